"""Tool calls and reasoning that a model writes of its own accord, through the official client."""

from __future__ import annotations

import json
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
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
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


def test_without_tools_it_is_text(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**ASKED, temperature=0).choices
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    assert "<tool_call>" in (choice.message.content or "")
