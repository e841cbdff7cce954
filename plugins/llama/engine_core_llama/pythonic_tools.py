"""Tool calls of Llama 3.2 and 3.3 as Python. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection

from engine_core.parsers import ParsedDelta, PythonArguments, ToolParser, whole_call


class Llama3PythonicToolParser(ToolParser):
    """``[get_weather(city="Oslo"), add(a=1)]`` as the whole answer.

    The format is that of Meta's model cards for tools that are named in the prompt. A call is given
    out when it is complete; one that was cut off stays content.
    """

    skip_special_tokens = True

    def __init__(self, functions: Collection[str]) -> None:
        super().__init__(functions)
        # One of "begin", "name", "arguments", "next" (after a call) and "text".
        self._state = "begin"
        self._buffer = ""
        self._before = ""
        self._name = ""
        self._num_calls = 0
        self._arguments = PythonArguments()

    def feed(self, text: str) -> ParsedDelta:
        """See :meth:`ToolParser.feed`."""
        self._buffer += text
        parsed = ParsedDelta()
        while self._buffer:
            made = self._advance()
            if made is None:
                break
            parsed += made
        return parsed

    def finish(self) -> ParsedDelta:
        """See :meth:`ToolParser.finish`."""
        rest, self._buffer = self._buffer, ""
        if self._state == "arguments":
            rest = self._arguments.raw + rest
        if self._state in ("name", "arguments"):
            rest = self._before + rest
        return ParsedDelta() if self._state == "next" else ParsedDelta(rest)

    def _advance(self) -> ParsedDelta | None:
        """Read on in the buffer; None if that needs more text."""
        begun = self._buffer.lstrip()
        space = self._buffer[: len(self._buffer) - len(begun)]
        if self._state == "text":
            self._buffer = ""
            return ParsedDelta(space + begun)
        if not begun:
            return None
        if self._state == "begin":
            self._state = "name" if begun[0] == "[" else "text"
            if begun[0] == "[":
                self._before, self._buffer = f"{space}[", begun[1:]
            return ParsedDelta()
        if self._state == "next":
            self._state = "name" if begun[0] == "," else "text"
            self._before, self._buffer = ",", begun[begun[0] in ",]" :]
            return ParsedDelta()
        if self._state == "name":
            name, found, _ = begun.partition("(")
            if found and name in self._functions:
                self._name, self._state = name, "arguments"
                self._before += space + name
                self._buffer = begun[len(name) :]
                self._arguments = PythonArguments()
                return ParsedDelta()
            if not found and any(each.startswith(name) for each in self._functions):
                return None
            return self._refused()
        used = self._arguments.feed(self._buffer)
        self._buffer = self._buffer[used:]
        if not self._arguments.ended:
            return None
        arguments = self._arguments.json()
        if arguments is None:
            self._before += self._arguments.raw
            return self._refused()
        self._state = "next"
        self._num_calls += 1
        return ParsedDelta(tool_calls=(whole_call(self._num_calls - 1, self._name, arguments),))

    def _refused(self) -> ParsedDelta:
        self._state = "text"
        return ParsedDelta(self._before)
