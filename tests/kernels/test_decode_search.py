"""The search around decode attention's cut: its points, and what it makes of times."""

from __future__ import annotations

import pytest

from benchmarks import decode_search, decode_space
from benchmarks.decode_search import MODELS, Model, Point

POINTS = decode_search.drawn_points([Model.named(name) for name in MODELS], 300, seed=7)


def test_points_are_drawn_by_a_seed_and_known_by_their_names() -> None:
    models = [Model.named(name) for name in MODELS]
    assert decode_search.drawn_points(models, 20, seed=7) == POINTS[:20]
    assert decode_search.drawn_points(models, 20, seed=8) != POINTS[:20]
    assert [Point.named(point.name) for point in POINTS] == POINTS
    assert len({point.name for point in POINTS}) == len(POINTS)
    assert {point.model.cache for point in POINTS} == set(decode_search.DTYPES)
    for point in POINTS:
        assert len(point.lengths) == point.rows
        assert sorted(point.lengths, reverse=True) == point.lengths
        assert 1 <= min(point.lengths) <= max(point.lengths) <= decode_search.LONGEST


def test_bytes_of_a_point() -> None:
    # 2 of keys and values, 8 heads of 128 numbers of 2 bytes, or of 1 and a scale of 4.
    assert Point.named("32/8/128 3x1000").bytes == 3 * 1000 * 2 * 8 * 128 * 2
    assert Point.named("32/8/128/int8 3x1000").bytes == 3 * 1000 * 2 * 8 * (128 + 4)
    assert Point.named("32/8/128/w400 3x1000").bytes == 3 * 400 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("name", ["32/8", "32/8/128/int4", "32/8/128/w100/int8/x"])
def test_names_of_no_model_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not heads/kv_heads/dim"):
        Model.named(name)


def test_every_way_is_of_the_space_and_can_be_launched() -> None:
    for point in POINTS:
        ways = decode_search.ways(point)
        assert ways[0] == decode_search.chosen(point)
        assert len(ways) == len(set(ways)) >= 2
        # No two ways with a tile are the same plan, and each has room for its splits.
        made = [(way[:4], decode_search.plan_of(point, way)) for way in ways[1:]]
        assert len(set(made)) == len(made)
        assert all(way.items == plan.count for way, (_, plan) in zip(ways[1:], made, strict=True))


def test_what_the_plan_chooses_is_of_the_space_of_its_tile() -> None:
    missing = 0
    for point in POINTS:
        choice, *others = decode_search.ways(point)
        same = [way for way in others if way[:4] == choice[:4]]
        chosen = decode_search.plan_of(point, choice)
        missing += chosen not in [decode_search.plan_of(point, way) for way in same]
    # Where few programs would be at work the space has none with fewer.
    assert missing <= len(POINTS) // 50


def test_plans_of_rows() -> None:
    assert decode_space.plan([33], 4) == (1, 33, 1)
    assert decode_space.plan([33], 8) == (2, 17, 2)
    # Pieces of 5 tiles are 7, which are of 5 tiles each.
    assert decode_space.plan([33], 28) == (7, 5, 7)
    # Pieces of 20 tiles: the longest are cut, into halves.
    assert decode_space.plan([30, 21, 20, 9, 0], 6) == (7, 20, 2)
    assert decode_space.plan([0], 256) == (1, 1, 1)
    assert decode_space.plan([4000], 256) == (64, 63, 64)


def test_times_between_those_that_were_taken() -> None:
    point = Point.named("32/8/128 1x4000")
    launch = decode_search.chosen(point)
    timed = {launch._replace(pieces=4 * n): us for n, us in {4: 20.0, 16: 10.0}.items()}

    def time_of(splits: int, **changed: int) -> float | None:
        way = launch._replace(pieces=4 * splits, **changed)
        return decode_search.time_of(point, way, timed)

    assert time_of(16) == 10.0
    # As many splits, made otherwise.
    assert time_of(16, items=99) == 10.0
    assert time_of(8) == pytest.approx(15.0)
    assert time_of(18) == 10.0
    assert time_of(32) is None
    assert time_of(8, num_warps=8) is None


def test_the_same_launch_of_other_costs_took_the_same() -> None:
    """Programs without a split are a part of it; and it is the same kernel."""
    point = Point.named("32/8/128 1x4000")
    launch = decode_search.chosen(point)._replace(pieces=64)
    timed = {launch._replace(items=items): float(items) for items in (16, 66, 40)}
    placed = launch._replace(shared=100, even=not launch.even, last_from=launch.last_from + 1)
    assert decode_search.compiled_for(placed) == decode_search.compiled_for(launch)
    for change in ({"sharing": 0.5}, {"waiting": 0.5}, {"warps": 9.0}, {"held": 7.0}):
        other = launch._replace(**change)
        assert decode_search.compiled_for(other) == decode_search.compiled_for(launch)
        for items in (16, 66, 40):
            assert decode_search.time_of(point, other._replace(items=items), timed) == items
    assert decode_search.compiled_for(launch._replace(registers=96)) != (
        decode_search.compiled_for(launch)
    )
