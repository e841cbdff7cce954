"""Config builders of Qwen2 and Qwen3 checkpoints. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from engine_core.configs import HFConfig, RotaryConfigBuilder, check_kinds
from engine_core.errors import ConfigError

_FULL, _SLIDING = "full_attention", "sliding_attention"


class Qwen2ConfigBuilder(RotaryConfigBuilder):
    """Reads the configs of Qwen2, of Qwen2.5 and of models published under their architecture.

    Which layers have a sliding window, and how wide it is, stands in the keys ``layer_types`` and
    ``sliding_window`` of the built config, however the checkpoint says it.
    """

    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    # Defaults of keys that older checkpoints leave out, from transformers' config class.
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }
    nullable: ClassVar[dict[str, tuple[Any, Any]]] = {"sliding_window": (1, 4096)}

    @classmethod
    def conventions(cls, hf_config: HFConfig) -> dict[str, Any]:
        """The format of tool calls; its parser does nothing to a text without its tags."""
        return {"tool_parser": "hermes"}

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """Say the window, which most configs have but few use, and the kind of each layer."""
        super().complete(values)
        if not values["use_sliding_window"]:
            values["sliding_window"] = None
        values["layer_types"] = _layer_types(values)


class Qwen3ConfigBuilder(Qwen2ConfigBuilder):
    """Reads the configs of dense Qwen3, whose head size does not follow from the hidden size."""

    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        **Qwen2ConfigBuilder.defaults,
        "head_dim": 128,
        "attention_bias": False,
    }

    @classmethod
    def conventions(cls, hf_config: HFConfig) -> dict[str, Any]:
        """Tags of reasoning too."""
        return {**super().conventions(hf_config), "reasoning_parser": "think"}


def _layer_types(values: dict[str, Any]) -> list[str]:
    """``layer_types`` of newer configs; older ones slide from layer ``max_window_layers`` on."""
    check_kinds(values, {"num_hidden_layers": 1})
    window, num_layers = values["sliding_window"], values["num_hidden_layers"]
    types = values.get("layer_types")
    if types is None:
        first = values.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise ConfigError(
                f"config.json: max_window_layers must be an integer from 0 on, got {first!r}"
            )
        full = num_layers if window is None else min(first, num_layers)
        return [_FULL] * full + [_SLIDING] * (num_layers - full)
    if not isinstance(types, list) or not all(kind in (_FULL, _SLIDING) for kind in types):
        raise ConfigError(
            f"config.json: layer_types must be a list of {_FULL!r} and {_SLIDING!r}, got {types!r}"
        )
    if len(types) != num_layers:
        raise ConfigError(
            f"config.json: layer_types has {len(types)} entries, num_hidden_layers is {num_layers}"
        )
    if window is None and _SLIDING in types:
        raise ConfigError(
            f"config.json: layer_types has {_SLIDING!r}, which needs a sliding_window and "
            f"use_sliding_window true, got {values['use_sliding_window']!r}"
        )
    return types
