"""The processes of a model's ranks on this machine: forked from this one, or spawned."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from engine_core import own_process
from engine_core.configs import EngineConfig
from engine_core.runtime.rank import Seat, live, prepare
from engine_core.runtime.ring import MessageRing
from engine_core.runtime.transport import RingTransport

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
# A fork says within some ms that it is there. One that does not hangs in a lock of a thread that it
# does not have.
_FORK_SECONDS = 10.0
# It takes a GPU's context, and imports Triton, in a second or two.
_GPU_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class RankProcesses:
    """Ranks that wait to be told to load.

    Attributes:
        ring: brings them messages.
        folder: where they meet.
        processes: by rank.
        connections: to each of them.
        forked: whether they are forks of this process.
    """

    ring: MessageRing
    folder: tempfile.TemporaryDirectory[str] = field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="engine-core-")
    )
    processes: list[BaseProcess] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    forked: bool = False

    def seat(self, rank: int) -> Seat:
        """Rank number ``rank``'s place."""
        # Torch takes what follows as it is: with %20 for a space it would wait for another folder.
        meeting = f"file://{Path(self.folder.name).absolute()}/rendezvous"
        return Seat(rank, meeting, gpu=rank)

    def took_gpus(self) -> bool:
        """Whether each fork has its GPU, which it says once; to be asked before anything else."""
        return _all_say_yes(self.connections, _GPU_SECONDS)

    def kill(self) -> None:
        """Kill them all."""
        for process in self.processes:
            process.kill()

    def end(self) -> None:
        """Kill them all, and leave nothing of them."""
        self.kill()
        self.close()

    def close(self, seconds: float = _STOP_SECONDS) -> None:
        """Hang up, and kill those that have not ended within so many seconds each."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.close()
        for process in self.processes:
            process.join(seconds)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()


def fork_ranks(model: str, config: EngineConfig) -> RankProcesses | None:
    """Ranks that are copies of this process, with all that it has imported.

    They prepare themselves at once. None if a copy may not do what a rank does, which the log says
    then.
    """
    why = _why_not(config)
    ranks = None if why else _forked(model, config)
    if ranks is None:
        logger.info("ranks are started as new processes: %s", why or "a fork did not work")
    return ranks


def spawn_ranks(model: str, config: EngineConfig) -> RankProcesses:
    """Ranks that are new processes, which import what they need."""
    context = multiprocessing.get_context("spawn")
    size = config.num_ranks
    ranks = RankProcesses(MessageRing(size))
    with ended_on_failure(ranks):
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_spawned_main,
                args=(theirs, ranks.ring, model, config, ranks.seat(rank), _parent()),
                name=_name(rank),
                daemon=True,
            )
            with own_process.main_left_out((model, config)):
                process.start()
            theirs.close()
            ranks.connections.append(ours)
            ranks.processes.append(process)
    return ranks


def _name(rank: int) -> str:
    return f"engine-core-rank-{rank}"


def _parent() -> int | None:
    """This process, if its ranks are to die with it.

    A rank that waits for one that hangs never reads that this process is gone. Any other thread
    than the main one may end long before the process.
    """
    return os.getpid() if threading.current_thread() is threading.main_thread() else None


def _why_not(config: EngineConfig) -> str | None:
    """Why ranks cannot be forks of this process; None if nothing is known against it."""
    if not sys.platform.startswith("linux"):
        return "this system is not Linux"
    if threading.active_count() > 1 or _parent() is None:
        return "this process has other threads"
    if torch.cuda.is_initialized() or _has_open("/dev/nvidia-uvm", "/dev/kfd"):
        return "this process has used a GPU"
    threads = torch.get_num_threads() // config.num_ranks
    on_cpu = config.device == "cpu" or not has_gpu()
    if threads > 1 and on_cpu and not own_process.is_claimed():
        # OpenMP reads when it is imported that idle threads leave their cores soon.
        return "each has several threads, and this process has imported torch for itself"
    return None


def has_gpu() -> bool:
    """Whether this machine has a GPU of NVIDIA's that this PyTorch is for; none is asked."""
    return torch.version.cuda is not None and Path("/dev/nvidiactl").exists()


