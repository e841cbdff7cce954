"""Epilogues of a linear: what becomes of a tile of products, in float32, before it is stored.

An epilogue is a named tuple of tensors, constants and these functions, each of which is given the
epilogue. Any reader of a weight goes with any epilogue. With GATED the weight has rows of the gate,
then as many of up, and a tile has products of both. With a LATE of 1 the next kernel is launched
after the wait and with 2 after the products, not at once. WHOLE columns are finished together:
where tiles are narrower, by the last program of so many columns to arrive, which reads the products
that the others left.

- ``order(epilogue, cols)``: the outputs that a tile's columns are.
- ``ask(epilogue, place)``: what is loaded before the products and used after them.
- ``finish(epilogue, asked, place, acc, up)``: round, compute and store; ``up`` only if GATED.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.activation.triton import activated
from engine_core.kernels.codes import cache_parts
from engine_core.kernels.codes.triton import encoded, larger, largest, scale_of
from engine_core.kernels.linear.tiles import Tile
from engine_core.kernels.rotary.triton import rotated, scaled, sum_in_order


class Place(NamedTuple):
    """The part of the result that a program computes.

    Attributes:
        tile: its number among those of a row.
        first_row: int64.
        rows: ``[BLOCK_M]``, counted from there.
        row_mask: whether there are such rows.
        cols: ``[BLOCK_N]``, as the tiles follow one another.
        n: the outputs that they are, by the epilogue's order.
        n_mask: whether there are such columns.
        size: N.
        start: int64, of the first row in ``[M, N]``.
    """

    tile: Any
    first_row: Any
    rows: Any
    row_mask: Any
    cols: Any
    n: Any
    n_mask: Any
    size: Any
    start: Any


@triton.jit
def place_of(epilogue, tile, first_row, num_rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The place of a tile of BLOCK_N columns."""
    rows = tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows - first_row.to(tl.int32)
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n = epilogue.order(epilogue, cols)
    return Place(tile, first_row, rows, row_mask, cols, n, cols < N, N, first_row * N)


@triton.jit
def _offsets(place):
    """From the start of the place in ``[M, N]``, and whether they are inside."""
    offsets = place.rows[:, None] * place.size + place.n[None, :]
    return offsets, place.row_mask[:, None] & place.n_mask[None, :]


@triton.jit
def _in_order(epilogue, cols):
    return cols


@triton.jit
def _ask_nothing(epilogue, place):
    return 0


@triton.jit
def _activate(epilogue, asked, place, acc, up):
    """Rounded where a linear followed by an activation rounds."""
    ELEMENT: tl.constexpr = epilogue.out.dtype.element_ty
    if epilogue.ACTIVATION is not None:
        acc = activated(acc.to(ELEMENT).to(tl.float32), epilogue.ACTIVATION)
    if epilogue.GATED:
        acc *= up.to(ELEMENT).to(tl.float32)
    offsets, mask = _offsets(place)
    tl.store(epilogue.out + place.start + offsets, acc.to(ELEMENT), mask=mask)


