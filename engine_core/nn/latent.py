"""Multi-head latent attention (DeepSeek-V2, 2024): a cache of latent vectors, and its block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.configs import LatentCacheSpec
from engine_core.configs.dtypes import dtype_name
from engine_core.errors import OptionError
from engine_core.kernels import latent_attention, store_kv
from engine_core.nn.attention import CachedLayer, KVCacheLayer
from engine_core.nn.distributed import divide
from engine_core.nn.epilogue import CosSin
from engine_core.nn.linear import (
    Linear,
    build_colwise_linear,
    build_o_proj,
    build_replicated_linear,
)
from engine_core.nn.module import Module
from engine_core.nn.norm import RMSNorm
from engine_core.nn.packing import PackedMatrix
from engine_core.nn.rotary import ApplyRotaryEmb
from engine_core.step_context import AttentionMetadata, current_build_context


class LatentAttention(CachedLayer):
    """Stores a latent vector and a rotated key of each token, and attends over all of them.

    Every rank stores them; the heads are split over the ranks.

    Attributes:
        num_heads: of this rank.
        num_kv_heads: as many: each head has keys and values of its own, projected from the vector.
        head_dim: of a query and key, both parts.
    """

    def __init__(
        self,
        num_heads: int,
        latent_dim: int,
        nope_dim: int,
        rope_dim: int,
        *,
        scale: float | None = None,
    ) -> None:
        """``num_heads`` is that of this rank.

        Args:
            num_heads: query heads.
            latent_dim: size of a latent vector (``kv_lora_rank``).
            nope_dim: size of a head's part of queries and keys that is not rotated.
            rope_dim: size of the part that is, of which all heads' keys share one.
            scale: of the scores; ``(nope_dim + rope_dim) ** -0.5`` if None.

        Raises:
            OptionError: the context asks for a cache of codes, or for deterministic mode.
        """
        super().__init__()
        context = current_build_context()
        if context.kv_cache_dtype != "auto":
            raise OptionError(
                f"kv_cache_dtype {context.kv_cache_dtype!r}: a cache of latent vectors has no "
                "codes, and is small already; leave kv_cache_dtype out"
            )
        if context.deterministic:
            raise OptionError(
                "deterministic: latent attention has no batch-invariant kernel; leave it out"
            )
        self.num_heads = self.num_kv_heads = num_heads
        self.head_dim = nope_dim + rope_dim
        self.latent_dim, self.rope_dim = latent_dim, rope_dim
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.dtype = context.dtype or torch.get_default_dtype()

    def cache_spec(self) -> LatentCacheSpec:
        """The cache spec of this layer."""
        dtype = dtype_name(str(self.dtype).removeprefix("torch."))
        return LatentCacheSpec(latent_dim=self.latent_dim, rope_dim=self.rope_dim, dtype=dtype)

    def forward(
        self,
        q: Tensor,
        latents: Tensor,
        rope_keys: Tensor,
        up: Tensor,
        cache: Tensor,
        attn_metadata: AttentionMetadata,
    ) -> Tensor:
        """Values ``[T, heads, v]`` that each head's queries attended to.

        Args:
            q: ``[T, heads, nope + rope]``, rotated.
            latents: ``[T, latent]``.
            rope_keys: ``[T, rope]``, rotated.
            up: ``[heads, nope + v, latent]``, the projections to keys and to values.
            cache: ``[num_blocks, block_size, latent + rope]``.
            attn_metadata: of the step.

        Raises:
            ValueError: tokens of a prefix are to see each other in both directions.
        """
        if attn_metadata.prefix_lens is not None:
            raise ValueError("latent attention is causal: it has no bidirectional prefix")
        group = attn_metadata.groups[self.group_id]
        held = cache.unsqueeze(2)
        parts = held[..., : self.latent_dim], held[..., self.latent_dim :]
        store_kv(latents.unsqueeze(1), rope_keys.unsqueeze(1), *parts, group.slot_mapping)
        return latent_attention(
            q,
            cache,
            up,
            block_tables=group.block_tables,
            query_start=attn_metadata.query_start,
            kv_lens=attn_metadata.kv_lens,
            max_query_len=attn_metadata.max_query_len,
            max_kv_len=attn_metadata.max_kv_len,
            num_decode_rows=attn_metadata.num_decode_rows,
            scale=self.scale,
            memo=attn_metadata.memos.setdefault(self.group_id, {}),
        )


class HeadsProjection(Linear):
    """The projection of latent vectors to every head's keys and values, multiplied head by head.

    So its weight stays numbers: no option quantises it, and codes of a checkpoint are unpacked.
    """

    quantizable = False

    def __init__(self, latent_dim: int, num_heads: int, dims: int) -> None:
        """``dims``: rows of each of the model's ``num_heads``, for keys and for values."""
        context = current_build_context()
        self.num_heads = divide(num_heads, context.tp_size, "number of query heads")
        rows = self.num_heads * dims
        super().__init__(
            latent_dim, [(None, num_heads * dims, context.tp_rank * rows, rows)], bias=False
        )

    def pack_by(
        self, pack: Callable[..., PackedMatrix | None], weight: Tensor, *others: Tensor | None
    ) -> PackedMatrix | None:
        """Codes, which :meth:`set_packed` unpacks; None for numbers, which are used as they are."""
        return pack(weight, *others) if others else None

    def set_packed(self, packed: PackedMatrix, *parameters: str) -> None:
        """Keep the numbers that ``packed`` stands for."""
        super().set_packed(packed, *parameters)
        self.packed = None
        self.weight = nn.Parameter(packed.dense(), requires_grad=False)

    def packed_sizes(self) -> Mapping[str, int]:
        """Bytes of the numbers, in place of all that a method keeps."""
        first, *others = self._parameters.keys() - {"bias"}
        return dict.fromkeys(others, 0) | {first: self.matrix_shape.numel() * self.dtype.itemsize}

    @property
    def heads(self) -> Tensor:
        """``[heads of this rank, dims, latent]``."""
        return self.weight.view(self.num_heads, -1, self.in_features)


