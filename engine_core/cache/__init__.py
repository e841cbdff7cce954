"""Allocation and sharing of the paged KV cache's blocks. Pure Python, without tensors."""

from engine_core.cache.block_pool import NULL_BLOCK, BlockPool
from engine_core.cache.kv_cache_group import KVCacheGroup, longest_cached_prefix, open_groups
from engine_core.cache.prefix_cache import (
    BlockKey,
    PrefixCache,
    cut_before_span,
    extend_block_keys,
)

__all__ = [
    "NULL_BLOCK",
    "BlockKey",
    "BlockPool",
    "KVCacheGroup",
    "PrefixCache",
    "cut_before_span",
    "extend_block_keys",
    "longest_cached_prefix",
    "open_groups",
]
