"""The load on an OpenAI-compatible server: requests sent at their times, and what comes when.

Several processes send, so that the client is never what a stream waits for. A process keeps the
time and the bytes of each read, and looks into them only when all of its streams have ended.
Times are seconds of the system's monotonic clock from the start of the run.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import signal
import socket
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

clock = time.monotonic
# An event loop that comes later than this is a stall, which a gap may be due to.
_STALL_SECONDS = 0.005
# What a process needs to make its tasks before the first request is due.
_LEAD_SECONDS = 0.5


@dataclass(slots=True)
class Request:
    """A request and when it is to be sent.

    Attributes:
        due: when, in seconds from the start of the run.
        body: what is posted.
        prompt_tokens: length of its prompt.
        kind: a label for the report.
    """

    due: float
    body: dict[str, Any]
    prompt_tokens: int
    kind: str = "text"


@dataclass(slots=True)
class Observation:
    """The client's view of one request.

    Attributes:
        index: its place among the requests.
        kind: the request's label.
        due: when it was to be sent.
        sent: when its bytes were handed to the system, or None.
        ended: when the connection was closed.
        prompt_tokens: length of its prompt.
        events: when each event with tokens came.
        tokens: how many each had; 1 where the server does not say.
        counted: whether the server said how many tokens each event had.
        usage: generated tokens by the server's own account.
        error: what went wrong, or None.
        cut: whether the client left before the end, as it was to.
    """

    index: int
    kind: str
    due: float
    prompt_tokens: int
    sent: float | None = None
    ended: float = 0.0
    events: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    counted: bool = True
    usage: int | None = None
    error: str | None = None
    cut: bool = False

    @property
    def first_token(self) -> float:
        """Seconds from sending to the first event with tokens."""
        assert self.sent is not None, "an event was a request before"
        return self.events[0] - self.sent

    @property
    def gaps(self) -> Iterator[tuple[float, float, int]]:
        """Begin, end, and tokens at the end, of the time between two events."""
        return zip(self.events, self.events[1:], self.tokens[1:], strict=False)


@dataclass(slots=True)
class Run:
    """Observations of the client in the requests' order, and where it came late itself.

    Attributes:
        observations: one for each request, but not for those that were not sent before a stop.
        stalls: begin and end of the times in which an event loop of the client did not run.
        origin: the start of the run on the monotonic clock, in seconds.
        stopped: seconds after which it was told to stop, or None.
    """

    observations: list[Observation]
    stalls: list[tuple[float, float]]
    origin: float
    stopped: float | None = None


class Stop:
    """The wish to end early, as a handler of signals: what was seen until then is kept.

    Attributes:
        when: the moment of the first wish by the monotonic clock, or None.
    """

    def __init__(self) -> None:
        self.when: float | None = None
        self._pipes: list[Connection] = []

    def __call__(self, *_: object) -> None:
        """Have the run under way end; without one, or asked again, raise KeyboardInterrupt."""
        again, self.when = self.when is not None, clock()
        if again or not self._pipes:
            raise KeyboardInterrupt
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)

    @contextmanager
    def stopping(self, pipes: list[Connection]) -> Iterator[None]:
        """Tell the processes behind these pipes of a wish that comes meanwhile."""
        self._pipes = pipes
        try:
            yield
        finally:
            self._pipes = []


@dataclass(frozen=True, slots=True)
class Client:
    """How requests are sent.

    Attributes:
        url: of the server, without a path.
        processes: processes that send; each takes its share of the requests.
        concurrency: requests in flight at most, instead of an open loop; None for no limit.
        patience: seconds after the last request is due until the streams left are given up; a
            closed loop goes on to its end.
        until: index of the request whose end ends the run, or None for all.
        api_key: what the server wants, or None.
        stop: ends a run early.
    """

    url: str
    processes: int = 1
    concurrency: int | None = None
    patience: float = 120.0
    until: int | None = None
    api_key: str | None = None
    stop: Stop = field(default_factory=Stop)

    def run(self, requests: Sequence[Request]) -> Run:
        """Send the requests at their times, and see them through.

        Raises:
            RuntimeError: a process of the client ended.
        """
        spawn = multiprocessing.get_context("spawn")
        count = min(self.processes, len(requests), self.concurrency or len(requests))
        pipes, processes = [], []
        for place in range(count):
            here, there = spawn.Pipe()
            processes.append(spawn.Process(target=_process, args=(self, there), daemon=True))
            processes[-1].start()
            there.close()
            here.send([(index, requests[index]) for index in range(place, len(requests), count)])
            pipes.append(here)
        limits = [None if self.concurrency is None else self.concurrency // count] * count
        for place in range((self.concurrency or 0) % count):
            limits[place] += 1
        try:
            for pipe in pipes:
                pipe.recv()  # its requests are bytes now
            origin = clock() + _LEAD_SECONDS
            for pipe, limit in zip(pipes, limits, strict=True):
                pipe.send((origin, limit))
            with self.stop.stopping(pipes):
                parts = [pipe.recv() for pipe in pipes]
        except EOFError:
            raise RuntimeError("a process of the client ended; its error is above") from None
        for process in processes:
            process.join()
        observations = sorted((seen for seen, _ in parts for seen in seen), key=lambda o: o.index)
        stalls = [stall for _, stalls in parts for stall in stalls]
        stopped = None if self.stop.when is None else self.stop.when - origin
        return Run(observations, stalls, origin, stopped)


def _process(client: Client, pipe: Connection) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the process that started it says when
        signal.signal(number, signal.SIG_IGN)
    share: list[tuple[int, Request]] = pipe.recv()
    streams = [_Stream(client, index, request) for index, request in share]
    pipe.send(None)
    origin, limit = pipe.recv()
    gc.disable()  # a collection would be a stall
    with suppress(OSError):  # only root may: not to wait for a server on the same cores
        os.nice(-10)
    stalls = asyncio.run(_send(client, streams, origin, limit, pipe))
    observations = [stream.observe(origin) for stream in streams if not stream.unsent]
    pipe.send((observations, [(begin - origin, end - origin) for begin, end in stalls]))


async def _send(
    client: Client, streams: list[_Stream], origin: float, limit: int | None, pipe: Connection
) -> list[tuple[float, float]]:
    """Send each request when it is due, until ``pipe`` says stop; where the event loop stalled."""
    room = asyncio.Semaphore(limit) if limit else None
    stalls: list[tuple[float, float]] = []
    watch = asyncio.create_task(_watch(stalls))
    tasks = [asyncio.create_task(stream.run(origin, room)) for stream in streams]
    ends = [t for t, s in zip(tasks, streams, strict=True) if client.until in (None, s.index)]
    last = origin + max(stream.request.due for stream in streams)
    timeout = None if limit else last + client.patience - clock()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), stopped.set)
    stop = asyncio.create_task(stopped.wait())
    seen = asyncio.gather(*(ends or tasks), return_exceptions=True)
    await asyncio.wait((seen, stop), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    cut = client.until is not None and all(task.done() for task in ends)
    cut |= stopped.is_set()
    for stream, task in zip(streams, tasks, strict=True):
        if not task.done():
            stream.leave(cut)
            task.cancel()
    stop.cancel()
    await asyncio.gather(*tasks, seen, stop, return_exceptions=True)
    watch.cancel()
    return stalls


async def _watch(stalls: list[tuple[float, float]]) -> None:
    while True:
        before = clock()
        await asyncio.sleep(0.01)
        if (now := clock()) > before + 0.01 + _STALL_SECONDS:
            stalls.append((before + 0.01, now))


_address = cache(socket.gethostbyname)


class _Stream(asyncio.Protocol):
    """One request on a connection of its own, which the server closes after the answer."""

    def __init__(self, client: Client, index: int, request: Request) -> None:
        self.index = index
        self.request = request
        self._url = urlsplit(client.url)
        # A name would be looked up in a thread, for each request anew.
        self._host = _address(self._url.hostname or "")
        body = json.dumps(request.body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._url.netloc}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        if client.api_key:
            head += f"Authorization: Bearer {client.api_key}\r\n"
        self._bytes = head.encode() + b"\r\n" + body
        self._due: float | None = None
        self._sent: float | None = None
        self._ended: float | None = None
        self._reads: list[tuple[float, bytes]] = []
        self._error: str | None = None
        self._cut = False
        self._transport: asyncio.Transport | None = None
        self._closed: asyncio.Future[None] | None = None

    async def run(self, origin: float, room: asyncio.Semaphore | None) -> None:
        """Send it when it is due, and wait for its end."""
        await asyncio.sleep(origin + self.request.due - clock())
        if room is None:
            await self._exchange()
            return
        async with room:
            self._due = clock()
            await self._exchange()

    async def _exchange(self) -> None:
        loop = asyncio.get_running_loop()
        self._closed = loop.create_future()
        options: dict[str, Any] = {"host": self._host, "port": self._url.port or 80}
        if self._url.scheme == "https":
            options |= {"port": self._url.port or 443, "ssl": True}
            options["server_hostname"] = self._url.hostname
        try:
            await loop.create_connection(lambda: self, **options)
        except OSError as error:
            self._error = f"{type(error).__name__}: {error}"
            self._ended = clock()
            return
        await self._closed

    @property
    def unsent(self) -> bool:
        """Whether it was stopped before it was due."""
        return self._cut and self._sent is None

    def leave(self, cut: bool) -> None:
        """Close the connection before the end, as was planned or because it takes too long."""
        self._cut = cut
        if not cut:
            self._error = "not finished in time"
        if self._transport is not None:
            self._transport.abort()
        self._ended = clock()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._sent = clock()
        transport.write(self._bytes)

    def data_received(self, data: bytes) -> None:
        """Keep what came, and when."""
        self._reads.append((clock(), data))

    def connection_lost(self, error: Exception | None) -> None:
        """Note the end."""
        self._ended = self._ended or clock()
        if error is not None and self._error is None:
            self._error = f"{type(error).__name__}: {error}"
        assert self._closed is not None, "it was connected"
        with suppress(asyncio.InvalidStateError):  # it was left
            self._closed.set_result(None)

    def observe(self, origin: float) -> Observation:
        """The answers, read at last."""
        due = self.request.due if self._due is None else self._due - origin
        seen = Observation(self.index, self.request.kind, due, self.request.prompt_tokens)
        seen.error, seen.cut = self._error, self._cut
        seen.sent = None if self._sent is None else self._sent - origin
        seen.ended = (self._ended or clock()) - origin
        if self._cut and not self._reads:
            seen.error = seen.error or "stopped before its first token"
            return seen
        status, body, times = _decode(self._reads)
        if status != 200:
            seen.error = seen.error or f"status {status}: {body[:300].decode(errors='replace')}"
            return seen
        done = False
        begin = 0
        while (end := body.find(b"\n\n", begin)) >= 0:
            line, begin = body[begin:end], end + 2
            if line == b"data: [DONE]":
                done = True
            elif line.startswith(b"data:"):
                _take(seen, json.loads(line[5:]), times.at(end + 1) - origin)
        if seen.error is None and not done and not seen.cut:
            seen.error = "the stream ended without [DONE]"
        if seen.error is None and not seen.events:
            seen.error = "the stream ended without a token"
        return seen


def _take(seen: Observation, chunk: dict[str, Any], when: float) -> None:
    """Add an event to what was seen of its request."""
    if "error" in chunk:
        seen.error = str(chunk["error"])[:300]
        return
    before, usage = seen.usage or 0, chunk.get("usage")
    if usage:
        seen.usage = usage["completion_tokens"]
    if not chunk.get("choices"):
        return
    ids = chunk["choices"][0].get("token_ids")
    count = len(ids) if ids is not None else (seen.usage or 0) - before if usage else None
    seen.counted &= count is not None
    if count == 0:
        return
    seen.events.append(when)
    seen.tokens.append(1 if count is None else count)


class _Times:
    """When each byte of an answer's body had come.

    Args:
        ends: where the pieces of the body end.
        times: when each of them had come.
    """

    def __init__(self, ends: list[int], times: list[float]) -> None:
        self._ends = ends
        self._times = times

    def at(self, place: int) -> float:
        """When the byte at ``place`` had come."""
        return self._times[bisect_left(self._ends, place + 1)]


def _decode(reads: Sequence[tuple[float, bytes]]) -> tuple[int, bytes, _Times]:
    """Status, body and times of an HTTP answer; the status is 0 if there is none."""
    raw = b"".join(data for _, data in reads)
    head, blank, rest = raw.partition(b"\r\n\r\n")
    when = [time for time, _ in reads]
    ends = list(accumulate(len(data) for _, data in reads))
    if not blank:
        return 0, raw, _Times(ends, when)
    status, first = int(head.split(b" ", 2)[1]), len(head) + len(blank)
    if b"transfer-encoding: chunked" not in head.lower():
        return status, rest, _Times([end - first for end in ends], when)
    pieces: list[bytes] = []
    times: list[float] = []
    place = first
    while (line := raw.find(b"\r\n", place)) >= 0:
        size = int(raw[place:line].partition(b";")[0], 16)
        end = line + 2 + size
        if size == 0 or end > len(raw):
            break
        pieces.append(raw[line + 2 : end])
        times.append(when[bisect_left(ends, end)])
        place = end + 2
    return status, b"".join(pieces), _Times(list(accumulate(map(len, pieces))), times)
