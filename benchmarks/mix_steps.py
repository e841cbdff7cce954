"""Time the steps of the mix of ``benchmarks/gpu.py`` by what is in them, on a GPU.

    python benchmarks/mix_steps.py llama3_8b [--quantization fp8] [--kv-cache-dtype fp8]
        [--rounds 1] [--try "few=64"] ...

The engine runs the mix as ``gpu.py`` does. Between CUDA events after each step are the step and
what the device waited before it: the sum is the time of the whole mix. Decode steps are told apart
by the rows that their graph has room for, steps with prompts by the decoding rows that they have
room for. What a step takes alone is what ``decode.py`` and ``step_times.py`` measure, and
``mix_bound.py`` adds that up.

Each ``--try`` is as of ``tiles.py``: all graphs are captured anew with it, and the mix runs once
more with them, in turn with the current settings for ``--rounds``. The script uses private parts of
the engine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.gpu import build, runner
from benchmarks.tiles import settings
from benchmarks.workloads import SHAPES
from engine_core import LLM
from engine_core.bench.workloads import mix_requests
from engine_core.runtime.eager import EagerSteps
from engine_core.runtime.graphs import Captured, DecodeGraphs, GraphSteps

Marks = list[tuple[str, int, Any]]


@contextmanager
def marked(marks: Marks) -> Iterator[None]:
    """Have each step add its kind, its rows or tokens, and an event behind it."""

    def mark(kind: str, tokens: int) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append((kind, tokens, event))

    replays, graph, eager = DecodeGraphs.replays, GraphSteps.run, EagerSteps.run

    def replayed(
        self: DecodeGraphs, captured: Captured, turns: int, rows: int, *, chosen: bool
    ) -> Iterator[Any]:
        for outputs in replays(self, captured, turns, rows, chosen=chosen):
            together = "" if outputs.turns == 1 else f", {outputs.turns} together"
            mark(f"decode, {captured.room.rows:4} rows{together}", rows * outputs.turns)
            yield outputs

    def kind_of(batch: Any, way: str) -> str:
        if not batch.key.prefill_rows:
            return f"decode, {batch.key.decode_rows:4} rows, {way}"
        return f"prompts beside {batch.key.decode_rows:4} rows, {way}"

    def captured(self: GraphSteps, batch: Any) -> Any:
        outputs = graph(self, batch)
        if outputs is not None:
            mark(kind_of(batch, "graph"), batch.key.tokens)
        return outputs

    def alone(self: EagerSteps, batch: Any) -> Any:
        outputs = eager(self, batch)
        mark(kind_of(batch, "eager"), batch.key.tokens)
        return outputs

    with (
        patch.object(DecodeGraphs, "replays", replayed),
        patch.object(GraphSteps, "run", captured),
        patch.object(EagerSteps, "run", alone),
    ):
        yield


def measure(llm: LLM, vocab: int, label: str) -> None:
    """Run the mix once and print a line for each kind of step."""
    prompts, lengths = mix_requests(vocab)
    run, marks = runner(llm), Marks()
    run([[1000] * 64], [1])
    begin = torch.cuda.Event(enable_timing=True)
    begin.record()
    with marked(marks):
        seconds = run(prompts, lengths)
    print(f"{label}: {sum(lengths) / seconds:.0f} output tokens/s, {seconds:.2f} s", flush=True)
    found: dict[str, list[tuple[int, float]]] = {}
    for (_, _, before), (kind, tokens, after) in pairwise([("", 0, begin), *marks]):
        found.setdefault(kind, []).append((tokens, before.elapsed_time(after)))
    print("| step | steps | tokens, mean | s in all | ms, mean | median | most |")
    print("|---|---|---|---|---|---|---|")
    for kind, steps in sorted(found.items()):
        times = sorted(ms for _, ms in steps)
        count, total = len(times), sum(times)
        cells = (
            kind,
            str(count),
            f"{sum(tokens for tokens, _ in steps) / count:.0f}",
            f"{total / 1e3:.3f}",
            *(f"{ms:.2f}" for ms in (total / count, times[count // 2], times[-1])),
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=list(SHAPES))
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="SETTINGS")
    arguments = parser.parse_args()
    options = {
        "quantization": arguments.quantization,
        "kv_cache_dtype": arguments.kv_cache_dtype,
    }
    print(torch.cuda.get_device_name(), torch.__version__)
    with (
        tempfile.TemporaryDirectory() as folder,
        build(arguments.model, Path(folder), deterministic=False, **options) as llm,
    ):
        engine = llm.engine.core.executor._runner
        for _ in range(arguments.rounds):
            for text in ("", *arguments.tries):
                with settings(text):
                    if arguments.tries:
                        engine._decode_graphs.forget()
                        engine._graph_steps.forget()
                    llm.warmup()
                    measure(llm, SHAPES[arguments.model]["vocab_size"], text or "as it is")


if __name__ == "__main__":
    main()
