"""The Mixtral fixture through the whole engine, against the original code's outputs."""

from __future__ import annotations

from typing import Any

import pytest
from golden_fixtures import (
    SETTINGS,
    check_generation,
    check_int8,
    check_preemption,
    check_prefix_cache,
    golden_llm,
)

from engine_core.errors import ConfigError, OptionError

RANKS: dict[str, dict[str, Any]] = {
    "split-within-experts": {"tensor_parallel_size": 2},
    "split-by-experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
ALL = {**SETTINGS, **RANKS}


@pytest.mark.parametrize("settings", ALL.values(), ids=ALL.keys())
def test_tokens_and_logits_are_those_of_the_original_code(settings: dict[str, Any]) -> None:
    check_generation("mixtral-tiny", settings)


def test_a_second_run_from_the_prefix_cache_is_the_same() -> None:
    check_prefix_cache("mixtral-tiny")


def test_preempted_requests_are_the_same() -> None:
    check_preemption("mixtral-tiny")


def test_int8_weights_choose_nearly_the_same() -> None:
    check_int8("mixtral-tiny")


def test_experts_are_split_only_where_there_are_any() -> None:
    with pytest.raises(OptionError, match="LlamaForCausalLM has no experts"):
        golden_llm("llama-gqa", tensor_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 1"):
        golden_llm("mixtral-tiny", enable_expert_parallel=True)
