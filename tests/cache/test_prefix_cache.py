from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import examples

from engine_core.cache import (
    BlockKey,
    KVCacheGroup,
    cut_before_span,
    extend_block_keys,
    longest_cached_prefix,
    open_groups,
)
from engine_core.configs import CacheConfig, CacheGroup, KVCacheSpec
from engine_core.errors import ConfigError


def block_keys(
    token_ids: Sequence[int],
    block_size: int = 2,
    spans: Sequence[tuple[int, int]] = (),
    salts: tuple[object, ...] = (),
) -> list[BlockKey]:
    keys: list[BlockKey] = []
    extend_block_keys(keys, token_ids, block_size, spans=spans, salts=salts)
    return keys


def groups(*windows: int | None, block_sizes: Sequence[int] = (2,)) -> tuple[KVCacheGroup, ...]:
    """Groups over one pool; the last block size is that of all that follow."""
    sizes = [*block_sizes, *[block_sizes[-1]] * len(windows)]
    config = CacheConfig(
        groups=tuple(
            CacheGroup(
                spec=KVCacheSpec(
                    num_kv_heads=1, head_dim=8, v_head_dim=8, dtype="float16", window=window
                ),
                block_size=size,
            )
            for window, size in zip(windows, sizes, strict=False)
        ),
        num_blocks=32,
    )
    return open_groups(config)


def group(window: int | None = None, block_size: int = 2) -> KVCacheGroup:
    [only] = groups(window, block_sizes=(block_size,))
    return only


def fill(cache_group: KVCacheGroup, keys: Sequence[BlockKey]) -> list[int]:
    """Blocks with these keys, free but findable."""
    blocks = cache_group.pool.allocate(len(keys))
    for index, block in enumerate(blocks):
        cache_group.prefix.register(block, keys, index)
    cache_group.pool.release(reversed(blocks))
    return blocks


def test_block_sizes_divide_one_another() -> None:
    assert len(groups(None, None, block_sizes=(2, 4))) == 2
    with pytest.raises(ConfigError, match=r"must divide one another, got \[4, 6\]"):
        groups(None, None, block_sizes=(4, 6))


def test_only_full_blocks_have_keys() -> None:
    assert len(block_keys([1, 2, 3, 4, 5])) == 2
    assert block_keys([1]) == []


def test_keys_chain() -> None:
    one, other = block_keys([1, 2, 3, 4]), block_keys([9, 2, 3, 4])
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert block_keys([1, 2, 3, 4, 5, 6])[:2] == one


def test_a_key_is_not_that_of_another_block_of_the_same_tokens() -> None:
    first, second = block_keys([1, 2, 1, 2])
    assert first != second


def test_keys_extend_to_those_made_at_once() -> None:
    keys = block_keys([1, 2, 3], spans=((0, 2),), salts=("a",))
    extend_block_keys(keys, [1, 2, 3, 4, 5, 6], 2, spans=((0, 2),), salts=("a",))
    assert keys == block_keys([1, 2, 3, 4, 5, 6], spans=((0, 2),), salts=("a",))


def test_salts_are_compared_by_value() -> None:
    plain = block_keys([1, 2])
    assert block_keys([1, 2], salts=("a",)) != plain
    assert block_keys([1, 2], salts=("a",)) == block_keys([1, 2], salts=("a",))
    assert block_keys([1, 2], salts=(("a", "b"),)) != block_keys([1, 2], salts=("a", "b"))


def test_every_block_of_a_span_depends_on_all_its_tokens() -> None:
    spans = ((1, 6),)
    one = block_keys([1, 2, 3, 4, 5, 6, 7, 8], spans=spans)
    other = block_keys([1, 2, 3, 4, 5, 9, 7, 8], spans=spans)
    assert [a == b for a, b in zip(one, other, strict=True)] == [False] * 4
    before = block_keys([1, 2, 3, 4, 5, 6], spans=((2, 6),))
    assert before[0] == block_keys([1, 2, 3, 4, 5, 9], spans=((2, 6),))[0]


