"""Host memory for the blocks of preempted sequences."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_core.errors import CacheMemoryError
from engine_core.runtime.memory import CachePlan
from engine_core.runtime.platform import to_device, total_memory
from engine_core.steps import SwapPairs

# Device memory that blocks are gathered in on their way, so that few large copies cross the bus.
_STAGING_BYTES = 64 * 2**20


def count_swap_blocks(swap_space: int, plan: CachePlan, num_ranks: int) -> int:
    """How many blocks of each cache group fit into ``swap_space`` bytes of host memory.

    Args:
        swap_space: bytes for each of ``num_ranks`` processes; 0 for none.
        plan: the cache whose blocks they are.
        num_ranks: processes of this machine that take as much.

    Raises:
        CacheMemoryError: it holds not one block, or the machine has less memory.
    """
    if swap_space == 0:
        return 0
    if swap_space < plan.bytes_per_block:
        raise CacheMemoryError(
            f"swap_space is {swap_space} bytes, but one block of the KV cache takes "
            f"{plan.bytes_per_block}: raise it, or leave it at 0"
        )
    total = total_memory(torch.device("cpu"))
    if swap_space * num_ranks > total:
        raise CacheMemoryError(
            f"swap_space is {swap_space} bytes for each of {num_ranks} ranks, but the machine has "
            f"{total}: lower it"
        )
    return swap_space // plan.bytes_per_block


@dataclass(frozen=True, slots=True)
class _Group:
    """One cache group: ``[num_blocks, width]`` a key or value tensor, and ``[num_slots, sum]``."""

    layers: list[Tensor]
    host: Tensor


class SwapSpace:
    """Slots of host memory, each for one block of all layers of a cache group, and the copies.

    Copies are queued on the current stream, in order with the steps before and after, and nothing
    waits for them. The memory is page-locked if the cache is on a GPU.
    """

    def __init__(
        self,
        kv_cache: Sequence[tuple[Tensor, Tensor]],
        layer_groups: Sequence[int],
        num_slots: int,
    ) -> None:
        """Take the memory.

        Args:
            kv_cache: keys and values of each layer, ``[num_blocks, block_size, heads, head_dim]``.
            layer_groups: for each layer, the index of its group.
            num_slots: blocks a group.

        Raises:
            CacheMemoryError: the memory cannot be locked.
        """
        self._device = kv_cache[0][0].device
        self._groups = []
        for index in range(max(layer_groups) + 1):
            layers = [
                tensor.view(tensor.shape[0], -1)
                for pair, group in zip(kv_cache, layer_groups, strict=True)
                for tensor in pair
                if group == index
            ]
            width = sum(layer.shape[1] for layer in layers)
            host = torch.empty(num_slots, width, dtype=layers[0].dtype)
            self._groups.append(_Group(layers, host))
        if self._device.type == "cuda":
            for group in self._groups:
                self._lock(group.host)

    def copy_out(self, copies: Sequence[SwapPairs]) -> None:
        """Copy blocks to slots: for each group its ``(block, slot)`` pairs, in order."""
        for group, pairs in zip(self._groups, copies, strict=True):
            for some in _pieces(group, pairs):
                blocks = self._blocks(some)
                staging = torch.cat([layer[blocks] for layer in group.layers], dim=1)
                for line, (_, slot) in zip(staging, some, strict=True):
                    group.host[slot].copy_(line, non_blocking=True)

    def copy_in(self, copies: Sequence[SwapPairs]) -> None:
        """Copy slots to blocks: for each group its ``(block, slot)`` pairs, no block twice."""
        for group, pairs in zip(self._groups, copies, strict=True):
            for some in _pieces(group, pairs):
                staging = torch.empty(
                    len(some), group.host.shape[1], dtype=group.host.dtype, device=self._device
                )
                for line, (_, slot) in zip(staging, some, strict=True):
                    line.copy_(group.host[slot], non_blocking=True)
                blocks = self._blocks(some)
                widths = [layer.shape[1] for layer in group.layers]
                for layer, part in zip(group.layers, staging.split(widths, dim=1), strict=True):
                    layer.index_copy_(0, blocks, part)

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
                f"{size} bytes of host memory for swap_space cannot be locked ({error}): lower it, "
                "or raise the limit of locked memory (ulimit -l)"
            )
        weakref.finalize(self, _unlock, host, self._device)


def _pieces(group: _Group, pairs: SwapPairs) -> list[SwapPairs]:
    """The pairs in runs whose blocks fit the staging memory, or single ones."""
    size = group.host.shape[1] * group.host.element_size()
    most = max(1, _STAGING_BYTES // size)
    return [pairs[start : start + most] for start in range(0, len(pairs), most)]


def _unlock(host: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
