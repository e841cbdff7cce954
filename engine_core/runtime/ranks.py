"""An executor's side of its ranks, wherever they run: messages to all, and the answers of each."""

from __future__ import annotations

import abc
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from engine_core.configs import EngineConfig, GuidedParams, SchedulerConfig
from engine_core.errors import (
    EngineDeadError,
    EngineError,
    OptionError,
    RemoteTracebackError,
    RequestError,
)
from engine_core.runtime import platform, rank_memory
from engine_core.runtime.compiles import ALL, MEMORY, NOBODY, PATIENCE, START, Compiles
from engine_core.runtime.guided import GrammarCompiler
from engine_core.runtime.memory import CachePlan
from engine_core.runtime.phases import Phases
from engine_core.runtime.runner import PendingStep
from engine_core.runtime.stages import whole_budget
from engine_core.runtime.transport import Transport, send
from engine_core.runtime.worker import WorkerReport
from engine_core.steps import StepPlan, StepResult

if TYPE_CHECKING:
    import torch


class Failure(NamedTuple):
    """A rank's own report of its end.

    Attributes:
        when: seconds by the clock of the rank's machine.
        message: what failed, in a line.
        trace: its traceback.
        error: what was raised, if it is an error of ours.
        rank: the rank's number.
    """

    when: float
    message: str
    trace: str
    error: EngineError | None
    rank: int

    def reraise(self, name: str) -> NoReturn:
        """Raise it in this process; ``name`` is what the rank is called."""
        error = self.error or EngineDeadError(f"{name} failed: {self.message}")
        raise error from RemoteTracebackError(self.trace)


