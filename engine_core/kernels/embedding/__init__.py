"""Looking tokens up in the embedding's matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_core.kernels.embedding import reference

__all__ = ["embed"]


def embed(ids: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
    """The rows of a matrix, or of a rank's part of it, that ids name; on a GPU in one launch.

    Args:
        ids: ``[...]`` int64 or int32.
        weight: ``[R, H]``, contiguous.
        first: the id of the first row, if other ranks have others: ids of these give zeros. None if
            there are all rows. An id of none of them is an error then, which a GPU reports as it
            does that of an index of PyTorch's: by an assertion on the device, after which it cannot
            go on.

    Returns:
        ``[..., H]`` of weight's dtype.

    Raises:
        ValueError: ids or weight are not as above.
        IndexError: an id has no row, on a CPU.
    """
    if weight.dim() != 2 or not weight.is_contiguous():
        raise ValueError(
            "embed: weight must be [R, H], contiguous, got "
            f"{tuple(weight.shape)} with strides {weight.stride()}"
        )
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"embed: ids must be int64 or int32, got {ids.dtype}")
    if weight.is_cuda:
        from engine_core.kernels.embedding import triton

        return triton.embed(ids, weight, first)
    return reference.embed(ids, weight, first)
