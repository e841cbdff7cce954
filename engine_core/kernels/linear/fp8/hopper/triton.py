"""Products of quantised rows by 8-bit floats on Hopper, in Gluon, Triton's language below the tile.

The weight's rows are the rows of the matrix units' products and x's rows are their columns, which
come in steps of 32 here and not of 64 or 128: less time is lost on rows that are not there. The
tensor memory accelerator brings tiles to shared memory some steps ahead, those of the weight before
the kernel ahead has ended. K may be split between programs, whose sums are left to what follows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
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
    tma_store,
    wait,
)
from engine_core.kernels.launch.triton import pdl_options
from engine_core.kernels.linear.tiles import ProductTile, product_rows
from engine_core.kernels.row_codes import FP8, paired, reference_quantize_rows

_FAMILY = Family("8-bit linears", "Steps of 9 to 192 rows take up to a tenth longer")

# A step of K, which is the 128 bytes of the widest swizzle.
_STEP = gl.constexpr(128)


@gluon.jit
def _multiplied(acc, weight, x, stage, use_acc):
    """Begin to add the products of a step."""
    return warpgroup_mma(
        weight.index(stage), x.index(stage).permute((1, 0)), acc, use_acc=use_acc, is_async=True
    )


@gluon.jit
def _scaled(acc, row_scales_ptr, col_scales_ptr, bias_ptr, first_row, col, num_rows, N):
    """``acc [TILE, ROWS]`` times the scales of both, and the bias."""
    ACC: gl.constexpr = acc.type.layout
    rows = first_row + gl.arange(0, acc.shape[1], gl.SliceLayout(0, ACC))
    cols = col + gl.arange(0, acc.shape[0], gl.SliceLayout(1, ACC))
    row_scales = gl.load(row_scales_ptr + rows, mask=rows < num_rows, other=0.0)
    col_scales = gl.load(col_scales_ptr + cols, mask=cols < N, other=0.0)
    acc *= gl.expand_dims(row_scales, 0) * gl.expand_dims(col_scales, 1)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)
        acc += gl.expand_dims(bias, 1)
    return acc


@gluon.jit
def _store_part(out_ptr, acc, first_row, col, num_rows, N):
    """Store float32 sums; threads have 8 neighbouring columns of a row, which is 32 bytes."""
    ACC: gl.constexpr = acc.type.layout
    rows = first_row + gl.arange(0, acc.shape[1], gl.SliceLayout(0, ACC))
    cols = col + gl.arange(0, acc.shape[0], gl.SliceLayout(1, ACC))
    offsets = gl.expand_dims(rows, 0) * N + gl.expand_dims(cols, 1)
    mask = gl.expand_dims(rows < num_rows, 0) & gl.expand_dims(cols < N, 1)
    gl.store(out_ptr + offsets, acc, mask=mask)


@gluon.jit(do_not_specialize=["num_rows", "N", "steps", "part_steps"])
def _product_kernel(
    out_desc,
    more_out_desc,
    parts_ptr,
    x_desc,
    more_x_desc,
    weight_desc,
    row_scales_ptr,
    col_scales_ptr,
    bias_ptr,
    num_rows,
    N,
    steps,
    part_steps,
    COLS: gl.constexpr,
    ROWS: gl.constexpr,
    MORE_ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """COLS columns of ROWS and MORE_ROWS rows, over ``part_steps`` steps of K.

    The rows are two products, for a product has a power of 2 of columns here. The result goes to
    ``out_desc`` and ``more_out_desc``, or float32 sums to ``parts_ptr [parts, num_rows, N]``.
    """
    launch_dependents(PDL)
    WARPS: gl.constexpr = gl.num_warps()
    ELEMENT: gl.constexpr = weight_desc.dtype
    BYTES: gl.constexpr = (COLS + ROWS + MORE_ROWS) * _STEP
    swizzle: gl.constexpr = weight_desc.layout
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 32])
    col = gl.program_id(0) * COLS
    row = gl.program_id(2) * (ROWS + MORE_ROWS)
    low = gl.program_id(1) * part_steps
    high = gl.minimum(low + part_steps, steps)

    weight = gl.allocate_shared_memory(ELEMENT, [STAGES, COLS, _STEP], swizzle)
    x = gl.allocate_shared_memory(ELEMENT, [STAGES, ROWS, _STEP], swizzle)
    more_x = x
    if MORE_ROWS:
        more_x = gl.allocate_shared_memory(ELEMENT, [STAGES, MORE_ROWS, _STEP], swizzle)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    sync_threads()
    # The weight is older than all kernels: its first tiles do not wait for x.
    for stage in gl.static_range(STAGES):
        there = low + stage < high
        barrier = full.index(stage)
        mbarrier.expect(barrier, BYTES, pred=there)
        k = (low + stage) * _STEP
        tma_load(weight_desc, [col, k], barrier, weight.index(stage), pred=there)
    wait(PDL)
    for stage in gl.static_range(STAGES):
        there = low + stage < high
        barrier = full.index(stage)
        k = (low + stage) * _STEP
        tma_load(x_desc, [row, k], barrier, x.index(stage), pred=there)
        if MORE_ROWS:
            tma_load(more_x_desc, [row + ROWS, k], barrier, more_x.index(stage), pred=there)
    acc = gl.zeros([COLS, ROWS], gl.float32, ACC)
    more = acc
    if MORE_ROWS:
        MORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, MORE_ROWS, 32])
        more = gl.zeros([COLS, MORE_ROWS], gl.float32, MORE)
    stage = 0
    phase = 0
    for step in range(low, high):
        mbarrier.wait(full.index(stage), phase)
        # The products of the step before are waited for when these are begun; then its tiles may be
        # overwritten.
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
        acc = _multiplied(acc, weight, x, stage, True)
        if MORE_ROWS:
            more = _multiplied(more, weight, more_x, stage, True)
            acc, more = warpgroup_mma_wait(2, deps=(acc, more))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        sync_threads()
        there = (step > low) & (step + STAGES - 1 < high)
        k = (step + STAGES - 1) * _STEP
        barrier = full.index(before)
        mbarrier.expect(barrier, BYTES, pred=there)
        tma_load(weight_desc, [col, k], barrier, weight.index(before), pred=there)
        tma_load(x_desc, [row, k], barrier, x.index(before), pred=there)
        if MORE_ROWS:
            tma_load(more_x_desc, [row + ROWS, k], barrier, more_x.index(before), pred=there)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if MORE_ROWS:
        acc, more = warpgroup_mma_wait(0, deps=(acc, more))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    if parts_ptr is not None:
        part = parts_ptr + gl.program_id(1).to(gl.int64) * num_rows * N
        _store_part(part, acc, row, col, num_rows, N)
        if MORE_ROWS:
            _store_part(part, more, row + ROWS, col, num_rows, N)
    else:
        if col_scales_ptr is not None:
            scales = (row_scales_ptr, col_scales_ptr, bias_ptr)
            acc = _scaled(acc, *scales, row, col, num_rows, N)
            if MORE_ROWS:
                more = _scaled(more, *scales, row + ROWS, col, num_rows, N)
        # No tile is read any more: the results take the place of the weight's and of x's.
        sync_threads()
        out = reinterpret(weight, out_desc.dtype, [1, ROWS, COLS], out_desc.layout).index(0)
        out.store(acc.to(out_desc.dtype).permute((1, 0)))
        if MORE_ROWS:
            more_out = reinterpret(x, out_desc.dtype, [1, MORE_ROWS, COLS], out_desc.layout)
            more_out.index(0).store(more.to(out_desc.dtype).permute((1, 0)))
        fence_async_shared()
        sync_threads()
        tma_store(out_desc, [row, col], out)
        if MORE_ROWS:
            tma_store(more_out_desc, [row + ROWS, col], more_out.index(0))
        tma.store_wait(0)


class _Operands(NamedTuple):
    """Rows of codes and the scale of each, and a weight of codes and the scale of each column."""

    codes: Tensor
    scales: Tensor
    weight: Tensor
    weight_scales: Tensor


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether this module takes codes ``x [M, K]`` and ``weight [N, K]``."""
    return (
        x.dtype == weight.dtype == FP8
        and 0 < len(x) <= 256
        and weight.shape[0] % 8 == 0
        and all(
            tensor.data_ptr() % 16 == 0 and tensor.stride(0) % 16 == 0 and tensor.stride(1) == 1
            for tensor in (x, weight)
        )
    )


