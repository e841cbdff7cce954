"""The side of a pool that gives work; see :class:`WorkerPool`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from engine_core.errors import EngineDeadError, QueueFullError
from engine_core.workers import template
from engine_core.workers.template import STATUS
from engine_core.workers.turns import Turns

# A template that was told to end has so long until it is killed.
_STOP_SECONDS = 5.0
# Threads that the libraries of a template would start, as forks have none of them.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
_MIB = 2**20


class WorkerError(Exception):
    """A task was ended at a limit, or its process died; the message says which, without a name.

    Attributes:
        repeatable: whether the same task would end so again, as far as is known.
    """

    def __init__(self, message: str, *, repeatable: bool = True) -> None:
        super().__init__(message)
        self.repeatable = repeatable


class _TemplateDiedError(WorkerError):
    """The template ended while a worker was at a task."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what a task may take.

    Attributes:
        seconds: until it is killed; time in the queue does not count.
        memory_bytes: address space beyond what a worker begins with.
        stack_bytes: stack of its main thread.
    """

    seconds: float
    memory_bytes: int
    stack_bytes: int


class WorkerPool:
    """Runs functions in processes made for one call each, under limits.

    The workers are forks of template processes, one for each :meth:`setup`, which imports and makes
    once what its tasks need. A fork takes milliseconds, shares the template's memory, and takes
    with it whatever a call left behind. It may be used from several threads, and after a fork,
    which gets templates of its own.

    Args:
        max_workers: tasks that run at once. One place is never taken by the tasks of the same
            setup, so that those of others need not wait until these are done.
        max_queued: tasks of a setup that may wait for a worker.
    """

    def __init__(self, *, max_workers: int = 3, max_queued: int = 64) -> None:
        self._max_workers = max_workers
        self._max_queued = max_queued
        self._closed = False
        self._setups: list[Workers] = []  # the next one whose turn it is first
        self._begin()

    def _begin(self) -> None:
        """Begin anew in this process, to which a fork brings no threads."""
        self._owner = os.getpid()
        self._threads = ThreadPoolExecutor(
            self._max_workers, thread_name_prefix="engine-core-workers"
        )
        self._lock = threading.Lock()
        for setup in self._setups:
            setup._begin()

    def setup(
        self,
        initializer: str,
        arguments: Callable[[], tuple[Any, ...]],
        limits: Limits,
        *,
        what: str = "the worker",
    ) -> Workers:
        """Workers that begin alike. Nothing runs before their first task or :meth:`Workers.start`.

        Args:
            initializer: ``module:function``; what it returns is the first argument of every task.
            arguments: makes picklable ones for the initializer, when the template is started.
            limits: of each task.
            what: what the template is called in messages.
        """
        made = Workers(self, initializer, arguments, limits, what)
        with self._lock:
            self._setups.append(made)
        return made

    def close(self) -> None:
        """End all workers and templates; it may be called twice."""
        with self._lock:
            self._closed = True
            templates = [setup._template for setup in self._setups]
            waiting = [task for setup in self._setups for task in setup._turns.clear()]
            for setup in self._setups:
                setup._template = None
        for template_ in templates:
            if template_ is not None:
                template_.close()
        self._threads.shutdown(wait=False)
        for task in waiting:
            task.refuse(_closed())

    def _submit(self, setup: Workers, task: _Given) -> None:
        if self._owner != os.getpid():
            self._begin()
        shed = full = None
        with self._lock:
            if self._closed:
                raise _closed()
            if setup.unfinished >= self._places + self._max_queued:
                full = QueueFullError(
                    f"{setup.unfinished} requests wait for {setup._what} already; this one can be "
                    "served later"
                )
                if (shed := setup._turns.shed(task.client)) is None:
                    raise full
            setup._turns.add(task.client, task, task.cost, task.lane)
            self._dispatch()
        if shed is not None and full is not None:  # its callbacks may submit
            shed.refuse(full)

    def _leave(self, setup: Workers, task: _Given) -> None:
        """Nobody waits for the task any more."""
        with self._lock:
            setup._turns.discard(task.client, task)

    @property
    def _places(self) -> int:
        """Tasks of one setup that may run at once."""
        return max(1, self._max_workers - 1)

    def _dispatch(self) -> None:
        """Have threads wait for as many tasks as may run, of each setup in its turn."""
        while sum(setup._turns.num_running for setup in self._setups) < self._max_workers:
            turns = ((setup, setup._turns) for setup in self._setups)
            ready = [setup for setup, t in turns if t.ready and t.num_running < self._places]
            if not ready or self._closed:
                return
            chosen = ready[0]
            self._setups.remove(chosen)
            self._setups.append(chosen)
            self._threads.submit(self._run, chosen, chosen._turns.take())

    def _run(self, setup: Workers, future: _Given) -> None:
        try:
            if future.set_running_or_notify_cancel():
                function, arguments = future.take()
                try:
                    future.set_result(setup._run(future.line, function, arguments))
                except BaseException as error:
                    # Its frames and what they hold, this future too, would wait for a collection.
                    error.__traceback__ = error.__context__ = None
                    future.set_exception(_closed() if self._closed else error)
        finally:
            with self._lock:
                setup._turns.end(future.client, future)
                self._dispatch()


class _Line:
    """The channel to the worker that is at a task, once there is one, for who may hang up."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self.hung_up = False

    def connect(self, channel: socket.socket) -> None:
        self._channel = channel
        if self.hung_up:
            self.hang_up()

    def hang_up(self) -> None:
        """End the worker: its template kills it."""
        self.hung_up = True
        if self._channel is not None:
            with contextlib.suppress(OSError):  # it is closed
                self._channel.shutdown(socket.SHUT_RDWR)


