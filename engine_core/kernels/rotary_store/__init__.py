"""Norm, rotation and storing between the projection to q, k, v and attention, as one op."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine_core.kernels import compiled
from engine_core.kernels.kv_store import check_store
from engine_core.kernels.rotary import check_rotation
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
    kv_scales: tuple[float, float] | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
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
        k_cache: ``[num_blocks, block_size, Hk, D]``, written; last dimension contiguous. Or of
            codes, as of :func:`~engine_core.kernels.store_kv`.
        v_cache: ``[num_blocks, block_size, Hk, Dv]``, likewise.
        slot_mapping: ``[T]`` int64; a token whose slot is negative is not stored.
        q_weight: ``[D]``, contiguous, of q's RMSNorm; None if there is none, as for ``k_weight``.
        k_weight: ``[D]``, contiguous, of k's.
        eps: added to the mean squares.
        offset: added to the weights, as by :func:`~engine_core.kernels.rms_norm`.
        interleaved: how dimensions pair in the rotation.
        kv_scales: as of :func:`~engine_core.kernels.store_kv`.
        scales: float32, contiguous, of the rows ``[T]`` and of the columns ``[Hq * D + Hk * (D +
            Dv)]`` of the product that q, k and v are parts of, by which it is still to be
            multiplied; None for none. The result is rounded, as by an op of its own.
        bias: ``[Hq * D + Hk * (D + Dv)]``, added after the scales; None for none.

    Raises:
        ValueError: shapes, dtypes or strides are not as above.
    """
    check_rotation("rotary_store", q, k, cos, sin)
    check_store("rotary_store", k, v, k_cache, v_cache, slot_mapping, kv_scales)
    check_norms("rotary_store", q_weight, k_weight, k.shape[2])
    _check_scales(q, k, v, scales, bias)
    slot_mapping = slot_mapping.contiguous()
    given = (q, k, v, cos, sin, k_cache, v_cache, slot_mapping)
    norms: dict[str, Any] = {"q_weight": q_weight, "k_weight": k_weight, "eps": eps}
    norms |= {"interleaved": interleaved, "kv_scales": kv_scales}
    whole = norms | {"offset": offset, "scales": scales, "bias": bias}
    if q.is_cuda and (cos.dim() == 2 or cos.shape[0] == 1) and cos.shape[-1]:
        from engine_core.kernels.rotary_store import triton

        triton.rotary_store(*given, **whole)
    elif (
        not offset
        and scales is None
        and compiled.takes(q, *(w for w in (q_weight, k_weight) if w is not None))
    ):
        given = (q, k, v, cos.contiguous(), sin.contiguous(), k_cache, v_cache, slot_mapping)
        compiled.kernels("rotary_store").rotary_store(*given, **norms)
    else:
        reference.rotary_store(*given, **whole)


def _check_scales(
    q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor] | None, bias: Tensor | None
) -> None:
    width = sum(part.shape[1] * part.shape[2] for part in (q, k, v))
    rows, columns = scales or (None, None)
    for name, given, shape in (
        ("scales of rows", rows, (len(q),)),
        ("scales of columns", columns, (width,)),
        ("bias", bias, (width,)),
    ):
        if given is not None and (given.shape != shape or not given.is_contiguous()):
            raise ValueError(
                f"rotary_store: {name} must be contiguous {shape}, got {tuple(given.shape)} with "
                f"strides {given.stride()}"
            )
    if bias is not None and scales is None:
        raise ValueError("rotary_store: a bias is added where there are scales; add it before")


def check_norms(op: str, q_weight: Tensor | None, k_weight: Tensor | None, head_dim: int) -> None:
    """Check the weights of norms of heads.

    Raises:
        ValueError: they are not both ``[head_dim]`` and contiguous, nor both None.
    """
    weights = [None if w is None else tuple(w.shape) for w in (q_weight, k_weight)]
    if weights not in ([None, None], [(head_dim,), (head_dim,)]):
        raise ValueError(
            f"{op}: q_weight and k_weight must both be [{head_dim}] or both None, got "
            f"{weights[0]} and {weights[1]}"
        )
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and not weight.is_contiguous():
            raise ValueError(f"{op}: {name} must be contiguous, got stride {weight.stride()}")
