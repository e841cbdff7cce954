"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_core.kernels.rotary import cpu

__all__ = ["apply_rotary", "check_rotation", "rotary_angles"]


def apply_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate q and k in place (Su et al. 2021), in float32, rounding once.

    Section ``s`` covers dimensions ``[2 * half * s, 2 * half * (s + 1))`` of each head, with the
    angles ``cos[s]``, ``sin[s]``; dimensions beyond the last section stay as they are. Within a
    section, dimension ``i`` turns with ``i + half`` (GPT-NeoX), or if ``interleaved`` ``2 * i``
    with ``2 * i + 1`` (GPT-J).

    Args:
        q: ``[T, Hq, D]``, modified; may be a view into a fused qkv, last dimension contiguous.
        k: ``[T, Hk, D]``, likewise, q's dtype; does not overlap q.
        cos: ``[T, half]``, or ``[S, T, half]`` for S sections; float32.
        sin: cos' shape; float32.
        interleaved: how dimensions pair.

    Returns:
        ``(q, k)``, the tensors given.

    Raises:
        ValueError: shapes, dtypes or strides are not as above.
    """
    check_rotation("apply_rotary", q, k, cos, sin)
    if q.is_cuda:
        from engine_core.kernels.rotary import triton

        triton.apply_rotary(q, k, cos, sin, interleaved=interleaved)
    else:
        cpu.apply_rotary(q, k, cos, sin, interleaved=interleaved)
    return q, k


def check_rotation(op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ValueError in the name of ``op`` if :func:`apply_rotary` does not take these."""
    half = cos.shape[-1]
    num_sections = cos.shape[0] if cos.dim() == 3 else 1
    if q.dim() != 3 or k.dim() != 3 or q.shape[::2] != k.shape[::2] or q.dtype != k.dtype:
        raise ValueError(
            f"{op}: q must be [T, Hq, D] and k [T, Hk, D] of one dtype, got "
            f"{tuple(q.shape)} {q.dtype} and {tuple(k.shape)} {k.dtype}"
        )
    if cos.shape != sin.shape or cos.dim() not in (2, 3) or cos.shape[-2] != q.shape[0]:
        raise ValueError(
            f"{op}: cos and sin must be [{q.shape[0]}, half] or [S, {q.shape[0]}, half], "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if not cos.dtype == sin.dtype == torch.float32:
        raise ValueError(f"{op}: cos and sin must be float32, got {cos.dtype} and {sin.dtype}")
    if 2 * half * num_sections > q.shape[2]:
        raise ValueError(
            f"{op}: {num_sections} section(s) of {2 * half} dimensions exceed the head "
            f"dimension {q.shape[2]}"
        )
    if q.stride(2) != 1 or k.stride(2) != 1:
        raise ValueError(
            f"{op}: the last dimension of q and k must have stride 1, got "
            f"{q.stride()} and {k.stride()}"
        )


def rotary_angles(
    positions: Tensor, inv_freq: Tensor, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``positions * inv_freq``, times ``factor``; one launch on a GPU.

    Args:
        positions: ``[...]``, any numbers; multiplied in float32.
        inv_freq: ``[half]`` float32, contiguous.
        factor: 1, but for YaRN.

    Returns:
        cos and sin ``[..., half]``, float32.

    Raises:
        ValueError: ``inv_freq`` is not as above.
    """
    if inv_freq.dim() != 1 or inv_freq.dtype != torch.float32 or not inv_freq.is_contiguous():
        raise ValueError(
            "rotary_angles: inv_freq must be [half] float32, contiguous, got "
            f"{tuple(inv_freq.shape)} {inv_freq.dtype} with strides {inv_freq.stride()}"
        )
    if positions.is_cuda and inv_freq.is_cuda:
        from engine_core.kernels.rotary import triton

        return triton.rotary_angles(positions, inv_freq, factor)
    angles = positions.unsqueeze(-1).float() * inv_freq
    if factor == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * factor, angles.sin() * factor
