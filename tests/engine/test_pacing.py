"""How far the host runs ahead, through the scheduler that it tells."""

from __future__ import annotations

import pytest

from engine_core.cache import KVCacheGroup
from engine_core.configs import CacheConfig, KVCacheSpec, SchedulerConfig
from engine_core.engine.pacing import Pacing
from engine_core.scheduler import Scheduler
from engine_core.steps import PlanRow, StepPlan


def scheduler() -> Scheduler:
    group = KVCacheGroup(
        KVCacheSpec(num_kv_heads=1, head_dim=1, v_head_dim=1, dtype="float32"),
        CacheConfig(block_size=16, num_blocks=9),
    )
    return Scheduler(
        SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=128, max_repeat=8),
        [group],
    )


def decode(repeat: int) -> StepPlan:
    return StepPlan(0, (PlanRow("a", 0, 5, 1, ((),), True),), repeat=repeat)


def prefill() -> StepPlan:
    return StepPlan(0, (PlanRow("a", 0, 0, 5, ((1,),), True),))


def run(pacing: Pacing, sched: Scheduler, early: list[bool]) -> int:
    """The replays allowed after decode steps of which each used what was allowed."""
    for each in early:
        pacing.finished(decode(sched.repeat_limit), early=each)
    return sched.repeat_limit


def test_offline_a_few_early_steps_double_the_replays_up_to_the_limit() -> None:
    sched = scheduler()
    pacing = Pacing(sched, 2, serving=False)
    assert (pacing.depth, sched.repeat_limit) == (2, 1)
    assert run(pacing, sched, [True] * 4) == 2
    assert run(pacing, sched, [True] * 40) == 8
    pacing.arrived()
    assert sched.repeat_limit == 8
    assert run(pacing, sched, [False] * 63) == 8
    assert run(pacing, sched, [False]) == 4


def test_a_server_keeps_one_step_queued_and_replays_only_while_the_device_waits() -> None:
    sched = scheduler()
    pacing = Pacing(sched, 2, serving=True)
    assert (pacing.depth, sched.repeat_limit) == (1, 1)
    assert run(pacing, sched, ([True] * 31 + [False]) * 3) == 1
    assert run(pacing, sched, [True] * 32) == 2
    assert run(pacing, sched, [False]) == 1


def test_who_arrives_at_a_server_ends_the_replays() -> None:
    sched = scheduler()
    pacing = Pacing(sched, 2, serving=True)
    assert run(pacing, sched, [True] * 96) == 8
    pacing.arrived()
    assert run(pacing, sched, [True] * 31) == 1


def test_on_a_cpu_nothing_is_queued() -> None:
    assert Pacing(scheduler(), 0, serving=True).depth == 0


@pytest.mark.parametrize("serving", [False, True])
def test_steps_with_prompts_and_short_plans_say_nothing(serving: bool) -> None:
    sched = scheduler()
    pacing = Pacing(sched, 2, serving=serving)
    run(pacing, sched, [True] * 32)
    replays = sched.repeat_limit
    assert replays > 1
    for _ in range(200):
        pacing.finished(prefill(), early=False)
        pacing.finished(decode(1), early=False)
    assert sched.repeat_limit == replays
