"""Time decode attention as the engine and every other way of a space cut it, on drawn points.

    python benchmarks/decode_search.py [--out FILE] [--points N] [--seed S] [--seconds S]
        [--compile-seconds S] [--each S] [--models 32/8/128,14/2/64/int8,...] [--dry-run]
        [--at "35/5/80 22x15306,..."]
    python benchmarks/decode_search.py --replay FILE

A point is a model's heads, cache and window, and rows of so many tokens, equal or drawn. Points are
drawn by a seed and come in that order, so that those which are timed before the time is over are
a sample of all. The space (``decode_space.py``): tiles (tokens, warps, tiles in flight) and splits
of a row. The choice is what the engine takes (``attention/decode.py``).

``--at`` takes points by their names, as they are printed, instead of drawing any. All kernels are
compiled first, in processes of their own. ``--out`` takes a line of JSON for each
point, with all times; points that it has already are not timed again. ``--replay`` asks what the
choice as it is now takes by such times, between two splits by what is between them. Prints the
points at which it is furthest from the best of the space, and those at which it takes longest
beyond its bytes at 4.28 TB/s. ``--dry-run`` runs a few small points in Triton's interpreter, on any
machine: it times nothing, and shows that the program and all ways agree.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decode_space import PIECES, Heads, Plan, chosen_pieces, cut_by, plan, tiles
from engine_core.kernels.attention import decode
from engine_core.kernels.attention.call import Call
from engine_core.kernels.codes import CODE_TOPS, SCALE_BYTES, cache_parts

DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "e4m3": torch.float8_e4m3fn}
# Heads, KV heads, dimensions, cache and window of known models, or like those.
MODELS = [
    "32/8/64", "14/2/64", "16/16/64", "14/2/64/int8", "32/32/80", "32/2/96", "32/32/96",
    "32/8/128", "28/4/128", "64/4/128", "40/8/128", "32/8/128/int8", "32/8/128/e4m3",
    "32/8/128/w4096", "16/2/192", "8/1/256", "16/8/256", "16/8/256/e4m3/w4096",
]  # fmt: skip
ROWS = (1, 2, 3, 4, 8, 16, 24, 32, 64, 100, 128, 200, 256)
TOKENS = (1, 30, 100, 300, 700, 1030, 2000, 4000, 15000, 30000, 60000, 128000)
BLOCK = 64
# What a captured step is told of its longest row.
LONGEST = 131072
MULTIPROCESSORS = 132
# Programs of a multiprocessor that splits make at most.
MOST_PROGRAMS = 16
# Bytes of a layer's keys and values at most, of all layers of a point, and what fills the L2 cache.
MOST_BYTES, ALL_BYTES, FLUSHED = 1.6e9, 1.6e9, 128 << 20
MICROSECONDS_PER_BYTE = 1 / 4.28e6
ALLOWED_MICROSECONDS = 8.0
# Between two ways to add up the same products in bfloat16.
_DIFFERENCE = 2e-2
# Logarithm of numbers of splits that take about the same.
_NEAR = 0.2


class Model(NamedTuple):
    """Heads of a model, and its cache and window."""

    heads: int
    kv_heads: int
    dim: int
    cache: str = "bf16"
    window: int | None = None

    @classmethod
    def named(cls, name: str) -> Model:
        """The model of ``heads/kv_heads/dim[/cache][/wWINDOW]``."""
        parts = name.split("/")
        cache = [part for part in parts[3:] if part in DTYPES]
        window = [int(part[1:]) for part in parts[3:] if part[0] == "w"]
        if len(parts) != 3 + len(cache) + len(window):
            raise ValueError(f"{name!r} is not heads/kv_heads/dim[/{'|'.join(DTYPES)}][/wWINDOW]")
        return cls(*map(int, parts[:3]), *(cache or ["bf16"]), *window)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """Name that :meth:`named` reads."""
        cache = "" if self.cache == "bf16" else f"/{self.cache}"
        window = "" if self.window is None else f"/w{self.window}"
        return f"{self.heads}/{self.kv_heads}/{self.dim}{cache}{window}"

    @property
    def dtype(self) -> torch.dtype:
        """Of the cache."""
        return DTYPES[self.cache]

    @property
    def shape(self) -> Heads:
        """Heads and their cache, as the space asks for them."""
        group = self.heads // self.kv_heads
        return Heads(group, self.kv_heads, (self.dim, self.dim), self.dtype.itemsize)

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values, scales included."""
        scales = SCALE_BYTES if self.dtype in CODE_TOPS else 0
        return 2 * self.kv_heads * (self.dim * self.dtype.itemsize + scales)


