"""The gated activations in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``x [..., 2 * I]``."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def quick_gelu(x: Tensor) -> Tensor:
    """``x * sigmoid(1.702 x)``."""
    return (x.float() * (1.702 * x.float()).sigmoid()).to(x.dtype)


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """``gelu(gate) * up`` of ``x [..., 2 * I]``."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate=approximate) * up).to(x.dtype)
