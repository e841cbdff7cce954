from __future__ import annotations

import re
from collections import abc
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
from scheduling import answer, cache, planned, scheduler

import engine_core.scheduler.scheduler as scheduler_module
from engine_core.configs import SamplingParams
from engine_core.errors import ConfigError, ErrorCode, RequestError
from engine_core.inputs import ProcessedPrompt
from engine_core.scheduler import Scheduler, Sequence, SequenceStatus
from engine_core.scheduler.lockstep import Lockstep
from engine_core.steps import (
    Logprob,
    PlanRows,
    RowError,
    RowResult,
    StepPlan,
    StepResult,
    TokenRows,
)


def request(
    name: str = "a",
    tokens: abc.Sequence[int] = (1, 2, 3),
    *,
    eos: tuple[int, ...] = (0,),
    max_model_len: int = 64,
    spans: tuple[tuple[int, int], ...] = (),
    salts: tuple[Hashable, ...] = (),
    priority: int = 0,
    **sampling: Any,
) -> Sequence:
    return Sequence(
        name,
        ProcessedPrompt(tuple(tokens), atomic_spans=spans, cache_salts=salts),
        SamplingParams(**sampling),
        eos_token_ids=eos,
        arrival_time=0.0,
        max_model_len=max_model_len,
        priority=priority,
    )


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(row.sequence_id, row.start, row.num_tokens, row.sample) for row in plan.rows]


def test_a_request_runs_from_prompt_to_length() -> None:
    sched = scheduler()
    one = request(max_tokens=2)
    sched.add(one)
    assert (one.status, sched.num_waiting, sched.num_running) == (SequenceStatus.WAITING, 1, 0)
    plan = planned(sched)
    assert shape(plan) == [("a", 0, 3, True)]
    assert plan.admitted[0].token_ids.tolist() == [1, 2, 3]
    assert plan.admitted[0].prompt is one.prompt
    assert (one.status, sched.num_waiting, sched.num_running) == (SequenceStatus.RUNNING, 0, 1)
    assert (one.num_computed, one.num_in_flight, one.num_pending) == (0, 3, 1)
    update = answer(sched, plan, [5])[0]
    assert (update.sequence_id, update.new_token_ids, update.finished) == ("a", (5,), False)
    assert (one.num_computed, one.num_in_flight, one.num_pending) == (3, 0, 0)
    plan = planned(sched)
    assert shape(plan) == [("a", 3, 1, True)]
    assert plan.admitted == ()
    assert answer(sched, plan, [6])[0].finished
    assert one.output_token_ids == [5, 6]
    assert (one.finish_reason, one.stop_reason) == ("length", None)
    assert not sched.has_unfinished()
    assert sched.schedule() is None
    assert sched.kv_cache_usage == 0.0


def test_steps_are_planned_before_their_tokens_are_known() -> None:
    sched = scheduler(max_model_len=32)
    one = request(max_tokens=4, max_model_len=32)
    sched.add(one)
    plans = [planned(sched) for _ in range(4)]
    assert [shape(plan)[0][1:] for plan in plans] == [
        (0, 3, True),
        (3, 1, True),
        (4, 1, True),
        (5, 1, True),
    ]
    assert [plan.step_id for plan in plans] == [0, 1, 2, 3]
    assert sched.schedule() is None  # all four tokens are in flight
    assert sched.num_steps_in_flight == 4
    for plan in plans:
        answer(sched, plan)
    assert one.finish_reason == "length"
    assert one.num_output_tokens == 4


def test_what_comes_after_the_stop_is_discarded() -> None:
    sched = scheduler(max_repeat=3)
    one = request(max_tokens=20)
    sched.add(one)
    first, second, third = (planned(sched) for _ in range(3))
    assert (second.repeat, third.repeat) == (3, 3)
    answer(sched, first, [4])
    updates = answer(sched, second, [5, 0, 6])
    assert updates[0].new_token_ids == (5, 0)
    assert updates[0].finished
    assert sched.kv_cache_usage > 0  # the third step still names the blocks
    assert answer(sched, third, [6, 6, 6]) == []
    assert one.output_token_ids == [4, 5, 0]
    assert sched.kv_cache_usage == 0


