"""Norms, rotation and storing of a step's queries, keys and values, compiled for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
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
_LEAST = 2**13


def rotary_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    interleaved: bool,
) -> None:
    """Arguments as in the public wrapper; cos and sin are contiguous."""
    slot_mapping = slot_mapping.contiguous()
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = v.shape[1:]
    _KERNEL.run(
        (q.dtype, interleaved, q_weight is not None),
        threads(tokens * (num_heads + 2 * num_kv_heads) * head_dim, _LEAST),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slot_mapping.data_ptr(),
        0 if q_weight is None else q_weight.data_ptr(),
        0 if k_weight is None else k_weight.data_ptr(),
        tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        v_head_dim,
        cos.shape[-1],
        cos.shape[0] if cos.dim() == 3 else 1,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        k_cache.shape[1],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        eps,
    )


def _make(dtype: torch.dtype, interleaved: bool, normalised: bool) -> Callable[..., None]:
    stored, size = STORED[dtype], dtype.itemsize

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        tokens, num_heads, num_kv_heads = args[10], args[11], args[12]
        head_dim, v_head_dim, half, sections = args[13], args[14], args[15], args[16]
        block_size = args[23]
        eps = float32(as_double(args[30]))
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
                    target = args[5] + place * size
                    weights = args[9]
                x = array(address, stored, head_dim)
                out = array(target, stored, head_dim)
                if normalised:
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
                    for i in range(half):
                        if interleaved:
                            left, right = first + 2 * i, first + 2 * i + 1
                        else:
                            left, right = first + i, first + half + i
                        a, b = widen(out[left]), widen(out[right])
                        out[left] = narrow(a * cos[i] - b * sin[i], out[left])
                        out[right] = narrow(b * cos[i] + a * sin[i], out[right])
            if slot >= 0:
                for head in range(num_kv_heads):
                    address = args[2] + (token * args[21] + head * args[22]) * size
                    place = block * args[27] + offset * args[28] + head * args[29]
                    x = array(address, stored, v_head_dim)
                    out = array(args[6] + place * size, stored, v_head_dim)
                    for i in range(v_head_dim):
                        out[i] = x[i]

    return body


_KERNEL = Kernel(_make, "30qd")
