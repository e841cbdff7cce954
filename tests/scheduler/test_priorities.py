"""Who is served first, who gives way, and what happens to the keys and values of those who do."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling import answer, planned
from scheduling import scheduler as make_scheduler

from engine_core.configs import SamplingParams
from engine_core.errors import RequestError
from engine_core.inputs import ProcessedPrompt
from engine_core.scheduler import Scheduler, Sequence, SequenceStatus
from engine_core.steps import StepPlan


def scheduler(**options: Any) -> Scheduler:
    """A cache without prefixes, in blocks of one token unless a window says otherwise."""
    return make_scheduler(**{"block_size": 1, "enable_prefix_caching": False, **options})


def add(
    sched: Scheduler,
    name: str,
    num_tokens: int = 3,
    priority: Any = 0,
    max_tokens: int = 8,
) -> Sequence:
    request = Sequence(
        name,
        ProcessedPrompt(tuple(range(1, num_tokens + 1))),
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        arrival_time=0.0,
        max_model_len=sched.config.max_model_len,
        priority=priority,
    )
    sched.add(request)
    return request


def names(plan: StepPlan) -> set[str]:
    return {row.sequence_id for row in plan.rows}


def admitted(plan: StepPlan) -> list[str]:
    return [admission.sequence_id for admission in plan.admitted]


def test_the_lowest_number_is_admitted_first_and_equals_in_order_of_arrival() -> None:
    sched = scheduler(max_num_seqs=1)
    for name, priority in (("a", 2), ("b", 0), ("c", 2), ("d", -5), ("e", 0)):
        add(sched, name, priority=priority, max_tokens=1)
    order = []
    while sched.has_unfinished():
        plan = planned(sched)
        order += admitted(plan)
        answer(sched, plan)
    assert order == ["d", "b", "e", "a", "c"]


def test_the_least_important_gives_way_when_blocks_run_out() -> None:
    sched = scheduler(num_blocks=16)
    requests = [
        add(sched, name, priority=priority, max_tokens=12)
        for name, priority in (("old", 1), ("young", 0), ("middle", 1))
    ]
    while all(request.status is SequenceStatus.RUNNING for request in requests) or (
        sched.num_running == 0
    ):
        answer(sched, planned(sched))
    old, young, middle = requests
    assert (young.num_preemptions, old.num_preemptions, middle.num_preemptions) == (0, 0, 1)
    while not young.finished:
        answer(sched, planned(sched))
    assert young.num_preemptions == 0
    while sched.has_unfinished():
        answer(sched, planned(sched))
    assert old.num_preemptions <= middle.num_preemptions
    assert [request.num_output_tokens for request in requests] == [12, 12, 12]


def test_an_urgent_request_takes_the_row_of_the_least_important() -> None:
    sched = scheduler(max_num_seqs=2)
    one, other = add(sched, "one", priority=1), add(sched, "other", priority=2)
    answer(sched, planned(sched))
    add(sched, "urgent", priority=0)
    plan = planned(sched)
    assert admitted(plan) == ["urgent"]
    assert names(plan) == {"one", "urgent"}
    assert (one.num_preemptions, other.num_preemptions) == (0, 1)
    assert sched.num_preemptions == 1


def test_equals_do_not_take_from_one_another() -> None:
    sched = scheduler(max_num_seqs=1)
    first = add(sched, "first", priority=1)
    answer(sched, planned(sched))
    add(sched, "second", priority=1)
    while not first.finished:
        plan = planned(sched)
        assert names(plan) == {"first"}
        answer(sched, plan)
    assert first.num_preemptions == 0
    assert admitted(planned(sched)) == ["second"]


def test_no_more_are_preempted_than_needed() -> None:
    sched = scheduler(num_blocks=25)
    running = [add(sched, str(number), 4, priority=number) for number in (1, 2, 3)]
    answer(sched, planned(sched))
    # 12 of 24 blocks are free. The urgent one wants 10, and one more for each of the three beside
    # it and itself.
    add(sched, "urgent", 10, priority=0)
    plan = planned(sched)
    assert admitted(plan) == ["urgent"]
    assert [request.num_preemptions for request in running] == [0, 0, 1]


def test_nobody_is_preempted_in_vain() -> None:
    """The blocks of all less important requests would not be enough."""
    sched = scheduler(num_blocks=21)
    large = add(sched, "large", 14, priority=-1, max_tokens=2)
    small = add(sched, "small", 1, priority=1, max_tokens=4)
    answer(sched, planned(sched))
    add(sched, "urgent", 12, priority=0)
    plan = planned(sched)
    assert names(plan) == {"large", "small"}
    assert small.num_preemptions == 0
    answer(sched, plan)
    assert large.finished
    plan = planned(sched)
    assert "urgent" in admitted(plan)


def test_the_prefix_that_an_urgent_request_shares_brings_it_no_blocks() -> None:
    sched = scheduler(num_blocks=21, enable_prefix_caching=True)
    add(sched, "kept", 1, priority=-1)
    shares = add(sched, "shares", 8, priority=1)
    answer(sched, planned(sched))
    # 11 of 20 blocks are free. It wants 10 after the 8 that it would share, and a reserve of 2
    # beside "kept" alone.
    add(sched, "urgent", 18, priority=0, max_tokens=2)
    plan = planned(sched)
    assert admitted(plan) == []
    assert shares.num_preemptions == 0


def test_what_comes_back_is_kept_for_the_urgent_request() -> None:
    """With steps in flight blocks come back later; less important requests take none of them."""
    sched = scheduler(num_blocks=15, max_num_seqs=3)
    kept = add(sched, "kept", 4, priority=1, max_tokens=10)
    gives = add(sched, "gives", 4, priority=2, max_tokens=10)
    plans = [planned(sched), planned(sched)]
    add(sched, "urgent", 7, priority=0)
    # 4 of 14 blocks are free and 5 on their way back; the urgent request wants 7 and a reserve of
    # 2. The one block that "kept" would need is not given to it.
    assert sched.schedule() is None
    assert (kept.num_preemptions, gives.num_preemptions) == (0, 1)
    for plan in plans:
        assert sched.schedule() is None
        answer(sched, plan)
    plan = planned(sched)
    assert admitted(plan) == ["urgent"]
    assert names(plan) == {"urgent", "kept"}
    assert kept.num_preemptions == 0


def test_repeats_take_none_of_what_comes_back_for_the_urgent_request() -> None:
    sched = scheduler(num_blocks=20, max_num_seqs=3, max_repeat=4)
    gives = add(sched, "gives", 5, priority=2)
    plans = [planned(sched)]
    kept = add(sched, "kept", 4, priority=1)
    plans.append(planned(sched))
    add(sched, "urgent", 8, priority=1)
    plan = planned(sched)
    assert (kept.num_preemptions, gives.num_preemptions) == (0, 1)
    # Two tokens of "gives" are in flight, and with them its blocks; 8 others are free.
    assert (names(plan), plan.repeat) == ({"kept"}, 1)
    for done in (*plans, plan):
        answer(sched, done)
    assert "urgent" in admitted(planned(sched))


def test_important_prompts_come_before_less_important_ones_of_a_running_batch() -> None:
    sched = scheduler(max_num_batched_tokens=8)
    add(sched, "slow", 20, priority=1)
    answer(sched, planned(sched))
    add(sched, "urgent", 6, priority=0)
    plan = planned(sched)
    assert {row.sequence_id: row.num_tokens for row in plan.rows} == {"urgent": 6, "slow": 2}


@pytest.mark.parametrize("priority", [1.5, "high", None, True], ids=repr)
def test_a_priority_is_a_whole_number(priority: Any) -> None:
    sched = scheduler()
    with pytest.raises(RequestError, match="'a': priority must be an integer, got"):
        add(sched, "a", priority=priority)
    assert not sched.has_unfinished()


def preempted(sched: Scheduler, num_tokens: int = 3) -> tuple[Sequence, StepPlan]:
    """A request that an urgent one has just taken the only row from, and the plan of that."""
    request = add(sched, "swapped", num_tokens, priority=1)
    for _ in range(3):
        answer(sched, planned(sched))
    add(sched, "urgent", priority=0, max_tokens=2)
    plan = planned(sched)
    assert request.num_preemptions == 1
    return request, plan


def test_blocks_go_to_the_host_and_come_back() -> None:
    sched = scheduler(max_num_seqs=1, num_swap_blocks=10)
    request, plan = preempted(sched)
    # Three tokens of prompt and two of the three generated are in the cache.
    assert request.num_swapped == 5
    pairs = plan.swap_out
    assert len(pairs) == 5
    assert len({slot for _, slot in pairs}) == 5
    assert plan.swap_in == ()
    answer(sched, plan)
    answer(sched, planned(sched))
    plan = planned(sched)
    assert admitted(plan) == ["swapped"]
    assert [(row.start, row.num_tokens) for row in plan.rows] == [(5, 1)]
    back = plan.swap_in
    assert [slot for _, slot in back] == [slot for _, slot in pairs]
    assert [block for block, _ in back] == list(plan.rows[0].new_blocks[0][:5])
    assert (request.num_swapped, sched.num_swaps) == (0, 1)
    answer(sched, plan)
    while sched.has_unfinished():
        answer(sched, planned(sched))
    assert request.num_output_tokens == 8


def test_without_room_on_the_host_it_is_computed_again() -> None:
    sched = scheduler(max_num_seqs=1, num_swap_blocks=4)
    request, plan = preempted(sched)
    assert (request.num_swapped, plan.swap_out, sched.num_swaps) == (0, (), 0)
    answer(sched, plan)
    answer(sched, planned(sched))
    assert [(row.start, row.num_tokens) for row in planned(sched).rows] == [(0, 6)]


def test_only_the_window_goes_to_the_host() -> None:
    sched = scheduler(max_num_seqs=1, windows=(None, 3), num_swap_blocks=20)
    request, plan = preempted(sched, num_tokens=7)
    # All blocks of one group. Of the other two: the query at 9 sees itself and the two before it.
    assert len(plan.swap_out) == 9 + 2
    answer(sched, plan)
    answer(sched, planned(sched))
    plan = planned(sched)
    tables = plan.rows[0].new_blocks
    assert tables[1][:7] == (0,) * 7
    assert [block for block, _ in plan.swap_in] == [*tables[0][:9], *tables[1][7:9]]
    answer(sched, plan)
    while sched.has_unfinished():
        answer(sched, planned(sched))
        # Old blocks are given back after a swap as before.
        assert sched.pool.num_used <= len(request.token_ids) + 4
    assert request.num_output_tokens == 8


def test_the_host_memory_of_an_aborted_request_is_free_again() -> None:
    sched = scheduler(max_num_seqs=1, num_swap_blocks=5)
    request, plan = preempted(sched)
    assert request.num_swapped == 5
    sched.abort("swapped")
    sched.check()  # which counts the slots
    assert request.finish_reason == "abort"
    answer(sched, plan)
    answer(sched, planned(sched))
    assert not sched.has_unfinished()
    again, plan = preempted(sched)
    assert again.num_swapped == 5


def test_tokens_in_flight_of_a_swapped_request_are_accepted() -> None:
    sched = scheduler(max_num_seqs=1, num_swap_blocks=10)
    request = add(sched, "swapped", priority=1)
    plans = [planned(sched) for _ in range(3)]
    add(sched, "urgent", priority=0, max_tokens=2)
    # The row comes back when its steps are done; the blocks are free for the next plan already.
    assert sched.schedule() is None
    assert request.num_swapped == 5
    assert sched.kv_cache_usage == 0
    for plan in plans:
        answer(sched, plan)
    assert request.num_output_tokens == 3
    plan = planned(sched)
    assert admitted(plan) == ["urgent"]
    assert len(plan.swap_out) == 5
    while not request.finished:
        answer(sched, plan)
        plan = sched.schedule() or plan
    assert request.num_output_tokens == 8
    assert request.num_preemptions == 1
