"""The hooks of this package. Imports no torch."""

from engine_core import hookimpl
from engine_core_deepseek_v2.config import DeepseekV2ConfigBuilder, DeepseekV3ConfigBuilder

requires_api = "0.3"


@hookimpl
def module_map() -> dict[str, str]:
    """The architectures of this family."""
    model = "engine_core_deepseek_v2.model.DeepseekV2ForCausalLM"
    return {"DeepseekV2ForCausalLM": model, "DeepseekV3ForCausalLM": model}


@hookimpl
def config_builders() -> list[type]:
    """Read the configs of both generations."""
    return [DeepseekV2ConfigBuilder, DeepseekV3ConfigBuilder]
