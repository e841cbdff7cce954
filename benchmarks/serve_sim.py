"""Simulate the server's steps: its own scheduler and pacing, on a device of given step times.

    python benchmarks/serve_sim.py [--rates 4,16,32,48] [--seconds 60] [--seeds 5,6,7]
        [--max-step-time 0.03] [--stretch 1.4] [--scale 1.05]

Requests are those of ``benchmarks/serve.py``, which draws the same ones from the same seed. Time is
simulated: a plan takes the host a fixed time, the device runs one step after the other, and how
long each takes follows from what is in it. By default that is Llama 3 8B's shape on an H200. No
model and no GPU is needed, and equal options make equal figures. A line has the mean of the seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import serve
from engine_core.configs import (
    CacheConfig,
    CacheGroup,
    KVCacheSpec,
    SamplingParams,
    SchedulerConfig,
)
from engine_core.engine.pacing import Pacing
from engine_core.inputs import ProcessedPrompt
from engine_core.runtime.step_batch import ROWS_BESIDE, sizes_beside
from engine_core.scheduler import Scheduler
from engine_core.scheduler import Sequence as Generated
from engine_core.steps import PlanRow, StepPlan, StepResult, TokenRows

BLOCK = 16
# max_num_batched_tokens, as by default.
MOST = 2048


# Milliseconds of steps on an H200, Llama 3 8B's shape in bfloat16, by all their tokens: a row of
# prompts beside 16 rows that decode with 600 tokens each (benchmarks/step_times.py, 2026-11-24).
STEPS = {
    96: 5.67,
    160: 6.11,
    224: 7.33,
    288: 8.39,
    352: 9.70,
    416: 11.01,
    480: 10.89,
    544: 13.52,
    672: 16.36,
    800: 17.15,
    928: 21.02,
    1056: 23.19,
    1312: 30.25,
    1568: 31.54,
    1824: 39.53,
    2080: 44.82,
}


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step, and of what is around it.

    Attributes:
        decode: of a step in which rows decode, whatever their number.
        a_row: more for each of them.
        a_pair: for each pair of a prompt's token and one that it attends to.
        steps: milliseconds of steps with prompts by the tokens in all, of which each has as many
            as the next one here. A row of them is a prompt whose attention is counted in.
        scale: of all times of the device: a warm one has a lower clock.
        plan: from a step's planning to its submission.
        take: from a step's end to its events.
        way: from the client to the engine and back.
    """

    decode: float = 3.9e-3
    a_row: float = 3.7e-5
    a_pair: float = 0.92e-9
    steps: Mapping[int, float] = field(default_factory=lambda: STEPS)
    scale: float = 1.0
    plan: float = 0.8e-3
    take: float = 0.3e-3
    way: float = 2e-3

    def step(self, plan: StepPlan) -> float:
        """Seconds of a step on the device."""
        chunks = [row for row in plan.rows if row.num_tokens > 1]
        rows = len(plan.rows) - len(chunks)
        if not chunks:
            return self.scale * plan.repeat * (self.decode + self.a_row * rows)
        prompts = sum(row.num_tokens for row in chunks)
        pairs = sum(row.num_tokens * (row.start + row.num_tokens / 2) for row in chunks)
        # With as many rows of padding as a captured step has.
        room = next((room for room in ROWS_BESIDE if room >= rows > 0), 0)
        holding = [size for size in sizes_beside(room, MOST) if size >= prompts]
        total = room + holding[0]
        known = [(size, ms) for size, ms in self.steps.items() if size >= total]
        size, ms = known[0] if known else max(self.steps.items())
        alone = 1e-3 * ms * max(1.0, total / size) - self.a_pair * (size - 32) ** 2 / 2
        reading = self.a_row / 2 * (rows - 16)
        return self.scale * (alone + reading + self.a_pair * pairs)


@dataclass(slots=True)
class Stream:
    """Record of a request: when it was due, its prompt's tokens, and when each event came."""

    due: float
    prompt: int
    events: list[float] = field(default_factory=list)


