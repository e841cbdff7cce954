"""The garbage collector, memory, cores and end of a process that runs an engine and nothing else.

The mains of such a process (the engine process, a rank, a command) call :func:`claim`. In any other
those for the collector and memory do nothing, but for :func:`uncollected`: its objects and its
memory are its user's.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from multiprocessing import spawn
from typing import Any

_PR_SET_PDEATHSIG = 1  # of prctl(2)
# Parameters of mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# A product is compiled for each number of rows, into 0.3 MiB of oneDNN's cache and as much of that
# of ideep, torch's layer over it. Their own limit of 1,024 each comes to 600 MiB, within minutes of
# short chats. What was dropped costs 0.4 ms once more. They are read at the first product.
_PRODUCTS_KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}
# NumPy's library of products starts a thread for each core when it is imported, and gives each its
# memory: with two cores that takes 0.05 s of the import, and as much again on the other core. The
# engine has torch multiply.
_NUMPY_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
# Idle threads of GNU's OpenMP poll for work, milliseconds long unless told otherwise. Where other
# processes want the cores, the working threads wait for them, and whoever polls to the end of its
# turn is not woken in the midst of another's. Two threads beside some ten on two cores decoded 0.7
# tokens a second of SmolLM2, 14 with 2000 turns (40 us), 40 with these (4 us) and 34 with none.
_POLLS = "200"
# In the environment of processes that share the host's memory with others of their kind, how many
# these are: each takes that part of what is free for its KV cache.
HOST_SHARE = "ENGINE_CORE_HOST_SHARE"
# How many ranks of one model this machine has, where they are not all here.
HOST_RANKS = "ENGINE_CORE_HOST_RANKS"
# New objects between two collections of garbage while a process starts. Nearly all of them stay:
# with Python's own 700, to import torch takes 1.4 s of a processor instead of 1.1. A start makes
# 350,000; collections after each 100,000 took 0.12 s.
_STARTING = 1_000_000
_THRESHOLDS = gc.get_threshold()
_claimed = False
_uncollected_lock = threading.Lock()
# How many blocks of :func:`uncollected` run, and whether garbage was collected before the first.
_uncollected, _collects = 0, False
# Held while what multiprocessing tells of the user's program is another's.
_telling = threading.Lock()
# What it tells a spawned process of the program that it is to read.
_TOLD_OF_MAIN = ("init_main_from_name", "init_main_from_path")


def claim() -> None:
    """Declare that this process is the engine's alone, best before NumPy or torch is imported.

    Until :func:`freeze` it seldom collects garbage. It may have as many open files as the system
    allows: pictures in shared memory are one each.
    """
    global _claimed
    _claimed = True
    gc.set_threshold(_STARTING)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # "unlimited", which not every system takes
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for name, count in (_PRODUCTS_KEPT | _NUMPY_THREADS).items():
        os.environ.setdefault(name, count)
    poll_briefly()


def poll_briefly() -> None:
    """Have idle threads of GNU's OpenMP leave their core soon, in this process and its children.

    Where torch was imported before, in its children alone. Whoever has set ``GOMP_SPINCOUNT`` or
    ``OMP_WAIT_POLICY`` is heeded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _POLLS)


def is_claimed() -> bool:
    """Whether this process is the engine's alone."""
    return _claimed


def count_cores() -> int:
    """Cores that this process may run on, which is what OpenMP takes."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def die_with(parent: int) -> None:
    """Be killed when the parent dies, also in the middle of a step that never ends.

    The system takes the end of the parent's thread that started this process for the parent's.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        os._exit(1)


