"""Normalising, rotating and storing, composed of the single operations."""

from __future__ import annotations

from torch import Tensor

from engine_core.kernels.kv_store import store_kv
from engine_core.kernels.norm import rms_norm
from engine_core.kernels.rotary import apply_rotary


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
    offset: float = 0.0,
    interleaved: bool,
    kv_scales: tuple[float, float] | None = None,
) -> None:
    """Arguments as in the public wrapper."""
    if q_weight is not None and k_weight is not None:
        q.copy_(rms_norm(q, q_weight, eps, offset=offset))
        k = rms_norm(k, k_weight, eps, offset=offset)
    else:
        k = k.clone()
    apply_rotary(q, k, cos, sin, interleaved=interleaved)
    store_kv(k, v, k_cache, v_cache, slot_mapping, kv_scales)
