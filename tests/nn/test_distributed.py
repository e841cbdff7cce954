"""Sums over ranks on gloo: bit for bit those of plain additions in the order of the ranks."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch import Tensor

from engine_core.nn.distributed import all_reduce
from engine_core.step_context import BuildContext

# The last three are above what is gathered whole; two of them do not divide by the ranks.
SHAPES = [(1, 8), (1, 577), (3, 577), (257, 577), (512, 576), (523, 577)]
DTYPES = [torch.float32, torch.bfloat16]


def terms(rank: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A rank's term; that of fewer rows is the beginning of that of more."""
    generator = torch.Generator().manual_seed(rank)
    largest = torch.randn(SHAPES[-1], generator=generator) * 10.0 ** (rank % 3)
    return largest[: shape[0], : shape[1]].to(dtype).contiguous()


def add_up(rank: int, size: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size
    )
    group = torch.distributed.group.WORLD
    context = BuildContext(tp_rank=rank, tp_size=size, process_group=group)
    sums = {
        (shape, dtype): all_reduce(terms(rank, shape, dtype), context)
        for shape in SHAPES
        for dtype in DTYPES
    }
    torch.save(sums, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


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
    every = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for shape in SHAPES:
        for dtype in DTYPES:
            expected = torch.zeros(shape)
            for rank in range(size):
                expected = expected + terms(rank, shape, dtype).float()
            for sums in every:
                assert sums[shape, dtype].dtype == dtype
                assert torch.equal(sums[shape, dtype], expected.to(dtype)), (shape, dtype)
