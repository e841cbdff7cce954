"""Tool calls and reasoning that a model writes of its own accord, through the official client."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from reciting_model import write_reciting_model
from serving import ServerProcess

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "The weather in Rome and Oslo?"}],
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    pieces = ["<think>", "Two", " cities.", "</think>", "Let me", " look.", "<tool_call>"]
    pieces += ['{"name": "get_', 'weather", "argu', 'ments": {"city": "Ro', 'me"}}', "</tool_call>"]
    pieces += ["\n<tool_call>", '{"name": "get_weather", ', '"arguments": {"city": "Oslo"}}']
    pieces += ["</tool_call>\n"]
    model = write_reciting_model(tmp_path_factory.mktemp("reciting") / "model", pieces)
    options = ["--served-model-name", "tiny", "--kv-cache-memory", "16MiB"]
    options += ["--tool-parser", "hermes", "--reasoning-parser", "think"]
    with (
        ServerProcess(model, *options).wait_ready() as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_a_whole_answer(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**ASKED, tools=[TOOL], temperature=0).choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content or "").strip() == "Let me look."
    assert choice.message.model_extra == {"reasoning_content": "Two cities."}
    calls = choice.message.tool_calls or []
    assert [call.function.name for call in calls] == ["get_weather", "get_weather"]
    cities = [json.loads(call.function.arguments)["city"] for call in calls]
    assert cities == ["Rome", "Oslo"]
    assert len({call.id for call in calls}) == 2


def test_a_stream(client: openai.OpenAI) -> None:
    content = reasoning = ""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    last = None
    stream = client.chat.completions.create(**ASKED, tools=[TOOL], temperature=0, stream=True)
    for chunk in stream:
        (choice,) = chunk.choices
        last = choice.finish_reason
        content += choice.delta.content or ""
        reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
        for piece in choice.delta.tool_calls or ():
            names.setdefault(piece.index, piece.function.name)
            arguments[piece.index] = arguments.get(piece.index, "") + piece.function.arguments
    assert last == "tool_calls"
    assert (content.strip(), reasoning) == ("Let me look.", "Two cities.")
    assert names == {0: "get_weather", 1: "get_weather"}
    assert [json.loads(text)["city"] for text in arguments.values()] == ["Rome", "Oslo"]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_left_out_if_not_wanted(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {**ASKED, "extra_body": {"include_reasoning": False}}
    if stream:
        chunks = client.chat.completions.create(**options, stream=True)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        extras = [delta.model_extra for delta in deltas]
        content = "".join(delta.content or "" for delta in deltas)
    else:
        (choice,) = client.chat.completions.create(**options).choices
        extras, content = [choice.message.model_extra], choice.message.content or ""
    assert not any(extras)
    assert content.startswith("Let me look.")


def test_only_the_first_call_is_reported_if_one_is_wanted(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**ASKED, "tools": [TOOL], "temperature": 0}
    options["parallel_tool_calls"] = False
    (choice,) = client.chat.completions.create(**options).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    chunks = client.chat.completions.create(**options, stream=True)
    pieces = [p for chunk in chunks for p in chunk.choices[0].delta.tool_calls or ()]
    assert {piece.index for piece in pieces} == {0}
    text = "".join((piece.function and piece.function.arguments) or "" for piece in pieces)
    assert json.loads(text) == {"city": "Rome"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("limit", "reason", "arguments"),
    [
        ({"stop": ["Rome"]}, "stop", ['{"city": "']),
        ({"stop": ["Oslo"]}, "stop", ['{"city": "Rome"}', '{"city": "']),
        ({"stop": ["</tool_call>\n"]}, "tool_calls", ['{"city": "Rome"}']),
        # The tenth token ends within the first call's arguments.
        ({"max_tokens": 10}, "length", ['{"city": "Ro']),
    ],
    ids=["in a call", "in the second call", "after a call", "length"],
)
def test_a_call_that_was_cut_off_is_not_to_be_run(
    client: openai.OpenAI, stream: bool, limit: Any, reason: str, arguments: list[str]
) -> None:
    options: dict[str, Any] = {**ASKED, **limit, "tools": [TOOL], "temperature": 0}
    found: dict[int, str] = {}
    if stream:
        for chunk in client.chat.completions.create(**options, stream=True):
            (piece,) = chunk.choices
            last = piece.finish_reason
            for call in piece.delta.tool_calls or ():
                found[call.index] = found.get(call.index, "") + call.function.arguments
    else:
        (choice,) = client.chat.completions.create(**options).choices
        last = choice.finish_reason
        calls = choice.message.tool_calls or ()
        found = {index: call.function.arguments for index, call in enumerate(calls)}
    assert (last, list(found.values())) == (reason, arguments)


@pytest.mark.parametrize("choice", [None, "auto"])
@pytest.mark.parametrize(
    "guide",
    [
        {"guided_json": {"type": "object"}},
        {"guided_regex": "a+"},
        {"guided_choice": ["a"]},
        {"guided_grammar": 'start: "a"'},
    ],
    ids=lambda guide: "-".join(guide),
)
def test_a_guided_text_has_no_room_for_calls(
    client: openai.OpenAI, guide: dict[str, Any], choice: str | None
) -> None:
    (field,) = guide
    with pytest.raises(openai.BadRequestError, match=f"{field} says what the text must be") as no:
        client.chat.completions.create(
            **ASKED, tools=[TOOL], extra_body={**guide, "tool_choice": choice}
        )
    assert (no.value.code, no.value.param) == ("conflicting_fields", field)


SKY = {
    "type": "object",
    "properties": {"sky": {"enum": ["clear", "grey"]}},
    "required": ["sky"],
    "additionalProperties": False,
}
FORMATS: list[Any] = [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "sky", "schema": SKY}},
]


@pytest.fixture(scope="module")
def undecided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A model that would say something before it calls, and knows an answer in JSON."""
    # Each begins where the grammar leaves a choice: what it leaves none of is written in the
    # tokens of the tokenizer, a character each.
    pieces = ["Let me look.", "<tool_call>", '\n{"name": "get_weather", "arguments":']
    pieces += [' {"city": "Ro', 'me"}}', "\n</tool_call>"]
    pieces += ['\n<tool_call>\n{"name": "now", "arguments":', " {}}", "</tool_call>\n"]
    pieces += ['{"sky":', ' "clear"}']
    pieces += [*'{}[]":, <>/_\n', *string.ascii_lowercase]
    model = write_reciting_model(tmp_path_factory.mktemp("undecided") / "model", pieces)
    options = ["--served-model-name", "tiny", "--kv-cache-memory", "16MiB"]
    with (
        ServerProcess(model, *options, "--tool-parser", "hermes").wait_ready() as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


NOW: Any = {"type": "function", "function": {"name": "now"}}
# The tokens that begin a call and the answer in JSON; <unk>, </s> and <start> come before the
# pieces. Whatever it has begun it goes on with: that is 8 more probable than all else.
TO_CALL = {"logit_bias": {"4": 1, "1": 2}}
TO_ANSWER = {"logit_bias": {"12": 1}}


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form["type"])
@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}], ids=["unset", "auto"])
def test_a_text_is_calls_or_an_answer_in_the_format(
    undecided: openai.OpenAI, form: Any, choice: Any
) -> None:
    asked = {**ASKED, **choice, **TO_CALL, "tools": [TOOL, NOW], "temperature": 0}
    (called,) = undecided.chat.completions.create(**asked, response_format=form).choices
    assert called.finish_reason == "tool_calls"
    assert not called.message.content
    calls = [call.function for call in called.message.tool_calls or ()]
    assert [call.name for call in calls] == ["get_weather", "now"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Rome"}, {}]

    asked |= TO_ANSWER
    (answered,) = undecided.chat.completions.create(**asked, response_format=form).choices
    assert answered.finish_reason == "stop"
    assert answered.message.tool_calls is None
    assert json.loads(answered.message.content or "") == {"sky": "clear"}

    text = ""
    for chunk in undecided.chat.completions.create(**asked, response_format=form, stream=True):
        assert not chunk.choices[0].delta.tool_calls
        text += chunk.choices[0].delta.content or ""
    assert json.loads(text) == {"sky": "clear"}


@pytest.mark.parametrize(
    ("schema", "parameters", "param"),
    [
        ({"type": "strin"}, {}, "response_format.json_schema.schema"),
        (SKY, {"properties": {"a": {"type": "strin"}}}, "tools.1.function.parameters.properties.a"),
    ],
)
def test_what_cannot_be_kept_of_a_format_beside_calls_is_named(
    undecided: openai.OpenAI, schema: Any, parameters: Any, param: str
) -> None:
    wrong: Any = {"type": "function", "function": {"name": "wrong", "parameters": parameters}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as no:
        undecided.chat.completions.create(**ASKED, tools=[TOOL, wrong], response_format=form)
    assert no.value.param == param


def test_a_format_beside_calls_that_are_json_themselves_is_refused(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = write_reciting_model(tmp_path_factory.mktemp("json") / "model", ["a"])
    options = ["--served-model-name", "tiny", "--kv-cache-memory", "16MiB"]
    options += ["--tool-parser", "llama3_json"]
    with (
        ServerProcess(model, *options).wait_ready() as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match=r"no room for calls .* 'llama3_json'") as no,
    ):
        client.chat.completions.create(**ASKED, tools=[TOOL], response_format=FORMATS[0])
    assert (no.value.code, no.value.param) == ("conflicting_fields", "response_format")


def test_without_tools_it_is_text(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**ASKED, temperature=0).choices
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    assert "<tool_call>" in (choice.message.content or "")


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A model that thinks, then talks, and has letters with which it can be made to call."""
    pieces = ["<think>", "Two", " cities.", "</think>", "Let me look."]
    pieces += [*'{}[]":, <>/_\n', *string.ascii_lowercase]
    model = write_reciting_model(tmp_path_factory.mktemp("thinking") / "model", pieces)
    options = ["--served-model-name", "tiny", "--kv-cache-memory", "16MiB"]
    options += ["--tool-parser", "hermes", "--reasoning-parser", "think"]
    with ServerProcess(model, *options).wait_ready() as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "look"}}],
    ids=["required", "named"],
)
def test_calls_that_must_come_follow_the_reasoning(
    thinking: ServerProcess, choice: Any, thinks: bool, stream: bool
) -> None:
    schema = {"type": "object", "properties": {"at": {"const": "sky"}}, "required": ["at"]}
    schema["additionalProperties"] = False
    asked: dict[str, Any] = {
        **ASKED,
        "tools": [{"type": "function", "function": {"name": "look", "parameters": schema}}],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": thinks}},
    }
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0) as client:
        if stream:
            with client.chat.completions.stream(**asked) as events:
                (answer,) = events.get_final_completion().choices
        else:
            (answer,) = client.chat.completions.create(**asked).choices
    message: Any = answer.message
    assert answer.finish_reason == "tool_calls"
    reasoning = (message.model_extra or {}).get("reasoning_content")
    assert reasoning == ("Two cities." if thinks else None)
    assert not message.content
    (call,) = message.tool_calls
    assert call.function.name == "look"
    assert json.loads(call.function.arguments) == {"at": "sky"}
