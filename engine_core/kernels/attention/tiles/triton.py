"""Tiles of keys and values, and their logits, for attention on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_at(table_ptr, position, high, BLOCK_SIZE: tl.constexpr):
    """The block of the token at ``position``, or of the last before ``high`` if that is less."""
    position = tl.maximum(tl.minimum(position, high - 1), 0)
    return tl.load(table_ptr + position // BLOCK_SIZE).to(tl.int64)


@triton.jit
def load_tokens(
    cache_ptr,
    table_ptr,
    block,
    start,
    in_range,
    block_stride,
    slot_stride,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys or values ``[BLOCK_N, BLOCK_D]`` of the tokens from ``start`` on, a multiple of BLOCK_N.

    With MASKED they are zeros where ``in_range [BLOCK_N]`` says no; without, whatever is stored
    there, or in block 0. Where a block holds whole tiles this one is in ``block``: its addresses
    are one of the whole program and offsets that are the same in all tiles.
    """
    in_tile = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    if BLOCK_SIZE % BLOCK_N == 0:
        cache_ptr += block * block_stride + start % BLOCK_SIZE * slot_stride
        rows = in_tile * slot_stride
    else:
        positions = start + in_tile
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
        rows = blocks * block_stride + (positions % BLOCK_SIZE).to(tl.int64) * slot_stride
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
    block,
    start,
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
    BLOCK_N: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Logits of every query row for the tokens from ``start`` on, -inf where they are not visible.

    :func:`load_tokens` says what ``block`` is. Without MASKED they are all visible. A dot product
    becomes a logit by ``scale * log2(e)`` in ``logit_scale``; or with a softcap by ``softcap *
    log2(e)`` there, around the tanh of half of it times ``cap_scale``.
    """
    positions = start + tl.arange(0, BLOCK_N)
    # Without a mask: what is stored beyond the row may be anything, since its logits become -inf.
    k = load_tokens(
        k_cache_ptr, table_ptr, block, start, in_range, k_block_stride, k_slot_stride,
        BLOCK_SIZE, D, BLOCK_D, BLOCK_N, False,
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
