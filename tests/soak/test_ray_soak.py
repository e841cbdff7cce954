"""Ranks on two nodes of a Ray cluster: more models, pictures, and nodes and ranks that are killed.

Run by ``make soak``: it takes minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_fixtures import GOLDEN, golden_prompts
from random_examples import FULL
from ray_nodes import Nodes, two_nodes
from slow_llama import SETTINGS as SLOW

from engine_core import LLM, AsyncEngine, EngineConfig, SamplingParams
from engine_core.errors import EngineDeadError, OptionError

pytest.importorskip("ray", reason="ray is not installed: pip install 'engine-core-llm[ray]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FULL not in os.environ, reason=f"takes minutes: set {FULL}=1"),
]
MODEL = str(GOLDEN / "llama-gqa")
PROMPTS = golden_prompts("llama-gqa")
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with two_nodes() as made:
        yield made


def config(nodes: Nodes, **more: Any) -> EngineConfig:
    return nodes.config(**{"kv_cache_memory": 16 * 2**20} | more)


def test_goldens_of_ranks_and_of_stages(nodes: Nodes) -> None:
    stages = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    for name, settings in [
        ("llama-gqa", stages),
        ("llama-tied-llama3", stages),
        ("gemma3-ropes", {}),
        ("bloom-pow2", {}),
        ("mixtral-tiny", {"enable_expert_parallel": True}),
        ("llama-yarn", {"block_size": 4, "max_num_batched_tokens": 8}),
    ]:
        with LLM(str(GOLDEN / name), config(nodes, **settings)) as llm:
            outputs = llm.generate([prompt.input_ids for prompt in golden_prompts(name)], GREEDY)
        expected = [prompt.new_tokens for prompt in golden_prompts(name)]
        assert [output.outputs[0].token_ids for output in outputs] == expected, name


def test_a_picture_travels_to_the_other_node(nodes: Nodes) -> None:
    """Its pixels are in memory that only the first node's ranks can open."""
    model = GOLDEN / "qwen2vl-tiny"
    image = np.random.default_rng(0).integers(0, 255, (448, 560, 3), np.uint8)
    token = json.loads((model / "config.json").read_text())["image_token_id"]
    prompt = {"prompt_token_ids": [5, token, 6], "multi_modal_data": {"image": [image]}}
    tokens = []
    for settings in ({}, {"distributed_executor": "auto", "tensor_parallel_size": 1}):
        changed = config(nodes, max_model_len=1024, **settings)
        if settings:
            changed = changed.replace(ray_address=None)
        with LLM(str(model), changed) as llm:
            tokens.append(llm.generate(prompt, GREEDY)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]


def test_a_node_with_another_version_of_a_package_is_named(tmp_path: Path) -> None:
    info = tmp_path / "engine_core_llama-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-core-llama\nVersion: 9.9\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with two_nodes(env_vars={"PYTHONPATH": paths}) as nodes:
        named = (
            rf"\({nodes.nodes[1].node_id[:8]}\) differs .* engine-core-llama: .* version 9\.9 there"
        )
        with pytest.raises(OptionError, match=named):
            LLM(MODEL, config(nodes))


@pytest.mark.parametrize("hangs", [False, True], ids=["killed", "hangs"])
def test_ranks_end_with_an_engine_process_that_is_killed_or_waits_for_one(
    nodes: Nodes, hangs: bool
) -> None:
    """A rank that is stopped answers nothing; the step's time ends the engine."""

    async def scene() -> None:
        settings = config(nodes, **SLOW)
        engine = await AsyncEngine.start(MODEL, settings, step_timeout=5 if hangs else None)
        ranks = [*nodes.ranks(0), *nodes.ranks(1)]
        assert len(ranks) == 2
        stream = await engine.add_request(PROMPTS[2].input_ids, LONG)
        await anext(stream)
        if hangs:
            ranks[1].suspend()
        else:
            os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            [output async for output in stream]
        await engine.close()
        deadline = time.monotonic() + 60
        while any(rank.is_running() for rank in ranks) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        assert not any(rank.is_running() for rank in ranks)

    asyncio.run(scene())


def ends_with(llm: LLM, victim: Callable[[], None], after: int) -> str:
    """The error of requests under way when something is killed, within a minute."""
    streams = [llm.stream(prompt.input_ids, LONG) for prompt in PROMPTS[:3]]
    for _ in range(after):
        for stream in streams:
            next(stream)
    victim()
    begin = time.monotonic()
    with pytest.raises(EngineDeadError) as caught:
        list(streams[0])
    assert time.monotonic() - begin < 60
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPTS[0].input_ids, GREEDY)
    return str(caught.value)


def test_a_killed_node_is_named_and_another_one_takes_its_place(nodes: Nodes) -> None:
    for _ in range(2):
        lost = nodes.nodes.pop()
        kill = partial(nodes.cluster.remove_node, lost, allow_graceful=False)
        with LLM(MODEL, config(nodes, **SLOW)) as llm:
            told = ends_with(llm, kill, after=3)
        assert f"({lost.node_id[:8]})" in told
        assert "rank 1 on node" in told
        assert "node is dead" in told or "worker process has died" in told
        nodes.nodes.append(nodes.cluster.add_node(num_cpus=1))
    with LLM(MODEL, config(nodes)) as llm:
        outputs = llm.generate([prompt.input_ids for prompt in PROMPTS], GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [p.new_tokens for p in PROMPTS]


def test_ranks_killed_at_any_time_are_named_and_the_rest_is_ended(nodes: Nodes) -> None:
    draw = random.Random(5)
    for _ in range(8):
        with LLM(MODEL, config(nodes, **SLOW)) as llm:
            ranks = [*nodes.ranks(0), *nodes.ranks(1)]
            assert len(ranks) == 2
            number = draw.randrange(2)

            def kill(number: int = number, ranks: Any = ranks) -> None:
                time.sleep(draw.random() * 0.05)
                ranks[number].kill()

            told = ends_with(llm, kill, after=draw.randrange(1, 6))
        assert f"rank {number} on node" in told, told
        assert f"({nodes.nodes[number].node_id[:8]})" in told
        deadline = time.monotonic() + 30
        while any(rank.is_running() for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(rank.is_running() for rank in ranks)
