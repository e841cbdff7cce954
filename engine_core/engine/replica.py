"""Handles on engine cores: all that a frontend knows of one, wherever it runs."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from engine_core import own_process
from engine_core.configs import EngineConfig
from engine_core.engine import process
from engine_core.engine.arguments import WarmUp, check_children
from engine_core.engine.process import Decoder, Failure
from engine_core.errors import EngineDeadError, OptionError, RemoteTracebackError

_T = TypeVar("_T")

# How long a process that was told to end, or whose socket is closed, has until it is killed.
_STOP_SECONDS = 5.0
# Seconds that a hung process has to write its stacks.
_LAST_WORDS_SECONDS = 5.0


class Replica(ABC):
    """A handle on one engine core: sequences go in, and what its steps bring comes out.

    Its messages are those of ``engine.process``. :class:`Found` and :class:`Ready` come first, each
    waited for by :meth:`expect`; from :meth:`serve` on the results of steps are handed on.
    """

    @abstractmethod
    async def expect(self, kind: type[_T]) -> _T:
        """The next message, which is of this kind.

        Raises:
            EngineError: what the core raised instead.
            EngineDeadError: the core is gone.
        """

    @property
    @abstractmethod
    def is_closing(self) -> bool:
        """Whether what is sent is lost, though it may not be known yet why."""

    @abstractmethod
    def serve(
        self, receive: Callable[[Any], None], bury: Callable[[EngineDeadError], None]
    ) -> None:
        """Hand on every message from now on, and in the end the reason why the core is gone."""

    @abstractmethod
    def send(self, message: Any) -> None:
        """Send a command: "add", "abort", "finish", "trace" or "take_trace", and its arguments.

        It is lost if the core is gone.
        """

    @abstractmethod
    def give_up(self, why: str) -> None:
        """End a core that hangs, which then tells why as the reason of its end."""

    @abstractmethod
    async def close(self, *, kill: bool) -> None:
        """End the core and wait for that; ``kill`` does not let it end by itself."""


class MessageReplica(Replica):
    """A core that sends its messages as a stream of bytes.

    Args:
        label: begins each line that it logs.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._decoder = Decoder()
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._receive: Any = self._inbox.put_nowait
        self._bury: Any = None
        self._failure: Failure | None = None

    def _feed(self, data: bytes) -> bool:
        """Take in bytes; False if they can make no sense, as the failure then says."""
        try:
            for message in self._decoder.feed(data):
                self._take(message)
        except Exception as error:
            # Results that cannot be taken in leave no way to go on.
            trace = "".join(traceback.format_exception(error))
            self._failure = Failure(f"{type(error).__name__}: {error}", trace)
            return False
        return True

    def _take(self, message: Any) -> None:
        if isinstance(message, Failure):
            self._failure = message
        elif isinstance(message, logging.LogRecord):
            log = logging.getLogger(message.name)
            if log.isEnabledFor(message.levelno):
                message.msg, message.args = self._label + message.getMessage(), None
                log.handle(message)
        else:
            self._receive(message)

    async def expect(self, kind: type[_T]) -> _T:
        """See :class:`Replica`."""
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
        """See :class:`Replica`."""
        self._receive = receive
        self._bury = bury
        while not self._inbox.empty():
            message = self._inbox.get_nowait()
            if isinstance(message, EngineDeadError):
                bury(message)
            else:
                receive(message)

    def _end_with(self, error: EngineDeadError) -> None:
        """Tell why the core is gone."""
        if self._bury is not None:
            self._bury(error)
        else:
            self._inbox.put_nowait(error)


