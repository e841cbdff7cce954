"""Activations of feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from engine_core.kernels import Activation, gelu_and_mul, silu_and_mul
from engine_core.nn.module import Module

Approximate = Literal["tanh", "none"]


class SiluAndMul(Module):
    """``silu(gate) * up`` of ``[..., gate | up]``."""

    activation: Activation = "silu"
    gated = True

    def forward(self, x: Tensor) -> Tensor:
        """``[..., 2 I]`` to ``[..., I]``."""
        return silu_and_mul(x)


class GeluAndMul(Module):
    """``gelu(gate) * up`` of ``[..., gate | up]``."""

    gated = True

    def __init__(self, approximate: Approximate = "none") -> None:
        super().__init__()
        self.approximate = approximate
        self.activation: Activation = "gelu_tanh" if approximate == "tanh" else "gelu"

    def forward(self, x: Tensor) -> Tensor:
        """``[..., 2 I]`` to ``[..., I]``."""
        return gelu_and_mul(x, approximate=self.approximate)


class Gelu(Module):
    """``gelu(x)``."""

    gated = False

    def __init__(self, approximate: Approximate = "none") -> None:
        super().__init__()
        self.approximate = approximate
        self.activation: Activation = "gelu_tanh" if approximate == "tanh" else "gelu"

    def forward(self, x: Tensor) -> Tensor:
        """``[..., I]`` to ``[..., I]``."""
        return F.gelu(x, approximate=self.approximate)


_GATED: dict[str, Callable[[], nn.Module]] = {
    "silu": SiluAndMul,
    "swish": SiluAndMul,
    "gelu": GeluAndMul,
    "gelu_pytorch_tanh": lambda: GeluAndMul("tanh"),
    "gelu_new": lambda: GeluAndMul("tanh"),
}


_PLAIN: dict[str, Callable[[], nn.Module]] = {
    "gelu": Gelu,
    "gelu_pytorch_tanh": lambda: Gelu("tanh"),
    "gelu_new": lambda: Gelu("tanh"),
}


def build_gated_activation(name: str) -> nn.Module:
    """The gated activation that a config calls ``name``.

    Raises:
        ValueError: it is not known; lists those that are.
    """
    return _build(_GATED, name)


def build_activation(name: str) -> nn.Module:
    """The activation without a gate that a config calls ``name``; raises as the other does."""
    return _build(_PLAIN, name)


def _build(known: dict[str, Callable[[], nn.Module]], name: str) -> nn.Module:
    if name not in known:
        raise ValueError(f"hidden_act {name!r} is not one of {', '.join(known)}")
    return known[name]()
