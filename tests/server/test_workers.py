"""Several processes that answer requests for one engine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serving import COMPLETION, ServerProcess, Stream, leave_unharmed
from slow_llama import OPTIONS as SLOW

pytestmark = pytest.mark.slow

OPTIONS = ("--api-server-count", "2", "--max-num-seqs", "32", "--max-model-len", "1024")
BODY: dict[str, Any] = COMPLETION


@contextmanager
def serving(model: Path, *options: str) -> Iterator[ServerProcess]:
    """A server, of which the test sees how it ends."""
    flags = (*OPTIONS, "--kv-cache-memory", "16MiB", "--served-model-name", "tiny", *options)
    with ServerProcess(model, *flags) as server:
        server.wait_for_log(" ready ")
        yield server


def owners(server: ServerProcess) -> dict[int, int]:
    """By the clients' ports, the processes that have their connections."""
    return {
        connection.raddr.port: child.pid
        for child in psutil.Process(server.process.pid).children()
        for connection in child.net_connections("tcp")
        if connection.raddr
    }


def _check_nothing_is_stored(server: ServerProcess) -> None:
    """Responses are not kept where the next request may come to another process."""
    asked = {"input": "a", "max_output_tokens": 1}
    url = f"{server.url}/v1/responses"
    answer = httpx.post(url, json=asked, timeout=60).json()
    assert (answer["status"], answer["store"]) == ("incomplete", False)
    for more in ({"store": True}, {"previous_response_id": answer["id"]}):
        refused = httpx.post(url, json=asked | more, timeout=60)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == next(iter(more))
        assert "2 processes that answer (--api-server-count)" in refused.text
    missing = httpx.get(f"{url}/{answer['id']}", timeout=60)
    assert missing.status_code == 404
    assert "--api-server-count" in missing.text


def test_each_answers_for_all(tiny_model: Path) -> None:
    """One that is killed loses its own requests only, and all end with the engine."""
    with serving(tiny_model, *SLOW) as server:
        _check_each_answers_for_all(server)
        _check_a_killed_process_loses_its_own_requests_only(server)
        streams = [Stream(server.url, prompt="one", max_tokens=900) for _ in range(4)]
        psutil.Process(server.engine_pid).kill()
        assert server.wait() == 1
        assert "ended by signal SIGKILL" in server.log
        for stream in streams:
            stream.join(60)
            assert stream.error == "engine_dead"


def _check_each_answers_for_all(server: ServerProcess) -> None:
    prompts = [f"The quick brown fox {number}" for number in range(8)]

    def whole(prompt: str) -> str:
        body = {**BODY, "prompt": prompt, "max_tokens": 20}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        text: str = answer.json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(whole, prompts))
    assert len(set(texts)) > 1
    streams = [Stream(server.url, prompt=prompt, max_tokens=20) for prompt in prompts]
    for stream, text in zip(streams, texts, strict=True):
        stream.join(60)
        assert stream.complete
        assert stream.text == text
    ask = {
        **BODY,
        "ignore_eos": False,
        "prompt": "x",
        "max_tokens": 16,
        "guided_choice": ["left", "right"],
    }
    for _ in range(6):
        answer = httpx.post(f"{server.url}/v1/completions", json=ask, timeout=60)
        assert answer.json()["choices"][0]["text"] in ("left", "right")
    # Each connection goes to either process; whichever it is has the figures of both.
    for _ in range(6):
        server.wait_for("engine_core_finished_sequences_total", 16, finish_reason="length")
        server.wait_for("engine_core_finished_sequences_total", 6, finish_reason="stop")
        assert httpx.get(f"{server.url}/health/ready", timeout=60).status_code == 200
    _check_nothing_is_stored(server)


def _check_a_killed_process_loses_its_own_requests_only(server: ServerProcess) -> None:
    aborted = server.metric("engine_core_aborted_sequences_total")
    streams = [Stream(server.url, prompt="one", max_tokens=900) for _ in range(4)]
    while len({(of := owners(server))[stream.port] for stream in streams}) < 2:
        streams.append(Stream(server.url, prompt="one", max_tokens=900))
        assert len(streams) < 32, f"one process has all connections: {of}"
    # The one that has two of them, so that one may go away and one is lost.
    victim = max(set(of.values()), key=[of[stream.port] for stream in streams].count)
    lost = [stream for stream in streams if of[stream.port] == victim]
    kept = [stream for stream in streams if of[stream.port] != victim]
    gone = kept.pop() if len(kept) > 1 else lost.pop()
    gone.left.set()  # a client that goes away
    server.wait_for("engine_core_aborted_sequences_total", aborted + 1)
    server.wait_for("engine_core_requests_running", len(streams) - 1)
    psutil.Process(victim).send_signal(signal.SIGKILL)
    server.wait_for_log("another process takes its place")
    for stream in lost:
        stream.join(60)
    assert not any(stream.complete for stream in lost)
    leave_unharmed(kept)
    # By now, or when the new process answers: connections to it wait until it does.
    server.wait_for("engine_core_aborted_sequences_total", aborted + len(streams))
    server.wait_for("engine_core_requests_running", 0)
    pids: set[int] = set()
    while len(pids) < 2:
        again = Stream(server.url, prompt="one", max_tokens=10)
        pids.add(owners(server)[again.port])
        again.join(60)
        assert again.complete
    assert victim not in pids


def test_the_queue_is_one_for_all(tiny_model: Path) -> None:
    options = ("--max-num-seqs", "2", "--max-queued-requests", "3", "--drain-timeout", "0.5")
    with serving(tiny_model, *SLOW, *options) as server:
        streams = [Stream(server.url, prompt="one", max_tokens=900) for _ in range(2)]
        server.wait_for("engine_core_requests_running", 2)
        body = {**BODY, "prompt": "two", "max_tokens": 900, "n": 3}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
            server.wait_for("engine_core_requests_waiting", 3)
            for _ in range(8):
                refused = httpx.post(
                    f"{server.url}/v1/completions", json={**BODY, "prompt": "three"}, timeout=60
                )
                assert refused.status_code == 429
            server.terminate(signal.SIGINT)
            assert waiting.result().status_code == 503
        assert server.wait() == 0
        for stream in streams:
            stream.join(60)
            assert stream.error == "draining"
