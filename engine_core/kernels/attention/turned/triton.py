"""Decode attention whose products have tokens as rows and heads as columns.

Matrix units multiply 16 rows by 8 columns at least. A KV head has 4 or 8 query heads mostly: as
columns they fill what is multiplied, and as rows a quarter or a half of it. So there are half as
many products, logits and sums for the same bytes. It matters most where codes are converted
besides. Of numbers the loop has 28% fewer instructions and 24 to 32% fewer registers, so that more
programs ask for memory at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from engine_core.kernels.attention.tiles.triton import (
    block_at,
    load_queries,
    load_scales,
    load_tokens,
)
from engine_core.kernels.codes.triton import high_codes, log2_of, low_codes
from engine_core.kernels.launch.triton import wait, wait_within


class Row(NamedTuple):
    """A row and a KV head: where its queries are, and all that they may see.

    Attributes:
        q: the row's queries.
        heads: ``[BLOCK_G]``, those of the KV head.
        head_mask: which of them there are.
        position: of the queries, the last token's.
        seen: the keys and values.
    """

    q: Any
    heads: Any
    head_mask: Any
    position: Any
    seen: Any


class Asking(NamedTuple):
    """The queries of a row and a KV head, as columns.

    Attributes:
        q: ``[D, BLOCK_G]``; over codes of the even dimensions, ``[D / 2, BLOCK_G]``.
        q_odd: over codes of the odd ones.
        factors: ``[BLOCK_G]``, what products of queries and keys are multiplied by.
        slopes: ``[BLOCK_G]``, in units of log 2.
    """

    q: Any
    q_odd: Any
    factors: Any
    slopes: Any


@triton.jit
def _load_queries(inputs, row, waited, SHAPE: tl.constexpr):
    """The queries of a row, as rows if they are numbers, and as columns.

    ``waited`` is 0, once the kernel that writes them is complete.
    """
    rows = row.heads * inputs.q_strides[1]
    q, q_odd, scales, slopes = load_queries(
        inputs, row.q + waited, rows, row.heads, row.head_mask, SHAPE
    )
    factors = scales * (inputs.cap_scale if SHAPE.has_softcap else inputs.logit_scale)
    return q, Asking(tl.trans(q), tl.trans(q_odd), factors, slopes)


@triton.jit
def _capped(logits, inputs, SHAPE: tl.constexpr):
    if SHAPE.has_softcap:
        # tanh(x) = 2 * sigmoid(2 * x) - 1
        logits = inputs.logit_scale * (2.0 * tl.sigmoid(logits) - 1.0)
    return logits


@triton.jit
def _load_last(inputs, row, block, waited, wanted, SHAPE: tl.constexpr):
    """Key and value of a row's last token, in that block; zeros unless it is ``wanted``, 1.

    ``waited`` is 0, once the kernel that stores it is complete.
    """
    slot = row.position % SHAPE.block_size + waited
    k_dims, v_dims = tl.arange(0, SHAPE.block_d), tl.arange(0, SHAPE.block_dv)
    k_ptrs = row.seen.k + block * inputs.k_strides[0] + slot * inputs.k_strides[1] + k_dims
    v_ptrs = row.seen.v + block * inputs.v_strides[0] + slot * inputs.v_strides[1] + v_dims
    k = tl.load(k_ptrs, mask=k_dims < wanted * SHAPE.d, other=0.0)
    return k, tl.load(v_ptrs, mask=v_dims < wanted * SHAPE.dv, other=0.0)


@triton.jit
def _see_last(
    inputs, q, factors, k, v, SHAPE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Values, weights' sums and greatest logits of queries that have seen their own token alone.

    These are what :func:`attend` begins with. Queries are ``q [BLOCK_G, D]``.
    """
    products = q.to(tl.float32) * k.to(tl.float32)[None, :]
    logits = _capped(tl.sum(products, axis=1) * factors, inputs, SHAPE)
    BLOCK_DV: tl.constexpr = SHAPE.block_dv
    values = tl.broadcast_to(v.to(tl.float32)[:, None], [BLOCK_DV, BLOCK_G])
    first = (tl.arange(0, BLOCK_N) == 0).to(tl.float32)
    return values, tl.broadcast_to(first[:, None], [BLOCK_N, BLOCK_G]), logits


