"""One server for most tests, driven by the official client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from reciting_model import write_reciting_model
from serving import ServerProcess, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[ServerProcess]:
    options = ["--max-num-seqs", "16", "--max-model-len", "1024", "--kv-cache-memory", "16MiB"]
    options += ["--max-n", "8"]
    with ServerProcess(tiny_model, *options, "--served-model-name", "tiny") as process:
        yield process.wait_ready()
        assert process.process.poll() is None, process.log
        assert "Traceback" not in process.log


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A model that thinks, talks and calls a tool twice, and repeats what the tool said."""
    pieces = ["<think>", "Two", " cities.", "</think>", "Let me", " look.", "<tool_call>"]
    pieces += ['{"name": "get_', 'weather", "argu', 'ments": {"city": "Ro', 'me"}}', "</tool_call>"]
    pieces += ["\n<tool_call>", '{"name": "get_weather", ', '"arguments": {"city": "Oslo"}}']
    pieces += ["</tool_call>\n"]
    replies = {"Sunny.": ["Sunny", " in Rome."], "Rainy.": ["Rain", " in Oslo."]}
    model = write_reciting_model(tmp_path_factory.mktemp("agent") / "model", pieces, replies)
    options = ["--served-model-name", "tiny", "--kv-cache-memory", "16MiB"]
    options += ["--tool-parser", "hermes", "--reasoning-parser", "think"]
    options += ["--max-stored-responses", "4", "--max-stored-size", "16KiB"]
    keys = {"ENGINE_CORE_API_KEY": "secret other"}
    with ServerProcess(model, *options, environment=keys).wait_ready() as server:
        yield server
        assert server.process.poll() is None, server.log
        assert "Traceback" not in server.log
