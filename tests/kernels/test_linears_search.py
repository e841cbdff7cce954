"""The search among tiles of linears of codes: its cases, its space, and a case that it times."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks import linears_search
from benchmarks.decode_search import HostClock
from benchmarks.linears_search import Case

CASES = linears_search.default_cases()


def test_cases_are_known_by_their_names() -> None:
    assert [Case.named(case.name) for case in CASES] == CASES
    assert len(set(CASES)) == len(CASES)
    assert {case.kind for case in CASES} == {"int4", "int8", "e4m3"}


@pytest.mark.parametrize("name", ["int4/1", "int3/1/64x128", "int4/0/64x128", "e4m3/1/64x100"])
def test_names_of_no_case_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name!r} is not KIND/ROWS/NxK")):
        Case.named(name)


def test_the_floor_is_that_of_bytes_or_of_products() -> None:
    # Codes of half a byte, and for each 128 of them a scale of 2 bytes and a zero of 1.
    few = Case.named("int4/1/28672x4096g")
    assert few.bytes == 28672 * (4096 // 2 + 4096 // 128 * 3)
    assert few.floor == few.bytes / 4.28e6
    assert Case.named("e4m3/256/4096x4096").floor == 256 * 4096 * 4096 / 395e6


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_way_fits_the_weight_and_the_rows(case: Case) -> None:
    tiles = linears_search.ways(case)
    chosen = linears_search.chosen_tile(case)
    assert chosen is None or tiles[0] == chosen
    assert len(set(tiles)) == len(tiles) > 4
    for tile in tiles:
        assert case.kind != "int4" or tile.block_k == 128
        assert case.k % (tile.block_k * tile.splits) == 0 or tile.block_k == 128
        assert tile.mode != "vector" or case.rows == 1
        warps_fit = tile.block_n * 4 >= tile.num_warps * 64
        assert warps_fit or tile.mode != "wx" or tile == chosen


def test_a_case_is_timed_and_compared(launch_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears_search, "native_reader", lambda weight: weight.reader())
    case = Case.named("int4/1/64x256g")
    tile = next(linears_search.space(case))
    torch.manual_seed(0)
    line = linears_search.time_case(
        case, None, HostClock(), 60, launch_device, [tile], turn_bytes=1
    )
    # The tile, and what is fetched ahead with it.
    assert len(line["times"]) == 4
    assert line["wrong"] == []
    assert line["today"] > 0
