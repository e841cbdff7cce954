"""How Llama and Mistral checkpoints write their configs. Imports no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

from engine_core.configs import DefaultConfigBuilder, HFConfig, ModelConfig
from engine_core.errors import ConfigError

_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
# Scalings whose factor says how far beyond max_position_embeddings a sequence may go.
_STRETCHING = ("linear", "dynamic", "yarn")


class LlamaConfigBuilder:
    """Reads the configs of Llama 1 to 3.x and of models published under its architecture."""

    architecture: ClassVar[str] = "LlamaForCausalLM"
    # What older checkpoints leave out, as transformers' config class fills it in.
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether the checkpoint calls itself by this architecture."""
        return bool(hf_config.get("architectures") == [cls.architecture])

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config; its ``hf_config`` has every key that the model reads.

        Raises:
            ConfigError: a key is missing or senseless.
        """
        stated = {key: value for key, value in hf_config.to_dict().items() if value is not None}
        values = {**cls.defaults, **stated}
        rope = _rope_scaling(values)
        values["rope_theta"] = rope.pop("rope_theta", values["rope_theta"])
        values["rope_scaling"] = rope
        values["sliding_window"] = cls.sliding_window(hf_config)
        if "num_attention_heads" in values:
            values.setdefault("num_key_value_heads", values["num_attention_heads"])
        _check_kinds(values, cls.defaults)
        hf_config = HFConfig(values)
        kwargs.setdefault("max_position_embeddings", longest_sequence(hf_config))
        kwargs.setdefault("may_exceed_length", rope["rope_type"] == "dynamic")
        config = DefaultConfigBuilder.build(hf_config, model_path, **kwargs)
        return config.replace(hf_config=hf_config.replace(head_dim=config.head_dim))

    @classmethod
    def sliding_window(cls, hf_config: HFConfig) -> int | None:
        """How many keys a query sees, itself included; None for all, as in every Llama."""
        del hf_config
        return None


class MistralConfigBuilder(LlamaConfigBuilder):
    """Reads the configs of Mistral 7B and of models published under its architecture."""

    architecture: ClassVar[str] = "MistralForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        **LlamaConfigBuilder.defaults,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
    }

    @classmethod
    def sliding_window(cls, hf_config: HFConfig) -> int | None:
        """``sliding_window``, whose null means no window; a config without the key means 4096.

        Raises:
            ConfigError: it is no positive integer.
        """
        window = hf_config.to_dict().get("sliding_window", 4096)
        if window is None or (type(window) is int and window > 0):
            return window
        raise ConfigError(
            f"config.json: sliding_window must be a positive integer or null, got {window!r}"
        )


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
        if not _is_positive(value):
            raise ConfigError(f"config.json: {key} must be a positive number, got {value!r}")
    return max(int(length * factor), int(hf_config.max_position_embeddings))


def _rope_scaling(values: dict[str, Any]) -> dict[str, Any]:
    """``rope_scaling`` or its newer name ``rope_parameters``, with ``rope_type`` always."""
    rope = values.pop("rope_parameters", None) or values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"config.json: rope_scaling must be an object or null, got {rope!r}")
    rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
    if rope["rope_type"] not in _ROPE_TYPES:
        raise ConfigError(
            f"config.json: rope_scaling of type {rope['rope_type']!r} is not one of "
            f"{', '.join(_ROPE_TYPES)}"
        )
    return rope


def _check_kinds(values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Refuse values that are of another kind than those that they stand for."""
    for key, default in {"intermediate_size": 1, **defaults}.items():
        value = values.get(key)
        if isinstance(default, bool | str):
            fits = type(value) is type(default)
            kind = "a string" if isinstance(default, str) else "true or false"
        else:
            fits = _is_positive(value) and (isinstance(default, float) or type(value) is int)
            kind = "a positive number" if isinstance(default, float) else "a positive integer"
        if not fits:
            raise ConfigError(f"config.json: {key} must be {kind}, got {value!r}")


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0
