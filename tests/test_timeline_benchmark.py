"""Steps and gaps that ``benchmarks/timeline.py`` finds among the events of a run."""

from __future__ import annotations

import pytest

from benchmarks.timeline import Event, Gap, behind_choice, decode_steps, gaps, show


def run_of(steps: int) -> list[Event]:
    """Steps of 100 us: two kernels of inputs, one that chooses, a copy, and 12 us of nothing."""
    events = []
    for begin in range(0, 100 * steps, 100):
        events += [
            Event("_decode_inputs_kernel", begin, 2),
            Event("_decode_inputs_kernel", begin + 2, 2),
            Event("_linear_kernel", begin + 3, 60),
            Event("_choose_greedy_kernel", begin + 60, 10),
            Event("Memcpy DtoH", begin + 82, 18),
        ]
    return events


def test_steps_begin_with_their_inputs() -> None:
    found = decode_steps(run_of(3))
    assert [step[0].begin for step in found] == [0, 100]
    assert [len(step) for step in found] == [5, 5]
    assert [event.name for event in behind_choice(found[0])] == ["Memcpy DtoH"]


def test_only_what_nothing_runs_in_is_a_gap() -> None:
    events = [Event("a", 0, 10), Event("long", 5, 30), Event("b", 12, 3), Event("c", 40, 1)]
    assert gaps(events) == [Gap(5, 35, "c")]
    assert gaps(run_of(2)) == [Gap(12, 70, "Memcpy DtoH"), Gap(12, 170, "Memcpy DtoH")]


def test_a_run_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show(run_of(4))
    out = capsys.readouterr().out
    assert "2 decode steps from begin to begin, us: median 100.0" in out
    assert "behind the choice: Memcpy DtoH, 3 times, median 18.00 us" in out
    assert "idle 0.048 ms" in out