class LatentSelfAttention(Module):
    """Project to queries, latent vectors and rotated keys; rotate; attend; project back.

    Parameters are named as in DeepSeek's checkpoints.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None = None,
        bias: bool = False,
        norm_eps: float = 1e-6,
        interleaved_rope: bool = True,
        scale: float | None = None,
    ) -> None:
        """``num_heads`` is the whole model's.

        Args:
            hidden_size: of the input.
            num_heads: query heads.
            kv_lora_rank: size of a latent vector.
            qk_nope_head_dim: size of a head's part of queries and keys that is not rotated.
            qk_rope_head_dim: size of the part that is.
            v_head_dim: size of a value head.
            q_lora_rank: size of the vector that queries are projected from; None for none.
            bias: whether the projections down and the one back have biases.
            norm_eps: of the norms of projections down.
            interleaved_rope: as of :class:`ApplyRotaryEmb`.
            scale: as of :class:`LatentAttention`.
        """
        super().__init__()
        self.input_width = hidden_size
        self.nope_dim, self.head_dim = qk_nope_head_dim, qk_nope_head_dim + qk_rope_head_dim
        self.sizes = (kv_lora_rank, qk_rope_head_dim)
        self.q_lora_rank = q_lora_rank
        self.kv_b_proj = HeadsProjection(kv_lora_rank, num_heads, qk_nope_head_dim + v_head_dim)
        if q_lora_rank is None:
            self.q_proj = build_colwise_linear(hidden_size, num_heads * self.head_dim)
        else:
            self.q_a_proj = build_replicated_linear(hidden_size, q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(q_lora_rank, norm_eps)
            self.q_b_proj = build_colwise_linear(q_lora_rank, num_heads * self.head_dim)
        self.kv_a_proj_with_mqa = build_replicated_linear(hidden_size, sum(self.sizes), bias=bias)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, norm_eps)
        self.o_proj = build_o_proj(num_heads * v_head_dim, hidden_size, bias=bias)
        self.rotate = ApplyRotaryEmb(interleaved_rope)
        self.attend = LatentAttention(
            self.kv_b_proj.num_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, scale=scale
        )

    def forward(
        self,
        x: Tensor,
        cos_sin: CosSin,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
        *then: Any,
    ) -> Any:
        """``x [1, T, H]`` to ``[1, T, H]``; ``then`` is as of :class:`Branch`."""
        if self.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(-1, self.attend.num_heads, self.head_dim)
        latents, rope_keys = self.kv_a_proj_with_mqa(x)[0].split(self.sizes, dim=-1)
        self.rotate(q[..., self.nope_dim :], rope_keys.unsqueeze(1), *cos_sin)
        heads = self.attend(
            q, self.kv_a_layernorm(latents), rope_keys, self.kv_b_proj.heads, cache[0],
            attn_metadata,
        )  # fmt: skip
        return self.o_proj(heads.flatten(1).unsqueeze(0), *then)
