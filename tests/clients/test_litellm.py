"""litellm, which other tools and its proxy are built on."""

import asyncio
import json
from typing import Any, Literal

import litellm
import pydantic
import pytest
from scripted import AGAIN, FIRST, LONGEST, THOUGHT, TOLD

ASK: Any = {"role": "user", "content": "What is it?"}
AND: Any = {"role": "user", "content": "And?"}
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


# Its three ways to such a server: each makes requests of its own form.
PROVIDERS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "text-completion-openai"])
CHATS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])


def ask(url: str, model: str, messages: list[Any], **options: Any) -> Any:
    where = {"api_base": url, "api_key": "none", "num_retries": 0, "max_retries": 0}
    return litellm.completion(model=model, messages=messages, **where, **options)


@PROVIDERS
def test_an_answer_of_a_real_model(smollm2: str, provider: str) -> None:
    france = [{"role": "user", "content": "The capital of France is"}]
    options: Any = {"temperature": 0, "max_tokens": 20}
    answer = ask(smollm2, f"{provider}/smollm2", france, **options)
    text = answer.choices[0].message.content
    assert text
    assert 0 < answer.usage.completion_tokens <= 20
    chunks = list(ask(smollm2, f"{provider}/smollm2", france, stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


@CHATS
def test_several_turns(scripted: str, provider: str) -> None:
    model = f"{provider}/scripted"
    message = ask(scripted, model, [ASK]).choices[0].message
    assert (message.content, message.reasoning_content) == (FIRST, THOUGHT)
    for back in (message, message.model_dump()):
        assert ask(scripted, model, [ASK, back, AND]).choices[0].message.content == AGAIN
    # What a stream is put together to goes back too.
    chunks = list(ask(scripted, model, [ASK], stream=True, stream_options={"include_usage": True}))
    built: Any = litellm.stream_chunk_builder(chunks, messages=[ASK])
    assert built.choices[0].message.content == FIRST
    assert built.usage.completion_tokens == 8
    back = built.choices[0].message
    assert ask(scripted, model, [ASK, back, AND]).choices[0].message.content == AGAIN


@CHATS
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_read(scripted: str, provider: str, stream: bool) -> None:
    model = f"{provider}/scripted"
    answer = ask(scripted, model, [ASK], tools=[TOOL], tool_choice="auto", stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=[ASK])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "sunny"}
    answer = ask(scripted, model, [ASK, choice.message, result], tools=[TOOL])
    assert answer.choices[0].message.content == TOLD


@CHATS
def test_structured_output(smollm2: str, provider: str) -> None:
    answer = ask(smollm2, f"{provider}/smollm2", [ASK], response_format=Sky)
    Sky.model_validate_json(answer.choices[0].message.content)


@CHATS
def test_further_parameters(smollm2: str, provider: str) -> None:
    options: Any = {"top_k": 5, "min_p": 0.1, "seed": 3, "stop": ["\n"], "max_tokens": 8, "n": 2}
    options |= {"user": "u", "metadata": {"a": "b"}, "logprobs": True, "top_logprobs": 2}
    options |= {"presence_penalty": 0.1, "logit_bias": {"5": 1.0}, "parallel_tool_calls": True}
    answer = ask(smollm2, f"{provider}/smollm2", [ASK], **options)
    assert len(answer.choices) == 2
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def test_it_runs_in_an_event_loop(scripted: str) -> None:
    async def several() -> list[str]:
        where: Any = {"api_base": scripted, "api_key": "none", "max_retries": 0}
        asked = [
            litellm.acompletion(model="openai/scripted", messages=[ASK], **where) for _ in range(8)
        ]
        return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

    assert asyncio.run(several()) == [FIRST] * 8


@CHATS
def test_errors(scripted: str, provider: str) -> None:
    with pytest.raises(litellm.NotFoundError, match="the model 'other' is not served here"):
        ask(scripted, f"{provider}/other", [ASK])
    long = {"role": "user", "content": " fast." * 2 * LONGEST}
    for stream in (False, True):
        # It tells which error this is by the message alone.
        with pytest.raises(litellm.ContextWindowExceededError, match="the prompt is too long"):
            ask(scripted, f"{provider}/scripted", [long], stream=stream)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(scripted, f"{provider}/scripted", [ASK], temperature=-1)
