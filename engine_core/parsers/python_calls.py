"""Calls that are written as Python."""

from __future__ import annotations

import ast
import json
import uuid
import warnings
from typing import Any

from engine_core.parsers.tools import ToolCallDelta

_MAX_LENGTH = 2**18


class PythonArguments:
    """Reads ``(city="Oslo", days=3)`` from pieces of its text.

    Values are Python's literals that JSON has too; tuples become lists. They are given out whole:
    a part of them is no JSON.

    Attributes:
        raw: the text read so far.
        ended: whether the closing parenthesis was read, or it is too long to be waited for.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.ended = False
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def feed(self, text: str) -> int:
        """Read ``text`` up to the end of the arguments; return how many characters were read."""
        used = 0
        while used < len(text) and not self.ended:
            char = text[used]
            used += 1
            if self._quote:
                if not self._escaped and char == self._quote:
                    self._quote = ""
                self._escaped = char == "\\" and not self._escaped
            elif char in "\"'":
                self._quote = char
            else:
                self._depth += (char in "([{") - (char in ")]}")
                self.ended = self._depth <= 0
        self.raw += text[:used]
        self.ended = self.ended or len(self.raw) > _MAX_LENGTH
        return used

    def json(self) -> str | None:
        """The arguments as JSON text, or None if they are no keywords with literal values."""
        try:
            with warnings.catch_warnings():
                # Of unknown escapes, which are the model's.
                warnings.simplefilter("ignore")
                call = ast.parse(f"f{self.raw}", mode="eval").body
            if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
                return None
            values: dict[str, Any] = {}
            for keyword in call.keywords:
                if keyword.arg is None:
                    return None
                values[keyword.arg] = ast.literal_eval(keyword.value)
            return json.dumps(values, ensure_ascii=False, allow_nan=False)
        # TypeError: what JSON has not, such as a set.
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None


def whole_call(index: int, name: str, arguments: str) -> ToolCallDelta:
    """A call in one piece; see :class:`ToolCallDelta`."""
    return ToolCallDelta(index, f"call_{uuid.uuid4().hex[:24]}", name, arguments)
