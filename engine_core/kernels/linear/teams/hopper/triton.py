"""Linears of up to 1024 rows by codes on Hopper, by teams: warp groups that share x, in Gluon.

One warp brings tiles of x, codes, scales and zeros to shared memory, some steps ahead. Two to four
teams multiply, each 64 rows of the weight. With a team a program, as in
:mod:`engine_core.kernels.linear.groups.hopper`, 32 rows of x are twice as many bytes from the L2
cache as the codes are, and scales, which threads load, are waited for. Eight codes of 4 bits become
numbers by 9 instructions, and not 11, and do so once for up to 128 rows of x. Codes of 8 bits,
whose scales are of whole rows, need 10, and their products no second sum.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
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

from engine_core.kernels.launch.gluon import Family
from engine_core.kernels.launch.hopper.triton import (
    launch_dependents,
    reinterpret,
    sync_threads,
    tma_load,
    wait,
)
from engine_core.kernels.launch.triton import pdl_options
from engine_core.kernels.linear.boxes.hopper.triton import (
    Boxes,
    load_box,
    place_of,
    room,
    rows_layout,
)
from engine_core.kernels.linear.epilogues.hopper.triton import (
    Launch,
    ask_inverse,
    conclude,
    output,
    rows_of_program,
    takes_rows,
)
from engine_core.kernels.linear.groups import BLOCK, GroupWeight
from engine_core.kernels.linear.groups.hopper.triton import trial_of_codes
from engine_core.kernels.linear.reference import DeferredRMSNorm
from engine_core.kernels.linear.tiles import Tile

_FAMILY = Family(
    "4-bit linears by teams",
    "Steps of 2 to 64 rows take up to a tenth longer, of 65 to 1024 up to half as long again",
)
_OF_BYTES = Family(
    "8-bit linears by teams", "Steps of up to 1024 rows take up to half as long again"
)

# Rows of the weight of a team, and columns of a group. A step has RUNS of so many: two of codes of
# 4 bits, with a scale each, or one of 8 bits, whose scales are of rows.
_ROWS = gl.constexpr(64)
_COLS = gl.constexpr(BLOCK)
# Rows and columns of a box of x where more rows than these of a program are missing. Missing rows
# are filled with zeros, which takes longer than reading rows. us of 28672 x 4096, gated, in a box
# of 128 rows and in boxes of 32: 72 rows 68, 58; 80 rows 62, 57; 100 rows 57, 60; 128 rows 54, 58.
_BOX_ROWS = gl.constexpr(32)
_BOX_COLS = gl.constexpr(64)
_MOST_MISSING = 32
# Registers of a thread of the warp that loads, and of a team's, by teams and what a program's
# threads may have on average. ptxas waits for each product if a team's are too few.
_LOADS = gl.constexpr(32)
_REGISTERS = {(2, 0): 208, (2, 80): 104, (2, 88): 112, (3, 0): 152, (4, 0): 112}


@gluon.constexpr_function
def _words_layout(width, gated):
    """The words that a thread multiplies; with ``gated`` of a row of the gate and one of up."""
    if not gated:
        return rows_layout(64, width, 4, 2, 4)
    registers = [[0, 1], [32, 0], [0, 8], [0, 16], [0, 32]]
    if width == 32:
        registers.pop()
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [64, width])


@gluon.constexpr_function
def _column_layout(gated):
    """The same rows of ``[64, 1]``."""
    if not gated:
        return rows_layout(64, 1, 4, 1, 1)
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[32, 0]], lanes, [[8, 0], [16, 0]], [], [64, 1])


@gluon.jit
def _load_weight(
    codes_desc, scales_desc, zeros_desc, codes, scales, zeros, barrier, stage, first, step,
    TEAMS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Begin to load a step's codes, scales and zeros of all teams."""
    for team in gl.static_range(TEAMS):
        head, row = place_of(first + team, BLOCK_N, HEAD_DIM)
        at = stage * TEAMS + team
        load_box(codes_desc, codes, barrier, at, head, row, step, True)
        if scales_desc is not None:
            load_box(scales_desc, scales, barrier, at, head, row, step, True)
        if zeros_desc is not None:
            load_box(zeros_desc, zeros, barrier, at, head, row, step, True)


