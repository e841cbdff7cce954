"""Qwen2 (Yang et al., 2024) and Qwen3 (Yang et al., 2025), as transformers computes them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import nn

from engine_core.configs import HFConfig
from engine_core.nn import (
    DecoderLayer,
    GatedMLP,
    RMSNorm,
    RotaryCausalLM,
    SelfAttention,
    SparseMoE,
)


class _QwenForCausalLM(RotaryCausalLM):
    """Parts that both generations share: all of a layer but its attention."""

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        """A layer, whose entry in ``layer_types`` says whether it has the sliding window."""
        slides = config.layer_types[index] == "sliding_attention"
        return DecoderLayer(
            self.build_attention(config, config.sliding_window if slides else None),
            self.build_mlp(config, index),
            lambda: RMSNorm(config.hidden_size, config.rms_norm_eps),
        )

    def build_mlp(self, config: HFConfig, index: int) -> nn.Module:
        """The feed-forward block of a layer."""
        return GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)

    @abstractmethod
    def build_attention(self, config: HFConfig, window: int | None) -> SelfAttention:
        """The attention of a layer in which a query sees ``window`` keys, or all if None."""


class Qwen2ForCausalLM(_QwenForCausalLM):
    """Qwen2 and Qwen2.5: biases on q, k and v, none on the output projection."""

    def build_attention(self, config: HFConfig, window: int | None) -> SelfAttention:
        """Attention with biases."""
        return SelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            qkv_bias=True,
            sliding_window=window,
        )


class Qwen3ForCausalLM(_QwenForCausalLM):
    """Qwen3: each head of q and k is normalised before it is rotated."""

    def build_attention(self, config: HFConfig, window: int | None) -> SelfAttention:
        """Attention with norms; ``attention_bias`` is that of all four projections."""
        return SelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            qk_norm_eps=config.rms_norm_eps,
            sliding_window=window,
        )


class Qwen2MoeForCausalLM(_QwenForCausalLM):
    """Qwen2 with experts, beside one that all tokens take, behind a gate."""

    def build_attention(self, config: HFConfig, window: int | None) -> SelfAttention:
        """Attention with biases, unless the config says otherwise."""
        return SelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            qkv_bias=config.qkv_bias,
            sliding_window=window,
        )

    def build_mlp(self, config: HFConfig, index: int) -> nn.Module:
        """Experts, or in some layers none."""
        if not config.sparse_layers[index]:
            return super().build_mlp(config, index)
        return _experts(
            config, shared_size=config.shared_expert_intermediate_size, shared_gate=True
        )


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3 with experts."""

    def build_mlp(self, config: HFConfig, index: int) -> nn.Module:
        """Experts, or in some layers none."""
        if not config.sparse_layers[index]:
            return super().build_mlp(config, index)
        return _experts(config)


def _experts(config: HFConfig, **shared: Any) -> SparseMoE:
    return SparseMoE(
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
        config.num_experts_per_tok,
        config.hidden_act,
        renormalize=config.norm_topk_prob,
        **shared,
    )
