"""Experts of so few tokens that hardly two share one: the time is that of reading their weights.

Pairs of a token and an expert are not grouped. A program of the first product takes some columns of
one pair; one of the second some columns of a token, of all its experts, and adds them up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.activation.triton import activated
from engine_core.kernels.launch.triton import launch_dependents, pdl_options, wait
from engine_core.kernels.linear import Activation, DeferredRMSNorm
from engine_core.kernels.linear.epilogues.triton import Activated, Added, place_of
from engine_core.kernels.linear.reference import taken_apart
from engine_core.kernels.linear.tiles import Tile

# Of the first product: columns of a program, the columns of x that it multiplies by at a time, and
# tiles in flight. Of the second: columns of a program, numbers of a tile of all places, and tiles.
GATE_TILE = (4, 512, 5)
DOWN_TILE = (2, 4096, 4)


@triton.jit
def load_squares(squares_ptr, row, SQUARES: tl.constexpr, BLOCK_SQUARES: tl.constexpr):
    """A row's sums of squares, ``[BLOCK_SQUARES]``; 0 if x lacks no division."""
    squares = 0.0
    if SQUARES:
        parts = tl.arange(0, BLOCK_SQUARES)
        squares = tl.load(squares_ptr + row * SQUARES + parts, mask=parts < SQUARES, other=0.0)
    return squares


@triton.jit
def inverse_of(squares, K, eps):
    """One by the root mean square of a row of K numbers."""
    return 1.0 / tl.sqrt(tl.sum(squares, axis=0) / K + eps)


def squares_options(squares: Tensor | None) -> dict[str, int]:
    """The constants of :func:`load_squares` for ``squares [rows, parts]``."""
    parts = 0 if squares is None else squares.shape[1]
    return {"SQUARES": parts, "BLOCK_SQUARES": triton.next_power_of_2(max(1, parts))}


@triton.jit
def _gate_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    ids_ptr,
    squares_ptr,
    eps,
    E,
    N,
    K,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N columns of a pair: ``out [pairs, N]``; an expert's weight has 2 N rows.

    With SQUARES, x still lacks RMSNorm's division, which is made up for before the activation. The
    next kernel is launched after this one waited, so that it may read the ids before it waits.
    """
    wait(PDL)
    launch_dependents(PDL)
    pair = tl.program_id(1)
    expert = tl.load(ids_ptr + pair)
    squares = load_squares(squares_ptr, pair // TOP_K, SQUARES, BLOCK_SQUARES)
    if (expert >= 0) & (expert < E):
        cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        # Rows beyond the last one read it once more: loads of the weight need no mask.
        w_rows = expert.to(tl.int64) * (2 * N) + tl.minimum(cols, N - 1)
        places = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64) * K + places[None, :]
        w_ptrs = weight_ptr + w_rows[:, None] * K + places[None, :]
        up_ptrs = w_ptrs + N.to(tl.int64) * K
        acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            mask = None if EVEN_K else (start + places < K)[None, :]
            other = None if EVEN_K else 0.0
            x = tl.load(x_ptrs + start, mask=mask, other=other).to(tl.float32)
            acc += tl.load(w_ptrs + start, mask=mask, other=other).to(tl.float32) * x
            up += tl.load(up_ptrs + start, mask=mask, other=other).to(tl.float32) * x
        gates = tl.sum(acc, axis=1)
        ups = tl.sum(up, axis=1)
        if SQUARES:
            inverse = inverse_of(squares, K, eps)
            gates *= inverse
            ups *= inverse
        result = activated(gates, ACTIVATION) * ups
        out_ptrs = out_ptr + pair.to(tl.int64) * N + cols
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def _load_tile(ptrs, there, places, K, EVEN_K: tl.constexpr):
    mask = there if EVEN_K else there & (places < K)[None, None, :]
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _down_kernel(
    epilogue,
    x_ptr,
    weight_ptr,
    weights_ptr,
    ids_ptr,
    E,
    N,
    K,
    TOP_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N columns of a token's sum, of ``x [tokens * TOP_K, K]``, for the epilogue."""
    launch_dependents(PDL)
    tile, row = tl.program_id(0), tl.program_id(1)
    place = place_of(epilogue, tile, row.to(tl.int64), tl.num_programs(1), N, 1, BLOCK_N)
    chosen = tl.arange(0, BLOCK_P)
    pairs = row * TOP_K + chosen
    # Written by a kernel that was complete before this one was launched, as the weights were.
    ids = tl.load(ids_ptr + pairs, mask=chosen < TOP_K, other=-1, cache_modifier=".cg")
    valid = (ids >= 0) & (ids < E)
    scales = tl.load(weights_ptr + pairs, mask=valid, other=0.0, cache_modifier=".cg")
    there = valid[:, None, None]
    w_rows = ids.to(tl.int64)[:, None] * N + tl.minimum(place.cols, N - 1)[None, :]
    places = tl.arange(0, BLOCK_K)
    w_ptrs = weight_ptr + w_rows[:, :, None] * K + places[None, None, :]
    x_ptrs = x_ptr + pairs.to(tl.int64)[:, None, None] * K + places[None, None, :]
    # The first tile waits for x in registers.
    w = _load_tile(w_ptrs, there, places, K, EVEN_K)
    wait(PDL)
    asked = epilogue.ask(epilogue, place)
    acc = w.to(tl.float32) * _load_tile(x_ptrs, there, places, K, EVEN_K).to(tl.float32)
    for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        x = _load_tile(x_ptrs + start, there, start + places, K, EVEN_K)
        w = _load_tile(w_ptrs + start, there, start + places, K, EVEN_K)
        acc += w.to(tl.float32) * x.to(tl.float32)
    total = tl.sum(tl.sum(acc, axis=2) * scales[:, None], axis=0)[None, :]
    epilogue.finish(epilogue, asked, place, total, total)


