"""The way of messages from an executor to its ranks: each is pickled once, whoever reads it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

from engine_core.runtime.ring import NOTICE_BYTES, MessageRing
from engine_core.workers import SharedBytes


class Transport(Protocol):
    """Messages to some of the ranks, each of which also has a connection.

    Attributes:
        same_machine: whether its ranks may open this machine's shared memory.
    """

    @property
    def same_machine(self) -> bool:
        """See the class."""

    def pack(self, message: memoryview) -> memoryview | bytes:
        """The bytes that every rank is sent by its connection, for a pickled message."""

    def unpack(self, sent: bytes) -> Any:
        """The message, at a rank that was sent these bytes."""


class RingTransport:
    """Shared memory that the executor writes once, and a notice of 16 bytes for each rank."""

    same_machine = True

    def __init__(self, ring: MessageRing, reader: int = 0) -> None:
        """``reader`` is the number of the rank among the ring's readers."""
        self._ring, self._reader = ring, reader

    def pack(self, message: memoryview) -> memoryview | bytes:
        """See :class:`Transport`; what the ring has no room for goes as it is."""
        notice = self._ring.write(message)
        if notice is not None:
            return notice
        assert message.nbytes > NOTICE_BYTES, "a message looks like a notice"
        return message

    def unpack(self, sent: bytes) -> Any:
        """See :class:`Transport`."""
        if len(sent) == NOTICE_BYTES:
            return self._ring.read(sent, self._reader)
        return pickle.loads(sent)


class StreamTransport:
    """The whole message on each rank's connection, for ranks on other machines."""

    same_machine = False

    def pack(self, message: memoryview) -> memoryview | bytes:
        """See :class:`Transport`."""
        return message

    def unpack(self, sent: bytes) -> Any:
        """See :class:`Transport`."""
        return pickle.loads(sent)


def _pickled(message: Any, *, by_value: bool) -> tuple[memoryview, bool]:
    """The message, with shared memory as a name on this machine or by value; whether it has any."""
    met = False

    def reduce(shared: SharedBytes) -> Any:
        nonlocal met
        met = True
        return shared.reduced_by_value() if by_value else shared.__reduce__()

    file = io.BytesIO()
    pickler = ForkingPickler(file)
    # A reducer that knew the pickler would keep it, and so the message, until garbage is collected.
    pickler.dispatch_table[SharedBytes] = reduce
    pickler.dump(message)
    return file.getbuffer(), met


def send(message: Any, ways: Sequence[tuple[Transport, Sequence[Connection]]]) -> None:
    """Send a message to every connection, by its transport.

    It is pickled once, and a second time only if it names shared memory that ranks of other
    machines cannot open.

    Raises:
        OSError: a connection has ended.
    """
    data, has_shared = _pickled(message, by_value=False)
    for transport, connections in ways:
        here = data
        if has_shared and not transport.same_machine:
            here, _ = _pickled(message, by_value=True)
        packed = transport.pack(here)
        for connection in connections:
            connection.send_bytes(packed)
