"""Attention within segments of a sequence."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import TOLERANCE, error

from engine_core.kernels import Segments, attend_segments
from engine_core.kernels.segments import reference

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
RUNS = [(2, 5), (1, 3), (1, 3), (4, 1)]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_token_sees_its_segment(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 20, 2, 8).to(dtype)
    got = attend_segments(q, k, v, Segments(RUNS, CPU))
    wanted = reference.attend_segments(q.float(), k.float(), v.float(), RUNS, 8**-0.5)
    assert error(got, wanted) < TOLERANCE[dtype]
    got = attend_segments(q, k, v, Segments(RUNS, CPU), scale=0.2)
    wanted = reference.attend_segments(q.float(), k.float(), v.float(), RUNS, 0.2)
    assert error(got, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_do_not_influence_each_other(device: torch.device, dtype: torch.dtype) -> None:
    qkv = torch.randn(3, 300, 4, 80, device=device, dtype=dtype)
    together = attend_segments(*qkv, Segments([(2, 100), (1, 70), (3, 10)], device))
    alone = attend_segments(*qkv[:, 200:270], Segments([(1, 70)], device))
    assert torch.equal(together[200:270], alone)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("width", [64, 72, 80, 96, 128])
def test_long_segments_on_hopper(width: int) -> None:
    """Tiles that end early, one query in the last, and segments shorter than a tile."""
    runs = [(1, 1025), (1, 63), (3, 200), (1, 7), (2, 128), (1, 640)]
    device = torch.device("cuda")
    segments = Segments(runs, device)
    for dtype in (torch.bfloat16, torch.float16):
        qkv = torch.randn(segments.length, 3, 4, width, device=device, dtype=dtype)
        got = attend_segments(*qkv.unbind(1), segments)
        wanted = reference.attend_segments(*qkv.float().unbind(1), runs, width**-0.5)
        assert error(got, wanted) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("width", [64, 80])
def test_what_is_beside_a_long_segment_may_be_anything(width: int) -> None:
    device = torch.device("cuda")
    qkv = torch.randn(3, 2300, 4, width, device=device, dtype=torch.bfloat16)
    qkv[:, :600] = torch.nan
    qkv[:, 1900:] = torch.nan
    together = attend_segments(*qkv, Segments([(1, 600), (1, 1300), (1, 400)], device))
    alone = attend_segments(*qkv[:, 600:1900], Segments([(1, 1300)], device))
    assert alone.isfinite().all()
    assert torch.equal(together[600:1900], alone)


@pytest.mark.gpu
def test_where_segments_begin_is_computed_on_the_device() -> None:
    segments = Segments(RUNS, torch.device("cuda"))
    assert segments.starts is not None
    assert segments.starts.tolist() == [0, 5, 10, 13, 16, 17, 18, 19, 20]
    assert segments.starts.dtype is torch.int32


def test_runs_of_one_size_are_one() -> None:
    segments = Segments(RUNS, CPU)
    assert (segments.runs, segments.length, segments.longest) == ([(2, 5), (2, 3), (4, 1)], 20, 5)


@pytest.mark.parametrize("runs", [[], [(0, 3)], [(1, 0)], [(1, 2), (-1, 2)]])
def test_what_is_no_segment_is_refused(runs: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="positive"):
        Segments(runs, CPU)


def test_other_lengths_are_refused() -> None:
    q, k, v = torch.randn(3, 19, 2, 8)
    with pytest.raises(ValueError, match=r"must be \[20, heads, D\]"):
        attend_segments(q, k, v, Segments(RUNS, CPU))
