"""Middleware of every request: its id, log line, API key and last-resort error answer."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import socket
import time
from collections.abc import Collection, Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine_core.server.connections import address_of
from engine_core.server.context import RequestContext
from engine_core.server.errors import ApiError, ClientGone, as_api_error
from engine_core.server.logs import log
from engine_core.server.pages import PAGE
from engine_core.server.service import Service
from engine_core.server.settings import ServerSettings

logger = logging.getLogger(__name__)

# The status of nginx for a client that closed the connection; it is only written down.
_CLIENT_GONE = 499
# Polled by monitoring; not worth a log line each, and answered when others are refused.
HEALTH = ("/health", "/health/live", "/health/ready", "/ping", "/load", "/metrics")
# Characters of what a client may write at any length: 32 KiB a line would fill a disk.
_LOGGED = 200
_GENERATION = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
)
_PROTECTED = ("/v1/", "/v2/", "/rerank", "/score", "/tokenize", "/detokenize")


class RequestMiddleware:
    """Adds the request id, answers uncaught exceptions, and writes the log and the metrics."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Clients that join paths end some with a slash.
        scope["path"] = scope["path"].rstrip("/") or "/"
        context = RequestContext.begin(
            scope,
            Headers(scope=scope).get("x-request-id"),
            log_prompts=self._service.settings.log_prompts,
        )
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = context.request_id
                if context.of_anthropic:
                    headers["Request-Id"] = context.request_id  # where its client looks
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        generation = scope["path"] in _GENERATION
        self._service.in_flight.own += generation
        try:
            await self._app(scope, receive, send_with_headers)
        except ClientGone:
            status = _CLIENT_GONE
        except Exception as error:
            failure = as_api_error(error, context)
            logger.exception("request %s failed", context.request_id)
            context.note(failure)
            if status:
                # The response has begun: breaking it off is the only signal left.
                raise
            await failure.response(context)(scope, receive, send_with_headers)
        finally:
            self._service.in_flight.own -= generation
            self._note(scope, context, status)

    def _note(self, scope: Scope, context: RequestContext, status: int) -> None:
        self._service.metrics.http_requests.labels(_route_path(scope), status).inc()
        seconds = time.monotonic() - context.arrival
        if scope["path"] in _GENERATION and status == 200:
            self._service.metrics.whole.observe(seconds)
        if scope["path"] in HEALTH and status != 500:
            return
        client = scope.get("client")
        log(
            logger,
            logging.INFO if status < 500 else logging.ERROR,
            "request",
            request_id=context.request_id,
            method=scope["method"],
            path=scope["path"][:_LOGGED],
            status=status,
            seconds=round(seconds, 4),
            client=client[0][:_LOGGED] if client else None,
            **context.details,
        )


def _route_path(scope: Scope) -> str:
    """The route label in the metrics, also for requests refused before they reach it."""
    for route in scope["app"].router.routes:
        match, _ = route.matches(scope)
        if match is not Match.NONE:
            path: str = "/" if route.name == PAGE else route.path.replace(":path", "")
            return path
    return "unknown"


class ApiKeyMiddleware:
    """Requires an API key; pages, health and metrics are open to all.

    With ``own_caches``, requests of different keys share no cached beginnings of prompts.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], *, own_caches: bool) -> None:
        self._app = app
        self._own_caches = own_caches
        # Equal lengths, so that the time of a comparison tells nothing of a key's.
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and scope["path"].startswith(_PROTECTED):
            context = RequestContext.of(HTTPConnection(scope))
            headers = Headers(scope=scope)
            scheme, _, bearer = headers.get("authorization", "").partition(" ")
            given = [bearer] if scheme.lower() == "bearer" else []
            if "x-api-key" in headers:
                given.append(headers["x-api-key"])
            known = [key for key in given if self._is_known(key)]
            if not known:
                refusal = ApiError(
                    401,
                    "the API key is not one that this server knows"
                    if given or scheme
                    else "no API key was given; send it in the header 'Authorization: Bearer KEY' "
                    "or 'x-api-key: KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await refusal.response(context)(scope, receive, send)
                return
            context.key = _given_digest(known[0])
            if self._own_caches:
                context.cache_namespace = context.key
        await self._app(scope, receive, send)

    def _is_known(self, key: str) -> bool:
        given = _given_digest(key)
        known = False
        for digest in self._keys:
            known |= hmac.compare_digest(given, digest)
        return known


class HostMiddleware:
    """Refuses requests that call the server by a name which is not its own.

    A web page may have its own name resolved to this machine's address (DNS rebinding). The browser
    then takes the server for the page's own origin. An address needs no resolving, and what is no
    browser may leave the host out.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            for host in Headers(scope=scope).getlist("host"):
                if not self._is_own(host):
                    refusal = ApiError(
                        421,
                        f"the host {host[:80]!r} is none of this server's names; if it is to be "
                        "one, start it with --allowed-hosts NAME",
                        code="unknown_host",
                    )
                    await refusal.response(RequestContext.of(HTTPConnection(scope)))(
                        scope, receive, send
                    )
                    return
        await self._app(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        name = host.partition(":")[0].lower().removesuffix(".")
        own = name in self._allowed or name.endswith(".localhost")
        return own or address_of(host) is not None


def names_of(settings: ServerSettings) -> Collection[str] | None:
    """The names by which requests may call the server, besides addresses; None for any."""
    host = settings.host.lower()
    if "*" in settings.allowed_hosts:
        return None
    if not settings.allowed_hosts and not _is_local(host):
        return None
    return {"localhost", host, *settings.allowed_hosts}


def _is_local(host: str) -> bool:
    """Whether only this machine reaches who listens there."""
    with contextlib.suppress(OSError):
        host = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    address = address_of(host)
    return address is not None and address.is_loopback


def _given_digest(key: str) -> bytes:
    return _digest(key.strip().encode("latin-1", errors="replace"))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
