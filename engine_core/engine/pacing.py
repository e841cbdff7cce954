"""Limits of how far the host runs ahead, and of the prompt tokens in a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from engine_core.scheduler import Scheduler
from engine_core.steps import StepPlan

# Steps of which the median tells what a decode step takes, and what a token of a prompt adds.
_REMEMBERED = 15
# Fewer tokens of prompts say more about the launch of a step than about a token.
_TELLING_TOKENS = 64
# Prompts get on even if decoding alone takes as long as a step should.
_LEAST_TOKENS = 64


class Pacing:
    """Decide how many steps are in flight, how often a plan is replayed, and a step's prompts.

    A step that is done before its result is asked for was shorter than the host's work for one: the
    device waited. Then decode plans are replayed more often, which spares the host work. Replays
    cost latency, since whoever arrives waits for all that is in flight. So the rule depends on who
    waits:

    - Offline nobody does: a few early steps double the replays, and many in a row that had to be
      waited for halve them. A step computes as many tokens of prompts as the scheduler's limit
      allows, so that equal runs have equal steps.
    - A server replays only while the device keeps waiting for the host and nobody arrives. It keeps
      one step queued behind the one that runs, which hides the host's work. Figures are in
      benchmarks/notes/serving.md. A step in which rows decode computes as many tokens of prompts
      as should keep it within ``max_step_time``, by what such steps took until now.

    Args:
        scheduler: asked for plans; its ``repeat_limit`` and ``prompt_budget`` are set here.
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
        scheduler.prompt_budget = first_budget if self._serving else None
        # Steps in a row that were done early, or had to be waited for, before the replays change.
        self._early_steps, self._waiting_steps = (32, 1) if self._serving else (4, 64)
        self._early = 0
        self._waits = 0
        self._decode_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._token_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._last_end = 0.0

    def arrived(self) -> None:
        """Take note of a new request."""
        if self._serving:
            self._scheduler.repeat_limit = 1
            self._early = 0

    def waiting(self, plan: StepPlan, *, early: bool) -> None:
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
        seconds = self._last_end - begin
        if plan.rows[-1].num_tokens == 1:
            self._decode_seconds.append(seconds / plan.repeat)
            return
        prompts = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        if prompts < _TELLING_TOKENS:
            return
        decode = 0.0
        if plan.rows[0].num_tokens == 1 and self._decode_seconds:
            decode = median(self._decode_seconds)
        self._token_seconds.append(max(seconds - decode, 0.1 * seconds) / prompts)
        self._set_budget()

    def _set_budget(self) -> None:
        decode = median(self._decode_seconds) if self._decode_seconds else 0.0
        left = max(0.0, self._max_step_time - decode)
        tokens = max(_LEAST_TOKENS, int(left / median(self._token_seconds)))
        # Few different sizes, which steps are captured for: powers of two and half-way points.
        grain = max(_LEAST_TOKENS, 1 << (tokens.bit_length() - 2))
        limit = self._scheduler.config.max_num_batched_tokens
        self._scheduler.prompt_budget = min(limit, tokens // grain * grain)


__all__ = ["Pacing"]
