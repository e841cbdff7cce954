"""The tokens that captured steps choose, on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine_core.kernels import Turns
from engine_core.runtime.platform import written_to_host

# Bytes. Each turn's tokens, and its status, begin at a multiple: Triton compiles another kernel for
# other alignments, and for strides that are no multiples of 16.
_ALIGNMENT = 128


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class ChosenRoom:
    """Where a captured step leaves the tokens of all its turns, so that they are sent at once.

    Attributes:
        rows: those that choose, padding included.
        turns: what the step writes.
        room: ``[T, N]`` uint8, contiguous, which both parts of these are in.
    """

    rows: int
    turns: Turns
    room: Tensor

    @staticmethod
    def bytes_of(rows: int, num_turns: int) -> int:
        """Bytes of room for so many rows."""
        return num_turns * (_aligned(8 * rows) + _aligned(rows))

    @classmethod
    def of(cls, rows: int, num_turns: int, memory: Tensor, turn: Tensor | None) -> ChosenRoom:
        """Room in ``memory``, uint8, for so many rows and turns; ``turn`` is as of :class:`Turns`.

        That memory is aligned, and at least :meth:`bytes_of` long.
        """
        room = memory[: cls.bytes_of(rows, num_turns)].view(num_turns, -1)
        return cls(rows, Turns(*_parts(room, rows), turn), room)

    def to_host(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Tokens ``[count, rows]`` int64 and their status, int8, of the turns from ``first`` on.

        From a GPU they are on their way: they are there after all that was launched before. They
        are kept until then, as of :func:`~engine_core.runtime.platform.written_to_host`.
        """
        some = self.room[first : first + count]
        # The next step writes here, on a CPU too.
        return _parts(written_to_host(some) if some.is_cuda else some.clone(), self.rows)


def _parts(room: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The tokens and the status in it."""
    begin = _aligned(8 * rows)
    return room[:, : 8 * rows].view(torch.int64), room[:, begin : begin + rows].view(torch.int8)
