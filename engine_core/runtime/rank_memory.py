"""Memory of GPUs that all ranks of a model read, for sums over the ranks."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from engine_core.configs import EngineConfig
from engine_core.kernels import RankMemory, rank_gather, rank_sum
from engine_core.kernels.rank_sum.layout import PROGRAMS, SIZES, region_bytes
from engine_core.runtime.capture import Agreement, AttemptError, agreed

logger = logging.getLogger(__name__)

# Bytes that ranks exchange at a time; larger sums go on with the same buffers. So these stay in the
# GPU's cache of 50 MB. Each program has room for four rows of 8 KB.
_CAPACITY = 8 << 20
# CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the driver.
_NATIVE_ATOMICS = 3
# Two ranks on one GPU, as tests have them; torch reads it too.
_SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def planned_bytes(config: EngineConfig) -> int:
    """Bytes of each GPU that memory for sums takes, if the GPUs can have it; 0 if none is made."""
    size = config.tensor_parallel_size
    if config.pipeline_parallel_size > 1 or config.rank_sums == "nccl" or size not in SIZES:
        return 0
    return region_bytes(size, _CAPACITY)


def keep_off_multicast() -> None:
    """Leave NVLink multicast off, for NCCL and for symmetric memory, unless the user set it.

    To be called before either is first used.
    """
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def share_memory(
    agreement: Agreement, group: Any, device: torch.device, capacity: int = _CAPACITY
) -> RankMemory | None:
    """Memory for sums, ``capacity`` bytes at a time; None, and a log line, if a rank can have none.

    A collective of the ranks, each on a GPU of its own. ``group`` is their ``torch.distributed``
    group, whose store torch's symmetric memory uses to exchange handles.
    """
    try:
        agreed(agreement, lambda: _check_alone(agreement.size))
        _check_together(agreement.gather(_place(device)), device, agreement)
        nbytes = region_bytes(agreement.size, capacity)
        region = agreed(agreement, lambda: _allocate(nbytes, device))
        memory = agreed(agreement, lambda: _meet(agreement, group, region, capacity))
        agreed(agreement, lambda: _try(memory))
    except AttemptError as error:
        if agreement.rank == 0:
            logger.info("sums over ranks go by NCCL: %s", error)
        return None
    return memory


def _check_alone(size: int) -> None:
    if size not in SIZES:
        raise RuntimeError(f"{size} ranks; kernels are for 2, 4 and 8")
    if find_spec("triton") is None:
        raise RuntimeError("triton is not installed")
    if torch.version.hip is not None:
        raise RuntimeError("kernels are for NVIDIA's GPUs")


def _place(device: torch.device) -> tuple[str, str]:
    """The machine of a rank, and its GPU there."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    return machine, str(torch.cuda.get_device_properties(device).uuid)


def _check_together(
    places: list[tuple[str, str]], device: torch.device, agreement: Agreement
) -> None:
    """Refuse ranks of several machines, and GPUs that cannot reach each other's memory."""

    def check() -> None:
        machine, own = places[agreement.rank]
        count = torch.cuda.device_count()
        numbers = {
            str(torch.cuda.get_device_properties(number).uuid): number for number in range(count)
        }
        for rank, (other_machine, other) in enumerate(places):
            if other_machine != machine:
                raise RuntimeError(f"rank {rank} is on another machine")
            if rank == agreement.rank:
                continue
            if other == own:
                if not os.environ.get(_SHARED_GPU):
                    raise RuntimeError(f"rank {rank} is on the same GPU")
            elif other not in numbers:
                raise RuntimeError(f"the GPU of rank {rank} is not visible to this process")
            elif not torch.cuda.can_device_access_peer(device, numbers[other]):
                raise RuntimeError(f"its GPU cannot read that of rank {rank}")
            elif not _carries_atomics(numbers[own], numbers[other]):
                raise RuntimeError(
                    f"its link to the GPU of rank {rank} carries no atomic operations"
                )

    agreed(agreement, check)


def _carries_atomics(own: int, other: int) -> bool:
    """Whether a GPU's atomic operations reach another's memory; also if the driver does not say.

    Flags are told by them. NVLink carries them, and PCIe as a rule does not, though reads and
    writes go over it.
    """
    able = ctypes.c_int(1)
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute
    except (OSError, AttributeError):
        return True
    failed = ask(ctypes.byref(able), _NATIVE_ATOMICS, own, other)
    return bool(failed) or able.value != 0


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.empty(nbytes, dtype=torch.uint8, device=device).zero_()


def _meet(agreement: Agreement, group: Any, region: torch.Tensor, capacity: int) -> RankMemory:
    import torch.distributed._symmetric_memory as symmetric

    handle = symmetric.rendezvous(region, group)
    buffers = [
        handle.get_buffer(rank, tuple(region.shape), torch.uint8) for rank in range(agreement.size)
    ]
    addresses = [buffer.data_ptr() for buffer in buffers]
    if addresses[agreement.rank] != region.data_ptr() or any(each % 128 for each in addresses):
        raise RuntimeError(f"torch gave the regions {addresses}, own {region.data_ptr()}")
    # Zeros are there before anybody's first sum: what follows is agreed on.
    torch.cuda.synchronize(region.device)
    return RankMemory(
        agreement.rank,
        agreement.size,
        torch.tensor(addresses, dtype=torch.int64, device=region.device),
        torch.zeros(PROGRAMS, dtype=torch.int32, device=region.device),
        capacity,
        (region, handle, buffers),
    )


def _try(memory: RankMemory) -> None:
    """Compare what is summed and gathered with what it has to be."""
    for what, found, expected in trials(memory):
        if not torch.equal(found, expected):
            raise RuntimeError(f"{what} was wrong")


def trials(memory: RankMemory) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """A sum in each way that so many ranks take, and a gather, of numbers with known results.

    Gives for each what it is, what the ranks computed and what is right.
    """
    device, size = memory.addresses.device, memory.size
    for count in (1000, 200_000, 1_000_000):
        # No sum is more than 256, up to which a bfloat16 is exact.
        x = torch.arange(count, device=device).remainder(16).bfloat16()
        found = rank_sum(x + memory.rank, memory)
        yield f"a sum of {count} numbers", found, x * size + size * (size - 1) // 2
    ranks = torch.arange(size, device=device).bfloat16()
    gathered = rank_gather(ranks[memory.rank].expand(3, 5), memory)
    yield "what ranks gathered", gathered[1, ::5], ranks


def unshared(config: EngineConfig, rank: int, device: torch.device) -> RankMemory | None:
    """A rank's memory on a GPU that is not there.

    None where :func:`share_memory` gives none.
    """
    size = config.tensor_parallel_size
    if planned_bytes(config) == 0:
        return None
    addresses, epochs = (
        torch.zeros(count, dtype=dtype, device=device)
        for count, dtype in ((size, torch.int64), (PROGRAMS, torch.int32))
    )
    return RankMemory(rank, size, addresses, epochs, _CAPACITY)
