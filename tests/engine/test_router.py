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
    router: Router,
    tokens: Sequence[int],
    *,
    n: int = 1,
    generated: Sequence[int] = (0, 0, 0),
    step_tokens: float = 0.0,
    salt: str = "",
) -> Ticket:
    by_replica = dict(enumerate(generated))
    return router.route(len(tokens), keys_of(tokens, salt), n, by_replica, step_tokens)


def routers(count: int, blocks: int = 1000, rows: int = 100) -> Router:
    router = Router()
    for number in range(count):
        router.join(number, BLOCK, blocks, rows)
    return router


def test_a_conversation_stays_and_others_spread() -> None:
    router = routers(3)
    homes = []
    for talk in range(6):
        ticket = routed(router, [talk] * 40)
        homes.append(ticket.replica)
        assert (ticket.why, ticket.waiting) == ("new", 40)
        router.ended(ticket, 0)
    assert sorted(homes) == [0, 0, 1, 1, 2, 2]
    for talk, home in enumerate(homes):
        ticket = routed(router, [talk] * 40 + [9] * 8)
        assert (ticket.replica, ticket.why, ticket.waiting) == (home, "prefix", 8)
        router.ended(ticket, 0)


def test_it_moves_when_more_waits_there_than_its_blocks_save() -> None:
    """40 tokens are saved: 40 that wait elsewhere are not reason enough, 41 are."""
    for waiting, home, why in ((40, 0, "prefix"), (41, 1, "load")):
        router = routers(2)
        first = routed(router, [1] * 40)
        router.ended(first, 0)
        router.leave(1)
        blocking = routed(router, list(range(100, 100 + waiting)))
        router.join(1, BLOCK, 1000, 100)
        assert blocking.replica == 0
        ticket = routed(router, [1] * 41)
        assert (ticket.replica, ticket.why) == (home, why), waiting
        router.ended(blocking, 0)
        router.ended(ticket, 0)
        # Now both have it, and nothing waits.
        assert routed(router, [1] * 41).why == "prefix"


def test_what_is_expected_to_be_generated_counts_as_work() -> None:
    """40 tokens are saved: 3 sequences that may generate 13 each are no reason to move."""
    for mean, progress, home in ((13, 0, 0), (14, 0, 1), (0, 39, 0), (0, 42, 1), (14, 39, 1)):
        router = routers(2)
        router.ended(routed(router, [1] * 40), mean)
        router.began(routed(router, [1] * 40, n=3))
        # The first replica has also generated the tokens of the sequence that ended.
        ticket = routed(router, [1] * 40, generated=(mean + progress, 0))
        assert ticket.replica == home, (mean, progress)


def test_a_queue_for_rows_costs_the_steps_until_one_is_free() -> None:
    """Sequences of 10 tokens have both rows: 2 * 10, and 5 steps of 20 until one is free."""
    for saved, home in ((116, 1), (120, 0)):
        router = routers(2, rows=2)
        router.ended(routed(router, [1] * saved), 10)
        router.began(routed(router, [1] * saved, n=2))
        ticket = routed(router, [1] * saved + [2] * 8, generated=(10, 10), step_tokens=20.0)
        assert ticket.replica == home, saved


def test_a_full_cache_sends_what_is_new_elsewhere() -> None:
    """All beginnings are the same, so that the first replica would take all, one by one."""
    router = routers(2, blocks=10)
    homes = []
    for talk in range(4):
        ticket = routed(router, [7] * 8 + [talk] * 12)
        homes.append(ticket.replica)
        router.ended(ticket, 0)
    # 2 + 2 * 3 blocks fit. The third pushes one out: 12 + 4 tokens, which is less than the 20 that
    # the other one computes. The fourth pushes three out: 12 + 12.
    assert homes == [0, 0, 0, 1]


def test_salts_are_worlds_of_their_own() -> None:
    router = routers(2)
    router.ended(routed(router, [1] * 40, salt="a"), 0)
    other = routed(router, [1] * 40, salt="b")
    assert (other.why, other.waiting, other.replica) == ("new", 40, 1)


def test_a_replica_that_comes_back_knows_nothing() -> None:
    router = routers(2)
    old = routed(router, [1] * 40)
    router.leave(0)
    assert router.open == (1,)
    assert routed(router, [1] * 40).replica == 1
    router.join(0, BLOCK, 1000, 100)
    router.ended(old, 0)  # one that ended with the replica it was at
    fresh = routed(router, [2] * 40)
    assert (fresh.replica, fresh.why) == (0, "new")
    assert router.num_keys(0) == 10


