"""RMSNorm and LayerNorm, by kernels compiled for a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_core.kernels.compiled import Kernel, threads

# Numbers per thread, at least.
_LEAST = 2**14


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None,
    centred: bool,
) -> tuple[Tensor, Tensor | None]:
    """The norm of ``x [..., H]`` plus ``residual``, and that sum if there is a residual."""
    size = x.shape[-1]
    x = x if x.is_contiguous() else x.contiguous()
    if residual is not None and not residual.is_contiguous():
        residual = residual.contiguous()
    out = torch.empty_like(x)
    total = None if residual is None else torch.empty_like(x)
    numbers = x.numel()
    _KERNEL.run(
        (x.dtype, centred),
        threads(numbers, _LEAST),
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if total is None else total.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        numbers // size if size else 0,
        size,
        eps,
    )
    return out, total


_KERNEL = Kernel("engine_core.kernels.norm.numba:make", "8qd")
