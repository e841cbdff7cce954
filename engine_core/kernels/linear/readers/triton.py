"""Readers of a weight: what the main loop of a linear asks for its tiles.

A reader is a named tuple of tensors, constants and these functions, each of which is given the
reader. Any epilogue goes with any reader. A cursor is a tensor or a tuple, of the reader's choice.

- ``prefetch(reader, rows, low, high, K, part, PARTS)``: bring the beginning of the weight's
  ``rows [BLOCK_N]`` from column ``low`` to ``high`` into the L2 cache.
- ``begin(reader, rows, cols, K)``: the cursor at ``cols [BLOCK_K]`` of rows that there are.
- ``load(reader, cursor, k_mask, EVEN_K)``: the tile ``[BLOCK_N, BLOCK_K]`` at the cursor, zeros
  outside of ``k_mask`` unless EVEN_K, and the cursor of the next. Any dtype: it becomes that of x.
  With PARTS of 2 or 4 the tile is a tuple of so many ``[BLOCK_N, BLOCK_K / PARTS]``: each block of
  ``PARTS * APART`` columns lies in runs of APART, of which each part has one. Behind them, unless
  RUN is 0, is what the products of RUN parts are multiplied by, for one run after another: each
  ``[BLOCK_N, blocks]``. With MINIMA, which is for a RUN of 1, follows for each run what the sum of
  its inputs is multiplied by, to be added.
- ``scale(reader, cursor, acc)``: the products ``[BLOCK_M, BLOCK_N]`` in float32, scaled, by the
  cursor behind the last tile.

The weight is older than all kernels: reading it does not wait for the kernel before.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.launch.triton import prefetch_l2
from engine_core.kernels.linear.coded import CodedWeight
from engine_core.kernels.linear.fp8 import Fp8Weight
from engine_core.kernels.linear.groups import GroupWeight
from engine_core.kernels.row_codes import BLOCK


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
    PARTS: Any = tl.constexpr(1)
    RUN: Any = tl.constexpr(0)
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
        ELEMENT: what codes become by instructions of an NVIDIA GPU; "" to leave it to Triton.
    """

    weight: Tensor
    scales: Tensor
    rows: int
    BLOCK: Any
    ELEMENT: Any
    PARTS: Any = tl.constexpr(2)
    APART: Any = tl.constexpr(64)
    RUN: Any = tl.constexpr(0)
    MINIMA: Any = tl.constexpr(False)
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
            RUN=tl.constexpr(0 if weight.scales.dim() == 1 else 2),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        n, pairs = self.weight.shape
        return n, 2 * pairs


# By the element, in pairs as a register holds them: floats whose last bit of fraction is 1, so that
# a code added to their bits is added to them (128 of bfloat16, 1024 of float16); the number 1; the
# instructions' name of the pairs.
_FLOATS = {
    "bfloat16": (0x43004300, 0x3F803F80, "bf16x2", 128.0),
    "float16": (0x64006400, 0x3C003C00, "f16x2", 1024.0),
}


def offset_of(element: str, bits: int) -> float:
    """Difference of the floats that instructions make to the codes."""
    if not element or (bits == 8 and element == "bfloat16"):
        return 0.0
    # Codes of 8 bits have a sign, which float16 takes as 128 more.
    return _FLOATS[element][3] + (128.0 if bits == 8 else 0.0)


