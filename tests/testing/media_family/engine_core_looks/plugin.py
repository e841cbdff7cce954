from engine_core import hookimpl
from engine_core_looks.config import LooksConfigBuilder
from engine_core_looks.inputs import LooksProcessor

requires_api = "0.1"


@hookimpl
def module_map() -> dict[str, str]:
    return {"LooksForCausalLM": "engine_core_looks.model.LooksForCausalLM"}


@hookimpl
def config_builders() -> list[type]:
    return [LooksConfigBuilder]


@hookimpl
def input_processors() -> list[type]:
    return [LooksProcessor]
