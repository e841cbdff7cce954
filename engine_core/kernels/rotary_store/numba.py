"""Norms, rotation and storing of a step's queries, keys and values, compiled for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine_core.kernels.codes import E4M3_TOP, INT8_TOP
from engine_core.kernels.compiled.numbers import (
    STORED,
    all_parts,
    array,
    as_double,
    e4m3_of,
    float32,
    inline,
    int8_of,
    narrow,
    scale_of,
    sqrt,
    this_part,
    unpack,
    widen,
)


def make(dtype: torch.dtype, kept: torch.dtype, given: bool) -> Callable[..., None]:
    """The body for dtypes of activations and cache, and the kind of scales."""
    stored, size = STORED[dtype], dtype.itemsize
    held_as, kept_size, scaled = STORED[kept], kept.itemsize, kept != dtype
    # A function that is chosen here would have another name on the disk in each process.
    as_int8 = kept is torch.int8

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        tokens, num_heads, num_kv_heads = args[10], args[11], args[12]
        head_dim, v_head_dim, half, sections = args[13], args[14], args[15], args[16]
        block_size, interleaved = args[23], args[35] != 0
        eps = float32(as_double(args[36]))
        k_scale, v_scale = float32(as_double(args[37])), float32(as_double(args[38]))
        part, parts = this_part(), all_parts()
        slots = array(args[7], np.int64, tokens)
        angles = sections * tokens * half
        all_cos, all_sin = array(args[3], np.float32, angles), array(args[4], np.float32, angles)
        for token in range(tokens * part // parts, tokens * (part + 1) // parts):
            slot = slots[token]
            block, offset = slot // block_size, slot % block_size
            for head in range(num_heads + num_kv_heads):
                if head < num_heads:
                    address = args[0] + (token * args[17] + head * args[18]) * size
                    target = address
                    weights = args[8]
                else:
                    if slot < 0:
                        break
                    kv_head = head - num_heads
                    address = args[1] + (token * args[19] + kv_head * args[20]) * size
                    place = block * args[24] + offset * args[25] + kv_head * args[26]
                    target = args[30] + part * head_dim * size if scaled else args[5] + place * size
                    weights = args[9]
                x = array(address, stored, head_dim)
                out = array(target, stored, head_dim)
                if weights != 0:
                    weight = array(weights, stored, head_dim)
                    squares = float32(0)
                    for i in range(head_dim):
                        squares += widen(x[i]) * widen(x[i])
                    scale = float32(1) / sqrt(squares / float32(head_dim) + eps)
                    for i in range(head_dim):
                        normed = narrow(widen(x[i]) * scale, out[i])
                        out[i] = narrow(widen(normed) * widen(weight[i]), out[i])
                else:
                    for i in range(head_dim):
                        out[i] = x[i]
                for section in range(sections):
                    angle = (section * tokens + token) * half
                    cos, sin = all_cos[angle : angle + half], all_sin[angle : angle + half]
                    first = 2 * half * section
                    if interleaved:
                        for i in range(half):
                            _turn(out, first + 2 * i, first + 2 * i + 1, cos[i], sin[i])
                    else:
                        for i in range(half):
                            _turn(out, first + i, first + half + i, cos[i], sin[i])
                if scaled and head >= num_heads:
                    scale = args[31] + _scale_at(args, 32, block, head - num_heads, offset)
                    codes = array(args[5] + place, held_as, head_dim)
                    _encode(out, codes, scale, as_int8, given, k_scale)
            if slot >= 0:
                for head in range(num_kv_heads):
                    address = args[2] + (token * args[21] + head * args[22]) * size
                    place = block * args[27] + offset * args[28] + head * args[29]
                    x = array(address, stored, v_head_dim)
                    values = array(args[6] + place * kept_size, held_as, v_head_dim)
                    if scaled:
                        scale = args[33] + _scale_at(args, 34, block, head, offset)
                        _encode(x, values, scale, as_int8, given, v_scale)
                    else:
                        for i in range(v_head_dim):
                            values[i] = x[i]

    return body


@inline
def _turn(x: Any, left: int, right: int, cos: Any, sin: Any) -> None:
    a, b = widen(x[left]), widen(x[right])
    x[left] = narrow(a * cos - b * sin, x[left])
    x[right] = narrow(b * cos + a * sin, x[right])


@inline
def _scale_at(args: Any, stride: int, block: int, head: int, offset: int) -> int:
    """Bytes to a head's scale from the first."""
    place: int = (block * args[stride] + head * args[23] + offset) * 4
    return place


@inline
def _encode(
    x: Any, codes: Any, scale_address: int, as_int8: bool, is_given: bool, given: Any
) -> None:
    top = float32(INT8_TOP) if as_int8 else float32(E4M3_TOP)
    scale = scale_of(x, top)
    if is_given:  # but NaN where there are no finite numbers
        scale = given + scale * float32(0)
    array(scale_address, np.float32, 1)[0] = scale
    inverse = float32(1) / scale
    for i in range(len(x)):
        number = widen(x[i]) * inverse
        if is_given:
            number = min(max(number, -top), top)
        codes[i] = int8_of(number) if as_int8 else e4m3_of(number)
