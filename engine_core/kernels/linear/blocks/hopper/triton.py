"""Linears of few rows by GGUF blocks on Hopper, in Gluon, Triton's language below the tile.

Codes come as those of :mod:`engine_core.kernels.linear.groups.hopper`. Each group of 32 or 16
columns has products of its own. A code becomes a number that is larger than it is by the same for
all, which takes two instructions; what the products are too large by is that times the sum of x
over the group. The minima want the same sum: the matrix units make it, as products by ones.
Without minima these begin from that sum, as products by what is too much. Of Q4_K, Q5_K and Q6_K a
row's scales of a super-block lie side by side, so that a thread loads them in two loads; those that
are floats come to shared memory as codes do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine_core.kernels.launch.gluon import Family, Trial
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
    output,
    rows_of_program,
    takes_rows,
    trial_of,
)
from engine_core.kernels.linear.groups import GroupWeight
from engine_core.kernels.linear.readers.triton import instructions, offset_of
from engine_core.kernels.linear.reference import DeferredRMSNorm
from engine_core.kernels.linear.tiles import Tile

_FAMILY = Family("linears by GGUF blocks", "These take about twice as long for up to 32 rows")

# Columns of a super-block, which is a step.
_COLS = gl.constexpr(256)
# Rows of a program up to which warps multiply by themselves. Products of a warp group, each of
# which ptxas waits for, are faster for more. us of 28672x4096, gated, and 4096x14336, Q4_K, so and
# so: 1 row 35.3, 37.5; 18.4, 19.2. 32 rows 59.0, 53.9; 42.7, 34.6.
_MOST_AT_ONCE = gl.constexpr(16)


@gluon.constexpr_function
def _words_layout(rows, width, warps):
    """Where threads have a step's words ``[rows, width]``: those of the numbers they multiply."""
    return rows_layout(rows, width, warps, 2, 4)


@gluon.constexpr_function
def _products_layout(rows, warps, of_groups):
    """Of products by a group of warps, or by each warp."""
    if of_groups:
        return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, rows, 16])
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.jit
def _load_weight(
    codes_desc, high_desc, scales, minima, codes, bits, of_scales, of_minima, barrier, stage, head,
    row, step, pred,
):  # fmt: skip
    """Begin to load a step's words and high bits, and what shared memory has the floats of."""
    load_box(codes_desc, codes, barrier, stage, head, row, step, pred)
    if high_desc is not None:
        load_box(high_desc, bits, barrier, stage, head, row, step, pred)
    if of_scales is not None:
        load_box(scales, of_scales, barrier, stage, head, row, step, pred)
        if minima is not None:
            load_box(minima, of_minima, barrier, stage, head, row, step, pred)


@gluon.jit
def _load_x(desc, x, barrier, stage, row, step, pred):
    GROUPS: gl.constexpr = x.shape[1]
    tma_load(desc, [step * GROUPS, row, 0], barrier, x.index(stage), pred=pred)


@gluon.jit
def _high_of(bits, BITS: gl.constexpr):
    """The high bits of a block's words, from its bytes."""
    found = bits.to(gl.int16)
    if BITS == 5:
        ROWS: gl.constexpr = bits.shape[0]
        found = gl.join(found & 15, found >> 4).permute((0, 2, 1)).reshape([ROWS, 32])
        LAYOUT: gl.constexpr = _words_layout(ROWS, 32, gl.num_warps())
        found = gl.convert_layout(found, LAYOUT)
    return found


