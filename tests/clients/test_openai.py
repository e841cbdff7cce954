"""The official client, of Python."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from scripted import AGAIN, FIRST, LONGEST, THOUGHT, TOLD

ASK: Any = {"role": "user", "content": "What is it?"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


class Sky(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    sky: Literal["clear", "grey"]
    wet: bool


@pytest.fixture(scope="module")
def client(scripted: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=scripted, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def real(smollm2: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=smollm2, api_key="none", max_retries=0) as client:
        yield client


def test_several_turns(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(model="scripted", messages=[ASK]).choices
    assert (choice.message.content, choice.finish_reason) == (FIRST, "stop")
    # The whole message goes back, with what it has beside the text.
    messages: Any = [ASK, choice.message, {"role": "user", "content": "And?"}]
    answer = client.chat.completions.create(model="scripted", messages=messages)
    assert answer.choices[0].message.content == AGAIN
    dumped: Any = [ASK, choice.message.model_dump(), {"role": "user", "content": "And?"}]
    answer = client.chat.completions.create(model="scripted", messages=dumped)
    assert answer.choices[0].message.content == AGAIN


def test_streams(client: openai.OpenAI) -> None:
    options: Any = {"model": "scripted", "messages": [ASK]}
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == FIRST
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    with client.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"content.delta", "content.done"} <= kinds
    assert message.content == FIRST
    assert (message.model_extra or {})["reasoning_content"] == THOUGHT


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_read(client: openai.OpenAI, stream: bool) -> None:
    options: Any = {"model": "scripted", "tools": [TOOL]}
    if stream:
        with client.chat.completions.stream(**options, messages=[ASK]) as events:
            for _ in events:
                pass
            (choice,) = events.get_final_completion().choices
    else:
        (choice,) = client.chat.completions.create(**options, messages=[ASK]).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    answer = client.chat.completions.create(**options, messages=[ASK, choice.message, result])
    assert answer.choices[0].message.content == TOLD


def test_structured_output(real: openai.OpenAI) -> None:
    options: Any = {"model": "smollm2", "messages": [ASK], "response_format": Sky}
    (choice,) = real.chat.completions.parse(**options).choices
    assert isinstance(choice.message.parsed, Sky)
    with real.chat.completions.stream(**options) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(streamed, Sky)
    # A parsed message goes back too.
    messages: Any = [ASK, choice.message, ASK]
    again = real.chat.completions.parse(model="smollm2", messages=messages, response_format=Sky)
    assert isinstance(again.choices[0].message.parsed, Sky)


def test_a_tool_made_of_a_class(real: openai.OpenAI) -> None:
    options: Any = {"model": "smollm2", "messages": [ASK], "tool_choice": "required"}
    options["tools"] = [openai.pydantic_function_tool(Sky)]
    (choice,) = real.chat.completions.parse(**options).choices
    (call,) = choice.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Sky)


def test_completions_and_models(real: openai.OpenAI) -> None:
    text = real.completions.create(
        model="smollm2", prompt="The capital of France is", temperature=0
    )
    assert "Paris" in text.choices[0].text
    assert [model.id for model in real.models.list()] == ["smollm2"]
    assert real.models.retrieve("smollm2").id == "smollm2"


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="scripted", input="What is it?")
    assert answer.output_text == FIRST
    turns: Any = [ASK, *answer.output, {"role": "user", "content": "And?"}]
    assert client.responses.create(model="scripted", input=turns).output_text == AGAIN
    tool: Any = {"type": "function", "strict": False, **TOOL["function"]}
    options: Any = {"model": "scripted", "tools": [tool]}
    with client.responses.stream(input="What is it?", **options) as events:
        for _ in events:
            pass
        called = events.get_final_response()
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Rome"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    told = client.responses.create(input=[ASK, *called.output, result], **options)
    assert told.output_text == TOLD
    sky = client.responses.parse(model="scripted", input="As JSON?", text_format=Sky)
    assert sky.output_parsed == Sky(sky="clear", wet=False)


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="scripted") as missing:
        client.chat.completions.create(model="other", messages=[ASK])
    assert missing.value.code == "model_not_found"
    long: Any = {"role": "user", "content": " fast." * 2 * LONGEST}
    for stream in (False, True):
        with pytest.raises(
            openai.BadRequestError, match="the prompt is too long: it has 1026 tokens"
        ) as refused:
            client.chat.completions.create(model="scripted", messages=[long], stream=stream)
        assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="Not Found"):
        client.embeddings.create(model="scripted", input="a")
