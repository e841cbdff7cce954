"""Norms, rotation and storing of queries, keys and values, by kernels compiled for a CPU."""

from __future__ import annotations

from torch import Tensor

from engine_core.kernels.codes import cache_parts
from engine_core.kernels.compiled import Kernel, threads

# Numbers per thread, at least.
_LEAST = 2**13


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
    interleaved: bool,
    kv_scales: tuple[float, float] | None = None,
) -> None:
    """Arguments as in the public wrapper; cos and sin are contiguous."""
    slot_mapping = slot_mapping.contiguous()
    (k_cache, k_scales), (v_cache, v_scales) = cache_parts(k_cache), cache_parts(v_cache)
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = v.shape[1:]
    parts = threads(tokens * (num_heads + 2 * num_kv_heads) * head_dim, _LEAST)
    # A head of keys before it is encoded.
    scratch = None if k_scales is None else q.new_empty(parts, head_dim)
    _KERNEL.run(
        (q.dtype, k_cache.dtype, kv_scales is not None),
        parts,
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slot_mapping.data_ptr(),
        0 if q_weight is None else q_weight.data_ptr(),
        0 if k_weight is None else k_weight.data_ptr(),
        tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        v_head_dim,
        cos.shape[-1],
        cos.shape[0] if cos.dim() == 3 else 1,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        k_cache.shape[1],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        0 if scratch is None else scratch.data_ptr(),
        0 if k_scales is None else k_scales.data_ptr(),
        0 if k_scales is None else k_scales.stride(0),
        0 if v_scales is None else v_scales.data_ptr(),
        0 if v_scales is None else v_scales.stride(0),
        int(interleaved),
        eps,
        *(kv_scales or (0.0, 0.0)),
    )


_KERNEL = Kernel("engine_core.kernels.rotary_store.numba:make", "36q3d")