def test_memory_is_bounded() -> None:
    router = routers(1, blocks=10**9)
    for start in range(0, 3 * MOST_KEYS, MOST_KEYS // 2):
        keys = list(range(start, start + MOST_KEYS // 2))
        router.ended(router.route(len(keys) * BLOCK, keys, 1, {0: 0}, 0.0), 1)
    assert router.num_keys(0) == MOST_KEYS


class Plain:
    """The rule once more, as it is written: sums over everything that was sent."""

    def __init__(self) -> None:
        self.capacity: dict[int, int] = {}
        self.rows: dict[int, int] = {}
        self.cached: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        self.generated: dict[int, int] = {}
        self.finished: dict[int, int] = {}
        self.at: dict[int, tuple[int, int, int]] = {}  # replica, tokens that wait, sequences
        self.lengths: list[int] = []

    def cost(self, number: int, tokens: list[int], salt: str, n: int, step_tokens: float) -> float:
        keys, cached = keys_of(tokens, salt), self.cached[number]
        matched = 0
        while matched < len(keys) and keys[matched] in cached:
            matched += 1
        here = [at for at in self.at.values() if at[0] == number]
        sequences = sum(at[2] for at in here)
        mean = sum(self.lengths) / len(self.lengths) if self.lengths else 0
        progress = (self.generated[number] - self.finished[number]) / (sequences or 1)
        expected = max(mean, progress)
        cost = len(tokens) - matched * BLOCK + sum(at[1] for at in here) + sequences * expected
        if sequences + n > self.rows[number]:
            rounds = (sequences + n - self.rows[number]) / self.rows[number]
            cost += rounds * expected * step_tokens
        too_many = len(cached) + len(keys) - matched - self.capacity[number]
        return cost + BLOCK * min(max(too_many, 0), len(cached))

    def send(self, number: int, tokens: list[int], salt: str) -> None:
        keys = keys_of(tokens, salt)[: self.capacity[number]]
        cached = [key for key in self.cached[number] if key not in keys] + keys[::-1]
        self.cached[number] = cached[max(0, len(cached) - self.capacity[number]) :]


@given(st.data())
@settings(max_examples=examples(200), deadline=None)
def test_the_cheapest_is_chosen_whatever_happened_before(data: st.DataObject) -> None:
    router, plain = Router(), Plain()
    tickets: dict[int, Ticket] = {}
    for serial in range(data.draw(st.integers(1, 30))):
        numbers = list(plain.capacity)
        absent = [number for number in range(4) if number not in numbers]
        events = ["join"] * bool(absent) + ["send"] * 3 * bool(numbers)
        events += ["begin", "end"] * bool(tickets) + ["leave"] * (len(numbers) > 1)
        event = data.draw(st.sampled_from(events))
        if event == "join":
            number, blocks = data.draw(st.sampled_from(absent)), data.draw(st.integers(0, 12))
            rows = data.draw(st.integers(1, 3))
            router.join(number, BLOCK, blocks, rows)
            plain.capacity[number], plain.rows[number], plain.cached[number] = blocks, rows, []
            plain.generated[number] = plain.finished[number] = 0
        elif event == "leave":
            number = data.draw(st.sampled_from(numbers))
            router.leave(number)
            del plain.capacity[number], plain.cached[number]
            plain.at = {key: at for key, at in plain.at.items() if at[0] != number}
        elif event == "send":
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=24))
            salt, n = data.draw(st.sampled_from("ab")), data.draw(st.integers(1, 3))
            step_tokens = data.draw(st.integers(0, 20))
            costs = {each: plain.cost(each, tokens, salt, n, step_tokens) for each in numbers}
            keys = keys_of(tokens, salt)
            ticket = router.route(len(tokens), keys, n, plain.generated, step_tokens)
            assert ticket.replica in costs
            assert costs[ticket.replica] <= min(costs.values()) + 1e-6
            assert 0 <= ticket.waiting <= len(tokens)
            plain.send(ticket.replica, tokens, salt)
            tickets[serial] = ticket
            plain.at[serial] = (ticket.replica, ticket.waiting, n)
        else:
            name = data.draw(st.sampled_from(sorted(tickets)))
            at = plain.at.get(name)
            if event == "begin":
                router.began(tickets[name])
                if at is not None:
                    plain.at[name] = (at[0], 0, at[2])
                    plain.generated[at[0]] += data.draw(st.integers(0, 20))
            else:
                ticket, length = tickets.pop(name), data.draw(st.integers(0, 20))
                plain.lengths += [length] + [0] * (ticket.sequences - 1)
                router.ended(ticket, length)
                if at is not None:
                    plain.generated[at[0]] += length
                    plain.finished[at[0]] += length
                    del plain.at[name]
        for number, blocks in plain.capacity.items():
            assert router.num_keys(number) == len(plain.cached[number]) <= blocks
