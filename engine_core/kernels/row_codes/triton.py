"""Rows quantised to 8-bit floats on a GPU: by a launch of its own, or where another made them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.codes import E4M3_TOP
from engine_core.kernels.codes.triton import largest
from engine_core.kernels.launch.triton import launch_dependents, pdl_options, wait
from engine_core.kernels.row_codes import FP8, CodedRows, RowForm

_TOP = tl.constexpr(E4M3_TOP)


@triton.jit
def store_codes(codes_ptr, scales_ptr, given_ptr, x, rows, row_mask, cols, K, PAIRS: tl.constexpr):
    """Store codes and scales of ``x [R, L]``, float32 of whole rows, 0 from column K on.

    The scale is the one at ``given_ptr``, unless that is None. The numbers have been rounded to 16
    bits, so that the codes are those of a kernel that reads them. NaN has a code of its own.
    """
    if given_ptr is None:
        scale = largest(x) / _TOP
    else:
        scale = tl.broadcast_to(tl.load(given_ptr), [x.shape[0]])
    tl.store(scales_ptr + rows, scale, mask=row_mask)
    x = x / tl.where(scale == 0.0, 1.0, scale)[:, None]
    x = tl.clamp(x, -_TOP, _TOP, propagate_nan=tl.PropagateNan.ALL)
    codes = x.to(tl.float8e4nv)
    if PAIRS:
        # As bytes, in shared memory: loads and stores stay wide.
        halves = tl.reshape(codes, [x.shape[0], x.shape[1] // 128, 2, 64])
        codes = tl.reshape(tl.permute(halves, [0, 1, 3, 2]), [x.shape[0], x.shape[1]])
    mask = row_mask[:, None] & (cols < K)[None, :]
    tl.store(codes_ptr + rows[:, None] * K + cols[None, :], codes, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_kernel(
    codes_ptr,
    scales_ptr,
    x_ptr,
    scale_ptr,
    num_rows,
    x_stride,
    K,
    PAIRS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK)
    row_mask = rows < num_rows
    mask = row_mask[:, None] & (cols < K)[None, :]
    wait(PDL)
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    store_codes(codes_ptr, scales_ptr, scale_ptr, x, rows, row_mask, cols, K, PAIRS)


def quantize_rows(
    x: Tensor, scale: Tensor | None = None, *, pairs: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``x [M, K]``, whose rows are contiguous; ``pairs`` as of the wrapper."""
    num_rows, k = x.shape
    coded = empty_rows(x.shape, x, RowForm(scale, pairs))
    if num_rows:
        block, block_rows, num_warps = tile_of(k)
        _quantize_kernel[(triton.cdiv(num_rows, block_rows),)](
            coded.codes,
            coded.scales,
            x,
            scale,
            num_rows,
            x.stride(0),
            k,
            PAIRS=pairs,
            BLOCK_ROWS=block_rows,
            BLOCK=block,
            num_warps=num_warps,
            **pdl_options(x.device),
        )
    return coded.codes, coded.scales


def empty_rows(shape: torch.Size, like: Tensor, form: RowForm) -> CodedRows:
    """Room for rows ``[..., K]``, in the dtype and on the device of ``like``."""
    codes = torch.empty(shape, dtype=FP8, device=like.device)
    scales = torch.empty(codes.numel() // shape[-1], dtype=torch.float32, device=like.device)
    return CodedRows(codes, scales, like.dtype, form.pairs)


def tile_of(columns: int) -> tuple[int, int, int]:
    """Columns and rows of a program that holds whole rows, and its warps."""
    block = triton.next_power_of_2(columns)
    # 2048 numbers at least, as of the norms.
    return block, max(1, 2048 // block), min(16, max(4, block // 1024))
