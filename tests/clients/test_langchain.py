"""langchain-openai's ChatOpenAI and OpenAI."""

import asyncio
from typing import Any, Literal

import openai
import pydantic
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from scripted import AGAIN, FIRST, LONGEST, TOLD


class Sky(pydantic.BaseModel):
    """Colour and state of the sky."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sky: Literal["clear", "grey"]
    wet: bool


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


@pytest.fixture(scope="module")
def chat(scripted: str) -> ChatOpenAI:
    return ChatOpenAI(model="scripted", base_url=scripted, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def responses(scripted: str) -> ChatOpenAI:
    """The same by way of ``/v1/responses``."""
    options: Any = {"max_retries": 0, "use_responses_api": True}
    return ChatOpenAI(model="scripted", base_url=scripted, api_key="none", **options)


@pytest.fixture(scope="module")
def real(smollm2: str) -> ChatOpenAI:
    return ChatOpenAI(model="smollm2", base_url=smollm2, api_key="none", max_retries=0)


def test_several_turns(chat: ChatOpenAI) -> None:
    ask = [SystemMessage("Be brief."), HumanMessage("What is it?")]
    answer = chat.invoke(ask)
    assert answer.text == FIRST
    assert answer.usage_metadata["output_tokens"] == 8
    assert chat.invoke([*ask, answer, HumanMessage("And?")]).text == AGAIN
    parts = HumanMessage([{"type": "text", "text": "And?"}])
    assert chat.invoke([*ask, answer, parts]).text == AGAIN


def test_a_stream_goes_back(chat: ChatOpenAI) -> None:
    whole = AIMessageChunk("")
    for chunk in chat.stream("What is it?", stream_usage=True):
        whole += chunk
    assert whole.text == FIRST
    assert whole.usage_metadata["output_tokens"] == 8
    ask = HumanMessage("What is it?")
    assert chat.invoke([ask, whole, HumanMessage("And?")]).text == AGAIN


def test_responses(responses: ChatOpenAI) -> None:
    ask, more = HumanMessage("What is it?"), HumanMessage("And?")
    whole = AIMessageChunk("")
    for chunk in responses.stream([ask]):
        whole += chunk
    for answer in (responses.invoke([ask]), whole):
        assert answer.text == FIRST
        assert responses.invoke([ask, answer, more]).text == AGAIN
    able = responses.bind_tools([get_weather])
    answer = able.invoke([ask])
    (call,) = answer.tool_calls
    assert able.invoke([ask, answer, get_weather.invoke(call)]).text == TOLD


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_read(chat: ChatOpenAI, stream: bool) -> None:
    able = chat.bind_tools([get_weather])
    ask = HumanMessage("The weather in Rome?")
    answer: Any = AIMessageChunk("")
    if stream:
        for chunk in able.stream([ask]):
            answer += chunk
    else:
        answer = able.invoke([ask])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Rome"})
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert able.invoke([ask, answer, result]).text == TOLD


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(real: ChatOpenAI, method: Any, strict: bool | None) -> None:
    shaped = real.with_structured_output(Sky, method=method, strict=strict)
    assert isinstance(shaped.invoke("The sky?"), Sky)


def test_json_mode(chat: ChatOpenAI) -> None:
    shaped = chat.with_structured_output(Sky, method="json_mode")
    assert shaped.invoke("The sky, as JSON?") == Sky(sky="clear", wet=False)


def test_further_parameters(smollm2: str) -> None:
    chat = ChatOpenAI(
        model="smollm2",
        base_url=smollm2,
        api_key="none",
        temperature=0.5,
        seed=1,
        max_tokens=8,
        n=2,
        stop=["\n"],
        top_p=0.9,
        logprobs=True,
        presence_penalty=0.1,
        extra_body={"top_k": 5},
    )
    answer = chat.invoke("The sky?")
    assert answer.response_metadata["logprobs"]["content"]


def test_it_runs_in_an_event_loop(chat: ChatOpenAI) -> None:
    assert [m.text for m in asyncio.run(chat.abatch(["a", "b"]))] == [FIRST, FIRST]


def test_a_completion(smollm2: str) -> None:
    model = OpenAI(model="smollm2", base_url=smollm2, api_key="none", temperature=0, max_tokens=10)
    assert "Paris" in model.invoke("The capital of France is")
    assert "Paris" in "".join(model.stream("The capital of France is"))


def test_errors(chat: ChatOpenAI, scripted: str) -> None:
    other = ChatOpenAI(model="other", base_url=scripted, api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="the model 'other' is not served here"):
        other.invoke("What is it?")
    with pytest.raises(ContextOverflowError, match="the prompt is too long"):
        chat.invoke(" fast." * 2 * LONGEST)
    with pytest.raises(ContextOverflowError, match="the prompt is too long"):
        list(chat.stream(" fast." * 2 * LONGEST))
