"""Activations of feed-forward layers."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from engine_core.kernels import (
    Activation,
    CodedRows,
    RowForm,
    gelu_and_mul,
    gelu_and_mul_codes,
    quick_gelu,
    silu_and_mul,
    silu_and_mul_codes,
)
from engine_core.nn.module import Module

Approximate = Literal["tanh", "none"]


class SiluAndMul(Module):
    """``silu(gate) * up`` of ``[..., gate | up]``."""

    activation: Activation = "silu"
    gated = True

    def forward(self, x: Tensor) -> Tensor:
        """``[..., 2 I]`` to ``[..., I]``."""
        return silu_and_mul(x)

    def codes(self, x: Tensor, form: RowForm) -> CodedRows:
        """The same, its rows quantised."""
        return silu_and_mul_codes(x, form)


class _Gelu(Module):
    def __init__(self, approximate: Approximate = "none") -> None:
        super().__init__()
        self.approximate = approximate
        self.activation: Activation = "gelu_tanh" if approximate == "tanh" else "gelu"


class GeluAndMul(_Gelu):
    """``gelu(gate) * up`` of ``[..., gate | up]``."""

    gated = True

    def forward(self, x: Tensor) -> Tensor:
        """``[..., 2 I]`` to ``[..., I]``."""
        return gelu_and_mul(x, approximate=self.approximate)

    def codes(self, x: Tensor, form: RowForm) -> CodedRows:
        """The same, its rows quantised."""
        return gelu_and_mul_codes(x, form, self.approximate)


class Gelu(_Gelu):
    """``gelu(x)``."""

    gated = False

    def forward(self, x: Tensor) -> Tensor:
        """``[..., I]`` to ``[..., I]``."""
        return F.gelu(x, approximate=self.approximate)


class QuickGelu(Module):
    """``x * sigmoid(1.702 x)``."""

    activation: Activation = "quick_gelu"
    gated = False

    def forward(self, x: Tensor) -> Tensor:
        """``[..., I]`` to ``[..., I]``."""
        return quick_gelu(x)


_GELUS: dict[str, Approximate] = {
    "gelu": "none",
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "tanh",
}


def build_gated_activation(name: str) -> nn.Module:
    """The gated activation that a config calls ``name``.

    Raises:
        ValueError: it is not known; lists those that are.
    """
    if name in ("silu", "swish"):
        return SiluAndMul()
    return GeluAndMul(_approximate(name, "silu", "swish"))


def build_activation(name: str) -> nn.Module:
    """The activation without a gate that a config calls ``name``; raises as the other does."""
    return QuickGelu() if name == "quick_gelu" else Gelu(_approximate(name, "quick_gelu"))


def _approximate(name: str, *others: str) -> Approximate:
    if name not in _GELUS:
        known = ", ".join((*others, *_GELUS))
        raise ValueError(f"hidden_act {name!r} is not one of {known}")
    return _GELUS[name]
