"""Linears of few rows by 4-bit codes on Hopper, in Gluon, Triton's language below the tile.

The tensor memory accelerator brings tiles of codes and of x to shared memory, some steps ahead, the
first codes before the kernel ahead has ended. A thread reads from there, in the order in which they
lie, the codes of just those numbers that the matrix units want of it: they become numbers in
registers, 11 instructions for 8, and never move to another thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
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
from engine_core.kernels.linear.boxes.hopper.triton import barriers, rows_layout
from engine_core.kernels.linear.epilogues.hopper.triton import (
    Launch,
    conclude,
    output,
    rows_of_program,
    takes_rows,
    trial_of,
)
from engine_core.kernels.linear.groups import BLOCK, GroupWeight
from engine_core.kernels.linear.readers.triton import instructions, offset_of
from engine_core.kernels.linear.reference import DeferredRMSNorm
from engine_core.kernels.linear.tiles import Tile

_FAMILY = Family("4-bit linears", "These take up to half as long again for up to 64 rows")

# Columns of a block of codes, and words of the two blocks of a tile in shared memory: 128 bytes,
# the widest swizzle.
_COLS = gl.constexpr(BLOCK)
_WORDS = gl.constexpr(32 * 2)
# Rows of a program with which a block's codes become numbers while the products of the one before
# are made. ms of a step of Llama 3 8B on an H200, without and with that: 1 row 2.010, 2.114; 16
# rows 2.832, 2.711; 32 rows 3.617, 3.601. More rows leave too few registers.
_LEAST_AHEAD = gl.constexpr(16)
_MOST_AHEAD = gl.constexpr(32)


@gluon.jit
def _load_codes(
    desc, boxes, barrier, stage, row, apart, step, BOXES: gl.constexpr, PAIRS: gl.constexpr, pred
):
    """Begin to load a step's words of BOXES of rows, ``apart`` from one another."""
    for pair in gl.static_range(PAIRS):
        for box in gl.static_range(BOXES):
            place = boxes.index((stage * PAIRS + pair) * BOXES + box)
            words = (step * PAIRS + pair) * _WORDS
            tma_load(desc, [row + box * apart, words], barrier, place, pred=pred)


@gluon.jit
def _load_x(desc, x, barrier, stage, row, step, PAIRS: gl.constexpr, pred):
    for block in gl.static_range(2 * PAIRS):
        place = x.index(stage * 2 * PAIRS + block)
        tma_load(desc, [row, (step * 2 * PAIRS + block) * _COLS], barrier, place, pred=pred)


