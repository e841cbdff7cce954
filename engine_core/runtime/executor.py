"""Executors, which run a model's ranks in this process or each in one of its own."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine_core import own_process
from engine_core.configs import EngineConfig, GuidedParams, SchedulerConfig
from engine_core.errors import (
    EngineDeadError,
    EngineError,
    ModelError,
    OptionError,
    RemoteTracebackError,
    RequestError,
)
from engine_core.nn import Experts
from engine_core.plugin_code import described
from engine_core.runtime import platform
from engine_core.runtime.guided import GrammarCompiler
from engine_core.runtime.loader import build_on_meta
from engine_core.runtime.memory import CachePlan
from engine_core.runtime.ring import NOTICE_BYTES, MessageRing
from engine_core.runtime.runner import PendingStep
from engine_core.runtime.source import ModelSource, open_model
from engine_core.runtime.stages import StageLink, find_decoder, whole_budget
from engine_core.runtime.worker import Worker, WorkerReport
from engine_core.step_context import BuildContext
from engine_core.steps import StepPlan, StepResult

if TYPE_CHECKING:
    import torch
    from torch import nn

_STOP_SECONDS = 5.0
# Less, so that a rank ends by itself even if its parent is gone.
_LEAVE_SECONDS = 4


def build_executor(source: ModelSource, config: EngineConfig) -> Executor:
    """The executor of ``config.num_ranks`` ranks.

    Raises:
        OptionError: the devices are not those that the ranks need, or the model cannot be split
            over so many.
        ConfigError: its class cannot be built from its config.
    """
    if config.num_ranks == 1:
        return Worker(source, config, BuildContext())
    check_devices(config, source.device)
    # Otherwise each rank would refuse by itself, after all of them were started.
    context = BuildContext(
        tp_size=config.tensor_parallel_size,
        dtype=source.dtype,
        deterministic=config.deterministic,
        kv_cache_dtype=config.kv_cache_dtype,
        expert_parallel=config.enable_expert_parallel,
        model_class=source.registry.model_class,
    )
    model = build_on_meta(source.model_class, source.model_config, context, source.scheme)
    check_experts(config, model)
    check_stages(config, model, pools=source.model_config.pooling is not None)
    return ProcessExecutor(source, config)


def check_devices(config: EngineConfig, device: torch.device) -> None:
    """Refuse more ranks than this machine has GPUs.

    Raises:
        OptionError: there are too few, or ``config.device`` names one of them.
    """
    size = config.num_ranks
    if size == 1 or device.type != "cuda":
        return
    import torch

    if config.device not in ("auto", "cuda"):
        raise OptionError(
            f"{_sizes(config)} takes one GPU per rank, but device is {config.device!r}; set "
            "device='cuda', and CUDA_VISIBLE_DEVICES to choose GPUs"
        )
    count = torch.cuda.device_count()
    if count < size:
        raise OptionError(
            f"{_sizes(config)} takes {size} GPUs, but torch sees {count}; set it to at most {count}"
        )


def check_experts(config: EngineConfig, model: nn.Module) -> None:
    """Refuse to share out the experts of a model that has none.

    Raises:
        OptionError: it is asked for.
    """
    if config.enable_expert_parallel and not any(isinstance(m, Experts) for m in model.modules()):
        raise OptionError(
            f"enable_expert_parallel: {type(model).__name__} has no experts; leave it out"
        )


def check_stages(config: EngineConfig, model: nn.Module, *, pools: bool) -> None:
    """Refuse to cut a model whose layers the core does not know, or that has too few.

    ``pools``: it gives vectors or scores in place of tokens.

    Raises:
        OptionError: it cannot be cut into ``config.pipeline_parallel_size`` stages.
    """
    if config.pipeline_parallel_size > 1:
        find_decoder(model, config.pipeline_parallel_size, pools=pools)


def _sizes(config: EngineConfig) -> str:
    sizes = f"tensor_parallel_size {config.tensor_parallel_size}"
    if config.pipeline_parallel_size == 1:
        return sizes
    return f"{sizes} with pipeline_parallel_size {config.pipeline_parallel_size}"


class ProcessExecutor:
    """Every rank in a spawned process; plans go out in shared memory, results come by pipes.

    Every rank of the last stage samples the same tokens from the same gathered logits, so that only
    the first of them answers: rank 0 if there is one stage.
    The others report only failures. A rank that dies or fails ends all of them. On a CPU rank 0 has
    a step's result when every rank has begun to sample; on GPUs its host may be ahead of the others
    by the launches of the steps in flight.
    """

    def __init__(self, source: ModelSource, config: EngineConfig) -> None:
        """Start the processes; each opens the model anew from its name and ``config``."""
        context = multiprocessing.get_context("spawn")
        size = config.num_ranks
        self._config, self._device = config, source.device
        # The first of the last stage, which chooses tokens.
        self._answering = size - config.tensor_parallel_size
        self._ring = MessageRing(size)
        self._folder = tempfile.TemporaryDirectory(prefix="engine-core-")
        # Torch takes what follows as it is: with %20 for a space it would wait for another folder.
        meeting = f"file://{Path(self._folder.name).absolute()}/rendezvous"
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._answers: list[deque[Any]] = [deque() for _ in range(size)]
        # By a grammar's number, its future once for each rank that has not compiled it yet.
        self._preparing: dict[int, list[Future[None]]] = {}
        # A rank that waits for one that hangs never reads that this process is gone. Any other
        # thread may end long before the process.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_worker_main,
                args=(theirs, self._ring, source.name, config, rank, meeting, parent),
                name=f"engine-core-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def load(self) -> WorkerReport:
        """Load the model on every rank: all layers, and a cache budget that every rank has.

        The phases are those of rank 0.
        """
        reports: list[WorkerReport] = self._ask_all("load")
        size = self._config.tensor_parallel_size
        stages = [reports[begin : begin + size] for begin in range(0, len(reports), size)]
        each = [(ranks[0].specs, min(rank.cache_budget for rank in ranks)) for ranks in stages]
        specs, budget = each[0]
        if len(stages) > 1:
            block_size = platform.resolve_block_size(self._config, self._device)
            specs, budget = whole_budget(each, block_size)
        return WorkerReport(specs, budget, reports[0].phases)

    def start(
        self,
        plan: CachePlan,
        scheduler_config: SchedulerConfig,
        eos_token_ids: tuple[int, ...],
        grammar_compiler: Callable[[], GrammarCompiler] | None,
    ) -> None:
        """Make the cache and the persistent batch on every rank.

        ``grammar_compiler`` is picklable; each rank calls it at its first guided request.
        """
        self._ask_all("start", plan, scheduler_config, eos_token_ids, grammar_compiler)

    def prepare(self, params: GuidedParams | None) -> Future[None]:
        """Have every rank compile a request's grammar beside the steps; see :meth:`poll`."""
        future: Future[None] = Future()
        self._preparing[id(future)] = [future] * len(self._processes)
        self._send("prepare", id(future), params)
        return future

    def poll(self) -> None:
        """Take in the ranks' messages, such as that a grammar is compiled."""
        self._read()

    def submit(self, plan: StepPlan) -> PendingStep:
        """Send a step to every rank."""
        self._send("submit", plan)
        return PendingStep(self._next_result, plan.num_tokens)

    def capture_next(self) -> bool:
        """Capture nothing: on several ranks every kernel is launched by itself."""
        return False

    def apply_model(self, *_: object) -> NoReturn:
        """Refuse, as ``trace_layers`` does: the model's parts are in other processes.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            f"{_sizes(self._config)} keeps the model in processes of its own; leave it out to "
            "trace layers or call apply_model"
        )

    trace_layers = apply_model

    def close(self) -> None:
        """End the processes; those that do not within 5 s are killed."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(_STOP_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def _send(self, *message: Any) -> None:
        data = memoryview(ForkingPickler.dumps(message))
        sent = self._ring.write(data)
        if sent is None:
            assert data.nbytes > NOTICE_BYTES, f"{message} looks like a notice"
            sent = bytes(data)
        for connection in self._connections:
            try:
                connection.send_bytes(sent)
            except OSError:
                self._receive()  # Raises with what its process said before it went.
                raise

    def _ask_all(self, *message: Any) -> list[Any]:
        self._send(*message)
        return [self._answer(rank) for rank in range(len(self._processes))]

    def _next_result(self) -> StepResult:
        result = self._answer(self._answering)
        assert isinstance(result, StepResult), f"a rank answered {result!r} to a step"
        return result

    def _answer(self, rank: int) -> Any:
        """The next answer of ``rank``, while all of them are watched.

        Raises:
            EngineError: what a rank raised.
            EngineDeadError: a rank died, or failed for no fault of the user's.
        """
        while not self._answers[rank]:
            self._receive()
        return self._answers[rank].popleft()

    def _receive(self) -> None:
        """Wait for a message of any rank, and take it in."""
        ready = multiprocessing.connection.wait(
            [*self._connections, *(process.sentinel for process in self._processes)]
        )
        # Read all messages before looking at deaths: a reported failure explains them.
        self._read()
        for rank, process in enumerate(self._processes):
            if process.sentinel in ready:
                process.join()
                self._kill()
                raise EngineDeadError(f"the process of rank {rank} ended {_how(process.exitcode)}")

    def _read(self) -> None:
        failures: list[tuple[float, str, str, EngineError | None, int]] = []
        for rank, connection in enumerate(self._connections):
            with contextlib.suppress(EOFError, OSError):
                while connection.poll():
                    kind, content = connection.recv()
                    if kind == "done":
                        self._answers[rank].append(content)
                        continue
                    if kind == "prepared":
                        self._take_prepared(*content)
                        continue
                    failures.append((*content, rank))
        if failures:
            self._kill()
            # Ranks that wait for one that is gone fail too, after it.
            _, message, trace, error, rank = min(failures, key=itemgetter(0))
            error = error or EngineDeadError(f"rank {rank} failed: {message}")
            raise error from RemoteTracebackError(trace)

    def _take_prepared(self, number: int, error: str | None) -> None:
        left = self._preparing[number]
        future = left.pop()
        if error is not None and not future.done():
            future.set_exception(RequestError(error))
        if not left:
            del self._preparing[number]
            if not future.done():
                future.set_result(None)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


