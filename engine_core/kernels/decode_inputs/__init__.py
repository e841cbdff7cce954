"""Inputs of a decode step, gathered from the state of the persistent batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_core.kernels.decode_inputs import reference
from engine_core.kernels.turns import check_turn

__all__ = ["DecodeInputs", "decode_inputs"]


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The inputs of a step in which each of R rows computes one token.

    Attributes:
        input_ids: ``[R]`` int64, the token that each row sampled last.
        position_ids: ``[R]`` int64, 0 for padding.
        kv_lens: ``[R]`` int32, tokens of each row with this one, 0 for padding.
        block_tables: for each cache group ``[R, max_blocks]`` int32; what lies beyond a row's
            position may hold anything.
        slot_mappings: for each cache group ``[R]`` int64, where the token is stored; -1 for
            padding.
    """

    input_ids: Tensor
    position_ids: Tensor
    kv_lens: Tensor
    block_tables: tuple[Tensor, ...]
    slot_mappings: tuple[Tensor, ...]


def decode_inputs(
    rows: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    tables: Sequence[Tensor],
    block_sizes: Sequence[int],
    *,
    turn: Tensor | None = None,
    num_turns: int = 1,
) -> DecodeInputs:
    """Gather the inputs of a decode step; on a GPU in one launch for each cache group.

    Args:
        rows: ``[R]`` int64, rows of the persistent batch.
        positions: ``[R]`` int64, of the token that each row computes; negative for padding.
        last_tokens: ``[max_rows]`` int64, by row of the persistent batch.
        tables: for each cache group, of which there is one at least, ``[max_rows, max_blocks]``
            int32, contiguous.
        block_sizes: tokens per block, for each cache group.
        turn: ``[1]`` int64, modified: where the step counts its turns. It becomes the next of
            ``num_turns``, and after the last the first, which is 0. Without rows it stays.
        num_turns: how many there are before they begin anew.

    Raises:
        ValueError: shapes, dtypes or strides are not as above, or there is no turn.
    """
    if rows.dim() != 1 or rows.shape != positions.shape:
        raise ValueError(
            "decode_inputs: rows and positions must be [R], got "
            f"{tuple(rows.shape)} and {tuple(positions.shape)}"
        )
    if {rows.dtype, positions.dtype, last_tokens.dtype} != {torch.int64}:
        raise ValueError(
            "decode_inputs: rows, positions and last_tokens must be int64, got "
            f"{rows.dtype}, {positions.dtype} and {last_tokens.dtype}"
        )
    if not tables or len(tables) != len(block_sizes):
        raise ValueError(
            f"decode_inputs: {len(tables)} tables and {len(block_sizes)} block sizes; there must "
            "be one of each for every cache group"
        )
    for table in tables:
        if table.dim() != 2 or table.dtype != torch.int32 or not table.is_contiguous():
            raise ValueError(
                "decode_inputs: a table must be [max_rows, max_blocks] int32, contiguous, got "
                f"{tuple(table.shape)} {table.dtype} with strides {table.stride()}"
            )
    check_turn("decode_inputs", turn)
    if num_turns < 1:
        raise ValueError(f"decode_inputs: num_turns must be at least 1, got {num_turns}")
    given = (rows, positions, last_tokens, tables, block_sizes, turn, num_turns)
    if rows.is_cuda:
        from engine_core.kernels.decode_inputs import triton

        return DecodeInputs(*triton.decode_inputs(*given))
    return DecodeInputs(*reference.decode_inputs(*given))
