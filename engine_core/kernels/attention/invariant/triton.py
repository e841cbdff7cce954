"""Attention on a GPU in which a token's result does not depend on what else is computed.

A row's tokens are cut into tiles at fixed places. Each tile has a softmax of its own, and the tiles
are folded into one another in their order. So it makes no difference whether one program goes
through all tiles or many share them, how many queries of the row are computed at once, or how many
rows there are: decode, prefill and every way to chunk it give the same bits (fixed split sizes: He
et al., "Defeating nondeterminism in LLM inference", 2025). The matrix units, whose order is that of
the tokens, add up the denominators too: ``tl.sum`` would do it in an order that depends on where a
tile lies in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_core.kernels.attention.call import Call
from engine_core.kernels.attention.tiles.triton import (
    Inputs,
    Shape,
    block_at,
    divided,
    load_pairs,
    load_tokens,
    store_rows,
    tile_logits,
)
from engine_core.kernels.launch.triton import (
    arrival_counts,
    arrives_last,
    launch_dependents,
    num_multiprocessors,
    pdl_options,
    wait,
)

# Bytes of partial results at most; rows that would need more are not shared among programs.
_MAX_PARTIAL = 2**29


@triton.jit
def _fold(some, others):
    """The softmax of some tokens and of those after them, folded into one."""
    acc, denominator, maximum = some
    next_acc, next_denominator, next_maximum = others
    new_maximum = tl.maximum(maximum, next_maximum)
    # Where nothing was visible yet: -inf - -inf would be NaN.
    subtrahend = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    rescale = tl.exp2(maximum - subtrahend)
    next_rescale = tl.exp2(next_maximum - subtrahend)
    # Prevent the compiler from fusing one product with the sum here, and the other at another use.
    next_acc = next_acc * next_rescale[:, None]
    acc = tl.fma(acc, tl.broadcast_to(rescale[:, None], acc.shape), next_acc)
    denominator = tl.fma(denominator, rescale, next_denominator * next_rescale)
    return acc, denominator, new_maximum


@triton.jit
def _load_partial(
    partial_ptr,
    denominators_ptr,
    maxima_ptr,
    tile,
    num_tiles,
    heads,
    head_mask,
    SHAPE: tl.constexpr,
):
    """Load the partial result of some heads of a tile; zero where there is no such tile."""
    places = tile * SHAPE.num_heads + heads
    present = head_mask & (places < num_tiles * SHAPE.num_heads)
    dims = tl.arange(0, SHAPE.block_dv)
    acc = tl.load(
        partial_ptr + places[:, None] * SHAPE.dv + dims[None, :],
        mask=present[:, None] & (dims < SHAPE.dv)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    denominator = tl.load(denominators_ptr + places, mask=present, other=0.0, cache_modifier=".cg")
    maximum = tl.load(maxima_ptr + places, mask=present, other=float("-inf"), cache_modifier=".cg")
    return acc, denominator, maximum


@triton.jit
def _fold_partial(
    out_ptr,
    partial_ptr,
    denominators_ptr,
    maxima_ptr,
    heads,
    head_mask,
    num_tiles,
    SHAPE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Fold the first ``num_tiles`` tiles of some heads of a row, four asked for at a time."""
    BLOCK_DV: tl.constexpr = SHAPE.block_dv
    acc = tl.zeros([BLOCK_HEADS, BLOCK_DV], dtype=tl.float32)
    denominator = tl.zeros([BLOCK_HEADS], dtype=tl.float32)
    maximum = tl.full([BLOCK_HEADS], float("-inf"), dtype=tl.float32)
    for first in range(0, num_tiles, 4):
        loaded = ()
        for tile in tl.static_range(4):
            part = _load_partial(
                partial_ptr, denominators_ptr, maxima_ptr, first + tile, num_tiles, heads,
                head_mask, SHAPE,
            )  # fmt: skip
            loaded = loaded + (part,)  # type: ignore[assignment]  # noqa: RUF005
        for tile in tl.static_range(4):
            # Beyond the last tile nothing is changed: factors of 1, sums with 0.
            acc, denominator, maximum = _fold((acc, denominator, maximum), loaded[tile])
    store_rows(out_ptr, heads, divided(acc, denominator), head_mask, SHAPE)