@cache
def instructions(element: str, bits: int, zero: float | None) -> tuple[str, str]:
    """PTX from registers of words to four registers of pairs of numbers, and its constraints.

    Operands are the words, the high bits of 5 and 6, and what is added to each part, unless
    ``zero`` says it for all: then the products read the weight from registers, and from shared
    memory if an operand is the same everywhere (Triton 3.6). Minus the offset leaves it in.
    """
    magic, one, kind, _ = _FLOATS[element]
    inputs = 1 if bits == 4 else 2
    lines = [f".reg .b32 w, s, p0, p1, p2, p3, one, z; mov.b32 one, {one:#x};"]
    if zero is not None:
        added = torch.tensor([-zero - offset_of(element, bits)] * 2)
        pair = int(added.to(getattr(torch, element)).view(torch.int32)) & 0xFFFFFFFF
        lines.append(f"mov.b32 z, {pair:#x};")
    for part in range(4):
        p, more = f"p{part}", f"${4 + inputs + part}" if zero is None else "z"
        if bits == 8:
            lines.append(f"prmt.b32 w, $4, $5, {(4 + part) << 8 | part:#x};")
            if element == "bfloat16":
                # 7 bits of fraction: the sign, -128, is added by itself.
                lines.append(f"lop3.b32 {p}, w, 0x007f007f, 0x43004300, 0xea;")
                lines.append("lop3.b32 s, w, 0x00800080, 0xc300c300, 0xea;")
                lines.append(f"fma.rn.{kind} {p}, {p}, one, s;")
            else:
                lines.append(f"lop3.b32 {p}, w, 0x00ff00ff, 0x64806480, 0x6a;")
        else:
            lines += _shifted("$4", -4 * part)
            lines.append(f"lop3.b32 {p}, w, 0x000f000f, {magic:#x}, 0xea;")
        if bits in (5, 6):
            lines += _shifted("$5", 4 - (bits - 4) * part)
            lines.append(f"lop3.b32 {p}, w, {0x00100010 * (2 ** (bits - 4) - 1):#x}, {p}, 0xea;")
        if zero is None or zero + offset_of(element, bits):
            lines.append(f"fma.rn.{kind} {p}, {p}, one, {more};")
    lines += [f"mov.b32 ${part}, p{part};" for part in range(4)]
    operands = inputs + (4 if zero is None else 0)
    return "{\n" + "\n".join(lines) + "\n}", ",".join(["=r"] * 4 + ["r"] * operands)


def _shifted(register: str, left: int) -> list[str]:
    """Its bits in w, some places to the left."""
    if left < 0:
        return [f"shr.u32 w, {register}, {-left};"]
    return [f"shl.b32 w, {register}, {left};"]


