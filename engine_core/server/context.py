"""The facts about one HTTP request that its log line reports."""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import HTTPConnection

from engine_core.server.connections import network_of
from engine_core.server.errors import ApiError
from engine_core.workers import Member

_KEY = "engine_core.context"
# Statuses whose messages may quote the client's body.
_MAY_QUOTE = (400, 404, 415)
_ACCEPTED = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True)
class RequestContext:
    """Facts about one request, filled in as they become known and logged when it ends.

    Attributes:
        request_id: the client's X-Request-Id if it is one that a log can hold, or a new one.
        arrival: ``time.monotonic`` seconds.
        details: further columns of the log line.
        log_prompts: whether the log may quote what the client sent.
        body_size: bytes of the body, once it is read.
        host: the client's address; "" if it is not known.
        key: a digest of the API key; empty if the server has none.
        cache_namespace: the same if the requests of a key have a prefix cache of their own.
        of_anthropic: whether it is one of Anthropic's API.
        field_names: patterns of places in a chat's body that it was translated to, and what takes
            their place in an error.
    """

    request_id: str
    arrival: float = field(default_factory=time.monotonic)
    details: dict[str, Any] = field(default_factory=dict)
    log_prompts: bool = False
    body_size: int = 0
    host: str = ""
    key: bytes = b""
    cache_namespace: bytes = b""
    of_anthropic: bool = False
    field_names: Sequence[tuple[str, str]] = ()

    @classmethod
    def of(cls, request: HTTPConnection) -> RequestContext:
        """That of ``request``."""
        context: RequestContext = request.scope[_KEY]
        return context

    def cache_salts(self, salt: str | None) -> tuple[bytes, ...]:
        """Salts of a request with the ``cache_salt``; what is hashed is as short for long ones."""
        if not self.cache_namespace and salt is None:
            return ()
        return (hashlib.sha256(self.cache_namespace + (salt or "").encode()).digest(),)

    def client(self, salt: str | None) -> Hashable:
        """Whose turn a request with the ``cache_salt`` takes: of a key, else of the address.

        Those behind one address take its turns by their salts. A key or an address has no more of
        them by changing these.
        """
        return self.key or Member(network_of(self.host), salt)

    @classmethod
    def begin(cls, scope: Any, given_id: str | None, *, log_prompts: bool) -> RequestContext:
        """A new one, put into ``scope``."""
        accepted = given_id is not None and _ACCEPTED.fullmatch(given_id)
        request_id = given_id if accepted and given_id else uuid.uuid4().hex
        anthropic = f"{scope['path']}/".startswith("/v1/messages/")
        host, _ = scope.get("client") or ("", 0)
        context = cls(request_id, log_prompts=log_prompts, host=host, of_anthropic=anthropic)
        scope[_KEY] = context
        return context

    def own_name(self, place: str) -> str:
        """The client's name of a place in the body of the chat that its request became."""
        for pattern, name in self.field_names:
            made, count = re.subn(rf"^(?:{pattern})(?=\.|$)", name, place)
            if count:
                return made
        return place

    def note(self, failure: ApiError) -> None:
        """Let the log line say why the request failed.

        The message of a refusal may quote the body, and so a prompt: unless those are logged, the
        code and the field stand for it.
        """
        if self.log_prompts or failure.status_code not in _MAY_QUOTE:
            self.details["error"] = failure.message
            return
        self.details["error"] = failure.code
        if failure.param is not None:
            self.details["param"] = failure.param
