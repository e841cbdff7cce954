"""Decode attention whose products have tokens as rows and heads as columns.

Matrix units multiply 16 rows by 8 columns at least. A KV head has 4 or 8 query heads mostly: as
columns they fill what is multiplied, and as rows a quarter or a half of it. So there are half as
many products, logits and sums for the same bytes. It matters most where codes are converted
besides. Of numbers the loop has 28% fewer instructions and 24 to 32% fewer registers, so that more
programs ask for memory at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine_core.kernels.attention.tiles.triton import block_at, load_scales, load_tokens
from engine_core.kernels.codes.triton import high_codes, log2_of, low_codes


@triton.jit
def _tile_logits(
    inputs,
    queries,
    factors,
    position,
    exponents,
    block,
    start,
    in_range,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Logits ``[BLOCK_N, G]`` of the tokens from ``start`` on, -inf where they are not visible.

    ``exponents [BLOCK_N]`` of codes are added. ``queries.q`` is ``[D, G]``, over codes as
    ``queries.q_odd`` ``[D / 2, G]``; ``factors [G]`` are what their products with numbers of keys
    are multiplied by, and the query is at ``position``.
    """
    CODE: tl.constexpr = SHAPE.code
    IN_PAIRS: tl.constexpr = 1 if CODE == "" else 2
    k = load_tokens(
        queries.k, inputs.k_strides, queries.table, block, start, in_range, SHAPE,
        SHAPE.d // IN_PAIRS, SHAPE.block_d // IN_PAIRS, BLOCK_N, False,
    )  # fmt: skip
    if CODE == "":
        logits = tl.dot(k, queries.q, input_precision=SHAPE.precision)
    else:
        scales = load_scales(
            inputs.k_scales, inputs.k_scales_strides, queries, block, start, in_range, SHAPE,
            BLOCK_N, False,
        )  # fmt: skip
        low = low_codes(k, CODE, SHAPE.native).to(queries.q.dtype)
        high = high_codes(k, CODE, SHAPE.native).to(queries.q.dtype)
        # Two sums, so that no product waits for all before it.
        logits = tl.dot(low, queries.q, input_precision=SHAPE.precision) * scales[:, None]
        logits += tl.dot(high, queries.q_odd, input_precision=SHAPE.precision) * scales[:, None]
    logits *= factors[None, :]
    if SHAPE.has_softcap:
        # tanh(x) = 2 * sigmoid(2 * x) - 1
        logits = inputs.logit_scale * (2.0 * tl.sigmoid(logits) - 1.0)
    positions = start + tl.arange(0, BLOCK_N)
    if SHAPE.has_alibi:
        logits += queries.slopes[None, :] * (positions - position).to(tl.float32)[:, None]
    if CODE != "":
        logits += exponents[:, None]
    visible = in_range
    if SHAPE.has_window:
        after = positions > position - queries.window
        if SHAPE.has_prefix:
            after = after | (positions < queries.prefix_len)
        visible = visible & after
    # What is stored beyond the row may be anything, NaN too.
    return tl.where(visible[:, None], logits, float("-inf"))


@triton.jit
def attend(
    inputs,
    queries,
    position,
    low,
    high,
    SHAPE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to the tokens in ``[low, high)``, of which ``low`` is a multiple of BLOCK_N.

    Returns values times their weights ``[BLOCK_G, BLOCK_DV]``, the weights' sums, and the greatest
    logits, both ``[BLOCK_G]``.
    """
    CODE: tl.constexpr = SHAPE.code
    # Of numbers the even ones are all.
    IN_PAIRS: tl.constexpr = 1 if CODE == "" else 2
    DIMS: tl.constexpr = SHAPE.block_dv // IN_PAIRS
    factors = queries.scales * (inputs.cap_scale if SHAPE.has_softcap else inputs.logit_scale)
    even = tl.zeros([DIMS, BLOCK_G], dtype=tl.float32)
    odd = even
    sums = tl.zeros([BLOCK_N, BLOCK_G], dtype=tl.float32)
    maximum = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
    block = block_at(queries.table, low, high, SHAPE)
    for start in range(low, high, BLOCK_N):
        in_range = start + tl.arange(0, BLOCK_N) < high
        # Loaded one tile ahead, so that no key waits for it.
        next_block = block_at(queries.table, start + BLOCK_N, high, SHAPE)
        exponents = maximum  # of codes alone
        if CODE != "":
            # Weights and scales in one exponent: no product of them is too small for 16 bits.
            scales = load_scales(
                inputs.v_scales, inputs.v_scales_strides, queries, block, start, in_range, SHAPE,
                BLOCK_N, True,
            )  # fmt: skip
            exponents = log2_of(scales, SHAPE.native)
        logits = _tile_logits(
            inputs, queries, factors, position, exponents, block, start, in_range, SHAPE, BLOCK_N
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
            queries.v, inputs.v_strides, queries.table, block, start, in_range, SHAPE,
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
    if CODE == "":
        values = tl.trans(even)
    else:
        pairs = tl.permute(tl.join(even, odd), (1, 0, 2))
        values = tl.reshape(pairs, [BLOCK_G, 2 * DIMS])
    return values, tl.sum(sums, axis=0), maximum
