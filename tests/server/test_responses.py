"""OpenAI's Responses API, through its official client."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from serving import ServerProcess

pytestmark = pytest.mark.slow

ASKED: dict[str, Any] = {"model": "tiny", "input": "What is an engine?", "temperature": 0}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Now.",
    "parameters": SCHEMA,
    "strict": True,
}
QUESTION: dict[str, Any] = {"role": "user", "content": "The weather in Rome and Oslo?"}
TASK: dict[str, Any] = {"model": "tiny", "temperature": 0, "tools": [WEATHER]}


def _client(server: ServerProcess, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def codex(agent: ServerProcess) -> Iterator[openai.OpenAI]:
    with _client(agent, "secret") as client:
        yield client


def _results(response: Any) -> list[Any]:
    """Check what the model does first; return the results of its calls."""
    reasoning, message, *calls = response.output
    assert reasoning.content[0].text == "Two cities."
    assert message.content[0].text.strip() == "Let me look."
    assert [call.type for call in calls] == ["function_call", "function_call"]
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Rome", "Oslo"]
    assert {item.status for item in response.output} == {"completed"}
    assert response.status == "completed"
    usage = response.usage
    # The pieces that it recites and the end; of the first ones two are between the tags.
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (17, 2)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    return [
        {"type": "function_call_output", "call_id": call.call_id, "output": said}
        for call, said in zip(calls, ("Rainy.", "Sunny."), strict=True)
    ]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_an_agent_calls_a_tool_and_answers_from_its_result(
    codex: openai.OpenAI, streamed: bool, stored: bool
) -> None:
    def ask(items: list[Any], **more: Any) -> Any:
        asked = {**TASK, "input": items, "store": stored, **more}
        if not streamed:
            return codex.responses.create(**asked)
        with codex.responses.stream(**asked) as stream:
            return stream.get_final_response()

    called = ask([QUESTION])
    results = _results(called)
    if stored:
        answered = ask(results, previous_response_id=called.id)
        assert answered.previous_response_id == called.id
    else:
        answered = ask([QUESTION, *called.output, *results])
    assert answered.output_text == "Sunny in Rome."
    assert [item.type for item in answered.output] == ["message"]
    # The prompt is the whole conversation: of tokens that the tokenizer has, that is all of it.
    assert answered.usage.input_tokens > called.usage.input_tokens


def test_a_stream_has_its_events_in_order(agent: ServerProcess) -> None:
    body = {**TASK, "input": [QUESTION], "stream": True}
    headers = {"Authorization": "Bearer secret"}
    text = httpx.post(f"{agent.url}/v1/responses", json=body, headers=headers, timeout=60).text
    document = httpx.get(f"{agent.url}/openapi.json").json()
    kinds = []
    for number, piece in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = piece.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        assert value["sequence_number"] == number
        jsonschema.validate(value, {**document, "$ref": "#/components/schemas/ResponseEvent"})
        kinds.append(value["type"].removeprefix("response."))
    added, done = "output_item.added", "output_item.done"
    call = ["function_call_arguments.delta", "function_call_arguments.done"]

    def part(kind: str) -> list[str]:
        return ["content_part.added", f"{kind}.delta", f"{kind}.done", "content_part.done"]

    assert [kind for kind, _ in itertools.groupby(kinds)] == [
        *("created", "in_progress"),
        *(added, *part("reasoning_text"), done),
        *(added, *part("output_text"), done),
        *[added, *call, done] * 2,
        "completed",
    ]


def test_reasoning_is_turned_off(codex: openai.OpenAI) -> None:
    response = codex.responses.create(**TASK, input=[QUESTION], reasoning={"effort": "none"})
    assert [item.type for item in response.output] == ["message", *["function_call"] * 2]
    assert response.reasoning is not None
    assert response.reasoning.effort == "none"
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 0


def test_a_response_is_its_keys_alone(agent: ServerProcess, codex: openai.OpenAI) -> None:
    made = codex.responses.create(**TASK, input=[QUESTION], metadata={"run": "7"})
    assert codex.responses.retrieve(made.id) == made
    with _client(agent, "other") as other:
        with pytest.raises(openai.NotFoundError, match="is not stored here"):
            other.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError, match="is not stored here"):
            other.responses.delete(made.id)
        with pytest.raises(openai.BadRequestError, match="is not stored here") as no:
            other.responses.create(**TASK, input="So?", previous_response_id=made.id)
        assert no.value.code == "previous_response_not_found"
        assert no.value.param == "previous_response_id"
    codex.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="deleted"):
        codex.responses.retrieve(made.id)
    unstored = codex.responses.create(**TASK, input=[QUESTION], store=False)
    with pytest.raises(openai.NotFoundError, match="not to be stored"):
        codex.responses.retrieve(unstored.id)


def test_the_oldest_responses_are_dropped(codex: openai.OpenAI) -> None:
    def answer(**more: Any) -> Any:
        return codex.responses.create(**{**TASK, "input": "a", "max_output_tokens": 1, **more})

    names = [answer().id for _ in range(4)]
    codex.responses.retrieve(names[0])
    names.append(answer().id)
    # The fifth takes the place of the one that was not used for longest.
    with pytest.raises(openai.NotFoundError):
        codex.responses.retrieve(names[1])
    for name in (names[0], *names[2:]):
        codex.responses.retrieve(name)
    # Bytes count too: this one needs nearly all of them, and the next has no place at all.
    size = len(codex.responses.with_raw_response.retrieve(names[-1]).content)
    assert answer(metadata={"a": "a" * (2**14 - size - 200)}).model_extra == {"store": True}
    with pytest.raises(openai.NotFoundError):
        codex.responses.retrieve(names[-1])
    assert answer(metadata={"a": "a" * 20000}).model_extra == {"store": False}


def test_the_settings_come_back(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="tiny",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "What is"}]}],
        instructions="Be brief.",
        max_output_tokens=4,
        temperature=0.5,
        top_p=0.9,
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        include=["reasoning.encrypted_content"],
        metadata={"run": "7"},
        truncation="disabled",
        user="somebody",
    )
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 4
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.9, 4)
    assert (response.instructions, response.metadata) == ("Be brief.", {"run": "7"})
    assert (response.user, response.truncation) == ("somebody", "disabled")
    assert response.text is not None
    assert response.text.verbosity == "low"


def test_items_are_the_messages_of_a_chat(client: openai.OpenAI) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    items: list[Any] = [
        {"role": "developer", "content": "Be exact."},
        QUESTION,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "?"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
        {"type": "function_call", "call_id": "c1", **function},
        {"type": "function_call_output", "call_id": "c1", "output": "Sunny"},
        {"type": "message", "role": "user", "content": "So?"},
    ]
    calls: list[Any] = [{"id": "c1", "type": "function", "function": function}]
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Be exact."},
        QUESTION,
        {"role": "assistant", "content": "Let me look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
        {"role": "user", "content": "So?"},
    ]
    tool: Any = {key: value for key, value in WEATHER.items() if key not in ("type", "strict")}
    chat = client.chat.completions.create(
        model="tiny",
        messages=messages,
        tools=[{"type": "function", "function": tool}],
        tool_choice="required",
        max_tokens=1,
    )
    response = client.responses.create(
        model="tiny",
        instructions="Be brief.",
        input=items,
        tools=[WEATHER],  # type: ignore[list-item]
        tool_choice="required",
        max_output_tokens=1,
    )
    assert chat.usage is not None
    assert response.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "json_schema"}])
def test_output_of_a_schema(server: ServerProcess, client: openai.OpenAI, form: Any) -> None:
    if form["type"] == "json_schema":
        form = {**form, "name": "place", "schema": SCHEMA, "strict": True}
    # The closing brace is made likely, or the object would be long.
    brace = httpx.post(f"{server.url}/tokenize", json={"prompt": "}"}).json()["tokens"][0]
    extra = {"logit_bias": {str(brace): 50}}
    asked = {**ASKED, "max_output_tokens": 200}
    made = client.responses.create(**asked, text={"format": form}, extra_body=extra)
    assert isinstance(json.loads(made.output_text), dict)
    if form["type"] == "json_schema":
        jsonschema.validate(json.loads(made.output_text), SCHEMA)


def test_a_function_that_is_named_is_called(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "name": "get_weather"}
    asked = {**ASKED, "max_output_tokens": 200, "tools": [WEATHER], "tool_choice": choice}
    (call,) = client.responses.create(**asked, parallel_tool_calls=False).output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)


def test_only_allowed_functions_are_called(server: ServerProcess, client: openai.OpenAI) -> None:
    others = [{**WEATHER, "name": f"get_{name}"} for name in ("time", "news")]
    asked: dict[str, Any] = {**ASKED, "max_output_tokens": 200, "parallel_tool_calls": False}
    choice = ALLOWED["get_weather"]
    tools = [others[0], WEATHER, others[1]]
    made = client.responses.create(**asked, tools=tools, tool_choice=choice)
    (call,) = made.output
    assert call.type == "function_call"
    assert call.name == "get_weather"
    assert [tool.name for tool in made.tools] == ["get_time", "get_weather", "get_news"]  # type: ignore[union-attr]
    assert made.tool_choice.to_dict() == choice  # type: ignore[union-attr]
    # The model is not told of the others: the prompt is that of the one tool.
    alone = client.responses.create(**asked, tools=[WEATHER], tool_choice="required")
    assert made.usage is not None
    assert alone.usage is not None
    assert made.usage.input_tokens == alone.usage.input_tokens
    # In a chat it is written otherwise, and an error names the tool by its own place.
    functions = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["parameters"]}}
        for tool in tools
    ]
    functions[1]["function"]["parameters"] = {"properties": {"a": {"type": "strin"}}}
    named = [{"type": "function", "function": {"name": "get_weather"}}]
    body = {
        "model": "tiny",
        "messages": [QUESTION],
        "tools": functions,
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": named},
        },
    }
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools.1.function.parameters.properties.a"


@pytest.mark.parametrize("streamed", [False, True])
def test_log_probabilities_are_those_of_a_chat(client: openai.OpenAI, streamed: bool) -> None:
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": ASKED["input"]}],
        temperature=0,
        max_tokens=12,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    expected = [each.model_dump() for each in logprobs.content]
    asked: dict[str, Any] = {**ASKED, "max_output_tokens": 12, "top_logprobs": 2}
    asked["include"] = ["message.output_text.logprobs"]
    pieces: list[Any] = []
    if streamed:
        for event in client.responses.create(**asked, stream=True):
            if event.type == "response.output_text.delta":
                pieces += [each.to_dict() for each in event.logprobs]
            elif event.type == "response.output_text.done":
                assert [each.to_dict() for each in event.logprobs] == pieces
            elif event.type in ("response.completed", "response.incomplete"):
                made = event.response
    else:
        made = client.responses.create(**asked)
    (message,) = made.output
    assert message.type == "message"
    (content,) = message.content
    assert content.type == "output_text"
    found = [each.to_dict() for each in content.logprobs or ()]
    assert found == expected[: len(found)]
    # What is left is the end of the text, which is no text.
    assert len(expected) - len(found) <= 1
    assert made.top_logprobs == 2
    if streamed:
        assert pieces == found


@pytest.mark.parametrize("streamed", [False, True])
def test_log_probabilities_are_of_the_text_alone(codex: openai.OpenAI, streamed: bool) -> None:
    asked = {**TASK, "input": [QUESTION], "include": ["message.output_text.logprobs"]}
    if streamed:
        with codex.responses.stream(**asked) as stream:
            made = stream.get_final_response()
    else:
        made = codex.responses.create(**asked)
    _results(made)
    (content,) = made.output[1].content
    assert [each.token for each in content.logprobs] == ["Let me", " look."]
    assert all(each.top_logprobs == [] for each in content.logprobs)
    without = codex.responses.create(**TASK, input=[QUESTION])
    assert without.output[1].content[0].logprobs == []  # type: ignore[union-attr]


def test_the_conversation_before_a_response_is_listed(
    agent: ServerProcess, codex: openai.OpenAI
) -> None:
    called = codex.responses.create(**TASK, input=[QUESTION], instructions="Be brief.")
    answered = codex.responses.create(
        **TASK, input=_results(called), previous_response_id=called.id
    )
    items = [item.to_dict() for item in codex.responses.input_items.list(answered.id, order="asc")]
    kinds = [
        "message",
        "reasoning",
        "message",
        *["function_call"] * 2,
        *["function_call_output"] * 2,
    ]
    assert [item["type"] for item in items] == kinds
    assert items[0]["content"] == [{"type": "input_text", "text": QUESTION["content"]}]
    assert items[1]["content"] == [{"type": "reasoning_text", "text": "Two cities."}]
    assert items[2]["role"] == "assistant"
    assert [json.loads(item["arguments"])["city"] for item in items[3:5]] == ["Rome", "Oslo"]
    assert [item["output"] for item in items[5:]] == ["Rainy.", "Sunny."]
    assert [item["call_id"] for item in items[3:5]] == [item["call_id"] for item in items[5:]]
    # In pages, the last one first; ids stay the same.
    page = codex.responses.input_items.list(answered.id, limit=3)
    names = [item.id for item in page.data]
    assert (page.has_more, page.first_id, page.last_id) == (True, names[0], names[-1])  # type: ignore[attr-defined]
    assert [item.id for item in page] == [item["id"] for item in reversed(items)]
    document = httpx.get(f"{agent.url}/openapi.json").json()
    headers = {"Authorization": "Bearer secret"}
    url = f"{agent.url}/v1/responses/{answered.id}/input_items"
    answer = httpx.get(url, headers=headers).json()
    jsonschema.validate(answer, {**document, "$ref": "#/components/schemas/InputItems"})
    # As input they are the same conversation.
    again = codex.responses.create(**TASK, input=items)  # type: ignore[arg-type]
    assert again.output_text == answered.output_text
    assert again.usage is not None
    assert answered.usage is not None
    assert again.usage.input_tokens == answered.usage.input_tokens
    with _client(agent, "other") as other, pytest.raises(openai.NotFoundError):
        other.responses.input_items.list(answered.id)
    for query in ("limit=0", "limit=101", "limit=x", "limit=-1", "order=up", "after=msg_1"):
        refused = httpx.get(f"{url}?{query}", headers=headers)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == query.partition("=")[0]


def test_the_oldest_turns_are_left_out_of_what_is_too_long(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    word = "engine " * 25
    first = {"role": "system", "content": "Be brief."}
    turns = [{"role": role, "content": word} for role in ("user", "assistant")] * 8
    last = {"role": "user", "content": "So?"}

    def length(count: int) -> int:
        """Of the prompt without the oldest turns."""
        messages = [first, *turns[2 * count :], last]
        body = {"messages": messages}
        return int(httpx.post(f"{server.url}/tokenize", json=body).json()["count"])

    asked: dict[str, Any] = {
        "model": "tiny",
        "max_output_tokens": 1,
        "input": [first, *turns, last],
    }
    with pytest.raises(openai.BadRequestError, match="the longest taken here"):
        client.responses.create(**asked)
    usage = client.responses.create(**asked, truncation="auto").usage
    assert usage is not None
    # The model's length less one for the answer.
    fitting = [tokens for tokens in map(length, range(9)) if tokens <= 1023]
    assert 1 < len(fitting) < 9
    assert usage.input_tokens == max(fitting)
    with pytest.raises(openai.BadRequestError, match="the longest taken here"):
        client.responses.create(**{**asked, "input": word * 20}, truncation="auto")


ALLOWED = {
    name: {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": name}],
    }
    for name in ("get_weather", "other")
}
IMAGE = {"type": "input_image", "image_url": "https://example.org/a.png", "detail": "auto"}


@pytest.mark.parametrize(
    ("wrong", "param", "said"),
    [
        (
            {"tools": [{"type": "web_search", "search_context_size": "low"}]},
            "tools.0.type",
            "tools.0.type: hosted tools are not offered, only those of type 'function', got "
            "'web_search'",
        ),
        (
            {"input": [{"role": "user", "content": [IMAGE]}]},
            "input.0.content.0.image_url",
            "takes text alone",
        ),
        (
            {
                "input": [
                    {"role": "user", "content": [{**IMAGE, "type": "input_text", "text": "a"}]}
                ]
            },
            "input.0.content.0.image_url",
            "give what it shows a part of its own",
        ),
        (
            {"input": [{"role": "assistant", "content": [IMAGE]}]},
            "input.0.content.0.type",
            "got 'input_image'",
        ),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input.0", "item_reference"),
        ({"background": True}, "background", "only false is supported"),
        ({"conversation": "c"}, "conversation", "not supported here"),
        ({"top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"include": ["message.input_audio"]}, "include.0", "input_audio"),
        ({"tools": [WEATHER], "tool_choice": ALLOWED["other"]}, "tool_choice", "allows 'other'"),
        ({"tool_choice": ALLOWED["get_weather"]}, "tool_choice", "allows 'get_weather'"),
        ({"unknown": 1}, "unknown", "unknown field"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "is not stored here"),
        ({"input": "word " * 2000}, "input", "the longest taken here"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "strin"}}}},
            "text.format.schema",
            "text.format.schema",
        ),
        (
            {
                "tools": [{**WEATHER, "parameters": {"properties": {"a": {"type": "strin"}}}}],
                "tool_choice": "required",
            },
            "tools.0.parameters.properties.a",
            "tools.0.parameters",
        ),
    ],
)
def test_what_is_wrong_is_named(
    server: ServerProcess, wrong: Any, param: str | None, said: str
) -> None:
    response = httpx.post(f"{server.url}/v1/responses", json={**ASKED, **wrong}, timeout=60)
    assert response.status_code == 400
    error = response.json()["error"]
    assert re.search(re.escape(said), error["message"]), error
    assert param is None or error["param"] == param


def test_a_stored_response_is_not_streamed(server: ServerProcess) -> None:
    refused = httpx.get(f"{server.url}/v1/responses/resp_1?stream=true")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
