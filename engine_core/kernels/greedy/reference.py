"""What greedy choice computes, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def choose_greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable token of each row of ``logits [B, V]``, and whether they are not finite."""
    not_finite = ~logits.amax(dim=-1).isfinite()
    return logits.argmax(dim=-1), not_finite.to(torch.int8)
