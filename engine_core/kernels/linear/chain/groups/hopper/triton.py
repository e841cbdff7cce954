"""A chain of linears by 4-bit codes as one launch, on Hopper, in Gluon.

It is made as that of 8-bit floats (:mod:`engine_core.kernels.linear.chain.hopper.triton`), but for
its products, which are of integers. A row of x becomes integers of 16 bits, parts of the greatest
of each group of 128, in two columns of bytes. A nibble is a byte where the others are masked; a
high one is 16 times too large. Each warp multiplies 16 rows of the weight by 256 columns of its
own, so that warps wait for one another at the end of a stage alone. Sums of a group begin with what
zeros take away, are exact, and are scaled in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine_core.kernels.activation.triton import activated
from engine_core.kernels.launch.gluon import Family, Trial
from engine_core.kernels.launch.hopper.triton import (
    launch_dependents,
    reinterpret,
    sync_threads,
    tma_load,
    wait,
)
from engine_core.kernels.launch.triton import num_multiprocessors, pdl_options
from engine_core.kernels.linear.boxes.hopper.triton import barriers, room
from engine_core.kernels.linear.chain import Chain, barrier_count
from engine_core.kernels.linear.chain.hopper.triton import (
    ask,
    divide,
    join_programs,
    load_tiles,
    of_four,
    rounded,
    trial_of_chain,
)
from engine_core.kernels.linear.epilogues.triton import Activated, Added
from engine_core.kernels.linear.groups import BLOCK, GroupWeight
from engine_core.kernels.linear.tiles import Tile

_FAMILY = Family("chains of 4-bit linears", "Steps of one row in 4 bits take a tenth longer")

# Rows of the weight that a warp multiplies; of a gate as many more of up.
_ROWS = gl.constexpr(16)
_WARPS = gl.constexpr(8)
# A stage has 16 chunks of 16 rows by 256 columns, two groups: 128 bytes of a row.
_CHUNKS = gl.constexpr(16)
_COLS = gl.constexpr(128)
# Groups of a whole stage of one half.
_GROUPS = gl.constexpr(2 * _CHUNKS.value)
# The greatest integer that a number of x becomes: 127 times 256.
_TOP = gl.constexpr(32512.0)
# Numbers of groups that have none above this are so many parts of it.
_LEAST = gl.constexpr(1e-30)
# 1.5 * 2**23, to which an integer is added in its last bits, and half a high byte.
_MAGIC = gl.constexpr(12583040.0)
_MAGIC_BITS = gl.constexpr(0x4B400000)
# Codes of 16 rows by the 128 columns of a group: the low halves of bytes, and the high ones, which
# are 16 times as large. Sums begin with $18 and $19, 1.5 * 2**23 as a float, less zeros.
_PRODUCTS = gl.constexpr("""{
.reg .b32 a, b, c, d, l0, l1, l2, l3, h0, h1, h2, h3;
.reg .f32 f, g;
mov.b32 l0, $18; mov.b32 l1, $18; mov.b32 l2, $19; mov.b32 l3, $19;
mov.b32 h0, 0x4B400000; mov.b32 h1, h0; mov.b32 h2, h0; mov.b32 h3, h0;
and.b32 a, $2, 0x0f0f0f0f; and.b32 b, $6, 0x0f0f0f0f;
and.b32 c, $3, 0x0f0f0f0f; and.b32 d, $7, 0x0f0f0f0f;
mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32
{l0, l1, l2, l3}, {a, b, c, d}, {$10, $12}, {l0, l1, l2, l3};
and.b32 a, $2, 0xf0f0f0f0; and.b32 b, $6, 0xf0f0f0f0;
and.b32 c, $3, 0xf0f0f0f0; and.b32 d, $7, 0xf0f0f0f0;
mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32
{h0, h1, h2, h3}, {a, b, c, d}, {$11, $13}, {h0, h1, h2, h3};
and.b32 a, $4, 0x0f0f0f0f; and.b32 b, $8, 0x0f0f0f0f;
and.b32 c, $5, 0x0f0f0f0f; and.b32 d, $9, 0x0f0f0f0f;
mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32
{l0, l1, l2, l3}, {a, b, c, d}, {$14, $16}, {l0, l1, l2, l3};
and.b32 a, $4, 0xf0f0f0f0; and.b32 b, $8, 0xf0f0f0f0;
and.b32 c, $5, 0xf0f0f0f0; and.b32 d, $9, 0xf0f0f0f0;
mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32
{h0, h1, h2, h3}, {a, b, c, d}, {$15, $17}, {h0, h1, h2, h3};
mov.b32 f, h0; mov.b32 g, h2;
fma.rn.f32 f, f, 0f3D800000, 0fCB4C0000;
fma.rn.f32 g, g, 0f3D800000, 0fCB4C0000;
mov.b32 $0, l0; mov.b32 $1, l2;
add.f32 $0, $0, f; add.f32 $1, $1, g;
}""")


_MOST_SHARED = 180 * 1024
_MOST_STAGES = 4
_MOST_REGISTERS = 96


@gluon.constexpr_function
def _lanes_layout():
    """``[8, 8, 4]``: warps, the rows of a warp that are below 8, and columns of results by two.

    Rows are in an order by which eight lanes read all banks of shared memory.
    """
    lanes = [[0, 0, 1], [0, 0, 2], [0, 4, 0], [0, 1, 0], [0, 2, 0]]
    return gl.DistributedLinearLayout([], lanes, [[1, 0, 0], [2, 0, 0], [4, 0, 0]], [], [8, 8, 4])


@gluon.constexpr_function
def _words_layout(halves):
    """``[16, 16, 32]``, chunks, rows and words, as the matrix units want them of threads."""
    first, warp = (8, 1) if halves == 1 else (1, 2)
    registers = [[0, 0, 1], [0, 0, 2], [0, 8, 0], [0, 0, 16], [first, 0, 0]]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 4, 0], [0, 1, 0], [0, 2, 0]]
    warps = [[warp, 0, 0], [2 * warp, 0, 0], [4 * warp, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [16, 16, 32])


@gluon.constexpr_function
def _x_layout():
    """``[8, 2, 4, 2, 2, 4, 4]``: warps, groups, rows, columns, halves, and words by four."""
    registers = [[0] * 6 + [1], [0] * 6 + [2], [0, 0, 0, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0]]
    lanes = [[0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 2, 0], [0, 0, 2, 0, 0, 0, 0]]
    lanes += [[0, 0, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0]]
    warps = [[size] + [0] * 6 for size in (1, 2, 4)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [8, 2, 4, 2, 2, 4, 4])


@gluon.constexpr_function
def _sums_layout():
    """``[8, 2, 8, 2, 2, 2]``: warps, groups, rows, columns by two, columns, and two values."""
    registers = [[0, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0]]
    lanes = [[0, 0, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0], [0, 0, 4, 0, 0, 0]]
    lanes += [[0, 0, 1, 0, 0, 0], [0, 0, 2, 0, 0, 0]]
    warps = [[size, 0, 0, 0, 0, 0] for size in (1, 2, 4)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [8, 2, 8, 2, 2, 2])


@gluon.constexpr_function
def _groups_layout(halves):
    """Of rows and groups, each chunk's as of :func:`_words_layout`: six dimensions.

    With a half ``[2, 8, 2, 2, 8, 4]``, chunks, groups, rows above and below 8, columns; with two
    ``[8, 2, 2, 2, 8, 4]``, chunks, groups, halves, and so on.
    """

    def at(place, size):
        return [size if place == each else 0 for each in range(6)]

    warp, group, part = (1, 2, 0) if halves == 1 else (0, 1, 2)
    registers = [at(3, 1), at(group, 1), at(part, 1)]
    lanes = [at(5, 1), at(5, 2), at(4, 4), at(4, 1), at(4, 2)]
    warps = [at(warp, 1), at(warp, 2), at(warp, 4)]
    shape = [2, 8, 2, 2, 8, 4] if halves == 1 else [8, 2, 2, 2, 8, 4]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], shape)


@gluon.jit
def _halved(values):
    """The left and the right half of the last dimension of ``[8, 8, 4, n]``."""
    LEFT: gl.constexpr = values.shape[3] // 2
    return values.reshape([8, 8, 4, 2, LEFT]).permute((0, 1, 2, 4, 3)).split()


@gluon.jit
def _parted(values):
    """``[8, 8, 4, n]`` as n tensors, one number of each in a thread."""
    LANES: gl.constexpr = _lanes_layout()
    COUNT: gl.constexpr = values.shape[3]
    parts = (values,)
    for level in gl.static_range(COUNT.bit_length() - 1):
        halved = ()
        for each in gl.static_range(1 << level):
            halved += _halved(parts[each])
        parts = halved  # type: ignore[assignment]
    found = ()
    for each in gl.static_range(COUNT):
        found += (gl.convert_layout(parts[each].reshape([8, 8, 4]), LANES),)  # type: ignore[assignment]
    return found


@gluon.jit
def _of_groups(values, HALVES: gl.constexpr):
    """Of rows of a stage's groups: parts, groups and rows above and below 8."""
    LAYOUT: gl.constexpr = _groups_layout(HALVES)
    found = values.load(LAYOUT)
    if HALVES == 1:
        whole = gl.zeros([2, 8, 2, 2, 8, 4], found.dtype, LAYOUT)
        found, _whole = gl.broadcast(found, whole)
        ordered = found.permute((1, 4, 5, 0, 2, 3))
    else:
        whole = gl.zeros([8, 2, 2, 2, 8, 4], found.dtype, LAYOUT)
        found, _whole = gl.broadcast(found, whole)
        ordered = found.permute((0, 4, 5, 2, 1, 3))
    return ordered.reshape([8, 8, 4, 8])


