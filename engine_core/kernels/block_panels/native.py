"""Panels of blocks, by kernels compiled for a CPU."""

from __future__ import annotations

from torch import Tensor

from engine_core.kernels.compiled import Kernel, threads

# Bytes per thread, at least.
_LEAST = 2**19


def pack_blocks(blocks: Tensor, type_name: str, panels: Tensor) -> None:
    """Write a matrix's blocks as panels.

    Args:
        blocks: ``[rows, blocks of a row, bytes of a block]`` uint8, contiguous, at an even address.
        type_name: of ``FORMS``.
        panels: ``[panels, bytes]`` uint8, contiguous.
    """
    rows, count, _ = blocks.shape
    arguments = blocks.data_ptr(), panels.data_ptr(), rows, count, len(panels)
    _KERNEL.run((type_name,), threads(panels.numel(), _LEAST), *arguments)


_KERNEL = Kernel("engine_core.kernels.block_panels.numba:make", "5q")
