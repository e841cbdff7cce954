"""The hooks of this package. Imports no torch."""

from engine_core import hookimpl
from engine_core_qwen2_audio.config import Qwen2AudioConfigBuilder
from engine_core_qwen2_audio.inputs import Qwen2AudioProcessor

requires_api = "0.3"


@hookimpl
def module_map() -> dict[str, str]:
    """The architecture of this family."""
    return {
        "Qwen2AudioForConditionalGeneration": (
            "engine_core_qwen2_audio.model.Qwen2AudioForConditionalGeneration"
        )
    }


@hookimpl
def config_builders() -> list[type]:
    """Reads the configs of Qwen2-Audio."""
    return [Qwen2AudioConfigBuilder]


@hookimpl
def input_processors() -> list[type]:
    """Says where sounds are in a prompt."""
    return [Qwen2AudioProcessor]
