"""Contents of pictures, videos and sounds that are named by an address or a path.

Nothing is read or fetched for a stranger unless the server's owner has allowed the folder or the
host. Clients take turns at it, and none has all threads, all room for bytes, or all places to wait.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from engine_core.errors import EngineDeadError, QueueFullError, RequestError, shown
from engine_core.media.download import Reading, Resolver, check_size, fetch
from engine_core.media.parts import MediaPart
from engine_core.workers.turns import Turns, group_of

MAX_BYTES = 128 * 2**20
# Of all that is held for prompts that wait for a worker, or for more of what they show, and of it
# what is held for one client; no more is begun then. What comes already may be as much again.
_MAX_HELD = 2**30
_MAX_OF_CLIENT = 2**28
_SECONDS = 20.0
# Threads that wait for other hosts; those that wait for the files of one client, and for one host.
_AT_ONCE = 64
_OF_CLIENT = 16
_OF_HOST = 32
# What may wait for one of them, or be in it; more if it is all of one prompt.
_QUEUED = 256
_PORTS = {"http": 80, "https": 443}


@dataclass(eq=False, slots=True)
class _Task:
    """A file that is to be read for a prompt."""

    part: MediaPart
    reading: Reading
    client: Hashable
    content: Future[bytes] = field(default_factory=Future)

    def refuse(self, error: Exception) -> None:
        """Have it, which will not be read, raise ``error``."""
        if self.content.set_running_or_notify_cancel():
            self.content.set_exception(error)


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
        self._resolver = Resolver()
        self._turns: Turns[_Task] = Turns(_OF_HOST, _OF_CLIENT)
        self._taken: deque[_Task] = deque()  # for threads that come for them
        self._readings: set[Reading] = set()
        self._held: Counter[Hashable] = Counter()
        self._closed = False

    def begin(
        self, parts: Sequence[MediaPart], client: Hashable = None, *, bounded: bool = True
    ) -> Future[list[MediaPart]]:
        """Begin to read the parts that name their content, several at once.

        The first that fails ends the others. The ``client`` is whose prompt it is: clients take
        turns. If too many files wait, the newest of the client with the most raises
        :class:`QueueFullError`, if that is another.
        Where they are not ``bounded``, whoever calls bounds how many prompts there are at a time.

        Returns:
            The parts, with the bytes of a file in the place of its path or address. Data URLs stay:
            they are decoded with what they hold. It raises :class:`RequestError`, whose ``param``
            names the part, if one may not be read, or cannot. To cancel it ends what comes.

        Raises:
            QueueFullError: too many wait for it, and no other client has more of them.
            EngineDeadError: the engine is being shut down.
        """
        made: Future[list[MediaPart]] = Future()
        reading = Reading(self._max_bytes, partial(self._hold, group_of(client), bounded=bounded))
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
                if settled or (left and error is None):
                    return
                settled = True
            # Errors are not raised here, nor are the tasks kept, so that nothing that was read has
            # to wait for a collection.
            ready = dict(coming)
            coming.clear()
            going = made.set_running_or_notify_cancel()
            if error is not None or not going:
                # What the others would say now is of no interest, and nobody waits for them.
                self._give_up(reading, ready.values())
                if going:
                    made.set_exception(error)
                return
            with self._lock:
                self._readings.discard(reading)
            read = {place: task.content.result() for place, task in ready.items()}
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
        if not tasks:
            with self._lock:
                self._check_open()
            made.set_result(list(parts))
            return made
        with self._lock:
            self._check_open()
            shed, full = self._queue(client, tasks, bounded=bounded)
            if full is None:
                self._readings.add(reading)
                self._dispatch()
        for task in shed:  # whose callbacks end the other files of their prompts
            task.refuse(self._full())
        if full is not None:
            raise full
        return made

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("the engine is being shut down and takes no more requests")

    def _queue(
        self, client: Hashable, tasks: Sequence[_Task], *, bounded: bool
    ) -> tuple[list[_Task], QueueFullError | None]:
        """Have tasks wait. What leaves its place to them, and why they have none."""
        if not bounded:
            self._wait(tasks)
            return [], None
        held, own = self._held.total(), self._held[group_of(client)]
        if held > _MAX_HELD or own > _MAX_OF_CLIENT:
            return [], self._full()
        self._wait(tasks)
        shed: list[_Task] = []
        # A prompt that names more has its turn where nothing else waits: later it had none either.
        most = max(_QUEUED, len(tasks))
        while len(self._turns) + self._turns.num_running > most:
            if (other := self._turns.shed(client)) is None:
                for task in tasks:
                    self._turns.discard(client, task)
                # Nobody loses a place for a prompt that has none. Of each the newest went first.
                self._wait(reversed(shed))
                return [], self._full()
            shed.append(other)
        return shed, None

    def _wait(self, tasks: Iterable[_Task]) -> None:
        for task in tasks:
            self._turns.add(task.client, task, lane=_host_of(task.part.value))

    def _full(self) -> QueueFullError:
        reading = len(self._turns) + self._turns.num_running
        return QueueFullError(
            f"{reading} pictures, videos and sounds are being read already, and "
            f"{self._held.total() >> 20} MiB of others wait for their turn; send it again later"
        )

    def _give_up(self, reading: Reading, tasks: Iterable[_Task]) -> None:
        """End what comes for a prompt, and begin nothing more for it."""
        reading.cancel()
        with self._lock:
            self._readings.discard(reading)
            for task in tasks:
                self._turns.discard(task.client, task)
            self._dispatch()
        for task in tasks:
            task.content.cancel()

    def _dispatch(self) -> None:
        """Have threads read as many files as may be read at once."""
        while self._turns.num_running < _AT_ONCE and self._turns.ready and not self._closed:
            self._taken.append(self._turns.take())
            # Without an argument, to which an error would lead through the frames of its thread.
            self._threads.submit(self._work)

    def _work(self) -> None:
        """Read the file whose turn it is."""
        with self._lock:
            if not self._taken:  # closed meanwhile
                return
            task = self._taken.popleft()
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
                self._turns.end(task.client, task)
                self._dispatch()
            del task  # to which an error leads through this frame

    def _hold(self, group: Hashable, size: int, *, bounded: bool = True) -> None:
        """So many bytes more are held for a client, or fewer."""
        with self._lock:
            own = self._held[group] + size
            most = self._held.total() + size
            if (
                bounded
                and size > 0
                and (own > _MAX_OF_CLIENT + self._max_bytes or most > 2 * _MAX_HELD)
            ):
                raise self._full()
            self._held[group] = own
            if own <= 0:
                del self._held[group]

    def release(self, size: int, client: Hashable = None) -> None:
        """Give back the room of so many bytes that were read for a client."""
        self._hold(group_of(client), -size)

    def close(self) -> None:
        """Read nothing more."""
        with self._lock:
            self._closed = True
            waiting = [*self._turns.clear(), *self._taken]
            self._taken.clear()
            readings = list(self._readings)
        for task in waiting:
            task.content.cancel()
        for reading in readings:
            reading.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _content(self, part: MediaPart, reading: Reading) -> bytes:
        try:
            reading.check()
            return self._read(part.value, reading)
        except QueueFullError:
            raise
        except RequestError as error:
            raise RequestError(f"{part.param}: {error}", param=part.param) from None

    def _read(self, value: str | Path, reading: Reading) -> bytes:
        if isinstance(value, Path):
            return self._file(value, reading)
        try:
            url = urlsplit(value)
            port = url.port
        except ValueError as error:
            raise RequestError(f"{value[:80]!r} is no address: {error}") from None
        if url.scheme == "file":
            return self._file(self._allowed(url), reading)
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
        return fetch(
            url,
            host,
            port or usual,
            reading,
            seconds=self._seconds,
            resolver=self._resolver,
            max_bytes=self._max_bytes,
        )

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

    def _file(self, path: Path, reading: Reading) -> bytes:
        # Neither a link put there meanwhile nor a pipe that nobody writes to.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
        if self._local_path is not None and path.is_relative_to(self._local_path):
            flags |= getattr(os, "O_NOFOLLOW", 0)
        try:
            with os.fdopen(os.open(path, flags), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise RequestError(f"{path.name!r} is no file")
                check_size(status.st_size, self._max_bytes)
                reading.take(status.st_size)
                content = file.read(status.st_size)
                if len(content) < status.st_size:
                    raise RequestError(f"{path.name!r} has become shorter while it was read")
                return content
        except RequestError:
            raise
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RequestError(f"{path.name!r} cannot be read: {reason}") from None


def _failure(task: Future[bytes]) -> BaseException | None:
    """Why nothing was read."""
    if task.cancelled():
        return EngineDeadError("the engine is being shut down")
    return task.exception()


def _host_of(value: str | Path) -> str | None:
    """The host that an address names, if it is one."""
    try:
        return urlsplit(value).hostname if isinstance(value, str) else None
    except ValueError:
        return None


def names_source(part: MediaPart) -> bool:
    """Whether a part is named by a path, or by an address that is no data URL."""
    value = part.value
    if isinstance(value, Path):
        return True
    return isinstance(value, str) and value[:5].lower() != "data:"


__all__ = ["MediaSources", "names_source"]
