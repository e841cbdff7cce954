"""Linears that cuBLAS multiplies, with the sums after them left to the norm, or taken from it.

Seen on an H200 in bfloat16, in CUDA graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Fewer have kernels of ours. For more, 896x4864 still gains (512 rows 10.8, 9.5 us) and 4096x4096
# loses (320 rows 17.3, 18.6).
_PARTED_ROWS = range(65, 257)
# No wider ones were seen.
_MOST_COLUMNS = 4096


def choose_parts(rows: int, n: int, k: int) -> int:
    """Parts to cut K into for ``rows`` of 16 bits by a weight ``[n, k]``; 1 to leave it whole.

    us of a linear and of its parts without their sum, at 96 and 256 rows: 4096x4096 15.0, 11.7;
    17.0, 15.2. 4096x14336 37.5, 32.1; 48.7, 43.9. 3584x3584 10.9, 9.6; 12.5, 12.5. 896x4864, in 4
    parts, 8.7, 5.8 (in 2 parts 6.9); 10.4, 6.8. 1536x8960, in 4, 12.4, 9.9; 18.6, 12.9.
    """
    parts = 4 if n <= 2048 and k >= 4 * n else 2
    # Each part's rows begin at a multiple of 16 bytes, as cuBLAS's faster kernels want.
    fits = rows in _PARTED_ROWS and n <= _MOST_COLUMNS and k % (8 * parts) == 0
    return parts if fits else 1


def adds(rows: int) -> bool:
    """Whether the residual costs less as what cuBLAS adds to, in place, than as what the norm adds.

    us of linear, addition and norm, and with the addition in the linear, at 4096 and 8192 rows:
    4096x4096 219, 200; 450, 417. 896x896 17.1, 15.3; 37.2, 32.1. 896x4864 54.0, 52.3; 126.6, 120.8.
    """
    return rows >= _PARTED_ROWS.stop


def partial_sums(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Contiguous ``x [M, K]`` by ``weight [N, K]``: float32 ``[parts, M, N]``, to be added up."""
    return torch.bmm(
        x.view(len(x), parts, -1).transpose(0, 1),
        weight.view(len(weight), parts, -1).permute(1, 2, 0),
        out_dtype=torch.float32,
    )
