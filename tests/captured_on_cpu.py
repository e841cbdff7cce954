"""Steps that a CPU captures and replays as a GPU does, with memory and failures by a test's choice.

Give it as a ``custom_module_map``. A capture runs the step without the other ranks, as a GPU's
launches nothing; a replay runs it with them and refills the results of the capture. The variable
:data:`FOLDER` names a folder:

- ``rank-N`` gets a line for each capture and each replay of rank N, in their order;
- ``failures`` has lines of a rank, "rehearse", "run" or "capture", and the number of the call of
  that kind that fails on it; "memory" may follow, for a lack of it, or "killed";
- ``free`` has, by rank, the bytes that it says are free.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed

from engine_core.nn import distributed
from engine_core.nn.distributed import rehearsing
from engine_core.runtime import capture, runner
from engine_core.runtime.capture import Capturer, Graph

T = TypeVar("T")

FOLDER = "ENGINE_CORE_TEST_GRAPHS"
_calls: Counter[str] = Counter()


def _folder() -> Path:
    return Path(os.environ[FOLDER])


def _rank() -> int:
    return torch.distributed.get_rank()


def _note(line: str) -> None:
    with (_folder() / f"rank-{_rank()}").open("a") as journal:
        journal.write(f"{line}\n")


def _fail_if_asked(kind: str) -> None:
    _calls[kind] += 1
    failures = _folder() / "failures"
    lines = failures.read_text().splitlines() if failures.exists() else []
    for line in lines:
        rank, asked, number, *memory = line.split()
        if (int(rank), asked, int(number)) == (_rank(), kind, _calls[kind]):
            if memory == ["killed"]:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("out of memory" if memory else f"no {kind} here")


class Replayed:
    def __init__(self, step: Callable[[], object], outputs: object, number: int) -> None:
        self.step, self.outputs, self.number = step, outputs, number

    def replay(self) -> None:
        _note(f"replay {self.number}")
        for kept, new in zip(self.outputs, self.step(), strict=True):  # type: ignore[call-overload]
            if kept is not None:
                kept.copy_(new)


class CpuCapturer:
    captures = 0

    def __init__(self, device: torch.device) -> None:
        del device

    def run(self, function: Callable[[], T]) -> T:
        _fail_if_asked("rehearse" if distributed._REHEARSING.get() else "run")
        return function()

    def capture(self, function: Callable[[], T]) -> tuple[Graph, T]:
        CpuCapturer.captures += 1
        _note(f"capture {self.captures}")
        with rehearsing():
            outputs = function()
        _fail_if_asked("capture")
        return Replayed(function, outputs, self.captures), outputs

    def reserve(self, count: int) -> None:
        del count

    def free_memory(self) -> int:
        free = _folder() / "free"
        return int(free.read_text().split()[_rank()]) if free.exists() else 1 << 40


_whole = capture.capturer_of


def _capturer_of(device: torch.device) -> Callable[[torch.device], Capturer] | None:
    # The process of the tests has imported this too.
    return CpuCapturer if FOLDER in os.environ else _whole(device)


capture.capturer_of = runner.capturer_of = _capturer_of

MODULE_MAP: dict[str, str] = {}
