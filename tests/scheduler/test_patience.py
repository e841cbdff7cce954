"""When sequences that are patient begin to decode."""

from __future__ import annotations

from typing import Any

import pytest
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
    **sampling: Any,
) -> Sequence:
    first = 1000 * sum(name.encode())  # nothing of one prompt is in the cache for another
    request = Sequence(
        name,
        ProcessedPrompt(tuple(range(first, first + length))),
        SamplingParams(max_tokens=most, ignore_eos=True, **sampling),
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


@pytest.mark.parametrize("others", [{"patient": False}, {"most": 1}], ids=str)
def test_most_of_a_step_is_of_prompts_that_are_waited_for(others: dict[str, Any]) -> None:
    """Of patient ones that go on to decode."""
    for length, waits in ((8, False), (9, True)):
        sched = scheduler()
        add(sched, "a", 16)
        add(sched, "b", length, most=2)
        add(sched, "c", 16 - length, **others)
        assert next_counts(sched) == {"a": 16}
        assert next_counts(sched).get("a", 0) == (not waits)


def test_nobody_waits_for_what_is_less_urgent() -> None:
    for priority in (0, 1):
        sched = scheduler()
        add(sched, "a", 16)
        add(sched, "b", 9)
        add(sched, "c", 7, priority=priority)
        assert next_counts(sched) == {"a": 16}
        assert next_counts(sched).get("a", 0) == priority


def test_nobody_waits_for_more_prompts_than_there_are_rows() -> None:
    """Those between ended with their first tokens."""
    sched = scheduler(max_num_seqs=2)
    for name in "abc":
        add(sched, name, 16, stop_token_ids=(5,))
    assert next_counts(sched) == {"a": 16}
    plan = planned(sched)
    assert [row.sequence_id for row in plan.rows] == ["b"]
    answer(sched, plan, (5,))
    assert next_counts(sched) == {"a": 1, "c": 16}


def test_who_is_computed_again_has_begun() -> None:
    """A chunk of one token begins where its prompt ends, and those behind it take the next step."""
    sched = scheduler(num_blocks=11, enable_prefix_caching=False)
    p = add(sched, "p", 12, most=20, priority=1)
    told: list[int] = []

    def step() -> dict[str, int]:
        plan = planned(sched)
        if any(admission.sequence_id == "p" for admission in plan.admitted):
            told.clear()
        for row in plan.rows:
            if row.sequence_id == "p":
                told.extend(row.new_blocks[0])
        answer(sched, plan)
        return {row.sequence_id: row.num_tokens for row in plan.rows}

    for _ in range(5):
        step()
    add(sched, "u", 20, most=1)
    assert step() == {"u": 16}
    assert p.num_preemptions == 1
    assert step() == {"u": 4}
    add(sched, "x", 4, most=1)
    assert step() == {"x": 4, "p": 12}
    add(sched, "y", 15)
    assert step() == {"y": 15, "p": 1}
    for _ in range(3):
        step()
        assert told == p.block_tables[0]


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


def test_blocks_of_several_repeats_come_behind_those_of_the_first_token() -> None:
    sched = scheduler(block_size=2, max_repeat=4)
    sequences = [add(sched, name, 16) for name in "ab"]
    for _ in range(2):
        answer(sched, planned(sched))
    plan = planned(sched)
    assert plan.repeat == 4
    for row, sequence in zip(plan.rows, sequences, strict=True):
        assert [*row.new_blocks[0]] == sequence.block_tables[0][8:]
        assert len(row.new_blocks[0]) == 2


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
