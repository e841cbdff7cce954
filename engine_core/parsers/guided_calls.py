"""Calls that guided decoding wrote, which are JSON by construction."""

from __future__ import annotations

import uuid
from collections.abc import Collection

from engine_core.parsers.tools import BufferedToolParser, ParsedDelta, ToolCallDelta, ToolParser


class CallListParser(BufferedToolParser):
    """A JSON array of calls, as :func:`tool_choice_params` asks for it where any may be made."""

    skip_special_tokens = True

    def _advance(self, content: list[str], calls: list[ToolCallDelta]) -> bool:
        """See :meth:`BufferedToolParser._advance`."""
        if self._reader is None:
            # Brackets, commas and spaces between the calls.
            self._buffer = self._buffer[self._buffer.find("{") :] if "{" in self._buffer else ""
            if not self._buffer:
                return False
            self._begin_call()
        if self._read_call(calls) is None:
            return False
        self._reader = None
        return True

    def finish(self) -> ParsedDelta:
        """A call that was cut off before its arguments began is neither a call nor content."""
        return ParsedDelta()


class CallsOrAnswerParser(ToolParser):
    """Calls in the model's own format or a JSON answer, as :func:`calls_or_answer_params` asks for
    them; the first character tells which.

    Args:
        calls: reads the calls.
        opening: what a call begins with, and no JSON does.
    """

    def __init__(self, calls: ToolParser, opening: str) -> None:
        super().__init__(())
        self._calls = calls
        self._opening = opening
        self._reads_calls: bool | None = None
        # That of an instance: it is the other parser's.
        self.skip_special_tokens = calls.skip_special_tokens  # type: ignore[misc]

    def feed(self, text: str) -> ParsedDelta:
        """See :meth:`ToolParser.feed`."""
        if self._reads_calls is None and text:
            self._reads_calls = text[0] == self._opening[0]
        return self._calls.feed(text) if self._reads_calls else ParsedDelta(text)

    def finish(self) -> ParsedDelta:
        """See :meth:`ToolParser.finish`."""
        return self._calls.finish() if self._reads_calls else ParsedDelta()


class ArgumentsParser(ToolParser):
    """The arguments of the one function that must be called."""

    skip_special_tokens = True

    def __init__(self, functions: Collection[str]) -> None:
        super().__init__(functions)
        (self._name,) = functions
        self._begun = False

    def feed(self, text: str) -> ParsedDelta:
        """See :meth:`ToolParser.feed`."""
        if not text:
            return ParsedDelta()
        name = call_id = None
        if not self._begun:
            self._begun = True
            name, call_id = self._name, f"call_{uuid.uuid4().hex[:24]}"
        return ParsedDelta(tool_calls=(ToolCallDelta(0, call_id, name, text),))

    def finish(self) -> ParsedDelta:
        """Nothing is held back."""
        return ParsedDelta()