def simulate(
    requests: Sequence[tuple[float, int, int]],
    costs: Costs,
    pace: Callable[[Scheduler, Callable[[], float]], Pacing],
    *,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = MOST,
) -> list[Stream]:
    """Serve requests, given as the second they are due and the tokens of prompt and output.

    Args:
        requests: by when they are due.
        costs: of the steps.
        pace: makes the pacing of a scheduler by a clock.
        max_num_seqs: as of the engine, like the next one.
    """
    now = 0.0
    spec = KVCacheSpec(num_kv_heads=1, head_dim=1, v_head_dim=1, dtype="float32")
    group = CacheGroup(spec=spec, block_size=BLOCK)
    cache = CacheConfig(groups=(group,), num_blocks=40_000, enable_prefix_caching=False)
    limits = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=8192,
        max_repeat=8,
    )
    scheduler = Scheduler(limits, cache)
    pacing = pace(scheduler, lambda: now)
    for _ in range(3):  # as engine/trials.py does
        for rows, tokens in ((1, 0), (8, 0), *((1, size) for size in pacing.sizes(1))):
            made = [PlanRow("", 0, 99, 1, ((),), True)] * rows
            if tokens:
                made.append(PlanRow("", 0, 0, tokens, ((),), True))
            trial, begin = StepPlan(0, tuple(made)), now
            now += costs.step(trial)
            pacing.finished(trial, begin, early=False)
    origin = now
    streams = [Stream(origin + due, prompt) for due, prompt, _ in requests]
    flight: deque[tuple[StepPlan, float, float]] = deque()
    coming, device = 0, 0.0
    while True:
        while coming < len(streams) and streams[coming].due + costs.way / 2 <= now:
            _, prompt, output = requests[coming]
            sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
            ids = ProcessedPrompt((0,) * prompt)
            scheduler.add(
                Generated(str(coming), ids, sampling, arrival_time=now, max_model_len=8192)
            )
            pacing.arrived()
            coming += 1
        arrival = streams[coming].due + costs.way / 2 if coming < len(streams) else float("inf")
        if flight and flight[-1][2] > now:
            spare = pacing.spare(flight[-1][0], flight[-1][1])
            if spare >= 1e-3:
                now = min(now + 1e-3, arrival)
                continue
        begun = now
        plan = scheduler.schedule()
        if plan is not None:
            planned = now
            now += costs.plan
            device = max(now, device) + costs.step(plan)
            flight.append((plan, planned, device))
            pacing.submitted(now - begun)
        if not flight:
            if coming == len(streams):
                return streams
            now = max(now, arrival)
            continue
        if plan is not None and len(flight) <= pacing.depth:
            continue
        done, planned, end = flight.popleft()
        early = end <= now
        pacing.waiting(done, early=early)
        now = max(now, end)
        pacing.finished(done, planned, early=early)
        tokens = np.zeros(len(done.rows), dtype=np.int64)
        updates = scheduler.update(
            StepResult(done.step_id, TokenRows(done.rows, tokens, range(len(done.rows))))
        )
        now += costs.take
        for update in updates:
            if update.new_token_ids:
                streams[int(update.sequence_id)].events.append(now + costs.way / 2)


def figures(streams: Sequence[Stream]) -> list[float]:
    """First token p50 and p99, gaps p50, p99 and most, in milliseconds."""
    first = [stream.events[0] - stream.due for stream in streams]
    gaps = np.concatenate([np.diff(stream.events) for stream in streams if stream.events])
    return [
        *(1e3 * np.percentile(first, [50, 99])).tolist(),
        *(1e3 * np.percentile(gaps, [50, 99, 100])).tolist(),
    ]


def drawn(rate: float, seconds: float, seed: int) -> list[tuple[float, int, int]]:
    """The requests that ``benchmarks/serve.py`` sends at a rate."""
    options = serve.parse(["--seed", str(seed)])
    options.token_range = (1000, 125_256)
    load = serve.Load("", rate, max(1, int(rate * seconds)))
    return [(r.due, r.prompt_tokens, r.body["max_tokens"]) for r in serve.plan(load, options, "")]


def main() -> None:
    """Print a line for each rate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=serve.numbers, default=[4, 16, 32, 48])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", type=serve.numbers, default=[5, 6, 7])
    parser.add_argument("--max-step-time", type=float, default=0.03)
    parser.add_argument("--stretch", type=float, default=1.4)
    parser.add_argument("--scale", type=float, default=1.05, help="of all times of the device")
    options = parser.parse_args()

    def pace(scheduler: Scheduler, clock: Callable[[], float]) -> Pacing:
        return Pacing(
            scheduler,
            2,
            max_step_time=options.max_step_time,
            backlog_stretch=options.stretch,
            rooms=ROWS_BESIDE,
            clock=clock,
        )

    costs = Costs(scale=options.scale)
    print("| requests/s | first token p50, p99, ms | gaps p50, p99, most, ms |\n|---|---|---|")
    for rate in options.rates:
        runs = [
            figures(simulate(drawn(rate, options.seconds, int(seed)), costs, pace))
            for seed in options.seeds
        ]
        a, b, c, d, e = (mean(run[i] for run in runs) for i in range(5))
        print(f"| {rate:g} | {a:.1f}, {b:.0f} | {c:.1f}, {d:.1f}, {e:.1f} |", flush=True)


if __name__ == "__main__":
    main()
