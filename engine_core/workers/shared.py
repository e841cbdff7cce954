"""Memory that processes share without copies. It has no name, so that nothing stays behind."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Who has the block can neither change nor shorten it under the eyes of others.
_SEALS = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE")
_NAME = "engine-core-media"


class SharedBytes:
    """A block of memory that lives as long as any process holds it.

    It may be sent in the messages of a pool's workers, which carry open files. Pickled by other
    means it is opened again where it is unpickled, for which the process that pickled it must
    still hold it, and run for the same user.

    Attributes:
        size: in bytes.
        lost: why it could not be opened where it was unpickled; None if it was.
    """

    __slots__ = ("__weakref__", "_fd", "lost", "size")

    def __init__(self, fd: int) -> None:
        """Take over an open file."""
        self._fd = fd
        self.size = os.fstat(fd).st_size
        self.lost: str | None = None

    @classmethod
    def of(cls, parts: Iterable[tuple[int, ReadableBuffer]], size: int) -> SharedBytes:
        """A block of ``size`` bytes with ``parts``, each at its place; zeros are between them.

        Raises:
            OSError: there is no memory, or no file can be opened.
        """
        made = cls(os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(made._fd, size)
        for place, part in parts:
            view = memoryview(part).cast("B")
            while view:
                written = os.pwrite(made._fd, view, place)
                view, place = view[written:], place + written
        seals = sum(getattr(fcntl, name) for name in _SEALS)
        fcntl.fcntl(made._fd, fcntl.F_ADD_SEALS, seals)
        made.size = size
        return made

    def fileno(self) -> int:
        """The open file."""
        return self._fd

    def map(self) -> mmap.mmap:
        """The bytes, mapped. What is written there is this mapping's alone.

        Raises:
            OSError: it is lost.
        """
        if self.lost is not None:
            raise OSError(self.lost)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(self._fd, self.size, flags=mmap.MAP_PRIVATE, prot=access)

    def reduced_by_value(self) -> tuple[Any, ...]:
        """The bytes themselves, for a pickler of messages to other machines to take instead."""
        with self.map() as content:
            return _made_again, (content[:],)

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (os.getpid(), self._fd, _identity(self._fd), self.size)

    def __del__(self, close: Any = os.close) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            close(fd)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _made_again(content: bytes) -> SharedBytes:
    return SharedBytes.of([(0, content)], len(content))


def _opened(pid: int, fd: int, identity: tuple[int, int], size: int) -> SharedBytes:
    """The block that another process holds open as ``fd``."""
    made = SharedBytes.__new__(SharedBytes)
    made._fd, made.size, made.lost = -1, size, None
    try:
        made._fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        # It may have been closed, and the number be another file's now.
        if _identity(made._fd) != identity:
            made.lost = "its sender has dropped it"
    except OSError as error:
        made.lost = f"its sender's memory cannot be opened: {error}"
    return made
