"""Llama (Touvron et al., 2023): the mathematics, checked against transformers' modeling_llama."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine_core.configs import HFConfig
from engine_core.nn import (
    CosSin,
    DecoderLayer,
    GatedMLP,
    KVCacheLayer,
    RMSNorm,
    SelfAttention,
    Weights,
    build_embedding,
    build_lm_head,
    build_rotary_embedding_from_config,
    load_stacked_weights,
    rope_lengths,
)
from engine_core.step_context import AttentionMetadata, StepContext, StepContextManager


class LlamaModel(nn.Module):
    """The decoder without its head."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        self.embed_tokens = build_embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(
                SelfAttention(
                    config.hidden_size,
                    config.num_attention_heads,
                    config.num_key_value_heads,
                    config.head_dim,
                    qkv_bias=config.attention_bias,
                    o_bias=config.attention_bias,
                ),
                GatedMLP(
                    config.hidden_size,
                    config.intermediate_size,
                    config.hidden_act,
                    bias=config.mlp_bias,
                ),
                lambda: RMSNorm(config.hidden_size, config.rms_norm_eps),
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        cos_sin: CosSin,
        past_key_values: list[KVCacheLayer],
        attn_metadata: AttentionMetadata,
    ) -> Tensor:
        """Embeddings ``[1, T, H]`` to hidden states ``[1, T, H]``."""
        residual = None
        for layer, cache in zip(self.layers, past_key_values, strict=True):
            x, residual = layer(x, residual, cos_sin, cache, attn_metadata)
        out: Tensor = self.norm(x, residual)[0]
        return out


class LlamaForCausalLM(nn.Module):
    """Llama with its language-model head."""

    support_cuda_graph = True

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.model = LlamaModel(config)
        self.rotary_emb = build_rotary_embedding_from_config(config)
        self.dynamic_rope = config.rope_scaling["rope_type"] == "dynamic"
        self.tied = config.tie_word_embeddings
        self.lm_head = build_lm_head(
            config.hidden_size,
            config.vocab_size,
            tied_to=self.model.embed_tokens if self.tied else None,
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: list[KVCacheLayer],
        attn_metadata: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
        rope_lengths: Tensor | None = None,
    ) -> Tensor:
        """``[1, T]`` to hidden states ``[1, T, H]``."""
        x = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cos_sin = self.rotary_emb(position_ids, rope_lengths)
        out: Tensor = self.model(x, cos_sin, past_key_values, attn_metadata)
        return out

    def get_logits(self, hidden_states: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., vocab]``."""
        out: Tensor = self.lm_head(hidden_states)
        return out

    def prepare_inputs_for_generation(
        self,
        past_key_values: list[KVCacheLayer],
        inputs_embeds: Tensor | None = None,
        context: StepContext | None = None,
    ) -> dict[str, Any]:
        """The arguments of ``forward`` for one step."""
        assert context is not None, "the runner passes the step's context"
        inputs = context.model_inputs(past_key_values)
        if self.dynamic_rope:
            inputs["rope_lengths"] = rope_lengths(context)
        return inputs

    def load_weights(self, weights: Weights) -> None:
        """Fill the parameters from a checkpoint in transformers' naming."""
        load_stacked_weights(
            self,
            weights,
            {
                "q_proj": ("qkv_proj", "q"),
                "k_proj": ("qkv_proj", "k"),
                "v_proj": ("qkv_proj", "v"),
                "gate_proj": ("gate_up_proj", 0),
                "up_proj": ("gate_up_proj", 1),
            },
            ignore=("rotary_emb.inv_freq", *(("lm_head.weight",) if self.tied else ())),
        )
