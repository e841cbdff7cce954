"""RMSNorm and LayerNorm on a GPU: one kernel, each row read once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.launch.triton import launch_dependents, pdl_options, wait
from engine_core.kernels.row_codes import CodedRows, RowForm
from engine_core.kernels.row_codes.triton import empty_rows, store_codes


@triton.jit
def _load_part(
    ptrs,
    mask,
    chosen_ptr,
    rows,
    num_rows,
    num_chosen,
    part: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A part of the rows in float32; zeros, whatever is there, where nothing was chosen."""
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if chosen_ptr is not None:
        # Looked at beside the numbers, not before them: one wait for memory and not two.
        chosen = tl.load(chosen_ptr + rows * PARTS + part, mask=rows < num_rows, other=-1)
        x = tl.where(((chosen >= 0) & (chosen < num_chosen))[:, None], x, 0.0)
    return x


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x_ptr,
    x_bias_ptr,
    row_scales_ptr,
    col_scales_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    chosen_ptr,
    out_ptr,
    out_scales_ptr,
    given_scale_ptr,
    total_ptr,
    num_rows,
    inner_rows,
    x_strides,
    residual_strides,
    num_chosen,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    CENTRED: tl.constexpr,
    OFFSET: tl.constexpr,
    ELEMENT: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """x is the sum of PARTS tensors, perhaps times scales, and perhaps of a bias of its own.

    Where there are ``chosen [num_rows, PARTS]``, a part of a row counts if its number is one of 0
    to ``num_chosen`` - 1. The result is rounded to ELEMENT. With ``out_scales`` that are not None
    ``out`` takes its codes.
    """
    launch_dependents(PDL)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_H)
    mask = (rows < num_rows)[:, None] & (cols < H)[None, :]
    outer, inner = rows // inner_rows, rows % inner_rows
    out_offsets = rows[:, None] * H + cols[None, :]

    weight = tl.load(weight_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    wait(PDL)
    x_rows = outer * x_strides[1] + inner * x_strides[2]
    x_ptrs = x_ptr + x_rows[:, None] + cols[None, :]
    # All of them are asked for before any is added.
    loaded = ()
    for part in tl.static_range(PARTS):
        more = _load_part(x_ptrs, mask, chosen_ptr, rows, num_rows, num_chosen, part, PARTS)
        loaded += (more,)  # type: ignore[assignment]
        x_ptrs += x_strides[0]
    if residual_ptr is not None:
        residual_rows = outer * residual_strides[0] + inner * residual_strides[1]
        residual = tl.load(
            residual_ptr + residual_rows[:, None] + cols[None, :], mask=mask, other=0.0
        )
    x = loaded[0]  # type: ignore[misc]
    for part in tl.static_range(1, PARTS):
        x += loaded[part]
    if row_scales_ptr is not None:
        x *= tl.load(row_scales_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
        x *= tl.load(col_scales_ptr + cols, mask=cols < H, other=0.0)[None, :]
    if x_bias_ptr is not None:
        x += tl.load(x_bias_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    if residual_ptr is not None:
        total = (x + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + out_offsets, total, mask=mask)
        x = total.to(tl.float32)
    if CENTRED:
        x = tl.where(mask, x - (tl.sum(x, axis=1) / H)[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / H + eps)
    y = x * inverse[:, None]
    if OFFSET != 0:
        weight += OFFSET
    elif not CENTRED:
        y = y.to(ELEMENT).to(tl.float32)
    y = y * weight[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
        y = y + bias[None, :]
    y = y.to(ELEMENT)
    if out_scales_ptr is None:
        tl.store(out_ptr + out_offsets, y, mask=mask)
    else:
        y = tl.where(mask, y.to(tl.float32), 0.0)
        store_codes(
            out_ptr, out_scales_ptr, given_scale_ptr, y, rows, rows < num_rows, cols, H, PAIRS
        )


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None,
    centred: bool,
    offset: float = 0.0,
    form: RowForm | None = None,
) -> tuple[Any, Tensor | None]:
    """LayerNorm if ``centred``, else RMSNorm; returns the result and the sum with the residual.

    The result is :class:`CodedRows` if they have a ``form``.
    """
    out = _room(x, form)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = x.numel() // x.shape[-1]
    if num_rows == 0:
        return out, total
    if x.dim() != 3:
        x = x.reshape(1, num_rows, x.shape[-1])
        residual = None if residual is None else residual.reshape(x.shape)
    given = (x[None], None, None, residual, weight, bias, eps, out, total)
    _launch(*given, centred=centred, offset=offset, form=form)
    return out, total


def _room(x: Tensor, form: RowForm | None) -> Tensor | CodedRows:
    """For the norm of ``x``."""
    if form is not None:
        return empty_rows(x.shape, x, form)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def sum_add_norm(
    partial: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    norm_bias: Tensor | None = None,
    centred: bool = False,
    offset: float = 0.0,
    scales: tuple[Tensor, Tensor] | None = None,
    chosen: tuple[Tensor, int] | None = None,
    form: RowForm | None = None,
) -> tuple[Any, Tensor]:
    """Norm of ``residual [..., H]``, ``bias [H]`` and ``partial [parts, rows, H]`` added up.

    The sum is float32, the parts in their order first, and rounded once. ``scales``, of the rows
    and ``[H]`` of the columns, float32, multiply the sum of the parts. ``chosen`` has numbers
    ``[rows, parts]`` int32, contiguous, and how many there are: a part of a row whose number is
    none of them adds nothing, whatever is there. Returns the result and the sum of all, both of
    residual's shape and dtype; the result in a ``form`` as :func:`norm`.
    """
    out = _room(residual, form)
    total = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    if total.numel() == 0:
        return out, total
    residual = residual.reshape(1, *partial.shape[1:])
    given = (partial[:, None], bias, scales, residual, weight, norm_bias, eps, out, total)
    _launch(*given, centred=centred, offset=offset, chosen=chosen, form=form)
    return out, total


# Rows up to which each has 16 warps if it is quantised, from so many columns on.
_FEW_ROWS, _LONG_ROW = 64, 4096


def _warps(block_h: int, num_rows: int, coded: bool) -> int:
    """Warps of a program of columns up to a power of 2.

    A step of few rows waits for the norm, whose programs most multiprocessors do without. A step of
    32 rows of Llama 3 8B on an H200 with 4, 8 and 16 warps 3.704, 3.657 and 3.626 ms (in a form of
    that step that was not kept).
    """
    if coded and num_rows <= _FEW_ROWS and block_h >= _LONG_ROW:
        return 16
    return 4 if block_h <= 2048 else 8 if block_h <= 8192 else 16


# Numbers of a row for each thread of a norm that adds up parts of a product.
_PARTED = 4


def _tile(block_h: int, num_rows: int, parts: int, coded: bool) -> tuple[int, int]:
    """Rows of a program and its warps, for columns up to a power of 2.

    At least 2048 values per program: 16 bytes per thread and load in 4 warps of bfloat16, so that
    per-head norms (H = 128) do not launch a program for every head. For fewer rows too: a row's sum
    is added up in the same order however many there are, unless it is quantised.

    Where it adds up parts, a thread has so few of them that all parts are on their way at once:
    with 16 numbers of each it waited for memory four times. ms of a step of 0.5B, with 16 and so:
    80 rows 1.017, 1.014; 192 rows 1.574, 1.569; with parts by Hopper's kernel, which is launched
    early, 128 rows 1.250, 1.203. By more programs of one row 256 rows took 0.3% less, but 128 rows
    4% more: they were in the way of what is launched beside them.
    """
    rows, warps = max(1, 2048 // block_h), _warps(block_h, num_rows, coded)
    if parts > 1:
        warps = max(warps, min(16, rows * block_h // (32 * _PARTED)))
    return rows, warps


def _launch(
    x: Tensor,
    x_bias: Tensor | None,
    scales: tuple[Tensor, Tensor] | None,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor | CodedRows,
    total: Tensor | None,
    *,
    centred: bool,
    offset: float,
    chosen: tuple[Tensor, int] | None = None,
    form: RowForm | None,
) -> None:
    """Fill ``out`` and ``total`` from ``x [parts, outer, inner, H]``, not empty.

    ``residual`` is ``[outer, inner, H]``; the other tensors are contiguous.
    """
    if residual is not None and residual.stride(-1) != 1:
        residual = residual.contiguous()
    parts, outer_rows, inner_rows, hidden_size = x.shape
    num_rows = outer_rows * inner_rows
    strides, residual_strides = x.stride()[1:3], None if residual is None else residual.stride()[:2]
    if outer_rows == 1:
        # One kernel for any number of rows, without a division: Triton compiles others for 1, for
        # multiples of 16 and for the rest.
        inner_rows, strides = 1, (x.stride(2), 0)
        residual_strides = None if residual is None else (residual.stride(1), 0)
    block_h = triton.next_power_of_2(hidden_size)
    plain = chosen is None and form is None
    block_rows, num_warps = _tile(block_h, num_rows, parts if plain else 1, form is not None)
    ids, num_chosen = chosen or (None, 0)
    codes = out if isinstance(out, CodedRows) else None
    _norm_kernel[(triton.cdiv(num_rows, block_rows),)](
        x,
        x_bias,
        *(scales or (None, None)),
        residual,
        weight,
        bias,
        ids,
        out if codes is None else codes.codes,
        codes and codes.scales,
        form and form.scale,
        total,
        num_rows,
        inner_rows,
        # A stride that is not used is always the same: kernels are compiled for multiples of 16.
        (x.stride(0) if parts > 1 else 0, *strides),
        residual_strides,
        num_chosen,
        eps,
        H=hidden_size,
        BLOCK_H=block_h,
        BLOCK_ROWS=block_rows,
        PARTS=parts,
        CENTRED=centred,
        OFFSET=offset,
        ELEMENT=getattr(tl, str(out.dtype).removeprefix("torch.")),
        PAIRS=codes is not None and codes.pairs,
        num_warps=num_warps,
        **pdl_options(x.device),
    )
