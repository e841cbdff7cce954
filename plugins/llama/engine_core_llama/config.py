"""How Llama checkpoints write their config. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_core.configs import DefaultConfigBuilder, HFConfig, ModelConfig
from engine_core.errors import ConfigError

# What older checkpoints leave out, as transformers' LlamaConfig fills it in.
_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}

# Scalings whose factor says how far beyond max_position_embeddings a sequence may go.
_STRETCHING = ("linear", "dynamic", "yarn")


class LlamaConfigBuilder:
    """Reads the configs of Llama 1 to 3.x and of models published under its architecture."""

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether the checkpoint calls itself a Llama for causal language modelling."""
        return hf_config.get("architectures") == ["LlamaForCausalLM"]

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config; its ``hf_config`` has every key that the model reads.

        Raises:
            ConfigError: a key is missing or senseless.
        """
        values = {**_DEFAULTS, **{k: v for k, v in hf_config.to_dict().items() if v is not None}}
        rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
        rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
        values["rope_theta"] = float(rope.pop("rope_theta", values["rope_theta"]))
        values["rope_scaling"] = rope
        values.pop("rope_parameters", None)
        if "num_attention_heads" in values:
            values.setdefault("num_key_value_heads", values["num_attention_heads"])
        hf_config = HFConfig(values)
        kwargs.setdefault("max_position_embeddings", longest_sequence(hf_config))
        kwargs.setdefault("may_exceed_length", rope["rope_type"] == "dynamic")
        config = DefaultConfigBuilder.build(hf_config, model_path, **kwargs)
        return config.replace(hf_config=hf_config.replace(head_dim=config.head_dim))


def longest_sequence(hf_config: HFConfig) -> int:
    """Tokens of the longest sequence, with the stretch of the rope scaling.

    Raises:
        ConfigError: a length or factor is not a positive number.
    """
    rope = hf_config.rope_scaling
    length = hf_config.max_position_embeddings
    factor = 1.0
    if rope["rope_type"] in _STRETCHING:
        length = rope.get("original_max_position_embeddings", length)
        factor = rope.get("factor", 1.0)
    for key, value in (("max_position_embeddings", length), ("rope_scaling factor", factor)):
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"config.json: {key} must be a positive number, got {value!r}")
    return max(int(length * factor), int(hf_config.max_position_embeddings))
