"""Greedy choice in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def choose_greedy(
    logits: Tensor, rows: Tensor | None, last_tokens: Tensor | None, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The most probable token of each row of ``logits [B, V]``, and whether they are not finite."""
    # One pass for both; NaN is the largest.
    largest, tokens = logits.max(dim=-1)
    not_finite = ~largest.isfinite()
    if rows is not None and last_tokens is not None and positions is not None:
        last_tokens[rows] = tokens
        positions += positions >= 0
    return tokens, not_finite.to(torch.int8)
