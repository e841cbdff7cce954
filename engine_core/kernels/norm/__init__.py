"""RMSNorm and LayerNorm, with the residual addition that precedes them in a decoder layer."""

from __future__ import annotations

from typing import overload

from torch import Tensor

from engine_core.kernels.norm import cpu

__all__ = ["layer_norm", "rms_norm"]


@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: None = None, offset: float = 0.0
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    offset: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Root mean square normalisation over the last dimension (Zhang and Sennrich 2019).

    The statistics and the division are float32; the result is rounded to x's dtype before the
    weight multiplies it, as in transformers' Llama. No input is modified.

    Args:
        x: ``[..., H]``, any strides with the last dimension contiguous.
        weight: ``[H]``, contiguous.
        eps: added to the mean square.
        residual: x's shape and dtype; added to x first, the sum rounded to x's dtype.
        offset: added to the weight, in float32. Where it is not 0 the result is rounded once, after
            the weight, as in transformers' Gemma.

    Returns:
        The normalised x, contiguous; with a residual also the sum that was normalised.

    Raises:
        ValueError: weight or residual does not fit x.
    """
    return _norm("rms_norm", x, weight, None, eps, residual, centred=False, offset=offset)


@overload
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, residual: None = None
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, residual: Tensor
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer normalisation over the last dimension (Ba et al. 2016), computed in float32.

    Args:
        x: ``[..., H]``, any strides with the last dimension contiguous.
        weight: ``[H]``, contiguous.
        bias: ``[H]``, contiguous, or None.
        eps: added to the variance.
        residual: x's shape and dtype; added to x first, the sum rounded to x's dtype.

    Returns:
        The normalised x, contiguous; with a residual also the sum that was normalised.

    Raises:
        ValueError: weight, bias or residual does not fit x.
    """
    return _norm("layer_norm", x, weight, bias, eps, residual, centred=True)


def _norm(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    *,
    centred: bool,
    offset: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    size = x.shape[-1:]
    if weight.shape != size or (bias is not None and bias.shape != size):
        raise ValueError(
            f"{op}: x is {tuple(x.shape)}, weight {tuple(weight.shape)}, bias "
            f"{None if bias is None else tuple(bias.shape)}; both must be {tuple(size)}"
        )
    if x.stride(-1) != 1:
        raise ValueError(f"{op}: x's last dimension must have stride 1, got {x.stride()}")
    if not weight.is_contiguous() or (bias is not None and not bias.is_contiguous()):
        raise ValueError(
            f"{op}: weight and bias must be contiguous, got strides {weight.stride()} and "
            f"{None if bias is None else bias.stride()}"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"{op}: residual is {tuple(residual.shape)} {residual.dtype}, x {tuple(x.shape)} "
            f"{x.dtype}; they must agree"
        )
    norm = cpu.norm
    if x.is_cuda:
        from engine_core.kernels.norm import triton

        norm = triton.norm
    normed, total = norm(x, weight, bias, eps, residual=residual, centred=centred, offset=offset)
    return normed if total is None else (normed, total)
