"""The gated activations, compiled for a CPU."""

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
    exp,
    float32,
    narrow,
    this_part,
    unpack,
    widen,
)

# Results per thread, at least.
_LEAST = 2**13


def act_and_mul(x: Tensor, activation: str) -> Tensor:
    """``act(gate) * up`` of ``x [..., 2 * I]``; the activation is "silu" or "gelu_tanh"."""
    x = x if x.is_contiguous() else x.contiguous()
    size = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], size))
    numbers = out.numel()
    _KERNEL.run(
        (x.dtype, activation),
        threads(numbers, _LEAST),
        x.data_ptr(),
        out.data_ptr(),
        numbers // size if size else 0,
        size,
    )
    return out


def _make(dtype: torch.dtype, activation: str) -> Callable[..., None]:
    stored = STORED[dtype]
    silu = activation == "silu"

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        rows, size = args[2], args[3]
        part, parts = this_part(), all_parts()
        # For a single row each part takes some columns.
        low, high = rows * size * part // parts, rows * size * (part + 1) // parts
        while low < high:
            row = low // size
            end = min(high, (row + 1) * size)
            gate = array(args[0], stored, 2 * rows * size)[row * size + low :]
            up = gate[size:]
            out = array(args[1], stored, rows * size)[low:]
            for i in range(end - low):
                g = widen(gate[i])
                if silu:
                    weight = float32(1) / (float32(1) + exp(-g))
                else:
                    # (1 + tanh(a)) / 2 is the logistic function of 2 a.
                    a = float32(0.7978845608028654) * (g + float32(0.044715) * g * g * g)
                    weight = float32(1) / (float32(1) + exp(float32(-2) * a))
                out[i] = narrow(g * weight * widen(up[i]), out[i])
            low = end

    return body


_KERNEL = Kernel(_make, "4q")
