"""OLMo 2: ``--custom-module-map examples/module_maps/olmo2.py``.

Branches are normalised after them alone, and queries and keys over all heads at once. Norms are
rounded as Llama's, before the weight multiplies; the original rounds after that. It shows in 16-bit
numbers alone.
"""

from __future__ import annotations

from torch import Tensor, nn

from engine_core.configs import HFConfig, RotaryConfigBuilder
from engine_core.nn import (
    ApplyRotaryEmb,
    Attention,
    CosSin,
    GatedMLP,
    HeadsRMSNorm,
    KVCacheLayer,
    RotaryCausalLM,
    build_o_proj,
    build_qkv_proj,
)
from engine_core.step_context import AttentionMetadata


class Olmo2ConfigBuilder(RotaryConfigBuilder):
    """Reads the configs of OLMo 2."""

    architecture = "Olmo2ForCausalLM"
    defaults = {
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 50279,
    }


class Olmo2Attention(nn.Module):
    """Attention with norms over all heads."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.qkv_proj = build_qkv_proj(hidden, heads, kv_heads, dim, bias=bias)
        self.q_norm = HeadsRMSNorm(heads, dim, config.rms_norm_eps)
        self.k_norm = HeadsRMSNorm(kv_heads, dim, config.rms_norm_eps)
        self.rotate = ApplyRotaryEmb()
        self.attend = Attention(
            self.qkv_proj.num_q_heads, dim, num_kv_heads=self.qkv_proj.num_kv_heads
        )
        self.o_proj = build_o_proj(heads * dim, hidden, bias=bias)

    def forward(
        self, x: Tensor, cos_sin: CosSin, cache: KVCacheLayer, attn_metadata: AttentionMetadata
    ) -> Tensor:
        """``[1, T, H]`` to ``[1, T, H]``."""
        q, k, v = self.qkv_proj.split_qkv(self.qkv_proj(x))
        q, k = self.rotate(self.q_norm(q), self.k_norm(k), *cos_sin)
        heads = self.attend(q, k, v, *cache[:2], attn_metadata)
        out: Tensor = self.o_proj(heads.flatten(1).unsqueeze(0))
        return out


class Olmo2Layer(nn.Module):
    """A layer with norms after its branches."""

    def __init__(self, model: RotaryCausalLM, config: HFConfig) -> None:
        super().__init__()
        self.self_attn = Olmo2Attention(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.post_attention_layernorm = model.build_norm(config)
        self.post_feedforward_layernorm = model.build_norm(config)

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
        attended = self.self_attn(x, cos_sin, cache, attn_metadata)
        x = x + self.post_attention_layernorm(attended)
        return self.post_feedforward_layernorm(self.mlp(x)), x


class Olmo2ForCausalLM(RotaryCausalLM):
    """OLMo 2."""

    def build_layer(self, config: HFConfig, index: int) -> Olmo2Layer:
        """A layer; all are alike."""
        return Olmo2Layer(self, config)


MODULE_MAP = {"Olmo2ForCausalLM": "Olmo2ForCausalLM"}
CONFIG_BUILDERS = [Olmo2ConfigBuilder]
