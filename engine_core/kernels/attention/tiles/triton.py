"""Inputs of attention on a GPU, and the logits of tiles of keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from engine_core.kernels.codes.triton import high_codes, low_codes


class Inputs(NamedTuple):
    """Inputs of a kernel: tensors and scales, as in the public wrapper, and strides.

    Attributes:
        q: ``[T, Hq, D]``.
        k_cache: ``[num_blocks, block_size, Hk, D]``; of codes pairs of neighbours, ``D / 2`` int16.
        v_cache: ``[num_blocks, block_size, Hk, Dv]``; likewise.
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
        code: "e4m3" or "int8" if keys and values are codes; "" for numbers.
        native: whether codes become numbers by instructions of an NVIDIA GPU.
        rest_d: columns, a power of 2, of a second part of keys whose first has ``block_d / 2``; 0
            if one part has all. A head of 80 is 64 and 16 then, and padded in no product.
        rest_dv: likewise of values.
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
    code: str = ""
    native: bool = False
    rest_d: int = 0
    rest_dv: int = 0


class Seen(NamedTuple):
    """Keys and values of a row that the queries of a KV head may see.

    Attributes:
        k: the KV head's keys in block 0.
        v: its values there.
        kv_head: the KV head.
        table: the row's blocks.
        window: sliding window in tokens.
        prefix_len: leading tokens that all queries see.
    """

    k: Any
    v: Any
    kv_head: Any
    table: Any
    window: Any
    prefix_len: Any


class Queries(NamedTuple):
    """Queries of a row and a KV head, and the keys and values that they see.

    Attributes:
        q: ``[M, BLOCK_D]``, of the type in which keys and weights are multiplied; if keys are
            codes, the even dimensions ``[M, BLOCK_D / 2]``, if they have two parts the first.
        q_odd: the odd dimensions, if keys are codes, or the second part.
        scales: ``[M]``, what a product is to be multiplied with if keys are codes.
        positions: ``[M]``.
        slopes: ``[M]``, in units of log 2.
        seen: the keys and values.
    """

    q: Any
    q_odd: Any
    scales: Any
    positions: Any
    slopes: Any
    seen: Any


@triton.jit
def seen_of(inputs, kv_head, table, window, prefix_len):
    """Keys and values of a KV head and a row whose blocks are in ``table``."""
    k = inputs.k_cache + kv_head * inputs.k_strides[2]
    v = inputs.v_cache + kv_head * inputs.v_strides[2]
    return Seen(k, v, kv_head, table, window, prefix_len)