@gluon.jit
def _x_of(x):
    """Words of x by which a warp's two groups are multiplied."""
    LAYOUT: gl.constexpr = _x_layout()
    whole = gl.zeros([8, 2, 4, 2, 2, 4, 4], gl.int32, LAYOUT)
    found, _whole = gl.broadcast(x.load(LAYOUT), whole)
    return _parted(found.permute((0, 2, 3, 5, 1, 4, 6)).reshape([8, 8, 4, 16]))


@gluon.jit
def _sums_of(sums):
    """Of a warp's two groups: the sum of a column's integers, and what these are parts of."""
    LAYOUT: gl.constexpr = _sums_layout()
    whole = gl.zeros([8, 2, 8, 2, 2, 2], gl.int32, LAYOUT)
    found, _whole = gl.broadcast(sums.load(LAYOUT), whole)
    return _parted(found.permute((0, 2, 3, 4, 1, 5)).reshape([8, 8, 4, 4]))


@gluon.jit
def _multiply(
    words, scales, zeros, x, sums, acc, slot, of_tile, HALVES: gl.constexpr, MIDDLE: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
):  # fmt: skip
    """``acc`` and the products of a stage: of each part those of rows below 8, and of 8 and more.

    Parts are the chunks of a row, or the gate and up.
    """
    found = words.index(slot).load(_words_layout(HALVES))
    if HALVES == 1:
        split = found.reshape([2, 8, 2, 8, 2, 4, 4]).permute((1, 3, 5, 0, 4, 2, 6))
    else:
        split = found.reshape([8, 2, 2, 8, 2, 4, 4]).permute((0, 3, 5, 1, 4, 2, 6))
    codes = _parted(split.reshape([8, 8, 4, 32]))
    scale = _parted(_of_groups(scales.index(slot), HALVES).to(gl.float32))
    zero = scale
    if HAS_ZEROS:
        zero = _parted(_of_groups(zeros.index(slot), HALVES).to(gl.int32))
    first = of_tile * (2 // HALVES)
    values = _x_of(x.index(first))
    totals = _sums_of(sums.index(first))
    made = ()
    for part in gl.static_range(2):
        if HALVES == 1 and part == 1:
            values = _x_of(x.index(first + 1))
            totals = _sums_of(sums.index(first + 1))
        low = acc[2 * part]
        high = acc[2 * part + 1]
        for group in gl.static_range(2):
            total = totals[2 * group]
            times = totals[2 * group + 1].to(gl.float32, bitcast=True)
            if HAS_ZEROS:
                begin = _MAGIC_BITS - zero[4 * part + 2 * group] * total
                begin_high = _MAGIC_BITS - zero[4 * part + 2 * group + 1] * total
            else:
                begin = _MAGIC_BITS - MIDDLE * total
                begin_high = begin
            of_low, of_high = gl.inline_asm_elementwise(
                _PRODUCTS, "=&f,=&f" + ",r" * 18,
                codes[16 * part + 8 * group : 16 * part + 8 * group + 8]
                + values[8 * group : 8 * group + 8]
                + (begin, begin_high),
                (gl.float32, gl.float32), is_pure=True, pack=1,
            )  # fmt: skip
            low += of_low * (scale[4 * part + 2 * group] * times)
            high += of_high * (scale[4 * part + 2 * group + 1] * times)
        made += (low, high)  # type: ignore[assignment]
    return made


@gluon.jit
def _results(acc):
    """Sums over warps and columns of x: ``[16, 2]``, of rows and parts."""
    LANES: gl.constexpr = acc[0].type.layout
    column = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, _last(LANES)), 0), 1)
    weight = gl.where(column == 0, 256.0, gl.where(column == 1, 1.0, 0.0))
    first = gl.join(acc[0] * weight, acc[1] * weight)
    second = gl.join(acc[2] * weight, acc[3] * weight)
    # Warps, rows below 8, columns, above and below 8, parts.
    both = gl.join(first, second).permute((3, 1, 4, 0, 2)).reshape([16, 2, 32])
    return gl.sum(both, 2)


