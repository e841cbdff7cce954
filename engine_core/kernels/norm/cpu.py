"""RMSNorm and LayerNorm on a CPU: compiled where possible, else composed of torch's operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.kernels import compiled
from engine_core.kernels.norm import reference


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None,
    centred: bool,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """The norm of ``x [..., H]`` plus ``residual``, and that sum if there is a residual.

    LayerNorm if ``centred``, else RMSNorm.
    """
    if not offset and compiled.takes(x, weight, *(() if bias is None else (bias,))):
        given = (x, weight, bias, eps)
        done: tuple[Tensor, Tensor | None] = compiled.kernels("norm").norm(
            *given, residual=residual, centred=centred
        )
        return done
    total = None if residual is None else x + residual
    summed = x if total is None else total
    if centred:
        return reference.layer_norm(summed, weight, bias, eps), total
    if offset:
        return reference.rms_norm(summed, weight, eps, offset), total
    return _rms_norm(summed, weight, eps), total


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``x [..., H]`` without a residual.

    In float32 torch's own gives the same in 7 us instead of 10 for one row; in lower precision it
    rounds after the weight, not before. There, avoiding temporaries as large as x, besides its copy
    in float32, takes 0.12 ms instead of 0.23 for 512 rows of 576.
    """
    if x.dtype == torch.float32 and weight.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    if weight.dtype != x.dtype:
        return reference.rms_norm(x, weight, eps)
    x32 = x.float()
    if x.numel() == x.shape[-1] and eps > 0:
        # The scale as a Python float: 7 us instead of 10 for the row of a decode step.
        row = x32.view(-1)
        mean = float(torch.dot(row, row)) / x.shape[-1]
        return x32.mul_((mean + eps) ** -0.5).type_as(x).mul_(weight)
    length = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    scale = length.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return x32.mul_(scale).to(x.dtype).mul_(weight)
