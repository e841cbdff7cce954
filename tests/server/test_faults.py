"""Faults around a server, which other requests must not notice.

Every answer that is not ended by its own fault has the tokens of an engine that nobody disturbs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from attacking import read_all, wait_until
from random_requests import Job, answered, known_jobs
from serving import ServerProcess
from slow_llama import OPTIONS as SLOW

pytestmark = pytest.mark.slow

LONG = {"prompt": [5, 6, 7], "max_tokens": 480, "ignore_eos": True, "temperature": 0}
STREAMED = {**LONG, "stream": True}


@pytest.fixture(scope="module")
def jobs(tiny_model: Path) -> list[Job]:
    return known_jobs(tiny_model, 16, seed=3)


@contextmanager
def serving(tiny_model: Path, *options: str) -> Iterator[ServerProcess]:
    """A server of its own for a fault; its blocks are all back at the end."""
    options = ("--served-model-name", "tiny", "--max-model-len", "512", *options)
    with ServerProcess(tiny_model, *options) as server:
        yield server.wait_ready()
        if server.process.poll() is None:
            nothing_is_left(server)
            server.terminate()
            assert server.wait() == 0, server.log
            assert "Traceback" not in server.log, server.log


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[ServerProcess]:
    """A server of those whose faults it outlives; few may run at once."""
    with serving(tiny_model, "--max-num-seqs", "8") as server:
        yield server


def nothing_is_left(server: ServerProcess) -> None:
    for gauge in ("requests_running", "requests_waiting", "kv_cache_usage_ratio"):
        server.wait_for(f"engine_core_{gauge}", 0)


def in_parallel(
    server: ServerProcess, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]
) -> None:
    """Run ``work`` with a client that opens as many connections as it likes."""

    async def run() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            await work(client)

    asyncio.run(run())


async def complete(client: httpx.AsyncClient, job: Job) -> None:
    """The job as everybody else's request: it must come back as if it were alone."""
    response = await client.post("/v1/completions", json=job.body)
    assert response.status_code == 200, response.text
    assert answered(response.json()["choices"]) == job.answers, job


def open_stream(
    server: ServerProcess,
    body: dict[str, Any],
    receive_buffer: int | None = None,
    path: str = "/v1/completions",
) -> socket.socket:
    """A request whose socket the test reads, or does not; a stream if its body says so.

    ``receive_buffer`` are the bytes that the kernel takes for it, more or less; as many as it likes
    if None.
    """
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps({"model": "tiny", **body}).encode()
    end = socket.socket()
    end.settimeout(60)
    if receive_buffer is not None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    end.connect((host, int(port)))
    end.sendall(
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
        + f"content-length: {len(content)}\r\n\r\n".encode()
        + content
    )
    return end


def test_clients_that_go_away(tiny_model: Path, jobs: list[Job]) -> None:
    # Not one would be over by itself before all are left.
    with serving(tiny_model, *SLOW, "--max-model-len", "1024") as server:
        for _ in range(2):
            with open_stream(server, STREAMED) as end:
                assert b"200 OK" in end.recv(64)
                server.wait_for("engine_core_requests_running", 1)
            steps = server.metric("engine_core_engine_steps_total")
            server.wait_for("engine_core_requests_running", 0)
            # It would have gone on for hundreds: only those are over that ran while this looked.
            assert server.metric("engine_core_engine_steps_total") - steps < 400
        assert server.metric("engine_core_aborted_sequences_total") == 2
        in_parallel(server, lambda client: complete(client, jobs[0]))
        # Of several each is away by itself.
        long = {**STREAMED, "temperature": 1, "max_tokens": 1000}
        ends = [open_stream(server, {**long, "seed": i}) for i in range(4)]
        for end in ends:
            end.recv(64)
        server.wait_for("engine_core_requests_running", 4)
        for left, end in enumerate(ends[:-1], 1):
            end.close()
            server.wait_for("engine_core_requests_running", 4 - left)
        ends[-1].close()


