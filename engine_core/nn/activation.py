"""Activations of gated feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from engine_core.kernels import gelu_and_mul, silu_and_mul
from engine_core.nn.module import Module


class SiluAndMul(Module):
    """``silu(gate) * up`` of ``[..., gate | up]``."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., 2 I]`` to ``[..., I]``."""
        return silu_and_mul(x)


class GeluAndMul(Module):
    """``gelu(gate) * up`` of ``[..., gate | up]``."""

    def __init__(self, approximate: Literal["tanh", "none"] = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """``[..., 2 I]`` to ``[..., I]``."""
        return gelu_and_mul(x, approximate=self.approximate)


_GATED: dict[str, Callable[[], nn.Module]] = {
    "silu": SiluAndMul,
    "swish": SiluAndMul,
    "gelu": GeluAndMul,
    "gelu_pytorch_tanh": lambda: GeluAndMul("tanh"),
    "gelu_new": lambda: GeluAndMul("tanh"),
}


def build_gated_activation(name: str) -> nn.Module:
    """The gated activation that a config calls ``name``.

    Raises:
        ValueError: it is not known; lists those that are.
    """
    if name not in _GATED:
        raise ValueError(f"hidden_act {name!r} is not one of {', '.join(_GATED)}")
    return _GATED[name]()
