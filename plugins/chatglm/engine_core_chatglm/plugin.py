"""The hooks of this package. Imports no torch."""

from engine_core import hookimpl
from engine_core_chatglm.config import ChatGLM1ConfigBuilder, ChatGLM2ConfigBuilder
from engine_core_chatglm.inputs import BidirectionalContextProcessor

requires_api = "0.3"


@hookimpl
def module_map() -> dict[str, str]:
    """The architectures of this family, by the names that the builders choose."""
    return {
        "ChatGLM1ForConditionalGeneration": (
            "engine_core_chatglm.model.ChatGLM1ForConditionalGeneration"
        ),
        "ChatGLM2ForConditionalGeneration": (
            "engine_core_chatglm.model.ChatGLM2ForConditionalGeneration"
        ),
    }


@hookimpl
def config_builders() -> list[type]:
    """Tell the first version from the later ones, which have its names but not its shape."""
    return [ChatGLM1ConfigBuilder, ChatGLM2ConfigBuilder]


@hookimpl
def input_processors() -> list[type]:
    """Says where the first version's bidirectional context ends."""
    return [BidirectionalContextProcessor]


@hookimpl
def tool_parsers() -> dict[str, str]:
    """The format of the third version."""
    return {"chatglm3": "engine_core_chatglm.tools.ChatGLM3ToolParser"}
