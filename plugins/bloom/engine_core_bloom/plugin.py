"""The hooks of this package. Imports no torch."""

from engine_core import hookimpl
from engine_core_bloom.config import BloomConfigBuilder

requires_api = "0.3"


@hookimpl
def module_map() -> dict[str, str]:
    """The architectures of this family."""
    return {"BloomForCausalLM": "engine_core_bloom.model.BloomForCausalLM"}


@hookimpl
def config_builders() -> list[type]:
    """Reads BLOOM configs."""
    return [BloomConfigBuilder]
