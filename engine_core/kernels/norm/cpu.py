"""RMSNorm on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.kernels.norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``x [..., H]`` without a residual.

    In float32 torch's own gives the same in 7 us instead of 10 for one row; in lower precision it
    rounds after the weight, not before.
    """
    if x.dtype == torch.float32 and weight.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return reference.rms_norm(x, weight, eps)
