"""The life of one rank: it meets the others, and obeys the messages of its executor."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import traceback
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from engine_core import own_process
from engine_core.configs import EngineConfig
from engine_core.errors import EngineError, ModelError
from engine_core.plugin_code import described
from engine_core.runtime.phases import Phases
from engine_core.runtime.transport import Transport

if TYPE_CHECKING:
    from engine_core.runtime.capture import Agreement
    from engine_core.runtime.runner import PendingStep
    from engine_core.runtime.source import ModelSource
    from engine_core.runtime.stages import StageLink
    from engine_core.runtime.worker import Worker
    from engine_core.step_context import BuildContext

# How long a rank waits for another's word on a capture. The other may compile kernels meanwhile.
_AGREE = timedelta(minutes=10)
# Fewer than the executor waits, so that a rank ends by itself even if that is gone.
_LEAVE_SECONDS = 4


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place among the others.

    Attributes:
        rank: its number.
        meeting: where ranks meet: a file's URI if all are on this machine, else host and port of a
            store of torch's.
        gpu: its GPU's number in its process.
        threads: threads of its CPU kernels; None for this machine's, shared by all ranks.
        name: what messages call it.
        everywhere: whether every error is prefixed with ``name``: others than those of code are
            the same on every rank of one machine.
    """

    rank: int
    meeting: str
    gpu: int
    threads: int | None = None
    name: str = ""
    everywhere: bool = False


def live(
    connection: Connection, transport: Transport, model: str, config: EngineConfig, seat: Seat
) -> None:
    """Obey the executor's messages until it closes the connection, or this rank fails.

    A failure is told: when it was by this machine's clock, what, the traceback, and the error if
    it is one of ours.
    """
    own_process.claim()
    # Ctrl-C goes to every process of the terminal; the executor decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _serve(connection, transport, model, config, seat)
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        told, refusal = described(error), error if isinstance(error, EngineError) else None
        if seat.everywhere or isinstance(error, ModelError) or error.__cause__ is not None:
            error.args = (f"{seat.name or f'rank {seat.rank}'}: {told}", *error.args[1:])
        failure = (time.monotonic(), told, trace, refusal)
        with contextlib.suppress(OSError):  # the executor is gone
            connection.send(("failed", failure))


def _serve(
    connection: Connection, transport: Transport, model: str, config: EngineConfig, seat: Seat
) -> None:
    worker: Worker | None = None
    flight: deque[PendingStep] = deque()
    # How many steps the device still had before it when one was launched, and how often.
    leads: Counter[int] = Counter()
    answers = seat.rank == config.num_ranks - config.tensor_parallel_size
    sending = threading.Lock()

    def tell(number: int, prepared: Future[None]) -> None:
        error = prepared.exception()
        with sending, contextlib.suppress(OSError):  # the executor is gone
            connection.send(("prepared", (number, None if error is None else str(error))))

    while True:
        # A step that is here already is launched before the device is waited for.
        while flight and not connection.poll():
            pending = flight.popleft()
            result = pending.result()
            if answers:
                with sending:
                    connection.send(("step", (result, pending.way, pending.num_tokens)))
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            break
        command, *arguments = transport.unpack(message)
        if command == "load":
            (config,) = arguments
            worker, phases = _join(model, config, seat)
            report = worker.load()
            phases.update(report.phases)
            with sending:
                connection.send(("done", replace(report, phases=phases)))
            continue
        assert worker is not None, f"{command} before load"
        if command == "start":
            worker.start(*arguments)
            with sending:
                connection.send(("done", None))
        elif command == "prepare":
            number, params = arguments
            worker.prepare(params).add_done_callback(partial(tell, number))
        elif command == "leads":
            with sending:
                connection.send(("done", dict(leads)))
            leads.clear()
        elif command == "capture_next":
            more = worker.capture_next()
            with sending:
                connection.send(("captured", more))
        else:
            pending = worker.submit(*arguments)
            leads[sum(before.done is False for before in flight)] += 1
            flight.append(pending)
    if worker is None:
        return
    # A step in flight, or NCCL, may wait for a rank that is dead. The signal ends this process
    # whatever holds the GIL.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LEAVE_SECONDS)
    del worker
    _leave()
    signal.alarm(0)


def _leave() -> None:
    """Leave the process group, whose other ranks may be gone."""
    import torch.distributed

    # The model's layers know the group, and each other.
    own_process.thaw()
    gc.collect()
    torch.distributed.destroy_process_group()


def _gpu_of(seat: Seat) -> int:
    """The number of a rank's GPU in its process."""
    return seat.gpu


def _backend_of(device: str) -> str:
    """The backend of ``torch.distributed`` for tensors on devices of this type."""
    return "nccl" if device == "cuda" else "gloo"