@pytest.mark.parametrize(
    ("sampling", "reason", "output"),
    [
        ({}, ("stop", None), [4, 0]),
        ({"stop_token_ids": (4,)}, ("stop", 4), [4]),
        ({"stop_token_ids": (0,)}, ("stop", None), [4, 0]),
        ({"stop_token_ids": (0,), "ignore_eos": True}, ("stop", 0), [4, 0]),
        ({"ignore_eos": True}, ("length", None), [4, 0, 4, 0, 4]),
        ({"min_tokens": 3}, ("stop", None), [4, 0, 4, 0]),
        ({"min_tokens": 3, "stop_token_ids": (4,)}, ("stop", 4), [4, 0, 4]),
        ({"max_tokens": 2}, ("stop", None), [4, 0]),
        ({"max_tokens": 1}, ("length", None), [4]),
        ({"max_tokens": None, "ignore_eos": True}, ("length", None), [4, 0, 4, 0, 4, 0]),
    ],
    ids=str,
)
def test_stopping(sampling: dict[str, Any], reason: tuple[str, object], output: list[int]) -> None:
    sched = scheduler()
    one = request(**{"max_model_len": 9, "max_tokens": 5, **sampling})
    sched.add(one)
    tokens = [4, 0] * 4
    while sched.has_unfinished():
        answer(sched, planned(sched), [tokens.pop(0)])
    assert one.output_token_ids == output
    assert (one.finish_reason, one.stop_reason) == reason


def test_logprobs_are_cut_with_their_tokens() -> None:
    sched = scheduler(max_repeat=3)
    sched.add(request(max_tokens=20, logprobs=0))
    answer(sched, planned(sched))
    plan = planned(sched)
    logprobs = tuple({token: Logprob(-1.0, 1)} for token in (5, 0, 6))
    rows = (RowResult("a", (5, 0, 6), logprobs=logprobs),)
    assert sched.update(StepResult(plan.step_id, rows))[0].logprobs == logprobs[:2]


def test_long_prompts_are_chunked_and_share_the_step_with_decodes() -> None:
    sched = scheduler(max_num_batched_tokens=8)
    sched.add(request("short", max_tokens=9))
    answer(sched, planned(sched))
    sched.add(request("long", range(1, 18), max_tokens=9))
    steps = []
    for _ in range(4):
        plan = planned(sched)
        steps.append(shape(plan))
        answer(sched, plan)
    # What a decode row computes is not taken from the prompt's eight tokens.
    assert [[row for row in step if row[0] == "long"] for step in steps] == [
        [("long", 0, 8, False)],
        [("long", 8, 8, False)],
        [("long", 16, 1, True)],
        [("long", 17, 1, True)],
    ]
    assert all(step[0][0] == "short" for step in steps[:2])


def test_rows_of_one_token_come_before_chunks_and_the_longest_first() -> None:
    sched = scheduler(max_num_batched_tokens=64, max_num_seqs=8, enable_prefix_caching=False)
    for length in (3, 30, 1, 12):
        sched.add(request(f"{length}", range(1, length + 1), max_tokens=9))
    answer(sched, planned(sched))
    sched.add(request("new", range(1, 41), max_tokens=9))
    plan = planned(sched)
    assert [row.sequence_id for row in plan.rows] == ["30", "12", "3", "1", "new"]
    answer(sched, plan)
    assert [row[0] for row in shape(planned(sched))] == ["new", "30", "12", "3", "1"]


def test_prompts_of_a_batch_take_no_more_steps_than_their_tokens_fill() -> None:
    sched = scheduler(max_num_batched_tokens=16, num_blocks=256)
    for number in range(4):
        sched.add(request(str(number), range(number, number + 16), max_tokens=9))
    steps = []
    for _ in range(4):
        plan = planned(sched)
        steps.append([row.num_tokens for row in plan.rows])
        answer(sched, plan)
    assert steps == [[16], [1, 16], [1, 1, 16], [1, 1, 1, 16]]


def test_a_span_as_long_as_a_step_is_not_held_up_by_decodes() -> None:
    sched = scheduler(max_num_batched_tokens=8)
    sched.add(request("short", max_tokens=20))
    answer(sched, planned(sched))
    sched.add(request("long", range(1, 10), spans=((0, 8),)))
    assert shape(planned(sched)) == [("short", 3, 1, True), ("long", 0, 8, False)]


def test_decode_rows_come_before_chunks() -> None:
    sched = scheduler(max_num_batched_tokens=6, enable_prefix_caching=False)
    sched.add(request("long", range(1, 13), spans=((4, 10),)))
    sched.add(request("short", [1]))
    # The span does not fit after the first four tokens, which leaves room for another request.
    assert shape(planned(sched)) == [("short", 0, 1, True), ("long", 0, 4, False)]


