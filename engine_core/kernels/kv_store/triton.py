"""Storing keys and values on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.codes import cache_parts
from engine_core.kernels.codes.triton import encoded, largest, scale_of
from engine_core.kernels.launch.triton import launch_dependents, pdl_options, wait


@triton.jit
def _store_heads(
    src_ptr,
    src_strides,
    cache_ptr,
    cache_strides,
    scales_ptr,
    scales_strides,
    given,
    tokens,
    heads,
    blocks,
    offsets,
    kept,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    dims = tl.arange(0, BLOCK_D)
    mask = kept[:, None] & (dims < D)[None, :]
    src_rows = tokens * src_strides[0] + heads * src_strides[1]
    values = tl.load(src_ptr + src_rows[:, None] + dims[None, :], mask=mask, other=0.0)
    rows = blocks * cache_strides[0] + offsets * cache_strides[1] + heads * cache_strides[2]
    if scales_ptr is not None:
        CODE: tl.constexpr = cache_ptr.dtype.element_ty
        scale = scale_of(largest(values), given, CODE)
        places = blocks * scales_strides[0] + heads * scales_strides[1] + offsets
        tl.store(scales_ptr + places, scale, mask=kept)
        values = encoded(values, scale, given is not None, CODE)
    tl.store(cache_ptr + rows[:, None] + dims[None, :], values, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _store_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    k_given,
    v_given,
    slots_ptr,
    num_tokens,
    k_strides,
    v_strides,
    k_cache_strides,
    v_cache_strides,
    k_scales_strides,
    v_scales_strides,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    # In this order, so that attention, launched next, may read older data before it waits: the
    # lengths, and the plan of its splits from an earlier layer.
    wait(PDL)
    launch_dependents(PDL)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tokens, heads = rows // NUM_HEADS, rows % NUM_HEADS
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)
    mask = slots >= 0
    slots = tl.where(mask, slots, 0)
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    _store_heads(
        k_ptr, k_strides, k_cache_ptr, k_cache_strides, k_scales_ptr, k_scales_strides, k_given,
        tokens, heads, blocks, offsets, mask, D, BLOCK_D,
    )  # fmt: skip
    _store_heads(
        v_ptr, v_strides, v_cache_ptr, v_cache_strides, v_scales_ptr, v_scales_strides, v_given,
        tokens, heads, blocks, offsets, mask, DV, BLOCK_DV,
    )  # fmt: skip


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: tuple[float, float] | None = None,
) -> None:
    """Write ``k [T, Hk, D]`` and ``v [T, Hk, Dv]`` into the caches; negative slots are skipped."""
    num_tokens, num_heads, head_dim = k.shape
    (k_cache, k_scales), (v_cache, v_scales) = cache_parts(k_cache), cache_parts(v_cache)
    if num_tokens == 0:
        return
    block_d = triton.next_power_of_2(head_dim)
    # A program's 2048 keys are 16 values per thread in 4 warps: two 16-byte accesses in bfloat16.
    block_rows = max(1, min(2048 // block_d, triton.next_power_of_2(num_tokens * num_heads)))
    _store_kv_kernel[(triton.cdiv(num_tokens * num_heads, block_rows),)](
        k,
        v,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        *(kv_scales or (None, None)),
        slot_mapping,
        num_tokens,
        k.stride(),
        v.stride(),
        k_cache.stride(),
        v_cache.stride(),
        (0, 0) if k_scales is None else k_scales.stride()[:2],
        (0, 0) if v_scales is None else v_scales.stride()[:2],
        BLOCK_SIZE=k_cache.shape[1],
        NUM_HEADS=num_heads,
        D=head_dim,
        DV=v.shape[2],
        BLOCK_D=block_d,
        BLOCK_DV=triton.next_power_of_2(v.shape[2]),
        BLOCK_ROWS=block_rows,
        num_warps=4,
        **pdl_options(k.device),
    )
