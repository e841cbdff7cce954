"""Greedy choice in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_core.kernels.turns import Turns


def choose_greedy(
    logits: Tensor,
    rows: Tensor | None,
    last_tokens: Tensor | None,
    positions: Tensor | None,
    turns: Turns | None = None,
) -> tuple[Tensor, Tensor]:
    """The most probable token of each row of ``logits [B, V]``, and whether they are not finite."""
    # One pass for both; NaN is the largest.
    largest, tokens = logits.max(dim=-1)
    status = (~largest.isfinite()).to(torch.int8)
    if rows is not None and last_tokens is not None and positions is not None:
        last_tokens[rows] = tokens
        positions += positions >= 0
    if turns is None:
        return tokens, status
    turns.store(tokens, status)
    return turns.tokens, turns.status
