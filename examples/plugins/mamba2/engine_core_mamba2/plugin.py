"""The hooks of this package. Imports no torch."""

from engine_core import hookimpl
from engine_core_mamba2.config import Mamba2ConfigBuilder

requires_api = "0.1"


@hookimpl
def module_map() -> dict[str, str]:
    """The architectures of this family."""
    return {"Mamba2ForCausalLM": "engine_core_mamba2.model.Mamba2ForCausalLM"}


@hookimpl
def config_builders() -> list[type]:
    """Reads Mamba-2 configs."""
    return [Mamba2ConfigBuilder]
