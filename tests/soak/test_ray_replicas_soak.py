"""Replicas on a Ray cluster under load: lost nodes, scaling by the queue, and prefix routing."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import httpx
import psutil
import pytest
from attacking import wait_until
from golden_fixtures import GOLDEN, golden_prompts
from random_examples import FULL
from replicas import tokens_of, until
from serving import ServerProcess, write_tiny_model
from slow_llama import OPTIONS as SLOW_OPTIONS
from slow_llama import SETTINGS as SLOW

from engine_core import AsyncEngine, EngineConfig, SamplingParams
from engine_core.errors import EngineDeadError

pytest.importorskip("ray", reason="ray is not installed: pip install 'engine-core-llm[ray]'")
from ray_nodes import Nodes, two_nodes

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(not os.environ.get(FULL), reason=f"set {FULL}=1, as make soak does"),
]

PROMPT = golden_prompts("llama-gqa")[3]
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
OPTIONS = ("--device", "cpu", "--max-model-len", "2048", "--kv-cache-memory", "16MiB")
OPTIONS += ("--served-model-name", "tiny", "--replica-executor", "ray")


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with two_nodes() as made:
        yield made


def test_a_lost_node_ends_its_requests_and_its_replica_comes_back(nodes: Nodes) -> None:
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
            str(GOLDEN / "llama-gqa"), config, replicas=2, replica_executor="ray"
        )
        streams = [await engine.add_request(PROMPT.input_ids, LONG) for _ in range(4)]
        await until(lambda: [each.stats.running for each in engine.replicas] == [2, 2])
        await asyncio.to_thread(nodes.cluster.remove_node, nodes.nodes[1], False)
        ends = await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)
        failed = [str(end) for end in ends if isinstance(end, EngineDeadError)]
        whole = [end for end in ends if isinstance(end, list)]
        assert len(failed) == len(whole) == 2, ends
        named = re.compile(
            rf"replica \d: .* \(node {nodes.nodes[1].node_id[:8]}\) is gone: "
            "(Ray has lost the machine|it or its machine cannot be reached|its node )"
        )
        assert all(named.match(end) for end in failed), failed
        for tokens in whole:
            assert len(tokens) == 100
            assert tokens[:16] == PROMPT.new_tokens[:16]
        # There is no place for it until another machine joins.
        await until(lambda: [each.phase for each in engine.replicas].count("starting") == 1)
        assert engine.takes_requests
        nodes.cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        await until(lambda: all(each.phase == "ready" for each in engine.replicas), 120)
        streams = [await engine.add_request(PROMPT.input_ids, LONG) for _ in range(4)]
        await until(lambda: [each.stats.running for each in engine.replicas] == [2, 2])
        for tokens in await asyncio.gather(*map(tokens_of, streams)):
            assert tokens[:16] == PROMPT.new_tokens[:16]
        await engine.close()

    asyncio.run(scene())


def test_a_process_that_hangs_is_killed_and_started_again(nodes: Nodes) -> None:
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
            str(GOLDEN / "llama-gqa"),
            config,
            max_restarts=3,
            step_timeout=4.0,
            replica_executor="ray",
        )
        stream = await engine.add_request(PROMPT.input_ids, LONG)
        await until(lambda: engine.replicas[0].stats.running == 1)
        pid = engine.replicas[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match=rf"\(pid {pid}\) hangs: no step has ended for 4"):
            await tokens_of(stream)
        await until(lambda: engine.replicas[0].phase == "ready")
        assert not psutil.pid_exists(pid)
        stream = await engine.add_request(PROMPT.input_ids, LONG)
        assert (await tokens_of(stream))[:16] == PROMPT.new_tokens[:16]
        await engine.close()

    asyncio.run(scene())


def test_replicas_follow_the_queue(nodes: Nodes, tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 300, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    bounds = ("--max-replicas", "2", "--scale-up-delay", "1", "--scale-down-delay", "3")
    model = write_tiny_model(tmp_path / "tiny")
    options = (*OPTIONS, *SLOW_OPTIONS, *bounds, "--max-num-seqs", "2")
    with ServerProcess(model, *options, "--ray-address", nodes.address) as server:
        server.wait_ready()

        def phases() -> list[str]:
            health = httpx.get(f"{server.url}/health", timeout=60).json()
            return [each["status"] for each in health["replicas"]]

        def ask(_: int) -> list[int]:
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            tokens: list[int] = answer.json()["choices"][0]["token_ids"]
            return tokens

        assert phases() == ["ready"]
        with ThreadPoolExecutor(6) as pool:
            answers = pool.map(ask, range(24))
            wait_until(lambda: phases() == ["ready", "ready"])
            tokens = list(answers)
        assert tokens == [tokens[0]] * 24
        assert len(tokens[0]) == 300
        assert server.metric("engine_core_replica_generation_tokens_total", replica="1") > 0
        wait_until(lambda: phases() == ["ready"])
        # Counts of a replica that has ended are kept.
        assert server.metric("engine_core_generation_tokens_total") == 24 * 300
        assert ask(0) == tokens[0]
        server.terminate()
        assert server.wait() == 0, server.log


def test_conversations_stay_with_their_blocks(nodes: Nodes, tmp_path: Path) -> None:
    """Turns that went round three replicas would find a third."""
    nodes.cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    model = write_tiny_model(tmp_path / "tiny")

    def rate(replicas: int) -> tuple[float, list[list[int]]]:
        # With steps of a millisecond most of a request's time would be that of messages.
        options = (*OPTIONS, *SLOW_OPTIONS, "--max-num-seqs", "6", "--replicas", str(replicas))
        with ServerProcess(model, *options, "--ray-address", nodes.address) as server:
            server.wait_ready()
            answers = talk(server)
            hits, queries = (
                server.metric(f"engine_core_prefix_cache_{name}_tokens_total")
                for name in ("hits", "queries")
            )
            server.terminate()
            assert server.wait() == 0, server.log
        return hits / queries, answers

    alone, expected = rate(1)
    routed, same = rate(3)
    assert same == expected
    assert routed >= 0.9 * alone, (routed, alone)
    print(f"prefix hits: one {alone:.3f}, three on Ray {routed:.3f}")


def talk(server: ServerProcess) -> list[list[int]]:
    """Have 50 conversations of 5 turns, 8 at a time; their tokens."""
    draw = Random(7)
    prompts: list[list[int]] = [[] for _ in range(50)]
    with httpx.Client(base_url=server.url, timeout=120) as client:

        def turn(prompt: list[int]) -> None:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            prompt += answer.json()["choices"][0]["token_ids"]

        for _ in range(5):
            for prompt in prompts:
                prompt += [draw.randrange(3, 300) for _ in range(44)]
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(turn, prompts))
    return prompts
