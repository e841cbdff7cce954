"""Readers of a weight: what the main loop of a linear asks for its tiles.

A reader is a named tuple of tensors, constants and these functions, each of which is given the
reader. Any epilogue goes with any reader. A cursor is a tensor or a tuple, of the reader's choice.

- ``prefetch(reader, rows, low, high, K, part, PARTS)``: bring the beginning of the weight's
  ``rows [BLOCK_N]`` from column ``low`` to ``high`` into the L2 cache.
- ``begin(reader, rows, cols, K)``: the cursor at ``cols [BLOCK_K]`` of rows that there are.
- ``load(reader, cursor, k_mask, EVEN_K)``: the tile ``[BLOCK_N, BLOCK_K]`` at the cursor, zeros
  outside of ``k_mask`` unless EVEN_K, and the cursor of the next. Any dtype: it becomes that of x.
  With PAIRS the tile is ``(low, high, weights)``: low and high ``[BLOCK_N, BLOCK_K / 2]`` are the
  columns j and j + 64 of each 128, weights 1 or ``[BLOCK_N, BLOCK_K / 128]`` what the products of
  128 columns are multiplied by.
- ``scale(reader, cursor, acc)``: the products ``[BLOCK_M, BLOCK_N]`` in float32, scaled, by the
  cursor behind the last tile.

The weight is older than all kernels: reading it does not wait for the kernel before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.launch.triton import prefetch_l2
from engine_core.kernels.linear.coded import CodedWeight
from engine_core.kernels.linear.fp8 import BLOCK, Fp8Weight


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
    PAIRS: Any = tl.constexpr(False)
    prefetch: Any = _prefetch
    begin: Any = _begin
    load: Any = _load
    scale: Any = _scale

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        n, k = self.weight.shape
        return n, k


# Two pairs of e4m3 numbers, a register, to those of the low bytes and those of the high ones as
# bfloat16 or float16: exponent and fraction move to their places, and a product makes up for the
# exponents' biases. Exact, subnormals too; NaN becomes 480.
_TO_BFLOAT16 = tl.constexpr("""{
.reg .b32 a, b, c, m;
shl.b32 a, $2, 8;
shl.b32 b, $2, 4;
shr.u32 c, $2, 4;
and.b32 b, b, 0x07f007f0;
and.b32 c, c, 0x07f007f0;
lop3.b32 b, a, 0x80008000, b, 0xea;
lop3.b32 c, $2, 0x80008000, c, 0xea;
mov.b32 m, 0x7b807b80;
mul.rn.bf16x2 $0, b, m;
mul.rn.bf16x2 $1, c, m;
}""")
_TO_FLOAT16 = tl.constexpr("""{
.reg .b32 a, b, c, m;
shl.b32 a, $2, 8;
shl.b32 b, $2, 7;
shr.u32 c, $2, 1;
and.b32 b, b, 0x3f803f80;
and.b32 c, c, 0x3f803f80;
lop3.b32 b, a, 0x80008000, b, 0xea;
lop3.b32 c, $2, 0x80008000, c, 0xea;
mov.b32 m, 0x5c005c00;
mul.rn.f16x2 $0, b, m;
mul.rn.f16x2 $1, c, m;
}""")


@triton.jit
def _prefetch_fp8(reader, rows, low, high, K, part, PARTS: tl.constexpr):
    """As of numbers, in multiples of 16 columns."""
    part = tl.cdiv(part, 16) * 16
    cols = low + tl.arange(0, PARTS) * part
    pointers = reader.weight + rows.to(tl.int64)[:, None] * (K // 2) + cols[None, :] // 2
    prefetch_l2(pointers, tl.broadcast_to(tl.minimum(high - cols, part)[None, :], pointers.shape))


@triton.jit
def _begin_fp8(reader, rows, cols, K):
    """The pointers to pairs; the rows' scales, or pointers to those of the first block."""
    HALF: tl.constexpr = cols.shape[0] // 2
    first = tl.min(cols, axis=0)
    pairs = tl.multiple_of(first // 2, HALF) + tl.arange(0, HALF)
    pointers = reader.weight + rows.to(tl.int64)[:, None] * (K // 2) + pairs[None, :]
    if reader.BLOCK:
        scales = reader.scales + first // reader.BLOCK * reader.rows + rows
    else:
        scales = tl.load(reader.scales + rows)
    return pointers, scales


@triton.jit
def _load_fp8(reader, cursor, k_mask, EVEN_K: tl.constexpr):
    pointers, scales = cursor
    HALF: tl.constexpr = pointers.shape[1]
    if EVEN_K:
        pairs = tl.load(pointers)
    else:
        inside = tl.reshape(k_mask, [HALF // 64, 2, 64])
        inside = tl.reshape(tl.max(inside.to(tl.int32), axis=1), [HALF]) > 0
        pairs = tl.load(pointers, mask=inside[None, :], other=0)
    if reader.ELEMENT == "bfloat16":
        low, high = tl.inline_asm_elementwise(
            _TO_BFLOAT16, "=r,=r,r", [pairs], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif reader.ELEMENT == "float16":
        low, high = tl.inline_asm_elementwise(
            _TO_FLOAT16, "=r,=r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        low = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        high = (pairs >> 8 & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    weights = 1.0
    if reader.BLOCK:
        # A tile has whole blocks: the scales are [BLOCK_N, blocks].
        BLOCKS: tl.constexpr = HALF * 2 // reader.BLOCK
        ptrs = scales[:, None] + (tl.arange(0, BLOCKS) * reader.rows)[None, :]
        if EVEN_K:
            weights = tl.load(ptrs)
        else:
            there = tl.max(tl.reshape(k_mask.to(tl.int32), [BLOCKS, reader.BLOCK]), axis=1) > 0
            weights = tl.load(ptrs, mask=there[None, :], other=0.0)
        scales += BLOCKS * reader.rows
    return (low, high, weights), (pointers + HALF, scales)


@triton.jit
def _scale_fp8(reader, cursor, acc):
    if not reader.BLOCK:
        acc *= cursor[1][None, :]
    return acc


class Fp8Reader(NamedTuple):
    """A weight ``[N, K]`` of 8-bit floats, K a multiple of 128, with float32 scales.

    Tiles are as wide as some blocks of 128 columns; if a row has several scales, as one of them
    unless the mode is "vector".

    Attributes:
        weight: the codes, as pairs.
        scales: ``[N]``, or ``[blocks, N]``.
        rows: N.
        BLOCK: columns of a block that has a scale; 0 for one scale a row.
        ELEMENT: what codes become by instructions of an NVIDIA GPU; None to leave it to Triton.
    """

    weight: Tensor
    scales: Tensor
    rows: int
    BLOCK: Any
    ELEMENT: Any
    PAIRS: Any = tl.constexpr(True)
    prefetch: Any = _prefetch_fp8
    begin: Any = _begin_fp8
    load: Any = _load_fp8
    scale: Any = _scale_fp8

    @classmethod
    def of(cls, weight: Fp8Weight) -> Fp8Reader:
        """The reader of a weight."""
        native = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
        return cls(
            weight.codes.view(torch.int16),
            weight.scales,
            len(weight),
            tl.constexpr(0 if weight.scales.dim() == 1 else BLOCK),
            tl.constexpr(native.get(weight.dtype) if weight.codes.is_cuda else None),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        n, pairs = self.weight.shape
        return n, 2 * pairs


def reader_of(weight: Tensor | CodedWeight) -> Any:
    """The reader of a weight."""
    return weight.reader() if isinstance(weight, CodedWeight) else DenseWeight(weight)
