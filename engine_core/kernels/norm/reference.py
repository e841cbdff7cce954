"""The norms in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """RMSNorm of ``x [..., H]`` without a residual."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    if offset:
        return (normed * (offset + weight.float())).to(x.dtype)
    return (normed.to(x.dtype) * weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of ``x [..., H]`` without a residual; torch's own accumulates in float32."""
    weight = weight.to(x.dtype)
    return F.layer_norm(x, x.shape[-1:], weight, None if bias is None else bias.to(x.dtype), eps)
