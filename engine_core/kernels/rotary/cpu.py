"""Rotary position embedding on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_core.kernels.rotary import reference


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
    """Rotate ``q [T, Hq, D]`` and ``k [T, Hk, D]`` in place.

    In float32, q and k that are neighbours in a fused qkv are rotated as one tensor, with one
    temporary: 17 us instead of 38 for one token.
    """
    if q.dtype != torch.float32:
        reference.apply_rotary(q, k, cos, sin, interleaved=interleaved)
        return
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    size = 2 * cos.shape[-1]
    num_heads = q.shape[1]
    strides = q.stride()
    adjoining = (
        strides == k.stride()
        and k.data_ptr() == q.data_ptr() + 4 * num_heads * strides[1]
        and k.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
    )
    if adjoining:
        tensors = [q.as_strided((q.shape[0], num_heads + k.shape[1], q.shape[2]), strides)]
    else:
        tensors = [q, k]
    for section in range(cos.shape[0]):
        c, s = cos[section].unsqueeze(1), sin[section].unsqueeze(1)
        for x in tensors:
            part = x[..., section * size : (section + 1) * size]
            a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
            a_sin = a * s
            a.mul_(c).addcmul_(b, s, value=-1)
            b.mul_(c).add_(a_sin)
