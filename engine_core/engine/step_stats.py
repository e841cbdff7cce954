"""Statistics of an engine's steps, and where their time went."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine_core.steps import StepPlan


@dataclass(slots=True)
class KindStats:
    """The steps of one kind.

    Attributes:
        steps: how many; a step that is replayed on the device counts once for each time.
        tokens: tokens computed in them.
        seconds: submitting them and waiting for them.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


class StepStats:
    """Counts and times of an engine's steps. Written by :meth:`Engine.step`.

    It is always on, at about a microsecond per step. The engine reports the end of each verb, which
    is charged the time since the last report.

    Attributes:
        schedule_seconds: choosing what to run.
        submit_seconds: giving it to the device; on a CPU in this process also computing it.
        wait_seconds: for the device, or for other processes.
        apply_seconds: taking the results in, decoding their text, making outputs.
        prefill: steps in which no row decodes.
        mixed: steps in which some rows decode and others compute a prompt's tokens.
        decode: steps in which every row computes one token; so does the last token of a prompt
            if it has a step of its own.
    """

    __slots__ = (
        "_last",
        "apply_seconds",
        "decode",
        "mixed",
        "prefill",
        "schedule_seconds",
        "submit_seconds",
        "wait_seconds",
    )

    def __init__(self) -> None:
        self.schedule_seconds = 0.0
        self.submit_seconds = 0.0
        self.wait_seconds = 0.0
        self.apply_seconds = 0.0
        self.prefill = KindStats()
        self.mixed = KindStats()
        self.decode = KindStats()
        self._last = 0.0

    def begin(self) -> float:
        """A step begins. This and the methods below return the time of ``time.monotonic``."""
        self._last = time.monotonic()
        return self._last

    def scheduled(self) -> float:
        """The scheduler has made a plan, or found that there is nothing to do."""
        self.schedule_seconds += self._lap()
        return self._last

    def submitted(self, plan: StepPlan) -> float:
        """``plan`` was given to the executor."""
        seconds = self._lap()
        self.submit_seconds += seconds
        kind = self._of(plan)
        kind.steps += plan.repeat
        # Adding up the rows' counts would cost a decode step more than all the rest here.
        kind.tokens += len(plan.rows) * plan.repeat if kind is self.decode else plan.num_tokens
        kind.seconds += seconds
        return self._last

    def waited(self, plan: StepPlan) -> float:
        """The result of ``plan`` is there."""
        seconds = self._lap()
        self.wait_seconds += seconds
        self._of(plan).seconds += seconds
        return self._last

    def applied(self) -> float:
        """The outputs of a result are made."""
        self.apply_seconds += self._lap()
        return self._last

    def _lap(self) -> float:
        now = time.monotonic()
        seconds = now - self._last
        self._last = now
        return seconds

    def _of(self, plan: StepPlan) -> KindStats:
        kind: KindStats = getattr(self, plan.kind)
        return kind
