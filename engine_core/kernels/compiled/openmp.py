"""The OpenMP library that torch uses."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")


class _Place(threading.local):
    """Where this thread is.

    Attributes:
        inside: whether it runs a task of :meth:`OpenMP.each`.
    """

    inside = False


place = _Place()


class OpenMP:
    """Runs functions side by side on torch's threads.

    Attributes:
        found: whether the library is there and offers GCC's interface: libgomp and, on Linux,
            LLVM's and Intel's do.
        parallel: ``GOMP_parallel(function, data, number of threads, flags)``.
        addresses: those of the functions that compiled code calls, by their names.
    """

    def __init__(self) -> None:
        folder = Path(torch.__file__).parent / "lib"
        self.found = False
        self.parallel: Any = None
        self.addresses: dict[str, int] = {}
        try:
            library = ctypes.CDLL(str(next(folder.glob("libtorch_cpu.*"))))
            self.parallel = library.GOMP_parallel
            addresses = {
                name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
                for name in ("omp_get_thread_num", "omp_get_num_threads")
            }
        except (StopIteration, OSError, AttributeError):
            return
        self.parallel.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
        self.parallel.restype = None
        self.addresses = addresses
        self.found = True

    def each(self, tasks: Sequence[Callable[[], _Result]], threads: int) -> list[_Result]:
        """Run functions of Python, each by one of so many threads as soon as one is free.

        torch's operations in them use their own thread alone. An exception ends all of it.

        Returns:
            What they returned, in their order.
        """
        numbered = enumerate(tasks)
        results: dict[int, _Result] = {}
        failures: list[BaseException] = []
        inference = torch.is_inference_mode_enabled()

        def work(_: object) -> None:
            place.inside = True
            try:
                with torch.inference_mode(inference):
                    # The interpreter's lock makes taking the next one a single step.
                    for index, task in numbered:
                        results[index] = task()
                        if failures:
                            return
            except BaseException as error:
                failures.append(error)
            finally:
                place.inside = False

        self.parallel(_TASK(work), None, threads, 0)
        if failures:
            raise failures[0]
        return [results[index] for index in range(len(results))]


_TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def openmp() -> OpenMP:
    """The one library of this process."""
    return OpenMP()
