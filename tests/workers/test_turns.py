"""Turns: who is next, whatever others send."""

from __future__ import annotations

import random
from typing import Any

from engine_core.workers import Member
from engine_core.workers.turns import Turns


def order(turns: Turns[Any], clients: dict[Any, Any]) -> list[Any]:
    """All tasks that wait, one after another."""
    taken = []
    while turns:
        taken.append(task := turns.take())
        turns.end(clients[task], task)
    return taken


def waiting(*given: tuple[Any, str, float]) -> tuple[Turns[Any], dict[Any, Any]]:
    turns: Turns[Any] = Turns()
    for client, task, cost in given:
        turns.add(client, task, cost)
    return turns, {task: client for client, task, _ in given}


def test_clients_have_as_much_and_not_as_often() -> None:
    large = [("a", f"A{number}", 10.0) for number in range(3)]
    small = [("b", f"b{number}", 1.0) for number in range(15)]
    taken = order(*waiting(*large, *small))
    assert [task for task in taken if task[0] == "b"] == [task for _, task, _ in small]
    assert taken.index("A0") == 9  # the tenth: as much of either
    assert taken.index("A1") > taken.index("b14")


def test_names_of_ones_own_give_no_more_turns() -> None:
    many = [(Member("attacker", f"salt {number}"), f"a{number}", 1.0) for number in range(20)]
    other = [(Member("victim", None), f"v{number}", 1.0) for number in range(3)]
    taken = order(*waiting(*many, *other))
    assert max(taken.index(f"v{number}") for number in range(3)) <= 5
    # And who shares the address has their own.
    shared = (Member("attacker", "another"), "s", 0.5)
    turns, clients = waiting(*many, shared)
    assert order(turns, clients).index("s") == 0
    assert not turns._all.members


def test_who_did_nothing_has_no_credit() -> None:
    turns, _ = waiting(*[("a", f"a{number}", 1.0) for number in range(50)])
    for _ in range(20):
        turns.end("a", turns.take())
    for number in range(20):
        turns.add("b", f"b{number}", 1.0)
    taken = [turns.take() for _ in range(20)]
    assert sum(task.startswith("a") for task in taken) == 10


def test_large_tasks_leave_a_place() -> None:
    turns: Turns[str] = Turns(most_of_lane=1)
    for name in ("a", "b"):
        turns.add(name, f"{name} large", 50.0, "large")
    turns.add("a", "a small", 1.0)
    assert turns.take() == "a large"
    assert turns.take() == "a small"  # past the other's large one
    assert len(turns) == 1
    assert not turns.ready
    turns.add("b", "b small", 1.0)
    assert turns.ready
    assert turns.take() == "b small"
    turns.end("a", "a large")
    assert turns.take() == "b large"


def test_a_client_or_a_group_has_some_places() -> None:
    turns: Turns[str] = Turns(most_of_client=2)
    for number in range(3):
        turns.add(Member("one", number), f"m{number}")
        turns.add("two", f"t{number}")
    assert {turns.take() for _ in range(4)} == {"m0", "m1", "t0", "t1"}
    assert not turns.ready
    turns.end("two", "t1")
    assert turns.take() == "t2"


def test_the_newest_of_whoever_has_most_leaves() -> None:
    turns: Turns[str] = Turns()
    for name, count in (("x", 3), ("y", 2)):
        for number in range(count):
            turns.add(Member("one", name), f"{name}{number}")
    turns.add("two", "t0")
    assert turns.shed("two") == "x2"
    assert turns.shed("three") in ("x1", "y1")
    # The group has no more than another, but one of its members has.
    turns = Turns()
    for number in range(3):
        turns.add(Member("one", "x"), f"x{number}")
        turns.add("two", f"t{number}")
    assert turns.shed(Member("one", "z")) == "x2"
    assert turns.shed(Member("one", "x")) is None
    assert turns.shed("two") is None
    assert sorted(turns.clear()) == ["t0", "t1", "t2", "x0", "x1"]
    assert not turns


def test_whatever_happens_nothing_is_lost_or_kept() -> None:
    """Random work against a count that is kept apart."""
    chance = random.Random(0)
    for _ in range(30):
        turns: Turns[int] = Turns(most_of_lane=1)
        held: dict[int, Any] = {}
        running: dict[int, Any] = {}
        large: set[int] = set()
        for number in range(300):
            group = chance.randrange(3)
            client = (
                Member(group, chance.choice([None, "a", "b"])) if group else chance.randrange(3)
            )
            action = chance.randrange(5)
            if action < 2:
                if chance.random() < 0.3:
                    large.add(number)
                turns.add(client, number, chance.random() * 9, "a" if number in large else None)
                held[number] = client
            elif action == 2 and turns.ready:
                task = turns.take()
                running[task] = held.pop(task)
                assert len(large & running.keys()) <= 1
            elif action == 3 and running:
                task = chance.choice(list(running))
                turns.end(running.pop(task), task)
            elif held:
                task = chance.choice(list(held))
                turns.discard(held.pop(task), task)
            assert (len(turns), turns.num_running) == (len(held), len(running))
            blocked = large & running.keys()
            assert turns.ready == any(not blocked or each not in large for each in held)
        assert sorted(turns.clear()) == sorted(held)
        for task, client in running.items():
            turns.end(client, task)
        assert not turns._all.members
