"""The llama fixtures through the whole engine, against the original code's outputs."""

from __future__ import annotations

from typing import Any

import pytest
from golden_fixtures import (
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

FIXTURES = [
    "llama-bias-linear",
    "llama-dynamic",
    "llama-gqa",
    "llama-tied-llama3",
    "llama-yarn",
]


@pytest.mark.parametrize(("name", "settings"), with_settings(FIXTURES))
def test_tokens_and_logits_are_those_of_the_original_code(
    name: str, settings: dict[str, Any]
) -> None:
    check_generation(name, settings)


@pytest.mark.parametrize("name", some_of(FIXTURES, "llama-gqa", "llama-yarn"))
def test_a_second_run_from_the_prefix_cache_is_the_same(name: str) -> None:
    check_prefix_cache(name)


# Dynamic angles depend on the length of what is computed anew.
@pytest.mark.parametrize("name", some_of(FIXTURES, "llama-dynamic", "llama-gqa"))
def test_preempted_requests_are_the_same(name: str) -> None:
    check_preemption(name)


def test_dynamic_rope_shares_no_blocks_between_prompts_of_other_lengths() -> None:
    """Beyond the trained length the angles depend on the prompt's length."""
    name = "llama-dynamic"
    long = next(prompt for prompt in golden_prompts(name) if prompt.name == "long")
    with golden_llm(name, block_size=4) as llm:
        llm.generate(long.input_ids[:120], greedy_params(name))
        (output,) = llm.generate(long.input_ids, greedy_params(name))
    assert output.metrics.num_cached_tokens == 0
    check_output(output, long)
