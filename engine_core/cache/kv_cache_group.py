"""The layers that share block tables."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.cache.block_pool import BlockPool
from engine_core.cache.prefix_cache import BlockKey, PrefixCache, Spans, cut_before_span
from engine_core.configs import CacheConfig, KVCacheSpec


class KVCacheGroup:
    """The block pool and prefix index of the layers with one cache spec.

    Every group has its own block ids: block 7 of one group and block 7 of another are different
    memory.

    Args:
        spec: what each layer of the group keeps.
        cache_config: block size, number of blocks, and whether prefixes are shared.

    Attributes:
        spec: as given.
        cache_config: as given.
        block_size: tokens a block.
        enable_prefix_caching: whether full blocks may be registered and found.
        pool: the group's block ids.
        prefix: its findable blocks.
    """

    def __init__(self, spec: KVCacheSpec, cache_config: CacheConfig) -> None:
        self.spec = spec
        self.cache_config = cache_config
        self.block_size = cache_config.block_size
        self.enable_prefix_caching = cache_config.enable_prefix_caching
        self.pool = BlockPool(cache_config.num_blocks)
        self.prefix = PrefixCache(self.pool, self.block_size, spec.window)

    def max_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """See :meth:`KVCacheSpec.max_blocks`."""
        return self.spec.max_blocks(num_tokens, block_size=self.block_size, max_chunk=max_chunk)


def longest_cached_prefix(
    groups: Sequence[KVCacheGroup],
    keys: Sequence[BlockKey],
    max_tokens: int,
    spans: Spans = (),
) -> int:
    """The most blocks, cached in every group, after which a request can go on.

    Args:
        groups: all groups of the model; their block size is the same.
        keys: keys of the request's full blocks.
        max_tokens: the prefix holds no more tokens than this.
        spans: the prompt's atomic spans; the prefix ends inside none.
    """
    block_size = groups[0].block_size
    count = min(len(keys), max_tokens // block_size)
    before = -1
    while count != before:
        before = count
        for group in groups:
            count = group.prefix.longest(keys, count)
        count = cut_before_span(count * block_size, spans) // block_size
    return count