def test_the_bounds_of_a_span_count() -> None:
    tokens = [1, 2, 3, 4]
    keys = {block_keys(tokens, spans=spans)[0] for spans in ((), ((0, 2),), ((0, 3),), ((1, 3),))}
    assert len(keys) == 4
    # Also where the spans have the same tokens.
    assert len({block_keys([1] * 4, spans=spans)[0] for spans in (((0, 2),), ((1, 3),))}) == 2


tokens_and_spans = st.tuples(
    st.lists(st.integers(0, 2), min_size=4, max_size=6),
    st.sampled_from([(), ((0, 2),), ((1, 4),), ((0, 1), (2, 4)), ((3, 4),)]),
    st.sampled_from([(), ("a",), ("a", "b"), (("a", "b"),)]),
)


@settings(max_examples=examples(200), deadline=None)
@given(tokens_and_spans, tokens_and_spans)
def test_keys_are_equal_just_if_what_they_stand_for_is(
    one: tuple[list[int], tuple[tuple[int, int], ...], tuple[object, ...]],
    other: tuple[list[int], tuple[tuple[int, int], ...], tuple[object, ...]],
) -> None:
    def content(
        tokens: list[int], spans: tuple[tuple[int, int], ...], salts: tuple[object, ...], end: int
    ) -> object:
        seen = [(span, tokens[slice(*span)]) for span in spans if span[0] < end]
        return tokens[:end], seen, salts

    keys = [block_keys(tokens, 2, spans, salts) for tokens, spans, salts in (one, other)]
    for index in range(2):
        end = 2 * (index + 1)
        equal = content(*one, end) == content(*other, end)
        assert (keys[0][index] == keys[1][index]) == equal


@pytest.mark.parametrize("tokens", [[1.5, 2], ["a", "b"], [None, 1]], ids=str)
def test_tokens_are_integers(tokens: list[int]) -> None:
    with pytest.raises(TypeError):
        block_keys(tokens)


def test_tokens_fit_64_bits() -> None:
    with pytest.raises(OverflowError):
        block_keys([1, 2**63])


@pytest.mark.parametrize(
    ("end", "boundary"),
    [(0, 0), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5), (8, 8), (9, 9)],
)
def test_cut_before_span(end: int, boundary: int) -> None:
    assert cut_before_span(end, ((2, 5), (5, 8))) == boundary


def test_a_prefix_is_found_up_to_the_first_miss() -> None:
    keys = block_keys([1, 2, 3, 4, 5, 6])
    cache_group = group()
    fill(cache_group, keys[:1])
    fill(cache_group, keys[2:])
    assert longest_cached_prefix([cache_group], keys, 6) == 1


def test_a_prefix_is_cached_in_every_group() -> None:
    keys = block_keys([1, 2, 3, 4, 5, 6])
    one, other = groups(None, None)
    fill(one, keys)
    assert longest_cached_prefix([one, other], keys, 6) == 0
    fill(other, keys[:2])
    assert longest_cached_prefix([one, other], keys, 6) == 2


def test_a_hit_ends_at_a_block_of_every_group() -> None:
    keys = block_keys(list(range(16)))
    small, large = groups(None, None, block_sizes=(2, 4))
    fill(small, keys)
    assert longest_cached_prefix([small, large], keys, 16) == 0
    blocks = large.pool.allocate(3)
    for index, block in enumerate(blocks):
        large.prefix.register(block, keys, index)
    # Eight keys of two tokens; three blocks of four tokens are cached.
    assert longest_cached_prefix([small, large], keys, 16) == 6
    assert longest_cached_prefix([small, large], keys, 11) == 4
    assert longest_cached_prefix([small, large], keys, 16, ((9, 11),)) == 6
    assert longest_cached_prefix([small, large], keys, 16, ((11, 13),)) == 4
    assert large.prefix.acquire(keys, 6, 1) == [0, *blocks[1:]]


