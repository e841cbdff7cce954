"""Time linears of 4-bit and 8-bit codes with every tile of a space, beside today's choice.

    python benchmarks/linears_search.py [--out FILE] [--cases int4/32/28672x4096g,...]
        [--seconds S] [--compile-seconds S] [--each S] [--dry-run]

A case is a kind of weight, rows of x and a shape ``NxK``, of gate and up with ``g``: Llama 3 8B's
four shapes, those cases first whose time counts most. Kinds: ``int4`` (groups of 128 with zeros),
``int8`` and ``e4m3`` (a scale a row). ``today`` is the engine's ``linear``, whatever it takes;
``bf16`` is the same by a bfloat16 weight, and ``numbers`` makes numbers of the codes first. The
floor is that of bytes at 4.28 TB/s or of products at 790 TFLOP/s, the larger.

Kernels are compiled first, in processes of their own that use no GPU. What was not done in time is
not timed. A time is that of one of several launches of a CUDA graph, whose weights take turns so
that none is in the L2 cache; results that differ from the first tile's are named. ``--out`` takes a
line of JSON for each case, with all times; cases that it has already are not timed again.
``--dry-run`` runs small shapes in Triton's interpreter, on any machine, and times nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Future, ProcessPoolExecutor
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decode_search import Clock, HostClock, Timer
from engine_core.kernels.gpu import GPU
from engine_core.kernels.linear import CodedWeight, Fp8Weight, GroupWeight, linear
from engine_core.kernels.linear.tiles import Tile

BITS = {"int4": 4.0 + 24 / 128, "int8": 8.0, "e4m3": 8.0, "bf16": 16.0}
GROUP = 128
SHAPES = ("28672x4096g", "4096x14336", "6144x4096", "4096x4096")
# Kinds and rows, the most important first.
ORDER = (
    ("int4", 1), ("int4", 32), ("int4", 128), ("e4m3", 32), ("e4m3", 128), ("e4m3", 256),
    ("int4", 64), ("int4", 256), ("int4", 8), ("int4", 16), ("e4m3", 1), ("e4m3", 64), ("int8", 1),
    ("int8", 32), ("int8", 128), ("e4m3", 8), ("e4m3", 16), ("int8", 8), ("int8", 16),
    ("int8", 64), ("int8", 256),
)  # fmt: skip
HOPPER = GPU.of_capability((9, 0))
BYTES_PER_MICROSECOND, PRODUCTS_PER_MICROSECOND = 4.28e6, 395e6
# Of all weights that take turns; launches of a graph at least.
TURN_BYTES, LAUNCHES = 220e6, 8
# Of two ways to add up the same products in bfloat16, times the largest result.
_DIFFERENCE = 2e-2


class Case(NamedTuple):
    """Rows of x by a weight ``[n, k]`` of a kind, whose first half is a gate if ``gated``."""

    kind: str
    rows: int
    n: int
    k: int
    gated: bool

    @classmethod
    def named(cls, name: str) -> Case:
        """The case of ``KIND/ROWS/NxK[g]``.

        Raises:
            ValueError: it is not of that form.
        """
        try:
            kind, rows, shape = name.split("/")
            n, k = map(int, shape.removesuffix("g").split("x"))
            case = cls(kind, int(rows), n, k, shape.endswith("g"))
        except ValueError:
            case = None
        if case is None or case.kind not in BITS or case.rows < 1 or case.k % GROUP:
            raise ValueError(
                f"{name!r} is not KIND/ROWS/NxK or KIND/ROWS/NxKg: kinds are {', '.join(BITS)}, "
                f"and K is a multiple of {GROUP}"
            )
        return case

    @property
    def name(self) -> str:
        """Name that :meth:`named` reads."""
        return f"{self.kind}/{self.rows}/{self.n}x{self.k}{'g' if self.gated else ''}"

    @property
    def bytes(self) -> float:
        """Of the weight."""
        return self.n * self.k * BITS[self.kind] / 8

    @property
    def floor(self) -> float:
        """Microseconds."""
        products = self.rows * self.n * self.k / PRODUCTS_PER_MICROSECOND
        return max(self.bytes / BYTES_PER_MICROSECOND, products)


def default_cases() -> list[Case]:
    """All cases, in their order."""
    return [Case.named(f"{kind}/{rows}/{shape}") for kind, rows in ORDER for shape in SHAPES]


def made_weight(case: Case, device: str) -> Tensor | CodedWeight:
    """A weight of random codes; on a CPU of any."""
    n, k = case.n, case.k
    filled = partial(torch.randint, device=device) if device != "meta" else None

    def codes(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if filled is None:
            return torch.empty(shape, dtype=dtype)
        return filled(low, high, shape, dtype=dtype)

    def floats(*shape: int, dtype: torch.dtype) -> Tensor:
        if filled is None:
            return torch.empty(shape, dtype=dtype)
        return (torch.rand(shape, device=device) * 0.01 + 0.005).to(dtype)

    if case.kind == "int4":
        words = codes(-(1 << 15), 1 << 15, (n, k // GROUP, 32), torch.int16)
        zeros = codes(0, 16, (k // GROUP, n), torch.int8)
        scales = floats(k // GROUP, n, dtype=torch.float16)
        return GroupWeight(words, scales, zeros, k, GROUP, torch.bfloat16)
    if case.kind == "int8":
        words = codes(-(1 << 31), 1 << 31, (n, k // GROUP, 32), torch.int32)
        scales = floats(n, dtype=torch.float32) / 16
        return GroupWeight(words, scales, None, k, 0, torch.bfloat16, quantizes_rows=True)
    if case.kind == "e4m3":
        # Bytes of finite numbers, of both signs.
        parts = codes(0, 127, (n, k), torch.int8)
        if filled is not None:
            parts += codes(-1, 1, (n, k), torch.int8) * -128
        scales = floats(n, dtype=torch.float32) / 16
        return Fp8Weight(parts.view(torch.float8_e4m3fn), scales, torch.bfloat16)
    if filled is None:
        return torch.empty(n, k, dtype=torch.bfloat16)
    return torch.randn(n, k, dtype=torch.bfloat16, device=device) * 0.02


def native_reader(weight: Any) -> Any:
    """The reader of a weight as a GPU has it, wherever the weight is."""
    if isinstance(weight, GroupWeight):
        from engine_core.kernels.linear.readers.triton import GroupReader

        return GroupReader.of(weight, native=True)
    import triton.language as tl

    return weight.reader()._replace(ELEMENT=tl.constexpr("bfloat16"))


def space(case: Case) -> Iterator[Tile]:
    """Tiles that are worth a try, the likelier first."""
    outputs = case.n // 2 if case.gated else case.n
    few = case.rows <= 64
    widths = (GROUP,) if case.kind == "int4" else (128, 256)
    forms = [(n, "wx", warps) for n in (64, 128) for warps in (4, 8) if n * 4 >= warps * 64]
    if not few:
        forms = [(64, "wx", 4), (128, "wx", 8), (128, "xw", 8), (64, "xw", 4), (128, "wx", 4)]
    if not few and case.kind != "int4":
        # cuBLAS has kernels for these: a few ways will do.
        forms, widths = forms[:3], (128,)
    most = [min(128, case.rows)] if few else [64, 128]
    if case.rows > 128:
        most.append(256)
    for rows in most:
        for splits in (4, 2, 8, 1):
            blocks = max(1, -(-case.rows // max(16, rows)))
            programs = -(-outputs // 64) * splits * blocks
            if splits > 1 and (case.k < 512 * splits or programs > HOPPER.num_multiprocessors * 20):
                continue
            more = splits < 8 and case.k >= 1024 * splits
            if programs * 2 < HOPPER.num_multiprocessors and more:
                continue
            for block_n, mode, warps in forms:
                for block_k in widths:
                    for stages in (4, 6) if few else (3, 4):
                        most_m = 128 if few else rows
                        yield Tile(block_n, block_k, splits, mode, warps, stages, 256, 16, most_m)
    if case.rows == 1:
        wide = ((16, 128), (32, 128)) if case.kind == "int4" else ((8, 512), (8, 1024), (4, 2048))
        for block_n, block_k in wide:
            for splits in (1, 2, 4):
                if case.k % (block_k * splits):
                    continue
                for stages in (3, 5):
                    yield Tile(block_n, block_k, splits, "vector", 4, stages, 256)


def chosen_tile(case: Case) -> Tile | None:
    """The tile that the engine takes on an H200."""
    weight = made_weight(case, "meta")
    assert isinstance(weight, CodedWeight), "a case is of codes"
    return weight.tile(case.rows, case.gated, HOPPER)


def ways(case: Case) -> list[Tile]:
    """The engine's tile, if it has one, then all others."""
    chosen = chosen_tile(case)
    first = [] if chosen is None else [chosen]
    # What is fetched ahead is no part of a kernel, and tried with the best tiles alone.
    return list(dict.fromkeys([*first, *space(case)]))


