"""Encoding of answers as JSON and server-sent events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson


def encode(value: Any) -> bytes:
    """``value`` as JSON in UTF-8.

    A lone surrogate, which no generated text has but an error message may quote, is replaced.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
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


def named_event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event that has the name of its ``type``."""
    return f"event: {value['type']}\n".encode() + event(value)


# A text that no other part of an answer is.
_PLACE = "\0\0"


class TextEvent:
    """An event of which only one text changes; the rest is encoded once.

    Args:
        make: the event's value with a given text.
    """

    def __init__(self, make: Callable[[str], Any]) -> None:
        self._begin, self._end = event(make(_PLACE)).split(encode(_PLACE), 1)

    def __call__(self, text: str) -> bytes:
        """The event with this text."""
        return self._begin + encode(text) + self._end


DONE = b"data: [DONE]\n\n"
