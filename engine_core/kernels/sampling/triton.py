"""Sampling on a GPU: four launches, no sort, and at most two readings of each row.

The first reads all logits, finds each row's largest and finishes the greedy rows. For a row with a
top-k or a top-p the second guesses, from a sample of some thousand of its logits, two bounds
between which the least kept logit lies. The third reads all logits again: it weighs those from the
upper bound up by block, and gathers those between the bounds, usually some hundreds. In the fourth
one program per row narrows the bounds to a single logit among those gathered, and draws: the block,
then the token. A row that nothing restricts is all above its bounds.

The guess decides how long it takes, not what is chosen: if it was wrong, the fourth goes through
the whole row. Weights are integers, whose sums do not depend on how they are parted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.greedy.triton import load_best
from engine_core.kernels.launch.triton import (
    arrival_counts,
    arrives_last,
    launch_dependents,
    pdl_options,
    wait,
)
from engine_core.kernels.sampling.reference import LEAST_TEMPERATURE, mass_bits

if TYPE_CHECKING:
    from engine_core.kernels.sampling import SamplingState

# Threads of a program that reads all logits, and how often each of them reads four: one row of
# 128,000 logits gives a program to each of 63 multiprocessors. Many rows are many times the
# programs of a GPU, and fewer of them are done sooner.
_LANES = 256
_PARTS = 2
_MANY_ROWS = 64
_PARTS_OF_MANY = 8
# The sample has one logit of this many, or of up to half as many, and at most so many.
_SAMPLED = 40
_MOST_SAMPLED = 16384
# Steps of the search for the bounds in the sample; each halves what is between.
_SAMPLE_STEPS: tl.constexpr = tl.constexpr(20)
# The margin of the bounds: standard deviations, and sampled tokens that may be missing. One row of
# a million misses 5 deviations; each deviation is a thousand tokens or less to gather.
_DEVIATIONS: tl.constexpr = tl.constexpr(5.0)
_MISSING: tl.constexpr = tl.constexpr(8.0)
# Sampled tokens above the lower bound at least: few say nothing about the heaviest tokens.
_FEWEST: tl.constexpr = tl.constexpr(16.0)
# Most tokens that are gathered, and the logits that need no sample.
_MOST_CANDIDATES = 16384
# The entry of a candidate whose logit is -inf, which weighs nothing.
_NO_CANDIDATE: tl.constexpr = tl.constexpr(-(0x800000 << 32))
# Logits that the narrowing program reads at once, of those gathered or of all, and its warps.
_CHUNK = 1024
_WHOLE_CHUNK = 1024
_SETTLE_WARPS = 16
# Low bits that are the same for all logits of a type once they are float32.
_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}

_LEAST_TEMPERATURE: tl.constexpr = tl.constexpr(LEAST_TEMPERATURE)
# Of those that are not -inf.
_LEAST_LOGIT: tl.constexpr = tl.constexpr(-3.4028234663852886e38)

# Kinds of choice for a row: already done, from all of its tokens, from a nucleus, or from the
# top-k.
_DONE: tl.constexpr = tl.constexpr(0)
_WHOLE: tl.constexpr = tl.constexpr(1)
_NUCLEUS: tl.constexpr = tl.constexpr(2)
_LIMITED: tl.constexpr = tl.constexpr(3)
# A mode is a kind, and above it how the logits are adjusted: BIASED, PENALISED, or banned.
_KINDS: tl.constexpr = tl.constexpr(4)
_BANNED: tl.constexpr = tl.constexpr(4)
# Integers of ``_Found.sums`` for a row, and half as many as of ``_Found.sizes``: atomic additions
# go to lines of memory of their own.
_SUMS: tl.constexpr = tl.constexpr(16)


class _Rows(NamedTuple):
    """Inputs of all launches; see the public wrapper. ``kinds`` is None if nothing is adjusted."""

    logits: Any
    stride: Any
    vocab: Any
    rows: Any
    numbers: Any
    kinds: Any
    ban_ids: Any
    ban_width: Any
    bias: Any
    seen: Any
    counts: Any


class _Chosen(NamedTuple):
    """Where the choice of a row is stored."""

    tokens: Any
    last_tokens: Any


class _Found(NamedTuple):
    """Results of a launch for those after it, for each row.

    Attributes:
        modes: the kind of choice, and how logits are adjusted.
        peaks: the largest logit.
        draws: the random number.
        totals: about what all tokens of a nucleus row weigh, float32.
        bounds: ``[3]`` float32: the lower and the upper bound of those that are gathered, and below
            which logit none weighs anything.
        sums: what all tokens of a nucleus row weigh, or how many of a top-k row are above the
            bounds; and what those of a nucleus row that are above weigh.
        sizes: how many tokens are between the bounds.
        masses: what a block's tokens above the bounds weigh, but for those ``min_p`` excludes.
        candidates: the tokens between the bounds in any order: the bits of the logit, then 32 bits
            of the token.
    """

    modes: Any
    peaks: Any
    draws: Any
    totals: Any
    bounds: Any
    sums: Any
    sizes: Any
    masses: Any
    candidates: Any


@triton.jit
def _uniform(seed, position):
    """Philox4x32-10 of the 64-bit counter ``position`` and the key ``seed``, as float64."""
    low_bits = tl.full((), 0xFFFFFFFF, tl.uint64)
    position = position.to(tl.uint64)
    seed = seed.to(tl.uint64)
    c0 = position & low_bits
    c1 = position >> 32
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    k0 = seed & low_bits
    k1 = seed >> 32
    for _ in tl.static_range(10):
        first = c0 * tl.full((), 0xD2511F53, tl.uint64)
        second = c2 * tl.full((), 0xCD9E8D57, tl.uint64)
        c0 = (second >> 32) ^ c1 ^ k0
        c1 = second & low_bits
        c2 = (first >> 32) ^ c3 ^ k1
        c3 = first & low_bits
        k0 = (k0 + tl.full((), 0x9E3779B9, tl.uint64)) & low_bits
        k1 = (k1 + tl.full((), 0xBB67AE85, tl.uint64)) & low_bits
    bits = (c0 << 21) | (c1 >> 11)
    return bits.to(tl.int64).to(tl.float64) * (2.0**-53)


@triton.jit
def _key(x):
    """Integers in the order of the float32 ``x``, the two zeros alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _least_key(x, shift):
    """The least key, without its unused low bits, of a logit that is ``x`` or more."""
    key = _key(x)
    # Below 0 these bits of a logit's key are ones: all keys that are cut to the same are at most
    # the logit's. From 0 up they are zeros.
    rest = tl.where(key < 0, 0, (tl.full((), 1, tl.int32) << shift) - 1)
    return (key + rest) >> shift


