"""Config builders of Qwen2 and Qwen3 checkpoints, dense and with experts. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.configs import HFConfig, RotaryConfigBuilder, check_kinds
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig

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


_EXPERTS = {
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}


class Qwen2MoeConfigBuilder(Qwen2ConfigBuilder):
    """Reads the configs of Qwen1.5-MoE and Qwen2-MoE.

    Which layers have experts stands in the key ``sparse_layers`` of the built config.
    """

    architecture: ClassVar[str] = "Qwen2MoeForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        **Qwen2ConfigBuilder.defaults,
        **_EXPERTS,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "shared_expert_intermediate_size": 5632,
    }

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """See :class:`RotaryConfigBuilder`; a window of 0 that is not used means none."""
        if hf_config.get("sliding_window") == 0 and not hf_config.get("use_sliding_window"):
            hf_config = hf_config.replace(sliding_window=None)
        return super().build(hf_config, model_path, **kwargs)

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """Say which layers have experts; transformers has every other layer of the first slide."""
        if values.get("layer_types") is None:
            check_kinds(values, {"num_hidden_layers": 1})
            first = _first_window(values)
            slides = values["use_sliding_window"]
            values["layer_types"] = [
                _SLIDING if slides and layer % 2 == 0 and layer < first else _FULL
                for layer in range(values["num_hidden_layers"])
            ]
        super().complete(values)
        values["sparse_layers"] = _sparse_layers(values)


class Qwen3MoeConfigBuilder(Qwen3ConfigBuilder):
    """Reads the configs of Qwen3-MoE; see :class:`Qwen2MoeConfigBuilder`."""

    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        **Qwen2ConfigBuilder.defaults,
        **_EXPERTS,
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
    }
    aliases: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """Say which layers have experts; all layers have the window, or none."""
        check_kinds(values, {"num_hidden_layers": 1})
        slides = values["use_sliding_window"] and values["sliding_window"] is not None
        values["layer_types"] = [_SLIDING if slides else _FULL] * values["num_hidden_layers"]
        super().complete(values)
        values["sparse_layers"] = _sparse_layers(values)


def _sparse_layers(values: dict[str, Any]) -> list[bool]:
    """For each layer whether it has experts: every ``decoder_sparse_step``-th, with exceptions."""
    if values["num_experts_per_tok"] > values["num_experts"]:
        raise ConfigError(
            f"config.json: num_experts_per_tok {values['num_experts_per_tok']} is more than "
            f"num_experts {values['num_experts']}"
        )
    dense = values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ConfigError(f"config.json: mlp_only_layers must be a list of layers, got {dense!r}")
    step = values["decoder_sparse_step"]
    return [
        layer not in dense and (layer + 1) % step == 0
        for layer in range(values["num_hidden_layers"])
    ]


def _first_window(values: dict[str, Any]) -> int:
    first = values.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise ConfigError(
            f"config.json: max_window_layers must be an integer from 0 on, got {first!r}"
        )
    return first


def _layer_types(values: dict[str, Any]) -> list[str]:
    """``layer_types`` of newer configs; older ones slide from layer ``max_window_layers`` on."""
    check_kinds(values, {"num_hidden_layers": 1})
    window, num_layers = values["sliding_window"], values["num_hidden_layers"]
    types = values.get("layer_types")
    if types is None:
        first = _first_window(values)
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
