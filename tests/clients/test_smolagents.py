"""smolagents: its model, and agents that call tools."""

import json
from typing import Any

import openai
import pytest
from scripted import AGAIN, FIRST, LONGEST
from smolagents import ChatMessage, MessageRole, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import agglomerate_stream_deltas
from smolagents.utils import AgentError, AgentGenerationError

asked = []


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: which one.
    """
    asked.append(city)
    return "sunny"


def model_of(url: str, name: str, **options: Any) -> OpenAIModel:
    kwargs = {"max_retries": 0}
    options = {"client_kwargs": kwargs, "retry": False, **options}
    return OpenAIModel(model_id=name, api_base=url, api_key="none", **options)


def test_several_turns(scripted: str) -> None:
    model = model_of(scripted, "scripted")
    ask = ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": "What is it?"}])
    answer = model.generate([ask])
    assert answer.content == FIRST
    streamed = agglomerate_stream_deltas(list(model.generate_stream([ask])))
    assert streamed.content == FIRST
    for back in (answer, streamed):
        assert model.generate([ask, back, ask]).content == AGAIN


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_a_tool_and_reads_its_result(scripted: str, stream: bool) -> None:
    asked.clear()
    agent = ToolCallingAgent(
        tools=[get_weather],
        model=model_of(scripted, "scripted"),
        max_steps=3,
        verbosity_level=0,
        stream_outputs=stream,
    )
    assert agent.run("The weather in Rome?") == "It is sunny."
    assert asked == ["Rome"]


def test_structured_output(smollm2: str) -> None:
    schema = {"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"]}
    schema["additionalProperties"] = False
    shape: Any = {"type": "json_schema", "json_schema": {"name": "sky", "schema": schema}}
    ask = ChatMessage(role=MessageRole.USER, content="Is it wet?")
    answer = model_of(smollm2, "smollm2").generate([ask], response_format=shape)
    assert json.loads(answer.content) in ({"wet": True}, {"wet": False})


def test_errors(scripted: str) -> None:
    ask = ChatMessage(role=MessageRole.USER, content="What is it?")
    with pytest.raises(openai.NotFoundError, match="the model 'other' is not served here"):
        model_of(scripted, "other").generate([ask])
    agent = ToolCallingAgent(tools=[], model=model_of(scripted, "scripted"), verbosity_level=0)
    with pytest.raises(AgentGenerationError, match="the prompt is too long") as failed:
        agent.run(" fast." * 2 * LONGEST)
    assert isinstance(failed.value, AgentError)
