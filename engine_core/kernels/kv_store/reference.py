"""Storing keys and values in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_core.kernels.codes import cache_parts, quantized


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: tuple[float, float] | None = None,
) -> None:
    """Write ``k`` and ``v [T, Hk, D]`` into the caches."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    blocks, offsets = slots // k_cache.shape[1], slots % k_cache.shape[1]
    k_scale, v_scale = kv_scales or (None, None)
    for x, cache, scale in ((k[kept], k_cache, k_scale), (v[kept], v_cache, v_scale)):
        held, scales = cache_parts(cache)
        if scales is None:
            held[blocks, offsets] = x
        else:
            codes, of_heads = quantized(x, cache.dtype, scale)
            # Torch moves no 8-bit floats.
            held.view(torch.int8)[blocks, offsets] = codes.view(torch.int8)
            scales[blocks, :, offsets] = of_heads
