"""Parts of messages that are pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine_core.errors import RequestError


class MediaPart(NamedTuple):
    """A picture of a conversation.

    Attributes:
        kind: "image".
        value: a data URL, or whatever the user of ``LLM`` gave.
        param: where it stands, as in "messages.0.content.1.image_url".
    """

    kind: str
    value: Any
    param: str


def split_media(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[MediaPart]]:
    """Messages as chat templates know them, with a mark for each picture, and the pictures.

    A content that is a list of parts has ``{"type": "text", "text": ...}``, OpenAI's
    ``{"type": "image_url", "image_url": {"url": ...}}`` or ``{"type": "image", "image": ...}``. The
    content of a message without pictures is left as it is.

    Raises:
        RequestError: a part is none of these.
    """
    plain: list[Mapping[str, Any]] = []
    found: list[MediaPart] = []
    given: Any = messages
    if not isinstance(given, Sequence):
        return given, []  # for the template's check to name
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list) or not any(_kind(part) for part in content):
            plain.append(message)
            continue
        parts = []
        for index, part in enumerate(content):
            kind = _kind(part)
            if kind is None:
                parts.append(part)
                continue
            param = f"messages.{number}.content.{index}.{kind}"
            value = part.get(kind)
            if kind == "image_url":
                value = value.get("url") if isinstance(value, Mapping) else value
                if not isinstance(value, str):
                    raise RequestError(
                        f'{param}: is {{"url": "data:image/..."}}, got {value!r}', param=param
                    )
            found.append(MediaPart("image", value, param))
            parts.append({"type": "image"})
        plain.append({**message, "content": parts})
    return plain, found


def _kind(part: Any) -> str | None:
    """The key of a part that is a picture; None for any other."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if kind in ("image_url", "image") else None
