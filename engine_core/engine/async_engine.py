"""An engine in a process of its own, driven from an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import socket
import time
import weakref
from array import array
from collections import Counter, abc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from engine_core.cache import BlockKey, extend_block_keys
from engine_core.configs import EngineConfig, ModelConfig, PoolingParams, SamplingParams
from engine_core.engine.arguments import WarmUp, check_model_and_config
from engine_core.engine.frontend import (
    Frontend,
    HasFrontend,
    Prompt,
    State,
    TokenizedPrompt,
    choose_tokenizer,
    with_texts,
)
from engine_core.engine.process import Found, Ready
from engine_core.engine.replica import ProcessReplica, Replica, environments
from engine_core.engine.router import Router, Ticket, Why
from engine_core.engine.shared_count import SharedCount
from engine_core.engine.timings import Timings
from engine_core.engine.trace import EngineTrace, FrontendTrace, OutputRecord, RequestRecord
from engine_core.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    ErrorCode,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
)
from engine_core.inputs import InputProcessor
from engine_core.registry import build_registry
from engine_core.runtime.memory import CachePlan
from engine_core.scheduler import Sequence, check_sequence
from engine_core.steps import EngineStats, NewSequence, RequestOutput, TokenUpdate
from engine_core.text import Tokenizer

logger = logging.getLogger(__name__)

Launch = Callable[[int], Awaitable[Replica]]
"""Starts the replica of a number; it may still be loading when it is returned."""

_NOTHING = EngineStats()
# Blocks of a prompt that are looked at to choose a replica: hashing takes 1 us each.
_MOST_KEYS = 2048
# How long a measurement of steps is used.
_MEASURE_SECONDS = 0.2
# Checks of the engine process per ``step_timeout``. It is given up when this many checks in a row
# found no sign of it, so that a busy event loop, which checks less often, waits longer.
_LOOKS = 4
# Seconds until a replica that died is started again, doubled each time, and their limit. One that
# has lived for as long as the last of these counts from the beginning.
_FIRST_DELAY, _LONGEST_DELAY, _SETTLED_SECONDS = 1.0, 60.0, 600.0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """The state of one of an engine's replicas.

    Attributes:
        index: its number.
        phase: "ready", or "starting" again after its death; "draining" before it is ended; "dead"
            if it is not started any more.
        pid: the id of its process; None while there is none.
        restarts: how often it was started again.
        error: why it ended last, or None.
        stats: its load, and counts over all its lives.
        routed: requests that came to it, by the reason.
    """

    index: int
    phase: Literal["ready", "starting", "draining", "dead"]
    pid: int | None
    restarts: int
    error: str | None
    stats: EngineStats
    routed: abc.Mapping[Why, int]


@dataclass(slots=True, eq=False)
class _Member:
    """One of an engine's replicas, through all its lives.

    Attributes:
        index: its number.
        replica: None while it is dead.
        pid: of its process.
        stats: its figures since it was started last.
        past: counts of its earlier lives.
        sent: sequences that it was sent since it was started last.
        requests: those under way.
        idle: set while there are none.
        heard: whether a message has come since it was looked at last.
        silent_looks: how often in a row there was work and no message.
        watcher: looks again.
        room: tokens of its blocks, blocks of its cache, and rows.
        begun: when it was started last, in seconds of ``time.monotonic``.
        failures: deaths in a row.
        restarts: how often it was started again.
        restart: the task that starts it again.
        leaving: whether it is to end, or has.
        error: why it ended last.
        routed: requests that came to it, by the reason.
    """

    index: int
    replica: Replica | None = None
    pid: int = 0
    stats: EngineStats = _NOTHING
    past: EngineStats = _NOTHING
    sent: int = 0
    requests: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    heard: bool = True
    silent_looks: int = 0
    watcher: asyncio.TimerHandle | None = None
    room: tuple[int, int, int] = (1, 0, 1)
    begun: float = 0.0
    failures: int = 0
    restarts: int = 0
    restart: asyncio.Task[None] | None = None
    leaving: bool = False
    error: EngineDeadError | None = None
    routed: Counter[Why] = field(default_factory=Counter)

    def send(self, *message: Any) -> None:
        """Send a command; it is lost if the replica is dead."""
        if self.replica is not None:
            self.replica.send(message)

    def status(self) -> ReplicaStatus:
        """Its state for people."""
        phase: Literal["ready", "starting", "draining", "dead"] = "ready"
        if self.leaving:
            phase = "draining"
        elif self.replica is None or self.replica.is_closing:
            phase = "dead" if self.restart is None else "starting"
        error = None if self.error is None else str(self.error)
        stats = _total([self.past, self.stats])
        pid = None if self.replica is None else self.pid
        return ReplicaStatus(self.index, phase, pid, self.restarts, error, stats, self.routed)


class RequestStream:
    """An asynchronous iterator over the outputs of one request.

    ::

        async with await engine.add_request("Hello") as stream:
            async for output in stream:
                for completion in output.outputs:
                    print(completion.index, completion.text)

    Each output holds what is new: the completions that changed, with only the text, tokens and
    log-probabilities since the output before; ``cumulative_logprob`` is the sum over all tokens so
    far, and ``prompt_logprobs`` come once. Outputs that are not read in time are merged into one.
    The last has ``finished`` set.

    Leaving before that, by :meth:`abort`, :meth:`aclose`, the end of the ``async with``,
    cancellation or dropping the stream, ends the request: its cache blocks are free within a step.

    Attributes:
        request_id: the id given, or one made by the engine.
        prompt_token_ids: the prompt's tokens.
        media_tokens: by kind, those that each picture, video or sound takes.
    """

    def __init__(self, engine: AsyncEngine, state: State) -> None:
        self.request_id = state.request_id
        self.prompt_token_ids = state.prompt_token_ids
        self.media_tokens = state.media_tokens
        self._engine = engine
        self._state = state
        self._changed = False
        self._ended = False
        self._error: EngineError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._written: OutputRecord | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output.

        Raises:
            StopAsyncIteration: the request has ended.
            RequestTimeoutError: the request's timeout has passed.
            EngineDeadError: the engine process has ended.
        """
        self.wrote()
        while (output := self.take()) is None:
            if self._ended:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError(
                    f"request {self.request_id!r} is read by two tasks at once; read it in one"
                )
            self._waiter = self._engine._loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self._engine._leave(self)
                raise
            finally:
                self._waiter = None
        return output

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Have ``listener`` called, in the event loop, whenever something can be taken.

        It is called once right away, takes the place of a reader until this is called with None,
        and must not raise. So many streams can be served without waking a task for each token.
        """
        self._listener = listener
        if listener is not None:
            listener()

    @property
    def pending(self) -> bool:
        """Whether there is output to take, or an error that :meth:`take` raises."""
        return self._changed or self._error is not None

    def take(self) -> RequestOutput | None:
        """The pending output, or None if there is none yet.

        Raises:
            RequestTimeoutError: the request's timeout has passed.
            EngineDeadError: the engine process has ended.
        """
        if self._changed:
            self._changed = False
            output = self._state.delta()
            if (trace := self._engine.trace) is not None:
                self._written = trace.taken(output, self._engine.stats().last_plan)
            return output
        if self._error is not None:
            raise self._error
        return None

    def take_text(self) -> tuple[str, int] | None:
        """The pending text and its number of tokens; None if :meth:`take` has more to give.

        For most tokens of a request with one completion this spares making an output.
        """
        completions = self._state.completions
        if not self._changed or len(completions) > 1 or self._engine.trace is not None:
            return None
        taken = completions[0].take_text()
        self._changed = taken is None
        return taken

    def wrote(self) -> None:
        """Take note that the output taken last was written. Asking for the next notes it too."""
        if self._written is not None:
            self._written.written = time.monotonic()
            self._written = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def abort(self) -> None:
        """End the request; unless it had ended, an output with the reason "abort" follows."""
        self._engine._leave(self)

    async def aclose(self) -> None:
        """End the request if it has not ended; nothing more is to be read."""
        self._engine._leave(self)
        self._changed = False
        self._error = None

    def __del__(self) -> None:
        # Any thread may drop it.
        if not self._ended:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._engine._loop.call_soon_threadsafe(self._engine._forget, self._state)

    def _wake(self) -> None:
        """Wake the reader: there is new output."""
        self._changed = True
        if self._listener is not None:
            self._listener()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end(self, error: EngineError | None = None) -> None:
        """End the stream after its pending output."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if error is not None:
            self._error = error
            if self._listener is not None:
                self._listener()
            elif self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)


