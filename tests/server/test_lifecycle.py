"""How a server begins and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forkserver
import httpx
import pytest
from serving import ServerProcess
from slow_llama import OPTIONS as SLOW

from engine_core.errors import ConfigError
from engine_core.server.settings import ServerSettings

pytestmark = pytest.mark.slow

BODY: dict[str, Any] = {"model": "tiny", "prompt": "long", "max_tokens": 900, "ignore_eos": True}
OPTIONS = [*SLOW, "--max-model-len", "1024", "--kv-cache-memory", "16MiB"]


def _stream(server: ServerProcess, **changes: Any) -> list[Any]:
    """The events of a long stream."""
    body = {**BODY, "stream": True, **changes}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def _wait_until_not_ready(server: ServerProcess) -> httpx.Response:
    """Wait until the server is no longer ready, and return its answer."""
    deadline = time.monotonic() + 60
    while (ready := httpx.get(f"{server.url}/health/ready", timeout=60)).status_code == 200:
        assert time.monotonic() < deadline, "it is still ready"
        time.sleep(0.01)
    return ready


def test_requests_in_flight_end_and_new_ones_are_refused(tiny_model: Path) -> None:
    with ServerProcess(tiny_model, *OPTIONS) as server, ThreadPoolExecutor(4) as pool:
        loading = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60)
        assert (loading.status_code, loading.json()["error"]["code"]) == (503, "loading")
        assert int(loading.headers["retry-after"]) > 0
        assert httpx.get(f"{server.url}/health/live", timeout=60).json() == {"status": "loading"}
        server.wait_ready()
        streams = [pool.submit(_stream, server, max_tokens=60) for _ in range(3)]
        server.wait_for("engine_core_requests_running", 3)
        server.terminate()
        assert _wait_until_not_ready(server).json()["error"]["code"] == "draining"
        refused = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        for stream in streams:
            events = stream.result()
            assert events[-1] == "[DONE]"
            assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0


def test_what_does_not_end_in_time_is_told_so(tiny_model: Path) -> None:
    options = [*OPTIONS, "--drain-timeout", "0.2", "--log-prompts"]
    with ServerProcess(tiny_model, *options) as server, ThreadPoolExecutor(4) as pool:
        server.wait_ready()
        httpx.post(f"{server.url}/v1/completions", json={**BODY, "prompt": {"a": "xylophone"}})
        server.wait_for_log("got {'a': 'xylophone'}")
        body = {**BODY, "prompt": "remember me", "n": 3}
        whole = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        server.wait_for("engine_core_requests_running", 3)
        stream = pool.submit(_stream, server)
        server.wait_for("engine_core_requests_running", 4)
        server.terminate()
        answer = whole.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        events = stream.result()
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == "draining"
        assert server.wait() == 0
        assert "remember me" in server.log


def test_what_the_engine_logs_has_its_level_once(tiny_model: Path) -> None:
    with ServerProcess(tiny_model, *SLOW, "--kv-cache-memory", "128KiB") as server:
        server.wait_ready().wait_for_log("the KV cache holds ")
        assert "+00:00 WARNING the KV cache holds " in server.log


def test_a_second_signal_ends_it_at_once(tiny_model: Path) -> None:
    with ServerProcess(tiny_model, *OPTIONS) as server, ThreadPoolExecutor(1) as pool:
        server.wait_ready()
        pool.submit(httpx.post, f"{server.url}/v1/completions", json=BODY, timeout=60)
        server.wait_for("engine_core_requests_running", 1)
        server.terminate()
        _wait_until_not_ready(server)
        server.terminate(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT  # and 0 if the request had been answered


def test_a_deadline_and_the_death_of_the_engine(tiny_model: Path) -> None:
    options = [*OPTIONS, "--request-timeout", "4"]
    with ServerProcess(tiny_model, *options) as server, ThreadPoolExecutor(4) as pool:
        server.wait_ready()
        many = {**BODY, "n": 3}
        whole = pool.submit(httpx.post, f"{server.url}/v1/completions", json=many, timeout=60)
        endless = {"stream": True, "logit_bias": {"2": -100}}
        asked: dict[str, Any] = {
            "messages": [{"role": "user", "content": "long"}],
            "max_tokens": 900,
        }
        others = [
            pool.submit(httpx.post, f"{server.url}/v1/{path}", json=body | endless, timeout=60)
            for path, body in (("messages", asked), ("responses", {"input": "long"}))
        ]
        events = _stream(server)
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == "timeout"
        assert len(events) > 4
        message, response = (other.result().text.split("\n\n") for other in others)
        assert len(min(message, response)) > 4
        name, data = message[-2].split("\n")
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: "))["error"]["type"] == "timeout_error"
        name, data = response[-2].split("\n")
        assert name == "event: response.failed"
        failed = json.loads(data.removeprefix("data: "))["response"]
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        assert failed["output"][0]["status"] == "incomplete"
        answer = whole.result()
        assert answer.status_code == 408
        assert answer.json()["error"]["type"] == "timeout_error"
        assert "tokens generated" in answer.json()["error"]["message"]
        server.wait_for("engine_core_requests_running", 0)

        whole = pool.submit(httpx.post, f"{server.url}/v1/completions", json=many, timeout=60)
        server.wait_for("engine_core_requests_running", 3)
        os.kill(server.engine_pid, signal.SIGKILL)
        error = whole.result().json()["error"]
        assert error["code"] == "engine_dead"
        assert "SIGKILL" in error["message"]
        assert server.wait() == 1
        assert "SIGKILL" in server.log


def _run(*arguments: str) -> tuple[int, str]:
    done = forkserver.run(
        [sys.executable, "-m", "engine_core.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


_CONNECTS_WHEN_TOLD = """
import logging, re, socket
from engine_core.cli.root import main

