"""Request bodies, read within limits and parsed as strictly as JSON is defined (RFC 8259).

Python's own parser takes NaN and Infinity, lets the last of several equal keys win, and makes lone
surrogates into strings that nothing downstream can encode; others read large integers as
floats. Here each of them is refused, so that no two readers of a body understand it differently.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import TypeAdapter, ValidationError

from engine_core import own_process
from engine_core.media.parts import MEDIA_FIELDS, OWN_PART
from engine_core.server.context import RequestContext
from engine_core.server.errors import ApiError, ClientGone, unavailable

Model = TypeVar("Model")

MAX_DEPTH = 64
# Creating millions of them takes the interpreter a second, and so does each garbage collection that
# visits them.
MAX_CONTAINERS = 2**18
# An object is made in one piece, in which no other thread of the process runs: 0.15 s for so many.
MAX_KEYS = 2**17
# Array elements. Other threads run between two numbers, but not between two texts.
MAX_VALUES = 2**21
MAX_TEXTS = 2**18
_READ_TIMEOUT = 30.0
# Bytes still read of a refused body, so that its sender gets to see the reason.
_DISCARD_TIMEOUT = 2.0
# A body of this many bytes is parsed in a thread. Those of many more take turns, so that their
# threads do not keep the event loop waiting one after the other.
_LARGE = 64 * 1024
_HUGE = 1024 * 1024
_HUGE_PARSER = ThreadPoolExecutor(1, thread_name_prefix="huge-body")
# Bodies of the largest size that may be read and parsed at once, or more smaller ones.
_BODIES_AT_ONCE = 16
# Bytes of bodies after which their memory is given back to the system.
_MUCH = 32 * 2**20
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# A string that does not end is taken too, and nothing is tried twice: the time is linear.
_STRING_OR_SIGN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{:,]', re.DOTALL)
_SHOWN = 80
# Their time grows with the square.
_MOST_DIGITS = 1000


class BodyRoom:
    """Bytes that all bodies that are being read and parsed may have.

    The first 64 KiB of each do not count, so that whoever sends little is always read.

    Args:
        max_size: bytes of one body at most.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._most = _BODIES_AT_ONCE * max_size
        self._held = self._highest = 0

    @contextlib.contextmanager
    def place(self) -> Iterator[Callable[[int], bool]]:
        """Room for one body: what is yielded says whether there is enough for so many bytes."""
        own = 0

        def grow(size: int) -> bool:
            nonlocal own
            more = max(0, size - _LARGE) - own
            if self._held + more > self._most:
                return False
            own += more
            self._held += more
            self._highest = max(self._highest, self._held)
            return True

        try:
            yield grow
        finally:
            self._held -= own
            if not self._held:
                if self._highest > _MUCH:
                    # It lies in pieces that the heap would keep.
                    own_process.return_freed_memory()
                self._highest = 0


async def read_body(request: Request, model: TypeAdapter[Model], room: BodyRoom) -> Model:
    """The request's body as ``model``.

    Raises:
        ApiError: 400, 408, 413, 415 or 503; says which field is at fault.
    """
    _check_content_type(request)
    with room.place() as grow:
        raw = await _read(request, room.max_size, grow)
        RequestContext.of(request).body_size = len(raw)
        if len(raw) >= _LARGE:
            executor = _HUGE_PARSER if len(raw) >= _HUGE else None
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(executor, _parse, raw, model)
        return validated(parse_json(raw), model)


def _parse(raw: bytes, model: TypeAdapter[Model]) -> Model:
    # A collection would visit all that is made, in which no other thread runs.
    with own_process.uncollected():
        value = parse_json(raw)
    return validated(value, model)


def validated(value: Any, model: TypeAdapter[Model]) -> Model:
    """``value`` as ``model``.

    Raises:
        ApiError: 400; says which field is at fault.
    """
    try:
        return model.validate_python(value)
    except ValidationError as error:
        raise _explained(error, value) from None


def _check_content_type(request: Request) -> None:
    media_type, _, parameters = request.headers.get("content-type", "").partition(";")
    charset = re.fullmatch(r"\s*charset\s*=\s*\"?([^\s\";]+)\"?\s*", parameters)
    plain = not parameters.strip() or (charset and charset[1].lower() in ("utf-8", "utf8"))
    if media_type.strip().lower() != "application/json" or not plain:
        given = request.headers.get("content-type")
        raise ApiError(
            415,
            "the body must be JSON in UTF-8, sent with the header 'Content-Type: "
            f"application/json'; got {given!r}",
            code="unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise ApiError(
            415,
            f"a body in the Content-Encoding {encoding!r} is not read; send it as it is",
            code="unsupported_media_type",
        )


