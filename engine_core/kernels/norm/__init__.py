"""RMSNorm and LayerNorm, with the residual addition that precedes them in a decoder layer."""

from __future__ import annotations

from functools import partial
from typing import Any, overload

from torch import Tensor

from engine_core.kernels import row_codes
from engine_core.kernels.norm import cpu
from engine_core.kernels.row_codes import CodedRows, RowForm

__all__ = ["layer_norm", "layer_norm_codes", "rms_norm", "rms_norm_codes"]


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


def rms_norm_codes(
    x: Tensor, weight: Tensor, eps: float, form: RowForm, *, residual: Tensor, offset: float = 0.0
) -> tuple[CodedRows, Tensor]:
    """:func:`rms_norm`, its rows quantised from what it rounds to; one launch on a GPU.

    Args:
        x: as of :func:`rms_norm`, as all but form.
        weight: of the norm.
        eps: of the norm.
        form: of the rows.
        residual: added to x first.
        offset: of the norm.

    Returns:
        The rows that :func:`rms_norm` gives, in codes as of :func:`quantize_rows`, bit for bit; and
        the sum that was normalised.

    Raises:
        ValueError: as :func:`rms_norm`.
    """
    given = ("rms_norm_codes", x, weight, None, eps, residual, form)
    return _norm_codes(*given, centred=False, offset=offset)


def layer_norm_codes(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, form: RowForm, *, residual: Tensor
) -> tuple[CodedRows, Tensor]:
    """:func:`layer_norm`, as :func:`rms_norm_codes` is :func:`rms_norm`."""
    given = ("layer_norm_codes", x, weight, bias, eps, residual, form)
    return _norm_codes(*given, centred=True)


def _norm_codes(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor,
    form: RowForm,
    *,
    centred: bool,
    offset: float = 0.0,
) -> tuple[CodedRows, Tensor]:
    _check(op, x, weight, bias, residual)
    options: dict[str, Any] = {"residual": residual, "centred": centred, "offset": offset}
    norm: Any = cpu.norm
    if x.is_cuda:
        from engine_core.kernels.norm import triton

        norm = triton.norm
        if row_codes.fits(x.shape[-1]):
            norm = partial(norm, form=form)
    normed, total = norm(x, weight, bias, eps, **options)
    assert total is not None, "there is a residual"
    return normed if isinstance(normed, CodedRows) else CodedRows.of(normed, form), total


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
    _check(op, x, weight, bias, residual)
    norm = cpu.norm
    if x.is_cuda:
        from engine_core.kernels.norm import triton

        norm = triton.norm
    normed, total = norm(x, weight, bias, eps, residual=residual, centred=centred, offset=offset)
    return normed if total is None else (normed, total)


def _check(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None
) -> None:
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
