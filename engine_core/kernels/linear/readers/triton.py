"""Readers of a weight: what the main loop of a linear asks for its tiles.

A reader is a named tuple of tensors, constants and these functions, each of which is given the
reader. Any epilogue goes with any reader. A cursor is a tensor or a tuple, of the reader's choice.

- ``prefetch(reader, rows, low, high, K, part, PARTS)``: bring the beginning of the weight's
  ``rows [BLOCK_N]`` from column ``low`` to ``high`` into the L2 cache.
- ``begin(reader, rows, cols, K)``: the cursor at ``cols [BLOCK_K]`` of rows that there are.
- ``load(reader, cursor, k_mask, EVEN_K)``: the tile ``[BLOCK_N, BLOCK_K]`` at the cursor, zeros
  outside of ``k_mask`` unless EVEN_K, and the cursor of the next. Any dtype: it becomes that of x.
- ``scale(reader, cursor, acc)``: the products ``[BLOCK_M, BLOCK_N]`` in float32, scaled, by the
  cursor behind the last tile.

The weight is older than all kernels: reading it does not wait for the kernel before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.launch.triton import prefetch_l2


@triton.jit
def _prefetch(reader, rows, low, high, K, part, PARTS: tl.constexpr):
    """The first PARTS times ``part`` columns of each row's run."""
    cols = low + tl.arange(0, PARTS) * part
    pointers = reader.weight + rows.to(tl.int64)[:, None] * K + cols[None, :]
    size = tl.minimum(high - cols, part) * (reader.weight.dtype.element_ty.primitive_bitwidth // 8)
    prefetch_l2(pointers, tl.broadcast_to(size[None, :], pointers.shape))


@triton.jit
def _begin(reader, rows, cols, K):
    return reader.weight + rows.to(tl.int64)[:, None] * K + cols[None, :]


@triton.jit
def _load(reader, cursor, k_mask, EVEN_K: tl.constexpr):
    tile = tl.load(cursor) if EVEN_K else tl.load(cursor, mask=k_mask[None, :], other=0.0)
    return tile, cursor + tile.shape[1]


@triton.jit
def _scale(reader, cursor, acc):
    return acc


class DenseWeight(NamedTuple):
    """A weight ``[N, K]`` of numbers, contiguous, that begins at a multiple of 16 bytes."""

    weight: Tensor
    prefetch: Any = _prefetch
    begin: Any = _begin
    load: Any = _load
    scale: Any = _scale

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        n, k = self.weight.shape
        return n, k