@triton.jit
def _tile_logits(
    inputs,
    row,
    queries,
    exponents,
    block,
    start,
    in_range,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Logits ``[BLOCK_N, G]`` of the tokens from ``start`` on, -inf where they are not visible.

    ``exponents [BLOCK_N]`` of codes are added.
    """
    CODE: tl.constexpr = SHAPE.code
    IN_PAIRS: tl.constexpr = 1 if CODE == "" else 2
    k = load_tokens(
        row.seen.k, inputs.k_strides, row.seen.table, block, start, in_range, SHAPE,
        SHAPE.d // IN_PAIRS, SHAPE.block_d // IN_PAIRS, BLOCK_N, False,
    )  # fmt: skip
    if CODE == "":
        logits = tl.dot(k, queries.q, input_precision=SHAPE.precision)
    else:
        scales = load_scales(
            inputs.k_scales, inputs.k_scales_strides, row.seen, block, start, in_range, SHAPE,
            BLOCK_N, False,
        )  # fmt: skip
        low = low_codes(k, CODE, SHAPE.native).to(queries.q.dtype)
        high = high_codes(k, CODE, SHAPE.native).to(queries.q.dtype)
        # Two sums, so that no product waits for all before it.
        logits = tl.dot(low, queries.q, input_precision=SHAPE.precision) * scales[:, None]
        logits += tl.dot(high, queries.q_odd, input_precision=SHAPE.precision) * scales[:, None]
    logits = _capped(logits * queries.factors[None, :], inputs, SHAPE)
    positions = start + tl.arange(0, BLOCK_N)
    if SHAPE.has_alibi:
        logits += queries.slopes[None, :] * (positions - row.position).to(tl.float32)[:, None]
    if CODE != "":
        logits += exponents[:, None]
    visible = in_range
    if SHAPE.has_window:
        after = positions > row.position - row.seen.window
        if SHAPE.has_prefix:
            after = after | (positions < row.seen.prefix_len)
        visible = visible & after
    # What is stored beyond the row may be anything, NaN too.
    return tl.where(visible[:, None], logits, float("-inf"))


@triton.jit
def attend(
    inputs,
    row,
    low,
    high,
    SHAPE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Wait for the kernel before, and attend to the tokens in ``[low, high)``.

    ``low`` is a multiple of BLOCK_N. With EARLY the first tiles are asked for before the wait: all
    tokens but the last one are older than the kernel before, which stores that.

    Returns values times their weights ``[BLOCK_G, BLOCK_DV]``, the weights' sums, and the greatest
    logits, both ``[BLOCK_G]``.
    """
    CODE: tl.constexpr = SHAPE.code
    # Of numbers the even ones are all.
    IN_PAIRS: tl.constexpr = 1 if CODE == "" else 2
    DIMS: tl.constexpr = SHAPE.block_dv // IN_PAIRS
    even = tl.zeros([DIMS, BLOCK_G], dtype=tl.float32)
    odd = even
    sums = tl.zeros([BLOCK_N, BLOCK_G], dtype=tl.float32)
    maximum = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
    if EARLY:
        tl.static_assert(CODE == "", "a last token of codes is not seen alone")
        high_known = tl.minimum(high, row.position)
        # Queries are loaded with the first tile, so that there is one, if there are tokens at all.
        end = tl.maximum(high_known, tl.minimum(low + 1, high))
        BLOCK_D: tl.constexpr = SHAPE.block_d
        q = tl.zeros([BLOCK_D, BLOCK_G], dtype=inputs.q.dtype.element_ty)
        queries = Asking(q, q, maximum, maximum)
        last_block = tl.load(row.seen.table + tl.maximum(row.position, 0) // SHAPE.block_size)
        last_block = last_block.to(tl.int64)
    else:
        high_known = high
        end = high
    # Numbers of blocks are older than all kernels of a step.
    block = block_at(row.seen.table, low, high_known, SHAPE)
    if not EARLY:
        wait(PDL)
        _, queries = _load_queries(inputs, row, 0, SHAPE)
    for start in range(low, end, BLOCK_N):
        in_range = start + tl.arange(0, BLOCK_N) < high_known
        # Loaded one tile ahead, so that no key waits for it. Two ahead none would be in flight:
        # Triton keeps no loads so that others wait for over two rounds.
        next_block = block_at(row.seen.table, start + BLOCK_N, high_known, SHAPE)
        # What tiles in flight are asked for with stands before the loop when it is compiled.
        if EARLY and start == low:
            waited = wait_within(start, PDL)
            has_last = high > row.position
            k, v = _load_last(inputs, row, last_block, waited, has_last.to(tl.int32), SHAPE)
            q_rows, queries = _load_queries(inputs, row, waited, SHAPE)
            if has_last:
                even, sums, maximum = _see_last(
                    inputs, q_rows, queries.factors, k, v, SHAPE, BLOCK_G, BLOCK_N
                )
        exponents = maximum  # of codes alone
        if CODE != "":
            # Weights and scales in one exponent: no product of them is too small for 16 bits.
            scales = load_scales(
                inputs.v_scales, inputs.v_scales_strides, row.seen, block, start, in_range, SHAPE,
                BLOCK_N, True,
            )  # fmt: skip
            exponents = log2_of(scales, SHAPE.native)
        logits = _tile_logits(
            inputs, row, queries, exponents, block, start, in_range, SHAPE, BLOCK_N
        )
        new_maximum = tl.maximum(maximum, tl.max(logits, axis=0))
        # A query that has seen nothing yet: -inf - -inf would be NaN.
        subtrahend = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(logits - subtrahend[None, :])
        rescale = tl.exp2(maximum - subtrahend)
        if CODE == "":
            sums = sums * rescale[None, :] + weights
        else:
            sums = sums * rescale[None, :] + weights * tl.exp2(-exponents)[:, None]
        v = load_tokens(
            row.seen.v, inputs.v_strides, row.seen.table, block, start, in_range, SHAPE,
            SHAPE.dv // IN_PAIRS, DIMS, BLOCK_N, True, True,
        )  # fmt: skip
        weights = weights.to(queries.q.dtype)
        rescale = rescale[None, :]
        if CODE == "":
            even = tl.dot(v, weights, even * rescale, input_precision=SHAPE.precision)
        else:
            v_low = low_codes(v, CODE, SHAPE.native).to(weights.dtype)
            v_high = high_codes(v, CODE, SHAPE.native).to(weights.dtype)
            even = tl.dot(v_low, weights, even * rescale, input_precision=SHAPE.precision)
            odd = tl.dot(v_high, weights, odd * rescale, input_precision=SHAPE.precision)
        maximum = new_maximum
        block = next_block
    if EARLY:
        wait(PDL)  # without tokens nothing has waited
    if CODE == "":
        values = tl.trans(even)
    else:
        pairs = tl.permute(tl.join(even, odd), (1, 0, 2))
        values = tl.reshape(pairs, [BLOCK_G, 2 * DIMS])
    return values, tl.sum(sums, axis=0), maximum
