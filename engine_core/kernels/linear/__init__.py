"""Linears, with the gated activation that may follow them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_core.kernels.linear import reference

__all__ = ["linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> Tensor:
    """``x @ weight.T + bias``, or :func:`~engine_core.kernels.silu_and_mul` of it if ``gated``.

    Rounded before silu_and_mul too. On a GPU, shapes for which a kernel was seen to beat cuBLAS
    take that kernel, which accumulates in float32: few rows of bfloat16 or float16.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, x's dtype; if ``gated`` N is even, the gate's rows before those of up.
        bias: ``[N]``, or None.
        gated: whether silu_and_mul follows.

    Returns:
        ``[..., N]``, or ``[..., N / 2]`` if ``gated``, x's dtype.

    Raises:
        ValueError: weight or bias does not fit x.
    """
    out_features, in_features = weight.shape
    if x.shape[-1] != in_features or (bias is not None and bias.shape != (out_features,)):
        raise ValueError(
            f"linear: x is {tuple(x.shape)}, weight {tuple(weight.shape)}, bias "
            f"{None if bias is None else tuple(bias.shape)}; x's last dimension must be "
            f"{in_features} and bias [{out_features}]"
        )
    if gated and out_features % 2:
        raise ValueError(f"linear: a gated weight must have an even N, got {tuple(weight.shape)}")
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.dtype == weight.dtype:
        from engine_core.kernels.linear import triton

        rows = x.numel() // in_features
        tile = triton.choose_tile(rows, out_features, in_features, gated, x.device)
        dense = x.stride(-1) == 1 and weight.is_contiguous() and weight.data_ptr() % 16 == 0
        if tile is not None and dense:
            out = triton.linear(x.reshape(rows, in_features), weight, bias, tile, gated=gated)
            return out.view(*x.shape[:-1], out.shape[-1])
    return reference.linear(x, weight, bias, gated=gated)
