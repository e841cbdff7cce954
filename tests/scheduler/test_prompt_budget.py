"""The prompts' share of a step in which others decode."""

from __future__ import annotations

from collections.abc import Callable

from scheduling import answer, planned, scheduler

from engine_core.configs import SamplingParams
from engine_core.inputs import ProcessedPrompt
from engine_core.scheduler import Scheduler, Sequence
from engine_core.steps import StepPlan


def add(
    sched: Scheduler, name: str, length: int, spans: tuple[tuple[int, int], ...] = ()
) -> Sequence:
    first = 1000 * sum(name.encode())  # nothing of one prompt is in the cache for another
    request = Sequence(
        name,
        ProcessedPrompt(tuple(range(first, first + length)), atomic_spans=spans),
        SamplingParams(max_tokens=50, ignore_eos=True),
        eos_token_ids=(),
        arrival_time=0.0,
        max_model_len=512,
    )
    sched.add(request)
    return request


def budgets(usual: int, for_many: int) -> Callable[[int, int, int], int]:
    """The same budgets beside any number of rows: the second for prompts of more than two of it."""
    return lambda rows, tokens, cached: for_many if tokens > 2 * usual else usual


def decoding(prompt_budget: int | None = 8) -> Scheduler:
    """A scheduler in which one request decodes."""
    sched = scheduler(max_model_len=512, max_num_batched_tokens=64, num_blocks=400)
    if prompt_budget is not None:
        sched.prompt_budget = budgets(prompt_budget, prompt_budget)
    add(sched, "decoding", 3)
    answer(sched, planned(sched))
    return sched


def counts(plan: StepPlan) -> dict[str, int]:
    return {row.sequence_id: row.num_tokens for row in plan.rows}


def next_counts(sched: Scheduler) -> dict[str, int]:
    plan = planned(sched)
    answer(sched, plan)
    sched.check()
    return counts(plan)


def test_prompts_beside_decodes_keep_to_their_budget() -> None:
    sched = decoding()
    add(sched, "long", 20)
    assert [next_counts(sched) for _ in range(4)] == [
        {"decoding": 1, "long": 8},
        {"decoding": 1, "long": 8},
        {"decoding": 1, "long": 4},
        {"decoding": 1, "long": 1},
    ]


def test_prompts_that_nobody_decodes_beside_have_the_whole_step() -> None:
    sched = scheduler(max_model_len=512, max_num_batched_tokens=64, num_blocks=400)
    sched.prompt_budget = budgets(8, 8)
    add(sched, "a", 40)
    add(sched, "b", 40)
    assert next_counts(sched) == {"a": 40, "b": 24}


def test_without_a_budget_for_them_prompts_have_the_whole_step_in_their_order() -> None:
    sched = decoding(prompt_budget=None)
    add(sched, "long", 70)
    add(sched, "short", 5)
    assert next_counts(sched) == {"decoding": 1, "long": 64}
    assert next_counts(sched) == {"decoding": 1, "long": 6, "short": 5}


def test_a_short_prompt_is_not_behind_all_chunks_of_a_long_one() -> None:
    sched = decoding()
    add(sched, "long", 40)
    assert next_counts(sched) == {"decoding": 1, "long": 8}
    add(sched, "short", 3)
    add(sched, "also", 7)
    assert next_counts(sched) == {"decoding": 1, "long": 4, "short": 3, "also": 1}
    assert next_counts(sched) == {"decoding": 1, "long": 4, "short": 1, "also": 4}
    assert next_counts(sched) == {"decoding": 1, "long": 4, "short": 1, "also": 2}
    assert next_counts(sched) == {"decoding": 1, "long": 8, "short": 1, "also": 1}


def test_prompts_for_more_than_two_steps_have_longer_ones() -> None:
    sched = decoding()
    sched.prompt_budget = budgets(8, 12)
    add(sched, "first", 16)
    assert next_counts(sched) == {"decoding": 1, "first": 8}
    add(sched, "second", 9)
    assert next_counts(sched) == {"decoding": 1, "first": 8, "second": 4}
    assert next_counts(sched) == {"decoding": 1, "first": 1, "second": 5}
    add(sched, "third", 24)
    assert [next_counts(sched)["third"] for _ in range(3)] == [12, 8, 4]


def test_the_budget_is_asked_for_with_what_a_step_holds() -> None:
    """The rows that decode, the tokens of prompts that wait, and the most before one of them."""
    sched = decoding()
    asked = []

    def of_rows(rows: int, tokens: int, cached: int) -> int:
        asked.append((rows, tokens, cached))
        return 8 // rows

    sched.prompt_budget = of_rows
    add(sched, "first", 10)
    assert [next_counts(sched)["first"] for _ in range(2)] == [8, 2]
    add(sched, "second", 6)
    add(sched, "third", 100)
    assert next_counts(sched)["second"] == 2
    assert next_counts(sched)["second"] == 4
    add(sched, "fourth", 300)
    add(sched, "fifth", 400)  # three full steps of 64 are many enough
    assert next_counts(sched)["third"] == 1
    assert asked == [(1, 10, 0), (1, 2, 8), (2, 106, 0), (2, 102, 2), (3, 398, 2)]


def test_the_first_in_rank_goes_on_whatever_the_budget() -> None:
    sched = decoding(prompt_budget=1)
    add(sched, "a", 9)
    add(sched, "b", 9)
    assert next_counts(sched) == {"decoding": 1, "a": 1}


def test_a_span_larger_than_the_budget_goes_without_other_prompts() -> None:
    sched = decoding()
    add(sched, "before", 6)
    add(sched, "picture", 20, spans=((2, 18),))
    add(sched, "after", 4)
    assert next_counts(sched) == {"decoding": 1, "before": 6, "picture": 1, "after": 1}
    assert next_counts(sched) == {"decoding": 1, "before": 1, "picture": 1, "after": 3}
    assert next_counts(sched) == {"decoding": 1, "before": 1, "picture": 18, "after": 1}


def test_rows_that_are_planned_as_columns_count_as_decoding() -> None:
    sched = decoding()
    sched.lockstep_from = 2
    add(sched, "also", 3)
    for _ in range(3):
        next_counts(sched)
    asked = []

    def of_rows(rows: int, tokens: int, cached: int) -> int:
        asked.append((rows, tokens, cached))
        return 8

    sched.prompt_budget = of_rows
    add(sched, "long", 30)
    assert next_counts(sched) == {"decoding": 1, "also": 1, "long": 8}
    add(sched, "second", 30)
    assert next_counts(sched) == {"decoding": 1, "also": 1, "long": 4, "second": 4}
    next_counts(sched)
    # Of several prompts that have begun the one that is furthest tells.
    assert asked == [(2, 30, 0), (2, 52, 8), (2, 44, 12)]
