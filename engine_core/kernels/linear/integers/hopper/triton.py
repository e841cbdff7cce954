"""Linears of up to 8 rows by GGUF blocks on Hopper, as products of integers, in Gluon.

The matrix units want 8 columns and there are fewer rows: so each row is two columns of integers of
8 bits, which together are its numbers to 16 bits, as parts of the greatest of each 256. Codes are
integers of 8 bits as they are, 4 instructions for 8 of them where numbers of 16 bits take 7. Scales
of Q4_K, Q5_K and Q6_K, integers too, multiply sums of products; where scales are floats, sums of
each 32 columns become floats before. All that rounds is x, at a hundredth of what rounding the
result to 16 bits does, and sums in float32, of each 256 or 32 columns.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine_core.kernels.launch.gluon import Family
from engine_core.kernels.launch.hopper.triton import (
    launch_dependents,
    reinterpret,
    sync_threads,
    tma_load,
    wait,
)
from engine_core.kernels.launch.triton import pdl_options
from engine_core.kernels.linear.blocks.hopper.triton import fits as fits_blocks
from engine_core.kernels.linear.blocks.hopper.triton import form_of, trial_of_blocks
from engine_core.kernels.linear.boxes.hopper.triton import (
    Boxes,
    barriers,
    float_of,
    load_box,
    place_of,
    room,
    rows_layout,
)
from engine_core.kernels.linear.epilogues.hopper.triton import (
    Launch,
    conclude,
    rows_of_program,
)
from engine_core.kernels.linear.groups import GroupWeight
from engine_core.kernels.linear.reference import DeferredRMSNorm
from engine_core.kernels.linear.tiles import Tile

_FAMILY = Family("linears of integers", "Steps of up to 8 rows take about half as long again")

# Columns of a super-block, which is a step, and their words.
_COLS = gl.constexpr(256)
_WORDS = gl.constexpr(64)
# The greatest integer that a number of x becomes: 127 times 256.
_TOP = gl.constexpr(32512.0)
# 1.5 * 2**23, to which an integer is added in its last bits, and half a high byte.
_MAGIC = gl.constexpr(12583040.0)


@gluon.constexpr_function
def _row_layout(width, warps):
    """``[1, width]`` where threads have the columns of their sums."""
    registers, column = [], 4
    while column < width:
        registers.append([0, column])
        column *= 2
    lanes = [[0, 1 if width > 1 else 0], [0, 2 if width > 2 else 0]] + [[0, 0]] * 3
    of_warps = [[0, 0]] * (warps.bit_length() - 1)
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [1, width])


@gluon.constexpr_function
def _repeated_layout(times, cols, warps):
    """``[times, cols, 32]``, together 8 columns, as the matrix units want the second operand."""
    lanes, size = [[0, 0, 4], [0, 0, 8]], 1
    while size < cols:
        lanes.append([0, size, 0])
        size *= 2
    size = 1
    while size < times:
        lanes.append([size, 0, 0])
        size *= 2
    of_warps = [[0, 0, 0]] * (warps.bit_length() - 1)
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 16]]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [times, cols, 32])


@gluon.jit
def _load_step(
    codes_desc, high_desc, scales_desc, minima_desc, headers_desc, codes, bits, scales, minima,
    headers, barrier, stage, head, row, run, DEPTH: gl.constexpr, pred,
):  # fmt: skip
    """Begin to load all of a program's rows in a step's super-blocks, from ``run`` on."""
    load_box(codes_desc, codes, barrier, stage, head, row, run, pred, DEPTH)
    if high_desc is not None:
        load_box(high_desc, bits, barrier, stage, head, row, run, pred, DEPTH)
    WIDTH: gl.constexpr = scales_desc.block_type.shape[3] // codes_desc.block_type.shape[3]
    load_box(scales_desc, scales, barrier, stage, head, row, run, pred, DEPTH, WIDTH)
    if minima_desc is not None:
        load_box(minima_desc, minima, barrier, stage, head, row, run, pred, DEPTH, WIDTH)
    if headers_desc is not None:
        tma_load(headers_desc, [0, run, head, 0, row], barrier, headers.index(stage), pred=pred)


@gluon.jit
def _words(values, odd, LAYOUT: gl.constexpr):
    """The words of each row, of four scales or minima, of the left and of the right half.

    With two for each of these the second is of the columns ``odd``.
    """
    ROWS: gl.constexpr = values.shape[0]
    WIDTH: gl.constexpr = values.shape[1]
    found = values.load(rows_layout(ROWS, WIDTH, gl.num_warps(), WIDTH, 1))
    if WIDTH == 2:
        left, right = found.split()
        left, right = _column(left, LAYOUT), _column(right, LAYOUT)
    else:
        evens, odds = found.reshape([ROWS, 2, 2]).split()
        left, right = evens.split()
        odd_left, odd_right = odds.split()
        left = gl.where(odd, _column(odd_left, LAYOUT), _column(left, LAYOUT))
        right = gl.where(odd, _column(odd_right, LAYOUT), _column(right, LAYOUT))
    return left, right


@gluon.jit
def _column(values, LAYOUT: gl.constexpr):
    return gl.expand_dims(gl.convert_layout(values, gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def _of_rows(values, LAYOUT: gl.constexpr):
    return gl.expand_dims(float_of(values, gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def _asked(
    scales, minima, headers, odd, stage, inner, part, DEPTH: gl.constexpr, PARTS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Of a super-block: words of scales and their header, then those of minima, if there are."""
    KINDS: gl.constexpr = headers.shape[0] // scales.shape[0]
    at = (stage * DEPTH + inner) * PARTS + part
    in_headers = (stage * KINDS * DEPTH + inner) * PARTS + part
    left, right = _words(scales.index(at), odd, LAYOUT)
    head = _of_rows(headers.index(in_headers), LAYOUT)
    if KINDS == 1:
        found = (left, right, head, left, right, head)
    else:
        least = _of_rows(headers.index(in_headers + DEPTH * PARTS), LAYOUT)
        least_left, least_right = _words(minima.index(at), odd, LAYOUT)
        found = (left, right, head, least_left, least_right, least)
    return found


