"""The inputs of a decode step in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Parts = tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]


def decode_inputs(
    rows: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    tables: Sequence[Tensor],
    block_sizes: Sequence[int],
    turn: Tensor | None = None,
    num_turns: int = 1,
) -> Parts:
    """The fields of ``DecodeInputs`` in their order."""
    if turn is not None and len(rows):
        turn += 1
        turn[turn >= num_turns] = 0
    clamped = positions.clamp(min=0)
    block_tables, slot_mappings = [], []
    for table, block_size in zip(tables, block_sizes, strict=True):
        blocks = table[rows]
        block = blocks.gather(-1, (clamped // block_size).unsqueeze(-1)).squeeze(-1)
        slots = block.to(torch.int64) * block_size + clamped % block_size
        block_tables.append(blocks)
        slot_mappings.append(torch.where(positions < 0, -1, slots))
    kv_lens = (clamped + (positions >= 0)).to(torch.int32)
    return last_tokens[rows], clamped, kv_lens, tuple(block_tables), tuple(slot_mappings)
