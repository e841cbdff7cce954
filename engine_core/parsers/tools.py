"""Interface of tool-call parsers, and the reader of a single call that they share."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import ClassVar

_WHITESPACE = " \t\n\r"
_AFTER_SCALAR = f"{_WHITESPACE},}}]"


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one call of a tool.

    Attributes:
        index: which call of the answer, from 0.
        id: the call's id, in its first piece; None in every other.
        name: the function's name, in its first piece; None in every other.
        arguments: the next piece of the arguments, which together are JSON text.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """Additions to an answer by one piece of generated text.

    Attributes:
        content: for the reader.
        reasoning: what the model thought before it answered.
        tool_calls: pieces of calls, in order; several may be of one call.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __add__(self, other: ParsedDelta) -> ParsedDelta:
        return ParsedDelta(
            self.content + other.content,
            self.reasoning + other.reasoning,
            self.tool_calls + other.tool_calls,
        )


class ToolParser(ABC):
    """Separates tool calls from content in a model's text; made anew for each answer.

    The parts put together do not depend on how the text was cut into pieces. Text that only looks
    like a call, such as one of a function that was not offered, is content.

    Args:
        functions: names of the functions offered.
    """

    skip_special_tokens: ClassVar[bool] = False
    """Whether the parser works without special tokens in the text; a tokenizer may count those that
    mark a call among them."""

    def __init__(self, functions: Collection[str]) -> None:
        self._functions = frozenset(functions)

    @classmethod
    def call_tags(cls) -> tuple[str, str] | None:
        """The tags before and after each call, ``{"name": ..., "arguments": {...}}``.

        None if calls are written in another way. No JSON text begins with the first tag, so that a
        guided text can be either calls or JSON.
        """
        return None

    @abstractmethod
    def feed(self, text: str) -> ParsedDelta:
        """Read the next piece of the text."""

    @abstractmethod
    def finish(self) -> ParsedDelta:
        """Give out what was held back; the text has ended."""


class CallReader:
    """Reads one call, ``{"name": ..., "arguments": {...}}``, from pieces of its text.

    It is a call as soon as its name is one of ``functions`` and its arguments begin. From then on
    they are given out as they are written, even if they turn out not to be JSON. "parameters" is
    another name of "arguments", other keys are ignored. Arguments may also be a string with the
    object in it, null or left out; the last two mean none.

    Args:
        functions: names that may be called.
        index: of the call in the answer.

    Attributes:
        called: whether it is a call.
        failed: whether it cannot become one any more.
        ended: whether its object is complete, or it failed: nothing more is read.
    """

    def __init__(self, functions: Collection[str], index: int) -> None:
        self._functions = functions
        self._index = index
        self._name: str | None = None
        self._raw: list[str] = []
        self._pieces: list[str] = []
        self.called = self.failed = self.ended = False
        self._object = self._read_object()
        next(self._object)

    @property
    def raw(self) -> str:
        """The text read so far."""
        return "".join(self._raw)

    def feed(self, text: str) -> tuple[int, list[ToolCallDelta]]:
        """Read ``text`` up to the end of the call.

        Returns:
            How many characters were read, and what they added to the call.
        """
        was_called, used = self.called, 0
        self._pieces.clear()
        try:
            while used < len(text) and not self.ended:
                self._object.send(text[used])
                used += 1
        except StopIteration as end:
            used += end.value
            # A call that was given out stays and ends here, whatever follows.
            self.ended, self.failed = True, not self.called
        self._raw.append(text[:used])
        arguments = "".join(self._pieces)
        if self.called and not was_called:
            call_id = f"call_{uuid.uuid4().hex[:24]}"
            return used, [ToolCallDelta(self._index, call_id, self._name, arguments)]
        return used, [ToolCallDelta(self._index, None, None, arguments)] if arguments else []

    def _read_object(self) -> Generator[None, str, bool]:
        """Take the object's characters; return whether the last one that was sent is its own.

        One that is not may belong to the tag that ends an unfinished object.
        """
        seen: set[str] = set()
        early: str | None = None
        if (yield from _skip_space((yield))) != "{":
            return False
        while (char := (yield from _skip_space((yield)))) != "}":
            if char != '"':
                return False
            key = _loads((yield from self._read_nested(char)))
            key = "arguments" if key == "parameters" else key
            if not isinstance(key, str) or key in seen:
                return True
            seen.add(key)
            if (yield from _skip_space((yield))) != ":":
                return False
            char = yield from _skip_space((yield))
            nested, text = char in '{["', ""
            streamed = key == "arguments" and char == "{" and self._name is not None
            if nested:
                self.called = self.called or streamed
                text = yield from self._read_nested(char, streamed)
            while not nested and char not in _AFTER_SCALAR:
                text += char
                char = yield
            if key == "name":
                name = _loads(text)
                if not isinstance(name, str) or name not in self._functions:
                    return nested
                self._name = name
            elif key == "arguments" and not streamed:
                early = _as_arguments(text)
                if early is None:
                    return nested
            if early is not None and self._name is not None:
                self.called = True
                self._pieces.append(early)
                early = None
            if nested:
                char = yield
            char = yield from _skip_space(char)
            if char == "}":
                break
            if char != ",":
                return False
        if not self.called and self._name is not None:
            self.called = True
            self._pieces.append("{}")
        return True

    def _read_nested(self, char: str, streamed: bool = False) -> Generator[None, str, str]:
        """Take the rest of a string, array or object, which is not validated; return all of it."""
        text: list[str] = []
        depth, in_string, escaped = 0, False, False
        while True:
            text.append(char)
            if streamed:
                self._pieces.append(char)
            if char == '"' and not escaped:
                in_string = not in_string
            elif not in_string:
                depth += (char in "{[") - (char in "}]")
            escaped = in_string and char == "\\" and not escaped
            if not in_string and not depth:
                return "".join(text)
            char = yield


