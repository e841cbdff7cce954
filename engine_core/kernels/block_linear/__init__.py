"""Matrices in the blocks of GGUF files: products on a CPU, and their form for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_core.kernels import compiled
from engine_core.kernels.block_linear.forms import FORMS, group_weight, pack_blocks

__all__ = ["FORMS", "block_linear", "group_weight", "is_fast", "pack_blocks", "take_rows"]

_DTYPES = (torch.float32, torch.bfloat16)


def is_fast() -> bool:
    """Whether the CPU has instructions for products of bytes: AVX2 or VNNI.

    Without them 16 rows take twice as long as by numbers, and one row two thirds.
    """
    if not compiled.available():
        return False
    native = compiled.kernels("block_linear")
    return bool(native.instructions() != native.PORTABLE)


def block_linear(
    x: Tensor, panels: Tensor, type_name: str, bias: Tensor | None, out: Tensor
) -> Tensor:
    """``x @ matrix.T + bias``, the activations quantised to 8 bits in groups of 32.

    Args:
        x: ``[M, K]`` float32, bfloat16 or float16.
        panels: the matrix ``[N, K]`` as :func:`pack_blocks` gives it.
        type_name: its type, one of :data:`FORMS`.
        bias: ``[N]`` in x's dtype, or None.
        out: ``[M, N]`` in x's dtype, whose rows may be parts of longer ones; it is returned.
    """
    if x.dtype not in _DTYPES:
        wide = torch.empty(out.shape)
        return out.copy_(
            block_linear(x.float(), panels, type_name, None if bias is None else bias.float(), wide)
        )
    if x.shape[0]:
        compiled.kernels("block_linear").block_linear(x.contiguous(), panels, type_name, bias, out)
    return out


def take_rows(ids: Tensor, panels: Tensor, type_name: str, out: Tensor) -> Tensor:
    """Rows of a matrix in panels as numbers: ids ``[M]`` int64, out ``[M, K]``, returned."""
    if out.dtype not in _DTYPES:
        return out.copy_(take_rows(ids, panels, type_name, torch.empty(out.shape)))
    if len(ids):
        compiled.kernels("block_linear").take_rows(ids.contiguous(), panels, type_name, out)
    return out
