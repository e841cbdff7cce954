"""Tool calls of Llama 3.1 and later. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection

from engine_core.parsers import BufferedToolParser, ParsedDelta, ToolCallDelta, held_back

_TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"


class Llama3JsonToolParser(BufferedToolParser):
    """``{"name": ..., "parameters": {...}}`` as the whole answer, or after ``<|python_tag|>``.

    Several calls follow one another with a semicolon, a comma or white space between them. The
    format is that of Meta's model cards; the built-in tools, which are called as Python, are not
    known and stay content.
    """

    def __init__(self, functions: Collection[str]) -> None:
        super().__init__(functions)
        self._state = "begin"
        self._before = ""

    def finish(self) -> ParsedDelta:
        """See :meth:`ToolParser.finish`."""
        rest, self._buffer = self._buffer, ""
        if self._state == "call":
            assert self._reader is not None, "made when the call began"
            return ParsedDelta() if self._reader.called else self._refused(rest)
        if self._state == "text":
            return ParsedDelta(rest)
        between = not rest.strip(_BETWEEN) and self._num_calls > 0
        return ParsedDelta() if between else ParsedDelta(rest)

    def _refused(self, rest: str) -> ParsedDelta:
        assert self._reader is not None, "made when the call began"
        return ParsedDelta(self._before + self._reader.raw + rest)

    def _advance(self, content: list[str], calls: list[ToolCallDelta]) -> bool:
        """See :meth:`BufferedToolParser._advance`."""
        if self._state == "call":
            return self._advance_call(content, calls)
        if self._state == "begin":
            begun = self._buffer.lstrip(_BETWEEN if self._num_calls else None)
            if begun.startswith("{"):
                self._begin(self._buffer[: len(self._buffer) - len(begun)], begun)
                return True
            if _TAG.startswith(begun):
                return False
            if self._num_calls or begun.startswith(_TAG):
                self._buffer = begun
            self._state = "text"
        before, tag, after = self._buffer.partition(_TAG)
        if tag:
            content.append(before)
            self._begin(tag, after)
            return True
        held = held_back(before, _TAG)
        content.append(before[: len(before) - held])
        self._buffer = before[len(before) - held :]
        return False

    def _begin(self, before: str, rest: str) -> None:
        self._state = "call"
        self._before = before
        self._buffer = rest
        self._begin_call()

    def _advance_call(self, content: list[str], calls: list[ToolCallDelta]) -> bool:
        reader = self._read_call(calls)
        if reader is None:
            return False
        if reader.failed:
            content.append(self._before + reader.raw)
        self._state = "text" if reader.failed else "begin"
        return bool(self._buffer)
