"""Linears that cuBLAS multiplies in parts, whose sums are left to the norm."""

from __future__ import annotations

import torch
from torch import Tensor


def partial_sums(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Contiguous ``x [M, K]`` by ``weight [N, K]``: float32 ``[parts, M, N]``, to be added up."""
    return torch.bmm(
        x.view(len(x), parts, -1).transpose(0, 1),
        weight.view(len(weight), parts, -1).permute(1, 2, 0),
        out_dtype=torch.float32,
    )
