"""The 4-bit GGUF types whose groups of 32 have a scale and a minimum.

https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h has their layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK_TYPES = ("Q4_0", "Q4_1", "Q4_K")
GROUP_SIZE = 32


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix ``[N, K]`` as ``scales * codes + minima`` in groups of 32 columns.

    Attributes:
        codes: ``[N, K]`` uint8, 0 to 15.
        scales: ``[N, K / 32]`` float32.
        minima: ``[N, K / 32]`` float32.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    minima: NDArray[np.float32]


def unpack_blocks(raw: NDArray[np.uint8], type_name: str, shape: tuple[int, ...]) -> Blocks:
    """The bytes of a tensor of one of :data:`BLOCK_TYPES` as codes, scales and minima."""
    import numpy as np

    rows, columns = shape
    if type_name == "Q4_K":
        # 256 numbers: d, dmin, 12 bytes of 6-bit factors, 8 groups of codes two by two.
        blocks = raw.reshape(-1, 144)
        d, dmin = (blocks[:, at : at + 2].copy().view(np.float16) for at in (0, 2))
        factors, least = _six_bit_factors(blocks[:, 4:16])
        scales = d.astype(np.float32) * factors
        minima = -dmin.astype(np.float32) * least
        halves = blocks[:, 16:].reshape(-1, 32)
    else:
        size = {"Q4_0": 18, "Q4_1": 20}[type_name]
        blocks = raw.reshape(-1, size)
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        if type_name == "Q4_1":
            minima = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
        else:
            minima = -8 * scales
        halves = blocks[:, size - 16 :]
    # A run of bytes holds one run of codes in its low halves, and the next in its high ones.
    codes = np.stack((halves & 15, halves >> 4), axis=1)
    groups = columns // GROUP_SIZE
    return Blocks(
        codes.reshape(rows, columns), scales.reshape(rows, groups), minima.reshape(rows, groups)
    )


def _six_bit_factors(packed: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Q4_K's 12 bytes ``[n, 12]`` as the 8 factors of the scales and of the minima, ``[n, 8]``."""
    import numpy as np

    scale, least, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    factors = np.concatenate((scale & 63, (low & 15) | (scale >> 6 << 4)), axis=1)
    leasts = np.concatenate((least & 63, (low >> 4) | (least >> 6 << 4)), axis=1)
    return factors.astype(np.float32), leasts.astype(np.float32)
