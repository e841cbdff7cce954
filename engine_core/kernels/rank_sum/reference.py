"""Sums over ranks in plain PyTorch, of the terms of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor


def rank_sum(terms: Tensor) -> Tensor:
    """``terms [ranks, ...]`` added up in float32 in the order of the ranks, and rounded once."""
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return total.to(terms.dtype)


def rank_gather(parts: Tensor) -> Tensor:
    """``parts [ranks, ..., N]`` side by side, ``[..., ranks * N]``."""
    return torch.cat(list(parts), dim=-1)
