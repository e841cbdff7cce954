"""Refusals of arguments that have no counterpart, each by name."""

from __future__ import annotations

from typing import Any


def refuse(function: str, argument: str, value: Any, why: str) -> None:
    """Raise a ValueError that names ``argument``, ``value`` and the reason."""
    raise ValueError(f"{function}: {argument}={value!r} is not supported: {why}")


def check_quant(function: str, quant_config: Any) -> None:
    """Refuse a ``quant_config``."""
    if quant_config is not None:
        refuse(
            function,
            "quant_config",
            quant_config,
            "a ported model runs unquantised checkpoints; for a quantised one write the layer with "
            "engine_core.nn, which learns the method from the engine and takes no such argument",
        )
