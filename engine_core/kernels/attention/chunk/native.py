"""Attention of a prompt's tokens in float32 over a paged cache, by a kernel compiled for AVX2."""

from __future__ import annotations

from functools import cache

import torch

from engine_core.kernels.attention.call import Call
from engine_core.kernels.compiled import Kernel, cpu_features, threads
from engine_core.kernels.compiled.sizes import PANEL, ROWS

# Tokens whose keys and values are in panels at once: with heads of 64 these are 128 KiB.
TILE = 256
# Products of queries and keys per thread, at least.
_LEAST = 2**17


@cache
def wanted() -> bool:
    """Whether this CPU is one for which the kernel is faster than torch's."""
    return {"+avx2", "+fma"} <= cpu_features() and "+avx512f" not in cpu_features()


def takes(call: Call) -> bool:
    """Whether the kernel computes this call's prompts, if they have no prefix that all see."""
    return (
        call.q.dtype == call.k_cache.dtype == torch.float32
        and call.alibi_slopes is None
        and call.scale > 0
        and call.v_cache.shape[3] % PANEL == 0
        and wanted()
    )


def attend_chunk(call: Call, row: int, first: int, behind: int) -> None:
    """Attend queries ``[first, behind)``, which are the last tokens of a row."""
    q, out = call.q[first:behind], call.out[first:behind]
    k_cache, v_cache, table = call.k_cache, call.v_cache, call.block_tables[row]
    num_queries, num_heads, head_dim = q.shape
    block_size, num_kv_heads, v_head_dim = v_cache.shape[1:]
    kv_len = int(call.kv_lens[row])
    parts = threads(num_queries * kv_len * num_heads * head_dim // 2, _LEAST)
    group = num_heads // num_kv_heads
    private = TILE * (head_dim + v_head_dim + ROWS) + v_head_dim + 2 * num_queries * group
    scratch = q.new_empty(parts * private)
    _CHUNK.run(
        (),
        parts,
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        out.data_ptr(),
        table.data_ptr(),
        scratch.data_ptr(),
        num_queries,
        kv_len,
        num_kv_heads,
        group,
        block_size,
        call.window or 0,
        private,
        head_dim,
        v_head_dim,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *out.stride()[:2],
        call.scale,
    )


_CHUNK = Kernel("engine_core.kernels.attention.chunk.numba:make", "25qd")