def test_atomic_spans_are_never_split() -> None:
    sched = scheduler(max_num_batched_tokens=6)
    sched.add(request("a", range(1, 16), spans=((3, 8), (8, 10), (12, 13))))
    chunks = []
    for _ in range(4):
        plan = planned(sched)
        chunks.append((plan.rows[0].start, plan.rows[0].num_tokens))
        answer(sched, plan)
    assert chunks == [(0, 3), (3, 5), (8, 6), (14, 1)]


def test_requests_are_admitted_in_order_of_arrival() -> None:
    sched = scheduler(max_num_seqs=2)
    for name in "abcd":
        sched.add(request(name, max_tokens=2))
    plan = planned(sched)
    assert [admission.sequence_id for admission in plan.admitted] == ["a", "b"]
    assert sched.num_waiting == 2
    answer(sched, plan)
    answer(sched, planned(sched))
    assert [admission.sequence_id for admission in planned(sched).admitted] == ["c", "d"]


def test_nobody_overtakes_a_request_that_lacks_blocks() -> None:
    sched = scheduler(block_size=1, num_blocks=13)
    sched.add(request("running", [1, 2, 3, 4], max_tokens=8))
    answer(sched, planned(sched))
    sched.add(request("large", range(1, 11), max_tokens=2))
    sched.add(request("small", [9], max_tokens=2))
    plan = planned(sched)
    assert [row.sequence_id for row in plan.rows] == ["running"]
    assert plan.admitted == ()
    sched.abort("running")
    answer(sched, plan)
    assert planned(sched).admitted[0].sequence_id == "large"


def test_a_prefix_is_shared_and_its_last_token_computed() -> None:
    sched = scheduler(windows=(None, 6))
    first = request("first", range(1, 10), max_tokens=1)
    sched.add(first)
    blocks = planned(sched)
    answer(sched, blocks)
    second = request("second", range(1, 9), max_tokens=1)
    third = request("third", [*range(1, 9), 5], max_tokens=1)
    sched.add(second)
    sched.add(third)
    plan = planned(sched)
    assert shape(plan) == [("third", 8, 1, True), ("second", 4, 4, True)]
    assert (second.num_cached_tokens, third.num_cached_tokens) == (4, 8)
    shared = blocks.rows[0].new_blocks
    for group in range(2):
        assert plan.rows[0].new_blocks[group][:2] == shared[group][:2]
        assert plan.rows[1].new_blocks[group][:1] == shared[group][:1]
        assert plan.rows[1].new_blocks[group][1] not in shared[group][:2]


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6,), (900,), (900, 6)])
@pytest.mark.parametrize("shared", [0, 3, 124, 128, 129, 255, 256, 260, 511, 800])
def test_a_long_prompt_is_looked_up_as_far_as_it_is_cached(
    shared: int, windows: tuple[int | None, ...]
) -> None:
    """Keys are made in stretches of 32, 64 and so on, until one is not found."""
    sched = scheduler(
        windows=windows, num_blocks=900, max_num_batched_tokens=900, max_model_len=900
    )
    for name, own in (("first", 0), ("second", 1000), ("third", 1000)):
        tokens = [*range(shared), *range(shared + own, 801 + own)]
        one = request(name, tokens, max_model_len=900, max_tokens=1)
        sched.add(one)
        answer(sched, planned(sched))
        found = {"first": 0, "second": shared // 4 * 4, "third": 800}
        assert one.num_cached_tokens == found[name]


def test_generated_tokens_are_shared_too() -> None:
    sched = scheduler(block_size=2)
    first = request("first", [1, 2, 3], max_tokens=4)
    sched.add(first)
    while sched.has_unfinished():
        answer(sched, planned(sched))
    second = request("second", [*first.token_ids, 9])
    sched.add(second)
    planned(sched)
    assert second.num_cached_tokens == 6  # of 7 tokens, the last one was never computed


@pytest.mark.parametrize("why", ["off", "salts", "prompt_logprobs"])
def test_a_prefix_is_not_shared_if(why: str) -> None:
    sched = scheduler(enable_prefix_caching=why != "off")
    sched.add(request("first", range(1, 10), max_tokens=1))
    answer(sched, planned(sched))
    second = request(
        "second",
        range(1, 10),
        salts=("adapter",) if why == "salts" else (),
        prompt_logprobs=0 if why == "prompt_logprobs" else None,
    )
    sched.add(second)
    assert shape(planned(sched)) == [("second", 0, 9, True)]
    assert second.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("taken", "asked", "cached"),
    [
        (0, "two", 8),
        # The end of a prompt goes first: what is left of it is still of use.
        (1, "two", 4),
        (2, "two", 0),
        (2, "one", 8),
    ],
)
def test_the_prompt_used_longest_ago_leaves_the_prefix_cache_first(
    taken: int, asked: str, cached: int
) -> None:
    sched = scheduler(num_blocks=8)
    prompts = {"one": range(10, 19), "two": range(20, 29), "three": range(30, 39)}

    def run(tokens: abc.Sequence[int]) -> int:
        one = request("a", tokens, max_tokens=1)
        sched.add(one)
        answer(sched, planned(sched))
        return one.num_cached_tokens

    assert [run(prompts["one"]), run(prompts["two"])] == [0, 0]
    # Used again, the first prompt is the one used last; the third takes the blocks without a key.
    assert [run(prompts["one"]), run(prompts["three"])] == [8, 0]
    if taken:
        # One block has no key, and goes before those that have one.
        run(range(50, 50 + 4 * (taken + 1)))
    assert run(prompts[asked]) == cached


