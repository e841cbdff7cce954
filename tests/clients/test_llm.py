"""llm, as a command and from Python, with its models of a file of settings."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import llm
import pydantic
import pytest
from scripted import AGAIN, FIRST, LONGEST, TOLD


class Sky(pydantic.BaseModel):
    """Colour and state of the sky."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sky: Literal["clear", "grey"]
    wet: bool


@pytest.fixture(scope="module", autouse=True)
def settings(
    tmp_path_factory: pytest.TempPathFactory, scripted: str, smollm2: str
) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("llm")
    able = {"supports_schema": True, "supports_tools": True}
    models = [
        {"model_id": f"my-{name}", "model_name": name, "api_base": url, **able}
        for name, url in (("scripted", scripted), ("smollm2", smollm2), ("other", scripted))
    ]
    models.append(
        {
            "model_id": "my-text",
            "model_name": "smollm2",
            "api_base": smollm2,
            "completion": True,
        }
    )
    (folder / "extra-openai-models.yaml").write_text(json.dumps(models))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLM_USER_PATH", str(folder))
        yield folder


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_several_turns_of_the_command() -> None:
    assert command("-m", "my-scripted", "What is it?").stdout.strip() == FIRST
    assert command("-c", "And?").stdout.strip() == AGAIN


def test_several_turns() -> None:
    for stream in (False, True):
        conversation = llm.get_model("my-scripted").conversation()
        assert conversation.prompt("What is it?", stream=stream).text() == FIRST
        second = conversation.prompt("And?", stream=stream)
        assert second.text() == AGAIN
        assert second.usage().output == 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_read(stream: bool) -> None:
    asked = []

    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    model = llm.get_model("my-scripted")
    assert model.chain("Rome?", tools=[get_weather], stream=stream).text() == TOLD
    assert asked == ["Rome"]


def test_structured_output() -> None:
    answer = llm.get_model("my-smollm2").prompt("The sky?", schema=Sky).text()
    assert Sky.model_validate_json(answer)


def test_options_and_a_completion() -> None:
    options: Any = {"temperature": 0.5, "max_tokens": 5, "top_p": 0.9, "seed": 3, "stop": "\n"}
    options |= {"frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": '{"5": 2}'}
    assert llm.get_model("my-smollm2").prompt("The sky?", **options).usage().output <= 5
    text = llm.get_model("my-text").prompt("The capital of France is", max_tokens=10, temperature=0)
    assert "Paris" in text.text()


def test_errors() -> None:
    failed = command("-m", "my-other", "What is it?")
    assert failed.returncode != 0
    assert "the model 'other' is not served here" in failed.stderr
    with pytest.raises(Exception, match="the prompt is too long"):
        llm.get_model("my-scripted").prompt(" fast." * 2 * LONGEST).text()