class RanksExecutor(abc.ABC):
    """Ranks in processes of their own, each with a connection; plans go to all of them.

    Every rank of the last stage samples the same tokens from the same gathered logits, so that only
    the first of them answers: rank 0 if there is one stage.
    The others report only failures. A rank that dies or fails ends all of them. On a CPU rank 0 has
    a step's result when every rank has begun to sample; on GPUs its host may be ahead of the others
    by the launches of the steps in flight.

    Attributes:
        ranks_per_machine: the most ranks that one machine has.
    """

    def __init__(
        self, config: EngineConfig, device: torch.device, compiles: Compiles = NOBODY
    ) -> None:
        """Take note of the config; a subclass starts the ranks.

        ``compiles`` are kernels of all ranks, which find them in Triton's cache. What they capture
        must not depend on what one of them has found, so that they know nothing of this.
        """
        size = config.num_ranks
        self.ranks_per_machine = size
        self._config, self._device, self._compiles = config, device, compiles
        # The first of the last stage, which chooses tokens.
        self._answering = size - config.tensor_parallel_size
        # By rank.
        self._connections: list[Connection] = []
        self._answers: list[defaultdict[str, deque[Any]]] = [
            defaultdict(deque) for _ in range(size)
        ]
        self._submitted = self._received = 0  # steps
        # Told of, but not raised yet.
        self._failures: list[Failure] = []
        self._ended: set[int] = set()
        self._ways: list[tuple[Transport, Sequence[Connection]]] = []
        # By a grammar's number, its future once for each rank that has not compiled it yet.
        self._preparing: dict[int, list[Future[None]]] = {}

    def load(self) -> WorkerReport:
        """Load the model on every rank: all layers, and a cache budget that every rank has.

        The phases are those of rank 0, and how long the ranks took besides.
        """
        begin = time.perf_counter()
        if rank_memory.planned_bytes(self._config):
            self._compiles.wait(MEMORY)
        reports: list[WorkerReport] = self._ask_all("load", self._config)
        seconds = time.perf_counter() - begin
        size = self._config.tensor_parallel_size
        stages = [reports[begin : begin + size] for begin in range(0, len(reports), size)]
        each = [(ranks[0].specs, min(rank.cache_budget for rank in ranks)) for ranks in stages]
        specs, budget = each[0]
        if len(stages) > 1:
            block_size = platform.resolve_block_size(self._config, self._device)
            specs, budget = whole_budget(each, block_size)
        phases = reports[0].phases
        # New processes import what they need before they take the message.
        waited = Phases({"ranks": max(0.0, seconds - sum(phases.values()))})
        waited.update(phases)
        return WorkerReport(specs, budget, waited)

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
        self._compiles.wait(START)
        self._ask_all("start", plan, scheduler_config, eos_token_ids, grammar_compiler)

    def prepare(self, params: GuidedParams | None) -> Future[None]:
        """Have every rank compile a request's grammar beside the steps; see :meth:`poll`."""
        future: Future[None] = Future()
        self._preparing[id(future)] = [future] * len(self._connections)
        self._send("prepare", id(future), params)
        return future

    def poll(self) -> None:
        """Take in the ranks' messages, such as that a grammar is compiled."""
        self._read()

    def submit(self, plan: StepPlan) -> PendingStep:
        """Send a step to every rank."""
        self._send("submit", plan)
        self._submitted += 1
        number = self._submitted

        def finish() -> StepResult:
            result, pending.way, pending.num_tokens = self._answer(self._answering, "step")
            self._received += 1
            assert isinstance(result, StepResult), f"a rank answered {result!r} to a step"
            return result

        def is_done() -> bool | None:
            # That a result is not here says nothing: it may be on its way.
            return self._has_come(number) or None

        on_gpu = self._device.type == "cuda"
        pending = PendingStep(finish, plan.num_tokens, is_done=is_done if on_gpu else None)
        return pending

    def _has_come(self, number: int) -> bool:
        """Whether the result of this step is here, without waiting for it."""
        self._failures += self._take_in()
        return self._received + len(self._answers[self._answering]["step"]) >= number

    def wait_for_prompts(self) -> None:
        """Return once no prompt waits for a kernel: at once after :meth:`start`."""
        self._compiles.wait(START)

    def capture_next(self, *, part: bool = False) -> bool:
        """Have all ranks capture one more step, in one go; see :meth:`ModelRunner.capture_next`.

        They agree on it, so that their answers are the same. They do nothing, after a moment,
        before all kernels are compiled.
        """
        del part
        if not self._compiles.ready(ALL, PATIENCE):
            self._compiles.late += 1
            return True
        self._send("capture_next")
        answers = {self._answer(rank, "captured") for rank in range(len(self._connections))}
        assert len(answers) == 1, "ranks disagree on what is captured"
        return bool(answers.pop())

    def leads(self) -> list[dict[int, int]]:
        """How far each rank's host has been ahead of its device since the last call.

        By rank, how often a step was launched while so many before it were not done. At 0 the
        device waited for the host. Only GPUs tell; elsewhere all counts are at 0.
        """
        return self._ask_all("leads")

    def apply_model(self, *_: object) -> NoReturn:
        """Refuse, as ``trace_layers`` does: the model's parts are in other processes.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            f"{sizes(self._config)} keeps the model in processes of its own; leave it out to "
            "trace layers or call apply_model"
        )

    trace_layers = apply_model

    @abc.abstractmethod
    def close(self) -> None:
        """End the ranks; those that do not end within 5 s are killed."""

    @abc.abstractmethod
    def _receive(self) -> None:
        """Wait for a message of any rank, and take it in; raise if a rank has ended."""

    @abc.abstractmethod
    def _fail(self, failures: list[Failure]) -> None:
        """Kill all ranks and raise the cause of what these ranks report.

        ``_ended`` has those whose connection has ended besides. Do nothing if that is not yet, or
        not here, to be told.
        """

    def _send(self, *message: Any) -> None:
        try:
            send(message, self._ways)
        except OSError:
            self._receive()  # Raises with what the rank said before it went.
            raise

    def _ask_all(self, *message: Any) -> list[Any]:
        self._send(*message)
        return [self._answer(rank) for rank in range(len(self._connections))]

    def _answer(self, rank: int, kind: str = "done") -> Any:
        """The next answer of this kind of ``rank``, while all of them are watched.

        Raises:
            EngineError: what a rank raised.
            EngineDeadError: a rank died, or failed for no fault of the user's.
        """
        while not self._answers[rank][kind]:
            if self._failures:
                self._read()
            self._receive()
        return self._answers[rank][kind].popleft()

    def _read(self) -> None:
        """Take in all messages that are here; raise if one says that its rank failed."""
        failures = self._failures + self._take_in()
        self._failures = []
        if failures or self._ended:
            self._fail(failures)

    def _take_in(self) -> list[Failure]:
        failures: list[Failure] = []
        for rank, connection in enumerate(self._connections):
            if rank in self._ended:
                continue
            try:
                while connection.poll():
                    kind, content = connection.recv()
                    if kind == "prepared":
                        self._take_prepared(*content)
                    elif kind == "failed":
                        failures.append(Failure._make((*content, rank)))
                    else:
                        self._answers[rank][kind].append(content)
            except (EOFError, OSError):
                self._ended.add(rank)
        return failures

    def _take_prepared(self, number: int, error: str | None) -> None:
        left = self._preparing[number]
        future = left.pop()
        if error is not None and not future.done():
            future.set_exception(RequestError(error))
        if not left:
            del self._preparing[number]
            if not future.done():
                future.set_result(None)

    def _hang_up(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.close()


def sizes(config: EngineConfig) -> str:
    """The sizes that share a model out, in words, with their values."""
    named = f"tensor_parallel_size {config.tensor_parallel_size}"
    if config.pipeline_parallel_size == 1:
        return named
    return f"{named} with pipeline_parallel_size {config.pipeline_parallel_size}"
