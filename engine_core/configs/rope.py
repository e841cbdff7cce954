"""How checkpoints write their rotary embedding, for the config builders of families."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine_core.configs.builder import is_positive
from engine_core.errors import ConfigError

# Scalings whose factor says how far beyond max_position_embeddings a sequence may go.
_STRETCHING = ("linear", "dynamic", "yarn")


def rope_keys(values: Mapping[str, Any], rope_types: Collection[str]) -> dict[str, Any]:
    """The keys ``rope_theta`` and ``rope_scaling``, however a config.json writes them.

    Args:
        values: the config's keys. ``rope_parameters`` is the newer name of ``rope_scaling``, and
            may hold the base; ``rope_type`` is the newer name of ``type``.
        rope_types: what the family supports.

    Returns:
        both keys; ``rope_scaling`` is an object that always has ``rope_type``.

    Raises:
        ConfigError: the scaling is no object, or of a type that is not supported.
    """
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"config.json: rope_scaling must be an object or null, got {rope!r}")
    older = rope.get("type", "default")
    rope = {key: value for key, value in rope.items() if key != "type"}
    rope.setdefault("rope_type", older)
    if rope["rope_type"] not in rope_types:
        raise ConfigError(
            f"config.json: rope_scaling of type {rope['rope_type']!r} is not one of "
            f"{', '.join(rope_types)}"
        )
    theta = rope.pop("rope_theta", values.get("rope_theta"))
    return {"rope_theta": theta, "rope_scaling": rope}


def longest_sequence(max_position_embeddings: int, rope_scaling: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence that a model is made for, with the stretch of its scaling.

    Linear, dynamic and YaRN scaling stretch ``original_max_position_embeddings``, or else
    ``max_position_embeddings``, by ``factor``; for the others the length states it already.

    Args:
        max_position_embeddings: as the config states it.
        rope_scaling: as :func:`rope_keys` returns it.

    Raises:
        ConfigError: the length or the factor is no positive number.
    """
    length, factor = max_position_embeddings, 1.0
    if rope_scaling["rope_type"] in _STRETCHING:
        length = rope_scaling.get("original_max_position_embeddings", length)
        factor = rope_scaling.get("factor", factor)
    for key, value in (
        ("max_position_embeddings", max_position_embeddings),
        ("original_max_position_embeddings of rope_scaling", length),
        ("factor of rope_scaling", factor),
    ):
        if not is_positive(value):
            raise ConfigError(f"config.json: {key} must be a positive number, got {value!r}")
    return max(int(length * factor), int(max_position_embeddings))
