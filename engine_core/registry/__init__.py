"""Which families are installed, and what each of them brings. Imports no torch."""

from engine_core.registry.registry import (
    PluginReport,
    Registry,
    build_registry,
    text_model_config,
    text_processor,
)

__all__ = ["PluginReport", "Registry", "build_registry", "text_model_config", "text_processor"]