def forget_parent(inherited: Iterable[int]) -> None:
    """Be, after a fork, as a new process would: without what is the parent's, or its user's.

    Its open files, those of ``inherited`` numbers, are another process's connections, by whose end
    somebody is told something, and locks. The numbers stay taken: objects here would close them.
    Handlers of signals and logs go, and streams that stand for the standard ones. What is garbage
    there is not collected here.
    """
    gc.freeze()
    signal.set_wakeup_fd(-1)
    for sent in signal.valid_signals():
        if callable(signal.getsignal(sent)):
            signal.signal(sent, signal.SIG_DFL)
    logging.disable(logging.NOTSET)
    own = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == __package__]
    for logger in (logging.root, *map(logging.getLogger, own)):
        logger.handlers.clear()
        logger.setLevel(logging.WARNING if logger is logging.root else logging.NOTSET)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in inherited:
        with contextlib.suppress(OSError):  # it was the list's own
            # Devices are a terminal, or what a driver has to itself.
            if number > 2 and not stat.S_ISCHR(os.fstat(number).st_mode):
                os.dup2(nowhere, number, inheritable=False)
    os.close(nowhere)


@contextlib.contextmanager
def main_left_out(given: object) -> Iterator[None]:
    """Have processes that this thread spawns in the ``with`` block not read the user's program.

    Python has each of them run it, up to ``if __name__ == "__main__"``. A program without this line
    would make an engine there too, and one that came by stdin is not found. ``given`` is what the
    processes get: if something of it is the program's own, they read the program.
    """
    named = pickle.dumps(given)
    # In a spawned process the program is a module of the second name.
    if b"__main__" in named or b"__mp_main__" in named:
        yield
        return
    thread = threading.get_ident()

    def told(name: str) -> dict[str, Any]:
        data = whole(name)
        if threading.get_ident() == thread:
            for key in _TOLD_OF_MAIN:
                data.pop(key, None)
        return data

    with _telling:
        whole = spawn.get_preparation_data
        spawn.get_preparation_data = told
        try:
            yield
        finally:
            spawn.get_preparation_data = whole


def may_have_children() -> bool:
    """Whether multiprocessing lets this process start others; a worker of its ``Pool`` may not."""
    return not multiprocessing.current_process().daemon


def how_ended(code: int | None) -> str:
    """A process's exit code, below 0 for a signal, in words that follow "it ended"."""
    if code is None or code >= 0:
        return f"with exit code {code}"
    how = f"by signal {signal.Signals(-code).name}"
    unsent = "; if nobody sent it, the system ran out of memory"
    return how + unsent if -code == signal.SIGKILL else how


def freeze(*, collect: bool = False) -> None:
    """Exempt what was made so far from garbage collection: it lives as long as the process.

    A full collection that visits all of it would cost several steps. ``collect`` frees garbage
    before, which takes as long as one such collection.
    """
    if not _claimed:
        return
    if collect:
        gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def thaw() -> None:
    """Undo :func:`freeze`, so that an engine that is closed gives its memory back."""
    if _claimed:
        gc.unfreeze()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage by itself in the ``with`` block, of which several threads may have one."""
    global _uncollected, _collects
    with _uncollected_lock:
        if not _uncollected:
            _collects = gc.isenabled()
            gc.disable()
        _uncollected += 1
    try:
        yield
    finally:
        with _uncollected_lock:
            _uncollected -= 1
            if not _uncollected and _collects:
                gc.enable()


def keep_freed_memory() -> None:
    """Have glibc's malloc keep what is freed for the next request instead of returning it.

    By default it maps tensors beyond a threshold anew, and the system must clear their pages one by
    one: an RMSNorm of 512 x 576 takes 865 us so, and 90 otherwise. The threshold grows by itself,
    but the end of the heap is still given back. What is free now is returned before.
    Another libc is left alone.
    """
    if not _claimed:
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc_trim(0)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Give back to the system what the heap of glibc's malloc keeps free, which takes some ms."""
    if not _claimed:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


__all__ = [
    "claim",
    "count_cores",
    "die_with",
    "forget_parent",
    "freeze",
    "how_ended",
    "is_claimed",
    "keep_freed_memory",
    "main_left_out",
    "may_have_children",
    "poll_briefly",
    "return_freed_memory",
    "thaw",
    "uncollected",
]
