"""How far the host runs ahead, through the scheduler that it tells."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import examples

from engine_core.configs import CacheConfig, CacheGroup, KVCacheSpec, SchedulerConfig
from engine_core.engine.pacing import Pacing
from engine_core.scheduler import Scheduler
from engine_core.steps import MediaWork, PlanRow, StepPlan


def scheduler() -> Scheduler:
    spec = KVCacheSpec(num_kv_heads=1, head_dim=1, v_head_dim=1, dtype="float32")
    cache = CacheConfig(groups=(CacheGroup(spec=spec, block_size=16),), num_blocks=9)
    config = SchedulerConfig(
        max_num_seqs=2, max_num_batched_tokens=8192, max_model_len=99, max_repeat=8
    )
    return Scheduler(config, cache)


def decode(repeat: int) -> StepPlan:
    return StepPlan(0, (PlanRow("a", 0, 5, 1, ((),), True),), repeat=repeat)


def prefill(tokens: int = 5, *, decoding: bool = False) -> StepPlan:
    rows = (PlanRow("a", 0, 5, 1, ((),), True), PlanRow("b", 1, 0, tokens, ((1,),), True))
    return StepPlan(0, rows if decoding else rows[1:])


def budgets(sched: Scheduler, rows: int = 1, cached: int = 0) -> tuple[int, int]:
    """Tokens of prompts beside so many rows, as a rule and while many prompts wait."""
    budget = sched.prompt_budget
    assert budget is not None
    return budget(rows, 1, cached), budget(rows, 10**6, cached)


def run(pacing: Pacing, sched: Scheduler, early: list[bool]) -> int:
    """The replays allowed after decode steps of which each used what was allowed."""
    for each in early:
        pacing.waiting(decode(sched.repeat_limit), early=each)
    return sched.repeat_limit


def test_offline_a_few_early_steps_double_the_replays_up_to_the_limit() -> None:
    sched = scheduler()
    pacing = Pacing(sched, 2)
    assert (pacing.depth, sched.repeat_limit) == (2, 1)
    assert run(pacing, sched, [True] * 3) == 1
    assert run(pacing, sched, [True]) == 2
    assert run(pacing, sched, [True] * 40) == 8
    pacing.arrived()
    assert sched.repeat_limit == 8
    assert run(pacing, sched, [False] * 63) == 8
    assert run(pacing, sched, [True]) == 8
    assert run(pacing, sched, [False] * 63) == 8
    assert run(pacing, sched, [False]) == 4


def test_a_server_keeps_one_step_queued_and_replays_only_while_the_device_waits() -> None:
    sched = scheduler()
    pacing = Pacing(sched, 2, max_step_time=0.03)
    assert (pacing.depth, sched.repeat_limit) == (1, 1)
    assert run(pacing, sched, ([True] * 31 + [False]) * 3) == 1
    assert run(pacing, sched, [True] * 32) == 2
    assert run(pacing, sched, [False]) == 1


def test_who_arrives_at_a_server_ends_the_replays() -> None:
    sched = scheduler()
    pacing = Pacing(sched, 2, max_step_time=0.03)
    assert run(pacing, sched, [True] * 100) == 8
    pacing.arrived()
    assert run(pacing, sched, [True] * 31) == 1


def test_on_a_cpu_nothing_is_queued() -> None:
    assert Pacing(scheduler(), 0, max_step_time=0.03).depth == 0


@pytest.mark.parametrize("max_step_time", [None, 0.03])
def test_steps_with_prompts_and_short_plans_say_nothing(max_step_time: float | None) -> None:
    sched = scheduler()
    pacing = Pacing(sched, 2, max_step_time=max_step_time)
    shown = replace(decode(1), media_work=(MediaWork(0, 0, 0, 0, 9, 256),))
    for plan in (prefill(2), prefill(decoding=True), shown) * 100:
        pacing.waiting(plan, early=True)
    assert sched.repeat_limit == 1
    run(pacing, sched, [True] * 32)
    replays = sched.repeat_limit
    assert replays > 1
    for _ in range(200):
        pacing.waiting(prefill(), early=False)
        pacing.waiting(decode(1), early=False)
    assert sched.repeat_limit == replays


class Clock:
    """A device whose decode steps take 5 ms, and a token of a prompt ``token_seconds`` more."""

    def __init__(self, token_seconds: float) -> None:
        self.now = 100.0
        self.decode_seconds = 0.005
        self.token_seconds = token_seconds

    def __call__(self) -> float:
        return self.now

    def run(self, pacing: Pacing, plan: StepPlan, *, early: bool = False) -> None:
        submitted = self.now - 0.001  # while the step before still ran
        prompts = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        decodes = any(row.num_tokens == 1 for row in plan.rows)
        self.now += self.decode_seconds * decodes * plan.repeat + self.token_seconds * prompts
        pacing.finished(plan, submitted, early=early)


@pytest.mark.parametrize(
    ("token_seconds", "budget"),
    [
        (20e-6, 1024),  # 1,250 fit into 25 ms
        (100e-6, 192),  # 250
        (5e-6, 4096),  # 5,000
        (1e-6, 8192),  # 25,000: what a step may compute at all
        (1e-3, 64),  # 25: prompts get on all the same
    ],
)
def test_prompts_beside_decodes_have_what_keeps_a_step_within_its_time(
    token_seconds: float, budget: int
) -> None:
    sched = scheduler()
    clock = Clock(token_seconds)
    pacing = Pacing(sched, 2, max_step_time=0.03, first_budget=500, clock=clock)
    assert budgets(sched) == (500, 500)
    for _ in range(5):
        clock.run(pacing, decode(1))
        clock.run(pacing, prefill(400, decoding=True))
    for _ in range(4):  # far beyond what was seen it goes in steps
        clock.run(pacing, prefill(budgets(sched)[0], decoding=True))
    assert budgets(sched)[0] == budget
    # One that waited for a compile, and ends that nobody saw, change nothing.
    clock.now += 3.0
    pacing.finished(prefill(400), clock.now - 3.0, early=False)
    clock.now += 9.0
    for _ in range(20):
        pacing.finished(prefill(400), clock.now - 9.0, early=True)
    clock.run(pacing, prefill(400))
    assert budgets(sched)[0] == budget


def test_the_fixed_part_of_a_step_is_not_taken_for_its_tokens() -> None:
    """A step of 10 ms, whatever is in it, and 20 us a token: 1,000 tokens fit, or 1,600."""
    sched = scheduler()
    clock = Clock(20e-6)
    clock.decode_seconds = 0.010
    pacing = Pacing(sched, 2, max_step_time=0.03, clock=clock)
    clock.run(pacing, decode(1), early=True)
    for tokens in (60, 250, 120, 500):
        clock.run(pacing, prefill(tokens, decoding=True))
    assert budgets(sched) == (896, 1536)
    # Many prompts wait if they are for more than two steps.
    assert sched.prompt_budget is not None
    assert [sched.prompt_budget(1, tokens, 0) for tokens in (1792, 1793)] == [896, 1536]
    # Three steps of a size are believed before the others.
    clock.decode_seconds = 0.013
    for budget in (896, 896, 768):
        clock.run(pacing, prefill(896, decoding=True))
        assert budgets(sched)[0] == budget
    # What was seen of a size counts more than the line through all of them.
    for seconds, budget in ((0.012, 896), (0.013, 768)):
        clock.decode_seconds = seconds
        for _ in range(8):
            clock.run(pacing, prefill(896, decoding=True))
        assert budgets(sched)[0] == budget


def test_a_budget_is_what_captured_steps_hold_beside_the_rows() -> None:
    """With room for 32 rows a step of 1,024 tokens holds 992 of prompts, with room for 256, 768."""
    sched = scheduler()
    clock = Clock(20e-6)
    pacing = Pacing(sched, 2, max_step_time=0.029, rooms=(32, 256), clock=clock)
    for _ in range(3):
        clock.run(pacing, decode(1))
        clock.run(pacing, prefill(480, decoding=True))
        clock.run(pacing, prefill(96, decoding=True))
    # 992 take 24.8 ms with the 5 of a decode step, and 1,248 take 30.
    assert budgets(sched, 1)[0] == 992
    assert pacing.sizes(32)[-3:] == [7136, 8160, 8192]
    # Rows of padding take as long as tokens of prompts.
    assert budgets(sched, 33)[0] == 768
    assert pacing.sizes(33)[:5] == [64, 128, 192, 256, 384]
    # More rows than any step has room for are not padded.
    assert pacing.sizes(257)[:2] == [64, 128]


def test_while_few_gaps_are_long_fewer_prompts_make_a_step_longer() -> None:
    """1,024 tokens fit into 30 ms, and as many again into 42."""
    sched = scheduler()
    clock = Clock(20e-6)
    pacing = Pacing(sched, 2, max_step_time=0.03, clock=clock)

    def stretched(tokens: int) -> bool:
        assert sched.prompt_budget is not None
        return sched.prompt_budget(1, tokens, 0) > 1024

    clock.run(pacing, decode(1), early=True)  # of which it is not known how long it took
    for tokens in (64, 512):
        clock.run(pacing, prefill(tokens, decoding=True))
    for _ in range(97):
        clock.run(pacing, decode(1))
    assert not stretched(2048)
    clock.run(pacing, decode(1))  # the hundredth gap
    assert stretched(1537)
    assert not stretched(1536)
    clock.run(pacing, prefill(1792, decoding=True))
    assert not stretched(2048)
    assert stretched(2049)
    # What was saved is bounded: a quiet hour does not make the next one a rough one.
    for _ in range(20_000):
        clock.run(pacing, decode(1))
    for _ in range(100):
        assert stretched(1537)
        clock.run(pacing, prefill(1792, decoding=True))
    clock.run(pacing, prefill(1792, decoding=True))
    assert not stretched(1537)


class Tiles(Clock):
    """Steps take 5 ms, 0.1 for each row, and 10 for each 512 tokens of prompts that are begun."""

    def run_tiles(self, pacing: Pacing, rows: int, tokens: int) -> None:
        decoding = (PlanRow("a", 0, 5, 1, ((),), True),) * rows
        submitted = self.now
        self.now += 0.005 + 0.0001 * rows + 0.01 * -(-tokens // 512)
        prompts = (PlanRow("b", 1, 0, tokens, ((1,),), True),) * (tokens > 0)
        pacing.finished(StepPlan(0, decoding + prompts), submitted, early=False)


@pytest.mark.parametrize(("limit", "best"), [(0.0247, 512), (0.03, 1024), (0.037, 1536)])
def test_of_the_sizes_in_time_that_of_most_tokens_a_second_is_taken(
    limit: float, best: int
) -> None:
    sched = scheduler()
    clock = Tiles(0.0)
    pacing = Pacing(sched, 2, max_step_time=limit, clock=clock)
    for _ in range(3):
        for rows in (1, 8):
            clock.run_tiles(pacing, rows, 0)
        for size in (64, 128, 256, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048):
            clock.run_tiles(pacing, 1, size)
    # What steps of a size took beside one row says as much of those beside others.
    for rows in (1, 8, 20):
        assert budgets(sched, rows)[0] == best


def test_pictures_beside_decodes_take_the_tokens_that_they_cost() -> None:
    """A token takes 20 us, an embedding of a small picture as long, one of a large one 50."""
    sched = scheduler()
    clock = Clock(20e-6)
    pacing = Pacing(sched, 2, max_step_time=0.03, clock=clock)
    assert sched.media_cost is not None
    # Before anything is known of steps, one with a picture says nothing.
    clock.run(pacing, replace(decode(1), media_work=(MediaWork(0, 0, 0, 0, 9, 256),)))
    assert sched.media_cost(5000, 0, 9) is None
    for _ in range(5):
        clock.run(pacing, decode(1))
        clock.run(pacing, prefill(448, decoding=True))
    usual = pacing.spare(decode(1), clock.now)
    assert sched.media_cost(256, 0, 9) is None
    unknown = replace(decode(1), media_work=(MediaWork(0, 0, 0, 0, 9, 256),))
    assert pacing.spare(unknown, clock.now) == 0
    for size, seconds in ((256, 20e-6), (5760, 50e-6)) * 8:
        shown = replace(decode(1), media_work=(MediaWork(0, 0, 0, 100, 300, size),))
        clock.decode_seconds = 0.005 + 200 * seconds
        clock.run(pacing, shown)
        assert pacing.spare(shown, clock.now) == pytest.approx(usual + 200 * seconds)
    budgets(sched)  # which costs are in tokens of
    # One in size between them may be as dear as the larger one.
    costs = [sched.media_cost(size, 10, 110) for size in (300, 1000, 5000)]
    assert costs == pytest.approx([100, 250, 250])
    # What nobody has seen yet may be dearer than any.
    assert sched.media_cost(9000, 10, 110) is None
    # Steps without a picture are known as before.
    assert pacing.spare(decode(1), clock.now) == pytest.approx(usual)
    clock.decode_seconds = 0.005
    for _ in range(15):
        clock.run(pacing, replace(decode(1), media_work=(MediaWork(0, 0, 0, 0, 256, 256),)))
    assert sched.media_cost(256, 0, 256) == pytest.approx(0)


class SlowClock(Clock):
    """Steps of 24 ms, 1.15 ms more a row that decodes and 0.72 ms a token of a prompt."""

    def run_step(self, pacing: Pacing, rows: int, tokens: int) -> None:
        self.decode_seconds = 0.024 + 0.00115 * rows
        plan = StepPlan(0, decode(1).rows * rows + (prefill(tokens).rows if tokens else ()))
        self.run(pacing, plan)


def test_the_budget_is_that_of_the_rows_that_decode_now() -> None:
    sched = scheduler()
    clock = SlowClock(0.00072)
    pacing = Pacing(sched, 0, max_step_time=0.25, backlog_stretch=4, clock=clock)
    for rows in (1, 8, 20):
        clock.run_step(pacing, rows, 0)
        clock.run_step(pacing, rows, 128)
    clock.run_step(pacing, 20, 512)
    # (250 - 24 - 1.15 rows) / 0.72 and (1,000 - 24 - 1.15 rows) / 0.72 tokens fit.
    assert budgets(sched, 1) == (256, 1280)
    assert budgets(sched, 20) == (256, 1280)
    assert budgets(sched, 35) == (256, 1280)
    assert budgets(sched, 60) == (192, 1024)
    assert budgets(sched, 100) == (128, 1024)
    # No step of 60 rows was seen, and one of few rows or many says the same of it.
    for _ in range(40):
        clock.run_step(pacing, 1, 64)
    assert budgets(sched, 60) == (192, 1024)
    for _ in range(40):
        clock.run_step(pacing, 100, 64)
    assert budgets(sched, 1) == (256, 1280)


def test_steps_of_a_size_tell_of_those_with_other_rows() -> None:
    """Each row takes 10 ms and each token 0.72: 8 rows leave 236 tokens of 250 ms, 15 rows 138."""
    sched = scheduler()
    clock = SlowClock(0.00072)
    pacing = Pacing(sched, 0, max_step_time=0.25, clock=clock)
    for rows, tokens in ((1, 64), (1, 128), *[(8, size) for size in (64, 128, 192, 256)] * 3):
        clock.decode_seconds = 0.010 * rows
        clock.run(pacing, StepPlan(0, decode(1).rows * rows + prefill(tokens).rows))
    assert [budgets(sched, rows)[0] for rows in (8, 15)] == [192, 128]


def test_rows_that_need_the_whole_step_leave_twice_that_to_prompts_when_many_wait() -> None:
    """100 rows take 139 ms: 64 tokens, the least, are too many for steps of 100 ms."""
    sched = scheduler()
    clock = SlowClock(0.00072)
    pacing = Pacing(sched, 0, max_step_time=0.1, clock=clock)
    for rows in (1, 100):
        for tokens in (64, 256):
            clock.run_step(pacing, rows, tokens)
    # 3 * 139 ms have 278 for 386 tokens; 1.4 * 100 ms less 25 have 115 for 159.
    assert budgets(sched, 100) == (64, 384)
    assert budgets(sched, 1) == (64, 128)


class LongContexts(Clock):
    """Attention adds a nanosecond a pair, and is as long as for a multiple of 512 tokens."""

    def run_far(self, pacing: Pacing, tokens: int, cached: int) -> float:
        """A step far into a prompt; returns its seconds."""
        rows = (PlanRow("a", 0, 5, 1, ((),), True), PlanRow("b", 1, cached, tokens, ((1,),), True))
        submitted = self.now
        attention = 1e-9 * -(-tokens // 512) * 512 * (cached + tokens / 2)
        self.now += self.decode_seconds + self.token_seconds * tokens + attention
        pacing.finished(StepPlan(0, rows), submitted, early=False)
        return self.now - submitted


@pytest.mark.parametrize("most", [1.1, 3.0], ids=["quiet", "busy"])
@pytest.mark.parametrize("seed", range(3))
def test_a_machine_that_is_busy_makes_no_step_grow(most: float, seed: int) -> None:
    """Rows and prompts come together, so that what a slow step took may be laid to either.

    Two cores' steps, up to ``most`` times as long; a hundred prompts wait, and each that is done is
    one more row. Without other work a step may take seven times 0.25 s, plus a tenth.
    """
    chance = random.Random(seed)
    sched = scheduler()
    clock = Clock(0.0022)
    pacing = Pacing(sched, 0, max_step_time=0.25, backlog_stretch=4, clock=clock)
    rows, left = 1, 500
    for number in range(120):
        tokens = budgets(sched, rows)[1] if number else 128
        usual = 0.15 + 0.008 * rows + 0.0022 * tokens
        assert usual <= 7 * 0.25 * 1.1
        plan = StepPlan(0, decode(1).rows * rows + prefill(tokens).rows)
        begin = clock.now
        clock.now += usual * chance.uniform(1.0, most)
        pacing.finished(plan, begin, early=False)
        left -= tokens
        while left <= 0:
            rows, left = rows + 1, left + chance.randrange(100, 1000)


def test_what_a_machine_was_too_slow_for_is_tried_again() -> None:
    """Every size was seen while steps took five times what they take since then.

    12 rows and 1,024 tokens take 0.90 of the second that a step may take while many wait, or of the
    1.75 if rows seem to take as long as they once did. At first they took 4.5.
    """
    sched = scheduler()
    clock = Clock(0.0)
    pacing = Pacing(sched, 0, max_step_time=0.25, backlog_stretch=4, steady=False, clock=clock)

    def step(tokens: int, slower: float) -> None:
        begin = clock.now
        clock.now += (0.15 + 0.008 * 12 + 0.00064 * tokens) * slower
        plan = StepPlan(0, decode(1).rows * 12 + prefill(tokens).rows)
        pacing.finished(plan, begin, early=False)

    for _ in range(3):
        for tokens in (64, 128, 256, 512, 1024):
            step(tokens, 5.0)
    assert budgets(sched, 12)[1] <= 128
    for _ in range(200):
        tokens = budgets(sched, 12)[1]
        assert 0.15 + 0.008 * 12 + 0.00064 * tokens <= 7 * 0.25 * 1.1
        step(tokens, 1.0)
    assert tokens >= 896


def test_far_into_a_long_prompt_a_step_has_tokens_for_what_attention_leaves() -> None:
    sched = scheduler()
    clock = LongContexts(20e-6)
    pacing = Pacing(sched, 2, max_step_time=0.03, filling_tokens=512, clock=clock)
    clock.run_far(pacing, 512, 100_000)  # before anything is known of steps, it says nothing
    for _ in range(5):
        clock.run(pacing, decode(1))
        clock.run(pacing, prefill(400, decoding=True))
    assert sched.prompt_budget is not None
    assert budgets(sched) == (1024, 1792)
    cached, longest = 0, 0.0
    while cached < 100_000:
        tokens = sched.prompt_budget(1, 100_000 - cached, cached)
        longest = max(longest, clock.run_far(pacing, tokens, cached))
        cached += tokens
    # 64 tokens take 57 ms at the end, and 512, which take 66, are eight times as many.
    assert budgets(sched, cached=100_000) == (512, 512)
    assert 0.064 < longest < 0.068
    # 512 tokens take 25.6 ms, 640 as much attention as 1,024 and 38.6, 768 take 41.2.
    # The step that may be longer has 512 as well: it computes more of them a second.
    assert budgets(sched, cached=20_000) == (512, 512)
    # 1,792 tokens that attend to each other alone need 1.6 ms for that.
    assert budgets(sched) == (1024, 1536)
    for chunks, pairs in (
        # Fewer tokens than fill the device take as long as 512; two prompts, what each has.
        (((60_000, 100), (0, 100)), 512 * 60_050),
        (((60_000, 500), (30_000, 512)), 500 * 60_250 + 512 * 30_256),
    ):
        rows = [PlanRow("b", 1, start, count, (), True) for start, count in chunks]
        attention = pacing.spare(StepPlan(0, (*decode(1).rows, *rows)), clock.now)
        attention -= 0.005 + sum(count for _, count in chunks) * 20e-6
        assert attention == pytest.approx(pairs * 1e-9, rel=0.05)
    one, two = (
        pacing.spare(StepPlan(0, (PlanRow("b", 1, 0, 8192 // many, (), True),) * many), clock.now)
        for many in (1, 2)
    )
    assert one - two == pytest.approx((8192 * 4096 - 2 * 4096 * 2048) * 1e-9, rel=0.05)
    plan = StepPlan(0, (PlanRow("a", 0, 5, 1, ((),), True), PlanRow("b", 1, 60_000, 512, (), True)))
    expected = 0.005 + 512 * 20e-6 + 512 * 60_256e-9
    assert pacing.spare(plan, clock.now) == pytest.approx(expected, rel=0.03)
    # A picture beside it takes what the rest does not.
    submitted = clock.now
    clock.now += expected + 200 * 50e-6
    shown = replace(plan, media_work=(MediaWork(0, 0, 0, 100, 300, 5760),))
    pacing.finished(shown, submitted, early=False)
    assert sched.media_cost is not None
    assert sched.media_cost(5760, 100, 200) == pytest.approx(250, rel=0.2)


def test_a_picture_may_take_as_long_as_the_tokens_in_its_place() -> None:
    """A token takes 20 us in a step of 448, in one of 1,024 only 15."""
    sched = scheduler()
    clock = Clock(20e-6)
    pacing = Pacing(sched, 2, max_step_time=0.03, clock=clock)
    for _ in range(9):
        clock.run(pacing, decode(1))
        clock.run(pacing, prefill(448, decoding=True))
    shown = replace(decode(1), media_work=(MediaWork(0, 0, 0, 100, 300, 5760),))
    clock.decode_seconds = 0.005 + 200 * 50e-6
    clock.run(pacing, shown)
    clock.decode_seconds, clock.token_seconds = 0.005, 15e-6
    for _ in range(9):
        clock.run(pacing, prefill(1024, decoding=True))
    assert sched.prompt_budget is not None
    assert sched.media_cost is not None
    budget = sched.prompt_budget(1, 1, 0)
    clock.run(pacing, prefill(budget, decoding=True))
    cost = sched.media_cost(5760, 100, 300)
    assert cost == pytest.approx(200 * 50e-6 / 15e-6, rel=0.05)
    # Far into another prompt fewer tokens take that long, for attention.
    assert sched.prompt_sizes[-1] == 8192


def test_the_first_and_the_last_part_of_a_picture_take_longer() -> None:
    """An embedding takes 50 us, the beginning of a picture 4 ms and its end 1, a token 20 us."""
    sched = scheduler()
    clock = Clock(20e-6)
    pacing = Pacing(sched, 2, max_step_time=0.03, clock=clock)
    for _ in range(5):
        clock.run(pacing, decode(1))
        clock.run(pacing, prefill(448, decoding=True))

    def shown(*parts: tuple[int, int], more: float) -> None:
        work = tuple(MediaWork(0, 0, slot, *part, 5760) for slot, part in enumerate(parts))
        count = sum(end - begin for begin, end in parts)
        clock.decode_seconds = 0.005 + 50e-6 * count + more
        clock.run(pacing, replace(decode(1), media_work=work))

    assert sched.media_cost is not None
    shown((0, 180), more=3.0)  # it compiles, and what an embedding takes is not known yet
    budgets(sched)
    assert sched.media_cost(5760, 180, 360) is None
    for _ in range(3):
        shown((180, 360), more=0.0)
        shown((0, 360), more=0.004)
        shown((360, 720), (0, 180), more=0.004)
        shown((5580, 5760), (5580, 5760), more=0.002)
        shown((5580, 5760), (0, 180), more=0.9)  # which of both took so long?
    budgets(sched)
    costs = [sched.media_cost(5760, *part) for part in ((180, 360), (0, 180), (5580, 5760))]
    assert costs == pytest.approx([450, 650, 500])


def test_a_step_much_smaller_than_its_size_says_nothing() -> None:
    sched = scheduler()
    clock = Clock(20e-6)
    pacing = Pacing(sched, 2, max_step_time=0.03, clock=clock)
    for _ in range(5):
        clock.run(pacing, decode(1))
        clock.run(pacing, prefill(512, decoding=True))
    before = budgets(sched)
    clock.token_seconds = 200e-6
    for _ in range(20):
        clock.run(pacing, prefill(260, decoding=True))
    assert budgets(sched) == before


@pytest.mark.parametrize(("tokens", "known"), [(279, False), (280, True)])
def test_a_step_tells_of_its_size_if_seven_eighths_of_it_are_tokens(
    tokens: int, *, known: bool
) -> None:
    sched = scheduler()  # 320 is the size after 256
    clock = Clock(20e-6)
    pacing = Pacing(sched, 2, max_step_time=0.03, first_budget=192, clock=clock)
    for _ in range(3):
        clock.run(pacing, prefill(tokens, decoding=True))
    assert (pacing.spare(prefill(300, decoding=True), clock.now) > 0) == known
    # All of the step is taken for its tokens while no other size was seen, and so, as these are
    # fewer than 320, more for those of any other.
    assert budgets(sched)[0] == (320 if known else 192)


def test_a_step_with_a_chunk_of_two_tokens_is_no_decode_step() -> None:
    sched = scheduler()
    clock = Clock(20e-6)
    pacing = Pacing(sched, 2, max_step_time=0.03, clock=clock)
    for _ in range(5):
        clock.run(pacing, prefill(2, decoding=True))
    assert pacing.spare(decode(1), clock.now) == 0


def test_the_fifth_shortest_of_the_last_steps_is_waited_for() -> None:
    """Of 15: a step hardly falls below that."""
    sched = scheduler()
    clock = Clock(0.0)
    pacing = Pacing(sched, 2, max_step_time=0.03, clock=clock)
    clock.run(pacing, decode(1), early=True)
    expected = [0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 4, 5]  # milliseconds, by their number
    for number, known in enumerate(expected, start=1):
        clock.decode_seconds = number / 1e3
        clock.run(pacing, decode(1))
        left = max(0.0, known / 1e3 - 0.0003)  # the margin
        assert pacing.spare(decode(1), clock.now) == pytest.approx(left, abs=1e-9)


def test_a_step_with_other_rows_than_before_is_expected_to_take_longer_or_shorter() -> None:
    sched = scheduler()
    clock = SlowClock(0.00072)
    pacing = Pacing(sched, 2, max_step_time=0.25, clock=clock)
    for rows in (8, 12, 15, 20):
        for tokens in (0, 128, 256):
            clock.run_step(pacing, rows, tokens)
    for rows in (8, 10, 15, 100):
        plan = StepPlan(0, decode(1).rows * rows)
        expected = 0.024 + 0.00115 * rows
        assert pacing.spare(plan, clock.now) == pytest.approx(expected, abs=0.0005)


def test_a_server_plans_a_step_shortly_before_the_one_that_runs_ends() -> None:
    sched = scheduler()
    clock = Clock(20e-6)
    pacing = Pacing(sched, 2, max_step_time=0.03, clock=clock)
    assert pacing.spare(decode(1), clock.now) == 0  # nothing is known yet
    for _ in range(5):
        clock.run(pacing, decode(1))
        clock.run(pacing, prefill(512, decoding=True))
    # It began when the one before it ended, not when it was submitted.
    submitted = clock.now - 0.004
    assert pacing.spare(decode(1), submitted) == pytest.approx(0.005, abs=0.0005)
    assert pacing.spare(decode(4), submitted) == pytest.approx(0.020, abs=0.0005)
    mixed = pacing.spare(prefill(512, decoding=True), submitted)
    assert mixed == pytest.approx(0.005 + 512 * 20e-6, abs=0.0005)
    # No step of this size was seen.
    other = pacing.spare(prefill(1024, decoding=True), submitted)
    assert other == pytest.approx(0.005 + 1024 * 20e-6, abs=0.0005)
    clock.now += 0.003
    assert pacing.spare(decode(1), submitted) == pytest.approx(0.002, abs=0.0005)
    # The host's work for a step is begun as much sooner as it took of late.
    before = pacing.spare(decode(1), submitted)
    pacing.submitted(0.001)
    assert pacing.spare(decode(1), submitted) == pytest.approx(before - 0.001)
    pacing.submitted(0.0002)
    assert pacing.spare(decode(1), submitted) == pytest.approx(before - 0.0009)
    for _ in range(50):
        pacing.submitted(0.0002)
    assert pacing.spare(decode(1), submitted) == pytest.approx(0.0018, abs=0.0005)


def test_a_device_that_waited_is_given_its_steps_sooner_from_then_on() -> None:
    sched = scheduler()
    clock = Clock(20e-6)
    pacing = Pacing(sched, 2, max_step_time=0.03, clock=clock)
    for _ in range(5):
        clock.run(pacing, decode(4))
    spare = pacing.spare(decode(1), clock.now)
    assert spare == pytest.approx(0.005 - 0.0003)
    for _ in range(5):
        pacing.waiting(prefill(), early=True)
    assert pacing.spare(decode(1), clock.now) < 0  # at once, as if nobody could arrive
    for _ in range(9):
        pacing.waiting(prefill(), early=True)
    assert pacing.spare(decode(1), clock.now) == pytest.approx(0.005 - 0.05)
    for _ in range(600):
        pacing.waiting(prefill(), early=False)
    assert 0.001 < pacing.spare(decode(1), clock.now) < spare
    for _ in range(3000):
        pacing.waiting(prefill(), early=False)
    assert pacing.spare(decode(1), clock.now) == pytest.approx(spare)


def test_offline_every_step_has_the_same_budget() -> None:
    sched = scheduler()
    clock = Clock(1e-3)
    pacing = Pacing(sched, 2, clock=clock)
    for _ in range(9):
        clock.run(pacing, decode(1))
        clock.run(pacing, prefill(400, decoding=True))
    assert sched.prompt_budget is None
    assert sched.media_cost is None


SECONDS = st.one_of(
    st.sampled_from([0.0, 1e-12, 1e-6, 0.03, 60.0, 1e9]), st.floats(0.0, 1.0, allow_nan=False)
)
LENGTHS = st.sampled_from([2, 63, 64, 65, 500, 513, 8191, 8192])


@st.composite
def taken(draw: st.DrawFn) -> tuple[StepPlan, float, float, bool]:
    """A step of any rows, after any pause, of any duration, and whether its end was seen."""
    decoding, chunks = draw(st.integers(0, 1024)), draw(st.lists(LENGTHS, max_size=2))
    rows = [PlanRow("a", 0, 5, 1, ((),), True)] * (decoding or not chunks)
    rows += [
        PlanRow("b", 1, draw(st.sampled_from([0, 4096, 10**6])), min(count, 4096), ((),), True)
        for count in chunks
    ]
    repeat = 1 if chunks else draw(st.sampled_from([1, 2, 8]))
    return StepPlan(0, rows, repeat=repeat), draw(SECONDS), draw(SECONDS), draw(st.booleans())


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(taken(), min_size=1, max_size=30),
    st.integers(0, 3),
    st.sampled_from([1e-9, 0.03, 0.25, 1e6]),
    st.sampled_from([1, 2048]),
    st.sampled_from([(), (32, 64, 128, 256, 512, 1024)]),
)
def test_whatever_steps_took_every_choice_can_be_followed(
    steps: list[tuple[StepPlan, float, float, bool]],
    depth: int,
    limit: float,
    filling: int,
    rooms: tuple[int, ...],
) -> None:
    """Prompts always get on and never beyond what a step may hold, and no wait is for ever."""
    sched = scheduler()
    clock = Clock(0.0)
    pacing = Pacing(
        sched,
        depth,
        max_step_time=limit,
        first_budget=64,
        filling_tokens=filling,
        rooms=rooms,
        clock=clock,
    )
    largest = 0.0
    for plan, pause, seconds, early in steps:
        clock.now += pause
        submitted = clock.now
        pacing.submitted(min(seconds, pause))
        pacing.waiting(plan, early=early)
        clock.now += seconds
        pacing.finished(plan, submitted, early=early)
        largest = max(largest, seconds)
        assert 1 <= sched.repeat_limit <= 8
        for rows, cached in product((1, 96, 1024), (0, 10**6)):
            for tokens in (1, 10**6):
                assert sched.prompt_budget is not None
                assert 32 <= sched.prompt_budget(rows, tokens, cached) <= 8192
            usual, backlog = budgets(sched, rows, cached)
            assert usual <= backlog
        assert not math.isnan(pacing.spare(plan, clock.now))
        # Neither what is fixed nor a row takes longer than the longest step that was seen.
        if plan.kind == "decode" and not early:
            longest = plan.repeat * largest * (1 + len(plan.rows))
            assert pacing.spare(plan, clock.now) <= longest * (1 + 1e-9)
