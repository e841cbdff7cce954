"""An engine process with captures to make, which a test can watch and hold up, and no GPU.

Give it as a ``custom_module_map``. It stands where the engine meets the device: its executor says
that there are :data:`COUNT` steps to capture. The variable :data:`FOLDER` names a folder:

- ``journal`` gets a line when a capture begins, when it ends, and for each step that is run;
- a capture begins only when there is a file ``open``;
- the capture whose number is in a file ``fails`` fails.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from engine_core.runtime.runner import PendingStep
from engine_core.runtime.worker import Worker
from engine_core.steps import StepPlan

FOLDER = "ENGINE_CORE_TEST_CAPTURES"
COUNT = 4

_submit = Worker.submit


def _note(line: str) -> None:
    with Path(os.environ[FOLDER], "journal").open("a") as journal:
        journal.write(f"{line}\n")


def _submit_and_note(self: Worker, plan: StepPlan) -> PendingStep:
    _note("step")
    return _submit(self, plan)


def _capture_next(self: Worker, *, part: bool = False) -> bool:
    del self, part
    folder = Path(os.environ[FOLDER])
    journal = folder / "journal"
    done = journal.read_text().count("end") if journal.exists() else 0
    if done == COUNT:
        return False
    _note(f"begin {done}")
    while not (folder / "open").exists():
        time.sleep(0.001)
    fails = folder / "fails"
    if fails.exists() and int(fails.read_text()) == done:
        raise RuntimeError("an illegal memory access was encountered")
    _note(f"end {done}")
    return True


Worker.submit = _submit_and_note  # type: ignore[method-assign]
Worker.capture_next = _capture_next  # type: ignore[method-assign]

MODULE_MAP: dict[str, str] = {}
