"""Pictures over HTTP: the openai client, data URLs, and what is refused beside it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from seeing_model import IMAGE_TOKEN, character, write_seeing_model
from serving import ServerProcess

from engine_core import LLM, EngineConfig, SamplingParams

PIXELS = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
ASKED = {"model": "m", "temperature": 0, "max_tokens": 8}
ASKED |= {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("qwen2vl") / "m")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(model, "--kv-cache-memory", "16MiB", "--max-model-len", "256") as server:
        yield server.wait_ready()


def data_url(pixels: Any = PIXELS) -> str:
    out = BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def message(*urls: str) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    text = {"type": "text", "text": "".join(map(character, (5, 80, 7)))}
    return [{"role": "user", "content": [*parts, text]}]


def test_a_picture_over_http_is_what_it_is_offline(server: ServerProcess, model: Path) -> None:
    config = EngineConfig(kv_cache_memory=2**24, max_model_len=256)
    with LLM(str(model), config) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        parts = [{"type": "image", "image": PIXELS}, {"type": "image", "image": 255 - PIXELS}]
        text = message()[0]["content"]
        (offline,) = llm.chat([{"role": "user", "content": [*parts, *text]}], params)
        (other,) = llm.chat([{"role": "user", "content": [*parts[::-1], *text]}], params)
    assert offline.outputs[0].token_ids != other.outputs[0].token_ids
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="m",
            messages=message(data_url(), data_url(255 - PIXELS)),  # type: ignore[arg-type]
            temperature=0,
            max_tokens=8,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
    choice = answer.choices[0].model_dump()
    assert choice["token_ids"] == offline.outputs[0].token_ids
    # Two pictures, each with its two marks, and three tokens of text.
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(offline.prompt_token_ids) > 7
    assert offline.prompt_token_ids.count(IMAGE_TOKEN) == answer.usage.prompt_tokens - 7


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (message("https://example.org/a.png"), "addresses and files are not fetched"),
        (message("file:///etc/passwd"), "addresses and files are not fetched"),
        (message("data:image/png;base64,aGVsbG8="), "no picture in one of PNG"),
        (message(data_url() + "===="), "base64"),
        ([{"role": "user", "content": "<|image_pad|>"}], "number of images of 0"),
    ],
)
def test_what_is_no_picture_is_refused_and_others_are_served(
    server: ServerProcess, messages: list[dict[str, Any]], said: str
) -> None:
    url = server.url + "/v1/chat/completions"
    refused = httpx.post(url, json={**ASKED, "messages": messages}, timeout=60)
    assert refused.status_code == 400, refused.text
    assert said in refused.json()["error"]["message"]
    fine = httpx.post(url, json={**ASKED, "messages": message(data_url())}, timeout=60)
    assert fine.status_code == 200, fine.text


def test_tokens_of_pictures_are_not_counted_beforehand(server: ServerProcess) -> None:
    body = {"model": "m", "messages": message(data_url())}
    refused = httpx.post(server.url + "/tokenize", json=body, timeout=60)
    assert refused.status_code == 400
    assert "usage of an answer" in refused.json()["error"]["message"]


def test_other_services_take_pictures_in_their_own_parts(server: ServerProcess) -> None:
    text = message()[0]["content"][0]["text"]
    url = data_url()
    more = {"model": "m", "temperature": 0}

    def post(path: str, body: dict[str, Any]) -> Any:
        answer = httpx.post(server.url + path, json={**more, **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    chat = post("/v1/chat/completions", {"messages": message(url), "max_tokens": 4})
    parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": text}]
    plain = post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": parts}], "max_tokens": 4},
    )
    assert plain["choices"][0]["message"] == chat["choices"][0]["message"]
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": text}]
    response = post(
        "/v1/responses", {"input": [{"role": "user", "content": parts}], "max_output_tokens": 4}
    )
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    asked = {"messages": [{"role": "user", "content": blocks}]}
    anthropic = post("/v1/messages", {**asked, "max_tokens": 4})
    tokens = chat["usage"]["prompt_tokens"]
    assert response["usage"]["input_tokens"] == anthropic["usage"]["input_tokens"] == tokens
    answered = chat["choices"][0]["message"]["content"]
    assert response["output"][0]["content"][0]["text"] == answered
    assert anthropic["content"][0]["text"] == answered
    counted = httpx.post(server.url + "/v1/messages/count_tokens", json=asked, timeout=60)
    assert counted.status_code == 400
    assert "usage of an answer" in counted.json()["error"]["message"]
    small = post(
        "/v1/chat/completions",
        {"messages": message(url), "max_tokens": 1, "mm_processor_kwargs": {"max_pixels": 3136}},
    )
    assert small["usage"]["prompt_tokens"] < tokens
