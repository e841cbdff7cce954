"""The layers that share block tables."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.cache.block_pool import BlockPool
from engine_core.cache.prefix_cache import BlockKey, PrefixCache, Spans, cut_before_span
from engine_core.configs import CacheConfig


class KVCacheGroup:
    """One cache group's part of the pool, and its findable blocks.

    Args:
        config: the cache.
        index: which of its groups this is.
        pool: the block ids that all groups draw from.

    Attributes:
        spec: what each layer of the group keeps.
        block_size: tokens of a block.
        enable_prefix_caching: whether full blocks may be registered and found.
        pool: as given.
        prefix: the group's findable blocks.
    """

    def __init__(self, config: CacheConfig, index: int, pool: BlockPool) -> None:
        self.spec = config.groups[index].spec
        self.block_size = config.groups[index].block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        self.pool = pool
        self.prefix = PrefixCache(
            pool, self.spec, self.block_size, self.block_size // config.block_size, index
        )

    def max_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """See :meth:`~engine_core.configs.CacheSpec.max_blocks`."""
        return self.spec.max_blocks(num_tokens, self.block_size, max_chunk)


def open_groups(config: CacheConfig) -> tuple[KVCacheGroup, ...]:
    """The groups of a cache, over one new pool."""
    pool = BlockPool(config.num_blocks)
    return tuple(KVCacheGroup(config, index, pool) for index in range(len(config.groups)))


def longest_cached_prefix(
    groups: Sequence[KVCacheGroup],
    keys: Sequence[BlockKey],
    max_tokens: int,
    spans: Spans = (),
) -> int:
    """The most keys after whose tokens a request can go on, by what every group has cached.

    Args:
        groups: all groups of the model.
        keys: keys of the request, one for each of the smallest blocks.
        max_tokens: the prefix holds no more tokens than this.
        spans: the prompt's atomic spans; the prefix ends inside none.
    """
    key_size = min(group.block_size for group in groups)
    count = min(len(keys), max_tokens // key_size)
    before = -1
    while count != before:
        before = count
        for group in groups:
            count = group.prefix.longest(keys, count)
        count = cut_before_span(count * key_size, spans) // key_size
    return count
