"""The choice of a replica, as pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import examples

from engine_core.engine.router import MOST_KEYS, Router, Ticket

BLOCK = 4


def keys_of(tokens: Sequence[int], salt: str = "") -> list[tuple[str, tuple[int, ...]]]:
    """Keys that stand for all tokens up to the end of each full block."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    return [(salt, tuple(tokens[:end])) for end in ends]


def routed(
    router: Router, tokens: Sequence[int], *, n: int = 1, generated: int = 0, salt: str = ""
) -> Ticket:
    return router.route(len(tokens), keys_of(tokens, salt), n, generated)


def routers(count: int, blocks: int = 1000) -> Router:
    router = Router()
    for number in range(count):
        router.join(number, BLOCK, blocks)
    return router


def test_a_conversation_stays_and_others_spread() -> None:
    router = routers(3)
    homes = []
    for talk in range(6):
        ticket = routed(router, [talk] * 40)
        homes.append(ticket.replica)
        assert (ticket.why, ticket.waiting) == ("new", 40)
        router.ended(ticket)
    assert sorted(homes) == [0, 0, 1, 1, 2, 2]
    for talk, home in enumerate(homes):
        ticket = routed(router, [talk] * 40 + [9] * 8)
        assert (ticket.replica, ticket.why, ticket.waiting) == (home, "prefix", 8)
        router.ended(ticket)


def test_it_moves_when_more_waits_there_than_its_blocks_save() -> None:
    """40 tokens are saved: 40 that wait elsewhere are not reason enough, 41 are."""
    for waiting, home, why in ((40, 0, "prefix"), (41, 1, "load")):
        router = routers(2)
        first = routed(router, [1] * 40)
        router.ended(first)
        router.leave(1)
        blocking = routed(router, list(range(100, 100 + waiting)))
        router.join(1, BLOCK, 1000)
        assert blocking.replica == 0
        ticket = routed(router, [1] * 41)
        assert (ticket.replica, ticket.why) == (home, why), waiting
        router.ended(blocking)
        router.ended(ticket)
        # Now both have it, and nothing waits.
        assert routed(router, [1] * 41).why == "prefix"


def test_what_is_expected_to_be_generated_counts_as_work() -> None:
    router = routers(2)
    first = routed(router, [1] * 40)
    router.ended(first)
    several = routed(router, [1] * 40, n=3, generated=0)
    assert several.replica == 0
    router.began(several)
    # One sequence has ended, and 28 tokens were generated: 14 for each, 42 for the three.
    assert routed(router, [1] * 40, generated=28).replica == 1


def test_a_full_cache_sends_what_is_new_elsewhere() -> None:
    """All beginnings are the same, so that the first replica would take all, one by one."""
    router = routers(2, blocks=10)
    homes = []
    for talk in range(4):
        ticket = routed(router, [7] * 8 + [talk] * 12)
        homes.append(ticket.replica)
        router.ended(ticket)
    # 2 + 2 * 3 blocks fit. The third pushes one out: 12 + 4 tokens, which is less than the 20 that
    # the other one computes. The fourth pushes three out: 12 + 12.
    assert homes == [0, 0, 0, 1]


def test_salts_are_worlds_of_their_own() -> None:
    router = routers(2)
    router.ended(routed(router, [1] * 40, salt="a"))
    other = routed(router, [1] * 40, salt="b")
    assert (other.why, other.waiting, other.replica) == ("new", 40, 1)


def test_a_replica_that_comes_back_knows_nothing() -> None:
    router = routers(2)
    old = routed(router, [1] * 40)
    router.leave(0)
    assert router.open == (1,)
    assert routed(router, [1] * 40).replica == 1
    router.join(0, BLOCK, 1000)
    router.ended(old)  # one that ended with the replica it was at
    fresh = routed(router, [2] * 40)
    assert (fresh.replica, fresh.why) == (0, "new")
    assert router.num_keys(0) == 10


