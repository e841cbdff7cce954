"""The ASGI application: endpoints and middleware."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from engine_core.engine.shared_count import SharedCount
from engine_core.errors import EngineError
from engine_core.registry import build_registry
from engine_core.server.context import RequestContext
from engine_core.server.errors import as_api_error
from engine_core.server.middleware import (
    ApiKeyMiddleware,
    HostMiddleware,
    RequestMiddleware,
    names_of,
)
from engine_core.server.openapi import OPERATIONS, Endpoint, build_document
from engine_core.server.pages import page_routes
from engine_core.server.service import Service
from engine_core.server.settings import ServerSettings

if TYPE_CHECKING:
    from engine_core.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)


def create_app(
    engine: AsyncEngine | None,
    settings: ServerSettings,
    *,
    api_keys: Sequence[str] = (),
    in_flight: SharedCount | None = None,
) -> FastAPI:
    """The service as an ASGI application.

    Args:
        engine: answers the requests. Without one they are refused with status 503 until
            ``app.state.service.attach`` brings it.
        settings: the user's; ``served_model_name`` must have a name.
        api_keys: keys that give access to the API; empty gives everyone access.
        in_flight: counts the requests of all processes that serve together; this one's if None.
    """
    service = Service(settings, in_flight)
    if engine is not None:
        config = engine.config
        registry = build_registry(config.custom_module_map, plugin_errors=config.plugin_errors)
        service.attach(engine, registry)
    # FastAPI's own telemetry would hand exceptions, and so parts of prompts, to whatever exporter
    # the environment sets up.
    app = FastAPI(
        title="engine-core",
        docs_url="/docs" if settings.api_docs else None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service = service
    endpoints: dict[str, dict[str, Endpoint]] = {}
    for operation in OPERATIONS:
        endpoints.setdefault(operation.path, {})[operation.method] = operation.endpoint
    for path, by_method in endpoints.items():
        app.add_api_route(
            path,
            _endpoint(by_method),
            methods=[*by_method, "HEAD"] if "GET" in by_method else list(by_method),
            include_in_schema=False,
            response_model=None,
        )
    app.router.routes.extend(page_routes())
    _describe_when_asked(app, lambda: build_document(settings, service.names, bool(api_keys)))
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(EngineError, _answer)
    # The last one added is the first to see a request.
    if api_keys:
        own_caches = settings.prefix_cache_sharing == "key"
        app.add_middleware(ApiKeyMiddleware, keys=api_keys, own_caches=own_caches)
    if settings.allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origin,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    if (allowed_hosts := names_of(settings)) is not None:
        app.add_middleware(HostMiddleware, allowed=allowed_hosts)
    app.add_middleware(RequestMiddleware, service=service)
    return app


def _describe_when_asked(app: FastAPI, build: Callable[[], dict[str, Any]]) -> None:
    """Make the OpenAPI document for who asks first.

    That takes a third of a second of a processor, for which no start has to wait, nor another's
    stream.
    """
    document = cache(build)
    app.openapi = document  # type: ignore[method-assign]
    routes = app.router.routes
    (place,) = (n for n, each in enumerate(routes) if getattr(each, "path", "") == app.openapi_url)
    route = cast("Route", routes[place])

    async def answer(request: Request) -> Response:
        await asyncio.to_thread(document)
        return cast("Response", await route.endpoint(request))

    routes[place] = Route(route.path, answer, include_in_schema=False)


def _endpoint(by_method: Mapping[str, Endpoint]) -> Endpoint:
    """One for all methods of a path, so that a refusal of others names all of them."""

    async def answer(request: Request) -> Response:
        # uvicorn leaves out the body of an answer to HEAD.
        return await by_method["GET" if request.method == "HEAD" else request.method](request)

    return answer


async def _answer(request: Request, error: Any) -> Response:
    context = RequestContext.of(request)
    failure = as_api_error(error, context)
    if failure.code in ("model_failed", "internal_error"):
        logger.error("request %s failed", context.request_id, exc_info=error)
    context.note(failure)
    return failure.response(context)
