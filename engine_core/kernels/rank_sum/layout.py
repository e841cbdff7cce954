"""The memory of sums over ranks: what is where, and what has room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

PROGRAMS = 64
"""Programs of a sum at most. Each waits for its like of the other ranks alone."""

BUFFERS = 2
# Bytes. Torch's own kernels took on two H200s, with one and with two shots, 6.7 and 6.6 us for 8
# KB, 7.0 and 7.5 for 64 KB, 8.6 and 7.6 for 256 KB, 13.3 and 10.2 for 1 MB. Ours were not measured.
_ONE_SHOT_BYTES = 1 << 17
# Two flags for each program and rank, each a line of its own so that ranks do not write to one.
FLAG_BYTES = 128


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
        capacity: bytes of a sum at most, a multiple of ``128 * PROGRAMS``.
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


def region_bytes(size: int, capacity: int) -> int:
    """Bytes of each rank's region: flags, and buffers for terms and for sums of parts."""
    return flags_bytes(size) + 2 * BUFFERS * capacity


def plain_block(numel: int) -> int:
    """Elements of a sum that a program takes at a time."""
    return 1024 if numel <= 1024 * PROGRAMS else 4096


def has_room(capacity: int, rows: int, block: int, itemsize: int) -> bool:
    """Whether each program's buffer holds its share of so many blocks of elements."""
    return -(-rows // PROGRAMS) * block * itemsize <= capacity // PROGRAMS


def takes_two_shots(nbytes: int) -> bool:
    """Whether ranks share out the additions of so many bytes."""
    return nbytes > _ONE_SHOT_BYTES
