"""One token's step of states, compiled for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine_core.kernels.compiled.numbers import all_parts, array, float32, this_part, unpack


def make() -> Callable[..., None]:
    """The body."""

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        count, channels, heads, width, size = args[7], args[8], args[9], args[10], args[11]
        states = array(args[5], np.float32, args[12])
        places = array(args[6], np.int64, 2 * count)
        ds = array(args[4], np.float32, heads)
        per_group = heads // ((channels - heads * width) // (2 * size))
        part, parts = this_part(), all_parts()
        for item in range(count * heads * part // parts, count * heads * (part + 1) // parts):
            row, head = item // heads, item % heads
            step = array(args[2], np.float32, count * heads)[item]
            decay = array(args[3], np.float32, count * heads)[item]
            out = array(args[0], np.float32, count * heads * width)[item * width :]
            token = array(args[1], np.float32, count * channels)[row * channels :]
            x = token[head * width :]
            b = token[heads * width + head // per_group * size :]
            c = token[(channels + heads * width) // 2 + head // per_group * size :]
            source, target = places[row], places[count + row]
            for p in range(width):
                added = step * x[p]
                offset = (head * width + p) * size
                new = states[target + offset :]
                y = float32(0)
                if source < 0:
                    for n in range(size):
                        state = added * b[n]
                        new[n] = state
                        y += state * c[n]
                else:
                    old = states[source + offset :]
                    for n in range(size):
                        state = old[n] * decay + added * b[n]
                        new[n] = state
                        y += state * c[n]
                out[p] = y + ds[head] * x[p]

    return body
