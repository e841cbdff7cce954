"""The engine's own process: an :class:`EngineCore` behind sockets."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import logging.handlers
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from engine_core import own_process
from engine_core.configs import EngineConfig, ModelConfig, SchedulerConfig
from engine_core.engine.arguments import WarmUp
from engine_core.engine.trace import EngineTrace
from engine_core.errors import EngineDeadError, EngineError, RequestError
from engine_core.plugin_code import described
from engine_core.steps import EngineStats, NewSequence, RowError, TokenUpdate, TokenUpdates

if TYPE_CHECKING:
    import torch

    from engine_core.engine.core import EngineCore
    from engine_core.runtime.compiles import Compiles
    from engine_core.runtime.source import ModelSource

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<Q")
_READ_BYTES = 1 << 20
_BUFFER_BYTES = 4 << 20  # asked for; the system gives what it allows
# What each frontend's numbers of sequences are below.
_NUMBERS = 1 << 40
# How long a core that has work and can do none of it waits for something to change.
_STALLED_SECONDS = 0.001
# How long it waits for commands at a time while the device is busy: what a wait can be told at
# least, and what a step that ends sooner than expected costs at most.
_SPARE_SECONDS = 0.001
# By the kind of device: seconds that a step with decoding rows should take unless a user says so,
# and the tokens of prompts in it before any step was seen. No reader notices a gap of 30 ms; two
# cores of a CPU need 250 ms for prompts to get on at all.
_STEP_SECONDS = {"cpu": 0.25, "cuda": 0.03}
_FIRST_BUDGET = {"cpu": 128, "cuda": 512}
# How often as long a step may take while prompts for more than so many steps wait. Simulated with
# Poisson arrivals on an H200: at 32 requests a second 1.4 takes the first token's 99th percentile
# from 252 to 202 ms; at 16, where prompts seldom wait, that of the gaps stays. Sizes of steps there
# differ by a tenth in tokens a second, and prompts for 2 steps are often done sooner in one long
# step. On a CPU a step of one row costs as much as 33 tokens of a prompt and each further row as
# 1.6: fewer steps are less work. Simulated with 100 prompts at once, 4, 5 and 6 there have first
# tokens after 78.7, 76.7 and 76.5 s in the median (73 if steps have no limit), and steps that are
# up to 1.4 times as long stay below 2 s with 4 and 5.
_BACKLOG_STRETCH = {"cpu": 5.0, "cuda": 1.4}
_BACKLOG_STEPS = {"cpu": 2.5, "cuda": 2.0}
# Seconds that steps are timed for, while there are no requests, at most.
_TRIAL_SECONDS = {"cpu": 0.5, "cuda": 2.0}
# While grammars are compiled and nothing else is done, word is sent each so many seconds.
_QUIET_SECONDS = 0.5
# Seconds of idleness before a step is captured ahead: a client that sends one request after the
# other must not wait for one capture after the other.
_IDLE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Found:
    """The engine process's message once it has opened the model, before loading it.

    Attributes:
        pid: the engine process.
        model_config: the model's.
        generation_config: the checkpoint's.
        eos_token_ids: the tokens that end a sequence.
        tokenizer_folder: where the tokenizer's files are; None if none is wanted.
        has_input_processor: whether the family says more of a prompt than its tokens.
    """

    pid: int
    model_config: ModelConfig
    generation_config: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    tokenizer_folder: Path | None
    has_input_processor: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine process's message once it can take requests.

    Attributes:
        scheduler_config: the scheduler's limits.
        cache_plan: the plan of the cache, pickled: its specs may be a model author's, whose module
            the other process need not have.
        startup: seconds that each phase of loading took.
        block_size: tokens of the cache's smallest block.
        num_blocks: as many blocks as the cache has room for, in sequences of some length; 0 if
            beginnings of prompts are not kept.
    """

    scheduler_config: SchedulerConfig
    cache_plan: bytes
    startup: Mapping[str, float]
    block_size: int = 1
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the engine process ends.

    Attributes:
        message: the root cause in a line.
        trace: the traceback as text.
        error: the error itself, if it is one to be raised where the engine was started.
    """

    message: str
    trace: str
    error: EngineError | None = None


def encode(message: Any) -> bytes:
    """A message with its length before it."""
    return framed(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def framed(content: bytes) -> bytes:
    """A pickled message with its length before it."""
    return _HEADER.pack(len(content)) + content


class Decoder:
    """Messages out of a stream of bytes that arrives in any pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def has_partial(self) -> bool:
        """Whether a message has arrived in part."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that ``data`` completes."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _HEADER.size:
            (size,) = _HEADER.unpack_from(buffer, start)
            end = start + _HEADER.size + size
            if end > len(buffer):
                break
            with memoryview(buffer) as view:
                message = pickle.loads(view[start + _HEADER.size : end])
            start = end
            yield message
        del buffer[:start]


def enlarge(end: socket.socket) -> None:
    """Let ``end`` hold some steps' results while the other side is busy."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)


