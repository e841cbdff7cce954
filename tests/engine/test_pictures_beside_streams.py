"""Pictures that come beside streams, through scheduler and pacing: what a step takes then.

The device is a clock. Its times are near those of an H200 with Qwen2-VL 7B, as
benchmarks/notes/media.md has them.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate
from typing import NamedTuple

import pytest

from engine_core.configs import (
    CacheConfig,
    CacheGroup,
    KVCacheSpec,
    SamplingParams,
    SchedulerConfig,
)
from engine_core.engine.pacing import Pacing
from engine_core.inputs import MediaItem, ProcessedPrompt
from engine_core.runtime.step_batch import chunk_size
from engine_core.scheduler import Scheduler, Sequence
from engine_core.steps import PlanRow, RowResult, StepPlan, StepResult

STREAMS, LAYERS, EMBEDDINGS = 16, 32, 5760
# Seconds of a decode step, a token of a prompt, and of a picture's beginning and end.
DECODE, TOKEN, BEGIN, END = 0.005, 22e-6, 0.003, 0.001
MAX_STEP, STRETCH = 0.03, 1.4


class Step(NamedTuple):
    """Seconds that one took, and what it held: layers of so many pictures, tokens of prompts."""

    seconds: float
    layers: int
    pictures: int
    tokens: int


class Device:
    """A server's loop over a device that computes one step after another.

    Attributes:
        steps: those in which streams decoded, until all prompts beside them had their tokens.
    """

    def __init__(self, layer: float) -> None:
        """``layer``: seconds of one of a picture."""
        spec = KVCacheSpec(num_kv_heads=1, head_dim=8, v_head_dim=8, dtype="float16")
        cache = CacheConfig(
            groups=(CacheGroup(spec=spec, block_size=64),),
            num_blocks=2000,
            enable_prefix_caching=False,
        )
        limits = SchedulerConfig(
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            max_model_len=8192,
            max_repeat=1,
            encoder_cache_tokens=9 * EMBEDDINGS,
        )
        self.now = 0.0
        self.steps: list[Step] = []
        self._layer = layer
        self._scheduler = Scheduler(limits, cache)
        self._scheduler.media_in_parts = True
        self._pacing = Pacing(
            self._scheduler,
            1,
            max_step_time=MAX_STEP,
            backlog_stretch=STRETCH,
            clock=lambda: self.now,
        )
        self._done: dict[int, int] = {}  # layers, by slot
        self._added = 0
        self._learn()

    def _learn(self) -> None:
        """Time steps of nobody, as a server does at its start."""
        for tokens in (0, 64, 256, 1024, 1536) * 3:
            rows = [PlanRow("a", 0, 5, 1, ((),), True)]
            rows += [PlanRow("b", 1, 0, tokens, ((),), True)] * (tokens > 0)
            plan, begin = StepPlan(0, tuple(rows)), self.now
            self.now += self._run(plan).seconds
            self._pacing.finished(plan, begin, early=False)

    def _run(self, plan: StepPlan) -> Step:
        layers = 0
        tokens = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        seconds = DECODE + TOKEN * (chunk_size(tokens) if tokens else 0)  # captured, and padded
        for work in plan.media_work:
            done = self._done.get(work.slot, 0)
            seconds += BEGIN * (done == 0) + END * (work.end == work.size)
            first = done
            # As the runner does: at least the share that is planned.
            while done / LAYERS < work.end / work.size:
                done += 1
            self._done[work.slot] = done
            layers += done - first
        return Step(seconds + self._layer * layers, layers, len(plan.media_work), tokens)

    def _add(self, prompt: ProcessedPrompt, tokens: int) -> None:
        self._added += 1
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        name = str(self._added)
        self._scheduler.add(
            Sequence(name, prompt, sampling, arrival_time=self.now, max_model_len=8192)
        )
        self._pacing.arrived()

    def serve(self, arrivals: list[float], *, shown: bool) -> None:
        """Prompts come beside streams, after so many seconds: pictures, or texts as long."""
        for _ in range(STREAMS):
            self._add(ProcessedPrompt((1,) * 64), 4000)
        flight: deque[tuple[StepPlan, float, float, Step]] = deque()
        free, due, beside = self.now, deque(self.now + each for each in sorted(arrivals)), 0
        while due or beside or flight:
            while due and due[0] <= self.now:
                due.popleft()
                beside += 1
                span = (10, 10 + EMBEDDINGS)
                media = (MediaItem("image", bytes([beside, len(due)]), span),) if shown else ()
                self._add(ProcessedPrompt((1,) * (span[1] + 10), media=media), 1)
            if flight and (spare := self._pacing.spare(flight[0][0], flight[0][1])) > 0:
                self.now += min(spare, 0.0005)
                continue
            plan = self._scheduler.schedule() if due or beside else None
            if plan is not None:
                step = self._run(plan)
                free = max(free, self.now) + step.seconds
                flight.append((plan, self.now, free, step))
                self.now += 0.0005
                self._pacing.submitted(0.0005)
                if len(flight) == 1:
                    continue
            plan, submitted, end, step = flight.popleft()
            early = end < self.now
            self._pacing.waiting(plan, early=early)
            self.now = max(self.now, end)
            self._pacing.finished(plan, submitted, early=early)
            if len(plan.rows) >= STREAMS:
                self.steps.append(step)
            rows = tuple(RowResult(r.sequence_id, (7,) if r.sample else ()) for r in plan.rows)
            parts = {("image", EMBEDDINGS): LAYERS} if plan.media_work else {}
            for update in self._scheduler.update(StepResult(plan.step_id, rows, 0.0, parts)):
                beside -= update.finish_reason is not None


@pytest.mark.parametrize("layer", [0.003, 0.005, 0.007, 0.008])
def test_a_step_with_pictures_takes_no_longer_than_one_with_prompts(layer: float) -> None:
    """Two pictures alone, then three at once, and one behind."""
    taken = []
    arrivals = [0.1, 0.8, 1.5, 1.5, 1.5, 1.7]
    for shown in (False, True):
        device = Device(layer)
        device.serve(arrivals, shown=shown)
        taken.append(device.steps)
    texts, pictures = taken
    assert sum(step.layers for step in pictures) == LAYERS * len(arrivals)
    # Nobody knows at first what a layer takes, nor what beginning and end do.
    layers = accumulate(step.layers for step in pictures)
    known = [step for step, count in zip(pictures, layers, strict=True) if count > 2 * LAYERS]
    longest = max(step.seconds for step in texts)
    assert longest <= STRETCH * MAX_STEP
    assert max(step.seconds for step in known) <= longest + 0.001
    # And it has time for more than a single layer: a picture does not take for ever.
    assert any(step.pictures > 1 for step in known)
    assert sum(step.seconds for step in pictures) < 1.35 * (
        sum(step.seconds for step in texts) + len(arrivals) * (LAYERS * layer + BEGIN + END)
    )
