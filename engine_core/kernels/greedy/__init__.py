"""Choosing the most probable token."""

from __future__ import annotations

from torch import Tensor

from engine_core.kernels.greedy import reference

__all__ = ["choose_greedy"]


def choose_greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable token of each row, and whether the row can be trusted.

    On a GPU it is one launch; of equal logits the first wins.

    Args:
        logits: ``[B, V]``, last dimension contiguous; a logit of -inf forbids its token.

    Returns:
        Tokens ``[B]`` int64, and ``[B]`` int8: 1 where a logit is NaN or +inf or all are -inf, and
        then the token means nothing; else 0.

    Raises:
        ValueError: logits are not as above.
    """
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(
            "choose_greedy: logits must be [B, V] with V > 0 and stride 1 in the last dimension, "
            f"got {tuple(logits.shape)} with strides {logits.stride()}"
        )
    if logits.is_cuda:
        from engine_core.kernels.greedy import triton

        return triton.choose_greedy(logits)
    return reference.choose_greedy(logits)
