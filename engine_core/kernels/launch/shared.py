"""How much of a multiprocessor's first cache kernels prefer as shared memory.

How large a part that is cannot be changed while programs run. Of a kernel that takes little the
driver makes it small, so that programs of the next one, if they take more, begin on multiprocessors
that are idle alone: late, and many on the same few. And with all of it programs of a kernel that
has fewer than there is room for gather on multiprocessors that are free first.
"""

from __future__ import annotations

import ctypes
import functools
from collections import defaultdict
from typing import Any

import torch
from triton import knobs

# CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of cuFuncSetAttribute.
_CARVEOUT = 9
# A preference that leaves it to the driver.
AS_IT_CHOOSES = -1
# Of an H200's 228 KiB 130, for which its driver takes 132.
HALF = 57

_percents: dict[str, int] = {}
# Loaded kernels of a name, as the driver knows them.
_functions: defaultdict[str, list[int]] = defaultdict(list)


def prefer(name: str, percent: int) -> str:
    """Have kernels of this name in their code prefer so much from now on; returns the name.

    A graph keeps what was preferred when a launch was captured. The driver may do otherwise. Where
    there is no CUDA nothing is asked for.

    Args:
        name: of a kernel that is loaded, or will be.
        percent: of the largest part that a multiprocessor has; ``AS_IT_CHOOSES`` for the driver's
            own choice.
    """
    if _percents.get(name, AS_IT_CHOOSES) != percent:
        _percents[name] = percent
        for function in _functions[name]:
            _tell(function, percent)
    return name


def _loaded(module: Any, function: int, name: str, *more: Any) -> None:
    """Take note of a kernel that was loaded, and tell the driver what it prefers."""
    _functions[name].append(function)
    percent = _percents.get(name, AS_IT_CHOOSES)
    if percent != AS_IT_CHOOSES:
        _tell(function, percent)


def _unloaded(module: Any, function: int, name: str, *more: Any) -> None:
    """Forget a kernel, of which the driver knows no more."""
    # Kernels are unloaded at the end of a process, too, where a module may have no names any more.
    known = _functions.get(name, []) if _functions else []
    if function in known:
        known.remove(function)


def _tell(function: int, percent: int) -> None:
    driver = _driver()
    if driver is not None:
        driver.cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT, percent)


@functools.cache
def _driver() -> Any:
    """CUDA's, which a process that loads kernels for it has; None if there is none."""
    if torch.version.hip is not None:
        return None  # the functions are those of another driver
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


knobs.runtime.kernel_load_end_hook.add(_loaded)
# Triton before 3.8 unloads none.
if hasattr(knobs.runtime, "kernel_unload_hook"):
    knobs.runtime.kernel_unload_hook.add(_unloaded)
