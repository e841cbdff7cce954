"""Mixed requests over HTTP, many at once: each answer is that of ``LLM`` to the same alone."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from seeing_model import IMAGE_TOKEN, character, write_seeing_model
from serving import ServerProcess

from engine_core import LLM, EngineConfig, RequestOutput, SamplingParams

openai: Any = pytest.importorskip("openai", reason="openai is not installed")

AT_ONCE = 16
TOKENS = 12
SIZES = {"kv_cache_memory": 2**25, "max_model_len": 512}
# Small enough for the encoder cache to throw pictures out, and for prompts to come in chunks.
SIZES |= {"encoder_cache_tokens": 40, "max_num_batched_tokens": 64, "max_num_seqs": 8}


def picture(number: int) -> Image.Image:
    draw = np.random.default_rng(number)
    height, width = draw.integers(28, 130, 2)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))


def conversations(seed: int) -> Iterator[list[dict[str, Any]]]:
    """Text, a picture, several, pictures between texts, and pictures in a turn before."""
    draw = random.Random(seed)

    def text() -> dict[str, Any]:
        words = "".join(character(draw.randrange(2, 300)) for _ in range(draw.randrange(1, 40)))
        return {"type": "text", "text": words}

    def image() -> dict[str, Any]:
        return {"type": "image", "image": picture(draw.randrange(6))}

    while True:
        yield [{"role": "user", "content": text()["text"]}]
        yield [{"role": "user", "content": [image(), text()]}]
        yield [{"role": "user", "content": [image(), image(), image(), text()]}]
        yield [{"role": "user", "content": [text(), image(), text(), image(), text()]}]
        yield [
            {"role": "user", "content": [image(), text()]},
            {"role": "assistant", "content": text()["text"]},
            {"role": "user", "content": [text(), image()]},
        ]


def sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same for HTTP, pictures as data URLs."""

    def part(given: dict[str, Any]) -> dict[str, Any]:
        if given["type"] == "text":
            return given
        out = BytesIO()
        given["image"].save(out, "PNG")
        url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
        return {"type": "image_url", "image_url": {"url": url}}

    return [
        {
            **each,
            "content": each["content"]
            if isinstance(each["content"], str)
            else [part(given) for given in each["content"]],
        }
        for each in messages
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("mixed") / "m")


@pytest.mark.parametrize("requests", [30, pytest.param(100, marks=pytest.mark.long)])
def test_mixed_requests_are_answered_as_offline(model: Path, requests: int) -> None:
    source = conversations(1)
    asked = [next(source) for _ in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    # Each alone, with room for all: no neighbours, chunks or evictions.
    alone = EngineConfig(kv_cache_memory=2**25, max_model_len=512, enable_prefix_caching=False)
    with LLM(str(model), alone) as llm:
        expected = [llm.chat(each, params)[0] for each in asked]

    def answer(client: Any, number: int) -> None:
        right: RequestOutput = expected[number]
        body: dict[str, Any] = {"model": "m", "messages": sent(asked[number]), "temperature": 0}
        body |= {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
        if number % 2:
            usage, tokens = None, []
            options = {"include_usage": True}
            for chunk in client.chat.completions.create(
                **body, stream=True, stream_options=options
            ):
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    tokens += choice.model_dump().get("token_ids") or []
        else:
            whole = client.chat.completions.create(**body)
            usage, tokens = whole.usage, whole.choices[0].model_dump()["token_ids"]
        assert tokens == right.outputs[0].token_ids, number
        assert usage is not None
        assert usage.prompt_tokens == len(right.prompt_token_ids)
        assert usage.prompt_tokens_details is not None
        seen = usage.prompt_tokens_details.model_dump().get("image_tokens") or 0
        assert seen == right.prompt_token_ids.count(IMAGE_TOKEN)

    options = [
        str(each)
        for name, value in SIZES.items()
        for each in (f"--{name.replace('_', '-')}", value)
    ]
    with (
        ServerProcess(model, *options) as server,
        openai.OpenAI(base_url=server.wait_ready().url + "/v1", api_key="none") as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        list(pool.map(lambda number: answer(client, number), range(len(asked))))
