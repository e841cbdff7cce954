"""The cache of items: its bounds, its names and the keys of contents."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine_core.inputs import MediaItem
from engine_core.media import MediaCache, MediaStats
from engine_core.media.cache import content_key, item_bytes

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def item(number: int, size: int = 1000) -> MediaItem:
    return MediaItem("image", bytes([number]), (0, 4), {"values": np.zeros(size, np.uint8)})


def make(max_bytes: int, max_items: int = 100) -> tuple[MediaCache, MediaStats]:
    stats = MediaStats()
    return MediaCache(max_bytes, max_items, stats), stats


def test_the_least_recently_used_go_first() -> None:
    one = item_bytes(item(0))
    assert one >= 1000
    for cache, stats in (make(3 * one), make(100 * one, 3)):
        for number in range(3):
            cache.put(number, item(number))
        assert cache.get(0) is not None
        cache.put(3, item(3))
        cache.put(3, item(4))  # the same content
        found = {number: cache.get(number) for number in range(4)}
        assert [key for key, value in found.items() if value is not None] == [0, 2, 3]
        assert all(value.digest == bytes([key]) for key, value in found.items() if value)
        assert (stats.cache_items, stats.cache_bytes) == (3, 3 * one)
        assert (stats.cache_queries, stats.cache_hits) == (5, 4)
        cache.clear()
        assert (stats.cache_items, stats.cache_bytes, cache.get(3)) == (0, 0, None)


def test_what_is_larger_than_the_cache_takes_nobodys_room() -> None:
    cache, stats = make(3000)
    cache.put("small", item(1))
    cache.put("large", item(2, 5000))
    assert cache.get("small") is not None
    assert cache.get("large") is None
    nothing, stats = make(0)
    nothing.put("small", item(1, 0))
    assert stats.cache_items == 0


def test_names_live_as_long_as_their_item_and_mean_one() -> None:
    cache, _ = make(3 * item_bytes(item(0)))
    cache.name("nobody", "a")
    assert cache.get("nobody") is None
    cache.put("a", item(0))
    cache.name("cat", "a")
    cache.name("pet", "a")
    cache.put("b", item(1))
    cache.name("pet", "b")
    named = [cache.get(name) for name in ("cat", "pet")]
    assert [each and each.digest for each in named] == [b"\0", b"\1"]
    for number in range(2, 5):
        cache.put(number, item(number))
    assert [cache.get(name) for name in ("cat", "pet")] == [None, None]
    cache.put("a", item(0))
    assert cache.get("cat") is None


def test_contents_have_keys_of_their_own() -> None:
    image = Image.fromarray(PIXELS)
    clear = image.convert("P")
    clear.info["transparency"] = 3
    values: list[Any] = [
        "data:image/png;base64,aa",
        b"data:image/png;base64,aa",
        PIXELS,
        PIXELS.reshape(7, 5, 3),
        PIXELS.astype(np.int16),
        [PIXELS],
        [PIXELS, PIXELS],
        (PIXELS, 16000),
        (PIXELS, 8000),
        image.convert("P"),
        clear,
    ]
    keys = [content_key((), "image", value, {}) for value in values]
    keys += [content_key((), "image", PIXELS, {"a": 1}), content_key((), "video", PIXELS, {})]
    keys += [content_key((b"salt",), "image", PIXELS, {}), content_key(("p",), "image", PIXELS, {})]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    again = [
        content_key((), "image", each, {}) for each in (PIXELS.copy(), "data:image/png;base64,aa")
    ]
    assert again == [keys[2], keys[0]]
    both = [
        content_key((), "image", b"a", dict(o))
        for o in ([("a", 1), ("b", 2)], [("b", 2), ("a", 1)])
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize("kind", ["object", "mapping", "array of objects", "damaged"])
def test_what_cannot_be_told_apart_has_no_key(kind: str) -> None:
    out = BytesIO()
    Image.fromarray(PIXELS.repeat(50, axis=0)).save(out, "PNG")
    values = {
        "object": object(),
        "mapping": {"pixel_values": PIXELS},
        "array of objects": np.array([object()]),
        "damaged": Image.open(BytesIO(out.getvalue()[:-100])),
    }
    assert content_key((), "image", values[kind], {}) is None
