"""pydantic-ai's agents, as they talk to OpenAI's servers and to vLLM's."""

import asyncio
from typing import Any, Literal

import pydantic
import pytest
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import ModelContextWindowExceededError, ModelNotFoundError
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.vllm import VLLMProvider
from scripted import AGAIN, FIRST, LONGEST, THOUGHT, TOLD

PROVIDERS = pytest.mark.parametrize("provider", [OpenAIProvider, VLLMProvider])


class Sky(pydantic.BaseModel):
    """Colour and state of the sky."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sky: Literal["clear", "grey"]
    wet: bool


def model_of(provider: Any, url: str, name: str) -> OpenAIChatModel:
    return OpenAIChatModel(name, provider=provider(base_url=url, api_key="none"))


@PROVIDERS
def test_several_turns(scripted: str, provider: Any) -> None:
    agent = Agent(model_of(provider, scripted, "scripted"), instructions="Be brief.")
    first = agent.run_sync("What is it?")
    assert first.output == FIRST
    thoughts = [p for p in first.response.parts if isinstance(p, ThinkingPart)]
    assert [thought.content for thought in thoughts] == [THOUGHT]
    assert agent.run_sync("And?", message_history=first.all_messages()).output == AGAIN


@PROVIDERS
def test_a_stream(scripted: str, provider: Any) -> None:
    agent = Agent(model_of(provider, scripted, "scripted"))

    async def stream() -> tuple[str, str]:
        async with agent.run_stream("What is it?") as result:
            text = "".join([piece async for piece in result.stream_text(delta=True)])
            history = result.all_messages()
            assert result.usage.output_tokens == 8
        return text, (await agent.run("And?", message_history=history)).output

    assert asyncio.run(stream()) == (FIRST, AGAIN)


@PROVIDERS
def test_a_tool_is_called_and_its_result_read(scripted: str, provider: Any) -> None:
    asked = []
    agent = Agent(model_of(provider, scripted, "scripted"))

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    assert agent.run_sync("The weather in Rome?").output == TOLD

    async def stream() -> str:
        async with agent.run_stream("The weather in Rome?") as result:
            return await result.get_output()

    assert asyncio.run(stream()) == TOLD
    assert asked == ["Rome", "Rome"]


@PROVIDERS
@pytest.mark.parametrize("way", [ToolOutput, NativeOutput])
def test_structured_output(smollm2: str, provider: Any, way: Any) -> None:
    agent: Any = Agent(model_of(provider, smollm2, "smollm2"), output_type=way(Sky), retries=0)
    assert isinstance(agent.run_sync("The sky?").output, Sky)


@PROVIDERS
def test_an_object_that_the_prompt_alone_asks_for(scripted: str, provider: Any) -> None:
    model = model_of(provider, scripted, "scripted")
    agent: Any = Agent(model, output_type=PromptedOutput(Sky), retries=0)
    assert agent.run_sync("The sky, as JSON?").output == Sky(sky="clear", wet=False)


@PROVIDERS
def test_errors(scripted: str, provider: Any) -> None:
    with pytest.raises(ModelNotFoundError, match="the model 'other' is not served here"):
        Agent(model_of(provider, scripted, "other")).run_sync("What is it?")
    agent = Agent(model_of(provider, scripted, "scripted"))
    with pytest.raises(ModelContextWindowExceededError, match="the prompt is too long"):
        agent.run_sync(" fast." * 2 * LONGEST)
