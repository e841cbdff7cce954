"""Codes of groups as numbers, and rows quantised to 8 bits, on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.codes import INT8_TOP
from engine_core.kernels.codes.triton import larger
from engine_core.kernels.launch.triton import launch_dependents, pdl_options, wait
from engine_core.kernels.linear.fp8 import triton as fp8
from engine_core.kernels.linear.readers.triton import GroupReader

if TYPE_CHECKING:
    from engine_core.kernels.linear.groups import GroupWeight

_TOP = tl.constexpr(INT8_TOP)


@triton.jit
def _numbers_kernel(reader, out_ptr, ids_ptr, M, K, ROWS: tl.constexpr, PDL: tl.constexpr):
    """A block of columns of ROWS rows: of the first ones, or of those that ids name."""
    LANES: tl.constexpr = reader.APART
    launch_dependents(PDL)
    # Another kernel may still write the ids, or read the memory that the numbers get.
    wait(PDL)
    block = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < M
    sources = tl.minimum(rows, M - 1)
    if ids_ptr is not None:
        sources = tl.load(ids_ptr + sources)
    cols = block * 4 * LANES + tl.arange(0, 4 * LANES)
    cursor = reader.begin(reader, sources, cols, K)
    tile, _ = reader.load(reader, cursor, cols < K, True)
    for part in tl.static_range(4):
        numbers = tile[part]
        if reader.RUN == 0:
            numbers *= cursor[3][:, None]
        else:
            numbers *= tile[4 + part // reader.RUN]
        if reader.MINIMA:
            numbers += tile[8 + part]
        places = (block * 4 + part) * LANES + tl.arange(0, LANES)
        pointers = out_ptr + rows.to(tl.int64)[:, None] * K + places[None, :]
        mask = inside[:, None] & (places < K)[None, :]
        tl.store(pointers, numbers.to(out_ptr.dtype.element_ty), mask=mask)


def numbers(weight: GroupWeight, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """The numbers ``[N, K]`` of a weight, or of the rows ``ids [M]`` int64."""
    n, k = weight.shape
    m = n if ids is None else len(ids)
    out = torch.empty(m, k, dtype=dtype, device=weight.words.device)
    if m:
        _numbers_kernel[(triton.cdiv(m, 32), weight.words.shape[1])](
            GroupReader.of(weight, native=False),
            out,
            ids,
            m,
            k,
            ROWS=32,
            num_warps=4,
            **pdl_options(out.device),
        )
    return out


@triton.jit
def _quantize_kernel(
    codes_ptr, scales_ptr, x_ptr, x_stride, K, WIDTH, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """A row in the order of the words of a weight."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    sources = places // 128 * 128 + places % 4 * 32 + places % 128 // 4
    wait(PDL)
    x = tl.load(x_ptr + row * x_stride + sources, mask=sources < K, other=0.0).to(tl.float32)
    # No code says what is not finite: the scale does.
    largest = tl.reduce(tl.abs(x), 0, larger)
    scale = tl.where(largest < float("inf"), largest / _TOP, float("nan"))
    tl.store(scales_ptr + row, scale)
    codes = tl.floor(x / tl.where(scale == 0.0, 1.0, scale) + 0.5)
    codes = tl.minimum(tl.maximum(codes, -_TOP), _TOP)
    tl.store(codes_ptr + row * WIDTH + places, codes.to(tl.int8), mask=places < WIDTH)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes of ``x [M, K]`` in the order of a weight's words, and scales ``[M]`` float32.

    The codes are ``[M, ceil(K / 128) * 128]``, zeros where the weight has no columns.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, k = x.shape
    width = triton.cdiv(k, 128) * 128
    codes = torch.empty((rows, width), dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        _quantize_kernel[(rows,)](
            codes,
            scales,
            x,
            x.stride(0),
            k,
            width,
            BLOCK=block,
            num_warps=min(16, max(4, block // 1024)),
            **pdl_options(x.device),
        )
    return codes, scales


def rescale(
    sums: Tensor, rows: Tensor, cols: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Contiguous ``sums [M, N]`` int32 times ``rows [M]`` and ``cols [N]``, and the bias."""
    return fp8.rescale(sums, rows, cols, bias, torch.empty_like(sums, dtype=dtype))
