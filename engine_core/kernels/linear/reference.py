"""Linears in plain PyTorch."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.kernels.activation import gelu_and_mul, silu_and_mul

Activation = Literal["silu", "gelu", "gelu_tanh"]


def activate(x: Tensor, gated: bool, activation: Activation | None) -> Tensor:
    """The activation of ``x [..., N]``, or that of its first half times the second if ``gated``."""
    approximate: Literal["tanh", "none"] = "tanh" if activation == "gelu_tanh" else "none"
    if gated:
        silu = activation in (None, "silu")
        return silu_and_mul(x) if silu else gelu_and_mul(x, approximate)
    if activation is None:
        return x
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate=approximate)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gated: bool,
    activation: Activation | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """``x @ weight.T + bias``, and its activation; x divided if ``squares``."""
    if squares is None:
        out = F.linear(x, weight, bias)
    else:
        inverse = torch.rsqrt(squares.sum(-1) / x.shape[-1] + eps).view(*x.shape[:-1], 1)
        out = F.linear(x.float(), weight.float()) * inverse
        out = (out if bias is None else out + bias.float()).to(x.dtype)
    return activate(out, gated, activation)


def linear_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    norm_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum times the norm's weight, its squares ``[rows, 1]``, and the sum."""
    total = F.linear(x, weight, bias) + residual
    total32 = total.float()
    squares = total32.square().sum(-1).reshape(-1, 1)
    return (total32 * (norm_offset + norm_weight.float())).to(x.dtype), squares, total