def test_a_larger_block_depends_on_all_its_keys() -> None:
    _, large = groups(None, None, block_sizes=(2, 4))
    [block] = large.pool.allocate(1)
    large.prefix.register(block, block_keys([1, 2, 3, 4]), 0)
    assert large.prefix.longest(block_keys([1, 2, 3, 4]), 2) == 2
    assert large.prefix.longest(block_keys([1, 2, 3, 5]), 2) == 0
    assert large.prefix.longest(block_keys([1, 2]), 1) == 0


@pytest.mark.parametrize(("max_tokens", "blocks"), [(6, 3), (5, 2), (4, 2), (1, 0)])
def test_a_prefix_leaves_tokens_to_compute(max_tokens: int, blocks: int) -> None:
    keys = block_keys([1, 2, 3, 4, 5, 6])
    cache_group = group()
    fill(cache_group, keys)
    assert longest_cached_prefix([cache_group], keys, max_tokens) == blocks


@pytest.mark.parametrize(
    ("spans", "blocks"),
    [(((0, 6),), 3), (((0, 5),), 3), (((3, 7),), 1), (((2, 5), (5, 7)), 1), (((0, 7),), 0)],
)
def test_a_prefix_ends_inside_no_span(spans: tuple[tuple[int, int], ...], blocks: int) -> None:
    keys = block_keys([1, 2, 3, 4, 5, 6, 7], spans=spans)
    cache_group = group()
    fill(cache_group, keys)
    assert longest_cached_prefix([cache_group], keys, 6, spans) == blocks


def test_acquire_gives_the_table_and_holds_its_blocks() -> None:
    keys = block_keys([1, 2, 3, 4, 5, 6])
    cache_group = group()
    blocks = fill(cache_group, keys)
    assert cache_group.prefix.num_free_taken(keys, 2, 0) == 2
    assert cache_group.prefix.acquire(keys, 2, 0) == blocks[:2]
    assert cache_group.prefix.num_free_taken(keys, 3, 0) == 1
    assert [cache_group.pool.refs(block) for block in blocks] == [1, 1, 0]


def test_a_window_needs_only_what_it_sees() -> None:
    keys = block_keys(list(range(12)))
    cache_group = group(window=4)
    blocks = fill(cache_group, keys[3:5])
    # The query at 10 sees 7 to 10: blocks 3 and 4. The one at 8 sees 5 to 8: blocks 2 and 3.
    assert longest_cached_prefix([cache_group], keys, 11) == 5
    assert cache_group.prefix.acquire(keys, 5, 3) == [0, 0, 0, *blocks]
    assert longest_cached_prefix([cache_group], keys, 9) == 0


@settings(max_examples=examples(200), deadline=None)
@given(
    cached=st.lists(st.booleans(), min_size=1, max_size=10),
    block_size=st.integers(1, 4),
    window=st.none() | st.integers(1, 12),
)
def test_longest_is_the_longest(cached: list[bool], block_size: int, window: int | None) -> None:
    keys = block_keys(list(range(len(cached) * block_size)), block_size)
    cache_group = group(window, block_size)
    fill(cache_group, [key for key, wanted in zip(keys, cached, strict=True) if wanted])

    def usable(count: int) -> bool:
        query = count * block_size
        seen = range(0 if window is None else max(0, query - window + 1), query)
        return all(cached[position // block_size] for position in seen)

    longest = max(count for count in range(len(cached) + 1) if usable(count))
    assert cache_group.prefix.longest(keys, len(keys)) == longest


def test_a_window_bounds_the_blocks_of_a_sequence() -> None:
    assert group().max_blocks(100, max_chunk=8) == 50
    assert group(window=6).max_blocks(100, max_chunk=8) == 8
    assert group(window=6).max_blocks(5, max_chunk=8) == 3


@pytest.mark.parametrize(("room", "unwanted"), [("cache", "torch numpy"), ("scheduler", "torch")])
def test_room_imports_little(room: str, unwanted: str) -> None:
    code = f"import sys, engine_core.{room}; print(*set({unwanted!r}.split()) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
