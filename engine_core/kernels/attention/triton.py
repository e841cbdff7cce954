"""Paged attention on a GPU.

Decode rows go through a split-KV kernel (flash-decoding, Dao et al. 2023) whose last program of a
row and head merges the splits, all other rows through a tiled kernel with an online softmax (Dao
2023). Both pack the query heads of one KV head into the rows of one ``tl.dot``, so a key is read
once for all of them. Logits are kept in units of log 2, since a GPU has an exp2 instruction. Plain
causal prefill on Hopper takes the kernel of ``hopper``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.attention import decode
from engine_core.kernels.attention.call import Call
from engine_core.kernels.attention.tiles.triton import (
    Inputs,
    Queries,
    Shape,
    add_values,
    block_at,
    divided,
    load_pairs,
    load_queries,
    load_scales,
    no_values,
    seen_of,
    store_rows,
    store_values,
    tile_logits,
)
from engine_core.kernels.attention.turned import triton as turned
from engine_core.kernels.attention.unpack import triton as unpack
from engine_core.kernels.codes.triton import log2_of
from engine_core.kernels.gpu import gpu_of
from engine_core.kernels.launch.gluon import runs_gluon
from engine_core.kernels.launch.quick import Quick, is_quick
from engine_core.kernels.launch.shared import AS_IT_CHOOSES, prefer
from engine_core.kernels.launch.triton import (
    arrival_counts,
    arrives_last,
    launch_dependents,
    num_multiprocessors,
    pdl_options,
    wait,
)

_LOG2E = 1.4426950408889634

# Bytes of keys and values at most that codes become for Hopper's kernel, of a layer at a time:
# 262,144 tokens of 8 KV heads of 128 in 16 bits.
_MOST_UNPACKED = 1 << 30
# Programs of a multiprocessor that attend to rows for which there was no room: mostly none.
_PROGRAMS_LEFT = 2

# Numbers of an item of a plan, and what fills its 32 bytes.
ITEM = 8


@triton.jit
def _attend_tiles(
    acc,
    denominator,
    maximum,
    inputs,
    queries,
    block,
    low,
    high,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold the tokens in ``[low, high)`` into the running softmax of every query row.

    ``low`` is a multiple of BLOCK_N, and the first of its tokens is in that ``block``. Without
    MASKED ``high`` is one too, and all see every token.
    """
    seen = queries.seen
    for start in range(low, high, BLOCK_N):
        in_range = start + tl.arange(0, BLOCK_N) < high
        # Loaded one tile ahead, so that no key waits for it.
        next_block = block_at(seen.table, start + BLOCK_N, high, SHAPE)
        logits = tile_logits(inputs, queries, block, start, in_range, SHAPE, BLOCK_N, MASKED)
        inverse = logits
        if inputs.v_scales is not None:
            # Weights and scales in one exponent: no product of them is too small for 16 bits.
            scales = load_scales(
                inputs.v_scales, inputs.v_scales_strides, seen, block, start, in_range, SHAPE,
                BLOCK_N, MASKED,
            )  # fmt: skip
            exponents = log2_of(scales, SHAPE.native)
            logits += exponents[None, :]
            inverse = tl.exp2(-exponents)
        new_maximum = tl.maximum(maximum, tl.max(logits, axis=1))
        if MASKED:
            # A query that has seen nothing yet: -inf - -inf would be NaN.
            subtrahend = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        else:
            subtrahend = new_maximum
        weights = tl.exp2(logits - subtrahend[:, None])
        rescale = tl.exp2(maximum - subtrahend)
        if inputs.v_scales is not None:
            denominator = denominator * rescale + tl.sum(weights * inverse[None, :], axis=1)
        else:
            denominator = denominator * rescale + tl.sum(weights, axis=1)
        acc = add_values(
            acc, rescale, weights, inputs, queries, block, start, in_range, SHAPE, BLOCK_N, MASKED
        )
        maximum = new_maximum
        block = next_block
    return acc, denominator, maximum


