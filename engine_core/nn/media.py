"""Parts of models that see and hear."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

_T = TypeVar("_T")


def finished(parts: Generator[Any, Any, _T]) -> _T:
    """The result of work in parts, all of which are done now."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: _T = end.value
            return result
