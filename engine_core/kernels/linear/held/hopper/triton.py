"""Linears of few rows on Hopper whose weight waits for x in shared memory, in Gluon.

The tensor memory accelerator brings a program's whole run of a weight to shared memory before the
kernel ahead has ended; what is left to do behind it is to read x, to multiply and to store. So a
launch of a small model takes as long as reading its weight or as waiting for the kernel ahead, not
both, one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
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
from engine_core.kernels.linear.boxes.hopper.triton import (
    Boxes,
    barriers,
    load_box,
    place_of,
    room,
)
from engine_core.kernels.linear.epilogues.hopper.triton import (
    Launch,
    ask_rows,
    ask_weights,
    finish,
    halves_of,
    out_layout,
    partial_offsets,
    rows_of_program,
    sum_splits,
    takes_rows,
    trial_of,
)
from engine_core.kernels.linear.reference import DeferredRMSNorm
from engine_core.kernels.linear.tiles import HELD_COLUMNS, HELD_ROWS, Tile

_FAMILY = Family(
    "linears of small weights", "Steps of few rows of a small model take up to a quarter longer"
)

# Rows of the weight that a program has, those of the matrix units; columns of a chunk, 128 bytes,
# the widest swizzle; chunks of a step of the weight.
_ROWS = gl.constexpr(HELD_ROWS)
_COLS = gl.constexpr(64)
_CHUNKS = gl.constexpr(HELD_COLUMNS // 64)
# Chunks of x that are asked for at once.
_X_CHUNKS = gl.constexpr(4)


@gluon.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    w_desc,
    x_desc,
    epilogue,
    bias_ptr,
    squares_ptr,
    partial_ptr,
    arrivals_ptr,
    eps,
    num_rows,
    N,
    K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    KIND: gl.constexpr,
    SQUARES: gl.constexpr,
    PDL: gl.constexpr,
):
    """The products of 64 rows of the weight and BLOCK_M of x, over one of SPLITS runs of K.

    Of a gated weight that are 32 of the gate and as many of up. A run is a whole of steps, of which
    STAGES are in shared memory. All else is as of
    :func:`engine_core.kernels.linear.triton._linear_kernel`.
    """
    if epilogue.LATE == 0:
        launch_dependents(PDL)
    GATED: gl.constexpr = epilogue.GATED
    HEAD_DIM: gl.constexpr = epilogue.HEAD_DIM if KIND == "stored" else 0
    BLOCK_N: gl.constexpr = _ROWS // 2 if GATED else _ROWS
    SHAPE: gl.constexpr = (BLOCK_M, BLOCK_N)
    ELEMENT: gl.constexpr = x_desc.dtype
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = (K - 1) // (_COLS * _CHUNKS) + 1
    RUN: gl.constexpr = (STEPS - 1) // SPLITS + 1
    BYTES: gl.constexpr = _CHUNKS * _ROWS * _COLS * 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    OUT: gl.constexpr = out_layout(BLOCK_M, _ROWS, WARPS, GATED or HEAD_DIM > 0)
    CHUNK: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    tile, split, block = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    tiles = gl.num_programs(0)
    first_row = block * BLOCK_M
    low = split * RUN

    weight = room(w_desc, STAGES)
    weights = reinterpret(weight, ELEMENT, [STAGES * _CHUNKS, _ROWS, _COLS], CHUNK)
    X_BOXES: gl.constexpr = (RUN * _CHUNKS - 1) // _X_CHUNKS + 1
    x = gl.allocate_shared_memory(ELEMENT, [X_BOXES, _X_CHUNKS, BLOCK_M, _COLS], x_desc.layout)
    values = reinterpret(x, ELEMENT, [X_BOXES * _X_CHUNKS, BLOCK_M, _COLS], CHUNK)
    full = barriers(STAGES + 1)
    x_full = full.index(STAGES)
    head, row = place_of(tile, BLOCK_N, HEAD_DIM)
    # The weight is older than all kernels: it does not wait for x. What is beyond K is zeros.
    for stage in gl.static_range(STAGES):
        mbarrier.expect(full.index(stage), BYTES)
        load_box(w_desc, weight, full.index(stage), stage, head, row, low + stage, True)
    asked_before = ask_weights(epilogue, bias_ptr, tile, N, SHAPE, KIND, HEAD_DIM)
    mbarrier.expect(x_full, X_BOXES * _X_CHUNKS * BLOCK_M * _COLS * 2)
    wait(PDL)
    if epilogue.LATE == 1:
        launch_dependents(PDL)
    # Tiles begin at different boxes: all of them want the same lines of the L2 cache.
    for turn in gl.static_range(X_BOXES):
        box = (tile + turn) % X_BOXES
        chunk = low * _CHUNKS + box * _X_CHUNKS
        tma_load(x_desc, [chunk, first_row, 0], x_full, x.index(box))
    asked = ask_rows(
        epilogue, squares_ptr, first_row, num_rows, tile, N, SHAPE, KIND, SQUARES, HEAD_DIM
    )
    acc = gl.zeros([_ROWS, BLOCK_M], gl.float32, ACC)
    mbarrier.wait(x_full, 0)
    for step in gl.static_range(RUN):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES % 2)
        for chunk in gl.static_range(_CHUNKS):
            acc = warpgroup_mma(
                weights.index(stage * _CHUNKS + chunk),
                values.index(step * _CHUNKS + chunk).permute((1, 0)),
                acc,
                is_async=True,
            )
        if step + STAGES < RUN:
            acc = warpgroup_mma_wait(0, deps=(acc,))
            sync_threads()
            mbarrier.expect(full.index(stage), BYTES)
            load_box(w_desc, weight, full.index(stage), stage, head, row, low + step + STAGES, True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    if epilogue.LATE == 2:
        launch_dependents(PDL)

    products = gl.convert_layout(acc.permute((1, 0)), OUT)
    last = True
    if SPLITS > 1:
        # In the order of programs, so that all of them have room for all their columns.
        width = tiles * _ROWS
        size = num_rows * width
        offsets, mask = partial_offsets(tile, first_row, num_rows, width, BLOCK_M, _ROWS, OUT)
        gl.store(partial_ptr + split * size + offsets, products, mask=mask)
        arrivals_ptr += block * tiles + tile
        sync_threads()
        last = gl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            gl.store(arrivals_ptr, 0)
            products = sum_splits(
                partial_ptr, tile, first_row, num_rows, width, size, SPLITS, BLOCK_M, _ROWS, OUT
            )
        total = products
        up = products
        if GATED:
            total, up = halves_of(products)
        finish(
            epilogue, total, up, asked_before, asked, eps, first_row, num_rows, tile, tiles, N, K,
            SHAPE, KIND, SQUARES, HEAD_DIM,
        )  # fmt: skip


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether :func:`linear` takes tensors of these dtypes and places."""
    return (
        takes_rows(x)
        and weight.dtype == x.dtype
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and weight.shape[1] % _COLS.value == 0
    )


