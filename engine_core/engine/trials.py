"""Steps of nobody, which show what steps take before there is a request."""

from __future__ import annotations

import time
from array import array

from engine_core.configs import SamplingParams
from engine_core.engine.pacing import Pacing
from engine_core.inputs import ProcessedPrompt
from engine_core.runtime.executor import Executor
from engine_core.scheduler import Scheduler
from engine_core.steps import Admission, PlanRow, StepPlan

# Tokens of prompts beside a row that decodes. A third of them is enough for a line; each is run
# three times, as the median of three says more than one.
_SIZES = (16, 64, 128, 256, 512, 1024, 1536)
_ROUNDS = 3
# Positions of the row that decodes: those of its prompt, and one a step.
_PROMPT, _POSITIONS = 2, 64


def run_trials(executor: Executor, scheduler: Scheduler, pacing: Pacing, seconds: float) -> None:
    """Tell ``pacing`` what decode steps take, and prompts of several sizes beside them.

    It ends before the step that would take it beyond ``seconds``: on a slow machine after the first
    decode steps. Two rows of the persistent batch are used, and blocks that are given back.

    Args:
        executor: idle.
        scheduler: without sequences; only its blocks are used.
        pacing: told of each step.
        seconds: what all of it may take.
    """
    config, pool = scheduler.config, scheduler.pool
    longest = min(config.max_num_batched_tokens, config.max_model_len - 1)
    sizes = [size for size in _SIZES if size <= longest]
    counts = [-(-max(_POSITIONS, *sizes, 0) // group.block_size) for group in scheduler.groups]
    few_blocks = pool.num_free < 2 * sum(counts)
    if config.max_num_seqs < 2 or config.max_model_len < _POSITIONS or few_blocks:
        return
    end = time.monotonic() + seconds
    position = _PROMPT - 1
    blocks = [[tuple(pool.allocate(count)) for count in counts] for _ in range(2)]

    def planned(row: int, start: int, tokens: int, admitted: list[Admission]) -> PlanRow:
        new: tuple[tuple[int, ...], ...] = ((),) * len(counts)
        if start == 0:
            prompt = ProcessedPrompt((0,) * tokens)
            greedy = SamplingParams(temperature=0.0, seed=0)
            known = array("q", prompt.token_ids)
            admitted.append(Admission(str(row), row, known, tokens, greedy, prompt))
            new = tuple(blocks[row])
        return PlanRow(str(row), row, start, tokens, new, sample=True)

    def run(size: int, *, told: bool = True) -> float:
        """A step of the row that decodes, and of a prompt of this size if it is not 0."""
        nonlocal position
        position += 1
        admitted: list[Admission] = []
        rows = [planned(0, position, 1, admitted)]
        if size:
            rows.append(planned(1, 0, size, admitted))
        begin = time.monotonic()
        plan = StepPlan(0, tuple(rows), tuple(admitted))
        executor.submit(plan).result()
        pacing.finished(plan, begin, early=not told)
        return time.monotonic() - begin

    try:
        admitted: list[Admission] = []
        first = planned(0, 0, _PROMPT, admitted)
        executor.submit(StepPlan(0, (first,), tuple(admitted))).result()
        # What runs for the first time is loaded, or compiled: the first of each size is not told.
        taken, before = 0.0, 1
        for size in (0, *sizes):
            for turn in range(1 + _ROUNDS):
                if time.monotonic() + taken * max(1, size) / before > end:
                    return
                taken, before = run(size, told=turn > 0), max(1, size)
    finally:
        for tables in blocks:
            for table in tables:
                pool.release(table)


__all__ = ["run_trials"]
