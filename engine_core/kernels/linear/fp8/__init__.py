"""Linears whose weight is kept in 8-bit floats (e4m3), with a scale for each row or block of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine_core.kernels.gpu import GPU, gpu_of
from engine_core.kernels.linear import tiles
from engine_core.kernels.linear.coded import CodedWeight
from engine_core.kernels.row_codes import (
    BLOCK,
    FP8,
    CodedRows,
    RowForm,
    paired,
    reference_quantize_rows,
)

# BLOCK columns share a scale, of a weight whose rows have several, too.
_ROWS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight(CodedWeight):
    """A matrix ``[N, K]`` as ``codes * scales``.

    Make it by :meth:`of` or :meth:`quantized`.

    Attributes:
        codes: ``[N, K]`` e4m3, contiguous; where K is a multiple of 128 in the order of
            :func:`paired`.
        scales: float32, contiguous: ``[N]``, one of each row; or ``[ceil(K / 128), N]``, one of
            each 128 columns of a row.
        dtype: of what is multiplied by it.
        input_scale: ``[]`` float32 of activations that were calibrated; None to measure each row.
        quantizes_rows: whether many rows are quantised too, where that is faster.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype
    input_scale: Tensor | None = None
    quantizes_rows: bool = True

    @classmethod
    def of(
        cls,
        codes: Tensor,
        scales: Tensor,
        dtype: torch.dtype,
        input_scale: Tensor | None = None,
        *,
        quantizes_rows: bool = True,
    ) -> Fp8Weight:
        """The matrix of codes in their plain order; the rest as the attributes."""
        codes = paired(codes) if codes.shape[1] % BLOCK == 0 else codes
        return cls(codes, scales, dtype, input_scale, quantizes_rows)

    @classmethod
    def quantized(cls, weight: Tensor) -> Fp8Weight:
        """``weight [N, K]`` with a scale for each row, by which its greatest number becomes 448."""
        codes = torch.empty_like(weight, dtype=FP8)
        scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        # In parts, so that temporaries stay small.
        for start in range(0, len(weight), _ROWS):
            part = slice(start, start + _ROWS)
            codes[part], scales[part] = reference_quantize_rows(weight[part])
        return cls.of(codes, scales, weight.dtype)

    @property
    def shape(self) -> torch.Size:
        """``(N, K)``."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def multiplies_codes(self) -> bool:
        """Whether many rows are quantised, and each row of the weight has one scale."""
        return self.quantizes_rows and self.scales.dim() == 1

    def tile(self, rows: int, gated: bool, gpu: GPU | None) -> tiles.Tile | None:
        """By the table of 8-bit floats."""
        if not self.codes.is_contiguous() or self.codes.data_ptr() % 16:
            return None
        n, k = self.shape
        blocks = self.scales.dim() > 1
        many = self.multiplies_codes and multiplies_in_fp8(n, k, self.dtype, gpu)
        return tiles.choose_fp8_tile(rows, n, k, gated, gpu, blocks=blocks, quantizes_rows=many)

    def reader(self) -> Any:
        """Pairs of codes."""
        from engine_core.kernels.linear.readers.triton import Fp8Reader

        return Fp8Reader.of(self)

    @property
    def row_form(self) -> RowForm:
        """The form of rows that are multiplied by the codes."""
        return RowForm(self.input_scale, self.shape[1] % BLOCK == 0)

    def product(self, x: Tensor | CodedRows, bias: Tensor | None) -> Tensor | None:
        """Of rows that are quantised too, where matrix units can and the weight has row scales."""
        shape = (*self.shape, x.dtype, gpu_of(x.device))
        if not self.multiplies_codes or not x.numel() or not multiplies_in_fp8(*shape):
            return None
        return _product(x, self, bias)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The numbers ``[N, K]``, multiplied in float32 and rounded once."""
        n, k = self.shape
        out = torch.empty(n, k, dtype=dtype, device=self.codes.device)
        codes, scales = self.codes.to(dtype), self.scales.view(-1, n).T
        if k % BLOCK == 0:
            codes = codes.view(n, -1, BLOCK // 2, 2).transpose(2, 3)
            torch.mul(codes, scales[..., None, None], out=out.view(codes.shape))
            return out
        width = k if self.scales.dim() == 1 else BLOCK
        return torch.mul(codes, scales.repeat_interleave(width, dim=1)[:, :k], out=out)


def multiplies_in_fp8(n: int, k: int, dtype: torch.dtype, gpu: GPU | None) -> bool:
    """Whether matrix units multiply quantised bfloat16 rows by a weight with a scale a row."""
    able = gpu is not None and gpu.capability >= (8, 9)
    return able and n % 16 == k % 16 == 0 and dtype == torch.bfloat16


def has_kernel(
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    gpu: GPU | None,
    *,
    gated: bool = False,
    quantizes_rows: bool = True,
) -> bool:
    """Whether a kernel that can fuse what follows takes 8-bit floats ``[n, k]`` for such rows.

    ``quantizes_rows`` says whether they multiply many rows quantised too, where matrix units can.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    many = quantizes_rows and multiplies_in_fp8(n, k, dtype, gpu)
    tile = tiles.choose_fp8_tile(rows, n, k, gated, gpu, quantizes_rows=many)
    return tile is not None


def adds_residual(rows: int, n: int, k: int, dtype: torch.dtype, gpu: GPU | None) -> bool:
    """Whether the norm after the linear applies the scales of a weight that quantises rows."""
    return not has_kernel(rows, n, k, dtype, gpu) and scales_apart(rows, n, k, dtype, gpu)


def scales_apart(rows: int, n: int, k: int, dtype: torch.dtype, gpu: GPU | None) -> bool:
    """Whether the scales of a product are applied to its result, by a kernel of their own.

    With unit scales cuBLAS has faster kernels for few rows. us on an H200 with scales of rows and
    without: 128 rows by 4096x4096 13.9, 8.2; by 6144x4096 14.3, 9.8; by 4096x14336 36.9, 21.0; by
    28672x4096 35.8, 36.4; 256 rows 14.1, 9.8; 14.7, 12.2; 37.4, 26.2; 51.1, 49.8; 2048 rows 49.8,
    48.7; 72.8, 72.9; 169.5, 164.2; 332.1, 387.5.
    """
    return rows <= 256 and n <= 8192 and multiplies_in_fp8(n, k, dtype, gpu)


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def unscaled(x: Tensor | CodedRows, weight: Fp8Weight) -> tuple[Tensor, Tensor]:
    """``x [..., K]``, quantised, times the weight's codes, ``[M, N]`` of x's dtype; x's scales."""
    x = _coded(x, weight)
    codes, kernel = _own_kernel(x, weight)
    if kernel is not None:
        kernels, tile = kernel
        return kernels.product(codes, None, weight.codes, None, None, tile, x.dtype), x.scales
    return _unscaled_by_cublas(codes, weight, x.dtype), x.scales


def unscaled_parts(x: Tensor | CodedRows, weight: Fp8Weight) -> tuple[Tensor, Tensor]:
    """:func:`unscaled` in parts ``[P, M, N]`` to be added up, float32 if they are several."""
    x = _coded(x, weight)
    codes, kernel = _own_kernel(x, weight, parted=True)
    if kernel is None:
        return _unscaled_by_cublas(codes, weight, x.dtype)[None], x.scales
    kernels, tile = kernel
    if tile.parts > 1:
        return kernels.sums_of_parts(codes, weight.codes, tile), x.scales
    return kernels.product(codes, None, weight.codes, None, None, tile, x.dtype)[None], x.scales


def _own_kernel(
    x: CodedRows, weight: Fp8Weight, *, parted: bool = False
) -> tuple[Tensor, tuple[Any, tiles.ProductTile] | None]:
    """x's codes as a matrix; Hopper's kernels and the tile, or None where cuBLAS is asked."""
    n, k = weight.shape
    codes = x.codes.view(-1, k)
    tile = tiles.choose_product_tile(len(codes), n, k, gpu_of(x.device), parted=parted)
    if tile is None:
        return codes, None
    from engine_core.kernels.launch.gluon import runs_gluon

    if not runs_gluon(x.device):
        return codes, None
    from engine_core.kernels.linear.fp8.hopper import triton as hopper

    fits = hopper.fits(codes, weight.codes)
    trusted = fits and hopper.is_trusted(x.device, x.dtype, len(codes), tile)
    return codes, (hopper, tile) if trusted else None


def _unscaled_by_cublas(codes: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    one = _one(codes.device)
    out: Tensor = torch._scaled_mm(
        codes, weight.codes.t(), one, one, out_dtype=dtype, use_fast_accum=True
    )
    return out


def _coded(x: Tensor | CodedRows, weight: Fp8Weight) -> CodedRows:
    return x if isinstance(x, CodedRows) else CodedRows.of(x, weight.row_form)


def _product(x: Tensor | CodedRows, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    n, k = weight.shape
    rows = x.numel() // k
    if scales_apart(rows, n, k, x.dtype, gpu_of(x.device)):
        from engine_core.kernels.linear.fp8 import triton

        product, scales = unscaled(x, weight)
        return triton.rescale(product, scales, weight.scales, bias).view(*x.shape[:-1], n)
    x = _coded(x, weight)
    codes, kernel = _own_kernel(x, weight)
    # Fast accumulation keeps fewer bits of the sums. Where rounding to bfloat16 alone errs by 0.17%
    # and quantising the rows by 2.6%, it makes an error of 0.13% at K 4096 and 0.29% at 14336.
    # Without it sums move to float32 every 128 columns, which takes up to 20% longer.
    if kernel is not None:
        kernels, tile = kernel
        given = (codes, x.scales, weight.codes, weight.scales, bias)
        out: Tensor = kernels.product(*given, tile, x.dtype)
    else:
        out = torch._scaled_mm(
            codes,
            weight.codes.t(),
            scale_a=x.scales.view(-1, 1),
            scale_b=weight.scales.view(1, -1),
            bias=bias,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
    return out.view(*x.shape[:-1], n)
