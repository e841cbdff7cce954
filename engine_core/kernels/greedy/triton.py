"""Greedy choice on a GPU: many programs per row, of which the last to arrive decides."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.launch.triton import (
    arrival_counts,
    arrives_last,
    launch_dependents,
    num_multiprocessors,
    pdl_options,
    wait,
)
from engine_core.kernels.turns import Turns

# Logits of a program: one row of 128,000 logits still gives one to each of 32 multiprocessors.
_BLOCK, _WARPS = 4096, 8
# Of so many rows and more there are only as many programs as have room at once, each of which takes
# block after block: with one for each 8,192 logits a step of 256 rows took 0.6 to 1% longer, of a
# vocabulary of 152,000 and 24 layers of 896.
_MANY_ROWS = 64
_BLOCK_OF_MANY, _WARPS_OF_MANY, _STAGES_OF_MANY = 2048, 4, 3
_PROGRAMS_OF_MANY = 6


@triton.jit
def _load_logits(ptr, cols, VOCAB: tl.constexpr):
    """Logits as float32; a NaN is infinity here: a comparison loses NaN, infinity wins it."""
    x = tl.load(ptr + cols, mask=cols < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("inf"))


@triton.jit
def _store_best(x, cols, best_ptr, place_ptr, at, vocab):
    """Store the largest of logits ``x`` and the lowest of the ids ``cols`` that have it."""
    best = tl.max(x, axis=0)
    tl.store(best_ptr + at, best)
    tl.store(place_ptr + at, tl.min(tl.where(x == best, cols, vocab), axis=0))


@triton.jit
def load_best(best_ptr, place_ptr, num_blocks, vocab, BLOCK_BLOCKS: tl.constexpr):
    """A row's largest logit and the lowest id that has it, after the last of its blocks arrived."""
    blocks = tl.arange(0, BLOCK_BLOCKS)
    mask = blocks < num_blocks
    bests = tl.load(best_ptr + blocks, mask=mask, other=float("-inf"), cache_modifier=".cg")
    places = tl.load(place_ptr + blocks, mask=mask, other=vocab, cache_modifier=".cg")
    best = tl.max(bests, axis=0)
    return best, tl.min(tl.where(bests == best, places, vocab), axis=0)


@triton.jit
def _choose_greedy_kernel(
    tokens_ptr,
    status_ptr,
    best_ptr,
    place_ptr,
    arrivals_ptr,
    logits_ptr,
    rows_ptr,
    last_tokens_ptr,
    positions_ptr,
    turn_ptr,
    row_stride,
    tokens_stride,
    status_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    STAGES: tl.constexpr,
    MOVES_ON: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has every so many of a row's blocks, from the last one on.

    The last logits were written last: they are in the L2 cache until others take their place.
    """
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    runs = tl.num_programs(1)
    logits_ptr += row * row_stride
    in_block = tl.arange(0, BLOCK)
    block = (VOCAB - 1) // BLOCK - tl.program_id(1)
    best = _load_logits(logits_ptr, block * BLOCK + in_block, VOCAB)
    place = tl.zeros([BLOCK], dtype=tl.int32) + block
    for run in tl.range(1, block // runs + 1, num_stages=STAGES):
        at = block - run * runs
        x = _load_logits(logits_ptr, at * BLOCK + in_block, VOCAB)
        # Of equal ones the first wins, which comes last.
        place = tl.where(x >= best, at, place)
        best = tl.maximum(best, x)
    best_ptr += row * runs
    place_ptr += row * runs
    _store_best(best, place * BLOCK + in_block, best_ptr, place_ptr, tl.program_id(1), VOCAB)
    if arrives_last(arrivals_ptr + row, runs):
        if turn_ptr is not None:
            turn = tl.load(turn_ptr)
            tokens_ptr += turn * tokens_stride
            status_ptr += turn * status_stride
        peak, token = load_best(best_ptr, place_ptr, runs, VOCAB, BLOCK_RUNS)
        tl.store(tokens_ptr + row, token.to(tl.int64))
        tl.store(status_ptr + row, (tl.abs(peak) == float("inf")).to(tl.int8))
        if MOVES_ON:
            tl.store(last_tokens_ptr + tl.load(rows_ptr + row), token.to(tl.int64))
            position = tl.load(positions_ptr + row)
            tl.store(positions_ptr + row, tl.where(position >= 0, position + 1, position))


def choose_greedy(
    logits: Tensor,
    rows: Tensor | None = None,
    last_tokens: Tensor | None = None,
    positions: Tensor | None = None,
    turns: Turns | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens ``[B]`` int64 and status ``[B]`` int8 of ``logits [B, V]``."""
    num_rows, vocab = logits.shape
    device = logits.device
    if turns is None:
        tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
        status = torch.empty(num_rows, dtype=torch.int8, device=device)
        turn = None
    else:
        tokens, status, turn = turns
    if num_rows == 0:
        return tokens, status
    block, num_warps, stages = _BLOCK, _WARPS, 1
    runs = most = triton.cdiv(vocab, block)
    if num_rows >= _MANY_ROWS:
        block, num_warps, stages = _BLOCK_OF_MANY, _WARPS_OF_MANY, _STAGES_OF_MANY
        programs = _PROGRAMS_OF_MANY * num_multiprocessors(device)
        blocks = triton.cdiv(vocab, block)
        runs = max(1, min(blocks, programs // num_rows))
        most = max(1, min(blocks, programs // _MANY_ROWS))
    _choose_greedy_kernel[(num_rows, runs)](
        tokens,
        status,
        torch.empty(num_rows, runs, dtype=torch.float32, device=device),
        torch.empty(num_rows, runs, dtype=torch.int32, device=device),
        arrival_counts(device, num_rows),
        logits,
        rows,
        last_tokens,
        positions,
        turn,
        logits.stride(0),
        # The same kernel for tensors of any stride that are not looked for a turn in.
        0 if turn is None else tokens.stride(0),
        0 if turn is None else status.stride(0),
        VOCAB=vocab,
        BLOCK=block,
        # The same kernel for any number of many rows.
        BLOCK_RUNS=triton.next_power_of_2(most),
        STAGES=stages,
        MOVES_ON=rows is not None,
        num_warps=num_warps,
        **pdl_options(device),
    )
    return tokens, status
