"""Causal prefill attention on Hopper, in Gluon, which is Triton's language below the tile.

One warp brings tiles to shared memory with the tensor memory accelerator, and two warp groups
multiply: while the matrix units work for one, the other computes its softmax, and each has the
product with the next keys in flight beside the product with the last values (FlashAttention-3,
Shah et al. 2024). With heads of at most 64 long prompts have three groups, which begin their
products in turn: there the softmax takes as long as the products, and a third fills what two leave.
Programs stay on their multiprocessor and take tiles in turn, the heaviest first. Rows of padding,
which stand last, have no part in that: one prompt in a captured step with room for many must not
have its tiles on a few multiprocessors.

A head's columns are a main part and a rest, both powers of 2 (:class:`_Form`): heads of 80 and 96
are not padded to 128 in any product, nor those of 192 to 256.
"""

from __future__ import annotations

from functools import cache
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

from engine_core.kernels.attention import reference
from engine_core.kernels.attention.call import Call
from engine_core.kernels.launch.gluon import Family, Trial
from engine_core.kernels.launch.hopper.triton import (
    launch_dependents,
    reinterpret,
    tma_load,
    wait,
)

_LOG2E = 1.4426950408889634
_FAMILY = Family("prompts' attention", "That of long prompts takes about twice as long")
# Three warp groups are faster from so many tokens of a prompt, on average, and tiles of a program.
_LONG, _TURNS = 2048, 5
# Kinds of launches for which the kernels of two and of three groups are there.
_launched: set[tuple[Any, ...]] = set()
# Programs of a trial: few, so that each takes many tiles.
_TRIAL_PROGRAMS = 8

# Rows of a warp group, and columns of a panel: the 128 bytes of the widest swizzle. A tile of more
# columns lies in shared memory as one panel after another.
_ROWS = gl.constexpr(64)
_PANEL = gl.constexpr(64)
# Bytes of shared memory for tiles, which leaves some for the barriers.
_TILE_BYTES = 200 * 1024


