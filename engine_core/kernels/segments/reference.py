"""Attention within segments in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def attend_segments(
    q: Tensor, k: Tensor, v: Tensor, runs: Iterable[tuple[int, int]], scale: float
) -> Tensor:
    """``[N, heads, D]``, with a mask over all tokens."""
    sizes = torch.tensor([size for count, size in runs for _ in range(count)])
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes).to(q.device)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    scores = scores.masked_fill(owner[:, None] != owner, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float()).to(q.dtype)
