"""The hooks of this package. Imports no torch."""

from engine_core import hookimpl
from engine_core_qwen_vl.config import QWenConfigBuilder
from engine_core_qwen_vl.inputs import QWenProcessor, QWenVLProcessor

requires_api = "0.3"


@hookimpl
def module_map() -> dict[str, str]:
    """The architecture of this family, with and without images."""
    return {"QWenLMHeadModel": "engine_core_qwen_vl.model.QWenLMHeadModel"}


@hookimpl
def config_builders() -> list[type]:
    """Reads the configs of Qwen and Qwen-VL."""
    return [QWenConfigBuilder]


@hookimpl
def input_processors() -> list[type]:
    """Say which prompts may share cached blocks, and where images are."""
    return [QWenProcessor, QWenVLProcessor]
