"""Kernels that other processes compile while an engine starts."""

from __future__ import annotations

import logging
import math
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from engine_core import own_process
from engine_core.configs import EngineConfig
from engine_core.engine.interrupts import held_interrupt
from engine_core.engine.startup import Opened
from engine_core.kernels import GPU, gpu_of
from engine_core.plugin_code import described
from engine_core.runtime.compiles import NOBODY, CompileProcess, Compiles, Forked
from engine_core.runtime.executor import takes_ray
from engine_core.runtime.rank_processes import has_gpu

logger = logging.getLogger(__name__)

_MOST_PROCESSES = 32
_MAIN = """
import os, sys
events = os.dup(1)
os.dup2(2, 1)  # a model's code may print
from engine_core import own_process
own_process.die_with(int(sys.argv[1]))
from engine_core.engine.rehearsal import live
live(0, events)
"""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A start that is to be rehearsed.

    Attributes:
        model: as the user named it.
        config: the engine's settings.
        gpu: where it will run.
        memory: bytes of the GPU that are free, and all of them.
        processes: how many compile at once.
    """

    model: str
    config: EngineConfig
    gpu: GPU
    memory: tuple[int, int]
    processes: int


@dataclass(slots=True)
class Begun:
    """The process that compiles for a start, kept here as soon as there is one.

    Attributes:
        process: None if there is none, or none yet.
    """

    process: CompileProcess | None = None

    def close(self) -> None:
        """End it if there is one."""
        if self.process is not None:
            self.process.close()
            self.process = None


@contextmanager
def begun_early(config: EngineConfig) -> Iterator[Begun]:
    """A process for :func:`compile_beside`, where no kernels are kept; none if it is not known.

    It imports what it needs while this one asks the GPU, for some tenths of a second. What compiles
    is ended, also if it was begun later, if the ``with`` block, in which the model is opened and
    loaded, fails or is interrupted.
    """
    from engine_core.engine import kept_kernels

    begun = Begun()
    try:
        try:
            # Ranks are forked after it, which they are not from a process that has a thread.
            if config.num_ranks == 1 and _may_compile(config) and has_gpu():
                with held_interrupt():
                    begun.process = None if kept_kernels.has_notes() else _fork_if_alone()
        except Exception as error:
            logger.warning("kernels are not compiled ahead so soon: %s", described(error))
        yield begun
    except BaseException:
        begun.close()
        raise


def compile_beside(opened: Opened, begun: Begun) -> Compiles:
    """Have other processes compile what a start on a GPU will launch, unless it was before.

    Nobody does where that is off, where nothing is captured, and for ranks of other machines. No
    start fails by this: whatever goes wrong is a line of the log. ``begun`` has the process that
    was begun for it, if one was, and afterwards the one that compiles.
    """
    try:
        if _begin(opened, begun) and begun.process is not None:
            return begun.process
    except Exception as error:
        logger.warning("kernels are not compiled ahead: %s", described(error))
    begun.close()
    return NOBODY


def _may_compile(config: EngineConfig) -> bool:
    """Whether steps are captured with these settings, by kernels that are compiled here."""
    return not (
        config.device == "cpu"
        or config.compile_processes == 0
        or config.eager
        or config.pipeline_parallel_size > 1
        or find_spec("triton") is None
        or os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    )


def _begin(opened: Opened, begun: Begun) -> bool:
    """Whether a process was told to compile; False if there is nothing to do for it."""
    from engine_core.engine import kept_kernels

    source, config = opened.source, opened.config
    if not (
        source.device.type == "cuda"
        and _may_compile(config)
        and not (config.num_ranks > 1 and takes_ray(config, source.device))
        and source.model_config.pooling is None
        and source.state_known
    ):
        return False
    # To ask for the kind of the GPU takes no memory of it yet.
    gpu = gpu_of(source.device)
    if begun.process is None and not kept_kernels.may_be_kept(source, config, gpu):
        ranks = [] if opened.ranks is None else opened.ranks.connections
        with held_interrupt():
            begun.process = _fork_if_alone(ranks)
    task = _task(opened, gpu)
    if task is None:
        return False
    if begun.process is None:
        with held_interrupt():
            begun.process = _spawn()
    begun.process.send(pickle.dumps(task))
    return True


def _fork_if_alone(connections: Iterable[Connection] = ()) -> CompileProcess | None:
    """A fork; None if this process has other threads, which might hold a lock."""
    return _fork(connections) if threading.active_count() == 1 else None


def _task(opened: Opened, gpu: GPU | None) -> Rehearsal | None:
    """The start to rehearse; None if all kernels are there, or the GPU is not NVIDIA's."""
    source, config = opened.source, opened.config
    if gpu is None:
        return None
    from engine_core.engine import kept_kernels

    if kept_kernels.are_kept(kept_kernels.made_for(source, config, gpu)):
        return None
    processes = config.compile_processes or min(_MOST_PROCESSES, usable_cores())
    if config.num_ranks > 1:  # to ask for what is free would take memory of a rank's GPU
        total = torch.cuda.get_device_properties(source.device).total_memory
        memory = total, total
    else:
        memory = torch.cuda.mem_get_info(source.device)
    return Rehearsal(source.name, config, gpu, memory, processes)


def _fork(connections: Iterable[Connection]) -> CompileProcess:
    """A copy of this process, which has imported most of what it needs.

    There is no other thread of Python's, which might hold a lock. The copy leaves CUDA alone, and
    does not keep these ``connections`` of this process, by whose end somebody is told something.
    """
    task, events = os.pipe(), os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's threads hold no locks
        pid = os.fork()
    if pid == 0:
        try:
            own_process.die_with(parent)
            for connection in connections:
                connection.close()
            os.close(task[1])
            os.close(events[0])
            nowhere = os.open(os.devnull, os.O_RDWR)
            for standard in range(3):  # a model's code may print, and what fails is in an event
                os.dup2(nowhere, standard)
            torch.set_num_threads(1)  # those of the parent's pool are not here
            from engine_core.engine.rehearsal import live

            live(task[0], events[1])
        finally:
            os._exit(1)
    os.close(task[0])
    os.close(events[1])
    return CompileProcess(Forked(pid), os.fdopen(task[1], "wb"), os.fdopen(events[0], "rb"))


def _spawn() -> CompileProcess:
    """A new process."""
    from triton import knobs

    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",  # what PyTorch would ask a GPU for would take memory
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_CACHE_DIR": str(knobs.cache.dir),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # what fails is in an event
        env=environment,
    )
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    return CompileProcess(process, process.stdin, process.stdout)


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use, rounded up where a container has a part of their time."""
    return max(1, math.ceil(min(own_process.count_cores(), _quota(cgroup))))


def _quota(cgroup: Path) -> float:
    """How many cores' time the control group may take; infinite if nothing says so."""
    first = cgroup / "cpu"
    for files in ([cgroup / "cpu.max"], [first / "cpu.cfs_quota_us", first / "cpu.cfs_period_us"]):
        try:  # in microseconds; -1 or "max" for no limit
            quota, period = map(int, " ".join(file.read_text() for file in files).split())
            if quota > 0:
                return quota / period
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return math.inf
