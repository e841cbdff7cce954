"""Attention of absorbed queries over latent vectors on a GPU.

All heads of a row share what the cache has of a token, so that heads are the rows of one
``tl.dot``. A tile is loaded once: it is keys for the logits and values for the sums. The rotated
part of keys, whose size is no power of 2 together with the latent vector's, has a product of its
own. Decode rows are cut into splits as in :mod:`engine_core.kernels.attention.triton`. Chunks are
computed by the same tiles, and absorb the projections too: no shape depends on lengths, so that
steps may be captured. The tiles follow from sizes of shared memory and were not measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.attention import decode
from engine_core.kernels.attention.tiles.triton import block_at, divided, load_tokens, store_rows
from engine_core.kernels.attention.triton import ITEM, merge_splits, plan_splits
from engine_core.kernels.launch.triton import (
    arrival_counts,
    arrives_last,
    launch_dependents,
    num_multiprocessors,
    pdl_options,
    wait,
)

if TYPE_CHECKING:
    from engine_core.kernels.latent_attention import LatentCall

_LOG2E = 1.4426950408889634


class Inputs(NamedTuple):
    """Inputs of a kernel.

    Attributes:
        q: ``[T, H, rank + rope]``, absorbed, contiguous.
        cache: ``[num_blocks, block_size, rank + rope]``.
        block_tables: ``[R, max_blocks]``.
        query_start: ``[R + 1]``.
        kv_lens: ``[R]``.
        logit_scale: a dot product times this is a logit in units of log 2.
        strides: of the cache's blocks and slots.
    """

    q: Any
    cache: Any
    block_tables: Any
    query_start: Any
    kv_lens: Any
    logit_scale: Any
    strides: Any


class Shape(NamedTuple):
    """Constants that a kernel is compiled for.

    Attributes:
        num_heads: of this rank.
        block_size: tokens of a block.
        dv: size of a latent vector.
        block_dv: ``dv`` up to a power of 2.
        rope: size of the rotated part of a key.
        block_rope: ``rope`` up to a power of 2.
        precision: of products of float32.
    """

    num_heads: int
    block_size: int
    dv: int
    block_dv: int
    rope: int
    block_rope: int
    precision: str


@triton.jit
def _load_queries(inputs, tokens, heads, mask, SHAPE: tl.constexpr):
    """Queries of ``tokens`` and ``heads [M]``: ``[M, BLOCK_DV]`` and ``[M, BLOCK_ROPE]``."""
    latent, rope = tl.arange(0, SHAPE.block_dv), tl.arange(0, SHAPE.block_rope)
    rows = inputs.q + (tokens * SHAPE.num_heads + heads) * (SHAPE.dv + SHAPE.rope)
    q = tl.load(
        rows[:, None] + latent[None, :],
        mask=mask[:, None] & (latent < SHAPE.dv)[None, :],
        other=0.0,
    )
    q_rope = tl.load(
        rows[:, None] + SHAPE.dv + rope[None, :],
        mask=mask[:, None] & (rope < SHAPE.rope)[None, :],
        other=0.0,
    )
    return q, q_rope


@triton.jit
def _attend_tiles(
    acc,
    denominator,
    maximum,
    inputs,
    q,
    q_rope,
    positions,
    table_ptr,
    low,
    high,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold the tokens in ``[low, high)`` into the running softmax of every query row.

    ``low`` is a multiple of BLOCK_N. Without MASKED ``high`` is one too, and all see every token.
    """
    block = block_at(table_ptr, low, high, SHAPE)
    for start in range(low, high, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        in_range = tokens < high
        # Loaded one tile ahead, so that no key waits for it.
        next_block = block_at(table_ptr, start + BLOCK_N, high, SHAPE)
        latents = load_tokens(
            inputs.cache, inputs.strides, table_ptr, block, start, in_range, SHAPE, SHAPE.dv,
            SHAPE.block_dv, BLOCK_N, MASKED,
        )  # fmt: skip
        rope = load_tokens(
            inputs.cache + SHAPE.dv, inputs.strides, table_ptr, block, start, in_range, SHAPE,
            SHAPE.rope, SHAPE.block_rope, BLOCK_N, MASKED,
        )  # fmt: skip
        logits = tl.dot(q, tl.trans(latents), input_precision=SHAPE.precision)
        logits = tl.dot(q_rope, tl.trans(rope), logits, input_precision=SHAPE.precision)
        logits *= inputs.logit_scale
        if MASKED:
            visible = (tokens[None, :] <= positions[:, None]) & in_range[None, :]
            logits = tl.where(visible, logits, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(logits, axis=1))
        subtrahend = new_maximum
        if MASKED:
            # A query that has seen nothing yet: -inf - -inf would be NaN.
            subtrahend = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(logits - subtrahend[:, None])
        rescale = tl.exp2(maximum - subtrahend)
        denominator = denominator * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(latents.dtype), latents, acc, input_precision=SHAPE.precision)
        maximum = new_maximum
        block = next_block
    return acc, denominator, maximum