def test_hits_are_counted_in_tokens() -> None:
    sched = scheduler()
    for name, tokens in (("a", range(1, 10)), ("b", range(1, 10)), ("c", [1, 2, 3, 4, 9, 9])):
        sched.add(request(name, tokens, max_tokens=1))
        answer(sched, planned(sched))
    assert (sched.prefix_cache_queries, sched.prefix_cache_hits) == (9 + 9 + 6, 0 + 8 + 4)
    # Nothing is looked up for a request that must compute its whole prompt.
    sched.add(request("d", range(1, 10), max_tokens=1, prompt_logprobs=0))
    answer(sched, planned(sched))
    assert (sched.prefix_cache_queries, sched.prefix_cache_hits) == (24, 12)


def test_without_prefix_caching_no_token_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **fields: object) -> None:
        raise AssertionError("keys are made")

    monkeypatch.setattr(scheduler_module, "extend_block_keys", never)
    sched = scheduler(enable_prefix_caching=False)
    sched.add(request("a", range(1, 10), max_tokens=12))
    while sched.has_unfinished():
        answer(sched, planned(sched))
    assert (sched.prefix_cache_queries, sched.prefix_cache_hits) == (0, 0)
    sched = scheduler()
    sched.add(request("a", range(1, 10)))
    with pytest.raises(AssertionError, match="keys are made"):
        sched.schedule()


def prompt_logprobs(first: int, last: int) -> tuple[dict[int, Logprob], ...]:
    return tuple({token: Logprob(-float(token), 1)} for token in range(first, last))


def test_prompt_logprobs_come_whole_and_once() -> None:
    sched = scheduler(max_num_batched_tokens=4)
    sched.add(request("a", range(1, 7), prompt_logprobs=0))
    plan = planned(sched)
    rows = (RowResult("a", (), prompt_logprobs=prompt_logprobs(2, 6)),)
    assert not sched.update(StepResult(plan.step_id, rows))
    plan = planned(sched)
    rows = (RowResult("a", (9,), prompt_logprobs=prompt_logprobs(6, 7)),)
    assert sched.update(StepResult(plan.step_id, rows))[0].prompt_logprobs == prompt_logprobs(2, 7)
    plan = planned(sched)
    assert answer(sched, plan)[0].prompt_logprobs is None


def two_that_outgrow_the_pool(**limits: int) -> tuple[Scheduler, Sequence, Sequence]:
    sched = scheduler(block_size=1, num_blocks=13, **limits)
    old = request("old", [1, 2, 3], max_tokens=9, prompt_logprobs=0)
    young = request("young", [4, 5, 6], max_tokens=9, prompt_logprobs=0)
    sched.add(old)
    sched.add(young)
    return sched, old, young


def test_the_youngest_is_preempted_and_goes_on_where_it_was() -> None:
    sched, old, young = two_that_outgrow_the_pool()
    reported = {"old": 0, "young": 0}
    admissions = []
    tokens = {"old": iter(range(10, 30)), "young": iter(range(30, 50))}
    while sched.has_unfinished():
        plan = planned(sched)
        admissions += plan.admitted
        rows = tuple(
            RowResult(
                row.sequence_id,
                (next(tokens[row.sequence_id]),) if row.sample else (),
                prompt_logprobs=prompt_logprobs(2, 4) if row.num_tokens > 1 else (),
            )
            for row in plan.rows
        )
        for update in sched.update(StepResult(plan.step_id, rows)):
            reported[update.sequence_id] += update.prompt_logprobs is not None
        sched.check()
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    again = admissions[-1]
    assert again.sequence_id == "young"
    assert again.prompt_len == 3
    assert len(again.token_ids) > 3
    assert again.token_ids == young.token_ids[: len(again.token_ids)]
    assert old.output_token_ids == list(range(10, 19))
    assert young.output_token_ids == list(range(30, 39))
    assert reported == {"old": 1, "young": 1}


