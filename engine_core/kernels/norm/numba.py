"""RMSNorm and LayerNorm, compiled for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine_core.kernels.compiled import Kernel, threads
from engine_core.kernels.compiled.numbers import (
    STORED,
    all_parts,
    array,
    as_double,
    float32,
    narrow,
    sqrt,
    this_part,
    unpack,
    widen,
)

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


def _make(dtype: torch.dtype, centred: bool) -> Callable[..., None]:
    stored = STORED[dtype]

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        rows, size = args[6], args[7]
        eps = float32(as_double(args[8]))
        part, parts = this_part(), all_parts()
        weight = array(args[3], stored, size)
        for row in range(rows * part // parts, rows * (part + 1) // parts):
            begin = row * size
            x = array(args[0], stored, begin + size)[begin:]
            out = array(args[5], stored, begin + size)[begin:]
            if args[1]:
                other = array(args[1], stored, begin + size)[begin:]
                total = array(args[2], stored, begin + size)[begin:]
                for i in range(size):
                    total[i] = narrow(widen(x[i]) + widen(other[i]), total[i])
                x = total
            mean = float32(0)
            if centred:
                for i in range(size):
                    mean += widen(x[i])
                mean /= float32(size)
            squares = float32(0)
            for i in range(size):
                deviation = widen(x[i]) - mean
                squares += deviation * deviation
            scale = float32(1) / sqrt(squares / float32(size) + eps)
            if not centred:
                for i in range(size):
                    normed = narrow(widen(x[i]) * scale, out[i])
                    out[i] = narrow(widen(normed) * widen(weight[i]), out[i])
            elif args[4]:
                bias = array(args[4], stored, size)
                for i in range(size):
                    normed = (widen(x[i]) - mean) * scale
                    out[i] = narrow(normed * widen(weight[i]) + widen(bias[i]), out[i])
            else:
                for i in range(size):
                    normed = (widen(x[i]) - mean) * scale
                    out[i] = narrow(normed * widen(weight[i]), out[i])

    return body


_KERNEL = Kernel(_make, "8qd")
