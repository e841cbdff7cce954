"""Kernels whose multiprocessors are to keep half of their first cache as shared memory.

How large a part that is cannot be changed while programs run. Of a kernel that takes little the
driver makes it small, so that programs of the next one, if they take more, begin on multiprocessors
that are idle alone: late, and many on the same few.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from triton import knobs

# CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of cuFuncSetAttribute.
_CARVEOUT = 9
# Of an H200's 228 KiB 130, for which its driver takes 132.
PERCENT = 57

_names: set[str] = set()


def half_shared(name: str) -> str:
    """Have kernels of this name in their code prefer that, once they are loaded; returns the name.

    The driver may do otherwise. Where there is no CUDA nothing is asked for.
    """
    if not _names:
        knobs.runtime.kernel_load_end_hook.add(prefer)
    _names.add(name)
    return name


def prefer(module: Any, function: int, name: str, *more: Any) -> None:
    """Tell the driver, if a kernel that was loaded has such a name."""
    driver = _driver() if name in _names else None
    if driver is not None:
        driver.cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT, PERCENT)


@functools.cache
def _driver() -> Any:
    """CUDA's, which a process that loads kernels for it has; None if there is none."""
    if torch.version.hip is not None:
        return None  # the functions are those of another driver
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
