"""The server's process: start, signals, and the ways in which it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn

from engine_core import own_process
from engine_core.configs import EngineConfig
from engine_core.engine.async_engine import AsyncEngine
from engine_core.engine.autoscale import ScaleRule, follow_queue
from engine_core.engine.shared_count import SharedCount
from engine_core.engine.trace import FrontendTrace, check_trace_file, write_trace
from engine_core.errors import ConfigError, EngineDeadError, ErrorCode, RequestError
from engine_core.parsers import find_parser_names
from engine_core.plugin_code import described
from engine_core.registry import Registry, build_registry
from engine_core.server.app import create_app
from engine_core.server.connection import connection_class
from engine_core.server.connections import Connections
from engine_core.server.logs import configure_logging, log
from engine_core.server.service import Service, default_name
from engine_core.server.settings import ServerSettings
from engine_core.text.chat_template import render_chat_template

logger = logging.getLogger(__name__)

# Seconds that complete answers have to reach their readers when the server ends.
_FLUSH_SECONDS = 5


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers; this module handles signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


def run_server(
    model: str, config: EngineConfig, settings: ServerSettings, *, api_keys: Sequence[str] = ()
) -> None:
    """Serve ``model`` until a signal ends it.

    SIGTERM or SIGINT drains: no more requests are taken, those in flight have
    ``settings.drain_timeout`` seconds. A second signal ends the process at once.

    Args:
        model: a checkpoint folder, a GGUF file or a hub id.
        config: the engine's settings.
        settings: the service's.
        api_keys: keys that give access to the API; empty gives everyone access.

    Raises:
        ConfigError: the address cannot be listened on.
        EngineError: the model cannot run, or the engine died; all requests have got the cause.
    """
    if not settings.served_model_name:
        settings = settings.replace(served_model_name=(default_name(model),))
    from engine_core.server.workers import check_server_count, run_workers

    registry = build_registry(config.custom_module_map, plugin_errors=config.plugin_errors)
    # A wrong name is found before the model is loaded.
    if settings.tool_parser is not None:
        registry.tool_parser(settings.tool_parser)
    if settings.reasoning_parser is not None:
        registry.reasoning_parser(settings.reasoning_parser)
    if settings.trace is not None:
        check_trace_file(settings.trace)
    settings = settings.replace(chat_template=_read_template(settings.chat_template))
    _certificate(settings)
    configure_logging(settings.log_format)
    check_server_count(settings)
    if settings.api_server_count > 1:
        run_workers(model, config, settings, api_keys, settings.api_server_count)
        return
    uvicorn_config = make_uvicorn_config(settings, api_keys)
    with asyncio.Runner(loop_factory=uvicorn_config.get_loop_factory()) as runner:
        runner.run(_serve(uvicorn_config, registry, model, config, settings))


def make_uvicorn_config(
    settings: ServerSettings, api_keys: Sequence[str], in_flight: SharedCount | None = None
) -> uvicorn.Config:
    """The HTTP server's settings, with the application; see :func:`create_app`."""
    app = create_app(None, settings, api_keys=api_keys, in_flight=in_flight)
    connections = Connections(settings, app.state.service.metrics)
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        http=connection_class(settings, connections, _certificate(settings)),
        ws="none",
        backlog=connections.backlog,
        # The connection says who the client is.
        proxy_headers=False,
        timeout_keep_alive=settings.idle_timeout,  # type: ignore[arg-type]
        timeout_graceful_shutdown=_FLUSH_SECONDS,
    )


def _read_template(given: str | None) -> str | None:
    """The chat template that is in the file ``given``, or that it is itself.

    Raises:
        ConfigError: it is neither.
    """
    if given is None:
        return None
    if "{" not in given:
        try:
            given = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chat_template: {given} is no template, and no file that can be read: {error}"
            ) from None
    try:
        render_chat_template(
            given,
            [{"role": "user", "content": "Hello"}],
            add_generation_prompt=True,
            tools=None,
            variables={},
        )
    except RequestError as error:
        # What else it may say depends on the messages.
        if error.code is ErrorCode.CHAT_TEMPLATE:
            raise ConfigError(f"chat_template: {error}") from None
    return given


