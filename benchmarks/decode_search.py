"""Time decode attention as it is cut by rule, and in every other way of a space, on a grid.

    python benchmarks/decode_search.py [--out FILE] [--seconds S] [--shapes 32/8/64,...]

A point is rows of so many tokens each and a model's heads. The space: tiles (tokens, warps, tiles
in flight) and splits of a row. Compilers work in processes of their own while points are timed.
``--out`` takes all times, as JSON. Prints the points at which the rule is furthest from the best
of the space, and those at which it takes longest beyond its bytes at 4.28 TB/s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine_core import kernels
from engine_core.kernels.attention import decode

# Query heads, KV heads, dimensions; those of known models first.
SHAPES = [
    (32, 8, 64), (32, 8, 128), (14, 2, 64), (28, 4, 128), (32, 32, 128), (16, 8, 256),
    (64, 4, 128), (32, 32, 80), (32, 32, 96), (16, 2, 192),
]  # fmt: skip
# Rows, and tokens of each.
GRID = [
    (1, 100), (1, 1030), (1, 4000), (1, 15000), (1, 128000), (4, 1030), (4, 15000), (4, 60000),
    (8, 300), (8, 1030), (8, 4000), (8, 15000), (32, 100), (32, 1030), (32, 4000), (32, 15000),
    (128, 300), (128, 1030), (128, 4000), (256, 100), (256, 1030), (256, 3000),
]  # fmt: skip
# Tokens, warps and tiles in flight, for heads up to so wide.
TILES = {
    64: [(32, 1, 2), (32, 1, 3), (64, 2, 2), (64, 2, 3), (64, 2, 4), (128, 4, 2), (128, 4, 3)],
    128: [(32, 2, 3), (32, 2, 4), (64, 2, 2), (64, 2, 3), (64, 4, 2), (64, 4, 3), (32, 1, 3)],
    256: [(32, 4, 2), (32, 4, 3), (32, 2, 2), (16, 2, 3), (32, 2, 3), (64, 4, 2)],
}
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Tokens of a split at least.
SHORTEST = 64
BLOCK = 64
# Bytes of a layer's keys and values at most, of all keys, and of the L2 cache with room to spare.
MOST_BYTES, POOL_BYTES, FLUSHED = 2.2e9, 2.2e9, 128 << 20
MICROSECONDS_PER_BYTE = 1 / 4.28e6
# Between two ways to add up the same products in bfloat16.
_DIFFERENCE = 2e-2
Shape = tuple[int, int, int]


def width_of(shape: Shape) -> int:
    """A head's dimensions up to a power of 2."""
    return 1 << (shape[2] - 1).bit_length()


