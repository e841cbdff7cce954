"""Llama (Touvron et al., 2023) and Mistral (Jiang et al., 2023), as transformers computes them."""

from __future__ import annotations

from engine_core.configs import HFConfig
from engine_core.nn import DecoderLayer, GatedMLP, RMSNorm, RotaryCausalLM, SelfAttention


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
            GatedMLP(
                config.hidden_size,
                config.intermediate_size,
                config.hidden_act,
                bias=config.mlp_bias,
            ),
            lambda: RMSNorm(config.hidden_size, config.rms_norm_eps),
        )


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral: Llama whose queries may see only the last ``sliding_window`` keys."""