class Connect(logging.Handler):
    def emit(self, record):
        found = re.search(r"listening on http://([^:]+):(\\d+)", record.getMessage())
        if found:
            try:
                socket.create_connection((found[1], int(found[2])), timeout=60).close()
                print("connected", flush=True)
            except OSError as error:
                print(f"refused: {error}", flush=True)

logging.getLogger("engine_core.server.run").addHandler(Connect())
main()
"""


def test_listens_before_it_says_so(tmp_path: Path) -> None:
    """Whoever waits for the line may connect at once (the handler runs before the next await)."""
    done = forkserver.run(
        [sys.executable, "-c", _CONNECTS_WHEN_TOLD, "serve", str(tmp_path), "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "connected\n", done.stderr


def test_what_cannot_start_says_why(tiny_model: Path, tmp_path: Path) -> None:
    model = str(tiny_model)
    code, said = _run("serve", str(tmp_path / "nowhere"), "--port", "0")
    assert code == 1
    assert "nowhere" in said.splitlines()[-1]
    code, said = _run("serve", model, "--port", "0", "--tool-parser", "unknown-parser")
    assert code == 1
    assert "unknown-parser" in said.splitlines()[-1]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = _run("serve", model, "--port", str(taken.getsockname()[1]))
    assert code == 1
    assert "cannot listen on 127.0.0.1" in said
    code, said = _run("serve", model, "--api-key-file", str(tmp_path / "none"))
    assert code == 2
    code, said = _run("serve", model, "--drain-timeout", "-1")
    assert (code, "--drain-timeout" in said) == (2, True)
    for option, values, why in (
        ("--served-model-name", ("tiny", "other", "tiny"), "'tiny' is given twice"),
        ("--allow-origin", ("http://b.example:3000", "https://A.example"), "'https://a.example'"),
    ):
        code, said = _run("serve", model, *(word for value in values for word in (option, value)))
        said = " ".join(said.split())
        assert (code, option in said, why in said) == (2, True, True), said


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("served_model_name", "", "a name that is empty"),
        ("allow_origin", "https://a.example/x", "no path"),
        ("allow_origin", "https://a.example/", "no path"),
        ("allow_origin", "a.example", "a scheme and a host"),
        ("allow_origin", "https://a.example:443", "the port unless it is the scheme's own"),
    ],
)
def test_names_and_origins_that_nobody_sends_are_refused(name: str, value: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: .*{why}.*got .*{re.escape(value)}"):
        ServerSettings(**{name: (value,)})


def test_chat_talks_to_a_running_server(server: ServerProcess) -> None:
    done = forkserver.run(
        [
            *(sys.executable, "-m", "engine_core.cli", "chat", "--url", f"{server.url}/v1"),
            *("--temperature", "0", "--max-tokens", "8"),
        ],
        input="Hello\n/settings\n/settings n 2\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 8}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert done.stdout.rstrip() == answer["choices"][0]["message"]["content"].rstrip()
    used = answer["usage"]["total_tokens"]
    assert f"{used} of 1024 in the context]" in done.stderr
    assert "settings: temperature 0.0, max_tokens 8" in done.stderr
    assert "(cut off: max_tokens is reached)" in done.stderr


def test_chat_says_what_a_server_refuses(server: ServerProcess) -> None:
    code, said = _run("chat", "nobody", "--url", server.url)
    assert (code, "has no model 'nobody'; it has 'tiny'" in said) == (1, True)
    code, said = _run("chat", "--url", "http://127.0.0.1:1")
    assert (code, "cannot be reached" in said) == (1, True)
    assert "start a server there with 'engine-core serve'" in said
    code, said = _run("chat", "--url", server.url, "--max-num-seqs", "3")
    assert (code, "--max-num-seqs" in said) == (2, True)
    code, said = _run("chat")
    assert (code, "give a MODEL, or the --url" in said) == (2, True)
