"""Contents of pictures, videos and sounds that are named by an address or a path.

Nothing is read or fetched for a stranger unless the server's owner has allowed the folder or the
host. A host's name is resolved once, and the connection goes to the address that was looked at.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import re
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

from engine_core.errors import EngineDeadError, QueueFullError, RequestError, shown
from engine_core.media.parts import MediaPart
from engine_core.workers.turns import Turns

MAX_BYTES = 128 * 2**20
# Of all that is held for prompts that wait for a worker, or for more of what they show.
_MAX_HELD = 2**30
_SECONDS = 20.0
# Threads that wait for other hosts.
_AT_ONCE = 8
# What may wait for one of them, or be in it.
_QUEUED = 256
_PORTS = {"http": 80, "https": 443}
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")


class _Reading:
    """The reading of a prompt's files: bytes that they may still have, and its connections."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._left = max_bytes
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._cancelled = False

    def check(self) -> None:
        if self._cancelled:
            raise RequestError("nobody waits for it any more")
        if self._left < 0:
            raise RequestError(
                f"the files that the prompt names have more than {self._max_bytes} bytes together; "
                "send fewer of them, or smaller ones"
            )

    def take(self, size: int) -> None:
        with self._lock:
            self._left -= size
        self.check()

    def cancel(self) -> None:
        """End all connections, and have :meth:`check` refuse more."""
        with self._lock:
            self._cancelled = True
            for sock in self._sockets:
                _end(sock)

    @contextlib.contextmanager
    def watch(self, connected: socket.socket, clock: _Time) -> Iterator[None]:
        """End a connection from which something comes all the time, but too slowly."""
        late = threading.Event()
        left = clock.left()
        # TLS takes the socket itself over, before anything has come.
        sock = connected.dup()

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


class _Time:
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


@dataclass(eq=False, slots=True)
class _Task:
    """A file that is to be read for a prompt."""

    part: MediaPart
    reading: _Reading
    client: Hashable
    content: Future[bytes] = field(default_factory=Future)