class AsyncEngine(HasFrontend):
    """Runs one model in other processes, for the event loop in which it was started.

    This process tokenises and detokenises; the others schedule and compute. Nobody waits for
    another: a long step does not hold up the event loop, and a busy event loop does not hold up
    the next step. What the other processes log is logged in this one.

    There is one such process, or with ``replicas`` several with the whole model each. A request
    goes to the one that has its beginning in blocks, unless more work waits there than that saves
    (``engine.router``). One that dies ends its own requests, and is started again.

    Attributes:
        config: the settings of each replica.
        frontend: the half that knows text.
        model_config: the model's.
        tokenizer: None with ``skip_tokenizer_init``.
        max_model_len: tokens of a sequence, prompt and output together.
        eos_token_ids: the tokens that end a sequence.
        startup: seconds that each phase of loading took in the first process.
        dead: why the engine ended; None while a replica lives or is started again, and after
            :meth:`close`.
        trace: this process's part of a trace; None before :meth:`start_trace`.
    """

    def __init__(
        self,
        launch: Launch,
        replicas: abc.Sequence[tuple[Replica, Found, Ready]],
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        input_processor: InputProcessor | None,
        max_queued_requests: int | None,
        step_timeout: float | None,
        max_restarts: int,
        name: str = "",
        on_the_way: SharedCount | None = None,
        max_replicas: int | None = None,
    ) -> None:
        """See :meth:`start`."""
        _, found, ready = replicas[0]
        self.config = config
        self.model_config: ModelConfig = found.model_config
        self.tokenizer = tokenizer
        self._scheduler_config = ready.scheduler_config
        self.max_model_len = min(each.scheduler_config.max_model_len for *_, each in replicas)
        self._cache_plan = ready.cache_plan
        self._block_size = ready.block_size
        self.eos_token_ids = found.eos_token_ids
        self.startup = ready.startup
        self.dead: EngineDeadError | None = None
        self.trace: FrontendTrace | None = None
        self._engine_trace: asyncio.Future[EngineTrace | None] | None = None
        self._loop = asyncio.get_running_loop()
        self._launch = launch
        self._max_queued = max_queued_requests
        self._max_restarts = max_restarts
        self.frontend = Frontend(
            config,
            found.model_config,
            tokenizer,
            input_processor,
            found.generation_config,
            self._finish,
            name,
        )
        self._streams: weakref.WeakValueDictionary[str, RequestStream] = (
            weakref.WeakValueDictionary()
        )
        self._on_the_way = on_the_way or SharedCount()
        self._closing = False
        self._buried: asyncio.Future[EngineDeadError] = self._loop.create_future()
        self._idle = asyncio.Event()
        self._idle.set()
        self._step_timeout = step_timeout
        self._router = Router()
        # See _step_tokens.
        self._pace, self._measured = 0.0, -_MEASURE_SECONDS
        # Counts of replicas that were ended.
        self._retired = _NOTHING
        self._scaling = asyncio.Lock()
        self._most_replicas = max_replicas or len(replicas)
        self._members = [_Member(index) for index in range(len(replicas))]
        # The one whose results are being taken in.
        self._heard = self._members[0]
        for member, (replica, own, its) in zip(self._members, replicas, strict=True):
            self._seat(member, replica, own, its)

    @classmethod
    async def start(
        cls,
        model: str,
        config: EngineConfig | None = None,
        *,
        max_queued_requests: int | None = None,
        step_timeout: float | None = None,
        max_step_time: float | None = None,
        warm_up: WarmUp = False,
        listener: socket.socket | None = None,
        replicas: int = 1,
        max_restarts: int | None = None,
        max_replicas: int | None = None,
        replica_executor: Literal["processes", "ray"] = "processes",
        replica_cpus: int = 1,
    ) -> Self:
        """Start the engine process, or those of several replicas, and wait until all are ready.

        The thread that calls it must live as long as the engine; that of the event loop does.

        Args:
            model: a checkpoint folder, a GGUF file or a hub id.
            config: the engine's settings.
            max_queued_requests: sequences that may wait for a place in the batch; any number if
                None. It is for all replicas together.
            step_timeout: seconds that an engine process may be silent while it has work; None for
                no limit. After that it writes its threads' stacks to stderr and is killed, and
                every request there ends with :class:`EngineDeadError`. A step takes seconds at most
                on a GPU, but minutes for a long prompt of a large model on a CPU.
            max_step_time: seconds that a step should take at most while texts are being generated,
                which bounds the gap between two of their tokens: prompts that come meanwhile are
                computed in pieces. While prompts for more than 2 steps wait, on a CPU 2.5, it may
                take 1.4 times as long on a GPU, 4 times on a CPU. None for 0.03 on a GPU, 0.25 on a
                CPU.
            warm_up: True to capture all likely steps as CUDA graphs first, so that no request waits
                for a capture, and to time some steps. "beside" to be ready as soon as one can be
                answered, and to do so while the engine is idle: a request then waits for a capture
                now and then, a tenth of a second. False to capture while it is idle, without the
                times.
            listener: a listening Unix socket to which other processes :meth:`connect`; it is given
                to the engine process, and closed in this one. None for no other processes.
            replicas: engine processes with the whole model each. Each has GPUs of its own for
                all its ranks, or its share of a CPU's cores.
            max_restarts: how often in a row a process that dies is started again; 5 with several
                replicas if None, else never.
            max_replicas: how many :meth:`scale` may ask for; ``replicas`` if None.
            replica_executor: "ray" has the replicas run on the machines of the Ray cluster that
                ``config.ray_address`` names, else on this machine.
            replica_cpus: of the cluster's CPUs, those that each replica takes; on a CPU they are
                its threads.

        Raises:
            ConfigError: an argument is of another type, or out of range.
            OptionError: there are too few GPUs for so many replicas, or no Ray cluster is there.
            EngineError: the model cannot run; the subclass says why.
            EngineDeadError: a process ended before it was ready.
        """
        model, config = check_model_and_config(model, config)
        for name, number, what, least in (
            ("max_queued_requests", max_queued_requests, "sequences", 0),
            ("max_restarts", max_restarts, "times", 0),
            ("replicas", replicas, "engine processes", 1),
            ("max_replicas", max_replicas, "engine processes, as many as replicas", replicas),
            ("replica_cpus", replica_cpus, "CPUs", 1),
        ):
            if number is not None and not (_is_number(number) and number >= least):
                raise ConfigError(
                    f"{name} must be a number of {what}, {least} or more, or be left out; got "
                    f"{number!r}"
                )
        for name, given in (("step_timeout", step_timeout), ("max_step_time", max_step_time)):
            if given is not None and not (_is_number(given) and given > 0):
                raise ConfigError(
                    f"{name} must be a positive number of seconds or None; got {given!r}"
                )
        most = max_replicas or replicas
        if listener is not None and (most > 1 or replica_executor == "ray"):
            raise ConfigError(
                "listener lets other processes share one engine of this machine, and there are "
                f"{most} replicas by {replica_executor}; leave one of them out"
            )
        launch = (
            await cls._launch_by_processes(model, config, max_step_time, warm_up, listener, most)
            if replica_executor == "processes"
            else await cls._launch_by_ray(model, config, max_step_time, warm_up, replica_cpus, most)
        )
        return await cls.start_with(
            launch,
            config,
            max_queued_requests=max_queued_requests,
            step_timeout=step_timeout,
            replicas=replicas,
            max_restarts=(0 if most == 1 else 5) if max_restarts is None else max_restarts,
            max_replicas=most,
        )

    @staticmethod
    async def _launch_by_processes(
        model: str,
        config: EngineConfig,
        max_step_time: float | None,
        warm_up: WarmUp,
        listener: socket.socket | None,
        most: int,
    ) -> Launch:
        places = await environments(config, most)

        async def launch(index: int) -> Replica:
            return await ProcessReplica.open(
                model,
                config,
                max_step_time,
                warm_up,
                listener,
                places[index],
                f"replica {index}: " if most > 1 else "",
            )

        return launch

    @staticmethod
    async def _launch_by_ray(
        model: str,
        config: EngineConfig,
        max_step_time: float | None,
        warm_up: WarmUp,
        cpus: int,
        most: int,
    ) -> Launch:
        from engine_core.engine.ray_replica import RayReplicas

        site = await RayReplicas.open(model, config, max_step_time, warm_up, cpus=cpus, most=most)
        return site.launch

    @classmethod
    async def start_with(
        cls,
        launch: Launch,
        config: EngineConfig,
        *,
        max_queued_requests: int | None = None,
        step_timeout: float | None = None,
        replicas: int = 1,
        max_restarts: int = 0,
        name: str = "",
        on_the_way: SharedCount | None = None,
        max_replicas: int | None = None,
    ) -> Self:
        """Run the model on replicas that ``launch`` starts, wherever they are.

        The folder of the model's tokenizer must be one of this machine; the other arguments are
        those of :meth:`start` and :meth:`connect`.

        Raises:
            EngineError: the model cannot run; the subclass says why.
            EngineDeadError: a replica ended before it was ready.
        """
        begun: list[Replica] = []
        try:
            for index in range(replicas):
                begun += [await launch(index)]
            founds = await asyncio.gather(*(each.expect(Found) for each in begun))
            # While the other processes read the weights.
            opened, readies = await asyncio.gather(
                asyncio.to_thread(_open_text, config, founds[0]),
                asyncio.gather(*(each.expect(Ready) for each in begun)),
            )
        except BaseException:
            await asyncio.gather(*(each.close(kill=True) for each in begun))
            raise
        founds[0], tokenizer, processor = opened
        return cls(
            launch,
            list(zip(begun, founds, readies, strict=True)),
            config,
            tokenizer,
            processor,
            max_queued_requests,
            step_timeout,
            max_restarts,
            name,
            on_the_way,
            max_replicas,
        )

    @classmethod
    async def connect(
        cls,
        path: Path,
        config: EngineConfig,
        *,
        name: str,
        on_the_way: SharedCount,
        max_queued_requests: int | None = None,
    ) -> Self:
        """Share the engine process that another process has started; wait until it is ready.

        The process that started it also ends it, and notices if it hangs.

        Args:
            path: of the ``listener`` that :meth:`start` was given.
            config: the engine's settings, as given to :meth:`start`.
            name: of this process, different from those of all others that share the engine.
            on_the_way: counts the sequences that the engine process has not taken in yet.
            max_queued_requests: as for :meth:`start`, but for all these processes together.

        Raises:
            EngineDeadError: the engine process ended before it was ready.
        """
        return await cls.start_with(
            lambda _: ProcessReplica.connect(path),
            config,
            max_queued_requests=max_queued_requests,
            name=name,
            on_the_way=on_the_way,
        )

    @property
    def pid(self) -> int:
        """The id of the engine process, or that of the first replica."""
        return self._members[0].pid

    @property
    def replicas(self) -> list[ReplicaStatus]:
        """The state of each replica."""
        return [member.status() for member in self._members]

    @property
    def takes_requests(self) -> bool:
        """Whether there is a replica that takes requests."""
        return bool(self._router.open)

    @property
    def num_rows(self) -> int:
        """Sequences that run at once, in all replicas that take requests."""
        return len(self._router.open) * self._scheduler_config.max_num_seqs

    @property
    def cache_plan(self) -> CachePlan:
        """The blocks of the KV cache.

        Raises:
            ModuleNotFoundError: a layer's spec is of a module that this process has not imported.
        """
        plan: CachePlan = pickle.loads(self._cache_plan)
        return plan

    async def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> RequestStream:
        """Queue a request.

        Args:
            prompt: text or token ids.
            sampling_params: the checkpoint's defaults if None.
            request_id: a name of the caller's choice.
            priority: lower runs first; requests of equal priority run in the order of their
                arrival.
            timeout: seconds from now after which it is ended; None for no limit.

        Returns:
            The stream of its outputs.

        Raises:
            RequestError: it cannot be served; nothing of it is kept.
            QueueFullError: too many sequences wait already.
            EngineDeadError: the engine process has ended, or is to end.
        """
        (stream,) = await self.add_requests(
            [prompt],
            sampling_params,
            request_ids=None if request_id is None else [request_id],
            priority=priority,
            timeout=timeout,
        )
        return stream

    async def add_requests(
        self,
        prompts: abc.Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        request_ids: abc.Sequence[str] | None = None,
        priority: int = 0,
        timeout: float | None = None,
        arrival_time: float | None = None,
        cache_salts: tuple[abc.Hashable, ...] = (),
        client: abc.Hashable = None,
        max_prompt_tokens: int | None = None,
    ) -> list[RequestStream]:
        """Queue a request for each prompt, or none at all if one of them is refused.

        Args:
            prompts: text or token ids each.
            sampling_params: for all of them; the checkpoint's defaults if None.
            request_ids: names of the caller's choice, one per prompt.
            priority: see :meth:`add_request`.
            timeout: seconds from their arrival after which they are ended; None for no limit.
            arrival_time: when they arrived, in seconds of ``time.monotonic``; now if None.
            cache_salts: values that enter the keys of all their cache blocks; requests share
                blocks only with requests of equal salts.
            client: whose they are: clients take turns at having pictures, videos and sounds decoded
                and processed. Requests of equal salts are those of one client if it is None.
            max_prompt_tokens: of each prompt with what it shows; as many as leave room for an
                answer if None.

        Returns:
            The stream of each request's outputs, in the order of the prompts.

        Raises:
            RequestError: one cannot be served, or they are too many even for an idle engine.
            QueueFullError: too many sequences wait already.
            EngineDeadError: the engine process has ended, or is to end.
        """
        self._check_alive()
        if timeout is not None and not (_is_number(timeout) and timeout >= 0):
            raise RequestError(
                f"timeout must be a number of seconds, 0 or more, or None; got {timeout!r}"
            )
        if arrival_time is not None and not _is_number(arrival_time):
            raise RequestError(
                f"arrival_time must be seconds of time.monotonic or None; got {arrival_time!r}"
            )
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        for what, items in (("prompts", prompts), ("request_ids", request_ids or ())):
            if not isinstance(items, abc.Sequence) or isinstance(items, str | bytes):
                raise RequestError(f"{what} must be a list, one per request; got {items!r}")
        names: abc.Sequence[str | None] = (
            [None] * len(prompts) if request_ids is None else request_ids
        )
        if len(names) != len(prompts):
            raise RequestError(
                f"request_ids has {len(names)} entries for {len(prompts)} prompts; give one each"
            )
        frontend = self.frontend
        params = frontend.resolve(sampling_params)
        if params.guided is not None:
            await frontend.grammars.check_async(params.guided)
        if params.logits_processors:
            raise RequestError(
                "logits_processors are functions of this process, and tokens are chosen in "
                "another; use LLM or Engine"
            )
        # Pictures are worth no work for a request that would be refused after it.
        self._check_queue(params.n * len(prompts))
        longest = self.max_model_len - 1
        if max_prompt_tokens is not None:
            longest = min(longest, max_prompt_tokens)
        tokenized = [
            await frontend.tokenize_async(prompt, cache_salts, client, longest)
            for prompt in prompts
        ]
        tokenized_time = time.monotonic()
        # From here on nobody else runs until all of them are queued.
        self._check_alive()
        self._check_queue(params.n * len(prompts))
        prepared: dict[str, tuple[State, list[NewSequence]]] = {}
        for prompt_tokens, name in zip(tokenized, names, strict=True):
            state, sequences = frontend.prepare(
                prompt_tokens,
                params,
                request_id=name,
                priority=priority,
                unique_ids=True,
                arrival_time=arrival_time,
                cache_salts=cache_salts,
            )
            check_sequence(
                Sequence(
                    state.request_id,
                    sequences[0].prompt,
                    sequences[0].sampling,
                    arrival_time=state.arrival_time,
                    max_model_len=self.max_model_len,
                ),
                self._scheduler_config,
            )
            if (length := len(sequences[0].prompt.token_ids)) > longest:
                raise RequestError(
                    f"request {state.request_id!r}: a prompt of {length} tokens with what it shows "
                    f"is longer than the {longest} that are taken; shorten it",
                    code=ErrorCode.PROMPT_TOO_LONG,
                )
            if state.request_id in prepared:
                raise RequestError(f"two requests are called {state.request_id!r}; rename one")
            prepared[state.request_id] = (state, sequences)
        streams = [self._queue(state, sequences, timeout) for state, sequences in prepared.values()]
        if self.trace is not None:
            now = time.monotonic()
            for name, (_, sequences) in prepared.items():
                ids = tuple(sequence.sequence_id for sequence in sequences)
                self.trace.requests.append(
                    RequestRecord(name, ids, arrival_time, tokenized_time, now)
                )
        return streams

    def add_pooled(
        self,
        prompts: abc.Sequence[TokenizedPrompt],
        params: PoolingParams,
        *,
        priority: int = 0,
        timeout: float | None = None,
        arrival_time: float | None = None,
        cache_salts: tuple[abc.Hashable, ...] = (),
        queues: bool = True,
    ) -> RequestStream:
        """Queue one request for the vectors or scores of several prompts.

        Args:
            prompts: as ``frontend.tokenize_all`` returned them.
            params: what is wanted of each.
            priority: see :meth:`add_requests`, as for the next three.
            timeout: likewise.
            arrival_time: likewise.
            cache_salts: likewise.
            queues: whether it is refused if too many wait; not the rest of what has begun.

        Returns:
            The stream of its outputs, with a completion for each prompt that is done.

        Raises:
            RequestError: one cannot be served; nothing is kept then.
            QueueFullError: too many sequences wait already.
            EngineDeadError: the engine process has ended, or is to end.
        """
        self._check_alive()
        if queues:
            self._check_queue(len(prompts))
        state, sequences = self.frontend.prepare_pooled(
            prompts,
            self.frontend.pooling.resolve(params),
            priority=priority,
            unique_ids=True,
            arrival_time=arrival_time,
            cache_salts=cache_salts,
        )
        for new in sequences:
            sequence = Sequence(
                new.sequence_id,
                new.prompt,
                new.sampling,
                arrival_time=new.arrival_time,
                max_model_len=self.max_model_len,
                pooling=new.pooling,
            )
            check_sequence(sequence, self._scheduler_config)
        return self._queue(state, sequences, timeout)

    def stats(self) -> EngineStats:
        """Load of the engine after its last step, and counts since its start.

        Of several replicas it is the sum, and ``kv_cache_usage`` the mean.
        """
        parts = [self._retired, *(each for m in self._members for each in (m.past, m.stats))]
        total = _total(parts)
        caches = sum(member.replica is not None for member in self._members)
        return total._replace(kv_cache_usage=total.kv_cache_usage / max(1, caches))

    def start_trace(self, name: str = "server") -> None:
        """Record every step and request from now on, in both processes; ``name`` is of this one.

        Raises:
            ConfigError: there are several replicas.
        """
        if self._most_replicas > 1:
            raise ConfigError(
                f"a trace shows the steps of one engine, and there are {self._most_replicas} "
                "replicas; trace one alone"
            )
        self.trace = FrontendTrace(name)
        self._members[0].send("trace")

    async def take_trace(self) -> EngineTrace | None:
        """The engine process's part of the trace; None without a trace, or if it has died."""
        if self.dead is not None or self.trace is None:
            return None
        if self._engine_trace is None:
            self._engine_trace = self._loop.create_future()
            self._members[0].send("take_trace")
        return await asyncio.shield(self._engine_trace)

    async def wait_dead(self) -> EngineDeadError:
        """Wait until all engine processes have ended without being asked to; returns why."""
        return await asyncio.shield(self._buried)

    async def drain(self, timeout: float | None) -> None:
        """Take no more requests, and wait until those under way have ended.

        Args:
            timeout: seconds after which the rest is aborted; None for no limit.
        """
        self._closing = True
        # A request that waits for its grammar or picture would be refused after it anyway.
        await asyncio.to_thread(self.frontend.close_workers)
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            for state in list(self.frontend.states.values()):
                self._abort(state)

    async def close(self) -> None:
        """Abort all requests and end all engine processes; it may be called again."""
        self._closing = True
        for state in list(self.frontend.states.values()):
            self._abort(state)
        await asyncio.to_thread(self.frontend.close)
        await asyncio.gather(*map(self._end_member, self._members))

    async def scale(self, replicas: int, *, drain_timeout: float | None = None) -> None:
        """Go on with so many replicas, at most ``max_replicas`` of :meth:`start`.

        Those that are too many take no more requests. They end once theirs have; what has not
        ended after ``drain_timeout`` seconds is aborted (never if None). If this is cancelled
        before, they take requests again.

        Raises:
            ConfigError: the number is out of range.
            EngineError: a replica cannot be started; the others go on.
        """
        if not (_is_number(replicas) and 1 <= replicas <= self._most_replicas):
            raise ConfigError(
                f"replicas must be a number from 1 to {self._most_replicas}, for which there are "
                f"devices; got {replicas!r}"
            )
        async with self._scaling:
            for index in range(len(self._members), replicas):
                member = _Member(index)
                place = await self._begin(index)
                self._members.append(member)
                self._seat(member, *place)
            await asyncio.gather(
                *(self._retire(member, drain_timeout) for member in self._members[replicas:])
            )

    async def _retire(self, member: _Member, drain_timeout: float | None) -> None:
        """End a replica when its requests have ended."""
        member.leaving = True
        self._router.leave(member.index)
        if member.requests:
            try:
                await asyncio.wait_for(member.idle.wait(), drain_timeout)
            except TimeoutError:
                for state in self._states_at(member):
                    self._abort(state)
            except asyncio.CancelledError:
                member.leaving = False
                if member.replica is not None:
                    self._router.join(member.index, *member.room)
                raise
        ending = asyncio.ensure_future(self._remove(member))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    async def _remove(self, member: _Member) -> None:
        """End a replica for good, and keep its counts."""
        await self._end_member(member)
        self._members.remove(member)
        self._retired = _total([self._retired, member.past])

    async def _end_member(self, member: _Member) -> None:
        """End a replica's process, and the task that would start it again."""
        member.leaving = True
        if member.restart is not None:
            member.restart.cancel()
            await asyncio.gather(member.restart, return_exceptions=True)
            member.restart = None
        if member.replica is not None:
            await member.replica.close(kill=False)

    async def _begin(self, index: int) -> tuple[Replica, Found, Ready]:
        """A new replica, once it is ready."""
        replica = await self._launch(index)
        try:
            return replica, await replica.expect(Found), await replica.expect(Ready)
        except BaseException:
            await replica.close(kill=True)
            raise

    def _seat(self, member: _Member, replica: Replica, found: Found, ready: Ready) -> None:
        """Send requests to a replica that is ready."""
        member.replica, member.pid = replica, found.pid
        member.begun, member.heard, member.silent_looks = time.monotonic(), True, 0
        rows = ready.scheduler_config.max_num_seqs
        member.room = ready.block_size, ready.num_blocks, rows
        self._router.join(member.index, *member.room)
        replica.serve(partial(self._receive, member), partial(self._bury, member))
        self._look_again(member)

    async def _restart(self, member: _Member) -> None:
        """Start a replica that died again, and again if that fails, up to the limit."""
        while True:
            delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2**member.failures)
            member.failures += 1
            logger.error(
                "%s; it is started again in %g s (%d of at most %d times in a row)",
                member.error,
                delay,
                member.failures,
                self._max_restarts,
                exc_info=member.error,
            )
            await asyncio.sleep(delay)
            try:
                place = await self._begin(member.index)
            except Exception as error:  # OSError too: no more processes, memory or open files
                member.error = self._named(member, error)
                if member.failures < self._max_restarts:
                    continue
                member.restart = None
                self._give_up(member)
                return
            member.restart = None
            member.restarts += 1
            self._seat(member, *place)
            logger.warning("replica %d is ready again", member.index)
            return

    def _named(self, member: _Member, error: Exception) -> EngineDeadError:
        """The error as the end of one of several replicas."""
        if self._most_replicas == 1 and isinstance(error, EngineDeadError):
            return error
        if isinstance(error, EngineError):
            why, cause = str(error), error.__cause__
        else:
            why, cause = f"it cannot be started: {type(error).__name__}: {error}", error
        named = EngineDeadError(f"replica {member.index}: {why}")
        named.__cause__ = cause
        return named

    def _give_up(self, member: _Member) -> None:
        """Leave a replica dead; the engine is, if no other lives or is started again."""
        if any(other.replica or other.restart for other in self._members):
            logger.critical("%s; it is not started again", member.error, exc_info=member.error)
            return
        self.dead = member.error
        if not self._buried.done() and member.error is not None:
            self._buried.set_result(member.error)

    def _states_at(self, member: _Member) -> list[State]:
        """The requests that a replica has."""
        states = self.frontend.states.values()
        return [state for state in states if _ticket(state).replica == member.index]

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(str(self.dead)) from self.dead.__cause__
        if self._closing:
            raise EngineDeadError("the engine is being shut down and takes no more requests")
        if len(self._members) > 1:
            # A process may take seconds to end, and says why only then.
            for member in self._members:
                if member.replica is not None and member.replica.is_closing:
                    self._router.leave(member.index)
        if not self.takes_requests:
            raise EngineDeadError(
                f"no replica is ready ({self._members[0].error}); send the request again later"
            )

    def _check_queue(self, n: int) -> None:
        """Refuse ``n`` sequences if too many wait, as far as is known from the last step.

        What was sent since then counts as waiting, unless there were free rows and nobody waited.

        Raises:
            RequestError: they are too many even for an idle engine.
            QueueFullError: they are too many now.
        """
        if self._max_queued is None:
            return
        if n > self.num_rows + self._max_queued:
            raise RequestError(
                f"{n} sequences are asked for at once, and there is room for {self.num_rows} that "
                f"run (max_num_seqs) and {self._max_queued} that wait (max_queued_requests); ask "
                "for fewer"
            )
        rows, waiting, free = self._scheduler_config.max_num_seqs, self._on_the_way.total, 0
        for member in self._members:
            waiting += member.stats.waiting
            if member.index in self._router.open and member.stats.waiting == 0:
                free += rows - member.stats.running
        if waiting + n > self._max_queued + free:
            raise QueueFullError(
                f"{max(0, waiting - free)} sequences wait already, and max_queued_requests lets "
                f"{self._max_queued} wait: no place for {n} more; send the request again later"
            )

    def _queue(
        self, state: State, sequences: list[NewSequence], timeout: float | None
    ) -> RequestStream:
        """Hand a request that was checked to the other process."""
        self.frontend.keep(state)
        stream = RequestStream(self, state)
        self._streams[state.request_id] = stream
        self._idle.clear()
        state.ticket = ticket = self._route(sequences)
        member = self._member(ticket)
        member.routed[ticket.why] += 1
        member.requests += 1
        member.idle.clear()
        member.sent += len(sequences)
        self._count_sent()
        member.send("add", sequences)
        if timeout is not None:
            left = timeout - (time.monotonic() - state.arrival_time)
            if left > 0:
                stream._timer = self._loop.call_later(
                    left, self._time_out, weakref.ref(stream), timeout
                )
            else:  # an answer could come before a timer
                self._time_out(weakref.ref(stream), timeout)
        return stream

    def _route(self, sequences: list[NewSequence]) -> Ticket:
        """Choose a replica for a request."""
        prompts = {id(new.prompt): new.prompt for new in sequences}.values()
        keys: list[BlockKey] = []
        if self._most_replicas > 1 and len(prompts) == 1:
            (prompt,) = prompts
            extend_block_keys(
                keys,
                prompt.token_ids[: _MOST_KEYS * self._block_size],
                self._block_size,
                spans=prompt.atomic_spans,
                salts=prompt.cache_salts,
                media=prompt.media,
            )
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        generated = {m.index: m.stats.generated_tokens for m in self._members}
        step_tokens = self._step_tokens() if len(self._members) > 1 else 0.0
        return self._router.route(num_tokens, keys, len(sequences), generated, step_tokens)

    def _step_tokens(self) -> float:
        """Tokens of prompts that were computed, so far, in the time of a step that only decodes."""
        if time.monotonic() > self._measured + _MEASURE_SECONDS:
            stats = self.stats()
            steps = Timings(stats.timings)
            (decodes, decode), (_, prefill), (mixes, mixed) = (
                steps.histogram(f"step_{kind}") for kind in ("decode", "prefill", "mixed")
            )
            # The last bucket counts all of them.
            each = decode / max(1.0, decodes[-1][1])
            seconds = prefill + max(0.0, mixed - each * mixes[-1][1])
            computed = stats.prompt_tokens - stats.prefix_cache_hits
            self._pace = each * computed / seconds if seconds else 0.0
            self._measured = time.monotonic()
        return self._pace

    def _member(self, ticket: Ticket) -> _Member:
        """The replica that has a request."""
        return next(member for member in self._members if member.index == ticket.replica)

    def _ended(self, state: State) -> None:
        """Take note that a request is over."""
        ticket = _ticket(state)
        self._router.ended(ticket, sum(each.num_tokens for each in state.completions))
        member = self._member(ticket)
        member.requests -= 1
        if member.requests == 0:
            member.idle.set()

    def _count_sent(self) -> None:
        self._on_the_way.own = sum(member.sent - member.stats.added for member in self._members)

    def _receive(
        self,
        member: _Member,
        message: tuple[list[tuple[Any, ...]], bytes, bytes, EngineStats] | EngineTrace,
    ) -> None:
        """Take in what a step brought."""
        member.heard = True
        if isinstance(message, EngineTrace):
            self._give_trace(message)
            return
        received = time.monotonic()
        plain, numbers, tokens, member.stats = message
        self._heard = member
        updates = [TokenUpdate._make(update) for update in plain]
        columns = (memoryview(numbers).cast("q").tolist(), memoryview(tokens).cast("q").tolist())
        self._count_sent()
        for state in self.frontend.apply(updates, *columns):
            stream = self._streams.get(state.request_id)
            if stream is not None:
                stream._wake()
                if state.unfinished == 0:
                    stream._end()
            ticket = _ticket(state)
            if state.unfinished == 0:
                self._ended(state)
            elif ticket.waiting and state.first_token_time is not None:
                self._router.began(ticket)
        if self.trace is not None:
            self.trace.received(updates, len(columns[1]), member.stats.last_plan, received)
        self._note_idle()

    def _give_trace(self, trace: EngineTrace | None) -> None:
        if self._engine_trace is not None:
            self._engine_trace.set_result(trace)
            self._engine_trace = None

    def _finish(self, sequence_id: str, reason: str, stop_reason: str) -> None:
        # A text is found to be complete while the tokens of its replica are taken in.
        self._heard.send("finish", sequence_id, reason, stop_reason)

    def _leave(self, stream: RequestStream) -> None:
        """The reader of ``stream`` leaves."""
        if not stream._ended:
            self._abort(stream._state)

    def _forget(self, state: State) -> None:
        """Abort a request whose stream is gone."""
        if self.frontend.states.get(state.request_id) is state:
            self._abort(state)

    def _abort(self, state: State, error: EngineError | None = None) -> None:
        """End a request here and in the other process.

        Its stream ends with ``error``, or with an output whose reason is "abort".
        """
        self.frontend.drop(state.request_id)
        self._member(_ticket(state)).send("abort", state.running)
        self._ended(state)
        stream = self._streams.get(state.request_id)
        if stream is not None:
            if error is None:
                state.end("abort")
                stream._wake()
            stream._end(error)
        self._note_idle()

    def _time_out(self, reference: weakref.ref[RequestStream], timeout: float) -> None:
        """End a request whose deadline has passed."""
        stream = reference()
        if stream is not None and not stream._ended:
            tokens = sum(c.num_tokens for c in stream._state.completions)
            self._abort(
                stream._state,
                RequestTimeoutError(
                    f"request {stream.request_id!r} was ended after {timeout:g} s, its limit, with "
                    f"{tokens} tokens generated"
                ),
            )

    def _look_again(self, member: _Member) -> None:
        if self._step_timeout is not None and member.replica is not None:
            wait = self._step_timeout / _LOOKS
            member.watcher = self._loop.call_later(wait, self._look, member)

    def _look(self, member: _Member) -> None:
        """Give an engine process up if it has had work, and sent nothing, for too long."""
        stats = member.stats
        busy = member.requests > 0 or stats.running > 0 or stats.waiting > 0
        member.silent_looks = 0 if member.heard or not busy else member.silent_looks + 1
        member.heard = False
        if member.silent_looks < _LOOKS:
            self._look_again(member)
        elif member.replica is not None:
            member.replica.give_up(
                f"the engine process (pid {member.pid}) hangs: no step has ended for "
                f"{self._step_timeout:g} s, its step_timeout"
            )

    def _note_idle(self) -> None:
        if not self.frontend.states:
            self._idle.set()

    def _bury(self, member: _Member, error: EngineDeadError) -> None:
        """An engine process has ended."""
        if member.watcher is not None:
            member.watcher.cancel()
        self._give_trace(None)
        self._router.leave(member.index)
        member.replica = None
        counts = member.stats._replace(running=0, waiting=0, kv_cache_usage=0.0)
        member.past, member.stats = _total([member.past, counts]), _NOTHING
        member.sent = 0
        self._count_sent()
        lost = self._states_at(member)
        if (self._closing or member.leaving) and not lost:
            return
        member.error = error = self._named(member, error)
        for state in lost:
            self.frontend.drop(state.request_id)
            self._ended(state)
            stream = self._streams.get(state.request_id)
            if stream is not None:
                # An error of its own: each reader adds its traceback to it.
                own = EngineDeadError(str(error))
                own.__cause__ = error.__cause__
                stream._end(own)
        self._note_idle()
        if time.monotonic() - member.begun > _SETTLED_SECONDS:
            member.failures = 0
        stays = self._closing or member.leaving or member.failures >= self._max_restarts
        if stays:
            self._give_up(member)
        else:
            member.restart = asyncio.ensure_future(self._restart(member))


