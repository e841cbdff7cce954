"""A server under random arrivals, parameters and clients that leave.

``ENGINE_CORE_SOAK_SECONDS`` says for how long; ``make soak`` gives it ten minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from random_requests import Job, answered, known_jobs
from serving import ServerProcess, write_tiny_model

REQUESTS = 60 if "ENGINE_CORE_SOAK_SECONDS" in os.environ else 12
SECONDS = float(os.environ.get("ENGINE_CORE_SOAK_SECONDS", "2"))
CLIENTS = 24
# What the allocators of both processes may add between two samples of memory.
ALLOWED_GROWTH = 48 * 2**20


def memory_of(server: ServerProcess) -> int:
    """Bytes of the server's process and of those that it started."""
    parent = psutil.Process(server.process.pid)
    total = 0
    for process in (parent, *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # a worker that has just ended
            total += process.memory_info().rss
    return total


async def one_request(client: httpx.AsyncClient, job: Job, draw: random.Random) -> str:
    """Send a job in one of the ways there are; what became of it."""
    way = draw.choice(("whole", "stream", "stream", "leave", "leave at once"))
    if way == "whole":
        response = await client.post("/v1/completions", json=job.body)
        assert response.status_code == 200, response.text
        assert answered(response.json()["choices"]) == job.answers, job
        return "complete"
    if way == "leave at once":
        try:
            await client.post("/v1/completions", json=job.body, timeout=draw.uniform(0.001, 0.05))
        except httpx.TimeoutException:
            return "left"
        return "complete"
    chunks_read = draw.randint(1, 8)
    tokens: list[list[int]] = [[] for _ in job.answers]
    async with client.stream("POST", "/v1/completions", json={**job.body, "stream": True}) as got:
        assert got.status_code == 200, await got.aread()
        async for line in got.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                tokens[choice["index"]] += choice.get("token_ids", ())
            chunks_read -= 1
            if way == "leave" and chunks_read == 0:
                return "left"
    assert tuple(map(tuple, tokens)) == job.answers, job
    return "complete"


@pytest.mark.slow
def test_tokens_blocks_and_memory(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    jobs = known_jobs(model, REQUESTS, seed=5)
    options = ["--served-model-name", "tiny", "--max-num-seqs", "12", "--max-model-len", "512"]
    options += ["--kv-cache-memory", "768KiB", "--max-num-batched-tokens", "96"]
    outcomes: Counter[str] = Counter()
    memory: list[int] = []

    async def client_life(client: httpx.AsyncClient, number: int, end: float) -> None:
        draw = random.Random(number)
        # On a slow machine it takes longer until there is something to look at.
        while time.monotonic() < end or outcomes["complete"] <= 20 or outcomes["left"] <= 5:
            outcomes[await one_request(client, draw.choice(jobs), draw)] += 1
            await asyncio.sleep(draw.expovariate(20))

    async def watch(server: ServerProcess, end: float) -> None:
        while time.monotonic() < end:
            memory.append(memory_of(server))
            await asyncio.sleep(max(0.2, SECONDS / 500))

    async def soak(server: ServerProcess) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            # Whatever is made once, or once for each size of a batch, is made before memory is
            # looked at.
            for _ in range(3):
                await asyncio.gather(*(one_request(client, job, random.Random(0)) for job in jobs))
            end = time.monotonic() + SECONDS
            async with asyncio.TaskGroup() as group:
                group.create_task(watch(server, end))
                for number in range(CLIENTS):
                    group.create_task(client_life(client, number, end))

    with ServerProcess(model, *options) as server:
        server.wait_ready()
        asyncio.run(soak(server))
        for gauge in ("requests_running", "requests_waiting", "kv_cache_usage_ratio"):
            server.wait_for(f"engine_core_{gauge}", 0)
        preemptions = server.metric("engine_core_preemptions_total")
        tokens = server.metric("engine_core_generation_tokens_total")
        assert "Traceback" not in server.log
        server.terminate()
        assert server.wait() == 0, server.log
    first = sorted(memory[len(memory) // 4 : len(memory) // 2])
    last = sorted(memory[3 * len(memory) // 4 :])
    growth = last[len(last) // 2] - first[len(first) // 2]
    print(
        f"{outcomes['complete']} complete, {outcomes['left']} left, {tokens:.0f} tokens, "
        f"{preemptions:.0f} preemptions in {SECONDS:.0f} s; memory grew by "
        f"{growth / 2**20:.1f} MiB to {last[-1] / 2**20:.0f}"
    )
    assert outcomes["complete"] > 20
    assert outcomes["left"] > 5
    assert preemptions > 0
    assert growth < ALLOWED_GROWTH, f"memory grew by {growth} bytes"