@gluon.jit
def _asked(scales, minima, headers, block, blocks, rows, TOTAL, BLOCKS: gl.constexpr):
    """Of a block: the words of four scales, and of minima, and the headers of both."""
    block = gl.minimum(block, blocks - 1)
    run = block // BLOCKS
    places = (run * TOTAL + rows) * BLOCKS + block % BLOCKS
    words = gl.load(scales + places)
    head = gl.load(headers + run * TOTAL + rows)
    if minima is None:
        found = (words, head, words, head)
    else:
        least = gl.load(headers + (blocks // BLOCKS + run) * TOTAL + rows)
        found = (words, head, gl.load(minima + places), least)
    return found


@gluon.jit
def _scale(words, head, GROUP: gl.constexpr, SIGNED: gl.constexpr):
    """The scale or minimum of a group, as its definition has it: no step of this rounds.

    A byte becomes the end of a large number's fraction, below 128 in the third place.
    """
    if SIGNED:
        bits = (words ^ -0x7F7F7F80) >> (8 * GROUP) & 255
        found = (bits | 0x4B000000).to(gl.float32, bitcast=True) - 8388736.0
    elif GROUP == 1:
        found = (words & 0xFF00 | 0x47000000).to(gl.float32, bitcast=True) - 32768.0
    elif GROUP == 2:
        found = (words & 0xFF0000 | 0x43000000).to(gl.float32, bitcast=True) - 128.0
    else:
        bits = words >> (8 * GROUP) & 255
        found = (bits | 0x4B000000).to(gl.float32, bitcast=True) - 8388608.0
    return found * head


@gluon.jit
def _numbers(words, high, ELEMENT: gl.constexpr, ASM: gl.constexpr, OPERANDS: gl.constexpr,
             ACC: gl.constexpr):  # fmt: skip
    """A block's codes ``[rows, LANES]`` as four operands ``[rows, LANES]``."""
    given = (words,) if high is None else (words, high)
    if ELEMENT.is_bf16():
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            ASM, OPERANDS, given, (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            ASM, OPERANDS, given, (gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True,
            pack=2,
        )  # fmt: skip
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    return (
        gl.convert_layout(p0, OPERAND), gl.convert_layout(p1, OPERAND),
        gl.convert_layout(p2, OPERAND), gl.convert_layout(p3, OPERAND),
    )  # fmt: skip


@gluon.jit
def _begin(numbers, values, more, ACC: gl.constexpr):
    """Begin to multiply a group's ``numbers [rows, LANES]`` by its ``values [BLOCK_M, LANES]``.

    And ``more``, if there are such, to be added.
    """
    ROWS: gl.constexpr = numbers.shape[0]
    COLS: gl.constexpr = values.shape[0]
    products = gl.zeros([ROWS, COLS], gl.float32, ACC)
    values = values.permute((1, 0))
    products = warpgroup_mma(numbers, values, products, use_acc=False, is_async=True)
    if more is not None:
        products = warpgroup_mma(more, values, products, is_async=True)
    return products


@gluon.jit
def _factors(asked, scales, minima, at, GROUP: gl.constexpr, MINIMA: gl.constexpr,
             LAYOUT: gl.constexpr):  # fmt: skip
    """The scale of a group, and its minimum; of those that were asked for, or in shared memory."""
    if scales is None:
        found = (_scale(asked[0], asked[1].to(gl.float32), GROUP, not MINIMA),)
        if MINIMA:
            found += (_scale(asked[2], asked[3].to(gl.float32), GROUP, False),)  # type: ignore[assignment]
    else:
        found = (float_of(scales.index(at), LAYOUT),)
        if MINIMA:
            found += (float_of(minima.index(at), LAYOUT),)  # type: ignore[assignment]
    return found


@gluon.jit
def _add_scaled(total, products, sums, factors, EXCESS: gl.constexpr, MINIMA: gl.constexpr):
    """A group's products times its scale, and with a minimum less what they are too large by."""
    total += products * gl.expand_dims(factors[0], 1)
    if MINIMA:
        total += sums * gl.expand_dims(factors[0] * -EXCESS + factors[1], 1)
    return total


@gluon.jit
def _add(
    acc, up, begun, asked, up_asked, scales, minima, at, GROUP: gl.constexpr,
    PENDING: gl.constexpr, EXCESS: gl.constexpr, MINIMA: gl.constexpr, GATED: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """The sums with a group's products, of the gate and of up; PENDING ones were begun since."""
    if len(begun) == 5:
        # Registers that are read are not another's before.
        begun = warpgroup_mma_wait(PENDING, deps=begun)
    factors = _factors(asked, scales, minima, at, GROUP, MINIMA, ROWS)
    acc = _add_scaled(acc, begun[0], begun[2], factors, EXCESS, MINIMA)
    if GATED:
        factors = _factors(up_asked, scales, minima, at + 1, GROUP, MINIMA, ROWS)
        up = _add_scaled(up, begun[1], begun[2], factors, EXCESS, MINIMA)
    return acc, up


@gluon.jit(do_not_specialize=["num_rows", "steps", "inner"])
def _linear_kernel(
    codes_desc,
    high_desc,
    x_desc,
    scales,
    minima,
    headers_ptr,
    epilogue,
    bias_ptr,
    squares_ptr,
    partial_ptr,
    arrivals_ptr,
    eps,
    num_rows,
    N,
    steps,
    inner,
    ASM: gl.constexpr,
    OPERANDS: gl.constexpr,
    EXCESS: gl.constexpr,
    BITS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    KIND: gl.constexpr,
    SQUARES: gl.constexpr,
    PDL: gl.constexpr,
):
    """BLOCK_N columns of BLOCK_M rows, over one of SPLITS runs of super-blocks.

    ``scales`` and ``minima`` are pointers, and without headers descriptors of floats.
    All else is as of
    :func:`engine_core.kernels.linear.groups.hopper.triton._linear_kernel`.
    """
    if epilogue.LATE == 0:
        launch_dependents(PDL)
    GATED: gl.constexpr = epilogue.GATED
    HEAD_DIM: gl.constexpr = epilogue.HEAD_DIM if KIND == "stored" else 0
    ELEMENT: gl.constexpr = x_desc.dtype
    WARPS: gl.constexpr = gl.num_warps()
    PARTS: gl.constexpr = 2 if GATED else 1
    MINIMA: gl.constexpr = minima is not None
    FLOATS: gl.constexpr = headers_ptr is None
    SUMS: gl.constexpr = MINIMA or EXCESS != 0
    GROUPS: gl.constexpr = x_desc.block_type.shape[0]
    LANES: gl.constexpr = _COLS // GROUPS
    BLOCKS: gl.constexpr = GROUPS // 4
    HIGH: gl.constexpr = 0 if high_desc is None else high_desc.block_type.shape[4]
    WORD: gl.constexpr = codes_desc.dtype.primitive_bitwidth // 8
    FLOAT_BYTES: gl.constexpr = (4 if MINIMA else 2) * 4 if FLOATS else 0
    ROW_BYTES: gl.constexpr = BLOCKS * (WORD * LANES + HIGH + FLOAT_BYTES)
    BYTES: gl.constexpr = PARTS * BLOCK_N * ROW_BYTES + BLOCK_M * _COLS * 2
    ASYNC: gl.constexpr = BLOCK_M > _MOST_AT_ONCE
    # Of a group.
    DOTS: gl.constexpr = PARTS + 1 if MINIMA else PARTS * (2 if SUMS else 1)
    ACC: gl.constexpr = _products_layout(BLOCK_M, WARPS, ASYNC)
    ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    WORDS: gl.constexpr = _words_layout(BLOCK_N, LANES, WARPS)
    tile, split, block = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    low = split * gl.cdiv(steps, SPLITS)
    high = gl.minimum(low + gl.cdiv(steps, SPLITS), steps)

    # As boxes of the weight, and as rows: of the gate and of up, or of both halves of a head.
    PLACES: gl.constexpr = STAGES * BLOCKS * PARTS
    codes_boxes = room(codes_desc, STAGES)
    CODES: gl.constexpr = gl.NVMMASharedLayout(WORD * LANES, 8 * WORD, rank=2)
    codes = reinterpret(codes_boxes, codes_desc.dtype, [PLACES, BLOCK_N, LANES], CODES)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    bits_boxes = codes_boxes
    bits = codes
    if HIGH:
        bits_boxes = room(high_desc, STAGES)
        bits = reinterpret(bits_boxes, gl.uint8, [PLACES, BLOCK_N, HIGH], PLAIN)
    scales_boxes = None
    minima_boxes = None
    of_groups = None
    least_of_groups = None
    if FLOATS:
        scales_boxes = room(scales, STAGES)
        of_groups = reinterpret(scales_boxes, scales.dtype, [4 * PLACES, BLOCK_N, 1], PLAIN)
        if MINIMA:
            minima_boxes = room(minima, STAGES)
            least_of_groups = reinterpret(
                minima_boxes, minima.dtype, [4 * PLACES, BLOCK_N, 1], PLAIN
            )
    GROUP_X: gl.constexpr = gl.NVMMASharedLayout(2 * LANES, 16, rank=2)
    x = gl.allocate_shared_memory(ELEMENT, [STAGES, GROUPS, BLOCK_M, LANES], x_desc.layout)
    groups = reinterpret(x, ELEMENT, [STAGES * GROUPS, BLOCK_M, LANES], GROUP_X)
    # The sum of a group of x is a product by these; or, without minima, what is too much at once.
    ONE: gl.constexpr = 1.0 if MINIMA else -EXCESS
    if not SUMS:
        ones = None
    elif ASYNC:
        ones = gl.allocate_shared_memory(ELEMENT, [BLOCK_N, LANES], GROUP_X)
        FILLED: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
        ones.store(gl.full([BLOCK_N, LANES], ONE, ELEMENT, FILLED))
    else:
        ones = gl.full([BLOCK_N, LANES], ONE, ELEMENT, gl.DotOperandLayout(0, ACC, 2))
    less = None if MINIMA else ones
    full = barriers(STAGES)
    head, row = place_of(tile, BLOCK_N, HEAD_DIM)
    # The weight is older than all kernels: its first tiles do not wait for x.
    for stage in gl.static_range(STAGES):
        there = low + stage < high
        mbarrier.expect(full.index(stage), BYTES, pred=there)
        _load_weight(
            codes_desc, high_desc, scales, minima, codes_boxes, bits_boxes, scales_boxes,
            minima_boxes, full.index(stage), stage, head, row, low + stage, there,
        )  # fmt: skip
    # Rows beyond the last one read it once more.
    rows = gl.minimum(output(tile, gl.arange(0, BLOCK_N, ROWS), BLOCK_N, HEAD_DIM), N - 1)
    TOTAL = N * PARTS
    blocks = steps * BLOCKS
    asked = ()
    up_asked = ()
    if not FLOATS:
        asked = _asked(scales, minima, headers_ptr, low * BLOCKS, blocks, rows, TOTAL, BLOCKS)
        if GATED:
            up_asked = _asked(
                scales, minima, headers_ptr, low * BLOCKS, blocks, rows + N, TOTAL, BLOCKS
            )
    wait(PDL)
    if epilogue.LATE == 1:
        launch_dependents(PDL)
    for stage in gl.static_range(STAGES):
        _load_x(
            x_desc, x, full.index(stage), stage, block * BLOCK_M, low + stage, low + stage < high
        )
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    up = acc
    stage = 0
    phase = 0
    for step in range(low, high):
        barrier = full.index(stage)
        mbarrier.wait(barrier, phase)
        # As many as BLOCKS, which the compiler is not to know: it would take registers for all.
        for own in range(inner):
            at = step * BLOCKS + own
            # Those of the next block are asked for a block ahead.
            following = ()
            up_following = ()
            if not FLOATS:
                following = _asked(scales, minima, headers_ptr, at + 1, blocks, rows, TOTAL, BLOCKS)
                if GATED:
                    up_following = _asked(
                        scales, minima, headers_ptr, at + 1, blocks, rows + N, TOTAL, BLOCKS
                    )
            place = (stage * BLOCKS + own) * PARTS
            high_bits = None
            up_bits = None
            if HIGH:
                BIT_BYTES: gl.constexpr = _words_layout(BLOCK_N, HIGH, WARPS)
                high_bits = _high_of(bits.index(place).load(BIT_BYTES), BITS)
                if GATED:
                    up_bits = _high_of(bits.index(place + 1).load(BIT_BYTES), BITS)
            words = codes.index(place).load(WORDS)
            numbers = _numbers(words, high_bits, ELEMENT, ASM, OPERANDS, ACC)
            up_numbers = numbers
            if GATED:
                words = codes.index(place + 1).load(WORDS)
                up_numbers = _numbers(words, up_bits, ELEMENT, ASM, OPERANDS, ACC)
            before = ()
            for each in gl.static_range(4):
                values = groups.index((stage * BLOCKS + own) * 4 + each)
                group = ((stage * BLOCKS + own) * 4 + each) * PARTS
                if ASYNC:
                    products = _begin(numbers[each], values, less, ACC)
                    up_products = products
                    if GATED:
                        up_products = _begin(up_numbers[each], values, less, ACC)
                    sums = products
                    if MINIMA:
                        sums = _begin(ones, values, None, ACC)
                    if AHEAD and each:
                        acc, up = _add(
                            acc, up, before, asked, up_asked, of_groups, least_of_groups,
                            group - PARTS, each - 1, DOTS, EXCESS, MINIMA, GATED, ROWS,
                        )  # fmt: skip
                    before = (products, up_products, sums, numbers[each], up_numbers[each])  # type: ignore[assignment]
                    if not AHEAD or each == 3:
                        acc, up = _add(
                            acc, up, before, asked, up_asked, of_groups, least_of_groups, group,
                            each, 0, EXCESS, MINIMA, GATED, ROWS,
                        )  # fmt: skip
                else:
                    values = values.permute((1, 0)).load(gl.DotOperandLayout(1, ACC, 2))
                    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
                    sums = zeros
                    if SUMS:
                        sums = mma_v2(ones, values, zeros)
                    begun = zeros if MINIMA else sums
                    products = mma_v2(numbers[each], values, begun)
                    up_products = products
                    if GATED:
                        up_products = mma_v2(up_numbers[each], values, begun)
                    acc, up = _add(
                        acc, up, (products, up_products, sums), asked, up_asked, of_groups,
                        least_of_groups, group, each, 0, EXCESS, MINIMA, GATED, ROWS,
                    )  # fmt: skip
            asked = following
            up_asked = up_following
        sync_threads()
        more = step + STAGES < high
        mbarrier.expect(barrier, BYTES, pred=more)
        _load_weight(
            codes_desc, high_desc, scales, minima, codes_boxes, bits_boxes, scales_boxes,
            minima_boxes, barrier, stage, head, row, step + STAGES, more,
        )  # fmt: skip
        _load_x(x_desc, x, barrier, stage, block * BLOCK_M, step + STAGES, more)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    if epilogue.LATE == 2:
        launch_dependents(PDL)
    conclude(
        epilogue, acc, up, bias_ptr, squares_ptr, partial_ptr, arrivals_ptr, eps, tile, split,
        block, num_rows, N, steps * _COLS, SPLITS, BLOCK_M, BLOCK_N, KIND, SQUARES, HEAD_DIM,
    )  # fmt: skip


def fits(x: Tensor, weight: GroupWeight) -> bool:
    """Whether :func:`linear` takes tensors of these shapes and places."""
    kept = (weight.words, weight.scales, weight.minima, weight.high)
    if weight.headers is None:
        known = _has_floats(weight)
    elif weight.minima is None:
        known = weight.bits == 6 and weight.group_size == 16
    else:
        known = weight.bits in (4, 5) and weight.group_size == 32
    return (
        known
        and takes_rows(x)
        and weight.dtype == x.dtype
        and all(each is None or each.is_contiguous() for each in kept)
        and all(each is None or each.data_ptr() % 16 == 0 for each in kept)
    )


def _has_floats(weight: GroupWeight) -> bool:
    """Whether each 32 codes have a scale, and a minimum, of 16 bits; of whole super-blocks."""
    return (
        weight.bits in (4, 5, 8)
        and weight.group_size == 32
        and weight.zeros is None
        and weight.in_features % _COLS.value == 0
        # The tensor memory accelerator wants 16 bytes of scales, of halves of the rows too.
        and len(weight) % 16 == 0
        and weight.scales.dtype in (torch.bfloat16, torch.float16)
        and (weight.minima is None or weight.minima.dtype == weight.scales.dtype)
    )


def is_trusted(like: Tensor, weight: GroupWeight, tile: Tile, ending: str) -> bool:
    """Whether :func:`linear` may be used for such rows; it may be tried for that.

    ``ending`` is what follows the products: "activated", "gated", "added" or "stored".
    """
    block_m = rows_of_program(tile, like.numel() // like.shape[-1])
    kind = (like.dtype, *form_of(weight), tile, block_m, ending)
    # Three rows of the block are not there.
    shape = (block_m - 3, 2 * max(2, tile.splits) * _COLS.value)
    return _FAMILY.allows(
        like.device,
        kind,
        lambda: trial_of_blocks(like.new_empty(shape), weight, tile, ending, linear),
    )


def form_of(weight: GroupWeight) -> tuple[Any, ...]:
    """The properties that machine code depends on."""
    floats = weight.scales.dtype if weight.headers is None else None
    return weight.bits, weight.middle, weight.minima is None, floats


def trial_of_blocks(
    like: Tensor, of: GroupWeight, tile: Tile, ending: str, launch: Callable[..., Tensor]
) -> Trial:
    """As many rows and columns as ``like`` has, by a weight of such a form."""
    draw = torch.Generator(like.device).manual_seed(0)
    (rows, k), n, width = like.shape, 8 * tile.block_n, of.group_size

    def integers(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=draw, device=like.device, dtype=torch.uint8)

    def floats(columns: int, most: int) -> Tensor:
        drawn = torch.rand(n, k // columns, generator=draw, device=like.device) + 0.5
        return drawn.div_(2**of.bits * most * k**0.5)

    def spread(values: Tensor, columns: int) -> Tensor:
        return values.float().repeat_interleave(columns, 1)

    codes = integers(2**of.bits, n, k)
    headers: list[Tensor] = []
    minima = None
    if of.headers is None:
        scales = floats(width, 1).to(of.scales.dtype)
        scale = spread(scales, width)
        if of.minima is not None:
            minima = -floats(width, 1).to(of.scales.dtype)
            least = spread(minima, width)
    else:
        scales = integers(64, n, k // width).view(torch.int8)
        if of.minima is None:
            scales = scales - 32
        headers = [floats(_COLS.value, 32).half()]
        scale = spread(scales, width) * spread(headers[0], _COLS.value)
        if of.minima is not None:
            minima = integers(64, n, k // width).view(torch.int8)
            headers.append(-floats(_COLS.value, 32).half())
            least = spread(minima, width) * spread(headers[1], _COLS.value)
    weight = GroupWeight.of_codes(
        codes, scales, of.bits, like.dtype, minima, headers, centred=of.centred
    )
    numbers = codes.view(torch.int8) if of.bits == 8 else codes
    numbers = (numbers.float() - of.middle) * scale
    if minima is not None:
        numbers += least
    x = torch.randn(rows, k, generator=draw, device=like.device).to(like.dtype)
    product = x.float() @ numbers.T
    return trial_of(ending, x, product, tile, lambda epilogue: launch(x, weight, epilogue, tile))


@functools.cache
def _decoding(element: str, bits: int) -> tuple[str, str]:
    """The instructions and their operands, which leave the offset."""
    return instructions(element, bits, -offset_of(element, bits))


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
    launch = Launch.of(x, len(weight), epilogue, tile, bias)
    rows, k = launch.rows, weight.in_features
    element = str(weight.dtype).removeprefix("torch.")
    asm, operands = _decoding(element, weight.bits)
    width, blocks = weight.group_size, _COLS.value // (4 * weight.group_size)
    boxes = Boxes.of(launch, epilogue, len(weight), tile.block_n)
    # Groups of all rows, so that those of a step are whole tiles in shared memory.
    grouped = rows.as_strided((k // width, len(rows), width), (width, rows.stride(0), 1))
    swizzle = gl.NVMMASharedLayout(2 * width, 16, rank=3)

    def given(scales: Tensor) -> Any:
        if weight.headers is None:
            return boxes.across(scales, _COLS.value // width)
        return scales.view(torch.int32)

    _linear_kernel[launch.grid](
        boxes.along(weight.words, weight.words.shape[2], blocks),
        None if weight.high is None else boxes.along(weight.high, weight.high.shape[2], blocks),
        TensorDescriptor.from_tensor(
            grouped, [_COLS.value // width, launch.block_m, width], swizzle
        ),
        given(weight.scales),
        None if weight.minima is None else given(weight.minima),
        weight.headers,
        *launch.given,
        k // _COLS.value,
        blocks,
        ASM=asm,
        OPERANDS=operands,
        EXCESS=offset_of(element, weight.bits) + weight.middle,
        BITS=weight.bits,
        BLOCK_N=tile.block_n,
        STAGES=tile.num_stages,
        AHEAD=tile.ahead,
        **launch.constants,
        **pdl_options(rows.device),
    )
    out: Tensor = epilogue.out
    return out
