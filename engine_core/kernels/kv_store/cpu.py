"""Storing keys and values on a CPU."""

from __future__ import annotations

from torch import Tensor

from engine_core.kernels.kv_store import reference


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write ``k`` and ``v [T, Hk, D]`` into the caches.

    Where a cache's tokens lie at one stride and none is skipped, ``index_copy_`` over the tokens
    takes 2 us instead of 5 for one token, and 31 instead of 44 for 512.
    """
    block_size = k_cache.shape[1]
    if (
        k_cache.stride(0) != block_size * k_cache.stride(1)
        or v_cache.stride(0) != block_size * v_cache.stride(1)
        or not len(slot_mapping)
        or int(slot_mapping.min()) < 0
    ):
        reference.store_kv(k, v, k_cache, v_cache, slot_mapping)
        return
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)
