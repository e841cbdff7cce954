"""Encoding of answers as JSON and server-sent events."""

from __future__ import annotations

from typing import Any

import orjson


def encode(value: Any) -> bytes:
    """``value`` as JSON in UTF-8.

    A lone surrogate, which no generated text has but an error message may quote, is replaced.
    """
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return orjson.dumps(_expressible(value))


def _expressible(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_expressible(key): _expressible(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_expressible(item) for item in value]
    return value


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
