"""Rotary position embedding on a GPU: q and k in one launch, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.codes.triton import encoded, larger, largest, scale_of
from engine_core.kernels.launch.triton import launch_dependents, pdl_options, wait


@triton.jit
def rotated(a, b, cos, sin):
    """A pair turned by its angle, in float32.

    Which product is fused with the sum is said here, not chosen by the compiler: a row is then the
    same, bit for bit, from whichever kernel it comes.
    """
    return tl.fma(a, cos, -(b * sin)), tl.fma(b, cos, a * sin)


@triton.jit
def sum_in_order(x):
    """Sums ``[R]`` of ``x [R, L]``, L a power of two up to 512, bit for bit in any tile.

    Neighbours are added, then neighbouring sums; of two numbers any order gives the same.
    """
    for _ in tl.static_range(9):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), axis=2)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def scaled_product(ptrs, mask, cols, row_scale, col_scales_ptr, bias_ptr):
    """Numbers in float32; those of a product without its scales, unless these are None, as rounded.

    ``cols`` are its columns, which have scales and biases.
    """
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if col_scales_ptr is not None:
        x *= row_scale * tl.load(col_scales_ptr + cols, mask=mask, other=0.0)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        x = x.to(ptrs.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def rotate_heads(
    src_ptr,
    dst_ptr,
    src_head_stride,
    dst_head_stride,
    scales_ptr,
    scales_stride,
    given,
    row_scale,
    col_scales_ptr,
    bias_ptr,
    first_col,
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
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    stored=None,
):
    """Some heads of one token, ``dst`` may be ``src``; BLOCK_REST covers what does not rotate.

    Heads of ``head_mask`` are stored, or those of ``stored`` if that is not None. All loads come
    before all stores.

    With ``scales`` that are not None ``dst`` takes codes of heads, and they the scales, which are
    ``given`` or, if that is None, each head's own. What is loaded is :func:`scaled_product`,
    whose columns begin at ``first_col``.
    """
    pairs = tl.arange(0, BLOCK_HALF)
    a_dims = 2 * pairs if INTERLEAVED else pairs
    b_dims = a_dims + 1 if INTERLEAVED else pairs + HALF
    mask = head_mask[:, None] & (pairs < HALF)[None, :]
    src = src_ptr + heads[:, None] * src_head_stride
    dst = dst_ptr + heads[:, None] * dst_head_stride
    element = src_ptr.dtype.element_ty
    cols = first_col + heads[:, None] * D
    a = scaled_product(
        src + a_dims[None, :], mask, cols + a_dims[None, :], row_scale, col_scales_ptr, bias_ptr
    )
    b = scaled_product(
        src + b_dims[None, :], mask, cols + b_dims[None, :], row_scale, col_scales_ptr, bias_ptr
    )
    if BLOCK_REST:
        rest_dims = 2 * HALF + tl.arange(0, BLOCK_REST)
        rest_mask = head_mask[:, None] & (rest_dims < D)[None, :]
        rest = scaled_product(
            src + rest_dims[None, :], rest_mask, cols + rest_dims[None, :], row_scale,
            col_scales_ptr, bias_ptr,
        )  # fmt: skip
    if weight_ptr is not None:
        squares = sum_in_order(tl.fma(a, a, b * b))
        if BLOCK_REST:
            squares += tl.sum(rest * rest, axis=1)
        inverse = (1.0 / tl.sqrt(squares / D + eps))[:, None]
        a = _scaled(a, inverse, weight_ptr, a_dims, pairs < HALF, OFFSET, element)
        b = _scaled(b, inverse, weight_ptr, b_dims, pairs < HALF, OFFSET, element)
        if BLOCK_REST:
            rest = _scaled(rest, inverse, weight_ptr, rest_dims, rest_dims < D, OFFSET, element)
    cos = tl.load(cos_ptr + pairs, mask=pairs < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + pairs, mask=pairs < HALF, other=0.0)[None, :]
    a, b = rotated(a, b, cos, sin)
    a = a.to(element)
    b = b.to(element)
    if BLOCK_REST:
        rest = rest.to(element)
    if stored is not None:
        head_mask = stored
        mask = stored[:, None] & (pairs < HALF)[None, :]
        if BLOCK_REST:
            rest_mask = stored[:, None] & (rest_dims < D)[None, :]
    if scales_ptr is not None:
        CODE: tl.constexpr = dst_ptr.dtype.element_ty
        maximum = larger(largest(a), largest(b))
        if BLOCK_REST:
            maximum = larger(maximum, largest(rest))
        scale = scale_of(maximum, given, CODE)
        tl.store(scales_ptr + heads * scales_stride, scale, mask=head_mask)
        a = encoded(a, scale, given is not None, CODE)
        b = encoded(b, scale, given is not None, CODE)
        if BLOCK_REST:
            rest = encoded(rest, scale, given is not None, CODE)
    tl.store(dst + a_dims[None, :], a, mask=mask)
    tl.store(dst + b_dims[None, :], b, mask=mask)
    if BLOCK_REST:
        tl.store(dst + rest_dims[None, :], rest, mask=rest_mask)


@triton.jit
def scaled(x, inverse, weight, OFFSET: tl.constexpr, ELEMENT: tl.constexpr):
    """RMSNorm's product, rounded before and after the weight as the op of its own rounds."""
    x *= inverse
    if OFFSET != 0:
        weight += OFFSET
    else:
        x = x.to(ELEMENT).to(tl.float32)
    return (x * weight[None, :]).to(ELEMENT).to(tl.float32)


@triton.jit
def _scaled(x, inverse, weight_ptr, dims, mask, OFFSET: tl.constexpr, ELEMENT: tl.constexpr):
    weight = tl.load(weight_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    return scaled(x, inverse, weight, OFFSET, ELEMENT)


@triton.jit
def _rotate_sections(
    x_ptr,
    strides,
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
    heads = (tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
    for section in tl.static_range(SECTIONS):
        x = x_ptr + token * strides[0] + section * 2 * HALF
        angles = section * section_stride + token * HALF
        rotate_heads(
            x, x, strides[1], strides[1], None, 0, None, 1.0, None, None, 0, heads,
            heads < num_heads, None, 0.0, cos_ptr + angles, sin_ptr + angles, 2 * HALF, HALF,
            BLOCK_HALF, 0, 0, INTERLEAVED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["section_stride"])
def _rotary_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_strides,
    k_strides,
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
        _rotate_sections(
            q_ptr, q_strides, NUM_HEADS, cos_ptr, sin_ptr, section_stride, token, tile, HALF,
            SECTIONS, INTERLEAVED, BLOCK_HEADS, BLOCK_HALF,
        )  # fmt: skip
    else:
        _rotate_sections(
            k_ptr, k_strides, NUM_KV_HEADS, cos_ptr, sin_ptr, section_stride, token,
            tile - Q_TILES, HALF, SECTIONS, INTERLEAVED, BLOCK_HEADS, BLOCK_HALF,
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
        q.stride(),
        k.stride(),
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
