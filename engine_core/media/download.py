"""The fetching of one address, in a thread that waits for it. What comes is from a stranger.

A host's name is resolved once, and the connection goes to the address that was looked at. Every
wait has an end: for the name, for the connection, and for all that comes by it.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from io import BytesIO
from typing import Any, NamedTuple
from urllib.parse import SplitResult, quote

from engine_core.errors import RequestError

_PIECE = 2**20
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")


class Reading:
    """The reading of a prompt's files: bytes that they may still have, and what it waits for.

    Args:
        max_bytes: of all files together.
        hold: is told of bytes before they are kept, with a negative number of those that are not
            any more. It raises :class:`RequestError` if there is no room.
    """

    def __init__(self, max_bytes: int, hold: Callable[[int], None]) -> None:
        self._max_bytes = self._left = max_bytes
        self._hold = hold
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._waiters: set[Future[Any]] = set()
        self._cancelled = False

    def check(self) -> None:
        """Refuse to go on if nobody waits for it, or the files have too many bytes."""
        if self._cancelled:
            raise RequestError("nobody waits for it any more")
        if self._left < 0:
            raise RequestError(
                f"the files that the prompt names have more than {self._max_bytes} bytes together; "
                "send fewer of them, or smaller ones"
            )

    def take(self, size: int) -> None:
        """So many bytes more are kept until :meth:`cancel`, or for longer."""
        with self._lock:
            self.check()
            self._hold(size)
            self._left -= size
            self.check()

    def cancel(self) -> None:
        """End all connections, have :meth:`check` refuse more, and keep nothing."""
        with self._lock:
            if self._cancelled:
                return
            self._cancelled = True
            for sock in self._sockets:
                _end(sock)
            waiters = list(self._waiters)
            self._hold(self._left - self._max_bytes)
        for waiter in waiters:
            with contextlib.suppress(InvalidStateError):
                waiter.set_result(None)

    def wait(self, future: Future[Any], clock: Clock) -> Any:
        """The result of a future that goes on whoever waits for it."""
        waiter: Future[Any] = Future()

        def pass_on(done: Future[Any]) -> None:
            with contextlib.suppress(InvalidStateError):
                waiter.set_result(done.result())

        with self._lock:
            self._waiters.add(waiter)
        try:
            self.check()
            future.add_done_callback(pass_on)
            try:
                result = waiter.result(clock.left())
            except TimeoutError:
                raise clock.error() from None
            self.check()
            return result
        finally:
            with self._lock:
                self._waiters.discard(waiter)

    @contextlib.contextmanager
    def watch(self, given: socket.socket, clock: Clock) -> Iterator[None]:
        """End a connection from which something comes all the time, but too slowly."""
        late = threading.Event()
        left = clock.left()
        # TLS takes the socket itself over, before anything has come.
        sock = given.dup()

        def end() -> None:
            late.set()
            _end(sock)

        timer = threading.Timer(left, end)
        timer.daemon = True
        timer.start()
        with self._lock:
            self._sockets.add(sock)
        try:
            self.check()
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._sockets.discard(sock)
            sock.close()
            if late.is_set():  # an answer without a length seems complete
                raise clock.error() from None


class Clock:
    """The time that a file may take to come, with its host's name and the connection."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds.

        Raises:
            TimeoutError: there are none.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.error()
        return left

    def error(self) -> TimeoutError:
        """That it is over."""
        return TimeoutError(f"it took more than {self._seconds:g} s")


class _Found(NamedTuple):
    """Addresses of a host, or why there are none."""

    addresses: list[str]
    why: str = ""


