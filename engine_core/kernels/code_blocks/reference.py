"""Codes in blocks, by NumPy, which turns bytes in two thirds of torch's time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def pack_blocks(pairs: Tensor, block: int, out: Tensor) -> None:
    """See :func:`engine_core.kernels.code_blocks.pack_blocks`."""
    width = pairs.shape[1]
    halves = _exchange(pairs.contiguous().numpy().reshape(-1, 2, block // 2, width))
    turned = halves.reshape(-1, block, width).transpose(0, 2, 1)
    np.copyto(out.numpy().reshape(-1, width, block), turned)


def unpack_blocks(packed: Tensor, block: int) -> Tensor:
    """The rows of codes of which :func:`pack_blocks` makes ``packed [N, K / 2]``."""
    width = packed.shape[1]
    rows = packed.contiguous().numpy().reshape(-1, width, block).transpose(0, 2, 1)
    halves = np.ascontiguousarray(rows).reshape(-1, 2, block // 2, width)
    return torch.from_numpy(_exchange(halves).reshape(packed.shape))


def _exchange(rows: NDArray[Any]) -> NDArray[Any]:
    """The high half of each byte of the first rows in the place of the others' low half, and back.

    ``rows`` are ``[blocks, 2, rows of a half, bytes]`` uint8.
    """
    first, other = rows[:, 0], rows[:, 1]
    halves = np.empty_like(rows)
    changed = first >> 4
    changed ^= other
    changed &= 15
    np.bitwise_xor(other, changed, out=halves[:, 1])
    changed <<= 4
    np.bitwise_xor(first, changed, out=halves[:, 0])
    return halves
