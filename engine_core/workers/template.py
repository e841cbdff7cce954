"""The process of which a pool's workers are forks; see :class:`WorkerPool`.

It has one thread, so that a fork of it is a whole process. It has imported, and made, what every
task needs. A worker is made for one task, works under limits, and is gone after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

STATUS = struct.Struct("<i")
"""A worker's exit code, negative for a signal: the last bytes of its channel."""

_HEADER = struct.Struct("<Q")
# Looks for a parent that is gone while a fork of it holds the other end of the socket.
_LOOK_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1  # of prctl(2)
# The steps of an engine on the same processors go first.
_NICENESS = 5


def send(end: socket.socket, message: Any) -> None:
    """Send a message with its length before it."""
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    end.sendall(_HEADER.pack(len(content)))
    end.sendall(content)


def receive(end: socket.socket) -> Any:
    """The next message.

    Raises:
        EOFError: the other side is gone.
    """
    (size,) = _HEADER.unpack(_read(end, _HEADER.size))
    return pickle.loads(_read(end, size))


def _read(end: socket.socket, size: int) -> bytearray:
    content = bytearray()
    while len(content) < size:
        piece = end.recv(min(size - len(content), 1 << 20))
        if not piece:
            raise EOFError
        content += piece
    return content


def main(control_fd: int) -> None:
    """Make what the tasks need, then a worker for each channel that ``control_fd`` brings."""
    # Both go to every process of a terminal or a service; the parent decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=control_fd) as control:
        try:
            initializer, arguments, *limits = receive(control)
            try:
                state = _named(initializer)(*arguments)
            except Exception as error:
                send(control, portable(error))
                return
            send(control, None)
        except (EOFError, OSError):
            return
        # What is here is shared with the workers until a collection would write to it.
        gc.collect()
        gc.freeze()
        _serve(control, state, *limits)


def _serve(control: socket.socket, state: Any, memory_bytes: int, stack_bytes: int) -> None:
    parent = os.getppid()
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    channels: dict[int, socket.socket] = {}  # by process
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    try:
        while True:
            events = dict(poll.poll(_LOOK_SECONDS * 1000))
            if woken in events:
                os.read(woken, 4096)
            for pid, channel in list(channels.items()):
                # The other side has lost its patience.
                if events.get(channel.fileno(), 0) & (select.POLLHUP | select.POLLERR):
                    poll.unregister(channel)
                    os.kill(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with contextlib.suppress(KeyError):
                        poll.unregister(channel)
                    with contextlib.suppress(OSError), channels.pop(pid) as channel:
                        channel.sendall(STATUS.pack(os.waitstatus_to_exitcode(status)))
            if os.getppid() != parent:
                return
            if control.fileno() not in events:
                continue
            message, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            channel = socket.socket(fileno=fds[0])
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for other in (control, *channels.values()):
                    other.close()
                _work(channel, state, memory_bytes, stack_bytes)
            channels[pid] = channel
            poll.register(channel, 0)
    finally:
        for pid in channels:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _work(channel: socket.socket, state: Any, memory_bytes: int, stack_bytes: int) -> NoReturn:
    """The life of a worker."""
    try:
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.nice(_NICENESS)
        # Libraries that abort say why to stderr, which is not theirs here.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_STACK, stack_bytes)
        function, arguments = receive(channel)
        _limit(resource.RLIMIT_AS, _mapped_bytes() + memory_bytes)
        try:
            answer = True, _named(function)(state, *arguments)
        except BaseException as error:
            answer = False, portable(error)
        send(channel, answer)
    except BaseException:
        os._exit(1)
    os._exit(0)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _mapped_bytes() -> int:
    """Bytes that the process has mapped already."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except FileNotFoundError:  # not Linux
        return 0


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def portable(error: BaseException) -> Exception:
    """``error``, or what can be sent of it."""
    if isinstance(error, MemoryError):
        return MemoryError()
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = None
    if isinstance(copy, Exception):
        return copy
    return RuntimeError(f"{type(error).__name__}: {error}")
