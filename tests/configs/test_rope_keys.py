"""The helpers for config builders, on configs as checkpoints write them."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from engine_core.checkpoint import apply_overrides
from engine_core.configs import (
    HFConfig,
    RotaryConfigBuilder,
    check_kinds,
    longest_sequence,
    rope_keys,
)
from engine_core.errors import ConfigError

TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@pytest.mark.parametrize(
    ("written", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, {"rope_type": "default"}),
        ({"rope_theta": 1e4, "rope_scaling": None}, 1e4, {"rope_type": "default"}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            1e4,
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 4.0}},
            None,
            {"rope_type": "yarn", "factor": 4.0},
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            1e6,
            {"rope_type": "default"},
        ),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_theta": 1e4,
            },
            1e4,
            {"rope_type": "linear", "factor": 2.0},
        ),
    ],
)
def test_old_and_new_spellings_become_one(
    written: dict[str, Any], theta: float | None, scaling: dict[str, Any]
) -> None:
    before = repr(written)
    assert rope_keys(written, TYPES) == {"rope_theta": theta, "rope_scaling": scaling}
    assert repr(written) == before


NEW = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
OLD = {"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    ("config", "overrides", "theta", "scaling"),
    [
        (NEW, {"rope_theta": 9.0}, 9.0, {"rope_type": "default"}),
        (
            NEW,
            {"rope_scaling": {"type": "linear", "factor": 4}},
            7.0,
            {"rope_type": "linear", "factor": 4},
        ),
        (NEW, {"rope_scaling": {"rope_theta": 8.0}}, 8.0, {"rope_type": "default"}),
        (NEW, {"rope_parameters": None}, 7.0, {"rope_type": "default"}),
        (OLD, {"rope_theta": 9.0}, 9.0, {"rope_type": "linear", "factor": 2.0}),
        (OLD, {"rope_scaling": {"factor": 4}}, 7.0, {"rope_type": "linear", "factor": 4}),
        (OLD, {"rope_parameters": {"factor": 4}}, 7.0, {"rope_type": "linear", "factor": 4}),
        (OLD, {"rope_scaling": None}, 7.0, {"rope_type": "default"}),
        (
            OLD,
            {"rope_scaling": {"type": "dynamic"}},
            7.0,
            {"rope_type": "dynamic", "factor": 2.0},
        ),
        (
            {"rope_theta": 7.0},
            {"rope_scaling": {"type": "linear", "factor": 4}},
            7.0,
            {"rope_type": "linear", "factor": 4},
        ),
    ],
)
def test_an_override_takes_effect_under_whichever_name(
    config: dict[str, Any],
    overrides: dict[str, Any],
    theta: float,
    scaling: dict[str, Any],
) -> None:
    changed = apply_overrides(HFConfig(config), overrides).to_dict()
    assert rope_keys(changed, TYPES) == {"rope_theta": theta, "rope_scaling": scaling}


def test_an_override_that_is_no_object_is_not_passed_over() -> None:
    changed = apply_overrides(HFConfig(NEW), {"rope_scaling": "yarn"}).to_dict()
    with pytest.raises(ConfigError, match="rope_scaling must be an object or null, got 'yarn'"):
        rope_keys(changed, TYPES)


def test_an_override_of_two_names_is_refused() -> None:
    overrides = {"rope_scaling": {"factor": 2.0}, "rope_parameters": {"factor": 4.0}}
    with pytest.raises(ConfigError, match="rope_scaling and rope_parameters are two names"):
        apply_overrides(HFConfig(OLD), overrides)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("yarn", "rope_scaling must be an object or null, got 'yarn'"),
        ({"type": "longrope"}, "'longrope' is not one of default, linear"),
        ({"full_attention": {"rope_type": "default"}}, "an object for 'full_attention', but all"),
    ],
)
def test_a_scaling_that_is_not_supported_is_refused(scaling: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rope_keys({"rope_scaling": scaling}, TYPES)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"rope_type": "default", "factor": 4.0}, 1000),
        ({"rope_type": "llama3", "factor": 8.0}, 1000),
        ({"rope_type": "linear", "factor": 4.0}, 4000),
        ({"rope_type": "dynamic", "factor": 2.0}, 2000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 600}, 2400),
        ({"rope_type": "yarn"}, 1000),
    ],
)
def test_the_longest_sequence(scaling: dict[str, Any], longest: int) -> None:
    assert longest_sequence(1000, scaling) == longest


@pytest.mark.parametrize(
    ("length", "scaling", "message"),
    [
        (0, {"rope_type": "default"}, "max_position_embeddings must be a positive number, got 0"),
        (8, {"rope_type": "yarn", "factor": -1}, "factor of rope_scaling must be .*, got -1"),
        (8, {"rope_type": "linear", "factor": float("inf")}, "factor of rope_scaling"),
        (
            8,
            {"rope_type": "yarn", "original_max_position_embeddings": "x"},
            "original_max_position_embeddings of rope_scaling must be .*, got 'x'",
        ),
    ],
)
def test_a_senseless_length_is_refused(length: int, scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        longest_sequence(length, scaling)


EXAMPLES = {"layers": 1, "eps": 1e-6, "tied": False, "act": "silu"}
GOOD = {"layers": 2, "eps": 1, "tied": True, "act": "gelu", "other": None}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("layers", 2.0, "layers must be a positive integer, got 2.0"),
        ("layers", True, "layers must be a positive integer, got True"),
        ("layers", None, "layers must be a positive integer, got None"),
        ("eps", 0, "eps must be a positive number, got 0"),
        ("eps", float("nan"), "eps must be a positive number, got nan"),
        ("tied", 1, "tied must be true or false, got 1"),
        ("act", ["silu"], "act must be a string, got"),
    ],
)
def test_values_of_another_kind_are_refused(key: str, value: object, message: str) -> None:
    check_kinds(GOOD, EXAMPLES)
    with pytest.raises(ConfigError, match=message):
        check_kinds({**GOOD, key: value}, EXAMPLES)


class PartlyRotating(RotaryConfigBuilder):
    """A quarter of a head rotates, if a config says no other part."""

    architecture: ClassVar[str] = "PartForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e4,
        "max_position_embeddings": 64,
    }
    aliases: ClassVar[dict[str, str]] = {"rotary_pct": "partial_rotary_factor"}


@pytest.mark.parametrize(
    ("written", "factor"),
    [
        ({}, 0.25),
        ({"partial_rotary_factor": 0.75}, 0.75),
        ({"rotary_pct": 0.75}, 0.75),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, 0.5),
        ({"rotary_pct": 0.75, "rope_parameters": {"partial_rotary_factor": 0.5}}, 0.5),
    ],
)
def test_the_part_that_rotates_stands_in_one_place(written: dict[str, Any], factor: float) -> None:
    given = HFConfig(
        architectures=["PartForCausalLM"],
        vocab_size=9,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        **written,
    )
    built = PartlyRotating.build(given).hf_config
    assert built.partial_rotary_factor == factor
    assert built.rope_scaling == {"rope_type": "default"}
