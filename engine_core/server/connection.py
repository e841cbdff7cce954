"""Connections whose clients must read what they have asked for."""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from engine_core.server.logs import log

logger = logging.getLogger(__name__)


# The key in an ASGI scope of the response's :class:`Writer`.
WRITER = "engine_core.writer"


class Writer:
    """Writes pieces of a response that has begun to its connection, at once.

    Whoever sends an ASGI message needs a task, and each wrapper of ``send`` one more call. Pieces
    of a stream that come for hundreds of clients at once are written here instead.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._cycle = connection.cycle
        self._transport: asyncio.Transport = connection.transport

    @property
    def paused(self) -> bool:
        """Whether the client leaves too much unread."""
        paused: bool = self._cycle.flow.write_paused
        return paused

    def write(self, piece: bytes) -> None:
        """Write a piece; lost if the client is gone."""
        if not self._cycle.disconnected:
            self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def on_resume(self, call: Callable[[], None] | None) -> None:
        """Have ``call`` called whenever the client has read most of what was unread."""
        self._connection.resumed = call


def connection_class(send_timeout: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol with a timeout for clients that do not read.

    While a client does not read, uvicorn buffers 64 KiB for it, and the handler waits before
    writing more. To the handler, a connection that is broken off here looks like one that the
    client closed.

    Args:
        send_timeout: seconds in which a client that has something to take must take a part of it.
    """

    class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """One client's connection."""

        resumed: Callable[[], None] | None = None
        _watcher: asyncio.TimerHandle | None = None

        def on_headers_complete(self) -> None:
            """A request begins; httptools calls it, h11 has no such moment."""
            super().on_headers_complete()
            if self.cycle is not None and self.cycle.scope is self.scope:
                self.scope[WRITER] = Writer(self)

        def pause_writing(self) -> None:
            """The client leaves too much unread: the transport's buffer is full."""
            super().pause_writing()
            self._watch()

        def resume_writing(self) -> None:
            """The client has read most of it."""
            super().resume_writing()
            self._watch()
            if self.resumed is not None:
                self.resumed()

        def on_response_complete(self) -> None:
            """The response is complete, at least in the transport's buffer."""
            super().on_response_complete()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            """The connection is closed."""
            if self._watcher is not None:
                self._watcher.cancel()
            super().connection_lost(exc)

        @property
        def _only_sends(self) -> bool:
            """Whether nothing is written meanwhile, so that the unread bytes only decrease."""
            return self.flow.write_paused or self.cycle is None or self.cycle.response_complete

        def _watch(self) -> None:
            if self._watcher is not None:
                self._watcher.cancel()
                self._watcher = None
            if self.transport.get_write_buffer_size() and self._only_sends:
                loop = asyncio.get_running_loop()
                self._watcher = loop.call_later(
                    send_timeout, self._look, _bytes_left(self.transport)
                )

        def _look(self, before: int) -> None:
            left = _bytes_left(self.transport)
            if left < before or not self._only_sends:
                self._watch()
                return
            log(
                logger,
                logging.WARNING,
                f"a client took nothing of its answer for {send_timeout:g} s and was cut off",
                client=self.client[0] if self.client else None,
                bytes_left=left,
            )
            self.transport.abort()

    return Connection


def _bytes_left(transport: asyncio.Transport) -> int:
    """Bytes that the client has not read, in our buffer and the kernel's.

    The kernel asks for more only when a third of its megabytes is free, which takes a slow reader
    minutes.
    """
    left = transport.get_write_buffer_size()
    end = transport.get_extra_info("socket")
    if sys.platform == "win32" or end is None:
        return left

    import fcntl
    import termios

    in_kernel = array.array("i", [0])
    with contextlib.suppress(OSError):  # closed
        fcntl.ioctl(end.fileno(), termios.TIOCOUTQ, in_kernel)
    return left + in_kernel[0]