def _skip_space(char: str) -> Generator[None, str, str]:
    while char in _WHITESPACE:
        char = yield
    return char


def _as_arguments(text: str) -> str | None:
    """The arguments as an object's JSON, or None if ``text`` is neither that nor stands for it."""
    value = _loads(text)
    if text == "null":
        return "{}"
    if isinstance(value, str) and isinstance(_loads(value), dict):
        return value
    return text if isinstance(value, dict) else None


def _loads(text: str) -> object:
    """The JSON value of ``text``, or None if it is not JSON."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value


class BufferedToolParser(ToolParser):
    """A parser with a buffer of text that it cannot give out yet; a subclass reads it."""

    def __init__(self, functions: Collection[str]) -> None:
        super().__init__(functions)
        self._buffer = ""
        self._num_calls = 0
        self._reader: CallReader | None = None

    def feed(self, text: str) -> ParsedDelta:
        """See :meth:`ToolParser.feed`."""
        self._buffer += text
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        while self._advance(content, calls):
            pass
        return ParsedDelta("".join(content), tool_calls=tuple(calls))

    @abstractmethod
    def _advance(self, content: list[str], calls: list[ToolCallDelta]) -> bool:
        """Read on in the buffer; return whether more of it can be read."""

    def _begin_call(self) -> None:
        """Begin a call with the content of the buffer."""
        self._reader = CallReader(self._functions, self._num_calls)

    def _read_call(self, calls: list[ToolCallDelta]) -> CallReader | None:
        """Read on in the call that has begun; its reader once it has ended."""
        assert self._reader is not None, "made when the call began"
        used, deltas = self._reader.feed(self._buffer)
        calls.extend(deltas)
        self._buffer = self._buffer[used:]
        if not self._reader.ended:
            return None
        self._num_calls += not self._reader.failed
        return self._reader


def held_back(text: str, tag: str, leading: str = "") -> int:
    """Length of the longest end of ``text`` that may be the beginning of ``leading* tag``.

    Args:
        text: does not contain ``tag``.
        tag: the tag to look for.
        leading: characters that are dropped before the tag.
    """
    length = next(n for n in range(len(tag) - 1, -1, -1) if text.endswith(tag[:n]))
    before = text[: len(text) - length]
    return length + len(before) - len(before.rstrip(leading)) if leading else length
