"""Tool calls of ChatGLM3. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection

from engine_core.parsers import ParsedDelta, PythonArguments, ToolParser, whole_call

_CODE = "\n```python\ntool_call"
_END = "```"


class ChatGLM3ToolParser(ToolParser):
    """The function's name, and a block of Python that calls ``tool_call`` with its arguments.

    An answer has one call, as the model ends its turn with it. It is given out when it is complete;
    one that was cut off stays content.
    """

    skip_special_tokens = True

    def __init__(self, functions: Collection[str]) -> None:
        super().__init__(functions)
        # One of "begin", "arguments", "end" (of the block) and "text".
        self._state = "begin"
        self._buffer = ""
        self._before = ""
        self._name = ""
        self._arguments = PythonArguments()

    def feed(self, text: str) -> ParsedDelta:
        """See :meth:`ToolParser.feed`."""
        self._buffer += text
        if self._state == "begin":
            begun = self._buffer.lstrip()
            beginnings = {name + _CODE: name for name in self._functions}
            whole = next((each for each in beginnings if begun.startswith(f"{each}(")), None)
            if whole is not None:
                self._state, self._name = "arguments", beginnings[whole]
                length = len(self._buffer) - len(begun) + len(whole)
                self._before, self._buffer = self._buffer[:length], self._buffer[length:]
            elif any(f"{each}(".startswith(begun) for each in beginnings):
                return ParsedDelta()
            else:
                self._state = "text"
        parsed = ParsedDelta()
        if self._state == "arguments":
            used = self._arguments.feed(self._buffer)
            self._buffer = self._buffer[used:]
            if not self._arguments.ended:
                return parsed
            arguments = self._arguments.json()
            self._state = "text" if arguments is None else "end"
            if arguments is None:
                parsed = ParsedDelta(self._before + self._arguments.raw)
            else:
                parsed = ParsedDelta(tool_calls=(whole_call(0, self._name, arguments),))
        if self._state == "end":
            begun = self._buffer.lstrip()
            if _END.startswith(begun):
                return parsed
            self._state, self._buffer = "text", begun.removeprefix(_END)
        rest, self._buffer = self._buffer, ""
        return parsed + ParsedDelta(rest)

    def finish(self) -> ParsedDelta:
        """See :meth:`ToolParser.finish`."""
        rest, self._buffer = self._buffer, ""
        if self._state == "arguments":
            rest = self._before + self._arguments.raw + rest
        if self._state == "end" and _END.startswith(rest.strip()):
            rest = ""
        return ParsedDelta(rest)
