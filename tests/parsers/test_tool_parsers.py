"""Calls of tools in a model's text: whole and in pieces, and back from real chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from guided_model import backend
from hypothesis import example, given, settings
from hypothesis import strategies as st
from parsed_answers import Bare, Calls, cut, read
from tokenizers import Tokenizer as Backend

from engine_core.configs import HFConfig
from engine_core.errors import ConfigError, RequestError
from engine_core.parsers import OutputParser, ToolParser, build_output_parser, find_parser_names
from engine_core.registry import Registry, build_registry
from engine_core.text import FastTokenizer, load_tokenizer

TOKENIZERS = Path(__file__).parents[2] / ".cache" / "tokenizers"
REGISTRY = build_registry(plugin_errors="strict")
FUNCTIONS = ("get_weather", "add")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} of something",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in FUNCTIONS
]


def parser(name: str) -> ToolParser:
    made: ToolParser = REGISTRY.tool_parser(name)(FUNCTIONS)
    return made


def parsed(name: str, text: str) -> tuple[str, Calls]:
    content, _, calls = read(parser(name), [text])
    return content, calls


ONE = '{"name": "add", "arguments": {"a": [1, {"b": "}"}], "c": "</tool_call>\\""}}'
ARGUMENTS = '{"a": [1, {"b": "}"}], "c": "</tool_call>\\""}'
HERMES: dict[str, tuple[str, str, Calls]] = {
    "one": (f"<tool_call>\n{ONE}\n</tool_call>", "", [("add", ARGUMENTS)]),
    "text before and after": (
        f"Let me see.\n<tool_call>\n{ONE}\n</tool_call>\nDone.",
        "Let me see.Done.",
        [("add", ARGUMENTS)],
    ),
    "two": (
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>\n'
        '<tool_call>\n{"arguments": {"city": "Oslo"}, "name": "get_weather"}\n</tool_call>',
        "",
        [("add", "{}"), ("get_weather", '{"city": "Oslo"}')],
    ),
    "arguments as text": (
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    "no arguments": ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    "null": ('<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
    "another key": (
        '<tool_call>{"id": 7, "name": "add", "parameters": {}, "x": [{}]}</tool_call>',
        "",
        [("add", "{}")],
    ),
    "a brace too few": (
        '<tool_call>{"name": "add", "arguments": {"a": 1}\n</tool_call> yes',
        " yes",
        [("add", '{"a": 1}')],
    ),
    "a brace too many": (
        '<tool_call>{"name": "add", "arguments": {"a": 1}}}\n</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    "no closing tag": ('<tool_call>{"name": "add", "arguments": {}}', "", [("add", "{}")]),
    "cut off in the arguments": (
        '<tool_call>{"name": "add", "arguments": {"a": "b',
        "",
        [("add", '{"a": "b')],
    ),
    "cut off before": (
        '<tool_call>{"name": "add", "argu',
        '<tool_call>{"name": "add", "argu',
        [],
    ),
    "a tag cut off": ("text\n<tool_c", "text\n<tool_c", []),
    "no JSON": ("<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>", []),
    "another function": (
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [],
    ),
    "arguments that are no object": (
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        [],
    ),
    "a call after a broken one": (
        f"<tool_call>x<tool_call>{ONE}</tool_call>",
        "<tool_call>x",
        [("add", ARGUMENTS)],
    ),
    "no call": ("a < b\n\n<tool> \n", "a < b\n\n<tool> \n", []),
    "nothing": ("", "", []),
}
LLAMA: dict[str, tuple[str, str, Calls]] = {
    "one": ('{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    "with its type": (
        '{"type": "function", "name": "add", "parameters": {"a": 1}}',
        "",
        [("add", '{"a": 1}')],
    ),
    "after the tag": (
        '<|python_tag|>{"name": "add", "parameters": {}}',
        "",
        [("add", "{}")],
    ),
    "text before the tag": (
        'I will.<|python_tag|>{"name": "add", "parameters": {}}',
        "I will.",
        [("add", "{}")],
    ),
    "two": (
        '{"name": "add", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "O"}}\n',
        "",
        [("add", "{}"), ("get_weather", '{"city": "O"}')],
    ),
    "other JSON": ('{"name": "John", "age": 3}', '{"name": "John", "age": 3}', []),
    "JSON without a name": ('{"a": [1, 2]} and more', '{"a": [1, 2]} and more', []),
    "Python": (
        '<|python_tag|>brave_search.call(query="x")',
        '<|python_tag|>brave_search.call(query="x")',
        [],
    ),
    "JSON in text": (
        'Use {"name": "add", "parameters": {}}',
        'Use {"name": "add", "parameters": {}}',
        [],
    ),
    "spaces": ("  \n", "  \n", []),
    "cut off": ('{"name": "add", "parameters": {"a', "", [("add", '{"a')]),
    "text after": (
        '{"name": "add", "parameters": {}}\nThat was it.',
        "That was it.",
        [("add", "{}")],
    ),
}
MISTRAL: dict[str, tuple[str, str, Calls]] = {
    # As the chat template of Mistral-7B-Instruct-v0.3 writes a list of calls.
    "two in a list": (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}, '
        '{"name": "get_weather", "arguments": {"city": "O]"}}]',
        "",
        [("add", '{"a": 1}'), ("get_weather", '{"city": "O]"}')],
    ),
    "text around a list": (
        'So.[TOOL_CALLS][{"name": "add", "arguments": {}}] Done.',
        "So. Done.",
        [("add", "{}")],
    ),
    # As mistral-common's tokenizers from v11 and v13 on write calls.
    "named": (
        '[TOOL_CALLS]add[ARGS]{"a": {"b": "}"}}[TOOL_CALLS]get_weather[ARGS]{}',
        "",
        [("add", '{"a": {"b": "}"}}'), ("get_weather", "{}")],
    ),
    "named with an id": (
        'So.[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}',
        "So.",
        [("add", '{"a": 1}')],
    ),
    "another function named": ("[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}", []),
    "another function in a list": (
        '[TOOL_CALLS] [{"name": "add", "arguments": {}}, {"name": "rm", "arguments": {}}]',
        ', {"name": "rm", "arguments": {}}]',
        [("add", "{}")],
    ),
    "named without an object": ("[TOOL_CALLS]add[ARGS][1] x", "[TOOL_CALLS]add[ARGS][1] x", []),
    "no list": ("[TOOL_CALLS] [1]", "[TOOL_CALLS] [1]", []),
    "a name cut off": ("[TOOL_CALLS]get_w", "[TOOL_CALLS]get_w", []),
    "the tag cut off": ("a [TOOL", "a [TOOL", []),
    "arguments cut off": ('[TOOL_CALLS]add[ARGS]{"a', "", [("add", '{"a')]),
}
PYTHONIC: dict[str, tuple[str, str, Calls]] = {
    # As Meta's model card of Llama 3.2 shows them.
    "two": (
        "[get_weather(city='San Francisco', metric=\"celsius\"), add(a=[1, -2.5], b=None)]",
        "",
        [
            ("get_weather", '{"city": "San Francisco", "metric": "celsius"}'),
            ("add", '{"a": [1, -2.5], "b": null}'),
        ],
    ),
    "nested": (
        "\n[add(x={'k': (True, 'a)\\'\"')})]",
        "",
        [("add", '{"x": {"k": [true, "a)\'\\""]}}')],
    ),
    "an escape that Python warns of": ("[add(a='\\d')]", "", [("add", '{"a": "\\\\d"}')]),
    "no arguments": ("[add()]", "", [("add", "{}")]),
    "another function": ("[rm(a=1)]", "[rm(a=1)]", []),
    "a longer name": ("[adder(a=1)]", "[adder(a=1)]", []),
    "an expression": ("[add(a=open('x'))]", "[add(a=open('x'))]", []),
    "a place": ("[add(1)]", "[add(1)]", []),
    "what JSON has not": ("[add(a={1})]", "[add(a={1})]", []),
    "a list": ("[1, 2] and more", "[1, 2] and more", []),
    "text": ("I add(a=1).", "I add(a=1).", []),
    "text after": ("[add(a=1)] Done", " Done", [("add", '{"a": 1}')]),
    "cut off": ("[add(a=1), add(a='", ", add(a='", [("add", '{"a": 1}')]),
    "spaces": ("  \n", "  \n", []),
}
CHATGLM3: dict[str, tuple[str, str, Calls]] = {
    # As the guide to prompts in ChatGLM3's repository shows it.
    "one": (
        "get_weather\n```python\ntool_call(city='北京', days=1)\n```",
        "",
        [("get_weather", '{"city": "北京", "days": 1}')],
    ),
    "another function": (
        "rm\n```python\ntool_call(a=1)\n```",
        "rm\n```python\ntool_call(a=1)\n```",
        [],
    ),
    "other code": ("add\n```python\nprint(1)\n```", "add\n```python\nprint(1)\n```", []),
    "text": ("\n 你好", "\n 你好", []),
    "text after": ("add\n```python\ntool_call()\n```\nSo", "\nSo", [("add", "{}")]),
    "no end": ("add\n```python\ntool_call(a=1)\n``", "", [("add", '{"a": 1}')]),
    "cut off": ("add\n```python\ntool_call(a=", "add\n```python\ntool_call(a=", []),
    "a name": ("add", "add", []),
}
FORMATS = {
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "llama3_pythonic": PYTHONIC,
    "chatglm3": CHATGLM3,
}
CASES = [(name, *case) for name, cases in FORMATS.items() for case in cases.values()]
IDS = [f"{name}: {case}" for name, cases in FORMATS.items() for case in cases]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES, ids=IDS)
def test_what_is_a_call_and_what_is_content(
    name: str, text: str, content: str, calls: Calls
) -> None:
    assert parsed(name, text) == (content, calls)
    assert read(parser(name), text) == (content, "", calls)  # a character at a time


# Pieces of all formats in any order make texts that are almost calls.
_FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>", '{"name": "add"',
        '{"name": "add", "arguments": {"a": "}\\"{"', ', "parameters": {}', "}", "}}", '"', "\n",
        "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "add", "[", "]",
        "(a=", ")", "'", "\n```python\ntool_call(", "```",
        " ", ";", ",", "{", "x", "<", '"arguments"', ":", "null", "12", "\\", "é😀",
    ]
)  # fmt: skip
TEXTS = st.lists(_FRAGMENTS, max_size=12).map("".join) | st.sampled_from(
    [text for _, text, _, _ in CASES]
)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("reasoning", [None, "think"])
@settings(deadline=None)
@given(text=TEXTS, places=st.lists(st.integers(0, 400), max_size=8))
@example(text=f"<think>\nhm\n</think>\n\n<tool_call>{ONE}</tool_call>", places=[3, 9, 20])
def test_how_the_text_is_cut_does_not_show(
    name: str, reasoning: str | None, text: str, places: list[int]
) -> None:
    def build() -> OutputParser:
        return build_output_parser(Bare(name, reasoning), REGISTRY, tools=TOOLS)

    whole = read(build(), [text])
    assert read(build(), cut(text, places)) == whole
    assert read(build(), text) == whole


@settings(deadline=None)
@given(
    arguments=st.dictionaries(
        st.text(max_size=5), st.recursive(st.text() | st.integers(), st.lists, max_leaves=3)
    ),
    before=st.text(alphabet="ab \n.", max_size=6),
    indent=st.sampled_from([None, 2]),
)
def test_every_call_comes_back(arguments: dict[str, Any], before: str, indent: int | None) -> None:
    call = json.dumps({"name": "add", "arguments": arguments}, indent=indent)
    content, calls = parsed("hermes", f"{before}<tool_call>\n{call}\n</tool_call>")
    assert content == before.rstrip("\n")
    ((name, askedback),) = calls
    assert (name, json.loads(askedback)) == ("add", arguments)


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "How warm is it in Oslo and Rome?"},
    {
        "role": "assistant",
        "content": "I will look.",
        "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}
            for city in ("Oslo", 'R"o\\me')
        ],
    },
]


def test_a_real_chat_template_and_the_parser_agree() -> None:
    """The text that Qwen2.5's template writes for an answer with calls parses to those calls, also
    through its tokenizer, with the special tokens left in as the parser asks for."""
    tokenizer = load_tokenizer(TOKENIZERS / "qwen2_5")
    prompt = tokenizer.apply_chat_template(CONVERSATION[:1], tools=TOOLS)
    assert "get_weather" in prompt
    whole = tokenizer.apply_chat_template(CONVERSATION, tools=TOOLS, add_generation_prompt=False)
    assert whole.startswith(prompt)
    answer = whole.removeprefix(prompt).removesuffix("<|im_end|>\n")
    made = build_output_parser(Bare("hermes"), REGISTRY, tools=TOOLS)
    ids = tokenizer.encode(answer, add_special_tokens=False)
    text = tokenizer.decode(ids, skip_special_tokens=made.skip_special_tokens)
    content, _, calls = read(made, cut(text, range(0, 400, 7)))
    assert content == "I will look."
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("get_weather", {"city": "Oslo"}),
        ("get_weather", {"city": 'R"o\\me'}),
    ]


def test_ids_of_mistrals_calls_are_such_as_its_templates_take() -> None:
    made = parser("mistral").feed("[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]add[ARGS]{}")
    ids = [call.id for call in made.tool_calls if call.id is not None]
    assert len(set(ids)) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)


def test_special_tokens_that_mark_a_call_stay_in_the_text() -> None:
    """``<|python_tag|>`` is a special token of Llama's; without it the call would be no call."""
    with_tag = Backend.from_str(backend().to_str())
    with_tag.add_special_tokens(["<|python_tag|>"])
    tokenizer = FastTokenizer(with_tag, special_tokens={}, chat_templates={})
    tag = tokenizer.token_to_id("<|python_tag|>")
    assert tag in tokenizer.special_ids
    call = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
    ids = [tag, *tokenizer.encode(call, add_special_tokens=False)]
    made = build_output_parser(Bare("llama3_json"), REGISTRY, tools=TOOLS)
    assert made.skip_special_tokens is False
    text = tokenizer.decode(ids, skip_special_tokens=made.skip_special_tokens)
    assert read(made, [text]) == ("", "", [("get_weather", '{"city": "Oslo"}')])
    assert build_output_parser(Bare(), REGISTRY).skip_special_tokens is True


