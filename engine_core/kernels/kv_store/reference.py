"""Storing keys and values in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write ``k`` and ``v [T, Hk, D]`` into the caches."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    blocks, offsets = slots // k_cache.shape[1], slots % k_cache.shape[1]
    k_cache[blocks, offsets] = k[kept]
    v_cache[blocks, offsets] = v[kept]
