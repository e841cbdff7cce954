"""Steps of nobody before the first request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import pytest
from golden_fixtures import golden_llm, golden_prompts

from engine_core import SamplingParams
from engine_core.configs import CacheConfig, CacheGroup, KVCacheSpec, SchedulerConfig
from engine_core.engine.pacing import Pacing
from engine_core.engine.trials import trials
from engine_core.scheduler import Scheduler
from engine_core.steps import StepPlan, StepResult


class Notes(Pacing):
    """Takes note of what it is told."""

    def __init__(self, scheduler: Scheduler, rooms: Sequence[int] = ()) -> None:
        super().__init__(scheduler, 0, rooms=rooms)
        self.told: list[StepPlan] = []

    def finished(self, plan: StepPlan, submitted: float, *, early: bool) -> None:
        assert submitted > 0
        if not early:
            self.told.append(plan)


def test_trials_time_decode_steps_and_prompts_beside_them_and_leave_nothing() -> None:
    prompt = golden_prompts("llama-gqa")[0]
    with golden_llm("llama-gqa", max_num_seqs=4) as llm:
        core = llm.engine.core
        notes = Notes(core.scheduler)
        before = core.stats()
        list(trials(core.executor, core.scheduler, notes, 60.0))
        sizes = [plan.rows[-1].num_tokens for plan in notes.told]
        # The longest sequence has 160 tokens, and one of the four rows is the prompt's.
        assert sizes == [size for size in (1, 1, 16, 64, 128) for _ in range(3)]
        decoding = [sum(row.num_tokens == 1 for row in plan.rows) for plan in notes.told]
        assert decoding == [1] * 3 + [3] * 3 + [1] * 9
        assert {plan.rows[0].num_tokens for plan in notes.told} == {1}
        starts = [plan.rows[0].start for plan in notes.told]
        assert all(one < other for one, other in pairwise(starts))
        assert core.stats() == before
        core.scheduler.check()
        params = SamplingParams(temperature=0.0, max_tokens=len(prompt.new_tokens))
        (output,) = llm.generate([prompt.input_ids], params)
        assert output.outputs[0].token_ids == prompt.new_tokens


def test_trials_of_captured_steps_have_the_sizes_that_these_hold() -> None:
    with golden_llm("llama-gqa", max_num_seqs=4) as llm:
        core = llm.engine.core
        notes = Notes(core.scheduler, rooms=(32, 64))
        list(trials(core.executor, core.scheduler, notes, 60.0))
        sizes = [plan.rows[-1].num_tokens for plan in notes.told[6:]]
        # With room for 32 decoding rows they hold 32, 96 and 160 tokens.
        assert sizes == [size for size in (16, 32, 96) for _ in range(3)]


def test_rows_of_trials_have_blocks_for_all_their_positions() -> None:
    spec = KVCacheSpec(num_kv_heads=1, head_dim=8, v_head_dim=8, dtype="float16")
    cache = CacheConfig(groups=(CacheGroup(spec=spec, block_size=16),), num_blocks=512)
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=4096, max_model_len=8192)
    scheduler = Scheduler(config, cache)
    plans = []

    class Executor:
        def submit(self, plan: StepPlan) -> Future[StepResult]:
            plans.append(plan)
            done: Future[StepResult] = Future()
            done.set_result(StepResult(plan.step_id, ()))
            return done

    executor: Any = Executor()
    list(trials(executor, scheduler, Notes(scheduler, rooms=(32, 64)), 60.0))
    assert max(row.num_tokens for plan in plans for row in plan.rows) == 2016
    # A CPU has kernels for one row, for two, for up to four, for five and for more.
    decoding = [plan for plan in plans if all(row.num_tokens == 1 for row in plan.rows)]
    assert {len(plan.rows) for plan in decoding} == {1, 2, 3, 5, 8}
    blocks = Counter[str]()
    for plan in plans:
        for row in plan.rows:
            if row.start == 0:
                blocks[row.sequence_id] = len(row.new_blocks[0])
            assert row.start + row.num_tokens <= 16 * blocks[row.sequence_id]
    scheduler.check()


def test_trials_end_when_their_time_is_over() -> None:
    with golden_llm("llama-gqa", max_num_seqs=4) as llm:
        core = llm.engine.core
        notes = Notes(core.scheduler)
        list(trials(core.executor, core.scheduler, notes, 0.0))
        assert notes.told == []
        assert core.scheduler.pool.num_used == 0


@pytest.mark.parametrize("steps", [1, 2, 5, 12])
def test_trials_may_be_left_after_any_step_for_a_request(steps: int) -> None:
    prompt = golden_prompts("llama-gqa")[0]
    with golden_llm("llama-gqa", max_num_seqs=4) as llm:
        core = llm.engine.core
        timing = core.time_steps(60.0)
        for _ in range(steps):
            next(timing)
        assert core.scheduler.pool.num_used > 0
        timing.close()
        assert core.scheduler.pool.num_used == 0
        core.scheduler.check()
        params = SamplingParams(temperature=0.0, max_tokens=len(prompt.new_tokens))
        (output,) = llm.generate([prompt.input_ids], params)
        assert output.outputs[0].token_ids == prompt.new_tokens
        # And begun anew, to the end.
        assert len(list(core.time_steps(60.0))) > 20
        assert core.scheduler.pool.num_used == 0
