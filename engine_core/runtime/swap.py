"""Host memory for the blocks of preempted sequences."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from engine_core.errors import CacheMemoryError
from engine_core.runtime.memory import CachePlan
from engine_core.runtime.platform import to_device, total_memory
from engine_core.steps import SwapPairs

# Device memory that blocks are gathered in on their way, so that few large copies cross the bus.
_STAGING_BYTES = 64 * 2**20


def count_swap_blocks(swap_space: int, plan: CachePlan, num_ranks: int) -> int:
    """How many blocks of the cache fit into ``swap_space`` bytes of host memory.

    Args:
        swap_space: bytes for each of ``num_ranks`` processes; 0 for none.
        plan: the cache whose blocks they are.
        num_ranks: processes of this machine that take as much.

    Raises:
        CacheMemoryError: not one block fits, or the machine has less memory.
    """
    if swap_space == 0:
        return 0
    if swap_space < plan.bytes_per_block:
        raise CacheMemoryError(
            f"swap_space is {swap_space} bytes, but one block of the KV cache takes "
            f"{plan.bytes_per_block}: raise swap_space, or set it to 0"
        )
    total = total_memory(torch.device("cpu"))
    if swap_space * num_ranks > total:
        raise CacheMemoryError(
            f"swap_space is {swap_space} bytes for each of {num_ranks} ranks, but the machine has "
            f"{total} bytes: lower swap_space"
        )
    return swap_space // plan.bytes_per_block


class SwapSpace:
    """Slots of host memory, each for one block of the cache, and the copies.

    Copies are queued on the current stream, in order with the steps before and after, and nothing
    waits for them. The memory is page-locked if the cache is on a GPU.
    """

    def __init__(self, planes: Sequence[Tensor], num_slots: int) -> None:
        """Take the memory.

        Args:
            planes: ``[num_blocks, bytes]`` uint8 each, together all of a block.
            num_slots: blocks that there is room for.

        Raises:
            CacheMemoryError: the memory cannot be locked.
        """
        self._planes = list(planes)
        self._widths = [plane.shape[1] for plane in planes]
        self._device = planes[0].device
        self._host = torch.empty(num_slots, sum(self._widths), dtype=torch.uint8)
        if self._device.type == "cuda":
            self._lock(self._host)

    def copy_out(self, pairs: SwapPairs) -> None:
        """Copy blocks to slots, in order."""
        for some in self._pieces(pairs):
            blocks = self._blocks(some)
            staging = torch.cat([plane[blocks] for plane in self._planes], dim=1)
            for line, (_, slot) in zip(staging, some, strict=True):
                self._host[slot].copy_(line, non_blocking=True)

    def copy_in(self, pairs: SwapPairs) -> None:
        """Copy slots to blocks; no block is named twice."""
        for some in self._pieces(pairs):
            staging = torch.empty(
                len(some), self._host.shape[1], dtype=torch.uint8, device=self._device
            )
            for line, (_, slot) in zip(staging, some, strict=True):
                line.copy_(self._host[slot], non_blocking=True)
            blocks = self._blocks(some)
            parts = staging.split(self._widths, dim=1)
            for plane, part in zip(self._planes, parts, strict=True):
                plane.index_copy_(0, blocks, part)

    def _pieces(self, pairs: SwapPairs) -> list[SwapPairs]:
        """The pairs in runs whose blocks fit the staging memory, or single ones."""
        most = max(1, _STAGING_BYTES // self._host.shape[1])
        return [pairs[start : start + most] for start in range(0, len(pairs), most)]

    def _blocks(self, pairs: SwapPairs) -> Tensor:
        return to_device(torch.tensor([block for block, _ in pairs]), self._device)

    def _lock(self, host: Tensor) -> None:
        """Page-lock memory for as long as this object lives.

        torch's own allocator of such memory rounds up to a power of two, and keeps what is freed.
        """
        runtime = torch.cuda.cudart()
        size = host.numel() * host.element_size()
        error = runtime.cudaHostRegister(host.data_ptr(), size, 0)
        if int(error) != 0:
            raise CacheMemoryError(
                f"{size} bytes of host memory for swap_space cannot be locked ({error}): lower "
                "swap_space, or raise the limit of locked memory (ulimit -l)"
            )
        weakref.finalize(self, _unlock, host, self._device)


def _unlock(host: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
