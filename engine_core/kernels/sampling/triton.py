"""Sampling on a GPU: four launches, three of them of many programs per row, and no sort.

The first adjusts the logits, finds each row's largest and finishes the greedy rows. The second
weighs: rows that no top-k or top-p restricts by block, the others above each of a few pivots. In
the third the block that holds the drawn token finds it; or what lies above the highest pivot that
leaves enough, usually a few hundred tokens, is gathered, and in the fourth one program per row
narrows the bounds of the kept set to a single logit and draws. Weights are integers, whose sums do
not depend on how they are parted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.greedy.triton import load_best, store_best
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

# Logits of a program.
_BLOCK = 4096
# Pivots of the second launch; each takes time for every logit of the blocks that reach it.
_PIVOTS: tl.constexpr = tl.constexpr(8)
# Most tokens that are gathered; above it the bounds are narrowed on all logits.
_MOST_CANDIDATES = 16384
# Logits that the narrowing program reads at once: of those gathered, which are few, or of all.
_CHUNK = 1024
_WHOLE_CHUNK = 4096
# Low bits that are the same for all logits of a type once they are float32.
_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}

_LEAST_TEMPERATURE: tl.constexpr = tl.constexpr(LEAST_TEMPERATURE)

# Kinds of choice for a row: already done, from all of its tokens, from a nucleus, or from the
# top-k.
_DONE: tl.constexpr = tl.constexpr(0)
_WHOLE: tl.constexpr = tl.constexpr(1)
_NUCLEUS: tl.constexpr = tl.constexpr(2)
_LIMITED: tl.constexpr = tl.constexpr(3)
# Added to these where the logits are the adjusted ones.
_ADJUSTED: tl.constexpr = tl.constexpr(4)


class _Rows(NamedTuple):
    """Inputs of all launches; see the public wrapper."""

    logits: Any
    stride: Any
    vocab: Any
    rows: Any
    numbers: Any


class _Chosen(NamedTuple):
    """Where the choice of a row is stored, and counted if there are ``counts``."""

    tokens: Any
    last_tokens: Any
    kinds: Any
    counts: Any


class _Found(NamedTuple):
    """Results of a launch for those after it, for each row.

    Attributes:
        modes: the kind of choice.
        peaks: the largest logit.
        draws: the random number.
        pivots: logits ``[_PIVOTS]``, above which the second launch weighs.
        adjusted: the logits ``[V]`` of an adjusted row, float32; None if there are none.
        best: the largest logit of each block.
        masses: ``[_PIVOTS + 1, blocks]``, of a block's logits above each pivot, and of all.
        above: ``[_PIVOTS, blocks]``, how many these are.
        candidates: the logits that are gathered.
        ids: their tokens.
        sizes: how many there are; negative if none are gathered, but so many stay in question.
        lows: the pivot above which these are.
        low_masses: what they weigh.
        totals: what all tokens weigh.
    """

    modes: Any
    peaks: Any
    draws: Any
    pivots: Any
    adjusted: Any
    best: Any
    masses: Any
    above: Any
    candidates: Any
    ids: Any
    sizes: Any
    lows: Any
    low_masses: Any
    totals: Any


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
def _load_logits(rows, found, place, mode, cols, mask):
    """Logits of one row as float32, -inf beyond ``mask``."""
    logits_ptr = rows.logits + place * rows.stride
    if found.adjusted is not None:
        adjusted_ptr = found.adjusted + place * rows.vocab
        if mode >= _ADJUSTED:
            x = tl.load(adjusted_ptr + cols, mask=mask, other=float("-inf"))
        else:
            x = tl.load(logits_ptr + cols, mask=mask, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(logits_ptr + cols, mask=mask, other=float("-inf")).to(tl.float32)
    return x


@triton.jit
def _take(token, is_live, place, row, chosen, vocab):
    """Make ``token`` the row's one."""
    token = token.to(tl.int64)
    tl.store(chosen.tokens + place, token)
    tl.store(chosen.last_tokens + row, token)
    # Rows of padding share a row.
    if chosen.counts is not None:
        is_counted = is_live & ((tl.load(chosen.kinds + row) & 4) != 0)
        count_ptr = chosen.counts + row * vocab + token
        count = tl.load(count_ptr, mask=is_counted, other=0)
        tl.store(count_ptr, count + 1, mask=is_counted)


