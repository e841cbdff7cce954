"""The bloom fixtures through the whole engine, against the original code's outputs."""

from __future__ import annotations

from typing import Any

import pytest
from golden_fixtures import (
    check_generation,
    check_preemption,
    check_prefix_cache,
    some_of,
    with_settings,
)

FIXTURES = [
    "bloom-6heads",
    "bloom-postln",
    "bloom-pow2",
]


@pytest.mark.parametrize(("name", "settings"), with_settings(FIXTURES))
def test_tokens_and_logits_are_those_of_the_original_code(
    name: str, settings: dict[str, Any]
) -> None:
    check_generation(name, settings)


@pytest.mark.parametrize("name", some_of(FIXTURES, "bloom-6heads"))
def test_a_second_run_from_the_prefix_cache_is_the_same(name: str) -> None:
    check_prefix_cache(name)


@pytest.mark.parametrize("name", some_of(FIXTURES, "bloom-6heads"))
def test_preempted_requests_are_the_same(name: str) -> None:
    check_preemption(name)
