"""One server for most tests, driven by the official client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
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