def test_memory_is_bounded() -> None:
    router = routers(1, blocks=10**9)
    for start in range(0, 3 * MOST_KEYS, MOST_KEYS // 2):
        keys = list(range(start, start + MOST_KEYS // 2))
        router.ended(router.route(len(keys) * BLOCK, keys, 1, 0))
    assert router.num_keys(0) == MOST_KEYS


class Plain:
    """The rule once more, as it is written: sums over everything that was sent."""

    def __init__(self) -> None:
        self.capacity: dict[int, int] = {}
        self.cached: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        self.at: dict[int, tuple[int, int, int]] = {}  # replica, tokens that wait, sequences
        self.ended = 0

    def cost(self, number: int, tokens: list[int], salt: str, generated: int) -> float:
        keys, cached = keys_of(tokens, salt), self.cached[number]
        matched = 0
        while matched < len(keys) and keys[matched] in cached:
            matched += 1
        new = len(tokens) - matched * BLOCK
        work = sum(
            waiting + sequences * generated / (self.ended + 1)
            for home, waiting, sequences in self.at.values()
            if home == number
        )
        too_many = len(cached) + len(keys) - matched - self.capacity[number]
        return work + new + BLOCK * min(max(too_many, 0), len(cached))

    def send(self, number: int, tokens: list[int], salt: str) -> None:
        keys = keys_of(tokens, salt)[: self.capacity[number]]
        cached = [key for key in self.cached[number] if key not in keys] + keys[::-1]
        self.cached[number] = cached[max(0, len(cached) - self.capacity[number]) :]


@given(st.data())
@settings(max_examples=examples(200), deadline=None)
def test_the_cheapest_is_chosen_whatever_happened_before(data: st.DataObject) -> None:
    router, plain = Router(), Plain()
    tickets: dict[int, Ticket] = {}
    generated = 0
    for serial in range(data.draw(st.integers(1, 30))):
        numbers = list(plain.capacity)
        absent = [number for number in range(4) if number not in numbers]
        events = ["join"] * bool(absent) + ["send"] * 3 * bool(numbers)
        events += ["begin", "end"] * bool(tickets) + ["leave"] * (len(numbers) > 1)
        event = data.draw(st.sampled_from(events))
        if event == "join":
            number, blocks = data.draw(st.sampled_from(absent)), data.draw(st.integers(0, 12))
            router.join(number, BLOCK, blocks)
            plain.capacity[number], plain.cached[number] = blocks, []
        elif event == "leave":
            number = data.draw(st.sampled_from(numbers))
            router.leave(number)
            del plain.capacity[number], plain.cached[number]
            plain.at = {key: at for key, at in plain.at.items() if at[0] != number}
        elif event == "send":
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=24))
            salt, n = data.draw(st.sampled_from("ab")), data.draw(st.integers(1, 3))
            generated += data.draw(st.integers(0, 50))
            costs = {each: plain.cost(each, tokens, salt, generated) for each in numbers}
            ticket = routed(router, tokens, n=n, generated=generated, salt=salt)
            assert ticket.replica in costs
            assert costs[ticket.replica] <= min(costs.values()) + 1e-6
            assert 0 <= ticket.waiting <= len(tokens)
            plain.send(ticket.replica, tokens, salt)
            tickets[serial] = ticket
            plain.at[serial] = (ticket.replica, ticket.waiting, n)
        else:
            name = data.draw(st.sampled_from(sorted(tickets)))
            if event == "begin":
                router.began(tickets[name])
                if name in plain.at:
                    plain.at[name] = (plain.at[name][0], 0, plain.at[name][2])
            else:
                plain.ended += tickets[name].sequences
                router.ended(tickets.pop(name))
                plain.at.pop(name, None)
        for number, blocks in plain.capacity.items():
            assert router.num_keys(number) == len(plain.cached[number]) <= blocks
