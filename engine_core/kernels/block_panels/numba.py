"""Panels of blocks, compiled for a CPU.

Four columns of a row are a word, which is what a panel has together. A file's blocks begin at even
addresses, so that they are read by 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine_core.kernels.block_linear.forms import FORMS, PANEL
from engine_core.kernels.compiled.numbers import all_parts, array, inline, this_part, unpack

_LOW, _ONES, _TWOS = 0x0F0F0F0F, 0x01010101, 0x03030303
# A product with it puts four bits into the lowest of four bytes.
_SPREAD = 0x00204081
_SIGN = 0x8000
# Where a file's block has its codes, its scale and its minimum, in 16 bits.
_PLACES = {
    "Q4_0": (1, 0, 0),
    "Q4_1": (2, 0, 1),
    "Q5_0": (3, 0, 0),
    "Q5_1": (4, 0, 1),
    "Q8_0": (1, 0, 0),
    "Q4_K": (8, 0, 1),
    "Q5_K": (24, 0, 1),
    "Q6_K": (0, 104, 0),
}
# Kinds of codes: by halves of 16 bytes with and without a word of high bits, whole, and of three
# types in layers.
_PLAIN, _BITS, _WHOLE, _Q4, _Q5, _Q6 = range(6)
_KINDS = {
    "Q4_0": _PLAIN,
    "Q4_1": _PLAIN,
    "Q5_0": _BITS,
    "Q5_1": _BITS,
    "Q8_0": _WHOLE,
    "Q4_K": _Q4,
    "Q5_K": _Q5,
    "Q6_K": _Q6,
}


@inline
def _word(raw: Any, at: int) -> int:
    return int(raw[at]) | int(raw[at + 1]) << 16


def make(type_name: str) -> Callable[..., None]:
    """The body for a block type."""
    form, kind = FORMS[type_name], _KINDS[type_name]
    codes_at, scale_at, minimum_at = _PLACES[type_name]
    size, run, bits, affine = form.file_bytes // 2, form.run, form.bits, form.affine
    layered, header, block_bytes = form.layered, form.header_bytes, form.block_bytes

    @inline
    def columns(raw: Any, at: int, block: int, word: int) -> int:
        """Codes of four columns of a block, in a byte each."""
        if kind == _WHOLE:
            return _word(raw, at + codes_at + 2 * word)
        if kind <= _BITS:
            codes = _word(raw, at + codes_at + 2 * (word % 4)) >> word // 4 * 4 & _LOW
            if kind == _BITS:
                high = _word(raw, at + codes_at - 2) >> 4 * word & 15
                codes |= (high * _SPREAD & _ONES) << 4
            return codes
        if kind == _Q6:
            half, quarter = block // 4, block % 4
            place = at + 32 * half + quarter % 2 * 16 + 2 * word
            codes = _word(raw, place) >> quarter // 2 * 4 & _LOW
            high = _word(raw, at + 64 + 16 * half + 2 * word) >> 2 * quarter & _TWOS
            return codes | high << 4
        codes = _word(raw, at + codes_at + block // 2 * 16 + 2 * word) >> block % 2 * 4 & _LOW
        if kind == _Q5:
            codes |= (_word(raw, at + 8 + 2 * word) >> block & _ONES) << 4
        return codes

    @inline
    def factor(raw: Any, at: int, block: int, least: int) -> int:
        """The 6 bits of a block's scale, or of its minimum, of Q4_K and Q5_K."""
        own = _word(raw, at + 2 + 2 * least) >> 8 * (block % 4) & 255
        if block < 4:
            return own & 63
        low = _word(raw, at + 6) >> 8 * (block % 4) & 255
        return (low >> 4 * least & 15) | own >> 6 << 4

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        rows, count, panels = args[2], args[3], args[4]
        part, parts = this_part(), all_parts()
        run_bytes = header + run * block_bytes
        total = panels * count * run_bytes
        raw = array(args[0], np.uint16, rows * count * size)
        out8 = array(args[1], np.uint8, total)
        out16 = array(args[1], np.uint16, total // 2)
        out32 = array(args[1], np.uint32, total // 4)
        for panel in range(panels * part // parts, panels * (part + 1) // parts):
            filled = min(PANEL, rows - panel * PANEL)
            begin = panel * count * run_bytes
            if filled < PANEL:
                for i in range(begin // 4, (begin + count * run_bytes) // 4):
                    out32[i] = 0
            for index in range(count):
                to = begin + index * run_bytes
                if layered and affine:
                    for row in range(filled, PANEL):
                        out16[to // 2 + PANEL + row] = _SIGN
                for row in range(filled):
                    at = ((panel * PANEL + row) * count + index) * size
                    if layered:
                        out16[to // 2 + row] = raw[at + scale_at]
                        if affine:
                            out16[to // 2 + PANEL + row] = raw[at + minimum_at] ^ _SIGN
                    for block in range(run):
                        own = to + header + block * block_bytes
                        first = own // 4 + row
                        high_first, high_last = 0, 0
                        for pair in range(4):
                            low = columns(raw, at, block, 2 * pair)
                            high = columns(raw, at, block, 2 * pair + 1)
                            if bits == 8:
                                out32[first + 32 * pair] = low
                                out32[first + 32 * pair + 16] = high
                                continue
                            out32[first + 16 * pair] = low & _LOW | (high & _LOW) << 4
                            if bits == 5:
                                high_first |= (low >> 4 & _ONES) << 2 * pair
                                high_first |= (high >> 4 & _ONES) << 2 * pair + 1
                            elif bits == 6:
                                both = (low >> 4 & _TWOS) | (high >> 4 & _TWOS) << 2
                                if pair < 2:
                                    high_first |= both << 4 * pair
                                else:
                                    high_last |= both << 4 * (pair - 2)
                        if bits == 5 or bits == 6:
                            out32[first + 64] = high_first
                        if bits == 6:
                            out32[first + 80] = high_last
                        end = own + bits * 64
                        if not layered:
                            out16[end // 2 + row] = raw[at + scale_at]
                            if affine:
                                out16[end // 2 + PANEL + row] = raw[at + minimum_at]
                        elif kind == _Q6:
                            both = int(raw[at + 96 + block])
                            out8[end + row] = both & 255
                            out8[end + PANEL + row] = both >> 8
                        else:
                            out8[end + row] = factor(raw, at, block, 0)
                            out8[end + PANEL + row] = factor(raw, at, block, 1)

    return body