def test_tokens_in_flight_of_a_preempted_request_are_accepted() -> None:
    sched, old, young = two_that_outgrow_the_pool()
    plans = [planned(sched)]
    while young.status is SequenceStatus.RUNNING:
        plan = sched.schedule()
        if plan is not None:
            plans.append(plan)
    assert young.num_pending > 0
    assert young.num_output_tokens == 0
    in_flight = young.num_pending
    for plan in plans:
        answer(sched, plan)
    assert young.num_output_tokens == in_flight
    assert young.num_pending == 0
    assert old.num_preemptions == 0
    assert old.num_in_flight == 0
    assert planned(sched).rows[0].sequence_id == "old"


def test_repeat_is_bounded_by_the_tokens_left() -> None:
    sched = scheduler(max_repeat=8)
    sched.add(request("a", max_tokens=20))
    sched.add(request("b", max_tokens=6))
    plan = planned(sched)
    assert plan.repeat == 1
    answer(sched, plan)
    plan = planned(sched)
    assert plan.repeat == 5
    assert all(row.num_tokens == 1 for row in plan.rows)
    answer(sched, plan)
    assert planned(sched).repeat == 8


@pytest.mark.parametrize("num_blocks", [7, 17])
def test_blocks_that_a_window_has_passed_are_used_before_those_of_a_prompt(num_blocks: int) -> None:
    sched = scheduler(windows=(2,), block_size=1, num_blocks=num_blocks, max_num_batched_tokens=4)
    for name, tokens in (("a", range(1, 9)), ("b", range(20, 36)), ("c", range(1, 10))):
        one = request(name, tokens, max_tokens=1)
        sched.add(one)
        while not one.finished:
            answer(sched, planned(sched))
    # The token after the eight of "a" sees the last of them.
    assert one.num_cached_tokens == 8


def test_repeat_is_bounded_by_the_blocks() -> None:
    sched = scheduler(block_size=2, num_blocks=10, max_repeat=8)
    sched.add(request("a", [1, 2, 3], max_tokens=15))
    sched.add(request("b", [4, 5, 6], max_tokens=15))
    answer(sched, planned(sched))
    # Nine blocks, four in use. Five repeats would write positions 3 to 7, two blocks more each.
    plan = planned(sched)
    assert plan.repeat == 5
    assert [len(row.new_blocks[0]) for row in plan.rows] == [2, 2]


def test_repeat_is_1_for_the_last_token_of_a_prompt() -> None:
    sched = scheduler(max_repeat=8)
    sched.add(request("a", range(1, 18), max_tokens=20))
    answer(sched, planned(sched))
    plan = planned(sched)
    assert (plan.rows[0].num_tokens, plan.repeat) == (1, 1)
    answer(sched, plan)
    assert planned(sched).repeat == 8


def test_repeat_is_1_for_requests_that_need_the_host() -> None:
    sched = scheduler(max_repeat=8)
    sched.add(request("a", max_tokens=20))
    sched.add(request("b", max_tokens=20, stop="x"))
    answer(sched, planned(sched))
    assert planned(sched).repeat == 1


def test_repeat_is_1_beside_a_prefill() -> None:
    sched = scheduler(max_repeat=8)
    sched.add(request("a", max_tokens=20))
    answer(sched, planned(sched))
    sched.add(request("b", [5], max_tokens=20))
    plan = planned(sched)
    assert (len(plan.rows), plan.repeat) == (2, 1)


def test_an_aborted_request_gives_nothing_more() -> None:
    sched = scheduler()
    one, other = request("a"), request("b")
    sched.add(one)
    sched.add(other)
    plan = planned(sched)
    sched.abort("a")
    sched.check()
    assert [update.sequence_id for update in answer(sched, plan)] == ["b"]
    assert (one.finish_reason, one.output_token_ids) == ("abort", [])
    assert [row.sequence_id for row in planned(sched).rows] == ["b"]
    sched.abort("a")
    sched.abort("unknown")


