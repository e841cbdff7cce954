"""Which pictures, videos and sounds have their embeddings on the device."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    slot: int
    size: int
    holders: int
    computed: int = 0


class EncoderCache:
    """Embeddings of items, by their keys, within a number of tokens.

    An item that somebody holds stays. The others stay as long as nobody needs their room, and go in
    the order in which they were given back. The runner keeps the embeddings themselves, by slot.

    Attributes:
        capacity: embeddings in all.
        queries: items that were asked for.
        hits: how many of them were there.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queries = 0
        self.hits = 0
        self._used = 0
        self._entries: dict[Hashable, _Entry] = {}
        self._idle: dict[Hashable, None] = {}  # in the order in which they go
        self._next_slot = 0
        self._freed: list[int] = []

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def fits(self, items: Iterable[tuple[Hashable, int]]) -> bool:
        """Whether all of these, each with its size, can be held at once beside what is held."""
        wanted = dict(items)
        new = sum(size for key, size in wanted.items() if key not in self._entries)
        idle = sum(self._entries[key].size for key in self._idle if key not in wanted)
        return new <= self.capacity - self._used + idle

    def hold(self, key: Hashable, size: int) -> int:
        """Hold an item that fits; returns its slot."""
        self.queries += 1
        entry = self._entries.get(key)
        if entry is not None:
            self.hits += 1
            self._idle.pop(key, None)
            entry.holders += 1
            return entry.slot
        while self.capacity - self._used < size:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            gone = self._entries.pop(oldest)
            self._used -= gone.size
            if gone.computed:  # else no plan says anything of it
                self._freed.append(gone.slot)
        self._entries[key] = _Entry(self._next_slot, size, 1)
        self._next_slot += 1
        self._used += size
        return self._next_slot - 1

    def slot(self, key: Hashable) -> int:
        """Where an item's embeddings are; -1 if it is not there."""
        entry = self._entries.get(key)
        return -1 if entry is None else entry.slot

    def computed(self, key: Hashable) -> int:
        """How many of an item's embeddings the plans until now compute; 0 if it is not there."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.computed

    def compute(self, key: Hashable, end: int) -> None:
        """Take note that a plan computes an item's embeddings up to ``end``."""
        self._entries[key].computed = end

    def release(self, key: Hashable) -> None:
        """Give an item back, once for each time it was held."""
        entry = self._entries[key]
        entry.holders -= 1
        if entry.holders == 0:
            self._idle[key] = None

    def take_freed(self) -> tuple[int, ...]:
        """Slots that have embeddings and nobody needs any more, since the last call."""
        freed = tuple(self._freed)
        self._freed.clear()
        return freed

    def check(self) -> None:
        """Assert that sizes and holders add up, for tests."""
        assert self._used == sum(entry.size for entry in self._entries.values()) <= self.capacity
        idle = [key for key, entry in self._entries.items() if entry.holders == 0]
        assert set(idle) == set(self._idle)
        assert all(0 <= entry.computed <= entry.size for entry in self._entries.values())
        slots = [entry.slot for entry in self._entries.values()]
        assert len(set(slots)) == len(slots)
