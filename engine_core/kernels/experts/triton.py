"""Experts on a GPU: no shape, and nothing on the host, depends on the tokens' choice.

The pairs of a token and an expert are grouped by expert into blocks of BLOCK_M, of which there are
at most so many that every choice fits; blocks without pairs end at once. A program multiplies one
block by some rows of its expert's weight, so that few pairs read each chosen expert's weight once.
So few pairs that hardly two share an expert are not grouped at all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.activation.triton import activated
from engine_core.kernels.experts import sizes
from engine_core.kernels.experts.few import triton as few
from engine_core.kernels.experts.few.triton import inverse_of, load_squares
from engine_core.kernels.launch.triton import (
    FIRST_WAVE,
    arrival_counts,
    arrives_last,
    launch_dependents,
    pdl_options,
    prefetch_l2,
    wait,
)
from engine_core.kernels.linear import Activation, DeferredRMSNorm, Fp8Weight, GroupWeight
from engine_core.kernels.linear.coded import CodedWeight
from engine_core.kernels.linear.readers.triton import GroupReader
from engine_core.kernels.linear.reference import taken_apart
from engine_core.kernels.norm.triton import sum_add_norm

if TYPE_CHECKING:
    from engine_core.kernels.experts import Routing

# Pairs that a program looks through at a time: all of a decode step's, as a rule, since each turn
# is two waits for memory. Fewer pairs take the smaller, and so two kernels are compiled.
_CHUNKS = (512, 2048)
# The tile of deterministic mode, whatever the pairs: how K is cut decides how sums are rounded.
_ONE_TILE = (64, 64, 128, 4, 3)


@triton.jit
def _ordered(scores):
    """Integers in the order of the scores; a warp finds the greatest of them at once."""
    # -0.0 becomes 0.0, with which it is equal.
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best(keys, numbers, SIZE: tl.constexpr):
    """The number of the greatest key; the lowest of equal ones."""
    return tl.min(tl.where(keys == tl.max(keys, axis=0), numbers, SIZE), axis=0)


@triton.jit
def _choose(
    ids_ptr,
    weights_ptr,
    row,
    logits,
    bias_ptr,
    slots_ptr,
    scale,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SCORES: tl.constexpr,
):
    """A token's choice by ``logits [BLOCK_E]``, which are -inf from E on."""
    BLOCK_E: tl.constexpr = logits.shape[0]
    experts = tl.arange(0, BLOCK_E)
    there = experts < E
    lowest = float("-inf")
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(logits, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + experts, mask=there, other=0.0).to(tl.float32)
    # No number is the greatest of those with a NaN: then the result is to be NaN, not no expert's.
    broken = tl.sum(tl.where(there & (choice != choice), 1, 0), axis=0) > 0
    # Below all numbers' keys.
    NONE: tl.constexpr = -(2**31)
    keys = tl.where(there, _ordered(choice), NONE)
    if TOP_GROUPS < GROUPS:
        group = experts // (E // GROUPS)
        # Each expert's group's total, and then how many groups come before it.
        totals = tl.full([BLOCK_E], NONE, tl.int32)
        for each in tl.static_range(GROUPS):
            left = tl.where(there & (group == each), keys, NONE)
            total = 0.0
            for _ in tl.static_range(GROUP_SCORES):
                best = _best(left, experts, BLOCK_E)
                total += tl.max(tl.where(experts == best, choice, lowest), axis=0)
                left = tl.where(experts == best, NONE, left)
            totals = tl.where(there & (group == each), _ordered(total), totals)
        kept = tl.zeros([BLOCK_E], dtype=tl.int32)
        left = totals
        for _ in tl.static_range(TOP_GROUPS):
            best = _best(left, experts, BLOCK_E)
            mine = there & (group == best // (E // GROUPS))
            kept = tl.where(mine, 1, kept)
            left = tl.where(mine, NONE, left)
        keys = tl.where(kept > 0, keys, NONE)
    places = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], dtype=tl.int32)
    weights = tl.zeros([BLOCK_K], dtype=tl.int32)
    # No score is below 0: its bits are in its order.
    bits = scores.to(tl.int32, bitcast=True)
    for place in tl.static_range(TOP_K):
        best = _best(keys, experts, BLOCK_E)
        ids = tl.where(places == place, best, ids)
        score = tl.max(tl.where(experts == best, bits, 0), axis=0)
        weights = tl.where(places == place, score, weights)
        keys = tl.where(experts == best, NONE, keys)
    weights = weights.to(tl.float32, bitcast=True)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    ids = tl.where(broken, places, ids)
    weights = tl.where(broken, float("nan"), weights)
    if slots_ptr is not None:
        ids = tl.where(tl.load(slots_ptr + row) < 0, -1, ids)
    out = row * TOP_K + places
    tl.store(ids_ptr + out, ids, mask=places < TOP_K)
    tl.store(weights_ptr + out, weights * scale, mask=places < TOP_K)


