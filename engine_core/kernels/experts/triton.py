"""Experts on a GPU: a touched expert's weights are read once, and no shape depends on the choice.

A *pair* is a token and an expert that it chose. Two products are launched, gates with ups and then
downs, and a sum over each token's pairs. Of few pairs each program finds its expert's own in the
ids. Many are sorted by expert first, and a program has a block of an expert's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.activation.triton import activated
from engine_core.kernels.experts.tiles import Tiles, choose_tiles
from engine_core.kernels.gpu import gpu_of
from engine_core.kernels.launch.triton import launch_dependents, pdl_options, wait
from engine_core.kernels.linear import Activation, Fp8Weight

if TYPE_CHECKING:
    from engine_core.kernels.experts import Routing

_SCAN = 512  # ids that a program looks at at a time


@triton.jit
def _choose_kernel(
    ids_ptr,
    weights_ptr,
    logits_ptr,
    stride,
    bias_ptr,
    slots_ptr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token's choice; of equal scores the lower number comes first."""
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    inside = experts < NUM_EXPERTS
    places = tl.arange(0, PLACES)
    wait(PDL)
    logits = tl.load(logits_ptr + token * stride + experts, mask=inside, other=-float("inf"))
    logits = logits.to(tl.float32)
    if SOFTMAX:
        scores = tl.exp(logits - tl.max(logits, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    else:
        scores = tl.sigmoid(logits)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + experts, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(inside, choice, -float("inf"))
    chosen = tl.full([PLACES], -1, tl.int32)
    weights = tl.zeros([PLACES], tl.float32)
    for place in range(TOP_K):
        best = tl.max(choice, axis=0)
        expert = tl.min(tl.where(choice == best, experts, BLOCK), axis=0)
        weight = tl.sum(tl.where(experts == expert, scores, 0.0), axis=0)
        chosen = tl.where(places == place, expert, chosen)
        weights = tl.where(places == place, weight, weights)
        choice = tl.where(experts == expert, -float("inf"), choice)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    weights = weights * SCALE
    # A row of padding, and one that is not a number, choose none.
    chosen = tl.where(chosen < NUM_EXPERTS, chosen, -1)
    if HAS_SLOTS:
        padding = tl.load(slots_ptr + token) < 0
        chosen = tl.where(padding, -1, chosen)
    at = token * TOP_K + places
    tl.store(ids_ptr + at, chosen, mask=places < TOP_K)
    tl.store(weights_ptr + at, weights, mask=places < TOP_K)


def choose_experts(
    logits: Tensor, routing: Routing, bias: Tensor | None, slots: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See :func:`engine_core.kernels.choose_experts`; without groups."""
    tokens, num_experts = logits.shape
    ids = torch.empty(tokens, routing.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    if tokens:
        _choose_kernel[(tokens,)](
            ids,
            weights,
            logits,
            logits.stride(0),
            logits if bias is None else bias,
            logits if slots is None else slots,
            NUM_EXPERTS=num_experts,
            TOP_K=routing.top_k,
            SOFTMAX=routing.scoring == "softmax",
            RENORMALIZE=routing.renormalize,
            SCALE=routing.scale,
            HAS_BIAS=bias is not None,
            HAS_SLOTS=slots is not None,
            BLOCK=triton.next_power_of_2(num_experts),
            PLACES=triton.next_power_of_2(routing.top_k),
            num_warps=1 if num_experts <= 256 else 4,
            **pdl_options(logits.device),
        )
    return ids, weights


@triton.jit
def _count(ids_ptr, expert, before, SCAN: tl.constexpr):
    """How many of the first ``before`` pairs have this expert."""
    found = 0
    for start in range(0, before, SCAN):
        pairs = start + tl.arange(0, SCAN)
        ids = tl.load(ids_ptr + pairs, mask=pairs < before, other=-1)
        found += tl.sum((ids == expert).to(tl.int32), axis=0)
    return found


@triton.jit
def _find(ids_ptr, expert, num_pairs, first, SCAN: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of an expert's pairs those from the ``first``-th on ``[BLOCK_M]``; -1 where none is left."""
    wanted = first + tl.arange(0, BLOCK_M)
    pairs_of = tl.full([BLOCK_M], -1, tl.int32)
    seen = 0
    for start in range(0, num_pairs, SCAN):
        pairs = start + tl.arange(0, SCAN)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
        mine = (ids == expert).to(tl.int32)
        place = seen + tl.cumsum(mine, axis=0) - mine
        hits = (place[None, :] == wanted[:, None]) & (mine[None, :] > 0)
        pairs_of += tl.sum(tl.where(hits, pairs[None, :] + 1, 0), axis=1)
        seen += tl.sum(mine, axis=0)
    return pairs_of


@triton.jit
def _numbers(w, dtype: tl.constexpr):
    """Weights of the model's type, of e4m3 codes if they are bytes."""
    if w.dtype == tl.uint8:
        w = w.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return w.to(dtype)


@triton.jit
def _multiply(
    out_ptr,
    x_ptr,
    x_stride,
    w_ptr,
    scales_ptr,
    pairs,
    expert,
    tile,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALES: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of an expert's results for some pairs."""
    ROWS: tl.constexpr = 2 * OUT if GATED else OUT
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if dtype == tl.float32 else "tf32"
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    there, fits = pairs >= 0, cols < OUT
    source = pairs // TOP_K if GATED else pairs
    x_rows = x_ptr + tl.where(there, source, 0).to(tl.int64) * x_stride
    row = expert.to(tl.int64) * ROWS + cols
    acc = tl.zeros([pairs.shape[0], BLOCK_N], tl.float32)
    acc_up = tl.zeros([pairs.shape[0], BLOCK_N], tl.float32)
    for start in range(0, IN, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        inside = ks < IN
        columns = start + tl.arange(0, BLOCK_K)
        if PAIRED:
            # Columns j and j + 64 of each 128 are neighbours in the codes.
            columns = ks // 128 * 128 + ks % 2 * 64 + ks % 128 // 2
        x = tl.load(
            x_rows[:, None] + columns[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        mask = fits[None, :] & inside[:, None]
        w = _numbers(tl.load(w_ptr + row[None, :] * IN + ks[:, None], mask=mask, other=0), dtype)
        if SCALES == 2:
            scale_at = scales_ptr + start // 128 * (NUM_EXPERTS * ROWS)
            scale = tl.load(scale_at + row, mask=fits, other=0.0)
            acc += tl.dot(x, w, input_precision=PRECISION) * scale[None, :]
        else:
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        if GATED:
            up = row + OUT
            w_up = tl.load(w_ptr + up[None, :] * IN + ks[:, None], mask=mask, other=0)
            w_up = _numbers(w_up, dtype)
            if SCALES == 2:
                scale = tl.load(scale_at + up, mask=fits, other=0.0)
                acc_up += tl.dot(x, w_up, input_precision=PRECISION) * scale[None, :]
            else:
                acc_up = tl.dot(x, w_up, acc_up, input_precision=PRECISION)
    if SCALES == 1:
        acc *= tl.load(scales_ptr + row, mask=fits, other=0.0)[None, :]
    if GATED:
        if SCALES == 1:
            acc_up *= tl.load(scales_ptr + row + OUT, mask=fits, other=0.0)[None, :]
        # The products are numbers of the model's type before they meet, as in the reference.
        gate = acc.to(dtype).to(tl.float32)
        acc = activated(gate, ACTIVATION) * acc_up.to(dtype).to(tl.float32)
    out_at = out_ptr + tl.where(there, pairs, 0).to(tl.int64)[:, None] * OUT + cols[None, :]
    tl.store(out_at, acc.to(dtype), mask=there[:, None] & fits[None, :])


@triton.jit(do_not_specialize=["num_pairs", "x_stride"])
def _few_kernel(
    out_ptr,
    x_ptr,
    x_stride,
    w_ptr,
    scales_ptr,
    ids_ptr,
    num_pairs,
    BY_PAIR: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALES: tl.constexpr,
    PAIRED: tl.constexpr,
    SCAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait(PDL)
    place = tl.program_id(0)
    if BY_PAIR:
        # Fewer pairs than experts: a program has the expert of one, unless an earlier pair has it.
        expert = tl.load(ids_ptr + place)
        known = (expert >= 0) & (expert < NUM_EXPERTS)
        mine = known & (_count(ids_ptr, expert, place, SCAN) == 0)
        count = tl.where(mine, _count(ids_ptr, expert, num_pairs, SCAN), 0)
    else:
        expert = place
        count = _count(ids_ptr, expert, num_pairs, SCAN)
    for first in range(0, count, BLOCK_M):
        pairs = _find(ids_ptr, expert, num_pairs, first, SCAN, BLOCK_M)
        _multiply(
            out_ptr,
            x_ptr,
            x_stride,
            w_ptr,
            scales_ptr,
            pairs,
            expert,
            tl.program_id(1),
            NUM_EXPERTS,
            TOP_K,
            OUT,
            IN,
            GATED,
            ACTIVATION,
            SCALES,
            PAIRED,
            BLOCK_N,
            BLOCK_K,
        )


@triton.jit(do_not_specialize=["x_stride"])
def _many_kernel(
    out_ptr,
    x_ptr,
    x_stride,
    w_ptr,
    scales_ptr,
    order_ptr,
    blocks_ptr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALES: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait(PDL)
    # Neighbours share a block's rows of x; the expert's weights stay in L2 for its next block.
    TILES: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // TILES
    expert = tl.load(blocks_ptr + block * 3)
    first = tl.load(blocks_ptr + block * 3 + 1)
    end = tl.load(blocks_ptr + block * 3 + 2)
    if expert < NUM_EXPERTS:
        places = first + tl.arange(0, BLOCK_M)
        pairs = tl.load(order_ptr + places, mask=places < end, other=-1)
        _multiply(
            out_ptr,
            x_ptr,
            x_stride,
            w_ptr,
            scales_ptr,
            pairs,
            expert,
            tl.program_id(0) % TILES,
            NUM_EXPERTS,
            TOP_K,
            OUT,
            IN,
            GATED,
            ACTIVATION,
            SCALES,
            PAIRED,
            BLOCK_N,
            BLOCK_K,
        )


@triton.jit
def _sum_kernel(
    out_ptr,
    results_ptr,
    ids_ptr,
    weights_ptr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token's pairs by their weights, added up in float32 in the order of its choice."""
    launch_dependents(PDL)
    TILES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // TILES).to(tl.int64)
    cols = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    wait(PDL)
    for place in range(TOP_K):
        pair = token * TOP_K + place
        expert = tl.load(ids_ptr + pair)
        weight = tl.load(weights_ptr + pair)
        # What was not computed may be anything.
        known = (expert >= 0) & (expert < NUM_EXPERTS)
        result = tl.load(results_ptr + pair * SIZE + cols, mask=cols < SIZE, other=0.0)
        total += tl.where(known, result.to(tl.float32), 0.0) * weight
    tl.store(out_ptr + token * SIZE + cols, total.to(out_ptr.dtype.element_ty), mask=cols < SIZE)


def _operands(weight: Tensor | Fp8Weight) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Numbers or codes, scales, and what a kernel must know of them."""
    if isinstance(weight, Fp8Weight):
        paired = weight.shape[1] % 128 == 0
        codes = weight.codes.view(torch.uint8)
        return codes, weight.scales, {"SCALES": weight.scales.dim(), "PAIRED": paired}
    return weight, weight, {"SCALES": 0, "PAIRED": False}


def sorted_blocks(ids: Tensor, num_experts: int, block: int) -> tuple[Tensor, Tensor]:
    """The pairs by expert, and blocks of pairs of one expert; no shape depends on the ids.

    Returns:
        the pairs' numbers ``[P]`` int32; and ``[blocks, 3]`` int32: each block's expert, or
        ``num_experts`` where there is no such block, its first place among the pairs, and the
        place after its expert's last.
    """
    flat = ids.reshape(-1).long()
    flat = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    order = flat.sort(stable=True).indices
    ones = torch.ones_like(flat)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add_(0, flat, ones)[:num_experts]
    ends = counts.cumsum(0)
    blocks = (counts + block - 1) // block
    last = blocks.cumsum(0)
    most = triton.cdiv(flat.numel(), block) + min(num_experts, flat.numel())
    numbers = torch.arange(most, device=ids.device)
    expert = torch.searchsorted(last, numbers, right=True)
    known = expert.clamp(max=num_experts - 1)
    first = ends[known] - counts[known] + (numbers - last[known] + blocks[known]) * block
    return order.int(), torch.stack((expert, first, ends[known]), dim=1).int()


def run_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor | Fp8Weight,
    down: Tensor | Fp8Weight,
    activation: Activation,
    tiles: Tiles | None = None,
) -> Tensor:
    """See :func:`engine_core.kernels.run_experts`; ``tiles`` are of the rule if they are None."""
    tokens, hidden = x.shape
    top_k = ids.shape[1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not tokens:
        return out
    inner = down.shape[-1]
    num_experts = math.prod(down.shape[:-1]) // hidden
    pairs = tokens * top_k
    tiles = tiles or choose_tiles(pairs, num_experts, inner, hidden, x.dtype, gpu_of(x.device))
    ids, weights = ids.contiguous(), weights.contiguous()
    between = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    results = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    pdl = pdl_options(x.device)
    if tiles.sorts:
        order, blocks = sorted_blocks(ids, num_experts, tiles.rows)
    for target, source, weight, gated in (
        (between, x, gate_up, True),
        (results, between, down, False),
    ):
        codes, scales, form = _operands(weight)
        width = target.shape[1]
        columns = tiles.gate_columns if gated else tiles.down_columns
        options = {
            **form,
            "NUM_EXPERTS": num_experts,
            "TOP_K": top_k,
            "OUT": width,
            "IN": source.shape[1],
            "GATED": gated,
            "ACTIVATION": activation,
            "BLOCK_M": tiles.rows,
            "BLOCK_N": columns,
            "BLOCK_K": tiles.inputs,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
            **pdl,
        }
        operands = (target, source, source.stride(0), codes, scales)
        count = triton.cdiv(width, columns)
        if tiles.sorts:
            _many_kernel[(len(blocks) * count,)](*operands, order, blocks, **options)
        else:
            _few_kernel[(min(pairs, num_experts), count)](
                *operands, ids, pairs, BY_PAIR=pairs < num_experts, SCAN=_SCAN, **options
            )
    block = min(1024, triton.next_power_of_2(hidden))
    _sum_kernel[(tokens * triton.cdiv(hidden, block),)](
        out,
        results,
        ids,
        weights,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        SIZE=hidden,
        BLOCK=block,
        num_warps=4,
        **pdl,
    )
    return out
