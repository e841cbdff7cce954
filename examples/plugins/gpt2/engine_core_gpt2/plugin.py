"""The hooks of this package. Imports no torch."""

from engine_core import hookimpl
from engine_core_gpt2.config import GPT2ConfigBuilder

requires_api = "0.1"


@hookimpl
def module_map() -> dict[str, str]:
    """The architectures of this family."""
    return {"GPT2LMHeadModel": "engine_core_gpt2.model.GPT2LMHeadModel"}


@hookimpl
def config_builders() -> list[type]:
    """Reads GPT-2 configs."""
    return [GPT2ConfigBuilder]
