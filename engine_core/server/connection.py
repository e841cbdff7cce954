"""Connections whose clients are held to limits in what they send and leave unread."""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import ssl
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.utils import get_remote_addr

from engine_core.server.connections import Connections
from engine_core.server.errors import RETRY_BUSY, ApiError, unavailable
from engine_core.server.logs import log
from engine_core.server.middleware import HEALTH
from engine_core.server.settings import ServerSettings

logger = logging.getLogger(__name__)

# Requests that a client may send before it has read the answer to the first.
_MAX_PIPELINED = 16

# The key in an ASGI scope of the response's :class:`Writer`.
WRITER = "engine_core.writer"


class Writer:
    """Writes pieces of a response that has begun to its connection, at once.

    Whoever sends an ASGI message needs a task, and each wrapper of ``send`` one more call. Pieces
    of a stream that come for hundreds of clients at once are written here instead.

    Attributes:
        cycle: uvicorn's state of the request and its response.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.cycle = connection.cycle
        self._transport: asyncio.Transport = connection.transport

    @property
    def paused(self) -> bool:
        """Whether the client leaves too much unread."""
        paused: bool = self.cycle.flow.write_paused
        return paused

    def write(self, piece: bytes) -> None:
        """Write a piece; lost if the client is gone."""
        if not self.cycle.disconnected:
            chunk = b"%x\r\n%b\r\n" % (len(piece), piece)
            self._transport.write(chunk if self.cycle.chunked_encoding else piece)

    def on_resume(self, call: Callable[[], None] | None) -> None:
        """Have ``call`` called whenever the client has read most of what was unread."""
        self._connection.resumed = call


def connection_class(
    settings: ServerSettings, connections: Connections, tls: ssl.SSLContext | None = None
) -> type[asyncio.Protocol]:
    """uvicorn's protocol with limits for clients, which hold before any key is asked for.

    A request's line and headers are bounded in bytes, number and time; so are trailers and what
    else frames a body. A connection counts before its TLS handshake, which the time is for too.
    While a client does not read, uvicorn buffers 64 KiB for it, and the handler
    waits before writing more. To the handler, a connection that is broken off here looks like one
    that the client closed.

    Args:
        settings: the service's.
        connections: of this process; says who gets a place.
        tls: has the certificate, if HTTPS is spoken. uvicorn must not have one then.
    """
    send_timeout = settings.send_timeout
    max_header_size = settings.max_header_size

    class Connection(HttpToolsProtocol):
        """One client's connection."""

        resumed: Callable[[], None] | None = None
        _watcher: asyncio.TimerHandle | None = None
        _head_timer: asyncio.TimerHandle | None = None
        _refusal: ApiError | None = None
        _in_head = False
        # Bytes since headers or a message were complete that are not of a body, less those that
        # came in the same piece.
        _framing = 0
        _handshake: asyncio.Task[None] | None = None
        # Whether what comes is HTTP, and whether it is to be read no more.
        _begun = _ignores = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """There is a client."""
            self.transport = transport
            self._forwarded: deque[str | None] = deque()
            # What came before the handshake could read it, and later before its end was seen.
            self._early: list[bytes] = []
            client = get_remote_addr(transport)
            self._host = client[0] if client else None
            reason = connections.enter(self, self._host)
            self._reserved = reason is not None
            if reason is not None:
                self.app = _only_health(self.app, _TOO_MANY[reason])
            self._await_head()
            if tls is None:
                self._begin(transport)
            else:
                transport.pause_reading()
                self._handshake = self.loop.create_task(self._shake_hands(transport, tls))
                # Once the task has begun, and after what it had called soon.
                self.loop.call_soon(self.loop.call_soon, self._hand_over, transport)

        def _begin(self, transport: asyncio.Transport) -> None:
            self._begun = True
            super().connection_made(transport)

        def _hand_over(self, transport: asyncio.Transport) -> None:
            """Give what came early to the handshake: uvloop reads at least once."""
            early, self._early = b"".join(self._early), []
            # A BufferedProtocol, by its methods.
            reader: Any = transport.get_protocol()
            if early and reader is not self and not transport.is_closing():
                reader.get_buffer(len(early))[: len(early)] = early
                reader.buffer_updated(len(early))

        async def _shake_hands(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
            secure = None
            try:
                with contextlib.suppress(OSError):
                    if not transport.is_closing():
                        secure = await self.loop.start_tls(
                            transport,
                            self,
                            tls,
                            server_side=True,
                            ssl_handshake_timeout=settings.header_timeout,
                        )
            finally:
                if secure is None:
                    transport.abort()
                    self._stop_waiting()
                    connections.leave(self)
            if secure is not None:
                self._begin(secure)
                early, self._early = self._early, []
                for data in early:
                    self.data_received(data)

        def drop(self) -> None:
            """Break it off at once."""
            self.transport.abort()

        def data_received(self, data: bytes) -> None:
            """The client has sent ``data``."""
            if not self._begun:
                self._early.append(data)
                return
            if self._ignores:
                return
            # In pieces, so that no more than two limits are ever kept.
            for start in range(0, len(data), max_header_size):
                if self.transport.is_closing():
                    return
                piece = data[start : start + max_header_size]
                self._framing += len(piece)
                super().data_received(piece)
                if self._framing > max_header_size:
                    self._refuse(_head_too_large(settings))
            if self._head_timer is None and self._is_idle:
                self._await_head()

        @property
        def _is_idle(self) -> bool:
            """Whether no request waits for its answer."""
            return self.cycle is None or self.cycle.response_complete

        def on_message_begin(self) -> None:
            """A request begins."""
            super().on_message_begin()
            self._in_head = True

        def on_headers_complete(self) -> None:
            """The request's headers are complete."""
            self._in_head = False
            self._framing = 0
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            refusal = None
            if size > max_header_size:
                refusal = _head_too_large(settings)
            elif len(self.headers) > settings.max_headers:
                refusal = _too_many_headers(len(self.headers), settings)
            elif coding := _unknown_coding(self.headers):
                refusal = _not_decoded(coding)
            if refusal is not None or len(self.pipeline) >= _MAX_PIPELINED:
                self._refusal = refusal
                raise ValueError("the request is refused")
            self._stop_waiting()
            app = self.app
            host = connections.forwarded_for(self._host, self.headers)
            if host is not None:
                self.scope["client"] = (host, 0)
                if not connections.enter_forwarded(host):
                    self.app = _only_health(app, _TOO_MANY["address"])
            self._forwarded.append(host)
            if self.parser.get_http_version() == "1.0":
                self.app = _without_chunks(self.app)
            super().on_headers_complete()
            self.app = app
            if self._reserved or self.parser.should_upgrade():
                self.cycle.keep_alive = False
            # Trailers come into the list too, and are no headers.
            self.headers = []
            self.scope[WRITER] = Writer(self)  # type: ignore[literal-required]

        def on_body(self, body: bytes) -> None:
            """A part of the body; in chunks of a byte each has five bytes around it."""
            self._framing = max(0, self._framing - 17 * len(body))
            super().on_body(body)

        def on_message_complete(self) -> None:
            """The request is complete."""
            self._framing = 0
            super().on_message_complete()

        def _unsupported_upgrade_warning(self) -> None:
            """Another protocol is offered, which a server may leave at that."""

        def send_400_response(self, msg: str) -> None:
            """Refuse bytes that are no request, or a request over a limit."""
            self._refuse(self._refusal or _not_http())

        def _refuse(self, refusal: ApiError) -> None:
            """Answer, unless another answer is under way, and close."""
            if self.transport.is_closing():
                return
            connections.count(refusal.code or "")
            if self._answers_first(refusal):
                return
            if self._is_idle or self._awaits_body:
                response = refusal.response()
                self.transport.write(
                    STATUS_LINE[refusal.status_code]
                    + b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
                    + b"connection: close\r\n\r\n"
                    + response.body
                )
            self.transport.close()

        @property
        def _awaits_body(self) -> bool:
            """Whether the only request has neither all of its body nor any of its answer."""
            cycle = self.cycle
            return cycle.more_body and not cycle.response_started and not self.pipeline

        def _answers_first(self, refusal: ApiError) -> bool:
            """Whether a complete request has its answer before the bytes after it end all."""
            first = not self._is_idle and not self.cycle.more_body and not self.pipeline
            if first and refusal.code == "invalid_http":
                self._ignores = True
                self.cycle.keep_alive = False
                return True
            return False

        def _await_head(self) -> None:
            loop = asyncio.get_running_loop()
            self._head_timer = loop.call_later(settings.header_timeout, self._head_is_late)

        def _head_is_late(self) -> None:
            self._head_timer = None
            if self._in_head:
                self._refuse(_head_too_late(settings))
            elif not self.transport.is_closing():
                self.transport.close()

        def _stop_waiting(self) -> None:
            """A request has come."""
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
            connections.busy(self)

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
            host = self._forwarded.popleft() if self._forwarded else None
            if host is not None:
                connections.leave_forwarded(host)
            super().on_response_complete()
            if self._is_idle:
                connections.idle(self)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            """The connection is closed."""
            if self._watcher is not None:
                self._watcher.cancel()
            self._stop_waiting()
            connections.leave(self)
            for host in self._forwarded:
                if host is not None:
                    connections.leave_forwarded(host)
            self._forwarded.clear()
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


def _only_health(app: Any, refusal: ApiError) -> Any:
    """``app`` for those who ask how the server is; others get ``refusal``."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in HEALTH:
            await app(scope, receive, send)
        else:
            await refusal.response()(scope, receive, send)

    return answer


def _without_chunks(app: Any) -> Any:
    """``app`` for a client of HTTP/1.0: an answer without a length ends where the connection does.

    uvicorn would write chunks, which such a client does not know.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        writer: Writer = scope[WRITER]
        unbounded = False

        async def unframed(message: Message) -> None:
            nonlocal unbounded
            if message["type"] == "http.response.start":
                unbounded = all(name.lower() != b"content-length" for name, _ in message["headers"])
                if unbounded:
                    writer.cycle.chunked_encoding = False
            elif unbounded:
                # uvicorn counts down, to nothing in the end.
                size, more = len(message.get("body", b"")), message.get("more_body", False)
                writer.cycle.expected_content_length = size + more
            await send(message)

        await app(scope, receive, unframed)

    return answer


def _head_too_large(settings: ServerSettings) -> ApiError:
    return ApiError(
        431,
        f"the request's line and headers have more than {settings.max_header_size} bytes, which is "
        "the most that this server reads",
        code="headers_too_large",
    )


def _too_many_headers(count: int, settings: ServerSettings) -> ApiError:
    return ApiError(
        431,
        f"the request has {count} headers, and this server reads at most {settings.max_headers}",
        code="headers_too_large",
    )


def _unknown_coding(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """A body's transfer coding that is not read, if it has one; chunks are."""
    values = [value for name, value in headers if name == b"transfer-encoding"]
    codings = [part.strip().lower() for part in b",".join(values).decode("latin-1").split(",")]
    return next((coding for coding in codings if coding not in ("", "chunked")), None)


def _not_decoded(coding: str) -> ApiError:
    return ApiError(
        501,
        f"the body is sent in the Transfer-Encoding {coding[:80]!r}, and this server reads only "
        "'chunked'",
        code="unsupported_transfer_encoding",
    )


def _head_too_late(settings: ServerSettings) -> ApiError:
    return ApiError(
        408,
        f"the headers were not complete after {settings.header_timeout:g} seconds",
        code="timeout",
    )


def _not_http() -> ApiError:
    return ApiError(400, "what came is no HTTP/1.1 request", code="invalid_http")


_TOO_MANY = {
    "all": unavailable(
        "all connections that this server takes are in use; try again soon", "too_many_connections"
    ),
    "address": ApiError(
        429,
        "there are as many connections of this address as the server takes; use fewer",
        code="too_many_connections",
        headers={"Retry-After": str(RETRY_BUSY)},
    ),
}


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
