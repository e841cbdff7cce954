"""Codes in blocks, by a kernel compiled for a CPU."""

from __future__ import annotations

from torch import Tensor

from engine_core.kernels.compiled import Kernel, threads

# Bytes per thread, at least.
_LEAST = 2**19


def pack_blocks(pairs: Tensor, block: int, out: Tensor) -> None:
    """See :func:`engine_core.kernels.code_blocks.pack_blocks`; both are aligned to 8 bytes."""
    rows, width = pairs.shape
    arguments = pairs.data_ptr(), out.data_ptr(), rows, width // 8
    _KERNEL.run((block,), threads(pairs.numel(), _LEAST), *arguments)


_KERNEL = Kernel("engine_core.kernels.code_blocks.numba:make", "4q")
