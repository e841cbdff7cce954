"""Rows quantised to 8-bit floats, and scales applied, on a GPU: read once, written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.codes import E4M3_TOP
from engine_core.kernels.launch.triton import launch_dependents, pdl_options, wait

_TOP = tl.constexpr(E4M3_TOP)


@triton.jit
def _quantize_kernel(
    codes_ptr,
    scales_ptr,
    x_ptr,
    scale_ptr,
    x_stride,
    K,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < K
    # Where the numbers of the next places are: neighbours are 64 columns apart.
    sources = cols
    if PAIRS:
        sources = cols // 128 * 128 + cols % 2 * 64 + cols % 128 // 2
    wait(PDL)
    x = tl.load(x_ptr + row * x_stride + sources, mask=mask, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), axis=0) / _TOP if scale_ptr is None else tl.load(scale_ptr)
    tl.store(scales_ptr + row, scale)
    x = x / tl.where(scale == 0.0, 1.0, scale)
    x = tl.minimum(tl.maximum(x, -_TOP), _TOP)
    tl.store(codes_ptr + row * K + cols, x.to(tl.float8e4nv), mask=mask)


def quantize_rows(
    x: Tensor, scale: Tensor | None = None, *, pairs: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``x [M, K]``, whose rows are contiguous; ``pairs`` as of the wrapper."""
    rows, k = x.shape
    codes = torch.empty((rows, k), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(k)
        _quantize_kernel[(rows,)](
            codes,
            scales,
            x,
            scale,
            x.stride(0),
            k,
            PAIRS=pairs,
            BLOCK=block,
            num_warps=min(16, max(4, block // 1024)),
            **pdl_options(x.device),
        )
    return codes, scales


@triton.jit
def _rescale_kernel(
    out_ptr,
    product_ptr,
    row_scales_ptr,
    col_scales_ptr,
    bias_ptr,
    N,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    scales = tl.load(col_scales_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    wait(PDL)
    x = tl.load(product_ptr + row * N + cols, mask=mask, other=0).to(tl.float32)
    x *= tl.load(row_scales_ptr + row) * scales
    if bias_ptr is not None:
        x += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + cols, x.to(out_ptr.dtype.element_ty), mask=mask)


def rescale(
    product: Tensor, rows: Tensor, cols: Tensor, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Contiguous ``product [M, N]`` times ``rows [M]`` and ``cols [N]``, and the bias.

    Written to ``out``, in place if it is None; a product of integers needs one.
    """
    out = product if out is None else out
    num_rows, n = product.shape
    if num_rows:
        _rescale_kernel[(num_rows, triton.cdiv(n, 1024))](
            out, product, rows, cols, bias, n, BLOCK=1024, num_warps=4,
            **pdl_options(product.device),
        )  # fmt: skip
    return out
