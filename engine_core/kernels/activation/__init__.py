"""Activations of feed-forward layers: gated ones (Shazeer 2020), and a quick GELU."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from engine_core.kernels import row_codes
from engine_core.kernels.activation import cpu
from engine_core.kernels.row_codes import CodedRows, RowForm

__all__ = ["gelu_and_mul", "gelu_and_mul_codes", "quick_gelu", "silu_and_mul", "silu_and_mul_codes"]


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


def silu_and_mul_codes(x: Tensor, form: RowForm) -> CodedRows:
    """:func:`silu_and_mul`, its rows quantised from what it rounds to; one launch on a GPU.

    Args:
        x: as of :func:`silu_and_mul`.
        form: of the rows.

    Returns:
        ``[..., I]``: of the rows that :func:`silu_and_mul` gives, bit for bit.

    Raises:
        ValueError: as :func:`silu_and_mul`.
    """
    return _act_and_mul_codes("silu_and_mul_codes", x, "silu", form)


def gelu_and_mul_codes(
    x: Tensor, form: RowForm, approximate: Literal["tanh", "none"] = "tanh"
) -> CodedRows:
    """:func:`gelu_and_mul`, as :func:`silu_and_mul_codes` is :func:`silu_and_mul`."""
    name = "gelu_tanh" if approximate == "tanh" else "gelu"
    return _act_and_mul_codes("gelu_and_mul_codes", x, name, form)


def quick_gelu(x: Tensor) -> Tensor:
    """``x * sigmoid(1.702 x)`` (Hendrycks and Gimpel, 2016); one launch on a GPU.

    Args:
        x: ``[..., I]``, contiguous.

    Returns:
        The same shape and dtype; computed in float32 on a GPU, and rounded once.

    Raises:
        ValueError: x is not contiguous.
    """
    if not x.is_contiguous():
        raise ValueError(f"quick_gelu: x must be contiguous, got strides {x.stride()}")
    if x.is_cuda:
        from engine_core.kernels.activation import triton

        return triton.quick_gelu(x)
    return x * torch.sigmoid(1.702 * x)


def _act_and_mul_codes(op: str, x: Tensor, activation: str, form: RowForm) -> CodedRows:
    if x.is_cuda and row_codes.fits(x.shape[-1] // 2):
        _check(op, x)
        from engine_core.kernels.activation import triton

        return triton.act_and_mul_codes(x, activation, form)
    return CodedRows.of(_act_and_mul(op, x, activation), form)


def _check(op: str, x: Tensor) -> None:
    if x.shape[-1] % 2 or x.stride(-1) != 1:
        raise ValueError(
            f"{op}: x must be [..., 2 * I] with stride 1 in the last dimension, got "
            f"{tuple(x.shape)} with strides {x.stride()}"
        )


def _act_and_mul(op: str, x: Tensor, activation: str) -> Tensor:
    _check(op, x)
    if x.is_cuda:
        from engine_core.kernels.activation import triton

        return triton.act_and_mul(x, activation)
    return cpu.act_and_mul(x, activation)
