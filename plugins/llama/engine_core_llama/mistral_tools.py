"""Tool calls of Mistral's models. Imports no torch."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from dataclasses import replace

from engine_core.parsers import (
    BufferedToolParser,
    ParsedDelta,
    ToolCallDelta,
    held_back,
)

_TAG = "[TOOL_CALLS]"
_ID = "[CALL_ID]"
_ARGUMENTS = "[ARGS]"


class MistralToolParser(BufferedToolParser):
    """A list of calls after ``[TOOL_CALLS]``, or one call after each, in two forms.

    Models up to 2024 write ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, later ones
    ``[TOOL_CALLS]name[ARGS]{...}`` for each call, some with ``[CALL_ID]id`` after the name. Ids of
    calls have nine letters and digits: their chat templates refuse any other.
    """

    def __init__(self, functions: Collection[str]) -> None:
        super().__init__(functions)
        # One of "text", "tag" (what follows it is open), "call" and "next" (after one of a list).
        self._state = "text"
        # What stands before the call's own text, for a call that turns out to be none.
        self._before = ""
        # Characters of the call's text that were put there, not read.
        self._added = 0
        self._in_list = False

    def finish(self) -> ParsedDelta:
        """See :meth:`ToolParser.finish`."""
        rest, self._buffer = self._buffer, ""
        if self._state == "call":
            assert self._reader is not None, "made when the call began"
            return ParsedDelta() if self._reader.called else ParsedDelta(self._refused() + rest)
        if self._state == "next":
            return ParsedDelta()
        return ParsedDelta(_TAG + rest if self._state == "tag" else rest)

    def _refused(self) -> str:
        assert self._reader is not None, "made when the call began"
        return self._before + self._reader.raw[self._added :]

    def _advance(self, content: list[str], calls: list[ToolCallDelta]) -> bool:
        """See :meth:`BufferedToolParser._advance`."""
        if self._state == "text":
            before, tag, after = self._buffer.partition(_TAG)
            held = 0 if tag else held_back(before, _TAG)
            content.append(before[: len(before) - held])
            self._buffer = after if tag else before[len(before) - held :]
            self._state = "tag" if tag else "text"
            return bool(tag)
        if self._state == "tag":
            return self._advance_tag(content, calls)
        if self._state == "next":
            begun = self._buffer.lstrip()
            if begun.startswith(","):
                self._begin(",", begun[1:], in_list=True)
            else:
                self._buffer = begun.removeprefix("]")
                self._state = "text" if begun else "next"
            return bool(begun)
        made: list[ToolCallDelta] = []
        reader = self._read_call(made)
        # Chat templates take no other ids.
        calls += [replace(c, id=c.id and uuid.uuid4().hex[:9]) for c in made]
        if reader is None:
            return False
        if reader.failed:
            content.append(self._refused())
        self._state = "next" if self._in_list and not reader.failed else "text"
        return bool(self._buffer)

    def _advance_tag(self, content: list[str], calls: list[ToolCallDelta]) -> bool:
        begun = self._buffer.lstrip()
        if begun.startswith("["):
            space = self._buffer[: len(self._buffer) - len(begun)]
            self._begin(f"{_TAG}{space}[", begun[1:], in_list=True)
            return True
        named, found, after = self._buffer.partition(_ARGUMENTS)
        name = named.partition(_ID)[0].strip()
        if found and name in self._functions and _TAG not in named:
            self._begin(_TAG + named + found, after, in_list=False)
            assert self._reader is not None, "made when the call began"
            # The rest is what it would be in a list.
            prefix = f'{{"name": {json.dumps(name)}, "arguments": '
            self._reader.feed(prefix)
            self._added = len(prefix)
            return True
        # No name, nor what may become one: more of it may come.
        if not found and _TAG not in named and any(item.startswith(name) for item in self._names):
            return False
        content.append(_TAG)
        self._state = "text"
        return True

    @property
    def _names(self) -> list[str]:
        """Beginnings of the text between the tag and the arguments."""
        return [name + tag for name in self._functions for tag in (_ID, _ARGUMENTS)]

    def _begin(self, before: str, rest: str, *, in_list: bool) -> None:
        self._state = "call"
        self._before, self._buffer, self._in_list, self._added = before, rest, in_list, 0
        self._begin_call()
