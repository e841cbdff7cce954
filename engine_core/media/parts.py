"""Pictures, videos and sounds as users name them: parts of messages, and items of prompts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine_core.errors import RequestError, shown

# The kind of a part by its type, and the key under which its content is.
_TYPES = {
    "image_url": ("image", "image_url"),
    "input_image": ("image", "image_url"),
    "image": ("image", "image"),
    "video_url": ("video", "video_url"),
    "video": ("video", "video"),
    "audio_url": ("audio", "audio_url"),
    "input_audio": ("audio", "input_audio"),
    "audio": ("audio", "audio"),
}
# What a part or a message may have under it is a picture, a video or a sound, in some service.
MEDIA_FIELDS = frozenset(
    {
        *(name for each, (_, key) in _TYPES.items() for name in (each, key)),
        *("images", "videos", "audios", "input_video", "file", "input_file", "file_data"),
    }
)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_LONGEST_UUID = 256
# What to do about one of these fields in the wrong place.
OWN_PART = "give what it shows a part of its own, whose type says what it is"


class MediaPart(NamedTuple):
    """A picture, video or sound of a prompt.

    Attributes:
        kind: "image", "video" or "audio".
        value: its address as text (a data URL, too), a :class:`Path`, the bytes of a file, or
            whatever else the user of ``LLM`` gave; None if it is known by its ``uuid``.
        param: where it stands, as in "messages.0.content.1.image_url".
        uuid: the user's name for it, or None.
        owner: of that name: nobody else's means the same, whatever else they share.
    """

    kind: str
    value: Any
    param: str
    uuid: str | None = None
    owner: bytes = b""


def split_media(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[MediaPart]]:
    """Messages as chat templates know them, with a mark for each item, and the items.

    A content that is a list has text and items as OpenAI's services have them, as in
    ``{"type": "image_url", "image_url": {"url": ...}}``, or as a Python object under its kind, as
    in ``{"type": "image", "image": ...}``; ``type`` may be left out where the key says it. Each
    may have a ``uuid``. The content of a message without items is left as it is.

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
        for key in message if isinstance(message, Mapping) else ():
            if shows(key, message[key]):
                param = f"messages.{number}.{key}"
                raise RequestError(f"{param}: a message has no {key!r}; {OWN_PART}", param=param)
        if not isinstance(content, list):
            plain.append(message)
            continue
        kinds = [_type(part) for part in content]
        for index, (kind, part) in enumerate(zip(kinds, content, strict=True)):
            _check_fields(kind, part, f"messages.{number}.content.{index}")
            if message.get("role") == "user":
                _check_type(part, f"messages.{number}.content.{index}")
        if not any(kinds):
            plain.append(message)
            continue
        parts: list[Any] = []
        for index, (kind, part) in enumerate(zip(kinds, content, strict=True)):
            if kind is None:
                bare = isinstance(part, Mapping) and set(part) == {"text"}
                parts.append({"type": "text", "text": part["text"]} if bare else part)
                continue
            found.append(_of_part(kind, part, f"messages.{number}.content.{index}"))
            parts.append({"type": found[-1].kind})
        plain.append({**message, "content": parts})
    return plain, found


def prompt_media(
    data: Mapping[str, Any] | None, uuids: Mapping[str, Any] | None = None
) -> dict[str, list[MediaPart]]:
    """The items of a prompt's ``multi_modal_data`` by kind, with their ``multi_modal_uuids``.

    A text is an address if it begins with a scheme, and else the path of a file. None is an item
    that is known by its uuid.

    Raises:
        RequestError: either is no mapping, or the uuids do not fit.
    """
    data, uuids = data or {}, uuids or {}
    for name, value in (("multi_modal_data", data), ("multi_modal_uuids", uuids)):
        if not isinstance(value, Mapping):
            raise RequestError(f"{name} is a dictionary, got {type(value).__name__}", param=name)
    made: dict[str, list[MediaPart]] = {}
    for kind, one in data.items():
        values = one if isinstance(one, list) else [one]
        param = f"multi_modal_data.{kind}"
        names = _uuids(uuids, kind, len(values))
        made[kind] = [
            value
            if isinstance(value, MediaPart)
            else _checked(MediaPart(kind, _located(value), f"{param}.{index}", name))
            for index, (value, name) in enumerate(zip(values, names, strict=True))
        ]
    for kind in uuids:
        if kind not in data:
            _uuids(uuids, kind, 0)
    return {kind: parts for kind, parts in made.items() if parts}


