"""The hooks of this package. Imports no torch."""

from engine_core import hookimpl
from engine_core_mamba2.config import BambaConfigBuilder, Mamba2ConfigBuilder

requires_api = "0.1"


@hookimpl
def module_map() -> dict[str, str]:
    """The architectures of this family."""
    return {
        "BambaForCausalLM": "engine_core_mamba2.model.BambaForCausalLM",
        "Mamba2ForCausalLM": "engine_core_mamba2.model.Mamba2ForCausalLM",
    }


@hookimpl
def config_builders() -> list[type]:
    """Reads the configs of Mamba-2 and Bamba."""
    return [BambaConfigBuilder, Mamba2ConfigBuilder]
