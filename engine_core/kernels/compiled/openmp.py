"""The OpenMP library that torch uses."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch


class OpenMP:
    """Runs functions side by side on torch's threads.

    Attributes:
        found: whether the library is there and offers GCC's interface: libgomp and, on Linux,
            LLVM's and Intel's do.
        parallel: ``GOMP_parallel(function, data, number of threads, flags)``.
    """

    def __init__(self) -> None:
        folder = Path(torch.__file__).parent / "lib"
        self.found = False
        self.parallel: Any = None
        try:
            library = ctypes.CDLL(str(next(folder.glob("libtorch_cpu.*"))))
            self.parallel = library.GOMP_parallel
            addresses = {
                name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value
                for name in ("omp_get_thread_num", "omp_get_num_threads")
            }
        except (StopIteration, OSError, AttributeError):
            return
        self.parallel.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
        self.parallel.restype = None
        binding: Any = import_module("llvmlite.binding")
        for name, address in addresses.items():
            binding.add_symbol(name, address)
        self.found = True


@cache
def openmp() -> OpenMP:
    """The one library of this process."""
    return OpenMP()
