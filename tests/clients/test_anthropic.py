"""Anthropic's own client, which talks to ``/v1/messages``."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from scripted import AGAIN, FIRST, LONGEST, THOUGHT, TOLD

ASK: Any = {"role": "user", "content": "What is it?"}
OPTIONS: Any = {"model": "scripted", "max_tokens": 60}
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def client(scripted: str) -> Iterator[anthropic.Anthropic]:
    url = scripted.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, stream: bool, **options: Any) -> anthropic.types.Message:
    if not stream:
        return client.messages.create(**OPTIONS, **options)
    with client.messages.stream(**OPTIONS, **options) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_several_turns(client: anthropic.Anthropic, stream: bool) -> None:
    thinking, text = ask(client, stream, messages=[ASK], system="Be brief.").content
    assert (thinking.thinking, text.text) == (THOUGHT, FIRST)
    messages = [ASK, {"role": "assistant", "content": [thinking, text]}, ASK]
    (text,) = ask(client, stream, messages=messages).content
    assert text.text == AGAIN


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_read(client: anthropic.Anthropic, stream: bool) -> None:
    answer = ask(client, stream, messages=[ASK], tools=[TOOL])
    assert answer.stop_reason == "tool_use"
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.input == {"city": "Rome"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages = [ASK, {"role": "assistant", "content": answer.content}]
    messages.append({"role": "user", "content": [result]})
    (text,) = ask(client, stream, messages=messages, tools=[TOOL]).content
    assert text.text == TOLD


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    usage = ask(client, False, messages=[ASK]).usage
    counted = client.messages.count_tokens(model="scripted", messages=[ASK])
    assert counted.input_tokens == usage.input_tokens


def test_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="the model 'other' is not served here"):
        client.messages.create(model="other", max_tokens=5, messages=[ASK])
    long: Any = {"role": "user", "content": " fast." * 2 * LONGEST}
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError, match="the prompt is too long"):
            ask(client, stream, messages=[long])
