"""The block tables of the persistent batch, on the host and on the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


class BlockTables:
    """One cache group's block tables: the blocks of each row of the persistent batch.

    The host's copy is written when a plan is submitted. On a GPU only what changed follows, in one
    transfer, when a step needs it; on a CPU both are the same memory.

    Attributes:
        block_size: tokens a block.
        device_table: ``[max_rows + 1, max_blocks]`` int32; the last row is that of padding.
    """

    def __init__(
        self, max_rows: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self._host = np.zeros((max_rows + 1, max_blocks), dtype=np.int32)
        self._counts = [0] * max_rows
        self._changed: list[tuple[int, int]] = []
        self._shared = device.type == "cpu"
        self.device_table = (
            torch.from_numpy(self._host)
            if self._shared
            else torch.zeros(self._host.shape, dtype=torch.int32, device=device)
        )

    def clear(self, row: int) -> None:
        """The row begins anew; what it held is overwritten as it grows."""
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
            base = row * self._host.shape[1]
            self._changed.extend(
                (base + column, block)
                for column, block in zip(range(begin, end), blocks, strict=True)
            )

    def flush(self) -> None:
        """Bring the device's copy up to date, in stream order."""
        if not self._changed:
            return
        changes = torch.tensor(self._changed, dtype=torch.int64).pin_memory()
        self._changed.clear()
        where, blocks = changes.to(self.device_table.device, non_blocking=True).unbind(-1)
        self.device_table.view(-1)[where] = blocks.to(torch.int32)

    def slot(self, row: int, position: int) -> int:
        """``block * block_size + offset`` of a position in a row."""
        return int(self._host[row, position // self.block_size]) * self.block_size + (
            position % self.block_size
        )

    def slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        """``[T]``: ``block * block_size + offset`` of each (row, position)."""
        blocks = self._host[rows, positions // self.block_size].astype(np.int64)
        slots: IntArray = blocks * self.block_size + positions % self.block_size
        return slots
