"""Llama (Touvron et al., 2023), Mistral (Jiang et al., 2023) and Mixtral (Jiang et al., 2024)."""

from __future__ import annotations

from typing import ClassVar

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


class LlamaForCausalLM(RotaryCausalLM):
    """Llama: grouped-query attention with rotary positions, and a gated MLP."""

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        """All layers are alike; ``attention_bias`` puts a bias on the output projection too."""
        return DecoderLayer(
            SelfAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                qkv_bias=config.attention_bias,
                o_bias=config.attention_bias,
                sliding_window=config.sliding_window,
            ),
            self.build_mlp(config),
            lambda: RMSNorm(config.hidden_size, config.rms_norm_eps),
        )

    def build_mlp(self, config: HFConfig) -> nn.Module:
        """The feed-forward block of a layer."""
        return GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            bias=config.mlp_bias,
        )


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral: Llama whose queries may see only the last ``sliding_window`` keys."""


class MixtralForCausalLM(LlamaForCausalLM):
    """Mixtral: Mistral with experts, of which each token takes the best few."""

    stacked_weights: ClassVar = {
        **LlamaForCausalLM.stacked_weights,
        "w1": ("gate_up_proj", 0),
        "w3": ("gate_up_proj", 1),
        "w2": ("down_proj", None),
    }

    def build_mlp(self, config: HFConfig) -> SparseMoE:
        """Experts; the weights of those that a token takes add up to 1."""
        return SparseMoE(
            config.hidden_size,
            config.intermediate_size,
            config.num_local_experts,
            config.num_experts_per_tok,
            config.hidden_act,
            renormalize=True,
        )

    def weight_name(self, name: str) -> str:
        """Published checkpoints call the experts' block ``block_sparse_moe``."""
        return name.replace(".block_sparse_moe.", ".mlp.")
