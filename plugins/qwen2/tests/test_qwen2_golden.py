"""The qwen2 fixtures through the whole engine, against the original code's outputs."""

from __future__ import annotations

from typing import Any

import pytest
from golden_fixtures import (
    check_generation,
    check_int8,
    check_preemption,
    check_prefix_cache,
    some_of,
    with_settings,
)

FIXTURES = [
    "qwen2-gqa",
    "qwen2-swa",
    "qwen2-tied-nowindow",
    "qwen3-tiny",
    "qwen2moe-shared",
    "qwen3moe-stacked",
]
EXPERTS = FIXTURES[-2:]


@pytest.mark.parametrize(("name", "settings"), with_settings(FIXTURES))
def test_tokens_and_logits_are_those_of_the_original_code(
    name: str, settings: dict[str, Any]
) -> None:
    check_generation(name, settings)


@pytest.mark.parametrize("name", some_of(FIXTURES, "qwen2-swa", "qwen3moe-stacked"))
def test_a_second_run_from_the_prefix_cache_is_the_same(name: str) -> None:
    check_prefix_cache(name)


@pytest.mark.parametrize("name", some_of(FIXTURES, "qwen2-gqa"))
def test_preempted_requests_are_the_same(name: str) -> None:
    # Windows give blocks back, so that a few prompts hardly wait for each other.
    check_preemption(name, copies=27 if name == "qwen2-swa" else 3)


@pytest.mark.parametrize("name", some_of(EXPERTS, "qwen2moe-shared"))
def test_int8_weights_choose_nearly_the_same(name: str) -> None:
    check_int8(name)


@pytest.mark.parametrize(
    ("name", "by_experts"), with_settings(EXPERTS, {"within": False, "by-experts": True})
)
def test_experts_split_over_two_ranks_give_the_same(name: str, by_experts: bool) -> None:
    check_generation(name, {"tensor_parallel_size": 2, "enable_expert_parallel": by_experts})
