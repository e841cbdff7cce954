"""The side of a pool that gives work; see :class:`WorkerPool`."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from engine_core.errors import QueueFullError
from engine_core.workers import template
from engine_core.workers.template import STATUS

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

    The workers are forks of a template process, which imports and makes once what all of them
    need. A fork takes milliseconds, shares the template's memory, and takes with it whatever a
    call left behind. Nothing runs before the first call or :meth:`start`. It may be used from
    several threads, and after a fork, which gets a template of its own.

    Args:
        initializer: ``module:function``; what it returns is the first argument of every task.
        arguments: picklable, for the initializer.
        limits: of each task.
        max_workers: tasks that run at once.
        max_queued: tasks that may wait for a worker.
        what: what the template is called in messages.
    """

    def __init__(
        self,
        initializer: str,
        arguments: tuple[Any, ...],
        limits: Limits,
        *,
        max_workers: int = 2,
        max_queued: int = 64,
        what: str = "the worker",
    ) -> None:
        self._setup = (initializer, arguments, limits.memory_bytes, limits.stack_bytes)
        self._limits = limits
        self._what = what
        self._max_workers = max_workers
        self._most = max_workers + max_queued
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        """Begin anew in this process, to which a fork brings no threads."""
        self._owner = os.getpid()
        self._threads = ThreadPoolExecutor(
            self._max_workers, thread_name_prefix="engine-core-workers"
        )
        self._unfinished = 0
        self._lock = threading.Lock()
        self._template: _Template | None = None

    def start(self) -> None:
        """Start the template, if there is none, and wait until it can fork workers.

        Raises:
            Exception: what the initializer raised.
            WorkerError: it died, or the pool is closed.
        """
        self._ready_template()

    def submit(self, function: str, *arguments: Any) -> Future[Any]:
        """Have a worker call ``module:function`` with the initializer's value and ``arguments``.

        The future raises what the function raised, or :class:`WorkerError`. ``asyncio.wrap_future``
        makes it one to await.

        Raises:
            QueueFullError: too many tasks wait.
            WorkerError: the pool is closed.
        """
        if self._owner != os.getpid():
            self._begin()
        with self._lock:
            self._check_open()
            if self._unfinished >= self._most:
                raise QueueFullError(
                    f"{self._unfinished} requests wait for {self._what} already; this one can be "
                    "served later"
                )
            self._unfinished += 1
            future = self._threads.submit(self._run, function, arguments)
        future.add_done_callback(self._count_done)
        return future

    def close(self) -> None:
        """End all workers and the template; it may be called twice."""
        with self._lock:
            self._closed = True
            last, self._template = self._template, None
        if last is not None:
            last.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerError(f"{self._what} is being shut down", repeatable=False)

    def _count_done(self, _: Future[Any]) -> None:
        with self._lock:
            self._unfinished -= 1

    def _ready_template(self) -> _Template:
        with self._lock:
            self._check_open()
            current = self._template
            if current is None or not current.usable:
                if current is not None:
                    current.close()
                # Its start is waited for below, without the lock.
                current = self._template = _Template(self._what, self._setup)
        try:
            current.wait_ready()
        except WorkerError:
            with self._lock:
                self._check_open()  # it was ended meanwhile
            raise
        return current

    def _run(self, function: str, arguments: tuple[Any, ...]) -> Any:
        channel = self._ready_template().fork()
        deadline = time.monotonic() + self._limits.seconds
        try:
            with channel:
                channel.settimeout(self._limits.seconds)
                # A worker that is gone has left its reason.
                with contextlib.suppress(ConnectionError):
                    template.send(channel, (function, arguments))
                content = bytearray()
                while True:
                    channel.settimeout(max(deadline - time.monotonic(), 1e-3))
                    piece = channel.recv(_MIB)
                    if not piece:
                        break
                    content += piece
        except TimeoutError:
            message = f"it took more than {self._limits.seconds:g} s"
            raise WorkerError(message, repeatable=False) from None
        except ConnectionError:
            content = bytearray()
        code = STATUS.unpack(content[-STATUS.size :])[0] if len(content) >= STATUS.size else None
        if code != 0:
            raise self._death(code)
        with memoryview(content) as view:
            fine, answer = pickle.loads(view[8 : -STATUS.size])
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
            how = "is being shut down" if self._closed else "ended with all of its work"
            return WorkerError(f"{self._what} {how}", repeatable=False)
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

    def __init__(self, what: str, setup: tuple[Any, ...]) -> None:
        self._what = what
        self._setup: tuple[Any, ...] | None = setup
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
                    template.send(self._control, self._setup)
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
