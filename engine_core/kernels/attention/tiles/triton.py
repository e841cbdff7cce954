"""Inputs of attention on a GPU, and the logits of tiles of keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Inputs(NamedTuple):
    """Inputs of a kernel: tensors and scales, as in the public wrapper, and strides.

    Attributes:
        q: ``[T, Hq, D]``.
        k_cache: ``[num_blocks, block_size, Hk, D]``.
        v_cache: ``[num_blocks, block_size, Hk, Dv]``.
        block_tables: ``[R, max_blocks]``.
        query_start: ``[R + 1]``.
        kv_lens: ``[R]``.
        prefix_lens: ``[R]`` or None.
        slopes: ``[Hq]`` or None.
        logit_scale: a dot product times this is a logit in units of log 2; or with a softcap the
            bound of such logits, around the tanh of half of the product times ``cap_scale``.
        cap_scale: see ``logit_scale``.
        q_strides: of tokens and heads.
        k_strides: of blocks, slots and heads.
        v_strides: likewise.
        k_scales: ``[num_blocks, Hk, block_size]`` of codes; None of numbers.
        v_scales: likewise.
        k_scales_strides: of blocks and heads.
        v_scales_strides: likewise.
    """

    q: Any
    k_cache: Any
    v_cache: Any
    block_tables: Any
    query_start: Any
    kv_lens: Any
    prefix_lens: Any
    slopes: Any
    logit_scale: Any
    cap_scale: Any
    q_strides: Any
    k_strides: Any
    v_strides: Any
    k_scales: Any = None
    v_scales: Any = None
    k_scales_strides: Any = (0, 0)
    v_scales_strides: Any = (0, 0)


class Shape(NamedTuple):
    """Constants that a kernel is compiled for; ``block_d`` and ``block_dv`` hold a head.

    Attributes:
        precision: of products of float32.
    """

    num_heads: int
    group_size: int
    block_size: int
    d: int
    dv: int
    block_d: int
    block_dv: int
    has_alibi: bool
    has_window: bool
    has_softcap: bool
    has_prefix: bool
    precision: str


class Queries(NamedTuple):
    """Queries of a row and a KV head, and the keys and values that they see.

    Attributes:
        q: ``[M, BLOCK_D]``, of the type in which keys and weights are multiplied.
        scales: ``[M]``, what a product is to be multiplied with if keys are codes.
        positions: ``[M]``.
        slopes: ``[M]``, in units of log 2.
        k: the KV head's keys in block 0.
        v: its values there.
        kv_head: the KV head.
        table: the row's blocks.
        window: sliding window in tokens.
        prefix_len: leading tokens that all queries see.
    """

    q: Any
    scales: Any
    positions: Any
    slopes: Any
    k: Any
    v: Any
    kv_head: Any
    table: Any
    window: Any
    prefix_len: Any


@triton.jit
def load_queries(inputs, row_ptr, rows, heads, mask, SHAPE: tl.constexpr):
    """Queries ``[M, BLOCK_D]`` at ``rows`` behind ``row_ptr``, their scales, and heads' slopes.

    Codes of e4m3 become float16 in one instruction, and bfloat16 in three: there queries are
    float16 too, by scales, so that none is too large.
    """
    dims = tl.arange(0, SHAPE.block_d)
    ptrs = row_ptr + rows[:, None] + dims[None, :]
    q = tl.load(ptrs, mask=mask[:, None] & (dims < SHAPE.d)[None, :], other=0.0)
    scales = tl.full([heads.shape[0]], 1.0, dtype=tl.float32)
    if inputs.k_cache.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        numbers = q.to(tl.float32)
        largest = tl.max(tl.abs(numbers), axis=1)
        scales = tl.where(largest > 0.0, largest, 1.0)
        q = (numbers / scales[:, None]).to(tl.float16)
    slopes = tl.zeros([heads.shape[0]], dtype=tl.float32)
    if SHAPE.has_alibi:
        slopes = tl.load(inputs.slopes + heads, mask=mask, other=0.0) * 1.4426950408889634
    return q, scales, slopes


@triton.jit
def load_pairs(
    inputs,
    table_ptr,
    kv_head,
    first_pair,
    query_begin,
    num_queries,
    start_pos,
    window,
    prefix_len,
    SHAPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """BLOCK_M (query, head) pairs of a row and a KV head, heads of a query adjacent.

    Returns the :class:`Queries`, their tokens, heads, and which of them there are.
    """
    pairs = first_pair + tl.arange(0, BLOCK_M)
    queries = pairs // SHAPE.group_size
    mask = queries < num_queries
    heads = kv_head * SHAPE.group_size + pairs % SHAPE.group_size
    tokens = (query_begin + queries).to(tl.int64)
    rows = tokens * inputs.q_strides[0] + heads * inputs.q_strides[1]
    q, scales, slopes = load_queries(inputs, inputs.q, rows, heads, mask, SHAPE)
    k = inputs.k_cache + kv_head * inputs.k_strides[2]
    v = inputs.v_cache + kv_head * inputs.v_strides[2]
    held = Queries(
        q, scales, start_pos + queries, slopes, k, v, kv_head, table_ptr, window, prefix_len
    )
    return held, tokens, heads, mask


@triton.jit
def divided(acc, denominator):
    """Values that queries attended to, ``acc [M, BLOCK_DV]``; zeros for those that saw nothing."""
    return acc / tl.where(denominator > 0.0, denominator, 1.0)[:, None]


@triton.jit
def store_rows(out_ptr, rows, y, mask, SHAPE: tl.constexpr):
    """Store ``y [M, BLOCK_DV]`` as those rows of ``out [..., Dv]``."""
    dims = tl.arange(0, SHAPE.block_dv)
    tl.store(
        out_ptr + rows[:, None] * SHAPE.dv + dims[None, :],
        y.to(out_ptr.dtype.element_ty),
        mask=mask[:, None] & (dims < SHAPE.dv)[None, :],
    )


@triton.jit
def block_at(table_ptr, position, high, SHAPE: tl.constexpr):
    """The block of the token at ``position``, or of the last before ``high`` if that is less."""
    position = tl.maximum(tl.minimum(position, high - 1), 0)
    return tl.load(table_ptr + position // SHAPE.block_size).to(tl.int64)


@triton.jit
def load_tokens(
    cache_ptr,
    strides,
    table_ptr,
    block,
    start,
    in_range,
    SHAPE: tl.constexpr,
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
    if SHAPE.block_size % BLOCK_N == 0:
        cache_ptr += block * strides[0] + start % SHAPE.block_size * strides[1]
        rows = in_tile * strides[1]
    else:
        positions = start + in_tile
        blocks = tl.load(table_ptr + positions // SHAPE.block_size, mask=in_range, other=0).to(
            tl.int64
        )
        rows = blocks * strides[0] + (positions % SHAPE.block_size).to(tl.int64) * strides[1]
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
def load_scales(
    scales_ptr,
    strides,
    queries,
    block,
    start,
    in_range,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Scales ``[BLOCK_N]`` of the tokens that :func:`load_tokens` loads; 1 where it gives zeros."""
    in_tile = tl.arange(0, BLOCK_N)
    scales_ptr += queries.kv_head * strides[1]
    if SHAPE.block_size % BLOCK_N == 0:
        ptrs = scales_ptr + block * strides[0] + start % SHAPE.block_size + in_tile
    else:
        positions = start + in_tile
        blocks = tl.load(queries.table + positions // SHAPE.block_size, mask=in_range, other=0)
        ptrs = scales_ptr + blocks.to(tl.int64) * strides[0] + positions % SHAPE.block_size
    return tl.load(ptrs, mask=in_range, other=1.0) if MASKED else tl.load(ptrs)


@triton.jit
def tile_logits(
    inputs,
    queries,
    block,
    start,
    in_range,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Logits of every query for the tokens from ``start`` on, -inf where they are not visible.

    :func:`load_tokens` says what ``block`` is. Without MASKED they are all visible.
    """
    positions = start + tl.arange(0, BLOCK_N)
    # Without a mask: what is stored beyond the row may be anything, since its logits become -inf.
    k = load_tokens(
        queries.k, inputs.k_strides, queries.table, block, start, in_range, SHAPE, SHAPE.d,
        SHAPE.block_d, BLOCK_N, False,
    )  # fmt: skip
    # Codes are the same numbers in 16 bits.
    logits = tl.dot(queries.q, tl.trans(k.to(queries.q.dtype)), input_precision=SHAPE.precision)
    if inputs.k_scales is not None:
        scales = load_scales(
            inputs.k_scales, inputs.k_scales_strides, queries, block, start, in_range, SHAPE,
            BLOCK_N, False,
        )  # fmt: skip
        logits *= queries.scales[:, None] * scales[None, :]
    if SHAPE.has_softcap:
        # tanh(x) = 2 * sigmoid(2 * x) - 1
        logits = inputs.logit_scale * (2.0 * tl.sigmoid(logits * inputs.cap_scale) - 1.0)
    else:
        logits = logits * inputs.logit_scale
    if SHAPE.has_alibi:
        distance = (positions[None, :] - queries.positions[:, None]).to(tl.float32)
        logits += queries.slopes[:, None] * distance
    if MASKED:
        visible = positions[None, :] <= queries.positions[:, None]
        if SHAPE.has_window:
            after = positions[None, :] > queries.positions[:, None] - queries.window
            visible = visible & after
        if SHAPE.has_prefix:
            visible = visible | (positions < queries.prefix_len)[None, :]
        visible = visible & in_range[None, :]
        logits = tl.where(visible, logits, float("-inf"))
    return logits
