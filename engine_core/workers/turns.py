"""The order in which the tasks of several clients run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Task = TypeVar("Task", bound=Hashable)
_Name = tuple[Hashable, ...]
_Path = tuple[_Name, ...]


class Member(NamedTuple):
    """A client that is one of several to itself and one to others, as who shares an address."""

    group: Hashable
    name: Hashable


@dataclass(eq=False, slots=True)
class _Waiting:
    """A task that waits: its place among all that came, what it costs, and its lane."""

    number: int
    cost: float
    lane: Hashable


@dataclass(eq=False, slots=True)
class _Share(Generic[Task]):
    """Of a client, of a group of clients, or of all: what waits and runs.

    Attributes:
        tasks: of a client that wait, in the order in which they came.
        members: of a group.
        size: tasks that wait, in it and in its members.
        num_running: tasks that run.
        spent: the cost of what ran, and of what ran for others before it had anything to do.
        now: how much its members have spent whose turn it is.
    """

    tasks: dict[Task, _Waiting] = field(default_factory=dict)
    members: dict[_Name, _Share[Task]] = field(default_factory=dict)
    size: int = 0
    num_running: int = 0
    spent: float = 0.0
    now: float = 0.0

    def first(self, blocked: _Blocked) -> _Waiting | None:
        """The task whose turn it is among those that may run."""
        if not self.members:
            return next((each for each in self.tasks.values() if blocked.allows(each)), None)
        key = self.turn(blocked)
        return None if key is None else self.members[key].first(blocked)

    def turn(self, blocked: _Blocked, most: int | None = None) -> _Name | None:
        """The member whose turn it is, of those of whom fewer than ``most`` tasks run."""
        best: tuple[int, float, int] | None = None
        found = None
        for key, member in self.members.items():
            if not member.size or (most is not None and member.num_running >= most):
                continue
            if (task := member.first(blocked)) is not None:
                rank = member.num_running, member.spent + task.cost, task.number
                if best is None or rank < best:
                    best, found = rank, key
        return found


class _Blocked(set[Hashable]):
    """Lanes of which no more tasks may run."""

    def allows(self, task: _Waiting) -> bool:
        return task.lane is None or task.lane not in self


class Turns(Generic[Task]):
    """Tasks that wait, and how many of each client's run.

    Next is the client of whom the fewest run, and among such the one who will have spent the least
    with its next task. So a client with many long tasks leaves places to the others, whose short
    ones do not wait for one of its own each, and a long task waits for as much of others' as it
    takes itself. Who had nothing to do has no credit for that. The clients of one group
    (:class:`Member`) share its turns, by the same rule. The tasks of one client run in the order in
    which they came, but that they pass those of a lane of which no more may run.

    Args:
        most_of_lane: tasks of a lane that may run at once; None for any number.
        most_of_client: tasks of a client, or of a group of clients, that may run at once; likewise.
    """

    def __init__(self, most_of_lane: int | None = None, most_of_client: int | None = None) -> None:
        self._all: _Share[Task] = _Share()
        self._most_of_lane = most_of_lane
        self._most_of_client = most_of_client
        self._lanes: Counter[Hashable] = Counter()  # of tasks that run
        self._lane_of: dict[Task, Hashable] = {}
        self._numbers: Iterator[int] = itertools.count()

    def __len__(self) -> int:
        return self._all.size

    @property
    def num_running(self) -> int:
        """Tasks that were taken and have not ended."""
        return self._all.num_running

    @property
    def ready(self) -> bool:
        """Whether there is a task that may run."""
        return self._all.turn(self._blocked, self._most_of_client) is not None

    @property
    def _blocked(self) -> _Blocked:
        most = self._most_of_lane
        return _Blocked(
            lane for lane, count in self._lanes.items() if most is not None and count >= most
        )

    def add(self, client: Hashable, task: Task, cost: float = 1.0, lane: Hashable = None) -> None:
        """Have a task wait, which costs as much as others that cost the same.

        It may be of a lane, of which not many may run at once.
        """
        share = self._all
        share.size += 1
        for key in _path(client):
            group, share = share, share.members.get(key) or _Share(spent=share.now)
            group.members[key] = share
            share.size += 1
        share.tasks[task] = _Waiting(next(self._numbers), cost, lane)

    def take(self) -> Task:
        """The next task; :meth:`end` is to be told of its end."""
        blocked = self._blocked
        turn = self._all.turn(blocked, self._most_of_client)
        shares = [self._all]
        while turn is not None:
            shares.append(shares[-1].members[turn])
            turn = shares[-1].turn(blocked)
        tasks = shares[-1].tasks
        task = next(each for each, waiting in tasks.items() if blocked.allows(waiting))
        taken = _remove(shares, task)
        if taken.lane is not None:
            self._lane_of[task] = taken.lane
            self._lanes[taken.lane] += 1
        self._all.num_running += 1
        for group, share in itertools.pairwise(shares):
            share.num_running += 1
            share.spent += taken.cost
            group.now = max(group.now, share.spent)
        return task

    def end(self, client: Hashable, task: Task) -> None:
        """A task of the client that was taken has ended."""
        if (lane := self._lane_of.pop(task, None)) is not None:
            self._lanes[lane] -= 1
            if not self._lanes[lane]:
                del self._lanes[lane]
        path = _path(client)
        for share in self._shares(path):
            share.num_running -= 1
        self._forget(path)

    def discard(self, client: Hashable, task: Task) -> None:
        """Drop a task, if it waits."""
        self._drop(_path(client), task)

    def shed(self, client: Hashable) -> Task | None:
        """Take out the newest task of whoever has the most, for one more of ``client``.

        None if ``client`` would then have more than they.
        """
        share = self._all
        found: list[_Name] = []
        for name in _path(client):
            own = share.members.get(name)
            most = _fullest(share)
            if most is not None and share.members[most].size >= (own.size if own else 0) + 2:
                found.append(most)
                break
            if own is None:
                return None
            # Between groups nobody has enough more. There may be one within its own.
            found.append(name)
            share = own
        else:
            return None
        share = share.members[found[-1]]
        while (most := _fullest(share)) is not None:
            found.append(most)
            share = share.members[most]
        task = next(reversed(share.tasks))
        self._drop(tuple(found), task)
        return task

    def clear(self) -> list[Task]:
        """Drop the tasks that wait, and return them."""
        waiting = [(path, task) for path, share in _clients(self._all) for task in share.tasks]
        for path, task in waiting:
            self._drop(path, task)
        return [task for _, task in waiting]

    def _drop(self, path: _Path, task: Task) -> None:
        shares = self._shares(path)
        if len(shares) > len(path) and task in shares[-1].tasks:
            _remove(shares, task)
            self._forget(path)

    def _shares(self, path: _Path) -> list[_Share[Task]]:
        """That of all and those of a client, the widest first, as far as there are such."""
        shares = [self._all]
        for key in path:
            if key not in shares[-1].members:
                break
            shares.append(shares[-1].members[key])
        return shares

    def _forget(self, path: _Path) -> None:
        """Keep nothing of a client that has nothing to do."""
        groups = self._shares(path)
        while path and not groups[-1].size and not groups[-1].num_running:
            groups.pop()
            del groups[-1].members[path[-1]]
            path = path[:-1]


def _path(client: Hashable) -> _Path:
    """The client's names, from the widest group on."""
    # Tuples, so that none is None; and a client that has a group's name stands beside it.
    if isinstance(client, Member):
        return (Member, client.group), (client.name,)
    return ((client,),)


def group_of(client: Hashable) -> Hashable:
    """The client, as those of other groups see it."""
    return _path(client)[0]


def _clients(share: _Share[Task], path: _Path = ()) -> Iterator[tuple[_Path, _Share[Task]]]:
    """Those that are no groups."""
    for key, member in share.members.items():
        yield from _clients(member, (*path, key))
    if not share.members:
        yield path, share


def _fullest(share: _Share[Task]) -> _Name | None:
    """The member with most tasks that wait."""
    members = share.members
    return max(members, key=lambda each: members[each].size, default=None)


def _remove(shares: Sequence[_Share[Task]], task: Task) -> _Waiting:
    removed = shares[-1].tasks.pop(task)
    for share in shares:
        share.size -= 1
    return removed


__all__ = ["Member", "Turns", "group_of"]
