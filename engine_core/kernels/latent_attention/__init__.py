"""Attention of packed queries over a paged cache of latent vectors (MLA, DeepSeek-V2).

A token's keys and values of all heads are projections of one latent vector. A key has a rotated
part too, which all heads share. The cache keeps both, and nothing for each head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine_core.kernels.attention.call import check_rows
from engine_core.kernels.latent_attention import cpu

__all__ = ["LatentCall", "latent_attention"]

# Up to so many tokens oneDNN multiplies the weight by them faster than them by the weight: one
# token of 16 heads of 128 takes 0.24 ms and not 1.02 on one Zen 5 core in bfloat16, 8 take 0.26 and
# not 1.11, and 64 take 2.38 and not 1.81.
_FEW = 16


@dataclass(frozen=True, slots=True)
class LatentCall:
    """The arguments of :func:`latent_attention`, which has checked them."""

    q: Tensor
    cache: Tensor
    up: Tensor
    block_tables: Tensor
    query_start: Tensor
    kv_lens: Tensor
    max_query_len: int
    max_kv_len: int
    num_decode_rows: int
    scale: float
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Size of a latent vector."""
        return self.up.shape[2]

    @property
    def nope_dim(self) -> int:
        """Size of a head's part of a query that is not rotated."""
        return self.q.shape[2] + self.rank - self.cache.shape[2]

    def absorbed(self, q: Tensor) -> Tensor:
        """Queries ``[n, H, nope + rope]`` as ``[n, H, rank + rope]``, for what the cache has.

        A query's product with a key is the product of this projection with the latent vector.
        """
        nope = self.nope_dim
        latent = torch.bmm(q[..., :nope].transpose(0, 1), self.up[:, :nope]).transpose(0, 1)
        return torch.cat((latent, q[..., nope:]), dim=-1)

    def released(self, latents: Tensor) -> Tensor:
        """Weighted sums of latent vectors ``[n, H, rank]`` as values, ``[n, H, v]``, contiguous."""
        values = self.up[:, self.nope_dim :]
        if len(latents) <= _FEW:
            return torch.bmm(values, latents.permute(1, 2, 0)).permute(2, 0, 1).contiguous()
        sums = torch.bmm(latents.transpose(0, 1), values.transpose(1, 2))
        return sums.transpose(0, 1).contiguous()

    def expands(self, num_queries: int, kv_len: int) -> bool:
        """Whether a row costs fewer multiplications with every head's keys and values.

        Absorbed, each pair of query and key takes ``2 * rank + rope`` of them a head, and each
        query is projected. Expanded it takes ``nope + rope + v``, and each key is.
        """
        rank, dims = self.rank, self.up.shape[1]
        pairs = num_queries * (2 * kv_len - num_queries + 1) // 2
        saved = 2 * rank - dims
        return pairs * saved > (kv_len - num_queries) * rank * dims


def latent_attention(
    q: Tensor,
    cache: Tensor,
    up: Tensor,
    *,
    block_tables: Tensor,
    query_start: Tensor,
    kv_lens: Tensor,
    max_query_len: int,
    max_kv_len: int,
    num_decode_rows: int = 0,
    scale: float,
    memo: dict[Any, Any] | None = None,
) -> Tensor:
    """Attend causally over latent vectors, this step's included, which are stored already.

    Head ``h`` of a token has the key ``[up[h, :nope] @ latent, rope key]``, and the value
    ``up[h, nope:] @ latent``. On a CPU a row makes them if that is cheaper, see
    :meth:`LatentCall.expands`. Otherwise, and always on a GPU, the projections are absorbed:
    queries are projected to latent vectors, and so are their results back.

    Args:
        q: ``[T, H, nope + rope]``, rotated, last dimension contiguous.
        cache: ``[num_blocks, block_size, rank + rope]``, q's dtype: of each token the latent
            vector, then the rotated key; last dimension contiguous.
        up: ``[H, nope + v, rank]``, q's dtype.
        block_tables: as of :func:`~engine_core.kernels.paged_attention`, and so all up to ``memo``.
        query_start: ``[R + 1]`` int32.
        kv_lens: ``[R]`` int32. A row of length 0 is padding: its outputs are zeros.
        max_query_len: at least the longest row's number of queries.
        max_kv_len: at least the longest row's length.
        num_decode_rows: rows ``[0, num_decode_rows)`` have exactly one query each.
        scale: factor of the dot products.
        memo: one dict for all calls of a step with the same places; empty before the first.

    Returns:
        ``[T, H, v]``, contiguous. Tokens at ``query_start[R]`` and beyond are not set.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    rope = cache.shape[-1] - up.shape[-1]
    nope = q.shape[-1] - rope
    if (
        (q.dim(), cache.dim(), up.dim()) != (3, 3, 3)
        or q.shape[1] != up.shape[0]
        or not (rope >= 0 and 0 <= nope < up.shape[1])
    ):
        raise ValueError(
            "latent_attention: q must be [T, H, nope + rope], the cache [num_blocks, block_size, "
            "rank + rope] and up [H, nope + v, rank], got "
            f"{tuple(q.shape)}, {tuple(cache.shape)} and {tuple(up.shape)}"
        )
    if not q.dtype == cache.dtype == up.dtype or q.stride(2) != 1 or cache.stride(2) != 1:
        raise ValueError(
            "latent_attention: q, cache and up must have one dtype, and the last dimension of q "
            f"and cache stride 1, got {q.dtype}, {cache.dtype}, {up.dtype}, {q.stride()} and "
            f"{cache.stride()}"
        )
    check_rows("latent_attention", block_tables, query_start, kv_lens, num_decode_rows)
    call = LatentCall(
        q, cache, up, block_tables, query_start, kv_lens, max_query_len, max_kv_len,
        num_decode_rows, scale, {} if memo is None else memo,
    )  # fmt: skip
    if q.is_cuda:
        from engine_core.kernels.latent_attention import triton

        return triton.latent_attention(call)
    return cpu.latent_attention(call)
