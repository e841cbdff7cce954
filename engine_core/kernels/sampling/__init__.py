"""Choosing a token for each row: the most probable one, or a random one."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_core.kernels.sampling import reference
from engine_core.kernels.sampling.state import (
    BIASED,
    COUNTED,
    GENERATED,
    NUMBERS,
    PENALISED,
    PROMPTED,
    Adjustments,
    SamplingState,
)
from engine_core.kernels.turns import Turns

__all__ = [
    "BIASED",
    "COUNTED",
    "GENERATED",
    "NUMBERS",
    "PENALISED",
    "PROMPTED",
    "Adjustments",
    "SamplingState",
    "sample_tokens",
]


# Rows that plain PyTorch chooses for at once on a GPU, which bounds the memory that it takes.
_PLAIN_ROWS = 16


def sample_tokens(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    state: SamplingState,
    *,
    turns: Turns | None = None,
    plain: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose a token for each row, and move the state of the persistent batch on.

    On a GPU it is four launches, which need no input from the host. ``last_tokens[rows]`` become
    the tokens, positions that are not negative grow by one, and the tokens of ``COUNTED`` rows are
    counted.

    A row's logits x are first adjusted: bias, repetition penalty, frequency and presence penalty,
    bans. The greedy choice is the largest one, of equal ones the first. The random choice is from
    these tokens: the ``top_k`` largest, equal ones by token id; of them the fewest that reach the
    share ``top_p`` of their total weight, taken in the same order; of them those that weigh at
    least ``min_p``. A token weighs ``exp((x - max x) / temperature)``, in float32. Weights are
    added up as integers, multiples of 2**-44 for a vocabulary of 2**18, so that no order of
    addition shows. Of the tokens that are left, in the order of their ids, it is the first up to
    which they weigh more than the share u of the whole, u being
    :func:`~engine_core.kernels.sampling.philox.uniform` of the row's seed and of the position that
    the token will have.

    Args:
        logits: ``[B, V]``, V at most 2**24, last dimension contiguous; -inf forbids a token.
        rows: ``[B]`` int64, rows of the persistent batch; all different, but rows of padding may
            be one and the same.
        positions: ``[B]`` int64, contiguous, modified: the position of the token that each row
            computed, whose successor is chosen; negative for padding, whose result is meaningless.
        last_tokens: ``[max_rows]`` int64, modified.
        state: how each row of the persistent batch chooses.
        turns: where the result is stored; None for new tensors.
        plain: whether a GPU is to compute it by PyTorch's kernels, which are slower and need no
            compile; the host waits for it.

    Returns:
        Tokens ``[B]`` int64, and ``[B]`` int8: 1 where a logit is NaN or +inf or all are -inf, 2
        where the adjustments leave no finite one, and then the token means nothing; else 0. With
        ``turns`` theirs, ``[T, B]``, of which those of this turn are new.

    Raises:
        ValueError: shapes, dtypes or strides are not as above.
    """
    if (
        logits.dim() != 2
        or not 0 < logits.shape[1] <= 2**24
        or logits.stride(1) != 1
        or not logits.is_floating_point()
    ):
        raise ValueError(
            "sample_tokens: logits must be [B, V] floats with 0 < V <= 2**24 and stride 1 in the "
            f"last dimension, got {tuple(logits.shape)} {logits.dtype} with strides "
            f"{logits.stride()}"
        )
    for name, given in (("rows", rows), ("positions", positions)):
        if given.shape != logits.shape[:1] or given.dtype != torch.int64:
            raise ValueError(
                f"sample_tokens: {name} must be [{logits.shape[0]}] int64, got "
                f"{tuple(given.shape)} {given.dtype}"
            )
    max_rows = last_tokens.shape[0]
    shape = (max_rows, len(NUMBERS))
    if state.numbers.shape != shape or state.numbers.dtype != torch.float64:
        raise ValueError(
            f"sample_tokens: numbers must be {shape} float64, got {tuple(state.numbers.shape)} "
            f"{state.numbers.dtype}"
        )
    if state.adjustments is not None:
        _check_adjustments(state.adjustments, max_rows, logits.shape[1])
    if turns is not None:
        turns.check("sample_tokens", len(rows))
    if logits.is_cuda and not plain:
        from engine_core.kernels.sampling import triton

        return triton.sample_tokens(logits, rows, positions, last_tokens, state, turns)
    tokens, status = _plain(logits, rows, positions, last_tokens, state, plain=plain)
    if turns is None:
        return tokens, status
    turns.store(tokens, status)
    return turns.tokens, turns.status


def _plain(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    state: SamplingState,
    *,
    plain: bool,
) -> tuple[Tensor, Tensor]:
    """The choice by PyTorch; in parts if a GPU is to make it."""
    if plain and len(rows) > _PLAIN_ROWS:
        parts = zip(*(each.split(_PLAIN_ROWS) for each in (logits, rows, positions)), strict=True)
        chosen = [
            reference.sample_tokens(some, of, at, last_tokens, state) for some, of, at in parts
        ]
        tokens, status = zip(*chosen, strict=True)
        return torch.cat(tokens), torch.cat(status)
    return reference.sample_tokens(logits, rows, positions, last_tokens, state)


def _check_adjustments(adjustments: Adjustments, max_rows: int, vocab: int) -> None:
    whole = (max_rows, vocab)
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...], torch.dtype]] = {
        "kinds": (adjustments.kinds, (max_rows,), torch.int32),
        "ban_ids": (adjustments.ban_ids, (max_rows, adjustments.ban_ids.shape[-1]), torch.int32),
        "ban_ends": (adjustments.ban_ends, (max_rows,), torch.int64),
        "bias": (adjustments.bias, whole, torch.float32),
        "seen": (adjustments.seen, whole, torch.uint8),
        "output_counts": (adjustments.output_counts, whole, torch.int32),
        "seen_ids": (adjustments.seen_ids, whole, torch.int32),
        "seen_sizes": (adjustments.seen_sizes, (max_rows,), torch.int32),
    }
    together = ("seen", "output_counts", "seen_ids", "seen_sizes")
    given = [name for name in together if wanted[name][0] is not None]
    if 0 < len(given) < len(together):
        raise ValueError(
            f"sample_tokens: {', '.join(together)} go together, got only {' and '.join(given)}"
        )
    for name, (tensor, shape, dtype) in wanted.items():
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"sample_tokens: {name} must be {shape} {dtype}, contiguous, got "
                f"{tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}"
            )