Executor = Worker | ProcessExecutor
"""Runs plans on every rank of a model; the results are asked for in the order of the plans."""


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"by signal {signal.Signals(-code).name}"
    return f"with exit code {code}"


def _worker_main(
    connection: Connection,
    ring: MessageRing,
    model: str,
    config: EngineConfig,
    rank: int,
    meeting: str,
    parent: int | None,
) -> None:
    """The life of one rank's process; it does not outlive ``parent``, if that is known."""
    own_process.claim()
    if parent is not None:
        own_process.die_with(parent)
    # Ctrl-C goes to every process of the terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _serve(connection, ring, model, config, rank, meeting)
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        told, refusal = described(error), error if isinstance(error, EngineError) else None
        if isinstance(error, ModelError) or error.__cause__ is not None:
            # Other errors than those of code are the same on every rank.
            error.args = (f"rank {rank}: {told}", *error.args[1:])
        failure = (time.monotonic(), told, trace, refusal)
        with contextlib.suppress(OSError):  # the parent is gone
            connection.send(("failed", failure))
    # A thread of the process group may still hold tensors of the last collective. If it frees
    # them while the interpreter is shut down, the C++ runtime aborts; so it is not shut down.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or None
            stream.flush()
    os._exit(0)


def _serve(
    connection: Connection,
    ring: MessageRing,
    model: str,
    config: EngineConfig,
    rank: int,
    meeting: str,
) -> None:
    """Obey the parent's messages until it closes the pipe."""
    worker: Worker | None = None
    flight: deque[PendingStep] = deque()
    answers = rank == config.num_ranks - config.tensor_parallel_size
    sending = threading.Lock()

    def tell(number: int, prepared: Future[None]) -> None:
        error = prepared.exception()
        with sending, contextlib.suppress(OSError):  # the parent is gone
            connection.send(("prepared", (number, None if error is None else str(error))))

    while True:
        # A step that is here already is launched before the device is waited for.
        while flight and not connection.poll():
            result = flight.popleft().result()
            if answers:
                with sending:
                    connection.send(("done", result))
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            break
        is_notice = len(message) == NOTICE_BYTES
        command, *arguments = ring.read(message, rank) if is_notice else pickle.loads(message)
        if command == "load":
            worker = _join(model, config, rank, meeting)
            connection.send(("done", worker.load()))
            continue
        assert worker is not None, f"{command} before load"
        if command == "start":
            worker.start(*arguments)
            connection.send(("done", None))
        elif command == "prepare":
            number, params = arguments
            worker.prepare(params).add_done_callback(partial(tell, number))
        else:
            flight.append(worker.submit(*arguments))
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


