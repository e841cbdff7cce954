"""Phi-3, Phi-3.5 and Phi-4 (mini) of text: ``--custom-module-map examples/module_maps/phi3.py``.

Models with long context (LongRoPE) are served up to the length that they were trained with first,
``original_max_position_embeddings``. Beyond it all positions of a sequence rotate by other factors.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from engine_core.configs import HFConfig, ModelConfig, RotaryConfigBuilder, check_kinds
from engine_core.errors import ConfigError
from engine_core.nn import (
    DecoderLayer,
    GatedMLP,
    RotaryCausalLM,
    RotaryEmbedding,
    SelfAttention,
)

_OPTIONAL = ("factor", "attention_factor")


class Phi3ConfigBuilder(RotaryConfigBuilder):
    """Reads the configs of Phi-3."""

    architecture = "Phi3ForCausalLM"
    rope_types = ("default", "longrope", "su")
    nullable = {"sliding_window": (1, None)}
    defaults = {
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    }

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config; with LongRoPE its factors must be as many as angles."""
        config = super().build(hf_config, model_path, **kwargs)
        read = config.hf_config
        if read.rope_scaling["rope_type"] != "default":
            _check_longrope(read.rope_scaling, _rotary_dim(read) // 2)
        return config

    @classmethod
    def longest(cls, values: Any) -> int:
        """That of the first training where there was a second."""
        if values["rope_scaling"]["rope_type"] == "default":
            return int(values["max_position_embeddings"])
        # As in transformers, what a scaling itself says of the original length does not count.
        return min(values["original_max_position_embeddings"], values["max_position_embeddings"])


def _check_longrope(scaling: dict[str, Any], angles: int) -> None:
    factors = scaling.get("short_factor")
    if not (isinstance(factors, list) and len(factors) == angles):
        raise ConfigError(
            f"config.json: short_factor of rope_scaling must be a list of {angles} numbers, got "
            f"{factors!r}"
        )
    numbers = [("an entry of short_factor", factor) for factor in factors]
    numbers += [(key, scaling[key]) for key in _OPTIONAL if scaling.get(key) is not None]
    for key, value in numbers:
        check_kinds({key: value}, {key: 1.0})


def _rotary_dim(config: HFConfig) -> int:
    inside = config.rope_scaling.get("partial_rotary_factor")
    return int(config.head_dim * (inside or config.partial_rotary_factor))


class Phi3ForCausalLM(RotaryCausalLM):
    """A Llama whose checkpoints have q, k and v, and gate and up, in one tensor each."""

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        """A layer; all have the same window."""
        return DecoderLayer(
            SelfAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                sliding_window=config.sliding_window,
            ),
            GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act),
            lambda: self.build_norm(config),
        )

    def build_rotary(self, config: HFConfig) -> list[RotaryEmbedding]:
        """With the short factors of LongRoPE where the config has them."""
        scaling = config.rope_scaling
        if scaling["rope_type"] == "default":
            return super().build_rotary(config)
        dim, original = _rotary_dim(config), config.original_max_position_embeddings
        steps = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
        factors = torch.tensor(scaling["short_factor"], dtype=torch.float32, device="cpu")
        factor = scaling.get("factor") or config.max_position_embeddings / original
        strength = scaling.get("attention_factor")
        if strength is None:
            strength = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        rotary = RotaryEmbedding(1.0 / (factors * config.rope_theta**steps), strength)
        return [rotary] * config.num_hidden_layers


MODULE_MAP = {"Phi3ForCausalLM": "Phi3ForCausalLM"}
CONFIG_BUILDERS = [Phi3ConfigBuilder]
