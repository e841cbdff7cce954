"""Tasks for the tests of the worker pool; a worker imports this module."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from engine_core.workers import SharedBytes


def begin(value: str) -> dict[str, Any]:
    """The state of a pool."""
    return {"value": value, "pid": os.getpid(), "tasks": 0}


def begin_badly(value: str) -> None:
    """An initializer that fails."""
    raise ValueError(f"no {value}")


def look(state: dict[str, Any], more: str) -> tuple[str, int, int, int]:
    """The state with ``more``, the tasks that this process has seen, its pid and the template's."""
    state["tasks"] += 1
    return state["value"] + more, state["tasks"], os.getpid(), state["pid"]


def modules(state: dict[str, Any]) -> list[str]:
    """Names of the modules that the process has imported."""
    return sorted(sys.modules)


def echo(state: dict[str, Any], data: bytes) -> bytes:
    """``data`` reversed."""
    return data[::-1]


def fail(state: dict[str, Any], message: str) -> None:
    """Raise."""
    raise KeyError(message)


def sleep(state: dict[str, Any], seconds: float) -> int:
    """Sleep, and return the process."""
    time.sleep(seconds)
    return os.getpid()


def allocate(state: dict[str, Any], size: int) -> int:
    """Take memory."""
    return len(bytearray(size))


def recurse(state: dict[str, Any], depth: int) -> int:
    """Recurse in C."""
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    sys.setrecursionlimit(depth * 2)
    return len(repr(nested))


def die(state: dict[str, Any], name: str) -> None:
    """End by a signal."""
    os.kill(os.getpid(), signal.Signals[name])


def leave(state: dict[str, Any]) -> None:
    """Exit without a word."""
    os._exit(3)


def turn(state: dict[str, Any], blocks: list[SharedBytes]) -> list[SharedBytes]:
    """Each block backwards."""
    return [SharedBytes.of([(0, block.map()[::-1])], block.size) for block in blocks]


def give_and_die(state: dict[str, Any], size: int) -> bytes:
    """Send shared memory beside more than a socket holds, and be killed meanwhile."""

    class Killer:
        def __reduce__(self) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    made: Any = [SharedBytes.of([], size), Killer()]
    return made
