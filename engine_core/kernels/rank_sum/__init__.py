"""Sums over the ranks of a model, through memory that each of them reaches.

Each rank has a region of such memory. Small terms are written into the regions of all others; of
larger ones each rank's own is read by them, and among many ranks each adds up a part for all. Every
element is added up in float32 in the order of the ranks and rounded once, so that neither the
number of elements nor the way changes a bit, and all ranks have the same.

A rank may be a whole sum ahead of another, which still reads. So buffers alternate: a rank writes
to one again only after it has heard, in the sum between, that the others are done with it. How many
sums there were is counted on the device, for a captured sum is replayed any number of times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine_core.kernels.rank_sum import layout
from engine_core.kernels.rank_sum.layout import SIZES, RankMemory, region_bytes

__all__ = [
    "RankMemory",
    "fits_fused_sum",
    "fits_rank_sum",
    "rank_gather",
    "rank_sum",
    "rank_sum_add_norm",
    "region_bytes",
]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fits_rank_sum(x: Tensor, memory: RankMemory) -> bool:
    """Whether :func:`rank_sum` takes a term like ``x``; the same on all ranks."""
    block = layout.plain_block(x.numel())
    return (
        x.dtype in _DTYPES
        and memory.size in SIZES
        and 0 < x.nbytes <= layout.MOST_BYTES
        and layout.held_rows(memory.capacity, block, x.element_size()) > 0
    )


def fits_fused_sum(rows: int, width: int, dtype: torch.dtype, size: int, capacity: int) -> bool:
    """Whether :func:`rank_sum_add_norm` takes so many rows of so many numbers."""
    block = 1 << (width - 1).bit_length()
    return (
        dtype in _DTYPES
        and size in SIZES
        and 64 <= width <= 16384
        and 0 < rows * width * dtype.itemsize <= layout.FUSED_BYTES
        and layout.held_rows(capacity, block, dtype.itemsize) > 0
    )


def rank_sum(x: Tensor, memory: RankMemory) -> Tensor:
    """The sum of every rank's ``x``, each of the same shape and dtype, on a GPU.

    The first one of a shape must not be inside a graph capture.

    Raises:
        ValueError: :func:`fits_rank_sum` does not hold, or x is not on the memory's device.
    """
    _check("rank_sum", x, memory)
    from engine_core.kernels.rank_sum import triton

    return triton.rank_sum(x, memory)


def rank_gather(x: Tensor, memory: RankMemory) -> Tensor:
    """Every rank's ``x [..., N]`` side by side in their order, ``[..., size * N]``, on a GPU.

    The first of a shape must not be inside a graph capture.

    Raises:
        ValueError: :func:`fits_rank_sum` does not hold, or x is not on the memory's device.
    """
    _check("rank_gather", x, memory)
    from engine_core.kernels.rank_sum import triton

    return triton.rank_gather(x, memory)


def rank_sum_add_norm(
    x: Tensor,
    memory: RankMemory,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of the sum over ranks plus a bias and the residual, and what was normalised.

    It rounds as these operations do one by one: :func:`rank_sum`, the bias's addition, and
    :func:`engine_core.kernels.rms_norm` with a residual.

    Args:
        x: ``[..., H]``, this rank's term.
        memory: of the ranks.
        bias: ``[H]``, of the whole sum, or None.
        residual: x's shape and dtype.
        weight: ``[H]``, contiguous.
        eps: added to the mean square.
        offset: as of ``rms_norm``.

    Raises:
        ValueError: shapes do not fit, or :func:`fits_fused_sum` does not hold.
    """
    _check_device("rank_sum_add_norm", x, memory)
    size = x.shape[-1:]
    if weight.shape != size or (bias is not None and bias.shape != size):
        raise ValueError(
            f"rank_sum_add_norm: x is {tuple(x.shape)}, weight {tuple(weight.shape)}, bias "
            f"{None if bias is None else tuple(bias.shape)}; both must be {tuple(size)}"
        )
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"rank_sum_add_norm: residual is {tuple(residual.shape)} {residual.dtype}, x "
            f"{tuple(x.shape)} {x.dtype}; they must agree"
        )
    rows = x.numel() // x.shape[-1]
    if not fits_fused_sum(rows, x.shape[-1], x.dtype, memory.size, memory.capacity):
        raise ValueError(
            f"rank_sum_add_norm: no kernel takes {rows} rows of {x.shape[-1]} {x.dtype} over "
            f"{memory.size} ranks; ask fits_fused_sum"
        )
    from engine_core.kernels.rank_sum import triton

    return triton.rank_sum_add_norm(x, memory, bias, residual, weight, eps, offset=offset)


def _check(op: str, x: Tensor, memory: RankMemory) -> None:
    _check_device(op, x, memory)
    if not fits_rank_sum(x, memory):
        raise ValueError(
            f"{op}: x is {tuple(x.shape)} {x.dtype}, for {memory.size} ranks with room for "
            f"{memory.capacity} bytes; terms of {SIZES} ranks of {_DTYPES} up to "
            f"{layout.MOST_BYTES} bytes are taken"
        )


def _check_device(op: str, x: Tensor, memory: RankMemory) -> None:
    if not x.is_cuda or x.device != memory.addresses.device:
        raise ValueError(
            f"{op}: x is on {x.device}, the ranks' memory on {memory.addresses.device}; both must "
            "be on one GPU"
        )
