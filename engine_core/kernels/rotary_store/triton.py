"""Normalising, rotating and storing on a GPU, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.launch.triton import launch_dependents, pdl_options, wait


@triton.jit
def _rotate_heads(
    src_ptr,
    dst_ptr,
    src_head_stride,
    dst_head_stride,
    heads,
    head_mask,
    weight_ptr,
    eps,
    cos_ptr,
    sin_ptr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Some heads of one token, ``dst`` may be ``src``; BLOCK_REST covers what does not rotate."""
    pairs = tl.arange(0, BLOCK_HALF)
    a_dims = 2 * pairs if INTERLEAVED else pairs
    b_dims = a_dims + 1 if INTERLEAVED else pairs + HALF
    mask = head_mask[:, None] & (pairs < HALF)[None, :]
    src = src_ptr + heads[:, None] * src_head_stride
    dst = dst_ptr + heads[:, None] * dst_head_stride
    element = dst_ptr.dtype.element_ty
    a = tl.load(src + a_dims[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(src + b_dims[None, :], mask=mask, other=0.0).to(tl.float32)
    if BLOCK_REST:
        rest_dims = 2 * HALF + tl.arange(0, BLOCK_REST)
        rest_mask = head_mask[:, None] & (rest_dims < D)[None, :]
        rest = tl.load(src + rest_dims[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        if BLOCK_REST:
            squares += tl.sum(rest * rest, axis=1)
        inverse = (1.0 / tl.sqrt(squares / D + eps))[:, None]
        a = _scaled(a, inverse, weight_ptr, a_dims, pairs < HALF, OFFSET, element)
        b = _scaled(b, inverse, weight_ptr, b_dims, pairs < HALF, OFFSET, element)
        if BLOCK_REST:
            rest = _scaled(rest, inverse, weight_ptr, rest_dims, rest_dims < D, OFFSET, element)
    cos = tl.load(cos_ptr + pairs, mask=pairs < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + pairs, mask=pairs < HALF, other=0.0)[None, :]
    tl.store(dst + a_dims[None, :], (a * cos - b * sin).to(element), mask=mask)
    tl.store(dst + b_dims[None, :], (b * cos + a * sin).to(element), mask=mask)
    if BLOCK_REST:
        tl.store(dst + rest_dims[None, :], rest.to(element), mask=rest_mask)


@triton.jit
def _scaled(x, inverse, weight_ptr, dims, mask, OFFSET: tl.constexpr, ELEMENT: tl.constexpr):
    """RMSNorm's product, rounded before and after the weight as the op of its own rounds."""
    weight = tl.load(weight_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    x *= inverse
    if OFFSET != 0:
        weight += OFFSET
    else:
        x = x.to(ELEMENT).to(tl.float32)
    return (x * weight[None, :]).to(ELEMENT).to(tl.float32)


@triton.jit
def _rotary_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_block_stride,
    k_slot_stride,
    k_cache_head_stride,
    v_block_stride,
    v_slot_stride,
    v_cache_head_stride,
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
    HAS_NORM: tl.constexpr,
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
    if tile < Q_TILES:
        heads = tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        q_ptr += token * q_token_stride
        _rotate_heads(
            q_ptr, q_ptr, q_head_stride, q_head_stride, heads, heads < NUM_HEADS, q_weight_ptr,
            eps, cos_ptr, sin_ptr, D, HALF, BLOCK_HALF, BLOCK_REST, HAS_NORM, OFFSET, INTERLEAVED,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            heads = (tile - Q_TILES) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
            head_mask = heads < NUM_KV_HEADS
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            k_cache_ptr += block * k_block_stride + offset * k_slot_stride
            v_cache_ptr += block * v_block_stride + offset * v_slot_stride
            dims = tl.arange(0, BLOCK_DV)
            mask = head_mask[:, None] & (dims < DV)[None, :]
            v_ptrs = v_ptr + token * v_token_stride + heads[:, None] * v_head_stride
            v = tl.load(v_ptrs + dims[None, :], mask=mask, other=0.0)
            _rotate_heads(
                k_ptr + token * k_token_stride, k_cache_ptr, k_head_stride, k_cache_head_stride,
                heads, head_mask, k_weight_ptr, eps, cos_ptr, sin_ptr, D, HALF, BLOCK_HALF,
                BLOCK_REST, HAS_NORM, OFFSET, INTERLEAVED,
            )  # fmt: skip
            v_ptrs = v_cache_ptr + heads[:, None] * v_cache_head_stride
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
) -> None:
    """Arguments as in the public wrapper, with cos and sin of one section."""
    num_tokens, num_heads, head_dim = q.shape
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
        slot_mapping,
        q_weight,
        k_weight,
        eps,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
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
        HAS_NORM=q_weight is not None,
        OFFSET=offset,
        INTERLEAVED=interleaved,
        num_warps=4,
        **pdl_options(q.device),
    )
