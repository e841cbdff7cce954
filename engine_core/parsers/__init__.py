"""Parsers that split a model's text into content, reasoning and tool calls. No torch."""

from engine_core.parsers.output import OutputParser, build_output_parser, find_parser_names
from engine_core.parsers.python_calls import PythonArguments, whole_call
from engine_core.parsers.reasoning import ReasoningParser, ThinkParser
from engine_core.parsers.tags import TaggedCallParser
from engine_core.parsers.tool_choice import (
    calls_or_answer_params,
    reasoned_params,
    tool_choice_params,
)
from engine_core.parsers.tools import (
    BufferedToolParser,
    CallReader,
    ParsedDelta,
    ToolCallDelta,
    ToolParser,
    held_back,
)

__all__ = [
    "BufferedToolParser",
    "CallReader",
    "OutputParser",
    "ParsedDelta",
    "PythonArguments",
    "ReasoningParser",
    "TaggedCallParser",
    "ThinkParser",
    "ToolCallDelta",
    "ToolParser",
    "build_output_parser",
    "calls_or_answer_params",
    "find_parser_names",
    "held_back",
    "reasoned_params",
    "tool_choice_params",
    "whole_call",
]