@gluon.constexpr_function
def _last(layout):
    return gl.SliceLayout(0, gl.SliceLayout(1, layout))


@gluon.jit
def _take_row(x, sums, x_ptr, K: gl.constexpr, PASSES: gl.constexpr):
    """A row to shared memory as integers, with their sums and what they are parts of."""
    FLAT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 64], [8, 0], [16, 0]],
        [[0, 2], [0, 4], [0, 8], [0, 16], [0, 32]],
        [[1, 0], [2, 0], [4, 0]],
        [],
        [_GROUPS, _COLS],
    )
    ROWS: gl.constexpr = gl.SliceLayout(1, FLAT)
    groups = gl.expand_dims(gl.arange(0, _GROUPS, ROWS), 1)
    cols = gl.expand_dims(gl.arange(0, _COLS, gl.SliceLayout(0, FLAT)), 0)
    raw = ()
    for each in gl.static_range(PASSES):
        places = (groups + each * _GROUPS) * _COLS + cols
        # Other programs wrote it: not from this multiprocessor's own cache.
        found = gl.load(x_ptr + places, mask=places < K, other=0.0, cache_modifier=".cg")
        raw += (found,)  # type: ignore[assignment]
    for each in gl.static_range(PASSES):
        # As integers, so that NaN is the greatest.
        top = gl.max(raw[each].to(gl.int16, bitcast=True).to(gl.int32) & 0x7FFF, axis=1)
        top = (top << 16).to(gl.float32, bitcast=True)  # type: ignore[unreachable]
        top = gl.where(top < _LEAST, _LEAST, top)
        factor = gl.expand_dims(_TOP / top, 1)
        values = raw[each].to(gl.float32)
        factor, values = gl.broadcast(factor, values)
        magic = gl.full(values.shape, _MAGIC, gl.float32, FLAT)
        bits = gl.fma(values, factor, magic).to(gl.int32, bitcast=True)
        high = (bits >> 8).to(gl.int8)
        low = (bits ^ 128).to(gl.int8)
        both = gl.join(high, low).reshape([_GROUPS, 2, 2, 4, 2, 2, 2, 2])
        both = both.permute((0, 7, 4, 3, 5, 2, 6, 1)).reshape([_GROUPS, 2 * _COLS])
        x.index(each).store(both)
        # Sums of both bytes in one number: 128 low ones, from 0 on, have room in half of it.
        packed = (((bits - _MAGIC_BITS) >> 8) << 16) | (bits & 255)
        packed = gl.sum(packed, axis=1)
        parts = (top / _TOP).to(gl.int32, bitcast=True)
        of_high = gl.join(packed >> 16, parts)
        of_low = gl.join((packed & 65535) - 128 * _COLS, parts)
        sums.index(each).store(gl.join(of_high, of_low).permute((0, 2, 1)).reshape([_GROUPS, 4]))
    sync_threads()


