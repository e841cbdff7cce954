"""The rule by which replicas become more and fewer, apart from any engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_core.engine.autoscale import ScaleRule

UP, DOWN = 10.0, 60.0


def rule(least: int = 1, most: int = 8, rows: int = 4) -> ScaleRule:
    return ScaleRule(least, most, rows, UP, DOWN)


def split(sequences: int, replicas: int, rows: int) -> tuple[int, int]:
    """Those that run and those that wait, if any free row is taken."""
    running = min(sequences, replicas * rows)
    return running, sequences - running


@st.composite
def bounds(draw: st.DrawFn) -> tuple[int, int, int]:
    least = draw(st.integers(1, 6))
    return least, draw(st.integers(least, 12)), draw(st.integers(1, 16))


LOADS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=80)


@given(bounds(), LOADS, st.data())
def test_bounds_hold_and_changes_have_been_waited_for(
    limits: tuple[int, int, int], loads: list[tuple[int, int]], data: st.DataObject
) -> None:
    least, most, rows = limits
    scale = ScaleRule(least, most, rows, UP, DOWN)
    replicas = data.draw(st.integers(least, most))
    now = changed = 0.0
    seen: list[tuple[float, bool, bool]] = []
    for running, waiting in loads:
        now += data.draw(st.floats(0.1, 40.0))
        fits = waiting == 0 and running <= 0.7 * rows * (replicas - 1)
        seen.append((now, waiting > 0, fits))
        wanted = scale.wanted(now, replicas, running, waiting)
        assert least <= wanted <= most
        if wanted > replicas:
            since = [crowded for at, crowded, _ in seen if at >= now - UP and at > changed]
            assert all(since)
            assert now - changed >= UP
        if wanted < replicas:
            assert wanted == replicas - 1
            assert all(idle for at, _, idle in seen if at >= now - DOWN and at > changed)
            assert now - changed >= DOWN
        if wanted != replicas:
            replicas, changed, seen = wanted, now, []


@given(bounds(), st.integers(0, 200), st.data())
def test_a_load_that_stays_is_followed_in_one_direction(
    limits: tuple[int, int, int], sequences: int, data: st.DataObject
) -> None:
    least, most, rows = limits
    scale = ScaleRule(least, most, rows, UP, DOWN)
    replicas = data.draw(st.integers(least, most))
    numbers = [replicas]
    for second in range(int((most - least + 2) * DOWN * 1.1)):
        replicas = scale.wanted(float(second), replicas, *split(sequences, replicas, rows))
        numbers.append(replicas)
    assert numbers in (sorted(numbers), sorted(numbers, reverse=True))
    # In the end there are rows for all, as far as there may be, and nothing is far too large.
    assert replicas == most or replicas * rows >= sequences
    assert replicas == least or sequences > 0.7 * rows * (replicas - 1)


def test_a_queue_brings_rows_for_all_at_once_and_idleness_takes_one_by_one() -> None:
    scale = rule()
    assert [scale.wanted(t, 1, 4, 9) for t in (0.0, 5.0, 9.9, 10.0)] == [1, 1, 1, 4]
    # Both times begin anew.
    assert [scale.wanted(t, 4, 13, 3) for t in (11.0, 20.9, 21.0)] == [4, 4, 5]
    # 9 would not fit into 70% of the 12 rows of three, and 8 do.
    assert {scale.wanted(float(t), 4, 9, 0) for t in range(30, 200)} == {4}
    assert [scale.wanted(t, 4, 8, 0) for t in (200.0, 259.9, 260.0)] == [4, 4, 3]


def test_a_moment_without_a_queue_begins_the_wait_anew() -> None:
    scale = rule()
    looks = [(0.0, 1), (9.0, 1), (9.5, 0), (10.0, 1), (19.9, 1), (20.0, 1)]
    assert [scale.wanted(t, 1, 4, waiting) for t, waiting in looks] == [1, 1, 1, 1, 1, 2]
    busy = [(0.0, 2), (59.0, 2), (59.5, 8), (60.0, 2), (119.0, 2), (120.0, 2)]
    scale = rule()
    assert [scale.wanted(t, 2, running, 0) for t, running in busy] == [2, 2, 2, 2, 2, 1]