@triton.jit
def _choose_kernel(
    ids_ptr,
    weights_ptr,
    logits_ptr,
    bias_ptr,
    slots_ptr,
    stride,
    scale,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SCORES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token's choice."""
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    logits = tl.load(logits_ptr + row * stride + experts, mask=experts < E, other=float("-inf"))
    _choose(
        ids_ptr,
        weights_ptr,
        row,
        logits.to(tl.float32),
        bias_ptr,
        slots_ptr,
        scale,
        E,
        TOP_K,
        BLOCK_K,
        SIGMOID,
        RENORMALIZE,
        GROUPS,
        TOP_GROUPS,
        GROUP_SCORES,
    )


@triton.jit
def _route_kernel(
    ids_ptr,
    weights_ptr,
    logits_ptr,
    arrivals_ptr,
    x_ptr,
    matrix_ptr,
    matrix_bias_ptr,
    bias_ptr,
    slots_ptr,
    squares_ptr,
    eps,
    stride,
    scale,
    H,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SCORES: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N experts' logits of one token; the last program of a token to arrive chooses.

    With SQUARES, x still lacks RMSNorm's division, which the logits make up for.
    """
    launch_dependents(PDL)
    row = tl.program_id(1).to(tl.int64)
    numbers = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_H)
    mask = (numbers < E)[:, None] & (cols < H)[None, :]
    # The matrix is older than all kernels: it waits for x in registers.
    matrix = tl.load(matrix_ptr + numbers[:, None] * H + cols[None, :], mask=mask, other=0.0)
    wait(PDL)
    squares = load_squares(squares_ptr, row, SQUARES, BLOCK_SQUARES)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < H, other=0.0).to(tl.float32)
    logits = tl.sum(matrix.to(tl.float32) * x[None, :], axis=1)
    if SQUARES:
        logits *= inverse_of(squares, H, eps)
    if matrix_bias_ptr is not None:
        logits += tl.load(matrix_bias_ptr + numbers, mask=numbers < E, other=0.0).to(tl.float32)
    # Rounded where a linear rounds.
    logits = logits.to(matrix_ptr.dtype.element_ty).to(tl.float32)
    logits_ptr += row * E
    tl.store(logits_ptr + numbers, logits, mask=numbers < E)
    if arrives_last(arrivals_ptr + row, tl.num_programs(0)):
        experts = tl.arange(0, BLOCK_E)
        whole = tl.load(
            logits_ptr + experts, mask=experts < E, other=float("-inf"), cache_modifier=".cg"
        )
        _choose(
            ids_ptr,
            weights_ptr,
            row,
            whole,
            bias_ptr,
            slots_ptr,
            scale,
            E,
            TOP_K,
            BLOCK_K,
            SIGMOID,
            RENORMALIZE,
            GROUPS,
            TOP_GROUPS,
            GROUP_SCORES,
        )


def _choice(tokens: int, num_experts: int, routing: Routing, device: torch.device) -> Any:
    """Empty ids and weights, and the constants of a choice."""
    shape = (tokens, routing.top_k)
    ids = torch.empty(shape, dtype=torch.int32, device=device)
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    return (
        ids,
        weights,
        {
            "E": num_experts,
            "BLOCK_E": triton.next_power_of_2(num_experts),
            "TOP_K": routing.top_k,
            "BLOCK_K": triton.next_power_of_2(routing.top_k),
            "SIGMOID": routing.scoring == "sigmoid",
            "RENORMALIZE": routing.renormalize,
            "GROUPS": routing.groups,
            "TOP_GROUPS": routing.top_groups,
            "GROUP_SCORES": routing.group_scores,
            "num_warps": 1 if num_experts <= sizes.WARP_EXPERTS else 4,
            **pdl_options(device),
        },
    )


def choose_experts(
    logits: Tensor, routing: Routing, bias: Tensor | None, slots: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See :func:`engine_core.kernels.choose_experts`; rows are contiguous."""
    tokens, num_experts = logits.shape
    ids, weights, constants = _choice(tokens, num_experts, routing, logits.device)
    if tokens:
        _choose_kernel[(tokens,)](
            ids, weights, logits, bias, slots, logits.stride(0), routing.scale, **constants
        )
    return ids, weights


def route(
    x: Tensor | DeferredRMSNorm,
    matrix: Tensor,
    matrix_bias: Tensor | None,
    routing: Routing,
    bias: Tensor | None,
    slots: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See :func:`engine_core.kernels.route`, where it fits."""
    values, squares, eps = taken_apart(x)
    tokens, hidden = values.shape
    num_experts = len(matrix)
    ids, weights, constants = _choice(tokens, num_experts, routing, values.device)
    block_h = triton.next_power_of_2(hidden)
    block_n = max(1, min(16, sizes.ROUTER_BYTES // (block_h * matrix.itemsize)))
    if values.stride(1) != 1:
        values = values.contiguous()
    _route_kernel[(triton.cdiv(num_experts, block_n), tokens)](
        ids,
        weights,
        torch.empty((tokens, num_experts), dtype=torch.float32, device=values.device),
        arrival_counts(values.device, tokens),
        values,
        matrix,
        matrix_bias,
        bias,
        slots,
        squares,
        eps,
        values.stride(0),
        routing.scale,
        hidden,
        BLOCK_N=block_n,
        BLOCK_H=block_h,
        **few.squares_options(squares),
        **constants,
    )
    return ids, weights


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _group_kernel(
    pairs_ptr,
    experts_ptr,
    ids_ptr,
    num_pairs,
    num_blocks,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The blocks of one expert: its pairs in their order, then ``num_pairs`` for none."""
    launch_dependents(PDL)
    wait(PDL)
    expert = tl.program_id(0)
    numbers = tl.arange(0, BLOCK_E)
    places = tl.arange(0, CHUNK)
    counts = tl.zeros([BLOCK_E], dtype=tl.int32)
    for start in range(0, num_pairs, CHUNK):
        ids = tl.load(ids_ptr + start + places, mask=start + places < num_pairs, other=-1)
        counts += tl.histogram(ids, BLOCK_E, mask=(ids >= 0) & (ids < E))
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(numbers < expert, blocks, 0), axis=0)
    mine = tl.sum(tl.where(numbers == expert, blocks, 0), axis=0)
    end = (first + mine) * BLOCK_M
    done = first * BLOCK_M
    for start in range(0, num_pairs, CHUNK):
        pairs = start + places
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
        chosen = (ids == expert).to(tl.int32)
        rank = tl.cumsum(chosen, axis=0) - chosen
        tl.store(pairs_ptr + done + rank, pairs, mask=chosen > 0)
        done += tl.sum(chosen, axis=0)
    rest = tl.arange(0, BLOCK_M)
    tl.store(pairs_ptr + done + rest, num_pairs, mask=done + rest < end)
    for block in range(first, first + mine):
        tl.store(experts_ptr + block, expert)
    if expert == E - 1:
        for start in range(first + mine, num_blocks, BLOCK_E):
            tl.store(experts_ptr + start + numbers, -1, mask=start + numbers < num_blocks)


def group_pairs(ids: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Pairs by expert: ``[blocks * block_m]`` and each block's expert ``[blocks]``, both int32.

    A pair is a place in ``ids``, flattened; ``ids.numel()`` stands for none. Blocks that the choice
    does not need come last, with expert -1.
    """
    pairs = ids.numel()
    # Each chosen expert may have one block that is not full.
    blocks = (pairs + min(pairs, num_experts) * (block_m - 1)) // block_m
    order = torch.empty(blocks * block_m, dtype=torch.int32, device=ids.device)
    experts = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    _group_kernel[(num_experts,)](
        order,
        experts,
        ids,
        pairs,
        blocks,
        E=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_M=block_m,
        CHUNK=next((size for size in _CHUNKS if pairs <= size), _CHUNKS[-1]),
        num_warps=4,
        **pdl_options(ids.device),
    )
    return order, experts


@triton.jit
def _tile(ptr, rows, cols, k_mask, K, EVEN_K: tl.constexpr):
    ptrs = ptr + rows.to(tl.int64)[:, None] * K + cols[None, :]
    return tl.load(ptrs) if EVEN_K else tl.load(ptrs, mask=k_mask[None, :], other=0.0)


@triton.jit
def _add_products(acc, x, w, PRECISION: tl.constexpr):
    return tl.dot(x, tl.trans(w.to(x.dtype)), acc, input_precision=PRECISION)


@triton.jit
def _add_groups(acc, x, tile, reader, PRECISION: tl.constexpr):
    """The products of 128 columns, of which x and the tile have four runs; then come scales."""
    if reader.RUN == 0:
        for part in tl.static_range(4):
            acc = _add_products(acc, x[part], tile[part], PRECISION)
    else:
        for run in tl.static_range(4 // reader.RUN):
            products = tl.zeros_like(acc)
            for at in tl.static_range(reader.RUN):
                products = _add_products(
                    products,
                    x[run * reader.RUN + at],
                    tile[run * reader.RUN + at],
                    PRECISION,
                )
            acc += products * tl.trans(tile[4 + run])
            if reader.MINIMA:
                acc += tl.sum(x[run].to(tl.float32), axis=1)[:, None] * tl.trans(tile[8 + run])
    return acc


@triton.jit
def _load_run(ptrs, row_mask, cols, K):
    return tl.load(ptrs + cols[None, :], mask=row_mask[:, None] & (cols < K)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_pairs"])
def _experts_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    scales_ptr,
    reader,
    weights_ptr,
    pairs_ptr,
    experts_ptr,
    num_pairs,
    num_rows,
    N,
    K,
    prefetch_part,
    DIVISOR: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALED: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of pairs by BLOCK_N columns: ``out [pairs, N]``.

    A pair's row of x is the pair divided by DIVISOR. If GATED an expert's weight has 2 N rows, gate
    then up. SCALED is 0 for numbers, 1 for codes with a scale a row, 2 for those of 128 columns,
    ``[K / 128, num_rows]``, 3 for integers, which ``reader`` has. With PAIRED columns j and j + 64
    of 128 are neighbours.
    """
    block = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        # The second product is launched after this one waited: the groups are complete then.
        wait(PDL)
        launch_dependents(PDL)
        expert = tl.load(experts_ptr + block)
    else:
        launch_dependents(PDL)
        expert = tl.load(experts_ptr + block, cache_modifier=".cg")
        number = block * tl.num_programs(0) + tl.program_id(0)
        if PREFETCH_PARTS and PDL and number < FIRST_WAVE:
            starts = tl.arange(0, PREFETCH_PARTS) * prefetch_part
            sizes = tl.where(expert >= 0, tl.minimum(K - starts, prefetch_part), 0)
            sizes *= weight_ptr.dtype.element_ty.primitive_bitwidth // 8
            rows = (expert * N + tl.minimum(cols, N - 1)).to(tl.int64)
            first = weight_ptr + rows[:, None] * K + starts[None, :]
            prefetch_l2(first, tl.broadcast_to(sizes[None, :], first.shape))
        wait(PDL)
    if expert >= 0:
        pairs = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
        row_mask = pairs < num_pairs
        x_rows = (pairs // DIVISOR).to(tl.int64) * K
        w_rows = expert * (2 * N if GATED else N) + tl.minimum(cols, N - 1)
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        places = tl.arange(0, BLOCK_K)
        if SCALED == 3:
            x_ptrs, lanes = x_ptr + x_rows[:, None], tl.arange(0, 32)
            cursor = reader.begin(reader, w_rows, places, K)
            up_cursor = reader.begin(reader, w_rows + N if GATED else w_rows, places, K)
            for start in tl.range(0, K, 128, num_stages=STAGES):
                k_mask = start + places < K
                x = (
                    _load_run(x_ptrs, row_mask, start + lanes, K),
                    _load_run(x_ptrs, row_mask, start + 32 + lanes, K),
                    _load_run(x_ptrs, row_mask, start + 64 + lanes, K),
                    _load_run(x_ptrs, row_mask, start + 96 + lanes, K),
                )
                tile, cursor = reader.load(reader, cursor, k_mask, EVEN_K)
                acc = _add_groups(acc, x, tile, reader, PRECISION)
                if GATED:
                    tile, up_cursor = reader.load(reader, up_cursor, k_mask, EVEN_K)
                    up = _add_groups(up, x, tile, reader, PRECISION)
            acc = reader.scale(reader, cursor, acc)
            if GATED:
                up = reader.scale(reader, up_cursor, up)
        else:
            # The columns of x, in the order of the weight's.
            sources = places
            if PAIRED:
                sources = places // 128 * 128 + places % 2 * 64 + places % 128 // 2
            for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                k_mask = start + places < K
                x = _load_run(x_ptr + x_rows[:, None], row_mask, start + sources, K)
                w = _tile(weight_ptr, w_rows, start + places, k_mask, K, EVEN_K)
                if SCALED == 2:
                    scales = tl.load(scales_ptr + start // 128 * num_rows + w_rows)[None, :]
                    acc += _add_products(tl.zeros_like(acc), x, w, PRECISION) * scales
                else:
                    acc = _add_products(acc, x, w, PRECISION)
                if GATED:
                    w = _tile(weight_ptr, w_rows + N, start + places, k_mask, K, EVEN_K)
                    if SCALED == 2:
                        scales = tl.load(scales_ptr + start // 128 * num_rows + w_rows + N)[None, :]
                        up += _add_products(tl.zeros_like(up), x, w, PRECISION) * scales
                    else:
                        up = _add_products(up, x, w, PRECISION)
        if SCALED == 1:
            acc *= tl.load(scales_ptr + w_rows)[None, :]
            if GATED:
                up *= tl.load(scales_ptr + w_rows + N)[None, :]
        if GATED:
            acc = activated(acc, ACTIVATION) * up
        else:
            acc *= tl.load(weights_ptr + pairs, mask=row_mask, other=0.0)[:, None]
        ptrs = out_ptr + pairs.to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(
            ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & (cols < N)[None, :]
        )


@triton.jit
def _add_up_kernel(
    out_ptr,
    results_ptr,
    ids_ptr,
    E,
    N,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sum of a token's results, of those pairs that have an expert."""
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        pair = row * TOP_K + place
        expert = tl.load(ids_ptr + pair)
        end = tl.where(expert >= 0, tl.where(expert < E, N, 0), 0)
        total += tl.load(results_ptr + pair * N + cols, mask=cols < end, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + cols, total.to(out_ptr.dtype.element_ty), mask=cols < N)


def _tiles(pairs: int, num_experts: int) -> tuple[int, int, int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_K, warps and stages: by a rule, of the mean pairs of an expert.

    Few pairs wait for the weight: narrow tiles make many programs, which read side by side. Many
    multiply: tiles are as large as the accumulators of gate and up leave room for. A block holds
    the pairs of most experts where they choose at random, two deviations above the mean: the next
    block of an expert reads its weight again.
    """
    mean = pairs / num_experts
    if mean <= 8:
        return 16, 32, 128, 4, 4
    if mean <= 64:
        block_m = triton.next_power_of_2(int(mean + 2 * mean**0.5))
        return min(64, block_m), 64, 128, 4, 3
    return 128, 128, 64, 8, 3


def run_experts(
    x: Tensor | DeferredRMSNorm,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor | CodedWeight,
    down: Tensor | CodedWeight,
    activation: Activation,
    deterministic: bool = False,
) -> Tensor:
    """See :func:`engine_core.kernels.run_experts`; x lacks a division only if they are few."""
    if isinstance(x, Tensor) and not x.numel():
        return torch.empty_like(x)
    ids, weights = ids.contiguous(), weights.contiguous()
    tokens, top_k = ids.shape
    # In deterministic mode how many rows there are would decide how sums are rounded.
    if (
        isinstance(gate_up, Tensor)
        and isinstance(down, Tensor)
        and not deterministic
        and sizes.are_few(tokens, top_k, len(down))
    ):
        return few.run_experts(_contiguous(x), ids, weights, gate_up, down, activation)[0]
    assert isinstance(x, Tensor), "only the kernels of few tokens make up for a division"
    results = _results(x, ids, weights, gate_up, down, activation, deterministic)
    out = torch.empty_like(x)
    hidden = x.shape[1]
    block = min(1024, triton.next_power_of_2(hidden))
    _add_up_kernel[(tokens, triton.cdiv(hidden, block))](
        *(out, results, ids, _rows(down) // hidden, hidden),
        TOP_K=top_k,
        BLOCK=block,
        num_warps=4,
        **pdl_options(x.device),
    )
    return out


def run_experts_add(
    x: Tensor | DeferredRMSNorm,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    norm_offset: float,
) -> tuple[DeferredRMSNorm, Tensor]:
    """See :func:`engine_core.kernels.run_experts_add`, of few tokens."""
    given = (_contiguous(x), ids.contiguous(), weights.contiguous(), gate_up, down, activation)
    values, added = few.run_experts(*given, (residual, norm_weight, norm_offset))
    assert added is not None, "there is a residual"
    return DeferredRMSNorm(values, added.squares, eps), added.total


def run_experts_add_norm(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor | CodedWeight,
    down: Tensor | CodedWeight,
    activation: Activation,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    norm_bias: Tensor | None,
    norm_offset: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """See :func:`engine_core.kernels.run_experts_add_norm`, of more than few tokens."""
    ids, weights = ids.contiguous(), weights.contiguous()
    results = _results(x, ids, weights, gate_up, down, activation, deterministic=False)
    hidden = x.shape[1]
    return sum_add_norm(
        results.view(*ids.shape, hidden).transpose(0, 1),
        *(None, residual, norm_weight, eps),
        norm_bias=norm_bias,
        centred=centred,
        offset=norm_offset,
        chosen=(ids, _rows(down) // hidden),
    )


def _results(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor | CodedWeight,
    down: Tensor | CodedWeight,
    activation: Activation,
    deterministic: bool,
) -> Tensor:
    """Each pair's result times its weight, ``[pairs, H]``; anything for pairs of no expert."""
    hidden = x.shape[1]
    top_k, pairs = ids.shape[1], ids.numel()
    num_experts = _rows(down) // hidden
    inter = _rows(gate_up) // num_experts // 2
    tile = _ONE_TILE if deterministic else _tiles(pairs, num_experts)
    groups = group_pairs(ids, num_experts, tile[0])
    between = torch.empty((pairs, inter), dtype=x.dtype, device=x.device)
    results = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    _multiply(between, x.contiguous(), gate_up, weights, groups, tile, top_k, activation)
    _multiply(results, between, down, weights, groups, tile, 1, None)
    return results


def _contiguous(x: Tensor | DeferredRMSNorm) -> Tensor | DeferredRMSNorm:
    if isinstance(x, Tensor):
        return x.contiguous()
    return replace(x, values=x.values.contiguous())


def _rows(weight: Tensor | CodedWeight) -> int:
    return weight.numel() // weight.shape[-1] if isinstance(weight, Tensor) else weight.shape[0]


def _multiply(
    out: Tensor,
    x: Tensor,
    weight: Tensor | CodedWeight,
    weights: Tensor,
    groups: tuple[Tensor, Tensor],
    tile: tuple[int, int, int, int, int],
    divisor: int,
    activation: Activation | None,
) -> None:
    (pairs, n), k = out.shape, x.shape[1]
    block_m, block_n, block_k, warps, stages = tile
    given: tuple[Any, Any, Any] = (weight, None, None)
    scaled = parts = prefetch = 0
    if isinstance(weight, CodedWeight):
        # Whole blocks of 128 columns, whose order and scales are their own.
        block_k = 128
        if isinstance(weight, GroupWeight):
            assert weight.group_size != 16, "tiles of experts have runs of 32 columns"
            given, scaled = (None, None, GroupReader.of(weight)), 3
        else:
            assert isinstance(weight, Fp8Weight), f"experts have no kernel for {type(weight)}"
            given, scaled = (weight.codes, weight.scales, None), weight.scales.dim()
    else:
        if block_k > k:
            block_k = max(16, triton.next_power_of_2(k))
        if activation is None and k % 8 == 0 and weight.data_ptr() % 16 == 0:
            # The tiles in flight, one request a thread, of multiples of 16 bytes.
            parts = max(1, 32 * warps // block_n)
            prefetch = triton.cdiv(min(k, (stages - 1) * block_k), 8 * parts) * 8
    _experts_kernel[(triton.cdiv(n, block_n), len(groups[1]))](
        out,
        x,
        *given,
        weights,
        *groups,
        pairs,
        _rows(weight),
        n,
        k,
        prefetch,
        DIVISOR=divisor,
        GATED=activation is not None,
        ACTIVATION=activation or "none",
        SCALED=scaled,
        PAIRED=scaled in (1, 2) and k % 128 == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN_K=k % block_k == 0,
        # Tiles of float32 take twice the shared memory.
        STAGES=stages if x.itemsize == 2 else 1,
        PREFETCH_PARTS=parts,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=warps,
        **pdl_options(x.device),
    )