REASONING = [
    ("<think>\nfirst\n</think>\n\nanswer", "", "first", "answer"),
    ("  \n<think>a</think>b", "", "a", "b"),
    ("first\n</think>\n\nanswer", "<|im_start|>assistant\n<think>\n", "first", "answer"),
    ("answer", "<think>\n\n</think>\n\n", "", "answer"),
    ("no thought <think>x</think>", "", "", "no thought <think>x</think>"),
    ("<think>cut off\n", "", "cut off\n", ""),
    ("<think>\n\n</think>\n\n", "", "", ""),
    ("<thin", "", "", "<thin"),
    ("", "", "", ""),
]


@pytest.mark.parametrize(("text", "prompt_end", "reasoning", "content"), REASONING)
def test_reasoning_ends_where_its_tag_is(
    text: str, prompt_end: str, reasoning: str, content: str
) -> None:
    for pieces in ([text], list(text)):
        made = build_output_parser(Bare(None, "think"), REGISTRY, prompt_end=prompt_end)
        assert read(made, pieces) == (content, reasoning, [])


def test_calls_are_read_after_the_reasoning_and_not_in_it() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    made = build_output_parser(Bare("hermes", "think"), REGISTRY, tools=TOOLS)
    text = f"<think>Perhaps {call}?</think>\n{call}"
    assert read(made, [text]) == ("", f"Perhaps {call}?", [("add", "{}")])