def test_a_waiting_request_can_be_aborted() -> None:
    sched = scheduler()
    sched.add(request("a"))
    sched.abort("a")
    assert not sched.has_unfinished()
    assert sched.schedule() is None


def test_the_engine_finishes_a_request_at_a_stop_string() -> None:
    sched = scheduler()
    one = request("a", stop="x")
    sched.add(one)
    plans = [planned(sched), planned(sched)]
    answer(sched, plans[0], [5])
    sched.finish("a", "stop", "x")
    assert answer(sched, plans[1], [6]) == []
    assert (one.finish_reason, one.stop_reason, one.output_token_ids) == ("stop", "x", [5])


def test_the_id_of_a_finished_request_can_be_used_again() -> None:
    sched = scheduler()
    sched.add(request("a"))
    old_plan = planned(sched)
    sched.abort("a")
    again = request("a", [8, 9])
    sched.add(again)
    new_plan = planned(sched)
    assert new_plan.rows[0].row != old_plan.rows[0].row
    assert answer(sched, old_plan, [5]) == []
    answer(sched, new_plan, [6])
    assert again.output_token_ids == [6]


def test_a_row_error_ends_that_request_alone() -> None:
    sched = scheduler()
    one, other = request("a"), request("b")
    sched.add(one)
    sched.add(other)
    plan = planned(sched)
    error = RowError(ErrorCode.NOT_FINITE, "logits are NaN")
    rows = (RowResult("a", (), error=error), RowResult("b", (5,)))
    updates = sched.update(StepResult(plan.step_id, rows))
    assert [(update.sequence_id, update.finished) for update in updates] == [
        ("a", True),
        ("b", False),
    ]
    assert (one.finish_reason, one.error) == ("error", error)
    assert other.finish_reason is None


def test_blocks_out_of_the_window_are_given_back() -> None:
    sched = scheduler(block_size=2, windows=(None, 4))
    one = request("a", max_tokens=30)
    sched.add(one)
    while sched.has_unfinished():
        answer(sched, planned(sched))
        # A query sees its window of 4, which lies in at most 3 blocks.
        assert sched.pool.num_used <= -(-len(one.token_ids) // 2) + 3


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (request(tokens=[]), "prompt is empty"),
        (request(tokens=range(64)), "64 tokens leaves no room for output in max_model_len 64"),
        (request(tokens=range(9), max_model_len=9), "no room for output in max_model_len 9"),
        (request(max_model_len=65), "max_model_len is 65, above the engine's 64"),
        (request(tokens=range(20), max_tokens=30), "need 13 blocks of 4, the cache has 12"),
        (request(tokens=range(20), max_tokens=None), "need 16 blocks of 4"),
        (request(tokens=range(20), spans=((1, 18),)), "17 tokens from 1 to 18 must be computed"),
        (request(spans=((0, 4),)), "atomic spans must be"),
        (request(spans=((1, 1),)), "atomic spans must be"),
        (request(spans=((1, 3), (0, 1))), "atomic spans must be"),
        (request(tokens=range(9), spans=((0, 3), (2, 5))), "atomic spans must be"),
        (request(salts=([],)), "cache salts must be hashable"),
    ],
    ids=str,
)
def test_a_request_that_could_never_run_is_refused(refused: Sequence, message: str) -> None:
    sched = scheduler(num_blocks=13)
    with pytest.raises(RequestError, match=message) as raised:
        sched.add(refused)
    assert "'a'" in str(raised.value)
    assert not sched.has_unfinished()
    sched.add(request("a"))
    planned(sched)


