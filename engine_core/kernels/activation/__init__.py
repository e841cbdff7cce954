"""The gated activations of feed-forward layers (Shazeer 2020)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from engine_core.kernels.activation import cpu

__all__ = ["gelu_and_mul", "silu_and_mul"]


def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up``, computed in float32 and rounded once.

    Args:
        x: ``[..., 2 * I]``, gate then up, last dimension contiguous.

    Returns:
        ``[..., I]``, contiguous, x's dtype.

    Raises:
        ValueError: the last dimension is odd or not contiguous.
    """
    return _act_and_mul("silu_and_mul", x, "silu")


def gelu_and_mul(x: Tensor, approximate: Literal["tanh", "none"] = "tanh") -> Tensor:
    """``gelu(gate) * up``, computed in float32 and rounded once.

    Args:
        x: ``[..., 2 * I]``, gate then up, last dimension contiguous.
        approximate: "tanh" for the approximation by tanh, "none" for the error function.

    Returns:
        ``[..., I]``, contiguous, x's dtype.

    Raises:
        ValueError: the last dimension is odd or not contiguous, or approximate is neither.
    """
    if approximate not in ("tanh", "none"):
        raise ValueError(f"gelu_and_mul: approximate must be 'tanh' or 'none', got {approximate!r}")
    return _act_and_mul("gelu_and_mul", x, "gelu_tanh" if approximate == "tanh" else "gelu")


def _act_and_mul(op: str, x: Tensor, activation: str) -> Tensor:
    if x.shape[-1] % 2 or x.stride(-1) != 1:
        raise ValueError(
            f"{op}: x must be [..., 2 * I] with stride 1 in the last dimension, got "
            f"{tuple(x.shape)} with strides {x.stride()}"
        )
    if x.is_cuda:
        from engine_core.kernels.activation import triton

        return triton.act_and_mul(x, activation)
    return cpu.act_and_mul(x, activation)
