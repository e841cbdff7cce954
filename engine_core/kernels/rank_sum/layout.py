"""The memory of sums over ranks: what is where, what has room, and which way a sum goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

Way = Literal["words", "one shot", "two shots"]

# Sizes of a group. Ranks share a row out in equal parts that are powers of two.
SIZES = (2, 4, 8)
PROGRAMS = 256
"""Programs of a sum at most. Each waits for its like of the other ranks alone.

A program reads 8 KB at a time of each rank or so. A link moves some 400 GB/s in a direction, and an
answer takes 2 us: 800 KB must be on their way. Two programs for each multiprocessor of an H200 ask
for 2 MB, so that the link has work while some of them wait for a flag.
"""

BUFFERS = 2
WORDS_PROGRAMS = 64
"""Programs of a sum in words at most."""
WORDS_SHARE = 4096
"""Words of a program's buffer for each rank: a row of 8192 numbers of 16 bits."""
WORD_BYTES = 8
# Two flags for each program and rank, each a line of its own so that ranks do not write to one.
FLAG_BYTES = 128

# Seen on two H200s: one shot took 4.0 us for 8 KB and 5.1 for 128 KB. Of that some 2.5 are a
# meeting (a fence, a flag over the link, the look at it) and the answer to a read of another's
# memory. A link moves 1 MB in 2.5 us.
#
# Words need neither fence nor flag nor answer, and twice the bytes. With two ranks they saved 2.1
# us for 8 KB, 1.8 for 256 KB and 0.8 for 512 KB, and lost 1.3 for 1 MB.
_WORDS_BYTES = 1 << 18
# A second shot costs a meeting, which must be less than the bytes that it saves.
_MEETING_BYTES = 1 << 20
# Kernels count elements in 32 bits.
MOST_BYTES = 1 << 30
FUSED_BYTES = MOST_BYTES
"""Bytes of a sum with a norm at most: it saves a launch, and the norm's reads, beside the link."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The regions of all ranks, as this rank reaches them. One for each group.

    All sums through it are on one stream, or on streams that wait for each other, in the same order
    on every rank.

    Attributes:
        rank: this one.
        size: how many there are.
        addresses: ``[size]`` int64 on the device, where each rank's region begins: a multiple of
            128. It has :func:`region_bytes` bytes, and was zeros before any rank's first sum.
        epochs: ``[PROGRAMS]`` int32 on the device, of this rank alone; zeros before the first sum.
        capacity: bytes that all programs exchange at a time, a multiple of ``128 * PROGRAMS``.
        owner: keeps the memory; not looked at.
    """

    rank: int
    size: int
    addresses: Tensor
    epochs: Tensor
    capacity: int
    owner: Any = None


def flags_bytes(size: int) -> int:
    """Bytes at the beginning of a region, before its buffers."""
    return 2 * PROGRAMS * size * FLAG_BYTES


def words_begin(size: int, capacity: int) -> int:
    """Bytes before the buffers of words, which hold nothing else ever: their flags are in them."""
    return flags_bytes(size) + 2 * BUFFERS * capacity


def region_bytes(size: int, capacity: int) -> int:
    """Bytes of each rank's region: flags, and buffers of terms, of sums of parts and of words."""
    words = BUFFERS * WORDS_PROGRAMS * size * WORDS_SHARE * WORD_BYTES
    return words_begin(size, capacity) + words


def plain_block(numel: int) -> int:
    """Elements of a sum that a program takes at a time."""
    return 1024 if numel <= 1024 * PROGRAMS else 4096


def held_rows(capacity: int, block: int, itemsize: int) -> int:
    """Blocks of elements that a program's buffer has room for."""
    return capacity // PROGRAMS // (block * itemsize)


def has_words(rows: int, width: int, numel: int, itemsize: int) -> bool:
    """Whether rows of ``width`` elements go in whole words of 4 bytes, and these have room."""
    pair = 4 // itemsize
    words = (1 << (width - 1).bit_length()) // pair
    room = -(-rows // WORDS_PROGRAMS) * words <= WORDS_SHARE
    return room and words > 0 and not width % pair and not numel % pair


def way_of(nbytes: int, size: int) -> Way:
    """The way of a sum of so many bytes, by what a rank gets over its links.

    In one shot that is all terms of the others, in two shots its part of each and the others' sums.
    Two ranks get as much either way, so that a second shot gains nothing.
    """
    terms = (size - 1) * nbytes
    if terms <= _WORDS_BYTES:
        return "words"
    return "two shots" if terms - 2 * terms // size > _MEETING_BYTES else "one shot"