@triton.jit
def _prefetch_groups(reader, rows, low, high, K, part, PARTS: tl.constexpr):
    """As of numbers, in multiples of 128 columns; of 5 and 6 bits the low four. And all zeros."""
    SIZE: tl.constexpr = reader.words.dtype.element_ty.primitive_bitwidth // 8
    BLOCK: tl.constexpr = 4 * reader.APART
    part = tl.cdiv(part, 128) * 128
    cols = low + tl.arange(0, PARTS) * part
    wide = rows.to(tl.int64)[:, None] * (tl.cdiv(K, BLOCK) * reader.APART)
    pointers = reader.words + wide + cols[None, :] // 4
    size = tl.maximum(tl.minimum(high - cols, part), 0) // 128 * (32 * SIZE)
    prefetch_l2(pointers, tl.broadcast_to(size[None, :], pointers.shape))
    if reader.ZEROS_AHEAD:
        # Each tile waits for its zeros: less long if they are near.
        group = tl.arange(0, reader.ZEROS_AHEAD)
        first = tl.min(rows, axis=0) // 16 * 16
        wanted = (group >= low * reader.GROUPS // K) & (group * K < high * reader.GROUPS)
        MOST: tl.constexpr = max(16, rows.shape[0])
        size = tl.minimum(reader.rows - first, MOST)
        zeros = reader.zeros + tl.minimum(group, reader.GROUPS - 1) * reader.rows + first
        prefetch_l2(zeros, tl.where(wanted, size, 0))


@triton.jit
def _begin_groups(reader, rows, cols, K):
    """The pointers to words, the rows, the block, and the rows' own scales and zeros."""
    WIDTH: tl.constexpr = cols.shape[0] // 4
    BLOCK: tl.constexpr = 4 * reader.APART
    first = tl.min(cols, axis=0)
    words = tl.multiple_of(first // 4, WIDTH) + tl.arange(0, WIDTH)
    wide = rows.to(tl.int64)[:, None] * (tl.cdiv(K, BLOCK) * reader.APART)
    scales = _float_of(reader.scales, 0, rows, reader.rows, reader.FLOAT)
    added = _added(reader, rows, 0)
    return reader.words + wide + words[None, :], rows, first // BLOCK, scales, added


@triton.jit
def _float_of(values, group, rows, N, FLOAT: tl.constexpr):
    """The numbers of rows ``[BLOCK_N]`` in ``values [groups, N]``, as float32.

    If FLOAT names their 16 bits, ``values`` are pairs of them, int32: a load of 4 bytes is brought
    to shared memory ahead of its turn as those of words are, and a narrower one waits for memory.
    (Zeros would do the same, but products of them would be read from shared memory: Triton 3.6.)
    """
    if FLOAT == "":
        found = tl.load(values + group * N + rows).to(tl.float32)
    else:
        pairs = tl.load(values + group * (N // 2) + rows // 2)
        bits = (pairs >> rows % 2 * 16).to(tl.int16)
        if FLOAT == "bfloat16":
            found = bits.to(tl.bfloat16, bitcast=True).to(tl.float32)
        else:
            found = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return found


@triton.jit
def _added(reader, rows, group):
    """Minus the zeros of a group, as float32, with what the codes' floats are too large by."""
    if reader.zeros is None:
        zeros = tl.full(rows.shape, reader.MIDDLE, tl.float32)
    else:
        zeros = tl.load(reader.zeros + group * reader.rows + rows).to(tl.float32)
    return 0.0 - zeros - reader.OFFSET


@triton.jit
def _bits_of(added, shape: tl.constexpr, ELEMENT: tl.constexpr):
    if ELEMENT == "bfloat16":
        bits = added.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        bits = added.to(tl.float16).to(tl.int16, bitcast=True)
    return tl.broadcast_to(bits[:, None], shape)


@triton.jit
def _load_high(reader, rows, block):
    """The bits of codes beyond four, of one block, in the lowest bits of int16."""
    LANES: tl.constexpr = reader.APART
    BYTES: tl.constexpr = LANES * (reader.BITS - 4) // 2
    lanes = tl.arange(0, LANES)
    blocks = tl.cdiv(reader.columns, 4 * LANES)
    pointers = reader.high + rows.to(tl.int64)[:, None] * (blocks * BYTES)
    high = tl.load(pointers + block * BYTES + (lanes % BYTES)[None, :]).to(tl.int16)
    if BYTES < LANES:
        high = high >> (lanes // BYTES * 4).to(tl.int16)[None, :] & 15
    return high


@triton.jit
def _code(words, high, PART: tl.constexpr, BITS: tl.constexpr):
    """The codes of one part, int32."""
    code = words << (24 - 8 * PART) >> 24 if BITS == 8 else words >> 4 * PART & 15
    if high is not None:
        MASK: tl.constexpr = 1 if BITS == 5 else 3
        code |= (high.to(tl.int32) >> (BITS - 4) * PART & MASK) << 4
    return code


@triton.jit
def _decode(reader, words, high, a0, a1, a2, a3):
    """The numbers of the four parts, without their scales, from words and what is added."""
    if reader.ELEMENT != "":
        given = (words,) if high is None else (words, high)
        if reader.zeros is not None:
            given += (
                _bits_of(a0, words.shape, reader.ELEMENT),
                _bits_of(a1, words.shape, reader.ELEMENT),
                _bits_of(a2, words.shape, reader.ELEMENT),
                _bits_of(a3, words.shape, reader.ELEMENT),
            )
        if reader.ELEMENT == "bfloat16":
            p0, p1, p2, p3 = tl.inline_asm_elementwise(
                reader.ASM,
                reader.OPERANDS,
                given,
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        else:
            p0, p1, p2, p3 = tl.inline_asm_elementwise(
                reader.ASM,
                reader.OPERANDS,
                given,
                (tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
    else:
        wide = words.to(tl.int32)
        p0 = _code(wide, high, 0, reader.BITS).to(tl.float32) + a0[:, None]
        p1 = _code(wide, high, 1, reader.BITS).to(tl.float32) + a1[:, None]
        p2 = _code(wide, high, 2, reader.BITS).to(tl.float32) + a2[:, None]
        p3 = _code(wide, high, 3, reader.BITS).to(tl.float32) + a3[:, None]
    return p0, p1, p2, p3


@triton.jit
def _of_group(reader, values, KIND: tl.constexpr, rows, group):
    """The scales (KIND 0) or minima (1) of a group, ``[BLOCK_N, 1]`` float32."""
    if reader.headers is None:
        found = _float_of(values, group, rows, reader.rows, reader.FLOAT)
    else:
        run = group // reader.SHARING
        of_run = (run * reader.rows + rows) * reader.SHARING + group % reader.SHARING
        header = KIND * (reader.GROUPS // reader.SHARING) + run
        found = tl.load(values + of_run).to(tl.float32)
        found *= tl.load(reader.headers + header * reader.rows + rows).to(tl.float32)
    return found[:, None]


@triton.jit
def _load_groups(reader, cursor, k_mask, EVEN_K: tl.constexpr):
    pointers, rows, block, scales, added = cursor
    WIDTH: tl.constexpr = pointers.shape[1]
    LANES: tl.constexpr = reader.APART
    if EVEN_K or WIDTH == LANES:
        # A row has whole blocks, and a tile of one is never beyond them.
        words = tl.load(pointers)
    else:
        inside = tl.reshape(k_mask, [WIDTH // LANES, 4, LANES])
        inside = tl.reshape(tl.max(inside.to(tl.int32), axis=1), [WIDTH]) > 0
        words = tl.load(pointers, mask=inside[None, :], other=0)
    high = None
    if reader.high is not None:
        tl.static_assert(WIDTH == LANES, "codes of 5 and 6 bits are read by blocks")
        high = _load_high(reader, rows, block)
    following = (pointers + WIDTH, rows, block + WIDTH // LANES, scales, added)
    if reader.RUN == 0:
        tile = _decode(reader, words, high, added, added, added, added)
    elif reader.RUN == 4:
        group = block // reader.SPAN
        own = _added(reader, rows, group)
        tile = _decode(reader, words, high, own, own, own, own)
        tile += (_of_group(reader, reader.scales, 0, rows, group),)
    elif reader.RUN == 2:
        # The last block may end in the middle: what is beyond is multiplied by zeros.
        g0, g1 = block * 2, tl.minimum(block * 2 + 1, reader.GROUPS - 1)
        a0, a1 = _added(reader, rows, g0), _added(reader, rows, g1)
        tile = _decode(reader, words, high, a0, a0, a1, a1)
        tile += (
            _of_group(reader, reader.scales, 0, rows, g0),
            _of_group(reader, reader.scales, 0, rows, g1),
        )
    else:
        g0, g1 = block * 4, tl.minimum(block * 4 + 1, reader.GROUPS - 1)
        g2 = tl.minimum(block * 4 + 2, reader.GROUPS - 1)
        g3 = tl.minimum(block * 4 + 3, reader.GROUPS - 1)
        a0, a1 = _added(reader, rows, g0), _added(reader, rows, g1)
        a2, a3 = _added(reader, rows, g2), _added(reader, rows, g3)
        tile = _decode(reader, words, high, a0, a1, a2, a3)
        tile += (
            _of_group(reader, reader.scales, 0, rows, g0),
            _of_group(reader, reader.scales, 0, rows, g1),
            _of_group(reader, reader.scales, 0, rows, g2),
            _of_group(reader, reader.scales, 0, rows, g3),
        )
        if reader.MINIMA:
            tile += (
                _of_group(reader, reader.minima, 1, rows, g0),
                _of_group(reader, reader.minima, 1, rows, g1),
                _of_group(reader, reader.minima, 1, rows, g2),
                _of_group(reader, reader.minima, 1, rows, g3),
            )
    return tile, following


@triton.jit
def _scale_groups(reader, cursor, acc):
    if reader.RUN == 0:
        acc *= cursor[3][None, :]
    return acc


class GroupReader(NamedTuple):
    """A weight of integers with scales of groups; tiles are as wide as a block if there are any.

    Attributes:
        words: ``[N, blocks, APART]``, as the weight has them.
        high: of 5 and 6 bits, as the weight has them, or None.
        scales: ``[N]``, or ``[groups, N]``; or pairs of neighbours, as int32.
        zeros: int8, ``[N]`` or ``[groups, N]``, or None.
        minima: as ``scales``, or None.
        headers: as the weight has them, or None.
        columns: K.
        rows: N.
        GROUPS: of a row.
        SPAN: blocks that share a scale, if a group is that large.
        SHARING: groups that share a header.
        BITS: of a code.
        MIDDLE: the zero where ``zeros`` has none.
        OFFSET: by which the instructions' floats are larger than the codes.
        ZEROS_AHEAD: a power of two, GROUPS at least, if zeros are prefetched, else 0.
        FLOAT: the name of 16-bit floats that scales and minima are pairs of; "" for no pairs.
        ELEMENT: what codes become by instructions of an NVIDIA GPU; "" to leave it to Triton.
        ASM: these instructions.
        OPERANDS: their constraints.
    """

    words: Tensor
    high: Tensor | None
    scales: Tensor
    zeros: Tensor | None
    minima: Tensor | None
    headers: Tensor | None
    columns: int
    rows: int
    GROUPS: Any
    SPAN: Any
    SHARING: Any
    BITS: Any
    MIDDLE: Any
    OFFSET: Any
    ZEROS_AHEAD: Any
    FLOAT: Any
    ELEMENT: Any
    ASM: Any
    OPERANDS: Any
    APART: Any
    RUN: Any
    MINIMA: Any
    PARTS: Any = tl.constexpr(4)
    prefetch: Any = _prefetch_groups
    begin: Any = _begin_groups
    load: Any = _load_groups
    scale: Any = _scale_groups

    @classmethod
    def of(cls, weight: GroupWeight, *, native: bool | None = None) -> GroupReader:
        """The reader of a weight, by instructions of an NVIDIA GPU if ``native``.

        None for these on a GPU, for a weight that is multiplied by numbers of 16 bits.
        """
        element = str(weight.dtype).removeprefix("torch.")
        if native is False or element not in _FLOATS or not (native or weight.words.is_cuda):
            element = ""
        n, k = weight.shape
        size, lanes, bits = weight.group_size, weight.words.shape[2], weight.bits
        groups = -(-k // size) if size else 1
        zero = float(weight.middle) if weight.zeros is None else None
        asm, operands = instructions(element, bits, zero) if element else ("", "")
        sharing = 1 if weight.headers is None else groups // weight.headers.shape[1]
        zeros = weight.zeros
        ahead = zeros is not None and size > 0 and n % 16 == 0 and zeros.data_ptr() % 16 == 0
        scales, minima, pairs = weight.scales, weight.minima, _pairs_of(weight)
        if pairs:
            scales = scales.view(torch.int32)
            minima = None if minima is None else minima.view(torch.int32)
        return cls(
            *(weight.words, weight.high, scales, weight.zeros, minima, weight.headers, k, n),
            GROUPS=tl.constexpr(groups),
            SPAN=tl.constexpr(max(1, size // (4 * lanes))),
            SHARING=tl.constexpr(sharing),
            BITS=tl.constexpr(bits),
            MIDDLE=tl.constexpr(float(weight.middle)),
            OFFSET=tl.constexpr(offset_of(element, bits)),
            ZEROS_AHEAD=tl.constexpr(triton.next_power_of_2(groups) if ahead else 0),
            FLOAT=tl.constexpr(pairs),
            ELEMENT=tl.constexpr(element),
            ASM=tl.constexpr(asm),
            OPERANDS=tl.constexpr(operands),
            APART=tl.constexpr(lanes),
            RUN=tl.constexpr(min(size, 4 * lanes) // lanes),
            MINIMA=tl.constexpr(weight.minima is not None),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self.rows, self.columns


def _pairs_of(weight: GroupWeight) -> str:
    """The name of the 16-bit floats that scales and minima are, if they can be read as pairs."""
    kind = str(weight.scales.dtype).removeprefix("torch.")
    values = [each for each in (weight.scales, weight.minima) if each is not None]
    fits = weight.group_size > 0 and weight.shape[0] % 2 == 0 and kind in _FLOATS
    return kind if fits and all(each.dtype == values[0].dtype for each in values) else ""


def reader_of(weight: Tensor | CodedWeight) -> Any:
    """The reader of a weight."""
    return weight.reader() if isinstance(weight, CodedWeight) else DenseWeight(weight)