def is_trusted(like: Tensor, tile: Tile, ending: str) -> bool:
    """Whether :func:`linear` may be used for such rows; it may be tried for that.

    ``ending`` is what follows the products: "activated", "gated", "added" or "stored".
    """
    block_m = rows_of_program(tile, like.numel() // like.shape[-1])
    kind = (like.dtype, tile, block_m, like.shape[-1], ending)
    return _FAMILY.allows(like.device, kind, lambda: _trial(like, tile, block_m, ending))


def _trial(like: Tensor, tile: Tile, block_m: int, ending: str) -> Trial:
    """A block of rows, three of which are not there, of as many columns as ``like`` has."""
    draw = torch.Generator(like.device).manual_seed(0)
    rows, n, k = block_m - 3, 512, like.shape[-1]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=like.device).to(like.dtype)

    x, weight = normal(rows, k), normal(n, k) / 4 / k**0.5
    product = x.float() @ weight.float().T
    return trial_of(ending, x, product, tile, lambda epilogue: linear(x, weight, epilogue, tile))


def _x_descriptor(rows: Tensor, block_m: int) -> TensorDescriptor:
    """Rows by chunks, rows and columns."""
    count, k = rows.shape
    return TensorDescriptor(
        rows,
        [k // _COLS.value, count, _COLS.value],
        [_COLS.value, rows.stride(0), 1],
        [_X_CHUNKS.value, block_m, _COLS.value],
        gl.NVMMASharedLayout(128, 16, rank=3),
    )


def linear(
    x: Tensor | DeferredRMSNorm,
    weight: Tensor,
    epilogue: Any,
    tile: Tile,
    bias: Tensor | None = None,
) -> Tensor:
    """As :func:`engine_core.kernels.linear.triton.linear`, by a weight of numbers.

    What :func:`fits` asks of x and the weight holds, and there are rows. Nothing that is still
    running writes the weight: it is read before the kernels before are waited for.
    """
    gated, k = epilogue.GATED.value, weight.shape[1]
    block_n = HELD_ROWS // 2 if gated else HELD_ROWS
    launch = Launch.of(x, len(weight), epilogue, tile, bias, block_n)
    boxes = Boxes.of(launch, epilogue, len(weight), block_n)
    run = triton.cdiv(triton.cdiv(k, HELD_COLUMNS), tile.splits)
    _linear_kernel[launch.grid](
        boxes.along(weight, _COLS.value, _CHUNKS.value),
        _x_descriptor(launch.rows, launch.block_m),
        *launch.given,
        K=k,
        STAGES=min(tile.num_stages, run),
        **launch.constants,
        **pdl_options(launch.rows.device),
    )
    out: Tensor = epilogue.out
    return out
