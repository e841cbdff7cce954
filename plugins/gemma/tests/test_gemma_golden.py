"""The gemma fixtures through the whole engine, against transformers' outputs."""

from __future__ import annotations

from typing import Any

import pytest
from golden_fixtures import (
    GOLDEN,
    check_generation,
    check_output,
    check_preemption,
    check_prefix_cache,
    golden_llm,
    golden_prompts,
    greedy_params,
    some_of,
    with_settings,
)

from engine_core import LLM, SamplingParams

FIXTURES = ["gemma2-caps", "gemma3-ropes"]


@pytest.mark.parametrize(("name", "settings"), with_settings(FIXTURES))
def test_tokens_and_logits_are_those_of_the_original_code(
    name: str, settings: dict[str, Any]
) -> None:
    check_generation(name, settings)


@pytest.mark.parametrize("name", some_of(FIXTURES, "gemma2-caps"))
def test_a_second_run_from_the_prefix_cache_is_the_same(name: str) -> None:
    check_prefix_cache(name)


@pytest.mark.parametrize("name", some_of(FIXTURES, "gemma3-ropes"))
def test_preempted_requests_are_the_same(name: str) -> None:
    # Layers with a window need few blocks.
    check_preemption(name, copies=9)


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.long  # the conformance kit has two ranks of each architecture
def test_two_ranks(name: str) -> None:
    prompts = golden_prompts(name)
    with golden_llm(name, tensor_parallel_size=2) as llm:
        outputs = llm.generate([prompt.input_ids for prompt in prompts], greedy_params(name))
    for output, prompt in zip(outputs, prompts, strict=True):
        check_output(output, prompt)


@pytest.mark.parametrize("name", FIXTURES)
def test_int8_weights_choose_nearly_the_same(name: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=96)
    prompts = golden_prompts(name)
    with LLM(str(GOLDEN / name), skip_tokenizer_init=True, quantization="int8") as llm:
        outputs = llm.generate([prompt.input_ids for prompt in prompts], params)
    for output, prompt in zip(outputs, prompts, strict=True):
        wanted = prompt.step_logits[0].log_softmax(-1)
        (found,) = output.outputs[0].logprobs
        difference = sum(abs(found[i].logprob - float(wanted[i])) for i in range(96)) / 96
        assert difference < 0.1 * float(wanted.std()), prompt.name