def is_trusted(device: torch.device, dtype: torch.dtype, rows: int, tile: ProductTile) -> bool:
    """Whether a kernel may be used for such rows; it may be tried for that."""
    kind = (dtype, product_rows(rows), tile)
    return _FAMILY.allows(device, kind, lambda: _trial(device, dtype, rows, tile))


def _trial(device: torch.device, dtype: torch.dtype, rows: int, tile: ProductTile) -> Trial:
    """More steps than are in flight, columns that are not a whole of tiles, and a bias."""
    draw = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device)

    k = (tile.stages + 3) * tile.parts * _STEP.value
    numbers = normal(rows, k), normal(tile.cols + 48, k) / k**0.5
    (x, scales), (weight, weight_scales) = map(reference_quantize_rows, numbers)
    given = _Operands(paired(x), scales, paired(weight), weight_scales)
    bias = normal(len(weight)).to(dtype)
    sums = (x.float() @ weight.float().T) * scales[:, None] * weight_scales
    if tile.parts == 1:
        return Trial(lambda: product(*given, bias, tile, dtype), sums + bias.float())

    def run() -> Tensor:
        found = sums_of_parts(given.codes, given.weight, tile).sum(0)
        return (found * scales[:, None] * weight_scales).to(dtype)

    return Trial(run, sums)


