"""Scales applied to a product on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.launch.triton import launch_dependents, pdl_options, wait


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