def test_ten_times_more_clients_than_slots(shared: ServerProcess, jobs: list[Job]) -> None:
    requests = {"path": "/v1/completions", "status": "200"}
    before = shared.metric("engine_core_http_requests_total", **requests)

    async def crowd(client: httpx.AsyncClient) -> None:
        await asyncio.gather(*(complete(client, jobs[i % len(jobs)]) for i in range(80)))

    in_parallel(shared, crowd)
    assert shared.metric("engine_core_http_requests_total", **requests) - before == 80


def test_a_queue_that_is_full(tiny_model: Path, jobs: list[Job]) -> None:
    options = (*SLOW, "--max-num-seqs", "2", "--max-queued-requests", "3")
    statuses: Counter[int] = Counter()
    with serving(tiny_model, *options) as server:

        async def ask(client: httpx.AsyncClient, job: Job) -> None:
            response = await client.post("/v1/completions", json=job.body)
            statuses[response.status_code] += 1
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["code"]
            else:
                assert answered(response.json()["choices"]) == job.answers

        async def crowd(client: httpx.AsyncClient) -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(24):
                    group.create_task(ask(client, jobs[number % len(jobs)]))

        in_parallel(server, crowd)
        assert set(statuses) == {200, 429}
        # And later there is room again.
        in_parallel(server, lambda client: complete(client, jobs[0]))


def test_the_engine_process_is_killed(tiny_model: Path) -> None:
    with serving(tiny_model, *SLOW) as server:
        messages = []
        streaming = []

        async def crowd(client: httpx.AsyncClient) -> None:
            four = {"model": "tiny", **LONG, "n": 4}

            async def whole() -> None:
                response = await client.post("/v1/completions", json=four)
                assert response.status_code == 500, response.text
                messages.append(response.json()["error"]["message"])

            async def streamed() -> None:
                body = {**four, "stream": True}
                async with client.stream("POST", "/v1/completions", json=body) as got:
                    lines = []
                    async for line in got.aiter_lines():
                        if not lines:
                            streaming.append(got)
                        if line:
                            lines.append(line)
                *_, error, done = lines
                assert done == "data: [DONE]"
                messages.append(json.loads(error.removeprefix("data: "))["error"]["message"])

            async def kill() -> None:
                # An error before a stream's first token is an answer with a status of its own.
                while len(streaming) < 2 or server.metric("engine_core_requests_running") < 16:
                    await asyncio.sleep(0.01)
                os.kill(server.engine_pid, signal.SIGKILL)

            await asyncio.gather(whole(), whole(), streamed(), streamed(), kill())

        in_parallel(server, crowd)
        assert len(messages) == 4
        assert all("SIGKILL" in message for message in messages), messages
        assert server.wait() == 1, server.log
        assert "SIGKILL" in server.log


HANGING = """
import time
from engine_core_llama.config import LlamaConfigBuilder
from engine_core_llama.model import LlamaForCausalLM

class HangingLlama(LlamaForCausalLM):
    def forward(self, input_ids, *args, **kwargs):
        if (input_ids == 319).any():
            wait_for_a_rank_that_is_gone()
        return super().forward(input_ids, *args, **kwargs)

def wait_for_a_rank_that_is_gone():
    time.sleep(3600)

class HangingLlamaBuilder(LlamaConfigBuilder):
    architecture = "HangingLlama"

MODULE_MAP = {"HangingLlama": "HangingLlama"}
CONFIG_BUILDERS = [HangingLlamaBuilder]
"""


