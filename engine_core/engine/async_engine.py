"""An engine in a process of its own, driven from an event loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
import weakref
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from engine_core.configs import EngineConfig, ModelConfig, PoolingParams, SamplingParams
from engine_core.engine import process
from engine_core.engine.arguments import check_model_and_config
from engine_core.engine.frontend import (
    Frontend,
    HasFrontend,
    Prompt,
    State,
    TokenizedPrompt,
    choose_tokenizer,
    with_texts,
)
from engine_core.engine.process import Decoder, Failure, Found, Ready
from engine_core.engine.shared_count import SharedCount
from engine_core.engine.trace import EngineTrace, FrontendTrace, OutputRecord, RequestRecord
from engine_core.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    QueueFullError,
    RemoteTracebackError,
    RequestError,
    RequestTimeoutError,
)
from engine_core.inputs import InputProcessor
from engine_core.registry import build_registry
from engine_core.runtime.memory import CachePlan
from engine_core.scheduler import Sequence, check_sequence
from engine_core.steps import EngineStats, NewSequence, RequestOutput, TokenUpdate
from engine_core.text import Tokenizer

_T = TypeVar("_T")

# How long a process that was told to end, or whose socket is closed, has until it is killed.
_STOP_SECONDS = 5.0
# Checks of the engine process per ``step_timeout``. It is given up when this many checks in a row
# found no sign of it, so that a busy event loop, which checks less often, waits longer.
_LOOKS = 4
# Seconds that a hung process has to write its stacks.
_LAST_WORDS_SECONDS = 5.0


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
                self._written = trace.taken(output, self._engine._stats.last_plan)
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
    """Runs one model in another process, for the event loop in which it was started.

    This process tokenises and detokenises; the other one schedules and computes. Neither waits for
    the other: a long step does not hold up the event loop, and a busy event loop does not hold up
    the next step. What the other process logs is logged in this one.

    Attributes:
        config: the engine's settings.
        frontend: the half that knows text.
        model_config: the model's.
        tokenizer: None with ``skip_tokenizer_init``.
        max_model_len: tokens of a sequence, prompt and output together.
        eos_token_ids: the tokens that end a sequence.
        startup: seconds that each phase of loading took in the engine process.
        pid: the id of the engine process.
        dead: why the engine process ended; None while it lives, and after :meth:`close`.
        trace: this process's part of a trace; None before :meth:`start_trace`.
    """

    def __init__(
        self,
        link: _Link,
        config: EngineConfig,
        found: Found,
        ready: Ready,
        tokenizer: Tokenizer | None,
        input_processor: InputProcessor | None,
        max_queued_requests: int | None,
        step_timeout: float | None,
        name: str = "",
        on_the_way: SharedCount | None = None,
    ) -> None:
        """See :meth:`start`."""
        self.config = config
        self.model_config: ModelConfig = found.model_config
        self.tokenizer = tokenizer
        self.max_model_len = ready.scheduler_config.max_model_len
        self._cache_plan = ready.cache_plan
        self.eos_token_ids = found.eos_token_ids
        self.startup = ready.startup
        self.pid = found.pid
        self.dead: EngineDeadError | None = None
        self.trace: FrontendTrace | None = None
        self._engine_trace: asyncio.Future[EngineTrace | None] | None = None
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._max_queued = max_queued_requests
        self.frontend = Frontend(
            config,
            found.model_config,
            tokenizer,
            input_processor,
            found.generation_config,
            self._finish,
            name,
        )
        self._scheduler_config = ready.scheduler_config
        self._streams: weakref.WeakValueDictionary[str, RequestStream] = (
            weakref.WeakValueDictionary()
        )
        self._stats = EngineStats()
        self._num_sent = 0
        self._on_the_way = on_the_way or SharedCount()
        self._closing = False
        self._buried: asyncio.Future[EngineDeadError] = self._loop.create_future()
        self._idle = asyncio.Event()
        self._idle.set()
        self._step_timeout = step_timeout
        self._heard = True
        self._silent_looks = 0
        self._watcher: asyncio.TimerHandle | None = None
        link.serve(self._receive, self._bury)
        if self.dead is None:
            self._look_again()

    @classmethod
    async def start(
        cls,
        model: str,
        config: EngineConfig | None = None,
        *,
        max_queued_requests: int | None = None,
        step_timeout: float | None = None,
        max_step_time: float | None = None,
        warm_up: bool = False,
        listener: socket.socket | None = None,
    ) -> Self:
        """Start the engine process and wait until it can take requests.

        The thread that calls it must live as long as the engine; that of the event loop does.

        Args:
            model: a checkpoint folder, a GGUF file or a hub id.
            config: the engine's settings.
            max_queued_requests: sequences that may wait for a place in the batch; any number if
                None.
            step_timeout: seconds that the engine process may be silent while it has work; None for
                no limit. After that it writes its threads' stacks to stderr and is killed, and
                every request ends with :class:`EngineDeadError`. A step takes seconds at most on a
                GPU, but minutes for a long prompt of a large model on a CPU.
            max_step_time: seconds that a step should take at most while texts are being generated,
                which bounds the gap between two of their tokens: prompts that come meanwhile are
                computed in pieces. While prompts for more than 2.5 steps wait it may take 1.4
                times as long on a GPU, 4 times on a CPU. None for 0.03 on a GPU, 0.25 on a CPU.
            warm_up: whether to capture all likely steps as CUDA graphs first, so that no request
                waits for a capture, and to time some steps; otherwise the engine captures while it
                is idle.
            listener: a listening Unix socket to which other processes :meth:`connect`; it is given
                to the engine process, and closed in this one. None for no other processes.

        Raises:
            ConfigError: an argument is of another type, or out of range.
            EngineError: the model cannot run; the subclass says why.
            EngineDeadError: the process ended before it was ready.
        """
        model, config = check_model_and_config(model, config)
        if max_queued_requests is not None and not (
            _is_number(max_queued_requests) and max_queued_requests >= 0
        ):
            raise ConfigError(
                "max_queued_requests must be a number of sequences, 0 or more, or None for no "
                f"limit; got {max_queued_requests!r}"
            )
        for name, given in (("step_timeout", step_timeout), ("max_step_time", max_step_time)):
            if given is not None and not (_is_number(given) and given > 0):
                raise ConfigError(
                    f"{name} must be a positive number of seconds or None; got {given!r}"
                )
        link = await _Link.open(model, config, max_step_time, warm_up, listener)
        return await cls._greeted(link, config, max_queued_requests, step_timeout)

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
        link = await _Link.connect(path)
        return await cls._greeted(link, config, max_queued_requests, None, name, on_the_way)

    @classmethod
    async def _greeted(
        cls,
        link: _Link,
        config: EngineConfig,
        max_queued_requests: int | None,
        step_timeout: float | None,
        name: str = "",
        on_the_way: SharedCount | None = None,
    ) -> Self:
        """The engine behind ``link``, once it is ready."""
        try:
            found = await link.expect(Found)
            # While the other process reads the weights.
            (found, tokenizer, processor), ready = await asyncio.gather(
                asyncio.to_thread(_open_text, config, found), link.expect(Ready)
            )
        except BaseException:
            await link.close(kill=True)
            raise
        return cls(
            link,
            config,
            found,
            ready,
            tokenizer,
            processor,
            max_queued_requests,
            step_timeout,
            name,
            on_the_way,
        )

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
        tokenized = [await frontend.tokenize_async(prompt, cache_salts) for prompt in prompts]
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
        """Load of the engine after its last step, and counts since its start."""
        return self._stats

    def start_trace(self, name: str = "server") -> None:
        """Record every step and request from now on, in both processes; ``name`` is of this one."""
        self.trace = FrontendTrace(name)
        self._link.send(("trace",))

    async def take_trace(self) -> EngineTrace | None:
        """The engine process's part of the trace; None without a trace, or if it has died."""
        if self.dead is not None or self.trace is None:
            return None
        if self._engine_trace is None:
            self._engine_trace = self._loop.create_future()
            self._link.send(("take_trace",))
        return await asyncio.shield(self._engine_trace)

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine process has ended without being asked to; returns why."""
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
        """Abort all requests and end the engine process; it may be called again."""
        self._closing = True
        for state in list(self.frontend.states.values()):
            self._abort(state)
        await asyncio.to_thread(self.frontend.close)
        await self._link.close(kill=False)

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(str(self.dead)) from self.dead.__cause__
        if self._closing:
            raise EngineDeadError("the engine is being shut down and takes no more requests")

    def _check_queue(self, n: int) -> None:
        """Refuse ``n`` sequences if too many wait, as far as is known from the last step.

        What was sent since then counts as waiting, unless there were free rows and nobody waited.

        Raises:
            RequestError: they are too many even for an idle engine.
            QueueFullError: they are too many now.
        """
        if self._max_queued is None:
            return
        max_num_seqs = self._scheduler_config.max_num_seqs
        if n > max_num_seqs + self._max_queued:
            raise RequestError(
                f"{n} sequences are asked for at once, and there is room for {max_num_seqs} that "
                f"run (max_num_seqs) and {self._max_queued} that wait (max_queued_requests); ask "
                "for fewer"
            )
        stats = self._stats
        waiting = stats.waiting + self._on_the_way.total
        free = 0
        if stats.waiting == 0:
            free = max_num_seqs - stats.running
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
        self._num_sent += len(sequences)
        self._on_the_way.own = self._num_sent - self._stats.added
        self._link.send(("add", sequences))
        if timeout is not None:
            left = timeout - (time.monotonic() - state.arrival_time)
            stream._timer = self._loop.call_later(
                max(0.0, left), self._time_out, weakref.ref(stream), timeout
            )
        return stream

    def _receive(
        self, message: tuple[list[tuple[Any, ...]], bytes, bytes, EngineStats] | EngineTrace
    ) -> None:
        """Take in what a step brought."""
        self._heard = True
        if isinstance(message, EngineTrace):
            self._give_trace(message)
            return
        received = time.monotonic()
        plain, numbers, tokens, self._stats = message
        updates = [TokenUpdate._make(update) for update in plain]
        columns = (memoryview(numbers).cast("q").tolist(), memoryview(tokens).cast("q").tolist())
        self._on_the_way.own = self._num_sent - self._stats.added
        for state in self.frontend.apply(updates, *columns):
            stream = self._streams.get(state.request_id)
            if stream is not None:
                stream._wake()
                if state.unfinished == 0:
                    stream._end()
        if self.trace is not None:
            self.trace.received(updates, len(columns[1]), self._stats.last_plan, received)
        self._note_idle()

    def _give_trace(self, trace: EngineTrace | None) -> None:
        if self._engine_trace is not None:
            self._engine_trace.set_result(trace)
            self._engine_trace = None

    def _finish(self, sequence_id: str, reason: str, stop_reason: str) -> None:
        self._link.send(("finish", sequence_id, reason, stop_reason))

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
        self._link.send(("abort", state.running))
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

    def _look_again(self) -> None:
        if self._step_timeout is not None:
            self._watcher = self._loop.call_later(self._step_timeout / _LOOKS, self._look)

    def _look(self) -> None:
        """Give the engine process up if it has had work, and sent nothing, for too long."""
        stats = self._stats
        busy = not self._idle.is_set() or stats.running > 0 or stats.waiting > 0
        self._silent_looks = 0 if self._heard or not busy else self._silent_looks + 1
        self._heard = False
        if self._silent_looks < _LOOKS:
            self._look_again()
            return
        self._link.give_up(
            f"the engine process (pid {self.pid}) hangs: no step has ended for "
            f"{self._step_timeout:g} s, its step_timeout"
        )

    def _note_idle(self) -> None:
        if not self.frontend.states:
            self._idle.set()

    def _bury(self, error: EngineDeadError) -> None:
        """The engine process has ended."""
        if self._watcher is not None:
            self._watcher.cancel()
        self._give_trace(None)
        if self._closing and not self.frontend.states:
            return
        self.dead = error
        for state in list(self.frontend.states.values()):
            self.frontend.drop(state.request_id)
            stream = self._streams.get(state.request_id)
            if stream is not None:
                # An error of its own: each reader adds its traceback to it.
                own = EngineDeadError(str(error))
                own.__cause__ = error.__cause__
                stream._end(own)
        self._note_idle()
        if not self._buried.done():
            self._buried.set_result(error)


class _Link(asyncio.Protocol):
    """The engine process and the socket to it.

    Before :meth:`serve`, messages are waited for by :meth:`expect`; after it they are handed on.
    """

    def __init__(self, child: BaseProcess | None, end: socket.socket) -> None:
        self._child = child
        # For what the process said last, in case sending is first to find that it is gone.
        self._end = end
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._receive: Any = self._inbox.put_nowait
        self._bury: Any = None
        self._failure: Failure | None = None
        self._lost = asyncio.Event()
        self._ended: asyncio.Task[None] | None = None
        if child is not None:
            atexit.register(child.kill)

    @classmethod
    async def open(
        cls,
        model: str,
        config: EngineConfig,
        max_step_time: float | None,
        warm_up: bool,
        listener: socket.socket | None = None,
    ) -> Self:
        """Start the process."""
        log_level = logging.getLogger("engine_core").getEffectiveLevel()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            child = multiprocessing.get_context("spawn").Process(
                target=process.main,
                args=(
                    theirs,
                    os.getpid(),
                    log_level,
                    model,
                    config,
                    max_step_time,
                    warm_up,
                    listener,
                ),
                name="engine-core",
                # It has children of its own with tensor parallelism, as a daemon may not.
                daemon=False,
            )
            child.start()
        if listener is not None:
            listener.close()
        return await cls._over(ours, child)

    @classmethod
    async def connect(cls, path: Path) -> Self:
        """Connect to a process that another one has started."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.connect(str(path))
        except OSError as error:
            raise _death(None, None, None) from error
        return await cls._over(end, None)

    @classmethod
    async def _over(cls, end: socket.socket, child: BaseProcess | None) -> Self:
        process.enlarge(end)
        link = cls(child, end.dup())
        end.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=end)
        return link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        # uvloop's transport does not derive from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        try:
            for message in self._decoder.feed(data):
                self._take(message)
        except Exception as error:
            # Results that cannot be taken in leave no way to go on.
            trace = "".join(traceback.format_exception(error))
            self._failure = Failure(f"{type(error).__name__}: {error}", trace)
            assert self._transport is not None, "it was opened"
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._end.setblocking(False)
        with contextlib.suppress(OSError), self._end:
            while self._failure is None and (data := self._end.recv(1 << 20)):
                self.data_received(data)
        self._ended = asyncio.ensure_future(self._see_it_end())

    def _take(self, message: Any) -> None:
        if isinstance(message, Failure):
            self._failure = message
        elif isinstance(message, logging.LogRecord):
            log = logging.getLogger(message.name)
            if log.isEnabledFor(message.levelno):
                log.handle(message)
        else:
            self._receive(message)

    def send(self, message: Any) -> None:
        """Send ``message``; lost if the process is gone."""
        assert self._transport is not None, "it was opened"
        if not self._transport.is_closing():
            self._transport.write(process.encode(message))

    async def expect(self, kind: type[_T]) -> _T:
        """The next message, which is of this kind.

        Raises:
            EngineError: what the process raised instead.
            EngineDeadError: the process ended.
        """
        message = await self._inbox.get()
        if isinstance(message, EngineDeadError):
            self._inbox.put_nowait(message)
            if self._failure is not None and self._failure.error is not None:
                raise self._failure.error from message.__cause__
            raise message
        assert isinstance(message, kind), f"{message!r} where a {kind.__name__} was expected"
        return message

    def serve(
        self, receive: Callable[[Any], None], bury: Callable[[EngineDeadError], None]
    ) -> None:
        """Hand on every message from now on, and the end of the process."""
        self._receive = receive
        self._bury = bury
        while not self._inbox.empty():
            message = self._inbox.get_nowait()
            if isinstance(message, EngineDeadError):
                bury(message)
            else:
                receive(message)

    def give_up(self, why: str) -> None:
        """Kill a hung process once it has written its stacks to stderr."""
        if self._child is None or self._lost.is_set() or self._failure is not None:
            return
        self._failure = Failure(why, "the stacks of its threads are on stderr")
        assert self._child.pid is not None, "the process was started"
        os.kill(self._child.pid, signal.SIGUSR1)
        asyncio.get_running_loop().call_later(_LAST_WORDS_SECONDS, self._kill)

    def _kill(self) -> None:
        if self._child is not None and not self._lost.is_set():
            self._child.kill()

    async def close(self, *, kill: bool) -> None:
        """End the process and wait for that."""
        if kill:
            self._kill()
        assert self._transport is not None, "it was opened"
        self._transport.abort()  # What was not sent yet is of no use to it any more.
        await self._lost.wait()

    async def _see_it_end(self) -> None:
        """Wait for the process, whose socket is closed, and say how it ended."""
        child = self._child
        if child is None:
            error = _death(None, None, self._failure)
        else:
            await asyncio.to_thread(child.join, _STOP_SECONDS)
            if child.exitcode is None:
                child.kill()
                await asyncio.to_thread(child.join)
            atexit.unregister(child.kill)
            error = _death(child.pid, child.exitcode, self._failure)
            child.close()
        self._lost.set()
        if self._bury is not None:
            self._bury(error)
        else:
            self._inbox.put_nowait(error)


def _death(pid: int | None, code: int | None, failure: Failure | None) -> EngineDeadError:
    """Why the engine process is gone; ``pid`` is None in a process that did not start it."""
    if failure is not None:
        error = EngineDeadError(failure.message)
        error.__cause__ = RemoteTracebackError(failure.trace)
        return error
    if pid is None:
        return EngineDeadError("the engine process has ended")
    if code is not None and code < 0:
        how = f"by signal {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += "; if nobody sent it, the system ran out of memory"
    else:
        how = f"with exit code {code}"
    return EngineDeadError(f"the engine process (pid {pid}) ended {how}")


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


__all__ = ["AsyncEngine", "RequestStream"]
