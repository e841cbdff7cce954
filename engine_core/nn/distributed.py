"""How layers split over the ranks of a tensor-parallel group and join again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed
from torch import Tensor

from engine_core.kernels import (
    fits_rank_sum,
    rank_gather,
    rank_sum,
    rank_sum_add_norm,
    rms_norm,
)
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


# Its name until torch 2.13.
_gather = getattr(torch.distributed, "all_gather_single", None) or (
    torch.distributed.all_gather_into_tensor
)
_REHEARSING: ContextVar[bool] = ContextVar("engine_core_rehearsing", default=False)
_WITHOUT_RANKS: ContextVar[bool] = ContextVar("engine_core_without_ranks", default=False)


@contextmanager
def rehearsing() -> Iterator[None]:
    """Leave the other ranks out of sums and gathers in the ``with`` block.

    Shapes and types are as ever, and numbers mean nothing: to find out whether this rank by itself
    has the memory and the kernels.
    """
    token = _REHEARSING.set(True)
    try:
        yield
    finally:
        _REHEARSING.reset(token)


def is_rehearsing() -> bool:
    """Whether this is inside of :func:`rehearsing`."""
    return _REHEARSING.get()


@contextmanager
def without_ranks() -> Iterator[None]:
    """Have sums and gathers by ``torch.distributed`` do nothing in the ``with`` block.

    For a process that has no group of ranks; all else is launched as ever.
    """
    token = _WITHOUT_RANKS.set(True)
    try:
        yield
    finally:
        _WITHOUT_RANKS.reset(token)


def _exchange(collective: Callable[..., object], *args: object, context: BuildContext) -> None:
    """Call a collective of ``torch.distributed`` with the group of the ranks."""
    if not _WITHOUT_RANKS.get():
        collective(*args, group=context.process_group)


def all_reduce(x: Tensor, context: BuildContext) -> Tensor:
    """Sum ``x`` over the group; the identity on one rank, and on the meta device.

    On a CPU, through memory that the ranks share, and in deterministic mode, each element is added
    up in float32 in the order of the ranks, and rounded once. Elsewhere the order is NCCL's: it
    depends on the element's place and on the number of elements, and so on what else is in the
    batch. ``x`` may be overwritten.
    """
    if context.tp_size == 1 or x.is_meta or _REHEARSING.get():
        return x
    memory = context.rank_memory
    if memory is not None and x.is_cuda and fits_rank_sum(x, memory):
        return rank_sum(x, memory)
    if x.device.type == "cpu" or context.deterministic:
        return _sum_in_order(x, context)
    _exchange(torch.distributed.all_reduce, x, context=context)
    return x


def all_reduce_add_norm(
    x: Tensor,
    context: BuildContext,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of the sum over the group plus ``bias`` and ``residual``, and what was normalised.

    In one launch, through the ranks' memory; see :func:`~engine_core.kernels.rank_sum_add_norm`.
    """
    if _REHEARSING.get():
        whole = x if bias is None else x + bias
        return rms_norm(whole, weight, eps, residual=residual, offset=offset)
    given = (x, context.rank_memory, bias, residual, weight, eps)
    return rank_sum_add_norm(*given, offset=offset)


# Bytes. Above, each rank adds up a part and sends the sum: all that each sends is then 2 x, not
# one x for each other rank. Below, messages cost more than bytes: it takes twice as many.
_WHOLE_BYTES = 1 << 18


def _sum_in_order(x: Tensor, context: BuildContext) -> Tensor:
    """The sum over the ranks, each element's in the same order however many there are."""
    size = context.tp_size
    whole = x.nbytes <= _WHOLE_BYTES
    padding = 0 if whole else -x.numel() % size
    flat = torch.nn.functional.pad(x.reshape(-1), (0, padding)) if padding else x.reshape(-1)
    parts = flat.new_empty(size, flat.numel() if whole else flat.numel() // size)
    if whole:
        _exchange(torch.distributed.all_gather, [*parts], flat, context=context)
    else:
        _exchange(torch.distributed.all_to_all_single, parts, flat.view_as(parts), context=context)
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    total = total.to(x.dtype)
    if not whole:
        flat = torch.empty_like(flat)
        _exchange(torch.distributed.all_gather, [*flat.view_as(parts)], total, context=context)
        total = flat[: x.numel()]
    return total.view(x.shape)


def all_gather_last_dim(x: Tensor, context: BuildContext) -> Tensor:
    """Join ``[..., N]`` of every rank to ``[..., N * tp_size]`` in rank order."""
    size = context.tp_size
    if size == 1:
        return x
    if x.is_meta or _REHEARSING.get():
        return torch.cat([x] * size, dim=-1)
    memory = context.rank_memory
    if memory is not None and x.is_cuda and fits_rank_sum(x, memory):
        return rank_gather(x, memory)
    parts = x.new_empty(size, *x.shape)
    flat = x.contiguous().view(-1)
    _exchange(_gather, parts.view(-1), flat, context=context)
    # One row, as of a single sequence that decodes, needs no copy.
    return parts.movedim(0, -2).reshape(*x.shape[:-1], -1)
