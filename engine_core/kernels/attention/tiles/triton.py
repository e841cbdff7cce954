"""Tiles of keys and values, and their logits, for attention on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tokens(
    cache_ptr,
    table_ptr,
    positions,
    in_range,
    block_stride,
    slot_stride,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys or values ``[BLOCK_N, BLOCK_D]`` of the tokens at ``positions``, zeros elsewhere.

    Without MASKED all positions are in range.
    """
    dims = tl.arange(0, BLOCK_D)
    if MASKED:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=in_range, other=0)
    else:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE)
    rows = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE).to(tl.int64) * slot_stride
    ptrs = cache_ptr + rows[:, None] + dims[None, :]
    if MASKED:
        if BLOCK_D == D:
            values = tl.load(ptrs, mask=in_range[:, None], other=0.0)
        else:
            values = tl.load(ptrs, mask=in_range[:, None] & (dims < D)[None, :], other=0.0)
    else:
        if BLOCK_D == D:
            values = tl.load(ptrs)
        else:
            values = tl.load(ptrs, mask=(dims < D)[None, :], other=0.0)
    return values


@triton.jit
def tile_logits(
    q,
    query_pos,
    slopes,
    positions,
    in_range,
    k_cache_ptr,
    table_ptr,
    k_block_stride,
    k_slot_stride,
    logit_scale,
    cap_scale,
    window,
    prefix_len,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Logits of every query row for the tokens at ``positions``, -inf where they are not visible.

    Without MASKED they are all visible. A dot product becomes a logit by ``scale * log2(e)`` in
    ``logit_scale``; or with a softcap by ``softcap * log2(e)`` there, around the tanh of half of it
    times ``cap_scale``.
    """
    k = load_tokens(
        k_cache_ptr, table_ptr, positions, in_range, k_block_stride, k_slot_stride,
        BLOCK_SIZE, D, BLOCK_D, MASKED,
    )  # fmt: skip
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if HAS_SOFTCAP:
        # tanh(x) = 2 * sigmoid(2 * x) - 1
        logits = logit_scale * (2.0 * tl.sigmoid(logits * cap_scale) - 1.0)
    else:
        logits = logits * logit_scale
    if HAS_ALIBI:
        distance = (positions[None, :] - query_pos[:, None]).to(tl.float32)
        logits += slopes[:, None] * distance
    if MASKED:
        visible = positions[None, :] <= query_pos[:, None]
        if HAS_WINDOW:
            visible = visible & (positions[None, :] > query_pos[:, None] - window)
        if HAS_PREFIX:
            visible = visible | (positions < prefix_len)[None, :]
        visible = visible & in_range[None, :]
        logits = tl.where(visible, logits, float("-inf"))
    return logits
