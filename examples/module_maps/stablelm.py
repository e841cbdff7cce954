"""StableLM: ``--custom-module-map examples/module_maps/stablelm.py``.

A quarter of a head rotates. A layer's branches may stand side by side, and each head of queries
and keys may have a norm of its own.
"""

from __future__ import annotations

import re

import torch.nn.functional as F
from torch import Tensor, nn

from engine_core.configs import HFConfig, RotaryConfigBuilder
from engine_core.nn import (
    ApplyRotaryEmb,
    Attention,
    CosSin,
    DecoderLayer,
    GatedMLP,
    KVCacheLayer,
    LayerNorm,
    RotaryCausalLM,
    build_heads_parameter,
    build_o_proj,
    build_qkv_proj,
)
from engine_core.step_context import AttentionMetadata

# Heads of the largest model that the names of norms are known for.
_MOST_HEADS = 256


class StableLmConfigBuilder(RotaryConfigBuilder):
    """Reads the configs of StableLM."""

    architecture = "StableLmForCausalLM"
    defaults = {
        "hidden_act": "silu",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.25,
        "qk_layernorm": False,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_parallel_residual": False,
        "use_qkv_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


class HeadsLayerNorm(nn.Module):
    """A layer norm of each head, with weights of its own."""

    def __init__(self, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = build_heads_parameter(num_heads, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, heads, D]``, normalised."""
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * self.weight


class StableLmAttention(nn.Module):
    """Attention, perhaps with norms of queries and keys."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        hidden, dim, eps = config.hidden_size, config.head_dim, config.layer_norm_eps
        self.qkv_proj = build_qkv_proj(hidden, heads, kv_heads, dim, bias=config.use_qkv_bias)
        self.normed = config.qk_layernorm
        if self.normed:
            self.q_layernorm = HeadsLayerNorm(heads, dim, eps)
            self.k_layernorm = HeadsLayerNorm(kv_heads, dim, eps)
        self.rotate = ApplyRotaryEmb()
        # Of this rank's heads.
        self.attend = Attention(
            self.qkv_proj.num_q_heads, dim, num_kv_heads=self.qkv_proj.num_kv_heads
        )
        self.o_proj = build_o_proj(heads * dim, hidden)

    def forward(
        self, x: Tensor, cos_sin: CosSin, cache: KVCacheLayer, attn_metadata: AttentionMetadata
    ) -> Tensor:
        """``[1, T, H]`` to ``[1, T, H]``."""
        q, k, v = self.qkv_proj.split_qkv(self.qkv_proj(x))
        if self.normed:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        q, k = self.rotate(q, k, *cos_sin)
        heads = self.attend(q, k, v, *cache[:2], attn_metadata)
        out: Tensor = self.o_proj(heads.flatten(1).unsqueeze(0))
        return out


class ParallelLayer(nn.Module):
    """``x + attention(norm(x)) + mlp(norm(x))``."""

    def __init__(self, self_attn: nn.Module, mlp: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.input_layernorm = self_attn, mlp, norm

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos_sin: CosSin,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """``(x, residual)`` to the next layer's; the residual stream is their sum."""
        x = x if residual is None else x + residual
        normed = self.input_layernorm(x)
        attended = self.self_attn(normed, cos_sin, cache, attn_metadata)
        return attended + self.mlp(normed), x


class StableLmForCausalLM(RotaryCausalLM):
    """Llama with layer norms and the switches above."""

    # Checkpoints have a tensor for each head, which weight_name gives these names.
    stacked_weights = {
        **RotaryCausalLM.stacked_weights,
        **{
            f"{part}_layernorm_{head}": (f"{part}_layernorm", head)
            for part in "qk"
            for head in range(_MOST_HEADS)
        },
    }

    def build_norm(self, config: HFConfig) -> LayerNorm:
        """With a bias."""
        return LayerNorm(config.hidden_size, config.layer_norm_eps)

    def build_layer(self, config: HFConfig, index: int) -> nn.Module:
        """A layer; all are alike."""
        attention = StableLmAttention(config)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        if config.use_parallel_residual:
            return ParallelLayer(attention, mlp, self.build_norm(config))
        return DecoderLayer(attention, mlp, lambda: self.build_norm(config))

    def weight_name(self, name: str) -> str:
        """The name of a tensor here."""
        return re.sub(r"_layernorm\.norms\.(\d+)\.", r"_layernorm_\1.", name)


MODULE_MAP = {"StableLmForCausalLM": "StableLmForCausalLM"}
CONFIG_BUILDERS = [StableLmConfigBuilder]
