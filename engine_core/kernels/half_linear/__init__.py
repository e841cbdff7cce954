"""Matrices of bfloat16 or float16 numbers that multiply float32 activations, on a CPU.

Where a CPU has no products of such numbers, a model of them is computed in float32. Its weights
stay 16 bits in memory and become float32 in registers, which changes no number.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from engine_core.kernels import compiled

__all__ = [
    "HALVES",
    "as_halves",
    "half_linear",
    "pack_halves",
    "panel_width",
    "unpack_halves",
]

# Types of 16 bits in which matrices may be kept.
HALVES = (torch.bfloat16, torch.float16)


@cache
def panel_width() -> int:
    """Rows of a matrix that a panel has; 0 where no kernel can be compiled: it takes AVX2."""
    if not compiled.available():
        return 0
    width: int = compiled.kernels("half_linear").panel_width()
    return width


def as_halves(weight: Tensor) -> Tensor | None:
    """A float32 matrix in the type of 16 bits that has each of its numbers; None if none has."""
    for dtype in HALVES:
        # Nearly every matrix is told by its first row.
        if _equal(weight[:1], weight[:1].to(dtype)):
            halves = weight.to(dtype)
            if _equal(weight, halves):
                return halves
    return None


def _equal(weight: Tensor, halves: Tensor) -> bool:
    return torch.equal(halves.float(), weight)


def _order(dtype: torch.dtype) -> Tensor:
    """Which row of a panel each of its places has.

    Of bfloat16 a word of 32 bits has a row of the first half and one of the second, so that one
    operation on words makes float32 of half of them.
    """
    rows = torch.arange(panel_width())
    return rows.view(2, -1).t().flatten() if dtype is torch.bfloat16 else rows


def pack_halves(weight: Tensor) -> Tensor:
    """A matrix ``[N, K]`` of 16 bits as ``[panels, K, rows of a panel]``; the last is filled up."""
    width = panel_width()
    short = -len(weight) % width
    if short:
        weight = torch.cat((weight, weight.new_zeros(short, weight.shape[1])))
    panels = weight.view(-1, width, weight.shape[1])[:, _order(weight.dtype)]
    return panels.transpose(1, 2).contiguous()


def unpack_halves(panels: Tensor, ids: Tensor) -> Tensor:
    """Rows of a matrix in panels, by their numbers: ids ``[M]`` int64 to ``[M, K]`` of 16 bits."""
    width = panels.shape[2]
    places = torch.empty(width, dtype=torch.int64)
    places[_order(panels.dtype)] = torch.arange(width)
    return panels[ids // width, :, places[ids % width]]


def half_linear(x: Tensor, panels: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """``x @ matrix.T + bias``, in float32; of each row the same as alone.

    Args:
        x: ``[M, K]`` float32.
        panels: the matrix ``[N, K]`` as :func:`pack_halves` gives it.
        bias: ``[N]`` float32, or None.
        out: ``[M, N]`` float32, whose rows may be parts of longer ones; it is returned.
    """
    if x.shape[0]:
        compiled.kernels("half_linear").half_linear(x.contiguous(), panels, bias, out)
    return out