class MediaSources:
    """Reads what parts name. It may be used from several threads.

    Args:
        local_path: the folder below which ``file:`` addresses may be read; None for none.
        domains: hosts from which may be fetched, each with a port if it is not its scheme's own.
        max_bytes: of the files that one prompt names.
        seconds: that one may take to come.
    """

    def __init__(
        self,
        local_path: str | None = None,
        domains: tuple[str, ...] = (),
        max_bytes: int = MAX_BYTES,
        seconds: float = _SECONDS,
    ) -> None:
        self._local_path = None if local_path is None else Path(local_path).resolve()
        self._domains = frozenset(domain.lower() for domain in domains)
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="engine-core-media")
        self._lock = threading.Lock()
        self._turns: Turns[_Task] = Turns()
        self._waiting = 0
        self._held = 0
        self._closed = False

    def begin(self, parts: Sequence[MediaPart], client: Hashable = None) -> Future[list[MediaPart]]:
        """Begin to read the parts that name their content, several at once.

        The first that fails ends the others. The ``client`` is whose prompt it is: clients take
        turns.

        Returns:
            The parts, with the bytes of a file in the place of its path or address. Data URLs stay:
            they are decoded with what they hold. It raises :class:`RequestError`, whose ``param``
            names the part, if one may not be read, or cannot. To cancel it ends what comes.

        Raises:
            QueueFullError: too many wait for it.
            EngineDeadError: the engine is being shut down.
        """
        made: Future[list[MediaPart]] = Future()
        reading = _Reading(self._max_bytes)
        coming = {
            place: _Task(part, reading, client)
            for place, part in enumerate(parts)
            if names_source(part)
        }
        left, settled = len(coming), False

        def ended(content: Future[bytes]) -> None:
            nonlocal left, settled
            error = _failure(content)
            with self._lock:
                left -= 1
                self._waiting -= 1
                if settled or (left and error is None):
                    return
                settled = True
            # Errors are not raised here, nor are the tasks kept, so that nothing that was read has
            # to wait for a collection.
            ready = dict(coming)
            coming.clear()
            going = made.set_running_or_notify_cancel()
            if error is not None:
                # What the others would say now is of no interest, and nobody waits for them.
                self._give_up(reading, ready.values())
                if going:
                    made.set_exception(error)
            elif going:
                read = {place: task.content.result() for place, task in ready.items()}
                with self._lock:
                    self._held += sum(map(len, read.values()))
                made.set_result(
                    [
                        part._replace(value=read.get(place, part.value))
                        for place, part in enumerate(parts)
                    ]
                )

        def left_alone(made: Future[list[MediaPart]]) -> None:
            if made.cancelled():
                self._give_up(reading, list(coming.values()))

        tasks = list(coming.values())
        for task in tasks:
            task.content.add_done_callback(ended)
        made.add_done_callback(left_alone)
        with self._lock:
            if self._closed:
                raise EngineDeadError("the engine is being shut down and takes no more requests")
            if self._waiting + len(tasks) > _QUEUED or (tasks and self._held > _MAX_HELD):
                raise QueueFullError(
                    f"{self._waiting} pictures, videos and sounds are being read already, and "
                    f"{self._held >> 20} MiB of others wait for their turn; send it again later"
                )
            self._waiting += len(tasks)
            for task in tasks:
                self._turns.add(client, task)
                self._threads.submit(self._work)
        if not tasks:
            made.set_result(list(parts))
        return made

    def _give_up(self, reading: _Reading, tasks: Iterable[_Task]) -> None:
        """End what comes for a prompt, and begin nothing more for it."""
        reading.cancel()
        with self._lock:
            for task in tasks:
                self._turns.discard(task.client, task)
        for task in tasks:
            task.content.cancel()

    def _work(self) -> None:
        """Read the file whose turn it is."""
        with self._lock:
            if not self._turns:  # closed meanwhile
                return
            task = self._turns.take()
        try:
            if task.content.set_running_or_notify_cancel():
                try:
                    content = self._content(task.part, task.reading)
                except BaseException as error:
                    task.content.set_exception(error)
                else:
                    task.content.set_result(content)
        finally:
            with self._lock:
                self._turns.end(task.client)
            del task  # to which an error leads through this frame

    def release(self, size: int) -> None:
        """Give back the room of so many bytes that were read."""
        with self._lock:
            self._held -= size

    def close(self) -> None:
        """Read nothing more."""
        with self._lock:
            self._closed = True
            waiting = self._turns.clear()
        for task in waiting:
            task.content.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _content(self, part: MediaPart, reading: _Reading) -> bytes:
        try:
            reading.check()
            content = self._read(part.value, reading)
            reading.take(len(content))
        except RequestError as error:
            raise RequestError(f"{part.param}: {error}", param=part.param) from None
        return content

    def _read(self, value: str | Path, reading: _Reading) -> bytes:
        if isinstance(value, Path):
            return self._file(value)
        try:
            url = urlsplit(value)
            port = url.port
        except ValueError as error:
            raise RequestError(f"{value[:80]!r} is no address: {error}") from None
        if url.scheme == "file":
            return self._file(self._allowed(url))
        if url.scheme not in _PORTS:
            given = repr(url.scheme) if url.scheme else "text"
            raise RequestError(
                "what is shown is given as a data URL (data:TYPE;base64,...), or as an address "
                f"with https or file where the server allows it; this is {given}"
            )
        host = (url.hostname or "").lower()
        if not host:
            raise RequestError(f"{value[:80]!r} is no address: it names no host")
        usual = _PORTS[url.scheme]
        named = host if port in (None, usual) else f"{host}:{port}"
        if named not in self._domains or url.username is not None:
            raise RequestError(
                f"addresses at {shown(named)} are not fetched; send a data URL "
                "(allowed_media_domains of the server names the hosts that are)"
            )
        return self._fetch(url, host, port or usual, reading)

    def _allowed(self, url: SplitResult) -> Path:
        """The path of a ``file:`` address, below the folder that is allowed."""
        root = self._local_path
        if root is None or url.netloc not in ("", "localhost"):
            raise RequestError(
                "files are not read; send a data URL (allowed_local_media_path of the server "
                "names the folder whose files are)"
            )
        try:
            path = Path(unquote(url.path)).resolve()
        except (OSError, ValueError) as error:
            raise RequestError(f"{url.path[:80]!r} is no path: {error}") from None
        if not path.is_relative_to(root):
            raise RequestError("the file is not below the folder that the server allows")
        return path

    def _file(self, path: Path) -> bytes:
        # Neither a link put there meanwhile nor a pipe that nobody writes to.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
        if self._local_path is not None and path.is_relative_to(self._local_path):
            flags |= getattr(os, "O_NOFOLLOW", 0)
        try:
            with os.fdopen(os.open(path, flags), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise RequestError(f"{path.name!r} is no file")
                self._check_size(status.st_size)
                return file.read()
        except RequestError:
            raise
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RequestError(f"{path.name!r} cannot be read: {reason}") from None

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise RequestError(
                f"it has {size} bytes, and {self._max_bytes} are taken at most; make it smaller"
            )

    def _fetch(self, url: SplitResult, host: str, port: int, reading: _Reading) -> bytes:
        try:
            with contextlib.ExitStack() as stack:
                clock = _Time(self._seconds)
                address = _public_address(host)

                def connect(_: Any, timeout: Any = None, source: Any = None) -> socket.socket:
                    sock = socket.create_connection((address, port), timeout, source)
                    try:
                        stack.enter_context(reading.watch(sock, clock))
                    except BaseException:
                        sock.close()
                        raise
                    return sock

                connection = _connection(url.scheme, host, port, connect, clock.left())
                stack.callback(connection.close)
                connection.connect()
                return self._answer(connection, url, host)
        except RequestError:
            raise
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise RequestError(f"nothing comes from {host!r}: {reason}") from None

    def _answer(self, connection: http.client.HTTPConnection, url: SplitResult, host: str) -> bytes:
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
            self._check_size(answer.length or 0)
            content = answer.read(self._max_bytes + 1)
            self._check_size(len(content))
            if answer.length:
                raise http.client.IncompleteRead(b"", answer.length)
            return content


def _failure(task: Future[bytes]) -> BaseException | None:
    """Why nothing was read."""
    if task.cancelled():
        return EngineDeadError("the engine is being shut down")
    return task.exception()


def names_source(part: MediaPart) -> bool:
    """Whether a part is named by a path, or by an address that is no data URL."""
    value = part.value
    if isinstance(value, Path):
        return True
    return isinstance(value, str) and value[:5].lower() != "data:"


def _public_address(host: str) -> str:
    """An address of the host.

    Raises:
        RequestError: one of its addresses is not public: it belongs to this network.
        OSError: it has none.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not _is_public(address):
            raise RequestError(f"{host!r} has an address that is not public; send a data URL")
    return addresses[0]


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


__all__ = ["MediaSources", "names_source"]
