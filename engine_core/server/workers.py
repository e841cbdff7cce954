"""Several processes that answer requests for one engine.

One process, the supervisor, starts the engine process and the workers, which answer. Each worker
has a listening socket of its own for the same port, its own tokenizer, and a link to the engine
process. What is one for all of them is kept by those who have it anyway: the engine, its queue; the
supervisor, the lives of the others; shared memory, the counts that limits are compared with; and
files, the metrics of each process, dead ones too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from engine_core import own_process
from engine_core.configs import EngineConfig
from engine_core.engine.async_engine import AsyncEngine
from engine_core.engine.shared_count import SharedCount
from engine_core.errors import ConfigError, EngineDeadError
from engine_core.registry import build_registry
from engine_core.server.connections import allow_connections
from engine_core.server.logs import configure_logging
from engine_core.server.run import (
    keep_whole_trace,
    listen,
    log_address,
    log_death,
    log_draining,
    log_ready,
    make_uvicorn_config,
    serve,
    start_engine,
    stop_on_signals,
)
from engine_core.server.settings import ServerSettings

logger = logging.getLogger(__name__)

# Seconds that a worker has, beyond the drain timeout, to send the last answers and end.
_END_SECONDS = 10.0
# The exit code of a worker whose engine is gone.
_ENGINE_DIED = 3
# What a worker and the supervisor tell each other.
_READY = b"r"
_DRAIN = b"d"


def check_server_count(settings: ServerSettings) -> None:
    """Check that several processes may answer requests, if they are asked for.

    Raises:
        ConfigError: they may not; says why.
    """
    wanted = settings.api_server_count
    if wanted > 1 and not sys.platform.startswith("linux"):
        raise ConfigError(
            f"api_server_count is {wanted}, and on {sys.platform} one process alone can listen; "
            "leave it out"
        )


@dataclass(frozen=True)
class _Place:
    """The facts that a worker is given.

    Attributes:
        index: of the worker, from 0 on.
        first: whether no process had its place before.
        name: of this process; one that takes its place is called otherwise.
        path: of the engine process's socket.
        traces: folder for the part of a trace that this process has recorded.
        counts: a file of numbers, two for each worker.
        num_workers: how many there are.
        model: as given to the command.
        config: the engine's settings.
        settings: the service's.
        api_keys: as of ``run_server``.
        parent: the supervisor.
    """

    index: int
    first: bool
    name: str
    path: Path
    traces: Path
    counts: Path
    num_workers: int
    model: str
    config: EngineConfig
    settings: ServerSettings
    api_keys: Sequence[str]
    parent: int


def run_workers(
    model: str,
    config: EngineConfig,
    settings: ServerSettings,
    api_keys: Sequence[str],
    count: int,
) -> None:
    """Serve with ``count`` workers; see :func:`~engine_core.server.run.run_server`."""
    with tempfile.TemporaryDirectory(prefix="engine-core-") as folder:
        # Read by prometheus_client when a worker imports it.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        try:
            supervisor = _Supervisor(Path(folder), model, config, settings, api_keys, count)
            asyncio.run(supervisor.run())
        finally:
            del os.environ["PROMETHEUS_MULTIPROC_DIR"]


class _Supervisor:
    """Starts the engine and the workers, and replaces workers that die."""

    def __init__(
        self,
        folder: Path,
        model: str,
        config: EngineConfig,
        settings: ServerSettings,
        api_keys: Sequence[str],
        count: int,
    ) -> None:
        self._model = model
        self._config = config
        self._settings = settings
        self._api_keys = api_keys
        self._count = count
        self._counts = folder / "counts"
        self._counts.write_bytes(bytes(2 * 8 * count))
        self._gate = folder / "engine"
        self._traces = folder / "traces"
        self._traces.mkdir()
        self._drain = asyncio.Event()
        self._listeners: list[socket.socket] = []
        self._ready = [asyncio.Event() for _ in range(count)]

    async def run(self) -> None:
        """Serve until a signal comes.

        Raises:
            EngineError: the model cannot run, or the engine died; all requests have got the cause.
            ConfigError: a worker cannot start.
        """
        stop = stop_on_signals()
        _, backlog = allow_connections(self._settings.max_connections)
        first = listen(self._settings, backlog)
        port = first.getsockname()[1]
        first.close()
        # They stay open here, so that connections wait while a worker is replaced.
        self._listeners = [listen(self._settings, backlog, port=port) for _ in self._ready]
        log_address(self._listeners[0], self._model, self._settings)
        gate = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        gate.bind(str(self._gate))
        gate.listen(self._count)
        starting = asyncio.ensure_future(
            start_engine(self._model, self._config, self._settings, listener=gate)
        )
        workers = [asyncio.ensure_future(self._keep(index)) for index in range(self._count)]
        stopped = asyncio.ensure_future(stop.wait())
        engine: AsyncEngine | None = None

        async def first_of(*events: asyncio.Future[Any]) -> None:
            await asyncio.wait({*events, *workers}, return_when=asyncio.FIRST_COMPLETED)
            for worker in workers:
                if worker.done():
                    worker.result()

        try:
            await first_of(starting, stopped)
            if not starting.done():
                return
            engine = starting.result()
            if self._settings.trace is not None:
                engine.start_trace()
            dead = asyncio.ensure_future(engine.wait_dead())
            ready = asyncio.gather(*(event.wait() for event in self._ready))
            await first_of(ready, dead, stopped)
            if ready.done():
                own_process.freeze(collect=True)
                log_ready(engine)
                await first_of(dead, stopped)
            if dead.done():
                raise dead.result()
            in_flight = memoryview(self._counts.read_bytes()).cast("q")[self._count :]
            log_draining(sum(in_flight), self._settings)
        except EngineDeadError as error:
            log_death(error)
            raise
        finally:
            for listener in self._listeners:
                listener.close()
            self._drain.set()
            if not starting.done():
                starting.cancel()
                with suppress(asyncio.CancelledError):
                    await starting
            await asyncio.gather(*workers, return_exceptions=True)
            if engine is not None:
                if self._settings.trace is not None:
                    files = sorted(self._traces.iterdir())
                    await keep_whole_trace(
                        engine,
                        [pickle.loads(file.read_bytes()) for file in files],
                        self._settings.trace,
                        self._settings.traced_seconds,
                    )
                await engine.close()

    async def _keep(self, index: int) -> None:
        """Keep a worker alive until all are to end and it has.

        Raises:
            ConfigError: it ended before it could take requests.
        """
        for turn in itertools.count():
            process, control = self._start(index, turn)
            code = await self._watch(index, process, control)
            if code == _ENGINE_DIED:
                await self._drain.wait()  # the supervisor is about to hear of it
            if self._drain.is_set():
                return
            if not self._ready[index].is_set():
                raise ConfigError(
                    f"process {index} of {self._count} that answer requests ended with exit code "
                    f"{code} before it could; the cause is on stderr"
                )
            logger.error(
                "process %d of %d that answer requests ended %s: its requests are lost, and "
                "another process takes its place",
                index,
                self._count,
                f"by signal {-code}" if code < 0 else f"with exit code {code}",
            )

    def _start(self, index: int, turn: int) -> tuple[BaseProcess, socket.socket]:
        ours, theirs = socket.socketpair()
        place = _Place(
            index,
            turn == 0,
            f"{index}.{turn}.",
            self._gate,
            self._traces,
            self._counts,
            self._count,
            self._model,
            self._config,
            self._settings,
            self._api_keys,
            os.getpid(),
        )
        with theirs:
            process = multiprocessing.get_context("spawn").Process(
                target=work,
                args=(place, theirs, self._listeners[index]),
                name=f"engine-core-{index}",
            )
            process.start()
        ours.setblocking(False)
        return process, ours

    async def _watch(self, index: int, process: BaseProcess, control: socket.socket) -> int:
        """Wait for the end of a worker, which is told to drain when it should; the exit code."""
        loop = asyncio.get_running_loop()
        draining = asyncio.ensure_future(self._drain.wait())
        with control:
            while not draining.done():
                heard = asyncio.ensure_future(loop.sock_recv(control, 1))
                either: set[asyncio.Future[Any]] = {heard, draining}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not heard.done():
                    heard.cancel()
                elif heard.exception() is None and heard.result() == _READY:
                    self._ready[index].set()
                else:
                    break
            with suppress(OSError):  # it has ended
                control.send(_DRAIN)
            left = _END_SECONDS + (self._settings.drain_timeout if draining.done() else 0.0)
            draining.cancel()
            await asyncio.to_thread(process.join, left)
        if process.exitcode is None:
            process.kill()
            await asyncio.to_thread(process.join)
        code = process.exitcode
        assert code is not None, "it was waited for"
        mark_process_dead(process.pid)  # type: ignore[no-untyped-call]  # its gauges go with it
        return code


def work(place: _Place, control: socket.socket, listener: socket.socket) -> None:
    """The life of a worker: answer requests until the supervisor says so, or is gone."""
    own_process.claim()
    # Both go to every process of a terminal; the supervisor decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    own_process.die_with(place.parent)
    settings = place.settings
    configure_logging(settings.log_format)
    with place.counts.open("r+b") as file:
        counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
    count, index = place.num_workers, place.index
    registry = build_registry(
        place.config.custom_module_map, plugin_errors=place.config.plugin_errors
    )
    in_flight = SharedCount(counts[count:], index)
    uvicorn_config = make_uvicorn_config(settings, place.api_keys, in_flight)
    control.setblocking(False)

    def ready(_: AsyncEngine) -> None:
        control.send(_READY)

    async def keep_trace(engine: AsyncEngine) -> None:
        # Renamed when it is whole: a process that dies meanwhile leaves no half of it.
        part = place.traces.with_name(f"{place.name}part")
        await asyncio.to_thread(part.write_bytes, pickle.dumps(engine.trace))
        part.rename(place.traces / place.name)

    async def run() -> None:
        stop = asyncio.Event()

        async def listen_to_supervisor() -> None:
            if await asyncio.get_running_loop().sock_recv(control, 1) == _DRAIN:
                stop.set()

        listening = asyncio.ensure_future(listen_to_supervisor())
        starting = asyncio.ensure_future(
            AsyncEngine.connect(
                place.path,
                place.config,
                name=place.name,
                on_the_way=SharedCount(counts[:count], index),
                max_queued_requests=settings.max_queued_requests,
            )
        )
        await serve(
            uvicorn_config,
            registry,
            listener,
            starting,
            settings,
            stop,
            ready,
            on_drain=lambda *_: None,
            early=place.first,
            name=f"server {index}",
            keep_trace=None if settings.trace is None else keep_trace,
        )
        listening.cancel()

    # Why the engine died is for the supervisor to say.
    with (
        suppress(EngineDeadError),
        asyncio.Runner(loop_factory=uvicorn_config.get_loop_factory()) as runner,
    ):
        runner.run(run())


__all__ = ["check_server_count", "run_workers", "work"]