def multiply(x: Tensor, weight: Any, case: Case, tile: Tile) -> Tensor:
    """``x`` by the weight with a tile."""
    from engine_core.kernels.linear import triton as kernels

    epilogue = kernels.Activated.of(x, case.n, case.gated, None)
    return kernels.linear(x, native_reader(weight), epilogue, tile)


class Kernel(NamedTuple):
    """Key of a compiled kernel: rows as a block of them, the columns that matter, a tile."""

    kind: str
    rows: int
    n: int
    k: int
    gated: bool
    tile: Tile


def kernel_of(case: Case, tile: Tile) -> Kernel:
    """The kernel of a case, under the name of the shape that is compiled for it."""
    rows = 1
    if tile.mode != "vector":
        rows = min(tile.most_rows, max(tile.least_rows, 1 << (case.rows - 1).bit_length()))
    narrow = case.k if case.kind == "int4" else case.k % (tile.block_k * tile.splits)
    return Kernel(case.kind, rows, 0, narrow, case.gated, replace(tile, prefetch=0, most_rows=0))


class AbsentGPU:
    """An H200 for Triton's compiler, in processes that have none."""

    def get_current_target(self) -> Any:
        """The target."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """None."""
        return 0


_FOUND: list[Any] = []


def begin_compiler() -> None:
    """In a process of compilers: each launch only compiles, into Triton's cache on the disk."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from engine_core.kernels.linear import triton as kernels

    torch.set_num_threads(1)
    driver.set_active(AbsentGPU())
    kernels.pdl_options = lambda device: {"PDL": True, "launch_pdl": True}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        _FOUND.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only


