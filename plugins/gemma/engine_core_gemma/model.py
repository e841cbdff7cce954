"""Gemma 2 (Gemma Team, 2024) and the text of Gemma 3 (2025), as transformers computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine_core.configs import HFConfig
from engine_core.nn import (
    DecoderLayer,
    GatedMLP,
    RotaryCausalLM,
    RotaryEmbedding,
    SelfAttention,
    build_rotary_embedding_from_config,
)


class Gemma2ForCausalLM(RotaryCausalLM):
    """Norms on both sides of a branch, caps of scores and logits, windows in some layers."""

    norm_offset = 1.0
    qk_norm = False

    def __init__(self, config: HFConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.cap = config.final_logit_softcapping

    def embedding_scale(self, config: HFConfig) -> float:
        """The root of the hidden size."""
        return float(config.hidden_size**0.5)

    def build_rotary(self, config: HFConfig) -> list[RotaryEmbedding]:
        """One for each kind of layer."""
        kinds = {
            kind: build_rotary_embedding_from_config(config.replace(rope_parameters=rope))
            for kind, rope in config.rope_parameters.items()
        }
        return [kinds[kind] for kind in config.layer_types]

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        """A layer, whose entry in ``layer_types`` says whether it has the sliding window."""
        slides = config.layer_types[index] == "sliding_attention"
        return DecoderLayer(
            SelfAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                qkv_bias=config.attention_bias,
                o_bias=config.attention_bias,
                qk_norm_eps=config.rms_norm_eps if self.qk_norm else None,
                qk_norm_offset=1.0,
                sliding_window=config.sliding_window if slides else None,
                scale=config.query_pre_attn_scalar**-0.5,
                logit_softcapping=config.attn_logit_softcapping,
            ),
            GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_activation),
            lambda: self.build_norm(config),
            sandwich=True,
        )

    def adjust_logits(self, logits: Tensor) -> Tensor:
        """``[..., vocab]``, capped if the config says so."""
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Each head of q and k is normalised before it is rotated."""

    qk_norm = True


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text model alone of a checkpoint that has a vision tower too."""

    unused_weights = (
        *Gemma3ForCausalLM.unused_weights,
        "model.vision_tower.",
        "model.multi_modal_projector.",
    )

    def weight_name(self, name: str) -> str:
        """Parts stand at the top, or in newer files under ``model``."""
        name = name.removeprefix("model.")
        if name.startswith("language_model."):
            name = name.removeprefix("language_model.").removeprefix("model.")
        return name if name.startswith("lm_head.") else f"model.{name}"
