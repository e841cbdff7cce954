"""Properties of the machine, and the values of "auto" on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine_core import own_process
from engine_core.configs import EngineConfig
from engine_core.errors import CacheMemoryError, ConfigError, shown

_CPU_CACHE_SHARE = 0.4
_CPU_CACHE_MOST = 4 * 2**30
# Left for activations, the sampler's float32 logits and the allocator's rounding.
_GPU_CACHE_SHARE = 0.88
# Bytes. A kernel reads at most 16 at once, and memory is read in lines of 128.
_ALIGNMENT = 128
_CGROUP = Path("/sys/fs/cgroup")


def resolve_device(config: EngineConfig) -> torch.device:
    """The device that ``config.device`` names.

    Raises:
        ConfigError: a GPU is asked for and there is none of that number.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {shown(name)} is none: {error}") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(
                f"device {config.device!r} was asked for, but torch {torch.__version__} sees "
                f"{count} CUDA devices; use device='cpu' or a build of torch for this GPU"
            )
        device = torch.device("cuda", device.index or 0)
    return device


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one in the ``with`` block: Triton launches there, events record there.

    PyTorch keeps a current device per thread, and an engine may be used from several threads.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def cpu_has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU without emulating it."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def resolve_dtype(config: EngineConfig, device: torch.device, own: str | None) -> str:
    """The element type to run with; ``own`` is the checkpoint's, or None if it has none.

    "auto" keeps the checkpoint's own type, but on a CPU takes float32 for float16, and for
    bfloat16 where the CPU cannot multiply it.
    """
    if config.dtype != "auto":
        return config.dtype
    own = own or "bfloat16"
    if device.type == "cpu" and (own == "float16" or not cpu_has_bfloat16()):
        return "float32"
    return own


def resolve_block_size(config: EngineConfig, device: torch.device) -> int:
    """Tokens per cache block."""
    return config.block_size or (16 if device.type == "cpu" else 64)


def _available_memory() -> int:
    """Bytes of main memory that this process may still take, by /proc and its cgroup."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        available = min(available, limit - used)
    except (OSError, ValueError):
        # No cgroup v2, or no limit ("max").
        pass
    return available


def total_memory(device: torch.device) -> int:
    """Bytes that this machine, or the cgroup of this process, has in all for ``device``."""
    if device.type == "cuda":
        total: int = torch.cuda.mem_get_info(device)[1]
        return total
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # No cgroup v2, or no limit ("max").
        memory = min(memory, int((_CGROUP / "memory.max").read_text()))
    return memory


def used_memory(device: torch.device) -> int:
    """Bytes of a GPU that all processes together have taken; 0 for a CPU."""
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def rank_memory(device: torch.device, num_ranks: int) -> int:
    """Bytes of :func:`total_memory` for each rank of a machine with so many.

    Each has a GPU, or all share the host's.
    """
    return total_memory(device) // (num_ranks if device.type == "cpu" else 1)


def sum_in_float32() -> None:
    """Have cuBLAS add up the parts of a split product in float32, whatever the element type.

    On an H200 only products of odd sizes, such as 256 x 4095 x 4104, take another kernel for it.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def check_weights_fit(nbytes: int, device: torch.device) -> None:
    """Refuse weights that the whole machine has no room for.

    Raises:
        CacheMemoryError: ``nbytes`` are more than :func:`total_memory`.
    """
    total = total_memory(device)
    if nbytes > total:
        raise CacheMemoryError(
            f"the weights alone take {nbytes} bytes, but {device} has {total}: take a smaller "
            "dtype, a smaller model or a larger machine"
        )


def cache_budget(config: EngineConfig, device: torch.device, *, pending: int = 0) -> int:
    """Bytes for the KV cache, once the weights are in memory.

    ``pending`` are bytes that will be allocated before the cache, if the weights are not loaded
    yet.
    """
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    if device.type == "cpu":
        ranks = int(os.environ.get(own_process.HOST_RANKS, config.num_ranks))
        sharing = ranks * int(os.environ.get(own_process.HOST_SHARE, 1))
        share = int((_available_memory() // sharing - pending) * _CPU_CACHE_SHARE)
        return max(0, min(share, _CPU_CACHE_MOST))
    free, total = torch.cuda.mem_get_info(device)
    return gpu_cache_budget(free - pending, total)


def gpu_cache_budget(free: int, total: int) -> int:
    """Bytes for the KV cache of a GPU with ``total`` bytes, of which ``free`` are not taken."""
    return max(0, int(free - (1 - _GPU_CACHE_SHARE) * total))


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor where a copy of it to ``device`` does not wait for all work before."""
    return tensor if device.type == "cpu" else tensor.pin_memory()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on ``device``, without waiting for what the device is doing.

    From pageable memory a copy to a GPU would wait for all work before it.
    """
    return pinned(tensor, device).to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, on its way to the host if it is on a GPU: there after all launched before."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class _SeenByGPU:
    """Pinned bytes of the host as tensors on a GPU take them: at the same address."""

    def __init__(self, host: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 2,
        }


def written_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A few bytes as :func:`to_host` brings them, but written by a kernel.

    A copy is made by other hardware of the GPU: before it and after it an H200 is idle for 4 to 9
    us each, and 2 with a kernel. PyTorch does not know when the kernel is done, as it does of
    copies: keep the result until an event behind it is, or what has its memory next is written
    over.

    Args:
        tensor: uint8 and contiguous, on a GPU. If that is not NVIDIA's a copy brings it.
    """
    if torch.version.hip is not None:
        return to_host(tensor)
    host = torch.empty(tensor.shape, dtype=torch.uint8, pin_memory=True)
    seen = torch.as_tensor(_SeenByGPU(host), device=tensor.device)
    if seen.data_ptr() != host.data_ptr():
        # What was pinned beside another GPU, and given back, serves all GPUs. PyTorch takes it to
        # be on that one, and has made a copy for this one.
        return to_host(tensor)
    # What PyTorch calls a copy would be one.
    torch.add(tensor, 0, out=seen)
    return host


def load_written_to_host(tensor: torch.Tensor) -> None:
    """Load the kernel of :func:`written_to_host`, by a tensor like those that it will get.

    Else its first call would, where the device is at work that may wait for the load. The tensor
    stays as it is.
    """
    tensor += 0


def all_to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Host arrays on ``device`` as :func:`to_device` brings one, all in one transfer.

    On a GPU the tensors are parts of one, each as well aligned for kernels as one by itself. The
    pinned memory is the caching allocator's, which knows when the transfer is done; on a CPU the
    tensors are the arrays' own memory.
    """
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return tensors
    # Bytes of each array, and of the gap after it.
    sizes = [size for array in arrays for size in (array.nbytes, -array.nbytes % _ALIGNMENT)]
    pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    host, begin = pinned.numpy(), 0
    for array, gap in zip(arrays, sizes[1::2], strict=True):
        host[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        begin += array.nbytes + gap
    parts = pinned.to(device, non_blocking=True).split(sizes)[::2]
    return [
        part.view(tensor.dtype).view_as(tensor) for tensor, part in zip(tensors, parts, strict=True)
    ]