class Compiled(NamedTuple):
    """A kernel: seconds to make it, bytes of a program's shared memory, what went wrong."""

    seconds: float
    shared: int
    error: str


def compile_one(case: Case, tile: Tile) -> Compiled:
    """Compile a kernel, in a process of compilers."""
    begin = time.perf_counter()
    try:
        x = torch.empty(case.rows, case.k, dtype=torch.bfloat16)
        multiply(x, made_weight(case, "meta"), case, tile)
        kernel = _FOUND.pop()
        _FOUND.clear()
        shared = kernel.metadata.shared
        error = "too much shared memory" if shared > HOPPER.shared_memory else ""
        return Compiled(time.perf_counter() - begin, shared, error)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"[:200]
        return Compiled(time.perf_counter() - begin, 0, said)


def compile_all(cases: list[Case], seconds: float) -> dict[Kernel, Compiled]:
    """Compile what the cases need, in their order, for so many seconds, on all cores but one."""
    begin = time.perf_counter()
    wanted: dict[Kernel, tuple[Case, Tile]] = {}
    for case in cases:
        for tile in ways(case):
            wanted.setdefault(kernel_of(case, tile), (case, tile))
    pool = ProcessPoolExecutor(
        max(1, len(os.sched_getaffinity(0)) - 1),
        mp_context=multiprocessing.get_context("fork"),
        initializer=begin_compiler,
    )
    jobs: dict[Kernel, Future[Compiled]] = {
        kernel: pool.submit(compile_one, *each) for kernel, each in wanted.items()
    }
    made: dict[Kernel, Compiled] = {}
    for kernel, job in jobs.items():
        try:
            made[kernel] = job.result(timeout=max(0.01, begin + seconds - time.perf_counter()))
        except TimeoutError:
            job.cancel()
        except (BrokenExecutor, CancelledError) as error:
            print(f"FAILED a process of compilers: {error!r}"[:200])
            break
    pool.shutdown(wait=True, cancel_futures=True)
    failed = {kernel: each for kernel, each in made.items() if each.error}
    for kernel, each in list(failed.items())[:20]:
        print(f"FAILED {kernel}: {each.error}")
    print(
        f"{len(made) - len(failed)} of {len(wanted)} kernels of {len(cases)} cases in "
        f"{time.perf_counter() - begin:.0f} s, {sum(each.seconds for each in made.values()):.0f} s "
        "of processes",
        flush=True,
    )
    return made