class ProcessReplica(asyncio.Protocol, MessageReplica):
    """A core in a process of its own, and the socket to it."""

    def __init__(self, child: BaseProcess | None, end: socket.socket, label: str) -> None:
        super().__init__(label)
        self._child = child
        # For what the process said last, in case sending is first to find that it is gone.
        self._end = end
        self._transport: asyncio.Transport | None = None
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
        warm_up: WarmUp,
        listener: socket.socket | None = None,
        environment: Mapping[str, str] | None = None,
        label: str = "",
    ) -> Self:
        """Start the process, with these changes of the environment; ``label`` begins its logs.

        Raises:
            OptionError: this process may start none.
        """
        check_children("AsyncEngine")
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
            with _environment(environment or {}), own_process.main_left_out((model, config)):
                child.start()
        if listener is not None:
            listener.close()
        return await cls._over(ours, child, label)

    @classmethod
    async def connect(cls, path: Path) -> Self:
        """Connect to a process that another one has started."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.connect(str(path))
        except OSError as error:
            raise death(None, None, None) from error
        return await cls._over(end, None)

    @classmethod
    async def _over(cls, end: socket.socket, child: BaseProcess | None, label: str = "") -> Self:
        process.enlarge(end)
        link = cls(child, end.dup(), label)
        end.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=end)
        return link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        # uvloop's transport does not derive from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        if not self._feed(data):
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
        super()._take(message)
        if isinstance(message, Failure):
            # Threads of a model's, or a broken device, may keep it from ending.
            asyncio.get_running_loop().call_later(_STOP_SECONDS, self._kill)

    @property
    def is_closing(self) -> bool:
        """See :class:`Replica`."""
        assert self._transport is not None, "it was opened"
        # One that failed or hangs may take seconds to end.
        return self._failure is not None or self._transport.is_closing()

    def send(self, message: Any) -> None:
        """See :class:`Replica`."""
        if self._transport is not None and not self.is_closing:
            self._transport.write(process.encode(message))

    def give_up(self, why: str) -> None:
        """Kill a process that hangs once it has written its stacks to stderr."""
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
        """See :class:`Replica`."""
        if kill:
            self._kill()
        assert self._transport is not None, "it was opened"
        self._transport.abort()  # What was not sent yet is of no use to it any more.
        await self._lost.wait()

    async def _see_it_end(self) -> None:
        """Wait for the process, whose socket is closed, and say how it ended."""
        child = self._child
        if child is None:
            error = death(None, None, self._failure)
        else:
            await asyncio.to_thread(child.join, _STOP_SECONDS)
            if child.exitcode is None:
                child.kill()
                await asyncio.to_thread(child.join)
            atexit.unregister(child.kill)
            name = f"the engine process (pid {child.pid})"
            error = death(name, child.exitcode, self._failure)
            child.close()
        self._lost.set()
        self._end_with(error)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Change what a process that is started in the ``with`` block inherits.

    Libraries read some of it when they are loaded, and a user's script may import them before that
    process gets to anything of ours.
    """
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


async def environments(config: EngineConfig, replicas: int) -> list[dict[str, str]]:
    """The environment of each replica on this machine: its own GPUs, or its share of the cores.

    Raises:
        OptionError: there are too few GPUs, or ``config.device`` names one for all of them.
    """
    if replicas == 1:
        return [{}]
    if config.device not in ("auto", "cpu", "cuda"):
        raise OptionError(
            f"{replicas} replicas take GPUs of their own, but device is {config.device!r}; leave "
            "it out, and set CUDA_VISIBLE_DEVICES to choose GPUs"
        )
    gpus: list[str] = []
    if config.device != "cpu":
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            with own_process.main_left_out(()):  # the process begins with the first task
                counting = pool.submit(_count_gpus)
            count = await asyncio.wrap_future(counting)
        # A name of the user's list is that GPU's number; without one they are counted from 0.
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = list(map(str, range(count))) if given is None else given.split(",")[:count]
    if not gpus and config.device != "cuda":
        given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        # OpenMP warns of what is no number, and takes all cores.
        cores = int(given) if given.isdecimal() and int(given) else own_process.count_cores()
        threads = str(max(1, cores // replicas))
        return [{"OMP_NUM_THREADS": threads, own_process.HOST_SHARE: str(replicas)}] * replicas
    size = config.num_ranks
    if replicas * size > len(gpus):
        most = len(gpus) // size
        advice = f"ask for at most {most} replicas" if most > 1 else "leave replicas out"
        raise OptionError(
            f"replicas is {replicas} and the ranks of each {size}: they take {replicas * size} "
            f"GPUs, but torch sees {len(gpus)}; {advice}"
        )
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index * size : (index + 1) * size])}
        for index in range(replicas)
    ]


def _count_gpus() -> int:
    """GPUs that torch sees; called in a process of its own, so that this one needs no torch."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def death(process: str | None, code: int | None, failure: Failure | None) -> EngineDeadError:
    """The end of the engine process, by its own words or by how it ended.

    Args:
        process: what it is called; None if another process started it.
        code: its exit code, below 0 for a signal; None if it is not known.
        failure: what it said.
    """
    if failure is not None:
        error = EngineDeadError(failure.message)
        error.__cause__ = RemoteTracebackError(failure.trace)
        return error
    if process is None or code is None:
        return EngineDeadError(f"{process or 'the engine process'} has ended")
    return EngineDeadError(f"{process} ended {own_process.how_ended(code)}")


__all__ = [
    "MessageReplica",
    "ProcessReplica",
    "Replica",
    "death",
    "environments",
]