def run_experts(
    x: Tensor | DeferredRMSNorm,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    added: tuple[Tensor, Tensor, float] | None = None,
) -> tuple[Tensor, Added | None]:
    """See :func:`engine_core.kernels.run_experts`; all are contiguous, and there are tokens.

    With ``added``, a residual ``[tokens, H]``, an RMSNorm's weight and what is added to that, the
    result is what :func:`engine_core.kernels.run_experts_add` gives; the sum and the squares are
    the epilogue's.
    """
    values, squares, eps = taken_apart(x)
    tokens, hidden = values.shape
    num_experts, _, inter = down.shape
    top_k, device = ids.shape[1], values.device
    between = torch.empty((ids.numel(), inter), dtype=values.dtype, device=device)
    block_n, block_k, stages = GATE_TILE
    block_k = _step(hidden, block_k)
    _gate_kernel[(triton.cdiv(inter, block_n), ids.numel())](
        *(between, values, gate_up, ids, squares, eps, num_experts, inter, hidden),
        TOP_K=top_k,
        ACTIVATION=activation,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN_K=hidden % block_k == 0,
        STAGES=stages,
        num_warps=4,
        **squares_options(squares),
        **pdl_options(device),
    )
    block_n, numbers, stages = DOWN_TILE
    block_p = triton.next_power_of_2(top_k)
    block_k = _step(inter, numbers // (block_p * block_n))
    epilogue: Activated | Added = Activated.of(values, hidden)
    if added is not None:
        residual, norm_weight, offset = added
        epilogue = Added.of(residual, norm_weight, Tile(block_n, block_k), offset)
    _down_kernel[(triton.cdiv(hidden, block_n), tokens)](
        *(epilogue, between, down, weights, ids, num_experts, hidden, inter),
        TOP_K=top_k,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN_K=inter % block_k == 0,
        STAGES=stages,
        num_warps=4,
        **pdl_options(device),
    )
    return epilogue.out, epilogue if isinstance(epilogue, Added) else None


def _step(size: int, most: int) -> int:
    """Columns at a time, a power of two: so many that the last step is not mostly empty."""
    step: int = min(most, triton.next_power_of_2(size))
    while step > 128 and -size % step > size // 8:
        step //= 2
    return step
