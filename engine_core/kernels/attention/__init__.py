"""Attention of packed queries over a paged KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine_core.kernels.attention import cpu
from engine_core.kernels.attention.call import Call, check_rows
from engine_core.kernels.codes import cache_parts

__all__ = ["paged_attention"]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_tables: Tensor,
    query_start: Tensor,
    kv_lens: Tensor,
    max_query_len: int,
    max_kv_len: int,
    num_decode_rows: int = 0,
    scale: float,
    alibi_slopes: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    prefix_lens: Tensor | None = None,
    out: Tensor | None = None,
    memo: dict[Any, Any] | None = None,
    deterministic: bool = False,
    chained: int = 0,
) -> Tensor:
    """Softmax attention of each row's new tokens over all the tokens that its blocks hold.

    Row ``r`` owns queries ``query_start[r] : query_start[r + 1]``. They are the last of its
    ``kv_lens[r]`` tokens, whose keys and values are already stored; token ``j`` of the row lies in
    slot ``j % block_size`` of block ``block_tables[r, j // block_size]``. Key ``j`` is visible to
    the query at position ``i`` if ``j <= i`` (and ``j > i - window`` with a window), or if
    ``j < prefix_lens[r]``. The logit is ``scale * (q . k)``, then ``softcap * tanh(logit /
    softcap)`` with a softcap, then plus ``slope * (j - i)`` with ALiBi.

    Slots beyond a row's length and table entries beyond its blocks are never read as data: they
    may hold anything, NaN included. On a CPU the host reads the lengths. On a GPU it reads nothing:
    the decode grid depends on shapes, ``num_decode_rows`` and ``max_kv_len`` only, so a CUDA graph
    captured with the largest ``max_kv_len`` replays with any lengths.

    Args:
        q: ``[T, Hq, D]``, last dimension contiguous, float32, bfloat16 or float16.
        k_cache: ``[num_blocks, block_size, Hk, D]``, q's dtype, last dimension contiguous.
            ``Hq`` is a multiple of ``Hk``; query head ``h`` reads KV head ``h // (Hq // Hk)``. Or
            codes, as :func:`~engine_core.kernels.store_kv` makes them: each stands for itself times
            its head's scale.
        v_cache: ``[num_blocks, block_size, Hk, Dv]``, likewise.
        block_tables: ``[R, max_blocks]`` int32, last dimension contiguous.
        query_start: ``[R + 1]`` int32, ascending from 0.
        kv_lens: ``[R]`` int32. A row of length 0 is padding: its outputs are zeros.
        max_query_len: at least the longest row's number of queries.
        max_kv_len: at least the longest row's length.
        num_decode_rows: rows ``[0, num_decode_rows)`` have exactly one query each.
        scale: factor of the dot products.
        alibi_slopes: ``[Hq]`` float32 (Press et al. 2022).
        window: sliding window in tokens, the query's own included.
        softcap: bound of the logits.
        prefix_lens: ``[R]`` int32, leading tokens that every query of the row sees.
        out: ``[T, Hq, Dv]`` contiguous, written in place; made if None.
        memo: one dict for all calls with these ``block_tables``, ``query_start``, ``kv_lens``,
            ``num_decode_rows`` and ``prefix_lens``, as in the layers of a step; empty before the
            first. It keeps what was derived from them. If later calls are captured in a CUDA graph,
            the first must be too: a replay has to derive it anew.
        deterministic: whether each query's result must be the same, bit for bit, whatever other
            rows there are and however many queries of its own row. Only on a GPU.
        chained: bits of the codes of :func:`~engine_core.kernels.linear_chain` if that follows,
            which begins early if it is let; 0: it does not. Results do not depend on it.

    Returns:
        ``[T, Hq, Dv]``. Tokens at ``query_start[R]`` and beyond are not written.

    Raises:
        ValueError: a shape, dtype or stride is not as above, or ``deterministic`` is given on a
            CPU or for codes.
    """
    if q.dim() != 3 or k_cache.dim() != 4 or v_cache.dim() != 4:
        raise ValueError(
            "paged_attention: q must be [T, Hq, D], the caches [num_blocks, block_size, Hk, D], "
            f"got q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, "
            f"v_cache {tuple(v_cache.shape)}"
        )
    (k_cache, k_scales), (v_cache, v_scales) = cache_parts(k_cache), cache_parts(v_cache)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = v_cache.shape[2:]
    if (
        k_cache.shape[:3] != v_cache.shape[:3]
        or k_cache.shape[3] != head_dim
        or num_heads % num_kv_heads
    ):
        raise ValueError(
            "paged_attention: the caches must agree in blocks, block size and heads, k_cache's "
            "head dimension must be q's, and q's heads a multiple of theirs, got "
            f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}"
        )
    if k_cache.dtype != v_cache.dtype or (k_scales is None and q.dtype != k_cache.dtype):
        raise ValueError(
            f"paged_attention: q is {q.dtype}, k_cache {k_cache.dtype}, v_cache {v_cache.dtype}; "
            "they must have one dtype, or the caches that of codes"
        )
    if q.stride(2) != 1 or k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError(
            "paged_attention: the last dimension of q and the caches must have stride 1, got "
            f"{q.stride()}, {k_cache.stride()}, {v_cache.stride()}"
        )
    check_rows("paged_attention", block_tables, query_start, kv_lens, num_decode_rows)
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: window must be at least 1, got {window}")
    if alibi_slopes is not None and (
        alibi_slopes.shape != (num_heads,) or alibi_slopes.dtype != torch.float32
    ):
        raise ValueError(
            f"paged_attention: alibi_slopes must be [{num_heads}] float32, got "
            f"{tuple(alibi_slopes.shape)} {alibi_slopes.dtype}"
        )
    if prefix_lens is not None and prefix_lens.shape != kv_lens.shape:
        raise ValueError(
            f"paged_attention: prefix_lens must be [{len(kv_lens)}], got {tuple(prefix_lens.shape)}"
        )
    if out is None:
        out = q.new_empty((num_tokens, num_heads, v_head_dim))
    elif out.shape != (num_tokens, num_heads, v_head_dim) or not out.is_contiguous():
        raise ValueError(
            f"paged_attention: out must be contiguous [{num_tokens}, {num_heads}, {v_head_dim}], "
            f"got {tuple(out.shape)} with strides {out.stride()}"
        )
    if deterministic and k_scales is not None:
        raise ValueError(f"paged_attention: batch invariance is not for codes ({k_cache.dtype})")
    if deterministic and not q.is_cuda:
        raise ValueError(f"paged_attention: batch invariance is for a GPU, q is on {q.device}")
    call = Call(
        q, k_cache, v_cache, out, block_tables, query_start, kv_lens, max_query_len, max_kv_len,
        num_decode_rows, scale, alibi_slopes, window, softcap, prefix_lens,
        {} if memo is None else memo, deterministic, k_scales, v_scales, chained,
    )  # fmt: skip
    if q.is_cuda:
        from engine_core.kernels.attention import triton

        triton.paged_attention(call)
    else:
        cpu.paged_attention(call)
    return out
