"""RMSNorm on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.kernels.norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``x [..., H]`` without a residual.

    In float32 torch's own gives the same in 7 us instead of 10 for one row; in lower precision it
    rounds after the weight, not before. There, what has no temporary as large as x besides its copy
    in float32 takes 0.12 ms instead of 0.23 for 512 rows of 576.
    """
    if x.dtype == torch.float32 and weight.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    if weight.dtype != x.dtype:
        return reference.rms_norm(x, weight, eps)
    x32 = x.float()
    length = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    scale = length.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return x32.mul_(scale).to(x.dtype).mul_(weight)
