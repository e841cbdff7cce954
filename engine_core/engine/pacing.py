"""Limits of how far the host runs ahead, and of the prompt tokens in a step."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import combinations
from statistics import median

from engine_core.runtime.step_batch import chunk_sizes
from engine_core.scheduler import Scheduler
from engine_core.steps import StepPlan

# Steps of a size that are remembered, and how many of them are believed before the other sizes.
_REMEMBERED = 15
_TELLING = 3
# How much longer than others a step may take while prompts for more than two steps wait. Simulated
# with Poisson arrivals on an H200: at 32 requests a second the first token's 99th percentile falls
# from 252 to 202 ms; at 16, where prompts seldom wait, that of the gaps stays.
_BACKLOG_STRETCH = 1.4
# Seconds between the submission of a step and the end of the one before it, at least and at most.
_LEAST_MARGIN, _MOST_MARGIN = 0.0003, 0.05


class StepTimes:
    """Durations of steps, by the tokens of prompts in them and by whether rows decode beside them.

    A step is as long as the captured one that holds it, so tokens are counted in those sizes.
    """

    def __init__(self, max_tokens: int) -> None:
        """``max_tokens`` are of the prompts of a step, at most."""
        self._sizes = chunk_sizes(max_tokens)
        # Seconds and tokens by whether rows decode, and by size: 0 for decode steps.
        self._seen: defaultdict[tuple[bool, int], deque[tuple[float, int]]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED)
        )
        # What a step with decoding rows takes besides its prompts, and what a token of these adds.
        self._line: tuple[float, float] | None = None

    def add(self, plan: StepPlan, seconds: float) -> None:
        """Take note of a step that took ``seconds``, all its repeats together."""
        decoding, size, tokens = self._kind(plan)
        # Without a graph nothing is padded: a step much smaller than its size says little of it.
        if 8 * tokens < 7 * size:
            return
        self._seen[decoding, size].append((seconds / plan.repeat, tokens))
        if not decoding or size == 0:
            return
        points = [
            (median(tokens for _, tokens in seen), median(seconds for seconds, _ in seen))
            for (beside, _), seen in self._seen.items()
            if beside
        ]
        # Medians, so that neither a step that waited for a compile counts nor a rare size.
        slopes = [(y - b) / (x - a) for (a, b), (x, y) in combinations(points, 2)]
        slope = max(1e-9, median(slopes or [points[0][1] / points[0][0]]))
        self._line = max(0.0, median(y - slope * x for x, y in points)), slope

    def expect(self, plan: StepPlan) -> float | None:
        """Seconds that a step will hardly fall below; None if nothing is known of such steps."""
        decoding, size, _ = self._kind(plan)
        seen = sorted(self._seen.get((decoding, size), ()))
        if len(seen) >= _TELLING:
            return plan.repeat * seen[len(seen) // 5][0]
        if self._line is None:
            return None
        return plan.repeat * (self._line[0] + self._line[1] * size)

    def largest(self, seconds: float) -> int | None:
        """The most tokens of prompts with which a step with decoding rows keeps within ``seconds``.

        It is the smallest size if none does; None if no such step was seen.
        """
        if self._line is None:
            return None
        base, slope = self._line
        best = self._sizes[0]
        for size in self._sizes:
            taken = [each for each, _ in self._seen.get((True, size), ())]
            if (median(taken) if len(taken) >= _TELLING else base + slope * size) <= seconds:
                best = size
        return best

    def _kind(self, plan: StepPlan) -> tuple[bool, int, int]:
        """Whether rows decode, the size of the prompts, and their tokens."""
        # Rows that decode come first.
        if plan.rows[-1].num_tokens == 1:
            return True, 0, 0
        tokens = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        return plan.rows[0].num_tokens == 1, self._sizes[bisect_left(self._sizes, tokens)], tokens


class Pacing:
    """Decide how many steps are in flight, how often a plan is replayed, and a step's prompts.

    A step that is done before its result is asked for was shorter than the host's work for one: the
    device waited. Then decode plans are replayed more often, which spares the host work. Replays
    cost latency, since whoever arrives waits for all that is in flight. So the rule depends on who
    waits:

    - Offline nobody does: a few early steps double the replays, and many in a row that had to be
      waited for halve them. A step computes as many tokens of prompts as the scheduler's limit
      allows, so that equal runs have equal steps.
    - A server replays only while the device keeps waiting for the host and nobody arrives. It plans
      the step behind the one that runs shortly before that one ends, by what such steps took, so
      that whoever arrives until then is in it: sooner by what the host's work for a step has taken,
      and by a margin that doubles whenever the device had to wait, and then shrinks slowly. A step
      in which rows decode computes as many tokens of prompts as keep it within ``max_step_time``,
      or within 1.4 times that while prompts for more than two such steps wait. Figures are in
      benchmarks/notes/serving.md.

    Args:
        scheduler: asked for plans; its ``repeat_limit``, ``prompt_budget`` and ``backlog_budget``
            are set here.
        depth: steps that may be queued offline before the first result is read; 0 where a step is
            done when it is submitted.
        max_step_time: seconds that a step with decoding rows should take at most; None offline.
        first_budget: tokens of prompts in such a step before any was seen.
        clock: seconds since some moment.

    Attributes:
        depth: steps that may be queued before the first result is read.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        depth: int,
        *,
        max_step_time: float | None = None,
        first_budget: int = 512,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._serving = max_step_time is not None
        self._max_step_time = max_step_time or 0.0
        self.depth = min(depth, 1) if self._serving else depth
        self._scheduler = scheduler
        self._clock = clock
        scheduler.repeat_limit = 1
        scheduler.prompt_budget = scheduler.backlog_budget = None
        if self._serving:
            scheduler.prompt_budget = scheduler.backlog_budget = first_budget
        # Steps in a row that were done early, or had to be waited for, before the replays change.
        self._early_steps, self._waiting_steps = (32, 1) if self._serving else (4, 64)
        self._early = 0
        self._waits = 0
        self._times = StepTimes(scheduler.config.max_num_batched_tokens)
        self._last_end = 0.0
        self._host_seconds = 0.0
        self._margin = _LEAST_MARGIN

    def arrived(self) -> None:
        """Take note of a new request."""
        if self._serving:
            self._scheduler.repeat_limit = 1
            self._early = 0

    def submitted(self, seconds: float) -> None:
        """Take note of how long a step took the host, from its planning to its submission."""
        # The longest of late, since a step that comes too late costs more than one too early.
        self._host_seconds = max(seconds, 0.9 * self._host_seconds)

    def spare(self, plan: StepPlan, submitted: float) -> float:
        """Seconds until the next step is to be planned; 0 or less for at once.

        Args:
            plan: that of the only step in flight, which is running.
            submitted: when it was given to the device, by the clock.
        """
        expected = self._times.expect(plan)
        if expected is None:
            return 0.0
        begin = max(submitted, self._last_end)
        return begin + expected - self._host_seconds - self._margin - self._clock()

    def waiting(self, plan: StepPlan, *, early: bool) -> None:
        """Take note of the oldest step in flight, before its result is waited for.

        Args:
            plan: the step's plan.
            early: whether the device was done with it already.
        """
        margin = 2 * self._margin if early else 0.995 * self._margin
        self._margin = min(max(margin, _LEAST_MARGIN), _MOST_MARGIN)
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

    def finished(self, plan: StepPlan, submitted: float, *, early: bool) -> None:
        """Take note of a step whose result is there.

        Args:
            plan: the step's plan.
            submitted: when it was given to the device, by the clock.
            early: whether it was done before anybody asked, so that its end is not known.
        """
        if not self._serving:
            return
        # It began when it was submitted, or when the one before it ended.
        begin, self._last_end = max(submitted, self._last_end), self._clock()
        if early:
            return
        self._times.add(plan, self._last_end - begin)
        if plan.rows[-1].num_tokens > 1:
            scheduler, limit = self._scheduler, self._max_step_time
            budget = self._times.largest(limit)
            if budget is not None:
                scheduler.prompt_budget = budget
                scheduler.backlog_budget = self._times.largest(_BACKLOG_STRETCH * limit)


__all__ = ["Pacing", "StepTimes"]
