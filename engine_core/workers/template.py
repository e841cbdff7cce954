"""The process of which a pool's workers are forks; see :class:`WorkerPool`.

It has one thread, so that a fork of it is a whole process. It has imported, and made, what every
task needs. A worker is made for one task, works under limits, and is gone after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import io
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

from engine_core.workers.shared import SharedBytes

STATUS = struct.Struct("<4si")
"""A mark, and a worker's exit code, negative for a signal: the last bytes of its channel."""
MARK = b"exit"

_HEADER = struct.Struct("<QQ")  # bytes of the content, and how many times files come before it
_FILES = 64  # at a time; the system allows 253
_PIECE = 1 << 20
# Looks for a parent that is gone while a fork of it holds the other end of the socket.
_LOOK_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1  # of prctl(2)
# The steps of an engine on the same processors go first.
_NICENESS = 5


class _Pickler(pickle.Pickler):
    """Leaves shared memory out of the content; its open files are to be sent beside it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.blocks: list[SharedBytes] = []

    def persistent_id(self, item: Any) -> int | None:
        if type(item) is not SharedBytes:
            return None
        self.blocks.append(item)
        return len(self.blocks) - 1


class _Unpickler(pickle.Unpickler):
    """Puts the shared memory that came beside the content into it."""

    def __init__(self, file: io.BytesIO, blocks: list[SharedBytes]) -> None:
        super().__init__(file)
        self._blocks = blocks

    def persistent_load(self, index: Any) -> SharedBytes:
        block: SharedBytes = self._blocks[index]
        return block


class Incoming:
    """The content of a message as it arrives, in pieces.

    Args:
        end: of the socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._blocks: list[SharedBytes] = []
        self.content = bytearray()

    def read(self, most: int = _PIECE) -> bool:
        """Wait for some more; False if there is no more.

        Raises:
            OSError: this process has too many open files.
        """
        piece, fds, flags, _ = socket.recv_fds(self._end, most, _FILES, socket.MSG_CMSG_CLOEXEC)
        self._blocks += map(SharedBytes, fds)
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self.content += piece
        return bool(piece)

    def message(self, end: int | None = None) -> Any:
        """The message that has arrived, which ends at ``end``."""
        _, files = _HEADER.unpack_from(self.content)
        with memoryview(self.content) as view:
            content = io.BytesIO(view[_HEADER.size + files : end])
        return _Unpickler(content, self._blocks).load()


def send(end: socket.socket, message: Any) -> None:
    """Send a message with its length before it, and the open files of its shared memory."""
    content = io.BytesIO()
    pickler = _Pickler(content)
    pickler.dump(message)
    fds = [block.fileno() for block in pickler.blocks]
    groups = [fds[start : start + _FILES] for start in range(0, len(fds), _FILES)]
    end.sendall(_HEADER.pack(content.tell(), len(groups)))
    for group in groups:
        socket.send_fds(end, [b"f"], group)
    end.sendall(content.getbuffer())


def receive(end: socket.socket) -> Any:
    """The next message.

    Raises:
        EOFError: the other side is gone.
    """
    incoming = Incoming(end)
    while len(incoming.content) < _HEADER.size:
        _more(incoming, _HEADER.size - len(incoming.content))
    size, files = _HEADER.unpack_from(incoming.content)
    while (left := _HEADER.size + files + size - len(incoming.content)) > 0:
        _more(incoming, min(left, _PIECE))
    return incoming.message()


def _more(incoming: Incoming, most: int) -> None:
    if not incoming.read(most):
        raise EOFError


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
    parent, template = os.getppid(), os.getpid()
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
                        channel.sendall(STATUS.pack(MARK, os.waitstatus_to_exitcode(status)))
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
                _work(channel, template, state, memory_bytes, stack_bytes)
            channels[pid] = channel
            poll.register(channel, 0)
    finally:
        for pid in channels:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _work(
    channel: socket.socket, template: int, state: Any, memory_bytes: int, stack_bytes: int
) -> NoReturn:
    """The life of a worker."""
    try:
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != template:  # it died before that
                os._exit(1)
        os.nice(_NICENESS)
        # Where memory is short the system ends this process, and not the engine.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
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
