"""What is known of one HTTP request, for its log line."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

_KEY = "engine_core.context"
_ACCEPTED = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True)
class RequestContext:
    """Filled in by whoever learns it; written to the log when the request ends.

    Attributes:
        request_id: the client's X-Request-Id if it is one that a log can hold, or a new one.
        arrival: ``time.monotonic`` seconds.
        details: further columns of the log line.
    """

    request_id: str
    arrival: float = field(default_factory=time.monotonic)
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request) -> RequestContext:
        """That of ``request``."""
        context: RequestContext = request.scope[_KEY]
        return context

    @classmethod
    def begin(cls, scope: Any, given_id: str | None) -> RequestContext:
        """A new one, put into ``scope``."""
        accepted = given_id is not None and _ACCEPTED.fullmatch(given_id)
        context = cls(given_id if accepted and given_id else uuid.uuid4().hex)
        scope[_KEY] = context
        return context
