"""CPU kernels written in Python, compiled by Numba and run on torch's own OpenMP threads.

Numba is the extra ``[cpu]``; without it the same operations are made of torch's. A kernel is a
function of scalars and addresses; several of it run at once on the threads that torch uses too,
each doing its part (two pools of threads would spin against each other). Compiled code is
kept on the disk, beside the source or in the user's cache folder, and is loaded from there without
Numba (:mod:`engine_core.kernels.compiled.kept`).

An operation's ``native`` module has its kernels and calls them, and imports no Numba. The bodies
are in its ``numba`` module, which does, and is imported where one must be compiled.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from engine_core.kernels.compiled.openmp import openmp, place

__all__ = [
    "Kernel",
    "available",
    "cpu_features",
    "kernels",
    "openmp",
    "recording",
    "run_whole",
    "takes",
    "threads",
]

logger = logging.getLogger(__name__)

_DTYPES = frozenset((torch.float32, torch.bfloat16))


@cache
def available() -> bool:
    """Whether Numba can be imported; if it is installed but fails, a warning says why."""
    if find_spec("numba") is None:
        return False
    try:
        from engine_core.kernels.compiled import kept

        if kept.noted_features() is not None:
            return True  # it was imported before, by a process like this one
        import_module("numba")
    except ImportError as error:
        # It refuses, for example, a NumPy that is newer than it knows.
        logger.warning(
            "no kernels are compiled for the CPU, as numba cannot be imported: %s", error
        )
        return False
    return True


def takes(*tensors: Tensor) -> bool:
    """Whether kernels can be compiled for these tensors: on a CPU, of one supported dtype."""
    dtype = tensors[0].dtype
    if dtype not in _DTYPES or not tensors[0].is_cpu or not available():
        return False
    return all(x.dtype == dtype for x in tensors)


@cache
def kernels(operation: str) -> Any:
    """The module with an operation's compiled kernels."""
    return import_module(f"engine_core.kernels.{operation}.native")


def cpu_features() -> frozenset[str]:
    """The instructions for which kernels are compiled, in LLVM's words: ``"+avx2"``."""
    from engine_core.kernels.compiled import kept

    return kept.cpu_features()


class Kernel:
    """A body that is compiled for each specialisation when that is first asked for.

    Args:
        make: names what gives the body of a specialisation, ``"package.module:function"``; what
            the body closes over are constants to LLVM. The module is imported where code for it
            is not kept yet.
        arguments: their form in terms of :mod:`struct`, each of 8 bytes: ``q`` or ``d``.
        exact: whether sums are added up in the order in which they are written.
    """

    def __init__(self, make: str, arguments: str, *, exact: bool = False) -> None:
        self._module, _, self._make = make.partition(":")
        self._exact = exact
        self._pack = struct.Struct("=" + arguments).pack
        self._compiled: dict[Hashable, _Compiled] = {}

    def run(self, special: tuple[Hashable, ...], parts: int, *arguments: float) -> None:
        """Run ``parts`` of it side by side, and return when all have ended.

        Args:
            special: the arguments of ``make``; each is told from others by its ``repr``.
            parts: at most as many as torch has threads; see :func:`threads`.
            arguments: addresses are those of tensors that outlive the call.
        """
        compiled = self._compiled.get(special)
        if compiled is None:
            compiled = self._compiled[special] = self._load(special)
        packed = self._pack(*arguments)
        if _recording.calls is not None:
            _recording.calls.append(partial(compiled.run, packed, parts))
        compiled.run(packed, parts)

    def _load(self, special: tuple[Hashable, ...]) -> _Compiled:
        """The code of a specialisation, from the disk or compiled now."""
        from engine_core.kernels.compiled import kept

        name = kept.name_of(self._module, self._make, special, exact=self._exact)
        address = kept.load(self._module, name)
        if address is not None:
            return _Compiled(address, None)
        from engine_core.kernels.compiled.numbers import compile_entry, object_code

        make = getattr(import_module(self._module), self._make)
        made = compile_entry(make(*special), exact=self._exact)
        entry, code = object_code(made)
        # What runs is what later processes load.
        address = kept.link(entry, code)
        if address is None:
            logger.info("%s is compiled in each process: its code cannot be linked", name)
            return _Compiled(made.address, made)
        kept.keep(self._module, name, entry, code)
        kept.cpu_features()  # notes that Numba works here
        return _Compiled(address, None)


def threads(work: int, least: int) -> int:
    """The number of parts for ``work`` if each should have at least ``least`` of it."""
    if work < 2 * least or not openmp().found:
        return 1
    return min(torch.get_num_threads(), work // least)


class _Compiled:
    """Machine code of one specialisation, which takes the address of its packed arguments."""

    def __init__(self, address: int, owner: object) -> None:
        """``owner`` is what the code lives in."""
        self._address, self._owner = address, owner
        # The GIL is kept: the call is shorter than releasing and taking it.
        self._call = ctypes.PYFUNCTYPE(None, ctypes.c_char_p)(self._address)

    def run(self, packed: bytes, parts: int) -> None:
        """Run so many parts side by side."""
        # Inside of a task a thread has a number, and takes a part, unless it is a team of its own.
        if parts == 1 and not place.inside:
            self._call(packed)
        else:
            openmp().parallel(self._address, packed, parts, 0)


class _Recording(threading.local):
    calls: list[Callable[[], object]] | None = None


_recording = _Recording()


@contextmanager
def recording(calls: list[Callable[[], object]]) -> Iterator[None]:
    """Also append a repeatable call of each kernel that this thread runs."""
    _recording.calls = calls
    try:
        yield
    finally:
        _recording.calls = None


def run_whole(call: Callable[[], object]) -> None:
    """Run a ``call`` that reads numbers on the host, such as which experts tokens go to.

    It writes to tensors that were made before it. A recording repeats it as one kernel.
    """
    calls = _recording.calls
    if calls is None:
        call()
        return
    calls.append(call)
    _recording.calls = None
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            call()
    finally:
        _recording.calls = calls
