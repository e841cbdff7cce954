"""Codes of groups as numbers, and rows quantised to 8 bits, on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.launch.triton import launch_dependents, pdl_options, wait
from engine_core.kernels.linear.fp8 import triton as fp8

if TYPE_CHECKING:
    from engine_core.kernels.linear.groups import GroupWeight


@triton.jit
def _numbers_kernel(
    out_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    N,
    K,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """128 columns of ROWS rows."""
    launch_dependents(PDL)
    block = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    lanes = tl.arange(0, 32)
    wide = rows.to(tl.int64)[:, None]
    pointers = words_ptr + (wide * tl.num_programs(1) + block) * 32 + lanes[None, :]
    words = tl.load(pointers, mask=inside[:, None], other=0).to(tl.int32)
    # Another kernel may still read the memory that the numbers get.
    wait(PDL)
    for part in tl.static_range(4):
        first = block * 128 + part * 32
        group = first // GROUP if GROUP else 0
        live = inside & (first + tl.zeros_like(rows) < K)
        scale = tl.load(scales_ptr + group * N + rows, mask=live, other=0.0).to(tl.float32)
        codes = (words >> part * 4) & 15 if BITS == 4 else words << (24 - part * 8) >> 24
        zero = 8 if BITS == 4 else 0
        if zeros_ptr is not None:
            zero = tl.load(zeros_ptr + group * N + rows, mask=live, other=0).to(tl.int32)[:, None]
        cols = first + lanes
        numbers = (codes - zero).to(tl.float32) * scale[:, None]
        mask = inside[:, None] & (cols < K)[None, :]
        tl.store(
            out_ptr + wide * K + cols[None, :], numbers.to(out_ptr.dtype.element_ty), mask=mask
        )


def numbers(weight: GroupWeight, dtype: torch.dtype) -> Tensor:
    """The numbers ``[N, K]`` of a weight."""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.words.device)
    _numbers_kernel[(triton.cdiv(n, 32), weight.words.shape[1])](
        out,
        weight.words,
        weight.scales,
        weight.zeros,
        n,
        k,
        GROUP=weight.group_size,
        BITS=weight.bits,
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
    scale = tl.max(tl.abs(x), axis=0) / 127.0
    tl.store(scales_ptr + row, scale)
    codes = tl.floor(x / tl.where(scale == 0.0, 1.0, scale) + 0.5)
    codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
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
