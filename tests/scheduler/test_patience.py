"""When sequences whose tokens nobody sees before their end begin to decode."""

from __future__ import annotations

from scheduling import answer, planned, scheduler

from engine_core.configs import SamplingParams
from engine_core.inputs import ProcessedPrompt
from engine_core.scheduler import Scheduler, Sequence


def add(
    sched: Scheduler,
    name: str,
    length: int,
    *,
    patient: bool = True,
    priority: int = 0,
    most: int = 9,
) -> Sequence:
    first = 1000 * sum(name.encode())  # nothing of one prompt is in the cache for another
    request = Sequence(
        name,
        ProcessedPrompt(tuple(range(first, first + length))),
        SamplingParams(max_tokens=most, ignore_eos=True),
        eos_token_ids=(),
        arrival_time=0.0,
        max_model_len=64,
        patient=patient,
        priority=priority,
    )
    sched.add(request)
    return request


def next_counts(sched: Scheduler) -> dict[str, int]:
    plan = planned(sched)
    answer(sched, plan)
    return {row.sequence_id: row.num_tokens for row in plan.rows}


def test_prompts_that_come_at_once_begin_to_decode_together() -> None:
    sched = scheduler()
    for name in "abc":
        add(sched, name, 16)
    assert [next_counts(sched) for _ in range(4)] == [
        {"a": 16},
        {"b": 16},
        {"c": 16},
        {"a": 1, "b": 1, "c": 1},
    ]


def test_steps_ahead_of_their_results_are_the_same() -> None:
    sched = scheduler()
    for name in "ab":
        add(sched, name, 16)
    plans = [planned(sched) for _ in range(4)]
    assert [[row.sequence_id for row in plan.rows] for plan in plans] == [
        ["a"],
        ["b"],
        ["a", "b"],
        ["a", "b"],
    ]
    for plan in plans:
        answer(sched, plan)


def test_beside_a_step_that_is_not_full_all_decode() -> None:
    sched = scheduler()
    add(sched, "a", 16)
    add(sched, "b", 15)
    assert next_counts(sched) == {"a": 16}
    assert next_counts(sched) == {"a": 1, "b": 15}


def test_who_has_begun_to_decode_goes_on() -> None:
    sched = scheduler()
    add(sched, "a", 5)
    next_counts(sched)
    next_counts(sched)
    for name in "bc":
        add(sched, name, 16)
    assert [next_counts(sched) for _ in range(3)] == [
        {"a": 1, "b": 16},
        {"a": 1, "c": 16},
        {"a": 1, "b": 1, "c": 1},
    ]


def test_who_is_waited_for_decodes_at_once() -> None:
    sched = scheduler()
    add(sched, "a", 16, patient=False)
    add(sched, "b", 16)
    assert next_counts(sched) == {"a": 16}
    assert next_counts(sched) == {"a": 1, "b": 16}


def test_nobody_waits_for_prompts_that_end_at_once() -> None:
    sched = scheduler()
    add(sched, "a", 16)
    add(sched, "b", 16, most=1)
    add(sched, "c", 9, most=1)
    add(sched, "d", 16)
    assert [next_counts(sched) for _ in range(3)] == [
        {"a": 16},
        {"a": 1, "b": 16},
        {"a": 1, "c": 9, "d": 7},
    ]


def test_nobody_waits_for_what_is_less_urgent() -> None:
    sched = scheduler()
    add(sched, "a", 16)
    add(sched, "b", 16, priority=1)
    assert next_counts(sched) == {"a": 16}
    assert next_counts(sched) == {"a": 1, "b": 16}


def test_blocks_that_were_given_meanwhile_are_told_of_later() -> None:
    """The first token after a prompt of whole blocks needs a block."""
    sched = scheduler(block_size=8)
    for name in "ab":
        add(sched, name, 16)
    first = planned(sched)
    answer(sched, first)
    second = planned(sched)
    assert [len(row.new_blocks[0]) for row in (*first.rows, *second.rows)] == [2, 2]
    answer(sched, second)
    third = planned(sched)
    assert [len(row.new_blocks[0]) for row in third.rows] == [1, 1]
    blocks = [
        block for plan in (first, second, third) for row in plan.rows for block in row.new_blocks[0]
    ]
    assert len({*blocks}) == 6


def test_who_is_aborted_while_it_waits_leaves_nothing_behind() -> None:
    sched = scheduler(block_size=8)
    for name in "ab":
        add(sched, name, 16)
    plans = [planned(sched), planned(sched)]
    sched.abort("a")
    for plan in plans:
        answer(sched, plan)
    add(sched, "a", 3)
    assert next_counts(sched) == {"b": 1, "a": 3}
    sched.abort("a")
    sched.abort("b")
    assert sched.pool.num_used == 0
