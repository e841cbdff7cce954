"""Rotary position embedding in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
    """Rotate ``q [T, Hq, D]`` and ``k [T, Hk, D]`` in place."""
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    size = 2 * cos.shape[-1]
    for x in (q, k):
        for section, (c, s) in enumerate(zip(cos[:, :, None], sin[:, :, None], strict=True)):
            part = x[..., section * size : (section + 1) * size]
            a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
            rotated_a = a.float() * c - b.float() * s
            rotated_b = b.float() * c + a.float() * s
            a.copy_(rotated_a)
            b.copy_(rotated_b)
