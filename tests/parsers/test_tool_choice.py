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
from engine_core.parsers import (
    ThinkParser,
    build_output_parser,
    calls_or_answer_params,
    reasoned_params,
    tool_choice_params,
)
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


def accepts(params: GuidedParams, tokens: list[bytes], ids: list[int]) -> bool:
    """Whether a whole text may be these tokens of a vocabulary."""
    compiler = GrammarCompiler(tokens, lambda text: list(text.encode()), len(tokens))
    compiler.check(params)
    matcher = compiler.guide(params, []).matcher
    return all(matcher.consume_token(token) for token in ids) and matcher.is_accepting()


@pytest.mark.parametrize("special", [True, False])
def test_calls_or_an_answer(special: bool) -> None:
    schema = {"type": "object", "properties": {"b": {"const": 1}}, "required": ["b"]}
    answer = GuidedParams(json_schema={**schema, "additionalProperties": False})
    opening = b"\xff<call>" if special else b"<call>"
    tokens = [*(bytes([byte]) for byte in range(256)), opening]
    known = {"<call>": 256} if special else {}
    params = calls_or_answer_params(TOOLS, answer, ("<call>", "</call>"), known)
    add = '{"name": "add", "arguments": {"a": 5}}'
    texts = {
        '{"b": 1}': True,
        '{"b": 2}': False,
        f"<call>{add}</call>": True,
        f"<call>\n{add}\n</call>\n<call>{add}</call>\n": True,
        '<call>{"name": "tree", "arguments": {"root": {"next": {}}}}</call>': True,
        '<call>{"name": "tree", "arguments": {}}</call>': False,
        '<call>{"name": "none", "arguments": {}}</call>': False,
        f"<call>{add}": False,
        f'<call>{add}</call>{{"b": 1}}': False,
        f'{{"b": 1}}<call>{add}</call>': False,
        add: False,
        "Let me see": False,
        '{"b":' + " " * 32 + "1}": True,
        '{"b":' + " " * 33 + "1}": False,
    }
    for text, allowed in texts.items():
        spelled = list(text.encode())
        assert accepts(params, tokens, spelled) is allowed, text
        parts = text.split("<call>")
        ids = [*parts[0].encode()]
        for part in parts[1:]:
            ids += [256, *part.encode()]
        assert accepts(params, tokens, ids) is allowed, text


def test_an_answer_that_speaks_of_calls_is_none() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    text = json.dumps({"a": call, "<tool_call>{": 1, ',"name": "add", "arguments": {': 2})
    text += call
    made = build_output_parser(
        Bare("hermes"), REGISTRY, tools=TOOLS, guided=True, calls_or_answer=True
    )
    assert read(made, list(text)) == (text, "", [])


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("opened", [True, False])
def test_reasoning_before_a_call_that_must_come(special: bool, opened: bool) -> None:
    end = b"\xff</think>" if special else b"</think>"
    tokens = [*(bytes([byte]) for byte in range(256)), end]
    tags = ThinkParser("<think>\n" if opened else "<|im_start|>assistant\n").tags()
    assert tags == ("" if opened else "<think>", "</think>")
    call = tool_choice_params(TOOLS, NAMED)
    assert call is not None
    params = reasoned_params(call, tags, {"</think>": 256} if special else {})
    begun = "" if opened else "<think>"
    texts = {
        begun + 'I {"a": 1} see</think>{"a": 5}': True,
        begun + '\n1 < 2\n</think>\n\n{"a": 5}': True,
        begun + '</think>{"a": 5}': True,
        begun + '</think>\n\n\n{"a": 5}': False,
        begun + '</think>{"a": "5"}': False,
        begun + "</think>The sum": False,
        begun + "</think>": False,
        begun + '{"a": 5}': False,
        '{"a": 5}': not opened,
        'Well, {"a": 5}': False,
    }
    for text, allowed in texts.items():
        before, _, after = text.partition("</think>")
        closed = [256, *after.encode()] if "</think>" in text else []
        assert accepts(params, tokens, [*before.encode(), *closed]) is allowed, text
    assert ThinkParser("<think>\n\n</think>\n\n").tags() is None


def test_a_call_that_must_come_is_read_after_the_reasoning() -> None:
    for choice, answer in (
        ("required", '[{"name": "add", "arguments": {"a": 5}}]'),
        (NAMED, '{"a": 5}'),
    ):
        made = build_output_parser(
            Bare("hermes"),
            REGISTRY,
            tools=TOOLS,
            tool_choice=choice,
            reasoning_parser="think",
            guided=True,
            reasoned=True,
        )
        text = f"<think>\nAdd {answer}?\n</think>\n\n{answer}"
        content, reasoning, calls = read(made, list(text))
        assert (content, reasoning) == ("", f"Add {answer}?")
        ((name, arguments),) = calls
        assert (name, json.loads(arguments)) == ("add", {"a": 5})


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
