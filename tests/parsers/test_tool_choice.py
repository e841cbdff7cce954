"""A forced call: the schema that guides it, and the parser that reads it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from guided_model import VOCAB, backend
from parsed_answers import Bare, cut, read

from engine_core.configs import GuidedParams
from engine_core.errors import RequestError
from engine_core.parsers import build_output_parser, tool_choice_params
from engine_core.registry import build_registry
from engine_core.runtime.guided import GrammarCompiler
from engine_core.text import FastTokenizer, token_bytes

REGISTRY = build_registry(plugin_errors="strict")
TREE = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
    "properties": {
        "root": {"$ref": "#/$defs/node"},
        "same": {"$ref": "#/properties/root"},
        "$ref": {"type": "integer"},
    },
    "required": ["root"],
}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("tree", TREE), tool("now"), tool("add", {"properties": {"a": {"type": "integer"}}})]
NAMED = {"type": "function", "function": {"name": "add"}}


def allows(schema: Any, value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def test_required_is_a_list_of_calls_each_with_its_own_schema() -> None:
    schema = tool_choice_params(TOOLS, "required").json_schema
    jsonschema.Draft202012Validator.check_schema(schema)
    good = [
        {"name": "tree", "arguments": {"root": {"next": {"next": {}}}, "same": {}, "$ref": 3}},
        {"name": "now", "arguments": {}},
        {"name": "add", "arguments": {"a": 1}},
    ]
    assert allows(schema, good)
    for bad in (
        [],
        {},
        [{"name": "rm", "arguments": {}}],
        [{"name": "add", "arguments": {"a": "1"}}],
        [{"name": "add", "arguments": []}],
        [{"name": "tree", "arguments": {}}],
        [{"name": "tree", "arguments": {"root": {"next": 1}}}],
        [{"name": "tree", "arguments": {"root": {}, "same": 3}}],
        [{"name": "now", "arguments": {"x": 1}}],
        [{"name": "now"}],
    ):
        assert not allows(schema, bad), bad
    single = tool_choice_params(TOOLS, "required", parallel_tool_calls=False).json_schema
    assert allows(single, good[:1])
    assert not allows(single, good)


def test_a_named_function_is_its_arguments() -> None:
    schema = tool_choice_params(TOOLS, NAMED).json_schema
    assert allows(schema, {"a": 1})
    assert not allows(schema, {"a": "x"})
    assert not allows(schema, [])
    for choice in (None, "auto", "none"):
        assert tool_choice_params(TOOLS, choice) is None


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([], "required", "'required' needs tools"),
        (TOOLS, "always", "must be 'auto', 'none', 'required'"),
        (TOOLS, {"type": "function"}, "must be 'auto'"),
        (TOOLS, {"type": "function", "function": {"name": "rm"}}, "names 'rm', .*'tree', 'now'"),
        ([tool("a"), tool("a")], "auto", r"tools\[1\]: there are two functions 'a'"),
        ([{"type": "function", "name": "a"}], "auto", r"tools\[0\] must be"),
        ([{"type": "code"}], "auto", r"tools\[0\] must be"),
        ([tool("a", [1])], "required", "parameters of function 'a' must be a JSON schema"),
    ],
)
def test_malformed_tools_and_choices_are_refused(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tool_choice_params(tools, choice)


def test_the_library_compiles_what_is_asked_for() -> None:
    tokenizer = FastTokenizer(backend(), special_tokens={}, chat_templates={})
    compiler = GrammarCompiler(
        token_bytes(tokenizer),
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        VOCAB,
    )
    for choice in ("required", NAMED):
        params = tool_choice_params(TOOLS, choice)
        assert isinstance(params, GuidedParams)
        compiler.check(params)
    bad = [tool("add", {"properties": {"a": {"type": "strin"}}})]
    with pytest.raises(RequestError, match=r"\$defs\.tool_0\.properties\.a: Invalid type: strin"):
        compiler.check(tool_choice_params(bad, "required"))


def test_forced_calls_are_read_back() -> None:
    calls = [
        {"name": "tree", "arguments": {"root": {"next": {}}}},
        {"name": "add", "arguments": {"a": 1}},
    ]
    for text in (json.dumps(calls), json.dumps(calls, indent=2) + "\n"):
        for pieces in ([text], list(text), cut(text, range(0, 200, 5))):
            made = build_output_parser(Bare(), REGISTRY, tools=TOOLS, tool_choice="required")
            content, _, found = read(made, pieces)
            assert content == ""
            assert [
                {"name": name, "arguments": json.loads(arguments)} for name, arguments in found
            ] == calls
    made = build_output_parser(Bare(), REGISTRY, tools=TOOLS, tool_choice=NAMED)
    assert read(made, ['{"a"', "", ": 1}"]) == ("", "", [("add", '{"a": 1}')])
    made = build_output_parser(Bare(), REGISTRY, tools=TOOLS, tool_choice="required")
    assert read(made, ['[{"name": "add", "arg']) == ("", "", [])