def test_a_step_that_hangs(tiny_model: Path, tmp_path: Path, jobs: list[Job]) -> None:
    file = tmp_path / "hanging_llama.py"
    file.write_text(HANGING)
    named = ("--hf-overrides", '{"architectures": ["HangingLlama"]}')
    with serving(
        tiny_model, "--custom-module-map", str(file), *named, "--step-timeout", "4"
    ) as server:
        in_parallel(server, lambda client: complete(client, jobs[0]))
        time.sleep(4.5)  # having nothing to do is no hanging
        in_parallel(server, lambda client: complete(client, jobs[1]))
        body = {"model": "tiny", "prompt": [5, 319], "max_tokens": 1}
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 500, response.text
        error = response.json()["error"]
        assert error["code"] == "engine_dead"
        assert "hangs: no step has ended for 4 s" in error["message"]
        assert server.wait() == 1, server.log
        assert "in wait_for_a_rank_that_is_gone" in server.log


def test_a_cache_that_is_far_too_small(tiny_model: Path) -> None:
    # Each fits; a few together do not.
    jobs = known_jobs(tiny_model, 6, seed=4, longest_answer=200)
    with serving(tiny_model, "--kv-cache-memory", "256KiB") as server:

        async def crowd(client: httpx.AsyncClient) -> None:
            await asyncio.gather(*(complete(client, job) for job in jobs))

        in_parallel(server, crowd)
        assert server.metric("engine_core_preemptions_total") > 0


def _nested(depth: int) -> bytes:
    return b'{"model":"tiny","prompt":' + b"[" * depth + b"]" * depth + b"}"


BAD_BODIES = {
    "huge": (b'{"model":"tiny","prompt":"' + b"a" * (9 << 20) + b'"}', 413),
    "deep": (_nested(100_000), 400),
    "not UTF-8": (b'{"model":"tiny","prompt":"\xff\xfe"}', 400),
    "lone surrogate": (rb'{"model":"tiny","prompt":"\ud800"}', 400),
    "NaN": (b'{"model":"tiny","prompt":"a","temperature":NaN}', 400),
    "infinite": (b'{"model":"tiny","prompt":"a","top_p":1e999}', 400),
    "negative": (b'{"model":"tiny","prompt":"a","max_tokens":-1}', 400),
    "negative token": (b'{"model":"tiny","prompt":[-1]}', 400),
    "token beyond the vocabulary": (b'{"model":"tiny","prompt":[320]}', 400),
    "a number of a million digits": (
        b'{"model":"tiny","prompt":"a","seed":' + b"9" * 1_000_000 + b"}",
        400,
    ),
    "cut off": (b'{"model":"tiny","prompt":"a', 400),
    "empty": (b"", 400),
    "no object": (b"[]", 400),
    "a field twice": (b'{"model":"tiny","prompt":"a","prompt":"b"}', 400),
    "an unknown field": (b'{"model":"tiny","prompt":"a","promt":"b"}', 400),
}


def test_bodies_that_nobody_should_send(shared: ServerProcess, jobs: list[Job]) -> None:
    async def refused(client: httpx.AsyncClient, name: str) -> None:
        body, status = BAD_BODIES[name]
        kind = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=body, headers=kind)
        assert response.status_code == status, (name, response.text)
        assert response.json()["error"]["message"], name

    async def crowd(client: httpx.AsyncClient) -> None:
        others = (complete(client, job) for job in jobs)
        await asyncio.gather(*(refused(client, name) for name in BAD_BODIES), *others)

    async def again(client: httpx.AsyncClient) -> None:
        for name in 10 * ("huge", "deep", "a number of a million digits"):
            await refused(client, name)

    in_parallel(shared, crowd)
    # Thirty deep or huge bodies leave no memory behind worth naming.
    process = psutil.Process(shared.process.pid)
    before = process.memory_info().rss
    in_parallel(shared, again)
    assert process.memory_info().rss - before < 64 << 20