class Weights:
    """As many weights as do not fit into the L2 cache, which take turns."""

    def __init__(self, case: Case, device: str, turn_bytes: float) -> None:
        count = max(2, min(24, round(turn_bytes / case.bytes)))
        self.case = case
        self.all = [made_weight(case, device) for _ in range(count)]
        self.x = torch.randn(case.rows, case.k, dtype=torch.bfloat16, device=device)
        self.launches = max(LAUNCHES if turn_bytes > 1 else 1, count)

    def run(self, multiply_one: Any) -> None:
        """Launch by each in turn."""
        for turn in range(self.launches):
            multiply_one(self.x, self.all[turn % len(self.all)])

    def microseconds(self, clock: Timer, multiply_one: Any) -> float:
        """Of one launch."""
        return round(clock.microseconds(lambda: self.run(multiply_one)) / self.launches, 3)


def time_case(
    case: Case, made: dict[Kernel, Compiled] | None, clock: Timer, most: float, device: str,
    tiles: list[Tile], turn_bytes: float = TURN_BYTES,
) -> dict[str, Any]:  # fmt: skip
    """Microseconds of each way and of what it is compared with; ``most`` seconds are taken.

    Only kernels that were ``made`` are timed; None for any.
    """
    begin = time.perf_counter()
    weights = Weights(case, device, turn_bytes)
    engine = partial(linear, gated=case.gated)

    def by_numbers(x: Tensor, weight: Any) -> Tensor:
        return linear(x, weight.numbers(x.dtype), gated=case.gated)

    times: list[list[Any]] = []
    wrong: list[str] = []
    line: dict[str, Any] = {"case": case.name, "floor": round(case.floor, 2)}
    named: dict[str, Any] = {"today": engine}
    if case.rows >= 64:
        named["numbers"] = by_numbers
    for name, way in named.items():
        way(weights.x, weights.all[0])
        line[name] = weights.microseconds(clock, way)
    expected = engine(weights.x, weights.all[0]).float()
    largest = expected.abs().max().item()
    line["largest"] = round(largest, 3)

    def timed(tile: Tile) -> float | None:
        way = partial(multiply, case=case, tile=tile)
        try:
            got = way(weights.x, weights.all[0]).float()
            apart = (got - expected).abs().max().item() / largest
            # e4m3 and int8 of many rows are quantised today: those differ.
            if not apart < (0.1 if case.kind != "int4" else _DIFFERENCE):
                wrong.append(f"{astuple(tile)}: {apart:.1e}")
            return weights.microseconds(clock, way)
        except Exception as error:
            if "illegal" in str(error) or "device-side" in str(error):
                raise
            print(f"FAILED {case.name} {tile}: {type(error).__name__}: {error}"[:300], flush=True)
            return None

    for tile in tiles:
        kernel = kernel_of(case, tile)
        if made is not None and (kernel not in made or made[kernel].error):
            continue
        if time.perf_counter() - begin > most:
            break
        us = timed(tile)
        if us is not None:
            times.append([*astuple(tile), us])
    times.sort(key=lambda each: each[-1])
    # Fetched ahead: of the two best.
    for best in [Tile(*each[:-1]) for each in times[:2]]:
        for prefetch in (0, 512, 1024):
            us = timed(replace(best, prefetch=prefetch))
            if us is not None:
                times.append([*astuple(replace(best, prefetch=prefetch)), us])
    times.sort(key=lambda each: each[-1])
    line |= {"times": times, "wrong": wrong, "seconds": round(time.perf_counter() - begin, 2)}
    return line


