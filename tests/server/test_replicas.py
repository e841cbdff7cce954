"""``serve --replicas``: several engines behind one server."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from attacking import wait_until
from random_examples import FULL
from serving import ServerProcess, Stream, leave_unharmed
from slow_llama import OPTIONS as SLOW

from engine_core.errors import ConfigError
from engine_core.server.settings import ServerSettings

REPLICAS, ROWS, QUEUE = 3, 6, 2
# All of them in ``make soak``.
CONVERSATIONS, TURNS = (50, 5) if os.environ.get(FULL) else (12, 4)
KEYS = {"one": "alpha", "two": "beta"}
OPTIONS = ("--device", "cpu", "--max-num-seqs", str(ROWS), "--max-model-len", "2048")
OPTIONS += ("--max-queued-requests", str(QUEUE), "--kv-cache-memory", "16MiB")
OPTIONS += ("--served-model-name", "tiny")


def client_of(server: ServerProcess, key: str | None = None) -> httpx.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=120)


class Talks:
    """Conversations of token ids, each of which grows by its answers and by new questions."""

    def __init__(self, client: httpx.Client, salts: int = 1) -> None:
        """Have all of them, some at a time; turn by turn they have one of so many salts."""
        draw = Random(7)
        self._client, self._salts = client, salts
        self.answers: list[list[list[int]]] = [[] for _ in range(CONVERSATIONS)]
        self._prompts: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
        for turn in range(TURNS):
            for prompt in self._prompts:
                prompt += [draw.randrange(3, 300) for _ in range(44)]
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(self._turn, range(CONVERSATIONS), [turn] * CONVERSATIONS))

    def _turn(self, talk: int, turn: int) -> None:
        prompt = self._prompts[talk]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        body["cache_salt"] = f"{turn % self._salts} of {self._salts}"
        answer = self._client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        self.answers[talk].append(choice["token_ids"])
        prompt += choice["token_ids"]


def hit_rate(server: ServerProcess, client: httpx.Client, salts: int) -> tuple[float, Talks]:
    """The part of prompt tokens that were in the prefix cache, and what was said."""

    def figures() -> tuple[float, float]:
        names = ("hits", "queries")
        found = [server.metric(f"engine_core_prefix_cache_{name}_tokens_total") for name in names]
        return found[0], found[1]

    before = figures()
    talks = Talks(client, salts)
    after = figures()
    return (after[0] - before[0]) / (after[1] - before[1]), talks


def requests_of(server: ServerProcess, replica: int, why: str) -> float:
    name = "engine_core_replica_requests_total"
    return server.metric(name, replica=str(replica), reason=why)


@pytest.fixture(scope="module")
def three(tiny_model: Path) -> Iterator[ServerProcess]:
    options = (*OPTIONS, *SLOW, "--replicas", str(REPLICAS), "--max-replica-restarts", "0")
    keys = {"ENGINE_CORE_API_KEY": " ".join(KEYS.values())}
    with ServerProcess(tiny_model, *options, environment=keys) as process:
        yield process.wait_ready()


@pytest.mark.slow
def test_conversations_stay_with_their_blocks(server: ServerProcess, three: ServerProcess) -> None:
    """Turns that went round would find what every third turn left, as with a salt for each."""
    with client_of(server) as client:
        alone, expected = hit_rate(server, client, 1)
    with client_of(three, KEYS["one"]) as client:
        routed, talks = hit_rate(three, client, 1)
        models = client.get("/v1/models").json()["data"][0]
        requests = REPLICAS * [0.0]
        for number in range(REPLICAS):
            for why in ("prefix", "load", "new"):
                requests[number] += requests_of(three, number, why)
        around, same = hit_rate(three, client, REPLICAS)
    assert talks.answers == same.answers == expected.answers
    rates = f"prefix hits: one {alone:.3f}, routed {routed:.3f}, in turn {around:.3f}"
    # So few conversations move now and then, when a machine is slow to answer.
    least = 0.9 if os.environ.get(FULL) else 0.7
    assert routed >= least * alone, rates
    assert around <= 0.4 * alone, rates
    # All of them work, and their figures add up.
    total = CONVERSATIONS * TURNS
    assert sum(requests) == total
    assert min(requests) > 0, requests
    for number in range(REPLICAS):
        assert three.metric("engine_core_replica_up", replica=str(number)) == 1
    for name in ("prompt_tokens", "generation_tokens", "prefix_cache_hits_tokens"):
        parts = [
            three.metric(f"engine_core_replica_{name}_total", replica=str(number))
            for number in range(REPLICAS)
        ]
        assert sum(parts) == three.metric(f"engine_core_{name}_total") > 0
    assert (models["id"], models["max_model_len"]) == ("tiny", 2048)


@pytest.mark.slow
def test_keys_health_and_stored_responses_are_one_for_all(three: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": [5] * 64, "max_tokens": 1}
    with client_of(three, "wrong") as stranger, client_of(three, KEYS["two"]) as client:
        assert stranger.post("/v1/completions", json=body).status_code == 401
        for path in ("/health", "/health/live"):
            assert stranger.get(path).json() == {
                "status": "ready",
                "replicas": [
                    {"replica": number, "status": "ready", "restarts": 0}
                    for number in range(REPLICAS)
                ],
            }
        # What another key has sent is not in the cache of this one, wherever it went.
        with client_of(three, KEYS["one"]) as other:
            for each, expected in ((other, 0), (client, 0), (client, 48)):
                answer = each.post("/v1/completions", json=body).json()
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
        # Responses are the server's, whichever replica makes them.
        asked: dict[str, Any] = {"model": "tiny", "input": "a", "max_output_tokens": 2}
        first = client.post("/v1/responses", json=asked).json()
        assert first["store"] is True
        asked["previous_response_id"] = first["id"]
        second = client.post("/v1/responses", json=asked)
        assert second.status_code == 200, second.text
        assert client.get(f"/v1/responses/{first['id']}").json()["id"] == first["id"]


@pytest.mark.slow
def test_load_death_and_drain(three: ServerProcess) -> None:
    key = KEYS["one"]

    def held() -> list[float]:
        return [
            figure("requests_running", number) + figure("requests_waiting", number)
            for number in range(REPLICAS)
        ]

    def figure(name: str, number: int, **labels: str) -> float:
        return three.metric(f"engine_core_replica_{name}", replica=str(number), **labels)

    # One conversation is with one replica, until that has no row left.
    moved = sum(figure("requests_total", number, reason="load") for number in range(REPLICAS))
    prompt = [7] * 40
    streams = [
        Stream(three.url, key, prompt=prompt, max_tokens=1900) for _ in range(REPLICAS * ROWS)
    ]
    wait_until(lambda: sum(held()) == REPLICAS * ROWS)
    before = held()
    assert min(before) > 0
    after = sum(figure("requests_total", number, reason="load") for number in range(REPLICAS))
    assert after > moved
    # The queue is one for all.
    waiting = threading.Thread(target=ask, args=(three, key, QUEUE))
    waiting.start()
    wait_until(lambda: sum(held()) == REPLICAS * ROWS + QUEUE)
    with client_of(three, key) as client:
        body = {"model": "tiny", "prompt": "more", "max_tokens": 4}
        refused = client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        too_many = client.post("/v1/completions", json=body | {"n": REPLICAS * ROWS + QUEUE + 1})
        assert too_many.status_code == 400
        assert f"{REPLICAS * ROWS} that run and {QUEUE} that wait" in too_many.text

    # A replica dies: its requests end with the cause, and others with their text.
    victim = three.engine_pid
    os.kill(victim, signal.SIGKILL)
    three.wait_for_log(f"the engine process (pid {victim}) ended by signal SIGKILL")
    health = httpx.get(f"{three.url}/health", timeout=60).json()
    assert health["status"] == "ready"
    phases = [each["status"] for each in health["replicas"]]
    assert sorted(phases) == ["dead", "ready", "ready"]
    its = before[phases.index("dead")]
    wait_until(lambda: sum(bool(stream.error) for stream in streams) >= its)
    lost = [stream for stream in streams if stream.error]
    leave_unharmed([stream for stream in streams if not stream.error])
    for stream in lost:
        stream.join(60)
    assert len(lost) == its
    assert {stream.error for stream in lost} == {"engine_dead"}
    waiting.join(60)
    assert "[7, 7" not in three.log

    # What is there when the server is to end is answered, on all that live.
    streams = [Stream(three.url, key, prompt=[n] * 40, max_tokens=250) for n in range(10, 14)]
    wait_until(lambda: sum(held()) == 4)
    assert sorted(held())[1] > 0
    three.terminate()
    three.wait_for_log("no more requests are taken")
    with client_of(three, key) as client:
        refused = client.post("/v1/completions", json={"model": "tiny", "prompt": "late"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    for stream in streams:
        stream.join(60)
        assert stream.complete
    assert three.wait() == 0, three.log


def ask(server: ServerProcess, key: str, n: int) -> None:
    """Wait for so many sequences' turn."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "n": n, "ignore_eos": True}
    with client_of(server, key) as client:
        client.post("/v1/completions", json=body)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"api_server_count": 2}, "api_server_count is 2, .* and replicas is 2; leave one"),
        ({"trace": Path("t.json")}, "trace is t.json, .* and replicas is 2; leave one"),
    ],
)
def test_what_is_for_one_engine_is_refused(other: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerSettings(replicas=2, **other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 3, "max_replicas": 2}, "max_replicas is 2, and replicas, .* is 3; raise"),
        ({"scale_up_delay": 1}, "scale_up_delay is for .* follows the queue; give max_replicas"),
        ({"max_replica_restarts": 0}, "max_replica_restarts is 0, and there is one engine"),
        ({"trace_seconds": 5}, "trace_seconds is 5, and trace, .* is not set"),
        ({"scale_down_delay": 1}, "scale_down_delay is for"),
        ({"replica_cpus": 2}, "replica_cpus .* replica_executor is 'processes'; leave it out"),
        ({"replica_executor": "mpi"}, "'processes' or 'ray'"),
        ({"max_replicas": 2, "api_server_count": 2}, "api_server_count is 2, .* max_replicas is 2"),
        ({"replica_executor": "ray", "trace": Path("t")}, "trace is t, .* replica_executor is ray"),
    ],
)
def test_settings_of_replicas_that_mean_nothing_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerSettings(**settings)
