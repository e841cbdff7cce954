"""A server that answers short chats and nothing else: its processes are to stop growing.

``ENGINE_CORE_SOAK_SECONDS`` says for how long; ``make soak-chats`` gives it an hour. What it prints
is a table for ``benchmarks/notes/service.md``.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path
from statistics import fmean

import httpx
import psutil
import pytest
from serving import ServerProcess

SECONDS = float(os.environ.get("ENGINE_CORE_SOAK_SECONDS", "0"))
CLIENTS = 8
# Every block of the cache is written by then, and oneDNN keeps as many products as it may.
SETTLED = 600
# Means of a minute: a step's tensors come and go.
EVERY = 60
ALLOWED_GROWTH = 0.01
# No real model needs to understand them; none of the prompts comes twice.
WORDS = """cat river moon story engine planet music train winter number light dream why how list
explain short make tell answer about without between seven slow green old never"""


def memory_of(server: ServerProcess) -> tuple[int, int]:
    """Bytes of the server's process and of the engine's."""
    pids = (server.process.pid, server.engine_pid)
    return tuple(psutil.Process(pid).memory_info().rss for pid in pids)  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.skipif(SECONDS < SETTLED + 4 * EVERY, reason="make soak-chats runs it")
def test_short_chats_take_no_more_memory_after_ten_minutes(smollm2_gguf: Path) -> None:
    outcomes: Counter[int] = Counter()
    samples: list[tuple[float, float, float]] = []

    async def chat(client: httpx.AsyncClient, draw: random.Random) -> None:
        text = " ".join(draw.choices(WORDS.split(), k=draw.randint(3, 60)))
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": draw.randint(4, 48),
            "stream": draw.random() < 0.5,
        }
        answer = await client.post("/v1/chat/completions", json=body)
        outcomes[answer.status_code] += 1

    async def client_life(client: httpx.AsyncClient, number: int, end: float) -> None:
        draw = random.Random(number)
        while time.monotonic() < end:
            await chat(client, draw)
            await asyncio.sleep(draw.expovariate(10))

    async def watch(server: ServerProcess, begin: float, end: float) -> None:
        minute: list[tuple[int, int]] = []
        while (now := time.monotonic()) < end:
            minute.append(memory_of(server))
            if now - begin >= EVERY * (len(samples) + 1):
                samples.append((now - begin, *map(fmean, zip(*minute, strict=True))))
                minute.clear()
                seconds, *sizes = samples[-1]
                mib = " | ".join(f"{size / 2**20:.0f}" for size in sizes)
                print(f"| {seconds:.0f} | {mib} | {outcomes[200]} |", flush=True)
            await asyncio.sleep(1)

    async def soak(server: ServerProcess) -> None:
        begin = time.monotonic()
        end = begin + SECONDS
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=120) as client,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(watch(server, begin, end))
            for number in range(CLIENTS):
                group.create_task(client_life(client, number, end))

    with ServerProcess(smollm2_gguf, "--kv-cache-memory", "128MiB") as server:
        server.wait_ready(300)
        print("\n| seconds | server, MiB | engine, MiB | answers |\n|---|---|---|---|")
        asyncio.run(soak(server))
        server.terminate()
        assert server.wait() == 0, server.log
    assert set(outcomes) == {200}
    settled = [sizes for seconds, *sizes in samples if seconds >= SETTLED]
    for name, sizes in zip(("server", "engine"), zip(*settled, strict=True), strict=True):
        growth = max(sizes) / sizes[0] - 1
        assert growth < ALLOWED_GROWTH, f"the {name}'s memory grew by {growth:.1%} in the rest"