class Activated(NamedTuple):
    """The products, activated; of a gated weight the gate's activation times up."""

    out: Tensor
    GATED: Any
    ACTIVATION: Any
    WHOLE: Any = tl.constexpr(1)
    LATE: Any = tl.constexpr(0)
    order: Any = _in_order
    ask: Any = _ask_nothing
    finish: Any = _activate

    @classmethod
    def of(cls, x: Tensor, n: int, gated: bool = False, activation: str | None = None) -> Activated:
        """The epilogue of ``x [..., K]`` and N rows of a weight.

        ``activation`` is "silu", "gelu_tanh", "gelu" or "quick_gelu", of the gate "silu" if None.
        """
        out = x.new_empty((*x.shape[:-1], n // 2 if gated else n))
        name = activation or ("silu" if gated else None)
        return cls(out, tl.constexpr(gated), name and tl.constexpr(name))


@triton.jit
def _ask_residual(epilogue, place):
    offsets, mask = _offsets(place)
    return tl.load(epilogue.residual + place.start + offsets, mask=mask, other=0.0)


@triton.jit
def _add_and_weigh(epilogue, residual, place, acc, up):
    ELEMENT: tl.constexpr = epilogue.out.dtype.element_ty
    offsets, mask = _offsets(place)
    total = (acc.to(ELEMENT).to(tl.float32) + residual.to(tl.float32)).to(ELEMENT)
    tl.store(epilogue.total + place.start + offsets, total, mask=mask)
    total = tl.where(mask, total.to(tl.float32), 0.0)
    squares = epilogue.squares + place.first_row * tl.num_programs(0) + place.tile
    parts = tl.sum(total * total, axis=1)
    tl.store(squares + place.rows * tl.num_programs(0), parts, mask=place.row_mask)
    norm_weight = tl.load(epilogue.norm_weight + place.n, mask=place.n_mask, other=0.0)
    norm_weight = norm_weight.to(tl.float32)
    if epilogue.OFFSET != 0:
        norm_weight += epilogue.OFFSET
    tl.store(
        epilogue.out + place.start + offsets, (total * norm_weight[None, :]).to(ELEMENT), mask=mask
    )


class Added(NamedTuple):
    """The sum with the residual, times an RMSNorm's weight, which is left to be divided.

    Attributes:
        out: ``[..., N]``, takes the sum times the weight.
        residual: ``[..., N]``, contiguous.
        norm_weight: ``[N]``.
        total: ``[..., N]``, takes the sum.
        squares: ``[M, tiles]`` float32, takes the squares of a row's sums, summed a tile.
        OFFSET: added to the norm's weight.
    """

    out: Tensor
    residual: Tensor
    norm_weight: Tensor
    total: Tensor
    squares: Tensor
    OFFSET: Any
    GATED: Any = tl.constexpr(False)
    WHOLE: Any = tl.constexpr(1)
    LATE: Any = tl.constexpr(0)
    order: Any = _in_order
    ask: Any = _ask_residual
    finish: Any = _add_and_weigh

    @classmethod
    def of(cls, residual: Tensor, norm_weight: Tensor, tile: Tile, offset: float = 0.0) -> Added:
        """The epilogue for such tiles."""
        residual, norm_weight = residual.contiguous(), norm_weight.contiguous()
        n = residual.shape[-1]
        parts = (residual.numel() // n, triton.cdiv(n, tile.block_n))
        squares = residual.new_empty(parts, dtype=torch.float32)
        out, total = torch.empty_like(residual), torch.empty_like(residual)
        return cls(out, residual, norm_weight, total, squares, tl.constexpr(offset))


@triton.jit
def _rotated_order(epilogue, cols):
    """An order in which outputs that rotate together are neighbours."""
    D: tl.constexpr = epilogue.HEAD_DIM
    return cols if epilogue.INTERLEAVED else cols // D * D + cols % 2 * (D // 2) + cols % D // 2


@triton.jit
def _pairs(epilogue, place):
    """``[BLOCK_N / 2]``: the pairs of neighbours among all, their heads, and their dimensions."""
    HALF: tl.constexpr = epilogue.HEAD_DIM // 2
    BLOCK: tl.constexpr = place.cols.shape[0] // 2
    pairs = place.tile * BLOCK + tl.arange(0, BLOCK)
    a_dims = 2 * (pairs % HALF) if epilogue.INTERLEAVED else pairs % HALF
    return pairs, pairs // HALF, a_dims, a_dims + (1 if epilogue.INTERLEAVED else HALF)


@triton.jit
def _angles(angles_ptr, epilogue, place, pairs):
    """Cosines or sines ``[BLOCK_M, BLOCK_N / 2]``; 0 for those of values, which do not rotate."""
    HALF: tl.constexpr = epilogue.HEAD_DIM // 2
    rotates = pairs < (epilogue.NUM_HEADS + epilogue.NUM_KV_HEADS) * HALF
    return tl.load(
        angles_ptr + place.first_row * HALF + place.rows[:, None] * HALF + (pairs % HALF)[None, :],
        mask=place.row_mask[:, None] & rotates[None, :],
        other=0.0,
    )


@triton.jit
def _ask_weights(epilogue, heads, dims):
    """Of the norm of each pair's head; values have none."""
    ptrs = tl.where(heads < epilogue.NUM_HEADS, epilogue.q_weight + dims, epilogue.k_weight + dims)
    mask = heads < epilogue.NUM_HEADS + epilogue.NUM_KV_HEADS
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _ask_turns(epilogue, place):
    """Slots, cosines and sines, and the weights of norms; numbers where there are none."""
    pairs, heads, a_dims, b_dims = _pairs(epilogue, place)
    slots = tl.load(epilogue.slots + place.first_row + place.rows, mask=place.row_mask, other=-1)
    cos = 1.0
    sin = 0.0
    if epilogue.cos is not None:
        cos = _angles(epilogue.cos, epilogue, place, pairs)
        sin = _angles(epilogue.sin, epilogue, place, pairs)
    a_weight = 1.0
    b_weight = 1.0
    if epilogue.q_weight is not None:
        a_weight = _ask_weights(epilogue, heads, a_dims)
        b_weight = _ask_weights(epilogue, heads, b_dims)
    return slots, cos, sin, a_weight, b_weight


@triton.jit
def _inverse(a, b, eps, D: tl.constexpr):
    """One by the root mean square of each pair's head, ``[M, N / 2]``; tiles are whole heads."""
    rows: tl.constexpr = a.shape[0] * a.shape[1] // (D // 2)
    squares = sum_in_order(tl.reshape(tl.fma(a, a, b * b), [rows, D // 2]))
    inverse = 1.0 / tl.sqrt(squares / D + eps)
    return tl.reshape(tl.broadcast_to(inverse[:, None], [rows, D // 2]), a.shape)


@triton.jit
def _of_heads(x, rows: tl.constexpr, like):
    """One number of each row and head, ``[rows]``, for all of the head's pairs."""
    D_HALF: tl.constexpr = like.shape[0] * like.shape[1] // rows
    return tl.reshape(tl.broadcast_to(x[:, None], [rows, D_HALF]), like.shape)


@triton.jit
def _coded(epilogue, place, slots, a, b):
    """Codes of pairs ``a`` and ``b [M, N / 2]``, of whole heads, whose scales are stored."""
    CODE: tl.constexpr = epilogue.k_cache.dtype.element_ty
    HALF: tl.constexpr = epilogue.HEAD_DIM // 2
    NUM_KV_HEADS: tl.constexpr = epilogue.NUM_KV_HEADS
    ROWS: tl.constexpr = a.shape[0] * a.shape[1] // HALF
    HEADS: tl.constexpr = a.shape[1] // HALF
    a_heads = tl.reshape(a, [ROWS, HALF])
    b_heads = tl.reshape(b, [ROWS, HALF])
    of_row = tl.broadcast_to(slots[:, None], [a.shape[0], HEADS])
    heads = place.tile * HEADS + tl.arange(0, HEADS) - epilogue.NUM_HEADS
    of_head = tl.broadcast_to(heads[None, :], [a.shape[0], HEADS])
    of_row = tl.reshape(of_row, [ROWS])
    of_head = tl.reshape(of_head, [ROWS])
    maximum = larger(largest(a_heads), largest(b_heads))
    GIVEN: tl.constexpr = epilogue.k_given is not None
    if GIVEN:
        given = tl.where(of_head < NUM_KV_HEADS, epilogue.k_given, epilogue.v_given)
        scales = scale_of(maximum, given, CODE)
    else:
        scales = scale_of(maximum, None, CODE)
    blocks = of_row // epilogue.BLOCK_SIZE
    offsets = of_row % epilogue.BLOCK_SIZE
    for cache in tl.static_range(2):
        base = epilogue.v_scales if cache else epilogue.k_scales
        strides = epilogue.v_scales_strides if cache else epilogue.k_scales_strides
        kv_heads = of_head - cache * NUM_KV_HEADS
        mask = (of_row >= 0) & (kv_heads >= 0) & (kv_heads < NUM_KV_HEADS)
        tl.store(base + blocks * strides[0] + kv_heads * strides[1] + offsets, scales, mask=mask)
    a = tl.reshape(encoded(a_heads, scales, GIVEN, CODE), a.shape)
    b = tl.reshape(encoded(b_heads, scales, GIVEN, CODE), b.shape)
    return a, b


@triton.jit
def _store_pairs(ptrs, a_dims, b_dims, a, b, mask):
    tl.store(ptrs + a_dims[None, :], a, mask=mask)
    tl.store(ptrs + b_dims[None, :], b, mask=mask)


@triton.jit
def _rotate_and_store(epilogue, asked, place, acc, up):
    """Rounded before the norm and before the rotation, as by a linear and then rotary_store."""
    slots, cos, sin, a_weight, b_weight = asked
    ELEMENT: tl.constexpr = epilogue.out.dtype.element_ty
    D: tl.constexpr = epilogue.HEAD_DIM
    NUM_HEADS: tl.constexpr = epilogue.NUM_HEADS
    NUM_KV_HEADS: tl.constexpr = epilogue.NUM_KV_HEADS
    acc = acc.to(ELEMENT).to(tl.float32)
    a, b = tl.split(tl.reshape(acc, [acc.shape[0], acc.shape[1] // 2, 2]))
    _pair, heads, a_dims, b_dims = _pairs(epilogue, place)
    rotates = (heads < NUM_HEADS + NUM_KV_HEADS)[None, :]
    if epilogue.q_weight is not None:
        inverse = _inverse(a, b, epilogue.eps, D)
        a = tl.where(rotates, scaled(a, inverse, a_weight, epilogue.OFFSET, ELEMENT), a)
        b = tl.where(rotates, scaled(b, inverse, b_weight, epilogue.OFFSET, ELEMENT), b)
    if epilogue.cos is not None:
        turned_a, turned_b = rotated(a, b, cos, sin)
        turned_a = tl.where(rotates, turned_a, a).to(ELEMENT)
        turned_b = tl.where(rotates, turned_b, b).to(ELEMENT)
    else:
        turned_a = a.to(ELEMENT)
        turned_b = b.to(ELEMENT)
    q_rows = epilogue.out + place.first_row * (NUM_HEADS * D)
    q_rows += (place.rows * NUM_HEADS)[:, None] * D
    mask = place.row_mask[:, None] & (heads < NUM_HEADS)[None, :]
    _store_pairs(q_rows + (heads * D)[None, :], a_dims, b_dims, turned_a, turned_b, mask)
    blocks = slots // epilogue.BLOCK_SIZE
    offsets = slots % epilogue.BLOCK_SIZE
    if epilogue.k_scales is not None:
        kept_a, kept_b = _coded(epilogue, place, slots, turned_a, turned_b)
    else:
        kept_a = turned_a
        kept_b = turned_b
    stored = (place.row_mask & (slots >= 0))[:, None]
    for cache in tl.static_range(2):
        base = epilogue.v_cache if cache else epilogue.k_cache
        block_stride, slot_stride, head_stride = epilogue.v_strides if cache else epilogue.k_strides
        kv_heads = heads - NUM_HEADS - cache * NUM_KV_HEADS
        ptrs = base + (blocks * block_stride + offsets * slot_stride)[:, None]
        mask = stored & ((kv_heads >= 0) & (kv_heads < NUM_KV_HEADS))[None, :]
        ptrs += (kv_heads * head_stride)[None, :]
        _store_pairs(ptrs, a_dims, b_dims, kept_a, kept_b, mask)


class Stored(NamedTuple):
    """Queries, keys and values; those but values normalised and rotated; all but queries stored.

    Attributes:
        out: ``[M, Hq, D]``, takes the queries.
        cos: ``[M, D / 2]`` float32, contiguous; None for no rotation.
        sin: likewise.
        slots: ``[M]`` int64, contiguous; a token whose slot is negative is not stored.
        k_cache: ``[num_blocks, block_size, Hk, D]``, written; last dimension contiguous.
        v_cache: likewise.
        k_strides: the cache's but the last.
        v_strides: likewise.
        k_scales: ``[num_blocks, Hk, block_size]`` float32, written; None if the cache is of
            numbers. D is then a power of two.
        v_scales: likewise.
        k_scales_strides: of blocks and heads.
        v_scales_strides: likewise.
        k_given: the scale of all keys; None to take each head's greatest number.
        v_given: likewise.
        q_weight: ``[D]``, of the norm of each head of queries; None for none, as for ``k_weight``.
            D is then a power of two.
        k_weight: likewise, of keys.
        eps: of the norms.
        OFFSET: added to their weights.
        INTERLEAVED: how dimensions pair in the rotation.
    """

    out: Tensor
    cos: Tensor | None
    sin: Tensor | None
    slots: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_strides: Any
    v_strides: Any
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    OFFSET: Any
    NUM_HEADS: Any
    NUM_KV_HEADS: Any
    HEAD_DIM: Any
    BLOCK_SIZE: Any
    INTERLEAVED: Any
    WHOLE: Any
    GATED: Any = tl.constexpr(False)
    # Attention is launched next: :class:`engine_core.kernels.attention.decode.Start`. Mostly not
    # before the products, for its programs would crowd on multiprocessors that have none of these.
    LATE: Any = tl.constexpr(2)
    order: Any = _rotated_order
    ask: Any = _ask_turns
    finish: Any = _rotate_and_store
    k_scales: Any = None
    v_scales: Any = None
    k_scales_strides: Any = (0, 0)
    v_scales_strides: Any = (0, 0)
    k_given: Any = None
    v_given: Any = None

    @classmethod
    def of(
        cls,
        n: int,
        cos: Tensor | None,
        sin: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        interleaved: bool,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 0.0,
        offset: float = 0.0,
        dtype: torch.dtype | None = None,
        kv_scales: tuple[float, float] | None = None,
        late: int = 2,
    ) -> Stored:
        """The epilogue of N outputs: those of all queries, keys, then values.

        ``dtype`` is that of queries; the cache's if None. ``late`` is when the next kernel is
        launched: 0 at once, 1 after the wait, 2 after the products.
        """
        (k_cache, k_scales), (v_cache, v_scales) = cache_parts(k_cache), cache_parts(v_cache)
        block_size, kv_heads, head_dim = k_cache.shape[1:]
        num_heads = n // head_dim - 2 * kv_heads
        whole = 1 if q_weight is None and k_scales is None else head_dim
        sizes = (offset, num_heads, kv_heads, head_dim, block_size, interleaved, whole)
        made = cls(
            k_cache.new_empty(
                (len(slot_mapping), num_heads, head_dim), dtype=dtype or k_cache.dtype
            ),
            None if cos is None else cos.contiguous(),
            None if sin is None else sin.contiguous(),
            slot_mapping.contiguous(),
            k_cache,
            v_cache,
            k_cache.stride()[:3],
            v_cache.stride()[:3],
            q_weight,
            k_weight,
            eps,
            *(tl.constexpr(size) for size in sizes),
        )._replace(LATE=tl.constexpr(int(late)))
        if k_scales is None or v_scales is None:
            return made
        k_given, v_given = kv_scales or (None, None)
        return made._replace(
            k_scales=k_scales,
            v_scales=v_scales,
            k_scales_strides=k_scales.stride()[:2],
            v_scales_strides=v_scales.stride()[:2],
            k_given=k_given,
            v_given=v_given,
        )
