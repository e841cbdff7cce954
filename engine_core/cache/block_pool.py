"""Block ids with reference counts, and the order in which free ones are reused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from itertools import islice

NULL_BLOCK = 0
"""Takes the writes of rows that have ended; stands in tables for blocks no query sees any more."""


class BlockPool:
    """Reference-counted block ids ``1..num_blocks - 1``, which all cache groups draw from.

    The life of a block: ``allocate`` gives it one reference, ``acquire`` one more for each request
    that shares it, ``release`` takes one away. At zero it goes to the end of a free list, which
    is used from its front: the least recently freed block first. A block that was given a key by
    ``register`` is found by it, free or not, until ``allocate`` hands it to a new owner.

    There are two free lists of blocks with a key. Those that a window has passed are used before
    the others: a hit at the end of a sequence, by far the most likely, needs none. No hit needs
    blocks without a key. These come first of all, the last freed before the rest: memory that was
    just written is in a processor's caches, and the first touch of a page of the system's takes
    long. Where nothing has a key the cache so takes no more memory than it needs.

    Every operation takes constant time per block. The null block 0 is never handed out.

    Args:
        num_blocks: blocks in all, the null block included; at least 2.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got {num_blocks} blocks")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._keys: list[Hashable | None] = [None] * num_blocks
        self._index: dict[Hashable, int] = {}
        # Free blocks without a key, the last one is used first.
        self._blank = list(range(num_blocks - 1, 0, -1))
        # An OrderedDict is a linked list in C: a plain dict is slow to find its first item after
        # many removals at the front.
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._free: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can hand out now; keyed ones are among them."""
        return len(self._blank) + len(self._passed) + len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - 1 - self.num_free

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks, each with one reference and no key."""
        assert count <= self.num_free, f"asked for {count} blocks, {self.num_free} are free"
        blank, refs = self._blank, self._refs
        left = max(0, len(blank) - count)
        blocks = blank[left:]
        blocks.reverse()
        del blank[left:]
        count -= len(blocks)
        if count:
            passed, free, keys = self._passed, self._free, self._keys
            num_passed = min(count, len(passed))
            keyed = [*islice(passed, num_passed), *islice(free, count - num_passed)]
            for place, block in enumerate(keyed):
                del (passed if place < num_passed else free)[block]
                del self._index[keys[block]]
                keys[block] = None
            blocks += keyed
        for block in blocks:
            refs[block] = 1
        return blocks

    def acquire(self, block: int) -> None:
        """One more reference to a block that ``find`` gave."""
        if self._refs[block] == 0:
            del (self._passed if block in self._passed else self._free)[block]
        self._refs[block] += 1

    def release(self, blocks: Iterable[int], *, passed: bool = False) -> None:
        """One reference less to each block, in this order; null blocks are skipped.

        ``passed`` says that a window has passed them.
        """
        refs, keys, blank = self._refs, self._keys, self._blank
        free = self._passed if passed else self._free
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            left = refs[block] - 1
            assert left >= 0, f"block {block} is released but nobody holds it"
            refs[block] = left
            if left:
                continue
            if keys[block] is None:
                blank.append(block)
            else:
                free[block] = None

    def register(self, block: int, key: Hashable) -> None:
        """Make a block findable. If another one has the key already, that one keeps it."""
        assert self._refs[block] > 0, f"block {block} gets a key but nobody holds it"
        assert self._keys[block] is None, f"block {block} gets a second key"
        if key not in self._index:
            self._index[key] = block
            self._keys[block] = key

    def find(self, key: Hashable) -> int | None:
        """The block with this key, free or not, or None."""
        return self._index.get(key)

    def is_free(self, block: int) -> bool:
        """Whether the block has no references."""
        return self._refs[block] == 0

    def refs(self, block: int) -> int:
        """The block's number of references."""
        return self._refs[block]

    def check(self) -> None:
        """Verify the invariants, in time linear in ``num_blocks``.

        Raises:
            AssertionError: one is broken; the message gives the numbers.
        """
        assert self._refs[NULL_BLOCK] == 0, f"null block has {self._refs[NULL_BLOCK]} references"
        assert not any(self._keys[block] is not None for block in self._blank), "blank with a key"
        free = [*self._blank, *self._passed, *self._free]
        assert NULL_BLOCK not in free, "null block is in the free list"
        held = sum(1 for count in self._refs if count > 0)
        assert min(self._refs) >= 0, f"reference count {min(self._refs)} below zero"
        assert held + len(free) == len({*free}) + held == self.num_blocks - 1, (
            f"{held} held + {len(free)} free != {self.num_blocks - 1} blocks"
        )
        for block in free:
            assert self._refs[block] == 0, f"block {block} is free with {self._refs[block]} refs"
        keyed = sum(1 for key in self._keys if key is not None)
        assert keyed == len(self._index), f"{keyed} keyed blocks, {len(self._index)} index entries"
        for key, block in self._index.items():
            assert self._keys[block] == key, f"key of block {block} is not the one in the index"