def by_rule(shape: Shape, rows: int) -> decode.Launch:
    """The choice of the engine."""
    heads, kv_heads, _ = shape
    wide = width_of(shape)
    return decode.launch(rows, heads // kv_heads, kv_heads, wide, wide, False, 132)


def space(shape: Shape, rows: int, tokens: int) -> Iterator[decode.Launch]:
    """All ways to cut the point that are worth a try."""
    heads, kv_heads, _ = shape
    wide, group = width_of(shape), heads // kv_heads
    for splits in SPLITS:
        programs = rows * kv_heads * splits
        too_short = tokens < splits * SHORTEST
        if splits > 1 and (too_short or programs > 132 * 16):
            break
        more = min(splits * 4, 64)
        if programs * 4 <= 132 and tokens >= more * SHORTEST and more > splits:
            continue
        for block_n, num_warps, num_stages in TILES[max(64, wide)]:
            merged = (4, 1)
            if splits > 4:
                least = max(1, 32 * num_warps * 64 // (16 * wide))
                merged = (16, min(1 << (group - 1).bit_length(), least))
            yield decode.Launch(
                16, block_n, num_warps, num_stages, rows * splits, SHORTEST, *merged
            )


def compiled_for(cut: decode.Launch) -> decode.Launch:
    """The launch with what its kernel is not compiled for left out."""
    return cut._replace(wanted=1, min_split=SHORTEST)


class Layers:
    """Attention of one token of each row in several layers, each with keys of its own."""

    def __init__(self, shape: Shape, rows: int, tokens: int, pools: tuple[Tensor, Tensor]) -> None:
        heads, kv_heads, dim = shape
        blocks = rows * -(-tokens // BLOCK)
        size = blocks * BLOCK * kv_heads * dim
        self.bytes = rows * tokens * kv_heads * dim * 4
        count = max(1, min(6, len(pools[0]) // size, int(1.5e9 // self.bytes)))
        options = {"dtype": torch.int32, "device": "cuda"}
        self.caches = [
            [pool[i * size : (i + 1) * size].view(blocks, BLOCK, kv_heads, dim) for pool in pools]
            for i in range(count)
        ]
        self.q = torch.randn(rows, heads, dim, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.q)
        self.arguments: dict[str, Any] = {
            "block_tables": torch.randperm(blocks, device="cuda").int().view(rows, -1),
            "query_start": torch.arange(rows + 1, **options),  # type: ignore[call-overload]
            "kv_lens": torch.full((rows,), tokens, **options),  # type: ignore[call-overload]
            "max_query_len": 1,
            # What a captured step is given.
            "max_kv_len": 131072,
            "num_decode_rows": rows,
            "scale": dim**-0.5,
        }

    def run(self, cut: decode.Launch, memo: dict[Any, Any], count: int | None = None) -> None:
        """Launch ``count`` layers, or all."""
        choose = decode.launch
        decode.launch = lambda *_: cut
        try:
            for k, v in self.caches[:count]:
                kernels.paged_attention(self.q, k, v, out=self.out, memo=memo, **self.arguments)
        finally:
            decode.launch = choose


class Clock:
    """Times of graphs on one stream, with the L2 cache full of something else before each."""

    def __init__(self) -> None:
        self.other = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
        self.other.zero_()
        torch.cuda.synchronize()
        self.pool = torch.cuda.graph_pool_handle()
        self.kept = self._captured(lambda: self.other[:16].zero_())

    def _captured(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool)
        try:
            run()
        finally:
            graph.capture_end()
        return graph

    def microseconds(self, run: Callable[[], object], most: int = 5) -> float:
        """Median of a few runs, fewer if they are long."""
        graph = self._captured(run)
        graph.replay()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        repeats = max(2, min(most, int(0.006 / (time.perf_counter() - begin))))
        events = []
        for _ in range(repeats):
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self.other.zero_()
            pair[0].record()
            graph.replay()
            pair[1].record()
            events.append(pair)
        torch.cuda.synchronize()
        taken = [float(begin.elapsed_time(end)) for begin, end in events]
        return 1e3 * statistics.median(taken)


class Compiled(NamedTuple):
    """A kernel: seconds to make it, registers of a thread, bytes of a program's shared memory."""

    seconds: float
    registers: int
    shared: int
    error: str


def compile_one(shape: Shape, cut: decode.Launch) -> Compiled:
    """Compile a kernel, in a process of compilers."""
    from engine_core.kernels.attention import triton as attention

    begin = time.perf_counter()
    try:
        pools = tuple(torch.zeros(2, 4 * BLOCK * shape[1] * shape[2], dtype=torch.bfloat16).cuda())
        Layers(shape, 2, 100, pools).run(cut._replace(wanted=4), {}, 1)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        kernel = list(attention._decode_kernel.device_caches[0][0].values())[-1]
        return Compiled(time.perf_counter() - begin, kernel.n_regs, kernel.metadata.shared, "")
    except Exception as error:
        return Compiled(time.perf_counter() - begin, 0, 0, f"{type(error).__name__}: {error}"[:200])


def time_point(
    shape: Shape, rows: int, tokens: int, pools: tuple[Tensor, Tensor], clock: Clock,
    broken: set[decode.Launch],
) -> dict[str, Any]:  # fmt: skip
    """Every way's microseconds a layer, and how far its results are from those by rule."""
    layers = Layers(shape, rows, tokens, pools)
    rule = by_rule(shape, rows)
    taken: dict[decode.Launch, tuple[float, float]] = {}
    expected = None
    rule_memo: dict[Any, Any] = {}
    for cut in dict.fromkeys([rule, *space(shape, rows, tokens)]):
        if compiled_for(cut) in broken:
            continue
        memo = rule_memo if cut == rule else {}
        layers.run(cut, memo, 1)
        if expected is None:
            expected = layers.out.float()
        difference = (layers.out.float() - expected).abs().max().item()
        whole = clock.microseconds(lambda m=memo, c=cut: layers.run(c, m))  # type: ignore[misc]
        taken[cut] = whole / len(layers.caches), difference
    again = clock.microseconds(lambda: layers.run(rule, rule_memo)) / len(layers.caches)
    best = min(taken, key=lambda cut: taken[cut][0])
    return {
        "shape": shape,
        "rows": rows,
        "tokens": tokens,
        "floor": layers.bytes * MICROSECONDS_PER_BYTE,
        "rule": rule,
        "rule_us": min(taken[rule][0], again),
        "rule_twice": [taken[rule][0], again],
        "best": best,
        "best_us": taken[best][0],
        "difference": max(difference for _, difference in taken.values()),
        "times": [[*cut, round(us, 2)] for cut, (us, _) in taken.items()],
    }


def line_of(point: dict[str, Any]) -> str:
    """A point in one line: microseconds by rule, of the best and of the bytes."""
    shape = "/".join(map(str, point["shape"]))
    ways = (",".join(map(str, point[way][1:])) for way in ("rule", "best"))
    return (
        f"{shape:10} {point['rows']:3}x{point['tokens']:<6} rule {point['rule_us']:7.1f} best "
        f"{point['best_us']:7.1f} bytes {point['floor']:7.1f}  {'  '.join(ways)}"
    )


def summary(points: list[dict[str, Any]], most: int) -> None:
    """The worst points, and how many are within the bounds."""
    if not points:
        return

    def ratio(point: dict[str, Any]) -> float:
        return float(point["rule_us"] / point["best_us"])

    def beyond(point: dict[str, Any]) -> float:
        return float(point["rule_us"] - point["floor"])

    near = sum(point["rule_us"] <= 1.05 * point["best_us"] for point in points)
    print(f"{near} of {len(points)} points within 5% of the best; the furthest:")
    for point in sorted(points, key=ratio, reverse=True)[:most]:
        print(f"  {ratio(point):5.2f} {line_of(point)}")
    for bound in (5, 8):
        held = sum(beyond(point) <= bound for point in points)
        at_best = sum(point["best_us"] <= point["floor"] + bound for point in points)
        print(f"within their bytes and {bound} us: {held}, at best {at_best}")
    for point in sorted(points, key=beyond, reverse=True)[: most // 2]:
        print(f"  {beyond(point):5.1f} {line_of(point)}")


def search(seconds: float, shapes: list[Shape], out: Path | None, most: int = 18) -> int:
    """Time all points; returns how many are more than 5% off. ``seconds`` bounds all of it."""
    import triton  # noqa: F401  (before the compilers are forked)

    from engine_core.kernels.attention import triton as _  # noqa: F401

    begin = time.perf_counter()
    points: list[dict[str, Any]] = []
    made: list[list[Any]] = []
    grids = {
        shape: [
            (rows, tokens)
            for rows, tokens in GRID
            if rows * tokens * shape[1] * shape[2] * 4 <= MOST_BYTES
        ]
        for shape in shapes
    }
    # CUDA is not there yet in this process, so that others can be forked from it.
    with ProcessPoolExecutor(
        max(1, (len(os.sched_getaffinity(0)) - 1)),
        mp_context=multiprocessing.get_context("fork"),
    ) as pool:
        jobs: dict[Shape, dict[decode.Launch, Future[Compiled]]] = {}
        for shape, grid in grids.items():
            cuts = [by_rule(shape, rows) for rows, _ in grid]
            cuts += [cut for point in grid for cut in space(shape, *point)]
            wanted = dict.fromkeys(map(compiled_for, cuts))
            jobs[shape] = {cut: pool.submit(compile_one, shape, cut) for cut in wanted}
        pools = tuple(
            torch.randn(int(POOL_BYTES) // 2, dtype=torch.bfloat16, device="cuda") for _ in range(2)
        )
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            clock = Clock()
            for shape, grid in grids.items():
                results = {cut: job.result() for cut, job in jobs[shape].items()}
                made += [[shape, *cut, *result] for cut, result in results.items()]
                broken = {cut for cut, result in results.items() if result.error}
                for cut in broken:
                    print(f"FAILED {shape} {cut}: {results[cut].error}")
                compiled = time.perf_counter() - begin
                compile_seconds = sum(result.seconds for result in results.values())
                for point in grid:
                    if time.perf_counter() - begin > seconds:
                        break
                    points.append(time_point(shape, *point, pools, clock, broken))  # type: ignore[arg-type]
                print(
                    f"{shape}: {len(results)} kernels {compile_seconds:.0f} s, at {compiled:.0f} "
                    f"to {time.perf_counter() - begin:.0f} s",
                    flush=True,
                )
                if out:
                    out.write_text(json.dumps({"kernels": made, "points": points}))
        for shape in grids:
            for job in jobs[shape].values():
                job.cancel()
    summary(points, most)
    wrong = [each for each in points if not each["difference"] < _DIFFERENCE]
    for each in wrong[:5]:
        print(f"WRONG by {each['difference']:.1e}: {line_of(each)}")
    return sum(bool(point["rule_us"] > 1.05 * point["best_us"]) for point in points) + len(wrong)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON with all times")
    parser.add_argument("--seconds", type=float, default=600, help="begin no point after these")
    parser.add_argument("--shapes", help="heads/KV heads/dimensions,...")
    args = parser.parse_args()
    shapes = SHAPES
    if args.shapes:
        shapes = [tuple(map(int, part.split("/"))) for part in args.shapes.split(",")]  # type: ignore[misc]
    return 1 if search(args.seconds, shapes, args.out) else 0


if __name__ == "__main__":
    sys.exit(main())
