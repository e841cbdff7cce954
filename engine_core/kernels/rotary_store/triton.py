"""Normalising, rotating and storing on a GPU, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.codes import cache_parts
from engine_core.kernels.codes.triton import encoded, largest, scale_of
from engine_core.kernels.launch.triton import launch_dependents, pdl_options, wait
from engine_core.kernels.rotary.triton import rotate_heads, scaled_product


@triton.jit
def _rotary_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    k_given,
    v_given,
    row_scales_ptr,
    col_scales_ptr,
    bias_ptr,
    slots_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    q_strides,
    k_strides,
    v_strides,
    k_cache_strides,
    v_cache_strides,
    k_scales_strides,
    v_scales_strides,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Up to BLOCK_HEADS heads of q, or of k and v, of one token."""
    # In this order, so that attention, launched next, may read older data before it waits: the
    # lengths, and the plan of its splits from an earlier layer.
    wait(PDL)
    launch_dependents(PDL)
    Q_TILES: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cos_ptr += token * HALF
    sin_ptr += token * HALF
    row_scale = 1.0
    if row_scales_ptr is not None:
        row_scale = tl.load(row_scales_ptr + token)
    if tile < Q_TILES:
        heads = tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        q_ptr += token * q_strides[0]
        rotate_heads(
            q_ptr, q_ptr, q_strides[1], q_strides[1], None, 0, None, row_scale, col_scales_ptr,
            bias_ptr, 0, heads, heads < NUM_HEADS, q_weight_ptr, eps, cos_ptr, sin_ptr, D, HALF,
            BLOCK_HALF, BLOCK_REST, OFFSET, INTERLEAVED,
        )  # fmt: skip
    else:
        # The slot, keys and values are loaded beside each other, before anything is stored, so that
        # they are one wait for memory and not three.
        slot = tl.load(slots_ptr + token)
        heads = (tile - Q_TILES) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        head_mask = heads < NUM_KV_HEADS
        dims = tl.arange(0, BLOCK_DV)
        mask = head_mask[:, None] & (dims < DV)[None, :]
        v_ptrs = v_ptr + token * v_strides[0] + heads[:, None] * v_strides[1]
        cols = (NUM_HEADS + NUM_KV_HEADS) * D + heads[:, None] * DV + dims[None, :]
        v = scaled_product(v_ptrs + dims[None, :], mask, cols, row_scale, col_scales_ptr, bias_ptr)
        v = v.to(v_ptr.dtype.element_ty)
        stored = head_mask & (slot + tl.zeros_like(heads) >= 0)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        k_cache_ptr += block * k_cache_strides[0] + offset * k_cache_strides[1]
        v_cache_ptr += block * v_cache_strides[0] + offset * v_cache_strides[1]
        if k_scales_ptr is not None:
            k_scales_ptr += block * k_scales_strides[0] + offset
            v_scales_ptr += block * v_scales_strides[0] + offset
        rotate_heads(
            k_ptr + token * k_strides[0], k_cache_ptr, k_strides[1], k_cache_strides[2],
            k_scales_ptr, k_scales_strides[1], k_given, row_scale, col_scales_ptr, bias_ptr,
            NUM_HEADS * D, heads, head_mask, k_weight_ptr, eps, cos_ptr, sin_ptr, D, HALF,
            BLOCK_HALF, BLOCK_REST, OFFSET, INTERLEAVED, stored,
        )  # fmt: skip
        if k_scales_ptr is not None:
            CODE: tl.constexpr = v_cache_ptr.dtype.element_ty
            scale = scale_of(largest(v), v_given, CODE)
            v_scales_ptrs = v_scales_ptr + heads * v_scales_strides[1]
            tl.store(v_scales_ptrs, scale, mask=stored)
            v = encoded(v, scale, v_given is not None, CODE)
        v_ptrs = v_cache_ptr + heads[:, None] * v_cache_strides[2]
        mask = stored[:, None] & (dims < DV)[None, :]
        tl.store(v_ptrs + dims[None, :], v, mask=mask)


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
    """Arguments as in the public wrapper, with cos and sin of one section."""
    num_tokens, num_heads, head_dim = q.shape
    (k_cache, k_scales), (v_cache, v_scales) = cache_parts(k_cache), cache_parts(v_cache)
    num_kv_heads, v_head_dim = v.shape[1:]
    if num_tokens == 0:
        return
    half = cos.shape[-1]
    rest = head_dim - 2 * half
    block_half = triton.next_power_of_2(half)
    # 512 pairs are 4 of each thread of 4 warps: few tokens are spread over many multiprocessors.
    block_heads = max(1, min(512 // block_half, triton.next_power_of_2(num_heads)))
    tiles = triton.cdiv(num_heads, block_heads) + triton.cdiv(num_kv_heads, block_heads)
    _rotary_store_kernel[(num_tokens, tiles)](
        q,
        k,
        v,
        cos.contiguous(),
        sin.contiguous(),
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        *(kv_scales or (None, None)),
        *(scales or (None, None)),
        bias,
        slot_mapping,
        q_weight,
        k_weight,
        eps,
        q.stride(),
        k.stride(),
        v.stride(),
        k_cache.stride(),
        v_cache.stride(),
        (0, 0) if k_scales is None else k_scales.stride()[:2],
        (0, 0) if v_scales is None else v_scales.stride()[:2],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=k_cache.shape[1],
        D=head_dim,
        DV=v_head_dim,
        HALF=half,
        BLOCK_HALF=block_half,
        BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
        BLOCK_DV=triton.next_power_of_2(v_head_dim),
        BLOCK_HEADS=block_heads,
        OFFSET=offset,
        INTERLEAVED=interleaved,
        num_warps=4,
        **pdl_options(q.device),
    )
