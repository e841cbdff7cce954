"""Sampling on a GPU: four launches, no sort, and at most two readings of each row.

The first reads all logits, finds each row's largest and finishes the greedy rows. Of a row with a
top-k or a top-p it keeps a sample, some thousand logits, from which the second guesses two bounds
between which the least kept logit lies. The third reads all logits again: it weighs those from the
upper bound up by block, and gathers those between the bounds, usually some hundreds, with a
histogram of them. In the fourth one program per row finds the histogram's bin that the least kept
logit is in, and the logit among those few, and draws: the block, then the token. A row that nothing
restricts is all above its bounds.

Of a penalised row few tokens were seen, and a list has them. The first leaves out all that were
seen, the third weighs all as if none had been; then both go through the list, and the third takes
back what it weighed of those. It gets the logits of most from the first.

The guess decides how long it takes, not what is chosen: if it was wrong, the fourth goes through
the whole row. Weights are integers, whose sums do not depend on how they are parted. A launch reads
what was there before the first while the launch before it still runs.
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
    num_multiprocessors,
    pdl_options,
    wait,
)
from engine_core.kernels.sampling.reference import LEAST_TEMPERATURE, mass_bits
from engine_core.kernels.turns import Turns

if TYPE_CHECKING:
    from engine_core.kernels.sampling import SamplingState

# Threads of a program that reads all logits, and how often each of them reads four of a block, a
# power of 2; the first reading takes eight. One row of 128,000 logits gives a program to each of 63
# multiprocessors.
_LANES = 256
_PARTS = 2
_MANY_ROWS = 64
_PARTS_OF_MANY = 4
# Many rows would be many times the programs of a GPU, and each program begins with reads that
# depend on each other and ends with exchanges. So each has a run of a row's blocks, and there are
# at most as many on each multiprocessor as have room at once, or two for each row.
_PROGRAMS_OF_MANY = 6
# Blocks of such a run of the third reading if nothing is adjusted, however many programs there are:
# longer runs take 11% longer where logits are even, since what is gathered is not the same in all.
_RUN_OF_PLAIN = 2
# Registers of a thread, so that more programs run at once: for many rows of those that read all
# logits, if nothing adjusts these and if something does, and of those that settle; for few rows of
# those that first read what something adjusts.
_READ_REGISTERS_OF_MANY = 40
_ADJUST_REGISTERS_OF_MANY = 40
_SETTLE_REGISTERS_OF_MANY = 64
_ADJUST_REGISTERS_OF_FEW = 32
# The sample has one logit of this many, or of up to half as many, and at most so many.
_SAMPLED = 40
_MOST_SAMPLED = 16384
# Bins of the sample between two bounds, and how often it is counted at most, each time in smaller
# ones.
_SAMPLE_BINS = 128
_SAMPLE_ROUNDS: tl.constexpr = tl.constexpr(3)
# Few enough tokens of the sample in the bins of the bounds, and a thousand of a row.
_FEW_AT_ENDS: tl.constexpr = tl.constexpr(32.0)
# Its threads have 32 logits of the sample each.
_SAMPLED_BY_WARP = 1024
# The margin of the bounds: standard deviations, and sampled tokens that may be missing. One row of
# a million misses 5 deviations; each deviation is a thousand tokens or less to gather.
_DEVIATIONS: tl.constexpr = tl.constexpr(5.0)
_MISSING: tl.constexpr = tl.constexpr(8.0)
# Sampled tokens above the lower bound at least: few say nothing about the heaviest tokens.
_FEWEST: tl.constexpr = tl.constexpr(16.0)
# Most tokens that are gathered, and the logits that need no sample.
_MOST_CANDIDATES = 16384
# So many seen tokens of a row, a multiple of ``_LANES``, are adjusted once, by the first reading:
# what is known of each is in lines of memory of its own, which take as long as all logits.
_KEPT_SEEN = 4096
# The entry of a candidate whose logit is -inf, which weighs nothing.
_NO_CANDIDATE: tl.constexpr = tl.constexpr(-(0x800000 << 32))
# Bits of a bin's number in the histogram of those gathered, of which few or none share a bin, and
# how many of a bin are compared with each other.
_BIN_BITS = 10
_LISTED = 128
# At a time, which bounds the registers that it takes.
_COMPARED: tl.constexpr = tl.constexpr(32)
# Logits that the narrowing program reads at once, of those gathered or of all, and its warps.
_CHUNK = 1024
_SETTLE_WARPS = 16
# Low bits that are the same for all logits of a type once they are float32.
_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}

_LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
_LEAST_TEMPERATURE: tl.constexpr = tl.constexpr(LEAST_TEMPERATURE)
# Of those that are not -inf.
_LEAST_LOGIT: tl.constexpr = tl.constexpr(-3.4028234663852886e38)

# Bits of a token in its place in the order of choice, which has the logit's key above them.
_TOKEN_BITS: tl.constexpr = tl.constexpr(24)
_LAST_TOKEN: tl.constexpr = tl.constexpr(2**24 - 1)
# Below all places.
_NOWHERE: tl.constexpr = tl.constexpr(-(2**62))

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
    seen_ids: Any
    seen_sizes: Any


class _Chosen(NamedTuple):
    """Where the choice of a row is stored.

    Attributes:
        tokens: of all turns.
        last_tokens: by row of the persistent batch.
        turn: a pointer to the number of this turn; to any number if both strides are 0.
        tokens_stride: of turns.
        status_stride: of turns.
    """

    tokens: Any
    last_tokens: Any
    turn: Any
    tokens_stride: Any
    status_stride: Any


class _Found(NamedTuple):
    """Results of a launch for those after it, for each row.

    Attributes:
        modes: the kind of choice, and how logits are adjusted.
        peaks: the largest logit.
        draws: the random number.
        sample: some of the adjusted logits, float32.
        totals: about what all tokens of a nucleus row weigh, float32.
        bounds: ``[3]`` float32: the lower and the upper bound of those that are gathered, and below
            which logit none weighs anything.
        sums: what all tokens of a nucleus row weigh, or how many of a top-k row are above the
            bounds; and what those of a nucleus row that are above weigh.
        sizes: how many tokens are between the bounds; and a count of the narrowing program.
        masses: what a block's tokens above the bounds weigh, but for those ``min_p`` excludes.
        candidates: the tokens between the bounds in any order: the bits of the logit, then 32 bits
            of the token.
        bins: a histogram of them: what tokens of a nucleus row weigh, or how many there are.
        kept: the first seen tokens of a penalised row that is random: the bits of the logit that
            others would have there, then those of the penalised one; None if nothing is adjusted.
        listed: ``[2]``: of those of one bin the places in the order of choice, and what each adds.
    """

    modes: Any
    peaks: Any
    draws: Any
    sample: Any
    totals: Any
    bounds: Any
    sums: Any
    sizes: Any
    masses: Any
    candidates: Any
    bins: Any
    kept: Any
    listed: Any


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
def _least_key(x, shift):
    """The least key, without its unused low bits, of a logit that is ``x`` or more."""
    key = _key(x)
    # Below 0 these bits of a logit's key are ones: all keys that are cut to the same are at most
    # the logit's. From 0 up they are zeros.
    rest = tl.where(key < 0, 0, (tl.full((), 1, tl.int32) << shift) - 1)
    return (key + rest) >> shift


@triton.jit
def _bin_bits(length, BITS: tl.constexpr):
    """How many low bits numbers below ``length`` may lose to be ``BITS`` bits long."""
    exponent = (length.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return tl.maximum(exponent + 1 - BITS, 0)


@triton.jit
def _gathered_keys(lower, upper, peak, shift):
    """The first key and the one past the last of those from ``lower`` up to ``upper``."""
    # Between two logits of 16 bits a bound stands for the upper one.
    end = (_key(peak) >> shift) + 1
    return _least_key(lower, shift), tl.minimum(_least_key(upper, shift), end)


@triton.jit
def _steepness(numbers_ptr):
    """The reciprocal of a row's temperature, with which a row that is drawn weighs its logits."""
    temperature = tl.maximum(tl.load(numbers_ptr).to(tl.float32), _LEAST_TEMPERATURE)
    return tl.div_rn(1.0, temperature)


