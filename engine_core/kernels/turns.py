"""Room for what the turns of a repeated step choose."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Turns(NamedTuple):
    """Where a step that is repeated leaves its choice in each of its turns, one beside the other.

    Attributes:
        tokens: ``[T, B]`` int64, last dimension contiguous.
        status: ``[T, B]`` int8, likewise.
        turn: ``[1]`` int64, which of the T it is now, as ``decode_inputs`` moves it on; None for
            the first.
    """

    tokens: Tensor
    status: Tensor
    turn: Tensor | None

    def check(self, operation: str, num_rows: int) -> None:
        """Refuse room that is not for so many rows.

        Raises:
            ValueError: shapes, dtypes or strides are not as above; names the operation.
        """
        shape = (max(1, len(self.tokens)), num_rows)
        for name, tensor, dtype in (
            ("tokens", self.tokens, torch.int64),
            ("status", self.status, torch.int8),
        ):
            if tensor.shape != shape or tensor.dtype != dtype or tensor.stride(1) != 1:
                raise ValueError(
                    f"{operation}: {name} of turns must be {shape} {dtype} with stride 1 in the "
                    f"last dimension, got {tuple(tensor.shape)} {tensor.dtype} with strides "
                    f"{tensor.stride()}"
                )
        check_turn(operation, self.turn)

    def store(self, tokens: Tensor, status: Tensor) -> None:
        """Leave a choice at the turn's place."""
        place = slice(0, 1) if self.turn is None else self.turn
        self.tokens[place] = tokens
        self.status[place] = status


def check_turn(operation: str, turn: Tensor | None) -> None:
    """Refuse what is no number of a turn.

    Raises:
        ValueError: it is not ``[1]`` int64; names the operation.
    """
    if turn is not None and (turn.shape != (1,) or turn.dtype != torch.int64):
        raise ValueError(
            f"{operation}: turn must be [1] int64, got {tuple(turn.shape)} {turn.dtype}"
        )