def bf16_time(case: Case, clock: Timer, device: str) -> float:
    """Microseconds by a bfloat16 weight."""
    weights = Weights(case._replace(kind="bf16"), device, 2 * TURN_BYTES)
    way = partial(linear, gated=case.gated)
    way(weights.x, weights.all[0])
    return weights.microseconds(clock, way)


def report(line: dict[str, Any]) -> None:
    """Print a case: today's choice, the best, bfloat16 and the floor, in microseconds."""
    numbers = f" numbers {line['numbers']:7.2f}" if "numbers" in line else ""
    print(
        f"{line['case']:22} today {line['today']:7.2f}{numbers} bf16 {line.get('bf16', 0):7.2f} "
        f"floor {line['floor']:6.2f} of {len(line['times'])}:",
        flush=True,
    )
    for each in line["times"][:4]:
        print(f"    {each[-1]:7.2f} {','.join(map(str, each[:-1]))}", flush=True)
    for each in line["wrong"][:4]:
        print(f"    WRONG by {each}", flush=True)


def read(path: Path | None) -> list[dict[str, Any]]:
    """The cases of a file, or none."""
    if path is None or not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [line for line in lines if "case" in line]


def search(
    cases: list[Case], *, seconds: float, compile_seconds: float, each: float, out: Path | None
) -> int:
    """Time the cases on a GPU; returns how many failed or had wrong results.

    ``seconds`` bounds the timing: no case is begun after.
    """
    import triton  # before the compilers are forked

    from engine_core.kernels.linear import triton as _  # noqa: F401

    known = {line["case"] for line in read(out)}
    cases = [case for case in cases if case.name not in known]
    made = compile_all(cases, compile_seconds)
    begin = time.perf_counter()
    failures = 0
    dense: dict[tuple[int, int, int], float] = {}
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        clock = Clock()
        print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
        for number, case in enumerate(cases):
            if time.perf_counter() - begin > seconds:
                print(f"out of time: {number} of {len(cases)} cases")
                break
            try:
                line = time_case(case, made, clock, each, "cuda", ways(case))
                key = case.rows, case.n, case.k
                if key not in dense:
                    dense[key] = bf16_time(case, clock, "cuda")
                line["bf16"] = dense[key]
            except Exception as error:
                # One broken case must not hide the others: this machine may be lent for minutes.
                print(f"FAILED {case.name}: {type(error).__name__}: {error}"[:300], flush=True)
                failures += 1
                if failures == 5:
                    break
                continue
            report(line)
            failures += bool(line["wrong"])
            if out:
                with out.open("a") as file:
                    print(json.dumps(line), file=file)
    return failures


def dry_run() -> int:
    """Run small shapes in Triton's interpreter; returns how many are wrong."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))
    from interpreter import quicken  # type: ignore[import-not-found]

    quicken()  # and exact: the interpreter alone takes integers for the bits of bfloat16
    globals()["native_reader"] = lambda weight: weight.reader()
    wrong = 0
    for kind in ("int4", "int8", "e4m3"):
        for rows, shape in ((1, "128x1024g"), (2, "64x1024"), (70, "128x512g")):
            case = Case.named(f"{kind}/{rows}/{shape}")
            tiles = list(space(case))
            some = [*tiles[:2], tiles[-1]]
            line = time_case(case, None, HostClock(), 60, "cpu", some, turn_bytes=1)
            line["bf16"] = bf16_time(case, HostClock(), "cpu")
            report(json.loads(json.dumps(line)))
            wrong += bool(line["wrong"]) or len(line["times"]) < len(some)
    return wrong


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="lines of JSON with all times; added to")
    parser.add_argument("--cases", help="KIND/ROWS/NxK[g],...; all in their order if left out")
    parser.add_argument("--seconds", type=float, default=120, help="begin no case after these")
    parser.add_argument("--compile-seconds", type=float, default=100)
    parser.add_argument("--each", type=float, default=4, help="seconds of a case at most")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    cases = [Case.named(name) for name in args.cases.split(",")] if args.cases else default_cases()
    if args.dry_run:
        return 1 if dry_run() else 0
    failed = search(
        cases, seconds=args.seconds, compile_seconds=args.compile_seconds, each=args.each,
        out=args.out,
    )  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