@pytest.mark.parametrize("token", [2**63, -(2**63) - 1, 1.0, "1", None])
def test_tokens_that_are_no_integers_of_64_bits_are_refused(token: Any) -> None:
    message = f"request 'a': token {token!r} at position 3 is not an integer of 64 bits"
    with pytest.raises(RequestError, match=re.escape(message)):
        request(tokens=[1, 2, 3, token])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([[1, 2, 3]]), r"token array\(\[1, 2, 3\]\) at position 0 is not an integer"),
        (iter([1, 2, 3]), "must be a sequence of integers, got list_iterator"),
    ],
    ids=["rows", "iterator"],
)
def test_tokens_that_are_no_sequence_of_integers_are_refused(tokens: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Sequence("a", ProcessedPrompt(tokens), SamplingParams(), arrival_time=0.0, max_model_len=64)


def test_ids_are_unique_among_the_unfinished() -> None:
    sched = scheduler()
    sched.add(request("a"))
    with pytest.raises(RequestError, match="'a': an unfinished request has this id"):
        sched.add(request("a"))
    assert sched.num_waiting == 1


def test_a_request_is_added_once() -> None:
    sched = scheduler()
    one = request("a")
    sched.add(one)
    sched.abort("a")
    with pytest.raises(RequestError, match="was added before"):
        sched.add(one)


def test_a_sequence_longer_than_the_pool_runs_if_its_window_is_not() -> None:
    sched = scheduler(block_size=1, num_blocks=30, windows=(8,), max_num_batched_tokens=8)
    one = request("a", range(1, 41), max_tokens=10)
    sched.add(one)
    while sched.has_unfinished():
        plan = sched.schedule()
        assert plan is not None
        answer(sched, plan)
    assert one.num_output_tokens == 10
    assert one.num_preemptions == 0


def test_what_a_window_gives_back_another_group_takes() -> None:
    # Of 31 computed tokens one group holds 16 blocks of 2 in the end, the other at most 5.
    sched = scheduler(block_size=2, windows=(None, 4), num_blocks=22, max_num_batched_tokens=4)
    one = request(tokens=range(10), max_tokens=22)
    sched.add(one)
    while sched.has_unfinished():
        answer(sched, planned(sched))
    assert one.num_output_tokens == 22
    assert one.num_preemptions == 0


def test_groups_must_fit_together() -> None:
    sched = scheduler(windows=(None, None), num_blocks=13)
    # Of blocks of 4 each group needs 6, and they have 12 together.
    sched.add(request("fits", tokens=range(20), max_tokens=5))
    with pytest.raises(RequestError, match="need 14 blocks of 4, the cache has 12"):
        sched.add(request("does not", tokens=range(20), max_tokens=6))


@pytest.mark.parametrize(
    ("windows", "block_size"),
    [((None, None), 2), ((None, 5, 5, 5), 1), ((None, 3), (4, 1)), ((6, 2, None), (1, 2, 8))],
    ids=str,
)
def test_the_first_goes_on_when_groups_run_out_of_blocks(
    windows: tuple[int | None, ...], block_size: int | tuple[int, ...]
) -> None:
    whole = cache(windows=windows, block_size=block_size)
    sched = scheduler(
        windows=windows,
        block_size=block_size,
        num_blocks=1 + whole.max_blocks(39, 4),
        max_num_batched_tokens=4,
        max_model_len=40,
    )
    requests = [request(name, max_tokens=30, max_model_len=40) for name in "abc"]
    for one in requests:
        sched.add(one)
    in_flight: list[StepPlan] = []
    while sched.has_unfinished():
        first = next(one for one in requests if not one.finished)
        before = first.num_scheduled
        plan = sched.schedule()
        sched.check()
        assert first.num_scheduled > before or in_flight
        if plan is not None:
            in_flight.append(plan)
        if plan is None or len(in_flight) == 3:
            answer(sched, in_flight.pop(0))
    for plan in in_flight:
        answer(sched, plan)
    assert [one.num_output_tokens for one in requests] == [30, 30, 30]
    assert requests[0].num_preemptions == 0
    assert sched.num_preemptions > 0
    assert sched.kv_cache_usage == 0


def test_block_sizes_of_groups_divide_one_another() -> None:
    assert cache(block_size=(4, 2, 8), windows=(None, 3, None)).block_size == 2
    with pytest.raises(ConfigError, match=r"divide one another, got \[2, 3\]"):
        cache(block_size=(2, 3), windows=(None, 3))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (StepResult(1, (RowResult("a", (5,)),)), "step 0 is the oldest in flight"),
        (StepResult(0, ()), "step 0 has 1 rows, its result 0"),
        (StepResult(0, (RowResult("b", (5,)),)), "result of 'b' where the plan has 'a'"),
        (StepResult(0, (RowResult("a", ()),)), "0 tokens from 1 repeats"),
    ],
    ids=["step", "rows", "id", "tokens"],
)
def test_a_result_must_fit_its_plan(result: StepResult, message: str) -> None:
    sched = scheduler()
    sched.add(request("a"))
    planned(sched)
    with pytest.raises(AssertionError, match=message):
        sched.update(result)