class _Given(Future[Any]):
    """The future of a task; to cancel it while it runs ends its worker."""

    def __init__(
        self,
        setup: Workers,
        function: str,
        arguments: tuple[Any, ...],
        client: Hashable,
        cost: float,
        lane: Hashable,
    ) -> None:
        super().__init__()
        self.client = client
        self.cost = cost
        self.lane = lane
        self.line = _Line()
        self._setup = setup
        self._call: tuple[str, tuple[Any, ...]] | None = (function, arguments)

    def take(self) -> tuple[str, tuple[Any, ...]]:
        """The function and its arguments, once: who keeps the future does not keep these."""
        call, self._call = self._call, None
        assert call is not None, "a task runs once"
        return call

    def refuse(self, error: Exception) -> None:
        """Have a task that will not run raise ``error``."""
        self._call = None
        if self.set_running_or_notify_cancel():
            self.set_exception(error)

    def cancel(self) -> bool:
        if super().cancel():
            self._call = None
            self._setup._pool._leave(self._setup, self)
            return True
        self.line.hang_up()
        return False


def _closed() -> EngineDeadError:
    return EngineDeadError("the engine is being shut down and takes no more requests")


class Workers:
    """The workers of one setup of a pool; see :meth:`WorkerPool.setup`."""

    def __init__(
        self,
        pool: WorkerPool,
        initializer: str,
        arguments: Callable[[], tuple[Any, ...]],
        limits: Limits,
        what: str,
    ) -> None:
        self._pool = pool
        self._initializer = initializer
        self._arguments = arguments
        self._limits = limits
        self._what = what
        self._begin()

    def _begin(self) -> None:
        self._turns: Turns[_Given] = Turns(max(1, self._pool._places - 1))
        self._template: _Template | None = None

    @property
    def unfinished(self) -> int:
        """Tasks that run or wait."""
        return self._turns.num_running + len(self._turns)

    def start(self) -> None:
        """Start the template, if there is none, and wait until it can fork workers.

        Raises:
            Exception: what the initializer raised.
            WorkerError: it died.
            EngineDeadError: the pool is closed.
        """
        self._ready_template()

    def submit(
        self,
        function: str,
        *arguments: Any,
        client: Hashable = None,
        cost: float = 1.0,
        large: bool = False,
    ) -> Future[Any]:
        """Have a worker call ``module:function`` with the initializer's value and ``arguments``.

        Clients take turns by what their tasks cost, as :class:`Turns` says. Tasks that are
        ``large`` leave one of several places of the setup to those that are not. If too many tasks
        wait, the newest of the client with the most raises :class:`QueueFullError`, if that is
        another. The future raises what the function raised, :class:`WorkerError`, or
        :class:`EngineDeadError` if the pool is closed. ``asyncio.wrap_future`` makes it one to
        await. Cancelling it ends a worker that is at the task, and the future raises
        :class:`WorkerError`.

        Raises:
            QueueFullError: too many tasks wait, and no other client has more of them.
            EngineDeadError: the pool is closed.
        """
        future = _Given(self, function, arguments, client, cost, "large" if large else None)
        self._pool._submit(self, future)
        return future

    def _ready_template(self) -> _Template:
        with self._pool._lock:
            if self._pool._closed:
                raise _closed()
            current = self._template
            if current is None or not current.usable:
                if current is not None:
                    current.close()
                # Its start is waited for below, without the lock.
                current = self._template = _Template(self._what, self._setup)
        try:
            current.wait_ready()
        except WorkerError:
            if self._pool._closed:  # it was ended meanwhile
                raise _closed() from None
            raise
        return current

    def _setup(self) -> tuple[Any, ...]:
        limits = self._limits
        return self._initializer, self._arguments(), limits.memory_bytes, limits.stack_bytes

    def _run(self, line: _Line, function: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return self._run_once(line, function, arguments)
        except _TemplateDiedError:
            # No task can end it: it was killed by somebody, or for lack of memory.
            return self._run_once(line, function, arguments)

    def _run_once(self, line: _Line, function: str, arguments: tuple[Any, ...]) -> Any:
        channel = self._ready_template().fork()
        line.connect(channel)
        deadline = time.monotonic() + self._limits.seconds
        incoming = template.Incoming(channel)
        try:
            with channel:
                channel.settimeout(self._limits.seconds)
                # A worker that is gone has left its reason.
                with contextlib.suppress(ConnectionError):
                    template.send(channel, (function, arguments))
                while True:
                    channel.settimeout(max(deadline - time.monotonic(), 1e-3))
                    if not incoming.read():
                        break
        except TimeoutError:
            message = f"it took more than {self._limits.seconds:g} s"
            raise WorkerError(message, repeatable=False) from None
        except ConnectionError:
            pass  # how it ends if the worker has not read all that it was sent
        except OSError as error:
            raise WorkerError(f"{self._what} failed: {error}", repeatable=False) from None
        if line.hung_up:
            raise WorkerError("nobody waits for it any more", repeatable=False)
        content = incoming.content
        code = None
        if len(content) >= STATUS.size:
            mark, status = STATUS.unpack(content[-STATUS.size :])
            code = status if mark == template.MARK else None
        if code != 0:
            raise self._death(code)
        fine, answer = incoming.message(-STATUS.size)
        if fine:
            return answer
        if isinstance(answer, MemoryError):
            raise WorkerError(self._memory())
        raise answer

    def _memory(self) -> str:
        return f"it needs more than {self._limits.memory_bytes // _MIB} MiB of memory"

    def _death(self, code: int | None) -> WorkerError:
        """Why a worker is gone."""
        if code is None:
            return _TemplateDiedError(f"{self._what} ended with all of its work", repeatable=False)
        if code >= 0:
            return WorkerError(f"{self._what} ended with exit code {code}")
        name = signal.Signals(-code).name
        ended = f"{self._what} ended by {name}"
        if -code in (signal.SIGSEGV, signal.SIGBUS):
            stack = self._limits.stack_bytes // 1024
            return WorkerError(f"it needs more than {stack} KiB of stack ({ended})")
        if -code == signal.SIGABRT:
            return WorkerError(f"{self._memory()} ({ended})")
        return WorkerError(ended, repeatable=False)


class _Template:
    """A template process and the socket to it."""

    def __init__(self, what: str, setup: Callable[[], tuple[Any, ...]]) -> None:
        self._what = what
        self._setup: Callable[[], tuple[Any, ...]] | None = setup
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._control, theirs = socket.socketpair()
        # Neither the user's main module nor anything else that this process imported is wanted.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from engine_core.workers.template import main; main({theirs.fileno()})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1")},
            )
        self._finalizer = weakref.finalize(self, _end, self._control, self._process, self._owner)

    @property
    def usable(self) -> bool:
        """Whether it lives."""
        return self._error is None and self._process.poll() is None

    def wait_ready(self) -> None:
        """Wait until it can fork.

        Raises:
            Exception: what its initializer raised.
            WorkerError: it died.
        """
        with self._lock:
            if self._setup is not None:
                try:
                    template.send(self._control, self._setup())
                    self._error = template.receive(self._control)
                except (EOFError, OSError):
                    code = self._process.wait(_STOP_SECONDS)
                    message = f"{self._what} ended at its start, with exit code {code}"
                    self._error = WorkerError(message, repeatable=False)
                self._setup = None
            if self._error is not None:
                raise self._error

    def fork(self) -> socket.socket:
        """The channel to a new worker."""
        ours, theirs = socket.socketpair()
        # If it died, the channel ends at once.
        with theirs, contextlib.suppress(OSError), self._lock:
            socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """End it and its workers."""
        self._finalizer()


def _end(control: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the process that it belongs to
        control.close()
        process.returncode = 0  # not this process's child
        return
    # A thread may be waiting for its first answer.
    with contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)
    control.close()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
