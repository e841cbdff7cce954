"""The Mixtral fixture through the whole engine, against the original code's outputs."""

from __future__ import annotations

from typing import Any

import pytest
from golden_fixtures import SETTINGS, check_generation, check_preemption, check_prefix_cache

RANKS = {"tensor_parallel_size": 2}


@pytest.mark.parametrize("settings", [*SETTINGS.values(), RANKS], ids=[*SETTINGS, "two-ranks"])
def test_tokens_and_logits_are_those_of_the_original_code(settings: dict[str, Any]) -> None:
    check_generation("mixtral-tiny", settings)


def test_a_second_run_from_the_prefix_cache_is_the_same() -> None:
    check_prefix_cache("mixtral-tiny")


def test_preempted_requests_are_the_same() -> None:
    check_preemption("mixtral-tiny")
