from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from random_examples import examples

from engine_core.cache import NULL_BLOCK, BlockPool


def test_hands_out_every_block_but_the_null_block() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.num_used == 4


def test_uses_the_least_recently_freed_block_with_a_key_first() -> None:
    pool = BlockPool(5)
    first, second, third, fourth = blocks = pool.allocate(4)
    for block in blocks:
        pool.register(block, f"key of {block}")
    pool.release([third])
    pool.release([first, fourth])
    assert pool.allocate(3) == [third, first, fourth]
    pool.release([second])
    assert pool.allocate(1) == [second]


def test_blocks_without_a_key_are_used_first_and_the_last_freed_before_others() -> None:
    pool = BlockPool(6)
    first, second, third, fourth = pool.allocate(4)
    pool.register(second, "key")
    pool.release([second, first])
    # In the order of the sequence again: its blocks are freed from the last on.
    pool.release([fourth, third])
    [unused] = set(range(1, 6)) - {first, second, third, fourth}
    assert pool.allocate(5) == [third, fourth, first, unused, second]
    pool.check()


def test_blocks_that_a_window_has_passed_are_used_before_others() -> None:
    pool = BlockPool(6)
    first, second, third, fourth = pool.allocate(4)
    for block in (first, second, third):
        pool.register(block, f"key of {block}")
    pool.release([first])
    pool.release([third, second], passed=True)
    assert pool.find(f"key of {second}") == second
    [unused] = set(range(1, 6)) - {first, second, third, fourth}
    assert pool.allocate(2) == [unused, third]
    pool.acquire(second)
    assert pool.allocate(1) == [first]
    pool.check()


def test_refuses_more_blocks_than_are_free() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="asked for 3 blocks, 2 are free"):
        pool.allocate(3)


def test_refuses_a_pool_of_the_null_block_alone() -> None:
    with pytest.raises(ValueError, match="got 1 blocks"):
        BlockPool(1)


def test_a_keyed_block_is_found_until_it_is_used_again() -> None:
    pool = BlockPool(3)
    block, _ = pool.allocate(2)
    pool.register(block, "key")
    assert pool.find("key") == block
    pool.release([block])
    assert pool.find("key") == block
    assert pool.allocate(1) == [block]
    assert pool.find("key") is None


def test_acquire_takes_a_found_block_out_of_the_free_list() -> None:
    pool = BlockPool(3)
    block, other = pool.allocate(2)
    pool.register(block, "key")
    pool.release([block, other])
    pool.acquire(block)
    assert pool.allocate(1) == [other]
    pool.acquire(block)
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1


def test_the_first_block_with_a_key_keeps_it() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.register(first, "key")
    pool.register(second, "key")
    assert pool.find("key") == first
    pool.check()


def test_release_passes_over_the_null_block() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.release([NULL_BLOCK, *blocks])
    pool.check()
    assert pool.num_free == 2


def test_release_of_a_free_block_is_an_error() -> None:
    with pytest.raises(AssertionError, match="block 2 is released but nobody holds it"):
        BlockPool(3).release([2])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pool: pool._refs.__setitem__(1, 0), "held"),
        (lambda pool: pool._free.__setitem__(1, None), "held"),
        (lambda pool: pool._index.clear(), "1 keyed blocks, 0 index entries"),
        (lambda pool: pool._refs.__setitem__(0, 1), "null block has 1 references"),
    ],
    ids=["lost", "free-and-held", "index", "null"],
)
def test_check_reports_what_is_broken(spoil: object, message: str) -> None:
    pool = BlockPool(4)
    pool.register(pool.allocate(1)[0], "key")
    pool.check()
    spoil(pool)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=message):
        pool.check()


class PoolAgainstLists(RuleBasedStateMachine):
    """The pool against plain lists that are searched from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.held: list[int] = []
        self.free = [1, 2, 3, 4, 5, 6]
        self.keys: dict[int, int] = {}

    @rule(count=st.integers(1, 3))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            return
        expected, self.free = self.free[:count], self.free[count:]
        assert self.pool.allocate(count) == expected
        self.held += expected
        for block in expected:
            self.keys.pop(block, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.release([block])
        self.held.remove(block)
        if block not in self.held:
            self.free.insert(len(self.free) if block in self.keys else 0, block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.integers(0, 4))
    def register(self, data: st.DataObject, key: int) -> None:
        block = data.draw(st.sampled_from(self.held))
        if block in self.keys:
            return
        self.pool.register(block, key)
        if key not in self.keys.values():
            self.keys[block] = key

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.keys)))
        self.pool.acquire(block)
        if block in self.free:
            self.free.remove(block)
        self.held.append(block)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_used == len(set(self.held))
        for key in range(5):
            owner = [block for block, known in self.keys.items() if known == key]
            assert self.pool.find(key) == (owner[0] if owner else None)
        for block in range(1, 7):
            assert self.pool.refs(block) == self.held.count(block)
            assert self.pool.is_free(block) == (block in self.free)


PoolAgainstLists.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)
TestPoolAgainstLists = PoolAgainstLists.TestCase
