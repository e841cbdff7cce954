"""The far end of a :class:`RayReplica`: an engine process on a machine of a Ray cluster.

Ray Serve runs a :class:`CoreHost` in an actor. It imports no torch and does not look into
messages: bytes of the engine process's socket go through it as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from engine_core import __version__
from engine_core.configs import EngineConfig
from engine_core.engine import process
from engine_core.engine.arguments import WarmUp
from engine_core.errors import OptionError

_READ_BYTES = 1 << 20
# Seconds that a process has to end once its socket is closed, and to write its stacks.
STOP_SECONDS, LAST_WORDS_SECONDS = 5.0, 5.0
# Seconds without a word of the frontend after which the engine and its deployment end. They
# outlast the longest wait before a dead engine is started again.
_SILENT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class CoreTask:
    """All that the engine process on another machine is started with.

    Attributes:
        version: of engine-core.
        model: a checkpoint folder, a GGUF file or a hub id, as on that machine.
        config: the engine's settings.
        max_step_time: see :func:`engine_core.engine.process.main`, as for the next one.
        warm_up: likewise.
        log_level: likewise.
        environment: changes of its environment.
    """

    version: str
    model: str
    config: EngineConfig
    max_step_time: float | None
    warm_up: WarmUp
    log_level: int
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Hosted:
    """The host's first message: where the engine process runs.

    Attributes:
        node: the machine's address in the cluster.
        node_id: by which Ray knows it.
        pid: of the engine process.
    """

    node: str
    node_id: str
    pid: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The host's last message: the exit code of the engine process, below 0 for a signal."""

    code: int


class CoreHost:
    """Runs one engine process at a time, each for a life of a replica.

    Commands come numbered: Ray Serve calls methods in any order. A life that another one follows
    is ended.
    """

    def __init__(self) -> None:
        import ray
        from ray import serve

        self._serve = serve
        self._name = serve.get_replica_context().app_name
        self._node = ray.util.get_node_ip_address()
        self._node_id = ray.get_runtime_context().get_node_id()
        self._life = ""
        self._child: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._expected = 0
        self._early: dict[int, bytes] = {}
        self._heard = time.monotonic()
        threading.Thread(target=self._watch, name="frontend's signs", daemon=True).start()

    async def run(self, life: str, task: bytes) -> AsyncIterator[bytes]:
        """Start the engine process and yield its messages, in pieces of any size.

        Args:
            life: a name that commands to this process carry.
            task: a pickled :class:`CoreTask`.
        """
        self._end_child()
        self._heard = time.monotonic()
        self._life, self._expected, self._early = life, 0, {}
        given: CoreTask = pickle.loads(task)
        if given.version != __version__:
            error = OptionError(
                f"the server runs engine-core {given.version}, and on the machine {self._node} "
                f"of the Ray cluster is {__version__}; install the same one on both"
            )
            yield process.encode(process.Failure(str(error), "", error))
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            # By a command of its own: multiprocessing would import the actor's main module again.
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine_core.engine.ray_core", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.PIPE,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    **given.environment,
                },
            )
        self._child = child
        assert child.stdin is not None, "it is a pipe"
        with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
            pipe.write(task)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        self._writer = writer
        try:
            self._take_early()
            yield process.encode(Hosted(self._node, self._node_id, child.pid))
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(_READ_BYTES):
                    yield data
            try:
                code = await asyncio.to_thread(child.wait, STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                code = await asyncio.to_thread(child.wait)
            yield process.encode(Ended(code))
        finally:
            child.kill()
            writer.transport.abort()
            if self._child is child:
                self._child = self._writer = None
            await asyncio.shield(asyncio.to_thread(child.wait))

    async def send(self, life: str, number: int, data: bytes) -> None:
        """Hand on bytes to the engine process, after those with lower numbers."""
        self._heard = time.monotonic()
        if life == self._life:
            self._early[number] = data
            self._take_early()

    def _take_early(self) -> None:
        while self._writer is not None and self._expected in self._early:
            self._writer.write(self._early.pop(self._expected))
            self._expected += 1

    async def beat(self) -> None:
        """Hear that the frontend lives."""
        self._heard = time.monotonic()

    async def stop(self, life: str, how: str) -> None:
        """End the engine process: "close", by itself; "kill"; "hang", once it wrote its stacks."""
        child = self._child
        if life != self._life or child is None:
            return
        if how == "hang":
            child.send_signal(signal.SIGUSR1)
            await asyncio.sleep(LAST_WORDS_SECONDS)
        if how == "close":
            if self._writer is not None:
                self._writer.transport.abort()
        else:
            child.kill()

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.kill()

    def _watch(self) -> None:
        """End everything when nobody has been heard for long: the frontend's machine is gone."""
        while (left := self._heard + _SILENT_SECONDS - time.monotonic()) > 0:
            time.sleep(left)
        self._end_child()
        self._serve.delete(self._name, _blocking=False)


__all__ = ["LAST_WORDS_SECONDS", "STOP_SECONDS", "CoreHost", "CoreTask", "Ended", "Hosted"]