def _has_open(*names: str) -> bool:
    """Whether one of these files is open, as those are that a GPU's driver works with."""
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder's own
            if str(file.readlink()) in names:
                return True
    return False


def _forked(model: str, config: EngineConfig) -> RankProcesses | None:
    ranks = RankProcesses(MessageRing(config.num_ranks), forked=True)
    with ended_on_failure(ranks):
        _fork_all(ranks, model, config)
        if len(ranks.processes) == config.num_ranks and _all_say_yes(
            ranks.connections, _FORK_SECONDS
        ):
            return ranks
    ranks.end()
    return None


@contextmanager
def ended_on_failure(ranks: RankProcesses | None) -> Iterator[None]:
    """Leave none of these processes behind if the ``with`` block fails, or is interrupted."""
    try:
        yield
    except BaseException:
        if ranks is not None:
            ranks.end()
        raise


def _fork_all(ranks: RankProcesses, model: str, config: EngineConfig) -> None:
    """Fork them, up to one for which another thread turned out to be there."""
    context = multiprocessing.get_context("fork")
    with _no_interrupt() as mask:
        for rank in range(config.num_ranks):
            ours, theirs = context.Pipe()
            # Not those of the process itself, by which its end is known.
            inherited = [int(file.name) for file in Path("/proc/self/fd").iterdir()]
            process = context.Process(
                target=_forked_main,
                args=(theirs, ranks.ring, model, config, ranks.seat(rank), os.getpid()),
                kwargs={"inherited": inherited, "mask": mask},
                name=_name(rank),
                daemon=True,
            )
            with warnings.catch_warnings():
                # It counts threads after a library has put its own away for the fork, as we do.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            ranks.connections.append(ours)
            ranks.processes.append(process)
            # OpenBLAS ends its idle threads for a fork. Others, such as OpenMP's, would be missed.
            if len(list(Path("/proc/self/task").iterdir())) > 1:
                break


def _all_say_yes(connections: list[Connection], seconds: float) -> bool:
    """Whether each sends True, and all within so many seconds."""
    until = time.monotonic() + seconds
    try:
        # All are heard, so that no answer is left for whoever reads next.
        said = [
            connection.poll(max(0.0, until - time.monotonic())) and connection.recv()
            for connection in connections
        ]
    except (EOFError, OSError):
        return False
    return all(each is True for each in said)


@contextmanager
def _no_interrupt() -> Iterator[set[signal.Signals]]:
    """Hold Ctrl-C back in the ``with`` block; gives the signals that were held before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield {signal.Signals(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _forked_main(
    connection: Connection,
    ring: MessageRing,
    model: str,
    config: EngineConfig,
    seat: Seat,
    parent: int,
    *,
    inherited: list[int],
    mask: set[signal.Signals],
) -> None:
    """The life of a rank that was forked."""
    own_process.die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    own_process.forget_parent(set(inherited) - {connection.fileno()})
    # True where CUDA was begun before the fork, which the parent may have overlooked.
    connection.send(not torch.cuda._is_in_bad_fork())
    connection.send(prepare(config, seat))
    _live(connection, ring, model, config, seat)


def _spawned_main(
    connection: Connection,
    ring: MessageRing,
    model: str,
    config: EngineConfig,
    seat: Seat,
    parent: int | None,
) -> None:
    """The life of a rank in a new process; it does not outlive ``parent``, if that is known."""
    if parent is not None:
        own_process.die_with(parent)
    _live(connection, ring, model, config, seat)


def _live(
    connection: Connection, ring: MessageRing, model: str, config: EngineConfig, seat: Seat
) -> None:
    live(connection, RingTransport(ring, seat.rank), model, config, seat)
    # A thread of the process group may still hold tensors of the last collective. If it frees
    # them while the interpreter is shut down, the C++ runtime aborts; so it is not shut down.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or None
            stream.flush()
    os._exit(0)
