"""Anthropic's Messages API, through its official client."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import openai
import pytest
from serving import ServerProcess

if TYPE_CHECKING:  # its import takes 3 s of every process that collects
    import anthropic

pytestmark = pytest.mark.slow

HELLO: list[Any] = [{"role": "user", "content": "What is an engine?"}]
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "messages": HELLO}
GREEDY: dict[str, Any] = {"temperature": 0}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"name": "get_weather", "description": "Now.", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(agent: ServerProcess) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=agent.url, api_key="secret", max_retries=0) as client:
        yield client


TASK: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "The weather in Rome and Oslo?"}],
    "tools": [WEATHER],
    "extra_body": GREEDY,
}


def _check_calls(message: Any) -> None:
    thinking, text, *calls = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Two cities.")
    assert (text.type, text.text.strip()) == ("text", "Let me look.")
    assert [call.type for call in calls] == ["tool_use", "tool_use"]
    assert [call.input for call in calls] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert len({call.id for call in calls}) == 2
    assert message.stop_reason == "tool_use"
    # The pieces above and the end.
    assert message.usage.output_tokens == 17


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_calls_a_tool_and_answers_from_its_result(
    claude: anthropic.Anthropic, streamed: bool
) -> None:
    def ask(messages: list[Any]) -> Any:
        asked = {**TASK, "messages": messages}
        if not streamed:
            return claude.messages.create(**asked)
        with claude.messages.stream(**asked) as stream:
            return stream.get_final_message()

    messages = list(TASK["messages"])
    called = ask(messages)
    _check_calls(called)
    calls = [block for block in called.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": said}
        for call, said in zip(calls, ("Rainy.", "Sunny."), strict=True)
    ]
    messages += [called.to_param(), {"role": "user", "content": results}]
    answered = ask(messages)
    (text,) = answered.content
    assert text.text == "Sunny in Rome."
    assert answered.stop_reason == "end_turn"


def test_a_stream_has_its_events_in_order(
    agent: ServerProcess, claude: anthropic.Anthropic
) -> None:
    body = {**TASK, "stream": True, **GREEDY}
    del body["extra_body"]
    text = httpx.post(
        f"{agent.url}/v1/messages", json=body, headers={"x-api-key": "secret"}, timeout=60
    ).text
    document = httpx.get(f"{agent.url}/openapi.json").json()
    kinds = []
    for piece in text.removesuffix("\n\n").split("\n\n"):
        name, data = piece.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        jsonschema.validate(value, {**document, "$ref": "#/components/schemas/MessagesEvent"})
        kind = value.get("delta", value.get("content_block", {})).get("type", "")
        kinds.append(f"{value['type']} {kind}".strip())
    without_repeats = [kind for kind, _ in itertools.groupby(kinds)]
    block = ["content_block_start {}", "content_block_delta {}_delta", "content_block_stop"]
    assert without_repeats == [
        "message_start",
        *(line.format("thinking") for line in block),
        *(line.format("text") for line in block),
        *["content_block_start tool_use", "content_block_delta input_json_delta", block[2]] * 2,
        "message_delta",
        "message_stop",
    ]


def test_only_the_first_call_if_one_is_wanted(claude: anthropic.Anthropic) -> None:
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    message = claude.messages.create(**TASK, tool_choice=choice)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.stop_reason == "tool_use"


def test_thinking_is_turned_off(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**TASK, thinking={"type": "disabled"})
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]


@pytest.mark.parametrize(
    ("limit", "reason", "sequence"),
    [
        ({"max_tokens": 10}, "max_tokens", None),
        ({"stop_sequences": ["xyz", "Rome"]}, "stop_sequence", "Rome"),
    ],
)
def test_a_call_that_is_cut_off_is_left_out(
    claude: anthropic.Anthropic, limit: Any, reason: str, sequence: str | None
) -> None:
    message = claude.messages.create(**{**TASK, **limit})
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    with claude.messages.stream(**{**TASK, **limit}) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == (reason, sequence)


def test_a_key_comes_in_either_header(agent: ServerProcess) -> None:
    import anthropic

    count = {"messages": HELLO}
    url = f"{agent.url}/v1/messages/count_tokens"
    for headers in (
        {"x-api-key": "secret"},
        {"Authorization": "Bearer secret"},
        {"Authorization": "Bearer unknown", "x-api-key": "secret"},
    ):
        assert httpx.post(url, json=count, headers=headers).status_code == 200
    for headers in ({}, {"x-api-key": "secre"}, {"Authorization": "secret"}):
        refused = httpx.post(url, json=count, headers=headers)
        assert refused.status_code == 401
        assert refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "authentication_error"
    with (
        anthropic.Anthropic(base_url=agent.url, auth_token="unknown", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError, match="not one that this server knows"),
    ):
        stranger.messages.create(**ASKED)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"system": "Be brief."},
        {"system": [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}]},
        {"tools": [WEATHER], "tool_choice": {"type": "any"}},
        {"tools": [WEATHER], "tool_choice": {"type": "none"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": [*HELLO, {"role": "assistant", "content": "An engine"}]},
    ],
)
def test_count_tokens_is_the_usage(client: anthropic.Anthropic, more: Any) -> None:
    prompt = {"model": "tiny", "messages": HELLO, **more}
    counted = client.messages.count_tokens(**prompt).input_tokens
    for _ in range(2):
        usage = client.messages.create(**prompt, max_tokens=4).usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
        if "system" not in more or isinstance(more["system"], str):
            assert usage.input_tokens == counted


def test_the_prompt_is_that_of_the_chat(client: anthropic.Anthropic, server: ServerProcess) -> None:
    """Blocks become the messages that a chat's client would send."""
    call = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Rome"}}
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, call]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "Sunny", "is_error": False},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    function = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    calls: list[Any] = [{"id": "c1", "type": "function", "function": function}]
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
        {"role": "user", "content": "So?"},
    ]
    tool: Any = {"name": "get_weather", "description": "Now.", "parameters": SCHEMA}
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as chats:
        chat = chats.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=[{"type": "function", "function": tool}],
            tool_choice="required",
            max_tokens=1,
        )
    message = client.messages.create(
        model="tiny",
        max_tokens=1,
        system="Be brief.",
        messages=turns,
        tools=[WEATHER],
        tool_choice={"type": "any"},
    )
    assert chat.usage is not None
    assert message.usage.input_tokens == chat.usage.prompt_tokens


