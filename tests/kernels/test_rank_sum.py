"""Sums over ranks: bit for bit those in the order of the ranks, whoever is ahead of whom."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forkserver
import pytest
import torch
from random_examples import FULL

from engine_core.kernels import RankMemory, fits_fused_sum, fits_rank_sum, rank_sum
from engine_core.kernels.rank_sum import reference
from engine_core.kernels.rank_sum.layout import PROGRAMS, way_of

CAPACITY = 16384 * PROGRAMS
FAULTS = ("buffers", "waiting", "words-buffers", "words-waiting")
# Sizes, and how many sums in "make soak" and else. The twentieth is the first in several exchanges.
SUMS = {2: (80, 36), 4: (30, 22)}


def run(folder: Path, *cases: str) -> dict[str, str]:
    """Faults in the sums of each case, see ``rank_sums.py``."""
    script = Path(__file__).with_name("rank_sums.py")
    done = forkserver.run(
        [sys.executable, str(script), str(folder), *cases],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = (line.partition(" ") for line in done.stdout.splitlines())
    return {case: wrong for case, _, wrong in told}


@pytest.mark.slow
def test_ranks_in_shared_memory_have_the_same_sums(tmp_path: Path) -> None:
    """Sums, gathers and norms of random shapes, one after another, with random delays."""
    pytest.importorskip("triton", reason="triton is not installed")
    cases = [f"{size}:{rounds[FULL not in os.environ]}:none" for size, rounds in SUMS.items()]
    assert run(tmp_path, *cases) == dict.fromkeys(cases, "")


@pytest.mark.slow
def test_that_would_find_what_is_written_or_read_too_early(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    cases = [f"2:40:{fault}" for fault in FAULTS]
    found = run(tmp_path, *cases)
    assert list(found) == cases
    assert all(found.values()), found


def test_the_order_of_the_ranks_is_that_of_the_additions() -> None:
    terms = torch.tensor([[1e8], [1.0], [-1e8]])
    assert reference.rank_sum(terms).tolist() == [0.0]
    assert reference.rank_sum(terms[[0, 2, 1]]).tolist() == [1.0]
    # Rounded once: 256 + 1 is no bfloat16, and 258 is.
    assert reference.rank_sum(torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()).tolist() == [258.0]
    assert reference.rank_gather(torch.arange(8).view(2, 2, 2)).tolist() == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]


def test_a_second_shot_is_for_whom_it_saves_more_bytes_than_a_meeting_costs() -> None:
    """Of N ranks one gets N - 1 terms, or twice the share of 1 / N of each."""
    assert {size: way_of(1 << 18, size) for size in (2, 4, 8)} == {
        2: "words",
        4: "one shot",
        8: "two shots",
    }
    assert way_of((1 << 18) + 1, 2) == way_of(1 << 30, 2) == "one shot"
    assert way_of(690_000, 4) == "one shot"
    assert way_of(710_000, 4) == "two shots"


def test_what_has_no_room_or_no_kernel_is_left_to_others() -> None:
    addresses = torch.zeros(2, dtype=torch.int64)
    memory = RankMemory(0, 2, addresses, addresses.int(), CAPACITY)
    assert fits_rank_sum(torch.zeros(CAPACITY), memory)
    assert not fits_rank_sum(torch.empty((1 << 28) + 1, device="meta"), memory)
    small = RankMemory(0, 2, addresses, addresses.int(), CAPACITY // 8)
    assert not fits_rank_sum(torch.zeros(CAPACITY), small)
    assert not fits_rank_sum(torch.zeros(0), memory)
    assert not fits_rank_sum(torch.zeros(1, dtype=torch.float64), memory)
    three = RankMemory(0, 3, torch.zeros(3, dtype=torch.int64), addresses.int(), CAPACITY)
    assert not fits_rank_sum(torch.zeros(1), three)
    assert fits_fused_sum(4096, 4096, torch.bfloat16, 2, 1 << 23)
    assert not fits_fused_sum(1, 16384, torch.float32, 2, 1 << 23)
    assert not fits_fused_sum(0, 4096, torch.bfloat16, 2, 1 << 23)
    assert not fits_fused_sum(1, 32768, torch.bfloat16, 2, 1 << 23)
    with pytest.raises(ValueError, match="rank_sum: x is on cpu, the ranks' memory on cpu; both"):
        rank_sum(torch.zeros(1), memory)


@pytest.mark.gpu
@pytest.mark.parametrize("cards", [1, 2])
def test_ranks_on_gpus_have_the_same_sums(cards: int, tmp_path: Path) -> None:
    """By themselves and in graphs that are replayed in a random order."""
    if torch.cuda.device_count() < cards:
        pytest.skip(f"needs {cards} GPUs")
    script = Path(__file__).with_name("rank_sums_gpu.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(rank), str(cards)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=300) for rank in ranks]
    assert [(rank.returncode, out) for rank, (out, _) in zip(ranks, told, strict=True)] == [
        (0, "")
    ] * 2, [error for _, error in told]