class Resolver:
    """Looks hosts up, in a thread for each: the system's resolver knows no limit of time.

    Who asks for a host that is being looked up waits for the same answer. So there are no more
    threads than hosts that are allowed, however long these take.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._coming: dict[str, Future[_Found]] = {}

    def look_up(self, host: str) -> Future[_Found]:
        """The addresses of a host; it raises nothing."""
        with self._lock:
            coming = self._coming.get(host)
            if coming is None:
                # A daemon: no program waits for it at its end. If there can be no thread, nobody is
                # to wait for its answer.
                name = "engine-core-media-host"
                threading.Thread(target=self._ask, args=(host,), name=name, daemon=True).start()
                coming = self._coming[host] = Future()
        return coming

    def _ask(self, host: str) -> None:
        try:
            entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found = _Found([str(entry[4][0]) for entry in entries], "it has no address")
        except Exception as error:  # as of a name that is no name
            found = _Found([], str(error) or type(error).__name__)
        with self._lock:
            coming = self._coming.pop(host)
        coming.set_result(found)


def fetch(
    url: SplitResult,
    host: str,
    port: int,
    reading: Reading,
    *,
    seconds: float,
    resolver: Resolver,
    max_bytes: int,
) -> bytes:
    """The bytes that an address gives.

    Args:
        url: the address.
        host: of it.
        port: of it.
        reading: that of the prompt.
        seconds: that it may take.
        resolver: looks the host up.
        max_bytes: that it may have.

    Raises:
        RequestError: nothing comes, or too much, or too slowly; or the host is of this network.
    """
    try:
        with contextlib.ExitStack() as stack:
            clock = Clock(seconds)
            address = _public_address(host, reading.wait(resolver.look_up(host), clock))

            def connect(_: Any, timeout: Any = None, source: Any = None) -> socket.socket:
                sock = socket.socket(_family(address), socket.SOCK_STREAM)
                try:
                    stack.enter_context(reading.watch(sock, clock))
                    _connect(sock, (address, port), reading, clock)
                except BaseException:
                    sock.close()
                    raise
                return sock

            connection = _connection(url.scheme, host, port, connect, clock.left())
            stack.callback(connection.close)
            connection.connect()
            return _answer(connection, url, host, reading, max_bytes)
    except RequestError:
        raise
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise RequestError(f"nothing comes from {host!r}: {reason}") from None


def check_size(size: int, most: int) -> None:
    """Refuse a file of more than ``most`` bytes.

    Raises:
        RequestError: it has more.
    """
    if size > most:
        raise RequestError(f"it has {size} bytes, and {most} are taken at most; make it smaller")


def _connect(sock: socket.socket, address: tuple[str, int], reading: Reading, clock: Clock) -> None:
    """Connect, unless nobody waits for it any more."""
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        sock.connect(address)
    # From here on whoever ends the reading ends this too; before there was nothing to end.
    reading.check()
    waiting = select.poll()
    waiting.register(sock, select.POLLOUT)
    if not waiting.poll(clock.left() * 1000):
        raise clock.error()
    reading.check()
    if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(error, os.strerror(error))
    sock.settimeout(clock.left() + 1)  # The watch ends it before that, and says why.


def _answer(
    connection: http.client.HTTPConnection,
    url: SplitResult,
    host: str,
    reading: Reading,
    max_bytes: int,
) -> bytes:
    path = url.path or "/"
    target = f"{path}?{url.query}" if url.query else path
    target = _BEYOND_ASCII.sub(lambda letters: quote(letters[0]), target)
    connection.request("GET", target, headers={"Accept-Encoding": "identity"})
    with contextlib.closing(connection.getresponse()) as answer:
        if 300 <= answer.status < 400:
            raise RequestError(
                f"{host!r} answers with a redirect ({answer.status}), which is not "
                "followed; give the address that it leads to"
            )
        if answer.status != 200:
            raise RequestError(f"{host!r} answers with status {answer.status}")
        check_size(answer.length or 0, max_bytes)
        content = BytesIO()
        while piece := answer.read(min(_PIECE, max_bytes + 1 - content.tell())):
            check_size(content.tell() + len(piece), max_bytes)
            reading.take(len(piece))
            content.write(piece)
        if answer.length:
            raise http.client.IncompleteRead(b"", answer.length)
        return content.getvalue()


def _public_address(host: str, found: _Found) -> str:
    """An address of the host.

    Raises:
        RequestError: one of its addresses is not public: it belongs to this network.
        OSError: it has none.
    """
    for address in found.addresses:
        if not _is_public(address):
            raise RequestError(f"{host!r} has an address that is not public; send a data URL")
    if not found.addresses:
        raise OSError(found.why)
    return found.addresses[0]


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        # What leads to an address of the older kind counts as that.
        nat64 = ip in ipaddress.ip_network("64:ff9b::/96")
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if nat64 else None
        ip = inner or ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None, None))[1] or ip
    return ip.is_global and not ip.is_multicast


def _connection(
    scheme: str, host: str, port: int, connect: Callable[..., socket.socket], seconds: float
) -> http.client.HTTPConnection:
    """A connection by ``connect`` that speaks to ``host``."""
    made = (
        http.client.HTTPSConnection(
            host, port, timeout=seconds, context=ssl.create_default_context()
        )
        if scheme == "https"
        else http.client.HTTPConnection(host, port, timeout=seconds)
    )
    made._create_connection = connect  # type: ignore[attr-defined]
    return made


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Not the method of a TLS socket, which its user's thread is in.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


__all__ = ["Reading", "Resolver", "check_size", "fetch"]
