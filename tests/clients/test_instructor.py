"""instructor, in its modes for such servers."""

from collections.abc import Iterator
from typing import Any, Literal

import instructor
import openai
import pydantic
import pytest
from instructor.core.exceptions import InstructorRetryException
from scripted import LONGEST

ASK: Any = [{"role": "user", "content": "What is the sky like?"}]


class Sky(pydantic.BaseModel):
    """Colour and state of the sky."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sky: Literal["clear", "grey"]
    wet: bool


@pytest.fixture
def raw(smollm2: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=smollm2, api_key="none", max_retries=0) as client:
        yield client


MODES = ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"]


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_is_an_object(raw: openai.OpenAI, mode: str) -> None:
    client = instructor.from_openai(raw, mode=instructor.Mode[mode])
    options: Any = {"model": "smollm2", "messages": ASK, "response_model": Sky, "max_retries": 0}
    sky, completion = client.chat.completions.create_with_completion(**options)
    assert isinstance(sky, Sky)
    assert completion.usage.completion_tokens > 0


@pytest.mark.parametrize("mode", MODES)
def test_an_object_grows(raw: openai.OpenAI, mode: str) -> None:
    client = instructor.from_openai(raw, mode=instructor.Mode[mode])
    options: Any = {"model": "smollm2", "messages": ASK, "response_model": Sky}
    *_, last = client.chat.completions.create_partial(**options)
    assert Sky.model_validate(last.model_dump())


@pytest.mark.parametrize("mode", ["JSON", "MD_JSON"])
def test_an_object_that_the_model_writes_of_its_own_accord(scripted: str, mode: str) -> None:
    with openai.OpenAI(base_url=scripted, api_key="none", max_retries=0) as raw:
        client = instructor.from_openai(raw, mode=instructor.Mode[mode])
        asked: Any = [{"role": "user", "content": "What is the sky like, as JSON?"}]
        options: Any = {"model": "scripted", "messages": asked, "response_model": Sky}
        sky = client.chat.completions.create(**options, max_retries=0)
        assert sky.model_dump() == {"sky": "clear", "wet": False}


def test_errors(raw: openai.OpenAI, scripted: str) -> None:
    client = instructor.from_openai(raw)
    options: Any = {"response_model": Sky, "max_retries": 0}
    with pytest.raises(InstructorRetryException, match="the model 'other' is not served here"):
        client.chat.completions.create(model="other", messages=ASK, **options)
    short = instructor.from_openai(openai.OpenAI(base_url=scripted, api_key="none", max_retries=0))
    long: Any = [{"role": "user", "content": " fast." * 2 * LONGEST}]
    with pytest.raises(InstructorRetryException, match="the prompt is too long"):
        short.chat.completions.create(model="scripted", messages=long, **options)
