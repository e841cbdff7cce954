"""Codes of 4 bits in the blocks of rows that torch's kernel for a CPU multiplies.

A block has the bytes of its rows one column of codes after the other. A byte has the code of one of
its first rows in the low half, and that of one of the others in the high half.
"""

from __future__ import annotations

from torch import Tensor

from engine_core.kernels import compiled
from engine_core.kernels.code_blocks.reference import pack_blocks as _pack_by_reference
from engine_core.kernels.code_blocks.reference import unpack_blocks

__all__ = ["pack_blocks", "unpack_blocks"]

# The kernel turns squares of so many rows and bytes.
_SIDE = 8


def pack_blocks(pairs: Tensor, block: int, out: Tensor) -> None:
    """Write rows of codes to ``out`` as blocks.

    Args:
        pairs: ``[N, K / 2]`` uint8, columns 2j and 2j + 1 in a byte, 2j in the low half.
        block: rows of a block, an even divisor of N.
        out: uint8 of the same shape, contiguous.
    """
    square = pairs.shape[1] % _SIDE == 0 and block % (2 * _SIDE) == 0
    aligned = pairs.is_contiguous() and (pairs.data_ptr() | out.data_ptr()) % _SIDE == 0
    if square and aligned and compiled.available():
        compiled.kernels("code_blocks").pack_blocks(pairs, block, out)
    else:
        _pack_by_reference(pairs, block, out)
