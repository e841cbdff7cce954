"""Rotary position embedding on a GPU: q and k in one launch, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.launch.triton import launch_dependents, pdl_options, wait


@triton.jit
def _rotate_heads(
    x_ptr,
    x_token_stride,
    x_head_stride,
    num_heads,
    cos_ptr,
    sin_ptr,
    section_stride,
    token,
    tile,
    HALF: tl.constexpr,
    SECTIONS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    heads = tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pairs = tl.arange(0, BLOCK_HALF)
    mask = (heads < num_heads)[:, None] & (pairs < HALF)[None, :]
    base = x_ptr + token * x_token_stride + heads.to(tl.int64)[:, None] * x_head_stride
    for section in tl.static_range(SECTIONS):
        angles = section * section_stride + token * HALF + pairs
        cos = tl.load(cos_ptr + angles, mask=pairs < HALF, other=0.0)[None, :]
        sin = tl.load(sin_ptr + angles, mask=pairs < HALF, other=0.0)[None, :]
        if INTERLEAVED:
            a_ptrs = base + (section * 2 * HALF + 2 * pairs)[None, :]
            b_ptrs = a_ptrs + 1
        else:
            a_ptrs = base + (section * 2 * HALF + pairs)[None, :]
            b_ptrs = a_ptrs + HALF
        a = tl.load(a_ptrs, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(a_ptrs, (a * cos - b * sin).to(x_ptr.dtype.element_ty), mask=mask)
        tl.store(b_ptrs, (b * cos + a * sin).to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["section_stride"])
def _rotary_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    section_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SECTIONS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    Q_TILES: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    if tile < Q_TILES:
        _rotate_heads(
            q_ptr, q_token_stride, q_head_stride, NUM_HEADS, cos_ptr, sin_ptr, section_stride,
            token, tile, HALF, SECTIONS, INTERLEAVED, BLOCK_HEADS, BLOCK_HALF,
        )  # fmt: skip
    else:
        _rotate_heads(
            k_ptr, k_token_stride, k_head_stride, NUM_KV_HEADS, cos_ptr, sin_ptr, section_stride,
            token, tile - Q_TILES, HALF, SECTIONS, INTERLEAVED, BLOCK_HEADS, BLOCK_HALF,
        )  # fmt: skip


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
    """Rotate ``q [T, Hq, D]`` and ``k [T, Hk, D]`` in place."""
    num_tokens, num_heads = q.shape[:2]
    num_kv_heads, half = k.shape[1], cos.shape[-1]
    if num_tokens == 0 or half == 0:
        return
    cos, sin = cos.contiguous(), sin.contiguous()
    block_half = triton.next_power_of_2(half)
    # 1024 pairs per program: 16 heads of dimension 128 share the angles they load.
    block_heads = max(1, min(1024 // block_half, triton.next_power_of_2(num_heads)))
    tiles = triton.cdiv(num_heads, block_heads) + triton.cdiv(num_kv_heads, block_heads)
    _rotary_kernel[(num_tokens, tiles)](
        q,
        k,
        cos,
        sin,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        num_tokens * half,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        SECTIONS=cos.shape[0] if cos.dim() == 3 else 1,
        INTERLEAVED=interleaved,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        num_warps=4,
        **pdl_options(q.device),
    )


# Angles of a program.
_ANGLES = 256


@triton.jit(do_not_specialize=["count", "factor"])
def _angles_kernel(
    cos_ptr,
    sin_ptr,
    positions_ptr,
    inv_freq_ptr,
    factor,
    count,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait(PDL)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    positions = tl.load(positions_ptr + index // HALF, mask=mask, other=0).to(tl.float32)
    angles = positions * tl.load(inv_freq_ptr + index % HALF, mask=mask, other=0.0)
    tl.store(cos_ptr + index, tl.cos(angles) * factor, mask=mask)
    tl.store(sin_ptr + index, tl.sin(angles) * factor, mask=mask)


def rotary_angles(positions: Tensor, inv_freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Arguments as in the public wrapper."""
    half = inv_freq.shape[0]
    shape = (*positions.shape, half)
    cos = torch.empty(shape, dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    count = cos.numel()
    if count:
        _angles_kernel[(triton.cdiv(count, _ANGLES),)](
            cos,
            sin,
            positions.contiguous(),
            inv_freq,
            factor,
            count,
            HALF=half,
            BLOCK=_ANGLES,
            num_warps=4,
            **pdl_options(positions.device),
        )
    return cos, sin
