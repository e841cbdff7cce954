"""Sums over ranks on gloo: bit for bit those of plain additions in the order of the ranks."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from spawned import DTYPES, SHAPES, add_up, terms


@pytest.mark.parametrize("size", [2, 4])
def test_sums_are_those_in_the_order_of_the_ranks(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=add_up, args=(i, size, str(tmp_path))) for i in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
    every = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for shape in SHAPES:
        for dtype in DTYPES:
            expected = torch.zeros(shape)
            for rank in range(size):
                expected = expected + terms(rank, shape, dtype).float()
            for sums in every:
                assert sums[shape, dtype].dtype == dtype
                assert torch.equal(sums[shape, dtype], expected.to(dtype)), (shape, dtype)
