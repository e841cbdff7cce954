"""How many sequences fit into the cache of a model with windows, through plan and scheduler."""

from __future__ import annotations

from array import array

import pytest

from engine_core.configs import (
    CacheSpec,
    EngineConfig,
    KVCacheSpec,
    SamplingParams,
    SchedulerConfig,
)
from engine_core.inputs import ProcessedPrompt
from engine_core.runtime.memory import CachePlan, plan_cache
from engine_core.scheduler import Scheduler, Sequence
from engine_core.steps import RowResult, StepResult

GIB = 2**30
CHUNK = 2048


def keys_and_values(window: int | None = None, heads: int = 4, size: int = 256) -> KVCacheSpec:
    return KVCacheSpec(
        num_kv_heads=heads, head_dim=size, v_head_dim=size, dtype="bfloat16", window=window
    )


# Gemma 3 4B: every sixth layer sees all keys, the others 1,024.
GEMMA = [keys_and_values(None if layer % 6 == 5 else 1024) for layer in range(34)]


def plan(
    specs: list[CacheSpec] | list[KVCacheSpec],
    max_model_len: int,
    *,
    budget: int = 40 * GIB,
    block_size: int = 64,
    **settings: object,
) -> CachePlan:
    config = EngineConfig(**{"max_num_seqs": 512, "max_num_batched_tokens": CHUNK, **settings})
    return plan_cache(
        specs, config, block_size=block_size, budget=budget, max_model_len=max_model_len
    )


def scheduler(planned: CachePlan) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=512,
        max_num_batched_tokens=CHUNK,
        max_model_len=planned.max_model_len,
        max_repeat=1,
    )
    return Scheduler(config, planned.cache_config)


def request(name: str, tokens: list[int], max_tokens: int, max_model_len: int) -> Sequence:
    return Sequence(
        name,
        ProcessedPrompt(array("q", tokens)),
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        arrival_time=0.0,
        max_model_len=max_model_len,
    )


def run(sched: Scheduler) -> int:
    """Run all requests to their end; the most that ran at once."""
    most = 0
    while sched.has_unfinished():
        step = sched.schedule()
        assert step is not None
        most = max(most, sched.num_running)
        rows = tuple(RowResult(row.sequence_id, (7,) if row.sample else ()) for row in step.rows)
        sched.update(StepResult(step.step_id, rows))
    return most


def test_layers_with_windows_share_blocks_of_five() -> None:
    planned = plan(GEMMA, 32_768)
    sizes = [planned.layer_groups.count(group) for group in range(7)]
    assert sorted(sizes) == [4, 5, 5, 5, 5, 5, 5]
    assert planned.bytes_per_block == 5 * 64 * 4 * 512 * 2
    # Keys and values of each of the five are planes of their own, whatever group has the block.
    assert planned.planes == (64 * 4 * 256 * 2,) * 10
    assert planned.cache_config.num_blocks == 40 * GIB // planned.bytes_per_block


# Of equal numbers of blocks for all groups, 301, 9 and 2 fit.
@pytest.mark.parametrize(("length", "least"), [(1024, 285), (32_768, 38), (131_072, 13)])
def test_so_many_sequences_fit(length: int, least: int) -> None:
    planned = plan(GEMMA, length)
    assert planned.full_sequences >= least
    # Six groups with a window keep it and a part of a block at each end; one sequence at a time has
    # a chunk besides.
    blocks = length // 64
    kept, most = (blocks + 6 * min(blocks, -(-n // 64) + 1) for n in (1024, 1023 + CHUNK))
    usable = 40 * GIB // planned.bytes_per_block - 1
    assert planned.full_sequences == 1 + (usable - most) // kept
    # They really run together: the first still decodes while the last is computed.
    num_outputs = min(length // 2, least * (length // CHUNK + 1) + 50)
    sched = scheduler(planned.__class__(
        planned.cache_config.replace(enable_prefix_caching=False),
        planned.layer_groups, planned.planes, planned.max_model_len,
    ))  # fmt: skip
    for number in range(least):
        tokens = [1] * (length - num_outputs)
        sched.add(request(str(number), tokens, num_outputs, length))
    assert run(sched) == least
    assert sched.num_preemptions == 0
    sched.check()


# Of all tokens of prompts, those found in the cache. Where every group had blocks of its own they
# were 0.8822 and 0.1635.
@pytest.mark.parametrize(
    ("added", "hit_rate"), [pytest.param(500, 0.8822, marks=pytest.mark.long), (2500, 0.8066)]
)
def test_fifty_conversations_find_their_beginnings(added: int, hit_rate: float) -> None:
    sched = scheduler(plan(GEMMA, 32_768))
    system = [token % 1000 for token in range(1500)]
    conversations = [system.copy() for _ in range(50)]
    for turn in range(8):
        for number, tokens in enumerate(conversations):
            tokens += [1000 + (number * 31 + turn * 7 + i) % 997 for i in range(added - 100)]
            name = f"{number} {turn}"
            mine = request(name, tokens, 100, 32_768)
            sched.add(mine)
            run(sched)
            tokens += mine.output_token_ids
    found = sched.prefix_cache_hits / sched.prefix_cache_queries
    assert found >= hit_rate
