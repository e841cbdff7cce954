"""Shared by the tests that attack a server: raw connections, and a client that is served well."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
from serving import ServerProcess


class Clock:
    """Time that passes for the one who answers.

    By the wall's clock a machine that is busy with other things seems slow, and by that of the
    processors whatever is done beside. The lesser of both says how long an answer was kept waiting
    for what the server and its engine did instead.
    """

    def __init__(self, server: ServerProcess) -> None:
        pids = (server.process.pid, server.engine_pid)
        self._processes = [psutil.Process(pid) for pid in pids]
        self._last = self._now()

    def _now(self) -> tuple[float, float]:
        spent = sum(sum(process.cpu_times()[:2]) for process in self._processes)
        return time.monotonic(), spent

    def lap(self) -> float:
        """Seconds since the last one."""
        last, self._last = self._last, self._now()
        return min(now - before for now, before in zip(self._last, last, strict=True))


class Healthy:
    """A client that streams the same answer again and again.

    Attributes:
        session: what it asks with.
        expected: the tokens of its answer, as they were when nobody else asked.
        baseline: seconds that it went without a token then.
    """

    def __init__(self, server: ServerProcess, headers: dict[str, str] | None = None) -> None:
        self._url = f"{server.url}/v1/completions"
        # It keeps its connection: a new one has no more right to a place than those of a crowd.
        limits = httpx.Limits(keepalive_expiry=None)
        self.session = httpx.Client(
            headers=headers, timeout=60, verify=server.verify, limits=limits
        )
        self._clock = Clock(server)
        self.expected, self.baseline = self._answer()
        _, again = self._answer()
        self.baseline = max(self.baseline, again)

    def _answer(self) -> tuple[list[int], float]:
        """The tokens, and the longest time without one."""
        body: dict[str, Any] = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 60}
        body |= {"temperature": 0, "stream": True, "return_token_ids": True, "ignore_eos": True}
        tokens: list[int] = []
        longest = 0.0
        self._clock.lap()
        self._begun = False
        with self.session.stream("POST", self._url, json=body) as response:
            assert response.status_code == 200, response.read()
            self._begun = True
            for line in response.iter_lines():
                longest = max(longest, self._clock.lap())
                if line.startswith("data: {"):
                    choices = json.loads(line.removeprefix("data: "))["choices"]
                    tokens += [token for choice in choices for token in choice["token_ids"]]
        return tokens, longest

    @contextlib.contextmanager
    def beside(self, refused: bool = False) -> Iterator[None]:
        """It is served meanwhile as it was before.

        Args:
            refused: a new connection of it may be told that all places are taken, and it tries
                again. Between two answers its own waits as others do, and may make room: what it
                sends then finds no reader. An answer that has begun is not broken off.
        """
        stop = threading.Event()
        answers: list[tuple[list[int], float]] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                while not stop.is_set() or not answers:
                    try:
                        answers.append(self._answer())
                        # An answer takes as long; one right after the other would take a core, and
                        # whoever keeps it waiting for more than that is seen by the next.
                        stop.wait(0.2)
                    except (AssertionError, httpx.TransportError) as error:
                        told = isinstance(error, httpx.TransportError) or (
                            "too_many_connections" in str(error)
                        )
                        if not refused or self._begun or not told:
                            raise
                        time.sleep(0.05)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        assert not errors, errors
        assert all(tokens == self.expected for tokens, _ in answers)
        assert max(longest for _, longest in answers) < self.baseline + 1.5


def connect(server: ServerProcess, source: str = "127.0.0.1") -> socket.socket:
    """A connection to it from an address, without TLS."""
    host, port = server.url.rpartition("/")[2].split(":")
    connection = socket.create_connection((host, int(port)), 60, source_address=(source, 0))
    connection.settimeout(60)
    return connection


def send(connection: socket.socket, data: bytes) -> bool:
    """Whether it could be sent."""
    try:
        connection.sendall(data)
    except OSError:
        return False
    return True


def read_all(connection: socket.socket) -> bytes:
    """Bytes until the server closes."""
    data = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            data += piece
    return bytes(data)


def status_of(data: bytes) -> int:
    """That of an answer, from its first line."""
    return int(data.split(b" ", 2)[1])


def memory_of(server: ServerProcess) -> int:
    """Bytes of the process that answers."""
    return int(psutil.Process(server.process.pid).memory_info().rss)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed it; what it sent is thrown away."""
    readable, _, _ = select.select([connection], [], [], 0)
    try:
        return bool(readable) and not connection.recv(65536, socket.MSG_DONTWAIT)
    except ConnectionError:
        return True


def wait_until(done: Callable[[], bool], seconds: float = 60) -> None:
    """Wait so many seconds at most: far more than is needed."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)
