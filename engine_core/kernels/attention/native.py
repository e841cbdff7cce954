"""Attention of decode rows over a paged cache, by kernels compiled for a CPU.

Keys and values are read where they lie, each once, for all query heads that share them. The tokens
of all rows and KV heads stand in one line, of which each thread takes an equal part; a row that
two threads share leaves each one's sum and maximum, which are joined afterwards.
"""

from __future__ import annotations

import torch

from engine_core.kernels.attention.call import Call
from engine_core.kernels.compiled import Kernel, threads
from engine_core.kernels.compiled.sizes import DOTS, LANES

# Products of queries and keys per thread, at least.
_LEAST = 2**15
# Tokens whose logits are held at once.
TILE = 256
# Places of a query's logits: tokens are multiplied by fours, of which the last may be no tokens.
LOGITS = TILE + DOTS
# Query heads that are attended together at most: what they hold stays in a core's cache.
_TOGETHER = 32
# Heads that are smaller, of tiny models, share code that is given its sizes: compiling takes 3 s.
_OWN_CODE = 64


def decode_attention(call: Call) -> None:
    """Attend the rows that have one query each, which come first."""
    q, k_cache, v_cache, num_rows = call.q, call.k_cache, call.v_cache, call.num_decode_rows
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads, v_head_dim = v_cache.shape[1:]
    group = num_heads // num_kv_heads
    alibi_slopes, window = call.alibi_slopes, call.window
    longest = call.max_kv_len if window is None else min(call.max_kv_len, window)
    parts = threads(num_rows * longest * num_heads * head_dim, _LEAST)
    own_code = max(head_dim, v_head_dim) >= _OWN_CODE
    vectors = own_code and k_cache.dtype == q.dtype
    vectors = vectors and head_dim % LANES == 0 and v_head_dim % LANES == 0
    together = max(min(num_kv_heads, _TOGETHER // group), 1) if vectors else 1
    sizes = (group, head_dim, v_head_dim)
    # After what each thread needs, how many shared the work.
    stride = scratch_sizes(*sizes, together)[2]
    scratch = q.new_empty(parts * stride + 1, dtype=torch.float32)
    special = sizes if own_code else (0, 0, 0)
    k_scales, v_scales = call.k_scales, call.v_scales
    arguments = (
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        call.out.data_ptr(),
        call.block_tables.data_ptr(),
        call.kv_lens.data_ptr(),
        0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        scratch.data_ptr(),
        num_rows,
        num_kv_heads,
        block_size,
        call.block_tables.stride(0),
        window or 0,
        parts,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        0 if k_scales is None else k_scales.data_ptr(),
        0 if k_scales is None else k_scales.stride(0),
        0 if v_scales is None else v_scales.data_ptr(),
        0 if v_scales is None else v_scales.stride(0),
        call.scale,
        torch.inf if call.softcap is None else call.softcap,
        *sizes,
        together,
    )
    if vectors:
        _VECTORS.run((q.dtype, *special), parts, *arguments)
    else:
        _ATTEND.run((q.dtype, k_cache.dtype, *special), parts, *arguments)
    if parts > 1:
        _JOIN.run((q.dtype,), 1, *arguments)


def scratch_sizes(
    group: int, head_dim: int, v_head_dim: int, together: int
) -> tuple[int, int, int]:
    """Numbers of a thread's own, of a piece of a shared row, and of all that a thread needs.

    Its own are queries, logits, sums, and maximum and sum of each query of so many KV heads, and
    the numbers that a head's codes are. A piece is the sums of a row and KV head so far, and each
    query's maximum and sum; a thread may share its first row and its last.
    """
    private = together * group * (head_dim + LOGITS + v_head_dim + 2) + max(head_dim, v_head_dim)
    piece = group * (v_head_dim + 2)
    return private, piece, private + 2 * piece


# Sizes come last.
_ARGUMENTS = "26q2d8x4q"
_ATTEND = Kernel("engine_core.kernels.attention.numba:make_attend", _ARGUMENTS)
_VECTORS = Kernel("engine_core.kernels.attention.numba:make_vectors", _ARGUMENTS)
_JOIN = Kernel("engine_core.kernels.attention.numba:make_join", _ARGUMENTS)
