"""An engine under random arrivals, aborts, priorities and a cache that is too small for them.

``ENGINE_CORE_SOAK_SECONDS`` says for how long; ``make soak`` gives it ten minutes.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import psutil
import pytest
from random_requests import Job, known_jobs
from serving import write_tiny_model

from engine_core import EngineConfig, SamplingParams
from engine_core.engine import Engine

REQUESTS = 60 if "ENGINE_CORE_SOAK_SECONDS" in os.environ else 12
SECONDS = float(os.environ.get("ENGINE_CORE_SOAK_SECONDS", "1"))
# What the allocator and caches that fill up may add between two samples of memory.
ALLOWED_GROWTH = 32 * 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def jobs(model: Path) -> list[Job]:
    return known_jobs(model, REQUESTS, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "swap_space",
    # The server's soak computes anew what it took the blocks of.
    [pytest.param(0, id="recompute", marks=pytest.mark.long), pytest.param(2**20, id="swap")],
)
def test_tokens_blocks_and_memory(model: Path, jobs: list[Job], swap_space: int) -> None:
    config = EngineConfig(
        max_num_seqs=12,
        max_num_batched_tokens=96,
        max_model_len=512,
        kv_cache_memory=768 * 2**10,
        swap_space=swap_space,
    )
    engine = Engine(str(model), config)
    process = psutil.Process()
    # Whatever is made once, or once for each size of a batch, is made before memory is looked at:
    # oneDNN keeps code for each number of tokens, and in a process that is not the engine's alone
    # nobody limits that. Prompts begin differently, for what is cached is not computed.
    for tokens in range(1, config.max_num_batched_tokens + 1):
        engine.add_request([3 + tokens] * tokens, SamplingParams(max_tokens=1))
        while engine.has_unfinished:
            engine.step()
    for _ in range(3):
        for job in jobs:
            engine.add_request(list(job.prompt), SamplingParams(**job.sampling))
        while engine.has_unfinished:
            engine.step()
    draw = random.Random(11)
    running: dict[str, Job] = {}
    complete = aborted = serial = 0
    memory: list[int] = []
    start = time.monotonic()

    def goes_on() -> bool:
        """On a slow machine it takes longer until there is something to look at."""
        return time.monotonic() - start < SECONDS or complete <= 20 or not aborted

    while (adding := goes_on()) or engine.has_unfinished:
        while adding and len(running) < 24 and draw.random() < 0.5:
            job, serial = draw.choice(jobs), serial + 1
            name = engine.add_request(
                list(job.prompt),
                SamplingParams(**job.sampling),
                request_id=str(serial),
                priority=job.priority,
                streaming=draw.random() < 0.5,
            )
            running[name] = job
        if running and draw.random() < 0.05:
            name = draw.choice(list(running))
            engine.abort(name)
            del running[name]
            aborted += 1
        for output in engine.step():
            if output.finished:
                job = running.pop(output.request_id)
                assert tuple(tuple(c.token_ids) for c in output.outputs) == job.answers, job
                complete += 1
        if serial % 20 == 0:
            engine.core.scheduler.check()
            memory.append(process.memory_info().rss)
    stats = engine.core.stats()
    assert not running
    assert complete > 20
    assert aborted > 0
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    engine.core.scheduler.check()
    assert stats.kv_cache_usage == 0
    first = sorted(memory[len(memory) // 4 : len(memory) // 2])
    last = sorted(memory[3 * len(memory) // 4 :])
    growth = last[len(last) // 2] - first[len(first) // 2]
    engine.close()
    print(
        f"{complete} complete, {aborted} aborted, {stats.num_preemptions} preemptions, "
        f"{stats.steps} steps in {SECONDS:.0f} s; memory grew by {growth / 2**20:.1f} MiB"
    )
    assert growth < ALLOWED_GROWTH, f"memory grew by {growth} bytes"
