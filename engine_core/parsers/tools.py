"""Interface of tool-call parsers, and the reader of a single call that they share."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

_WHITESPACE = " \t\n\r"


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

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


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


class _Place(Enum):
    """Where in the object of a call the reader stands."""

    BEFORE = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT_OR_END = auto()
    END = auto()


class _Value:
    """Finds the end of one JSON value, a character at a time; does not validate it."""

    def __init__(self, first: str) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.is_scalar = first not in '{["'

    def takes(self, char: str) -> bool:
        """Whether a character outside a string still belongs to a number, true, false or null."""
        return char not in _WHITESPACE and char not in ",}]"

    def ends_with(self, char: str) -> bool:
        """Whether the value, no scalar, ends with this character."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                return self._depth == 0
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


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
    """

    def __init__(self, functions: Collection[str], index: int) -> None:
        self._functions = functions
        self._index = index
        self._place = _Place.BEFORE
        self._token: list[str] = []
        self._key = ""
        self._value: _Value | None = None
        self._name: str | None = None
        self._early_arguments: str | None = None
        self._seen: set[str] = set()
        self._raw: list[str] = []
        self.called = False
        self.failed = False

    @property
    def raw(self) -> str:
        """The text read so far."""
        return "".join(self._raw)

    @property
    def ended(self) -> bool:
        """Whether its object is complete, or it failed: nothing more is read."""
        return self.failed or self._place is _Place.END

    def feed(self, text: str) -> tuple[int, list[ToolCallDelta]]:
        """Read ``text`` up to the end of the call.

        Returns:
            How many characters were read, and what they added to the call.
        """
        pieces: list[str] = []
        deltas: list[ToolCallDelta] = []
        used = 0
        while used < len(text) and not self.ended:
            char = text[used]
            was_called = self.called
            took, piece = self._read(char)
            if self.called and not was_called:
                deltas.append(
                    ToolCallDelta(self._index, f"call_{uuid.uuid4().hex[:24]}", self._name, "")
                )
            if piece:
                pieces.append(piece)
            if took:
                self._raw.append(char)
                used += 1
        if pieces:
            deltas.append(ToolCallDelta(self._index, None, None, "".join(pieces)))
        return used, _joined_first(deltas)

    def _read(self, char: str) -> tuple[bool, str]:
        """Read one character; return whether it was consumed, and its part of the arguments."""
        if self._place is _Place.VALUE:
            return self._read_value(char)
        if self._place is _Place.KEY:
            self._read_key(char)
        elif char in _WHITESPACE:
            pass
        elif self._place is _Place.BEFORE and char == "{":
            self._place = _Place.KEY_OR_END
        elif self._place is _Place.KEY_OR_END and char == '"':
            self._begin_key(char)
        elif self._place is _Place.COLON and char == ":":
            self._place = _Place.VALUE
        elif self._place is _Place.NEXT_OR_END and char == ",":
            self._place = _Place.KEY_OR_END
        elif self._place in (_Place.KEY_OR_END, _Place.NEXT_OR_END) and char == "}":
            return True, self._end()
        else:
            # Not consumed: it may belong to the tag that ends an unfinished object.
            self._fail()
            return False, ""
        return True, ""

    def _begin_key(self, char: str) -> None:
        self._place = _Place.KEY
        self._token = [char]
        self._value = _Value(char)
        self._value.ends_with(char)

    def _read_key(self, char: str) -> None:
        assert self._value is not None, "made when the key began"
        self._token.append(char)
        if self._value.ends_with(char):
            key = _loads("".join(self._token))
            self._value = None
            self._place = _Place.COLON
            key = "arguments" if key == "parameters" else key
            if not isinstance(key, str) or key in self._seen:
                self._fail()
                return
            self._key = key
            self._seen.add(key)

    def _read_value(self, char: str) -> tuple[bool, str]:
        if self._value is None:
            if char in _WHITESPACE:
                return True, ""
            self._value = _Value(char)
            self._token = []
            if self._key == "arguments" and char == "{" and self._name is not None:
                self.called = True
        streamed = self._key == "arguments" and self.called
        if self._value.is_scalar:
            if self._value.takes(char):
                self._token.append(char)
                return True, ""
            return False, self._end_value("".join(self._token))
        self._token.append(char)
        if not self._value.ends_with(char):
            return True, char if streamed else ""
        if streamed:
            self._value = None
            self._place = _Place.NEXT_OR_END
            return True, char
        return True, self._end_value("".join(self._token))

    def _end_value(self, text: str) -> str:
        """Take in a value that was read as a whole; return its part of the arguments."""
        self._value = None
        self._place = _Place.NEXT_OR_END
        if self._key not in ("name", "arguments"):
            return ""
        value = _loads(text)
        if self._key == "name":
            if not isinstance(value, str) or value not in self._functions:
                self._fail()
                return ""
            self._name = value
            if self._early_arguments is None:
                return ""
            self.called = True
            return self._early_arguments
        if value is None and text == "null":
            arguments = "{}"
        elif isinstance(value, str) and isinstance(_loads(value), dict):
            arguments = value
        elif isinstance(value, dict):
            arguments = text
        else:
            self._fail()
            return ""
        if self._name is None:
            self._early_arguments = arguments
            return ""
        self.called = True
        return arguments

    def _end(self) -> str:
        """The object is complete."""
        self._place = _Place.END
        if self.called:
            return ""
        if self._name is None:
            self._fail()
            return ""
        self.called = True
        return "{}"

    def _fail(self) -> None:
        """Nothing sensible follows; a call that was given out stays and ends here."""
        if self.called:
            self._place = _Place.END
        else:
            self.failed = True


def _joined_first(deltas: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """The delta with the name and the one after it as one."""
    if len(deltas) < 2:
        return list(deltas)
    first, second = deltas
    return [ToolCallDelta(first.index, first.id, first.name, second.arguments)]


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
