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
    scales: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
) -> None:
    """Arguments as in the public wrapper."""
    if scales is not None:
        product, k, v = _rescaled((q, k, v), scales, bias)
        q.copy_(product)
    if q_weight is not None and k_weight is not None:
        q.copy_(rms_norm(q, q_weight, eps, offset=offset))
        k = rms_norm(k, k_weight, eps, offset=offset)
    else:
        k = k.clone()
    apply_rotary(q, k, cos, sin, interleaved=interleaved)
    store_kv(k, v, k_cache, v_cache, slot_mapping, kv_scales)


def _rescaled(
    parts: tuple[Tensor, ...], scales: tuple[Tensor, Tensor], bias: Tensor | None
) -> list[Tensor]:
    """Parts ``[T, heads, D]`` of a product with its scales and bias."""
    rows, columns = scales
    sizes = [part[0].numel() for part in parts]
    biases = [None] * len(parts) if bias is None else bias.split(sizes)
    made = []
    for part, scale, added in zip(parts, columns.split(sizes), biases, strict=True):
        wide = part.float() * (rows.view(-1, 1, 1) * scale.view(part.shape[1:]))
        wide = wide if added is None else wide + added.view(part.shape[1:]).float()
        made.append(wide.to(part.dtype))
    return made
