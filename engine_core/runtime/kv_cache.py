"""The memory of the paged cache, and each layer's view of it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import torch
from torch import Tensor

from engine_core.configs import CacheTensor
from engine_core.runtime.memory import ALIGNMENT, CachePlan
from engine_core.runtime.platform import to_device

# Planes begin where an allocation of their own would.
_PLANE_ALIGNMENT = 256


class KVCache:
    """One buffer for the blocks of all groups.

    Attributes:
        planes: ``[num_blocks, bytes]`` uint8 each, see :class:`CachePlan`; together all of a block.
        layers: for each layer its tensors, ``[num_blocks, *shape]``, in its spec's order.
    """

    def __init__(self, plan: CachePlan, device: torch.device) -> None:
        """Take the memory. On a CPU the system provides it page by page, as it is written."""
        config = plan.cache_config
        num_blocks = config.num_blocks
        sizes = [-(-num_blocks * size // _PLANE_ALIGNMENT) for size in plan.planes]
        *starts, end = (_PLANE_ALIGNMENT * total for total in accumulate([0, *sizes]))
        buffer = _zeros(end, device)
        self.planes = [
            buffer[start : start + num_blocks * size].view(num_blocks, size)
            for start, size in zip(starts, plan.planes, strict=True)
        ]
        # What is to be zeros in a new block, for each group.
        self._zeroed: list[list[Tensor]] = [[] for _ in config.groups]
        self.layers: list[tuple[Tensor, ...]] = []
        # Where the next tensor of each group lies: its plane, and the byte in it.
        places = [(0, 0)] * len(config.groups)
        for group_id in plan.layer_groups:
            group = config.groups[group_id]
            tensors = []
            for spec in group.spec.tensors(group.block_size):
                plane, offset = places[group_id]
                tensors.append(_view(self.planes[plane], offset, spec))
                if spec.zeroed:
                    self._zeroed[group_id].append(tensors[-1])
                end = offset + -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
                places[group_id] = (plane, end) if len(self.planes) == 1 else (plane + 1, 0)
            self.layers.append(tuple(tensors))

    @property
    def zeroed_groups(self) -> tuple[int, ...]:
        """The groups with tensors that must be zeros in a new block."""
        return tuple(index for index, tensors in enumerate(self._zeroed) if tensors)

    def clear(self, group_id: int, blocks: Sequence[int]) -> None:
        """Fill these tensors of a group with zeros in new blocks, in stream order."""
        tensors = self._zeroed[group_id]
        if not blocks:
            return
        index = to_device(torch.tensor(blocks), tensors[0].device)
        for tensor in tensors:
            tensor.index_fill_(0, index, 0)


def _view(plane: Tensor, offset: int, spec: CacheTensor) -> Tensor:
    """``[num_blocks, *shape]`` of a plane's bytes from ``offset`` of each block on."""
    held: Tensor = plane[:, offset : offset + spec.nbytes].view(getattr(torch, spec.dtype))
    return held.view(len(held), *spec.shape)


def _zeros(size: int, device: torch.device) -> Tensor:
    """``[size]`` bytes of zeros.

    On a CPU the system provides them page by page as they are written, where torch would write all
    of it at once: 4 GiB take 13 s. numpy would ask for pages of 2 MiB, of which the first token
    takes one of each plane: 120 MiB with 30 layers, and 0.2 s where a machine is slow to give them.
    Attention reads small pages as fast, at 1 row and at 16, of 300 to 8000 tokens.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel that knows none
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]
