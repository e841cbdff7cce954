"""Steps that a CPU captures, and replays as a GPU does: into the results of the first run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from engine_core.runtime.capture import Graph

T = TypeVar("T")


class Replayed:
    """The graph of a function that a CPU runs again, and that refills what it gave."""

    def __init__(self, function: Callable[[], Any], outputs: Any) -> None:
        self.function, self.outputs = function, outputs

    def replay(self) -> None:
        for kept, new in zip(self.outputs, self.function(), strict=True):
            if kept is not None:
                kept.copy_(new)


class Replaying:
    """Captures what a CPU can run again."""

    def __init__(self, device: torch.device) -> None:
        del device

    def run(self, function: Callable[[], T]) -> T:
        return function()

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        outputs = function()
        return Replayed(function, outputs), outputs

    def reserve(self, count: int) -> None: ...

    def free_memory(self) -> int:
        return 1 << 40
