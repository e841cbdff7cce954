"""The tiles by which a GPU multiplies experts, by rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_core.kernels.gpu import GPU

# A program of few pairs looks at all ids, which takes a microsecond for so many.
_MOST_SCANNED = 4096


@dataclass(frozen=True, slots=True)
class Tiles:
    """What a program multiplies at a time.

    Attributes:
        sorts: whether pairs are sorted by expert first.
        rows: pairs of an expert, at least 16.
        gate_columns: columns of the gates, and as many of the ups.
        down_columns: columns of the results.
        inputs: at a time; 128 with scales of 128 columns.
        warps: of a program.
        stages: inputs that are loaded ahead.
    """

    sorts: bool
    rows: int
    gate_columns: int
    down_columns: int
    inputs: int
    warps: int
    stages: int


def choose_tiles(
    pairs: int, num_experts: int, inner: int, hidden: int, dtype: torch.dtype, gpu: GPU | None
) -> Tiles:
    """Tiles for so many pairs of tokens and experts, of shapes alone and not of the choice.

    Few pairs are bound by the weights' bytes: programs are made narrow until there are two for each
    multiprocessor, each expert being touched at most once. Many are bound by products.
    """
    wide = 2 if dtype.itemsize > 2 else 1  # float32 takes twice the room
    if pairs > min(_MOST_SCANNED, 64 * num_experts):
        rows = 64 if pairs < 64 * num_experts else 128
        return Tiles(True, rows, 64 // wide, 128 // wide, 128 // wide, 8, 3)
    touched = min(pairs, num_experts)
    wanted = 2 * (gpu.num_multiprocessors if gpu else 132)

    def columns(width: int, most: int) -> int:
        size = most
        while size > 16 and touched * -(-width // size) < wanted:
            size //= 2
        return size

    rows = 16 if pairs <= 16 * touched else 32
    return Tiles(
        False, rows, columns(inner, 32 // wide), columns(hidden, 64 // wide), 128 // wide, 4, 4
    )