@gluon.jit
def _byte(words, PLACE: gl.constexpr, SIGNED: gl.constexpr):
    """The byte at a place of each word, as an integer."""
    SELECT: gl.constexpr = 0x8880 + 0x1111 * PLACE if SIGNED else 0x4440 + PLACE
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, $2;", "=r,r,n", [words, SELECT], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _halves(values):
    """The left and the right half of the columns."""
    ROWS: gl.constexpr = values.shape[0]
    HALF: gl.constexpr = values.shape[1] // 2
    return values.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()


@gluon.jit
def _pairs(values, LAYOUT: gl.constexpr):
    """The even and the odd columns."""
    HALF: gl.constexpr = values.shape[1] // 2
    low, high = values.reshape([values.shape[0], HALF, 2]).split()
    return gl.convert_layout(low, LAYOUT), gl.convert_layout(high, LAYOUT)


@gluon.jit
def _bytes(given, ASM: gl.constexpr, OPERANDS: gl.constexpr):
    """The codes of four parts."""
    return gl.inline_asm_elementwise(
        ASM, OPERANDS, given, (gl.int8, gl.int8, gl.int8, gl.int8), is_pure=True, pack=4
    )


@gluon.jit
def _codes_of(
    codes, high, block, PART: gl.constexpr, PARTS: gl.constexpr, CHUNKS: gl.constexpr,
    ASM: gl.constexpr, OPERANDS: gl.constexpr,
):  # fmt: skip
    """A super-block's codes, of both halves and four parts of each."""
    ROWS: gl.constexpr = codes.shape[1]
    WORDS: gl.constexpr = rows_layout(ROWS, codes.shape[2], gl.num_warps(), 4, 4)
    words = codes.index(block * CHUNKS * PARTS + PART).load(WORDS)
    if CHUNKS == 2:
        more = codes.index((block * CHUNKS + 1) * PARTS + PART).load(WORDS)
        found = (_bytes((words,), ASM, OPERANDS), _bytes((more,), ASM, OPERANDS))
    else:
        given = (words,) if high is None else (words, high)
        p0, p1, p2, p3 = _bytes(given, ASM, OPERANDS)
        l0, r0 = _halves(p0)
        l1, r1 = _halves(p1)
        l2, r2 = _halves(p2)
        l3, r3 = _halves(p3)
        found = ((l0, l1, l2, l3), (r0, r1, r2, r3))
    return found


@gluon.jit
def _high_of(bits, BITS: gl.constexpr, WARPS: gl.constexpr):
    """The bytes of a step's high bits as there are words."""
    if BITS == 5:
        # Of each half's 32 words in 16 bytes.
        low, above = gl.inline_asm_elementwise(
            "and.b32 $0, $2, 0x0f0f0f0f; shr.u32 $1, $2, 4; and.b32 $1, $1, 0x0f0f0f0f;",
            "=&r,=r,r", [bits], (gl.uint8, gl.uint8), is_pure=True, pack=4,
        )  # fmt: skip
        ROWS: gl.constexpr = bits.shape[0]
        both = gl.join(low, above).reshape([ROWS, 2, 16, 2]).permute((0, 1, 3, 2))
        bits = gl.convert_layout(
            both.reshape([ROWS, _WORDS]), rows_layout(ROWS, _WORDS, WARPS, 4, 4)
        )
    return bits


