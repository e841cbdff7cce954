"""How far the host runs ahead of the device."""

from __future__ import annotations

from engine_core.scheduler import Scheduler
from engine_core.steps import StepPlan


class Pacing:
    """Decide how many steps are in flight and how often a plan may be replayed.

    A step that is done before its result is asked for was shorter than the host's work for one: the
    device waited. Then decode plans are replayed more often, which spares the host work. Replays
    cost latency, since whoever arrives waits for all that is in flight. So the rule depends on who
    waits:

    - Offline nobody does: a few early steps double the replays, and many in a row that had to be
      waited for halve them.
    - A server replays only while the device keeps waiting for the host and nobody arrives. It keeps
      one step queued behind the one that runs, which hides the host's work. Figures are in
      benchmarks/notes/serving.md.

    Args:
        scheduler: asked for plans; its ``repeat_limit`` is set here.
        depth: steps that may be queued offline before the first result is read; 0 where a step is
            done when it is submitted.
        serving: whether requests arrive while others run.

    Attributes:
        depth: steps that may be queued before the first result is read.
    """

    def __init__(self, scheduler: Scheduler, depth: int, *, serving: bool) -> None:
        self.depth = min(depth, 1) if serving else depth
        self._scheduler = scheduler
        self._serving = serving
        scheduler.repeat_limit = 1
        # Steps in a row that were done early, or had to be waited for, before the replays change.
        self._early_steps, self._waiting_steps = (32, 1) if serving else (4, 64)
        self._early = 0
        self._waits = 0

    def arrived(self) -> None:
        """Take note of a new request."""
        if self._serving:
            self._scheduler.repeat_limit = 1
            self._early = 0

    def finished(self, plan: StepPlan, *, early: bool) -> None:
        """Take note of the oldest step in flight, before its result is waited for.

        Args:
            plan: the step's plan.
            early: whether the device was done with it already.
        """
        scheduler = self._scheduler
        if plan.rows[-1].num_tokens > 1 or plan.repeat < scheduler.repeat_limit:
            return  # it says nothing about decode plans as long as those to come
        if early:
            self._waits = 0
            self._early += 1
            if self._early >= self._early_steps:
                self._early = 0
                scheduler.repeat_limit = min(2 * plan.repeat, scheduler.config.max_repeat)
        else:
            self._early = 0
            self._waits += 1
            if self._waits >= self._waiting_steps:
                self._waits = 0
                scheduler.repeat_limit = max(1, plan.repeat // 2)


__all__ = ["Pacing"]
