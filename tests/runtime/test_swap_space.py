"""Copies of cache blocks to host memory and back."""

from __future__ import annotations

import pytest
import torch

import engine_core.runtime.swap as swap
from engine_core.configs import CacheConfig, CacheGroup, KVCacheSpec
from engine_core.errors import CacheMemoryError
from engine_core.runtime.memory import CachePlan
from engine_core.runtime.swap import SwapSpace, count_swap_blocks

NUM_BLOCKS = 9


def random_planes() -> list[torch.Tensor]:
    """Planes of different widths, and views that begin inside a buffer."""
    torch.manual_seed(0)
    buffer = torch.randint(256, (NUM_BLOCKS * 100,), dtype=torch.uint8)
    widths, starts = (64, 4, 31), (0, 576, 612)
    return [
        buffer[start : start + NUM_BLOCKS * width].view(NUM_BLOCKS, width)
        for start, width in zip(starts, widths, strict=True)
    ]


@pytest.mark.parametrize("staging", [1, 2**20], ids=["block by block", "at once"])
def test_blocks_come_back_wherever_they_are_put(
    staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "_STAGING_BYTES", staging)
    planes = random_planes()
    before = [plane.clone() for plane in planes]
    space = SwapSpace(planes, num_slots=5)
    space.copy_out(((3, 4), (1, 0), (8, 2)))
    for plane in planes:
        plane.fill_(7)
    space.copy_in(((6, 0), (2, 4)))
    came = {6: 1, 2: 3}  # block now: block before
    for now, old in zip(planes, before, strict=True):
        for block in range(NUM_BLOCKS):
            expected = torch.full_like(now[block], 7)
            if block in came:
                expected = old[came[block]]
            assert torch.equal(now[block], expected), block


def test_a_slot_written_twice_holds_the_later_block() -> None:
    planes = random_planes()
    expected = [plane[2].clone() for plane in planes]
    space = SwapSpace(planes, num_slots=1)
    space.copy_out(((6, 0), (2, 0)))
    space.copy_in(((4, 0),))
    assert all(torch.equal(plane[4], old) for plane, old in zip(planes, expected, strict=True))


@pytest.fixture
def plan() -> CachePlan:
    spec = KVCacheSpec(num_kv_heads=1, head_dim=8, v_head_dim=8, dtype="float16")
    config = CacheConfig(groups=(CacheGroup(spec=spec, block_size=16),), num_blocks=4)
    return CachePlan(config, layer_groups=(0, 0), planes=(256,) * 4, max_model_len=48)


@pytest.mark.parametrize(
    ("swap_space", "blocks"), [(0, 0), (1024, 1), (2047, 1), (10_240, 10)], ids=str
)
def test_swap_space_is_counted_in_blocks(plan: CachePlan, swap_space: int, blocks: int) -> None:
    assert count_swap_blocks(swap_space, plan, num_ranks=2) == blocks


def test_swap_space_of_less_than_a_block_is_refused(plan: CachePlan) -> None:
    with pytest.raises(CacheMemoryError, match=r"is 1023 bytes, but one block .* 1024"):
        count_swap_blocks(1023, plan, num_ranks=1)


def test_swap_space_is_within_the_memory_of_the_machine(
    plan: CachePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "total_memory", lambda device: 4000)
    assert count_swap_blocks(4000, plan, num_ranks=1) == 3
    with pytest.raises(CacheMemoryError, match="each of 2 ranks, but the machine has 4000"):
        count_swap_blocks(4000, plan, num_ranks=2)
