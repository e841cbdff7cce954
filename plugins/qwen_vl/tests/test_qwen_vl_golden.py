"""Text and images through the whole engine, against outputs of the original code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_fixtures import GOLDEN
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_core import LLM, RequestOutput, SamplingParams
from engine_core.errors import RequestError

TINY, LONG = "qwenvl1-tiny", "qwenvl1-ntk-logn"
VOCAB = 320
BEGIN, END, PAD = 300, 301, 302
SETTINGS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "one-by-one": {"max_num_seqs": 1},
    "blocks-of-1": {"block_size": 1},
    # Chunks end inside of pictures.
    "chunks-of-7": {"max_num_seqs": 4, "max_num_batched_tokens": 7},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "room-for-one-picture": {"encoder_cache_tokens": 256},
}
OF_THE_KIT = ("one-by-one", "blocks-of-1", "no-prefix-cache")


@dataclass(frozen=True)
class Prompt:
    """A prompt of a fixture; ``rows`` are those of the prompt whose logits are there."""

    name: str
    folder: str
    ids: list[int]
    pixels: list[dict[str, Tensor]]
    files: list[str]
    rows: list[int]
    prefill_logits: Tensor
    step_logits: Tensor
    new_tokens: list[int]
    features: Tensor | None

    @property
    def given(self) -> Any:
        return {"prompt_token_ids": self.ids, "multi_modal_data": {"image": self.pixels}}


@cache
def prompts(name: str) -> list[Prompt]:
    folder = GOLDEN / name
    tensors = load_file(folder / "expected.safetensors")
    entries = json.loads((folder / "expected.json").read_text())["prompts"]
    return [
        Prompt(
            name=entry["name"],
            folder=name,
            ids=entry["input_ids"],
            pixels=[
                {key: tensors[value] for key, value in item.items()}
                for item in entry.get("media", {}).get("image", ())
            ],
            files=entry.get("images", []),
            rows=entry.get("prefill_rows", list(range(len(entry["input_ids"])))),
            prefill_logits=tensors[entry["prefill_logits"]],
            step_logits=tensors[entry["step_logits"]],
            new_tokens=entry["new_tokens"],
            features=tensors.get(entry.get("image_features", "")),
        )
        for entry in entries
    ]


def llm(name: str, **settings: Any) -> LLM:
    given: dict[str, Any] = {"dtype": "float32", "max_model_len": 560} | settings
    return LLM(str(GOLDEN / name), skip_tokenizer_init=True, **given)


def params(*, with_prompt: bool = False) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=16,
        ignore_eos=True,
        logprobs=VOCAB,
        prompt_logprobs=VOCAB if with_prompt else None,
    )


def check(output: RequestOutput, prompt: Prompt) -> None:
    """The same tokens, and logits within 1e-4."""
    (completion,) = output.outputs
    assert completion.token_ids == prompt.new_tokens, prompt.name
    check_rows(completion.logprobs, prompt.step_logits)
    if output.prompt_logprobs is not None and len(prompt.ids) > 1:
        # Row i is reported with the token after it.
        rows = [row for row in prompt.rows if row + 1 < len(prompt.ids)]
        every = [output.prompt_logprobs[row + 1] for row in rows]
        check_rows(every, prompt.prefill_logits[: len(rows)])


def check_rows(entries: Any, logits: Tensor) -> None:
    ours = torch.tensor([[row[token].logprob for token in range(VOCAB)] for row in entries])
    torch.testing.assert_close(ours, logits.log_softmax(-1), atol=1e-4, rtol=0)


# The conformance kit runs the other one so: with other blocks, and with and without a prefix cache.
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(LONG, {}, id=LONG),
        *(
            pytest.param(TINY, each, id=how, marks=[pytest.mark.long] if how in OF_THE_KIT else [])
            for how, each in SETTINGS.items()
        ),
    ],
)
def test_tokens_and_logits_are_those_of_the_original_code(
    name: str, settings: dict[str, Any]
) -> None:
    asked = [params(with_prompt=not settings and len(p.ids) < 400) for p in prompts(name)]
    with llm(name, **settings) as engine:
        outputs = engine.generate([prompt.given for prompt in prompts(name)], asked)
    for output, prompt in zip(outputs, prompts(name), strict=True):
        check(output, prompt)


@pytest.mark.parametrize("name", [pytest.param(TINY, marks=pytest.mark.long), LONG])
def test_prompts_by_themselves_are_the_same_cold_and_from_the_prefix_cache(name: str) -> None:
    with llm(name, block_size=4) as engine:
        for cached in (False, True):
            for prompt in prompts(name):
                (output,) = engine.generate(prompt.given, params())
                check(output, prompt)
                expected = (len(prompt.ids) - 1) // 4 * 4 if cached else 0
                assert output.metrics.num_cached_tokens == expected, prompt.name


def test_preempted_requests_are_the_same() -> None:
    with llm(LONG, block_size=4) as engine:
        plan = engine.engine.cache_plan
    memory = plan.bytes_per_block * (1 + plan.cache_config.max_blocks(400, 512))
    settings = {"kv_cache_memory": memory, "max_num_batched_tokens": 512, "max_model_len": 400}
    with llm(LONG, block_size=4, **settings) as engine:
        outputs = engine.generate([prompt.given for prompt in prompts(LONG)] * 2, params())
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for output, prompt in zip(outputs, prompts(LONG) * 2, strict=True):
        check(output, prompt)


def test_a_prompt_that_grew_into_another_base_shares_no_blocks_with_its_equal() -> None:
    """An answer of 140 tokens, as a prompt of 140: the first has the base of 124."""
    cross = next(prompt for prompt in prompts(LONG) if prompt.name == "text-cross")
    longer = cross.ids + cross.new_tokens
    with llm(LONG, block_size=4) as engine:
        (alone,) = engine.generate(longer, params())
    with llm(LONG, block_size=4) as engine:
        engine.generate(cross.ids, params())
        (after,) = engine.generate(longer, params())
        # Of equal bases they do.
        (shorter,) = engine.generate([*cross.ids, 5], params())
    assert after.metrics.num_cached_tokens == 0
    assert after.outputs[0].token_ids == alone.outputs[0].token_ids
    assert shorter.metrics.num_cached_tokens == 124


@pytest.mark.parametrize("name", [TINY, LONG])
def test_files_become_the_same_pixels_and_embeddings(name: str) -> None:
    with llm(name) as engine:
        processor: Any = engine.engine.frontend._input_processor
        for prompt in prompts(name):
            images = [picture(GOLDEN / name / file) for file in prompt.files]
            if not images:
                continue
            made = processor.process_media(prompt.ids, {"image": images}, {})
            for item, expected in zip(made.media, prompt.pixels, strict=True):
                check_pixels(item.features["pixel_values"], expected["pixel_values"])
            if prompt.features is not None:
                # Bytes, pixels that are normalised, and both at once.
                given = [torch.as_tensor(item.features["pixel_values"]) for item in made.media]
                bytes_ = [{"pixel_values": pixels} for pixels in given]
                for images in (prompt.pixels, bytes_, [*bytes_[:1], *prompt.pixels[1:]]):
                    (embeddings,) = engine.apply_model(embed(images))
                    torch.testing.assert_close(embeddings, prompt.features, atol=1e-4, rtol=0)


def check_pixels(ours: Any, normalised: Tensor) -> None:
    """Bytes ``[S, S, 3]`` that the original normalises so."""
    assert ours.dtype == np.uint8
    mean, std = np.array(
        [[0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]]
    )
    given = torch.as_tensor(((ours / 255 - mean) / std).transpose(2, 0, 1), dtype=torch.float32)
    torch.testing.assert_close(given, normalised, atol=1e-5, rtol=0)


def picture(file: Path) -> Image.Image:
    with Image.open(file) as image:
        image.load()
        return image


def embed(images: list[dict[str, Tensor]]) -> Callable[[Any], Tensor]:
    def embedded(model: Any) -> Tensor:
        device = model.visual.mean.device
        sent = [{name: x.to(device) for name, x in image.items()} for image in images]
        return torch.stack(model.embed_media("image", sent)).cpu()

    return embedded


def test_marks_alone_stand_for_a_whole_picture() -> None:
    """The pads in its place are other tokens than the path, with the same result."""
    prompt = next(prompt for prompt in prompts(TINY) if prompt.name == "image-middle")
    start, end = prompt.ids.index(BEGIN), prompt.ids.index(END)
    with llm(TINY) as engine:
        for between in ([], [PAD], [PAD] * 256, list(b"a.png")):
            ids = [*prompt.ids[: start + 1], *between, *prompt.ids[end:]]
            (output,) = engine.generate({**prompt.given, "prompt_token_ids": ids}, params())
            check(output, prompt)
            assert len(output.prompt_token_ids) == len(prompt.ids)


def test_another_picture_in_its_place_is_not_taken_from_the_prefix_cache() -> None:
    prompt = next(prompt for prompt in prompts(TINY) if prompt.name == "image-first")
    other = {"image": {"pixel_values": -prompt.pixels[0]["pixel_values"]}}
    with llm(TINY, block_size=4) as engine:
        given: Any = {**prompt.given, "multi_modal_data": other}
        (first,) = engine.generate(given, params())
        (output,) = engine.generate(prompt.given, params())
    assert first.outputs[0].token_ids != prompt.new_tokens
    check(output, prompt)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ["text-short", "text-cross", "text-1.6x", "text-short-again"]),
        # Below seq_length both have no effect.
        ({"use_logn_attn": False, "use_dynamic_ntk": False}, ["text-short", "text-short-again"]),
    ],
)
def test_without_visual_it_is_the_text_model_alone(
    changes: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    tensors = load_file(GOLDEN / LONG / "model.safetensors")
    text = {name: tensor for name, tensor in tensors.items() if ".visual." not in name}
    save_file(text, tmp_path / "model.safetensors")
    config = json.loads((GOLDEN / LONG / "config.json").read_text()) | changes
    del config["visual"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    every = [prompt for prompt in prompts(LONG) if prompt.name in names]
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 400}
    with LLM(str(tmp_path), skip_tokenizer_init=True, **settings) as engine:
        outputs = engine.generate([prompt.ids for prompt in every], params(with_prompt=True))
        # Nothing is reserved for pictures.
        assert engine.engine.core.scheduler.encoder_cache.capacity == 0
    for output, prompt in zip(outputs, every, strict=True):
        check(output, prompt)


def test_files_that_tokens_name_are_read_where_that_is_allowed() -> None:
    folder = str(GOLDEN / TINY)
    shown = [prompt for prompt in prompts(TINY) if prompt.files]
    with llm(TINY, allowed_local_media_path=folder) as engine:
        outputs = engine.generate([prompt.ids for prompt in shown], params())
        frontend = engine.engine.frontend
        # As a server does, in a worker.
        tokenized = asyncio.run(frontend.tokenize_async(shown[-1].ids))
    assert tokenized.processed is not None
    for output, prompt in zip(outputs, shown, strict=True):
        check(output, prompt)
    for item, expected in zip(tokenized.processed.media, shown[-1].pixels, strict=True):
        check_pixels(item.features["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("img0.png", "prompt: files are not read; .*allowed_local_media_path"),
        ("/etc/passwd", "prompt: files are not read"),
        ("https://example.org/a.png", "prompt: addresses at 'example.org' are not fetched"),
    ],
)
def test_files_are_not_read_where_nobody_allowed_it(path: str, said: str) -> None:
    with llm(TINY) as engine, pytest.raises(RequestError, match=said):
        engine.generate([BEGIN, *path.encode(), PAD, END], params())


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("../README.md", "not below the folder that the server allows"),
        ("/etc/passwd", "not below the folder that the server allows"),
        ("none.png", "'none.png' cannot be read: No such file"),
        ("config.json", "prompt: .*picture"),
        ("a\0b", "no path"),
    ],
)
def test_other_files_than_pictures_below_the_folder_are_refused(
    reading: LLM, path: str, said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        reading.generate([BEGIN, *path.encode(), PAD, END], params())


@pytest.fixture(scope="module")
def reading() -> Iterator[LLM]:
    """One that reads files below its folder."""
    with llm(TINY, allowed_local_media_path=str(GOLDEN / TINY)) as engine:
        yield engine