@triton.jit
def _middle(low, high):
    """The middle of two keys."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _steepness(numbers_ptr):
    """The reciprocal of a row's temperature, with which a row that is drawn weighs its logits."""
    temperature = tl.maximum(tl.load(numbers_ptr).to(tl.float32), _LEAST_TEMPERATURE)
    return tl.div_rn(1.0, temperature)


@triton.jit
def _weights(x, peak, steepness):
    return tl.exp((x - peak) * steepness)


@triton.jit
def _masses(weights, one):
    return (weights * one).to(tl.int64)


@triton.jit
def _share(top_p, total):
    """The least integer that is at least ``top_p`` of ``total``, and from 1 to ``total``."""
    share = top_p * total.to(tl.float64)
    whole = share.to(tl.int64)
    whole += (whole.to(tl.float64) < share).to(tl.int64)
    return tl.minimum(tl.maximum(whole, 1), total)


@triton.jit
def _limit(u, total):
    """The chosen token is the first up to which the mass is above this share of ``total``."""
    return tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _adjust(x, rows, row, mode, cols, mask):
    """The logits ``x`` of one row after what its mode says: bias, penalties, bans."""
    if rows.kinds is not None:
        adjusted = mode // _KINDS
        if adjusted > 0:
            is_biased = (adjusted & 1) != 0
            if is_biased:
                x += tl.load(rows.bias + row * rows.vocab + cols, mask=mask, other=0.0)
            is_penalised = (adjusted & 2) != 0
            if is_penalised:
                numbers_ptr = rows.numbers + row * 7
                repetition = tl.load(numbers_ptr + 4).to(tl.float32)
                frequency = tl.load(numbers_ptr + 5).to(tl.float32)
                presence = tl.load(numbers_ptr + 6).to(tl.float32)
                at = row * rows.vocab + cols
                seen = tl.load(rows.seen + at, mask=mask, other=0)
                # Few tokens were generated, and memory is read for those alone.
                generated = seen >= 2
                counts = tl.load(rows.counts + at, mask=generated, other=0)
                repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
                x = tl.where(seen != 0, repeated, x)
                x -= counts.to(tl.float32) * frequency
                x = tl.where(generated, x - presence, x)
            if (adjusted & _BANNED) != 0:
                for index in range(rows.ban_width):
                    banned = tl.load(rows.ban_ids + row * rows.ban_width + index)
                    x = tl.where(cols == banned, float("-inf"), x)
    return x


@triton.jit
def _load_raw(rows, place, cols, end):
    """The model's logits of one row, -inf from ``end`` on."""
    logits_ptr = rows.logits + place * rows.stride
    return tl.load(logits_ptr + cols, mask=cols < end, other=float("-inf"))


@triton.jit
def _load_logits(rows, place, row, mode, cols):
    """Adjusted logits of one row as float32, -inf beyond the vocabulary."""
    x = _load_raw(rows, place, cols, rows.vocab).to(tl.float32)
    return _adjust(x, rows, row, mode, cols, cols < rows.vocab)


@triton.jit
def _take(token, is_live, place, row, chosen, rows):
    """Make ``token`` the row's one."""
    token = token.to(tl.int64)
    tl.store(chosen.tokens + place, token)
    tl.store(chosen.last_tokens + row, token)
    # Rows of padding share a row.
    if rows.kinds is not None:
        is_counted = is_live & ((tl.load(rows.kinds + row) & 4) != 0)
        at = row * rows.vocab + token
        count = tl.load(rows.counts + at, mask=is_counted, other=0)
        tl.store(rows.counts + at, count + 1, mask=is_counted)
        seen = tl.load(rows.seen + at, mask=is_counted, other=0)
        tl.store(rows.seen + at, seen | 2, mask=is_counted)


