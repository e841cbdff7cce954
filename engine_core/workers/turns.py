"""The order in which the tasks of several clients run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

Task = TypeVar("Task", bound=Hashable)


class Turns(Generic[Task]):
    """Tasks that wait, and how many of each client's run.

    Next is the client of whom the fewest run, and among such the one whose turn was the longest
    ago. So a client with many long tasks leaves places to the others, whose short ones do not wait
    for one of its own each, and all of it wait for at most one turn of each other client. The tasks
    of one client run in the order in which they came.
    """

    def __init__(self) -> None:
        # By client; the one whose turn was the longest ago first. None is empty.
        self._waiting: dict[Hashable, dict[Task, None]] = {}
        self._running: Counter[Hashable] = Counter()
        self._size = self._num_running = 0

    def __len__(self) -> int:
        return self._size

    @property
    def num_running(self) -> int:
        """Tasks that were taken and have not ended."""
        return self._num_running

    def add(self, client: Hashable, task: Task) -> None:
        """Have a task wait."""
        self._waiting.setdefault(client, {})[task] = None
        self._size += 1

    def take(self) -> Task:
        """The next task; :meth:`end` is to be told of its end."""
        client = min(self._waiting, key=self._running.__getitem__)
        task = next(iter(self._waiting[client]))
        self.discard(client, task)
        if (left := self._waiting.pop(client, None)) is not None:
            self._waiting[client] = left
        self._running[client] += 1
        self._num_running += 1
        return task

    def end(self, client: Hashable) -> None:
        """A task of the client that was taken has ended."""
        self._num_running -= 1
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]

    def discard(self, client: Hashable, task: Task) -> None:
        """Drop a task, if it waits."""
        tasks = self._waiting.get(client, {})
        if task in tasks:
            del tasks[task]
            self._size -= 1
            if not tasks:
                del self._waiting[client]

    def shed(self, client: Hashable) -> Task | None:
        """Take out the newest task of whoever has the most, for one more of ``client``.

        None if ``client`` would then have more than they.
        """
        most = max(self._waiting, key=lambda each: len(self._waiting[each]), default=None)
        own = len(self._waiting.get(client, ()))
        if most is None or len(self._waiting[most]) < own + 2:
            return None
        task = next(reversed(self._waiting[most]))
        self.discard(most, task)
        return task

    def clear(self) -> list[Task]:
        """Drop the tasks that wait, and return them."""
        tasks = [task for each in self._waiting.values() for task in each]
        self._waiting.clear()
        self._size = 0
        return tasks


__all__ = ["Turns"]