@triton.jit
def _nothing_yet(M: tl.constexpr, SHAPE: tl.constexpr):
    # Triton 3.6 takes no field of a tuple as a size.
    BLOCK_DV: tl.constexpr = SHAPE.block_dv
    acc = tl.zeros([M, BLOCK_DV], dtype=tl.float32)
    return acc, tl.zeros([M], dtype=tl.float32), tl.full([M], float("-inf"), dtype=tl.float32)


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrivals_ptr,
    items_ptr,
    inputs,
    table_stride,
    SHAPE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ITEM: tl.constexpr,
    MERGED_SPLITS: tl.constexpr,
    MERGED_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Up to BLOCK_G heads of one row over one split of its tokens, which the plan's item names.

    Where a row has several, the last program to arrive merges them from ``partial [max_items, H,
    rank]`` float32 and their logarithmic denominators ``lse``.
    """
    item = tl.program_id(1).to(tl.int64)
    wait(PDL)
    items_ptr += item * ITEM
    row = tl.load(items_ptr).to(tl.int64)
    if row < 0:
        return
    low = tl.load(items_ptr + 1)
    high = tl.load(items_ptr + 2)
    first_item = tl.load(items_ptr + 3).to(tl.int64)
    used = tl.load(items_ptr + 4)
    first_head = tl.program_id(0) * BLOCK_G
    heads = first_head + tl.arange(0, BLOCK_G)
    mask = heads < SHAPE.num_heads
    q, q_rope = _load_queries(inputs, row, heads, mask, SHAPE)
    positions = tl.zeros([BLOCK_G], dtype=tl.int32) + (tl.load(inputs.kv_lens + row) - 1)
    acc, denominator, maximum = _nothing_yet(BLOCK_G, SHAPE)
    acc, denominator, maximum = _attend_tiles(
        acc, denominator, maximum, inputs, q, q_rope, positions,
        inputs.block_tables + row * table_stride, low, high, SHAPE, BLOCK_N, True,
    )  # fmt: skip
    launch_dependents(PDL)
    # No tokens: padding.
    safe = tl.where(denominator > 0.0, denominator, 1.0)
    y = acc / safe[:, None]
    if used > 1:
        partial = item * SHAPE.num_heads + heads
        store_rows(partial_ptr, partial, y, mask, SHAPE)
        tl.store(lse_ptr + partial, maximum + tl.log2(safe), mask=mask)
        if arrives_last(arrivals_ptr + row * tl.num_programs(0) + tl.program_id(0), used):
            for in_tile in range(0, min(BLOCK_G, SHAPE.num_heads), MERGED_HEADS):
                merged = first_head + in_tile + tl.arange(0, MERGED_HEADS)
                merge_splits(
                    out_ptr + row * SHAPE.num_heads * SHAPE.dv,
                    partial_ptr + first_item * SHAPE.num_heads * SHAPE.dv,
                    lse_ptr + first_item * SHAPE.num_heads,
                    merged,
                    merged < SHAPE.num_heads,
                    used,
                    SHAPE,
                    MERGED_SPLITS,
                    MERGED_HEADS,
                )
    else:
        store_rows(out_ptr, row * SHAPE.num_heads + heads, y, mask, SHAPE)


@triton.jit(do_not_specialize=["first_row", "table_stride"])
def _prefill_kernel(
    out_ptr,
    inputs,
    first_row,
    table_stride,
    SHAPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_M (query, head) pairs of one row, heads of a query adjacent."""
    launch_dependents(PDL)
    wait(PDL)
    # The last tiles see the most keys: they start first, so that short ones fill the end.
    first_pair = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    row = first_row + tl.program_id(1).to(tl.int64)
    query_begin = tl.load(inputs.query_start + row)
    num_queries = tl.load(inputs.query_start + row + 1) - query_begin
    if first_pair >= num_queries * SHAPE.num_heads:
        return
    start_pos = tl.load(inputs.kv_lens + row) - num_queries
    pairs = first_pair + tl.arange(0, BLOCK_M)
    queries, heads = pairs // SHAPE.num_heads, pairs % SHAPE.num_heads
    mask = queries < num_queries
    tokens = (query_begin + queries).to(tl.int64)
    q, q_rope = _load_queries(inputs, tokens, heads, mask, SHAPE)
    positions = start_pos + queries
    last_query = tl.minimum((first_pair + BLOCK_M - 1) // SHAPE.num_heads, num_queries - 1)
    high = start_pos + last_query + 1
    # All queries see the tokens before.
    full = tl.maximum(start_pos + first_pair // SHAPE.num_heads + 1, 0) // BLOCK_N * BLOCK_N
    table_ptr = inputs.block_tables + row * table_stride
    acc, denominator, maximum = _nothing_yet(BLOCK_M, SHAPE)
    acc, denominator, maximum = _attend_tiles(
        acc, denominator, maximum, inputs, q, q_rope, positions, table_ptr, 0, full, SHAPE,
        BLOCK_N, False,
    )  # fmt: skip
    acc, denominator, maximum = _attend_tiles(
        acc, denominator, maximum, inputs, q, q_rope, positions, table_ptr, full, high, SHAPE,
        BLOCK_N, True,
    )  # fmt: skip
    rows = tokens * SHAPE.num_heads + heads
    store_rows(out_ptr, rows, divided(acc, denominator), mask, SHAPE)


def latent_attention(call: LatentCall) -> Tensor:
    """See :func:`engine_core.kernels.latent_attention`."""
    attended = attend(call, call.absorbed(call.q))
    return call.released(attended)


def attend(call: LatentCall, q: Tensor) -> Tensor:
    """Weighted sums of latent vectors ``[T, H, rank]`` for absorbed queries, contiguous."""
    num_rows, num_decode_rows, num_heads = len(call.kv_lens), call.num_decode_rows, q.shape[1]
    rank, rope = call.rank, q.shape[2] - call.rank
    float32 = q.dtype == torch.float32
    shape = Shape(
        num_heads, call.cache.shape[1], rank, max(16, triton.next_power_of_2(rank)), rope,
        max(16, triton.next_power_of_2(rope)), "ieee" if float32 else "tf32",
    )  # fmt: skip
    inputs = Inputs(
        q, call.cache, call.block_tables, call.query_start, call.kv_lens, call.scale * _LOG2E,
        call.cache.stride()[:2],
    )  # fmt: skip
    out = q.new_empty((*q.shape[:2], rank))
    pdl = pdl_options(q.device)
    table_stride = call.block_tables.stride(0)
    block_n = 16 if float32 else 32
    # Of rows of 512 numbers, 64 queries and two tiles of 32 tokens take 150 KiB in 16 bits.
    most = 16 if float32 else 64
    if num_decode_rows:
        block_g = max(16, min(triton.next_power_of_2(num_heads), most))
        tile = decode.Tile(block_n, 8 if block_g == 64 else 4, 2)
        # A token's numbers are keys and values.
        cut = decode.cut(
            tile, num_decode_rows, num_heads, 1, shape.block_dv, shape.block_dv, (rank + rope, 0),
            q.element_size(), num_multiprocessors(q.device), block_g,
        )  # fmt: skip
        head_tiles = triton.cdiv(num_heads, block_g)
        items, _ = plan_splits(call.kv_lens, num_decode_rows, call.max_kv_len, None, cut, call.memo)
        size = (len(items), num_heads)
        _decode_kernel[(head_tiles, len(items))](
            out,
            torch.empty((*size, rank), dtype=torch.float32, device=q.device),
            torch.empty(size, dtype=torch.float32, device=q.device),
            arrival_counts(q.device, num_decode_rows * head_tiles),
            items,
            inputs,
            table_stride,
            SHAPE=shape,
            BLOCK_G=block_g,
            BLOCK_N=block_n,
            ITEM=ITEM,
            MERGED_SPLITS=cut.merged_splits,
            MERGED_HEADS=cut.merged_heads,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **pdl,
        )
    if num_rows > num_decode_rows and call.max_query_len:
        pairs = call.max_query_len * num_heads
        block_m = min(most, max(16, triton.next_power_of_2(pairs)))
        grid = (triton.cdiv(pairs, block_m), num_rows - num_decode_rows)
        _prefill_kernel[grid](
            out,
            inputs,
            num_decode_rows,
            table_stride,
            SHAPE=shape,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=8 if block_m == 64 else 4,
            num_stages=2,
            **pdl,
        )
    return out