def _uuids(uuids: Mapping[str, Any], kind: str, count: int) -> list[Any]:
    given = uuids.get(kind)
    if given is None:
        return [None] * count
    names = given if isinstance(given, list | tuple) else [given]
    if len(names) != count:
        param = f"multi_modal_uuids.{kind}"
        raise RequestError(f"{param}: {len(names)} for {count} items", param=param)
    return list(names)


def _type(part: Any) -> str | None:
    """The type of a part that is an item; None for any other."""
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    if kind is None:
        return next((each for each in ("image", "video", "audio") if each in part), None)
    return kind if kind in _TYPES else None


def _check_type(part: Any, param: str) -> None:
    """Refuse a part of a user's message that a template would pass over."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind != "text" and kind not in _TYPES:
        known = ", ".join(repr(each) for each in ("text", *_TYPES))
        raise RequestError(
            f"{param}: parts of a user's message have one of the types {known}, got {shown(kind)}",
            param=f"{param}.type",
        )


def shows(key: str, value: Any) -> bool:
    """Whether a field of a message or a part says that there is something to see or hear."""
    empty = value is None or (isinstance(value, str | list | dict) and not value)
    return key in MEDIA_FIELDS and not empty


def _check_fields(kind: str | None, part: Any, place: str) -> None:
    """Refuse what a part shows besides what its type says."""
    if not isinstance(part, Mapping):
        return
    own = None if kind is None else _TYPES[kind][1]
    for key, value in part.items():
        if key != own and shows(key, value):
            given = f"of the type {shown(part['type'])}" if "type" in part else "without a type"
            raise RequestError(
                f"{place}.{key}: a part {given} has no {key!r}; {OWN_PART}", param=f"{place}.{key}"
            )


def _of_part(name: str, part: Mapping[str, Any], place: str) -> MediaPart:
    kind, key = _TYPES[name]
    param = f"{place}.{key}"
    value = part.get(key)
    uuid = part.get("uuid")
    if key == kind:  # of the program's own user: what others send has no such key
        return _checked(MediaPart(kind, _located(value), param, uuid))
    if isinstance(value, Mapping):
        uuid = value.get("uuid") if uuid is None else uuid
        value = _sound(value, param) if name == "input_audio" else value.get("url")
    if not isinstance(value, str | None):
        raise RequestError(
            f'{param}: is {{"url": "data:{kind}/..."}}, got {shown(value)}', param=param
        )
    return _checked(MediaPart(kind, (value or "").strip() or None, param, uuid))


def _sound(value: Mapping[str, Any], param: str) -> str | None:
    """OpenAI's sound as a data URL."""
    data, form = value.get("data"), value.get("format")
    if not data:
        return None
    if not isinstance(data, str) or not isinstance(form, str) or not re.fullmatch(r"\w+", form):
        raise RequestError(
            f'{param}: is {{"data": "base64 of a file", "format": "wav"}}, got {shown(value)}',
            param=param,
        )
    return f"data:audio/{form};base64,{data}"


def _located(value: Any) -> Any:
    """A text that is no address as a path."""
    if not isinstance(value, str):
        return value
    if not value:
        return None
    return value if _SCHEME.match(value) else Path(value)


def _checked(part: MediaPart) -> MediaPart:
    """The part, which has a content or a uuid."""
    kind, value, param, uuid, _ = part
    if uuid is not None and not (isinstance(uuid, str) and 0 < len(uuid) <= _LONGEST_UUID):
        raise RequestError(
            f"{param}: its uuid is a text of 1 to {_LONGEST_UUID} characters, got {shown(uuid)}",
            param=param,
        )
    if value is None and uuid is None:
        raise RequestError(
            f"{param}: there is no {kind}; give one, or the uuid of one that was given before",
            param=param,
        )
    return part


__all__ = ["MEDIA_FIELDS", "OWN_PART", "MediaPart", "prompt_media", "shows", "split_media"]
