"""The block tables of the persistent batch, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine_core.runtime.platform import all_to_device

IntArray = npt.NDArray[np.int64]


class BlockTables:
    """One cache group's block tables: the blocks of each row of the persistent batch.

    The host's copy is written when a plan is submitted. The GPU's gets the changes alone, in one
    transfer, when a step needs them. On a CPU both are the same memory.

    Attributes:
        block_size: tokens per block.
        device_table: ``[max_rows + 1, max_blocks]`` int32; the last row is that of padding.
    """

    def __init__(
        self, max_rows: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self._host = np.zeros((max_rows + 1, max_blocks), dtype=np.int32)
        self._counts = [0] * max_rows
        # Runs of blocks: the first one's place in the flat table, and how many.
        self._changed: list[tuple[int, int]] = []
        self._shared = device.type == "cpu"
        self.device_table = (
            torch.from_numpy(self._host)
            if self._shared
            else torch.zeros(self._host.shape, dtype=torch.int32, device=device)
        )

    def clear(self, row: int) -> None:
        """Begin the row anew; its old entries are overwritten as it grows."""
        self._counts[row] = 0

    def append(self, row: int, blocks: tuple[int, ...]) -> None:
        """Add blocks to the end of a row's table."""
        if not blocks:
            return
        begin = self._counts[row]
        end = begin + len(blocks)
        self._host[row, begin:end] = blocks
        self._counts[row] = end
        if not self._shared:
            self._changed.append((row * self._host.shape[1] + begin, len(blocks)))

    def append_each(self, rows: Sequence[int], blocks: Sequence[tuple[int, ...]]) -> None:
        """Add blocks to the ends of some rows' tables, one to most of them."""
        if any(len(of_row) != 1 for of_row in blocks):
            for row, of_row in zip(rows, blocks, strict=True):
                self.append(row, of_row)
            return
        counts, width = self._counts, self._host.shape[1]
        begins = [counts[row] for row in rows]
        self._host[rows, begins] = [block for (block,) in blocks]
        places = list(zip(rows, begins, strict=True))
        for row, begin in places:
            counts[row] = begin + 1
        if not self._shared:
            self._changed += [(row * width + begin, 1) for row, begin in places]

    def unwritten(self, row: int, blocks: tuple[int, ...], start: int) -> tuple[int, ...]:
        """Those of ``blocks``, not appended yet, that hold no position before ``start``."""
        return blocks[max(0, -(-start // self.block_size) - self._counts[row]) :]

    def flush(self) -> None:
        """Bring the device's copy up to date, in stream order."""
        if len(self._changed) == 1:
            # One run, as for a prompt that comes alone: its places need not be sent.
            first, count = self._changed.pop()
            blocks = torch.from_numpy(self._host.reshape(-1)[first : first + count])
            own = self.device_table.view(-1)[first : first + count]
            own.copy_(blocks.pin_memory(), non_blocking=True)
        elif self._changed:
            firsts, counts = np.array(self._changed, dtype=np.int64).T
            self._changed.clear()
            ends = np.cumsum(counts)
            where: IntArray = np.arange(ends[-1]) + np.repeat(firsts - (ends - counts), counts)
            blocks_there = self._host.reshape(-1)[where]
            places, sent = all_to_device([where, blocks_there], self.device_table.device)
            self.device_table.view(-1)[places] = sent

    def slot(self, row: int, position: int) -> int:
        """``block * block_size + offset`` of a position in a row."""
        return int(self._host[row, position // self.block_size]) * self.block_size + (
            position % self.block_size
        )

    def slots(self, rows: IntArray, lengths: IntArray, positions: IntArray) -> IntArray:
        """``[T]``: ``block * block_size + offset`` of the positions of some rows' tokens.

        Args:
            rows: ``[R]``.
            lengths: ``[R]``, how many of the positions are of each row.
            positions: ``[T]``, row by row.
        """
        # A division of many numbers by one is fast in numpy, a remainder is not.
        columns = positions // self.block_size
        blocks = self._host.reshape(-1)[np.repeat(rows * self._host.shape[1], lengths) + columns]
        slots: IntArray = positions + (blocks - columns) * self.block_size
        return slots