def test_a_tool_that_is_named_is_called(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "tool", "name": "get_weather"}
    asked = {**ASKED, "max_tokens": 200, "tools": [WEATHER], "tool_choice": choice}
    (block,) = client.messages.create(**asked, extra_body=GREEDY).content
    assert block.type == "tool_use"
    assert block.input["city"] in ("Rome", "Oslo")


def test_output_of_a_schema(client: anthropic.Anthropic) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    message = client.messages.create(
        **{**ASKED, "max_tokens": 200}, output_config=config, extra_body=GREEDY
    )
    (block,) = message.content
    assert block.type == "text"
    assert json.loads(block.text)["city"] in ("Rome", "Oslo")


def test_the_last_message_is_continued(client: anthropic.Anthropic, server: ServerProcess) -> None:
    prefill = {"role": "assistant", "content": "An engine"}
    message = client.messages.create(**{**ASKED, "messages": [*HELLO, prefill]}, extra_body=GREEDY)
    chat = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={
            "messages": [*HELLO, prefill],
            "continue_final_message": True,
            "max_tokens": 8,
            **GREEDY,
        },
        timeout=60,
    ).json()
    assert message.content[0].text == chat["choices"][0]["message"]["content"]  # type: ignore[union-attr]
    assert message.usage.input_tokens == chat["usage"]["prompt_tokens"]


FILE = {"type": "image", "source": {"type": "file", "file_id": "a"}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "content.0.source has 'image', "),
        ({"messages": [{"role": "user", "content": [FILE]}]}, "messages.0.content.0.*'file'"),
        (
            {"messages": [{"role": "user", "content": [{**IMAGE, "type": "text", "text": "a"}]}]},
            r"messages\.0\.content\.0\.source: not supported here",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a", "image": "b"}]}
                ]
            },
            r"messages\.0\.content\.0\.image: .*give what it shows a part of its own",
        ),
        ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "messages.0.content.*'image'"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "hosted tools are not offered, only .* 'custom', got 'web_search_20250305'$",
        ),
        ({"max_tokens": None}, "max_tokens"),
        ({"container": "c"}, "container: not supported here"),
        ({"mcp_servers": [{}]}, "mcp_servers: only an empty one"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: this field is required"),
        ({"top_k": "five"}, "top_k: .*'five'"),
        ({"unknown": 1}, "unknown: unknown field"),
        (
            {
                "tools": [{"name": "f", "input_schema": {"properties": {"a": {"type": "strin"}}}}],
                "tool_choice": {"type": "tool", "name": "f"},
            },
            "tools.0.input_schema.properties.a",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}},
            "output_config.format.schema",
        ),
    ],
)
def test_what_is_wrong_is_named(server: ServerProcess, wrong: Any, said: str) -> None:
    response = httpx.post(f"{server.url}/v1/messages", json={**ASKED, **wrong}, timeout=60)
    assert response.status_code == 400
    refusal = response.json()
    assert refusal["type"] == "error"
    assert refusal["request_id"] == response.headers["x-request-id"]
    assert refusal["error"]["type"] == "invalid_request_error"
    assert re.search(said, refusal["error"]["message"]), refusal


def test_errors_have_anthropics_types(client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**{**ASKED, "model": "other"})
    assert unknown.value.request_id
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    long: list[Any] = [{"role": "user", "content": "word " * 2000}]
    with pytest.raises(anthropic.BadRequestError, match="the longest taken here"):
        client.messages.create(**{**ASKED, "messages": long})
    unfinished = [
        *HELLO,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
        },
    ]
    with pytest.raises(anthropic.BadRequestError, match="followed by its tool_result"):
        client.messages.create(**{**ASKED, "messages": unfinished})