class _Channel:
    """One socket of the engine process; sending never waits for the other side to read.

    Attributes:
        end: the socket.
        base: what is added here to the numbers of its sequences.
        added: sequences that came from the other side.
        unsent: what the socket was too full for.
    """

    def __init__(self, end: socket.socket, base: int) -> None:
        end.setblocking(False)
        enlarge(end)
        self.end = end
        self.base = base
        self.added = 0
        self.unsent: deque[memoryview] = deque()
        self._decoder = Decoder()

    def send(self, message: Any) -> None:
        """Send ``message``, now or, as far as the socket is full, at a later call."""
        self.unsent.append(memoryview(encode(message)))
        self.write()

    @property
    def is_receiving(self) -> bool:
        """Whether a message has arrived in part."""
        return self._decoder.has_partial

    def flush(self) -> None:
        """Wait until everything is sent, or the other side is gone."""
        self.end.setblocking(True)
        try:
            while self.unsent:
                self.end.sendall(self.unsent.popleft())
        except OSError:
            self.unsent.clear()

    def read(self) -> list[Any]:
        """Messages that have arrived.

        Raises:
            EOFError: the other side is gone.
        """
        messages: list[Any] = []
        while True:
            try:
                data = self.end.recv(_READ_BYTES)
            except BlockingIOError:
                return messages
            except OSError:
                data = b""
            if not data:
                raise EOFError
            messages += self._decoder.feed(data)

    def write(self) -> None:
        """Send what was not sent yet, as far as the socket has room."""
        unsent = self.unsent
        try:
            while unsent:
                sent = self.end.send(unsent[0])
                if sent == len(unsent[0]):
                    unsent.popleft()
                else:
                    unsent[0] = unsent[0][sent:]
        except BlockingIOError:
            return
        except OSError:
            unsent.clear()  # Reading tells that the other side is gone.


