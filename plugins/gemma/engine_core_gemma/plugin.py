"""The hooks of this package. Imports no torch."""

from engine_core import hookimpl
from engine_core_gemma.config import (
    Gemma2ConfigBuilder,
    Gemma3ConfigBuilder,
    Gemma3WithVisionConfigBuilder,
)

requires_api = "0.3"


@hookimpl
def module_map() -> dict[str, str]:
    """The architectures of this family."""
    return {
        "Gemma2ForCausalLM": "engine_core_gemma.model.Gemma2ForCausalLM",
        "Gemma3ForCausalLM": "engine_core_gemma.model.Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration": "engine_core_gemma.model.Gemma3ForConditionalGeneration",
    }


@hookimpl
def config_builders() -> list[type]:
    """Read the configs of Gemma 2, of Gemma 3, and of Gemma 3 with a vision tower."""
    return [Gemma2ConfigBuilder, Gemma3ConfigBuilder, Gemma3WithVisionConfigBuilder]


@hookimpl
def gguf_adapters() -> dict[str, str]:
    """GGUF files that llama.cpp calls gemma2 and gemma3."""
    return {
        "gemma2": "engine_core_gemma.gguf.Gemma2GGUFAdapter",
        "gemma3": "engine_core_gemma.gguf.Gemma3GGUFAdapter",
    }
