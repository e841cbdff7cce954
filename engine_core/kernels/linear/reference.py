"""Linears in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.kernels.activation import gelu_and_mul, quick_gelu, silu_and_mul

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu"]


@dataclass(frozen=True, slots=True)
class DeferredRMSNorm:
    """An RMSNorm's result without the division by the root mean square.

    The division commutes with a linear, which can make up for it: so the norm needs no launch.

    Attributes:
        values: ``[..., K]``, the norm's input times its weight, rounded once.
        squares: ``[rows, parts]`` float32, whose sums over the parts are the sums of squares of the
            norm's input.
        eps: added to the mean square.
    """

    values: Tensor
    squares: Tensor
    eps: float

    def inverse(self) -> Tensor:
        """One by the root mean square, ``[..., 1]`` float32."""
        mean = self.squares.sum(-1) / self.values.shape[-1]
        return torch.rsqrt(mean + self.eps).view(*self.values.shape[:-1], 1)

    def divided(self) -> Tensor:
        """The norm's result, ``[..., K]``."""
        return (self.values.float() * self.inverse()).to(self.values.dtype)


def taken_apart(x: Tensor | DeferredRMSNorm) -> tuple[Tensor, Tensor | None, float]:
    """Its values, and what they lack: squares, None if there is nothing to divide by, and eps.

    The squares are contiguous, as kernels read them.
    """
    if isinstance(x, DeferredRMSNorm):
        return x.values, x.squares.contiguous(), x.eps
    return x, None, 0.0


def activate(x: Tensor, gated: bool, activation: Activation | None) -> Tensor:
    """The activation of ``x [..., N]``, or that of its first half times the second if ``gated``."""
    approximate: Literal["tanh", "none"] = "tanh" if activation == "gelu_tanh" else "none"
    if gated:
        silu = activation in (None, "silu")
        return silu_and_mul(x) if silu else gelu_and_mul(x, approximate)
    if activation is None:
        return x
    if activation == "quick_gelu":
        return quick_gelu(x)
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate=approximate)


def linear(
    x: Tensor | DeferredRMSNorm,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gated: bool,
    activation: Activation | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, divided if x still has to be, and its activation."""
    if isinstance(x, Tensor):
        out = F.linear(x, weight, bias)
    else:
        out = F.linear(x.values.float(), weight.float()) * x.inverse()
        out = (out if bias is None else out + bias.float()).to(x.values.dtype)
    return activate(out, gated, activation)


def linear_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    norm_offset: float = 0.0,
) -> tuple[DeferredRMSNorm, Tensor]:
    """The sum times the norm's weight, with its squares ``[rows, 1]``, and the sum."""
    return add_deferred(F.linear(x, weight, bias), residual, norm_weight, eps, norm_offset)


def add_deferred(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, norm_offset: float = 0.0
) -> tuple[DeferredRMSNorm, Tensor]:
    """``x + residual`` times the norm's weight, with its squares ``[rows, 1]``, and that sum."""
    total = x + residual
    total32 = total.float()
    squares = total32.square().sum(-1).reshape(-1, 1)
    values = (total32 * (norm_offset + norm_weight.float())).to(x.dtype)
    return DeferredRMSNorm(values, squares, eps), total
