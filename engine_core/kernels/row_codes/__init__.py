"""Rows of activations as 8-bit floats (e4m3), with a scale for each, as matrix units take them.

A row's scale needs all of the row. So the operation that makes whole rows, a norm or an activation,
can quantise them too (:class:`RowForm`), and no launch of its own reads them again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine_core.kernels.codes import E4M3_TOP
from engine_core.kernels.gpu import gpu_of

__all__ = [
    "BLOCK",
    "FP8",
    "FP8_MAX",
    "CodedRows",
    "RowForm",
    "fits",
    "paired",
    "quantize_rows",
    "reference_quantize_rows",
]

FP8 = torch.float8_e4m3fn
# The largest number of e4m3.
FP8_MAX = E4M3_TOP
# Columns within which pairs lie.
BLOCK = 128
# Columns of a row that a program holds at most.
_MOST_COLUMNS = 1 << 15


@dataclass(frozen=True, slots=True, eq=False)
class RowForm:
    """The form in which a product takes its rows.

    Attributes:
        scale: ``[]`` float32, the scale of every row; None to measure each.
        pairs: whether the codes are :func:`paired`.
    """

    scale: Tensor | None = None
    pairs: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class CodedRows:
    """Rows ``[..., K]`` as ``codes * scales``.

    Attributes:
        codes: ``[..., K]`` e4m3, contiguous; in the order of :func:`paired` if ``pairs``.
        scales: float32, one of each row, in their order.
        dtype: of the numbers that were quantised.
        pairs: as of :class:`RowForm`.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype
    pairs: bool

    @classmethod
    def of(cls, x: Tensor, form: RowForm) -> CodedRows:
        """The numbers ``[..., K]`` in this form."""
        k = x.shape[-1]
        codes, scales = quantize_rows(x.reshape(-1, k), form.scale, pairs=form.pairs)
        return cls(codes.view(x.shape), scales, x.dtype, form.pairs)

    @property
    def shape(self) -> torch.Size:
        """``[..., K]``."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        """The codes' device."""
        return self.codes.device

    def numel(self) -> int:
        """How many numbers there are."""
        return self.codes.numel()

    def numbers(self) -> Tensor:
        """``[..., K]``, multiplied in float32 and rounded once."""
        codes = self.codes.view(-1, self.shape[-1])
        if self.pairs:
            halves = codes.view(torch.uint8).view(
                len(codes), codes.shape[1] // BLOCK, BLOCK // 2, 2
            )
            codes = halves.transpose(2, 3).reshape(codes.shape).view(FP8)
        return (codes.float() * self.scales.unsqueeze(1)).to(self.dtype).view(self.shape)


def fits(columns: int) -> bool:
    """Whether kernels quantise rows of so many columns."""
    return columns <= _MOST_COLUMNS


def paired(codes: Tensor) -> Tensor:
    """``[N, K]``, K a multiple of 128, with columns j and j + 64 of each 128 as neighbours.

    A product takes pairs of codes out of a register by few instructions then, and needs the rows
    that it multiplies in runs of 64.
    """
    halves = codes.view(torch.uint8).view(len(codes), codes.shape[1] // BLOCK, 2, BLOCK // 2)
    return halves.transpose(2, 3).reshape(codes.shape).view(FP8)


def reference_quantize_rows(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """:func:`quantize_rows` in plain torch."""
    numbers = x.float()
    scales = numbers.abs().amax(dim=1) / FP8_MAX if scale is None else scale.expand(len(x))
    divisor = torch.where(scales == 0, 1, scales).unsqueeze(1)
    return (numbers / divisor).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales


def quantize_rows(
    x: Tensor, scale: Tensor | None = None, *, pairs: bool = False
) -> tuple[Tensor, Tensor]:
    """e4m3 codes of ``x [M, K]`` and the scales ``[M]`` float32, such that codes * scales is near.

    The greatest number of a row becomes 448. A ``scale []`` that is given is that of every row:
    what it does not reach becomes 448 or -448. The codes are :func:`paired` if ``pairs``.
    """
    if gpu_of(x.device) is None or not fits(x.shape[1]) or x.stride(-1) != 1:
        codes, scales = reference_quantize_rows(x, scale)
        return paired(codes) if pairs else codes, scales
    from engine_core.kernels.row_codes import triton

    return triton.quantize_rows(x, scale, pairs=pairs)
