"""Time steps of a server by what is in them: rows that decode, and a prompt's tokens beside them.

    python benchmarks/step_times.py [llama3_8b] [--rows 16] [--sizes 64,...,2048] [--cached 0,1280]
    python benchmarks/step_times.py [llama3_8b] [--rows 16] --totals 992,1024,1056

The engine's own steps, captured as a server captures them before its first request, one queued
behind the other, so that the device never waits. Milliseconds a step, and for each token of the
prompt beyond what a step without one takes. Each row that decodes has ``--context`` tokens in its
cache, and the prompt ``--cached`` ones before those of the step. With ``--totals`` a step has so
many tokens in all, 32 of them for rows that decode, whether a server captures such steps or not:
products are in tiles, and one more tile than fills the device may take as long as all before it.
The script uses private parts of the engine for that.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from array import array
from collections import deque
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads import SHAPES, write_config
from engine_core import EngineConfig, SamplingParams, own_process
from engine_core.engine.core import EngineCore
from engine_core.engine.startup import load, open_engine
from engine_core.inputs import ProcessedPrompt
from engine_core.runtime.step_batch import GraphKey, chunk_sizes
from engine_core.steps import Admission, PlanRow, StepPlan

# Rows that a step of one of --totals has room for.
BESIDE = 32
GREEDY = SamplingParams(temperature=0.0, seed=0)


class Steps:
    """Rows that decode, and steps with them.

    Args:
        core: idle; its executor runs the steps, and its scheduler's blocks are used up.
        rows: that decode.
        context: tokens of each of them, at first.
        longest: of the prompts beside them, what is cached included.
        steps: that will be run at most.
    """

    def __init__(self, core: EngineCore, rows: int, context: int, longest: int, steps: int) -> None:
        self._executor = core.executor
        pool, groups = core.scheduler.pool, core.scheduler.groups
        lengths = [context + steps] * rows + [longest]
        self._blocks = [
            tuple(tuple(pool.allocate(-(-length // group.block_size))) for group in groups)
            for length in lengths
        ]
        self._none: tuple[tuple[int, ...], ...] = ((),) * len(groups)
        self._positions = [context] * rows
        self._made = 0
        for row in range(rows):
            made = StepPlan(row, *self._prompt(row, 0, context))
            self._executor.submit(made).result()

    def _prompt(
        self, row: int, start: int, size: int
    ) -> tuple[tuple[PlanRow, ...], tuple[Admission, ...]]:
        prompt = ProcessedPrompt((1,) * (start + size))
        known, name = array("q", prompt.token_ids), str(row)
        admission = Admission(name, row, known, start + size, GREEDY, prompt)
        chunk = PlanRow(name, row, start, size, self._blocks[row], sample=True)
        return (chunk,), (admission,)

    def plan(self, size: int, cached: int) -> StepPlan:
        """The next step, with so many tokens of a prompt behind those in the cache."""
        rows = [
            PlanRow(str(row), row, start, 1, self._none, sample=True)
            for row, start in enumerate(self._positions)
        ]
        self._positions = [start + 1 for start in self._positions]
        self._made += 1
        chunks, admitted = self._prompt(len(rows), cached, size) if size else ((), ())
        return StepPlan(self._made, (*rows, *chunks), admitted)

    def seconds(self, size: int, cached: int, turns: int) -> float:
        """Median of so many steps that follow each other, after two untimed ones."""
        ends, flight = [], deque()
        for _ in range(turns + 2):
            flight.append(self._executor.submit(self.plan(size, cached)))
            if len(flight) > 2:
                flight.popleft().result()
                ends.append(time.monotonic())
        for pending in flight:
            pending.result()
            ends.append(time.monotonic())
        return median(after - before for before, after in pairwise(ends[1:]))


def measure(model: str, options: argparse.Namespace) -> None:
    """Print a line for each number of rows, of cached tokens and of the prompt's tokens."""
    config = EngineConfig(
        load_format=options.load_format,
        device=options.device,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_batched_tokens=options.most,
        max_model_len=options.max_model_len,
    )
    core = EngineCore(load(open_engine(model, config)))
    graphs = core.executor._runner._graph_steps if options.totals else None
    sizes = options.sizes or [size for size in chunk_sizes(options.most) if size <= options.most]
    if graphs is not None:
        sizes = [total - BESIDE for total in options.totals]
        graphs.fit = lambda key: (
            GraphKey(key.tokens - key.decode_rows + BESIDE, BESIDE, max(8, key.prefill_rows)),
            True,
        )
    else:
        begin, captured = time.monotonic(), 0
        while core.capture_next():
            captured += 1
        print(f"{captured} graphs in {time.monotonic() - begin:.1f} s", flush=True)
    turns = options.steps
    cases = len(options.cached) * len(sizes) + 1
    print("| rows | cached | tokens | ms | us a token |\n|---|---|---|---|---|")
    for rows in options.rows:
        steps = Steps(
            core, rows, options.context, max(options.cached) + max(sizes), cases * (turns + 2)
        )
        alone = steps.seconds(0, 0, turns)
        print(f"| {rows} | | 0 | {alone * 1e3:.2f} | |")
        for cached in options.cached:
            for size in sizes:
                time.sleep(options.rest)
                taken = steps.seconds(size, cached, turns)
                each = (taken - alone) / size * 1e6
                print(
                    f"| {rows} | {cached} | {size} | {taken * 1e3:.2f} | {each:.1f} |", flush=True
                )
    core.close()


def numbers(text: str) -> list[int]:
    """Parse numbers with commas between them."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="llama3_8b", help="a shape's name, or a path")
    parser.add_argument("--rows", type=numbers, default=[16])
    parser.add_argument("--sizes", type=numbers, help="all that are captured if not given")
    parser.add_argument("--totals", type=numbers, default=[], help="in place of --sizes")
    parser.add_argument("--cached", type=numbers, default=[0])
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--most", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each kind")
    parser.add_argument("--rest", type=float, default=0.1, help="seconds before each kind")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    own_process.claim()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model in SHAPES:
            model = str(write_config(model, Path(folder) / model))
        measure(model, options)


if __name__ == "__main__":
    main()
