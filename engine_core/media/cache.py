"""Items that are kept for prompts to come, and counts of the work on them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine_core.inputs import MediaItem, Video, media_digest

# Taken while a PIL image reads its file, which two threads at once would spoil; by the image's id.
_READING = [threading.Lock() for _ in range(64)]
# What an item takes beside its arrays, roughly.
_ITEM_BYTES = 1024


@dataclass(slots=True)
class MediaStats:
    """Counts of one frontend's work on pictures, videos and sounds, since its start.

    Attributes:
        items: those that prompts showed, from the cache or not.
        refused: prompts that were refused for what they show.
        waiting: prompts whose items wait for a worker now, or are in one.
        decode_seconds: of decoding, in workers.
        process_seconds: of the family's processing: resizing, normalising, cutting.
        cache_queries: items that were looked up in the cache.
        cache_hits: those that were there.
        cache_items: those that are in it now.
        cache_bytes: their size.
    """

    items: int = 0
    refused: int = 0
    waiting: int = 0
    decode_seconds: float = 0.0
    process_seconds: float = 0.0
    cache_queries: int = 0
    cache_hits: int = 0
    cache_items: int = 0
    cache_bytes: int = 0


@dataclass(slots=True)
class _Entry:
    item: MediaItem
    size: int
    names: set[Hashable] = field(default_factory=set)


class MediaCache:
    """Items of earlier prompts by keys, the least recently used of which go when room is short.

    Keys and names begin with the namespace of the request's key and salt, as those of
    :func:`content_key` do: then nobody finds another's item, or learns that it is there. An item's
    span is that of the prompt for which it was made. It may be used from several threads.

    Args:
        max_bytes: of all items together; with 0 nothing is kept.
        max_items: number of items, each of which may hold an open file.
        stats: counts what happens.
    """

    def __init__(self, max_bytes: int, max_items: int, stats: MediaStats) -> None:
        self._max_bytes = max_bytes
        self._max_items = max_items
        self._stats = stats
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._keys: dict[Hashable, Hashable] = {}  # of names
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> MediaItem | None:
        """The item of a key, or of a name; None if it is not there."""
        with self._lock:
            self._stats.cache_queries += 1
            key = self._keys.get(key, key)
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            self._stats.cache_hits += 1
            return entry.item

    def put(self, key: Hashable, item: MediaItem) -> None:
        """Keep an item, unless it is larger than the cache."""
        size = item_bytes(item)
        with self._lock:
            if key in self._entries or size > self._max_bytes:
                return
            self._entries[key] = _Entry(item, size)
            self._stats.cache_items += 1
            self._stats.cache_bytes += size
            while self._stats.cache_bytes > self._max_bytes or len(self._entries) > self._max_items:
                self._drop_oldest()

    def name(self, name: Hashable, key: Hashable) -> None:
        """Have :meth:`get` find the item of ``key`` by ``name`` too, as long as it is there.

        What the name meant before is forgotten.
        """
        with self._lock:
            before = self._entries.get(self._keys.pop(name, None))
            if before is not None:
                before.names.discard(name)
            entry = self._entries.get(key)
            if entry is not None:
                entry.names.add(name)
                self._keys[name] = key

    def clear(self) -> None:
        """Forget every item."""
        with self._lock:
            while self._entries:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self._stats.cache_items -= 1
        self._stats.cache_bytes -= entry.size
        for name in entry.names:
            del self._keys[name]


def item_bytes(item: MediaItem) -> int:
    """Bytes that an item takes in memory."""
    size: int | None = getattr(item.features, "nbytes", None)
    if size is None:
        size = sum(np.asarray(value).nbytes for value in item.features.values())
    return _ITEM_BYTES + size


def content_key(
    namespace: Sequence[Hashable], kind: str, value: Any, options: Mapping[str, Any]
) -> Hashable | None:
    """The key of an item in :class:`MediaCache`; None if what is given cannot be told apart.

    Args:
        namespace: the request's salts.
        kind: of the item.
        value: what the user gave: an encoded file, arrays or PIL images, or lists of them.
        options: what it is processed with.
    """
    try:
        asked = sorted((name, repr(option)) for name, option in options.items())
        return (*namespace, media_digest(kind, repr(asked), *_contents(value)))
    except (TypeError, ValueError, OSError, SyntaxError):  # PIL reads a file when it is looked at
        return None


def _contents(value: Any) -> list[Any]:
    """Bytes that tell ``value`` from any other, for a digest.

    Raises:
        TypeError: it is of another type.
    """
    if isinstance(value, str):
        return ["text", value.encode()]
    if isinstance(value, bytes | int | float | np.ndarray):
        if isinstance(value, np.ndarray) and value.dtype.kind not in "biuf":
            raise TypeError("not an array of numbers")
        return [value]
    if isinstance(value, Video):
        return ["video", repr(value.fps), *_contents(value.frames)]
    if isinstance(value, list | tuple):
        return [len(value), *(part for each in value for part in _contents(each))]
    if hasattr(value, "convert") and hasattr(value, "info"):  # a PIL image
        with _READING[id(value) % len(_READING)]:
            value.load()
        info = [value.info.get(name) for name in ("transparency", "exif")]
        return [value.mode, repr(value.getpalette()), repr(info), np.asarray(value)]
    raise TypeError(f"{type(value).__name__} has no content to look at")
