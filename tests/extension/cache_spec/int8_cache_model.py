"""A Llama whose even layers cache keys and values in int8, with a scale for each token and head.

Written as an author would outside of the engine: from public names, with an attention in plain
torch. The other layers keep the engine's own cache, so that two specs share one pool.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from engine_core.configs import CacheSpec, CacheTensor, HFConfig
from engine_core.nn import (
    ApplyRotaryEmb,
    CachedLayer,
    CosSin,
    DecoderLayer,
    GatedMLP,
    KVCacheLayer,
    RMSNorm,
    RotaryCausalLM,
    SelfAttention,
    build_o_proj,
    build_qkv_proj,
)
from engine_core.step_context import AttentionMetadata
from engine_core_llama.config import LlamaConfigBuilder


class Int8CacheSpec(CacheSpec):
    """Keys and values in int8, and what they are to be multiplied with.

    Attributes:
        num_kv_heads: key and value heads on this rank.
        head_dim: size of a head.
    """

    num_kv_heads: int
    head_dim: int

    def tensors(self, block_size: int) -> tuple[CacheTensor, ...]:
        """Keys, values, scales of keys, scales of values."""
        heads = (block_size, self.num_kv_heads)
        kept = {"shape": (*heads, self.head_dim), "dtype": "int8"}
        scale = {"shape": heads, "dtype": "float32", "zeroed": True}
        return (
            CacheTensor(name="keys", **kept),
            CacheTensor(name="values", **kept),
            CacheTensor(name="key scales", **scale),
            CacheTensor(name="value scales", **scale),
        )


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x [T, heads, D]`` as int8 and scales ``[T, heads]``."""
    scale = x.abs().amax(dim=-1).clamp(min=1e-6) / 127
    return (x / scale.unsqueeze(-1)).round().char(), scale


class Int8Attention(CachedLayer):
    """Stores rounded keys and values, and attends over what is stored."""

    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim

    def cache_spec(self) -> Int8CacheSpec:
        """Scales beside keys and values, in the same block."""
        return Int8CacheSpec(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCacheLayer, metadata: AttentionMetadata
    ) -> Tensor:
        """``q [T, heads, D]``, ``k`` and ``v [T, kv heads, D]`` to ``[T, heads, D]``."""
        group = metadata.groups[self.group_id]
        keys, values, key_scales, value_scales = cache
        block_size = keys.shape[1]
        slots = group.slot_mapping
        blocks, offsets = slots // block_size, slots % block_size
        # Zeroed, as the spec asks: no position of a new block has a scale yet.
        assert (key_scales[blocks, offsets] == 0).all()
        keys[blocks, offsets], key_scales[blocks, offsets] = quantized(k)
        values[blocks, offsets], value_scales[blocks, offsets] = quantized(v)
        out = q.new_empty(q.shape)
        starts = metadata.query_start.tolist()
        for row, length in enumerate(metadata.kv_lens.tolist()):
            table = group.block_tables[row, : -(-length // block_size)]
            held = [
                (tensor[table].flatten(0, 1) * scales[table].flatten(0, 1).unsqueeze(-1))[:length]
                for tensor, scales in ((keys, key_scales), (values, value_scales))
            ]
            mine = q[starts[row] : starts[row + 1]]
            seen = mine.new_ones(len(mine), length).tril(length - len(mine)).bool()
            out[starts[row] : starts[row + 1]] = scaled_dot_product_attention(
                mine.transpose(0, 1).unsqueeze(0),
                *(tensor.transpose(0, 1).unsqueeze(0) for tensor in held),
                attn_mask=seen,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return out


class Int8SelfAttention(nn.Module):
    """Llama's attention, over the int8 cache."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv_proj = build_qkv_proj(config.hidden_size, heads, kv_heads, config.head_dim)
        self.o_proj = build_o_proj(heads * config.head_dim, config.hidden_size)
        self.rotate = ApplyRotaryEmb()
        self.attend = Int8Attention(self.qkv_proj.num_kv_heads, config.head_dim)

    def forward(
        self, x: Tensor, cos_sin: CosSin, cache: KVCacheLayer, metadata: AttentionMetadata
    ) -> Tensor:
        """``x [1, T, H]`` to ``[1, T, H]``."""
        q, k, v = self.qkv_proj.split_qkv(self.qkv_proj(x))
        q, k = self.rotate(q, k, *cos_sin)
        out: Tensor = self.o_proj(self.attend(q, k, v, cache, metadata).flatten(1).unsqueeze(0))
        return out


class Int8CacheLlama(RotaryCausalLM):
    """Llama with every other layer's cache in int8."""

    support_cuda_graph = False

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        """Even layers have the int8 cache."""
        attention = (
            Int8SelfAttention(config)
            if index % 2 == 0
            else SelfAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
            )
        )
        return DecoderLayer(
            attention,
            GatedMLP(config.hidden_size, config.intermediate_size),
            lambda: RMSNorm(config.hidden_size, config.rms_norm_eps),
        )


class Int8CacheLlamaBuilder(LlamaConfigBuilder):
    """Llama's config under the name of this model."""

    architecture = "Int8CacheLlama"


MODULE_MAP = {"Int8CacheLlama": "Int8CacheLlama"}
CONFIG_BUILDERS = [Int8CacheLlamaBuilder]
