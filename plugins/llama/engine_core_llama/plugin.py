"""The hooks of this package. Imports no torch."""

from engine_core import hookimpl
from engine_core_llama.config import (
    LlamaConfigBuilder,
    MistralConfigBuilder,
    MixtralConfigBuilder,
)
from engine_core_llama.inputs import DynamicRopeProcessor

requires_api = "0.3"


@hookimpl
def module_map() -> dict[str, str]:
    """The architectures of this family."""
    return {
        "LlamaForCausalLM": "engine_core_llama.model.LlamaForCausalLM",
        "MistralForCausalLM": "engine_core_llama.model.MistralForCausalLM",
        "MixtralForCausalLM": "engine_core_llama.model.MixtralForCausalLM",
    }


@hookimpl
def config_builders() -> list[type]:
    """Read the configs of Llama, Mistral and Mixtral."""
    return [LlamaConfigBuilder, MistralConfigBuilder, MixtralConfigBuilder]


@hookimpl
def input_processors() -> list[type]:
    """Keeps prefix caching exact under dynamic rope scaling."""
    return [DynamicRopeProcessor]


@hookimpl
def gguf_adapters() -> dict[str, str]:
    """GGUF files that llama.cpp calls llama."""
    return {"llama": "engine_core_llama.gguf.LlamaGGUFAdapter"}


@hookimpl
def tool_parsers() -> dict[str, str]:
    """The formats of Llama 3.1 and later, and of Mistral."""
    return {
        "llama3_json": "engine_core_llama.tools.Llama3JsonToolParser",
        "llama3_pythonic": "engine_core_llama.pythonic_tools.Llama3PythonicToolParser",
        "mistral": "engine_core_llama.mistral_tools.MistralToolParser",
    }
