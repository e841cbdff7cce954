"""Norm, rotation and storing between the projection to q, k, v and attention, as one op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine_core.kernels import compiled
from engine_core.kernels.rotary_store import reference

__all__ = ["is_fused", "rotary_store"]


def is_fused(q: Tensor) -> bool:
    """Whether :func:`rotary_store` is one kernel for these queries, not three operations."""
    return q.is_cuda or compiled.takes(q)


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
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    interleaved: bool = False,
) -> None:
    """Normalise q and k per head if weights are given, rotate them, store k and v in the cache.

    The same as :func:`~engine_core.kernels.rms_norm`, :func:`~engine_core.kernels.apply_rotary`
    and :func:`~engine_core.kernels.store_kv` one after another, each rounding its results. On a
    GPU it is one launch, and reads and writes everything once.

    Args:
        q: ``[T, Hq, D]``, modified; may be a view into a fused qkv, last dimension contiguous.
        k: ``[T, Hk, D]``, likewise, but not modified.
        v: ``[T, Hk, Dv]``, likewise not modified.
        cos: ``[T, half]``, or ``[S, T, half]`` for S sections; float32.
        sin: cos' shape; float32.
        k_cache: ``[num_blocks, block_size, Hk, D]``, written; last dimension contiguous.
        v_cache: ``[num_blocks, block_size, Hk, Dv]``, likewise.
        slot_mapping: ``[T]`` int64; a token whose slot is negative is not stored.
        q_weight: ``[D]``, contiguous, of q's RMSNorm; None if there is none, as for ``k_weight``.
        k_weight: ``[D]``, contiguous, of k's.
        eps: added to the mean squares.
        offset: added to the weights, as by :func:`~engine_core.kernels.rms_norm`.
        interleaved: how dimensions pair in the rotation.

    Raises:
        ValueError: shapes, dtypes or strides are not as above.
    """
    tokens, num_kv_heads, head_dim = k.shape
    block_shape = k_cache.shape[:2]
    if (
        q.shape[0] != tokens
        or q.shape[2] != head_dim
        or v.shape[:2] != k.shape[:2]
        or k_cache.shape != (*block_shape, num_kv_heads, head_dim)
        or v_cache.shape != (*block_shape, num_kv_heads, v.shape[2])
        or slot_mapping.shape != (tokens,)
        or slot_mapping.dtype != torch.int64
    ):
        raise ValueError(
            "rotary_store: q must be [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv], the caches "
            "[num_blocks, block_size, Hk, D or Dv] and slot_mapping [T] int64, got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}, {tuple(k_cache.shape)}, "
            f"{tuple(v_cache.shape)} and {tuple(slot_mapping.shape)} {slot_mapping.dtype}"
        )
    if not q.dtype == k.dtype == v.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(
            f"rotary_store: q, k, v and the caches are {q.dtype}, {k.dtype}, {v.dtype}, "
            f"{k_cache.dtype} and {v_cache.dtype}; they must have one dtype"
        )
    if any(x.stride(-1) != 1 for x in (q, k, v, k_cache, v_cache)):
        raise ValueError(
            "rotary_store: the last dimension of q, k, v and the caches must have stride 1, got "
            f"{q.stride()}, {k.stride()}, {v.stride()}, {k_cache.stride()}, {v_cache.stride()}"
        )
    if cos.shape != sin.shape or cos.dim() not in (2, 3) or cos.shape[-2] != tokens:
        raise ValueError(
            f"rotary_store: cos and sin must be [{tokens}, half] or [S, {tokens}, half], got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if not cos.dtype == sin.dtype == torch.float32:
        raise ValueError(
            f"rotary_store: cos and sin must be float32, got {cos.dtype} and {sin.dtype}"
        )
    sections = cos.shape[0] if cos.dim() == 3 else 1
    if 2 * cos.shape[-1] * sections > head_dim:
        raise ValueError(
            f"rotary_store: {sections} section(s) of {2 * cos.shape[-1]} dimensions exceed the "
            f"head dimension {head_dim}"
        )
    weights = [None if w is None else tuple(w.shape) for w in (q_weight, k_weight)]
    if weights not in ([None, None], [(head_dim,), (head_dim,)]):
        raise ValueError(
            f"rotary_store: q_weight and k_weight must both be [{head_dim}] or both None, got "
            f"{weights[0]} and {weights[1]}"
        )
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and not weight.is_contiguous():
            raise ValueError(
                f"rotary_store: {name} must be contiguous, got stride {weight.stride()}"
            )
    given = (q, k, v, cos, sin, k_cache, v_cache, slot_mapping)
    norms: dict[str, Any] = {"q_weight": q_weight, "k_weight": k_weight, "eps": eps}
    if q.is_cuda and sections == 1 and cos.shape[-1]:
        from engine_core.kernels.rotary_store import triton

        triton.rotary_store(*given, **norms, offset=offset, interleaved=interleaved)
    elif not offset and compiled.takes(q, *(w for w in (q_weight, k_weight) if w is not None)):
        given = (q, k, v, cos.contiguous(), sin.contiguous(), k_cache, v_cache, slot_mapping)
        compiled.kernels("rotary_store").rotary_store(*given, **norms, interleaved=interleaved)
    else:
        reference.rotary_store(*given, **norms, offset=offset, interleaved=interleaved)