def _certificate(settings: ServerSettings) -> ssl.SSLContext | None:
    """The options of HTTPS, if it is asked for.

    Raises:
        ConfigError: the certificate or its key cannot be used.
    """
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        if key is not None:
            raise ConfigError("ssl_keyfile is of no use without ssl_certfile; give both")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A client that shakes hands again and again takes the server's time before any request.
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        # The password is for a key that has one: asking for it would wait for ever.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:
        raise ConfigError(
            f"ssl_certfile: {certificate} with the key in {key or certificate} cannot be used: "
            f"{error}; both must be PEM files, and the key without a password"
        ) from None
    return context


async def _serve(
    uvicorn_config: uvicorn.Config,
    registry: Registry,
    model: str,
    config: EngineConfig,
    settings: ServerSettings,
) -> None:
    stop = stop_on_signals()
    listener = listen(settings, uvicorn_config.backlog)
    log_address(listener, model, settings)
    starting = asyncio.ensure_future(start_engine(model, config, settings))
    try:
        await serve(uvicorn_config, registry, listener, starting, settings, stop, log_ready)
    except EngineDeadError as error:
        log_death(error)
        raise


def start_engine(
    model: str,
    config: EngineConfig,
    settings: ServerSettings,
    listener: socket.socket | None = None,
) -> Coroutine[Any, Any, AsyncEngine]:
    """Start the engine process as the settings say; see :meth:`AsyncEngine.start`."""
    return AsyncEngine.start(
        model,
        config,
        max_queued_requests=settings.max_queued_requests,
        step_timeout=settings.step_timeout,
        max_step_time=settings.max_step_time,
        warm_up=settings.warm_up == "before" or "beside",
        listener=listener,
        replicas=settings.replicas,
        max_restarts=settings.replica_restarts,
        max_replicas=settings.max_replicas,
        replica_executor=settings.replica_executor,
        replica_cpus=settings.replica_cpus or 1,
    )


def _follow_queue(engine: AsyncEngine, settings: ServerSettings) -> asyncio.Task[None] | None:
    """Scale the replicas by the queue from now on, if the settings say so."""
    if settings.max_replicas is None:
        return None
    rule = ScaleRule(
        least=settings.replicas,
        most=settings.max_replicas,
        rows=engine.num_rows // settings.replicas,
        up_delay=settings.scale_up_delay or 10.0,
        down_delay=settings.scale_down_delay or 300.0,
    )
    return asyncio.ensure_future(follow_queue(engine, rule))


def log_address(listener: socket.socket, model: str, settings: ServerSettings) -> None:
    """Say where the server listens."""
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    log(
        logger,
        logging.INFO,
        f"listening on {'https' if settings.ssl_certfile else 'http'}://{shown}:{port}",
        model=model,
        served_as=list(settings.served_model_name),
    )


def log_ready(engine: AsyncEngine) -> None:
    """Say that requests are taken."""
    log(
        logger,
        logging.INFO,
        "ready",
        seconds=round(sum(engine.startup.values()), 2),
        max_model_len=engine.max_model_len,
        **({"replicas": count} if (count := len(engine.replicas)) > 1 else {}),
    )


def log_draining(in_flight: int, settings: ServerSettings) -> None:
    """Say that no more requests are taken."""
    log(
        logger,
        logging.INFO,
        "shutting down: no more requests are taken",
        in_flight=in_flight,
        drain_timeout=settings.drain_timeout,
    )


def log_death(error: EngineDeadError) -> None:
    """Say why the engine has stopped."""
    logger.critical("the engine has stopped: %s", error, exc_info=error)


