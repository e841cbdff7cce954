"""Kinds of GPUs, by which kernels are chosen; they need not be in this machine."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

# KiB of shared memory that one program may use, by compute capability (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability").
_SHARED_MEMORY = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227}
_LEAST_SHARED_MEMORY = 99


@dataclass(frozen=True, slots=True)
class GPU:
    """An NVIDIA GPU.

    Attributes:
        capability: compute capability.
        shared_memory: bytes of shared memory that one program may use.
        num_multiprocessors: multiprocessors that the programs of a launch are spread over.
    """

    capability: tuple[int, int]
    shared_memory: int
    num_multiprocessors: int

    @classmethod
    def of_capability(cls, capability: tuple[int, int], multiprocessors: int = 132) -> GPU:
        """The GPU of a compute capability; if not said, with the multiprocessors of an H200."""
        shared_memory = _SHARED_MEMORY.get(capability, _LEAST_SHARED_MEMORY)
        return cls(capability, shared_memory * 1024, multiprocessors)


@functools.cache
def gpu_of(device: torch.device) -> GPU | None:
    """The kind of a device that is here; None on a CPU and on other vendors' GPUs."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    properties = torch.cuda.get_device_properties(device)
    return GPU(
        capability=torch.cuda.get_device_capability(device),
        shared_memory=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        num_multiprocessors=properties.multi_processor_count,
    )