class _Form(NamedTuple):
    """Tiles for heads of a width: with the registers of 232 a thread, and in shared memory.

    Attributes:
        main: columns of the first part of a head, a multiple of a panel's.
        rest: columns of the second; 0 for none.
        keys: of a tile.
        slots: tiles of queries at a time.
        stages: tiles of keys, and of values, at a time.
        groups: warp groups that multiply. Three begin their products in turn.
    """

    main: int
    rest: int
    keys: int
    slots: int
    stages: int
    groups: int

    @classmethod
    def of(cls, head_dim: int, groups: int = 2) -> _Form:
        """The form for heads of at most 256 dimensions; 64 if there are three groups."""
        main = min(256, max(64, 1 << head_dim.bit_length() - 1))
        rest = 0 if head_dim <= main else max(16, triton.next_power_of_2(head_dim - main))
        if rest > 64:
            main, rest = main * 2, 0
        columns = main + rest
        # Results of 256 columns and logits of 128 keys would be more registers than there are.
        keys = 128 if columns <= 128 else 64
        row, stage = 2 * groups * _ROWS.value * columns, 4 * keys * columns
        slots = 2 if 2 * row + 2 * stage <= _TILE_BYTES else 1
        stages = min(4, (_TILE_BYTES - slots * row) // stage)
        return cls(main, rest, keys, slots, stages, groups)


class _Descs(NamedTuple):
    """Where queries, keys and values are: the main columns, and the rest."""

    q: Any
    q_rest: Any
    k: Any
    k_rest: Any
    v: Any
    v_rest: Any


class _Plan(NamedTuple):
    """The rows that a launch attends: their lengths, and how programs take them in ``turns``.

    Queries from ``pad_begin`` to ``pad_end`` are those of the rows of padding after them.
    """

    query_start_ptr: Any
    kv_lens_ptr: Any
    first_row: Any
    num_rows: Any
    query_tiles: Any
    turns: Any
    pad_begin: Any
    pad_end: Any


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
    turn: Any


# Rows whose lengths are looked at together.
_LENGTHS = gl.constexpr(128)


@gluon.jit
def _make_plan(
    query_start_ptr, kv_lens_ptr, first_row, num_rows, HEAD_TILES: gl.constexpr,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """The plan for the rows up to the last that has tokens in the cache; TOKENS of a tile."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows = 0
    longest = 0
    for start in range(0, num_rows, _LENGTHS):
        row = start + gl.arange(0, _LENGTHS, LAYOUT)
        mask = row < num_rows
        begin = gl.load(query_start_ptr + first_row + row, mask=mask, other=0)
        end = gl.load(query_start_ptr + first_row + row + 1, mask=mask, other=0)
        real = gl.load(kv_lens_ptr + first_row + row, mask=mask, other=0) > 0
        rows = gl.maximum(rows, gl.max(gl.where(real, row + 1, 0), axis=0))
        longest = gl.maximum(longest, gl.max(gl.where(real, end - begin, 0), axis=0))
    query_tiles = (longest + TOKENS - 1) // TOKENS
    items = query_tiles * rows * HEAD_TILES
    turns = (items + gl.num_programs(0) - 1) // gl.num_programs(0)
    pad_begin = gl.load(query_start_ptr + first_row + rows)
    pad_end = gl.load(query_start_ptr + first_row + num_rows)
    return _Plan(
        query_start_ptr, kv_lens_ptr, first_row, gl.maximum(rows, 1), query_tiles, turns, pad_begin,
        pad_end,
    )  # fmt: skip


@gluon.jit
def _work(turn, plan, HEAD_TILES: gl.constexpr, TOKENS: gl.constexpr, KEYS: gl.constexpr):
    """The work of this program at its ``turn``, of tiles of TOKENS queries.

    Returns the row, where its queries begin, the first query, the number of queries and of tokens
    of the row, the tile of heads, and the number of key tiles: 0 if there is nothing to do.
    """
    # Back and forth over the programs: the one with the heavier tile gets the lighter one next.
    program = gl.program_id(0)
    last = gl.num_programs(0) - 1
    item = turn * (last + 1) + program + turn % 2 * (last - 2 * program)
    head_tile = item % HEAD_TILES
    row = plan.first_row + item // HEAD_TILES % plan.num_rows
    first_query = (plan.query_tiles - 1 - item // HEAD_TILES // plan.num_rows) * TOKENS
    query_begin = 0
    num_queries = 0
    kv_len = 0
    if first_query >= 0:
        query_begin = gl.load(plan.query_start_ptr + row)
        num_queries = gl.load(plan.query_start_ptr + row + 1) - query_begin
        kv_len = gl.load(plan.kv_lens_ptr + row)
    key_tiles = 0
    if first_query < num_queries:
        end = kv_len - num_queries + gl.minimum(first_query + TOKENS, num_queries)
        key_tiles = (end + KEYS - 1) // KEYS
    return row, query_begin, first_query, num_queries, kv_len, head_tile, key_tiles


@gluon.jit
def _load_tile(
    desc, rest_desc, boxes, rest_boxes, stage, barrier, rows, column, BOX: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """Begin to load tokens of one head; ``rows`` says where each BOX of them begins."""
    PANELS: gl.constexpr = FORM.main // _PANEL
    BOXES: gl.constexpr = FORM.keys // BOX
    for box in gl.static_range(BOXES):
        for panel in gl.static_range(PANELS):
            place = (stage * PANELS + panel) * BOXES + box
            coordinates = [rows[box], column + panel * _PANEL]
            tma_load(desc, coordinates, barrier, boxes.index(place))
        if FORM.rest:
            rest = [rows[box], column + FORM.main]
            tma_load(rest_desc, rest, barrier, rest_boxes.index(stage * BOXES + box))


@gluon.jit
def _zero_end(chunks, stage, valid, PANELS: gl.constexpr, WIDTH: gl.constexpr, KEYS: gl.constexpr):
    """Put zeros behind ``valid`` rows of a tile of values, ``chunks [..., 8, WIDTH]``."""
    CHUNKS: gl.constexpr = KEYS // 8
    LANES: gl.constexpr = WIDTH // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [1, 1], [1, 0])
    in_chunk = gl.arange(0, 8, gl.SliceLayout(1, layout))
    for chunk in range(valid // 8, CHUNKS):
        for panel in gl.static_range(PANELS):
            values = chunks.index((stage * PANELS + panel) * CHUNKS + chunk)
            x = values.load(layout)
            keep = (chunk * 8 + in_chunk < valid)[:, None]
            values.store(gl.where(keep, x, gl.zeros_like(x)))


@gluon.jit
def _load(
    descs,
    buffers,
    plan,
    block_tables_ptr,
    table_stride,
    k_head_stride,
    v_head_stride,
    HEAD_TILES: gl.constexpr,
    TILES_OF_GROUP: gl.constexpr,
    PACKED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    FORM: gl.constexpr,
    PDL: gl.constexpr,
):
    """The warp that loads."""
    KEYS: gl.constexpr = FORM.keys
    REST: gl.constexpr = FORM.rest
    STAGES: gl.constexpr = FORM.stages
    SLOTS: gl.constexpr = FORM.slots
    GROUPS: gl.constexpr = FORM.groups
    COLUMNS: gl.constexpr = FORM.main + REST
    PANELS: gl.constexpr = FORM.main // _PANEL
    TOKENS: gl.constexpr = _ROWS // PACKED
    BOX: gl.constexpr = min(BLOCK_SIZE, KEYS)
    BOXES: gl.constexpr = KEYS // BOX
    TILE_BYTES: gl.constexpr = KEYS * COLUMNS * 2
    element: gl.constexpr = descs.k.dtype
    panels: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    k_boxes = reinterpret(buffers.k, element, [STAGES * PANELS * BOXES, BOX, _PANEL], panels)
    v_boxes = reinterpret(buffers.v, element, [STAGES * PANELS * BOXES, BOX, _PANEL], panels)
    # Shared memory of a swizzled panel repeats every 8 rows.
    CHUNKS: gl.constexpr = KEYS // 8
    v_chunks = reinterpret(buffers.v, element, [STAGES * PANELS * CHUNKS, 8, _PANEL], panels)
    q_panels: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    q_boxes = reinterpret(
        buffers.q, element, [GROUPS * SLOTS * PANELS, TOKENS, PACKED, _PANEL], q_panels
    )
    q_rests, k_rests, v_rests, rest_chunks = q_boxes, k_boxes, v_boxes, v_chunks
    if REST:
        rest: gl.constexpr = gl.NVMMASharedLayout(2 * REST, 16, rank=2)
        q_rest: gl.constexpr = gl.NVMMASharedLayout(2 * REST, 16, rank=3)
        q_rests = reinterpret(
            buffers.q_rest, element, [GROUPS * SLOTS, TOKENS, PACKED, REST], q_rest
        )
        k_rests = reinterpret(buffers.k_rest, element, [STAGES * BOXES, BOX, REST], rest)
        v_rests = reinterpret(buffers.v_rest, element, [STAGES * BOXES, BOX, REST], rest)
        rest_chunks = reinterpret(buffers.v_rest, element, [STAGES * CHUNKS, 8, REST], rest)
    wait(PDL)
    items = 0
    loaded = 0
    ends = 0
    # The next tile is looked up while this one is computed.
    work = _work(0, plan, HEAD_TILES, GROUPS * TOKENS, KEYS)
    for turn in range(plan.turns):
        row, query_begin, first_query, _, kv_len, head_tile, key_tiles = work
        work = _work(turn + 1, plan, HEAD_TILES, GROUPS * TOKENS, KEYS)
        if key_tiles > 0:
            slot = items % SLOTS
            mbarrier.wait(buffers.q_empty.index(slot), (items // SLOTS & 1) ^ 1)
            full = buffers.q_full.index(slot)
            mbarrier.expect(full, GROUPS * _ROWS * COLUMNS * 2)
            for group in gl.static_range(GROUPS):
                token = query_begin + first_query + group * TOKENS
                for panel in gl.static_range(PANELS):
                    coordinates = [token, head_tile * PACKED, panel * _PANEL]
                    place = q_boxes.index((slot * GROUPS + group) * PANELS + panel)
                    tma_load(descs.q, coordinates, buffers.q_full.index(slot), place)
                if REST:
                    coordinates = [token, head_tile * PACKED, FORM.main]
                    place = q_rests.index(slot * GROUPS + group)
                    tma_load(descs.q_rest, coordinates, buffers.q_full.index(slot), place)
            items += 1
            kv_head = head_tile // TILES_OF_GROUP
            table_ptr = block_tables_ptr + row.to(gl.int64) * table_stride
            for tile in range(key_tiles):
                rows = ()
                for box in gl.static_range(BOXES):
                    position = tile * KEYS + box * BOX
                    # Beyond the row's tokens its last block is read again.
                    block = gl.load(table_ptr + gl.minimum(position, kv_len - 1) // BLOCK_SIZE)
                    cache_row = block * BLOCK_SIZE + position % BLOCK_SIZE
                    rows = rows + (cache_row,)  # type: ignore[assignment]  # noqa: RUF005
                stage = loaded % STAGES
                parity = (loaded // STAGES & 1) ^ 1
                mbarrier.wait(buffers.k_empty.index(stage), parity)
                mbarrier.expect(buffers.k_full.index(stage), TILE_BYTES)
                column = kv_head * k_head_stride
                _load_tile(
                    descs.k, descs.k_rest, k_boxes, k_rests, stage, buffers.k_full.index(stage),
                    rows, column, BOX, FORM,
                )  # fmt: skip
                mbarrier.wait(buffers.v_empty.index(stage), parity)
                column = kv_head * v_head_stride
                valid = kv_len - tile * KEYS
                # Behind those of the stages is the barrier of a row's end, which waits here.
                barrier = buffers.v_full.index(gl.where(valid < KEYS, STAGES, stage))
                mbarrier.expect(barrier, TILE_BYTES)
                _load_tile(
                    descs.v, descs.v_rest, v_boxes, v_rests, stage, barrier, rows, column, BOX, FORM
                )
                if valid < KEYS:
                    # Slots behind the last token may hold anything, and 0 * NaN is NaN.
                    mbarrier.wait(barrier, ends & 1)
                    ends += 1
                    _zero_end(v_chunks, stage, valid, PANELS, _PANEL, KEYS)
                    if REST:
                        _zero_end(rest_chunks, stage, valid, 1, REST, KEYS)
                    fence_async_shared()
                    mbarrier.arrive(buffers.v_full.index(stage))
                loaded += 1


@gluon.jit
def _softmax(
    logits, maximum, denominator, scale, first_key, query_pos, masked, KEYS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Fold logits into the running softmax of each row; returns weights and the old one's factor.

    Whether a tile is ``masked`` is seen while it runs: code for both kinds takes twice as long to
    compile. A row's first tile has a key that it sees, so that no maximum is infinite.
    """
    if masked:
        keys = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
        logits = gl.where(keys[None, :] <= (query_pos - first_key)[:, None], logits, float("-inf"))
    new_maximum = gl.maximum(maximum, gl.max(logits, axis=1))
    subtrahend = new_maximum * scale
    weights = gl.exp2(logits * scale - subtrahend[:, None])
    rescale = gl.exp2(maximum * scale - subtrahend)
    denominator = denominator * rescale + gl.sum(weights, axis=1)
    return weights, new_maximum, denominator, rescale


@gluon.jit
def _multiply_keys(q, q_rest, buffers, stage, FORM: gl.constexpr, LOGITS: gl.constexpr):
    """Begin the product of queries and a tile of keys."""
    KEYS: gl.constexpr = FORM.keys
    logits = gl.zeros([_ROWS, KEYS], gl.float32, LOGITS)
    k = buffers.k.index(stage).permute((1, 0))
    logits = warpgroup_mma(q, k, logits, use_acc=False, is_async=True)
    if FORM.rest:
        # The queries' columns beyond a head are zeros, whatever the keys' are.
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
    group,
    items,
    used,
    tile,
    q,
    q_rest,
    query_pos,
    scale,
    buffers,
    masked,
    FORM: gl.constexpr,
    LOGITS: gl.constexpr,
    ACC: gl.constexpr,
    ACC_REST: gl.constexpr,
    WEIGHTS: gl.constexpr,
):
    """Multiply with the keys of a tile, and ``weights`` with the values of the one before."""
    STAGES: gl.constexpr = FORM.stages
    stage = used % STAGES
    before = (used - 1) % STAGES
    mbarrier.wait(buffers.k_full.index(stage), used // STAGES & 1)
    if FORM.groups == 3:
        # An item's first tile takes no turn. The first group's first turn comes by itself.
        taken = used - items - 1
        mbarrier.wait(buffers.turn.index(group), (taken & 1) ^ (group == 0).to(gl.int32))
    logits = _multiply_keys(q, q_rest, buffers, stage, FORM, LOGITS)
    mbarrier.wait(buffers.v_full.index(before), (used - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, buffers.v.index(before), acc, is_async=True)
    if FORM.rest:
        same = gl.convert_layout(weights, gl.DotOperandLayout(0, ACC_REST, 2))
        rest = warpgroup_mma(same, buffers.v_rest.index(before), rest, is_async=True)
    if FORM.groups == 3:
        mbarrier.arrive(buffers.turn.index((group + 1) % FORM.groups))
    if FORM.rest:
        logits = warpgroup_mma_wait(2, deps=(logits,))
    else:
        logits = warpgroup_mma_wait(1, deps=(logits,))
    mbarrier.arrive(buffers.k_empty.index(stage))
    weights, maximum, denominator, rescale = _softmax(
        logits, maximum, denominator, scale, tile * FORM.keys, query_pos, masked, FORM.keys, LOGITS
    )
    if FORM.rest:
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
    out_ptr, y, query_begin, first_query, num_queries, head_tile, first_row,
    NUM_HEADS: gl.constexpr, PACKED: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr,
    D: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store COLUMNS of heads of D, from FIRST on: the rows of a half tile from ``first_row`` on."""
    in_tile = first_row + gl.arange(0, y.shape[0], gl.SliceLayout(1, LAYOUT))
    dims = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    queries = first_query + in_tile // PACKED
    heads = head_tile * PACKED + in_tile % PACKED
    rows = (query_begin + queries).to(gl.int64) * NUM_HEADS + heads
    mask = (queries < num_queries)[:, None]
    if FIRST + COLUMNS > D:
        mask = mask & (dims < D)[None, :]
    gl.store(out_ptr + rows[:, None] * D + dims[None, :], y, mask=mask)


@gluon.jit
def _zero_padding(
    out_ptr, plan, group, GROUPS: gl.constexpr, NUM_HEADS: gl.constexpr, FIRST: gl.constexpr,
    COLUMNS: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store zeros as COLUMNS of the results of rows of padding, from FIRST on."""
    ROWS: gl.constexpr = 1024 // COLUMNS  # 16 bytes per thread
    zeros = gl.zeros([ROWS, COLUMNS], out_ptr.dtype.element_ty, LAYOUT)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dims = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    first = plan.pad_begin.to(gl.int64) * NUM_HEADS
    count = (plan.pad_end - plan.pad_begin) * NUM_HEADS
    start = (gl.program_id(0) * GROUPS + group) * ROWS
    for begin in range(start, count, gl.num_programs(0) * GROUPS * ROWS):
        place = begin + rows
        pointers = out_ptr + (first + place)[:, None] * D + dims[None, :]
        mask = (place < count)[:, None]
        if FIRST + COLUMNS > D:
            mask = mask & (dims < D)[None, :]
        gl.store(pointers, zeros, mask=mask)


@gluon.jit
def _attend_item(
    out_ptr,
    buffers,
    scale,
    group,
    work,
    items,
    used,
    NUM_HEADS: gl.constexpr,
    PACKED: gl.constexpr,
    D: gl.constexpr,
    FORM: gl.constexpr,
):
    """Attend a warp group's half of a tile of queries; returns how many tiles of keys are used up.

    A function of its own: the front end visits code within loops and conditions several times.
    """
    KEYS: gl.constexpr = FORM.keys
    MAIN: gl.constexpr = FORM.main
    STAGES: gl.constexpr = FORM.stages
    SLOTS: gl.constexpr = FORM.slots
    # Without a rest the smallest, which nothing uses.
    REST: gl.constexpr = FORM.rest if FORM.rest else 16
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    ACC_REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    # 16 bytes per thread.
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // MAIN, MAIN // 8], [4, 1], [1, 0])
    OUT_REST: gl.constexpr = gl.BlockedLayout([1, 8], [256 // REST, REST // 8], [4, 1], [1, 0])
    _, query_begin, first_query, num_queries, kv_len, head_tile, key_tiles = work
    first_query += group * (_ROWS // PACKED)
    first_pos = kv_len - num_queries + first_query
    query_pos = first_pos + gl.arange(0, _ROWS, gl.SliceLayout(1, LOGITS)) // PACKED
    # Key tiles that all of these queries see as a whole.
    full = (first_pos + 1) // KEYS
    slot = items % SLOTS
    mbarrier.wait(buffers.q_full.index(slot), items // SLOTS & 1)
    q = buffers.q.index(slot * FORM.groups + group)
    q_rest = buffers.q_rest.index(slot * FORM.groups + group if FORM.rest else 0)

    stage = used % STAGES
    mbarrier.wait(buffers.k_full.index(stage), used // STAGES & 1)
    logits = _multiply_keys(q, q_rest, buffers, stage, FORM, LOGITS)
    logits = warpgroup_mma_wait(0, deps=(logits,))
    mbarrier.arrive(buffers.k_empty.index(stage))
    maximum = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
    denominator = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, LOGITS))
    weights, maximum, denominator, _unused = _softmax(
        logits, maximum, denominator, scale, 0, query_pos, full <= 0, KEYS, LOGITS
    )
    weights = gl.convert_layout(weights.to(buffers.v.dtype), WEIGHTS)
    acc = gl.zeros([_ROWS, MAIN], gl.float32, ACC)
    rest = gl.zeros([_ROWS, REST], gl.float32, ACC_REST)
    used += 1
    # Where heads are wide, whether a tile is masked is no condition: prompts were 4% slower by it.
    APART: gl.constexpr = MAIN > 128
    end = gl.minimum(gl.maximum(full, 1), key_tiles) if APART else key_tiles
    for tile in range(1, end):
        acc, rest, weights, maximum, denominator = _attend_tile(
            acc, rest, weights, maximum, denominator, group, items, used, tile, q, q_rest,
            query_pos, scale, buffers, False if APART else tile >= full, FORM, LOGITS, ACC,
            ACC_REST, WEIGHTS,
        )  # fmt: skip
        used += 1
    if APART:
        for tile in range(end, key_tiles):
            acc, rest, weights, maximum, denominator = _attend_tile(
                acc, rest, weights, maximum, denominator, group, items, used, tile, q, q_rest,
                query_pos, scale, buffers, True, FORM, LOGITS, ACC, ACC_REST, WEIGHTS,
            )  # fmt: skip
            used += 1
    before = (used - 1) % STAGES
    mbarrier.wait(buffers.v_full.index(before), (used - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, buffers.v.index(before), acc, is_async=True)
    if FORM.rest:
        same = gl.convert_layout(weights, gl.DotOperandLayout(0, ACC_REST, 2))
        rest = warpgroup_mma(same, buffers.v_rest.index(before), rest, is_async=True)
        acc, rest = warpgroup_mma_wait(0, deps=(acc, rest))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(buffers.v_empty.index(before))
    factor = 1.0 / denominator
    y = acc * gl.convert_layout(factor, gl.SliceLayout(1, ACC))[:, None]
    # By way of the queries' place, to be stored in whole lines.
    q.store(y.to(buffers.q.dtype))
    y = q.load(OUT)
    y_rest = y
    if FORM.rest:
        y_rest = rest * gl.convert_layout(factor, gl.SliceLayout(1, ACC_REST))[:, None]
        q_rest.store(y_rest.to(buffers.q.dtype))
        y_rest = q_rest.load(OUT_REST)
    fence_async_shared()
    mbarrier.arrive(buffers.q_empty.index(slot))
    _store(
        out_ptr, y, query_begin, first_query, num_queries, head_tile, 0, NUM_HEADS, PACKED, 0, MAIN,
        D, OUT,
    )  # fmt: skip
    if FORM.rest:
        _store(
            out_ptr, y_rest, query_begin, first_query, num_queries, head_tile, 0, NUM_HEADS, PACKED,
            MAIN, REST, D, OUT_REST,
        )  # fmt: skip
    return used


@gluon.jit
def _zero_item(
    out_ptr, work, group, NUM_HEADS: gl.constexpr, PACKED: gl.constexpr, FIRST: gl.constexpr,
    COLUMNS: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store zeros as COLUMNS, from FIRST on, of a warp group's half of a tile."""
    ROWS: gl.constexpr = 1024 // COLUMNS
    _, query_begin, first_query, num_queries, _, head_tile, _ = work
    first_query += group * (_ROWS // PACKED)
    y = gl.zeros([ROWS, COLUMNS], out_ptr.dtype.element_ty, LAYOUT)
    for first_row in range(0, _ROWS, ROWS):
        _store(
            out_ptr, y, query_begin, first_query, num_queries, head_tile, first_row, NUM_HEADS,
            PACKED, FIRST, COLUMNS, D, LAYOUT,
        )  # fmt: skip


@gluon.jit
def _attend(
    group,
    out_ptr,
    buffers,
    plan,
    scale,
    NUM_HEADS: gl.constexpr,
    HEAD_TILES: gl.constexpr,
    PACKED: gl.constexpr,
    D: gl.constexpr,
    FORM: gl.constexpr,
    PDL: gl.constexpr,
):
    """A warp group that multiplies: its part of a tile's rows."""
    MAIN: gl.constexpr = FORM.main
    REST: gl.constexpr = FORM.rest
    TOKENS: gl.constexpr = _ROWS // PACKED
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // MAIN, MAIN // 8], [4, 1], [1, 0])
    wait(PDL)
    items = 0
    used = 0
    work = _work(0, plan, HEAD_TILES, FORM.groups * TOKENS, FORM.keys)
    for turn in range(plan.turns):
        now = work
        work = _work(turn + 1, plan, HEAD_TILES, FORM.groups * TOKENS, FORM.keys)
        if now[6] > 0:
            used = _attend_item(
                out_ptr, buffers, scale, group, now, items, used, NUM_HEADS, PACKED, D, FORM
            )
            items += 1
        elif now[2] >= 0:
            # A row without tokens in the cache, among others.
            _zero_item(out_ptr, now, group, NUM_HEADS, PACKED, 0, MAIN, D, OUT)
            if REST:
                rest: gl.constexpr = gl.BlockedLayout(
                    [1, 8], [256 // REST, REST // 8], [4, 1], [1, 0]
                )
                _zero_item(out_ptr, now, group, NUM_HEADS, PACKED, MAIN, REST, D, rest)
    _zero_padding(out_ptr, plan, group, FORM.groups, NUM_HEADS, 0, MAIN, D, OUT)
    if REST:
        padded: gl.constexpr = gl.BlockedLayout([1, 8], [256 // REST, REST // 8], [4, 1], [1, 0])
        _zero_padding(out_ptr, plan, group, FORM.groups, NUM_HEADS, MAIN, REST, D, padded)


@gluon.jit(
    do_not_specialize=[
        "first_row",
        "num_rows",
        "table_stride",
        "k_head_stride",
        "v_head_stride",
    ]
)
def _hopper_prefill_kernel(
    out_ptr,
    q_desc,
    q_rest_desc,
    k_desc,
    k_rest_desc,
    v_desc,
    v_rest_desc,
    block_tables_ptr,
    query_start_ptr,
    kv_lens_ptr,
    scale,
    table_stride,
    first_row,
    num_rows,
    k_head_stride,
    v_head_stride,
    NUM_HEADS: gl.constexpr,
    HEAD_TILES: gl.constexpr,
    TILES_OF_GROUP: gl.constexpr,
    PACKED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    D: gl.constexpr,
    FORM: gl.constexpr,
    PDL: gl.constexpr,
):
    """Tiles of _ROWS (query, head) pairs a group; PACKED heads of a query are adjacent rows."""
    launch_dependents(PDL)
    element: gl.constexpr = k_desc.dtype
    MAIN: gl.constexpr = FORM.main
    KEYS: gl.constexpr = FORM.keys
    STAGES: gl.constexpr = FORM.stages
    SLOTS: gl.constexpr = FORM.slots
    GROUPS: gl.constexpr = FORM.groups
    # Without a rest the smallest place, which nothing uses.
    REST: gl.constexpr = FORM.rest if FORM.rest else 16
    REST_QUERIES: gl.constexpr = GROUPS * SLOTS if FORM.rest else 1
    REST_ROWS: gl.constexpr = _ROWS if FORM.rest else 16
    REST_STAGES: gl.constexpr = STAGES if FORM.rest else 1
    REST_KEYS: gl.constexpr = KEYS if FORM.rest else 16
    panels: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    rest: gl.constexpr = gl.NVMMASharedLayout(2 * REST, 16, rank=2)
    single: gl.constexpr = mbarrier.MBarrierLayout()
    buffers = _Buffers(
        gl.allocate_shared_memory(element, [GROUPS * SLOTS, _ROWS, MAIN], panels),
        gl.allocate_shared_memory(element, [REST_QUERIES, REST_ROWS, REST], rest),
        gl.allocate_shared_memory(element, [STAGES, KEYS, MAIN], panels),
        gl.allocate_shared_memory(element, [REST_STAGES, REST_KEYS, REST], rest),
        gl.allocate_shared_memory(element, [STAGES, KEYS, MAIN], panels),
        gl.allocate_shared_memory(element, [REST_STAGES, REST_KEYS, REST], rest),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], single),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], single),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], single),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], single),
        gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], single),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], single),
        gl.allocate_shared_memory(gl.int64, [GROUPS, 1], single),
    )
    for slot in gl.static_range(SLOTS):
        mbarrier.init(buffers.q_full.index(slot), count=1)
        mbarrier.init(buffers.q_empty.index(slot), count=GROUPS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(buffers.k_full.index(stage), count=1)
        mbarrier.init(buffers.k_empty.index(stage), count=GROUPS)
        mbarrier.init(buffers.v_full.index(stage), count=1)
        mbarrier.init(buffers.v_empty.index(stage), count=GROUPS)
    mbarrier.init(buffers.v_full.index(STAGES), count=1)
    for group in gl.static_range(GROUPS):
        mbarrier.init(buffers.turn.index(group), count=1)
    fence_async_shared()
    wait(PDL)
    TOKENS: gl.constexpr = _ROWS // PACKED
    plan = _make_plan(
        query_start_ptr, kv_lens_ptr, first_row, num_rows, HEAD_TILES, GROUPS * TOKENS
    )
    descs = _Descs(q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, v_rest_desc)
    # The group is no constant, so that its function is compiled to Triton's language once.
    if GROUPS == 3:
        # Registers of a thread: 3 * 128 * 160 + 128 * 32 are a multiprocessor's 65536.
        gl.warp_specialize(
            [
                (_attend, (
                    gl.to_tensor(0), out_ptr, buffers, plan, scale, NUM_HEADS, HEAD_TILES, PACKED,
                    D, FORM, PDL,
                )),
                (_attend, (
                    gl.to_tensor(1), out_ptr, buffers, plan, scale, NUM_HEADS, HEAD_TILES, PACKED,
                    D, FORM, PDL,
                )),
                (_attend, (
                    gl.to_tensor(2), out_ptr, buffers, plan, scale, NUM_HEADS, HEAD_TILES, PACKED,
                    D, FORM, PDL,
                )),
                (_load, (
                    descs, buffers, plan, block_tables_ptr, table_stride, k_head_stride,
                    v_head_stride, HEAD_TILES, TILES_OF_GROUP, PACKED, BLOCK_SIZE, FORM, PDL,
                )),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip
    else:
        # 2 * 128 * 232 + 128 * 40 fit them.
        gl.warp_specialize(
            [
                (_attend, (
                    gl.to_tensor(0), out_ptr, buffers, plan, scale, NUM_HEADS, HEAD_TILES, PACKED,
                    D, FORM, PDL,
                )),
                (_attend, (
                    gl.to_tensor(1), out_ptr, buffers, plan, scale, NUM_HEADS, HEAD_TILES, PACKED,
                    D, FORM, PDL,
                )),
                (_load, (
                    descs, buffers, plan, block_tables_ptr, table_stride, k_head_stride,
                    v_head_stride, HEAD_TILES, TILES_OF_GROUP, PACKED, BLOCK_SIZE, FORM, PDL,
                )),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip


def takes(q: Tensor, block_size: int, v_head_dim: int) -> bool:
    """Whether there is a kernel for such queries and blocks, wherever they lie."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and 32 < q.shape[2] <= 256
        and q.shape[2] % 8 == 0
        and v_head_dim == q.shape[2]
        and block_size >= 16
        and (128 % block_size == 0 or block_size % 128 == 0)
    )


def fits(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether :func:`prefill` takes tensors of these shapes and places."""
    block_size = k_cache.shape[1]
    return (
        takes(q, block_size, v_cache.shape[3])
        and q.data_ptr() % 16 == 0
        and all(stride % 8 == 0 for stride in q.stride()[:2])
        and all(
            cache.data_ptr() % 16 == 0
            and all(stride % 8 == 0 for stride in cache.stride()[1:3])
            and cache.stride(0) == block_size * cache.stride(1)
            for cache in (k_cache, v_cache)
        )
    )


def groups_for(call: Call, programs: int) -> int:
    """Warp groups that multiply: three where they are faster for such rows.

    The host's numbers alone decide, since a captured step must not depend on others. Three take
    tiles half as large again: with few of them some programs would have one more than others.
    """
    heads, head_dim = call.q.shape[1:]
    tokens = call.q.shape[0] - call.num_decode_rows
    long = tokens >= _LONG * (call.kv_lens.shape[0] - call.num_decode_rows)
    many = tokens * heads >= _TURNS * 3 * _ROWS.value * programs
    return 3 if _may_be_three(heads, call.k_cache.shape[2], head_dim) and long and many else 2


def _may_be_three(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether there are prompts for which three warp groups are faster."""
    # With fewer heads side by side the gain was 2 to 4%, and no more than is lost at the end.
    return head_dim <= _PANEL.value and _packed(heads, kv_heads) >= 4


def _packed(heads: int, kv_heads: int) -> int:
    """As many heads of a group as divide both it and the rows of a warp group."""
    group_size = heads // kv_heads
    packed: int = min(group_size & -group_size, _ROWS.value)
    return packed


def is_trusted(q: Tensor, num_kv_heads: int, block_size: int, pdl: bool, groups: int) -> bool:
    """Whether :func:`prefill` may be used for such queries and blocks; it may be tried for that."""
    kind = (q.dtype, *q.shape[1:], num_kv_heads, block_size, pdl, groups)
    return _FAMILY.allows(q.device, kind, lambda: _trial(q, num_kv_heads, block_size, pdl, groups))


def _trial(like: Tensor, num_kv_heads: int, block_size: int, pdl: bool, groups: int) -> Trial:
    """Rows that end within tiles, one of padding, and NaN in slots that no row sees."""
    heads, head_dim = like.shape[1:]
    device, dtype = like.device, like.dtype
    rows = ((300, 700), (129, 129), (2, 0))
    draw = torch.Generator(device).manual_seed(0)
    counts = [triton.cdiv(kv_len, block_size) for _, kv_len in rows]
    tables = torch.zeros((len(rows), max(counts)), dtype=torch.int32, device=device)
    free = list(range(sum(counts)))  # taken from the end: a row's blocks are not in their order
    shape = (2, len(free), block_size, num_kv_heads, head_dim)
    caches = torch.full(shape, torch.nan, dtype=dtype, device=device)
    for row, (count, (_, kv_len)) in enumerate(zip(counts, rows, strict=True)):
        blocks = [free.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        numbers = torch.randn((2, kv_len, *shape[3:]), generator=draw, device=device)
        for begin, block in zip(range(0, kv_len, block_size), blocks, strict=True):
            part = numbers[:, begin : begin + block_size]
            caches[:, block, : part.shape[1]] = part
    k_cache, v_cache = caches
    queries = [0, 300, 429, 431]
    q = torch.randn((queries[-1], heads, head_dim), generator=draw, device=device).to(dtype)
    query_start = torch.tensor(queries, dtype=torch.int32, device=device)
    kv_lens = torch.tensor([kv_len for _, kv_len in rows], dtype=torch.int32, device=device)
    call = Call(
        q, k_cache, v_cache, torch.full_like(q, torch.nan), tables, query_start, kv_lens, 300, 700,
        0, head_dim**-0.5,
    )  # fmt: skip
    expected = torch.empty(q.shape, dtype=torch.float32, device=device)
    reference.paged_attention(
        q,
        k_cache,
        v_cache,
        expected,
        block_tables=tables,
        query_start=query_start,
        kv_lens=kv_lens,
        scale=call.scale,
    )

    def run() -> Tensor:
        prefill(call, call.scale * _LOG2E, _TRIAL_PROGRAMS, pdl, groups)
        return call.out

    return Trial(run, expected)


@cache
def _panels(columns: int, rank: int) -> gl.NVMMASharedLayout:
    """The layout of tiles of so many columns: to make one takes as long as much of a launch."""
    return gl.NVMMASharedLayout(2 * columns, 16, rank=rank)


def prefill(call: Call, scale: float, num_programs: int, pdl: bool, groups: int = 2) -> None:
    """Write the attention of all rows but the first ``num_decode_rows`` into ``call.out``.

    What :func:`fits` asks of the call holds. The tensor maps have the addresses in them, as the
    arguments of any captured kernel do.

    Args:
        call: with a positive scale.
        scale: that times log2(e).
        num_programs: at most, one a multiprocessor.
        pdl: launch with programmatic dependent launch.
        groups: warp groups that multiply, 2, or 3 if heads have at most 64 dimensions.
    """
    q = call.q
    num_rows = call.kv_lens.shape[0] - call.num_decode_rows
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = call.k_cache.shape[1:3]
    packed = _packed(num_heads, num_kv_heads)
    tokens = _ROWS.value // packed
    form = _Form.of(head_dim, groups)
    descs: list[TensorDescriptor | None] = []
    for part in (q, call.k_cache, call.v_cache):
        shape, strides, box = list(q.shape), list(q.stride()), [tokens, packed]
        if part is not q:
            width = (num_kv_heads - 1) * part.stride(2) + head_dim
            shape, strides = [part.shape[0] * block_size, width], [part.stride(1), 1]
            box = [min(block_size, form.keys)]
        for columns in (_PANEL.value, form.rest):
            if not columns:
                descs.append(None)
                continue
            layout = _panels(columns, len(shape))
            descs.append(TensorDescriptor(part, shape, strides, [*box, columns], layout))
    head_tiles = num_heads // packed

    def launch(groups: int, num_rows: int, num_programs: int) -> None:
        _hopper_prefill_kernel[(num_programs,)](
            call.out,
            *descs,
            call.block_tables,
            call.query_start,
            call.kv_lens,
            scale,
            call.block_tables.stride(0),
            call.num_decode_rows,
            num_rows,
            call.k_cache.stride(2),
            call.v_cache.stride(2),
            NUM_HEADS=num_heads,
            HEAD_TILES=head_tiles,
            TILES_OF_GROUP=num_heads // num_kv_heads // packed,
            PACKED=packed,
            BLOCK_SIZE=block_size,
            D=head_dim,
            FORM=_Form.of(head_dim, groups),
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )

    kind = (q.device, q.dtype, num_heads, num_kv_heads, head_dim, block_size, pdl)
    if _may_be_three(num_heads, num_kv_heads, head_dim) and kind not in _launched:
        # The other one too, of no rows: a start has both compiled, and no prompt waits for that.
        launch(2 if groups == 3 else 3, 0, 1)
        _launched.add(kind)
    items = triton.cdiv(call.max_query_len, groups * tokens) * num_rows * head_tiles
    launch(groups, num_rows, min(num_programs, items))
