"""What is refused, and how: limits, keys, hostile bodies, deadlines, and clients that leave."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import ServerProcess
from slow_llama import OPTIONS as SLOW

pytestmark = pytest.mark.slow

KEYS = ("first-key", "schlüssel")
LONG: dict[str, Any] = {"model": "tiny", "prompt": "long", "max_tokens": 1000, "ignore_eos": True}
SHORT: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def strict(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with every limit set low, with keys, and with a log of JSON lines."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# who may\n{KEYS[1]}\n\n", encoding="utf-8")
    options = [
        *SLOW,
        *("--max-num-seqs", "2", "--max-queued-requests", "3", "--max-model-len", "1024"),
        *("--max-body-size", "20kB", "--max-prompt-tokens", "100", "--max-prompts", "4"),
        *("--request-timeout", "60", "--kv-cache-memory", "16MiB", "--max-n", "2"),
        *("--api-key-file", str(keys), "--log-format", "json", "--served-model-name", "tiny"),
        *("--served-model-name", "other", "--allow-origin", "https://page.example"),
    ]
    environment = {"ENGINE_CORE_API_KEY": KEYS[0]}
    with ServerProcess(tiny_model, *options, environment=environment) as process:
        yield process.wait_ready()


@pytest.fixture
def session(strict: ServerProcess) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    with httpx.Client(base_url=strict.url, headers=headers, timeout=60) as session:
        yield session


def _error(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return response.status_code, error["code"], error["param"]


def test_only_keys_let_in(strict: ServerProcess) -> None:
    for key in KEYS:
        raw = {"Authorization": f"Bearer {key}".encode()}
        assert httpx.get(f"{strict.url}/v1/models", headers=raw).status_code == 200
    for value in (
        "",
        "Bearer",
        "Bearer first-ke",
        "Bearer first-key1",
        "Basic first-key",
    ):
        headers = {"Authorization": value} if value else {}
        response = httpx.post(f"{strict.url}/v1/completions", headers=headers, json=SHORT)
        assert _error(response) == (401, "invalid_api_key", None)
        assert response.headers["www-authenticate"] == "Bearer"
    assert httpx.post(f"{strict.url}/tokenize", json={}).status_code == 401
    for path in ("/health", "/health/live", "/metrics", "/", "/openapi.json", "/version"):
        assert httpx.get(strict.url + path).status_code == 200, path
    with (
        openai.OpenAI(base_url=f"{strict.url}/v1", api_key="wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_only_named_origins_may_call(strict: ServerProcess, session: httpx.Client) -> None:
    headers = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    allowed = httpx.options(f"{strict.url}/v1/completions", headers=headers)
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    other = httpx.options(
        f"{strict.url}/v1/completions", headers={**headers, "Origin": "https://evil.example"}
    )
    assert "access-control-allow-origin" not in other.headers
    plain = session.get("/v1/models", headers={"Origin": "https://page.example"})
    assert plain.headers["access-control-allow-origin"] == "https://page.example"


def test_every_name_serves_the_same_model(session: httpx.Client) -> None:
    names = [model["id"] for model in session.get("/v1/models").json()["data"]]
    assert names == ["tiny", "other"]
    answer = session.post("/v1/completions", json={**SHORT, "model": "other"}).json()
    assert answer["model"] == "other"


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({**SHORT, "n": 3}, 400, "invalid_value", "n"),
        ({**SHORT, "prompt": ["a"] * 5}, 400, "invalid_value", "prompt"),
        # Two run and three wait: six never can.
        ({**SHORT, "prompt": ["a"] * 3, "n": 2}, 400, "invalid_value", "n"),
        ({**SHORT, "prompt": "word " * 200}, 400, "context_length_exceeded", "prompt"),
        ({**SHORT, "prompt": "word " * 5000}, 413, "body_too_large", None),
        ({**SHORT, "model": "nobody"}, 404, "model_not_found", "model"),
        ({**SHORT, "suffix": "x"}, 400, "invalid_value", "suffix"),
        ({**SHORT, "best_of": 2}, 400, "invalid_value", "best_of"),
        ({**SHORT, "colour": 1, "size": 2}, 400, "unknown_field", "colour"),
        ({**SHORT, "temperature": "hot"}, 400, "invalid_value", "temperature"),
        ({**SHORT, "max_tokens": True}, 400, "invalid_value", "max_tokens"),
        ({**SHORT, "max_tokens": 1.5}, 400, "invalid_value", "max_tokens"),
        ({**SHORT, "max_tokens": -1}, 400, "invalid_value", "max_tokens"),
        ({**SHORT, "max_tokens": 10**30}, 400, "invalid_value", "max_tokens"),
        ({**SHORT, "max_tokens": 0}, 400, "conflicting_fields", "max_tokens"),
        ({**SHORT, "min_tokens": 5}, 400, "conflicting_fields", "min_tokens"),
        ({**SHORT, "prompt": [1, "a"]}, 400, "invalid_value", "prompt"),
        ({**SHORT, "prompt": [[1], []]}, 400, "invalid_value", "prompt"),
        ({**SHORT, "prompt": ""}, 400, "invalid_value", "prompt"),
        ({**SHORT, "logit_bias": {"x": 1}}, 400, "invalid_value", "logit_bias.x"),
        ({**SHORT, "stop": ["a", ""]}, 400, "invalid_value", "stop.1"),
        ({**SHORT, "stream_options": {}}, 400, "conflicting_fields", "stream_options"),
        ({"model": "tiny"}, 400, "missing_field", "prompt"),
        ([], 400, "invalid_value", None),
    ],
)
def test_a_body_is_refused_by_field(
    session: httpx.Client, body: Any, status: int, code: str, param: str | None
) -> None:
    found = _error(session.post("/v1/completions", json=body))
    assert found[:2] == (status, code)
    assert (found[2] or "").split(".")[0] == (param or "").split(".")[0]


CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 1,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"messages": []}, "messages: must not be empty"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: this field is required"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages.0.role: .*'bot'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type: Input should be 'text'",
        ),
        ({"store": True}, "store: only false is supported"),
        ({"functions": []}, "functions: not supported here, got"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"max_completion_tokens": 2}, "max_tokens and max_completion_tokens differ"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"chat_template": "{{ x }}"}, "chat_template: unknown field"),
    ],
)
def test_a_chat_is_refused_with_a_reason(
    session: httpx.Client, change: dict[str, Any], says: str
) -> None:
    response = session.post("/v1/chat/completions", json={**CHAT, **change})
    assert _error(response)[0] == 400
    assert re.search(says, response.json()["error"]["message"])


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"model": "tiny", "prompt": "\xff"}', "not UTF-8"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"temperature": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"temperature": 1e999}', "beyond the range"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "far too large"),
        (b'{"model": "tiny", "model": "other"}', "'model' is given twice"),
        (b'{"prompt": "\\ud800"}', "lone surrogate U\\+D800"),
        (b"[" * 9000, "not JSON|deeper"),
        (b"[" * 9000 + b"]" * 9000, "deeper than 64"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "deeper than 64"),
        ('{"model": "tiny"}'.encode("utf-16"), "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
    ],
)
def test_what_is_not_json_is_refused(session: httpx.Client, raw: bytes, says: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = session.post(path, content=raw, headers={"Content-Type": "application/json"})
        assert _error(response) == (400, "invalid_json", None)
        assert re.search(says, response.json()["error"]["message"])


def test_other_media_types_and_methods_are_refused(session: httpx.Client) -> None:
    content = json.dumps(SHORT).encode()
    for kind in ("text/plain", "", "application/json; charset=latin-1", "application/x-ndjson"):
        response = session.post("/v1/completions", content=content, headers={"Content-Type": kind})
        assert _error(response)[:2] == (415, "unsupported_media_type"), kind
    packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert session.post("/v1/completions", content=content, headers=packed).status_code == 415
    plain = {"Content-Type": 'Application/JSON; charset="UTF-8"'}
    assert session.post("/v1/completions", content=content, headers=plain).status_code == 200
    wrong = session.get("/v1/completions")
    assert _error(wrong)[:2] == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert _error(session.delete("/v1/models"))[0] == 405
    assert _error(session.get("/v1/nothing"))[:2] == (404, "unknown_path")


def test_a_body_without_a_length_is_measured(session: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    headers = {"Content-Type": "application/json"}
    response = session.post("/v1/completions", content=chunks(), headers=headers)
    assert _error(response)[:2] == (413, "body_too_large")


def _idle(server: ServerProcess) -> None:
    for name in ("requests_running", "requests_waiting", "kv_cache_usage_ratio"):
        server.wait_for(f"engine_core_{name}", 0)


def test_too_many_are_told_to_come_again(strict: ServerProcess, session: httpx.Client) -> None:
    with ThreadPoolExecutor(12) as pool:
        body = {**LONG, "max_tokens": 30}
        responses = list(pool.map(lambda _: session.post("/v1/completions", json=body), range(12)))
    statuses = [response.status_code for response in responses]
    assert statuses.count(200) >= 5
    refused = [response for response in responses if response.status_code != 200]
    assert refused
    for response in refused:
        assert _error(response)[:2] == (429, "queue_full")
        assert int(response.headers["retry-after"]) >= 1
    _idle(strict)


def test_a_client_that_leaves_is_noticed_at_once(
    strict: ServerProcess, session: httpx.Client
) -> None:
    for stream in (True, False):
        before = strict.metric("engine_core_generation_tokens_total")
        aborted = strict.metric("engine_core_aborted_sequences_total")
        content = json.dumps({**LONG, "stream": stream, "n": 2}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        address = strict.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as connection:
            connection.sendall(head.encode() + content)
            deadline = time.monotonic() + 20
            while strict.metric("engine_core_generation_tokens_total") < before + 20:
                assert time.monotonic() < deadline
        _idle(strict)
        # It had 2000 tokens to go.
        assert strict.metric("engine_core_generation_tokens_total") < before + 1900
        assert strict.metric("engine_core_aborted_sequences_total") == aborted + 2


def test_the_log_is_json_without_prompts(strict: ServerProcess, session: httpx.Client) -> None:
    secret = "xylophone"
    headers = {"X-Request-Id": "logged-1"}
    session.post("/v1/completions", json={**SHORT, "prompt": secret}, headers=headers)
    deadline = time.monotonic() + 10
    while '"request_id":"logged-1"' not in strict.log:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    lines = [json.loads(line) for line in strict.log.splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == "logged-1"]
    assert line["status"] == 200
    assert line["completion_tokens"] == 1
    assert line["finish_reasons"] == ["length"]
    assert line["seconds"] > 0
    assert secret not in strict.log
    assert not any(key in strict.log for key in KEYS)