@triton.jit(do_not_specialize=["window", "first_row", "num_splits", "max_tiles", "table_stride"])
def _tiles_kernel(
    out_ptr,
    partial_ptr,
    denominators_ptr,
    maxima_ptr,
    arrivals_ptr,
    inputs,
    window,
    first_row,
    num_splits,
    max_tiles,
    table_stride,
    SHAPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FOLDED_HEADS: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_M (query, head) pairs of one KV head of one row, heads of a query adjacent.

    With HAS_SPLITS rows have one query, and up to ``num_splits`` programs share the tiles of its
    tokens: ``partial [R, max_tiles, Hq, Dv]`` float32 takes what each tile adds up to, and the two
    after it its denominators and maxima. The last program to arrive folds them, FOLDED_HEADS heads
    at a time.
    """
    NUM_HEADS: tl.constexpr = SHAPE.num_heads
    GROUP_SIZE: tl.constexpr = SHAPE.group_size
    BLOCK_DV: tl.constexpr = SHAPE.block_dv
    launch_dependents(PDL)
    wait(PDL)
    kv_head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1) % num_splits
    # The last queries see the most keys: they start first, so that short ones fill the end.
    block = (tl.num_programs(1) - 1 - tl.program_id(1)) // num_splits
    place = tl.program_id(2).to(tl.int64)
    row = first_row + place
    query_begin = tl.load(inputs.query_start + row)
    num_queries = tl.load(inputs.query_start + row + 1) - query_begin
    first_pair = block * BLOCK_M
    if first_pair >= num_queries * GROUP_SIZE:
        return
    kv_len = tl.load(inputs.kv_lens + row)
    start_pos = kv_len - num_queries
    last_query = (first_pair + BLOCK_M - 1) // GROUP_SIZE
    # [low, high) holds every visible key.
    low = 0
    high = start_pos + tl.minimum(last_query, num_queries - 1) + 1
    prefix_len = 0
    if SHAPE.has_prefix:
        prefix_len = tl.minimum(tl.load(inputs.prefix_lens + row), kv_len)
        high = tl.maximum(high, prefix_len)
    if SHAPE.has_window and not SHAPE.has_prefix:
        low = tl.maximum(start_pos + first_pair // GROUP_SIZE - window + 1, 0)
    # Tiles [first, end) of the row, and [begin, stop) of this program.
    first = low // BLOCK_N
    end = tl.cdiv(high, BLOCK_N)
    per_split = tl.maximum(tl.cdiv(end - first, num_splits), 1)
    begin = first + split * per_split
    stop = tl.minimum(begin + per_split, end)
    # The first split writes the zeros of a row without tokens.
    if split > 0 and begin >= stop:
        return
    used = tl.cdiv(end - first, per_split)

    table_ptr = inputs.block_tables + row * table_stride
    queries, tokens, heads, pair_mask = load_pairs(
        inputs, table_ptr, kv_head, first_pair, query_begin, num_queries, start_pos, window,
        prefix_len, SHAPE, BLOCK_M,
    )  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    denominator = tl.zeros([BLOCK_M], dtype=tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    kv_block = block_at(table_ptr, begin * BLOCK_N, high, SHAPE)
    for tile in range(begin, stop):
        start = tile * BLOCK_N
        in_range = start + tl.arange(0, BLOCK_N) < high
        next_kv_block = block_at(table_ptr, start + BLOCK_N, high, SHAPE)
        logits = tile_logits(inputs, queries, kv_block, start, in_range, SHAPE, BLOCK_N, True)
        tile_maximum = tl.max(logits, axis=1)
        subtrahend = tl.where(tile_maximum == float("-inf"), 0.0, tile_maximum)
        weights = tl.exp2(logits - subtrahend[:, None]).to(queries.q.dtype)
        ones = tl.full([BLOCK_N, 16], 1.0, queries.q.dtype)
        tile_denominator = tl.max(tl.dot(weights, ones, input_precision=SHAPE.precision), axis=1)
        v = load_tokens(
            queries.seen.v, inputs.v_strides, table_ptr, kv_block, start, in_range, SHAPE, SHAPE.dv,
            SHAPE.block_dv, BLOCK_N, True,
        )  # fmt: skip
        tile_acc = tl.dot(weights, v, input_precision=SHAPE.precision)
        if HAS_SPLITS and used > 1:
            dims = tl.arange(0, SHAPE.block_dv)
            partial = (place * max_tiles + tile - first) * NUM_HEADS + heads
            values = partial_ptr + partial[:, None] * SHAPE.dv + dims[None, :]
            tl.store(values, tile_acc, mask=pair_mask[:, None] & (dims < SHAPE.dv)[None, :])
            tl.store(denominators_ptr + partial, tile_denominator, mask=pair_mask)
            tl.store(maxima_ptr + partial, tile_maximum, mask=pair_mask)
        else:
            acc, denominator, maximum = _fold(
                (acc, denominator, maximum), (tile_acc, tile_denominator, tile_maximum)
            )
        kv_block = next_kv_block
    if HAS_SPLITS:  # noqa: SIM102
        if used > 1:
            blocks = tl.num_programs(1) // num_splits
            arrivals_ptr += (place * tl.num_programs(0) + tl.program_id(0)) * blocks + block
            if arrives_last(arrivals_ptr, used):
                at = place * max_tiles * NUM_HEADS
                for in_block in range(0, min(BLOCK_M, GROUP_SIZE), FOLDED_HEADS):
                    folded = first_pair + in_block + tl.arange(0, FOLDED_HEADS)
                    _fold_partial(
                        out_ptr + query_begin.to(tl.int64) * NUM_HEADS * SHAPE.dv,
                        partial_ptr + at * SHAPE.dv,
                        denominators_ptr + at,
                        maxima_ptr + at,
                        kv_head * GROUP_SIZE + folded,
                        folded < GROUP_SIZE,
                        end - first,
                        SHAPE,
                        FOLDED_HEADS,
                    )
            return
    rows = tokens * NUM_HEADS + heads
    store_rows(out_ptr, rows, divided(acc, denominator), pair_mask, SHAPE)


def _block_n(dims: int, float32: bool) -> int:
    """Tokens of a tile, the same in decode and prefill, for heads of ``dims`` dimensions."""
    if float32:
        return 16 if dims > 128 else 32
    return 32 if dims > 128 else 64 if dims > 64 else 128


def _decode_options(dims: int, float32: bool, num_programs: int) -> tuple[int, int, int]:
    """Warps of a program, tiles in flight, and programs wanted on each multiprocessor.

    Chosen on an H200 in bfloat16 at 1040 tokens; us with 8 KV heads of 128 at 1, 8, 32, 128 and 256
    rows 9.2, 23, 62, 144, 273, with 2 of 64 8.1, 10.3, 16.3, 36.5, 65.7.
    """
    if float32:
        return 8, 3, 2
    if dims > 128:
        return 4, 2, 8
    if dims <= 64 or num_programs < 16:
        return 4, 2, 4
    return (2, 2, 4) if num_programs < 512 else (2, 3, 4)


def paged_attention(call: Call, inputs: Inputs, shape: Shape) -> None:
    """Write attention into ``call.out``; the other arguments are the kernel's."""
    q, num_decode_rows, max_kv_len = call.q, call.num_decode_rows, call.max_kv_len
    num_rows, num_kv_heads = call.kv_lens.shape[0], call.k_cache.shape[2]
    num_heads, group_size, v_head_dim = shape.num_heads, shape.group_size, shape.dv
    dims = max(shape.block_d, shape.block_dv)
    float32 = q.dtype == torch.float32
    block_n = _block_n(dims, float32)
    max_tiles = triton.cdiv(max_kv_len, block_n)

    def launch(
        first_row: int, count: int, block_m: int, blocks: int, splits: int, warps: int, stages: int
    ) -> None:
        partial = denominators = maxima = arrivals = None
        if splits > 1:
            size = (count, max_tiles, num_heads)
            partial = torch.empty((*size, v_head_dim), dtype=torch.float32, device=q.device)
            denominators = torch.empty(size, dtype=torch.float32, device=q.device)
            maxima = torch.empty_like(denominators)
            arrivals = arrival_counts(q.device, count * num_kv_heads * blocks)
        _tiles_kernel[(num_kv_heads, blocks * splits, count)](
            call.out,
            partial,
            denominators,
            maxima,
            arrivals,
            inputs,
            call.window or 0,
            first_row,
            splits,
            max_tiles,
            call.block_tables.stride(0),
            SHAPE=shape,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            FOLDED_HEADS=min(triton.next_power_of_2(group_size), 4),
            HAS_SPLITS=splits > 1,
            num_warps=warps,
            num_stages=stages,
            **pdl_options(q.device),
        )

    if num_decode_rows:
        # With 64 rows and four warps Triton 3.6 takes Hopper's asynchronous products, and fails to
        # pipeline a loop in which they are not added up.
        block_m = min(32, max(16, triton.next_power_of_2(group_size)))
        blocks = triton.cdiv(group_size, block_m)
        programs = num_decode_rows * num_kv_heads * blocks
        warps, stages, wanted = _decode_options(dims, float32, programs)
        splits = triton.cdiv(wanted * num_multiprocessors(q.device), programs)
        splits = max(1, min(splits, max_tiles))
        if 4 * num_decode_rows * max_tiles * num_heads * (v_head_dim + 2) > _MAX_PARTIAL:
            splits = 1
        launch(0, num_decode_rows, block_m, blocks, splits, max(warps, block_m // 8), stages)
    if num_rows > num_decode_rows and call.max_query_len:
        pairs = call.max_query_len * group_size
        block_m = 32 if float32 else 64 if dims > 128 else 128
        block_m = min(block_m, max(16, triton.next_power_of_2(pairs)))
        warps = 8 if block_m == 128 or float32 else 4
        launch(
            num_decode_rows,
            num_rows - num_decode_rows,
            block_m,
            triton.cdiv(pairs, block_m),
            1,
            warps,
            2 if dims > 128 else 3,
        )