def _join(model: str, config: EngineConfig, rank: int, meeting: str) -> Worker:
    """Open the model in this process and meet the other ranks."""
    import torch
    import torch.distributed

    from engine_core.registry import build_registry

    size, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    registry = build_registry(config.custom_module_map, plugin_errors=config.plugin_errors)
    if config.device in ("auto", "cuda") and torch.cuda.is_available():
        config = config.replace(device=f"cuda:{rank}")
    source = open_model(model, config, registry)
    if source.device.type == "cuda":
        torch.cuda.set_device(source.device)
        backend = "nccl"
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // config.num_ranks))
        # All ranks are on this machine, whatever its host name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "gloo"
    torch.distributed.init_process_group(
        backend, init_method=meeting, rank=rank, world_size=config.num_ranks
    )
    group: Any = torch.distributed.group.WORLD
    if stages > 1:
        # Every rank takes part in the making of every group.
        groups = [
            torch.distributed.new_group([*range(begin, begin + size)])
            for begin in range(0, config.num_ranks, size)
        ]
        group = groups[rank // size]
    context = BuildContext(tp_rank=rank % size, tp_size=size, process_group=group)
    link = None
    if stages > 1:
        link = StageLink(rank // size, stages, rank % size, size, torch.distributed.new_group())
    return Worker(source, config, context, link)
