"""DeepSeek-V2 and V3 (DeepSeek-AI, 2024), as transformers computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from engine_core.configs import HFConfig
from engine_core.nn import (
    DecoderLayer,
    GatedMLP,
    LatentSelfAttention,
    RMSNorm,
    RotaryCausalLM,
    RotaryEmbedding,
    SparseMoE,
    Weights,
    build_rotary_embedding,
    load_stacked_weights,
)


class DeepseekV2ForCausalLM(RotaryCausalLM):
    """Layers of latent attention, the first with one feed-forward block, the others with experts.

    V3 chooses experts by sigmoids and a bias, V2 by a softmax.
    """

    # Queries have a projection of their own.
    stacked_weights: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def build_rotary(self, config: HFConfig) -> list[RotaryEmbedding]:
        """Angles of the part of a head that is rotated."""
        rotary = build_rotary_embedding(
            config.qk_rope_head_dim,
            base=config.rope_theta,
            max_position_embeddings=config.max_position_embeddings,
            scaling=config.rope_scaling,
        )
        return [rotary] * config.num_hidden_layers

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        """A layer; experts begin at ``first_k_dense_replace``."""
        attention = LatentSelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            bias=config.attention_bias,
            interleaved_rope=config.rope_interleave,
            scale=attention_scale(config),
        )
        dense = index < config.first_k_dense_replace
        return DecoderLayer(
            attention,
            GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
            if dense
            else self.build_experts(config),
            lambda: RMSNorm(config.hidden_size, config.rms_norm_eps),
        )

    def build_experts(self, config: HFConfig) -> SparseMoE:
        """Experts, and those that all tokens take, as one."""
        by_bias = config.topk_method == "noaux_tc"
        return SparseMoE(
            config.hidden_size,
            config.moe_intermediate_size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            config.hidden_act,
            scoring="sigmoid" if by_bias else "softmax",
            renormalize=by_bias and config.norm_topk_prob,
            groups=config.n_group,
            top_groups=config.topk_group,
            group_scores=2 if by_bias else 1,
            scale=config.routed_scaling_factor,
            correction_bias=by_bias,
            wide_router=True,
            shared_size=config.moe_intermediate_size * config.n_shared_experts,
        )

    def load_weights(self, weights: Weights) -> None:
        """Fill the parameters; layers that predict further tokens are left out."""
        behind = len(self.model.layers)
        load_stacked_weights(
            self,
            weights,
            self.stacked_weights,
            rename=lambda name: name.replace(".shared_experts.", ".shared_expert."),
            ignore=(*self.unused_weights, f"model.layers.{behind}."),
        )


def attention_scale(config: HFConfig) -> float:
    """The factor of the scores; YaRN's ``mscale_all_dim`` makes up for a longer context."""
    scale: float = config.head_dim**-0.5
    rope = config.rope_scaling
    weight, factor = rope.get("mscale_all_dim"), rope.get("factor", 1.0)
    if rope["rope_type"] == "yarn" and weight and factor > 1:
        scale *= (0.1 * weight * math.log(factor) + 1.0) ** 2
    return scale
