"""Arrays of an item in memory that processes share. Imports no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_core.workers import SharedBytes

# Less than this is as well sent as shared, and takes no open file.
_WORTHWHILE_BYTES = 1 << 17
# Smaller arrays, such as a grid, are at hand without mapping anything.
_SMALL_BYTES = 4096
_ALIGNMENT = 64


class SharedArrays(Mapping[str, Any]):
    """Named arrays of which the large ones are in a block of shared memory.

    They are mapped when they are looked at, and as long as somebody has them. They may be written
    to; others do not see it. Pickles have a handle in place of the arrays: see
    :class:`SharedBytes`.

    Attributes:
        nbytes: of all arrays.
    """

    def __init__(
        self,
        block: SharedBytes,
        layout: Mapping[str, tuple[str, tuple[int, ...], int] | NDArray[Any]],
        nbytes: int,
    ) -> None:
        """``layout`` has the dtype, shape and place of each array, or the array."""
        self._block = block
        self._layout = layout
        self.nbytes = nbytes

    @property
    def block(self) -> SharedBytes:
        """The memory of the large ones."""
        return self._block

    @property
    def lost(self) -> str | None:
        """Why the memory is not there; None if it is."""
        return self._block.lost

    def __getitem__(self, name: str) -> NDArray[Any]:
        place = self._layout[name]
        if not isinstance(place, tuple):
            return place
        dtype, shape, offset = place
        count = math.prod(shape)
        return np.frombuffer(self._block.map(), dtype, count, offset).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)


def shared(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arrays in shared memory, or as they are where that is not worthwhile.

    Raises:
        OSError: there is no memory for them.
    """
    if isinstance(arrays, SharedArrays) or not hasattr(os, "memfd_create"):
        return arrays
    known = {name: np.asarray(value, order="C") for name, value in arrays.items()}
    nbytes = sum(array.nbytes for array in known.values())
    if nbytes < _WORTHWHILE_BYTES or any(array.dtype.hasobject for array in known.values()):
        return arrays
    layout: dict[str, tuple[str, tuple[int, ...], int] | NDArray[Any]] = dict(known)
    parts: list[tuple[int, memoryview]] = []
    size = 0
    for name, array in known.items():
        if array.nbytes > _SMALL_BYTES:
            layout[name] = (array.dtype.str, array.shape, size)
            parts.append((size, array.reshape(-1).view(np.uint8).data))
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return SharedArrays(SharedBytes.of(parts, size), layout, nbytes)
