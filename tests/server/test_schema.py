"""schemathesis over the OpenAPI document: whatever is sent, the answer is one that it declares.

``ENGINE_CORE_TEST_SCHEMA_EXAMPLES`` says how many bodies an operation gets; 10 if not set, and then
no sequences of requests are tried, and bodies for the bounds of each field go to completions and to
``/tokenize`` alone, which have the fields of chats between them: each one that breaks a bound, one
of those of a wrong type in each place, and some of those that keep to all. The services of vectors
are asked by ``test_embeddings.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from serving import ServerProcess

HERE = Path(__file__).parent
FEW = "10"
EXAMPLES = os.environ.get("ENGINE_CORE_TEST_SCHEMA_EXAMPLES", FEW)
ALL_PHASES = "examples,coverage,fuzzing,stateful"
CHATS = "/v1/chat/completions"
TRANSLATED = ["/v1/messages", "/v1/messages/count_tokens", "/v1/responses"]
VECTORS = ["/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"]


@pytest.mark.slow
def test_every_answer_is_declared(server: ServerProcess, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
        *("--phases", "coverage,fuzzing" if EXAMPLES == FEW else ALL_PHASES),
        *("--max-examples", EXAMPLES),
        *("--seed", "1", "--generation-database", "none"),
        *("--request-timeout", "60", "--continue-on-failure", "--warnings", "off", "--no-color"),
        # Ours, in schema_hooks.py, are stricter: they name the reasons of a refusal, and ask the
        # schema again.
        *("--exclude-checks", "positive_data_acceptance,negative_data_rejection"),
    ]
    # More events than any answer has, or it would stop reading before the end.
    config = "max-stream-events = 10000\n"
    if EXAMPLES == FEW:
        names = [path.strip("/").replace("/", "_") for path in (CHATS, *TRANSLATED, *VECTORS)]
        config += f"[[operations]]\ninclude-operation-id = {names}\n"
        config += "phases.coverage.enabled = false\n"
        # It has few fields whose bounds could be tried.
        config += "[[operations]]\ninclude-operation-id = 'detokenize'\n"
        config += "phases.fuzzing.generation.max-examples = 50\n"
    (tmp_path / "schemathesis.toml").write_text(config)
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "schema_hooks", "PYTHONPATH": str(HERE)}
    if EXAMPLES == FEW:
        environment["ENGINE_CORE_TEST_SCHEMA_FEW"] = "1"
    refused = server.metric("engine_core_http_requests_total", path="/v1/completions", status="400")
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    # It has been everywhere: to the model and to what refuses.
    for path in (
        "/v1/completions",
        CHATS,
        "/tokenize",
        "/detokenize",
        *TRANSLATED,
    ):
        least = 3 if path in (CHATS, *TRANSLATED) and EXAMPLES == FEW else 20
        for status in ("200", "400"):
            count = server.metric("engine_core_http_requests_total", path=path, status=status)
            assert count > least, (path, status)
    after = server.metric("engine_core_http_requests_total", path="/v1/completions", status="400")
    assert after > refused


def test_the_document_describes_this_server(server: ServerProcess) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    assert set(document["paths"]) == {
        CHATS,
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/v1/embeddings",
        "/v1/score",
        "/score",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/ping",
        "/load",
        "/health",
        "/health/live",
        "/health/ready",
        "/metrics",
        "/version",
    }
    body = document["components"]["schemas"]["ChatBody"]
    assert body["properties"]["model"]["enum"] == ["tiny"]
    assert body["properties"]["n"]["anyOf"][0]["maximum"] == 8
    assert body["additionalProperties"] is False
    assert body["properties"]["messages"]["maxItems"] == 16384
    forms = document["components"]["schemas"]["CompletionBody"]["properties"]["prompt"]["oneOf"]
    # A text, texts, token ids, and lists of them.
    assert [form.get("maxItems") for form in forms] == [None, 64, 2**20, 64]
