"""Finding blocks that already hold the beginning of a prompt.

A full block is known by a key that stands for everything its keys and values depend on: every
token up to its end, the atomic spans it overlaps, and the prompt's salts. Token chains are
BLAKE2b digests of 256 bits (RFC 7693), as collision resistant as SHA-256; salts are compared by
value, so equal keys mean equal content.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from engine_core.cache.block_pool import NULL_BLOCK, BlockPool
from engine_core.configs import CacheSpec

if TYPE_CHECKING:
    from engine_core.inputs import MediaItem

BlockKey = tuple[bytes, tuple[Hashable, ...]]
"""Digest of the token chain, and the salts."""

Spans = Sequence[tuple[int, int]]
"""Half-open position ranges, sorted and disjoint."""


_ROOT = bytes(32)


def cut_before_span(end: int, spans: Spans) -> int:
    """The largest boundary at or before ``end`` that lies inside no span."""
    index = bisect_left(spans, (end,)) - 1  # the last span that starts before end
    if index >= 0 and end < spans[index][1]:
        return spans[index][0]
    return end


def extend_block_keys(
    keys: list[BlockKey],
    token_ids: Sequence[int],
    block_size: int,
    *,
    spans: Spans = (),
    salts: tuple[Hashable, ...] = (),
    media: Sequence[MediaItem] = (),
    most: int | None = None,
) -> None:
    """Append to ``keys`` those of the full blocks of ``token_ids`` that it does not have yet.

    A block that overlaps a span is hashed with the bounds and all the tokens of the span, also
    those outside the block: in a bidirectional span they all enter the block's keys and values.

    Args:
        keys: keys of the first blocks of the same tokens, spans and salts; may be empty.
        token_ids: at least as many tokens as ``keys`` stands for; each fits 64 bits.
        block_size: tokens per block.
        spans: the prompt's atomic spans.
        salts: the prompt's cache salts.
        media: the prompt's items. A block that overlaps one is hashed with its digest and with
            which of its embeddings the block has.
        most: how many keys there may be in all; as many as there are full blocks if None.

    Raises:
        TypeError: a token is not an integer.
        OverflowError: a token does not fit 64 bits.
    """
    first = len(keys) * block_size
    count = len(token_ids) // block_size
    last = (count if most is None else min(count, most)) * block_size
    if first >= last:
        return
    # As bytes at once: a conversion for each block would take longer than its hash.
    content = memoryview(array("q", token_ids[first:last])).cast("B")
    size = len(content) // ((last - first) // block_size)
    parent = keys[-1][0] if keys else _ROOT
    for index, start in enumerate(range(first, last, block_size)):
        chain = parent + content[index * size : (index + 1) * size]
        for span_start, span_end in spans:
            if span_start < start + block_size and start < span_end:
                span = array("q", (span_start, span_end, *token_ids[span_start:span_end]))
                chain += span.tobytes()
        for item in media:
            if item.span[0] < start + block_size and start < item.span[1]:
                begin = start - item.span[0]
                chain += item.digest + array("q", (begin, item.num_embeddings)).tobytes()
        parent = blake2b(chain, digest_size=32).digest()
        keys.append((parent, salts))


class PrefixCache:
    """The findable blocks of one group.

    A block of several keys is known by the last of them, which stands for those before it.

    Args:
        pool: whose blocks they are; it keeps the index, because it knows when a block is reused.
        spec: says which blocks a hit needs.
        block_size: tokens of a block.
        keys_per_block: keys of a block.
        group: index of the group, as block ids and token chains are the same in all of them.
    """

    def __init__(
        self,
        pool: BlockPool,
        spec: CacheSpec,
        block_size: int,
        keys_per_block: int = 1,
        group: int = 0,
    ) -> None:
        self._pool = pool
        self._first_needed = spec.first_needed
        self._block_size = block_size
        self._keys_per_block = keys_per_block
        self._last_key = keys_per_block - 1
        self._group = group

    def first_needed_block(self, position: int) -> int:
        """Index of the first block that a token at ``position`` or later needs any part of."""
        return self._first_needed(position) // self._block_size

    def longest(self, keys: Sequence[BlockKey], limit: int) -> int:
        """The most keys, at most ``limit``, after whose cached blocks a request can go on.

        That is, whole blocks all of which are cached that a token right after them needs.
        """
        per_block = self._keys_per_block
        limit //= per_block
        if self.first_needed_block(limit * self._block_size) == 0:
            for index in range(limit):
                if self._find(keys, index) is None:
                    return index * per_block
            return limit * per_block
        # From the right: the run of cached blocks [index, count) grows until it covers what is
        # needed from count, or breaks, and then no count down to the gap can do.
        count = index = limit
        while index > self.first_needed_block(count * self._block_size):
            index -= 1
            if self._find(keys, index) is None:
                count = index
        return count * per_block

    def ends_before(self, keys: Sequence[BlockKey], begin: int, limit: int) -> bool:
        """Whether no prefix of up to ``limit`` keys has all of ``keys``, by those from ``begin``.

        That is, each needs all blocks before its end, and one of these is not cached.
        """
        per_block = self._keys_per_block
        if self.first_needed_block(limit // per_block * self._block_size) > 0:
            return False
        indices = range(begin // per_block, len(keys) // per_block)
        return any(self._find(keys, index) is None for index in indices)

    def blocks(self, keys: Sequence[BlockKey], count: int, first: int) -> list[int]:
        """The cached blocks from ``first`` on, to the end of a prefix that ``longest`` gave.

        Args:
            keys: keys of the request.
            count: length of the cached prefix, in keys.
            first: index of the first block that the request needs; blocks before it may be gone.
        """
        found = []
        for index in range(first, count // self._keys_per_block):
            block = self._find(keys, index)
            assert block is not None, f"block {index} of a prefix of {count} keys is not cached"
            found.append(block)
        return found

    def acquire(self, keys: Sequence[BlockKey], count: int, first: int) -> list[int]:
        """A block table of cached blocks, with a reference to each one needed.

        The arguments are those of :meth:`blocks`. Blocks before ``first`` are the null block.
        """
        table = [NULL_BLOCK] * first
        for block in self.blocks(keys, count, first):
            self._pool.acquire(block)
            table.append(block)
        return table

    def num_free_taken(self, keys: Sequence[BlockKey], count: int, first: int) -> int:
        """How many blocks ``acquire`` would take out of the free list."""
        is_free = self._pool.is_free
        return sum(is_free(block) for block in self.blocks(keys, count, first))

    def register(self, block: int, keys: Sequence[BlockKey], index: int) -> None:
        """Make the full block ``index`` of a request findable; every token in it is accepted."""
        self._pool.register(
            block, (self._group, keys[index * self._keys_per_block + self._last_key])
        )

    def _find(self, keys: Sequence[BlockKey], index: int) -> int | None:
        return self._pool.find((self._group, keys[index * self._keys_per_block + self._last_key]))
