"""Linears over parts of K on Hopper, in Gluon, which is Triton's language below the tile.

What cuBLAS makes of parts cannot be launched before the kernel ahead of it ends, nor can the norm
that adds them up be launched before they end. Here one warp brings tiles to shared memory with the
tensor memory accelerator, those of the weight before the kernel ahead has ended, and two warp
groups multiply, each 64 rows. A program has one tile and one part of K.
"""

from __future__ import annotations

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
from engine_core.kernels.launch.hopper.triton import launch_dependents, tma_load, wait
from engine_core.kernels.launch.triton import pdl_options
from engine_core.kernels.linear.tiles import PartsTile

_FAMILY = Family("parts of linears", "Steps of 65 to 256 rows take up to a twentieth longer")

# Rows of a warp group, and a step of K, which is the 128 bytes of the widest swizzle.
_ROWS = gl.constexpr(64)
_GROUPS = gl.constexpr(2)
_STEP = gl.constexpr(64)
# Bytes of shared memory of a program, but for its barriers; steps in flight at most.
_SHARED, _MOST_STAGES = 226 * 1024, 12


@gluon.jit
def _place(row_tiles, col_tiles, parts, steps, COLS: gl.constexpr):
    """A program's first row and column, its part, and where its steps begin and end.

    Programs of the same tile of the weight are neighbours.
    """
    program = gl.program_id(0)
    row = program % row_tiles
    col = program // row_tiles % col_tiles
    part = program // row_tiles // col_tiles
    low, high = part * steps // parts, (part + 1) * steps // parts
    return row * (_GROUPS * _ROWS), col * COLS, part, low, high


@gluon.jit
def _load(
    x_desc,
    weight_desc,
    x_smem,
    weight_smem,
    full,
    empty,
    row_tiles,
    col_tiles,
    parts,
    steps,
    COLS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The warp that loads."""
    STAGES: gl.constexpr = weight_smem.shape[0]
    BYTES: gl.constexpr = (_GROUPS * _ROWS + COLS) * _STEP * 2
    row, col, _, low, high = _place(row_tiles, col_tiles, parts, steps, COLS)
    count = high - low
    # The weight is older than all kernels: its first tiles do not wait for x.
    preloaded = gl.minimum(count, STAGES)
    for stage in range(preloaded):
        mbarrier.expect(full.index(stage), BYTES)
        k = (low + stage) * _STEP
        tma_load(weight_desc, [col, k], full.index(stage), weight_smem.index(stage))
    wait(PDL)
    for loaded in range(count):
        stage = loaded % STAGES
        barrier = full.index(stage)
        k = (low + loaded) * _STEP
        if loaded >= preloaded:
            mbarrier.wait(empty.index(stage), (loaded // STAGES & 1) ^ 1)
            mbarrier.expect(barrier, BYTES)
            tma_load(weight_desc, [col, k], barrier, weight_smem.index(stage))
        tma_load(x_desc, [row, k], barrier, x_smem.index(stage))


@gluon.jit
def _multiply(
    GROUP: gl.constexpr,
    parts_ptr,
    num_rows,
    N,
    x_smem,
    weight_smem,
    full,
    empty,
    row_tiles,
    col_tiles,
    parts,
    steps,
    COLS: gl.constexpr,
    PDL: gl.constexpr,
):
    """A warp group that multiplies 64 of a tile's rows."""
    STAGES: gl.constexpr = weight_smem.shape[0]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    row, col, part, low, high = _place(row_tiles, col_tiles, parts, steps, COLS)
    count = high - low
    acc = gl.zeros([_ROWS, COLS], gl.float32, ACC)
    for used in range(count):
        stage = used % STAGES
        mbarrier.wait(full.index(stage), used // STAGES & 1)
        x = x_smem.index(stage).slice(GROUP * _ROWS, _ROWS)
        acc = warpgroup_mma(x, weight_smem.index(stage).permute((1, 0)), acc, is_async=True)
        # The next product is begun before this one is complete.
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((used + STAGES - 1) % STAGES), pred=used > 0)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    # What the kernel ahead reads may be what is written here.
    wait(PDL)
    rows = row + GROUP * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, ACC))
    cols = col + gl.arange(0, COLS, gl.SliceLayout(0, ACC))
    ptrs = parts_ptr + part.to(gl.int64) * num_rows * N
    ptrs += gl.expand_dims(rows, 1) * N + gl.expand_dims(cols, 0)
    mask = gl.expand_dims(rows < num_rows, 1) & gl.expand_dims(cols < N, 0)
    gl.store(ptrs, acc, mask=mask)


