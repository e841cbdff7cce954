"""The simulation of a loaded server: scheduler and pacing on a device of given times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.serve_sim import STEPS, Costs, drawn, figures, simulate
from engine_core.engine.pacing import Pacing
from engine_core.runtime.step_batch import ROWS_BESIDE
from engine_core.scheduler import Scheduler


def pace(scheduler: Scheduler, clock: Callable[[], float]) -> Pacing:
    return Pacing(scheduler, 2, max_step_time=0.03, rooms=ROWS_BESIDE, clock=clock)


def test_a_request_alone_waits_for_nothing_but_its_steps() -> None:
    """A prompt of 448 tokens and 3 tokens: a step of 480 tokens, then two of decoding."""
    costs = Costs()
    (stream,) = simulate([(0.5, 448, 3)], costs, pace)
    first, *others = (event - stream.due for event in stream.events)
    assert first == pytest.approx(costs.way + costs.plan + STEPS[480] / 1e3 + costs.take, abs=1e-3)
    assert len(others) == 2
    assert others[0] - first == pytest.approx(costs.decode + costs.take + costs.plan, rel=0.3)


def test_a_load_is_served_whole_and_the_same_each_time() -> None:
    requests = drawn(16, 4, seed=3)
    runs = [simulate(requests, Costs(), pace) for _ in range(2)]
    assert [len(stream.events) for stream in runs[0]] == [output for *_, output in requests]
    assert [stream.events for stream in runs[0]] == [stream.events for stream in runs[1]]
    assert figures(runs[0])[1] < 1e3 * requests[-1][0]


def test_no_gap_is_longer_than_the_steps_that_a_budget_allows() -> None:
    """Prompts of 1,376 tokens come faster than they are computed: steps of 42 ms at most."""
    requests = [(0.0, 64, 400), *((0.01 * turn, 1376, 4) for turn in range(1, 30))]
    costs = Costs()
    streams = simulate(requests, costs, pace)
    *_, longest = figures(streams)
    assert 28 < longest < 42 + 1e3 * (costs.plan + costs.take)
