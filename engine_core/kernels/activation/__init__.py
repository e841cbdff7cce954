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
    _check("silu_and_mul", x)
    if x.is_cuda:
        from engine_core.kernels.activation import triton

        return triton.act_and_mul(x, "silu")
    return cpu.silu_and_mul(x)


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
    _check("gelu_and_mul", x)
    if approximate not in ("tanh", "none"):
        raise ValueError(f"gelu_and_mul: approximate must be 'tanh' or 'none', got {approximate!r}")
    if x.is_cuda:
        from engine_core.kernels.activation import triton

        return triton.act_and_mul(x, "gelu_tanh" if approximate == "tanh" else "gelu")
    return cpu.gelu_and_mul(x, approximate)


def _check(op: str, x: Tensor) -> None:
    if x.shape[-1] % 2 or x.stride(-1) != 1:
        raise ValueError(
            f"{op}: x must be [..., 2 * I] with stride 1 in the last dimension, got "
            f"{tuple(x.shape)} with strides {x.stride()}"
        )
