"""The hook of this package. Imports no torch."""

from __future__ import annotations

from engine_core import hookimpl

requires_api = "0.1"


@hookimpl
def quantization_schemes() -> dict[str, str]:
    """The one scheme that is here."""
    return {"int8_groups": "engine_core_int8_groups.scheme.Int8GroupsScheme"}
