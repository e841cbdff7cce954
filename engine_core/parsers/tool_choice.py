"""Constraints on the text from OpenAI's ``tools`` and ``tool_choice``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine_core.configs import GuidedParams
from engine_core.configs.sampling import JSON_WHITESPACE
from engine_core.errors import RequestError

Tools = Sequence[Mapping[str, Any]] | None
ToolChoice = str | Mapping[str, Any] | None

# Keywords of JSON schema whose values are schemas by name, and those whose values are data.
_SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_DATA = frozenset({"const", "enum", "default", "examples"})


def tool_choice_params(
    tools: Tools, tool_choice: ToolChoice, *, parallel_tool_calls: bool = True
) -> GuidedParams | None:
    """The constraint that makes the text the call that ``tool_choice`` asks for.

    Args:
        tools: ``{"type": "function", "function": {"name": ..., "parameters": schema}}`` each.
        tool_choice: "auto", "none", "required", or a named function in OpenAI's form; None is
            "auto".
        parallel_tool_calls: whether more than one call may be made.

    Returns:
        For "required" a JSON array of calls, for a named function its arguments; else None. The
        parser of :func:`build_output_parser` for the same choice reads them.

    Raises:
        RequestError: a tool or the choice is malformed, or what it names is not offered.
    """
    offered = offered_functions(tools)
    chosen = chosen_function(offered, tool_choice)
    if chosen is not None:
        return GuidedParams(json_schema=_parameters(offered[chosen]))
    if tool_choice != "required":
        return None
    call, definitions = _call_schema(offered)
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": call, "$defs": definitions}
    if not parallel_tool_calls:
        schema["maxItems"] = 1
    return GuidedParams(json_schema=schema)


def calls_or_answer_params(
    tools: Tools, answer: GuidedParams, tags: tuple[str, str], special_tokens: Mapping[str, int]
) -> GuidedParams:
    """The constraint that makes the text either calls in the model's own format or an answer.

    Args:
        tools: as in :func:`tool_choice_params`; the model may call any of them, and several.
        answer: the constraint on a text without calls: a JSON object or a JSON schema.
        tags: the tags around the object of a call; see :meth:`ToolParser.call_tags`.
        special_tokens: those of the tags that are special tokens of the vocabulary, with their ids.

    Returns:
        A grammar. The parser of :func:`build_output_parser` with ``calls_or_answer`` reads it.

    Raises:
        RequestError: a tool is malformed.
    """
    call, definitions = _call_schema(offered_functions(tools))
    schema = {"type": "object"} if answer.json_object else answer.json_schema
    opening, closing = (_lark_tag(tag, special_tokens) for tag in tags)
    return GuidedParams(
        grammar="\n".join(
            (
                "start: answer | call (/\\n{0,2}/ call)* /\\n{0,2}/",
                f"call: {opening} /\\n?/ object /\\n?/ {closing}",
                f"object: {_lark_json({**call, '$defs': definitions})}",
                f"answer: {_lark_json(schema)}",
            )
        )
    )


def reasoned_params(
    answer: GuidedParams, tags: tuple[str, str], special_tokens: Mapping[str, int]
) -> GuidedParams:
    """The constraint on a text that may reason before what another constraint asks for.

    Args:
        answer: the constraint on what follows: a JSON schema.
        tags: those around the reasoning; see :meth:`ReasoningParser.tags`.
        special_tokens: those of the tags that are special tokens of the vocabulary, with their ids.
    """
    opening, closing = tags
    if closing in special_tokens:
        rest = f"rest: /(?s:.*)/ <[{special_tokens[closing]}]>"
    else:
        rest = f"rest[lazy]: /(?s:.*){re.escape(closing).replace('/', chr(92) + '/')}/"
    begun = (
        f"({_lark_tag(opening, special_tokens)} rest /\\n{{0,2}}/)?"
        if opening
        else "rest /\\n{0,2}/"
    )
    lines = f"start: {begun} answer", rest, f"answer: {_lark_json(answer.json_schema)}"
    return GuidedParams(grammar="\n".join(lines))


def _lark_tag(tag: str, special_tokens: Mapping[str, int]) -> str:
    text = json.dumps(tag)
    return f"(<[{special_tokens[tag]}]> | {text})" if tag in special_tokens else text


def _lark_json(schema: Any) -> str:
    schema = {} if schema is True else schema
    guidance = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
    return f"%json {json.dumps({**schema, **guidance})}"


def _call_schema(offered: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a call of one of the functions, and the ``$defs`` that it refers to."""
    schemas = {f"tool_{index}": _parameters(item) for index, item in enumerate(offered.values())}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{key}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, key in zip(offered, schemas, strict=True)
    ]
    definitions = {key: _moved(item, f"#/$defs/{key}") for key, item in schemas.items()}
    return calls[0] if len(calls) == 1 else {"anyOf": calls}, definitions


def offered_functions(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """The functions among ``tools`` by name.

    Raises:
        RequestError: one is malformed, or two have one name.
    """
    functions: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools or ()):
        function = tool.get("function") if tool.get("type", "function") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise RequestError(
                f"tools[{index}] must be {{'type': 'function', 'function': {{'name': ..., "
                f"'parameters': ...}}}}, got {tool!r}",
                param=f"tools.{index}",
            )
        if name in functions:
            raise RequestError(
                f"tools[{index}]: there are two functions {name!r}; rename one",
                param=f"tools.{index}.function.name",
            )
        functions[name] = function
    return functions


def chosen_function(offered: Mapping[str, Any], tool_choice: ToolChoice) -> str | None:
    """The function that ``tool_choice`` names, or None if it names none.

    Raises:
        RequestError: the choice is malformed, or what it names is not offered.
    """
    if tool_choice is None or tool_choice in ("auto", "none"):
        return None
    if tool_choice == "required":
        if not offered:
            raise RequestError(
                "tool_choice 'required' needs tools, and none are given", param="tool_choice"
            )
        return None
    name = None
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function":
        function = tool_choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            "tool_choice must be 'auto', 'none', 'required' or {'type': 'function', 'function': "
            f"{{'name': ...}}}}, got {tool_choice!r}",
            param="tool_choice",
        )
    if name not in offered:
        known = ", ".join(map(repr, offered)) or "none"
        raise RequestError(
            f"tool_choice names {name!r}, which is not among the tools: {known}",
            param="tool_choice",
        )
    return name


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object in any case."""
    schema = function.get("parameters")
    if schema is None or schema == {}:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping):
        raise RequestError(
            f"the parameters of function {function['name']!r} must be a JSON schema, got {schema!r}"
        )
    return {"type": "object", **schema} if "$ref" not in schema else dict(schema)


def _moved(schema: Any, place: str) -> Any:
    """A schema that stands at ``place`` of another one, its references to itself adjusted."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = place + value[1:]
        elif key in _DATA:
            moved[key] = value
        elif key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            moved[key] = {name: _moved(item, place) for name, item in value.items()}
        else:
            moved[key] = _moved(value, place)
    return moved
