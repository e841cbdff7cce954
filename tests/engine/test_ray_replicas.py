"""Replicas on two nodes of a Ray cluster, behind an ``AsyncEngine``."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from golden_fixtures import GOLDEN, golden_prompts
from replicas import tokens_of, until
from slow_llama import SETTINGS as SLOW

from engine_core import AsyncEngine, EngineConfig, SamplingParams
from engine_core.engine import RequestStream, async_engine
from engine_core.engine.process import Decoder
from engine_core.engine.ray_replica import _encode
from engine_core.errors import EngineDeadError, OptionError
from engine_core.workers import SharedBytes

pytest.importorskip("ray", reason="ray is not installed: pip install 'engine-core-llm[ray]'")
from ray_nodes import Nodes, two_nodes

# Ray Serve's own, when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MODEL = str(GOLDEN / "llama-gqa")
PROMPTS = golden_prompts("llama-gqa")
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two_nodes() as made:
        yield made


def applications() -> list[str]:
    from ray import serve

    return [name for name in serve.status().applications if name.startswith("engine-core-")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda:1"}, "gives each replica GPUs of its own, but device is 'cuda:1'"),
        (
            {"distributed_executor": "ray", "tensor_parallel_size": 2},
            "has all its ranks on one machine, .*; leave it out",
        ),
    ],
)
def test_ranks_on_several_machines_and_one_gpu_for_all_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        asyncio.run(AsyncEngine.start(MODEL, EngineConfig(**settings), replica_executor="ray"))


def test_shared_memory_goes_by_value() -> None:
    """Its sender may be on another machine; here its memory is gone when it is read."""
    content = random.Random(3).randbytes(10_000)
    block = SharedBytes.of([(0, content)], len(content))
    encoded = _encode(("add", [block, block]))
    del block
    ((name, (first, second)),) = Decoder().feed(encoded)
    assert name == "add"
    assert first is second
    with first.map() as mapped:
        assert mapped[:] == content


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["worker", pytest.param("engine", marks=pytest.mark.long)])
def test_tokens_and_deaths(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, dies: str) -> None:
    monkeypatch.setattr(async_engine, "_FIRST_DELAY", 0.05)
    config = EngineConfig(
        device="cpu",
        ray_address=nodes.address,
        skip_tokenizer_init=True,
        max_num_seqs=2,
        kv_cache_memory=8 * 2**20,
        **SLOW,
    )

    async def scene() -> None:
        engine = await AsyncEngine.start(
            MODEL, config, replicas=2, max_restarts=1, replica_executor="ray"
        )
        assert len(applications()) == 2

        async def begin(prompt: int, params: SamplingParams = LONG) -> RequestStream:
            return await engine.add_request(PROMPTS[prompt].input_ids, params)

        streams = [await begin(index, GREEDY) for index in range(len(PROMPTS))]
        answers = await asyncio.gather(*map(tokens_of, streams))
        assert answers == [prompt.new_tokens[:16] for prompt in PROMPTS]

        def processes() -> list[psutil.Process]:
            pids = [status.pid for status in engine.replicas]
            return [psutil.Process(pid) for pid in pids if pid is not None]

        async def lose(victim: psutil.Process, cause: str) -> None:
            """Kill a process of replica 0 while both work."""
            streams = [await begin(3) for _ in range(4)]
            await until(lambda: [s.stats.running for s in engine.replicas] == [2, 2])
            restarts = engine.replicas[0].restarts
            victim.kill()
            ends = await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)
            failed = [str(end) for end in ends if isinstance(end, EngineDeadError)]
            whole = [end for end in ends if isinstance(end, list)]
            assert len(failed) == len(whole) == 2, ends
            assert all(re.search(cause, end) for end in failed), failed
            for tokens in whole:
                assert len(tokens) == 100
                assert tokens[:16] == PROMPTS[3].new_tokens[:16]
            await until(lambda: engine.replicas[0].phase == "ready")
            assert engine.replicas[0].restarts == restarts + 1
            assert await tokens_of(await begin(1, GREEDY)) == PROMPTS[1].new_tokens[:16]

        first, second = processes()
        # Each has a node of its own, which has one CPU.
        assert first.ppid() != second.ppid()
        where = nodes.cluster.head_node.node_ip_address
        if dies == "engine":
            named = rf"\(pid {first.pid}\) on {where} \(node \w+\)"
            await lose(first, rf"{named} ended by signal SIGKILL")
        else:
            host = first.parent()
            assert host is not None
            await lose(host, "its worker process has died")
            assert not first.is_running()
        first, second = processes()
        await engine.close()
        assert not first.is_running()
        assert not second.is_running()
        await until(lambda: not applications())

    asyncio.run(scene())
