"""Choosing the most probable token."""

from __future__ import annotations

from torch import Tensor

from engine_core.kernels.greedy import reference
from engine_core.kernels.turns import Turns

__all__ = ["choose_greedy"]


def choose_greedy(
    logits: Tensor,
    *,
    rows: Tensor | None = None,
    last_tokens: Tensor | None = None,
    positions: Tensor | None = None,
    turns: Turns | None = None,
) -> tuple[Tensor, Tensor]:
    """The most probable token of each row, and whether the row can be trusted.

    On a GPU it is one launch; of equal logits the first wins. With ``rows``, the state of the
    persistent batch moves on in the same launch: ``last_tokens[rows]`` become the tokens, and
    positions that are not negative grow by one.

    Args:
        logits: ``[B, V]``, last dimension contiguous; a logit of -inf forbids its token.
        rows: ``[B]`` int64, rows of the persistent batch; rows of padding may be one and the same.
        last_tokens: ``[max_rows]`` int64, modified; given if ``rows`` is.
        positions: ``[B]`` int64, contiguous, modified; given if ``rows`` is.
        turns: where the result is stored; None for new tensors.

    Returns:
        Tokens ``[B]`` int64, and ``[B]`` int8: 1 where a logit is NaN or +inf or all are -inf, and
        then the token means nothing; else 0. With ``turns`` theirs, ``[T, B]``, of which those of
        this turn are new.

    Raises:
        ValueError: logits, the state or the turns are not as above.
    """
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(
            "choose_greedy: logits must be [B, V] with V > 0 and stride 1 in the last dimension, "
            f"got {tuple(logits.shape)} with strides {logits.stride()}"
        )
    given = [state is not None for state in (rows, last_tokens, positions)]
    if any(given) and not all(given):
        raise ValueError(
            "choose_greedy: rows, last_tokens and positions go together, got "
            f"{sum(given)} of the three"
        )
    for state in (rows, positions):
        if state is not None and state.shape != logits.shape[:1]:
            raise ValueError(
                f"choose_greedy: rows and positions must be [{logits.shape[0]}], got "
                f"{tuple(state.shape)}"
            )
    if turns is not None:
        turns.check("choose_greedy", len(logits))
    if logits.is_cuda:
        from engine_core.kernels.greedy import triton

        return triton.choose_greedy(logits, rows, last_tokens, positions, turns)
    return reference.choose_greedy(logits, rows, last_tokens, positions, turns)