async def _read(request: Request, max_size: int, grow: Callable[[int], bool]) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_size:
        await _discard(request)
        raise _too_large(max_size)
    chunks: list[bytes] = []
    size = 0
    more = fits = True
    try:
        async with asyncio.timeout(_READ_TIMEOUT):
            while more and fits and size <= max_size:
                chunk, more = await _receive(request)
                size += len(chunk)
                chunks.append(chunk)
                fits = grow(min(size, max_size))
    except TimeoutError:
        raise ApiError(
            408,
            f"the body was not complete after {_READ_TIMEOUT:.0f} seconds",
            code="timeout",
            headers={"Connection": "close"},
        ) from None
    if size > max_size or not fits:
        chunks.clear()
        if more:
            await _discard(request)
        raise _too_large(max_size) if size > max_size else _no_room()
    return b"".join(chunks)


async def _receive(request: Request) -> tuple[bytes, bool]:
    """The next piece of the body, and whether more follows."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)


async def _discard(request: Request) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_TIMEOUT):
            more = True
            while more:
                _, more = await _receive(request)


def _no_room() -> ApiError:
    return unavailable(
        "the bodies of other requests take all the room that there is for large ones; try again "
        "soon",
        "too_many_bodies",
        headers={"Connection": "close"},
    )


def _too_large(max_size: int) -> ApiError:
    return ApiError(
        413,
        f"the body has more than {max_size} bytes, which is the most that this server reads",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def parse_json(raw: bytes) -> Any:
    """``raw`` as the value it denotes.

    Raises:
        ApiError: it is not UTF-8 or not JSON; it repeats a key, nests deeper than
            :data:`MAX_DEPTH`, has more than :data:`MAX_CONTAINERS` arrays and objects,
            :data:`MAX_KEYS` keys, :data:`MAX_VALUES` values or :data:`MAX_TEXTS` texts, a number
            beyond a double's range or a lone surrogate.
    """
    if not raw:
        raise _invalid("the body is empty; it must be a JSON object")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    brackets = raw.count(b"[") + raw.count(b"{")
    many = raw.count(b":") > MAX_KEYS or raw.count(b",") > MAX_VALUES
    if many or brackets > MAX_CONTAINERS or raw.count(b'"') > 2 * MAX_TEXTS:
        _check_counts(text)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise _invalid(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    if brackets > MAX_DEPTH and is_too_deep(value):
        raise _too_deep()
    if _SURROGATE.search(text):
        _check_strings(value)
    return value


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")


def _too_deep() -> ApiError:
    return _invalid(f"the body nests deeper than {MAX_DEPTH} levels")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _invalid(f"the key {_short(key)} is given twice")
            seen.add(key)
    return value


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _invalid(f"the number {text[:_SHOWN]} is beyond the range of a double")
    return value


def _int(text: str) -> int:
    """An integer. It is called for each, so that other threads may run between two."""
    if len(text) > _MOST_DIGITS:
        raise _invalid("the body has an integer that is far too large")
    return int(text)


def _constant(text: str) -> NoReturn:
    raise _invalid(f"{text} is not a JSON number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_float=_float,
    parse_int=_int,
    parse_constant=_constant,
    strict=True,
)


def _check_counts(text: str) -> None:
    """Check how many arrays, objects, keys, values and texts there are."""
    containers = keys = values = texts = 0
    for found in _STRING_OR_SIGN.finditer(text):
        sign = found[0]
        containers += sign in ("[", "{")
        keys += sign == ":"
        values += sign == ","
        texts += sign[0] == '"'
        if containers > MAX_CONTAINERS:
            raise _invalid(f"the body has more than {MAX_CONTAINERS} arrays and objects")
        if keys > MAX_KEYS:
            raise _invalid(f"the body has more than {MAX_KEYS} keys")
        if values > MAX_VALUES:
            raise _invalid(f"the body has more than {MAX_VALUES} values")
        if texts > MAX_TEXTS:
            raise _invalid(f"the body has more than {MAX_TEXTS} texts")


def is_too_deep(value: Any) -> bool:
    """Whether ``value`` nests deeper than :data:`MAX_DEPTH`."""
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        items = (each.values() if isinstance(each, dict) else each for each in level)
        level = [item for inner in items for item in inner if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _check_strings(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _invalid(
            f"a string has the lone surrogate U+{ord(text[error.start]):04X}, which is no character"
        ) from None


def _short(value: Any) -> str:
    """The beginning of ``repr(value)``, which may itself be as large as the body."""
    # At least every third piece has a character.
    text = "".join(islice(_pieces(value), 3 * (_SHOWN + 1)))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield repr(value[: _SHOWN + 1])
    elif isinstance(value, dict):
        yield "{"
        for index, (key, item) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _pieces(key)
            yield ": "
            yield from _pieces(item)
        yield "}"
    elif isinstance(value, list):
        yield "["
        for index, item in enumerate(value):
            yield ", " if index else ""
            yield from _pieces(item)
        yield "]"
    else:
        yield repr(value)


def _has(value: Any, part: int | str) -> bool:
    """Whether an object has such a field, or an array such an element."""
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def _path(location: tuple[int | str, ...], value: Any, kind: str) -> tuple[str, ...]:
    """``location`` without what pydantic adds to it: the branches of a union."""
    path: list[str] = []
    last = len(location) - 1
    for index, part in enumerate(location):
        # A branch may have the name of a field beside it, where the rest of the way goes on.
        if _has(value, part) and (
            isinstance(value[part], dict | list)
            or not any(_has(value, later) for later in location[index + 1 :])
        ):
            value = value[part]
        elif not (index == last and kind == "missing"):
            continue
        path.append(str(part)[:_SHOWN])
    return tuple(path)


def _explained(error: ValidationError, value: Any) -> ApiError:
    """One message for all errors; for a field with several forms, the complaint of each."""
    complaints: dict[tuple[str, ...], list[str]] = {}
    code = "invalid_value"
    kinds = set()
    foreign: set[tuple[str, ...]] = set()
    for item in error.errors(include_url=False):
        kind = item["type"]
        path = _path(item["loc"], value, kind)
        message = item["msg"].removeprefix("Value error, ")
        if kind == "extra_forbidden":
            message = "unknown field; leave it out"
            if path and path[-1] in MEDIA_FIELDS:
                message = f"unknown field; {OWN_PART}"
        elif kind == "missing":
            message = "this field is required"
        elif kind in ("union_tag_invalid", "union_tag_not_found"):
            # The field that says which of several objects it is.
            name = item["ctx"]["discriminator"].strip("'")
            path = (*path, name)
            known_tags = item["ctx"].get("expected_tags")
            message = "this field is required"
            if known_tags is not None:
                message = f"must be one of {known_tags}, got {_short(item['input'].get(name))}"
            else:
                kind = "missing"
        elif kind in ("model_type", "model_attributes_type", "dict_type"):
            message = f"must be an object, got {_short(item['input'])}"
        elif kind == "tool_type":
            foreign.add(path[:-1])
            message = f"{message}, got {_short(item['input'])}"
        elif kind == "none_required":
            message = f"not supported here, got {_short(item['input'])}; leave it out"
        else:
            message = f"{message}, got {_short(item['input'])}"
        kinds.add(kind)
        known = complaints.setdefault(path, [])
        if message not in known:
            known.append(message)
    # A tool of another type has other fields.
    complaints = {
        path: each
        for path, each in complaints.items()
        if path[:-1] not in foreign or path[-1] == "type"
    }
    # Of a field's forms, that which fits further: a list of parts, and not text.
    outer = {path[:length] for path in complaints for length in range(len(path))}
    complaints = {path: each for path, each in complaints.items() if path not in outer}
    if kinds == {"extra_forbidden"}:
        code = "unknown_field"
    elif kinds == {"missing"}:
        code = "missing_field"
    lines = [
        f"{'.'.join(path) or 'the body'}: {'; or '.join(messages)}"
        for path, messages in list(complaints.items())[:5]
    ]
    first = next(iter(complaints))
    return ApiError(400, ". ".join(lines), param=".".join(first) or None, code=code)


def now() -> int:
    """Seconds since 1970, as OpenAI's objects give their time."""
    return int(time.time())