def prepare(config: EngineConfig, seat: Seat) -> bool:
    """Do what any model's rank must do, while the executor is still busy with its own part.

    What fails here fails again where it is needed, and is told then.

    Returns:
        Whether it has its GPU.
    """
    own_process.claim()
    taken = False
    with contextlib.suppress(Exception):
        import torch

        from engine_core.runtime import rank_memory

        rank_memory.keep_off_multicast()
        if config.device in ("auto", "cuda") and torch.cuda.is_available():
            torch.cuda.set_device(_gpu_of(seat))
            torch.zeros(1, device="cuda")  # which takes the GPU's context
            taken = True
            for needed in ("torch.distributed._symmetric_memory", "triton"):
                import_module(needed)
    return taken


def _join(model: str, config: EngineConfig, seat: Seat) -> tuple[Worker, Phases]:
    """Open the model in this process and meet the other ranks; the seconds of either besides."""
    from engine_core.runtime.worker import Worker

    phases = Phases()
    with phases.timed("rank open"):
        config, source = _open(model, config, seat)
    with phases.timed("rank meet"):
        group, link, agreement = _meet(source, config, seat)
    with phases.timed("rank memory"):
        context = _context(source, config, seat, group, agreement)
    return Worker(source, config, context, link, agreement), phases


def _open(model: str, config: EngineConfig, seat: Seat) -> tuple[EngineConfig, ModelSource]:
    """The model, and the config with this rank's device."""
    import torch

    from engine_core.registry import build_registry
    from engine_core.runtime.source import open_model

    registry = build_registry(config.custom_module_map, plugin_errors=config.plugin_errors)
    if config.device in ("auto", "cuda") and torch.cuda.is_available():
        config = config.replace(device=f"cuda:{_gpu_of(seat)}")
    # The engine's process has said how it runs, but not what becomes of the tensors.
    source = open_model(model, config, registry, quiet=True)
    if source.scheme is not None:
        source.scheme.quiet = seat.rank > 0
    if source.device.type == "cuda":
        torch.cuda.set_device(source.device)
    else:
        threads = seat.threads or torch.get_num_threads() // config.num_ranks
        torch.set_num_threads(max(1, threads))
    return config, source


def _meet(
    source: ModelSource, config: EngineConfig, seat: Seat
) -> tuple[Any, StageLink | None, Agreement | None]:
    """The group of this rank's stage, its place among stages, and what captures are agreed by."""
    import torch.distributed

    from engine_core.runtime import capture, rank_memory
    from engine_core.runtime.stages import StageLink

    rank, size, stages = seat.rank, config.tensor_parallel_size, config.pipeline_parallel_size
    if source.device.type == "cpu" or "://" in seat.meeting:
        # Unless told otherwise all ranks are on this machine, whatever its host name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = _backend_of(source.device.type)
    rank_memory.keep_off_multicast()
    meeting: dict[str, Any] = {"init_method": seat.meeting}
    if "://" not in seat.meeting:
        host, _, port = seat.meeting.rpartition(":")
        stores: Any = torch.distributed  # exports TCPStore without saying so
        meeting = {"store": stores.TCPStore(host, int(port), is_master=False)}
    torch.distributed.init_process_group(backend, rank=rank, world_size=config.num_ranks, **meeting)
    group: Any = torch.distributed.group.WORLD
    if stages > 1:
        # Every rank takes part in the making of every group.
        groups = [
            torch.distributed.new_group([*range(begin, begin + size)])
            for begin in range(0, config.num_ranks, size)
        ]
        group = groups[rank // size]
        link = StageLink(rank // size, stages, rank % size, size, torch.distributed.new_group())
        return group, link, None
    if capture.capturer_of(source.device) is None:
        return group, None, None
    # Hosts speak to each other beside what their devices do.
    talk = torch.distributed.new_group(timeout=_AGREE, backend="gloo")
    return group, None, capture.Agreement(talk)


def _context(
    source: ModelSource, config: EngineConfig, seat: Seat, group: Any, agreement: Agreement | None
) -> BuildContext:
    """The build context of this rank's layers, with memory for sums if there can be some.

    It is taken before the weights, so that it is known when the cache is planned.
    """
    from engine_core.runtime import rank_memory
    from engine_core.step_context import BuildContext

    memory, size = None, config.tensor_parallel_size
    if agreement is not None and source.device.type == "cuda" and config.rank_sums == "auto":
        memory = rank_memory.share_memory(agreement, group, source.device)
    return BuildContext(
        tp_rank=seat.rank % size, tp_size=size, process_group=group, rank_memory=memory
    )