@triton.jit
def load_queries(inputs, row_ptr, rows, heads, mask, SHAPE: tl.constexpr):
    """Queries at ``rows`` behind ``row_ptr``, even and odd, their scales, and heads' slopes.

    Codes become float16 in few instructions: beside them queries of bfloat16 are float16 too, by
    scales, so that none is too large.
    """
    CODE: tl.constexpr = SHAPE.code
    scales = tl.full([heads.shape[0]], 1.0, dtype=tl.float32)
    if SHAPE.rest_d > 0:
        MAIN: tl.constexpr = SHAPE.block_d // 2
        dims = tl.arange(0, MAIN)
        rest = MAIN + tl.arange(0, SHAPE.rest_d)
        inside = mask[:, None] & (rest < SHAPE.d)[None, :]
        q = tl.load(row_ptr + rows[:, None] + dims[None, :], mask=mask[:, None], other=0.0)
        q_odd = tl.load(row_ptr + rows[:, None] + rest[None, :], mask=inside, other=0.0)
    elif CODE == "":
        dims = tl.arange(0, SHAPE.block_d)
        inside = mask[:, None] & (dims < SHAPE.d)[None, :]
        q = tl.load(row_ptr + rows[:, None] + dims[None, :], mask=inside, other=0.0)
        q_odd = q
    else:
        HALF: tl.constexpr = SHAPE.block_d // 2
        ELEMENT: tl.constexpr = row_ptr.dtype.element_ty
        pairs = tl.arange(0, HALF)
        inside = mask[:, None] & (pairs < SHAPE.d // 2)[None, :]
        if tl.float32 == ELEMENT:
            ptrs = row_ptr + rows[:, None] + 2 * pairs[None, :]
            q = tl.load(ptrs, mask=inside, other=0.0)
            q_odd = tl.load(ptrs + 1, mask=inside, other=0.0)
        else:
            # Neighbours as one number, so that several come with a load.
            ptrs = row_ptr.to(tl.pointer_type(tl.int32)) + (rows // 2)[:, None] + pairs[None, :]
            both = tl.load(ptrs, mask=inside, other=0)
            q = both.to(tl.int16).to(ELEMENT, bitcast=True)
            q_odd = (both >> 16).to(tl.int16).to(ELEMENT, bitcast=True)
        if q.dtype == tl.bfloat16:
            even, odd = q.to(tl.float32), q_odd.to(tl.float32)
            largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)
            largest = tl.where(largest > 0.0, largest, 1.0)
            q = (even / largest[:, None]).to(tl.float16)
            q_odd = (odd / largest[:, None]).to(tl.float16)
            scales *= largest
    slopes = tl.zeros([heads.shape[0]], dtype=tl.float32)
    if SHAPE.has_alibi:
        slopes = tl.load(inputs.slopes + heads, mask=mask, other=0.0) * 1.4426950408889634
    return q, q_odd, scales, slopes


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
    q, q_odd, scales, slopes = load_queries(inputs, inputs.q, rows, heads, mask, SHAPE)
    seen = seen_of(inputs, kv_head, table_ptr, window, prefix_len)
    held = Queries(q, q_odd, scales, start_pos + queries, slopes, seen)
    return held, tokens, heads, mask


@triton.jit
def divided(acc, denominator):
    """Values that queries attended to, ``acc [M, BLOCK_DV]``; zeros for those that saw nothing."""
    return acc / tl.where(denominator > 0.0, denominator, 1.0)[:, None]


@triton.jit
def _store_columns(out_ptr, rows, y, mask, FIRST: tl.constexpr, DV: tl.constexpr):
    """Store ``y [M, ...]`` as the columns from FIRST on of those rows of ``out [..., Dv]``."""
    dims = FIRST + tl.arange(0, y.shape[1])
    tl.store(
        out_ptr + rows[:, None] * DV + dims[None, :],
        y.to(out_ptr.dtype.element_ty),
        mask=mask[:, None] & (dims < DV)[None, :],
    )


@triton.jit
def store_rows(out_ptr, rows, y, mask, SHAPE: tl.constexpr):
    """Store ``y [M, BLOCK_DV]`` as those rows of ``out [..., Dv]``."""
    _store_columns(out_ptr, rows, y, mask, 0, SHAPE.dv)


@triton.jit
def store_values(out_ptr, rows, acc, denominator, mask, SHAPE: tl.constexpr):
    """Store sums that :func:`add_values` made, divided, as those rows of ``out [..., Dv]``."""
    if SHAPE.rest_dv > 0:
        MAIN: tl.constexpr = SHAPE.block_dv // 2
        _store_columns(out_ptr, rows, acc[0] / denominator[:, None], mask, 0, SHAPE.dv)
        _store_columns(out_ptr, rows, acc[1] / denominator[:, None], mask, MAIN, SHAPE.dv)
    else:
        store_rows(out_ptr, rows, all_values(acc, SHAPE) / denominator[:, None], mask, SHAPE)


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
    TURNED: tl.constexpr = False,
):
    """Keys or values ``[BLOCK_N, BLOCK_D]`` of the tokens from ``start`` on, a multiple of BLOCK_N.

    With MASKED they are zeros where ``in_range [BLOCK_N]`` says no; without, whatever is stored
    there, or in block 0. Where a block holds whole tiles this one is in ``block``: its addresses
    are one of the whole program and offsets that are the same in all tiles. TURNED gives
    ``[BLOCK_D, BLOCK_N]``.
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
    if TURNED:
        ptrs = cache_ptr + rows[None, :] + dims[:, None]
        inside, in_range = (dims < D)[:, None], in_range[None, :]
    else:
        ptrs = cache_ptr + rows[:, None] + dims[None, :]
        inside, in_range = (dims < D)[None, :], in_range[:, None]
    if BLOCK_D == D:
        values = tl.load(ptrs, mask=in_range, other=0.0) if MASKED else tl.load(ptrs)
    else:
        mask = inside & in_range if MASKED else inside
        values = tl.load(ptrs, mask=mask, other=0.0)
    return values


@triton.jit
def load_scales(
    scales_ptr,
    strides,
    seen,
    block,
    start,
    in_range,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Scales ``[BLOCK_N]`` of the tokens that :func:`load_tokens` loads; 1 where it gives zeros.

    And where they are 0, if they are masked.
    """
    in_tile = tl.arange(0, BLOCK_N)
    scales_ptr += seen.kv_head * strides[1]
    if SHAPE.block_size % BLOCK_N == 0:
        ptrs = scales_ptr + block * strides[0] + start % SHAPE.block_size + in_tile
    else:
        positions = start + in_tile
        blocks = tl.load(seen.table + positions // SHAPE.block_size, mask=in_range, other=0)
        ptrs = scales_ptr + blocks.to(tl.int64) * strides[0] + positions % SHAPE.block_size
    if MASKED:
        scales = tl.load(ptrs, mask=in_range, other=1.0)
        # The null block, which stands for one that was given back, has zeros: no logarithm is
        # that of a scale of 0, and no token of it is seen.
        scales = tl.where(scales == 0.0, 1.0, scales)
    else:
        scales = tl.load(ptrs)
    return scales


@triton.jit
def no_values(M: tl.constexpr, SHAPE: tl.constexpr):
    """Zeros that :func:`add_values` adds to; a tuple."""
    BLOCK_DV: tl.constexpr = SHAPE.block_dv
    REST: tl.constexpr = SHAPE.rest_dv
    if REST > 0:
        main = tl.zeros([M, BLOCK_DV // 2], dtype=tl.float32)
        acc = (main, tl.zeros([M, REST], dtype=tl.float32))
    elif SHAPE.code == "":
        acc = (tl.zeros([M, BLOCK_DV], dtype=tl.float32),)  # type: ignore[assignment]
    else:
        half = tl.zeros([M, BLOCK_DV // 2], dtype=tl.float32)
        acc = (half, half)
    return acc


@triton.jit
def add_values(
    acc,
    rescale,
    weights,
    inputs,
    queries,
    block,
    start,
    in_range,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """``acc`` times ``rescale [M]``, and values weighted by ``weights [M, BLOCK_N]`` added.

    :func:`load_tokens` says what the tile's other arguments are.
    """
    seen = queries.seen
    CODE: tl.constexpr = SHAPE.code
    # The first of two parts is as wide as a half, of which there is no more.
    HALVES: tl.constexpr = CODE != "" or SHAPE.rest_dv > 0
    BLOCK_DV: tl.constexpr = SHAPE.block_dv // 2 if HALVES else SHAPE.block_dv
    DV: tl.constexpr = BLOCK_DV if SHAPE.rest_dv > 0 else SHAPE.dv // 2 if HALVES else SHAPE.dv
    v = load_tokens(
        seen.v, inputs.v_strides, seen.table, block, start, in_range, SHAPE, DV, BLOCK_DV,
        BLOCK_N, MASKED,
    )  # fmt: skip
    weights = weights.to(queries.q.dtype)
    rescale = rescale[:, None]
    if SHAPE.rest_dv > 0:
        rest = load_tokens(
            seen.v + BLOCK_DV, inputs.v_strides, seen.table, block, start, in_range, SHAPE,
            SHAPE.dv - BLOCK_DV, SHAPE.rest_dv, BLOCK_N, MASKED,
        )  # fmt: skip
        acc = (
            tl.dot(weights, v, acc[0] * rescale, input_precision=SHAPE.precision),
            tl.dot(weights, rest, acc[1] * rescale, input_precision=SHAPE.precision),
        )
    elif CODE == "":
        acc = (tl.dot(weights, v, acc[0] * rescale, input_precision=SHAPE.precision),)
    else:
        low = low_codes(v, CODE, SHAPE.native).to(weights.dtype)
        high = high_codes(v, CODE, SHAPE.native).to(weights.dtype)
        acc = (
            tl.dot(weights, low, acc[0] * rescale, input_precision=SHAPE.precision),
            tl.dot(weights, high, acc[1] * rescale, input_precision=SHAPE.precision),
        )
    return acc


@triton.jit
def all_values(acc, SHAPE: tl.constexpr):
    """Sums that :func:`add_values` made, ``[M, BLOCK_DV]``."""
    CODE: tl.constexpr = SHAPE.code
    if CODE == "":
        values = acc[0]
    else:
        M: tl.constexpr = acc[0].shape[0]
        BLOCK_DV: tl.constexpr = SHAPE.block_dv
        values = tl.reshape(tl.join(acc[0], acc[1]), [M, BLOCK_DV])
    return values


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
    seen = queries.seen
    CODE: tl.constexpr = SHAPE.code
    positions = start + tl.arange(0, BLOCK_N)
    # Without a mask: what is stored beyond the row may be anything, since its logits become -inf.
    HALVES: tl.constexpr = CODE != "" or SHAPE.rest_d > 0
    BLOCK_D: tl.constexpr = SHAPE.block_d // 2 if HALVES else SHAPE.block_d
    D: tl.constexpr = BLOCK_D if SHAPE.rest_d > 0 else SHAPE.d // 2 if HALVES else SHAPE.d
    k = load_tokens(
        seen.k, inputs.k_strides, seen.table, block, start, in_range, SHAPE, D, BLOCK_D,
        BLOCK_N, False,
    )  # fmt: skip
    if SHAPE.rest_d > 0:
        rest = load_tokens(
            seen.k + BLOCK_D, inputs.k_strides, seen.table, block, start, in_range, SHAPE,
            SHAPE.d - BLOCK_D, SHAPE.rest_d, BLOCK_N, False,
        )  # fmt: skip
        logits = tl.dot(queries.q, tl.trans(k), input_precision=SHAPE.precision)
        logits = tl.dot(queries.q_odd, tl.trans(rest), logits, input_precision=SHAPE.precision)
    elif CODE == "":
        logits = tl.dot(queries.q, tl.trans(k), input_precision=SHAPE.precision)
    else:
        low = low_codes(k, CODE, SHAPE.native).to(queries.q.dtype)
        high = high_codes(k, CODE, SHAPE.native).to(queries.q.dtype)
        logits = tl.dot(queries.q, tl.trans(low), input_precision=SHAPE.precision)
        logits = tl.dot(queries.q_odd, tl.trans(high), logits, input_precision=SHAPE.precision)
    if inputs.k_scales is not None:
        scales = load_scales(
            inputs.k_scales, inputs.k_scales_strides, seen, block, start, in_range, SHAPE,
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
            after = positions[None, :] > queries.positions[:, None] - seen.window
            visible = visible & after
        if SHAPE.has_prefix:
            visible = visible | (positions < seen.prefix_len)[None, :]
        visible = visible & in_range[None, :]
        logits = tl.where(visible, logits, float("-inf"))
    return logits
