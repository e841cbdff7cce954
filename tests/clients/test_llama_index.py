"""llama-index's OpenAILike."""

import asyncio
from typing import Any, Literal

import openai
import pydantic
import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram, LLMTextCompletionProgram
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from scripted import AGAIN, FIRST, LONGEST, TOLD


class Sky(pydantic.BaseModel):
    """Colour and state of the sky."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sky: Literal["clear", "grey"]
    wet: bool


def model_of(url: str, name: str, **options: Any) -> OpenAILike:
    options = {"is_chat_model": True, "is_function_calling_model": True, **options}
    return OpenAILike(model=name, api_base=url, api_key="none", max_retries=0, **options)


def test_several_turns(scripted: str) -> None:
    model = model_of(scripted, "scripted")
    ask = ChatMessage(role="user", content="What is it?")
    answer = model.chat([ask]).message
    assert answer.content == FIRST
    more = ChatMessage(role="user", content="And?")
    assert model.chat([ask, answer, more]).message.content == AGAIN
    *_, last = model.stream_chat([ask])
    assert last.message.content == FIRST
    assert model.chat([ask, last.message, more]).message.content == AGAIN
    assert str(model.complete("What is it?")) == FIRST


def test_a_completion(smollm2: str) -> None:
    model = model_of(smollm2, "smollm2", is_chat_model=False, temperature=0, max_tokens=10)
    assert "Paris" in str(model.complete("The capital of France is"))
    *_, last = model.stream_complete("The capital of France is")
    assert "Paris" in str(last)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_read(scripted: str, stream: bool) -> None:
    asked = []

    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    model = model_of(scripted, "scripted")
    tool = FunctionTool.from_defaults(get_weather)
    agent = FunctionAgent(tools=[tool], llm=model, streaming=stream, system_prompt="Be brief.")

    async def run() -> str:
        return str(await agent.run("The weather in Rome?"))

    assert asyncio.run(run()) == TOLD
    assert asked == ["Rome"]


def test_structured_output(smollm2: str) -> None:
    tools = model_of(smollm2, "smollm2")
    program = FunctionCallingProgram.from_defaults(
        output_cls=Sky,
        prompt_template_str="The sky?",
        llm=tools,
        tool_choice={"type": "function", "function": {"name": "Sky"}},
    )
    assert isinstance(program(), Sky)
    shaped = model_of(smollm2, "smollm2", should_use_structured_outputs=True)
    answer = shaped.as_structured_llm(Sky).chat([ChatMessage(role="user", content="The sky?")])
    assert isinstance(answer.raw, Sky)
    # The program of text has the schema in its prompt; the server's own field makes it hold.
    held: Any = {"extra_body": {"guided_json": Sky.model_json_schema()}}
    text = model_of(smollm2, "smollm2", is_function_calling_model=False, additional_kwargs=held)
    made = LLMTextCompletionProgram.from_defaults(
        output_cls=Sky, prompt_template_str="The sky?", llm=text
    )
    assert isinstance(made(), Sky)


def test_errors(scripted: str) -> None:
    with pytest.raises(openai.NotFoundError, match="the model 'other' is not served here"):
        model_of(scripted, "other").complete("What is it?")
    with pytest.raises(openai.BadRequestError, match="the prompt is too long"):
        model_of(scripted, "scripted").complete(" fast." * 2 * LONGEST)
