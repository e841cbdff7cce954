"""A client's view of an answer that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from engine_core.parsers import OutputParser, ToolParser

Calls = list[tuple[str, str]]


class Bare:
    """A model config that names no parser, or those given."""

    architecture = "SomeModel"

    def __init__(self, tools: str | None = None, reasoning: str | None = None) -> None:
        self.tool_parser = tools
        self.reasoning_parser = reasoning


def read(parser: OutputParser | ToolParser, pieces: Iterable[str]) -> tuple[str, str, Calls]:
    """Content, reasoning and calls put together as a client does it."""
    content, reasoning = "", ""
    names: dict[int, str] = {}
    ids: dict[int, str] = {}
    arguments: dict[int, str] = {}
    deltas = [parser.feed(piece) for piece in pieces]
    deltas.append(parser.finish())
    for delta in deltas:
        content += delta.content
        reasoning += delta.reasoning
        for call in delta.tool_calls:
            if call.index in names:
                assert call.name is None
                assert call.id is None
            else:
                assert call.index == len(names)
                assert call.name
                assert call.id
                names[call.index], ids[call.index] = call.name, call.id
            arguments[call.index] = arguments.get(call.index, "") + call.arguments
    assert len(set(ids.values())) == len(ids)
    return content, reasoning, [(names[index], arguments[index]) for index in sorted(names)]


def cut(text: str, places: Sequence[int]) -> list[str]:
    """``text`` in pieces, some of them empty."""
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]