class _Links:
    """The channels to all frontends: the one that started this process, and those that connect.

    Args:
        end: of the socket to the first frontend, with which this process ends.
        listener: where others connect; None if there are none.
    """

    def __init__(self, end: socket.socket, listener: socket.socket | None) -> None:
        self._first = _Channel(end, 0)
        self._channels = {end.fileno(): self._first}
        self._owners: dict[str, _Channel] = {}
        self._connected = 0
        self._listener = listener
        # What each frontend is told first, and last.
        self._hello: list[Any] = []
        self._stats = EngineStats()
        # Any thread may log; this one sends it with the next message, or before it waits for one.
        self._logged: SimpleQueue[Any] = SimpleQueue()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def log_handler(self) -> logging.Handler:
        """Sends what is logged to the first frontend, which says its level and where it is from."""
        handler = logging.handlers.QueueHandler(self._logged)
        # Else basicConfig gives it one that says so, too.
        handler.setFormatter(logging.Formatter("%(message)s"))
        return handler

    def greet(self, message: Any) -> None:
        """Send ``message`` to the first frontend, and to each that connects."""
        self._hello.append(message)
        self._take_logged()
        self._first.send(message)

    def accept(self) -> None:
        """Let frontends connect from now on."""
        if self._listener is not None:
            self._listener.setblocking(False)
            self._poll.register(self._listener, select.POLLIN)

    @property
    def all_sent(self) -> bool:
        """Whether the other sides have everything, or the sockets hold it for them."""
        return not any(channel.unsent for channel in self._channels.values())

    @property
    def is_receiving(self) -> bool:
        """Whether a message has arrived in part."""
        return any(channel.is_receiving for channel in self._channels.values())

    def receive(self, wait: float | None) -> list[Any]:
        """Return received commands; wait up to ``wait`` seconds for one, or for ever if None.

        A frontend that is gone aborts its sequences.

        Raises:
            EOFError: the first one is gone.
        """
        messages: list[Any] = []
        self._take_logged()
        while True:
            for channel in self._channels.values():
                if channel.unsent:
                    channel.write()
                events = select.POLLIN | (select.POLLOUT if channel.unsent else 0)
                self._poll.modify(channel.end, events)
            for fd, event in self._poll.poll(None if wait is None else wait * 1000):
                if fd not in self._channels:
                    self._welcome()
                elif event & ~select.POLLOUT:
                    messages += self._read(self._channels[fd])
            if messages or wait is not None:
                return messages

    def _read(self, channel: _Channel) -> list[Any]:
        try:
            messages = channel.read()
        except EOFError:
            if channel is self._first:
                raise
            self._poll.unregister(channel.end)
            del self._channels[channel.end.fileno()]
            channel.end.close()
            left = [name for name, owner in self._owners.items() if owner is channel]
            for name in left:
                del self._owners[name]
            return [("abort", left)]
        for name, *arguments in messages:
            if name == "add":
                new = arguments[0]
                channel.added += len(new)
                if channel is not self._first:
                    new[:] = [one._replace(number=channel.base + one.number) for one in new]
                    self._owners.update((one.sequence_id, channel) for one in new)
            else:  # it ends one or several
                for sequence_id in arguments[0] if name == "abort" else arguments[:1]:
                    self._owners.pop(sequence_id, None)
        return messages

    def _welcome(self) -> None:
        assert self._listener is not None, "it is polled"
        with contextlib.suppress(BlockingIOError):  # whoever it was has left again
            end, _ = self._listener.accept()
            self._connected += 1
            channel = _Channel(end, self._connected * _NUMBERS)
            self._channels[end.fileno()] = channel
            self._poll.register(end, select.POLLIN)
            for message in (*self._hello, ([], b"", b"", self._stats._replace(added=0))):
                channel.send(message)

    def send(self, updates: TokenUpdates, stats: EngineStats) -> None:
        """Send each frontend the updates of its sequences, and all of them the figures.

        Its own :attr:`EngineStats.added` tells each which of its sequences were taken in.
        """
        self._stats = stats
        self._take_logged()
        columns = updates.columns
        several = len(self._channels) > 1
        for channel in self._channels.values():
            base, others = channel.base, updates.others
            numbers = tokens = b""
            if columns is not None:
                theirs = columns.numbers, columns.tokens
                if several:
                    own = columns.numbers // _NUMBERS * _NUMBERS == base
                    theirs = columns.numbers[own] - base, columns.tokens[own]
                numbers, tokens = theirs[0].tobytes(), theirs[1].tobytes()
            if several:
                others = [u for u in others if base <= u.number < base + _NUMBERS]
                others = [u._replace(number=u.number - base) for u in others] if base else others
            # As plain tuples, which take a quarter of the time to pickle.
            plain = list(map(tuple, others))
            channel.send((plain, numbers, tokens, stats._replace(added=channel.added)))
        if self._owners:
            for update in updates.others:
                if update.finish_reason is not None:
                    self._owners.pop(update.sequence_id, None)

    def answer(self, message: Any) -> None:
        """Send ``message`` to the first frontend."""
        self._first.send(message)

    def fail(self, failure: Failure) -> None:
        """Tell every frontend why this process ends."""
        self._take_logged()
        for channel in self._channels.values():
            channel.send(failure)
            channel.flush()

    def _take_logged(self) -> None:
        while not self._logged.empty():
            self._first.unsent.append(memoryview(encode(self._logged.get_nowait())))


def main(
    end: socket.socket,
    parent: int,
    log_level: int,
    model: str,
    config: EngineConfig,
    max_step_time: float | None,
    warm_up: WarmUp,
    listener: socket.socket | None = None,
) -> None:
    """The life of the engine process: load ``model``, then serve until ``end`` is closed.

    It ends with code 1 if the model cannot run or fails, and says why before.

    Args:
        end: of a stream socket; commands come in and results go out.
        parent: the process whose end is its end.
        log_level: what is less severe than this is not worth sending.
        model: a checkpoint folder, a GGUF file or a hub id.
        config: the engine's settings.
        max_step_time: seconds that a step with decoding rows should take at most; None for what
            suits the device.
        warm_up: when all likely steps are captured.
        listener: where further frontends connect; None if there are none.
    """
    own_process.claim()
    # Both go to every process of a terminal or a service; the parent decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(RuntimeError):  # there is no stderr
        # What the other side sends before it kills a process that hangs.
        faulthandler.register(signal.SIGUSR1)
    own_process.die_with(parent)
    links = _Links(end, listener)
    logging.basicConfig(level=log_level, handlers=[links.log_handler()], force=True)
    try:
        _serve(links, model, config, max_step_time, warm_up)
    except EOFError:
        return
    except EngineDeadError as error:
        cause = error.__cause__ or error
        links.fail(Failure(str(error), "".join(traceback.format_exception(cause))))
    except EngineError as error:
        trace = "".join(traceback.format_exception(error))
        links.fail(Failure(str(error), trace, _portable(error)))
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        links.fail(Failure(described(error), trace))
    sys.exit(1)