@triton.jit
def _peaks_kernel(
    rows,
    chosen,
    found,
    status_ptr,
    best_ptr,
    place_ptr,
    raw_best_ptr,
    sum_ptr,
    arrivals_ptr,
    positions_ptr,
    seeds_ptr,
    ban_ends_ptr,
    num_blocks,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait(PDL)
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    vocab = rows.vocab
    row = tl.load(rows.rows + place)
    position = tl.load(positions_ptr + place)
    live = position >= 0
    numbers_ptr = rows.numbers + row * 7
    # In float64, for a temperature that float32 has no number for is not greedy.
    is_random = live & (tl.load(numbers_ptr) > 0)
    top_k = tl.load(numbers_ptr + 1)
    is_limited = (top_k >= 1) & (top_k < vocab)
    is_nucleus = (tl.load(numbers_ptr + 2) < 1) & (is_limited == 0)
    is_summed = is_random & is_nucleus
    mode = tl.where(is_limited, _LIMITED, tl.where(is_nucleus, _NUCLEUS, _WHOLE))
    if rows.kinds is not None:
        adjusted = tl.load(rows.kinds + row) & 3
        is_banned = position + 1 < tl.load(ban_ends_ptr + row)
        mode += _KINDS * (adjusted + tl.where(is_banned, _BANNED, 0))
    steepness = _steepness(numbers_ptr)
    # For each lane: the largest, the first place that has it, and what the lane weighs beside it.
    best = tl.full((PART,), float("-inf"), tl.float32)
    first = block * (PART * PARTS) + tl.arange(0, PART)
    raw_best = best
    weight = tl.zeros((PART,), tl.float32)
    size = tl.where(live, vocab, 0)
    start = block * (PART * PARTS)
    end = tl.minimum(start + PART * PARTS, size)
    offsets = tl.arange(0, PART)
    following = _load_raw(rows, place, start + offsets, end)
    for part in range(PARTS):
        cols = start + part * PART + offsets
        x = following.to(tl.float32)
        # The next are on their way meanwhile.
        following = _load_raw(rows, place, cols + PART, end)
        # A comparison loses NaN, infinity wins it.
        x = tl.where(x == x, x, float("inf"))
        if rows.kinds is not None:
            raw_best = tl.maximum(raw_best, x)
            x = _adjust(x, rows, row, tl.where(live, mode, 0), cols, cols < size)
            x = tl.where(x == x, x, float("inf"))
        is_more = x > best
        if is_summed:
            # One of the two has nothing to be multiplied with.
            distance = tl.abs(x - tl.maximum(best, _LEAST_LOGIT))
            distance = tl.where(best > float("-inf"), distance, float("inf"))
            factor = tl.exp(-distance * steepness)
            weight = tl.where(is_more, weight * factor + 1.0, weight + factor)
        best = tl.where(is_more, x, best)
        first = tl.where(is_more, cols, first)
    here = place * num_blocks
    peak = tl.max(best, axis=0)
    tl.store(best_ptr + here + block, peak)
    tl.store(place_ptr + here + block, tl.min(tl.where(best == peak, first, vocab), axis=0))
    if rows.kinds is not None:
        tl.store(raw_best_ptr + here + block, tl.max(raw_best, axis=0))
    if is_summed:
        # A block may have nothing but -inf.
        share = _weights(best, tl.maximum(peak, _LEAST_LOGIT), steepness)
        tl.store(sum_ptr + here + block, tl.sum(weight * share, axis=0))
    if arrives_last(arrivals_ptr + place, num_blocks):
        peak, token = load_best(best_ptr + here, place_ptr + here, num_blocks, vocab, BLOCK_BLOCKS)
        blocks = tl.arange(0, BLOCK_BLOCKS)
        some = blocks < num_blocks
        status = tl.where(tl.abs(peak) == float("inf"), 1, 0)
        if rows.kinds is not None:
            raw_bests = tl.load(
                raw_best_ptr + here + blocks, mask=some, other=float("-inf"), cache_modifier=".cg"
            )
            from_model = tl.abs(tl.max(raw_bests, axis=0)) != float("inf")
            status = tl.where(from_model, 2 * status, 1)
        status = tl.where(live, status, 0)
        is_drawn = is_random & (status == 0)
        tl.store(found.modes + place, tl.where(is_drawn, mode, _DONE))
        tl.store(status_ptr + place, status.to(tl.int8))
        tl.store(positions_ptr + place, tl.where(live, position + 1, position))
        if is_drawn:
            tl.store(found.peaks + place, peak)
            tl.store(found.draws + place, _uniform(tl.load(seeds_ptr + row), position + 1))
            pair = tl.arange(0, 2)
            tl.store(found.sums + place * _SUMS + pair, pair.to(tl.int64) * 0)
            tl.store(found.sizes + place * 2 * _SUMS, 0)
            # Of a row that nothing restricts all is above.
            bounds_ptr = found.bounds + place * 3 + pair
            tl.store(bounds_ptr, tl.zeros((2,), tl.float32) - float("inf"))
            if is_nucleus:
                bests = tl.load(
                    best_ptr + here + blocks, mask=some, other=float("-inf"), cache_modifier=".cg"
                )
                sums = tl.load(sum_ptr + here + blocks, mask=some, other=0, cache_modifier=".cg")
                total = tl.sum(sums * _weights(bests, peak, steepness), axis=0)
                tl.store(found.totals + place, total)
        else:
            _take(token, live, place, row, chosen, rows)


@triton.jit
def _bounds_kernel(
    rows,
    found,
    farthest,
    most,
    SAMPLE: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait(PDL)
    place = tl.program_id(0).to(tl.int64)
    mode = tl.load(found.modes + place)
    kind = mode % _KINDS
    if kind >= _NUCLEUS:
        vocab = rows.vocab
        row = tl.load(rows.rows + place)
        numbers_ptr = rows.numbers + row * 7
        peak = tl.load(found.peaks + place)
        steepness = _steepness(numbers_ptr)
        temperature = tl.maximum(tl.load(numbers_ptr).to(tl.float32), _LEAST_TEMPERATURE)
        # Nothing weighs anything that is farther from the peak.
        floor = tl.maximum(peak - temperature * farthest, _LEAST_LOGIT)
        lower = floor
        upper = tl.full((), float("inf"), tl.float32)
        if vocab > most:
            index = tl.arange(0, SAMPLE)
            cols = index.to(tl.int64) * vocab // SAMPLE
            x = _load_logits(rows, place, row, mode, cols)
            # In units of what one token of the sample stands for: how much is to be below the
            # bounds, tokens or weight.
            share = SAMPLE / vocab.to(tl.float32)
            if kind == _LIMITED:
                sizes = tl.full((SAMPLE,), 1.0, tl.float32)
                below = (vocab - tl.load(numbers_ptr + 1).to(tl.float32)) * share
            else:
                sizes = _weights(x, peak, steepness)
                left = 1.0 - tl.load(numbers_ptr + 2).to(tl.float32)
                below = left * tl.load(found.totals + place) * share
            # Below the lower bound there is surely less, below the upper one surely more.
            is_upper = tl.arange(0, 2) == 1
            low = tl.zeros((2,), tl.int32) + _key(floor)
            end = _key(peak) + 1
            high = tl.zeros((2,), tl.int32) + end
            sure = high
            for step in range(_SAMPLE_STEPS):
                # By value, which is fast where logits are spread evenly, and by key, which is never
                # slow.
                pivot = _key(_value(low) * 0.5 + _value(high) * 0.5)
                pivot = tl.where(step % 2 == 0, pivot, _middle(low, high))
                pivot = tl.minimum(tl.maximum(pivot, low + 1), high - 1)
                at = _value(pivot)
                is_below = x[None, :] < at[:, None]
                inside = tl.where(is_below, sizes[None, :], 0.0)
                number = tl.sum(is_below.to(tl.float32), axis=1)
                sum_ = tl.sum(inside, axis=1)
                squares = tl.sum(inside * inside, axis=1)
                variance = tl.maximum(squares - sum_ * sum_ / SAMPLE, 0.0)
                each = tl.where(kind == _LIMITED, 1.0, _weights(at, peak, steepness))
                margin = _DEVIATIONS * tl.sqrt(variance) + _MISSING * each
                # A heavy token in the sample hides that there is more, far above where it is.
                has_more = sum_ - margin >= below
                sure = tl.where(has_more, tl.minimum(sure, pivot), sure)
                is_higher = tl.where(
                    is_upper,
                    (has_more == 0) & (sum_ < 2.0 * below),
                    (sum_ + margin <= below) & (number <= SAMPLE - _FEWEST),
                )
                low = tl.where(is_higher, pivot, low)
                high = tl.where(is_higher, high, pivot)
            lower = _value(tl.sum(tl.where(is_upper, 0, low), axis=0))
            last = tl.sum(tl.where(is_upper, sure, 0), axis=0)
            # A top-p beside a top-k is a share of what that keeps, all of which must be gathered.
            has_both = (kind == _LIMITED) & (tl.load(numbers_ptr + 2) < 1)
            upper = tl.where((last < end) & (has_both == 0), _value(last), upper)
        bounds_ptr = found.bounds + place * 3
        tl.store(bounds_ptr, lower)
        tl.store(bounds_ptr + 1, upper)
        tl.store(bounds_ptr + 2, floor)


class _Bounds(NamedTuple):
    """Arguments of the third launch for the logits of a row.

    Attributes:
        lower: from which on they are gathered.
        upper: below which they are gathered.
        size_ptr: counts those that are.
        candidates_ptr: where they go, ``most`` of them.
        most: see there.
        peak: the largest.
        steepness: the reciprocal temperature.
        one: the integer that stands for a weight of 1.
        min_p: the least weight that can be drawn.
    """

    lower: Any
    upper: Any
    size_ptr: Any
    candidates_ptr: Any
    most: Any
    peak: Any
    steepness: Any
    one: Any
    min_p: Any


@triton.jit
def _weigh_lanes(x, cols, bounds, sums, KIND: tl.constexpr, HAS_ABOVE: tl.constexpr):
    """Gather and weigh one logit for each thread; returns ``sums`` with them, as _weigh_block."""
    measure, above_mass, drawable = sums
    if KIND != _WHOLE:
        between = x >= bounds.lower
        if HAS_ABOVE:
            above = x >= bounds.upper
            between = between & (x < bounds.upper)
            if KIND == _LIMITED:
                measure += above.to(tl.int64)
        # Few threads have any, and in any order.
        sizes_ptr = bounds.size_ptr + tl.zeros_like(cols)
        to = tl.atomic_add(sizes_ptr, 1, mask=between, sem="relaxed")
        entry = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | cols.to(tl.int64)
        tl.store(bounds.candidates_ptr + to, entry, mask=between & (to < bounds.most))
    if HAS_ABOVE or KIND == _NUCLEUS:
        weights = _weights(x, bounds.peak, bounds.steepness)
        masses = _masses(weights, bounds.one)
        if KIND == _NUCLEUS:
            measure += masses
        if HAS_ABOVE:
            if KIND != _WHOLE:
                masses = tl.where(above, masses, 0)
            if KIND == _NUCLEUS:
                above_mass += masses
            drawable += tl.where(weights >= bounds.min_p, masses, 0)
    return measure, above_mass, drawable


@triton.jit
def _weigh_block(
    rows,
    place,
    row,
    mode,
    start,
    bounds,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ABOVE: tl.constexpr,
):
    """Gather and weigh the logits of a block, four at a time for each thread.

    Returns:
        The mass of all for a nucleus, or the number above the bounds for a top-k; the mass above
        them for a nucleus; and the mass above them that can be drawn.
    """
    lanes = tl.arange(0, LANES)
    offsets = tl.arange(0, 4 * LANES)
    zeros = tl.zeros((LANES,), tl.int64)
    sums = (zeros, zeros, zeros)
    end = tl.minimum(start + 4 * LANES * PARTS, rows.vocab)
    following = _load_raw(rows, place, start + offsets, end)
    for part in range(PARTS):
        cols = start + part * 4 * LANES + offsets
        x = following.to(tl.float32)
        # The next are on their way meanwhile.
        following = _load_raw(rows, place, cols + 4 * LANES, end)
        x = _adjust(x, rows, row, mode, cols, cols < rows.vocab)
        # So parted, all stays in the thread that loaded it.
        even, odd = tl.split(tl.reshape(x, (2 * LANES, 2)))
        x0, x2 = tl.split(tl.reshape(even, (LANES, 2)))
        x1, x3 = tl.split(tl.reshape(odd, (LANES, 2)))
        first = start + part * 4 * LANES + 4 * lanes
        sums = _weigh_lanes(x0, first, bounds, sums, KIND, HAS_ABOVE)
        sums = _weigh_lanes(x1, first + 1, bounds, sums, KIND, HAS_ABOVE)
        sums = _weigh_lanes(x2, first + 2, bounds, sums, KIND, HAS_ABOVE)
        sums = _weigh_lanes(x3, first + 3, bounds, sums, KIND, HAS_ABOVE)
    return sums


@triton.jit
def _weigh_kernel(
    rows,
    found,
    most,
    one,
    num_blocks,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait(PDL)
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    mode = tl.load(found.modes + place)
    if mode != _DONE:
        kind = mode % _KINDS
        row = tl.load(rows.rows + place)
        numbers_ptr = rows.numbers + row * 7
        start = block * (4 * LANES * PARTS)
        sums_ptr = found.sums + place * _SUMS
        lower = tl.load(found.bounds + place * 3)
        upper = tl.load(found.bounds + place * 3 + 1)
        bounds = _Bounds(
            lower,
            upper,
            found.sizes + place * 2 * _SUMS,
            found.candidates + place * most,
            most,
            tl.load(found.peaks + place),
            _steepness(numbers_ptr),
            one,
            tl.load(numbers_ptr + 3).to(tl.float32),
        )
        of = (rows, place, row, mode, start, bounds)
        drawable = tl.zeros((LANES,), tl.int64)
        if kind == _WHOLE:
            _, _, drawable = _weigh_block(*of, LANES, PARTS, _WHOLE, True)
        else:
            measure = tl.zeros((LANES,), tl.int64)
            above_mass = tl.zeros((LANES,), tl.int64)
            if upper < float("inf"):
                if kind == _NUCLEUS:
                    measure, above_mass, drawable = _weigh_block(*of, LANES, PARTS, _NUCLEUS, True)
                else:
                    measure, above_mass, drawable = _weigh_block(*of, LANES, PARTS, _LIMITED, True)
            else:
                if kind == _NUCLEUS:
                    measure, above_mass, drawable = _weigh_block(*of, LANES, PARTS, _NUCLEUS, False)
                else:
                    measure, above_mass, drawable = _weigh_block(*of, LANES, PARTS, _LIMITED, False)
            tl.atomic_add(sums_ptr, tl.sum(measure, axis=0), sem="relaxed")
            tl.atomic_add(sums_ptr + 1, tl.sum(above_mass, axis=0), sem="relaxed")
        tl.store(found.masses + place * num_blocks + block, tl.sum(drawable, axis=0))


class _Logits(NamedTuple):
    """The logits that the narrowing program reads: all of a row, or those that were gathered.

    Attributes:
        candidates: those gathered; None for all of the row that the next four name.
        rows: the inputs.
        place: in the step.
        row: of the persistent batch.
        mode: as in ``_Found``.
        size: how many there are.
        shift: unused low bits of their keys.
        peak: the largest.
        steepness: the reciprocal temperature.
        one: the integer that stands for a weight of 1.
    """

    candidates: Any
    rows: Any
    place: Any
    row: Any
    mode: Any
    size: Any
    shift: Any
    peak: Any
    steepness: Any
    one: Any


class _Bound(NamedTuple):
    """A key, and what lies from it up.

    Attributes:
        key: the least key.
        count: how many tokens.
        mass: what they weigh.
    """

    key: Any
    count: Any
    mass: Any


class _Kept(NamedTuple):
    """Which logits may be drawn.

    Attributes:
        low: a key that none of them is below.
        high: a key from which on all are kept.
        last: the last token that is kept of those from ``low`` up to ``high``.
        min_p: the least weight.
    """

    low: Any
    high: Any
    last: Any
    min_p: Any


@triton.jit
def _load_chunk(logits, start, CHUNK: tl.constexpr):
    """Keys, weights and tokens of ``CHUNK`` logits from ``start`` on, and which there are."""
    ids = start + tl.arange(0, CHUNK)
    mask = ids < logits.size
    if logits.candidates is not None:
        entries = tl.load(logits.candidates + ids, mask=mask, other=_NO_CANDIDATE)
        x = (entries >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        ids = entries.to(tl.int32)
    else:
        x = _load_logits(logits.rows, logits.place, logits.row, logits.mode, ids)
    return _key(x) >> logits.shift, _weights(x, logits.peak, logits.steepness), ids, mask


@triton.jit
def _all_above(logits, low, above, CHUNK: tl.constexpr):
    """The bound ``low``: those of ``logits`` from it up, and those ``above`` them."""
    counts = tl.zeros((CHUNK,), tl.int32)
    masses = tl.zeros((CHUNK,), tl.int64)
    for start in range(0, logits.size, CHUNK):
        keys, weights, _ids, mask = _load_chunk(logits, start, CHUNK)
        inside = (keys >= low) & mask
        counts += inside.to(tl.int32)
        masses += tl.where(inside, _masses(weights, logits.one), 0)
    return _Bound(low, above.count + tl.sum(counts, axis=0), above.mass + tl.sum(masses, axis=0))


@triton.jit
def _narrow(logits, low, above, needed, BY_MASS: tl.constexpr, CHUNK: tl.constexpr):
    """The bounds in which the least kept logit lies: keys from ``low`` to below ``high``.

    There are ``needed`` tokens, or there is a mass of it, from ``low`` up, and less than that from
    ``high`` up. Between them lies one key, or one token, or what is just needed.

    Args:
        logits: all that lie between the bounds that are given.
        low: the lower one.
        above: the upper one, and of what lies above it that which is not among ``logits``.
        needed: a count or a mass.
    """
    shift = logits.shift
    low, low_count, low_mass = low.key, low.count, low.mass
    high, high_count, high_mass = above.key, above.count, above.mass
    spare = low_count - high_count - 1 if BY_MASS else low_count.to(tl.int64) - needed
    while (high > low + 1) & (spare > 0):
        # Three quarters of the way by value, which is fast where logits are spread evenly, and the
        # middle by key, which is never slow.
        index = tl.arange(0, 4)
        share = (index + 1).to(tl.float32) * 0.25
        # The key of -inf may stand for NaN here.
        lowest = tl.maximum(_value(low << shift), _LEAST_LOGIT)
        pivots = _key(lowest * (1.0 - share) + _value(high << shift) * share) >> shift
        pivots = tl.where(index == 3, _middle(low, high), pivots)
        pivots = tl.minimum(tl.maximum(pivots, low + 1), high - 1)
        counts = tl.zeros((4, CHUNK), tl.int32)
        masses = tl.zeros((4, CHUNK), tl.int64)
        for start in range(0, logits.size, CHUNK):
            keys, weights, _ids, mask = _load_chunk(logits, start, CHUNK)
            inside = (keys[None, :] >= pivots[:, None]) & mask[None, :]
            counts += inside.to(tl.int32)
            masses += tl.where(inside, _masses(weights, logits.one)[None, :], 0)
        count = tl.sum(counts, axis=1) + above.count
        mass = tl.sum(masses, axis=1) + above.mass
        enough = mass >= needed if BY_MASS else count >= needed
        low = tl.max(tl.where(enough, pivots, low), axis=0)
        low_count = tl.min(tl.where(enough, count, low_count), axis=0)
        low_mass = tl.min(tl.where(enough, mass, low_mass), axis=0)
        high = tl.min(tl.where(enough, high, pivots), axis=0)
        high_count = tl.max(tl.where(enough, high_count, count), axis=0)
        high_mass = tl.max(tl.where(enough, high_mass, mass), axis=0)
        spare = low_count - high_count - 1 if BY_MASS else low_count.to(tl.int64) - needed
    return _Bound(low, low_count, low_mass), _Bound(high, high_count, high_mass)


@triton.jit
def _kept_masses(keys, weights, ids, mask, kept, one):
    """Masses of tokens, 0 for those that are not kept."""
    is_kept = (keys >= kept.high) | ((keys >= kept.low) & (ids <= kept.last))
    return tl.where(is_kept & (weights >= kept.min_p) & mask, _masses(weights, one), 0)


@triton.jit
def _first(logits, kept, others, needed, last, BLOCK, BLOCKED: tl.constexpr, CHUNK: tl.constexpr):
    """The first place up to which there is as much as ``needed``, and how much there is before it.

    If ``BLOCKED``, places are blocks of tokens and it is the mass of those kept, to which
    ``others`` are added by block. If not, they are tokens, and it is the number from ``kept.low``
    up to ``kept.high``.

    Args:
        last: the last place, up to which there is surely enough.
    """
    first = tl.zeros_like(last)
    before = tl.zeros_like(needed)
    index = tl.arange(0, 4)
    while first < last:
        pivots = first + (last - first) * (index + 1) // 5
        sums = tl.zeros((4, CHUNK), tl.int64)
        for start in range(0, logits.size, CHUNK):
            keys, weights, ids, mask = _load_chunk(logits, start, CHUNK)
            if BLOCKED:
                sizes = _kept_masses(keys, weights, ids, mask, kept, logits.one)
            else:
                sizes = ((keys >= kept.low) & (keys < kept.high) & mask).to(tl.int64)
            early = (ids // BLOCK)[None, :] <= pivots[:, None]
            sums += tl.where(early, sizes[None, :], 0)
        sum_ = tl.sum(sums, axis=1)
        if BLOCKED:
            blocks = tl.arange(0, others.shape[0])
            are_early = blocks[None, :] <= pivots[:, None]
            sum_ += tl.sum(tl.where(are_early, others[None, :], 0), axis=1)
        enough = sum_ >= needed
        last = tl.min(tl.where(enough, pivots, last), axis=0)
        first = tl.max(tl.where(enough, first, pivots + 1), axis=0)
        before = tl.max(tl.where(enough, before, sum_), axis=0)
    return first, before


@triton.jit
def _keep(logits, kind, low, above, total, numbers_ptr, CHUNK: tl.constexpr):
    """Which logits are kept: ``low``, ``high`` and ``last`` of :class:`_Kept`.

    Args:
        logits: those between the bounds that are given.
        kind: ``_NUCLEUS`` or ``_LIMITED``.
        low: the lower one.
        above: the upper one, and of what lies above it that which is not among ``logits``.
        total: what all of the row's tokens weigh, for a nucleus.
        numbers_ptr: the row's parameters.
    """
    top_p = tl.load(numbers_ptr + 2)
    key, count, mass = low.key, low.count, low.mass
    # All from ``key`` up, until more is known.
    end = key
    room = tl.zeros_like(count)
    is_cut = room > 0
    if kind == _LIMITED:
        top_k = tl.load(numbers_ptr + 1).to(tl.int32)
        if count > top_k:
            at, high = _narrow(logits, low, above, top_k.to(tl.int64), False, CHUNK)
            key, count, mass = at.key, at.count, at.mass
            end = key
            room = top_k - high.count
            is_cut = room < count - high.count
            if is_cut:
                # Those between are equal.
                each = (mass - high.mass) // (count - high.count)
                end, count, mass = high.key, top_k, high.mass + room * each
        total = mass
    if top_p < 1:
        needed = _share(top_p, total)
        at, high = _narrow(logits, _Bound(key, count, mass), above, needed, True, CHUNK)
        # Those between are equal, or there is one. At the lower bound of the top-k not all that
        # are equal may have been counted, and then ``room`` is less than there are.
        between = at.count - high.count
        each = (at.mass - high.mass) // between
        room = ((needed - high.mass + each - 1) // each).to(tl.int32)
        key, end = at.key, high.key
        is_cut = is_cut | (room < between)
    last = tl.zeros_like(count) + logits.rows.vocab
    if is_cut:
        kept = _Kept(key, end, last, 0.0)
        none = tl.zeros((1,), tl.int64)
        last, _ = _first(logits, kept, none, room.to(tl.int64), last - 1, 1, False, CHUNK)
    return key, end, last


@triton.jit
def _draw(logits, kept, others, u, num_blocks, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """The token that is drawn.

    Args:
        logits: all that are kept, but for ``others``.
        kept: which of them are.
        others: what kept tokens that are not among ``logits`` weigh, by block.
        u: the random number.
    """
    sums = tl.zeros((CHUNK,), tl.int64)
    for start in range(0, logits.size, CHUNK):
        keys, weights, ids, mask = _load_chunk(logits, start, CHUNK)
        sums += _kept_masses(keys, weights, ids, mask, kept, logits.one)
    limit = _limit(u, tl.sum(sums, axis=0) + tl.sum(others, axis=0))
    last = tl.zeros_like(logits.size) + num_blocks - 1
    block, before = _first(logits, kept, others, limit + 1, last, BLOCK, True, CHUNK)
    rows = logits.rows
    cols = block * BLOCK + tl.arange(0, BLOCK)
    mask = cols < rows.vocab
    x = _load_logits(rows, logits.place, logits.row, logits.mode, cols)
    weights = _weights(x, logits.peak, logits.steepness)
    masses = _kept_masses(_key(x) >> logits.shift, weights, cols, mask, kept, logits.one)
    beyond = before + tl.cumsum(masses, axis=0) > limit
    return tl.min(tl.where(beyond, cols, rows.vocab - 1), axis=0)


# Triton 3.6 does not compile it for one block that it knows ahead.
@triton.jit(do_not_specialize=["num_blocks"])
def _settle_kernel(
    rows,
    chosen,
    found,
    most,
    one,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    WHOLE_CHUNK: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait(PDL)
    place = tl.program_id(0).to(tl.int64)
    mode = tl.load(found.modes + place)
    if mode != _DONE:
        kind = mode % _KINDS
        row = tl.load(rows.rows + place)
        numbers_ptr = rows.numbers + row * 7
        shift = tl.where(mode >= _KINDS, 0, UNUSED_BITS)
        peak = tl.load(found.peaks + place)
        steepness = _steepness(numbers_ptr)
        u = tl.load(found.draws + place)
        sums_ptr = found.sums + place * _SUMS
        # A nucleus needs no count above the bounds, and the top-k no mass.
        total = tl.load(sums_ptr)
        above_count = tl.where(kind == _LIMITED, total, 0).to(tl.int32)
        above_mass = tl.load(sums_ptr + 1)
        size = tl.load(found.sizes + place * 2 * _SUMS)
        row_of = (rows, place, row, mode)
        weigh = (shift, peak, steepness, one)
        few = _Logits(found.candidates + place * most, *row_of, tl.minimum(size, most), *weigh)
        blocks = tl.arange(0, BLOCK_BLOCKS)
        weighed_blocks = num_blocks
        # Everything is kept.
        low_key = tl.full((), -(2**31), tl.int32)
        high_key = low_key
        last = tl.zeros_like(size) + rows.vocab
        is_listed = size <= most
        many = _Logits(None, *row_of, tl.zeros_like(size) + rows.vocab, *weigh)
        if kind != _WHOLE:
            bounds_ptr = found.bounds + place * 3
            lower = tl.load(bounds_ptr)
            upper = tl.load(bounds_ptr + 1)
            floor = tl.load(bounds_ptr + 2)
            weighed_blocks = tl.where(upper < float("inf"), num_blocks, 0)
            # Between two logits of 16 bits a bound stands for the upper one.
            end = (_key(peak) >> shift) + 1
            if is_listed:
                upper_key = tl.minimum(_least_key(upper, shift), end)
                above = _Bound(upper_key, above_count, above_mass)
                low = _all_above(few, _least_key(lower, shift), above, CHUNK)
                if kind == _LIMITED:
                    top_k = tl.load(numbers_ptr + 1)
                    # Of those below the floor none can be drawn.
                    is_listed = (low.count >= top_k) | (lower <= floor)
                    is_listed = is_listed & (above_count < top_k)
                else:
                    needed = _share(tl.load(numbers_ptr + 2), total)
                    is_listed = (above_mass < needed) & (needed <= low.mass)
                if is_listed:
                    low_key, high_key, last = _keep(
                        few, kind, low, above, total, numbers_ptr, CHUNK
                    )
            if is_listed == 0:
                # Rare: as many equal logits as are not gathered, or an unlucky sample.
                none_above = _Bound(end, tl.zeros_like(above_count), tl.zeros_like(above_mass))
                all_above = _all_above(many, _least_key(floor, shift), none_above, WHOLE_CHUNK)
                low_key, high_key, last = _keep(
                    many, kind, all_above, none_above, total, numbers_ptr, WHOLE_CHUNK
                )
        kept = _Kept(low_key, high_key, last, tl.load(numbers_ptr + 3).to(tl.float32))
        if is_listed:
            masses_ptr = found.masses + place * num_blocks
            others = tl.load(masses_ptr + blocks, mask=blocks < weighed_blocks, other=0)
            token = _draw(few, kept, others, u, num_blocks, BLOCK, CHUNK)
        else:
            nothing = tl.zeros((BLOCK_BLOCKS,), tl.int64)
            token = _draw(many, kept, nothing, u, num_blocks, BLOCK, WHOLE_CHUNK)
        _take(token, mode != _DONE, place, row, chosen, rows)


def sample_tokens(
    logits: Tensor, rows: Tensor, positions: Tensor, last_tokens: Tensor, state: SamplingState
) -> tuple[Tensor, Tensor]:
    """Tokens ``[B]`` int64 and status ``[B]`` int8 of ``logits [B, V]``."""
    num_rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    status = torch.empty(num_rows, dtype=torch.int8, device=device)
    if num_rows == 0:
        return tokens, status

    def scratch(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=device)

    most = min(vocab, _MOST_CANDIDATES)
    bits = mass_bits(vocab)
    one = 2.0**bits
    adjustments = state.adjustments
    kinds = ban_ids = ban_ends = bias = seen = output_counts = None
    if adjustments is not None:
        kinds, ban_ids, ban_ends = adjustments.kinds, adjustments.ban_ids, adjustments.ban_ends
        bias, seen, output_counts = adjustments.bias, adjustments.seen, adjustments.output_counts
        # Kernels take long to compile, so that those of all adjustments are the same. What is not
        # there is in no row's kind, and so nothing is read of what is given for it.
        if bias is None:
            bias = torch.empty(1, dtype=torch.float32, device=device)
        if seen is None or output_counts is None:
            seen = torch.empty(1, dtype=torch.uint8, device=device)
            output_counts = torch.empty(1, dtype=torch.int32, device=device)
    given = _Rows(
        logits=logits,
        stride=logits.stride(0),
        vocab=vocab,
        rows=rows,
        numbers=state.numbers,
        kinds=kinds,
        ban_ids=ban_ids,
        ban_width=0 if ban_ids is None else ban_ids.shape[1],
        bias=bias,
        seen=seen,
        counts=output_counts,
    )
    chosen = _Chosen(tokens, last_tokens)
    parts = _PARTS if num_rows < _MANY_ROWS else _PARTS_OF_MANY
    block = 4 * _LANES * parts
    blocks = triton.cdiv(vocab, block)
    found = _Found(
        modes=scratch(dtype=torch.int32),
        peaks=scratch(dtype=torch.float32),
        draws=scratch(dtype=torch.float64),
        totals=scratch(dtype=torch.float32),
        bounds=scratch(3, dtype=torch.float32),
        sums=scratch(_SUMS.value, dtype=torch.int64),
        sizes=scratch(2 * _SUMS.value, dtype=torch.int32),
        masses=scratch(blocks, dtype=torch.int64),
        candidates=scratch(most, dtype=torch.int64),
    )
    common = {
        # The reference's penalties round each product.
        "enable_fp_fusion": False,
        **pdl_options(device),
    }
    shape = {"PARTS": parts, "num_warps": _LANES // 32}
    _peaks_kernel[(num_rows, blocks)](
        given,
        chosen,
        found,
        status,
        scratch(blocks, dtype=torch.float32),
        scratch(blocks, dtype=torch.int32),
        None if adjustments is None else scratch(blocks, dtype=torch.float32),
        scratch(blocks, dtype=torch.float32),
        arrival_counts(device, num_rows),
        positions,
        state.seeds,
        ban_ends,
        blocks,
        PART=4 * _LANES,
        BLOCK_BLOCKS=triton.next_power_of_2(blocks),
        **shape,
        **common,
    )
    sampled = min(triton.next_power_of_2(triton.cdiv(vocab, _SAMPLED)), _MOST_SAMPLED)
    _bounds_kernel[(num_rows,)](
        given,
        found,
        bits * math.log(2) + 1,
        most,
        SAMPLE=sampled,
        num_warps=16,
        **common,
    )
    _weigh_kernel[(num_rows, blocks)](
        given, found, most, one, blocks, LANES=_LANES, **shape, **common
    )
    _settle_kernel[(num_rows,)](
        given,
        chosen,
        found,
        most,
        one,
        blocks,
        BLOCK=block,
        BLOCK_BLOCKS=triton.next_power_of_2(blocks),
        CHUNK=_CHUNK,
        WHOLE_CHUNK=_WHOLE_CHUNK,
        UNUSED_BITS=_UNUSED_BITS[logits.dtype],
        num_warps=_SETTLE_WARPS,
        **common,
    )
    return tokens, status