@gluon.jit
def _load_x(
    desc, x, barrier, stage, row, last, step, BLOCK_M: gl.constexpr, RUNS: gl.constexpr
):  # fmt: skip
    """Begin to load a step of BLOCK_M rows; for boxes beyond the ``last`` row the first again."""
    if desc.block_type.shape[0] < BLOCK_M:
        BOXES: gl.constexpr = BLOCK_M // _BOX_ROWS
        for part in gl.static_range(RUNS * _COLS // _BOX_COLS):
            column = step * (RUNS * _COLS) + part * _BOX_COLS
            first = (stage * (RUNS * _COLS // _BOX_COLS) + part) * BOXES
            for box in gl.static_range(BOXES):
                beyond = box * _BOX_ROWS * (row + box * _BOX_ROWS <= last).to(gl.int32)
                tma_load(desc, [row + beyond, column], barrier, x.index(first + box))
    else:
        for half in gl.static_range(2):
            at = stage * 2 + half
            tma_load(desc, [row, (step * 2 + half) * (RUNS * _COLS // 2)], barrier, x.index(at))


@gluon.jit
def _x_room(desc, STAGES: gl.constexpr, ROWS: gl.constexpr, RUNS: gl.constexpr):
    """Shared memory for so many rows of x, half a step each, and as the boxes that they come in."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    COLS: gl.constexpr = RUNS * _COLS // 2
    x = gl.allocate_shared_memory(desc.dtype, [STAGES * 2, ROWS, COLS], SWIZZLED)
    boxes = x
    if desc.block_type.shape[0] < ROWS:
        IN_STEP: gl.constexpr = ROWS // _BOX_ROWS * (RUNS * _COLS // _BOX_COLS)
        SHAPE: gl.constexpr = [STAGES * IN_STEP, _BOX_ROWS, _BOX_COLS]
        boxes = reinterpret(x, desc.dtype, SHAPE, SWIZZLED)
    return x, boxes


@gluon.jit
def _load(
    codes_desc, scales_desc, zeros_desc, x_desc, more_desc, codes, scales, zeros, x, more_x, full,
    empty, first, row, last, low, high, LATE: gl.constexpr, BYTES: gl.constexpr,
    TEAMS: gl.constexpr, STAGES: gl.constexpr, BLOCK_M: gl.constexpr, MORE: gl.constexpr,
    BLOCK_N: gl.constexpr, RUNS: gl.constexpr, HEAD_DIM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The warp that loads."""
    # The weight is older than all kernels: its first tiles do not wait for x.
    preloaded = gl.minimum(high - low, STAGES)
    for stage in range(preloaded):
        barrier = full.index(stage)
        mbarrier.expect(barrier, BYTES)
        _load_weight(
            codes_desc, scales_desc, zeros_desc, codes, scales, zeros, barrier, stage, first,
            low + stage, TEAMS, BLOCK_N, HEAD_DIM,
        )  # fmt: skip
    wait(PDL)
    if LATE == 1:
        launch_dependents(PDL)
    for stage in range(preloaded):
        _load_x(x_desc, x, full.index(stage), stage, row, last, low + stage, BLOCK_M, RUNS)
        if MORE:
            more = row + BLOCK_M
            _load_x(
                more_desc, more_x, full.index(stage), stage, more, last, low + stage, MORE, RUNS
            )
    stage = 0
    phase = 0
    for step in range(low + preloaded, high):
        barrier = full.index(stage)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(barrier, BYTES)
        _load_weight(
            codes_desc, scales_desc, zeros_desc, codes, scales, zeros, barrier, stage, first, step,
            TEAMS, BLOCK_N, HEAD_DIM,
        )  # fmt: skip
        _load_x(x_desc, x, barrier, stage, row, last, step, BLOCK_M, RUNS)
        if MORE:
            _load_x(more_desc, more_x, barrier, stage, row + BLOCK_M, last, step, MORE, RUNS)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _in_eights(values):
    """Rows of the gate and of up, which lie in halves, in turn by eights."""
    COLS: gl.constexpr = values.shape[1]
    return values.reshape([2, 4, 8, COLS]).permute((1, 0, 2, 3)).reshape([_ROWS, COLS])


@gluon.jit
def _column(values, GATED: gl.constexpr):
    """``[64, 1]`` in shared memory as ``[64]``, in the order of products."""
    found = values.load(_column_layout(GATED))
    if GATED:
        found = _in_eights(found)
    return found.reshape([_ROWS])


@gluon.jit
def _scales(values, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.convert_layout(_column(values, GATED).to(gl.float32), LAYOUT)


@gluon.jit
def _words(words, GATED: gl.constexpr):
    """The words of a step, in the order of products."""
    found = words.load(_words_layout(words.shape[1], GATED))
    if GATED:
        found = _in_eights(found)
    return found


@gluon.jit
def _halves(words, GATED: gl.constexpr):
    """The words of a step's two groups."""
    return _words(words, GATED).reshape([_ROWS, 2, 32]).permute((0, 2, 1)).split()


@gluon.jit
def _parted(values):
    """Rows of the gate and of up, which lie in turn by eights."""
    COLS: gl.constexpr = values.shape[1]
    gate, up = values.reshape([4, 2, 8, COLS]).permute((0, 2, 3, 1)).split()
    return gate.reshape([_ROWS // 2, COLS]), up.reshape([_ROWS // 2, COLS])


@gluon.jit
def _row_scales(
    scales_ptr, unit, N, FACTOR: gl.constexpr, LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """The scales of a team's outputs of N, times FACTOR."""
    in_tile = gl.arange(0, BLOCK_N, LAYOUT)
    outs = output(unit, in_tile, BLOCK_N, HEAD_DIM)
    found = gl.load(scales_ptr + gl.minimum(outs, N - 1)).to(gl.float32)
    return found * FACTOR


@gluon.jit
def _numbers(
    words, zeros, ELEMENT: gl.constexpr, ACC: gl.constexpr, ZEROS: gl.constexpr,
    GATED: gl.constexpr, DECODING: gl.constexpr,
):  # fmt: skip
    """The numbers ``[64, 128]`` of a group, in units of FACTOR."""
    ASM: gl.constexpr = DECODING[0]
    OPERANDS: gl.constexpr = DECODING[1]
    given = (words,)
    if ZEROS:
        bits = _column(zeros, GATED).to(gl.int16) + DECODING[3]
        added = gl.inline_asm_elementwise(
            DECODING[2], "=r,r", [bits], dtype=gl.int16, is_pure=True, pack=2
        )
        added = gl.convert_layout(added, gl.SliceLayout(1, words.type.layout))
        added, _same = gl.broadcast(gl.expand_dims(added, 1), words)
        given = (words, added)  # type: ignore[assignment]
    if ELEMENT.is_bf16():
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            ASM, OPERANDS, given, (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            ASM, OPERANDS, given, (gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    # The last dimension says which two, the one before which of them.
    fours = gl.join(gl.join(p0, p1), gl.join(p2, p3))
    numbers = fours.permute((0, 3, 2, 1)).reshape([_ROWS, _COLS])
    return gl.convert_layout(numbers, gl.DotOperandLayout(0, ACC, 2))


@gluon.jit
def _numbers_of_bytes(words, ELEMENT: gl.constexpr, ACC: gl.constexpr, ASM: gl.constexpr):
    """The numbers ``[64, 64]`` of two of each word's codes of 8 bits, in units of FACTOR."""
    if ELEMENT.is_bf16():
        p0, p1 = gl.inline_asm_elementwise(
            ASM, "=r,=r,r,r", (words,), (gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    else:
        p0, p1 = gl.inline_asm_elementwise(
            ASM, "=r,=r,r,r", (words,), (gl.float16, gl.float16), is_pure=True, pack=2
        )
    numbers = gl.join(p0, p1).permute((0, 2, 1)).reshape([_ROWS, _COLS // 2])
    return gl.convert_layout(numbers, gl.DotOperandLayout(0, ACC, 2))


@gluon.jit
def _begin(numbers, values, more_values, total, more, ADDS: gl.constexpr, MORE: gl.constexpr):
    """Begin to multiply by ``values [columns, BLOCK_M]``, and those of MORE rows, if there are any.

    Both products, and the numbers in registers, which are read until they are there.
    """
    first = warpgroup_mma(numbers, values, total, use_acc=ADDS, is_async=True)
    second = first
    if MORE:
        second = warpgroup_mma(numbers, more_values, more, use_acc=ADDS, is_async=True)
    return first, second, numbers


@gluon.jit
def _complete(begun, PENDING: gl.constexpr, MORE: gl.constexpr):
    """Both products; so many were begun since."""
    if MORE:
        first, second, _read = warpgroup_mma_wait(PENDING, deps=begun)
    else:
        first, _read = warpgroup_mma_wait(PENDING, deps=(begun[0], begun[2]))
        second = first
    return first, second


@gluon.jit
def _of_groups(
    total, more, TEAM: gl.constexpr, codes, scales, zeros, x, more_x, full, empty, low, high,
    TEAMS: gl.constexpr, STAGES: gl.constexpr, MORE: gl.constexpr, DECODING: gl.constexpr,
    AHEAD: gl.constexpr, ZEROS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The products of steps of two groups of 4-bit codes, each scaled."""
    gl.static_assert(not (AHEAD and MORE), "products ahead are one of a group")
    ELEMENT: gl.constexpr = x.dtype
    BLOCK_M: gl.constexpr = total.shape[1]
    ACC: gl.constexpr = total.type.layout
    OF_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    OF_MORE: gl.constexpr = gl.SliceLayout(1, more.type.layout)
    nothing = total
    more_nothing = more
    stage = 0
    phase = 0
    for _step in range(low, high):
        mbarrier.wait(full.index(stage), phase)
        at = stage * TEAMS + TEAM
        both = _halves(codes.index(at), GATED)
        scale = _scales(scales.index(at * 2), GATED, OF_ROW)
        numbers = _numbers(both[0], zeros.index(at * 2), ELEMENT, ACC, ZEROS, GATED, DECODING)
        values = x.index(stage * 2).permute((1, 0))
        more_values = more_x.index(stage * 2).permute((1, 0))
        begun = _begin(numbers, values, more_values, nothing, more_nothing, False, MORE)
        if not AHEAD:
            products, more_products = _complete(begun, 0, MORE)
            total += products * gl.expand_dims(scale, 1)
            if MORE:
                more += more_products * gl.expand_dims(gl.convert_layout(scale, OF_MORE), 1)
        if BLOCK_M > 32:
            # Registers are few: words wait in shared memory.
            both = _halves(codes.index(at), GATED)
        later = _numbers(both[1], zeros.index(at * 2 + 1), ELEMENT, ACC, ZEROS, GATED, DECODING)
        values = x.index(stage * 2 + 1).permute((1, 0))
        more_values = more_x.index(stage * 2 + 1).permute((1, 0))
        second = _begin(later, values, more_values, nothing, more_nothing, False, MORE)
        if AHEAD:
            products, _none = _complete(begun, 1, MORE)
            total += products * gl.expand_dims(scale, 1)
        scale = _scales(scales.index(at * 2 + 1), GATED, OF_ROW)
        products, more_products = _complete(second, 0, MORE)
        total += products * gl.expand_dims(scale, 1)
        if MORE:
            more += more_products * gl.expand_dims(gl.convert_layout(scale, OF_MORE), 1)
        sync_threads()
        mbarrier.arrive(empty.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    return total, more


@gluon.jit
def _of_rows(
    total, more, TEAM: gl.constexpr, codes, x, more_x, full, empty, low, high,
    TEAMS: gl.constexpr, STAGES: gl.constexpr, MORE: gl.constexpr, DECODING: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """The products of steps of 128 codes of 8 bits, whose scales are of whole rows."""
    ELEMENT: gl.constexpr = x.dtype
    ACC: gl.constexpr = total.type.layout
    LOW: gl.constexpr = DECODING[0]
    HIGH: gl.constexpr = DECODING[1]
    stage = 0
    phase = 0
    for _step in range(low, high):
        mbarrier.wait(full.index(stage), phase)
        at = stage * TEAMS + TEAM
        # Half of each word's codes become numbers while the other half is multiplied.
        numbers = _numbers_of_bytes(_words(codes.index(at), GATED), ELEMENT, ACC, LOW)
        values = x.index(stage * 2).permute((1, 0))
        more_values = more_x.index(stage * 2).permute((1, 0))
        begun = _begin(numbers, values, more_values, total, more, True, MORE)
        # Registers are few: words wait in shared memory.
        later = _numbers_of_bytes(_words(codes.index(at), GATED), ELEMENT, ACC, HIGH)
        total, more = _complete(begun, 0, MORE)
        values = x.index(stage * 2 + 1).permute((1, 0))
        more_values = more_x.index(stage * 2 + 1).permute((1, 0))
        begun = _begin(later, values, more_values, total, more, True, MORE)
        total, more = _complete(begun, 0, MORE)
        sync_threads()
        mbarrier.arrive(empty.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    return total, more


@gluon.jit
def _scaled(total, scale, up_scale, GATED: gl.constexpr, RUNS: gl.constexpr):
    """A team's results, or the gate's and up's, by the scales of their rows if these have one."""
    result = total
    up = total
    if GATED:
        result, up = _parted(total)
    if RUNS == 1:
        LAYOUT: gl.constexpr = gl.SliceLayout(1, result.type.layout)
        result *= gl.expand_dims(gl.convert_layout(scale, LAYOUT), 1)
        up *= gl.expand_dims(gl.convert_layout(up_scale, LAYOUT), 1)
    return result, up


@gluon.jit
def _multiply(
    TEAM: gl.constexpr, codes, scales, zeros, x, more_x, full, empty, epilogue, bias_ptr,
    squares_ptr, partial_ptr, arrivals_ptr, eps, first, units, split, block, num_rows, N, K, low,
    high, TEAMS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, BLOCK_M: gl.constexpr,
    MORE: gl.constexpr, BLOCK_N: gl.constexpr, DECODING: gl.constexpr, FACTOR: gl.constexpr,
    AHEAD: gl.constexpr, ZEROS: gl.constexpr, RUNS: gl.constexpr, KIND: gl.constexpr,
    SQUARES: gl.constexpr, HEAD_DIM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A team, and what follows its products."""
    GATED: gl.constexpr = epilogue.GATED
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    total = gl.zeros([_ROWS, BLOCK_M], gl.float32, ACC)
    more = total
    if MORE:
        OF_MORE: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [gl.num_warps(), 1], [16, MORE, 16]
        )
        more = gl.zeros([_ROWS, MORE], gl.float32, OF_MORE)
    unit = first + TEAM
    scale = 1.0
    up_scale = 1.0
    if RUNS == 1:
        # They are older than all kernels, and asked for beside the first tiles.
        if GATED:
            gates, _ups = _parted(total)
            OF_GATE: gl.constexpr = gl.SliceLayout(1, gates.type.layout)
            scale = _row_scales(scales, unit, N, FACTOR, OF_GATE, BLOCK_N, 0)
            up_scale = _row_scales(scales + N, unit, N, FACTOR, OF_GATE, BLOCK_N, 0)
        else:
            OF_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
            scale = _row_scales(scales, unit, N, FACTOR, OF_ROW, BLOCK_N, HEAD_DIM)
            up_scale = scale
    # A division that the norm before left is asked for beside the first tiles, not behind the last.
    # Of more rows it takes registers that are spilt then.
    DIVIDES: gl.constexpr = SQUARES > 0 and SPLITS == 1 and BLOCK_M <= 32 and MORE == 0
    inverse = 1.0
    if DIVIDES:
        wait(PDL)
        inverse = ask_inverse(
            squares_ptr, eps, block * BLOCK_M, num_rows, N, K, (BLOCK_M, BLOCK_N), SQUARES
        )
    if RUNS == 1:
        total, more = _of_rows(
            total, more, TEAM, codes, x, more_x, full, empty, low, high, TEAMS, STAGES, MORE,
            DECODING, GATED,
        )  # fmt: skip
    else:
        total, more = _of_groups(
            total, more, TEAM, codes, scales, zeros, x, more_x, full, empty, low, high, TEAMS,
            STAGES, MORE, DECODING, AHEAD, ZEROS, GATED,
        )  # fmt: skip
        total *= FACTOR
        more *= FACTOR
    if DIVIDES:
        total *= gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(0, ACC)), 0)
    if epilogue.LATE == 2:
        launch_dependents(PDL)
    # What follows reads what the kernels before wrote.
    wait(PDL)
    if unit < units:
        result, up = _scaled(total, scale, up_scale, GATED, RUNS)
        conclude(
            epilogue, result, up, bias_ptr, squares_ptr, partial_ptr, arrivals_ptr, eps, unit,
            split, block, num_rows, N, K, SPLITS, BLOCK_M, BLOCK_N, KIND,
            0 if DIVIDES else SQUARES, HEAD_DIM, units,
        )  # fmt: skip
        if MORE:
            # Blocks of so many rows, of which those of the first product are the ones before.
            result, up = _scaled(more, scale, up_scale, GATED, RUNS)
            conclude(
                epilogue, result, up, bias_ptr, squares_ptr, partial_ptr, arrivals_ptr, eps, unit,
                split, BLOCK_M // MORE, num_rows, N, K, SPLITS, MORE, BLOCK_N, KIND, SQUARES,
                HEAD_DIM, units,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows", "K", "steps", "units"])
def _linear_kernel(
    codes_desc,
    scales_desc,
    zeros_desc,
    x_desc,
    more_desc,
    row_scales_ptr,
    epilogue,
    bias_ptr,
    squares_ptr,
    partial_ptr,
    arrivals_ptr,
    eps,
    num_rows,
    N,
    K,
    steps,
    units,
    DECODING: gl.constexpr,
    FACTOR: gl.constexpr,
    BLOCK_M: gl.constexpr,
    MORE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TEAMS: gl.constexpr,
    REGISTERS: gl.constexpr,
    AHEAD: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    RUNS: gl.constexpr,
    KIND: gl.constexpr,
    SQUARES: gl.constexpr,
    PDL: gl.constexpr,
):
    """TEAMS of ``units`` of BLOCK_N columns of BLOCK_M rows, over one of SPLITS runs of steps.

    With MORE all rows are those of a program, so many of them by a second product.

    All else is as of :func:`engine_core.kernels.linear.groups.hopper.triton._linear_kernel`.
    """
    if epilogue.LATE == 0:
        launch_dependents(PDL)
    HEAD_DIM: gl.constexpr = epilogue.HEAD_DIM if KIND == "stored" else 0
    ZEROS: gl.constexpr = zeros_desc is not None
    BOXES: gl.constexpr = STAGES * TEAMS
    OF_SCALE: gl.constexpr = 0 if RUNS == 1 else scales_desc.dtype.primitive_bitwidth // 8
    OF_ROW: gl.constexpr = 128 + RUNS * (OF_SCALE + (1 if ZEROS else 0))
    BYTES: gl.constexpr = TEAMS * _ROWS * OF_ROW + RUNS * (BLOCK_M + MORE) * _COLS * 2
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32 // RUNS, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # As boxes of the weight, and as rows: of the gate and of up, or of both halves of a head.
    codes_boxes = room(codes_desc, BOXES)
    codes = reinterpret(codes_boxes, codes_desc.dtype, [BOXES, _ROWS, 32 * RUNS], WORDS)
    scales_boxes = codes_boxes
    scales = row_scales_ptr
    if scales_desc is not None:
        scales_boxes = room(scales_desc, BOXES)
        scales = reinterpret(scales_boxes, scales_desc.dtype, [BOXES * 2, _ROWS, 1], PLAIN)
    zeros_boxes = scales_boxes
    zeros = scales
    if ZEROS:
        zeros_boxes = room(zeros_desc, BOXES)
        zeros = reinterpret(zeros_boxes, gl.int8, [BOXES * 2, _ROWS, 1], PLAIN)
    x, x_boxes = _x_room(x_desc, STAGES, BLOCK_M, RUNS)
    more_x = x
    more_boxes = x_boxes
    if MORE:
        more_x, more_boxes = _x_room(more_desc, STAGES, MORE, RUNS)
    single: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], single)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], single)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=TEAMS)
    fence_async_shared()
    first = gl.program_id(0) * TEAMS
    split, block = gl.program_id(1), gl.program_id(2)
    low = split * steps // SPLITS
    high = (split + 1) * steps // SPLITS
    if TEAMS == 4:
        gl.warp_specialize(
            [
                (_multiply, (
                    0, codes, scales, zeros, x, more_x, full, empty, epilogue, bias_ptr,
                    squares_ptr, partial_ptr, arrivals_ptr, eps, first, units, split, block,
                    num_rows, N, K, low, high, TEAMS, STAGES, SPLITS, BLOCK_M, MORE, BLOCK_N,
                    DECODING, FACTOR, AHEAD, ZEROS, RUNS, KIND, SQUARES, HEAD_DIM, PDL,
                )),
                (_multiply, (
                    1, codes, scales, zeros, x, more_x, full, empty, epilogue, bias_ptr,
                    squares_ptr, partial_ptr, arrivals_ptr, eps, first, units, split, block,
                    num_rows, N, K, low, high, TEAMS, STAGES, SPLITS, BLOCK_M, MORE, BLOCK_N,
                    DECODING, FACTOR, AHEAD, ZEROS, RUNS, KIND, SQUARES, HEAD_DIM, PDL,
                )),
                (_multiply, (
                    2, codes, scales, zeros, x, more_x, full, empty, epilogue, bias_ptr,
                    squares_ptr, partial_ptr, arrivals_ptr, eps, first, units, split, block,
                    num_rows, N, K, low, high, TEAMS, STAGES, SPLITS, BLOCK_M, MORE, BLOCK_N,
                    DECODING, FACTOR, AHEAD, ZEROS, RUNS, KIND, SQUARES, HEAD_DIM, PDL,
                )),
                (_multiply, (
                    3, codes, scales, zeros, x, more_x, full, empty, epilogue, bias_ptr,
                    squares_ptr, partial_ptr, arrivals_ptr, eps, first, units, split, block,
                    num_rows, N, K, low, high, TEAMS, STAGES, SPLITS, BLOCK_M, MORE, BLOCK_N,
                    DECODING, FACTOR, AHEAD, ZEROS, RUNS, KIND, SQUARES, HEAD_DIM, PDL,
                )),
                (_load, (
                    codes_desc, scales_desc, zeros_desc, x_desc, more_desc, codes_boxes,
                    scales_boxes, zeros_boxes, x_boxes, more_boxes, full, empty, first,
                    block * BLOCK_M, num_rows - 1, low, high, epilogue.LATE, BYTES, TEAMS, STAGES,
                    BLOCK_M, MORE, BLOCK_N, RUNS, HEAD_DIM, PDL,
                )),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, _LOADS],
        )  # fmt: skip
    elif TEAMS == 3:
        gl.warp_specialize(
            [
                (_multiply, (
                    0, codes, scales, zeros, x, more_x, full, empty, epilogue, bias_ptr,
                    squares_ptr, partial_ptr, arrivals_ptr, eps, first, units, split, block,
                    num_rows, N, K, low, high, TEAMS, STAGES, SPLITS, BLOCK_M, MORE, BLOCK_N,
                    DECODING, FACTOR, AHEAD, ZEROS, RUNS, KIND, SQUARES, HEAD_DIM, PDL,
                )),
                (_multiply, (
                    1, codes, scales, zeros, x, more_x, full, empty, epilogue, bias_ptr,
                    squares_ptr, partial_ptr, arrivals_ptr, eps, first, units, split, block,
                    num_rows, N, K, low, high, TEAMS, STAGES, SPLITS, BLOCK_M, MORE, BLOCK_N,
                    DECODING, FACTOR, AHEAD, ZEROS, RUNS, KIND, SQUARES, HEAD_DIM, PDL,
                )),
                (_multiply, (
                    2, codes, scales, zeros, x, more_x, full, empty, epilogue, bias_ptr,
                    squares_ptr, partial_ptr, arrivals_ptr, eps, first, units, split, block,
                    num_rows, N, K, low, high, TEAMS, STAGES, SPLITS, BLOCK_M, MORE, BLOCK_N,
                    DECODING, FACTOR, AHEAD, ZEROS, RUNS, KIND, SQUARES, HEAD_DIM, PDL,
                )),
                (_load, (
                    codes_desc, scales_desc, zeros_desc, x_desc, more_desc, codes_boxes,
                    scales_boxes, zeros_boxes, x_boxes, more_boxes, full, empty, first,
                    block * BLOCK_M, num_rows - 1, low, high, epilogue.LATE, BYTES, TEAMS, STAGES,
                    BLOCK_M, MORE, BLOCK_N, RUNS, HEAD_DIM, PDL,
                )),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, _LOADS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    0, codes, scales, zeros, x, more_x, full, empty, epilogue, bias_ptr,
                    squares_ptr, partial_ptr, arrivals_ptr, eps, first, units, split, block,
                    num_rows, N, K, low, high, TEAMS, STAGES, SPLITS, BLOCK_M, MORE, BLOCK_N,
                    DECODING, FACTOR, AHEAD, ZEROS, RUNS, KIND, SQUARES, HEAD_DIM, PDL,
                )),
                (_multiply, (
                    1, codes, scales, zeros, x, more_x, full, empty, epilogue, bias_ptr,
                    squares_ptr, partial_ptr, arrivals_ptr, eps, first, units, split, block,
                    num_rows, N, K, low, high, TEAMS, STAGES, SPLITS, BLOCK_M, MORE, BLOCK_N,
                    DECODING, FACTOR, AHEAD, ZEROS, RUNS, KIND, SQUARES, HEAD_DIM, PDL,
                )),
                (_load, (
                    codes_desc, scales_desc, zeros_desc, x_desc, more_desc, codes_boxes,
                    scales_boxes, zeros_boxes, x_boxes, more_boxes, full, empty, first,
                    block * BLOCK_M, num_rows - 1, low, high, epilogue.LATE, BYTES, TEAMS, STAGES,
                    BLOCK_M, MORE, BLOCK_N, RUNS, HEAD_DIM, PDL,
                )),
            ],
            [4, 1],
            [REGISTERS, _LOADS],
        )  # fmt: skip


def fits(x: Tensor, weight: GroupWeight) -> bool:
    """Whether :func:`linear` takes tensors of these shapes and places."""
    n, k = weight.shape
    values = [weight.words, weight.scales] + ([] if weight.zeros is None else [weight.zeros])
    if weight.bits == 8:
        kind = weight.group_size == 0 and weight.zeros is None
    else:
        # Steps are of two groups; zeros of halves come by 16 bytes at least.
        kind = weight.bits == 4 and weight.group_size == BLOCK
        kind = kind and n % 32 == 0 and k % (2 * BLOCK) == 0
    return (
        takes_rows(x)
        and kind
        and weight.dtype == x.dtype
        and weight.minima is None
        and weight.headers is None
        and all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in values)
    )


def _in_boxes(rows: int, block_m: int, more: int) -> bool:
    """Whether the last of ``rows`` come in several boxes: many of their product are missing.

    A program has ``block_m`` and ``more`` of them. Where it has 64 alone that changes nothing, and
    more blocks than four have few in which rows are missing.
    """
    if more:
        return block_m + more - rows > _MOST_MISSING
    return block_m > 64 and rows <= 4 * block_m and -rows % block_m > _MOST_MISSING


def is_trusted(like: Tensor, weight: GroupWeight, tile: Tile, ending: str) -> bool:
    """Whether :func:`linear` may be used for such rows; it may be tried for that.

    ``ending`` is what follows the products: "activated", "gated", "added" or "stored".
    """
    rows = like.numel() // like.shape[-1]
    block_m = rows_of_program(tile, rows)
    in_boxes = _in_boxes(rows, block_m, tile.more_rows)
    kind = (like.dtype, weight.scales.dtype, weight.zeros is None, tile, block_m, ending, in_boxes)
    tried = block_m + tile.more_rows - (_MOST_MISSING + 3 if in_boxes else 3)
    family = _OF_BYTES if weight.bits == 8 else _FAMILY
    return family.allows(
        like.device, kind, lambda: trial_of_codes(like, weight, tile, tried, ending, linear)
    )


# Of each type of numbers: its name in an instruction for two, the largest power of 2, and by how
# many powers of 2 the smallest number times that is less than 1.
_TYPES = {"bfloat16": ("bf16x2", 0x7F00, 6), "float16": ("f16x2", 0x7800, 9)}


def _less_zero(element: str, zero: float, shift: int) -> str:
    """Bits of a register that, added, take ``zero`` from two numbers, whose unit is so small."""
    pair = torch.tensor([-zero / 2**shift] * 2).to(getattr(torch, element))
    return f"{int(pair.view(torch.int32)) & 0xFFFFFFFF:#x}"


@functools.cache
def _decoding(element: str, zero: float | None) -> tuple[tuple[str, str, str, int], float]:
    """Instructions for codes, their operands, those for zeros, what these begin from; and a factor.

    Four bits in the lowest place of a number whose exponent is 0 are that many of the smallest
    numbers there are; in the next place they are 16 times as many. A product makes both what they
    stand for over the factor, and adds minus the zero: nothing is rounded. With ``zero`` that is
    the same everywhere.
    """
    kind, high, shift = _TYPES[element]
    low, unit, bits = {
        "bfloat16": (0x7D00, 0x3C80, 0xC300),
        "float16": (0x6800, 0x1800, 0xE400),
    }[element]
    lines = [
        ".reg .b32 w, p0, p1, p2, p3, a, b, z;",
        f"mov.b32 a, {high * 0x10001:#x}; mov.b32 b, {low * 0x10001:#x}; shr.u32 w, $4, 8;",
    ]
    more = "$5"
    if zero is not None:
        lines.append(f"mov.b32 z, {_less_zero(element, zero, shift)};")
        more = "z"
    for part, word in enumerate(("$4", "$4", "w", "w")):
        mask, factor = ("0x00f000f0", "b") if part % 2 else ("0x000f000f", "a")
        lines.append(f"and.b32 p{part}, {word}, {mask};")
        lines.append(f"fma.rn.{kind} p{part}, p{part}, {factor}, {more};")
    lines += [f"mov.b32 ${part}, p{part};" for part in range(4)]
    # A zero in the last bits of -128 or -1024 is that much less: times a unit, 2 more is minus it.
    added = (
        f"{{ .reg .b32 u, t; mov.b32 u, {unit * 0x10001:#x}; mov.b32 t, 0x40004000;"
        f" fma.rn.{kind} $0, $1, u, t; }}"
    )
    operands = "=r,=r,=r,=r,r" + (",r" if zero is None else "")
    return ("{\n" + "\n".join(lines) + "\n}", operands, added, bits - 0x10000), 2.0**shift


@functools.cache
def _decoding_of_bytes(element: str) -> tuple[tuple[str, ...], float]:
    """Instructions for the low and for the high two of a word's 8-bit codes; and a factor.

    As in :func:`_decoding`. From 0 on 8 bits, too, are that many of the smallest numbers, for those
    whose exponent is 1 are as far apart as those whose exponent is 0. 128 is what stands for 0.
    """
    kind, high, shift = _TYPES[element]
    less = _less_zero(element, 128, shift)
    made = tuple(
        "{ .reg .b32 t, p0, p1, a, z;"
        f" mov.b32 a, {high * 0x10001:#x}; mov.b32 z, {less};"
        f" prmt.b32 t, $2, $3, {bytes_:#x};"
        # (t & 0x00ff00ff) ^ 0x00800080: every other byte, from 0 on.
        " lop3.b32 p0, t, 0x00ff00ff, 0x00800080, 0x6a; shr.u32 t, t, 8;"
        " lop3.b32 p1, t, 0x00ff00ff, 0x00800080, 0x6a;"
        f" fma.rn.{kind} $0, p0, a, z; fma.rn.{kind} $1, p1, a, z; }}"
        for bytes_ in (0x5410, 0x7632)
    )
    return made, 2.0**shift


def linear(
    x: Tensor | DeferredRMSNorm,
    weight: GroupWeight,
    epilogue: Any,
    tile: Tile,
    bias: Tensor | None = None,
) -> Tensor:
    """As :func:`engine_core.kernels.linear.triton.linear`, by a weight of 4 or 8 bits.

    What :func:`fits` asks of x and the weight holds, and there are rows. Nothing that is still
    running writes the weight: it is read before the kernels before are waited for.
    """
    launch = Launch.of(x, len(weight), epilogue, tile, bias)
    boxes = Boxes.of(launch, epilogue, len(weight), tile.block_n)
    element = str(weight.dtype).removeprefix("torch.")
    runs = 8 // weight.bits
    decoding: tuple[Any, ...]
    if runs == 1:
        decoding, factor = _decoding_of_bytes(element)
    else:
        zero = float(weight.middle) if weight.zeros is None else None
        decoding, factor = _decoding(element, zero)
    units, splits, blocks = launch.grid
    more = tile.more_rows
    last_in_boxes = _in_boxes(len(launch.rows), launch.block_m, more)

    def box(rows: int, in_boxes: bool) -> TensorDescriptor:
        """Half a step of a product's rows, or a part of them."""
        shape = [rows, runs * _COLS.value // 2]
        if in_boxes:
            shape = [_BOX_ROWS.value, _BOX_COLS.value]
        swizzle = gl.NVMMASharedLayout(128, 16, rank=2)
        return TensorDescriptor.from_tensor(launch.rows, shape, swizzle)

    _linear_kernel[(-(-units // tile.teams), splits, blocks)](
        boxes.along(weight.words, 128 // weight.words.itemsize, 1),
        boxes.across(weight.scales, 2) if weight.group_size else None,
        None if weight.zeros is None else boxes.across(weight.zeros, 2),
        box(launch.block_m, last_in_boxes and not more),
        box(more, last_in_boxes) if more else None,
        None if weight.group_size else weight.scales,
        *launch.given,
        weight.in_features,
        -(-weight.in_features // (runs * BLOCK)),
        units,
        MORE=more,
        DECODING=decoding,
        FACTOR=factor,
        BLOCK_N=tile.block_n,
        TEAMS=tile.teams,
        REGISTERS=_REGISTERS[tile.teams, tile.max_registers],
        AHEAD=tile.ahead,
        STAGES=tile.num_stages,
        RUNS=runs,
        **launch.constants,
        **pdl_options(launch.rows.device),
    )
    out: Tensor = epilogue.out
    return out
