"""Copies of cache blocks to host memory and back."""

from __future__ import annotations

import pytest
import torch

import engine_core.runtime.swap as swap
from engine_core.configs import CacheConfig, KVCacheSpec
from engine_core.errors import CacheMemoryError
from engine_core.runtime.memory import CachePlan
from engine_core.runtime.swap import SwapSpace, count_swap_blocks

NUM_BLOCKS, BLOCK_SIZE = 9, 4
LAYER_GROUPS = (0, 1, 0)


def random_cache(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three layers of two groups, whose keys, values and heads differ in size."""
    torch.manual_seed(0)
    sizes = [(2, 8, 6), (1, 4, 4), (2, 8, 6)]
    return [
        (
            torch.randn(NUM_BLOCKS, BLOCK_SIZE, heads, size).to(dtype),
            torch.randn(NUM_BLOCKS, BLOCK_SIZE, heads, v_size).to(dtype),
        )
        for heads, size, v_size in sizes
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("staging", [1, 2**20], ids=["block by block", "at once"])
def test_blocks_come_back_wherever_they_are_put(
    dtype: torch.dtype, staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "_STAGING_BYTES", staging)
    cache = random_cache(dtype)
    before = [(keys.clone(), values.clone()) for keys, values in cache]
    space = SwapSpace(cache, LAYER_GROUPS, num_slots=5)
    out = (((3, 4), (1, 0), (8, 2)), ((5, 1),))
    space.copy_out(out)
    for pair in cache:
        for tensor in pair:
            tensor.fill_(7.0)
    space.copy_in((((6, 0), (2, 4)), ((5, 1),)))
    came = [{6: 1, 2: 3}, {5: 5}]  # block now: block before, by group
    for layer, group in enumerate(LAYER_GROUPS):
        for now, old in zip(cache[layer], before[layer], strict=True):
            for block in range(NUM_BLOCKS):
                source = came[group].get(block)
                expected = torch.full_like(now[block], 7.0) if source is None else old[source]
                assert torch.equal(now[block], expected), (layer, block)


def test_a_slot_written_twice_holds_the_later_block() -> None:
    cache = random_cache(torch.float32)
    expected = cache[1][0][2].clone()
    space = SwapSpace(cache, LAYER_GROUPS, num_slots=1)
    space.copy_out(((), ((6, 0), (2, 0))))
    space.copy_in(((), ((4, 0),)))
    assert torch.equal(cache[1][0][4], expected)


@pytest.fixture
def plan() -> CachePlan:
    spec = KVCacheSpec(num_kv_heads=1, head_dim=8, v_head_dim=8, dtype="float16")
    return CachePlan(CacheConfig(block_size=16, num_blocks=4), (spec,), (0, 0), 1024, 48)


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