class Point(NamedTuple):
    """Rows of ``tokens`` each, or of 0.2 to 1.8 times as many."""

    model: Model
    rows: int
    tokens: int
    unequal: bool

    @property
    def name(self) -> str:
        """Name that tells it from all others."""
        return f"{self.model.name} {self.rows}x{self.tokens}{'~' if self.unequal else ''}"

    @classmethod
    def named(cls, name: str) -> Point:
        """The point of a :attr:`name`."""
        model, _, size = name.partition(" ")
        rows, _, tokens = size.rstrip("~").partition("x")
        return cls(Model.named(model), int(rows), int(tokens), size.endswith("~"))

    @property
    def lengths(self) -> list[int]:
        """Of its rows, the longest first, as the engine orders them."""
        if not self.unequal:
            return [self.tokens] * self.rows
        drawn = random.Random(self.name)
        lengths = (int(self.tokens * drawn.uniform(0.2, 1.8)) for _ in range(self.rows))
        return sorted((max(1, min(n, LONGEST)) for n in lengths), reverse=True)

    @property
    def bytes(self) -> int:
        """Of the keys and values that are seen."""
        window = self.model.window or LONGEST
        return sum(min(n, window) for n in self.lengths) * self.model.token_bytes

    @property
    def seen(self) -> int:
        """Tokens of a row that are seen, on average."""
        return max(1, self.bytes // self.model.token_bytes // self.rows)


def drawn_points(models: list[Model], count: int, seed: int) -> list[Point]:
    """``count`` points of all whose cache is not too large, in an order drawn by ``seed``."""
    points = [
        Point(model, rows, tokens, unequal)
        for model in models
        for rows in ROWS
        for tokens in TOKENS
        for unequal in (False, True)
        if rows * tokens * model.token_bytes <= MOST_BYTES / 1.3
        and not (unequal and (rows == 1 or tokens < 30))
    ]
    random.Random(seed).shuffle(points)
    return points[:count]


def chosen(point: Point) -> decode.Launch:
    """The engine's choice."""
    heads = point.model.shape
    return decode.launch(
        point.rows, heads.group_size, heads.kv_heads, max(heads.widths), heads.widths[1],
        heads.bytes, MULTIPROCESSORS, heads.rests,
    )  # fmt: skip


def tiles_of(point: Point, block_n: int) -> list[int]:
    """Tiles of each row, the part of one before the window included."""
    window = point.model.window or LONGEST
    return [-(-(n - max(0, n - window) // block_n * block_n) // block_n) for n in point.lengths]


def plan_of(point: Point, launch: decode.Launch) -> Plan:
    """The plan that a step makes of the point."""
    rows = tiles_of(point, launch.block_n)
    pieces = launch.pieces or chosen_pieces(rows, launch)
    return plan(rows, pieces)


def space(point: Point) -> Iterator[decode.Launch]:
    """All ways to cut the point that are worth a try."""
    heads = point.model.shape
    for tile in tiles(heads):
        rows, made = tiles_of(point, tile.block_n), set()
        launch = cut_by(heads, point.rows, tile, MULTIPROCESSORS)
        for pieces in PIECES:
            planned = plan(rows, pieces)
            programs = planned.count * heads.programs
            if planned in made or (made and programs > MOST_PROGRAMS * MULTIPROCESSORS):
                continue
            # Where a quarter of the multiprocessors would be at work more pieces are better.
            few = 4 * programs <= MULTIPROCESSORS and max(rows) * tile.block_n >= 64 * pieces
            if few and pieces < 4 * decode.most_splits(point.rows):
                continue
            made.add(planned)
            yield launch._replace(pieces=pieces, items=planned.count)


def compiled_for(launch: decode.Launch) -> decode.Launch:
    """The launch with what its kernel is not compiled for left out."""
    return launch._replace(
        pieces=0,
        items=1,
        held=1.0,
        turns=1,
        tile_us=1.0,
        read_us=1.0,
        sharing=0.0,
        waiting=0.0,
        warps=0.0,
        shared=0,
        even=False,
        last_from=0,
    )


def ways(point: Point) -> list[decode.Launch]:
    """The engine's choice, then all others in an order of their own."""
    others = list(space(point))
    random.Random(point.name).shuffle(others)
    return list(dict.fromkeys([chosen(point), *others]))


def filled(dtype: torch.dtype, size: int, device: str) -> Tensor:
    """Numbers of a cache, or codes none of which is NaN."""
    if dtype == torch.int8:
        return torch.randint(-127, 128, (size,), dtype=dtype, device=device)
    return torch.randn(size, dtype=torch.bfloat16, device=device).to(dtype)


class Layers:
    """Attention of one token of each row in several layers, each with keys of its own."""

    def __init__(self, point: Point, pools: tuple[Tensor, Tensor], device: str) -> None:
        model, lengths = point.model, point.lengths
        width = model.dim + (SCALE_BYTES if model.dtype in CODE_TOPS else 0)
        needed = [-(-n // BLOCK) for n in lengths]
        blocks = sum(needed)
        size = blocks * BLOCK * model.kv_heads * width
        count = max(1, min(6, len(pools[0]) // size, int(ALL_BYTES / max(1, point.bytes))))
        caches = [
            [
                pool[i * size : (i + 1) * size].view(blocks, BLOCK, model.kv_heads, width)
                for i in range(count)
            ]
            for pool in pools
        ]
        self.parts = []
        for pair in zip(*caches, strict=True):
            parts = [cache_parts(cache) for cache in pair]
            for _, scales in parts:
                if scales is not None:
                    # Powers of 2, whose bytes are no NaN if another point has codes there.
                    scales.fill_(1.0 if model.cache == "e4m3" else 2.0**-6)
            self.parts.append(parts)
        tables = torch.zeros(point.rows, max(needed), dtype=torch.int32)
        for row, part in enumerate(torch.randperm(blocks).int().split(needed)):
            tables[row, : len(part)] = part
        self.q = torch.randn(
            point.rows, model.heads, model.dim, dtype=torch.bfloat16, device=device
        )
        self.out = torch.empty_like(self.q)
        self.tables = tables.to(device)
        self.query_start = torch.arange(point.rows + 1, dtype=torch.int32, device=device)
        self.kv_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.model = model

    def run(self, cut: decode.Launch, memo: dict[Any, Any], count: int | None = None) -> None:
        """Launch ``count`` layers, or all."""
        from engine_core.kernels.attention import triton as attention

        choose = decode.launch
        decode.launch = lambda *_: cut
        try:
            for (k, k_scales), (v, v_scales) in self.parts[:count]:
                call = Call(
                    self.q, k, v, self.out, self.tables, self.query_start, self.kv_lens, 1, LONGEST,
                    len(self.kv_lens), self.model.dim**-0.5, window=self.model.window, memo=memo,
                    k_scales=k_scales, v_scales=v_scales,
                )  # fmt: skip
                attention.paged_attention(call)
        finally:
            decode.launch = choose


class Timer(Protocol):
    """Clock of runs."""

    def microseconds(self, run: Callable[[], object]) -> float:
        """Of one run."""


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
        repeats = max(3, min(most, int(0.006 / (time.perf_counter() - begin))))
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


class HostClock:
    """Times of a dry run, which say nothing about a GPU."""

    def microseconds(self, run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - begin)


class Compiled(NamedTuple):
    """A kernel: seconds to make it, registers of a thread, bytes of a program's shared memory."""

    seconds: float
    registers: int
    shared: int
    error: str


def compile_one(model: Model, cut: decode.Launch, rows: int) -> Compiled:
    """Compile a kernel, in a process of compilers, and the plan of so many rows."""
    from engine_core.kernels.attention import triton as attention

    begin = time.perf_counter()
    try:
        point = Point(model, rows, 100, False)
        size = rows * BLOCK * model.token_bytes
        pools = (filled(model.dtype, size, "cuda"), filled(model.dtype, size, "cuda"))
        Layers(point, pools, "cuda").run(cut._replace(pieces=8, items=2 * rows), {}, 1)
        torch.cuda.synchronize()
        kernel = list(attention._decode_kernel.device_caches[0][0].values())[-1]
        return Compiled(time.perf_counter() - begin, kernel.n_regs, kernel.metadata.shared, "")
    except Exception as error:
        return Compiled(time.perf_counter() - begin, 0, 0, f"{type(error).__name__}: {error}"[:200])


Kernel = tuple[Model, decode.Launch]


def compile_all(points: list[Point], seconds: float) -> dict[Kernel, Compiled]:
    """Compile what the points need, in their order, in as many processes as there are cores.

    CUDA must not be there yet in this process, since others are forked from it. What is not done
    after ``seconds`` is left out, and compiled when it is timed.
    """
    begin = time.perf_counter()
    wanted: dict[Kernel, int] = {}
    plans = set()
    for point in points:
        for cut in ways(point):
            kernel = point.model, compiled_for(cut)
            rows = max(64, decode.power_of_2(point.rows))
            planned = rows, cut.block_n, point.model.window is None
            # The plan's kernel is for a power of 2 of rows: some kernel is compiled with it.
            wanted.setdefault(kernel, point.rows if planned not in plans else 2)
            if wanted[kernel] == point.rows:
                plans.add(planned)
    made: dict[Kernel, Compiled] = {}
    pool = ProcessPoolExecutor(
        max(1, (len(os.sched_getaffinity(0)) - 1)), mp_context=multiprocessing.get_context("fork")
    )
    jobs: dict[Kernel, Future[Compiled]] = {
        kernel: pool.submit(compile_one, *kernel, rows) for kernel, rows in wanted.items()
    }
    for kernel, job in jobs.items():
        try:
            made[kernel] = job.result(timeout=max(0.01, begin + seconds - time.perf_counter()))
        except TimeoutError:
            job.cancel()
        except (BrokenExecutor, CancelledError) as error:
            print(f"FAILED a process of compilers: {error!r}"[:200])
            break
    pool.shutdown(wait=True, cancel_futures=True)
    failed = [each for each in made.items() if each[1].error]
    for (model, cut), result in failed[:20]:
        print(f"FAILED {model.name} {cut}: {result.error}")
    print(
        f"{len(made) - len(failed)} of {len(wanted)} kernels of {len(points)} points in "
        f"{time.perf_counter() - begin:.0f} s, {sum(each.seconds for each in made.values()):.0f} s "
        "of processes",
        flush=True,
    )
    return made


def time_point(
    point: Point, pools: tuple[Tensor, Tensor], clock: Timer, most: float,
    broken: set[Kernel], device: str,
) -> dict[str, Any]:  # fmt: skip
    """Every way's microseconds a layer, and how far their results are apart.

    ``most`` seconds are taken; which ways are left out is chance.
    """
    begin = time.perf_counter()
    layers = Layers(point, pools, device)
    all_ways = [cut for cut in ways(point) if (point.model, compiled_for(cut)) not in broken]
    taken: dict[decode.Launch, float] = {}
    expected, difference = None, 0.0
    memos: dict[decode.Launch, dict[Any, Any]] = {}
    for done, cut in enumerate(all_ways):
        if done > 1 and time.perf_counter() - begin > most:
            break
        memo = memos.setdefault(cut, {})
        layers.run(cut, memo, 1)
        got = layers.out.float()
        if expected is None:
            expected = got
        # Not max(): it may lose a NaN.
        apart = (got - expected).abs().max().item()
        difference = apart if not apart <= difference else difference
        taken[cut] = clock.microseconds(lambda: layers.run(cut, memo)) / len(layers.parts)  # noqa: B023
    twice = []
    if all_ways:
        cut = all_ways[0]
        again = clock.microseconds(lambda: layers.run(cut, memos[cut])) / len(layers.parts)
        twice = [round(taken[cut], 3), round(again, 3)]
        taken[cut] = min(taken[cut], again)
    return {
        "point": point.name,
        "floor": round(point.bytes * MICROSECONDS_PER_BYTE, 3),
        "difference": difference,
        "twice": twice,
        "ways": len(all_ways),
        "times": [[*cut, round(us, 3)] for cut, us in taken.items()],
        "seconds": round(time.perf_counter() - begin, 3),
    }


class Judged(NamedTuple):
    """A point's times: of the choice, of the best, and of its bytes; microseconds."""

    point: Point
    floor: float
    cut: decode.Launch
    us: float
    best: decode.Launch
    best_us: float


def time_of(point: Point, launch: decode.Launch, times: dict[decode.Launch, float]) -> float | None:
    """Time of a choice, by what is between plans that were timed; None: unknown."""
    if launch in times:
        return times[launch]
    planned = plan_of(point, launch)
    near: dict[Plan, float] = {}
    for each, us in times.items():
        if each[1:4] == launch[1:4]:
            made = plan_of(point, each)
            if made == planned and each.items == launch.items:
                # The same launch, of other costs. Programs without a split take time too.
                return us
            near[made] = us
    if planned in near:
        return near[planned]
    low = max((each for each in near if each.count < planned.count), default=None)
    high = min((each for each in near if each.count > planned.count), default=None)
    if low is None or high is None:
        # Beyond those that were timed, but near enough.
        only = low or high
        near_enough = only and abs(math.log(planned.count / only.count)) < _NEAR
        return near[only] if only and near_enough else None
    part = math.log(planned.count / low.count) / math.log(high.count / low.count)
    return near[low] * (1 - part) + near[high] * part


def judged(line: dict[str, Any]) -> Judged | None:
    """A point of a file by the engine's choice as it is now; None if its time is not known."""
    point = Point.named(line["point"])
    times = {decode.Launch(*each[:-1]): float(each[-1]) for each in line["times"]}
    us = time_of(point, chosen(point), times)
    if us is None:
        return None
    best = min(times, key=lambda cut: times[cut])
    return Judged(point, float(line["floor"]), chosen(point), us, best, times[best])


def summary(lines: Iterable[dict[str, Any]], most: int = 18) -> int:
    """Print the worst points, and how many are within the bounds; returns how many are not."""
    points = [each for each in map(judged, lines) if each is not None]
    if not points:
        return 0
    ratios = [(each.us / each.best_us, each) for each in points]
    ratios.sort(key=lambda pair: pair[0], reverse=True)
    far = sum(ratio > 1.05 for ratio, _ in ratios)
    mean = math.exp(statistics.mean(math.log(ratio) for ratio, _ in ratios))
    print(
        f"{len(points) - far} of {len(points)} points within 5% of the best of the space, "
        f"{mean:.3f} times it on average; the furthest:"
    )
    for ratio, each in ratios[:most]:
        print(
            f"  {ratio:5.2f} {each.point.name:30} {each.us:7.1f} best {each.best_us:7.1f} bytes "
            f"{each.floor:7.1f}  {tuple(each.cut[1:])} best {tuple(each.best[1:])}"
        )
    within, at_best = (
        sum(us <= each.floor + ALLOWED_MICROSECONDS for us, each in taken)
        for taken in ([(e.us, e) for e in points], [(e.best_us, e) for e in points])
    )
    print(
        f"{within} of {len(points)} within their bytes and {ALLOWED_MICROSECONDS:.0f} us, "
        f"{at_best} at best; the furthest:"
    )
    for each in sorted(points, key=lambda each: each.floor - each.us)[: most // 2]:
        print(
            f"  {each.us - each.floor:6.1f} {each.point.name:30} {each.us:7.1f} best "
            f"{each.best_us:7.1f} bytes {each.floor:7.1f}"
        )
    return far


def read(path: Path | None) -> list[dict[str, Any]]:
    """The points of a file, or none."""
    if path is None or not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [line for line in lines if "point" in line]


def search(
    *, models: list[Model] | None = None, count: int = 200, seed: int = 25, seconds: float = 340,
    compile_seconds: float = 130, each: float = 1.5, out: Path | None = None,
    at: list[Point] | None = None,
) -> int:  # fmt: skip
    """Time the points on a GPU; returns how many are more than 5% off the best, or wrong.

    ``seconds`` bounds all of it: no point is begun after. ``at`` are the points; None to draw them.
    """
    import triton  # before the compilers are forked

    from engine_core.kernels.attention import triton as _  # noqa: F401

    begin = time.perf_counter()
    lines = read(out)
    known = {line["point"] for line in lines}
    models = models or [Model.named(name) for name in MODELS]
    points = [p for p in at or drawn_points(models, count, seed) if p.name not in known]
    made = compile_all(points, compile_seconds) if points else {}
    broken = {kernel for kernel, result in made.items() if result.error}
    if out:
        with out.open("a") as file:
            for (model, cut), result in made.items():
                print(json.dumps({"kernel": [model.name, *cut, *result]}), file=file)
    pools: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
    failures = 0
    with torch.cuda.stream(torch.cuda.Stream()):
        clock = Clock()
        print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
        for number, point in enumerate(points):
            if time.perf_counter() - begin > seconds:
                print(f"out of time: {number} of {len(points)} points")
                break
            dtype = point.model.dtype
            if dtype not in pools:
                size = int(MOST_BYTES) // dtype.itemsize
                pools[dtype] = filled(dtype, size, "cuda"), filled(dtype, size, "cuda")
            try:
                line = time_point(point, pools[dtype], clock, each, broken, "cuda")
            except Exception as error:
                # One broken point must not hide the others: this machine may be lent for minutes.
                print(f"FAILED {point.name}: {type(error).__name__}: {error}"[:300], flush=True)
                failures += 1
                if failures == 5:
                    break
                continue
            lines.append(line)
            if out:
                with out.open("a") as file:
                    print(json.dumps(line), file=file)
            if number % 20 == 0:
                print(f"{number} points, {time.perf_counter() - begin:.0f} s", flush=True)
    return summary(lines) + wrong(lines) + failures


def wrong(lines: list[dict[str, Any]]) -> int:
    """Name points whose ways do not agree; returns how many there are."""
    found = [line for line in lines if not line["difference"] < _DIFFERENCE]
    for line in found[:5]:
        print(f"WRONG by {line['difference']:.1e}: {line['point']}")
    return len(found)


def dry_run(names: list[str]) -> int:
    """Run small points of some models in Triton's interpreter; returns how many are wrong."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))
    from interpreter import quicken  # type: ignore[import-not-found]

    quicken()  # and exact: the interpreter alone takes integers for the bits of bfloat16
    lines = []
    for name in names:
        point = Point(Model.named(name), 2, 150, True)
        size = 6 * BLOCK * point.model.token_bytes
        pools = filled(point.model.dtype, size, "cpu"), filled(point.model.dtype, size, "cpu")
        line = time_point(point, pools, HostClock(), 60, set(), "cpu")
        lines.append(json.loads(json.dumps(line)))
        print(f"{point.name}: {len(line['times'])} ways, apart by {line['difference']:.1e}")
    unjudged = sum(judged(line) is None for line in lines)
    return wrong(lines) + unjudged


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="lines of JSON with all times; added to")
    parser.add_argument("--replay", type=Path, help="times that --out took; nothing is timed")
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--seed", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=340, help="begin no point after these")
    parser.add_argument("--compile-seconds", type=float, default=130)
    parser.add_argument("--each", type=float, default=1.5, help="seconds of a point at most")
    parser.add_argument("--models", help="heads/KV heads/dimensions[/cache][/wWINDOW],...")
    parser.add_argument("--at", help="points by name, separated by commas")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    names = args.models.split(",") if args.models else None
    if args.replay:
        return 1 if summary(read(args.replay)) else 0
    if args.dry_run:
        return 1 if dry_run(names or ["14/2/64", "32/2/96/w60"]) else 0
    failed = search(
        models=[Model.named(name) for name in names] if names else None,
        count=args.points, seed=args.seed, seconds=args.seconds,
        compile_seconds=args.compile_seconds, each=args.each, out=args.out,
        at=[Point.named(name) for name in args.at.split(",")] if args.at else None,
    )  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