@gluon.jit(do_not_specialize=["num_rows", "row_tiles", "col_tiles", "parts", "steps"])
def _parts_kernel(
    parts_ptr,
    x_desc,
    weight_desc,
    num_rows,
    N,
    row_tiles,
    col_tiles,
    parts,
    steps,
    COLS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Tiles of 128 rows by COLS of N columns, over a part of K each.

    ``parts_ptr`` is ``[parts, num_rows, N]``.
    """
    launch_dependents(PDL)
    element: gl.constexpr = x_desc.dtype
    swizzle: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    single: gl.constexpr = mbarrier.MBarrierLayout()
    x_smem = gl.allocate_shared_memory(element, [STAGES, _GROUPS * _ROWS, _STEP], swizzle)
    weight_smem = gl.allocate_shared_memory(element, [STAGES, COLS, _STEP], swizzle)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], single)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], single)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=_GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                0, parts_ptr, num_rows, N, x_smem, weight_smem, full, empty, row_tiles, col_tiles,
                parts, steps, COLS, PDL,
            )),
            (_multiply, (
                1, parts_ptr, num_rows, N, x_smem, weight_smem, full, empty, row_tiles, col_tiles,
                parts, steps, COLS, PDL,
            )),
            (_load, (
                x_desc, weight_desc, x_smem, weight_smem, full, empty, row_tiles, col_tiles, parts,
                steps, COLS, PDL,
            )),
        ],
        [4, 1],
        [152, 40],
    )  # fmt: skip


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether this module takes tensors of these shapes and places."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype == x.dtype
        and weight.shape[0] % 8 == 0
        and all(
            tensor.data_ptr() % 16 == 0 and tensor.stride(0) % 8 == 0 and tensor.stride(1) == 1
            for tensor in (x, weight)
        )
    )


def is_trusted(x: Tensor, tile: PartsTile) -> bool:
    """Whether a kernel may be used for such rows; it may be tried for that."""
    return _FAMILY.allows(x.device, (x.dtype, tile.cols), lambda: _trial(x, tile))


def _trial(like: Tensor, tile: PartsTile) -> Trial:
    """More steps than are in flight, parts of several lengths, and rows that are no whole tiles."""
    draw = torch.Generator(like.device).manual_seed(0)
    k = 2 * _STEP.value * _MOST_STAGES + 3 * _STEP.value
    x, weight = (
        torch.randn(size, k, generator=draw, device=like.device).to(like.dtype)
        for size in (200, 2 * tile.cols + 8)
    )
    weight /= k**0.5
    tile = tile._replace(parts=2)

    def run() -> Tensor:
        return partial_sums(x, weight, tile).sum(0).to(like.dtype)

    return Trial(run, x.float() @ weight.float().T)


def partial_sums(x: Tensor, weight: Tensor, tile: PartsTile) -> Tensor:
    """``x [M, K]`` by ``weight [N, K]`` over each part of K: float32 ``[parts, M, N]``.

    What :func:`fits` asks holds, and there are rows. Nothing that is still running writes the
    weight: it is read before the kernels before are waited for.
    """
    rows, k = x.shape
    n = len(weight)
    sums = torch.empty(tile.parts, rows, n, dtype=torch.float32, device=x.device)
    of_tile = _GROUPS.value * _ROWS.value
    row_tiles, col_tiles = triton.cdiv(rows, of_tile), triton.cdiv(n, tile.cols)
    steps = triton.cdiv(k, _STEP.value)
    of_step = 2 * _STEP.value * (of_tile + tile.cols)
    stages = min(_MOST_STAGES, _SHARED // of_step)
    swizzle = gl.NVMMASharedLayout(128, 16, rank=2)
    _parts_kernel[(row_tiles * col_tiles * tile.parts,)](
        sums,
        TensorDescriptor.from_tensor(x, [of_tile, _STEP.value], swizzle),
        TensorDescriptor.from_tensor(weight, [tile.cols, _STEP.value], swizzle),
        rows,
        n,
        row_tiles,
        col_tiles,
        tile.parts,
        steps,
        COLS=tile.cols,
        STAGES=stages,
        num_warps=4,
        **pdl_options(x.device),
    )
    return sums
