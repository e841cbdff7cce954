"""Writing new keys and values into the paged cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine_core.kernels.codes import CODE_TOPS, cache_parts
from engine_core.kernels.kv_store import cpu

__all__ = ["check_store", "store_kv"]


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: tuple[float, float] | None = None,
) -> None:
    """Copy each token's key and value into its slot; the caches are written in place.

    Slot ``s`` is offset ``s % block_size`` of block ``s // block_size``. A token whose slot is
    negative is skipped. If two tokens name one slot, either may win.

    Args:
        k: ``[T, Hk, D]``; may be a view into a fused qkv, last dimension contiguous.
        v: ``[T, Hk, Dv]``, likewise.
        k_cache: ``[num_blocks, block_size, Hk, D]``, k's dtype, last dimension contiguous; or codes
            ``[..., D + 4]``, see :func:`~engine_core.kernels.codes.cache_parts`, which are made.
        v_cache: ``[num_blocks, block_size, Hk, Dv]``, likewise.
        slot_mapping: ``[T]`` int64.
        kv_scales: of all codes of k and of v, positive; None to take each head's greatest number.
            What they do not reach becomes the greatest code.

    Raises:
        ValueError: shapes, dtypes or strides are not as above.
    """
    check_store("store_kv", k, v, k_cache, v_cache, slot_mapping, kv_scales)
    slot_mapping = slot_mapping.contiguous()
    if k.is_cuda:
        from engine_core.kernels.kv_store import triton

        triton.store_kv(k, v, k_cache, v_cache, slot_mapping, kv_scales)
    else:
        cpu.store_kv(k, v, k_cache, v_cache, slot_mapping, kv_scales)


def check_store(
    op: str,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: tuple[float, float] | None = None,
) -> None:
    """Raise ValueError in the name of ``op`` if the arguments are not as :func:`store_kv` wants."""
    coded = k_cache.dtype in CODE_TOPS
    if kv_scales is not None and not (coded and all(0 < each < math.inf for each in kv_scales)):
        raise ValueError(
            f"{op}: kv_scales must be positive and for a cache of codes, got {kv_scales} for "
            f"{k_cache.dtype}"
        )
    if coded and k_cache.dim() == v_cache.dim() == 4:
        k_cache, v_cache = cache_parts(k_cache)[0], cache_parts(v_cache)[0]
    if k.dim() != 3 or k_cache.dim() != 4 or k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"{op}: k must be [T, Hk, D], v [T, Hk, Dv] and the caches 4-dimensional, got "
            f"{tuple(k.shape)}, {tuple(v.shape)}, {tuple(k_cache.shape)}, {tuple(v_cache.shape)}"
        )
    if (
        k_cache.shape[2:] != k.shape[1:]
        or v_cache.shape[2:] != v.shape[1:]
        or k_cache.shape[:2] != v_cache.shape[:2]
    ):
        raise ValueError(
            f"{op}: the caches must be [num_blocks, block_size, Hk, D], got k_cache "
            f"{tuple(k_cache.shape)} for k {tuple(k.shape)}, v_cache {tuple(v_cache.shape)} for v "
            f"{tuple(v.shape)}"
        )
    same = k.dtype == v.dtype and k_cache.dtype == v_cache.dtype
    if not same or not (coded or k_cache.dtype == k.dtype):
        raise ValueError(
            f"{op}: k is {k.dtype}, v {v.dtype}, k_cache {k_cache.dtype}, v_cache "
            f"{v_cache.dtype}; they must have one dtype, or the caches that of codes"
        )
    if k.stride(2) != 1 or v.stride(2) != 1 or k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError(
            f"{op}: every last dimension must have stride 1, got "
            f"{k.stride()}, {v.stride()}, {k_cache.stride()}, {v_cache.stride()}"
        )
    if slot_mapping.shape != k.shape[:1] or slot_mapping.dtype != torch.int64:
        raise ValueError(
            f"{op}: slot_mapping must be [{k.shape[0]}] int64, got "
            f"{tuple(slot_mapping.shape)} {slot_mapping.dtype}"
        )
