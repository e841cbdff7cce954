"""Steps of no request, which show how long steps take before the first request comes."""

from __future__ import annotations

import time
from array import array
from collections.abc import Generator

from engine_core.configs import SamplingParams
from engine_core.engine.pacing import Pacing
from engine_core.inputs import ProcessedPrompt
from engine_core.runtime.executor import Executor
from engine_core.scheduler import Scheduler
from engine_core.steps import Admission, PlanRow, StepPlan

# Tokens of a prompt beside a row that decodes, at most: what a captured step holds, if it is half
# of them or more. A third of these sizes is enough to fit a line, and so they come before all
# others; each is run three times, since the median of three is more reliable than one time.
_SIZES = (16, 64, 128, 256, 512, 1024, 1536)
_ROUNDS = 3
# Larger steps are not timed.
_MOST = 2048
# Rows that decode at most, to learn how much time a row adds.
_ROWS = 8
# Tokens of the prompt of a row that decodes, and steps that are not timed, at most.
_PROMPT, _UNTIMED = 2, 10
# Numbers of rows for which a CPU has kernels of their own, beside one and many. The last layer
# computes so few tokens where few are sampled, also beside prompts.
_FEW = (2, 3, 5)


def trials(
    executor: Executor, scheduler: Scheduler, pacing: Pacing, seconds: float
) -> Generator[None, None, None]:
    """Tell ``pacing`` how long decode steps take, alone and beside prompts of several sizes.

    It gives way after each step, and runs the next one when it is asked for more; where it is
    closed before, it leaves nothing behind either. Steps of each kind are run untimed before, so
    that what they load, compile or record is there for the first request. It ends before the step
    that would take it beyond ``seconds``: on a slow machine after the first decode steps. Up to
    nine rows of the persistent batch are used, and blocks that are given back.

    Args:
        executor: idle, and so whenever a step is asked for.
        scheduler: without sequences until the end; only its blocks are used.
        pacing: told of each timed step.
        seconds: that timed steps may take together.
    """
    config, pool = scheduler.config, scheduler.pool
    longest = min(config.max_num_batched_tokens, config.max_model_len - 1)
    # Of steps that are padded much, pacing learns nothing.
    held = pacing.sizes(1)
    sizes = [
        max((fitting for fitting in held if size <= 2 * fitting <= 2 * size), default=size)
        for size in _SIZES
        if size <= longest
    ]
    sizes += [size for size in held if size <= min(longest, _MOST) and size not in sizes]
    many = min(_ROWS, config.max_num_seqs - 1)
    kinds = (1, 0), (many, 0), *((1, size) for size in sizes)
    # The first row is in every step.
    length = _PROMPT + _UNTIMED + len(kinds) * (1 + _ROUNDS)
    lengths = [length] * many + [max(sizes, default=0)]
    counts = [[-(-each // group.block_size) for group in scheduler.groups] for each in lengths]
    if many < 1 or config.max_model_len < length or pool.num_free < sum(map(sum, counts)):
        return
    positions = [_PROMPT - 1] * many
    blocks = [[tuple(pool.allocate(count)) for count in each] for each in counts]

    def planned(row: int, start: int, tokens: int, admitted: list[Admission]) -> PlanRow:
        new: tuple[tuple[int, ...], ...] = ((),) * len(scheduler.groups)
        if start == 0:
            prompt = ProcessedPrompt((0,) * tokens)
            greedy = SamplingParams(temperature=0.0, seed=0)
            known = array("q", prompt.token_ids)
            admitted.append(Admission(str(row), row, known, tokens, greedy, prompt))
            new = tuple(blocks[row])
        return PlanRow(str(row), row, start, tokens, new, sample=True)

    def run(decoding: int, size: int, *, told: bool = True) -> float:
        """A step of so many rows that decode, and of a prompt of this size if it is not 0."""
        admitted: list[Admission] = []
        rows = []
        for row in range(decoding):
            positions[row] += 1
            rows.append(planned(row, positions[row], 1, admitted))
        if size:
            rows.append(planned(many, 0, size, admitted))
        begin = time.monotonic()
        plan = StepPlan(0, tuple(rows), tuple(admitted))
        executor.submit(plan).result()
        pacing.finished(plan, begin, early=not told)
        return time.monotonic() - begin

    try:
        admitted: list[Admission] = []
        prompts = tuple(planned(row, 0, _PROMPT, admitted) for row in range(many))
        executor.submit(StepPlan(0, prompts, tuple(admitted))).result()
        yield
        # What runs for the first time is loaded, or compiled: pacing is not told of it. On a CPU
        # a step is recorded the second time that its number of rows comes, and compared the third;
        # where steps are long, recordings matter little.
        for decoding in (1, many):
            run(decoding, 0, told=False)
            yield
            if run(decoding, 0, told=False) < seconds / 8:
                yield
                run(decoding, 0, told=False)
            yield
        for decoding in (few for few in _FEW if few < many):
            run(decoding, 0, told=False)
            yield
        run(many, sizes[0] if sizes else 0, told=False)
        yield
        end = time.monotonic() + seconds
        taken, before = 0.0, 1
        for decoding, size in kinds:
            for turn in range(1 + _ROUNDS):
                if time.monotonic() + taken * max(1, size) / before > end:
                    return
                taken, before = run(decoding, size, told=turn > 0), max(1, size)
                yield
    finally:
        for tables in blocks:
            for table in tables:
                pool.release(table)


__all__ = ["trials"]