@gluon.jit
def _load_step(
    descs, rings, full, empty, step, tile, of_tile, HALVES: gl.constexpr, STAGES: gl.constexpr
):
    """Load a step of a tile, codes, scales and zeros, as soon as its place in the ring is empty."""
    desc, scales_desc, zeros_desc = descs
    codes, scales, zeros = rings
    HAS_ZEROS: gl.constexpr = zeros_desc is not None
    slot = step % STAGES
    barrier = full.index(slot)
    chunk = of_tile * (_CHUNKS // HALVES)
    row = tile * _ROWS
    mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
    mbarrier.expect(barrier, _CHUNKS * _ROWS * (128 + 4) + (_GROUPS * _ROWS if HAS_ZEROS else 0))
    tma_load(desc, [chunk, 0, row, 0], barrier, codes.index(slot))
    tma_load(scales_desc, [2 * chunk, 0, row], barrier, scales.index(slot))
    if HAS_ZEROS:
        tma_load(zeros_desc, [2 * chunk, 0, row], barrier, zeros.index(slot))


@gluon.jit
def _load(
    descs, rings, full, empty, TILES: gl.constexpr, NUM_STEPS: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    # Of the 7 tiles of a program none is dealt out: a step of Llama 3 8B took 1.786 ms, not 1.770.
    load_tiles(
        _load_step, descs, rings, full, empty, None, None, TILES, NUM_STEPS, HALVES, False, STAGES
    )  # fmt: skip


@gluon.jit
def _tile(
    views, words, x, sums, full, empty, step, end, bias_ptr, tile, factor,
    N: gl.constexpr, GATED: gl.constexpr, SQUARES: gl.constexpr, NUM_STEPS: gl.constexpr,
    STAGES: gl.constexpr, MIDDLE: gl.constexpr, HAS_ZEROS: gl.constexpr,
):  # fmt: skip
    """Multiply and store a tile; returned is the next step's number."""
    ELEMENT: gl.constexpr = end.out.dtype.element_ty
    # A thread has both a gate's product and its up's.
    BOTH: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [_WARPS, 1], [1, 0])
    OUT: gl.constexpr = gl.SliceLayout(1, BOTH)
    HALVES: gl.constexpr = 2 if GATED else 1
    scales, zeros = views[HALVES - 1]
    cols = tile * _ROWS + gl.arange(0, _ROWS, OUT)
    mask = cols < N
    bias = ask(bias_ptr, cols, N)
    up_bias = bias
    residual = 0.0
    weight = 0.0
    if GATED:
        if bias_ptr is not None:
            up_bias = ask(bias_ptr + N, cols, N)
    elif not SQUARES:
        residual = gl.load(end.residual + cols, mask=mask, other=0.0, cache_modifier=".cg")
        weight = ask(end.norm_weight, cols, N) + end.OFFSET
    none = gl.zeros([8, 8, 4], gl.float32, _lanes_layout())
    acc = (none, none, none, none)
    for of_tile in range(NUM_STEPS):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        acc = _multiply(
            words, scales, zeros, x[1], sums[1], acc, slot, of_tile, HALVES, MIDDLE, HAS_ZEROS
        )
        sync_threads()
        mbarrier.arrive(empty.index(slot))
        step += 1
    found, more = gl.convert_layout(_results(acc), BOTH).split()
    if GATED:
        gate = rounded(found * factor + bias, ELEMENT)
        up = rounded(more * factor + up_bias, ELEMENT)
        gl.store(end.out + cols, (activated(gate, "silu") * up).to(ELEMENT), mask=mask)
    else:
        found = (found + more) * factor + bias
        if SQUARES:
            gl.store(end.out + cols, found.to(ELEMENT), mask=mask)
        else:
            residual = residual.to(gl.float32)  # type: ignore[attr-defined]
            total = (rounded(found, ELEMENT) + residual).to(ELEMENT)
            gl.store(end.total + cols, total, mask=mask)
            total = total.to(gl.float32)
            gl.store(end.squares + tile, gl.sum(gl.where(mask, total * total, 0.0), 0))
            gl.store(end.out + cols, (total * weight).to(ELEMENT), mask=mask)
    return step


@gluon.jit
def _linear(
    views, words, x, sums, full, empty, step, x_ptr, end, bias_ptr, squares_ptr, eps,
    INDEX: gl.constexpr, K: gl.constexpr, N: gl.constexpr, SQUARES: gl.constexpr,
    TILES: gl.constexpr, NUM_STEPS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
    MIDDLE: gl.constexpr, HAS_ZEROS: gl.constexpr,
):  # fmt: skip
    """The linear number INDEX of the chain, of N columns; of what follows, see :class:`Added`.

    With SQUARES, x lacks an RMSNorm's division by those. Returned is the next step's number.
    """
    GATED: gl.constexpr = HALVES[INDEX] == 2
    factor = 1.0
    if SQUARES:
        FLAT: gl.constexpr = gl.BlockedLayout([2], [32], [_WARPS], [0])
        places = gl.arange(0, triton.next_power_of_2(SQUARES), FLAT)
        squares = gl.load(
            squares_ptr + places, mask=places < SQUARES, other=0.0, cache_modifier=".cg"
        )
        factor = 1.0 / gl.sqrt(gl.sum(squares, 0) / K + eps)
    _take_row(x[0], sums[0], x_ptr, K, (K - 1) // (_GROUPS * _COLS) + 1)
    for tile in range(gl.program_id(0), TILES[INDEX], gl.num_programs(0)):
        step = _tile(
            views, words, x, sums, full, empty, step, end, bias_ptr, tile, factor, N, GATED,
            SQUARES, NUM_STEPS[INDEX], STAGES, MIDDLE, HAS_ZEROS,
        )  # fmt: skip
    return step


@gluon.jit
def _multiply_all(
    x_ptr, o_end, gate_up_end, down_end, qkv_end, biases, middle_eps, end_eps, count_ptr, views,
    words, x, sums, full, empty,
    KS: gl.constexpr, NS: gl.constexpr, TILES: gl.constexpr, NUM_STEPS: gl.constexpr,
    HALVES: gl.constexpr, STAGES: gl.constexpr, MIDDLE: gl.constexpr,
    HAS_ZEROS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The warps that multiply: all of the chain but its loads of weights."""
    programs = gl.num_programs(0)
    wait(PDL)
    # Some programs may have come to the first meeting already, but not all.
    count = gl.load(count_ptr, volatile=True)
    count = count - count % programs + programs
    step = programs * 0
    step = _linear(
        views, words, x, sums, full, empty, step, x_ptr, o_end, biases[0], None, 0.0, 0,
        KS[0], NS[0], 0, TILES, NUM_STEPS, HALVES, STAGES, MIDDLE, HAS_ZEROS,
    )  # fmt: skip
    join_programs(count_ptr, count)
    step = _linear(
        views, words, x, sums, full, empty, step, o_end.out, gate_up_end, biases[1],
        o_end.squares, middle_eps, 1, KS[1], NS[1], TILES[0], TILES, NUM_STEPS, HALVES,
        STAGES, MIDDLE, HAS_ZEROS,
    )  # fmt: skip
    join_programs(count_ptr, count + programs)
    step = _linear(
        views, words, x, sums, full, empty, step, gate_up_end.out, down_end, biases[2],
        None, 0.0, 2, KS[2], NS[2], 0, TILES, NUM_STEPS, HALVES, STAGES, MIDDLE, HAS_ZEROS,
    )  # fmt: skip
    if len(NUM_STEPS) == 4:
        join_programs(count_ptr, count + 2 * programs)
        _linear(
            views, words, x, sums, full, empty, step, down_end.out, qkv_end, biases[3],
            down_end.squares, end_eps, 3, KS[3], NS[3], TILES[2], TILES, NUM_STEPS, HALVES,
            STAGES, MIDDLE, HAS_ZEROS,
        )  # fmt: skip
    else:
        divide(down_end, end_eps, count_ptr, count + 2 * programs, NS[2], TILES[2], _WARPS)


@gluon.jit
def _chain_kernel(
    o_desc, gate_up_desc, down_desc, qkv_desc,
    o_scales, gate_up_scales, down_scales, qkv_scales,
    o_zeros, gate_up_zeros, down_zeros, qkv_zeros,
    x_ptr,
    o_end, gate_up_end, down_end, qkv_end,
    o_bias, gate_up_bias, down_bias, qkv_bias,
    middle_eps, end_eps,
    count_ptr,
    KS: gl.constexpr, NS: gl.constexpr, TILES: gl.constexpr, NUM_STEPS: gl.constexpr,
    STAGES: gl.constexpr, PASSES: gl.constexpr, MIDDLE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The projection back, gate and up, down, and the next queries, keys and values, of one row.

    Three linears, and ``count``, are as of 8-bit floats.
    """
    launch_dependents(PDL)
    HALVES: gl.constexpr = (1, 2, 1, 1)
    HAS_ZEROS: gl.constexpr = o_zeros is not None
    SCALE: gl.constexpr = o_scales.dtype
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=3)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0])
    PLAIN_TWO: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PLAIN_SEVEN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [6, 5, 4, 3, 2, 1, 0])
    ring = room(o_desc, STAGES)
    halves = reinterpret(
        ring, o_desc.dtype, [STAGES, _CHUNKS // 2, 2, _ROWS, 64], gate_up_desc.layout
    )
    words = reinterpret(ring, gl.int32, [STAGES, _CHUNKS, _ROWS, 32], WORDS)
    scales = room(o_scales, STAGES)
    halves_scales = reinterpret(
        scales, SCALE, [STAGES, _GROUPS // 2, 2, _ROWS], gate_up_scales.layout
    )
    of_scales = reinterpret(scales, SCALE, [STAGES, 2, 8, 2, 2, 8, 1], PLAIN)
    of_halves = reinterpret(scales, SCALE, [STAGES, 8, 2, 2, 2, 8, 1], PLAIN)
    if HAS_ZEROS:
        zeros = room(o_zeros, STAGES)
        halves_zeros = reinterpret(
            zeros, gl.int8, [STAGES, _GROUPS // 2, 2, _ROWS], gate_up_zeros.layout
        )
        views = (
            (of_scales, reinterpret(zeros, gl.int8, [STAGES, 2, 8, 2, 2, 8, 1], PLAIN)),
            (of_halves, reinterpret(zeros, gl.int8, [STAGES, 8, 2, 2, 2, 8, 1], PLAIN)),
        )
        whole = (ring, scales, zeros)
        rings = (whole, (halves, halves_scales, halves_zeros), whole, whole)
    else:
        views = ((of_scales, of_scales), (of_halves, of_halves))
        whole = (ring, scales, scales)
        rings = (whole, (halves, halves_scales, halves_scales), whole, whole)
    x_bytes = gl.allocate_shared_memory(gl.int8, [PASSES, _GROUPS, 2 * _COLS], PLAIN_TWO)
    x_words = reinterpret(x_bytes, gl.int32, [2 * PASSES, 8, 2, 1, 2, 2, 4, 4], PLAIN_SEVEN)
    sums = gl.allocate_shared_memory(gl.int32, [PASSES, _GROUPS, 4], PLAIN_TWO)
    sums_views = reinterpret(sums, gl.int32, [2 * PASSES, 8, 2, 1, 1, 2, 2], PLAIN)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    gl.warp_specialize(
        [
            (_multiply_all, (
                x_ptr, o_end, gate_up_end, down_end, qkv_end,
                (o_bias, gate_up_bias, down_bias, qkv_bias), middle_eps, end_eps, count_ptr, views,
                words, (x_bytes, x_words), (sums, sums_views), full, empty, KS, NS, TILES,
                NUM_STEPS, HALVES, STAGES, MIDDLE, HAS_ZEROS, PDL,
            )),
            (_load, (
                (
                    (o_desc, o_scales, o_zeros),
                    (gate_up_desc, gate_up_scales, gate_up_zeros),
                    (down_desc, down_scales, down_zeros),
                    (qkv_desc, qkv_scales, qkv_zeros),
                ), rings, full, empty, TILES, NUM_STEPS, HALVES, STAGES,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


def fits(x: Tensor, chain: Chain) -> bool:
    """Whether :func:`chain` takes tensors of these forms and places."""
    weights: Any = chain.weights
    tensors = (each for w in weights for each in (w.words, w.scales, w.zeros) if each is not None)
    return x.stride(-1) == 1 and all(
        each.is_contiguous() and each.data_ptr() % 16 == 0 for each in tensors
    )


def is_trusted(x: Tensor, chain: Chain) -> bool:
    """Whether :func:`chain` may be used for such rows; it may be tried for that."""
    weights: Any = chain.weights
    shapes = tuple(tuple(weight.shape) for weight in weights)
    biased = tuple(bias is not None for bias in chain.biases)
    offsets = chain.middle.offset, chain.end.offset
    like = weights[0]
    kind = (x.dtype, shapes, like.scales.dtype, like.zeros is None, biased, offsets)
    return _FAMILY.allows(x.device, kind, lambda: _trial(x, shapes, like, biased, offsets))


def _trial(
    x: Tensor,
    shapes: tuple[tuple[int, ...], ...],
    like: GroupWeight,
    biased: tuple[bool, ...],
    offsets: tuple[float, float],
) -> Trial:
    draw = torch.Generator(x.device).manual_seed(0)

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, shape, generator=draw, device=x.device, dtype=dtype)

    def weight(n: int, k: int) -> GroupWeight:
        groups = k // BLOCK
        scales = torch.rand(groups, n, generator=draw, device=x.device) + 0.5
        zeros = None if like.zeros is None else integers(5, 11, groups, n, dtype=torch.int8)
        return GroupWeight(
            integers(-(2**15), 2**15, n, groups, BLOCK // 4, dtype=torch.int16),
            (scales / (5 * k**0.5)).to(like.scales.dtype),
            zeros,
            k,
            BLOCK,
            x.dtype,
        )

    def numbers(weight: GroupWeight, rows: slice) -> Tensor:
        part = replace(weight, words=weight.words[rows], zeros=None)
        off = part.codes().float().unflatten(1, (-1, BLOCK))
        zeros = weight.middle if weight.zeros is None else weight.zeros[:, rows].T.unsqueeze(2)
        scaled: Tensor = (off - zeros) * weight.scales[:, rows].T.float().unsqueeze(2)
        return scaled.flatten(1)

    made = [weight(*shape) for shape in shapes]
    return trial_of_chain(x, made, numbers, biased, offsets, chain)


def _descriptors(weight: GroupWeight, halves: int) -> tuple[TensorDescriptor | None, ...]:
    """Of a weight's words by chunks of 128 bytes, its scales and its zeros: halves, and rows."""
    n, k = weight.shape
    words, rows, whole = k // 4, n // halves, _ROWS.value
    codes = TensorDescriptor(
        weight.words,
        [words // 64, halves, rows, 64],
        [64, rows * words, words, 1],
        [_CHUNKS.value // halves, halves, whole, 64],
        gl.NVMMASharedLayout(128, 16, rank=4),
    )

    def groups(values: Tensor) -> TensorDescriptor:
        return TensorDescriptor(
            values,
            [len(values), halves, rows],
            [n, rows, 1],
            [_GROUPS.value // halves, halves, whole],
            gl.NVMMASharedLayout(0, 8 * values.itemsize, rank=3),
        )

    zeros = weight.zeros
    return codes, groups(weight.scales), None if zeros is None else groups(zeros)


def chain(x: Tensor, residual: Tensor, chain: Chain) -> tuple[Tensor, Tensor]:
    """As :func:`engine_core.kernels.linear.chain.linear_chain`.

    What :func:`fits` asks holds. Nothing that is still running writes the weights: they are read
    before the kernels before are waited for.
    """
    tile = Tile(_ROWS.value, 0)
    weights: Any = chain.weights
    sizes = [(weight.shape[0], weight.shape[1]) for weight in weights]
    o_end = Added.of(residual, chain.middle.weight, tile, chain.middle.offset)
    gate_up_end = Activated.of(o_end.out, sizes[1][0], gated=True)
    down_end = Added.of(o_end.total, chain.end.weight, tile, chain.end.offset)
    ends: list[Any] = [o_end, gate_up_end, down_end]
    ends += [Activated.of(o_end.out, n) for n, _ in sizes[3:]]
    halves = (1, 2, 1, 1)[: len(sizes)]
    passes = max(triton.cdiv(k, _GROUPS.value * _COLS.value) for _, k in sizes)
    shared = passes * _GROUPS.value * (2 * _COLS.value + 16)
    stage = _CHUNKS.value * _ROWS.value * (128 + 4) + _GROUPS.value * _ROWS.value
    described = [_descriptors(*each) for each in zip(weights, halves, strict=True)]
    _chain_kernel[(num_multiprocessors(x.device),)](
        *(each for kind in zip(*described, strict=True) for each in of_four(kind)),
        x,
        *of_four(ends),
        *of_four(chain.biases),
        chain.middle.eps,
        chain.end.eps,
        barrier_count(x.device),
        KS=tuple(k for _, k in sizes),
        NS=tuple(n // half for (n, _), half in zip(sizes, halves, strict=True)),
        TILES=tuple(
            triton.cdiv(n // half, _ROWS.value) for (n, _), half in zip(sizes, halves, strict=True)
        ),
        NUM_STEPS=tuple(
            triton.cdiv(k, _CHUNKS.value // half * 2 * _COLS.value)
            for (_, k), half in zip(sizes, halves, strict=True)
        ),
        STAGES=max(2, min(_MOST_STAGES, (_MOST_SHARED - shared) // stage)),
        PASSES=passes,
        MIDDLE=weights[0].middle,
        num_warps=_WARPS.value,
        maxnreg=_MOST_REGISTERS,
        **pdl_options(x.device),
    )
    return ends[-1].out, down_end.total
