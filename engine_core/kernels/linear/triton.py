"""Linears of few rows on a GPU: the time is that of reading the weight once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.activation.triton import activated
from engine_core.kernels.launch.triton import (
    arrival_counts,
    arrives_last,
    launch_dependents,
    pdl_options,
    prefetch_l2,
    wait,
)
from engine_core.kernels.linear.tiles import Tile


@triton.jit
def _prefetch(weight_ptr, rows, first, last, row_stride, part, PARTS: tl.constexpr):
    """Bring the first PARTS times ``part`` columns of each row's run into the L2 cache."""
    cols = first + tl.arange(0, PARTS) * part
    pointers = weight_ptr + rows.to(tl.int64)[:, None] * row_stride + cols[None, :]
    size = tl.minimum(last - cols, part) * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    prefetch_l2(pointers, tl.broadcast_to(size[None, :], pointers.shape))


@triton.jit
def _load_tile(ptrs, k_mask, EVEN_K: tl.constexpr):
    """A tile of the weight, zeros where it is beyond the columns of ``k_mask``."""
    return tl.load(ptrs) if EVEN_K else tl.load(ptrs, mask=k_mask[None, :], other=0.0)


@triton.jit
def _multiply(acc, x, w, MODE: tl.constexpr, PRECISION: tl.constexpr):
    """Add a tile's products: ``x [BLOCK_M, BLOCK_K]``, ``w [BLOCK_N, BLOCK_K]``."""
    if MODE == "vector":
        acc += w.to(tl.float32) * x.to(tl.float32)
    elif MODE == "wx":
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _zeros(MODE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    if MODE == "vector":
        acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    elif MODE == "wx":
        acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    return acc


@triton.jit
def _rows_by_cols(acc, MODE: tl.constexpr):
    """The accumulator as ``[BLOCK_M, BLOCK_N]``."""
    if MODE == "vector":
        acc = tl.sum(acc, axis=1)[None, :]
    elif MODE == "wx":
        acc = tl.trans(acc)
    return acc


@triton.jit
def _sum_splits(partial_ptr, offsets, mask, size, SPLITS: tl.constexpr):
    """The splits' results, always added in the same order."""
    acc = tl.load(partial_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        acc += tl.load(
            partial_ptr + split * size + offsets, mask=mask, other=0.0, cache_modifier=".cg"
        )
    return acc


@triton.jit
def _biased(acc, bias_ptr, n, mask, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _add_and_weigh(
    acc,
    residual,
    norm_weight_ptr,
    total_ptr,
    squares_ptr,
    offsets,
    rows,
    n,
    row_mask,
    n_mask,
    tile,
    num_tiles,
    OFFSET: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """Store the sum with the residual and the tile's part of its squares; the sum times weight."""
    mask = row_mask[:, None] & n_mask[None, :]
    total = (acc.to(ELEMENT).to(tl.float32) + residual.to(tl.float32)).to(ELEMENT)
    tl.store(total_ptr + offsets, total, mask=mask)
    total = tl.where(mask, total.to(tl.float32), 0.0)
    tl.store(squares_ptr + rows * num_tiles + tile, tl.sum(total * total, axis=1), mask=row_mask)
    norm_weight = tl.load(norm_weight_ptr + n, mask=n_mask, other=0.0).to(tl.float32)
    if OFFSET != 0:
        norm_weight += OFFSET
    return total * norm_weight[None, :]


@triton.jit
def _rotated_columns(j, D: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The outputs ``j`` of a qkv in an order in which those that rotate together are neighbours."""
    return j if INTERLEAVED else j // D * D + j % 2 * (D // 2) + j % D // 2


@triton.jit
def _load_angles(
    angles_ptr,
    first,
    rows,
    row_mask,
    ROTATED_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Cosines or sines ``[BLOCK_M, BLOCK_N / 2]`` of the pairs from output ``first`` on.

    0 for those of values, which do not rotate.
    """
    pairs = first // 2 + tl.arange(0, BLOCK_N // 2)
    return tl.load(
        angles_ptr + rows[:, None] * (D // 2) + (pairs % (D // 2))[None, :],
        mask=row_mask[:, None] & (pairs < ROTATED_HEADS * (D // 2))[None, :],
        other=0.0,
    )


@triton.jit
def _rotate_and_store(
    acc,
    cos,
    sin,
    slots,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    first,
    rows,
    row_mask,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROTATES: tl.constexpr,
):
    """Outputs of a qkv from ``first`` on, neighbours rotating together: q, or k and v, rotated.

    Rounded before the rotation too, where a linear followed by rotary_store rounds.
    """
    ELEMENT: tl.constexpr = q_ptr.dtype.element_ty
    a, b = tl.split(tl.reshape(acc.to(ELEMENT).to(tl.float32), [BLOCK_M, BLOCK_N // 2, 2]))
    pairs = first // 2 + tl.arange(0, BLOCK_N // 2)
    heads = pairs // (D // 2)
    in_head = pairs % (D // 2)
    a_dims = 2 * in_head if INTERLEAVED else in_head
    b_dims = a_dims + 1 if INTERLEAVED else in_head + D // 2
    if ROTATES:
        rotates = (heads < NUM_HEADS + NUM_KV_HEADS)[None, :]
        turned_a = tl.where(rotates, a * cos - b * sin, a).to(ELEMENT)
        turned_b = tl.where(rotates, b * cos + a * sin, b).to(ELEMENT)
    else:
        turned_a = a.to(ELEMENT)
        turned_b = b.to(ELEMENT)
    q_ptrs = q_ptr + (rows * NUM_HEADS)[:, None] * D + (heads * D)[None, :]
    mask = row_mask[:, None] & (heads < NUM_HEADS)[None, :]
    tl.store(q_ptrs + a_dims[None, :], turned_a, mask=mask)
    tl.store(q_ptrs + b_dims[None, :], turned_b, mask=mask)
    blocks = slots // BLOCK_SIZE
    offsets = slots % BLOCK_SIZE
    stored = (row_mask & (slots >= 0))[:, None]
    kv_heads = heads - NUM_HEADS
    k_rows = k_cache_ptr + (blocks * k_block_stride + offsets * k_slot_stride)[:, None]
    k_ptrs = k_rows + (kv_heads * k_head_stride)[None, :]
    mask = stored & ((kv_heads >= 0) & (kv_heads < NUM_KV_HEADS))[None, :]
    tl.store(k_ptrs + a_dims[None, :], turned_a, mask=mask)
    tl.store(k_ptrs + b_dims[None, :], turned_b, mask=mask)
    kv_heads -= NUM_KV_HEADS
    v_rows = v_cache_ptr + (blocks * v_block_stride + offsets * v_slot_stride)[:, None]
    v_ptrs = v_rows + (kv_heads * v_head_stride)[None, :]
    mask = stored & ((kv_heads >= 0) & (kv_heads < NUM_KV_HEADS))[None, :]
    tl.store(v_ptrs + a_dims[None, :], turned_a, mask=mask)
    tl.store(v_ptrs + b_dims[None, :], turned_b, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "prefetch_programs", "prefetch_part"])
def _linear_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    partial_ptr,
    arrivals_ptr,
    squares_ptr,
    residual_ptr,
    norm_weight_ptr,
    total_ptr,
    squares_out_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    eps,
    num_rows,
    x_stride,
    N,
    K,
    prefetch_programs,
    prefetch_part,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    MODE: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    ADDS: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROTATES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRELOAD: tl.constexpr,
    PREFETCH_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N columns of BLOCK_M rows, over one of SPLITS equal runs of K.

    N is the number of output columns; GATED, the weight has 2 N rows, gate then up. ``partial`` is
    ``[SPLITS, 1 or 2, num_rows, N]`` float32; the last program of a tile to arrive adds it up.

    With SQUARES, x still lacks RMSNorm's division, which is made up for at the end; with ADDS the
    results lack it: they are the sum with the residual times the norm's weight. With NUM_HEADS the
    results are queries, keys and values: q is rotated into ``out``, k into its cache, v stored.
    """
    if NUM_HEADS == 0:
        launch_dependents(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    block = tl.program_id(2)
    first_row = block.to(tl.int64) * BLOCK_M
    x_ptr += first_row * x_stride
    out_ptr += first_row * (NUM_HEADS * HEAD_DIM if NUM_HEADS else N)
    all_rows = num_rows
    num_rows -= first_row.to(tl.int32)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    if NUM_HEADS:
        n = _rotated_columns(n, HEAD_DIM, INTERLEAVED)
    # Rows beyond the last one read it once more: loads of the weight need no mask.
    w_rows = tl.minimum(n, N - 1)
    per_split = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
    low = split * per_split
    high = tl.minimum(low + per_split, K)
    if PDL and block == 0 and tile + split * tl.num_programs(0) < prefetch_programs:
        _prefetch(weight_ptr, w_rows, low, high, K, prefetch_part, PREFETCH_PARTS)
        if GATED:
            _prefetch(weight_ptr, w_rows + N, low, high, K, prefetch_part, PREFETCH_PARTS)
    cols = low + tl.arange(0, BLOCK_K)
    w_ptrs = weight_ptr + w_rows.to(tl.int64)[:, None] * K + cols[None, :]
    up_ptrs = weight_ptr + (w_rows + N).to(tl.int64)[:, None] * K + cols[None, :]
    if PRELOAD:
        # The weight is older than all kernels: its first tile waits for x in registers.
        w_first = _load_tile(w_ptrs, cols < high, EVEN_K)
        if GATED:
            up_first = _load_tile(up_ptrs, cols < high, EVEN_K)
    wait(PDL)

    rows = tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + cols[None, :]
    offsets = rows[:, None] * N + n[None, :]
    mask = row_mask[:, None] & n_mask[None, :]
    # Asked for here, used after the products.
    if SQUARES:
        squares_ptr += first_row * SQUARES
        parts = tl.arange(0, BLOCK_SQUARES)
        squares = tl.load(
            squares_ptr + rows[:, None] * SQUARES + parts[None, :],
            mask=row_mask[:, None] & (parts < SQUARES)[None, :],
            other=0.0,
        )
    if ADDS:
        residual = tl.load(residual_ptr + first_row * N + offsets, mask=mask, other=0.0)
    if NUM_HEADS:
        first = tile * BLOCK_N
        slots = tl.load(slots_ptr + first_row + rows, mask=row_mask, other=-1)
        cos = 0.0
        sin = 0.0
        if ROTATES:
            cos_ptr += first_row * (HEAD_DIM // 2)
            sin_ptr += first_row * (HEAD_DIM // 2)
            ROTATED_HEADS: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
            cos = _load_angles(cos_ptr, first, rows, row_mask, ROTATED_HEADS, HEAD_DIM, BLOCK_N)
            sin = _load_angles(sin_ptr, first, rows, row_mask, ROTATED_HEADS, HEAD_DIM, BLOCK_N)
    acc = _zeros(MODE, BLOCK_M, BLOCK_N, BLOCK_K)
    up = _zeros(MODE, BLOCK_M, BLOCK_N, BLOCK_K)
    if PRELOAD:
        x = tl.load(x_ptrs, mask=row_mask[:, None] & (cols < high)[None, :], other=0.0)
        acc = _multiply(acc, x, w_first, MODE, PRECISION)
        if GATED:
            up = _multiply(up, x, up_first, MODE, PRECISION)
            up_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
        low += BLOCK_K
    for start in tl.range(low, high, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=row_mask[:, None], other=0.0)
            w = tl.load(w_ptrs)
        else:
            k_mask = (start + tl.arange(0, BLOCK_K) < high)[None, :]
            x = tl.load(x_ptrs, mask=row_mask[:, None] & k_mask, other=0.0)
            w = tl.load(w_ptrs, mask=k_mask, other=0.0)
        acc = _multiply(acc, x, w, MODE, PRECISION)
        if GATED:
            w = tl.load(up_ptrs) if EVEN_K else tl.load(up_ptrs, mask=k_mask, other=0.0)
            up = _multiply(up, x, w, MODE, PRECISION)
            up_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    if NUM_HEADS:
        # Attention is launched next. Having waited, it may read before it waits itself what is
        # older: the lengths, and the plan of its splits that an earlier layer made. And not before
        # the products: its programs would crowd on the multiprocessors that have none of these.
        launch_dependents(PDL)
    acc = _rows_by_cols(acc, MODE)
    if GATED:
        up = _rows_by_cols(up, MODE)

    last = True
    if SPLITS > 1:
        size = all_rows * N * (2 if GATED else 1)
        partial_ptr += first_row * N
        tl.store(partial_ptr + split * size + offsets, acc, mask=mask)
        if GATED:
            tl.store(partial_ptr + split * size + all_rows * N + offsets, up, mask=mask)
        last = arrives_last(arrivals_ptr + block * tl.num_programs(0) + tile, SPLITS)
    if last:
        if SPLITS > 1:
            acc = _sum_splits(partial_ptr, offsets, mask, size, SPLITS)
            if GATED:
                up = _sum_splits(partial_ptr + all_rows * N, offsets, mask, size, SPLITS)
        if SQUARES:
            inverse = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / K + eps)
            acc *= inverse[:, None]
            if GATED:
                up *= inverse[:, None]
        acc = _biased(acc, bias_ptr, n, n_mask, HAS_BIAS)
        if ADDS:
            acc = _add_and_weigh(
                acc, residual, norm_weight_ptr, total_ptr + first_row * N,
                squares_out_ptr + first_row * tl.num_programs(0), offsets, rows, n, row_mask,
                n_mask, tile, tl.num_programs(0), NORM_OFFSET, out_ptr.dtype.element_ty,
            )  # fmt: skip
        if GATED:
            # Rounded where a linear followed by silu_and_mul rounds.
            up = _biased(up, bias_ptr, N + n, n_mask, HAS_BIAS)
            gate = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
            up = up.to(out_ptr.dtype.element_ty).to(tl.float32)
            acc = activated(gate, ACTIVATION) * up
        elif ACTIVATION is not None:
            acc = activated(acc.to(out_ptr.dtype.element_ty).to(tl.float32), ACTIVATION)
        if NUM_HEADS:
            _rotate_and_store(
                acc, cos, sin, slots, out_ptr, k_cache_ptr, v_cache_ptr, k_block_stride,
                k_slot_stride, k_head_stride, v_block_stride, v_slot_stride, v_head_stride, first,
                rows, row_mask, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N,
                INTERLEAVED, ROTATES,
            )  # fmt: skip
        else:
            tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


# The first wave of programs prefetches: four on each multiprocessor of an H200. With all of them at
# it a decode step of Llama 3 8B takes 4% longer.
_PREFETCH_PROGRAMS = 528


@dataclass(frozen=True, slots=True)
class Added:
    """The epilogue that adds ``residual`` and prepares RMSNorm.

    Attributes:
        residual: ``[M, N]``, contiguous.
        norm_weight: ``[N]``.
        total: ``[M, N]``, takes the sum.
        squares: ``[M, tiles]`` float32, takes the squares of a row's sums, summed a tile.
        norm_offset: added to the norm's weight.
    """

    residual: Tensor
    norm_weight: Tensor
    total: Tensor
    squares: Tensor
    norm_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Stored:
    """The epilogue of a linear to q, k and v: rotate, and store k and v.

    Attributes:
        cos: ``[M, D / 2]`` float32, contiguous; None for no rotation.
        sin: likewise.
        k_cache: ``[num_blocks, block_size, Hk, D]``, written; last dimension contiguous.
        v_cache: likewise.
        slot_mapping: ``[M]`` int64, contiguous; a token whose slot is negative is not stored.
        interleaved: how dimensions pair in the rotation.
    """

    cos: Tensor | None
    sin: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    interleaved: bool


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: Tile,
    *,
    gated: bool,
    activation: str | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    added: Added | None = None,
    stored: Stored | None = None,
) -> Tensor:
    """``x [M, K]`` by ``weight [N, K]`` to ``[M, N]``, or ``[M, N / 2]`` if ``gated``.

    ``activation`` is "silu", "gelu_tanh" or "gelu", of the gate if there is one, then "silu" if
    None.

    K is a multiple of 8, x's rows are contiguous, the weight is, and starts at a multiple of 16
    bytes. With ``squares [M, parts]`` x is divided by the root of their mean plus ``eps``; with
    ``added`` the result is the sum's product with the norm's weight; with ``stored`` it is the
    rotated queries ``[M, Hq * D]``.
    """
    num_rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    width = n
    summed: tuple[Tensor | None, ...] = (None,) * 4
    if added is not None:
        summed = (added.residual, added.norm_weight, added.total, added.squares)
    # Cosines, sines, slots, the caches and their strides.
    places: tuple[Tensor | int | None, ...] = (None,) * 5 + (0,) * 6
    num_heads = kv_heads = head_dim = block_size = 0
    if stored is not None:
        k_cache, v_cache = stored.k_cache, stored.v_cache
        block_size, kv_heads, head_dim = k_cache.shape[1:]
        num_heads = n // head_dim - 2 * kv_heads
        width = num_heads * head_dim
        places = (
            *(stored.cos, stored.sin, stored.slot_mapping, k_cache, v_cache),
            *(*k_cache.stride()[:3], *v_cache.stride()[:3]),
        )
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    block_m = 1
    if tile.mode != "vector":
        block_m = min(tile.most_rows, max(tile.least_rows, triton.next_power_of_2(num_rows)))
    blocks = triton.cdiv(num_rows, block_m)
    partial = arrivals = None
    tiles = triton.cdiv(n, tile.block_n)
    if tile.splits > 1:
        shape = (tile.splits, 2 if gated else 1, num_rows, n)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrivals = arrival_counts(x.device, tiles * blocks)
    # One request a thread.
    parts = max(1, 32 * tile.num_warps // tile.block_n)
    _linear_kernel[(tiles, tile.splits, blocks)](
        out,
        x,
        weight,
        bias,
        partial,
        arrivals,
        squares,
        *summed,
        *places,
        eps,
        num_rows,
        x.stride(0),
        n,
        k,
        _PREFETCH_PROGRAMS,
        triton.cdiv(tile.prefetch, 8 * parts) * 8,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLITS=tile.splits,
        MODE=tile.mode,
        GATED=gated,
        HAS_BIAS=bias is not None,
        SQUARES=0 if squares is None else squares.shape[1],
        BLOCK_SQUARES=1 if squares is None else triton.next_power_of_2(squares.shape[1]),
        ADDS=added is not None,
        NORM_OFFSET=0.0 if added is None else added.norm_offset,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        INTERLEAVED=stored is not None and stored.interleaved,
        ROTATES=stored is not None and stored.cos is not None,
        ACTIVATION=activation or ("silu" if gated else None),
        EVEN_K=k % (tile.block_k * tile.splits) == 0,
        STAGES=tile.num_stages,
        # Its tiles are small enough to be kept in registers.
        PRELOAD=tile.mode == "vector",
        PREFETCH_PARTS=parts,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        **pdl_options(x.device),
    )
    return out


def linear_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: Tile,
    residual: Tensor,
    norm_weight: Tensor,
    norm_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """``linear(x) + residual [M, N]`` times the norm's weight, its squares, and itself."""
    residual = residual.contiguous()
    parts = triton.cdiv(weight.shape[0], tile.block_n)
    squares = torch.empty((x.shape[0], parts), dtype=torch.float32, device=x.device)
    total = torch.empty_like(residual)
    added = Added(residual, norm_weight, total, squares, norm_offset)
    values = linear(x, weight, bias, tile, gated=False, added=added)
    return values, squares, total
