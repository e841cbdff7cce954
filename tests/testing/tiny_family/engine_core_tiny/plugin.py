from engine_core import hookimpl
from engine_core_tiny.config import TinyConfigBuilder

requires_api = "0.1"


@hookimpl
def module_map() -> dict[str, str]:
    return {"TinyForCausalLM": "engine_core_tiny.model.TinyForCausalLM"}


@hookimpl
def config_builders() -> list[type]:
    return [TinyConfigBuilder]