def test_rows_in_lockstep_give_what_others_give() -> None:
    """Tokens come as columns, and each sequence ends by its own stop token or length."""
    lengths = {"a": 90, "b": 7, "c": 70, "d": 90}
    outcomes, in_lockstep = [], []
    for lockstep_from in (1, 100):
        sched = scheduler(num_blocks=200, max_model_len=120)
        sched.lockstep_from = lockstep_from
        requests = [
            request(name, max_tokens=count, max_model_len=120) for name, count in lengths.items()
        ]
        for one in requests:
            sched.add(one)
        tokens: dict[str, list[int]] = {name: [] for name in lengths}
        columns = 0
        for turn in range(100):
            plan = sched.schedule()
            if plan is None:
                break
            # "d" ends by its stop token.
            sampled = [
                0 if row.sequence_id == "d" and turn == 80 else turn + 10 * ord(row.sequence_id)
                for row in plan.rows
            ]
            rows: abc.Sequence[RowResult] = [
                RowResult(row.sequence_id, (token,))
                for row, token in zip(plan.rows, sampled, strict=True)
            ]
            if isinstance(plan.rows, PlanRows):
                columns += 1
                given = TokenRows(plan.rows, np.array(sampled), range(len(sampled)))
                assert list(given) == rows
                assert [given[index] for index in range(len(given))] == rows
                assert [plan.rows[index] for index in range(len(given))] == list(plan.rows)
                rows = given
            for update in sched.update(StepResult(plan.step_id, rows)):
                tokens[update.sequence_id].extend(update.new_token_ids)
        sched.check()
        assert sched.pool.num_used == 0
        assert tokens == {one.sequence_id: one.output_token_ids for one in requests}
        outcomes.append((tokens, [(one.finish_reason, one.num_computed) for one in requests]))
        in_lockstep.append(columns)
    assert outcomes[0] == outcomes[1]
    assert {name: len(found) for name, found in outcomes[0][0].items()} == {**lengths, "d": 81}
    assert (in_lockstep[0] > 80, in_lockstep[1]) == (True, 0)


def test_results_of_rows_in_lockstep_must_fit_their_plan() -> None:
    sched = scheduler()
    sched.lockstep_from = 1
    sched.add(request("a"))
    answer(sched, planned(sched))
    assert isinstance(planned(sched).rows, PlanRows)
    with pytest.raises(AssertionError, match=r"results of \['b'\] where the plan has \['a'\]"):
        sched.update(StepResult(1, (RowResult("b", (5,)),)))


@pytest.mark.parametrize("end", ["abort", "finish", "preempt"])
def test_what_a_row_in_lockstep_generated_is_found_once_it_has_left(end: str) -> None:
    """Its full blocks are registered at its end, however it ends."""
    sched = scheduler()
    sched.lockstep_from = 1
    one = request(max_tokens=40, priority=1)
    sched.add(one)
    for _ in range(13):
        plan = planned(sched)
        answer(sched, plan)
    assert isinstance(plan.rows, PlanRows)
    if end == "preempt":
        sched._preempt(one)
    else:
        sched.finish("a", end)
    again = request("b", (1, 2, 3, *[7] * 12), max_tokens=1)
    sched.add(again)
    answer(sched, planned(sched))
    assert again.num_cached_tokens == 12


def test_a_row_in_lockstep_gives_back_what_its_window_has_passed() -> None:
    """At the same lengths as one that is not."""
    used: list[list[int]] = []
    for lockstep_from in (1, 100):
        sched = scheduler(windows=(8,), enable_prefix_caching=False)
        sched.lockstep_from = lockstep_from
        sched.add(request(max_tokens=50))
        used.append([])
        while (plan := sched.schedule()) is not None:
            sched.update(StepResult(plan.step_id, (RowResult("a", (7,)),)))
            used[-1].append(sched.pool.num_used)
    assert used[0] == used[1]
    assert max(used[0]) == 3


def test_rows_in_lockstep_are_looked_at_once_in_many_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    synced = []
    sync = Lockstep.sync

    def counted(self: Lockstep, rows: Any) -> None:
        synced.append(len(rows))
        sync(self, rows)

    monkeypatch.setattr(Lockstep, "sync", counted)
    sched = scheduler(num_blocks=200, max_model_len=300)
    sched.lockstep_from = 1
    one = request(max_tokens=290, max_model_len=300)
    sched.add(one)
    while (plan := sched.schedule()) is not None:
        sched.update(StepResult(plan.step_id, (RowResult("a", (7,)),)))
    assert one.output_token_ids == [7] * 290
    # Once for 64 tokens, for what is left before that, and at its end.
    assert 290 // 64 <= sum(synced) <= 290 // 64 + 2
