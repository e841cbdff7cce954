"""Messages that one process writes once, into memory that several others read."""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import tempfile
from multiprocessing.reduction import DupFd
from typing import Any

# Where a message ends, counted from the first that was ever written, and its bytes.
_NOTICE = struct.Struct("<QQ")
NOTICE_BYTES = _NOTICE.size
# Pages are taken when they are first written to.
_RING_BYTES = 4 << 20
# Each reader's number has a line of its own, or they would wait for one another's caches.
_LINE = 64


class MessageRing:
    """A ring of messages for ``readers``, which read all of them, each in the writer's order.

    It wakes nobody: the writer sends each reader a notice of 16 bytes by a pipe, on which that
    reader sleeps. A reader says how far it has read, so that nothing is written over that somebody
    has still to read. Pickled for a process that is spawned, it is the same memory there.
    """

    def __init__(self, readers: int, size: int = _RING_BYTES, fd: int | None = None) -> None:
        """``size`` bytes for messages, in an open file if one is given."""
        if fd is None:
            fd = _unnamed_file()
            os.ftruncate(fd, readers * _LINE + size)
        self._fd, self._readers, self._size = fd, readers, size
        view = memoryview(mmap.mmap(fd, readers * _LINE + size))
        self._read = view[: readers * _LINE].cast("Q")
        self._data = view[readers * _LINE :]
        self._end = 0

    def write(self, message: memoryview) -> bytes | None:
        """Write a message; the notice for each reader, or None if there is no room for it now."""
        begin, nbytes = self._end, message.nbytes
        if begin % self._size + nbytes > self._size:
            begin += -begin % self._size
        end, place = begin + nbytes, begin % self._size
        if end - min(self._read[:: _LINE // 8]) > self._size:
            return None
        self._data[place : place + nbytes] = message
        self._end = end
        return _NOTICE.pack(end, nbytes)

    def read(self, notice: bytes, reader: int) -> Any:
        """The message of a notice, unpickled by reader number ``reader``."""
        end, nbytes = _NOTICE.unpack(notice)
        place = (end - nbytes) % self._size
        message = pickle.loads(self._data[place : place + nbytes])
        self._read[reader * _LINE // 8] = end
        return message

    @property
    def place(self) -> tuple[int, ...]:
        """Where :func:`attach` finds it in other processes of this user, while this one lives."""
        status = os.fstat(self._fd)
        return self._readers, self._size, os.getpid(), self._fd, status.st_dev, status.st_ino

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self._readers, self._size, DupFd(self._fd))

    def __del__(self) -> None:
        os.close(self._fd)


def attach(place: tuple[int, ...]) -> MessageRing:
    """The ring of another process, by its :attr:`MessageRing.place`.

    Raises:
        OSError: it cannot be opened, or is gone.
    """
    readers, size, pid, number, *identity = place
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    status = os.fstat(fd)
    # The number may be another file's by now.
    if [status.st_dev, status.st_ino] != identity:
        os.close(fd)
        raise OSError(f"process {pid} has no such ring any more")
    return MessageRing(readers, size, fd)


def _opened(readers: int, size: int, duplicate: Any) -> MessageRing:
    return MessageRing(readers, size, duplicate.detach())


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("engine-core-steps")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
