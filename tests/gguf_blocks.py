"""Random matrices in the block types of GGUF files."""

from __future__ import annotations

import gguf
import numpy as np
from numpy.typing import NDArray

# Where a block has float16 numbers, by type.
_HALVES = {**dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"), (0,)), "Q6_K": (208,)}


def random_blocks(
    type_name: str, rows: int, columns: int, seed: int = 0, scale: float = 1 / 16
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Valid blocks ``[rows, blocks of a row, bytes]``, and the gguf package's numbers of them.

    ``scale`` is the standard deviation of the numbers that all of a block are multiples of.
    """
    kind = gguf.GGMLQuantizationType[type_name]
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(seed)
    raw = draw.integers(0, 256, (rows, columns // size, nbytes), dtype=np.uint8)
    for at in _HALVES.get(type_name, (0, 2)):
        halves = draw.standard_normal((rows, columns // size, 1)) * scale
        raw[..., at : at + 2] = halves.astype(np.float16).view(np.uint8)
    return raw, gguf.dequantize(raw.reshape(rows, -1), kind).reshape(rows, columns)