@gluon.jit
def _groups_of(values, step, rows, TOTAL, GROUPS, SPAN: gl.constexpr, PAIRS: gl.constexpr):
    """Values of rows of the groups of a step's blocks."""
    first = step * (2 * PAIRS)
    found = (gl.load(values + (gl.minimum(first // SPAN, GROUPS - 1) * TOTAL + rows)),)
    for block in gl.static_range(1, 2 * PAIRS):
        group = gl.minimum((first + block) // SPAN, GROUPS - 1)
        found += (gl.load(values + (group * TOTAL + rows)),)  # type: ignore[assignment]
    return found


@gluon.jit
def _begin_products(
    words, zeros, values, ACC: gl.constexpr, ZERO_BITS: gl.constexpr, ASM: gl.constexpr,
    OPERANDS: gl.constexpr,
):  # fmt: skip
    """Begin to multiply a block's codes ``[rows, 32]`` and ``values [128, BLOCK_M]``.

    The products, and the numbers in registers, which are read until they are there.
    """
    ROWS: gl.constexpr = words.shape[0]
    COLS: gl.constexpr = values.shape[1]
    WORDS: gl.constexpr = words.type.layout
    ELEMENT: gl.constexpr = values.dtype
    given = (words,)
    if zeros is not None:
        # A unit is the last bit of these numbers' fractions.
        added = gl.convert_layout(zeros.to(gl.int16) + ZERO_BITS, gl.SliceLayout(1, WORDS))
        added, _same = gl.broadcast(gl.expand_dims(added, 1), words)
        given = (words, added, added, added, added)  # type: ignore[assignment]
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
    # The last dimension says which two, the one before which of them.
    fours = gl.join(gl.join(p0, p1), gl.join(p2, p3))
    numbers = fours.permute((0, 3, 2, 1)).reshape([ROWS, _COLS])
    numbers = gl.convert_layout(numbers, gl.DotOperandLayout(0, ACC, 2))
    products = gl.zeros([ROWS, COLS], gl.float32, ACC)
    return warpgroup_mma(numbers, values, products, use_acc=False, is_async=True), numbers


@gluon.jit
def _added(total, begun, scales, PENDING: gl.constexpr):
    """The products of :func:`_begin_products`, scaled, added; PENDING were begun since."""
    products, _numbers = warpgroup_mma_wait(PENDING, deps=begun)
    return total + products * gl.expand_dims(scales.to(gl.float32), 1)


@gluon.jit
def _halves(words):
    """The words of a step's two blocks."""
    return words.reshape([words.shape[0], 2, 32]).permute((0, 2, 1)).split()


@gluon.jit(do_not_specialize=["num_rows", "K", "GROUPS"])
def _linear_kernel(
    codes_desc,
    x_desc,
    scales_ptr,
    zeros_ptr,
    epilogue,
    bias_ptr,
    squares_ptr,
    partial_ptr,
    arrivals_ptr,
    eps,
    num_rows,
    N,
    K,
    GROUPS,
    ASM: gl.constexpr,
    OPERANDS: gl.constexpr,
    ZERO_BITS: gl.constexpr,
    SPAN: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    PAIRS: gl.constexpr,
    KIND: gl.constexpr,
    SQUARES: gl.constexpr,
    PDL: gl.constexpr,
):
    """BLOCK_N columns of BLOCK_M rows, over one of SPLITS runs of K, which is a whole of steps.

    A step is PAIRS of blocks of 128 columns. KIND is that of the epilogue: "activated", "added" or
    "stored". All else is as of :func:`engine_core.kernels.linear.triton._linear_kernel`.
    """
    if epilogue.LATE == 0:
        launch_dependents(PDL)
    GATED: gl.constexpr = epilogue.GATED
    HEAD_DIM: gl.constexpr = epilogue.HEAD_DIM if KIND == "stored" else 0
    # Rows of a tile that are not neighbours in the weight come in two boxes.
    BOXES: gl.constexpr = 2 if GATED or HEAD_DIM else 1
    ELEMENT: gl.constexpr = x_desc.dtype
    WARPS: gl.constexpr = gl.num_warps()
    PARTS: gl.constexpr = 2 if GATED else 1
    BYTES: gl.constexpr = PAIRS * (PARTS * BLOCK_N * 128 + 2 * BLOCK_M * _COLS * 2)
    AHEAD: gl.constexpr = BLOCK_M >= _LEAST_AHEAD and BLOCK_M <= _MOST_AHEAD
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    # A step's words, those of the numbers that a thread multiplies.
    WORDS: gl.constexpr = rows_layout(BLOCK_N, _WORDS, WARPS, 2, 4)
    tile, split, block = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    first_row = block * BLOCK_M
    steps = gl.cdiv(K, _COLS * 2 * PAIRS)
    low = split * gl.cdiv(steps, SPLITS)
    high = gl.minimum(low + gl.cdiv(steps, SPLITS), steps)

    codes = gl.allocate_shared_memory(
        gl.int16, [STAGES * PAIRS * PARTS, BLOCK_N, _WORDS], codes_desc.layout
    )
    boxes = codes
    if HEAD_DIM:
        boxes = reinterpret(
            codes, gl.int16, [STAGES * PAIRS * 2, BLOCK_N // 2, _WORDS], codes_desc.layout
        )
    x = gl.allocate_shared_memory(ELEMENT, [STAGES * PAIRS * 2, BLOCK_M, _COLS], x_desc.layout)
    full = barriers(STAGES)
    col = output(tile, 0, BLOCK_N, HEAD_DIM)
    apart = HEAD_DIM // 2 if HEAD_DIM else N
    # The weight is older than all kernels: its first tiles do not wait for x.
    for stage in gl.static_range(STAGES):
        there = low + stage < high
        mbarrier.expect(full.index(stage), BYTES, pred=there)
        _load_codes(
            codes_desc, boxes, full.index(stage), stage, col, apart, low + stage, BOXES, PAIRS,
            there,
        )  # fmt: skip
    # Rows beyond the last one read it once more.
    outs = output(tile, gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC)), BLOCK_N, HEAD_DIM)
    rows = gl.minimum(outs, N - 1)
    word_rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, WORDS))
    word_rows = gl.minimum(output(tile, word_rows, BLOCK_N, HEAD_DIM), N - 1)
    scales = _groups_of(scales_ptr, low, rows, N * PARTS, GROUPS, SPAN, PAIRS)
    zeros = scales
    up_scales = scales
    if zeros_ptr is not None:
        zeros = _groups_of(zeros_ptr, low, word_rows, N * PARTS, GROUPS, SPAN, PAIRS)
    up_zeros = zeros
    if GATED:
        up_scales = _groups_of(scales_ptr, low, rows + N, N * PARTS, GROUPS, SPAN, PAIRS)
        if zeros_ptr is not None:
            up_zeros = _groups_of(zeros_ptr, low, word_rows + N, N * PARTS, GROUPS, SPAN, PAIRS)
    wait(PDL)
    if epilogue.LATE == 1:
        launch_dependents(PDL)
    for stage in gl.static_range(STAGES):
        there = low + stage < high
        _load_x(x_desc, x, full.index(stage), stage, first_row, low + stage, PAIRS, there)
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    up = acc
    stage = 0
    phase = 0
    for step in range(low, high):
        barrier = full.index(stage)
        # Those of the next step are asked for a step ahead.
        next_scales = _groups_of(scales_ptr, step + 1, rows, N * PARTS, GROUPS, SPAN, PAIRS)
        next_zeros = next_scales
        next_up_scales = next_scales
        if zeros_ptr is not None:
            next_zeros = _groups_of(zeros_ptr, step + 1, word_rows, N * PARTS, GROUPS, SPAN, PAIRS)
        next_up_zeros = next_zeros
        if GATED:
            next_up_scales = _groups_of(
                scales_ptr, step + 1, rows + N, N * PARTS, GROUPS, SPAN, PAIRS
            )
            if zeros_ptr is not None:
                next_up_zeros = _groups_of(
                    zeros_ptr, step + 1, word_rows + N, N * PARTS, GROUPS, SPAN, PAIRS
                )
        mbarrier.wait(barrier, phase)
        before = ()
        its_scales = scales[0]
        for pair in gl.static_range(PAIRS):
            place = (stage * PAIRS + pair) * PARTS
            words = _halves(codes.index(place).load(WORDS))
            up_words = words
            if GATED:
                up_words = _halves(codes.index(place + 1).load(WORDS))
            for half in gl.static_range(2):
                values = x.index((stage * PAIRS + pair) * 2 + half).permute((1, 0))
                for part in gl.static_range(PARTS):
                    if part:
                        zero = up_zeros[2 * pair + half] if zeros_ptr is not None else None
                        begun = _begin_products(
                            up_words[half], zero, values, ACC, ZERO_BITS, ASM, OPERANDS
                        )
                    else:
                        zero = zeros[2 * pair + half] if zeros_ptr is not None else None
                        begun = _begin_products(
                            words[half], zero, values, ACC, ZERO_BITS, ASM, OPERANDS
                        )
                    if AHEAD and pair + half + part:
                        if GATED and part == 0:
                            up = _added(up, before, its_scales, 1)
                        else:
                            acc = _added(acc, before, its_scales, 1)
                    before = begun
                    its_scales = up_scales[2 * pair + half] if part else scales[2 * pair + half]
                    if not AHEAD:
                        if part:
                            up = _added(up, before, its_scales, 0)
                        else:
                            acc = _added(acc, before, its_scales, 0)
        if AHEAD and GATED:
            up = _added(up, before, its_scales, 0)
        elif AHEAD:
            acc = _added(acc, before, its_scales, 0)
        scales, zeros = next_scales, next_zeros
        up_scales, up_zeros = next_up_scales, next_up_zeros
        sync_threads()
        more = step + STAGES < high
        mbarrier.expect(barrier, BYTES, pred=more)
        _load_codes(
            codes_desc, boxes, barrier, stage, col, apart, step + STAGES, BOXES, PAIRS, more
        )
        _load_x(x_desc, x, barrier, stage, first_row, step + STAGES, PAIRS, more)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    if epilogue.LATE == 2:
        launch_dependents(PDL)
    conclude(
        epilogue, acc, up, bias_ptr, squares_ptr, partial_ptr, arrivals_ptr, eps, tile, split,
        block, num_rows, N, K, SPLITS, BLOCK_M, BLOCK_N, KIND, SQUARES, HEAD_DIM,
    )  # fmt: skip


def fits(x: Tensor, weight: GroupWeight) -> bool:
    """Whether :func:`linear` takes tensors of these shapes and places."""
    return (
        takes_rows(x)
        and weight.dtype == x.dtype
        and weight.bits == 4
        and weight.group_size % BLOCK == 0
        and weight.words.shape[2] == _WORDS.value // 2
        and weight.minima is None
        and weight.headers is None
        and weight.words.data_ptr() % 16 == 0
        and weight.words.is_contiguous()
        and weight.words.stride(0) % 8 == 0
    )


def is_trusted(like: Tensor, weight: GroupWeight, tile: Tile, ending: str) -> bool:
    """Whether :func:`linear` may be used for such rows; it may be tried for that.

    ``ending`` is what follows the products: "activated", "gated", "added" or "stored".
    """
    block_m = rows_of_program(tile, like.numel() // like.shape[-1])
    form = (like.dtype, weight.scales.dtype, weight.zeros is None, weight.group_size)
    kind = (*form, tile, block_m, ending)
    return _FAMILY.allows(
        like.device, kind, lambda: trial_of_codes(like, weight, tile, block_m - 3, ending, linear)
    )


def trial_of_codes(
    like: Tensor,
    of: GroupWeight,
    tile: Tile,
    rows: int,
    ending: str,
    linear: Callable[..., Tensor],
) -> Trial:
    """So many rows, a few less than a program has, by a weight of such a form.

    ``linear`` is a kernel's, which is given x, the weight, an epilogue and the tile.
    """
    draw = torch.Generator(like.device).manual_seed(0)
    n = 8 * tile.block_n
    # Of whole groups, two at least; a split has more steps than are in flight.
    group = max(tile.block_k, of.group_size)
    k = max(2, -(-tile.splits * (tile.num_stages + 1) * tile.block_k // group)) * group
    groups = k // of.group_size if of.group_size else 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=like.device).to(like.dtype)

    def codes(*shape: int) -> Tensor:
        most = 2**of.bits
        return torch.randint(most, shape, generator=draw, device=like.device, dtype=torch.uint8)

    def spread(values: Tensor) -> Tensor:
        return values.float().repeat_interleave(k // groups, 1)

    given, zeros = codes(n, k), codes(n, groups)
    scales = ((normal(n, groups).float() / 8 + 1) / (2**of.bits * k**0.5)).to(of.scales.dtype)
    weight = GroupWeight.of_codes(given, scales, of.bits, like.dtype, centred=of.centred)
    numbers = (given.view(torch.int8) if of.bits == 8 else given).float() - of.middle
    if of.zeros is not None:
        held = zeros.view(torch.int8).T.reshape(weight.scales.shape).contiguous()
        weight, numbers = replace(weight, zeros=held), given.float() - spread(zeros)
    x = normal(rows, k)
    product = x.float() @ (numbers * spread(scales)).T
    return trial_of(ending, x, product, tile, lambda epilogue: linear(x, weight, epilogue, tile))


@functools.cache
def _decoding(element: str, zero: float | None) -> tuple[str, str, int]:
    """The instructions, their operands, and the bits of what zeros are taken from."""
    offset = torch.tensor(-offset_of(element, 4)).to(getattr(torch, element))
    return *instructions(element, 4, zero), int(offset.view(torch.int16))


def linear(
    x: Tensor | DeferredRMSNorm,
    weight: GroupWeight,
    epilogue: Any,
    tile: Tile,
    bias: Tensor | None = None,
) -> Tensor:
    """As :func:`engine_core.kernels.linear.triton.linear`, by a weight of 4 bits.

    What :func:`fits` asks of x and the weight holds, and there are rows. Nothing that is still
    running writes the weight: it is read before the kernels before are waited for.
    """
    launch = Launch.of(x, len(weight), epilogue, tile, bias)
    element = str(weight.dtype).removeprefix("torch.")
    asm, operands, zero_bits = _decoding(
        element, float(weight.middle) if weight.zeros is None else None
    )
    box = tile.block_n // 2 if launch.kind == "stored" else tile.block_n
    swizzle = gl.NVMMASharedLayout(128, 16, rank=2)
    words = weight.words.view(weight.shape[0], -1)
    _linear_kernel[launch.grid](
        TensorDescriptor.from_tensor(words, [box, _WORDS.value], swizzle),
        TensorDescriptor.from_tensor(launch.rows, [launch.block_m, _COLS.value], swizzle),
        weight.scales,
        weight.zeros,
        *launch.given,
        weight.in_features,
        weight.scales.shape[0] if weight.group_size else 1,
        ASM=asm,
        OPERANDS=operands,
        ZERO_BITS=zero_bits,
        SPAN=weight.group_size // BLOCK or 1 << 30,
        BLOCK_N=tile.block_n,
        STAGES=tile.num_stages,
        PAIRS=tile.block_k // (2 * BLOCK),
        **launch.constants,
        **pdl_options(launch.rows.device),
    )
    out: Tensor = epilogue.out
    return out
