"""The hooks of this package. Imports no torch."""

from engine_core import hookimpl
from engine_core_qwen2.config import (
    Qwen2ConfigBuilder,
    Qwen2MoeConfigBuilder,
    Qwen3ConfigBuilder,
    Qwen3MoeConfigBuilder,
)

requires_api = "0.3"


@hookimpl
def module_map() -> dict[str, str]:
    """The architectures of this family."""
    return {
        "Qwen2ForCausalLM": "engine_core_qwen2.model.Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM": "engine_core_qwen2.model.Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM": "engine_core_qwen2.model.Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM": "engine_core_qwen2.model.Qwen3MoeForCausalLM",
    }


@hookimpl
def config_builders() -> list[type]:
    """Read the configs of Qwen2 and Qwen3, dense and with experts."""
    return [
        Qwen2ConfigBuilder,
        Qwen2MoeConfigBuilder,
        Qwen3ConfigBuilder,
        Qwen3MoeConfigBuilder,
    ]


@hookimpl
def gguf_adapters() -> dict[str, str]:
    """GGUF files that llama.cpp calls so."""
    return {
        "qwen2": "engine_core_qwen2.gguf.Qwen2GGUFAdapter",
        "qwen2moe": "engine_core_qwen2.gguf.Qwen2MoeGGUFAdapter",
        "qwen3": "engine_core_qwen2.gguf.Qwen3GGUFAdapter",
        "qwen3moe": "engine_core_qwen2.gguf.Qwen3MoeGGUFAdapter",
    }


@hookimpl
def tool_parsers() -> dict[str, str]:
    """The format that Qwen2.5 and Qwen3 took from Hermes."""
    return {"hermes": "engine_core_qwen2.tools.HermesToolParser"}


@hookimpl
def reasoning_parsers() -> dict[str, str]:
    """The tags of Qwen3, which other families use, too."""
    return {"think": "engine_core.parsers.ThinkParser"}
