"""Linears of few rows on a GPU: the time is that of reading the weight once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.launch.shared import HALF, prefer
from engine_core.kernels.launch.triton import (
    FIRST_WAVE,
    arrival_counts,
    arrives_last,
    launch_dependents,
    num_multiprocessors,
    pdl_options,
    wait,
)
from engine_core.kernels.linear.epilogues.triton import Activated, Added, Stored, place_of
from engine_core.kernels.linear.readers.triton import DenseWeight, Fp8Reader, reader_of
from engine_core.kernels.linear.reference import DeferredRMSNorm, taken_apart
from engine_core.kernels.linear.tiles import Tile, tiles_held

__all__ = [
    "Activated",
    "Added",
    "DenseWeight",
    "Fp8Reader",
    "Stored",
    "Tile",
    "linear",
    "reader_of",
]


@triton.jit
def _add_products(acc, x, w, MODE: tl.constexpr, PRECISION: tl.constexpr):
    """Add a tile's products: ``x [BLOCK_M, BLOCK_K]``, ``w [BLOCK_N, BLOCK_K]``."""
    if MODE == "vector":
        acc += w.to(tl.float32) * x.to(tl.float32)
    elif MODE == "wx":
        acc = tl.dot(w.to(x.dtype), tl.trans(x), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _joined(reader, w):
    """Parts ``[BLOCK_N, BLOCK_K / PARTS]`` as one tile in the order of columns."""
    BLOCKS: tl.constexpr = w[0].shape[1] // reader.APART
    N: tl.constexpr = w[0].shape[0]
    if reader.PARTS == 2:
        pairs = tl.reshape(tl.join(w[0], w[1]), [N, BLOCKS, reader.APART, 2])
        whole = tl.permute(pairs, [0, 1, 3, 2])
    else:
        # The last dimension says which two, the one before which of them.
        fours = tl.join(tl.join(w[0], w[1]), tl.join(w[2], w[3]))
        whole = tl.permute(tl.reshape(fours, [N, BLOCKS, reader.APART, 2, 2]), [0, 1, 4, 3, 2])
    return tl.reshape(whole, [N, BLOCKS * reader.PARTS * reader.APART])


@triton.jit
def _multiply(reader, acc, x, w, MODE: tl.constexpr, JOINED: tl.constexpr, PRECISION: tl.constexpr):
    """Add a tile's products, of all its PARTS."""
    if reader.PARTS == 1:
        acc = _add_products(acc, x, w, MODE, PRECISION)
    elif JOINED:
        products = _add_products(tl.zeros_like(acc), x, _joined(reader, w), MODE, PRECISION)
        acc += products * w[reader.PARTS]
    elif reader.RUN == 0:
        for part in tl.static_range(reader.PARTS):
            acc = _add_products(acc, x[part], w[part], MODE, PRECISION)
    else:
        for run in tl.static_range(reader.PARTS // reader.RUN):
            products = tl.zeros_like(acc)
            for part in tl.static_range(reader.RUN):
                products = _add_products(
                    products,
                    x[run * reader.RUN + part],
                    w[run * reader.RUN + part],
                    MODE,
                    PRECISION,
                )
            scales = w[reader.PARTS + run]
            if MODE == "vector":
                tl.static_assert(not reader.MINIMA, "minima are added to products of tiles")
                parts = tl.reshape(products, [acc.shape[0], scales.shape[1], reader.APART])
                acc += tl.reshape(parts * scales[:, :, None], acc.shape)
            else:
                acc += products * (scales if MODE == "wx" else tl.trans(scales))
            if reader.MINIMA:
                minima = w[2 * reader.PARTS + run]
                sums = tl.sum(x[run].to(tl.float32), axis=1)
                if MODE == "wx":
                    acc += minima * sums[None, :]
                else:
                    acc += sums[:, None] * tl.trans(minima)
    return acc


@triton.jit
def _zeros(MODE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    if MODE == "vector":
        acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    elif MODE == "wx":
        acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    return acc


@triton.jit
def _rows_by_cols(acc, MODE: tl.constexpr):
    """The accumulator as ``[BLOCK_M, BLOCK_N]``."""
    if MODE == "vector":
        acc = tl.sum(acc, axis=1)[None, :]
    elif MODE == "wx":
        acc = tl.trans(acc)
    return acc


@triton.jit
def _load_run(ptrs, row_mask, cols, high, AT: tl.constexpr, EVEN_K: tl.constexpr):
    mask = row_mask[:, None] if EVEN_K else row_mask[:, None] & (cols + AT < high)[None, :]
    return tl.load(ptrs + AT, mask=mask, other=0.0)


@triton.jit
def _load_x(reader, ptrs, row_mask, cols, high, JOINED: tl.constexpr, EVEN_K: tl.constexpr):
    """x at ``cols``: all if parts are JOINED, or the first run of each block, and the others."""
    x = _load_run(ptrs, row_mask, cols, high, 0, EVEN_K)
    if JOINED:
        pass
    elif reader.PARTS == 2:
        x = (x, _load_run(ptrs, row_mask, cols, high, reader.APART, EVEN_K))
    elif reader.PARTS == 4:
        second = _load_run(ptrs, row_mask, cols, high, reader.APART, EVEN_K)
        third = _load_run(ptrs, row_mask, cols, high, 2 * reader.APART, EVEN_K)
        x = (x, second, third, _load_run(ptrs, row_mask, cols, high, 3 * reader.APART, EVEN_K))
    return x


@triton.jit
def _partial_offsets(place):
    """From the start of the place, in the order of its columns, and whether they are inside."""
    offsets = place.rows[:, None] * place.size + place.cols[None, :]
    return offsets, place.row_mask[:, None] & place.n_mask[None, :]


@triton.jit
def _sum_splits(partial_ptr, place, size, SPLITS: tl.constexpr):
    """The splits' results, always added in the same order."""
    offsets, mask = _partial_offsets(place)
    ptrs = partial_ptr + place.start + offsets
    acc = tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        acc += tl.load(ptrs + split * size, mask=mask, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def _biased(acc, bias_ptr, n, n_mask):
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    return acc


# Programs of one row whose weight is numbers take little shared memory or none, and attention takes
# some. ms of a step of one row, as the driver chooses, with 57% and with all: Qwen2 0.5B 0.570,
# 0.548, 0.547; Llama 3 8B 3.947, 3.906, 3.938; with 28% 4.521, for loops take some too.
_ONE_ROW = prefer("_linear_kernel_of_one_row", HALF)


def _name_of(kernel: Any) -> str:
    """The kernel's name in its code, by which it is known once it is loaded."""
    dense = isinstance(kernel.signature.get("reader"), DenseWeight)
    return _ONE_ROW if dense and kernel.constants.get("MODE") == "vector" else "_linear_kernel"


@triton.jit(do_not_specialize=["num_rows", "prefetch_part"], repr=_name_of)
def _linear_kernel(
    reader,
    epilogue,
    x_ptr,
    bias_ptr,
    squares_ptr,
    partial_ptr,
    arrivals_ptr,
    eps,
    num_rows,
    x_stride,
    N,
    K,
    prefetch_part,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    TOGETHER: tl.constexpr,
    MODE: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    HELD: tl.constexpr,
    ALL_HELD: tl.constexpr,
    PREFETCH_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N columns of BLOCK_M rows, over one of SPLITS equal runs of K.

    N is the number of output columns; if the epilogue is GATED, the weight has 2 N rows, gate then
    up. ``partial`` is ``[SPLITS, 1 or 2, num_rows, N]`` float32; the last program to arrive of a
    tile, or of those that are finished TOGETHER, adds it up. With SQUARES, x still lacks RMSNorm's
    division, which is made up for at the end. HELD tiles of the weight wait for x in registers.
    """
    # Parts that are scaled together become one operand, whose products are waited for once. Those
    # of parts, read from registers, would each be waited for, unless they add to acc (Triton 3.6).
    WX: tl.constexpr = MODE == "wx"
    JOINED: tl.constexpr = (WX and reader.RUN == reader.PARTS) if reader.PARTS > 1 else False
    # Columns of x and of the accumulator that a step multiplies at once.
    WIDTH: tl.constexpr = BLOCK_K if JOINED else BLOCK_K // reader.PARTS
    if epilogue.LATE == 0:
        launch_dependents(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    block = tl.program_id(2)
    first_row = block.to(tl.int64) * BLOCK_M
    place = place_of(epilogue, tile, first_row, num_rows, N, BLOCK_M, BLOCK_N)
    # Rows beyond the last one read it once more: loads of the weight need no mask.
    w_rows = tl.minimum(place.n, N - 1)
    per_split = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
    low = split * per_split
    high = tl.minimum(low + per_split, K)
    if PDL and block == 0 and tile + split * tl.num_programs(0) < FIRST_WAVE:
        reader.prefetch(reader, w_rows, low, high, K, prefetch_part, PREFETCH_PARTS)
        if epilogue.GATED:
            reader.prefetch(reader, w_rows + N, low, high, K, prefetch_part, PREFETCH_PARTS)
    cols = low + tl.arange(0, BLOCK_K)
    w_cursor = reader.begin(reader, w_rows, cols, K)
    if epilogue.GATED:
        up_cursor = reader.begin(reader, w_rows + N, cols, K)
    # The weight is older than all kernels: its first tiles wait for x in registers.
    held = ()
    for step in tl.static_range(HELD):
        w, w_cursor = reader.load(reader, w_cursor, cols + step * BLOCK_K < high, EVEN_K)
        held += (w,)  # type: ignore[assignment]
        if epilogue.GATED:
            w, up_cursor = reader.load(reader, up_cursor, cols + step * BLOCK_K < high, EVEN_K)
            held += (w,)  # type: ignore[assignment]
    wait(PDL)
    if epilogue.LATE == 1:
        launch_dependents(PDL)

    row_mask = place.row_mask
    places = tl.arange(0, WIDTH)
    if WIDTH < BLOCK_K:
        BLOCK: tl.constexpr = reader.PARTS * reader.APART
        places = places // reader.APART * BLOCK + places % reader.APART
    x_ptrs = x_ptr + first_row * x_stride + low
    x_ptrs += place.rows.to(tl.int64)[:, None] * x_stride + places[None, :]
    # Asked for here, used after the products.
    if SQUARES:
        parts = tl.arange(0, BLOCK_SQUARES)
        squares = tl.load(
            squares_ptr + first_row * SQUARES + place.rows[:, None] * SQUARES + parts[None, :],
            mask=row_mask[:, None] & (parts < SQUARES)[None, :],
            other=0.0,
        )
    whole = place
    if TOGETHER > 1:
        WHOLE: tl.constexpr = BLOCK_N * TOGETHER
        whole = place_of(epilogue, tile // TOGETHER, first_row, num_rows, N, BLOCK_M, WHOLE)
    asked = epilogue.ask(epilogue, whole)
    acc = _zeros(MODE, BLOCK_M, BLOCK_N, WIDTH)
    up = _zeros(MODE, BLOCK_M, BLOCK_N, WIDTH)
    for step in tl.static_range(HELD):
        x = _load_x(reader, x_ptrs, row_mask, low + places, high, JOINED, EVEN_K)
        if epilogue.GATED:
            acc = _multiply(reader, acc, x, held[2 * step], MODE, JOINED, PRECISION)
            up = _multiply(reader, up, x, held[2 * step + 1], MODE, JOINED, PRECISION)
        else:
            acc = _multiply(reader, acc, x, held[step], MODE, JOINED, PRECISION)
        x_ptrs += BLOCK_K
        low += BLOCK_K
    if not ALL_HELD:
        for start in tl.range(low, high, BLOCK_K, num_stages=STAGES):
            k_mask = start + tl.arange(0, BLOCK_K) < high
            x = _load_x(reader, x_ptrs, row_mask, start + places, high, JOINED, EVEN_K)
            w, w_cursor = reader.load(reader, w_cursor, k_mask, EVEN_K)
            acc = _multiply(reader, acc, x, w, MODE, JOINED, PRECISION)
            if epilogue.GATED:
                w, up_cursor = reader.load(reader, up_cursor, k_mask, EVEN_K)
                up = _multiply(reader, up, x, w, MODE, JOINED, PRECISION)
            x_ptrs += BLOCK_K
    if epilogue.LATE == 2:
        launch_dependents(PDL)
    acc = reader.scale(reader, w_cursor, _rows_by_cols(acc, MODE))
    if epilogue.GATED:
        up = reader.scale(reader, up_cursor, _rows_by_cols(up, MODE))

    last = True
    if SPLITS * TOGETHER > 1:
        part = num_rows * N
        size = part * 2 if epilogue.GATED else part
        offsets, mask = _partial_offsets(place)
        ptrs = partial_ptr + split * size + place.start + offsets
        tl.store(ptrs, acc, mask=mask)
        if epilogue.GATED:
            tl.store(ptrs + part, up, mask=mask)
        arrivals_ptr += block * (tl.num_programs(0) // TOGETHER) + tile // TOGETHER
        last = arrives_last(arrivals_ptr, SPLITS * TOGETHER)
    if last:
        total = acc
        total_up = up
        if SPLITS * TOGETHER > 1:
            total = _sum_splits(partial_ptr, whole, size, SPLITS)
            if epilogue.GATED:
                total_up = _sum_splits(partial_ptr + part, whole, size, SPLITS)
        if SQUARES:
            inverse = (1.0 / tl.sqrt(tl.sum(squares, axis=1) / K + eps))[:, None]
            total *= inverse
            if epilogue.GATED:
                total_up *= inverse
        total = _biased(total, bias_ptr, whole.n, whole.n_mask)
        if epilogue.GATED:
            total_up = _biased(total_up, bias_ptr, whole.n + N, whole.n_mask)
        epilogue.finish(epilogue, asked, whole, total, total_up)


def linear(
    x: Tensor | DeferredRMSNorm, reader: Any, epilogue: Any, tile: Tile, bias: Tensor | None = None
) -> Tensor:
    """Result of the epilogue for ``x [..., K]`` by the reader's weight ``[N, K]`` and the bias.

    K is a multiple of 8, and x's rows are contiguous. The result is the epilogue's ``out``.
    """
    values, squares, eps = taken_apart(x)
    rows = values.reshape(-1, values.shape[-1])
    num_rows, k = rows.shape
    gated = epilogue.GATED.value
    n = reader.shape[0] // 2 if gated else reader.shape[0]
    block_m = 1
    if tile.mode != "vector":
        block_m = min(tile.most_rows, max(tile.least_rows, triton.next_power_of_2(num_rows)))
    blocks = triton.cdiv(num_rows, block_m)
    tiles = triton.cdiv(n, tile.block_n)
    together = max(1, epilogue.WHOLE.value // tile.block_n)
    partial = arrivals = None
    if tile.splits * together > 1:
        shape = (tile.splits, 2 if gated else 1, num_rows, n)
        partial = torch.empty(shape, dtype=torch.float32, device=rows.device)
        arrivals = arrival_counts(rows.device, tiles * blocks)
    held = 0
    if tile.mode == "vector":
        all_held = reader.PARTS.value == 1 and tiles_held(
            tile, tiles * tile.splits, k, gated, num_multiprocessors(rows.device)
        )
        held = all_held or 1
    # One request a thread.
    parts = max(1, 32 * tile.num_warps // tile.block_n)
    _linear_kernel[(tiles, tile.splits, blocks)](
        reader,
        epilogue,
        rows,
        bias,
        squares,
        partial,
        arrivals,
        eps,
        num_rows,
        rows.stride(0),
        n,
        k,
        triton.cdiv(tile.prefetch, 8 * parts) * 8,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLITS=tile.splits,
        TOGETHER=together,
        MODE=tile.mode,
        SQUARES=0 if squares is None else squares.shape[1],
        BLOCK_SQUARES=1 if squares is None else triton.next_power_of_2(squares.shape[1]),
        EVEN_K=k % (tile.block_k * tile.splits) == 0,
        STAGES=tile.num_stages,
        HELD=held,
        # Without a loop a program has a third less registers, and no shared memory.
        ALL_HELD=held * tile.block_k * tile.splits >= k,
        PREFETCH_PARTS=parts,
        PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        **pdl_options(rows.device),
    )
    out: Tensor = epilogue.out
    return out
