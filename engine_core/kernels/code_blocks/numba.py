"""Codes in blocks, compiled for a CPU: squares of 8 x 8 bytes are turned in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine_core.kernels.compiled.numbers import all_parts, array, inline, this_part, unpack

# The halves that change places, where a word is shifted by so many bits.
_CODES, _BYTES, _PAIRS, _FOURS = (
    0x0F0F0F0F0F0F0F0F,
    0x00FF00FF00FF00FF,
    0x0000FFFF0000FFFF,
    0x00000000FFFFFFFF,
)


@inline
def _swap(one: int, other: int, shift: int, mask: int) -> tuple[int, int]:
    """The high parts of ``one`` in the place of the low parts of ``other``, and back."""
    changed = ((one >> shift) ^ other) & mask
    return one ^ (changed << shift), other ^ changed


@inline
def _turn(words: Any) -> Any:
    """Eight words, whose bytes are a square, turned."""
    a, b, c, d, e, f, g, h = words
    a, e = _swap(a, e, 32, _FOURS)
    b, f = _swap(b, f, 32, _FOURS)
    c, g = _swap(c, g, 32, _FOURS)
    d, h = _swap(d, h, 32, _FOURS)
    a, c = _swap(a, c, 16, _PAIRS)
    b, d = _swap(b, d, 16, _PAIRS)
    e, g = _swap(e, g, 16, _PAIRS)
    f, h = _swap(f, h, 16, _PAIRS)
    a, b = _swap(a, b, 8, _BYTES)
    c, d = _swap(c, d, 8, _BYTES)
    e, f = _swap(e, f, 8, _BYTES)
    g, h = _swap(g, h, 8, _BYTES)
    return a, b, c, d, e, f, g, h


def make(block: int) -> Callable[..., None]:
    """The body for blocks of so many rows."""
    half = block // 2
    words = block // 8  # of a column

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        rows, width = args[2], args[3]
        part, parts = this_part(), all_parts()
        pairs = array(args[0], np.int64, rows * width)
        out = array(args[1], np.int64, rows * width)
        blocks = rows // block
        for index in range(blocks * part // parts, blocks * (part + 1) // parts):
            for row in range(0, half, 8):
                for column in range(width):
                    at = (index * block + row) * width + column
                    to = (index * width + column) * block + row // 8
                    far = at + half * width
                    a, p = _swap(pairs[at], pairs[far], 4, _CODES)
                    b, q = _swap(pairs[at + width], pairs[far + width], 4, _CODES)
                    c, r = _swap(pairs[at + 2 * width], pairs[far + 2 * width], 4, _CODES)
                    d, s = _swap(pairs[at + 3 * width], pairs[far + 3 * width], 4, _CODES)
                    e, t = _swap(pairs[at + 4 * width], pairs[far + 4 * width], 4, _CODES)
                    f, u = _swap(pairs[at + 5 * width], pairs[far + 5 * width], 4, _CODES)
                    g, v = _swap(pairs[at + 6 * width], pairs[far + 6 * width], 4, _CODES)
                    h, w = _swap(pairs[at + 7 * width], pairs[far + 7 * width], 4, _CODES)
                    low = _turn((a, b, c, d, e, f, g, h))
                    high = _turn((p, q, r, s, t, u, v, w))
                    for place in range(8):
                        out[to + place * words] = low[place]
                        out[to + place * words + half // 8] = high[place]

    return body
