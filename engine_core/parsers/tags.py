"""Calls that stand between two tags."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from engine_core.parsers.tools import BufferedToolParser, ParsedDelta, ToolCallDelta, held_back

_BEGINS_JSON = frozenset('{["-0123456789tfn')


class TaggedCallParser(BufferedToolParser):
    """Calls as JSON objects between two tags, any number of them, with text before and after.

    A subclass says which tags. Line breaks around a call belong to nothing.
    """

    opening: ClassVar[str]
    closing: ClassVar[str]

    def __init__(self, functions: Collection[str]) -> None:
        super().__init__(functions)
        self._state = "text"

    @classmethod
    def call_tags(cls) -> tuple[str, str] | None:
        """See :meth:`ToolParser.call_tags`."""
        return None if cls.opening[0] in _BEGINS_JSON else (cls.opening, cls.closing)

    def finish(self) -> ParsedDelta:
        """See :meth:`ToolParser.finish`."""
        rest, self._buffer = self._buffer, ""
        if self._state == "text":
            return ParsedDelta(rest)
        if self._state == "call":
            assert self._reader is not None, "made when the call began"
            if not self._reader.called:
                return ParsedDelta(self.opening + self._reader.raw + rest)
        return ParsedDelta()

    def _advance(self, content: list[str], calls: list[ToolCallDelta]) -> bool:
        """See :meth:`BufferedToolParser._advance`."""
        if self._state == "after":
            # Models leave out a brace, write one too many, or forget the tag.
            self._buffer = self._buffer.lstrip(" \t\r\n}")
            if self._buffer.startswith(self.closing):
                self._buffer = self._buffer.removeprefix(self.closing)
            elif self.closing.startswith(self._buffer):
                return False
            self._state = "between"
        if self._state == "between":
            self._buffer = self._buffer.lstrip("\n")
            if not self._buffer:
                return False
            self._state = "text"
        if self._state == "text":
            before, tag, after = self._buffer.partition(self.opening)
            if not tag:
                held = held_back(before, self.opening, "\n")
                content.append(before[: len(before) - held])
                self._buffer = before[len(before) - held :]
                return False
            content.append(before.rstrip("\n"))
            self._buffer = after
            self._state = "call"
            self._begin_call()
        reader = self._read_call(calls)
        if reader is None:
            return False
        if reader.failed:
            content.append(self.opening + reader.raw)
        self._state = "text" if reader.failed else "after"
        return bool(self._buffer)
