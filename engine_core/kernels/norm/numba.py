"""RMSNorm and LayerNorm, compiled for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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


def make(dtype: torch.dtype, centred: bool) -> Callable[..., None]:
    """The body for a dtype, with or without a mean that is taken off."""
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
