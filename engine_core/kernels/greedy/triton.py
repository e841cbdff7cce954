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
    pdl_options,
    wait,
)

# Logits of a program: one row of 128,000 logits still gives one to each of 32 multiprocessors. Many
# rows are many times the programs of a GPU, and fewer of them arrive sooner.
_BLOCK = 4096
_MANY_ROWS = 64
_BLOCK_OF_MANY = 8192


@triton.jit
def store_best(x, cols, best_ptr, place_ptr, vocab):
    """Store the largest of a block's logits ``x`` and the lowest of the ids ``cols`` that have it.

    A NaN is infinity here: a comparison loses NaN, infinity wins it.
    """
    x = tl.where(x == x, x, float("inf"))
    best = tl.max(x, axis=0)
    tl.store(best_ptr, best)
    tl.store(place_ptr, tl.min(tl.where(x == best, cols, vocab), axis=0))


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
    row_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
    MOVES_ON: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * row_stride + cols, mask=cols < VOCAB, other=float("-inf"))
    logits = logits.to(tl.float32)
    best_ptr += row * BLOCKS
    place_ptr += row * BLOCKS
    store_best(logits, cols, best_ptr + block, place_ptr + block, VOCAB)
    if arrives_last(arrivals_ptr + row, BLOCKS):
        best, token = load_best(best_ptr, place_ptr, BLOCKS, VOCAB, BLOCK_BLOCKS)
        tl.store(tokens_ptr + row, token.to(tl.int64))
        tl.store(status_ptr + row, (tl.abs(best) == float("inf")).to(tl.int8))
        if MOVES_ON:
            tl.store(last_tokens_ptr + tl.load(rows_ptr + row), token.to(tl.int64))
            position = tl.load(positions_ptr + row)
            tl.store(positions_ptr + row, tl.where(position >= 0, position + 1, position))


def choose_greedy(
    logits: Tensor,
    rows: Tensor | None = None,
    last_tokens: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens ``[B]`` int64 and status ``[B]`` int8 of ``logits [B, V]``."""
    num_rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    status = torch.empty(num_rows, dtype=torch.int8, device=device)
    if num_rows == 0:
        return tokens, status
    block = _BLOCK if num_rows < _MANY_ROWS else _BLOCK_OF_MANY
    blocks = triton.cdiv(vocab, block)
    _choose_greedy_kernel[(num_rows, blocks)](
        tokens,
        status,
        torch.empty(num_rows, blocks, dtype=torch.float32, device=device),
        torch.empty(num_rows, blocks, dtype=torch.int32, device=device),
        arrival_counts(device, num_rows),
        logits,
        rows,
        last_tokens,
        positions,
        logits.stride(0),
        VOCAB=vocab,
        BLOCK=block,
        BLOCKS=blocks,
        BLOCK_BLOCKS=triton.next_power_of_2(blocks),
        MOVES_ON=rows is not None,
        num_warps=8,
        **pdl_options(device),
    )
    return tokens, status