def test_a_slow_reader(shared: ServerProcess, jobs: list[Job]) -> None:
    """It is served at its own speed; the others do not wait for it, nor does its text pile up."""
    body = {**STREAMED, "logprobs": 5, "return_token_ids": True}
    slow = [open_stream(shared, {**body, "seed": i}) for i in range(3)]
    in_parallel(shared, lambda client: complete(client, jobs[0]))
    nothing_is_left(shared)  # the engine has long been done with all of them
    time.sleep(0.5)
    tokens = []
    for end in slow:
        received = bytearray()
        while b"data: [DONE]" not in received[-1100:]:
            piece = end.recv(1024)
            assert piece, received[-500:]
            received += piece
        end.close()
        count = 0
        for line in received.decode().splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    count += len(choice.get("token_ids", ()))
        tokens.append(count)
    assert tokens == [480] * 3


# Each event of a stream has it: a few hundred are more than the kernel takes for a client, which is
# 4 MiB by default.
LONG_NAME = "a-name-that-is-long" * 400


def test_clients_that_do_not_read(tiny_model: Path, jobs: list[Job]) -> None:
    """They are cut off; neither their requests nor their answers stay.

    Another who reads a little at a time is not.
    """
    many = {**STREAMED, "model": LONG_NAME, "n": 2}
    names = ("--served-model-name", LONG_NAME)
    with serving(tiny_model, *names, "--send-timeout", "3") as server:
        reading = open_stream(server, many, receive_buffer=4096)
        whole = {"tokens": [1] * 2**20}  # of which each is a dozen characters
        ends = [
            open_stream(server, many, receive_buffer=4096),
            open_stream(server, whole, receive_buffer=4096, path="/detokenize"),
        ]
        received = bytearray(reading.recv(1024))
        # Less than the kernel's buffers must be emptied by before more is written to them.
        begin = time.monotonic()
        while time.monotonic() - begin < 7:
            received += reading.recv(4096)
            time.sleep(0.2)
        cut = "took nothing of its answer for 3 s"
        wait_until(lambda: server.log.count(cut) >= len(ends))
        while not received.endswith(b"0\r\n\r\n"):
            piece = reading.recv(1 << 20)
            assert piece, server.log
            received += piece
        reading.close()
        assert b"data: [DONE]" in received
        nothing_is_left(server)
        assert server.log.count(cut) == len(ends)
        in_parallel(server, lambda client: complete(client, jobs[0]))
        for end, last in zip(ends, (b"data: [DONE]", b'"}'), strict=True):
            received = read_all(end)
            end.close()
            assert received.startswith(b"HTTP/1.1 200 OK")
            assert last not in received


def test_sigterm_under_load(tiny_model: Path, jobs: list[Job]) -> None:
    with serving(tiny_model, *SLOW, "--max-num-seqs", "4") as server:
        outcomes: Counter[str] = Counter()

        async def ask(client: httpx.AsyncClient, job: Job) -> None:
            response = await client.post("/v1/completions", json=job.body)
            if response.status_code == 503:
                outcomes["refused"] += 1
                return
            assert response.status_code == 200, response.text
            assert answered(response.json()["choices"]) == job.answers
            outcomes["complete"] += 1

        async def ask_late(client: httpx.AsyncClient, job: Job) -> None:
            try:
                await ask(client, job)
            except httpx.TransportError:  # it has closed its door, or closes it just then
                outcomes["no connection"] += 1

        async def crowd(client: httpx.AsyncClient) -> None:
            async with asyncio.TaskGroup() as group:
                for job in jobs[:12]:
                    group.create_task(ask(client, job))
                load = 0
                while load + outcomes.total() < 12:
                    load = (await client.get("/load")).json()["server_load"]
                server.terminate()
                for job in jobs[:8]:
                    group.create_task(ask_late(client, job))
                    await asyncio.sleep(0.01)

        in_parallel(server, crowd)
        assert server.wait() == 0, server.log
        # What had begun was finished; what came after was turned away.
        assert outcomes["complete"] >= 4
        assert outcomes["refused"] + outcomes["no connection"] > 0
        assert outcomes.total() == 20
