"""The offer of this package. Imports no torch."""

from __future__ import annotations

from engine_core import hookimpl
from engine_core_transformers.config import ARCHITECTURE, FallbackConfigBuilder

requires_api = "0.3"


@hookimpl
def module_map() -> dict[str, str]:
    """One name for all; no checkpoint has it, the builder below gives it."""
    return {ARCHITECTURE: "engine_core_transformers.model.TransformersModel"}


@hookimpl
def fallback_builders() -> list[type]:
    """Reads configs that no family's package claims."""
    return [FallbackConfigBuilder]
