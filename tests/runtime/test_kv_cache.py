"""The plan of the cache, its memory, and each layer's view of it."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from engine_core.configs import CacheSpec, CacheTensor, EngineConfig, KVCacheSpec
from engine_core.errors import CacheMemoryError
from engine_core.runtime.block_tables import BlockTables
from engine_core.runtime.kv_cache import KVCache
from engine_core.runtime.memory import CachePlan, plan_cache

CPU = torch.device("cpu")


class ScaledSpec(CacheSpec):
    """Bytes, and a scale for each token that new blocks hold zeros of."""

    width: int

    def tensors(self, block_size: int) -> tuple[CacheTensor, ...]:
        return (
            CacheTensor(name="values", shape=(block_size, self.width), dtype="int8"),
            CacheTensor(name="scales", shape=(block_size,), dtype="float32", zeroed=True),
        )


def attention(window: int | None = None, heads: int = 2, size: int = 8) -> KVCacheSpec:
    return KVCacheSpec(
        num_kv_heads=heads, head_dim=size, v_head_dim=size, dtype="float32", window=window
    )


def plan(*specs: CacheSpec, budget: int = 2**20, **settings: object) -> CachePlan:
    config = EngineConfig(**{"max_num_seqs": 64, "max_num_batched_tokens": 16, **settings})
    length = config.max_model_len or 4096
    return plan_cache(specs, config, block_size=4, budget=budget, max_model_len=length)


def block_sizes(planned: CachePlan) -> list[int]:
    return [group.block_size for group in planned.cache_config.groups]


def test_one_kind_of_layers_has_contiguous_tensors() -> None:
    planned = plan(*[attention()] * 3)
    assert len(planned.cache_config.groups) == 1
    cache = KVCache(planned, CPU)
    num_blocks = planned.cache_config.num_blocks
    for layer in cache.layers:
        for tensor in layer:
            assert tensor.shape == (num_blocks, 4, 2, 8)
            assert tensor.is_contiguous()
            assert (tensor.data_ptr() - cache.planes[0].data_ptr()) % 256 == 0
    assert sum(plane.numel() for plane in cache.planes) <= 2**20


@pytest.mark.parametrize(
    "specs",
    [
        [attention(), attention(16), attention(16)],
        [attention(), attention(16, heads=1), attention(None, heads=3, size=6)],
        [ScaledSpec(width=5), attention(), ScaledSpec(width=5)],
        [ScaledSpec(width=3), ScaledSpec(width=80)],
    ],
    ids=["equal", "three sizes", "scales", "bytes"],
)
def test_no_two_tensors_of_a_block_overlap(specs: list[CacheSpec]) -> None:
    planned = plan(*specs, budget=20_000, max_model_len=16)
    cache = KVCache(planned, CPU)
    for group in range(len(planned.cache_config.groups)):
        tensors = [
            tensor
            for layer, of_group in zip(cache.layers, planned.layer_groups, strict=True)
            if of_group == group
            for tensor in layer
        ]
        for number, tensor in enumerate(tensors, start=1):
            tensor.fill_(number)
        for number, tensor in enumerate(tensors, start=1):
            assert (tensor == number).all()
        # A block of one group is a block of every other: what it holds lies in it alone.
        for plane in cache.planes:
            plane.zero_()
        for tensor in tensors:
            tensor[3] = 1
        for plane in cache.planes:
            assert not plane[:3].any()
            assert not plane[4:].any()


def test_layers_that_keep_less_have_more_tokens_in_a_block_or_more_layers() -> None:
    large, small = attention(heads=8), attention(heads=2)
    planned = plan(*[large] * 2, *[small] * 2, max_model_len=64)
    assert block_sizes(planned) == [4, 16]
    assert planned.bytes_per_block == large.bytes_per_block(4) * 2
    odd = attention(heads=3)
    planned = plan(*[large] * 3, *[odd] * 4, max_model_len=64)
    assert block_sizes(planned) == [4, 8]
    assert planned.layer_groups == (0, 0, 0, 1, 1, 1, 1)


def test_a_few_layers_are_not_padded_to_many() -> None:
    planned = plan(attention(), *[attention(16)] * 5, max_model_len=64)
    assert planned.bytes_per_block == attention().bytes_per_block(4)
    assert len(planned.cache_config.groups) == 6
    # One more of twelve is little.
    planned = plan(*[attention()] * 12, *[attention(16)] * 13, max_model_len=64)
    assert len(planned.cache_config.groups) == 2


def test_a_length_that_does_not_fit_is_shortened_or_refused() -> None:
    specs = [attention(), attention(16)]
    page = attention().bytes_per_block(4)
    # 50 blocks: 9 of the window while 16 tokens are computed, 41 of 4 tokens.
    planned = plan(*specs, budget=51 * page)
    assert planned.max_model_len == 41 * 4
    assert (planned.full_sequences, planned.cache_config.num_blocks) == (1, 51)
    with pytest.raises(CacheMemoryError, match="raise it, or set max_model_len to at most 164"):
        plan(*specs, budget=51 * page, max_model_len=165)
    with pytest.raises(CacheMemoryError, match=r"raise it$"):
        plan(*specs, budget=page, max_model_len=16)


def test_no_more_blocks_are_made_than_sequences_fill() -> None:
    planned = plan(attention(), budget=2**30, max_model_len=100, max_num_seqs=3)
    assert planned.cache_config.num_blocks == 1 + 3 * 25


def test_only_new_blocks_are_zeroed() -> None:
    cache = KVCache(plan(ScaledSpec(width=8), max_model_len=64), CPU)
    [(values, scales)] = cache.layers
    values.fill_(7)
    scales.fill_(7.0)
    tables = BlockTables(2, 16, 4, CPU)
    # Four positions and two of the next block are there already; one block of three is new.
    new = tables.unwritten(1, (5, 6, 2), start=6)
    assert new == (2,)
    tables.append(1, (5, 6, 2))
    assert tables.unwritten(1, (9,), start=12) == (9,)
    assert cache.zeroed_groups == (0,)
    cache.clear(0, new)
    assert (scales == 0).all(dim=1).nonzero().flatten().tolist() == [2]
    assert (values == 7).all()
    cache.clear(0, ())


def test_a_first_token_takes_a_small_page_of_each_plane() -> None:
    with Path("/proc/self/statm").open() as statm:
        cache = KVCache(plan(*[attention(heads=8, size=64)] * 30, budget=2**28), CPU)
        assert min(layer[0].nbytes for layer in cache.layers) >= 2**22

        def resident() -> int:
            statm.seek(0)
            return int(statm.read().split()[1]) * mmap.PAGESIZE

        before = resident()
        for layer in cache.layers:
            for tensor in layer:
                tensor[1, 0].fill_(1)
        assert resident() - before < 2**22