def product(
    x: Tensor,
    scales: Tensor | None,
    weight: Tensor,
    weight_scales: Tensor | None,
    bias: Tensor | None,
    tile: ProductTile,
    dtype: torch.dtype,
) -> Tensor:
    """``(x [M, K] * scales[:, None]) @ (weight [N, K] * weight_scales[:, None]).T + bias``.

    Rounded to 16 bits once. Without scales there is no bias. What :func:`fits` asks holds, and K is
    not split. Nothing that is still running writes the weight: it is read before the kernels before
    are waited for.
    """
    out = torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
    _launch(x, scales, weight, weight_scales, bias, tile, out, None)
    return out


def sums_of_parts(x: Tensor, weight: Tensor, tile: ProductTile) -> Tensor:
    """``x [M, K] @ weight [N, K].T`` over each of ``tile.parts`` parts of K.

    Float32 ``[parts, M, N]``, to be added up; else as :func:`product`.
    """
    sums = torch.empty(tile.parts, len(x), len(weight), dtype=torch.float32, device=x.device)
    _launch(x, None, weight, None, None, tile, None, sums)
    return sums


def _launch(
    x: Tensor,
    scales: Tensor | None,
    weight: Tensor,
    weight_scales: Tensor | None,
    bias: Tensor | None,
    tile: ProductTile,
    out: Tensor | None,
    sums: Tensor | None,
) -> None:
    rows, k = x.shape
    n = len(weight)
    first, more = product_rows(rows)
    steps = triton.cdiv(k, _STEP.value)
    codes = gl.NVMMASharedLayout(128, 8, rank=2)
    numbers = gl.NVMMASharedLayout(128, 16, rank=2)
    blocks = (first, more or first)
    outs: list[TensorDescriptor | None] = [None, None]
    if out is not None:
        outs = [TensorDescriptor.from_tensor(out, [size, tile.cols], numbers) for size in blocks]
    _product_kernel[(triton.cdiv(n, tile.cols), tile.parts, triton.cdiv(rows, first + more))](
        *outs,
        sums,
        *(TensorDescriptor.from_tensor(x, [size, _STEP.value], codes) for size in blocks),
        TensorDescriptor.from_tensor(weight, [tile.cols, _STEP.value], codes),
        scales,
        weight_scales,
        bias,
        rows,
        n,
        steps,
        triton.cdiv(steps, tile.parts),
        COLS=tile.cols,
        ROWS=first,
        MORE_ROWS=more,
        STAGES=tile.stages,
        num_warps=tile.num_warps,
        **pdl_options(x.device),
    )