@triton.jit
def _weights(x, peak, steepness):
    # By the steps of tl.exp, but for what is below 2**-126, which weighs nothing as an integer.
    return tl.exp2((x - peak) * steepness * _LOG2_E)


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
def _load_seen(rows, row, mode, cols, end):
    """Marks of the seen tokens of a penalised row; 0 for other rows and from ``end`` on."""
    end = tl.where(((mode // _KINDS) & 2) != 0, end, 0)
    return tl.load(rows.seen + row * rows.vocab + cols, mask=cols < end, other=0)


class _Penalties(NamedTuple):
    """A row's penalties in float32, see the reference; and 1 / ``repetition``."""

    repetition: Any
    inverse: Any
    frequency: Any
    presence: Any


@triton.jit
def _load_penalties(numbers_ptr):
    repetition = tl.load(numbers_ptr + 4).to(tl.float32)
    return _Penalties(
        repetition,
        # A row of padding has none.
        tl.div_rn(1.0, tl.where(repetition == 0.0, 1.0, repetition)),
        tl.load(numbers_ptr + 5).to(tl.float32),
        tl.load(numbers_ptr + 6).to(tl.float32),
    )


@triton.jit
def _penalise(x, penalties, seen, counts):
    """The logits ``x`` after a row's penalties."""
    # With the remainder of a product by a rounded inverse a quotient is rounded as a division is.
    quotient = x * penalties.inverse
    rest = tl.fma(-quotient, penalties.repetition, x)
    quotient = tl.fma(rest, penalties.inverse, quotient)
    repeated = tl.where(x > 0, quotient, x * penalties.repetition)
    x = tl.where(seen != 0, repeated, x)
    x -= counts.to(tl.float32) * penalties.frequency
    return tl.where(seen >= 2, x - penalties.presence, x)


@triton.jit
def _bias(x, rows, row, mode, cols, mask):
    """The logits ``x`` of one row, and its bias if it has any."""
    if rows.kinds is not None:
        is_biased = ((mode // _KINDS) & 1) != 0
        if is_biased:
            x += tl.load(rows.bias + row * rows.vocab + cols, mask=mask, other=0.0)
    return x


@triton.jit
def _ban(x, rows, row, mode, cols):
    """The logits ``x`` of one row, -inf for tokens that are banned from it."""
    if rows.kinds is not None:
        is_banned = ((mode // _KINDS) & _BANNED) != 0
        if is_banned:
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
    x = _bias(x, rows, row, mode, cols, cols < rows.vocab)
    if rows.kinds is not None:
        seen = _load_seen(rows, row, mode, cols, rows.vocab)
        # Few tokens were generated, and memory is read for those alone.
        counts_ptr = rows.counts + row * rows.vocab + cols
        counts = tl.load(counts_ptr, mask=seen >= 2, other=0)
        x = _penalise(x, _load_penalties(rows.numbers + row * 7), seen, counts)
    return _ban(x, rows, row, mode, cols)


class _SeenTokens(NamedTuple):
    """Some of a penalised row's seen tokens, one for each thread.

    Attributes:
        are_there: which of them are any.
        ids: the tokens.
        raw: the model's logits of them, -inf where there is none.
        counts: how often they were generated.
    """

    are_there: Any
    ids: Any
    raw: Any
    counts: Any


@triton.jit
def _seen_size(size, mode):
    """How many tokens were seen of a penalised row, 0 for others.

    ``size``: what is stored for the row, which is read before its mode is there.
    """
    return tl.where(((mode // _KINDS) & 2) != 0, size, 0)


@triton.jit
def _load_seen_ids(rows, row, start, size, LANES: tl.constexpr):
    """Seen tokens from the one at ``start`` on, of ``size``, 0 where there is none."""
    index = start + tl.arange(0, LANES)
    return tl.load(rows.seen_ids + row * rows.vocab + index, mask=index < size, other=0)


@triton.jit
def _load_seen_tokens(rows, place, row, ids, start, size, LANES: tl.constexpr):
    """Logits and counts of the seen tokens ``ids``, those from ``start`` on."""
    are_there = start + tl.arange(0, LANES) < size
    raw_ptr = rows.logits + place * rows.stride + ids
    raw = tl.load(raw_ptr, mask=are_there, other=float("-inf"))
    counts = tl.load(rows.counts + row * rows.vocab + ids, mask=are_there, other=0)
    return _SeenTokens(are_there, ids, raw, counts)


@triton.jit
def _load_kept(kept, place, start, size, LANES: tl.constexpr, KEPT: tl.constexpr):
    """Logits that _adjust_seen gave for seen tokens from ``start`` on, of those that are kept."""
    index = start + tl.arange(0, LANES)
    both = tl.load(kept + place * KEPT + index, mask=index < tl.minimum(size, KEPT), other=0)
    before = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return before, both.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _adjust_seen(tokens, rows, row, mode, penalties):
    """Logits of seen tokens as float32: what others would have there, and the penalised ones."""
    x = tokens.raw.to(tl.float32)
    x = _bias(x, rows, row, mode, tokens.ids, tokens.are_there)
    penalised = _penalise(x, penalties, tl.where(tokens.counts > 0, 2, 1), tokens.counts)
    x = _ban(x, rows, row, mode, tokens.ids)
    return x, _ban(penalised, rows, row, mode, tokens.ids)


@triton.jit
def _kind(numbers_ptr, vocab):
    """From which tokens a row that is drawn chooses."""
    top_k = tl.load(numbers_ptr + 1)
    is_limited = (top_k >= 1) & (top_k < vocab)
    is_nucleus = tl.load(numbers_ptr + 2) < 1
    return tl.where(is_limited, _LIMITED, tl.where(is_nucleus, _NUCLEUS, _WHOLE))


@triton.jit
def _take(token, is_live, turn, place, row, chosen, rows):
    """Make ``token`` the row's one."""
    token = token.to(tl.int64)
    tl.store(chosen.tokens + turn * chosen.tokens_stride + place, token)
    tl.store(chosen.last_tokens + row, token)
    # Rows of padding share a row.
    if rows.kinds is not None:
        is_counted = is_live & ((tl.load(rows.kinds + row) & 4) != 0)
        at = row * rows.vocab + token
        count = tl.load(rows.counts + at, mask=is_counted, other=0)
        tl.store(rows.counts + at, count + 1, mask=is_counted)
        seen = tl.load(rows.seen + at, mask=is_counted, other=0)
        tl.store(rows.seen + at, seen | 2, mask=is_counted)
        is_new = is_counted & (seen == 0)
        size = tl.load(rows.seen_sizes + row, mask=is_new, other=0)
        tl.store(rows.seen_ids + row * rows.vocab + size, token, mask=is_new)
        tl.store(rows.seen_sizes + row, size + 1, mask=is_new)


@triton.jit
def _larger(x, y):
    """The larger ones; NaN is the largest."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _two(x):
    """Its parts of even and of odd places."""
    return tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))


@triton.jit
def _four(x):
    """The first to the fourth of each four, which stay in the thread that loaded them."""
    even, odd = _two(x)
    x0, x2 = _two(even)
    x1, x3 = _two(odd)
    return x0, x1, x2, x3


@triton.jit
def _first_of_eight(x):
    even, _odd = _two(x)
    first, _odd = _two(even)
    first, _odd = _two(first)
    return first


@triton.jit
def _largest_of_eight(x):
    even, odd = _two(x)
    even, odd = _two(_larger(even, odd))
    even, odd = _two(_larger(even, odd))
    return _larger(even, odd)


@triton.jit
def _weight_of_eight(x, top, powers):
    """Weigh eight logits together, of each thread, beside the logit ``top``."""
    even, odd = _two(x)
    x0, x2, x4, x6 = _four(even)
    x1, x3, x5, x7 = _four(odd)
    sum_ = tl.exp2((x0 - top) * powers) + tl.exp2((x1 - top) * powers)
    sum_ += tl.exp2((x2 - top) * powers) + tl.exp2((x3 - top) * powers)
    sum_ += tl.exp2((x4 - top) * powers) + tl.exp2((x5 - top) * powers)
    return sum_ + tl.exp2((x6 - top) * powers) + tl.exp2((x7 - top) * powers)


@triton.jit
def _place_in_eight(x, largest):
    """Where of each eight the first is that is ``largest``."""
    even, odd = _two(x)
    x0, x2, x4, x6 = _four(even)
    x1, x3, x5, _x7 = _four(odd)
    place = tl.where(x6 == largest, 6, 7)
    place = tl.where(x5 == largest, 5, place)
    place = tl.where(x4 == largest, 4, place)
    place = tl.where(x3 == largest, 3, place)
    place = tl.where(x2 == largest, 2, place)
    place = tl.where(x1 == largest, 1, place)
    return tl.where(x0 == largest, 0, place)


# One kernel for any number of many rows, and so below.
@triton.jit(do_not_specialize=["num_blocks", "parts"])
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
    parts,
    MANY: tl.constexpr,
    LANES: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
    SAMPLE: tl.constexpr,
    PICKS: tl.constexpr,
    DISTANCE: tl.constexpr,
    PDL: tl.constexpr,
):
    PART: tl.constexpr = 8 * LANES
    parts = parts if MANY else 1
    wait(PDL)
    launch_dependents(PDL)
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    vocab = rows.vocab
    # On its way while it is read what the row is.
    first_part = block * parts
    start = first_part * PART
    next_x = _load_raw(rows, place, start + tl.arange(0, PART), vocab)
    row = tl.load(rows.rows + place)
    position = tl.load(positions_ptr + place)
    live = position >= 0
    numbers_ptr = rows.numbers + row * 7
    # In float64, for a temperature that float32 has no number for is not greedy.
    is_random = live & (tl.load(numbers_ptr) > 0)
    mode = _kind(numbers_ptr, vocab)
    is_nucleus = mode == _NUCLEUS
    is_summed = is_random & is_nucleus
    if rows.kinds is not None:
        adjusted = tl.load(rows.kinds + row) & 3
        seen_size = tl.load(rows.seen_sizes + row)
        is_banned = position + 1 < tl.load(ban_ends_ptr + row)
        mode += _KINDS * (adjusted + tl.where(is_banned, _BANNED, 0))
    steepness = _steepness(numbers_ptr)
    powers = steepness * _LOG2_E
    offsets = tl.arange(0, PART)
    lanes = tl.arange(0, LANES)
    # For each lane: the largest, the first token that has it, and what the lane weighs beside it.
    best = tl.full((LANES,), float("-inf"), tl.float32)
    first = start + lanes
    weight = tl.zeros((LANES,), tl.float32)
    raw_best = best
    size = tl.where(live, vocab, 0)
    end = tl.minimum(start + PART * parts, size)
    live_mode = tl.where(live, mode, 0)
    of = (rows, row, live_mode)
    is_sampled = is_random & (mode % _KINDS >= _NUCLEUS)
    picked_end = tl.where(is_sampled, end, 0)
    sample_ptr = found.sample + place * SAMPLE + lanes // DISTANCE
    if rows.kinds is not None:
        is_moved = ((live_mode // _KINDS) & (_BANNED + 1)) != 0
        next_seen = _load_seen(*of, start + offsets, end)
        seen_size = _seen_size(seen_size, live_mode)
        seen_start = block * LANES
        seen_step = num_blocks * LANES
        ids = _load_seen_ids(rows, row, seen_start, seen_size, LANES)
        of_tokens = (rows, place, row, ids, seen_start, seen_size)
        if not MANY:
            tokens = _load_seen_tokens(*of_tokens, LANES)
    for part in range(parts):
        cols = start + part * PART + offsets
        x = next_x.to(tl.float32)
        next_x = _load_raw(rows, place, cols + PART, end)
        own = start + part * PART + 8 * lanes
        is_picked = (lanes % DISTANCE == 0) & (own < picked_end)
        if rows.kinds is not None:
            seen = next_seen
            next_seen = _load_seen(*of, cols + PART, end)
            if is_moved:
                raw_best = _larger(raw_best, _largest_of_eight(x))
                x = _ban(_bias(x, *of, cols, cols < size), *of, cols)
            x = tl.where(seen == 0, x, float("-inf"))
            is_picked = is_picked & (_first_of_eight(seen) == 0)
        if PICKS > 0:
            at = (first_part + part) * PICKS
            tl.store(sample_ptr + at, _first_of_eight(x), mask=is_picked)
        largest = _largest_of_eight(x)
        if is_random == 0:
            first = tl.where(largest > best, own + _place_in_eight(x, largest), first)
        largest = _larger(largest, best)
        if is_summed:
            # So far there may be nothing but -inf.
            top = tl.maximum(largest, _LEAST_LOGIT)
            weight *= tl.exp2((best - top) * powers)
            weight += _weight_of_eight(x, top, powers)
        best = largest
    if rows.kinds is not None:
        if is_moved == 0:
            raw_best = best
        penalties = _load_penalties(numbers_ptr)
        sampled_ids = tl.where(is_sampled, vocab, 0)
        kept_size = tl.where(is_random, tl.minimum(seen_size, KEPT), 0)
        if MANY:
            # Of long programs it is not worth the registers to have them earlier.
            tokens = _load_seen_tokens(*of_tokens, LANES)
        while seen_start < seen_size:
            raw_best = _larger(raw_best, tokens.raw.to(tl.float32))
            before, x = _adjust_seen(tokens, *of, penalties)
            x = tl.where(tokens.are_there, x, float("-inf"))
            ids = tl.where(tokens.are_there, tokens.ids, vocab)
            kept = before.to(tl.int32, bitcast=True).to(tl.int64) << 32
            kept |= x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
            index = seen_start + lanes
            tl.store(found.kept + place * KEPT + index, kept, mask=index < kept_size)
            if PICKS > 0:
                lane = ids % PART // 8
                at = place * SAMPLE + ids // PART * PICKS + lane // DISTANCE
                is_picked = (ids % 8 == 0) & (lane % DISTANCE == 0) & (ids < sampled_ids)
                tl.store(found.sample + at, x, mask=is_picked)
            # The ids may be any.
            first = tl.where((x > best) | ((x == best) & (ids < first)), ids, first)
            largest = _larger(x, best)
            if is_summed:
                top = tl.maximum(largest, _LEAST_LOGIT)
                weight *= tl.exp2((best - top) * powers)
                weight += tl.exp2((x - top) * powers)
            best = largest
            seen_start += seen_step
            next_ids = _load_seen_ids(rows, row, seen_start, seen_size, LANES)
            of_next = (next_ids, seen_start, seen_size)
            tokens = _load_seen_tokens(rows, place, row, *of_next, LANES)
    # NaN is as good as infinity.
    best = tl.where(best == best, best, float("inf"))
    here = place * num_blocks
    peak = tl.max(best, axis=0)
    tl.store(best_ptr + here + block, peak)
    tl.store(place_ptr + here + block, tl.min(tl.where(best == peak, first, vocab), axis=0))
    if rows.kinds is not None:
        raw_best = tl.where(raw_best == raw_best, raw_best, float("inf"))
        tl.store(raw_best_ptr + here + block, tl.max(raw_best, axis=0))
    if is_summed:
        # A block may have nothing but -inf.
        share = _weights(best, tl.maximum(peak, _LEAST_LOGIT), steepness)
        tl.store(sum_ptr + here + block, tl.sum(weight * share, axis=0))
    if arrives_last(arrivals_ptr + place, num_blocks):
        turn = tl.load(chosen.turn)
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
        tl.store(status_ptr + turn * chosen.status_stride + place, status.to(tl.int8))
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
            # Of a random row without a finite logit any token, which means nothing.
            _take(tl.minimum(token, vocab - 1), live, turn, place, row, chosen, rows)


@triton.jit
def _bounds_kernel(
    rows,
    found,
    farthest,
    num_blocks,
    PART: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
    SAMPLE: tl.constexpr,
    PICKS: tl.constexpr,
    DISTANCE: tl.constexpr,
    BINS: tl.constexpr,
    BIN_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    vocab = rows.vocab
    row = tl.load(rows.rows + place)
    numbers_ptr = rows.numbers + row * 7
    wait(PDL)
    launch_dependents(PDL)
    mode = tl.load(found.modes + place)
    kind = mode % _KINDS
    if rows.kinds is not None:
        blocks = tl.arange(0, BLOCK_BLOCKS)
        tl.store(found.masses + place * num_blocks + blocks, 0, mask=blocks < num_blocks)
    if kind >= _NUCLEUS:
        tl.store(found.bins + (place << BIN_BITS) + tl.arange(0, 1 << BIN_BITS), 0)
        peak = tl.load(found.peaks + place)
        steepness = _steepness(numbers_ptr)
        temperature = tl.maximum(tl.load(numbers_ptr).to(tl.float32), _LEAST_TEMPERATURE)
        # Nothing weighs anything that is farther from the peak.
        floor = tl.maximum(peak - temperature * farthest, _LEAST_LOGIT)
        lower = floor
        upper = tl.full((), float("inf"), tl.float32)
        if PICKS > 0:
            index = tl.arange(0, SAMPLE)
            is_there = index // PICKS * PART + index % PICKS * (8 * DISTANCE) < vocab
            x = tl.load(found.sample + place * SAMPLE + index, mask=is_there, other=float("inf"))
            # In units of what one token of the sample stands for: how much is to be below the
            # bounds, tokens or weight.
            size = tl.sum(is_there.to(tl.float32), axis=0)
            share = size / vocab.to(tl.float32)
            top_p = tl.load(numbers_ptr + 2)
            is_limited = kind == _LIMITED
            if is_limited:
                below = (vocab - tl.load(numbers_ptr + 1).to(tl.float32)) * share
            else:
                below = (1.0 - top_p.to(tl.float32)) * tl.load(found.totals + place) * share
            # A top-p beside a top-k is a share of what that keeps, all of which must be gathered.
            has_upper = (is_limited == 0) | (top_p >= 1)
            sizes = tl.where(is_limited, 1.0, _weights(tl.minimum(x, peak), peak, steepness))
            bins = tl.arange(0, BINS)
            low = tl.maximum(floor, tl.min(x, axis=0))
            high = peak
            step = tl.full((), 0, tl.int32)
            while step < _SAMPLE_ROUNDS:
                # Below the lower bound there is surely less, below the upper one surely more. All
                # edges of equal bins are tried at once, then those of smaller bins between the
                # bounds.
                width = high * (1.0 / BINS) - low * (1.0 / BINS)
                scale = tl.where(width > 1e-37, 1.0 / tl.maximum(width, 1e-37), 0.0)
                is_below = x < low
                inside = tl.where(is_below, sizes, 0.0)
                index = tl.where(is_below, 0.0, tl.minimum(x, high) - low) * scale
                index = tl.minimum(index, BINS - 1.0).to(tl.int32)
                counted = tl.histogram(index, BINS, mask=(is_below == 0) & (x <= high))
                counted = counted.to(tl.float32)
                edges = low + bins.to(tl.float32) * width
                each = tl.where(is_limited, 1.0, _weights(edges, peak, steepness))
                middle = tl.where(is_limited, 1.0, _weights(edges + 0.5 * width, peak, steepness))
                weighed = counted * middle
                number = tl.sum(is_below.to(tl.float32), axis=0) + tl.cumsum(counted) - counted
                sum_ = tl.sum(inside, axis=0) + tl.cumsum(weighed) - weighed
                squares = weighed * middle
                squares = tl.sum(inside * inside, axis=0) + tl.cumsum(squares) - squares
                variance = tl.maximum(squares - sum_ * sum_ / size, 0.0)
                margin = _DEVIATIONS * tl.sqrt(variance) + _MISSING * each
                # A heavy token in the sample hides that there is more, far above where it is.
                has_more = (sum_ - margin >= below) & has_upper
                has_less = (sum_ + margin <= below) & (number <= size - _FEWEST)
                last = tl.max(tl.where(has_less, bins, -1), axis=0)
                first = tl.min(tl.where(has_more, bins, BINS), axis=0)
                at_ends = tl.sum(tl.where((bins == last) | (bins + 1 == first), counted, 0.0))
                is_fine = (at_ends <= _FEW_AT_ENDS) | ((last < 0) & (first == BINS))
                step = tl.where(is_fine, _SAMPLE_ROUNDS, step + 1)
                next_low = low + last.to(tl.float32) * width
                next_high = low + first.to(tl.float32) * width
                lower = tl.where(last >= 0, next_low, lower)
                upper = tl.where(first < BINS, next_high, upper)
                if first < BINS:
                    high = next_high
                elif upper == float("inf"):
                    high = next_low + width
                low = tl.where(last >= 0, next_low, low)
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
        bins_ptr: their histogram.
        last_key: the largest key of them.
        shift: unused low bits of their keys.
        bits: more low bits that do not tell their bin.
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
    bins_ptr: Any
    last_key: Any
    shift: Any
    bits: Any
    most: Any
    peak: Any
    steepness: Any
    one: Any
    min_p: Any


@triton.jit
def _is_between(x, cols, rows, row, may_be_seen, bounds, HAS_ABOVE: tl.constexpr):
    """Which logits are between the bounds and of tokens that were not seen.

    ``may_be_seen``: whether there are any in the row, for each thread.
    """
    between = x >= bounds.lower
    if HAS_ABOVE:
        between = between & (x < bounds.upper)
    if rows.kinds is not None:
        # Few are, and memory is read for those alone.
        seen_ptr = rows.seen + row * rows.vocab + cols
        seen = tl.load(seen_ptr, mask=between & may_be_seen, other=0)
        between = between & (seen == 0)
    return between


@triton.jit
def _gather_lanes(x, cols, measure, between, to, bounds):
    """Gather one logit for each thread at the places ``to``; returns the places after them.

    ``between``: which of them are gathered; ``measure``: what each adds to the histogram.
    """
    # Without a sign no sum of 64 bits is needed for a token.
    token = cols.to(tl.uint32, bitcast=True).to(tl.int64)
    entry = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | token
    tl.store(bounds.candidates_ptr + to, entry, mask=between & (to < bounds.most))
    distance = bounds.last_key - (_key(x) >> bounds.shift)
    at = (distance.to(tl.uint32, bitcast=True) >> bounds.bits).to(tl.int32)
    tl.atomic_add(bounds.bins_ptr + at, measure, mask=between, sem="relaxed")
    return to + between.to(tl.int32)


@triton.jit
def _weigh(x, rows, bounds):
    """Weights of the logits ``x``, and masses.

    A logit that a penalty makes smaller may be above the largest, and weighs what that does.
    """
    if rows.kinds is not None:
        x = tl.minimum(x, bounds.peak)
    weights = _weights(x, bounds.peak, bounds.steepness)
    return weights, _masses(weights, bounds.one)


@triton.jit
def _weigh_lanes(
    x, rows, bounds, sums, KIND: tl.constexpr, HAS_ABOVE: tl.constexpr, HAS_LEAST: tl.constexpr
):
    """Weigh one logit for each thread; returns ``sums`` with them, as _weigh_block, and masses."""
    measure, above_mass, drawable = sums
    masses = tl.zeros(x.shape, tl.int64)
    if HAS_ABOVE or KIND == _NUCLEUS:
        weights, masses = _weigh(x, rows, bounds)
        if KIND == _NUCLEUS:
            measure += masses
        if HAS_ABOVE:
            over = masses
            if KIND != _WHOLE:
                above = x >= bounds.upper
                over = tl.where(above, masses, 0)
                if KIND == _LIMITED:
                    measure += above.to(tl.int64)
            if KIND == _NUCLEUS:
                above_mass += over
            if HAS_LEAST:
                over = tl.where(weights >= bounds.min_p, over, 0)
            if HAS_LEAST or KIND != _NUCLEUS:
                drawable += over
    if KIND != _NUCLEUS:
        masses = tl.full(x.shape, 1, tl.int64)
    return (measure, above_mass, drawable), masses


@triton.jit
def _weigh_block(
    rows,
    place,
    row,
    mode,
    start,
    end,
    raw,
    bounds,
    sums,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ABOVE: tl.constexpr,
    HAS_LEAST: tl.constexpr,
):
    """Gather and weigh the logits of a block, four at a time for each thread.

    Seen tokens of a penalised row are weighed as if they were not penalised, and not gathered.

    Args:
        raw: those that are first, as the model gave them.
        end: the first token that is another program's.
        sums: of the program's blocks before: the mass of all for a nucleus, or the number above
            the bounds for a top-k; the mass above them for a nucleus; and the mass above them that
            can be drawn.

    Returns:
        The three sums with those of the block, and the logits that follow it.
    """
    lanes = tl.arange(0, LANES)
    offsets = tl.arange(0, 4 * LANES)
    next_x = raw
    may_be_seen = lanes < tl.where(((mode // _KINDS) & 2) != 0, LANES, 0)
    of = (rows, bounds)
    between_of = (rows, row, may_be_seen, bounds, HAS_ABOVE)
    for part in range(PARTS):
        cols = start + part * 4 * LANES + offsets
        x = next_x.to(tl.float32)
        # The next are on their way meanwhile.
        next_x = _load_raw(rows, place, cols + 4 * LANES, end)
        x = _bias(x, rows, row, mode, cols, cols < rows.vocab)
        x = _ban(x, rows, row, mode, cols)
        x0, x1, x2, x3 = _four(x)
        sums, measure0 = _weigh_lanes(x0, *of, sums, KIND, HAS_ABOVE, HAS_LEAST)
        sums, measure1 = _weigh_lanes(x1, *of, sums, KIND, HAS_ABOVE, HAS_LEAST)
        sums, measure2 = _weigh_lanes(x2, *of, sums, KIND, HAS_ABOVE, HAS_LEAST)
        sums, measure3 = _weigh_lanes(x3, *of, sums, KIND, HAS_ABOVE, HAS_LEAST)
        if KIND != _WHOLE:
            first = start + part * 4 * LANES + 4 * lanes
            between0 = _is_between(x0, first, *between_of)
            between1 = _is_between(x1, first + 1, *between_of)
            between2 = _is_between(x2, first + 2, *between_of)
            between3 = _is_between(x3, first + 3, *between_of)
            size = between0.to(tl.int32) + between1.to(tl.int32)
            size += between2.to(tl.int32) + between3.to(tl.int32)
            # Few threads have any, and in any order.
            sizes_ptr = bounds.size_ptr + tl.zeros_like(lanes)
            to = tl.atomic_add(sizes_ptr, size, mask=size > 0, sem="relaxed")
            to = _gather_lanes(x0, first, measure0, between0, to, bounds)
            to = _gather_lanes(x1, first + 1, measure1, between1, to, bounds)
            to = _gather_lanes(x2, first + 2, measure2, between2, to, bounds)
            to = _gather_lanes(x3, first + 3, measure3, between3, to, bounds)
    measure, above_mass, drawable = sums
    if KIND == _NUCLEUS and HAS_ABOVE and not HAS_LEAST:
        drawable = above_mass
    return (measure, above_mass, drawable), next_x


@triton.jit
def _correct(sums, tokens, rows, mode, bounds, masses_ptr, BLOCK: tl.constexpr):
    """Weigh seen tokens by their penalised logits, and not as _weigh_block did; gather them.

    Args:
        sums: of the tokens that one thread weighed, as the first two of _weigh_block.
        tokens: which there are, the tokens, and their logits before and after the penalties.
        rows: the inputs.
        mode: as in ``_Found``.
        bounds: the arguments of the launch.
        masses_ptr: what tokens weigh that can be drawn, by block.
    """
    measure, above_mass = sums
    are_there, ids, before, x = tokens
    is_nucleus = mode % _KINDS == _NUCLEUS
    old_weights, old_masses = _weigh(before, rows, bounds)
    weights, masses = _weigh(x, rows, bounds)
    was_above = before >= bounds.upper
    is_above = x >= bounds.upper
    number = is_above.to(tl.int64) - was_above.to(tl.int64)
    measure += tl.where(is_nucleus, masses - old_masses, number)
    old_over = tl.where(was_above, old_masses, 0)
    over = tl.where(is_above, masses, 0)
    above_mass += over - old_over
    change = tl.where(weights >= bounds.min_p, over, 0)
    change -= tl.where(old_weights >= bounds.min_p, old_over, 0)
    # Their blocks are any.
    is_changed = are_there & (change != 0)
    tl.atomic_add(masses_ptr + ids // BLOCK, change, mask=is_changed, sem="relaxed")
    between = are_there & (x >= bounds.lower) & (x < bounds.upper)
    sizes_ptr = bounds.size_ptr + tl.zeros_like(ids)
    to = tl.atomic_add(sizes_ptr, 1, mask=between, sem="relaxed")
    _gather_lanes(x, ids, tl.where(is_nucleus, masses, 1), between, to, bounds)
    return measure, above_mass


@triton.jit(do_not_specialize=["run"])
def _weigh_kernel(
    rows,
    found,
    most,
    one,
    num_blocks,
    run,
    MANY: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    KEPT: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    BIN_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    BLOCK: tl.constexpr = 4 * LANES * PARTS
    run = run if MANY else 1
    first_block = tl.program_id(1) * run
    start = first_block * BLOCK
    row = tl.load(rows.rows + place)
    numbers_ptr = rows.numbers + row * 7
    if rows.kinds is not None:
        seen_size = tl.load(rows.seen_sizes + row)
    end = tl.minimum(start + BLOCK * run, tl.where(tl.load(numbers_ptr) > 0, rows.vocab, 0))
    raw = _load_raw(rows, place, start + tl.arange(0, 4 * LANES), end)
    # The launch before has waited, so that what the first left is there.
    mode = tl.load(found.modes + place)
    if rows.kinds is not None:
        seen_size = _seen_size(seen_size, mode)
        seen_start = tl.program_id(1) * LANES
        seen_step = tl.num_programs(1) * LANES
        ids = _load_seen_ids(rows, row, seen_start, seen_size, LANES)
        before, x = _load_kept(found.kept, place, seen_start, seen_size, LANES, KEPT)
    wait(PDL)
    launch_dependents(PDL)
    if mode != _DONE:
        kind = mode % _KINDS
        sums_ptr = found.sums + place * _SUMS
        masses_ptr = found.masses + place * num_blocks
        lower = tl.load(found.bounds + place * 3)
        upper = tl.load(found.bounds + place * 3 + 1)
        peak = tl.load(found.peaks + place)
        shift = tl.where(mode >= _KINDS, 0, UNUSED_BITS)
        low_key, high_key = _gathered_keys(lower, upper, peak, shift)
        bounds = _Bounds(
            lower,
            upper,
            found.sizes + place * 2 * _SUMS,
            found.candidates + place * most,
            found.bins + (place << BIN_BITS),
            high_key - 1,
            shift,
            _bin_bits(high_key.to(tl.int64) - low_key, BIN_BITS).to(tl.uint32),
            most,
            peak,
            _steepness(numbers_ptr),
            one,
            tl.load(numbers_ptr + 3).to(tl.float32),
        )
        lanes = tl.arange(0, LANES)
        zeros = tl.zeros((LANES,), tl.int64)
        sums = (zeros, zeros, zeros)
        drawable = tl.full((), 0, tl.int64)
        for index in range(run):
            block = first_block + index
            of = (rows, place, row, mode, block * BLOCK, end, raw, bounds, sums)
            if kind == _WHOLE:
                sums, raw = _weigh_block(*of, LANES, PARTS, _WHOLE, True, True)
            elif upper < float("inf"):
                if kind == _LIMITED:
                    sums, raw = _weigh_block(*of, LANES, PARTS, _LIMITED, True, True)
                elif bounds.min_p > 0:
                    sums, raw = _weigh_block(*of, LANES, PARTS, _NUCLEUS, True, True)
                else:
                    # Of most, and with fewer sums.
                    sums, raw = _weigh_block(*of, LANES, PARTS, _NUCLEUS, True, False)
            elif kind == _LIMITED:
                sums, raw = _weigh_block(*of, LANES, PARTS, _LIMITED, False, False)
            else:
                sums, raw = _weigh_block(*of, LANES, PARTS, _NUCLEUS, False, False)
            drawn = tl.sum(sums[2], axis=0) - drawable
            drawable += drawn
            if rows.kinds is None:
                tl.store(masses_ptr + block, drawn, mask=block < num_blocks)
            else:
                is_block = block < num_blocks
                tl.atomic_add(masses_ptr + block, drawn, mask=is_block, sem="relaxed")
        measure, above_mass, _drawable = sums
        if rows.kinds is not None:
            while seen_start < seen_size:
                are_there = seen_start + lanes < seen_size
                if seen_start >= KEPT:
                    penalties = _load_penalties(numbers_ptr)
                    of_ids = (ids, seen_start, seen_size)
                    tokens = _load_seen_tokens(rows, place, row, *of_ids, LANES)
                    before, x = _adjust_seen(tokens, rows, row, mode, penalties)
                measure, above_mass = _correct(
                    (measure, above_mass),
                    (are_there, ids, before, x),
                    rows,
                    mode,
                    bounds,
                    masses_ptr,
                    BLOCK,
                )
                seen_start += seen_step
                ids = _load_seen_ids(rows, row, seen_start, seen_size, LANES)
                before, x = _load_kept(found.kept, place, seen_start, seen_size, LANES, KEPT)
        if kind != _WHOLE:
            tl.atomic_add(sums_ptr, tl.sum(measure, axis=0), sem="relaxed")
            tl.atomic_add(sums_ptr + 1, tl.sum(above_mass, axis=0), sem="relaxed")


class _Logits(NamedTuple):
    """The logits that the narrowing program reads: all of a row, or those that were gathered.

    Attributes:
        is_listed: whether they are those gathered.
        candidates: these.
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

    is_listed: Any
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


class _Between(NamedTuple):
    """Where in the order of choice the last kept token is: all after it come before others.

    Attributes:
        low: the first place.
        high: the place past the last.
        above: the number of the tokens from there on, or what they weigh.
    """

    low: Any
    high: Any
    above: Any


@triton.jit
def _places(x, ids, shift):
    """The order of choice: the largest logits are last, and of equal ones the first token."""
    return ((_key(x) >> shift).to(tl.int64) << _TOKEN_BITS) + (_LAST_TOKEN - ids)


@triton.jit
def _load_unlisted(logits, ids):
    return _load_logits(logits.rows, logits.place, logits.row, logits.mode, ids)


@triton.jit
def _load_unlisted_chunk(logits, ids):
    # A name of its own, which a test takes away to see that what was gathered is enough.
    return _load_unlisted(logits, ids)


@triton.jit
def _load_chunk(logits, start, CHUNK: tl.constexpr):
    """Places, weights and tokens of ``CHUNK`` logits from ``start`` on, and which there are."""
    ids = start + tl.arange(0, CHUNK)
    mask = ids < logits.size
    if logits.is_listed:
        entries = tl.load(logits.candidates + ids, mask=mask, other=_NO_CANDIDATE)
        x = (entries >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        ids = entries.to(tl.int32)
    else:
        x = _load_unlisted_chunk(logits, ids)
    weights = _weights(x, logits.peak, logits.steepness)
    return _places(x, ids, logits.shift), weights, ids, mask


@triton.jit
def _load_inside(logits, start, between, by_mass, CHUNK: tl.constexpr):
    """Places of ``CHUNK`` logits, what each adds to the measure, and which are ``between``."""
    places, weights, _ids, mask = _load_chunk(logits, start, CHUNK)
    inside = mask & (places >= between.low) & (places < between.high)
    return places, tl.where(by_mass, _masses(weights, logits.one), 1), inside


@triton.jit
def _count_bins(logits, between, bits, by_mass, bins_ptr, CHUNK: tl.constexpr):
    """Add those ``between`` to the histogram, the last of them to its first bin."""
    for start in range(0, logits.size, CHUNK):
        places, measure, inside = _load_inside(logits, start, between, by_mass, CHUNK)
        at = tl.where(inside, (between.high - 1 - places) >> bits, 0)
        tl.atomic_add(bins_ptr + at, measure, mask=inside, sem="relaxed")


@triton.jit
def _narrow(between, needed, bits, bins_ptr, BIN_BITS: tl.constexpr):
    """The bin that the last kept token is in, of ``2**bits`` places."""
    bins = tl.arange(0, 1 << BIN_BITS)
    held = tl.load(bins_ptr + bins, cache_modifier=".cg")
    sums = between.above + tl.cumsum(held, axis=0)
    at = tl.min(tl.where(sums >= needed, bins, (1 << BIN_BITS) - 1), axis=0)
    above = tl.sum(tl.where(bins == at, sums - held, 0), axis=0)
    one = tl.full((), 1, tl.int64)
    high = between.high - (at.to(tl.int64) << bits)
    return _Between(tl.maximum(between.low, high - (one << bits)), high, above)


@triton.jit
def _list(logits, between, by_mass, count_ptr, listed_ptr, LISTED: tl.constexpr, CHUNK):
    """List those ``between``, as many as have room, and count them."""
    for start in range(0, logits.size, CHUNK):
        places, measure, inside = _load_inside(logits, start, between, by_mass, CHUNK)
        counts_ptr = count_ptr + tl.zeros(places.shape, tl.int32)
        to = tl.atomic_add(counts_ptr, 1, mask=inside, sem="relaxed")
        has_room = inside & (to < LISTED)
        tl.store(listed_ptr + to, places, mask=has_room)
        tl.store(listed_ptr + LISTED + to, measure, mask=has_room)


@triton.jit
def _last_of(above, needed, number, listed_ptr, LISTED: tl.constexpr):
    """The place of the last kept token, one of those listed."""
    index = tl.arange(0, LISTED)
    there = index < number
    places = tl.load(listed_ptr + index, mask=there, other=_NOWHERE, cache_modifier=".cg")
    sums = tl.zeros((LISTED,), tl.int64)
    for start in range(0, number, _COMPARED):
        others_ptr = listed_ptr + start + tl.arange(0, _COMPARED)
        are_there = start + tl.arange(0, _COMPARED) < number
        others = tl.load(others_ptr, mask=are_there, other=_NOWHERE, cache_modifier=".cg")
        measure = tl.load(others_ptr + LISTED, mask=are_there, other=0, cache_modifier=".cg")
        after = others[None, :] >= places[:, None]
        sums += tl.sum(tl.where(after, measure[None, :], 0), axis=1)
    return tl.max(tl.where((above + sums >= needed) & there, places, _NOWHERE), axis=0)


@triton.jit
def _kept_mass(logits, last, CHUNK: tl.constexpr):
    """The weight of those that are not before ``last``."""
    sums = tl.zeros((CHUNK,), tl.int64)
    for start in range(0, logits.size, CHUNK):
        places, weights, _ids, mask = _load_chunk(logits, start, CHUNK)
        sums += tl.where(mask & (places >= last), _masses(weights, logits.one), 0)
    return tl.sum(sums, axis=0)


@triton.jit
def _kept_masses(logits, cols, last, min_p):
    """Masses of a row's tokens ``cols``, 0 for those that are not kept."""
    x = _load_unlisted(logits, cols)
    weights = _weights(x, logits.peak, logits.steepness)
    is_kept = (cols < logits.rows.vocab) & (weights >= min_p)
    is_kept = is_kept & (_places(x, cols, logits.shift) >= last)
    return tl.where(is_kept, _masses(weights, logits.one), 0)


@triton.jit
def _draw(
    logits,
    last,
    min_p,
    u,
    masses_ptr,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The token that is drawn.

    Args:
        logits: all that are kept, but for those in ``masses_ptr``.
        last: the place of the last that is kept.
        min_p: the least weight.
        u: the random number.
        masses_ptr: what kept tokens that are not among ``logits`` weigh, by block.
    """
    for start in range(0, logits.size, CHUNK):
        places, weights, ids, mask = _load_chunk(logits, start, CHUNK)
        is_kept = mask & (places >= last) & (weights >= min_p)
        masses = _masses(weights, logits.one)
        tl.atomic_add(masses_ptr + ids // BLOCK, masses, mask=is_kept, sem="relaxed")
    tl.debug_barrier()
    blocks = tl.arange(0, BLOCK_BLOCKS)
    masses = tl.load(masses_ptr + blocks, mask=blocks < num_blocks, other=0, cache_modifier=".cg")
    limit = _limit(u, tl.sum(masses, axis=0))
    sums = tl.cumsum(masses, axis=0)
    block = tl.min(tl.where(sums > limit, blocks, num_blocks - 1), axis=0)
    before = tl.sum(tl.where(blocks == block, sums - masses, 0), axis=0)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    beyond = before + tl.cumsum(_kept_masses(logits, cols, last, min_p), axis=0) > limit
    return tl.min(tl.where(beyond, cols, logits.rows.vocab - 1), axis=0)


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
    UNUSED_BITS: tl.constexpr,
    BIN_BITS: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    place = tl.program_id(0).to(tl.int64)
    # The launch before has waited, so that what the first two left is there.
    mode = tl.load(found.modes + place)
    if mode == _DONE:
        wait(PDL)
    else:
        kind = mode % _KINDS
        row = tl.load(rows.rows + place)
        numbers_ptr = rows.numbers + row * 7
        top_k = tl.load(numbers_ptr + 1)
        top_p = tl.load(numbers_ptr + 2)
        min_p = tl.load(numbers_ptr + 3).to(tl.float32)
        shift = tl.where(mode >= _KINDS, 0, UNUSED_BITS)
        peak = tl.load(found.peaks + place)
        steepness = _steepness(numbers_ptr)
        u = tl.load(found.draws + place)
        turn = tl.load(chosen.turn)
        lower = tl.load(found.bounds + place * 3)
        upper = tl.load(found.bounds + place * 3 + 1)
        floor = tl.load(found.bounds + place * 3 + 2)
        sums_ptr = found.sums + place * _SUMS
        size_ptr = found.sizes + place * 2 * _SUMS
        bins_ptr = found.bins + (place << BIN_BITS)
        listed_ptr = found.listed + place * 2 * LISTED
        masses_ptr = found.masses + place * num_blocks
        bins = tl.arange(0, 1 << BIN_BITS)
        wait(PDL)
        # A nucleus needs no count above the bounds, and the top-k no mass.
        total = tl.load(sums_ptr)
        size = tl.load(size_ptr)
        is_listed = size <= most
        is_open = kind != _WHOLE
        by_mass = kind == _NUCLEUS
        needed = tl.full((), 0, tl.int64)
        above = needed
        low_key, high_key = _gathered_keys(lower, upper, peak, shift)
        if is_open:
            if by_mass:
                above = tl.load(sums_ptr + 1)
                needed = _share(top_p, total)
                held = tl.sum(tl.load(bins_ptr + bins), axis=0)
                is_listed = is_listed & (above < needed) & (needed <= above + held)
            else:
                above = total
                # Of those below the floor none can be drawn.
                needed = top_k.to(tl.int64)
                is_listed = is_listed & ((above + size >= needed) | (lower <= floor))
                is_listed = is_listed & (above < needed)
                needed = tl.minimum(needed, above + size)
                is_open = (is_listed == 0) | (size > 0)
            if is_listed == 0:
                # Rare: as many equal logits as are not gathered, or an unlucky sample.
                size = tl.zeros_like(size) + rows.vocab
                low_key, high_key = _gathered_keys(floor, float("inf"), peak, shift)
                above = tl.zeros_like(above)
                needed = tl.where(by_mass, needed, top_k.to(tl.int64))
                blocks = tl.arange(0, BLOCK_BLOCKS)
                tl.store(masses_ptr + blocks, 0, mask=blocks < num_blocks)
        candidates = found.candidates + place * most
        row_of = (rows, place, row, mode)
        logits = _Logits(is_listed, candidates, *row_of, size, shift, peak, steepness, one)
        low = low_key.to(tl.int64) << _TOKEN_BITS
        end = high_key.to(tl.int64) << _TOKEN_BITS
        high = end
        bits = _TOKEN_BITS + _bin_bits(high_key.to(tl.int64) - low_key, BIN_BITS)
        last = low
        is_counted = is_listed.to(tl.int32)
        while is_open:
            if is_counted == 0:
                tl.store(bins_ptr + bins, 0)
                tl.debug_barrier()
                _count_bins(logits, _Between(low, high, above), bits, by_mass, bins_ptr, CHUNK)
            tl.store(size_ptr + 1, 0)
            tl.debug_barrier()
            if is_counted == 0:
                # Of the top-k there may be fewer than that which weigh anything.
                held = tl.load(bins_ptr + bins, cache_modifier=".cg")
                needed = tl.minimum(needed, above + tl.sum(held, axis=0))
            between = _narrow(_Between(low, high, above), needed, bits, bins_ptr, BIN_BITS)
            _list(logits, between, by_mass, size_ptr + 1, listed_ptr, LISTED, CHUNK)
            low, high, above = between.low, between.high, between.above
            tl.debug_barrier()
            number = tl.load(size_ptr + 1, cache_modifier=".cg")
            is_counted = tl.zeros_like(is_counted)
            if number <= LISTED:
                last = _last_of(above, needed, number, listed_ptr, LISTED)
                is_open = (by_mass == 0) & (top_p < 1)
                if is_open:
                    # All of the top-k were gathered.
                    needed = _share(top_p, _kept_mass(logits, last, CHUNK))
                    by_mass = is_open
                    low = last
                    high = end
                    above = tl.zeros_like(above)
                    bits = _bin_bits(high - low, BIN_BITS)
            else:
                bits = tl.maximum(bits - BIN_BITS, 0)
        tl.debug_barrier()
        token = _draw(logits, last, min_p, u, masses_ptr, num_blocks, BLOCK, BLOCK_BLOCKS, CHUNK)
        _take(token, mode != _DONE, turn, place, row, chosen, rows)


def sample_tokens(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    state: SamplingState,
    turns: Turns | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens ``[B]`` int64 and status ``[B]`` int8 of ``logits [B, V]``."""
    num_rows, vocab = logits.shape
    device = logits.device
    if turns is None:
        tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
        status = torch.empty(num_rows, dtype=torch.int8, device=device)
        turn = None
    else:
        tokens, status, turn = turns
    # Kernels are the same with turns and without, where any number will do.
    strides = (0, 0) if turn is None else (tokens.stride(0), status.stride(0))
    if num_rows == 0:
        return tokens, status

    def scratch(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=device)

    most = min(vocab, _MOST_CANDIDATES)
    bits = mass_bits(vocab)
    one = 2.0**bits
    adjustments = state.adjustments
    kinds = ban_ids = ban_ends = bias = seen = output_counts = seen_ids = seen_sizes = None
    if adjustments is not None:
        kinds, ban_ids, ban_ends = adjustments.kinds, adjustments.ban_ids, adjustments.ban_ends
        bias, seen, output_counts = adjustments.bias, adjustments.seen, adjustments.output_counts
        seen_ids, seen_sizes = adjustments.seen_ids, adjustments.seen_sizes
        # Kernels take long to compile, so that those of all adjustments are the same. What is not
        # there is in no row's kind, and so nothing is read of what is given for it.
        if bias is None:
            bias = torch.empty(1, dtype=torch.float32, device=device)
        if seen is None or output_counts is None:
            seen = torch.empty(1, dtype=torch.uint8, device=device)
            output_counts = torch.empty(1, dtype=torch.int32, device=device)
            # But this, of each row.
            seen_ids, seen_sizes = output_counts, kinds
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
        seen_ids=seen_ids,
        seen_sizes=seen_sizes,
    )
    chosen = _Chosen(tokens, last_tokens, rows if turn is None else turn, *strides)
    is_many = num_rows >= _MANY_ROWS
    parts = _PARTS_OF_MANY if is_many else _PARTS
    block = 4 * _LANES * parts
    blocks = triton.cdiv(vocab, block)
    # The first reading takes parts of eight logits a thread.
    parts_of_row = triton.cdiv(vocab, 8 * _LANES)
    peak_parts, run = 1, 1
    peak_programs = most_programs = parts_of_row
    runs = blocks
    if is_many:
        programs = _PROGRAMS_OF_MANY * num_multiprocessors(device)
        wanted = max(2, programs // num_rows)
        peak_parts = triton.cdiv(parts_of_row, wanted)
        peak_programs = triton.cdiv(parts_of_row, peak_parts)
        most_programs = max(2, min(parts_of_row, programs // _MANY_ROWS))
        run = _RUN_OF_PLAIN if adjustments is None else triton.cdiv(blocks, wanted)
        runs = triton.cdiv(blocks, run)
    # Of each part some logits are in the sample, at equal distances; none if all are gathered.
    sampled, picks, distance = 1, 0, 1
    if vocab > most:
        sampled = min(triton.next_power_of_2(triton.cdiv(vocab, _SAMPLED)), _MOST_SAMPLED)
        of_part = max(1, sampled // parts_of_row)
        distance = triton.cdiv(_LANES, of_part)
        picks = triton.cdiv(_LANES, distance)
    sample = {"SAMPLE": sampled, "PICKS": picks, "DISTANCE": distance}
    found = _Found(
        modes=scratch(dtype=torch.int32),
        peaks=scratch(dtype=torch.float32),
        draws=scratch(dtype=torch.float64),
        sample=scratch(sampled, dtype=torch.float32),
        totals=scratch(dtype=torch.float32),
        bounds=scratch(3, dtype=torch.float32),
        sums=scratch(_SUMS.value, dtype=torch.int64),
        sizes=scratch(2 * _SUMS.value, dtype=torch.int32),
        masses=scratch(blocks, dtype=torch.int64),
        candidates=scratch(most, dtype=torch.int64),
        bins=scratch(1 << _BIN_BITS, dtype=torch.int64),
        kept=None if adjustments is None else scratch(_KEPT_SEEN, dtype=torch.int64),
        listed=scratch(2 * _LISTED, dtype=torch.int64),
    )
    common = {
        # The reference's penalties round each product.
        "enable_fp_fusion": False,
        **pdl_options(device),
    }
    warps = _LANES // 32
    reading: dict[str, int] = {}
    first_reading: dict[str, int] = {}
    settling: dict[str, int] = {}
    if is_many:
        plain = adjustments is None
        reading["maxnreg"] = _READ_REGISTERS_OF_MANY if plain else _ADJUST_REGISTERS_OF_MANY
        settling["maxnreg"] = _SETTLE_REGISTERS_OF_MANY
        first_reading = reading
    elif adjustments is not None:
        first_reading = {"maxnreg": _ADJUST_REGISTERS_OF_FEW}
    _peaks_kernel[(num_rows, peak_programs)](
        given,
        chosen,
        found,
        status,
        scratch(peak_programs, dtype=torch.float32),
        scratch(peak_programs, dtype=torch.int32),
        None if adjustments is None else scratch(peak_programs, dtype=torch.float32),
        scratch(peak_programs, dtype=torch.float32),
        arrival_counts(device, num_rows),
        positions,
        state.seeds,
        ban_ends,
        peak_programs,
        peak_parts,
        MANY=is_many,
        LANES=_LANES,
        KEPT=_KEPT_SEEN,
        BLOCK_BLOCKS=triton.next_power_of_2(most_programs),
        num_warps=warps,
        **sample,
        **first_reading,
        **common,
    )
    _bounds_kernel[(num_rows,)](
        given,
        found,
        bits * math.log(2) + 1,
        blocks,
        PART=8 * _LANES,
        BLOCK_BLOCKS=triton.next_power_of_2(blocks),
        BINS=_SAMPLE_BINS,
        BIN_BITS=_BIN_BITS,
        num_warps=max(4, sampled // _SAMPLED_BY_WARP),
        **sample,
        **common,
    )
    _weigh_kernel[(num_rows, runs)](
        given,
        found,
        most,
        one,
        blocks,
        run,
        MANY=is_many,
        LANES=_LANES,
        KEPT=_KEPT_SEEN,
        UNUSED_BITS=_UNUSED_BITS[logits.dtype],
        BIN_BITS=_BIN_BITS,
        PARTS=parts,
        num_warps=warps,
        **reading,
        **common,
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
        UNUSED_BITS=_UNUSED_BITS[logits.dtype],
        BIN_BITS=_BIN_BITS,
        LISTED=_LISTED,
        num_warps=_SETTLE_WARPS,
        **settling,
        **common,
    )
    return tokens, status
