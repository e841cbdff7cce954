"""The hooks of this package. Imports no torch."""

from engine_core import hookimpl
from engine_core_internlm2.config import InternLM2ConfigBuilder
from engine_core_internlm2.inputs import DynamicRopeProcessor

requires_api = "0.3"


@hookimpl
def module_map() -> dict[str, str]:
    """The architecture of this family."""
    return {"InternLM2ForCausalLM": "engine_core_internlm2.model.InternLM2ForCausalLM"}


@hookimpl
def config_builders() -> list[type]:
    """Reads the configs of InternLM2."""
    return [InternLM2ConfigBuilder]


@hookimpl
def input_processors() -> list[type]:
    """Keeps prefix caching exact under dynamic rope scaling."""
    return [DynamicRopeProcessor]
