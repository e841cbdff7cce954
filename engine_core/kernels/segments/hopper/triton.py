"""Attention in both directions within segments on Hopper, in Gluon.

As causal prefill (``attention.hopper``): a warp brings tiles to shared memory, and warp groups
multiply, each with the product with the next keys in flight beside that with the last values. They
begin their products in turn, so that one computes its softmax while another's are in flight. A
head's columns are the first 64 and the rest, up to a power of 2: a width of 80 is not padded to 128
in any product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine_core.kernels.launch.gluon import Family, Trial
from engine_core.kernels.launch.hopper.triton import reinterpret, tma_load
from engine_core.kernels.segments import reference

_LOG2E = 1.4426950408889634
_FAMILY = Family("encoders' attention", "That of large pictures takes 1.3 to 2.2 times as long")
# Programs of a trial: few, so that each takes many tiles.
_TRIAL_PROGRAMS = 8
# Rows of a warp group, keys of a tile, and columns of the first part of a head.
_ROWS = gl.constexpr(64)
_KEYS = gl.constexpr(128)
_MAIN = gl.constexpr(64)
# Tokens of the longest segment from which on three groups multiply, with heads 64 wide.
_THREE_GROUPS = 1024


class _Descs(NamedTuple):
    """Where queries, keys and values are: the first columns, and the rest."""

    q: Any
    q_rest: Any
    k: Any
    k_rest: Any
    v: Any
    v_rest: Any


class _Buffers(NamedTuple):
    """Tiles in shared memory, and the barriers that say which of them are full or empty."""

    q: Any
    q_rest: Any
    k: Any
    k_rest: Any
    v: Any
    v_rest: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    end_full: Any
    turn: Any


class _Plan(NamedTuple):
    """The segments, and how programs take their tiles of queries in ``turns``."""

    starts_ptr: Any
    query_tiles: Any
    items: Any
    turns: Any


@gluon.jit
def _work(turn, plan, HEADS: gl.constexpr, TOKENS: gl.constexpr):
    """The work of this program at its ``turn``.

    Returns where the segment begins, its tokens, the first query, the head, and the number of key
    tiles: 0 if there is nothing to do. Tiles of a head follow each other: they read the same keys.
    """
    item = turn * gl.num_programs(0) + gl.program_id(0)
    tile = item % plan.query_tiles
    head = item // plan.query_tiles % HEADS
    segment = item // plan.query_tiles // HEADS
    begin = 0
    length = 0
    if item < plan.items:
        begin = gl.load(plan.starts_ptr + segment)
        length = gl.load(plan.starts_ptr + segment + 1) - begin
    first_query = tile * TOKENS
    key_tiles = 0
    if first_query < length:
        key_tiles = (length + _KEYS - 1) // _KEYS
    return begin, length, first_query, head, key_tiles


@gluon.jit
def _zero_end(chunks, first, valid, WIDTH: gl.constexpr):
    """Put zeros behind ``valid`` rows of a tile, ``chunks [..., 8, WIDTH]`` from ``first`` on."""
    LANES: gl.constexpr = WIDTH // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [1, 1], [1, 0])
    in_chunk = gl.arange(0, 8, gl.SliceLayout(1, layout))
    for chunk in range(valid // 8, _KEYS // 8):
        values = chunks.index(first + chunk)
        x = values.load(layout)
        values.store(gl.where((chunk * 8 + in_chunk < valid)[:, None], x, gl.zeros_like(x)))


@gluon.jit
def _copy(desc, rest_desc, tiles, rests, place, barrier, token, head, REST: gl.constexpr):
    """Begin to load tokens of one head: as many as one of the ``tiles`` holds."""
    tma_load(desc, [token, head, 0], barrier, tiles.index(place))
    if REST:
        coordinates = [token, head, _MAIN]
        tma_load(rest_desc, coordinates, barrier, rests.index(place))


@gluon.jit
def _load(
    descs, buffers, plan, HEADS: gl.constexpr, REST: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads."""
    COLUMNS: gl.constexpr = _MAIN + REST
    CHUNKS: gl.constexpr = _KEYS // 8
    element: gl.constexpr = descs.q.dtype
    main: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    q = reinterpret(buffers.q, element, [2 * GROUPS, _ROWS, 1, _MAIN], main)
    k = reinterpret(buffers.k, element, [STAGES, _KEYS, 1, _MAIN], main)
    v = reinterpret(buffers.v, element, [STAGES, _KEYS, 1, _MAIN], main)
    # Shared memory of a swizzled tile repeats every 8 rows.
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    v_chunks = reinterpret(buffers.v, element, [STAGES * CHUNKS, 8, _MAIN], flat)
    q_rest, k_rest, v_rest, rest_chunks = q, k, v, v_chunks
    if REST:
        rest: gl.constexpr = gl.NVMMASharedLayout(2 * REST, 16, rank=3)
        q_rest = reinterpret(buffers.q_rest, element, [2 * GROUPS, _ROWS, 1, REST], rest)
        k_rest = reinterpret(buffers.k_rest, element, [STAGES, _KEYS, 1, REST], rest)
        v_rest = reinterpret(buffers.v_rest, element, [STAGES, _KEYS, 1, REST], rest)
        flat_rest: gl.constexpr = gl.NVMMASharedLayout(2 * REST, 16, rank=2)
        rest_chunks = reinterpret(buffers.v_rest, element, [STAGES * CHUNKS, 8, REST], flat_rest)
    items = 0
    loaded = 0
    ends = 0
    work = _work(0, plan, HEADS, GROUPS * _ROWS)
    for turn in range(plan.turns):
        begin, length, first_query, head, key_tiles = work
        work = _work(turn + 1, plan, HEADS, GROUPS * _ROWS)
        if key_tiles > 0:
            slot = items % 2
            mbarrier.wait(buffers.q_empty.index(slot), (items // 2 & 1) ^ 1)
            full = buffers.q_full.index(slot)
            mbarrier.expect(full, GROUPS * _ROWS * COLUMNS * 2)
            for group in gl.static_range(GROUPS):
                token = begin + first_query + group * _ROWS
                place = slot * GROUPS + group
                _copy(descs.q, descs.q_rest, q, q_rest, place, full, token, head, REST)
            items += 1
            for tile in range(key_tiles):
                stage = loaded % STAGES
                parity = (loaded // STAGES & 1) ^ 1
                token = begin + tile * _KEYS
                mbarrier.wait(buffers.k_empty.index(stage), parity)
                barrier = buffers.k_full.index(stage)
                mbarrier.expect(barrier, _KEYS * COLUMNS * 2)
                _copy(descs.k, descs.k_rest, k, k_rest, stage, barrier, token, head, REST)
                mbarrier.wait(buffers.v_empty.index(stage), parity)
                valid = length - tile * _KEYS
                if valid >= _KEYS:
                    barrier = buffers.v_full.index(stage)
                    mbarrier.expect(barrier, _KEYS * COLUMNS * 2)
                    _copy(descs.v, descs.v_rest, v, v_rest, stage, barrier, token, head, REST)
                else:
                    # The next segment may hold anything, and 0 * NaN is NaN.
                    barrier = buffers.end_full.index(0)
                    mbarrier.expect(barrier, _KEYS * COLUMNS * 2)
                    _copy(descs.v, descs.v_rest, v, v_rest, stage, barrier, token, head, REST)
                    mbarrier.wait(barrier, ends & 1)
                    ends += 1
                    _zero_end(v_chunks, stage * CHUNKS, valid, _MAIN)
                    if REST:
                        _zero_end(rest_chunks, stage * CHUNKS, valid, REST)
                    fence_async_shared()
                    mbarrier.arrive(buffers.v_full.index(stage))
                loaded += 1


@gluon.jit
def _softmax(logits, maximum, denominator, scale, keys, MASKED: gl.constexpr, LAYOUT: gl.constexpr):
    """Fold logits into the running softmax; returns weights and the old one's factor.

    With MASKED only the first ``keys`` columns count.
    """
    if MASKED:
        columns = gl.arange(0, _KEYS, gl.SliceLayout(0, LAYOUT))
        logits = gl.where((columns < keys)[None, :], logits, float("-inf"))
    new_maximum = gl.maximum(maximum, gl.max(logits, axis=1))
    subtrahend = new_maximum * scale
    weights = gl.exp2(logits * scale - subtrahend[:, None])
    rescale = gl.exp2(maximum * scale - subtrahend)
    denominator = denominator * rescale + gl.sum(weights, axis=1)
    return weights, new_maximum, denominator, rescale


@gluon.jit
def _multiply_keys(q, q_rest, buffers, stage, REST: gl.constexpr, LOGITS: gl.constexpr):
    """Begin the product of queries and a tile of keys."""
    logits = gl.zeros([_ROWS, _KEYS], gl.float32, LOGITS)
    k = buffers.k.index(stage).permute((1, 0))
    logits = warpgroup_mma(q, k, logits, use_acc=False, is_async=True)
    if REST:
        k_rest = buffers.k_rest.index(stage).permute((1, 0))
        logits = warpgroup_mma(q_rest, k_rest, logits, is_async=True)
    return logits


@gluon.jit
def _attend_tile(
    acc,
    rest,
    weights,
    maximum,
    denominator,
    used,
    keys,
    q,
    q_rest,
    scale,
    buffers,
    MASKED: gl.constexpr,
    REST: gl.constexpr,
    STAGES: gl.constexpr,
    LOGITS: gl.constexpr,
    ACC: gl.constexpr,
    ACC_REST: gl.constexpr,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    taken,
):
    """Multiply with the keys of a tile, and ``weights`` with the values of the one before."""
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    stage = used % STAGES
    before = (used - 1) % STAGES
    mbarrier.wait(buffers.k_full.index(stage), used // STAGES & 1)
    # The first group's first turn comes by itself.
    mbarrier.wait(buffers.turn.index(GROUP), taken & 1 if GROUP else (taken & 1) ^ 1)
    logits = _multiply_keys(q, q_rest, buffers, stage, REST, LOGITS)
    mbarrier.wait(buffers.v_full.index(before), (used - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, buffers.v.index(before), acc, is_async=True)
    if REST:
        same = gl.convert_layout(weights, gl.DotOperandLayout(0, ACC_REST, 2))
        rest = warpgroup_mma(same, buffers.v_rest.index(before), rest, is_async=True)
    mbarrier.arrive(buffers.turn.index((GROUP + 1) % GROUPS))
    if REST:
        logits = warpgroup_mma_wait(2, deps=(logits,))
    else:
        logits = warpgroup_mma_wait(1, deps=(logits,))
    mbarrier.arrive(buffers.k_empty.index(stage))
    weights, maximum, denominator, rescale = _softmax(
        logits, maximum, denominator, scale, keys, MASKED, LOGITS
    )
    if REST:
        acc, rest = warpgroup_mma_wait(0, deps=(acc, rest))
        rest = rest * gl.convert_layout(rescale, gl.SliceLayout(1, ACC_REST))[:, None]
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(buffers.v_empty.index(before))
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, ACC))[:, None]
    weights = gl.convert_layout(weights.to(buffers.v.dtype), WEIGHTS)
    return acc, rest, weights, maximum, denominator


@gluon.jit
def _store(
    out_ptr, place, y, denominator, begin, first_query, length, head, FIRST: gl.constexpr,
    COLUMNS: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Divide and store columns from FIRST on, by way of the queries' place: in whole lines."""
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    y = y / gl.convert_layout(denominator, gl.SliceLayout(1, ACC))[:, None]
    place.store(y.to(place.dtype))
    y = place.load(OUT)
    queries = first_query + gl.arange(0, _ROWS, gl.SliceLayout(1, OUT))
    columns = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, OUT))
    rows = (begin + queries).to(gl.int64) * HEADS + head
    mask = (queries < length)[:, None] & (columns < D)[None, :]
    gl.store(out_ptr + rows[:, None] * D + columns[None, :], y, mask=mask)


@gluon.jit
def _attend(
    GROUP: gl.constexpr,
    out_ptr,
    buffers,
    plan,
    scale,
    HEADS: gl.constexpr,
    D: gl.constexpr,
    REST: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A warp group that multiplies: some of a tile's rows."""
    REST_COLUMNS: gl.constexpr = REST if REST else 16
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _MAIN, 16])
    ACC_REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST_COLUMNS, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    items = 0
    used = 0
    work = _work(0, plan, HEADS, GROUPS * _ROWS)
    for turn in range(plan.turns):
        begin, length, first_query, head, key_tiles = work
        work = _work(turn + 1, plan, HEADS, GROUPS * _ROWS)
        if key_tiles > 0:
            first_query += GROUP * _ROWS
            slot = items % 2
            mbarrier.wait(buffers.q_full.index(slot), items // 2 & 1)
            q = buffers.q.index(slot * GROUPS + GROUP)
            q_rest = buffers.q_rest.index(slot * GROUPS + GROUP if REST else 0)

            stage = used % STAGES
            mbarrier.wait(buffers.k_full.index(stage), used // STAGES & 1)
            logits = _multiply_keys(q, q_rest, buffers, stage, REST, LOGITS)
            logits = warpgroup_mma_wait(0, deps=(logits,))
            mbarrier.arrive(buffers.k_empty.index(stage))
            maximum = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
            denominator = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, LOGITS))
            if length >= _KEYS:
                weights, maximum, denominator, _unused = _softmax(
                    logits, maximum, denominator, scale, length, False, LOGITS
                )
            else:
                weights, maximum, denominator, _unused = _softmax(
                    logits, maximum, denominator, scale, length, True, LOGITS
                )
            weights = gl.convert_layout(weights.to(buffers.v.dtype), WEIGHTS)
            acc = gl.zeros([_ROWS, _MAIN], gl.float32, ACC)
            rest = gl.zeros([_ROWS, REST_COLUMNS], gl.float32, ACC_REST)
            used += 1
            full = gl.maximum(length // _KEYS, 1)
            for _tile in range(1, full):
                acc, rest, weights, maximum, denominator = _attend_tile(
                    acc, rest, weights, maximum, denominator, used, length, q, q_rest, scale,
                    buffers, False, REST, STAGES, LOGITS, ACC, ACC_REST, GROUP,
                    GROUPS, used - items - 1,
                )  # fmt: skip
                used += 1
            for tile in range(full, key_tiles):
                acc, rest, weights, maximum, denominator = _attend_tile(
                    acc, rest, weights, maximum, denominator, used, length - tile * _KEYS, q,
                    q_rest, scale, buffers, True, REST, STAGES, LOGITS, ACC, ACC_REST, GROUP,
                    GROUPS, used - items - 1,
                )  # fmt: skip
                used += 1
            before = (used - 1) % STAGES
            mbarrier.wait(buffers.v_full.index(before), (used - 1) // STAGES & 1)
            acc = warpgroup_mma(weights, buffers.v.index(before), acc, is_async=True)
            if REST:
                same = gl.convert_layout(weights, gl.DotOperandLayout(0, ACC_REST, 2))
                rest = warpgroup_mma(same, buffers.v_rest.index(before), rest, is_async=True)
                acc, rest = warpgroup_mma_wait(0, deps=(acc, rest))
            else:
                acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(buffers.v_empty.index(before))
            _store(
                out_ptr, q, acc, denominator, begin, first_query, length, head, 0, _MAIN, HEADS, D,
                ACC,
            )  # fmt: skip
            if REST:
                _store(
                    out_ptr, q_rest, rest, denominator, begin, first_query, length, head, _MAIN,
                    REST, HEADS, D, ACC_REST,
                )  # fmt: skip
            fence_async_shared()
            mbarrier.arrive(buffers.q_empty.index(slot))
            items += 1


@gluon.jit(do_not_specialize=["num_segments", "query_tiles"])
def _segments_kernel(
    out_ptr,
    q_desc,
    q_rest_desc,
    k_desc,
    k_rest_desc,
    v_desc,
    v_rest_desc,
    starts_ptr,
    scale,
    num_segments,
    query_tiles,
    HEADS: gl.constexpr,
    D: gl.constexpr,
    REST: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Tiles of GROUPS * _ROWS queries; a head has _MAIN columns and REST, of which D are real."""
    element: gl.constexpr = q_desc.dtype
    # Without a rest the smallest place, which nothing uses.
    REST_COLUMNS: gl.constexpr = REST if REST else 16
    REST_STAGES: gl.constexpr = STAGES if REST else 1
    main: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    rest: gl.constexpr = gl.NVMMASharedLayout(2 * REST_COLUMNS, 16, rank=2)
    single: gl.constexpr = mbarrier.MBarrierLayout()
    REST_QUERIES: gl.constexpr = 2 * GROUPS if REST else 1
    REST_KEYS: gl.constexpr = _KEYS if REST else 16
    REST_ROWS: gl.constexpr = _ROWS if REST else 16
    buffers = _Buffers(
        gl.allocate_shared_memory(element, [2 * GROUPS, _ROWS, _MAIN], main),
        gl.allocate_shared_memory(element, [REST_QUERIES, REST_ROWS, REST_COLUMNS], rest),
        gl.allocate_shared_memory(element, [STAGES, _KEYS, _MAIN], main),
        gl.allocate_shared_memory(element, [REST_STAGES, REST_KEYS, REST_COLUMNS], rest),
        gl.allocate_shared_memory(element, [STAGES, _KEYS, _MAIN], main),
        gl.allocate_shared_memory(element, [REST_STAGES, REST_KEYS, REST_COLUMNS], rest),
        gl.allocate_shared_memory(gl.int64, [2, 1], single),
        gl.allocate_shared_memory(gl.int64, [2, 1], single),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], single),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], single),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], single),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], single),
        gl.allocate_shared_memory(gl.int64, [1, 1], single),
        gl.allocate_shared_memory(gl.int64, [GROUPS, 1], single),
    )
    for slot in gl.static_range(2):
        mbarrier.init(buffers.q_full.index(slot), count=1)
        mbarrier.init(buffers.q_empty.index(slot), count=GROUPS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(buffers.k_full.index(stage), count=1)
        mbarrier.init(buffers.k_empty.index(stage), count=GROUPS)
        mbarrier.init(buffers.v_full.index(stage), count=1)
        mbarrier.init(buffers.v_empty.index(stage), count=GROUPS)
    mbarrier.init(buffers.end_full.index(0), count=1)
    for group in gl.static_range(GROUPS):
        mbarrier.init(buffers.turn.index(group), count=1)
    fence_async_shared()
    items = query_tiles * num_segments * HEADS
    turns = (items + gl.num_programs(0) - 1) // gl.num_programs(0)
    plan = _Plan(starts_ptr, query_tiles, items, turns)
    descs = _Descs(q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, v_rest_desc)
    if GROUPS == 3:
        # Registers of a thread: 3 * 128 * 160 + 128 * 32 are a multiprocessor's 65536.
        gl.warp_specialize(
            [
                (
                    _attend,
                    (0, out_ptr, buffers, plan, scale, HEADS, D, REST, GROUPS, STAGES),
                ),
                (
                    _attend,
                    (1, out_ptr, buffers, plan, scale, HEADS, D, REST, GROUPS, STAGES),
                ),
                (
                    _attend,
                    (2, out_ptr, buffers, plan, scale, HEADS, D, REST, GROUPS, STAGES),
                ),
                (_load, (descs, buffers, plan, HEADS, REST, GROUPS, STAGES)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _attend,
                    (0, out_ptr, buffers, plan, scale, HEADS, D, REST, GROUPS, STAGES),
                ),
                (
                    _attend,
                    (1, out_ptr, buffers, plan, scale, HEADS, D, REST, GROUPS, STAGES),
                ),
                (_load, (descs, buffers, plan, HEADS, REST, GROUPS, STAGES)),
            ],
            [4, 1],
            [232, 40],
        )


def fits(*parts: Tensor) -> bool:
    """Whether :func:`attend` takes queries, keys and values of these shapes and places."""
    return all(
        part.dtype in (torch.bfloat16, torch.float16)
        and 64 <= part.shape[2] <= 128
        and part.shape[2] % 8 == 0
        and part.data_ptr() % 16 == 0
        and all(stride % 8 == 0 for stride in part.stride()[:2])
        for part in parts
    )


def _groups(width: int, longest: int) -> int:
    """Warp groups that multiply."""
    # TFLOP/s with 2 and 3, heads 64 wide: 299 and 334 for 13 segments of 1025 tokens, 431 and 445
    # for one of 4096. With wider heads the registers of a third are too few.
    return 3 if width == _MAIN.value and longest >= _THREE_GROUPS else 2


def is_trusted(q: Tensor, longest: int) -> bool:
    """Whether :func:`attend` may be used for such queries; it may be tried for that."""
    kind = (q.dtype, *q.shape[1:], _groups(q.shape[2], longest))
    return _FAMILY.allows(q.device, kind, lambda: _trial(q, longest))


def _trial(like: Tensor, longest: int) -> Trial:
    """Segments that end within tiles, between tokens that are NaN."""
    sizes, begin, end = (640, 63, 300, 7, 128), 50, 50 + 1138
    shape = (3, end + 100, *like.shape[1:])
    draw = torch.Generator(like.device).manual_seed(0)
    qkv = torch.randn(shape, generator=draw, device=like.device).to(like.dtype)
    qkv[:, :begin] = torch.nan
    qkv[:, end:] = torch.nan
    scale = like.shape[2] ** -0.5
    starts, parts = [begin], []
    for size in sizes:
        q, k, v = qkv[:, starts[-1] : starts[-1] + size].float()
        parts.append(reference.attend_segments(q, k, v, [(1, size)], scale))
        starts.append(starts[-1] + size)
    places = torch.tensor(starts, dtype=torch.int32, device=like.device)

    def run() -> Tensor:
        q, k, v = qkv
        longer = max(longest, *sizes)
        return attend(q, k, v, places, longer, scale, _TRIAL_PROGRAMS)[begin:end]

    return Trial(run, torch.cat(parts))


def attend(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float, programs: int,
) -> Tensor:  # fmt: skip
    """Attention of ``[N, heads, D]`` within the segments that ``starts`` bound.

    What :func:`fits` asks holds.

    Args:
        q: queries.
        k: keys.
        v: values.
        starts: ``[segments + 1]`` int32.
        longest: at least the tokens of the longest segment.
        scale: positive factor of the dot products.
        programs: at most, one a multiprocessor.
    """
    heads, width = q.shape[1:]
    main = _MAIN.value
    rest = 0 if width == main else max(16, triton.next_power_of_2(width - main))
    groups = _groups(width, longest)
    descs = []
    for part, rows in ((q, _ROWS.value), (k, _KEYS.value), (v, _KEYS.value)):
        for columns in (main, rest or 16):
            layout = gl.NVMMASharedLayout(2 * columns, 16, rank=3)
            shape, strides = list(part.shape), list(part.stride())
            descs.append(TensorDescriptor(part, shape, strides, [rows, 1, columns], layout))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_segments = starts.shape[0] - 1
    query_tiles = triton.cdiv(longest, groups * _ROWS.value)
    columns = main + rest
    # Of 227 KiB, less the queries of two turns; a stage is keys and values.
    stages = (220 * 1024 - 4 * groups * _ROWS.value * columns) // (4 * _KEYS.value * columns)
    _segments_kernel[(min(programs, query_tiles * num_segments * heads),)](
        out,
        *descs,
        starts,
        scale * _LOG2E,
        num_segments,
        query_tiles,
        HEADS=heads,
        D=width,
        REST=rest,
        GROUPS=groups,
        STAGES=min(4, stages),
        num_warps=4,
    )
    return out
