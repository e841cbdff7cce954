"""Refusals and failures in the forms that OpenAI's and Anthropic's APIs give them."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi.responses import Response
from starlette.exceptions import HTTPException

from engine_core.errors import (
    EngineDeadError,
    ModelError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
)
from engine_core.server.encoding import encode

if TYPE_CHECKING:
    from engine_core.server.context import RequestContext

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}

# Characters of a message, which may show what was sent.
_LONGEST = 4000
# Seconds after which a client may try again.
RETRY_BUSY = 1
RETRY_UNAVAILABLE = 5


class ClientGone(Exception):  # noqa: N818 - nothing is wrong
    """The client closed the connection; nobody reads an answer."""


class ApiError(HTTPException):
    """A request is answered with an error.

    Args:
        status: HTTP status.
        message: what is wrong, what was offered and what to do.
        param: the body's field that is at fault.
        code: a word for programs; the tests and the documentation list them.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > _LONGEST:  # What is wrong may stand behind what was sent.
            message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
        super().__init__(status, detail=message, headers=dict(headers or {}))
        self.message = message
        self.param = param
        self.code = code

    def body(self, context: RequestContext | None = None) -> dict[str, Any]:
        """The ``{"error": ...}`` object, as the API of the request has it; OpenAI's without one."""
        anthropic = context is not None and context.of_anthropic
        types = _ANTHROPIC_TYPES if anthropic else _TYPES
        error = {
            "message": self.message,
            "type": types.get(self.status_code, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        if context is not None and context.of_anthropic:
            return {"type": "error", "error": error, "request_id": context.request_id}
        return {"error": error}

    def response(self, context: RequestContext | None = None) -> Response:
        """The HTTP response."""
        return Response(
            encode(self.body(context)),
            status_code=self.status_code,
            media_type="application/json",
            headers=self.headers,
        )


def conflict(message: str, param: str) -> ApiError:
    """Status 400 for fields that are right one by one, but not together."""
    return ApiError(400, message, param=param, code="conflicting_fields")


def unavailable(message: str, code: str, headers: Mapping[str, str] | None = None) -> ApiError:
    """Status 503 with the time after which to try again, and further headers."""
    headers = {"Retry-After": str(RETRY_UNAVAILABLE), **(headers or {})}
    return ApiError(503, message, code=code, headers=headers)


def busy(message: str) -> ApiError:
    """Status 429 with the time after which to try again."""
    headers = {"Retry-After": str(RETRY_BUSY)}
    return ApiError(429, message, code="queue_full", headers=headers)


def as_api_error(error: BaseException, context: RequestContext) -> ApiError:
    """The answer to an exception that a handler raised; it names the request's own fields.

    An unforeseen exception is named by the request's id alone. Its text may hold internals; the log
    has it.
    """
    failure = error if isinstance(error, ApiError) else _translated(error, context.request_id)
    if failure.param is not None and (own := context.own_name(failure.param)) != failure.param:
        if failure.message.startswith(failure.param):
            failure.message = own + failure.message.removeprefix(failure.param)
        failure.param = own
    return failure


def _translated(error: BaseException, request_id: str) -> ApiError:
    if isinstance(error, HTTPException):
        phrase = HTTPStatus(error.status_code).phrase
        code = {404: "unknown_path", 405: "method_not_allowed"}.get(error.status_code)
        return ApiError(error.status_code, phrase, code=code, headers=error.headers)
    if isinstance(error, QueueFullError):
        return busy(str(error))
    if isinstance(error, RequestTimeoutError):
        return ApiError(408, str(error), code="timeout")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code="invalid_request")
    if isinstance(error, EngineDeadError):
        return ApiError(500, str(error), code="engine_dead")
    if isinstance(error, ModelError):
        return ApiError(500, str(error), code="model_failed")
    return ApiError(
        500,
        f"the server failed on this request; its log says why under the id {request_id}",
        code="internal_error",
    )