async def serve(
    uvicorn_config: uvicorn.Config,
    registry: Registry,
    listener: socket.socket,
    starting: asyncio.Future[AsyncEngine],
    settings: ServerSettings,
    stop: asyncio.Event,
    on_ready: Callable[[AsyncEngine], None],
    *,
    on_drain: Callable[[int, ServerSettings], None] = log_draining,
    early: bool = True,
    name: str = "server",
    keep_trace: Callable[[AsyncEngine], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Answer requests until ``stop`` is set and those in flight have ended.

    Args:
        uvicorn_config: the HTTP server's settings.
        registry: has the parsers.
        listener: the listening socket.
        starting: the engine; requests are refused until it is there.
        settings: the service's.
        stop: ends the service.
        on_ready: called when requests are taken.
        on_drain: called when no more are taken, with how many there are.
        early: whether those who connect before the engine is there are refused, and do not wait.
        name: of this process in a trace.
        keep_trace: called in the end with the engine if there is a trace; writes its file if None.

    Raises:
        EngineError: the model cannot run, or the engine died; all requests have got the cause.
    """
    service: Service = uvicorn_config.app.state.service  # type: ignore[union-attr]
    server = _Server(uvicorn_config)
    begin = asyncio.Event()

    async def serve_http() -> None:
        await begin.wait()
        await server.serve(sockets=[listener])

    serving = asyncio.ensure_future(serve_http())
    if early:
        begin.set()
    engine: AsyncEngine | None = None
    scaling: asyncio.Task[None] | None = None
    workers: asyncio.Task[None] | None = None
    try:
        engine = await _load(starting, settings, service, registry, stop)
        if engine is None:
            return
        if settings.trace is not None:
            engine.start_trace(name)
        scaling = _follow_queue(engine, settings)
        begin.set()
        on_ready(engine)
        workers = asyncio.create_task(_start_workers(engine))
        dead = asyncio.ensure_future(engine.wait_dead())
        stopped = asyncio.ensure_future(stop.wait())
        ends: set[asyncio.Future[Any]] = {dead, stopped, serving, *filter(None, (scaling,))}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if scaling is not None and scaling.done():
            scaling.result()
        if dead.done():
            raise dead.result()
        dead.cancel()
        if scaling is not None:
            scaling.cancel()
            await asyncio.gather(scaling, return_exceptions=True)
        service.drain()
        on_drain(service.in_flight.total, settings)
        await engine.drain(settings.drain_timeout)
    finally:
        service.drain()
        server.should_exit = True
        if begin.is_set():
            await serving
        else:
            serving.cancel()
        if scaling is not None:
            scaling.cancel()
        if engine is not None:
            if keep_trace is not None:
                await keep_trace(engine)
            elif settings.trace is not None:
                frontends = [] if engine.trace is None else [engine.trace]
                await keep_whole_trace(engine, frontends, settings.trace, settings.traced_seconds)
            await engine.close()
        if workers is not None:
            await workers


async def _start_workers(engine: AsyncEngine) -> None:
    """Have vocabularies read now, and not when the first guided request comes.

    No other request waits for that, nor ends if it fails.
    """
    try:
        await asyncio.to_thread(engine.frontend.start_workers)
    except Exception as error:
        logger.warning(
            "what tries grammars and processes pictures cannot be started, so that requests for "
            "it will fail: %s",
            described(error),
        )


async def keep_whole_trace(
    engine: AsyncEngine, frontends: Sequence[FrontendTrace], path: Path, seconds: float
) -> None:
    """Write the trace of ``engine``, as far as its process lives, and of those that answered."""
    steps = await engine.take_trace()
    try:
        await asyncio.to_thread(write_trace, path, steps, frontends, seconds=seconds)
    except OSError as error:
        logger.error("the trace could not be written to %s: %s", path, error)
    else:
        log(logger, logging.INFO, "wrote a trace", file=str(path))


async def _load(
    starting: asyncio.Future[AsyncEngine],
    settings: ServerSettings,
    service: Service,
    registry: Registry,
    stop: asyncio.Event,
) -> AsyncEngine | None:
    """The engine, or None if the server is to end before it is there."""
    stopped = asyncio.ensure_future(stop.wait())
    either: set[asyncio.Future[Any]] = {starting, stopped}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
        return None
    stopped.cancel()
    engine = starting.result()
    try:
        find_parser_names(
            engine.model_config,
            registry,
            tool_parser=settings.tool_parser,
            reasoning_parser=settings.reasoning_parser,
        )
    except BaseException:
        await engine.close()
        raise
    service.attach(engine, registry)
    # What was made so far lives as long as the server; a collection that visits all of it would
    # hold up every stream for tens of milliseconds.
    own_process.freeze(collect=True)
    return engine


def stop_on_signals() -> asyncio.Event:
    """Set at the first SIGTERM or SIGINT; the second one ends the process at once."""
    stop = asyncio.Event()

    def handle(number: int) -> None:
        if stop.is_set():
            # The engine process notices that this one is gone, and follows.
            os._exit(128 + number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    return stop


def listen(settings: ServerSettings, backlog: int, *, port: int | None = None) -> socket.socket:
    """The listening socket, made before the model is loaded.

    It listens from here on. A client that connects before the server's first ``accept`` waits in
    the backlog, and a second server cannot take the same address. With a ``port`` given, several
    sockets take it, and the system divides connections among them.

    Raises:
        ConfigError: the address is taken or does not belong to this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, port or settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if port is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error}; choose another --host or "
            "--port"
        ) from None
    return listener
