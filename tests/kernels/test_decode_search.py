"""The search around decode attention's cut: its points, and what it makes of times."""

from __future__ import annotations

import pytest

from benchmarks import decode_search
from benchmarks.decode_search import MODELS, Model, Point
from benchmarks.decode_space import Tile, resident
from engine_core.kernels.attention.decode import Launch

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
        assert len(ways) == len(set(ways)) > 2
        for cut in decode_search.space(point):
            assert resident(point.model.shape, Tile(*cut[1:4]))


def test_times_between_those_that_were_taken() -> None:
    point = Point.named("32/8/128 1x4000")
    timed = {
        Launch(16, 64, 2, 3, splits, 64, 16, 4): us for splits, us in {4: 20.0, 16: 10.0}.items()
    }

    def time_of(splits: int, tile: tuple[int, int, int] = (64, 2, 3)) -> float | None:
        return decode_search.time_of(point, Launch(16, *tile, splits, 64, 4, 1), timed)

    assert time_of(16) == 10.0
    assert time_of(8) == pytest.approx(15.0)
    assert time_of(18) == 10.0
    assert time_of(32) is None
    assert time_of(8, (32, 1, 3)) is None
