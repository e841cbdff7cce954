"""The gated activations, compiled for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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


def make(dtype: torch.dtype, activation: str) -> Callable[..., None]:
    """The body for a dtype and an activation."""
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
