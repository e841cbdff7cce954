"""What a linear computes, in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine_core.kernels.activation import silu_and_mul


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool) -> Tensor:
    """``x @ weight.T + bias``, and silu_and_mul of it if ``gated``."""
    out = F.linear(x, weight, bias)
    return silu_and_mul(out) if gated else out
