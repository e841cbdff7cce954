"""The hooks of this package. Imports no torch."""

from engine_core import hookimpl
from engine_core_qwen2_vl.config import Qwen2VLConfigBuilder, Qwen25VLConfigBuilder
from engine_core_qwen2_vl.inputs import Qwen2VLProcessor

requires_api = "0.3"


@hookimpl
def module_map() -> dict[str, str]:
    """The architectures of this family."""
    return {
        "Qwen2VLForConditionalGeneration": (
            "engine_core_qwen2_vl.model.Qwen2VLForConditionalGeneration"
        ),
        "Qwen2_5_VLForConditionalGeneration": (
            "engine_core_qwen2_vl.model.Qwen25VLForConditionalGeneration"
        ),
    }


@hookimpl
def config_builders() -> list[type]:
    """Read the configs of Qwen2-VL and Qwen2.5-VL."""
    return [Qwen2VLConfigBuilder, Qwen25VLConfigBuilder]


@hookimpl
def input_processors() -> list[type]:
    """Says where images and videos are, and the three positions of each token."""
    return [Qwen2VLProcessor]
