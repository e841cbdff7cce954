"""How layers split over the ranks of a tensor-parallel group and join again."""

from __future__ import annotations

import torch
import torch.distributed
from torch import Tensor

from engine_core.step_context import BuildContext


class IndivisibleError(ValueError):
    """A part of a model does not split evenly over the ranks."""


def divide(total: int, parts: int, what: str) -> int:
    """``total / parts``.

    Raises:
        IndivisibleError: it is not whole; names ``what``.
    """
    if total % parts:
        raise IndivisibleError(
            f"{what} ({total}) is not divisible by tensor_parallel_size ({parts})"
        )
    return total // parts


def split_heads(num_heads: int, context: BuildContext, what: str) -> tuple[int, int]:
    """How many heads this rank keeps, and the first: of fewer heads than ranks, several keep one.

    Raises:
        IndivisibleError: they do not split evenly; names ``what``.
    """
    size, rank = context.tp_size, context.tp_rank
    if num_heads >= size:
        count = divide(num_heads, size, f"number of {what} heads")
        return count, rank * count
    if size % num_heads:
        raise IndivisibleError(
            f"tensor_parallel_size ({size}) is not divisible by the number of {what} heads "
            f"({num_heads})"
        )
    return 1, rank // (size // num_heads)


def all_reduce(x: Tensor, context: BuildContext) -> Tensor:
    """Sum ``x`` over the group, in place; the identity on one rank, and on the meta device."""
    if context.tp_size > 1 and not x.is_meta:
        torch.distributed.all_reduce(x, group=context.process_group)
    return x


def all_gather_last_dim(x: Tensor, context: BuildContext) -> Tensor:
    """Join ``[..., N]`` of every rank to ``[..., N * tp_size]`` in rank order."""
    if context.tp_size == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(context.tp_size)]
    if x.is_meta:
        return torch.cat(parts, dim=-1)
    torch.distributed.all_gather(parts, x.contiguous(), group=context.process_group)
    return torch.cat(parts, dim=-1)