def _ticket(state: State) -> Ticket:
    assert state.ticket is not None, "it was sent to a replica"
    return state.ticket


def _total(parts: abc.Sequence[EngineStats]) -> EngineStats:
    """The sums of figures; those of a single engine as they are."""
    parts = [part for part in parts if part is not _NOTHING] or [_NOTHING]
    if len(parts) == 1:
        return parts[0]
    timings = [array("d", part.timings) for part in parts if part.timings]
    summed = array("d", map(sum, zip(*timings, strict=True)))
    # All but the id of a plan and the histograms.
    counts: list[Any] = [sum(column) for column in zip(*(p[:-2] for p in parts), strict=True)]
    return EngineStats(*counts)._replace(timings=summed.tobytes())


def _open_text(
    config: EngineConfig, found: Found
) -> tuple[Found, Tokenizer | None, InputProcessor | None]:
    """Open the model's text half, which this process needs."""

    def folder() -> Path:
        assert found.tokenizer_folder is not None, "a tokenizer of the model's own is wanted"
        return found.tokenizer_folder

    tokenizer = choose_tokenizer(config, folder, found.model_config)
    found = replace(found, model_config=with_texts(found.model_config, tokenizer))
    if not found.has_input_processor:
        return found, tokenizer, None
    registry = build_registry(config.custom_module_map, plugin_errors=config.plugin_errors)
    return found, tokenizer, registry.input_processor(found.model_config)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


__all__ = ["AsyncEngine", "Launch", "ReplicaStatus", "RequestStream"]