@triton.jit(
    do_not_specialize=[
        "num_rows", "window", "pieces", "max_items", "last_from", "merged", "turns",
    ]
)  # fmt: skip
def _plan_kernel(
    items_ptr,
    kv_lens_ptr,
    num_rows,
    window,
    pieces,
    max_items,
    last_from,
    merged,
    turns,
    held,
    tile_us,
    read_us,
    begin_us,
    split_us,
    turn_us,
    crowded,
    sharing,
    waiting,
    warps,
    uneven,
    most_splits,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ITEM: tl.constexpr,
    CROP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Cut decode rows into splits; item ``i`` of ``items [max_items, ITEM]`` says what is split i.

    Its row, the first token and that behind the last, the row's first item, and how many it has. A
    row of -1 is none. Those are the last, or the first where there are ``last_from`` splits or
    more. Splits are about equally long in all rows, so that long rows do not keep the launch
    waiting. How long they are is what takes the least time, of 29 tries at most, the longest row in
    one piece to ``most_splits``, by what a launch waits for:

    - a split's tiles, each ``tile_us``, and those of others before it where there are more splits
      than the ``held`` that are attended to at a time; a tile takes ``waiting`` of that longer for
      each other warp of its scheduler, which has ``warps`` where ``held`` splits run, some
      ``uneven`` more; or all bytes, ``read_us`` a tile;
    - the beginning and end of a program, ``begin_us``, of ``held`` splits at the same time;
    - merging, ``split_us`` and ``turns`` of ``turn_us`` for each ``merged`` splits.

    It is ``crowded`` times as long where programs without a split run beside more than half of
    ``held``: those that have one are then not spread evenly. With ``sharing`` it is that part
    longer where as many splits as ``held`` run, and less so with fewer.

    With ``pieces`` it is that many quarters of a piece of the longest row.
    """
    launch_dependents(PDL)
    wait(PDL)
    rows = tl.arange(0, BLOCK_ROWS)
    mask = rows < num_rows
    kv_lens = tl.load(kv_lens_ptr + rows, mask=mask, other=0)
    # Where a window crops rows it is the last tokens that their queries see, and what precedes them
    # in their first tile.
    cropped = tl.maximum(kv_lens - window, 0) // BLOCK_N * BLOCK_N if CROP else 0
    tiles = tl.cdiv(kv_lens - cropped, BLOCK_N)
    longest = tl.max(tiles)
    order = tl.arange(0, 32)
    # 1, 1.25, 1.5, 1.75, 2, 2.5 and so on.
    quarters = (4 + order % 4) << (order // 4)
    each = tl.maximum(tl.cdiv(4 * longest, quarters), 1)
    length = each.to(tl.float32)
    used = ((tiles[:, None].to(tl.float32) + length[None, :] - 0.5) / length[None, :]).to(tl.int32)
    used = tl.where(mask[:, None], tl.minimum(tl.maximum(used, 1), most_splits), 0)
    count = tl.sum(used, axis=0)
    turn = count.to(tl.float32) / held
    others = tl.ceil(tl.minimum(turn, 1.0) * warps + uneven) - 1.0
    working = tile_us * length * tl.maximum(turn, 1.0) * (1.0 + waiting * others)
    reading = read_us * tl.sum(tiles.to(tl.float32))
    # Between the longer of both and their sum.
    working *= working
    reading *= reading
    cost = tl.sqrt(tl.sqrt(working * working + reading * reading)) + begin_us * turn
    splits = tl.cdiv(longest, each)
    merging = split_us + turn_us * (tl.cdiv(splits, merged) * turns).to(tl.float32)
    cost += tl.where(splits > 1, merging, 0.0)
    cost *= tl.where((turn > 0.5) & (turn < 1.0) & (count < max_items), crowded, 1.0)
    cost *= 1.0 + sharing * tl.minimum(turn, 1.0)
    fits = ((count <= max_items) & (quarters <= 4 * most_splits)) | (order == 0)
    chosen = tl.argmin(tl.where(fits, cost, float("inf")), axis=0)
    per_split = tl.sum(tl.where(order == chosen, each, 0))
    if pieces > 0:
        per_split = tl.maximum(tl.cdiv(4 * longest, pieces), 1)
    used = tl.maximum(tl.minimum(tl.cdiv(tiles, per_split), most_splits), 1)
    per_split = tl.maximum(tl.cdiv(tiles, used), 1)
    # A row without tokens has an item too, which writes its zeros.
    used = tl.where(mask, tl.maximum(tl.cdiv(tiles, per_split), 1), 0)
    per_split *= BLOCK_N
    total = tl.sum(used)
    begin = tl.where(total >= last_from, max_items - total, 0)
    first = begin + tl.cumsum(used) - used
    for split in range(tl.max(used)):
        pointers = items_ptr + (first + split) * ITEM
        low = cropped + split * per_split
        mask = split < used
        tl.store(pointers, rows, mask=mask)
        tl.store(pointers + 1, low, mask=mask)
        tl.store(pointers + 2, tl.minimum(low + per_split, kv_lens), mask=mask)
        tl.store(pointers + 3, first, mask=mask)
        tl.store(pointers + 4, used, mask=mask)
    for start in range(0, max_items, BLOCK_ROWS):
        places = start + rows
        is_none = (places < begin) | (places >= begin + total)
        tl.store(items_ptr + places * ITEM, -1, mask=is_none & (places < max_items))


@triton.jit
def merge_splits(
    out_ptr,
    partial_ptr,
    lse_ptr,
    heads,
    head_mask,
    num_splits,
    SHAPE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Merge the first ``num_splits`` splits of some heads of one row, in the splits' order."""
    BLOCK_DV: tl.constexpr = SHAPE.block_dv
    dims = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_HEADS, BLOCK_DV], dtype=tl.float32)
    total = tl.zeros([BLOCK_HEADS], dtype=tl.float32)
    maximum = tl.full([BLOCK_HEADS], float("-inf"), dtype=tl.float32)
    for start in range(0, num_splits, BLOCK_SPLITS):
        splits = start + tl.arange(0, BLOCK_SPLITS)
        mask = (splits < num_splits)[:, None] & head_mask[None, :]
        partial = splits[:, None] * SHAPE.num_heads + heads[None, :]
        lse = tl.load(lse_ptr + partial, mask=mask, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(
            partial_ptr + partial[:, :, None] * SHAPE.dv + dims[None, None, :],
            mask=mask[:, :, None] & (dims < SHAPE.dv)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_maximum = tl.maximum(maximum, tl.max(lse, axis=0))
        # With a prefix and a window a head may have seen nothing: -inf - -inf would be NaN.
        subtrahend = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(lse - subtrahend[None, :])
        rescale = tl.exp2(maximum - subtrahend)
        total = total * rescale + tl.sum(weights, axis=0)
        acc = acc * rescale[:, None] + tl.sum(weights[:, :, None] * values, axis=0)
        maximum = new_maximum
    store_rows(out_ptr, heads, divided(acc, total), head_mask, SHAPE)


# The name in its code: latent attention's and a state space's kernels have the other.
_DECODE = "_paged_decode_kernel"


# Without a graph the stride of the tables is the blocks of the longest row. A kernel compiled for
# multiples of 16 would be another one from step to step.
@triton.jit(
    do_not_specialize=["window", "planned_now", "table_stride", "num_items"],
    repr=lambda _: _DECODE,
)
def _decode_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrivals_ptr,
    items_ptr,
    inputs,
    window,
    planned_now,
    table_stride,
    num_items,
    SHAPE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ITEM: tl.constexpr,
    MERGED_SPLITS: tl.constexpr,
    MERGED_HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Up to BLOCK_G query heads of one KV head of one row over one split of its tokens.

    The plan's item names the row and the split. Where a row has more than one split, ``partial
    [max_items, Hq, Dv]`` float32 takes the results and ``lse`` their logarithmic denominators; the
    last program to arrive merges them, MERGED_SPLITS of MERGED_HEADS at a time. With AT_ONCE the
    next kernel is launched as soon as all programs run, so that it may read nothing before it waits
    but what is older than all kernels. Programs beyond those of ``num_items`` are the first, and do
    nothing. With EARLY all tokens but a row's last may be read before
    the kernel ahead is complete: earlier steps stored them.
    """
    if AT_ONCE:
        launch_dependents(PDL)
    NUM_HEADS: tl.constexpr = SHAPE.num_heads
    GROUP_SIZE: tl.constexpr = SHAPE.group_size
    G_TILES: tl.constexpr = (GROUP_SIZE + BLOCK_G - 1) // BLOCK_G
    # Wide heads, heads of two parts and more of them are rows.
    TURNED: tl.constexpr = BLOCK_G < 16
    HEAD_TILES: tl.constexpr = NUM_HEADS // GROUP_SIZE * G_TILES
    program = tl.program_id(0) - (tl.num_programs(0) - num_items * HEAD_TILES)
    if program < 0:
        return
    tile = program % HEAD_TILES
    kv_head = (tile // G_TILES).to(tl.int64)
    item = (program // HEAD_TILES).to(tl.int64)
    # A plan of an earlier layer needs no wait, as the lengths do not. That layer's attention had
    # waited for it before it let its successor be launched; or, with AT_ONCE, the kernel that
    # launches this one has waited itself.
    if planned_now:
        wait(PDL)
    items_ptr += item * ITEM
    row = tl.load(items_ptr).to(tl.int64)
    if row < 0:
        return
    low = tl.load(items_ptr + 1)
    high = tl.load(items_ptr + 2)
    first_item = tl.load(items_ptr + 3).to(tl.int64)
    used = tl.load(items_ptr + 4)
    kv_len = tl.load(inputs.kv_lens + row)

    in_group = tile % G_TILES * BLOCK_G + tl.arange(0, BLOCK_G)
    heads = kv_head * GROUP_SIZE + in_group
    head_mask = in_group < GROUP_SIZE
    q_ptr = inputs.q + row * inputs.q_strides[0]
    table = inputs.block_tables + row * table_stride
    prefix_len = 0
    if SHAPE.has_prefix:
        prefix_len = tl.load(inputs.prefix_lens + row)
    seen = seen_of(inputs, kv_head, table, window, prefix_len)
    if TURNED:
        of_row = turned.Row(q_ptr, heads, head_mask, kv_len - 1, seen)
        sums, denominator, maximum = turned.attend(
            inputs, of_row, low, high, SHAPE, BLOCK_G, BLOCK_N, EARLY, PDL
        )
        acc = (sums,)
    else:
        # Older than all kernels of the step, as a plan is: no key waits for it.
        block = block_at(table, low, high, SHAPE)
        wait(PDL)
        q, q_odd, q_scales, slopes = load_queries(
            inputs, q_ptr, heads * inputs.q_strides[1], heads, head_mask, SHAPE
        )
        positions = tl.zeros([BLOCK_G], dtype=tl.int32) + (kv_len - 1)
        queries = Queries(q, q_odd, q_scales, positions, slopes, seen)
        acc = no_values(BLOCK_G, SHAPE)
        denominator = tl.zeros([BLOCK_G], dtype=tl.float32)
        maximum = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
        acc, denominator, maximum = _attend_tiles(
            acc, denominator, maximum, inputs, queries, block, low, high, SHAPE, BLOCK_N, True
        )
    if not AT_ONCE:
        # Not before: programs of the linear that follows would take the place of these.
        launch_dependents(PDL)
    # No tokens (padding), or with a prefix and a window none that is visible in this split.
    safe = tl.where(denominator > 0.0, denominator, 1.0)
    if used > 1:
        partial = item * NUM_HEADS + heads
        if TURNED:
            store_rows(partial_ptr, partial, acc[0] / safe[:, None], head_mask, SHAPE)
        else:
            store_values(partial_ptr, partial, acc, safe, head_mask, SHAPE)
        tl.store(lse_ptr + partial, maximum + tl.log2(safe), mask=head_mask)
        if arrives_last(arrivals_ptr + row * HEAD_TILES + tile, used):
            first_head = tile % G_TILES * BLOCK_G
            for in_tile in range(0, min(BLOCK_G, GROUP_SIZE), MERGED_HEADS):
                merged = first_head + in_tile + tl.arange(0, MERGED_HEADS)
                merge_splits(
                    out_ptr + row * NUM_HEADS * SHAPE.dv,
                    partial_ptr + first_item * NUM_HEADS * SHAPE.dv,
                    lse_ptr + first_item * NUM_HEADS,
                    kv_head * GROUP_SIZE + merged,
                    merged < GROUP_SIZE,
                    used,
                    SHAPE,
                    MERGED_SPLITS,
                    MERGED_HEADS,
                )
    elif TURNED:
        store_rows(out_ptr, row * NUM_HEADS + heads, acc[0] / safe[:, None], head_mask, SHAPE)
    else:
        store_values(out_ptr, row * NUM_HEADS + heads, acc, safe, head_mask, SHAPE)


@triton.jit
def _attend_prompt(
    out_ptr,
    inputs,
    window,
    table_stride,
    kv_head,
    row,
    query_begin,
    num_queries,
    first_pair,
    SHAPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_M (query, head) pairs of one KV head of one row, heads of a query adjacent.

    The row has ``num_queries`` from ``query_begin`` on, of which ``first_pair`` is one of a head.
    """
    GROUP_SIZE: tl.constexpr = SHAPE.group_size
    kv_len = tl.load(inputs.kv_lens + row)
    start_pos = kv_len - num_queries

    first_pos = start_pos + first_pair // GROUP_SIZE
    last_query = (first_pair + BLOCK_M - 1) // GROUP_SIZE
    last_pos = start_pos + tl.minimum(last_query, num_queries - 1)
    # [low, high) holds every visible key, [full_low, full_high) those that all queries see.
    low = 0
    high = last_pos + 1
    full_low = 0
    full_high = tl.maximum(first_pos + 1, 0)
    prefix_len = 0
    if SHAPE.has_prefix:
        prefix_len = tl.minimum(tl.load(inputs.prefix_lens + row), kv_len)
        high = tl.maximum(high, prefix_len)
        full_high = tl.maximum(full_high, prefix_len)
    if SHAPE.has_window:
        if SHAPE.has_prefix:
            full_high = 0
        else:
            low = tl.maximum(first_pos - window + 1, 0) // BLOCK_N * BLOCK_N
            full_low = tl.cdiv(tl.maximum(last_pos - window + 1, 0), BLOCK_N) * BLOCK_N
    full_high = full_high // BLOCK_N * BLOCK_N
    if SHAPE.has_window:
        full_high = tl.maximum(full_high, low)
        full_low = tl.minimum(full_low, full_high)

    table_ptr = inputs.block_tables + row * table_stride
    queries, tokens, heads, mask = load_pairs(
        inputs, table_ptr, kv_head, first_pair, query_begin, num_queries, start_pos, window,
        prefix_len, SHAPE, BLOCK_M,
    )  # fmt: skip
    acc = no_values(BLOCK_M, SHAPE)
    denominator = tl.zeros([BLOCK_M], dtype=tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if SHAPE.has_window:
        block = block_at(table_ptr, low, full_low, SHAPE)
        acc, denominator, maximum = _attend_tiles(
            acc, denominator, maximum, inputs, queries, block, low, full_low, SHAPE, BLOCK_N, True
        )
    block = block_at(table_ptr, full_low, full_high, SHAPE)
    acc, denominator, maximum = _attend_tiles(
        acc, denominator, maximum, inputs, queries, block, full_low, full_high, SHAPE, BLOCK_N,
        False,
    )  # fmt: skip
    block = block_at(table_ptr, full_high, high, SHAPE)
    acc, denominator, maximum = _attend_tiles(
        acc, denominator, maximum, inputs, queries, block, full_high, high, SHAPE, BLOCK_N, True
    )
    rows = tokens * SHAPE.num_heads + heads
    safe = tl.where(denominator > 0.0, denominator, 1.0)
    store_values(out_ptr, rows, acc, safe, mask, SHAPE)


@triton.jit(do_not_specialize=["window", "first_row", "table_stride"])
def _prefill_kernel(
    out_ptr,
    inputs,
    window,
    first_row,
    table_stride,
    SHAPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of one KV head of one row."""
    GROUP_SIZE: tl.constexpr = SHAPE.group_size
    launch_dependents(PDL)
    wait(PDL)
    kv_head = tl.program_id(0).to(tl.int64)
    # The last tiles see the most keys: they start first, so that short ones fill the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row = first_row + tl.program_id(2).to(tl.int64)
    query_begin = tl.load(inputs.query_start + row)
    num_queries = tl.load(inputs.query_start + row + 1) - query_begin
    first_pair = tile * BLOCK_M
    if first_pair >= num_queries * GROUP_SIZE:
        return
    _attend_prompt(
        out_ptr, inputs, window, table_stride, kv_head, row, query_begin, num_queries, first_pair,
        SHAPE, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=["window", "first_row", "num_rows", "num_tiles", "table_stride"])
def _prefill_left_kernel(
    out_ptr,
    num_done_ptr,
    inputs,
    window,
    first_row,
    num_rows,
    num_tiles,
    table_stride,
    SHAPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """The tiles of all KV heads of the rows behind those that are done, program by program."""
    GROUP_SIZE: tl.constexpr = SHAPE.group_size
    KV_HEADS: tl.constexpr = SHAPE.num_heads // GROUP_SIZE
    launch_dependents(PDL)
    wait(PDL)
    done = tl.load(num_done_ptr)
    items = (num_rows - done) * num_tiles * KV_HEADS
    program = tl.program_id(0)
    for turn in range(tl.cdiv(items - program, tl.num_programs(0))):
        item = program + turn * tl.num_programs(0)
        kv_head = (item % KV_HEADS).to(tl.int64)
        first_pair = (num_tiles - 1 - item // KV_HEADS % num_tiles) * BLOCK_M
        row = (first_row + done + item // KV_HEADS // num_tiles).to(tl.int64)
        query_begin = tl.load(inputs.query_start + row)
        num_queries = tl.load(inputs.query_start + row + 1) - query_begin
        if first_pair < num_queries * GROUP_SIZE:
            _attend_prompt(
                out_ptr, inputs, window, table_stride, kv_head, row, query_begin, num_queries,
                first_pair, SHAPE, BLOCK_M, BLOCK_N,
            )  # fmt: skip


def plan_splits(
    kv_lens: Tensor,
    num_rows: int,
    max_kv_len: int,
    window: int | None,
    cut: decode.Launch,
    memo: dict[Any, Any],
) -> tuple[Tensor, bool]:
    """The splits of the first rows, made once for all layers of a step that cut them alike.

    ``window`` is what a query sees, if that is known beforehand. Returns the items that
    ``_plan_kernel`` writes, and whether it was launched now.
    """
    key = (num_rows, window, cut)
    if key in memo:
        return memo[key], False
    costs = decode.H200
    longest = triton.cdiv(max_kv_len, cut.block_n)
    splits = decode.most_splits(num_rows)
    most = min(max(num_rows, cut.items), num_rows * max(1, min(longest, splits)))
    items = torch.empty((most, ITEM), dtype=torch.int32, device=kv_lens.device)
    block_rows = max(64, triton.next_power_of_2(num_rows))
    _plan_kernel[(1,)](
        items,
        kv_lens,
        num_rows,
        window or 0,
        cut.pieces,
        most,
        cut.last_from or most + 1,
        cut.merged_splits,
        cut.turns,
        cut.held,
        cut.tile_us,
        cut.read_us,
        costs.begin,
        costs.split,
        decode.turn_of(cut),
        1.0 if cut.sharing else costs.crowded,
        cut.sharing,
        cut.waiting,
        cut.warps,
        costs.uneven,
        splits,
        BLOCK_ROWS=block_rows,
        BLOCK_N=cut.block_n,
        ITEM=ITEM,
        CROP=window is not None,
        num_warps=min(32, max(4, block_rows // 64)),
        **pdl_options(kv_lens.device),
    )
    memo[key] = items
    return items, True


def _constants(strides: tuple[int, ...]) -> tuple[Any, ...]:
    """Strides that a kernel is compiled for: offsets then take fewer registers and instructions."""
    return tuple(tl.constexpr(stride) for stride in strides)


def paged_attention(call: Call) -> None:
    """Write attention into ``call.out``."""
    q, prefix_lens, window = call.q, call.prefix_lens, call.window
    k_cache, v_cache, code = call.k_cache, call.v_cache, ""
    num_rows, num_decode_rows = call.kv_lens.shape[0], call.num_decode_rows
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads, v_head_dim = v_cache.shape[1:]
    if call.k_scales is not None:
        code = "int8" if k_cache.dtype == torch.int8 else "e4m3"
        if head_dim % 2 or v_head_dim % 2:
            raise ValueError(
                f"paged_attention: heads of {head_dim} and {v_head_dim} numbers are kept as codes "
                f"({k_cache.dtype}), which a GPU reads in pairs; take kv_cache_dtype='auto'"
            )
        k_cache, v_cache = k_cache.view(torch.int16), v_cache.view(torch.int16)
        if q.element_size() == 2 and (q.stride(0) % 2 or q.stride(1) % 2 or q.data_ptr() % 4):
            # They are read in pairs, too. One that is contiguous may begin at an odd number.
            q = q.clone(memory_format=torch.contiguous_format)
            call = replace(call, q=q)
    # Products take 16 numbers at least, and those of codes' pairs are two.
    least = 32 if code else 16
    block_d = max(least, triton.next_power_of_2(head_dim))
    block_dv = max(least, triton.next_power_of_2(v_head_dim))
    dims = max(block_d, block_dv)
    wide = dims > 128
    float32 = q.dtype == torch.float32
    scales = (call.scale * _LOG2E, 0.0)
    if call.softcap is not None:
        scales = (call.softcap * _LOG2E, 2.0 * call.scale / call.softcap)
    inputs = Inputs(
        q, k_cache, v_cache, call.block_tables, call.query_start, call.kv_lens, prefix_lens,
        call.alibi_slopes, *scales, q.stride()[:2], k_cache.stride()[:3], v_cache.stride()[:3],
    )  # fmt: skip
    if call.k_scales is not None and call.v_scales is not None:
        # Of numbers, whose kernels wait for memory, constants make none faster.
        inputs = inputs._replace(
            k_scales=call.k_scales,
            v_scales=call.v_scales,
            k_scales_strides=_constants(call.k_scales.stride()[:2]),
            v_scales_strides=_constants(call.v_scales.stride()[:2]),
            k_strides=_constants(k_cache.stride()[:3]),
            v_strides=_constants(v_cache.stride()[:3]),
        )
    group_size = num_heads // num_kv_heads
    shape = Shape(
        num_heads, group_size, block_size, head_dim, v_head_dim, block_d, block_dv,
        call.alibi_slopes is not None, window is not None, call.softcap is not None,
        prefix_lens is not None, "ieee" if float32 else "tf32", code, q.is_cuda,
    )  # fmt: skip
    pdl = pdl_options(q.device)
    table_stride = call.block_tables.stride(0)
    if not (code or call.deterministic):
        rests = decode.rest_of(head_dim, block_d), decode.rest_of(v_head_dim, block_dv)
        shape = shape._replace(rest_d=rests[0], rest_dv=rests[1])
    if call.deterministic:
        from engine_core.kernels.attention.invariant import triton as invariant

        invariant.paged_attention(call, inputs, shape)
        return
    if num_decode_rows:
        multiprocessors = num_multiprocessors(q.device)
        number_bytes = 1 if code else q.element_size()
        cut = decode.launch(
            num_decode_rows, group_size, num_kv_heads, dims, block_dv,
            # Queries of float32 take its tiles over codes, too.
            4 if float32 else number_bytes, multiprocessors, (shape.rest_d, shape.rest_dv),
        )  # fmt: skip
        head_tiles = num_kv_heads * triton.cdiv(group_size, cut.block_g)
        items, planned_now = plan_splits(
            call.kv_lens,
            num_decode_rows,
            call.max_kv_len,
            window if prefix_lens is None else None,
            cut,
            call.memo,
        )
        start = decode.start_of(
            num_decode_rows, group_size, num_kv_heads, head_dim, v_head_dim, number_bytes,
            multiprocessors,
        )  # fmt: skip
        # Other GPUs, but for the interpreter's, launch no kernel beside the one ahead.
        early = start < decode.Start.MULTIPLIED and (pdl["PDL"] or not q.is_cuda)
        size = (len(items), num_heads)
        # Measured on GPUs that launch early alone.
        wanted = pdl["PDL"] and cut.shared
        prefer(_DECODE, 100 * 1024 * cut.shared // decode.SHARED if wanted else AS_IT_CHOOSES)
        programs = head_tiles * len(items)
        if cut.even:
            programs = triton.cdiv(programs, multiprocessors) * multiprocessors
        _decode_kernel[(programs,)](
            call.out,
            torch.empty((*size, v_head_dim), dtype=torch.float32, device=q.device),
            torch.empty(size, dtype=torch.float32, device=q.device),
            arrival_counts(q.device, num_decode_rows * head_tiles),
            items,
            inputs,
            window or 0,
            int(planned_now),
            table_stride,
            len(items),
            SHAPE=shape,
            BLOCK_G=cut.block_g,
            BLOCK_N=cut.block_n,
            ITEM=ITEM,
            MERGED_SPLITS=cut.merged_splits,
            MERGED_HEADS=cut.merged_heads,
            AT_ONCE=decode.leaves_room(
                num_decode_rows * head_tiles,
                dims,
                number_bytes,
                multiprocessors,
                chained=call.chained,
            ),
            # Behind a chain it is the rotation that lets it be launched, which has waited itself.
            EARLY=early and not call.chained,
            num_warps=cut.num_warps,
            num_stages=cut.num_stages,
            # Not every kind of GPU's compiler has this option.
            **({"maxnreg": cut.registers} if cut.registers else {}),
            **pdl,
        )
    if num_rows > num_decode_rows and call.max_query_len:
        plain = not (shape.has_alibi or shape.has_window or shape.has_softcap or shape.has_prefix)
        quick = is_quick(Quick.ATTENTION) and not (wide or float32)
        # How many of these rows were attended to, on the device; None for none.
        num_done: Tensor | None = None
        if plain and call.scale > 0 and not quick and runs_gluon(q.device):
            from engine_core.kernels.attention.hopper import triton as hopper

            programs = num_multiprocessors(q.device)
            groups = hopper.groups_for(call, programs)
            trusted = (q, num_kv_heads, block_size, pdl["PDL"], groups)
            numbers, num_fitting = call, None
            unpacks = code and block_size == triton.next_power_of_2(block_size)
            if unpacks and hopper.takes(q, block_size, v_head_dim) and hopper.is_trusted(*trusted):
                # What is tried is the kernel alone: nothing is unpacked for one that is off.
                numbers, num_fitting = unpack.unpacked(call, _MOST_UNPACKED)
            fits = numbers.k_scales is None and hopper.fits(q, numbers.k_cache, numbers.v_cache)
            if fits and hopper.is_trusted(*trusted):
                hopper.prefill(numbers, scales[0], programs, pdl["PDL"], groups)
                if num_fitting is None:
                    return
                num_done = num_fitting
        pairs = call.max_query_len * group_size
        # 128 x 64 tiles of 256 dimensions take 192 KiB of shared memory, of 128 dimensions 96.
        gpu = gpu_of(q.device)
        small = wide and (q.is_cuda if gpu is None else gpu.shared_memory < 200 * 1024)
        block_m, block_n = (64, 32) if small else (128, 64)
        if float32:
            block_m, block_n = 32, 16 if wide else 32
        if quick:
            block_m, block_n = 64, 32
        block_m = min(block_m, max(16, triton.next_power_of_2(pairs)))
        num_tiles = triton.cdiv(pairs, block_m)
        options = {
            "SHAPE": shape,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "num_warps": 8 if block_m == 128 or float32 else 4,
            "num_stages": 1 if quick else 2 if wide else 3,
            **pdl,
        }
        num_rows -= num_decode_rows
        rows = (num_decode_rows, num_rows, num_tiles)
        if num_done is not None:
            items = num_rows * num_tiles * num_kv_heads
            programs = min(num_multiprocessors(q.device) * _PROGRAMS_LEFT, items)
            _prefill_left_kernel[(programs,)](
                call.out, num_done, inputs, window or 0, *rows, table_stride, **options
            )
            return
        _prefill_kernel[(num_kv_heads, num_tiles, num_rows)](
            call.out, inputs, window or 0, num_decode_rows, table_stride, **options
        )
