"""Time decode steps of 1 to 512 rows, and name those that take longer than their neighbours do.

    python benchmarks/rows.py [SHAPE ...] [--draw 0,3] [--quantization int4] [--layers 6]
        [--kv-cache-dtype fp8] [--rows 1,2,...] [--tokens 148] [--prepare 6] [--out FILE]
    python benchmarks/rows.py --dry-run

A shape is that of a published model, as a Llama-like decoder without biases, or a draw of
``benchmarks/draws.py`` with seed 1. It has few layers, whose weights and cache hold random values,
and the whole vocabulary. Steps are replays of the graphs that an engine for so many sequences
captures, so that rows that have no graph of their own take the next larger one. A time is the least
of several on the device, each of ten replays. A step is above its trend by what it takes more than
a line through its neighbours says; more than 8% are named. ``--prepare`` compiles the kernels of so
many shapes at a time first, each in a process of its own. ``--out`` takes a line of JSON for each
shape. ``--dry-run`` prints the shapes and the floors of their steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.decode import fill_cache, place_rows, wait_for_kernels
from benchmarks.draws import Draw, drawn, opened, prepare
from benchmarks.gpu import release
from benchmarks.workloads import SHAPES
from engine_core import own_process

# Those of benchmarks/workloads.py that fit.
_DENSE = ("qwen2_0_5b", "llama3_2_1b", "qwen2_5_7b", "llama3_8b", "qwen3_8b")
# Hidden and intermediate size, layers, heads of queries and keys, their width, the vocabulary, and
# whether it is tied; rows and tokens are those of a run.
PUBLISHED = {name: Draw.of(SHAPES[name], 1, 1) for name in _DENSE} | {
    "qwen3_0_6b": Draw(1024, 3072, 28, 16, 8, 128, 151936, True, 1, 1),
    "qwen2_5_1_5b": Draw(1536, 8960, 28, 12, 2, 128, 151936, True, 1, 1),
    "qwen3_1_7b": Draw(2048, 6144, 28, 16, 8, 128, 151936, True, 1, 1),
    "llama3_2_3b": Draw(3072, 8192, 28, 24, 8, 128, 128256, True, 1, 1),
    "qwen2_5_3b": Draw(2048, 11008, 36, 16, 2, 128, 151936, True, 1, 1),
    "qwen3_4b": Draw(2560, 9728, 36, 32, 8, 128, 151936, True, 1, 1),
    "qwen2_5_14b": Draw(5120, 13824, 48, 40, 8, 128, 152064, False, 1, 1),
}
# Both sides of where another graph or another kernel begins.
ROWS = (
    *(1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 24, 25, 28, 32, 33, 40, 48, 49, 56, 64, 65, 72, 80, 81, 88),
    *(96, 97, 104, 112, 113, 128, 129, 144, 145, 160, 161, 176, 192, 193, 208, 224, 225, 240, 256),
    *(257, 288, 289, 320, 321, 352, 384, 385, 416, 448, 449, 480, 512),
)
REPLAYS, ROUNDS = 10, 5
ALLOWED = 0.08


def above_trend(times: Mapping[int, float]) -> dict[int, float]:
    """By what part of it each time is above the line through those of the next fewer and more rows.

    The first and the last have no such line.
    """
    rows = sorted(times)
    found = {}
    for before, own, after in zip(rows, rows[1:], rows[2:], strict=False):
        share = (own - before) / (after - before)
        line = times[before] + share * (times[after] - times[before])
        found[own] = times[own] / line - 1
    return found


def shape(name: str, rows: int, tokens: int) -> Draw:
    """A published model's, or a draw's by its number."""
    found = PUBLISHED[name] if name in PUBLISHED else drawn(int(name) + 1, 1)[-1]
    return found._replace(rows=rows, tokens=tokens)


def step_ms(graphs: Any, count: int, tokens: int) -> float:
    """Milliseconds of a greedy step of so many rows, each of so many tokens."""
    rows, positions = list(range(count)), [tokens] * count
    graphs.begin(rows, positions)  # captured now, if it was not
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph = graphs.begin(rows, positions).graph
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / REPLAYS)
    return min(times)


@torch.inference_mode()
def measure(own: Draw, folder: Path, rows: Sequence[int], options: dict[str, Any]) -> list[float]:
    """Milliseconds of steps of so many rows."""
    own_process.claim()
    with opened(own, own.layers, folder, **options) as llm:
        runner = llm.engine.core.executor._runner
        wait_for_kernels(runner)
        fill_cache(runner)
        place_rows(runner, [own.tokens] * own.rows)
        found = [step_ms(runner._decode_graphs, count, own.tokens) for count in rows]
    release()
    return found


def show(name: str, times: Mapping[int, float], floors: Mapping[int, float]) -> None:
    """Print the steps of a shape, and those above their trend."""
    print("  rows: ms, times the floor")
    print("  " + "; ".join(f"{r}: {times[r]:.4f}, {times[r] / floors[r]:.2f}" for r in times))
    above = {rows: part for rows, part in above_trend(times).items() if part > ALLOWED}
    named = ", ".join(f"{rows} rows by {part:.0%}" for rows, part in above.items())
    print(f"  {name} above its trend: {named or 'nowhere'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(PUBLISHED))
    parser.add_argument("--draw", help="numbers of draws, too")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--tokens", type=int, default=148, help="of a row")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--quantization", help="fp8, int4 or int8: the linears")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto, fp8 or int8")
    parser.add_argument("--prepare", type=int, default=0, metavar="PROCESSES")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.shapes if name not in PUBLISHED]:
        parser.error(f"no shape {unknown[0]!r}; there are {', '.join(PUBLISHED)}")
    draws = arguments.draw.split(",") if arguments.draw else []
    names = [*arguments.shapes, *draws] or list(PUBLISHED)
    rows = sorted({int(part) for part in arguments.rows.split(",")})
    options = {
        "quantization": arguments.quantization,
        "kv_cache_dtype": arguments.kv_cache_dtype,
    }
    if arguments.prepare and not arguments.dry_run:
        more = ["--kv-cache-dtype", arguments.kv_cache_dtype, "--rows", arguments.rows]
        if arguments.quantization:
            more += ["--quantization", arguments.quantization]
        runs = [[*([name] if name in PUBLISHED else ["--draw", name]), *more] for name in names]
        prepare(__file__, runs, arguments.prepare)
    for name in names:
        own = shape(name, rows[-1], arguments.tokens)._replace(layers=arguments.layers)
        floors = {count: 1e3 * own._replace(rows=count).step_floor() for count in rows}
        print(f"{name} {own}", flush=True)
        if arguments.dry_run:
            print("  " + "; ".join(f"{count}: {floors[count]:.4f}" for count in rows))
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = measure(own, Path(folder), rows, options)
        times = dict(zip(rows, found, strict=True))
        show(name, times, floors)
        if arguments.out:
            with arguments.out.open("a") as file:
                told = {"shape": name, **own._asdict(), **options, "ms": times, "floors": floors}
                file.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
