from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine_core.configs import HFConfig
from engine_core.nn import (
    ApplyRotaryEmb,
    Attention,
    CosSin,
    GatedMLP,
    KVCacheLayer,
    RMSNorm,
    Weights,
    build_embedding,
    build_lm_head,
    build_o_proj,
    build_qkv_proj,
    build_rotary_embedding,
    load_stacked_weights,
)
from engine_core.step_context import AttentionMetadata, StepContext, StepContextManager


class TinyAttention(nn.Module):
    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        kv_heads, size = config.num_key_value_heads, config.head_dim
        self.qkv_proj = build_qkv_proj(hidden, heads, kv_heads, size, bias=config.attention_bias)
        self.o_proj = build_o_proj(heads * size, hidden, bias=config.attention_bias)
        self.rotate = ApplyRotaryEmb()
        self.attend = Attention(
            self.qkv_proj.num_q_heads,
            size,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            sliding_window=config.sliding_window,
        )

    def forward(
        self, x: Tensor, cos_sin: CosSin, cache: KVCacheLayer, attn_metadata: AttentionMetadata
    ) -> Tensor:
        q, k, v = self.qkv_proj.split_qkv(self.qkv_proj(x))
        q, k = self.rotate(q, k, *cos_sin)
        out = self.attend(q, k, v, *cache[:2], attn_metadata)
        return self.o_proj(out.flatten(1).unsqueeze(0))


class TinyLayer(nn.Module):
    def __init__(self, config: HFConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.self_attn = TinyAttention(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos_sin: CosSin, cache: KVCacheLayer, attn_metadata: AttentionMetadata
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, cache, attn_metadata)
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyModel(nn.Module):
    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        self.embed_tokens = build_embedding(config.vocab_size, config.hidden_size)
        layers = [TinyLayer(config, index) for index in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class TinyForCausalLM(nn.Module):
    support_cuda_graph = True

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.model = TinyModel(config)
        self.rotary_emb = build_rotary_embedding(config.head_dim, base=config.rope_theta)
        self.lm_head = build_lm_head(config.hidden_size, config.vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: list[KVCacheLayer],
        attn_metadata: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        x = self.model.embed_tokens(input_ids)
        cos_sin = self.rotary_emb(position_ids)
        for layer, cache in zip(self.model.layers, past_key_values, strict=True):
            x = layer(x, cos_sin, cache, attn_metadata)
        return self.model.norm(x)

    def get_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states)

    def prepare_inputs_for_generation(
        self,
        past_key_values: list[KVCacheLayer],
        inputs_embeds: Tensor | None = None,
        context: StepContext | None = None,
    ) -> dict[str, Any]:
        inputs = context.model_inputs(past_key_values)
        inputs["inputs_embeds"] = inputs_embeds
        return inputs

    def load_weights(self, weights: Weights) -> None:
        stacked = {
            "q_proj": ("qkv_proj", "q"),
            "k_proj": ("qkv_proj", "k"),
            "v_proj": ("qkv_proj", "v"),
            "gate_proj": ("gate_up_proj", 0),
            "up_proj": ("gate_up_proj", 1),
        }
        load_stacked_weights(self, weights, stacked, ignore=())
