"""The hooks of this package. Imports no torch."""

from engine_core import hookimpl
from engine_core_internvl.config import InternVLChatConfigBuilder, InternVLConfigBuilder
from engine_core_internvl.inputs import InternVLProcessor

requires_api = "0.3"


@hookimpl
def module_map() -> dict[str, str]:
    """The architectures of both layouts, which are one model."""
    return {
        "InternVLChatModel": "engine_core_internvl.model.InternVLModel",
        "InternVLForConditionalGeneration": "engine_core_internvl.model.InternVLModel",
    }


@hookimpl
def config_builders() -> list[type]:
    """Read the configs of the original layout and of transformers'."""
    return [InternVLChatConfigBuilder, InternVLConfigBuilder]


@hookimpl
def input_processors() -> list[type]:
    """Says where images and videos are."""
    return [InternVLProcessor]
