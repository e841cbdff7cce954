"""Vectors, scores and reranking over HTTP, by OpenAI's client and by hand."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from serving import ServerProcess
from tiny_bert import make, states

KEY = {"Authorization": "Bearer secret"}
FEW = "10"
EXAMPLES = os.environ.get("ENGINE_CORE_TEST_SCHEMA_EXAMPLES", FEW)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Any]]:
    folder = tmp_path_factory.mktemp("bert")
    model = make(folder)
    overrides = '{"matryoshka_dimensions": [8]}'
    options = ["--served-model-name", "tiny", "--max-num-seqs", "8", "--hf-overrides", overrides]
    keys = {"ENGINE_CORE_API_KEY": "secret"}
    with ServerProcess(folder, *options, environment=keys) as server:
        yield server.wait_ready(), model
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("cross")
    make(folder, scores=True)
    with ServerProcess(folder, "--served-model-name", "tiny") as server:
        yield server.wait_ready()
        assert "Traceback" not in server.log


def expected(model: Any, ids: list[int]) -> np.ndarray:
    mean = states(model, ids).mean(0).numpy()
    return mean / np.linalg.norm(mean)


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers=KEY, timeout=60)


def test_openai_s_client_gets_vectors(bert: tuple[ServerProcess, Any]) -> None:
    server, model = bert
    texts = ["the cat sat", "rain", "a dog ran far and far and far"] * 12
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        # Clients name the whole length, too.
        whole = client.embeddings.create(model="tiny", input=texts[0], dimensions=48)
        # Its client asks for base64 unless told otherwise.
        made = client.embeddings.create(model="tiny", input=texts)
        one = client.embeddings.create(model="tiny", input=texts[0], encoding_format="float")
        ids = client.embeddings.create(model="tiny", input=[[2, 5, 7, 9, 3], [9]])
        cut = client.embeddings.create(model="tiny", input=[2, 5, 7, 9, 3], dimensions=8)
        with pytest.raises(openai.BadRequestError, match="has 8") as refused:
            client.embeddings.create(model="tiny", input="rain", dimensions=9)
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="ada", input="rain")
    assert refused.value.param == "dimensions"
    assert [item.index for item in made.data] == list(range(36))
    wanted = [expected(model, [2, 5, 7, 9, 3]), expected(model, [2, 15, 3])]
    for place in (0, 1, 33, 34):
        np.testing.assert_allclose(made.data[place].embedding, wanted[place % 3], atol=1e-5)
    np.testing.assert_allclose(one.data[0].embedding, wanted[0], atol=1e-5)
    np.testing.assert_allclose(whole.data[0].embedding, wanted[0], atol=1e-5)
    np.testing.assert_allclose(ids.data[0].embedding, wanted[0], atol=1e-5)
    np.testing.assert_allclose(ids.data[1].embedding, expected(model, [9]), atol=1e-5)
    part = wanted[0][:8]
    np.testing.assert_allclose(cut.data[0].embedding, part / np.linalg.norm(part), atol=1e-5)
    assert (one.usage.prompt_tokens, one.usage.total_tokens) == (5, 5)
    assert made.usage.prompt_tokens == 12 * (5 + 3 + 10)
    assert (made.object, made.model) == ("list", "tiny")


def test_base64_is_float32(bert: tuple[ServerProcess, Any]) -> None:
    bodies = [
        post(bert[0], "/v1/embeddings", input="rain", encoding_format=form).json()
        for form in ("float", "base64")
    ]
    numbers, text = (body["data"][0]["embedding"] for body in bodies)
    read = np.frombuffer(base64.b64decode(text), "<f4")
    np.testing.assert_array_equal(read, np.array(numbers, np.float32))


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["rain", ""]}, "input.1", "invalid_value"),
        ({"input": ["rain", 3]}, "input.1", "invalid_value"),
        ({"input": [[3], ["rain"]]}, "input.1.0", "invalid_value"),
        ({"input": {"text": "rain"}}, "input", "invalid_value"),
        ({"input": [{"text": "rain"}]}, "input", "invalid_value"),
        ({"input": ["rain"] * 2049}, "input", "invalid_value"),
        ({"input": [64]}, "input", "invalid_request"),
        ({"input": "rain " * 50}, "input", "context_length_exceeded"),
        ({"input": ["rain", "rain " * 50]}, "input.1", "context_length_exceeded"),
        ({"input": [[9], [9] * 50]}, "input.1", "context_length_exceeded"),
        ({"input": "rain", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"input": "rain", "dimensions": 0}, "dimensions", "invalid_value"),
        ({"input": "rain", "prompt_name": "query"}, "prompt_name", "invalid_request"),
        ({"input": "rain", "voice": "deep"}, "voice", "unknown_field"),
        ({}, "input", "missing_field"),
    ],
)
def test_what_is_wrong_is_named(
    body: dict[str, Any], param: str, code: str, bert: tuple[ServerProcess, Any]
) -> None:
    refused = post(bert[0], "/v1/embeddings", **body)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert error["type"] == "invalid_request_error"


def test_the_text_that_is_too_long_is_named(
    bert: tuple[ServerProcess, Any], cross: ServerProcess
) -> None:
    long = "rain " * 50
    for server in (bert[0], cross):
        for path, body, name in (
            ("/rerank", {"query": "sun", "documents": ["sun", "sun", long]}, "documents.2"),
            ("/score", {"text_1": "sun", "text_2": ["sea", long]}, "text_2.1"),
            ("/score", {"text_1": "sun", "text_2": long}, "text_2"),
        ):
            error = post(server, path, **body).json()["error"]
            assert (error["param"], error["code"]) == (name, "context_length_exceeded")
            assert error["message"].startswith(f"{name}: the ")
    error = post(bert[0], "/rerank", query=long, documents=["sun"]).json()["error"]
    assert error["param"] == "query"


def test_a_text_is_cut_when_asked(bert: tuple[ServerProcess, Any]) -> None:
    for given in ("rain " * 50, [9] * 50):
        made = post(bert[0], "/v1/embeddings", input=given, truncate_prompt_tokens=6)
        assert made.json()["usage"]["prompt_tokens"] == 6


def test_vectors_are_compared(bert: tuple[ServerProcess, Any]) -> None:
    server, model = bert
    made = post(server, "/v1/score", text_1="rain", text_2=["sun", "rain", "the cat sat"])
    scores = [item["score"] for item in made.json()["data"]]
    query = expected(model, [2, 15, 3])
    for score, ids in zip(scores, ([2, 18, 3], [2, 15, 3], [2, 5, 7, 9, 3]), strict=True):
        assert score == pytest.approx(float(query @ expected(model, ids)), abs=1e-5)
    documents = ["sun", {"text": "rain"}, "the cat sat"]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = post(server, path, query="rain", documents=documents, top_n=2).json()
        assert ranked["results"][0]["index"] == 1
        assert ranked["results"][0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)
        assert ranked["results"][0]["document"] == {"text": "rain"}
        assert len(ranked["results"]) == 2
    refused = post(server, "/score", text_1=["rain", "sun"], text_2=["a", "cat", "sat"])
    assert refused.json()["error"]["code"] == "conflicting_fields"


def test_a_cross_encoder_ranks(cross: ServerProcess) -> None:
    documents = ["a dog ran far", "rain", "the cat sat on the mat"]
    scored = post(cross, "/score", text_1="the cat", text_2=documents).json()["data"]
    ranked = post(cross, "/rerank", query="the cat", documents=documents, return_documents=False)
    given = {item["index"]: item["relevance_score"] for item in ranked.json()["results"]}
    assert given == {item["index"]: item["score"] for item in scored}
    order = [item["relevance_score"] for item in ranked.json()["results"]]
    assert order == sorted(order, reverse=True)
    assert "document" not in ranked.json()["results"][0]
    refused = post(cross, "/v1/embeddings", input="rain")
    assert (refused.status_code, "gives no vectors" in refused.text) == (400, True)


def test_a_model_does_its_own_task_alone(
    bert: tuple[ServerProcess, Any], server: ServerProcess
) -> None:
    message = [{"role": "user", "content": "rain"}]
    for path, body in (
        ("/v1/completions", {"prompt": "rain"}),
        ("/v1/chat/completions", {"messages": message}),
        ("/v1/messages", {"messages": message, "max_tokens": 4}),
        ("/v1/responses", {"input": "rain"}),
    ):
        refused = post(bert[0], path, **body)
        assert refused.status_code == 400, refused.text
        assert "runs for the task 'embed'" in refused.text
    for path, body in (
        ("/v1/embeddings", {"input": "rain"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ):
        refused = post(server, path, **body)
        assert refused.status_code == 400, refused.text
        assert "generates text here" in refused.text
        assert "(--task embed)" in refused.text


def test_many_at_once_and_those_that_run_out_of_time(bert: tuple[ServerProcess, Any]) -> None:
    server, model = bert
    # More than the rows of the batch, in several portions; half of them are ended at once.
    texts = [["rain"] * 30, ["the cat sat"] * 40] * 6
    with ThreadPoolExecutor(8) as pool:
        late = [
            pool.submit(post, server, "/v1/embeddings", input=each, timeout=1e-6) for each in texts
        ]
        made = [pool.submit(post, server, "/v1/embeddings", input=each) for each in texts]
    assert {each.result().status_code for each in late} == {408}
    wanted = [expected(model, [2, 15, 3]), expected(model, [2, 5, 7, 9, 3])] * 6
    for each, vector in zip(made, wanted, strict=True):
        data = each.result().json()["data"]
        np.testing.assert_allclose(data[-1]["embedding"], vector, atol=1e-5)
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}


def test_keys_guard_every_path(bert: tuple[ServerProcess, Any]) -> None:
    for path in ("/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"):
        assert httpx.post(f"{bert[0].url}{path}", json={}).status_code == 401, path


@pytest.mark.slow
def test_every_answer_is_declared(bert: tuple[ServerProcess, Any], tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{bert[0].url}/openapi.json"),
        *("--phases", "coverage,fuzzing", "--max-examples", EXAMPLES, "--seed", "1"),
        *("--header", "Authorization: Bearer secret"),
        *("--generation-database", "none", "--continue-on-failure", "--no-color"),
        *("--warnings", "off", "--request-timeout", "60"),
        *("--exclude-checks", "positive_data_acceptance,negative_data_rejection"),
    ]
    # The other paths are other names of these.
    paths = ("/v1/embeddings", "/score", "/rerank")
    command += [word for path in paths for word in ("--include-path", path)]
    environment = {"SCHEMATHESIS_HOOKS": "schema_hooks", "PYTHONPATH": str(Path(__file__).parent)}
    if EXAMPLES == FEW:
        environment["ENGINE_CORE_TEST_SCHEMA_FEW"] = "1"
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    count = bert[0].metric("engine_core_http_requests_total", path="/rerank", status="200")
    assert count > 5