def test_what_is_not_asked_for_is_content() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    for asked in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS, "guided": True}):
        made = build_output_parser(Bare("hermes"), REGISTRY, **asked)
        assert read(made, [call]) == (call, "", [])


def test_names_askedwin_over_the_models() -> None:
    model: Any = Bare("llama3_json")
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    made = build_output_parser(model, REGISTRY, tools=TOOLS, tool_parser="hermes")
    assert read(made, [call]) == ("", "", [("add", "{}")])
    assert find_parser_names(model, REGISTRY) == ("llama3_json", None)
    assert find_parser_names(model, REGISTRY, tool_parser="hermes", reasoning_parser="think") == (
        "hermes",
        "think",
    )
    with pytest.raises(ConfigError, match="'hermess'; known: chatglm3, hermes, llama"):
        find_parser_names(model, REGISTRY, tool_parser="hermess")
    with pytest.raises(ConfigError, match="reasoning parser 'deep'; known: think"):
        find_parser_names(model, REGISTRY, reasoning_parser="deep")


def test_tools_without_a_parser_are_refused() -> None:
    with pytest.raises(RequestError, match="how SomeModel writes their calls is not known"):
        build_output_parser(Bare(), REGISTRY, tools=TOOLS)


def config(registry: Registry, architecture: str, **more: Any) -> Any:
    sizes = {
        "vocab_size": 100,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "head_dim": 16,
    }
    return registry.model_config(HFConfig({"architectures": [architecture], **sizes, **more}))


def test_families_name_their_parsers_where_it_is_certain() -> None:
    named = {
        "qwen2": config(REGISTRY, "Qwen2ForCausalLM"),
        "qwen3": config(REGISTRY, "Qwen3ForCausalLM"),
        "llama 3.1": config(
            REGISTRY, "LlamaForCausalLM", eos_token_id=[128001, 128008, 128009], vocab_size=128256
        ),
        "llama 2": config(REGISTRY, "LlamaForCausalLM", eos_token_id=2),
        "mistral": config(REGISTRY, "MistralForCausalLM", num_key_value_heads=4),
    }
    assert {name: (c.tool_parser, c.reasoning_parser) for name, c in named.items()} == {
        "qwen2": ("hermes", None),
        "qwen3": ("hermes", "think"),
        "llama 3.1": ("llama3_json", None),
        "llama 2": (None, None),
        "mistral": (None, None),
    }