def _filling_tokens(source: ModelSource, config: EngineConfig) -> int:
    """Tokens of a prompt whose attention fills the device once: a tile of 128 pairs of a token and
    a head for each multiprocessor of a GPU.
    """
    if source.device.type != "cuda":
        return 1
    from engine_core.kernels.gpu import gpu_of

    gpu = gpu_of(source.device)
    heads = max(1, source.model_config.num_attention_heads // config.tensor_parallel_size)
    return 128 * gpu.num_multiprocessors // heads if gpu is not None else 1


def _serve(
    links: _Links,
    model: str,
    config: EngineConfig,
    max_step_time: float | None,
    warm_up: WarmUp,
) -> None:
    from engine_core.engine.beside import begun_early, compile_beside
    from engine_core.engine.core import EngineCore
    from engine_core.engine.pacing import Pacing
    from engine_core.engine.startup import load, open_engine
    from engine_core.runtime.step_batch import ROWS_BESIDE

    with begun_early(config) as begun:
        opened = open_engine(model, config, fork=True)
        source = opened.source
        with opened.on_failure_ended():
            compiles = compile_beside(opened, begun)
            links.greet(
                Found(
                    pid=os.getpid(),
                    model_config=source.model_config,
                    generation_config=opened.generation_config,
                    eos_token_ids=opened.eos_token_ids,
                    tokenizer_folder=(
                        None
                        if config.skip_tokenizer_init or config.tokenizer is not None
                        else source.checkpoint.tokenizer_folder
                    ),
                    has_input_processor=source.has_input_processor,
                )
            )
            # Vocabularies are read now, and not while the first guided request waits.
            reads = bool(warm_up) and not config.skip_tokenizer_init
            reads = reads and find_spec("llguidance") is not None
            loaded = load(opened, compiles=compiles, guides=reads)
            # Offline the first token comes the sooner; nobody is to wait who comes later.
            loaded.executor.wait_for_prompts()
    kind = source.device.type
    core = EngineCore(
        loaded,
        Pacing(
            loaded.scheduler,
            loaded.depth,
            max_step_time=max_step_time or _STEP_SECONDS[kind],
            backlog_stretch=_BACKLOG_STRETCH[kind],
            backlog_steps=_BACKLOG_STEPS[kind],
            first_budget=_FIRST_BUDGET[kind],
            filling_tokens=_filling_tokens(source, config),
            rooms=ROWS_BESIDE if kind == "cuda" else (),
            steady=kind == "cuda",
        ),
        beside=True,
    )
    try:
        seconds = 0.0
        guides = core.executor.prepare(None) if reads else None
        # Else what a family's rows need is known with their first request.
        if warm_up and source.state_known and source.model_config.pooling is None:
            seconds = _TRIAL_SECONDS[kind]
        # On a CPU there is nothing to capture, and steps are timed in a moment.
        before = warm_up is True or (warm_up == "beside" and kind == "cpu")
        if before:
            _capture_expected(core, source.device if config.num_ranks == 1 else None, compiles)
        if guides is not None:
            core.wait_prepared(guides)  # if it failed, a guided request will say it
        if before and seconds:
            for _ in core.time_steps(seconds):
                pass
            seconds = 0.0
        plan, cache = loaded.cache_plan, loaded.cache_plan.cache_config
        num_blocks = min(plan.max_tokens // cache.block_size, cache.num_blocks - 1)
        links.greet(
            Ready(
                loaded.scheduler_config,
                pickle.dumps(plan),
                dict(opened.phases),
                cache.block_size,
                num_blocks if cache.enable_prefix_caching else 0,
            )
        )
        links.accept()
        _run(links, core, _Leisure(core, compiles, seconds))
    finally:
        core.close()


class _Leisure:
    """An engine's work while nobody wants anything: it captures steps, and then times some.

    A turn takes a tenth of a second, for which a request that comes then waits.
    """

    def __init__(self, core: EngineCore, compiles: Compiles, seconds: float = 0.0) -> None:
        """``seconds``: for how long steps are timed, once all are captured; 0 for not at all."""
        self._core, self._compiles = core, compiles
        self._seconds = seconds
        self._timing: Generator[None, None, None] | None = None
        self._captured, self._begin = 0, 0.0

    def use(self) -> bool:
        """Load a kernel, capture half a step, time one, or wait a moment; False if all is done."""
        begin, late = time.monotonic(), self._compiles.late
        if self._core.capture_next(part=True):
            self._begin = self._begin or begin
            self._captured += self._compiles.late == late
            return True
        if self._captured:
            seconds = time.monotonic() - self._begin
            logger.info(
                "captured %d more CUDA graphs while idle, within %.1f s", self._captured, seconds
            )
        self._captured, self._begin = 0, 0.0
        if self._seconds and self._timing is None:
            self._timing = self._core.time_steps(self._seconds)
        for _ in self._timing or ():
            return True
        self._timing, self._seconds = None, 0.0
        return False

    def end(self) -> None:
        """Leave off, as there is something to do. Steps are timed anew another time."""
        if self._timing is not None:
            self._timing.close()
            self._timing = None


def _run(links: _Links, core: EngineCore, leisure: _Leisure) -> None:
    """Take commands and step until the first frontend is gone; when idle, use the leisure."""
    wait: float | None = _IDLE_SECONDS
    refused: list[TokenUpdate] = []
    heard = False
    told = 0.0
    while True:
        begin = time.monotonic()
        commands = links.receive(wait)
        if wait != 0.0:
            begin = time.monotonic()  # it may have waited for them
        if not commands and not core.has_unfinished and links.all_sent:
            if links.is_receiving:
                # A command is larger than what the socket holds; its end is on the way.
                wait = None
                continue
            # The engine is idle. A request that comes now waits for half a capture at most.
            wait = 0.0 if leisure.use() else None
            continue
        if commands:
            leisure.end()
        heard = heard or bool(commands)
        for command in commands:
            _obey(links, core, refused, *command)
            del command  # it would live until the next one, and pictures with it
        if commands and core.trace is not None:
            core.trace.took(len(commands), begin)
        if core.spare_seconds >= _SPARE_SECONDS:
            wait = _SPARE_SECONDS
            continue
        before = (core.num_steps, core.num_in_flight)
        updates = core.step() if core.has_unfinished else TokenUpdates([])
        moved = before != (core.num_steps, core.num_in_flight)
        # Told after every step, also one that brought nothing: it took somebody in, or gave blocks
        # back.
        quiet = time.monotonic() - told < _QUIET_SECONDS
        if heard or moved or updates or (core.is_preparing and not quiet):
            told = time.monotonic()
            links.send(replace(updates, others=refused + updates.others), core.stats())
            if core.trace is not None:
                core.trace.sent()
            refused, heard = [], False
        busy = 0.0 if moved else _STALLED_SECONDS
        wait = busy if core.has_unfinished else _IDLE_SECONDS


def _obey(
    links: _Links, core: EngineCore, refused: list[TokenUpdate], name: str, *arguments: Any
) -> None:
    if name == "add":
        _add(core, arguments[0], refused)
    elif name == "abort":
        for sequence_id in arguments[0]:
            core.abort(sequence_id)
    elif name == "trace":
        core.trace = core.trace or EngineTrace()  # each frontend asks for it
    elif name == "take_trace":
        links.answer(core.trace)
    else:
        core.finish(*arguments)


def _capture_expected(core: EngineCore, device: torch.device | None, compiles: Compiles) -> None:
    """Capture all steps that are expected, so that no request waits for a capture.

    ``device`` is this process's; None if ranks in other processes have the devices: to ask for the
    memory of one would take some of it.
    """
    from engine_core.runtime.platform import used_memory

    begin, captured = time.monotonic(), 0
    before = 0 if device is None else used_memory(device)
    while core.capture_next():
        captured += 1
    captured -= compiles.late
    if captured:
        seconds, memory = time.monotonic() - begin, ""
        if device is not None:
            memory = f" and {(used_memory(device) - before) >> 20} MiB"
        logger.info("captured %d more CUDA graphs at start, in %.1f s%s", captured, seconds, memory)


def _add(core: EngineCore, sequences: Sequence[NewSequence], refused: list[TokenUpdate]) -> None:
    for sequence in sequences:
        try:
            core.add(sequence)
        except RequestError as error:
            refused.append(
                TokenUpdate(
                    sequence.sequence_id,
                    (),
                    finish_reason="error",
                    error=RowError(error.code, str(error)),
                    number=sequence.number,
                )
            )


def _portable(error: EngineError) -> EngineError | None:
    """The error if it survives being sent, else None."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return copy if isinstance(copy, EngineError) else None


__all__ = ["Decoder", "Failure", "Found", "Ready", "encode", "enlarge", "framed", "main"]