@gluon.jit
def _integers(values, scale, PAR: gl.constexpr, PARITY: gl.constexpr):
    """Columns ``[pairs, 256]`` over a scale of each row, as high and low bytes by groups.

    With PAR of 2 those of the groups of the other parity are 0.
    """
    bits = gl.fma(values, scale, gl.full(values.shape, _MAGIC, gl.float32, values.type.layout))
    bits = bits.to(gl.int32, bitcast=True)
    if PAR == 2:
        cols = gl.arange(0, _COLS, gl.SliceLayout(0, values.type.layout))
        own = gl.expand_dims(cols // 64 % 2 == PARITY, 0)
        bits = gl.where(own, bits, 128)
    return (bits >> 8).to(gl.int8), (bits ^ 128).to(gl.int8)


@gluon.jit
def _sums(values, scale):
    """The sums of groups ``[pairs, 8]`` of the integers that columns ``[pairs, 256]`` become."""
    PAIRS: gl.constexpr = values.shape[0]
    bits = gl.fma(values, scale, gl.full(values.shape, _MAGIC, gl.float32, values.type.layout))
    whole = bits.to(gl.int32, bitcast=True) - 0x4B400080
    return gl.sum(whole.reshape([PAIRS, 8, 32]), axis=2)


@gluon.jit
def _floats_of(sums, ROWS: gl.constexpr):
    """The sums of groups in float32, ``[blocks, 8, ROWS]``."""
    PAIRS: gl.constexpr = sums.shape[0]
    return sums.to(gl.float32).reshape([ROWS, PAIRS // ROWS, 8]).permute((1, 2, 0))


@gluon.jit
def _words_of(sums, ROWS: gl.constexpr):
    """The sums of groups as words of four bytes, one of each group of a half.

    ``[blocks, 8, ROWS]``: of the lowest bytes for both halves, of the middle ones and of the high
    ones, which have a sign; the last two are any.
    """
    PAIRS: gl.constexpr = sums.shape[0]
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [gl.num_warps(), 1], [1, 0])
    sums = gl.convert_layout(sums, WORDS)
    places = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, WORDS)) % 4 * 8, 0)
    low = _four((sums & 255) << places, ROWS)
    middle = _four((sums >> 8 & 255) << places, ROWS)
    high = _four((sums >> 16 & 255) << places, ROWS)
    four = gl.join(gl.join(low, middle), gl.join(high, high)).permute((0, 4, 3, 1, 2))
    return four.reshape([PAIRS // ROWS, 8, ROWS])


@gluon.jit
def _four(values, ROWS: gl.constexpr):
    """Words ``[blocks, 2, ROWS]`` whose bytes are ``values [ROWS * blocks, 8]``."""
    PAIRS: gl.constexpr = values.shape[0]
    words = gl.sum(values.reshape([PAIRS, 2, 4]), axis=2)
    return words.reshape([ROWS, PAIRS // ROWS, 2]).permute((1, 2, 0))


@gluon.jit
def _dot(words, sums, total, SIGNED: gl.constexpr):
    """``total`` and the products of four bytes, of which those of ``sums`` may have a sign."""
    KIND: gl.constexpr = "s32" if SIGNED else "u32"
    ASM: gl.constexpr = "dp4a.u32." + KIND + " $0, $1, $2, $3;"
    return gl.inline_asm_elementwise(
        ASM, "=r,r,r,r", [words, sums, total], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _least(asked, sums):
    """The products of a super-block's minima and the sums of its groups."""
    none = gl.zeros_like(asked[3] + sums[0])
    low = _dot(asked[4], sums[1], _dot(asked[3], sums[0], none, False), False)
    middle = _dot(asked[4], sums[3], _dot(asked[3], sums[2], none, False), False)
    high = _dot(asked[4], sums[5], _dot(asked[3], sums[4], none, True), True)
    return (high << 16) + (middle << 8) + low


@gluon.jit
def _by_groups(values, ROWS: gl.constexpr, PAR: gl.constexpr):
    """``[ROWS * blocks, 256]`` as ``[blocks, 8, ROWS, 32]``, in the order of the weight's words."""
    BLOCKS: gl.constexpr = values.shape[0] // ROWS
    if PAR == 1:
        values = values.reshape([ROWS, BLOCKS, 8, 32]).permute((1, 2, 0, 3))
    else:
        values = values.reshape([ROWS, BLOCKS, 2, 2, 4, 16]).permute((1, 2, 4, 0, 3, 5))
        values = values.reshape([BLOCKS, 8, ROWS, 32])
    return values


@gluon.jit
def _place_x(
    raw, x, x_scales, x_sums, FIRST: gl.constexpr, ROWS: gl.constexpr, PLACES: gl.constexpr,
    PAR: gl.constexpr,
):  # fmt: skip
    """ROWS rows as integers in PLACES of shared memory, and what these are to be multiplied by."""
    BLOCKS: gl.constexpr = raw.shape[0] // ROWS
    # As integers, so that NaN is the greatest.
    top = gl.max(raw.to(gl.int16, bitcast=True) & 0x7FFF, axis=1)
    top = top.to(gl.int16).to(raw.dtype, bitcast=True).to(gl.float32)
    inverse = gl.expand_dims(gl.where(top == 0.0, 0.0, _TOP / top), 1)
    values = raw.to(gl.float32)
    inverse, values = gl.broadcast(inverse, values)
    high, low = _integers(values, inverse, PAR, 0)
    both = gl.join(_by_groups(high, ROWS, PAR), _by_groups(low, ROWS, PAR))
    both = both.permute((0, 1, 2, 4, 3))
    if PAR == 2:
        high, low = _integers(values, inverse, PAR, 1)
        odd = gl.join(_by_groups(high, ROWS, PAR), _by_groups(low, ROWS, PAR))
        both = gl.join(both, odd.permute((0, 1, 2, 4, 3))).permute((0, 1, 2, 5, 3, 4))
        both = both.reshape([BLOCKS, 8, ROWS, 4, 32])
    scales = (top / _TOP).reshape([ROWS, BLOCKS]).permute((1, 0))
    if x_sums is not None:
        sums = _sums(values, inverse)
        sums = _floats_of(sums, ROWS) if x_sums.dtype == gl.float32 else _words_of(sums, ROWS)
        if ROWS < PLACES:
            sums = sums.reshape([BLOCKS * 8, 1])
            for size in gl.static_range(PLACES.bit_length() - 1):
                sums = gl.join(sums, sums).reshape([BLOCKS * 8, 2 << size])
            sums = sums.reshape([BLOCKS, 8, PLACES])
        x_sums.slice(FIRST, PLACES, 2).store(sums)
    if ROWS < PLACES:
        # Rows that are not there are the first.
        for size in gl.static_range(PLACES.bit_length() - 1):
            scales = gl.join(scales, scales).reshape([BLOCKS, 2 << size])
    scales = gl.join(scales, scales) if PAR == 2 else scales.reshape([BLOCKS, PLACES, 1])
    x.slice(FIRST, ROWS, 2).store(both)
    x_scales.slice(FIRST, PLACES, 1).store(scales)


@gluon.jit(do_not_specialize=["num_rows", "steps"])
def _linear_kernel(
    codes_desc,
    high_desc,
    x_ptr,
    x_stride,
    scales_desc,
    minima_desc,
    headers_desc,
    epilogue,
    bias_ptr,
    squares_ptr,
    partial_ptr,
    arrivals_ptr,
    eps,
    num_rows,
    N,
    steps,
    ASM: gl.constexpr,
    OPERANDS: gl.constexpr,
    MIDDLE: gl.constexpr,
    BITS: gl.constexpr,
    PAR: gl.constexpr,
    ROWS: gl.constexpr,
    RUN: gl.constexpr,
    DEPTH: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    KIND: gl.constexpr,
    SQUARES: gl.constexpr,
    PDL: gl.constexpr,
):
    """BLOCK_N columns of BLOCK_M rows, over one of SPLITS runs of super-blocks, RUN at most.

    ROWS of these rows are looked at. PAR is 2 for groups of 16 columns, of which a product has two.
    All else is as of :func:`engine_core.kernels.linear.groups.hopper.triton._linear_kernel`.
    """
    if epilogue.LATE == 0:
        launch_dependents(PDL)
    GATED: gl.constexpr = epilogue.GATED
    HEAD_DIM: gl.constexpr = epilogue.HEAD_DIM if KIND == "stored" else 0
    WARPS: gl.constexpr = gl.num_warps()
    PARTS: gl.constexpr = 2 if GATED else 1
    MINIMA: gl.constexpr = minima_desc is not None
    FLOATS: gl.constexpr = headers_desc is None
    KINDS: gl.constexpr = 2 if MINIMA else 1
    HIGH: gl.constexpr = 0 if high_desc is None else high_desc.block_type.shape[4]
    CHUNKS: gl.constexpr = codes_desc.block_type.shape[0] // DEPTH
    WIDTH: gl.constexpr = 2 * PAR
    SCALES: gl.constexpr = 16 if FLOATS else 4 * WIDTH + 2
    BYTES: gl.constexpr = DEPTH * PARTS * BLOCK_N * (128 * CHUNKS + HIGH + KINDS * SCALES)
    BOXES: gl.constexpr = STAGES * DEPTH * PARTS
    RESULTS: gl.constexpr = BLOCK_M * PAR
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, 4)
    HIGHS: gl.constexpr = rows_layout(BLOCK_N, max(16, HIGH), WARPS, 4, 4)
    SUMS: gl.constexpr = rows_layout(BLOCK_N, RESULTS, WARPS, 1, 4)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tile, split, block = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    low = split * gl.cdiv(steps, SPLITS)
    high = gl.minimum(low + gl.cdiv(steps, SPLITS), steps)

    # As boxes of the weight, and as rows: of the gate and of up, or of both halves of a head.
    codes_boxes = room(codes_desc, STAGES)
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, codes_desc.dtype.primitive_bitwidth, rank=2)
    WORDS: gl.constexpr = codes_desc.block_type.shape[4]
    codes = reinterpret(codes_boxes, codes_desc.dtype, [BOXES * CHUNKS, BLOCK_N, WORDS], CODES)
    bits_boxes = codes_boxes
    bits = codes
    if HIGH:
        bits_boxes = room(high_desc, STAGES)
        BITS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(HIGH, 8, rank=2)
        bits = reinterpret(bits_boxes, gl.uint8, [BOXES, BLOCK_N, HIGH], BITS_LAYOUT)
    # Words of integers, or floats of one group after another.
    scales_boxes = room(scales_desc, STAGES)
    SCALE: gl.constexpr = scales_desc.dtype
    OF_SCALES: gl.constexpr = [8 * BOXES, BLOCK_N, 1] if FLOATS else [BOXES, BLOCK_N, WIDTH]
    scales = reinterpret(scales_boxes, SCALE, OF_SCALES, PLAIN)
    minima_boxes = scales_boxes
    minima = scales
    if MINIMA:
        minima_boxes = room(minima_desc, STAGES)
        minima = reinterpret(minima_boxes, SCALE, OF_SCALES, PLAIN)
    headers_boxes = scales_boxes
    headers = scales
    if not FLOATS:
        headers_boxes = room(headers_desc, STAGES)
        headers = reinterpret(headers_boxes, gl.float16, [KINDS * BOXES, BLOCK_N, 1], PLAIN)
    PLAIN_X: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    COUNT: gl.constexpr = 1 if ROWS == 1 else BLOCK_M
    x = gl.allocate_shared_memory(gl.int8, [RUN, 8, COUNT, 2 * PAR, 32], PLAIN_X)
    PLAIN_THREE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    groups = reinterpret(x, gl.int8, [RUN * 8, 2 * COUNT * PAR, 32], PLAIN)
    if COUNT < BLOCK_M:
        groups = reinterpret(x, gl.int8, [RUN * 8, 1, 2 * PAR, 32], PLAIN_THREE)
    x_scales = gl.allocate_shared_memory(gl.float32, [RUN, BLOCK_M, PAR], PLAIN_THREE)
    x_sums = None
    run_sums = x_scales
    if MINIMA:
        SUM: gl.constexpr = gl.float32 if FLOATS else gl.int32
        x_sums = gl.allocate_shared_memory(SUM, [RUN, 8, BLOCK_M], PLAIN_THREE)
        run_sums = reinterpret(x_sums, SUM, [RUN * 8, 1, BLOCK_M], PLAIN)
    run_scales = reinterpret(x_scales, gl.float32, [RUN, 1, RESULTS], PLAIN)
    full = barriers(STAGES)
    head, row = place_of(tile, BLOCK_N, HEAD_DIM)
    # The weight is older than all kernels: its first tiles do not wait for x.
    for stage in gl.static_range(STAGES):
        there = low + stage * DEPTH < high
        mbarrier.expect(full.index(stage), BYTES, pred=there)
        _load_step(
            codes_desc, high_desc, scales_desc, minima_desc, headers_desc, codes_boxes, bits_boxes,
            scales_boxes, minima_boxes, headers_boxes, full.index(stage), stage, head, row,
            low + stage * DEPTH, DEPTH, there,
        )  # fmt: skip
    odd = gl.expand_dims(gl.arange(0, RESULTS, gl.SliceLayout(0, SUMS)) % 2 == 1, 0)
    wait(PDL)
    if epilogue.LATE == 1:
        launch_dependents(PDL)
    ONCE: gl.constexpr = max(1, min(ROWS, 16 // RUN))
    X: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    pairs = gl.arange(0, ONCE * RUN, gl.SliceLayout(1, X))
    x_cols = (low + pairs % RUN) * _COLS
    there = low + pairs % RUN < high
    in_block = gl.expand_dims(gl.arange(0, _COLS, gl.SliceLayout(0, X)), 0)
    raw = ()
    for first in gl.static_range(0, ROWS, ONCE):
        x_rows = block * BLOCK_M + first + pairs // RUN
        at = gl.expand_dims(x_rows * x_stride + x_cols, 1) + in_block
        mask = gl.expand_dims(there & (x_rows < num_rows), 1)
        raw += (gl.load(x_ptr + at, mask=mask, other=0.0),)  # type: ignore[assignment]
    for first in gl.static_range(0, ROWS, ONCE):
        _place_x(
            raw[first // ONCE], x, x_scales, x_sums, first, ONCE, BLOCK_M if ROWS == 1 else ONCE,
            PAR,
        )  # fmt: skip
    sync_threads()
    middle = gl.full([BLOCK_N, 32], -MIDDLE, gl.int8, LEFT)
    nothing = gl.zeros([BLOCK_N, 2 * RESULTS], gl.int32, ACC)
    none = gl.zeros([BLOCK_N, RESULTS], gl.int32, SUMS)
    no_floats = gl.zeros([BLOCK_N, RESULTS], gl.float32, SUMS)
    acc = no_floats
    up = acc
    stage = 0
    phase = 0
    for step in range(low, high, DEPTH):
        barrier = full.index(stage)
        mbarrier.wait(barrier, phase)
        for inner in gl.static_range(DEPTH):
            # Beyond the last super-block x is zeros.
            own = stage * DEPTH + inner
            place = step - low + inner
            asked = ()
            up_asked = ()
            if not FLOATS:
                asked = _asked(scales, minima, headers, odd, stage, inner, 0, DEPTH, PARTS, SUMS)
                if GATED:
                    up_asked = _asked(
                        scales, minima, headers, odd, stage, inner, 1, DEPTH, PARTS, SUMS
                    )
            high_bits = None
            up_bits = None
            if HIGH:
                high_bits = _high_of(bits.index(own * PARTS).load(HIGHS), BITS, WARPS)
                if GATED:
                    up_bits = _high_of(bits.index(own * PARTS + 1).load(HIGHS), BITS, WARPS)
            numbers = _codes_of(codes, high_bits, own, 0, PARTS, CHUNKS, ASM, OPERANDS)
            up_numbers = numbers
            if GATED:
                up_numbers = _codes_of(codes, up_bits, own, 1, PARTS, CHUNKS, ASM, OPERANDS)
            sums = (none, none)
            up_sums = sums
            total = no_floats
            up_total = no_floats
            for half in gl.static_range(2):
                for part in gl.static_range(4):
                    group = half * 4 + part
                    values = groups.index(place * 8 + group)
                    if COUNT < BLOCK_M:
                        values = _repeated(values, BLOCK_M, RIGHT)
                    else:
                        values = values.permute((1, 0)).load(RIGHT)
                    begun = nothing
                    if MIDDLE:
                        begun = mma_v2(middle, values, nothing)
                    of_group = None
                    if FLOATS and MINIMA:
                        of_group = _row(run_sums.index(place * 8 + group), SUMS)
                    products = mma_v2(gl.convert_layout(numbers[half][part], LEFT), values, begun)
                    if FLOATS:
                        box = (own * 8 + group) * PARTS
                        total = _add_floats(total, products, scales, minima, of_group, box, SUMS)
                    else:
                        sums = _add(sums, products, asked, half, part, MINIMA, SUMS)
                    if GATED:
                        products = mma_v2(
                            gl.convert_layout(up_numbers[half][part], LEFT), values, begun
                        )
                        if FLOATS:
                            up_total = _add_floats(
                                up_total, products, scales, minima, of_group, box + 1, SUMS
                            )
                        else:
                            up_sums = _add(up_sums, products, up_asked, half, part, MINIMA, SUMS)
            of_x = _row(run_scales.index(place), SUMS)
            if FLOATS:
                acc += total * of_x
                if GATED:
                    up += up_total * of_x
            else:
                of_groups = ()
                if MINIMA:
                    for each in gl.static_range(6):
                        of_each = run_sums.index(place * 8 + each)
                        of_groups += (_row(of_each, SUMS),)  # type: ignore[assignment]
                acc = _added(acc, sums, asked, of_groups, of_x, MINIMA)
                if GATED:
                    up = _added(up, up_sums, up_asked, of_groups, of_x, MINIMA)
        sync_threads()
        more = step + STAGES * DEPTH < high
        mbarrier.expect(barrier, BYTES, pred=more)
        _load_step(
            codes_desc, high_desc, scales_desc, minima_desc, headers_desc, codes_boxes, bits_boxes,
            scales_boxes, minima_boxes, headers_boxes, barrier, stage, head, row,
            step + STAGES * DEPTH, DEPTH, more,
        )  # fmt: skip
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    if epilogue.LATE == 2:
        launch_dependents(PDL)
    if PAR == 2:
        acc = gl.sum(acc.reshape([BLOCK_N, BLOCK_M, 2]), axis=2)
        up = gl.sum(up.reshape([BLOCK_N, BLOCK_M, 2]), axis=2)
    RESULT: gl.constexpr = rows_layout(BLOCK_N, BLOCK_M, WARPS, 1, min(BLOCK_M, 4))
    acc = gl.convert_layout(acc, RESULT)
    up = gl.convert_layout(up, RESULT)
    conclude(
        epilogue, acc, up, bias_ptr, squares_ptr, partial_ptr, arrivals_ptr, eps, tile, split,
        block, num_rows, N, steps * _COLS, SPLITS, BLOCK_M, BLOCK_N, KIND, SQUARES, HEAD_DIM,
    )  # fmt: skip


@gluon.jit
def _repeated(values, TIMES: gl.constexpr, RIGHT: gl.constexpr):
    """``[1, columns, 32]`` in shared memory as that many times as many columns, eight."""
    COLS: gl.constexpr = values.shape[1]
    LAYOUT: gl.constexpr = _repeated_layout(TIMES, COLS, gl.num_warps())
    whole = gl.zeros([TIMES, COLS, 32], gl.int8, LAYOUT)
    values, _same = gl.broadcast(values.load(LAYOUT), whole)
    return gl.convert_layout(values.reshape([TIMES * COLS, 32]).permute((1, 0)), RIGHT)


@gluon.jit
def _row(values, LAYOUT: gl.constexpr):
    """``[1, columns]`` in shared memory, as of a row of results."""
    WIDTH: gl.constexpr = values.shape[1]
    found = values.load(_row_layout(WIDTH, gl.num_warps())).reshape([WIDTH])
    return gl.expand_dims(gl.convert_layout(found, gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def _add(
    sums, products, asked, HALF: gl.constexpr, PART: gl.constexpr, MINIMA: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The sums of high bytes and of low bytes, with those of a group."""
    high, low = _pairs(products, LAYOUT)
    scale = _byte(asked[HALF], PART, not MINIMA)
    return sums[0] + high * scale, sums[1] + low * scale


@gluon.jit
def _add_floats(total, products, scales, minima, of_group, at, LAYOUT: gl.constexpr):
    """The sums of a super-block and of a group's products and its minimum."""
    high, low = _pairs(products, LAYOUT)
    total += ((high << 8) + low).to(gl.float32) * _of_rows(scales.index(at), LAYOUT)
    if of_group is not None:
        total += of_group * _of_rows(minima.index(at), LAYOUT)
    return total


@gluon.jit
def _added(acc, sums, asked, of_groups, of_x, MINIMA: gl.constexpr):
    """``acc`` and the sums of a super-block, times their header and what x is a multiple of."""
    found = sums[0].to(gl.float32) * 256.0 + sums[1].to(gl.float32)
    found *= asked[2]
    if MINIMA:
        found += _least(asked, of_groups).to(gl.float32) * asked[5]
    return acc + found * of_x


def fits(x: Tensor, weight: GroupWeight) -> bool:
    """Whether :func:`linear` takes tensors of these shapes and places."""
    # The tensor memory accelerator wants headers of eight rows.
    return len(weight) % 16 == 0 and fits_blocks(x, weight)


def is_trusted(like: Tensor, weight: GroupWeight, tile: Tile, ending: str) -> bool:
    """Whether :func:`linear` may be used for such rows; it may be tried for that.

    ``ending`` is what follows the products: "activated", "gated", "added" or "stored".
    """
    rows, k = like.numel() // like.shape[-1], like.shape[-1]
    block_m = rows_of_program(tile, rows)
    kind = (like.dtype, *form_of(weight), k, tile, block_m, rows == 1, ending)
    shape = (1 if rows == 1 else max(2, block_m - 1), k)
    return _FAMILY.allows(
        like.device,
        kind,
        lambda: trial_of_blocks(like.new_empty(shape), weight, tile, ending, linear),
    )


# Four registers of a byte of each part to four of a part.
_TRANSPOSING = """{
.reg .b32 a, b, c, d;
prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $6, $7, 0x5140;
prmt.b32 c, $4, $5, 0x7362; prmt.b32 d, $6, $7, 0x7362;
prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632;
prmt.b32 $2, c, d, 0x5410; prmt.b32 $3, c, d, 0x7632;
}"""


@functools.cache
def _decoding(bits: int) -> tuple[str, str]:
    """PTX from registers of four words to four registers of four codes, and its constraints.

    Codes of 5 and 6 bits are given a register of four bytes of high bits.
    """
    if bits == 8:
        return _TRANSPOSING, ",".join(["=r"] * 4 + ["r"] * 4)
    lines = [
        ".reg .b32 e, o, s, p0, p1, p2, p3;",
        "prmt.b32 e, $4, $5, 0x6420;",
        "prmt.b32 o, $4, $5, 0x7531;",
        "and.b32 p0, e, 0x0f0f0f0f; shr.u32 p1, e, 4; and.b32 p1, p1, 0x0f0f0f0f;",
        "and.b32 p2, o, 0x0f0f0f0f; shr.u32 p3, o, 4; and.b32 p3, p3, 0x0f0f0f0f;",
    ]
    if bits > 4:
        width = bits - 4
        for part in range(4):
            left = 4 - width * part
            shift = f"shl.b32 s, $6, {left};" if left >= 0 else f"shr.u32 s, $6, {-left};"
            mask = 0x10101010 * (2**width - 1)
            lines.append(f"{shift} lop3.b32 p{part}, s, {mask:#x}, p{part}, 0xea;")
    lines += [f"mov.b32 ${part}, p{part};" for part in range(4)]
    inputs = 2 if bits == 4 else 3
    return "{\n" + "\n".join(lines) + "\n}", ",".join(["=r"] * 4 + ["r"] * inputs)


def linear(
    x: Tensor | DeferredRMSNorm,
    weight: GroupWeight,
    epilogue: Any,
    tile: Tile,
    bias: Tensor | None = None,
) -> Tensor:
    """As :func:`engine_core.kernels.linear.triton.linear`, by a weight in such blocks.

    What :func:`fits` asks of x and the weight holds, and there are rows. Nothing that is still
    running writes the weight: it is read before the kernels before are waited for.
    """
    parity, steps = 32 // weight.group_size, weight.in_features // _COLS.value
    launch = Launch.of(x, len(weight), epilogue, tile, bias)
    rows = launch.rows
    asm, operands = _decoding(weight.bits)
    boxes = Boxes.of(launch, epilogue, len(weight), tile.block_n)
    depth = tile.block_k // _COLS.value

    def along(each: Tensor, chunks: int = 1) -> TensorDescriptor:
        """Columns of rows, so many parts of each super-block's."""
        return boxes.along(each, each[0].numel() // (steps * chunks), depth * chunks)

    def across(each: Tensor) -> TensorDescriptor:
        """Words of four scales, or floats of a group after another."""
        if weight.headers is None:
            return boxes.across(each, 8 * depth)
        return boxes.across(each.view(torch.int32), depth)

    headers = None
    if weight.headers is not None:
        whole = weight.headers.view(-1, steps, boxes.heads, boxes.halves, boxes.rows)
        of_headers = [len(whole), depth, 1, boxes.halves, boxes.box]
        headers = TensorDescriptor.from_tensor(
            whole, of_headers, gl.NVMMASharedLayout(0, 16, rank=5)
        )
    _linear_kernel[launch.grid](
        along(weight.words, 2 if weight.bits == 8 else 1),
        None if weight.high is None else along(weight.high),
        rows,
        rows.stride(0),
        across(weight.scales),
        None if weight.minima is None else across(weight.minima),
        headers,
        *launch.given,
        steps,
        ASM=asm,
        OPERANDS=operands,
        MIDDLE=weight.middle,
        BITS=weight.bits,
        PAR=parity,
        ROWS=1 if len(rows) == 1 else launch.block_m,
        RUN=max(depth, triton.next_power_of_2(triton.cdiv(steps, tile.splits))),
        DEPTH=depth,
        BLOCK_N=tile.block_n,
        STAGES=tile.num_stages,
        **launch.constants,
        **pdl_options(rows.device),
    )
    out: Tensor = epilogue.out
    return out