@triton.jit
def _peaks_kernel(
    rows,
    chosen,
    found,
    status_ptr,
    place_ptr,
    raw_best_ptr,
    arrivals_ptr,
    positions_ptr,
    seeds_ptr,
    ban_ids_ptr,
    ban_ends_ptr,
    bias_ptr,
    prompt_mask_ptr,
    ban_width,
    farthest,
    num_blocks,
    BLOCK: tl.constexpr,
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
    cols = block * BLOCK + tl.arange(0, BLOCK)
    mask = cols < tl.where(live, vocab, 0)
    x = tl.load(rows.logits + place * rows.stride + cols, mask=mask, other=float("-inf"))
    x = x.to(tl.float32)
    if found.adjusted is not None:
        # A comparison loses NaN, infinity wins it.
        raw_best = tl.max(tl.where(x == x, x, float("inf")), axis=0)
        tl.store(raw_best_ptr + place * num_blocks + block, raw_best)
        kinds = tl.load(chosen.kinds + row)
        is_banned = position + 1 < tl.load(ban_ends_ptr + row)
        is_adjusted = live & (((kinds & 3) != 0) | is_banned)
        if is_adjusted:
            if bias_ptr is not None:
                biased = cols < tl.where((kinds & 1) != 0, vocab, 0)
                x += tl.load(bias_ptr + row * vocab + cols, mask=biased, other=0.0)
            if prompt_mask_ptr is not None:
                is_penalised = (kinds & 2) != 0
                if is_penalised:
                    repetition = tl.load(numbers_ptr + 4).to(tl.float32)
                    frequency = tl.load(numbers_ptr + 5).to(tl.float32)
                    presence = tl.load(numbers_ptr + 6).to(tl.float32)
                    counts = tl.load(chosen.counts + row * vocab + cols, mask=mask, other=0)
                    seen = tl.load(prompt_mask_ptr + row * vocab + cols, mask=mask, other=0)
                    repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
                    x = tl.where((seen != 0) | (counts > 0), repeated, x)
                    x -= counts.to(tl.float32) * frequency
                    x = tl.where(counts > 0, x - presence, x)
            if is_banned:
                for index in range(ban_width):
                    banned = tl.load(ban_ids_ptr + row * ban_width + index)
                    x = tl.where(cols == banned, float("-inf"), x)
            tl.store(found.adjusted + place * vocab + cols, x, mask=mask)
    best_ptr = found.best + place * num_blocks
    place_ptr += place * num_blocks
    store_best(x, cols, best_ptr + block, place_ptr + block, vocab)
    if arrives_last(arrivals_ptr + place, num_blocks):
        peak, token = load_best(best_ptr, place_ptr, num_blocks, vocab, BLOCK_BLOCKS)
        status = tl.where(tl.abs(peak) == float("inf"), 1, 0)
        if found.adjusted is not None:
            blocks = tl.arange(0, BLOCK_BLOCKS)
            raw_bests = tl.load(
                raw_best_ptr + place * num_blocks + blocks,
                mask=blocks < num_blocks,
                other=float("-inf"),
                cache_modifier=".cg",
            )
            from_model = tl.abs(tl.max(raw_bests, axis=0)) != float("inf")
            status = tl.where(from_model, 2 * status, 1)
        status = tl.where(live, status, 0)
        temperature = tl.load(numbers_ptr).to(tl.float32)
        top_k = tl.load(numbers_ptr + 1)
        top_p = tl.load(numbers_ptr + 2)
        is_drawn = live & (status == 0) & (tl.load(numbers_ptr) > 0)
        is_limited = (top_k >= 1) & (top_k < vocab)
        mode = tl.where(is_limited, _LIMITED, tl.where(top_p < 1, _NUCLEUS, _WHOLE))
        if found.adjusted is not None:
            mode += tl.where(is_adjusted, _ADJUSTED, 0)
        tl.store(found.modes + place, tl.where(is_drawn, mode, _DONE))
        tl.store(status_ptr + place, status.to(tl.int8))
        tl.store(positions_ptr + place, tl.where(live, position + 1, position))
        if is_drawn:
            tl.store(found.peaks + place, peak)
            tl.store(found.draws + place, _uniform(tl.load(seeds_ptr + row), position + 1))
            # Distances to the peak, in units of the temperature; below the last nothing weighs
            # anything. The top-k do not depend on a high temperature.
            temperature = tl.maximum(temperature, _LEAST_TEMPERATURE)
            unit = tl.where(is_limited, tl.minimum(temperature, 1.0), temperature)
            index = tl.arange(0, _PIVOTS)
            step = index.to(tl.float32)
            distance = 0.5 + step + 0.15 * step * step
            distance = tl.where(index == _PIVOTS - 1, farthest, distance)
            tl.store(found.pivots + place * _PIVOTS + index, peak - unit * distance)
        else:
            _take(token, live, place, row, chosen, vocab)


@triton.jit
def _masses_kernel(
    rows,
    found,
    one,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait(PDL)
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    mode = tl.load(found.modes + place)
    if mode != _DONE:
        numbers_ptr = rows.numbers + tl.load(rows.rows + place) * 7
        steepness = _steepness(numbers_ptr)
        cols = block * BLOCK + tl.arange(0, BLOCK)
        mask = cols < rows.vocab
        x = _load_logits(rows, found, place, mode, cols, mask)
        weights = _weights(x, tl.load(found.peaks + place), steepness)
        masses = _masses(weights, one)
        kind = mode & 3
        if kind == _WHOLE:
            min_p = tl.load(numbers_ptr + 3).to(tl.float32)
            masses = tl.where(weights >= min_p, masses, 0)
        # The whole mass is kept behind those of the pivots.
        at = place * (_PIVOTS + 1) * num_blocks + block
        tl.store(found.masses + at + _PIVOTS * num_blocks, tl.sum(masses, axis=0))
        if kind != _WHOLE:
            best = tl.load(found.best + place * num_blocks + block)
            for index in tl.static_range(_PIVOTS):
                pivot = tl.load(found.pivots + place * _PIVOTS + index)
                count = tl.zeros((), tl.int32)
                mass = tl.zeros((), tl.int64)
                # Most blocks have nothing above the first pivots.
                if best >= pivot:
                    above = (x >= pivot) & mask
                    count = tl.sum(above.to(tl.int32), axis=0)
                    mass = tl.sum(tl.where(above, masses, 0), axis=0)
                to = place * _PIVOTS * num_blocks + index * num_blocks + block
                tl.store(found.above + to, count)
                tl.store(found.masses + at + index * num_blocks, mass)


class _Logits(NamedTuple):
    """The logits that the narrowing program reads: all of a row, or those that were gathered.

    Attributes:
        gathered_ptr: None for all of the row that ``rows``, ``found``, ``place`` and ``mode`` name.
        size: how many there are.
        shift: unused low bits of their keys.
        peak: the largest.
        steepness: the reciprocal temperature.
        one: the integer that stands for a weight of 1.
    """

    gathered_ptr: Any
    rows: Any
    found: Any
    place: Any
    mode: Any
    size: Any
    shift: Any
    peak: Any
    steepness: Any
    one: Any


class _Kept(NamedTuple):
    """Which logits may be drawn.

    Attributes:
        low: a key that none of them is below.
        high: a key from which on all are kept.
        between: how many logits there are from ``low`` up to ``high``.
        room: how many of these are kept, in the order of their ids.
        min_p: the least weight.
    """

    low: Any
    high: Any
    between: Any
    room: Any
    min_p: Any


@triton.jit
def _load_chunk(logits, start, CHUNK: tl.constexpr):
    """Keys and weights of ``CHUNK`` logits from ``start`` on, and which of them there are."""
    cols = start + tl.arange(0, CHUNK)
    mask = cols < logits.size
    if logits.gathered_ptr is not None:
        x = tl.load(logits.gathered_ptr + cols, mask=mask, other=float("-inf"))
    else:
        x = _load_logits(logits.rows, logits.found, logits.place, logits.mode, cols, mask)
    return _key(x) >> logits.shift, _weights(x, logits.peak, logits.steepness), mask


@triton.jit
def _narrow(
    logits,
    low,
    low_count,
    low_mass,
    needed,
    BY_MASS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The bounds in which the least kept logit lies: keys from ``low`` to below ``high``.

    There are ``needed`` tokens, or there is a mass of it, from ``low`` up, and less than that from
    ``high`` up. Between them lies one key, or one token, or what is just needed. Each bound comes
    with its count and mass.
    """
    shift = logits.shift
    high = (_key(logits.peak) >> shift) + 1
    high_count = tl.zeros_like(low_count)
    high_mass = tl.zeros_like(low_mass)
    spare = low_count - 1 if BY_MASS else low_count.to(tl.int64) - needed
    while (high > low + 1) & (spare > 0):
        # Three quarters of the way by value, which is fast where logits are spread evenly, and the
        # middle by key, which is never slow.
        index = tl.arange(0, 4)
        share = (index + 1).to(tl.float32) * 0.25
        lowest = _value(low << shift)
        # The key of -inf may stand for NaN here.
        lowest = tl.where(lowest > -3.0e38, lowest, -3.0e38)
        pivots = _key(lowest * (1.0 - share) + _value(high << shift) * share) >> shift
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        pivots = tl.where(index == 3, middle, pivots)
        pivots = tl.minimum(tl.maximum(pivots, low + 1), high - 1)
        count = tl.zeros((4,), tl.int32)
        mass = tl.zeros((4,), tl.int64)
        for start in range(0, logits.size, CHUNK):
            keys, weights, mask = _load_chunk(logits, start, CHUNK)
            masses = _masses(weights, logits.one)
            above = (keys[None, :] >= pivots[:, None]) & mask[None, :]
            count += tl.sum(above.to(tl.int32), axis=1)
            mass += tl.sum(tl.where(above, masses[None, :], 0), axis=1)
        enough = mass >= needed if BY_MASS else count >= needed
        low = tl.max(tl.where(enough, pivots, low), axis=0)
        low_count = tl.min(tl.where(enough, count, low_count), axis=0)
        low_mass = tl.min(tl.where(enough, mass, low_mass), axis=0)
        high = tl.min(tl.where(enough, high, pivots), axis=0)
        high_count = tl.max(tl.where(enough, high_count, count), axis=0)
        high_mass = tl.max(tl.where(enough, high_mass, mass), axis=0)
        spare = low_count - high_count - 1 if BY_MASS else low_count.to(tl.int64) - needed
    return low, low_count, low_mass, high, high_count, high_mass


@triton.jit
def _settle(
    logits,
    kind,
    low,
    count,
    mass,
    total,
    numbers_ptr,
    u,
    CHUNK: tl.constexpr,
):
    """The index of the drawn token among ``logits`` in the order of their ids.

    Args:
        logits: of the row's others none is kept.
        kind: ``_NUCLEUS`` or ``_LIMITED``.
        low: a key that none of the kept ones is below.
        count: how many of the logits there are from ``low`` up.
        mass: what these weigh.
        total: what all of the row's tokens weigh.
        numbers_ptr: the row's parameters.
        u: the random number.
    """
    top_p = tl.load(numbers_ptr + 2)
    high = low
    between = tl.zeros_like(count)
    room = tl.zeros_like(count)
    if kind == _LIMITED:
        top_k = tl.load(numbers_ptr + 1).to(tl.int64)
        if count > top_k:
            low, low_count, low_mass, high, high_count, high_mass = _narrow(
                logits, low, count, mass, top_k, False, CHUNK
            )
            between = low_count - high_count
            room = top_k.to(tl.int32) - high_count
            count = top_k.to(tl.int32)
            mass = low_mass
            if room < between:
                # All of them are equal.
                mass = high_mass + room * ((low_mass - high_mass) // between)
        total = mass
    if top_p < 1:
        needed = _share(top_p, total)
        low, low_count, low_mass, high, high_count, high_mass = _narrow(
            logits, low, count, mass, needed, True, CHUNK
        )
        # Those between are equal, or there is one. At the lower bound of the top-k not all that
        # are equal may have been counted, and then ``room`` is less than there are.
        each = (low_mass - high_mass) // (low_count - high_count)
        room = ((needed - high_mass + each - 1) // each).to(tl.int32)
        between = room + 1
    kept = _Kept(low, high, between, room, tl.load(numbers_ptr + 3).to(tl.float32))
    weighed = tl.zeros_like(mass)
    seen = tl.zeros_like(count)
    for start in range(0, logits.size, CHUNK):
        masses, seen = _kept_masses(logits, kept, start, seen, CHUNK)
        weighed += tl.sum(masses, axis=0)
    limit = _limit(u, weighed)
    before = tl.zeros_like(mass)
    seen = tl.zeros_like(count)
    chosen = tl.zeros_like(count) + logits.size
    for start in range(0, logits.size, CHUNK):
        masses, seen = _kept_masses(logits, kept, start, seen, CHUNK)
        beyond = before + tl.cumsum(masses, axis=0) > limit
        first = tl.min(tl.where(beyond, start + tl.arange(0, CHUNK), logits.size), axis=0)
        chosen = tl.minimum(chosen, first)
        before += tl.sum(masses, axis=0)
    return chosen


@triton.jit
def _kept_masses(logits, kept, start, seen, CHUNK: tl.constexpr):
    """Masses of a chunk, 0 for tokens not kept, and the number between the bounds so far."""
    keys, weights, mask = _load_chunk(logits, start, CHUNK)
    is_kept = (keys >= kept.low) & (weights >= kept.min_p) & mask
    if kept.room < kept.between:
        inside = ((keys >= kept.low) & (keys < kept.high) & mask).to(tl.int32)
        ranks = seen + tl.cumsum(inside, axis=0)
        is_kept = is_kept & ((keys >= kept.high) | (ranks <= kept.room))
        seen += tl.sum(inside, axis=0)
    return tl.where(is_kept, _masses(weights, logits.one), 0), seen


@triton.jit
def _gather_kernel(
    rows,
    chosen,
    found,
    most,
    one,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait(PDL)
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    mode = tl.load(found.modes + place)
    if mode != _DONE:
        row = tl.load(rows.rows + place)
        numbers_ptr = rows.numbers + row * 7
        kind = mode & 3
        cols = block * BLOCK + tl.arange(0, BLOCK)
        mask = cols < rows.vocab
        blocks = tl.arange(0, BLOCK_BLOCKS)
        some = blocks < num_blocks
        masses_ptr = found.masses + place * (_PIVOTS + 1) * num_blocks
        every = tl.load(masses_ptr + _PIVOTS * num_blocks + blocks, mask=some, other=0)
        total = tl.sum(every, axis=0)
        if kind == _WHOLE:
            before = tl.sum(tl.where(blocks < block, every, 0), axis=0)
            own = tl.sum(tl.where(blocks == block, every, 0), axis=0)
            limit = _limit(tl.load(found.draws + place), total)
            if (before <= limit) & (limit < before + own):
                steepness = _steepness(numbers_ptr)
                x = _load_logits(rows, found, place, mode, cols, mask)
                weights = _weights(x, tl.load(found.peaks + place), steepness)
                min_p = tl.load(numbers_ptr + 3).to(tl.float32)
                masses = tl.where(weights >= min_p, _masses(weights, one), 0)
                beyond = before + tl.cumsum(masses, axis=0) > limit
                token = tl.min(tl.where(beyond, cols, rows.vocab - 1), axis=0)
                _take(token, mode != _DONE, place, row, chosen, rows.vocab)
        else:
            index = tl.arange(0, _PIVOTS)
            at = index[:, None] * num_blocks + blocks[None, :]
            parts = tl.load(
                found.above + place * _PIVOTS * num_blocks + at, mask=some[None, :], other=0
            )
            counts = tl.sum(parts, axis=1)
            masses = tl.sum(tl.load(masses_ptr + at, mask=some[None, :], other=0), axis=1)
            if kind == _LIMITED:
                # A token of weight 0 is never drawn.
                enough = (counts >= tl.load(numbers_ptr + 1)) | (masses == total)
            else:
                enough = masses >= _share(tl.load(numbers_ptr + 2), total)
            pivot_index = tl.min(tl.where(enough, index, _PIVOTS), axis=0)
            is_chosen = index == pivot_index
            size = tl.sum(tl.where(is_chosen, counts, 0), axis=0)
            is_gathered = (pivot_index < _PIVOTS) & (size <= most)
            pivot = tl.load(found.pivots + place * _PIVOTS + tl.minimum(pivot_index, _PIVOTS - 1))
            if is_gathered:
                own = is_chosen[:, None] & (blocks[None, :] == block)
                if tl.sum(tl.sum(tl.where(own, parts, 0), axis=1), axis=0) > 0:
                    earlier = is_chosen[:, None] & (blocks[None, :] < block)
                    offset = tl.sum(tl.sum(tl.where(earlier, parts, 0), axis=1), axis=0)
                    x = _load_logits(rows, found, place, mode, cols, mask)
                    above = (x >= pivot) & mask
                    to = place * most + offset + tl.cumsum(above.to(tl.int32), axis=0) - 1
                    tl.store(found.candidates + to, x, mask=above)
                    tl.store(found.ids + to, cols, mask=above)
            if block == 0:
                # Rare: nothing is gathered of a flat distribution, or for thousands of top-k.
                mass = tl.sum(tl.where(is_chosen, masses, 0), axis=0)
                mass = tl.where(pivot_index == _PIVOTS, total, mass)
                size = tl.where(pivot_index == _PIVOTS, rows.vocab, size)
                pivot = tl.where(pivot_index == _PIVOTS, float("-inf"), pivot)
                tl.store(found.sizes + place, tl.where(is_gathered, size, -size))
                tl.store(found.lows + place, pivot)
                tl.store(found.low_masses + place, mass)
                tl.store(found.totals + place, total)


@triton.jit
def _settle_kernel(
    rows,
    chosen,
    found,
    most,
    one,
    CHUNK: tl.constexpr,
    WHOLE_CHUNK: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait(PDL)
    place = tl.program_id(0).to(tl.int64)
    mode = tl.load(found.modes + place)
    kind = mode & 3
    if kind >= _NUCLEUS:
        row = tl.load(rows.rows + place)
        numbers_ptr = rows.numbers + row * 7
        shift = tl.where(mode >= _ADJUSTED, 0, UNUSED_BITS)
        # Rounded up: between two logits of 16 bits the pivot stands for the upper one, as the count
        # of those above it does.
        low = (_key(tl.load(found.lows + place)) + (tl.full((), 1, tl.int32) << shift) - 1) >> shift
        count = tl.load(found.sizes + place)
        mass = tl.load(found.low_masses + place)
        total = tl.load(found.totals + place)
        peak = tl.load(found.peaks + place)
        steepness = _steepness(numbers_ptr)
        u = tl.load(found.draws + place)
        row_of = (rows, found, place, mode)
        if count >= 0:
            gathered_ptr = found.candidates + place * most
            few = _Logits(gathered_ptr, *row_of, count, shift, peak, steepness, one)
            index = _settle(few, kind, low, count, mass, total, numbers_ptr, u, CHUNK)
            token = tl.load(found.ids + place * most + index)
        else:
            many = _Logits(None, *row_of, rows.vocab, shift, peak, steepness, one)
            token = _settle(many, kind, low, -count, mass, total, numbers_ptr, u, WHOLE_CHUNK)
        _take(token, mode != _DONE, place, row, chosen, rows.vocab)


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

    blocks = triton.cdiv(vocab, _BLOCK)
    most = min(vocab, _MOST_CANDIDATES)
    bits = mass_bits(vocab)
    adjustments = state.adjustments
    kinds = ban_ids = ban_ends = bias = prompt_mask = output_counts = None
    if adjustments is not None:
        kinds, ban_ids, ban_ends = adjustments.kinds, adjustments.ban_ids, adjustments.ban_ends
        bias, output_counts = adjustments.bias, adjustments.output_counts
        if adjustments.prompt_mask is not None:
            prompt_mask = adjustments.prompt_mask.view(torch.uint8)
    given = _Rows(logits, logits.stride(0), vocab, rows, state.numbers)
    chosen = _Chosen(tokens, last_tokens, kinds, output_counts)
    found = _Found(
        modes=scratch(dtype=torch.int32),
        peaks=scratch(dtype=torch.float32),
        draws=scratch(dtype=torch.float64),
        pivots=scratch(_PIVOTS.value, dtype=torch.float32),
        adjusted=None if adjustments is None else scratch(vocab, dtype=torch.float32),
        best=scratch(blocks, dtype=torch.float32),
        masses=scratch(_PIVOTS.value + 1, blocks, dtype=torch.int64),
        above=scratch(_PIVOTS.value, blocks, dtype=torch.int32),
        candidates=scratch(most, dtype=torch.float32),
        ids=scratch(most, dtype=torch.int32),
        sizes=scratch(dtype=torch.int32),
        lows=scratch(dtype=torch.float32),
        low_masses=scratch(dtype=torch.int64),
        totals=scratch(dtype=torch.int64),
    )
    common = {
        # The reference's penalties round each product.
        "enable_fp_fusion": False,
        **pdl_options(device),
    }
    blocked = {
        "num_blocks": blocks,
        "BLOCK": _BLOCK,
        "BLOCK_BLOCKS": triton.next_power_of_2(blocks),
        "num_warps": 8,
        **common,
    }
    grid = (num_rows, blocks)
    _peaks_kernel[grid](
        given,
        chosen,
        found,
        status,
        scratch(blocks, dtype=torch.int32),
        None if adjustments is None else scratch(blocks, dtype=torch.float32),
        arrival_counts(device, num_rows),
        positions,
        state.seeds,
        ban_ids,
        ban_ends,
        bias,
        prompt_mask,
        0 if ban_ids is None else ban_ids.shape[1],
        farthest=bits * math.log(2) + 1,
        **blocked,
    )
    one = 2.0**bits
    _masses_kernel[grid](given, found, one, **blocked)
    _gather_kernel[grid](given, chosen, found, most, one, **blocked)
    _settle_kernel[(num_rows,)](
        given,
        chosen,
        found,
        most,
        one,
        CHUNK=_CHUNK,
        WHOLE_CHUNK=_WHOLE_CHUNK,
        UNUSED_BITS=_UNUSED_BITS[logits.dtype],
        num_warps=16,
        **common,
    )
    return tokens, status
