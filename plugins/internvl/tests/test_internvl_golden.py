"""Pictures through the whole engine, against outputs of the original code and of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from itertools import groupby
from typing import Any

import pytest
from golden_fixtures import (
    GOLDEN,
    check_output,
    golden_llm,
    golden_prompts,
    greedy_params,
    some_of,
    with_settings,
)
from safetensors.torch import load_file
from torch import Tensor

from engine_core import RequestOutput

FIXTURES = ["internvl-chat-qwen2", "internvl-hf-qwen2", "internvl-chat-internlm2"]
PER_TILE = 4
SETTINGS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "one-by-one": {"max_num_seqs": 1},
    "blocks-of-1": {"block_size": 1},
    # Chunks end inside of pictures.
    "chunks-of-5": {"max_num_seqs": 4, "max_num_batched_tokens": 5},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "room-for-one-picture": {"encoder_cache_tokens": 12},
}


def token(name: str, text: str) -> int:
    number: int = json.loads((GOLDEN / name / "added_tokens.json").read_text())[text]
    return number


@cache
def images(name: str, index: int) -> list[dict[str, Tensor]]:
    """The features of each image of a prompt of the fixture."""
    folder = GOLDEN / name
    prompt = json.loads((folder / "expected.json").read_text())["prompts"][index]
    if "pixel_values" not in prompt:
        return []
    context = token(name, "<IMG_CONTEXT>")
    runs = [(key, len([*run])) for key, run in groupby(prompt["input_ids"])]
    tiles = [length // PER_TILE for key, length in runs if key == context]
    pixels = load_file(folder / "expected.safetensors")[prompt["pixel_values"]]
    return [{"pixel_values": each} for each in pixels.split(tiles)]


def every_prompt(name: str) -> list[Any]:
    return [
        {"prompt_token_ids": prompt.input_ids, "multi_modal_data": {"image": images(name, index)}}
        for index, prompt in enumerate(golden_prompts(name))
    ]


def check(outputs: list[RequestOutput], name: str) -> None:
    for output, prompt in zip(outputs, golden_prompts(name), strict=True):
        check_output(output, prompt)


@pytest.mark.parametrize(("name", "settings"), with_settings(FIXTURES, SETTINGS))
def test_tokens_and_logits_are_those_of_the_original_code(
    name: str, settings: dict[str, Any]
) -> None:
    with golden_llm(name, **settings) as llm:
        check(llm.generate(every_prompt(name), greedy_params(name, with_prompt=True)), name)


@pytest.mark.parametrize("name", some_of(FIXTURES, "internvl-chat-internlm2"))
def test_every_cut_of_a_prompt_gives_the_same(name: str) -> None:
    """Chunks of 1 to 13 tokens end at each place of a picture, and between two."""
    index = next(i for i, prompt in enumerate(golden_prompts(name)) if prompt.name == "two-images")
    for chunk in range(1, 14):
        with golden_llm(name, max_num_batched_tokens=chunk, max_num_seqs=1) as llm:
            (output,) = llm.generate(every_prompt(name)[index], greedy_params(name))
            check_output(output, golden_prompts(name)[index])


@pytest.mark.parametrize("name", some_of(FIXTURES, "internvl-chat-qwen2"))
def test_prompts_by_themselves_are_the_same_cold_and_from_the_prefix_cache(name: str) -> None:
    with golden_llm(name, block_size=4) as llm:
        for cached in (False, True):
            for given, prompt in zip(every_prompt(name), golden_prompts(name), strict=True):
                (output,) = llm.generate(given, greedy_params(name))
                check_output(output, prompt)
                expected = (len(prompt.input_ids) - 1) // 4 * 4 if cached else 0
                assert output.metrics.num_cached_tokens == expected, prompt.name


def test_another_picture_in_its_place_is_not_taken_from_the_prefix_cache() -> None:
    name = FIXTURES[0]
    index = next(i for i, _ in enumerate(golden_prompts(name)) if images(name, i))
    given, prompt = every_prompt(name)[index], golden_prompts(name)[index]
    other = {"image": [{"pixel_values": -each["pixel_values"]} for each in images(name, index)]}
    with golden_llm(name, block_size=4) as llm:
        (first,) = llm.generate({**given, "multi_modal_data": other}, greedy_params(name))
        (output,) = llm.generate(given, greedy_params(name))
    assert first.outputs[0].token_ids != prompt.new_tokens
    check_output(output, prompt)


@pytest.mark.parametrize(
    ("name", "alone"), with_settings(FIXTURES, {"in its ends": False, "alone": True})
)
def test_one_placeholder_stands_for_a_whole_picture(name: str, alone: bool) -> None:
    """With ``<img>`` and ``</img>`` around it, or without them, which are then added."""
    context = token(name, "<IMG_CONTEXT>")
    ends = [token(name, "<img>"), token(name, "</img>")] if alone else []
    given = []
    for whole in every_prompt(name):
        runs = [(key, [*run]) for key, run in groupby(whole["prompt_token_ids"])]
        short = [key for first, run in runs for key in (run[:1] if first == context else run)]
        given.append({**whole, "prompt_token_ids": [key for key in short if key not in ends]})
    with golden_llm(name) as llm:
        outputs = llm.generate(given, greedy_params(name, with_prompt=True))
    for output, prompt in zip(outputs, golden_prompts(name), strict=True):
        assert output.prompt_token_ids == prompt.input_ids
    check(outputs, name)


def test_preempted_requests_are_the_same() -> None:
    name = FIXTURES[2]
    with golden_llm(name, block_size=4) as llm:
        plan = llm.engine.cache_plan
    memory = plan.bytes_per_block * (1 + plan.cache_config.max_blocks(160, 256))
    settings = {"block_size": 4, "kv_cache_memory": memory, "max_num_batched_tokens": 256}
    with golden_llm(name, **settings) as llm:
        outputs = llm.generate(every_prompt(name) * 3, greedy_params(name))
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for start in range(0, len(outputs), len(outputs) // 3):
        check(outputs[start : start + len(outputs) // 3], name)


@pytest.mark.parametrize("name", FIXTURES[1:])
@pytest.mark.long  # the conformance kit has two ranks of each architecture
def test_two_ranks(name: str) -> None:
    with golden_llm(name, tensor_parallel_size=2) as llm:
        check(llm.generate(every_prompt(name), greedy_params(name)), name)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_on_a_cpu(quantization: str) -> None:
    """Codes of 8 and 4 bits are near the original; what they choose stays within the vocabulary."""
    name = FIXTURES[0]
    with golden_llm(name, quantization=quantization) as llm:
        outputs = llm.generate(every_prompt(name), greedy_params(name, with_prompt=True))
        methods = llm.apply_model(
            lambda model: {
                type(model.get_submodule(part).method).__name__
                for part in (
                    "vision_model.encoder.layers.0.attn.qkv",
                    "language_model.model.layers.0.self_attn.qkv_proj",
                )
            }
        )
    assert len(methods[0]) == 1
    assert "Unquantized" not in next(iter(methods[0]))
    if quantization == "int8":
        for output, prompt in zip(outputs, golden_prompts(name), strict=True):
            assert output.outputs[0].token_ids[0] == prompt.new_tokens[0], prompt.name
