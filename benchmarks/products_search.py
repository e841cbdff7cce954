"""Time products of rows in 8-bit floats by 8-bit floats: cuBLAS, and Hopper's kernel by its tiles.

    python benchmarks/products_search.py [--rows 32,128,160,...] [--processes 12] [--only NxK,...]

Llama 3 8B's linears, each with what follows it in a step: the activation of gate and up, the norm
of o and down, which adds up parts of K, and nothing for q, k and v. A time is that of one of
several in a CUDA graph, the least of a few runs; weights take turns, so that none is in the L2
cache.
A line has cuBLAS's time, that of the tile that ``choose_product_tile`` takes or would take if it
were asked, and that of the fastest tile; results that are further from float64 than cuBLAS's twice
are named. Kernels are compiled first, in processes of their own.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from engine_core.kernels.gpu import GPU
from engine_core.kernels.linear.fp8 import Fp8Weight
from engine_core.kernels.linear.tiles import (
    WIDE,
    ProductTile,
    choose_product_tile,
    product_rows,
    product_tile,
)
from engine_core.kernels.row_codes import FP8, CodedRows, RowForm

SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
ROWS = (1, 16, 32, 64, 96, 128, 144, 160, 192, 224, 256)
TURN_BYTES, LAUNCHES, RUNS = 260e6, 12, 5
MEMORY = 226 * 1024
HOPPER = GPU.of_capability((9, 0))


def space(rows: int, n: int, k: int) -> Iterator[ProductTile]:
    """Tiles that are worth a try."""
    padded = sum(product_rows(rows))
    for cols in (64, 128, 256):
        warps = 8 if cols == 256 or cols * padded > 128 * 192 else 4
        if cols * padded > 32 * warps * 192:
            continue
        for parts in (1, 2, 4, 8) if n == 4096 else (1,):
            programs = -(-n // cols) * parts
            if (programs < 48 and parts < 8) or (parts > 1 and programs > 300) or k < 512 * parts:
                continue
            for together in (1, 2, 3):
                stages = min(8, MEMORY // together // ((cols + padded) * 128))
                if stages >= 3 and (together == 1 or programs > HOPPER.num_multiprocessors):
                    yield ProductTile(cols, parts, stages, warps)


def variants(all_rows: list[int], shapes: list[tuple[int, int]]) -> list[tuple[Any, ...]]:
    """The cases that kernels are compiled for, once each."""
    found = {}
    for rows in all_rows:
        for n, k in shapes:
            for tile in (*space(rows, n, k), product_tile(rows, n, k, HOPPER, parted=n == 4096)):
                kind = "parts" if tile.parts > 1 else "scaled" if n > WIDE else "plain"
                found[sum(product_rows(rows)), tile._replace(parts=1), kind] = (rows, tile, kind)
    return list(found.values())


def compile_some(given: list[tuple[Any, ...]]) -> None:
    """Launch each once by a small weight."""
    from engine_core.kernels.linear.fp8.hopper import triton as hopper

    for rows, tile, kind in given:
        x = torch.zeros(rows, 1024, device="cuda").to(FP8)
        weight = torch.zeros(512, 1024, device="cuda").to(FP8)
        scales = [torch.zeros(512, device="cuda")] * 2 if kind == "scaled" else [None, None]
        if kind == "parts":
            hopper.sums_of_parts(x, weight, tile)
        else:
            hopper.product(x, scales[0], weight, scales[1], None, tile, torch.bfloat16)
    torch.cuda.synchronize()


def compile_all(given: list[tuple[Any, ...]], processes: int) -> None:
    """In several processes, whose machine code is kept on disk."""
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=compile_some, args=(given[i::processes],)) for i in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def microseconds(run: Callable[[int], object], turns: int) -> float:
    """Of one of several runs in a graph, each told a number below ``turns``."""
    count = max(LAUNCHES, turns)
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(count):
            run(turn % turns)
    graph.replay()
    times: list[float] = []
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3 / count)
    return min(times)


class Case:
    """Rows by several weights ``[n, k]``, and what follows the product."""

    def __init__(self, rows: int, n: int, k: int, weights: list[Fp8Weight]) -> None:
        """Random codes."""
        self.rows, self.n, self.k, self.weights = rows, n, k, weights
        self.x = CodedRows.of(torch.randn(rows, k, device="cuda").bfloat16(), RowForm(None, True))
        self.residual = torch.randn(rows, n, device="cuda").bfloat16()
        self.norm = torch.ones(n, device="cuda").bfloat16()
        self.one = torch.ones((), device="cuda")
        self.exact: Tensor | None = None

    def follow(self, parts: Tensor, weight: Fp8Weight) -> None:
        """Launch what a step has after the product."""
        from engine_core.kernels.activation import triton as activation
        from engine_core.kernels.norm import triton as norm

        form = RowForm(None, True)
        if self.n > WIDE:
            activation.act_and_mul_codes(parts[0], "silu", form)
        elif self.n == 4096:
            scales = (self.x.scales, weight.scales)
            norm.sum_add_norm(parts, None, self.residual, self.norm, 1e-5, scales=scales, form=form)

    def by_cublas(self, weight: Fp8Weight) -> Tensor:
        """``[1, rows, n]``, with scales if it is wide."""
        scales: tuple[Tensor, Tensor] = (self.one, self.one)
        if self.n > WIDE:
            scales = (self.x.scales.view(-1, 1), weight.scales.view(1, -1))
        out: Tensor = torch._scaled_mm(
            self.x.codes, weight.codes.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return out[None]

    def by_tile(self, weight: Fp8Weight, tile: ProductTile) -> Tensor:
        """``[parts, rows, n]``, with scales if it is wide."""
        from engine_core.kernels.linear.fp8.hopper import triton as hopper

        if tile.parts > 1:
            return hopper.sums_of_parts(self.x.codes, weight.codes, tile)
        scales = (self.x.scales, weight.scales) if self.n > WIDE else (None, None)
        given = (self.x.codes, scales[0], weight.codes, scales[1], None)
        return hopper.product(*given, tile, torch.bfloat16)[None]

    def choice(self) -> tuple[ProductTile, str]:
        """The tile by the rule, and a remark if cuBLAS is asked all the same."""
        shape, parted = (self.rows, self.n, self.k, HOPPER), self.n == 4096
        taken = choose_product_tile(*shape, parted=parted) is not None
        return product_tile(*shape, parted=parted), "" if taken else " (not taken)"

    def away(self, parts: Tensor) -> float:
        """How far a result of the first weight is from that in float64, relative to its norm."""
        if self.exact is None:
            weight = self.weights[0]
            self.exact = self.x.codes.float().double() @ weight.codes.float().double().T
            if self.n > WIDE:
                self.exact *= self.x.scales.double()[:, None] * weight.scales.double()
        return float((parts.double().sum(0) - self.exact).norm() / self.exact.norm())

    def time(self, run: Callable[[Fp8Weight], Tensor]) -> float:
        """Microseconds of a product and what follows."""

        def both(turn: int) -> None:
            self.follow(run(self.weights[turn]), self.weights[turn])

        return microseconds(both, len(self.weights))


def random_weights(n: int, k: int) -> list[Fp8Weight]:
    """As many as are more than the L2 cache holds several times over."""
    weights = []
    for _ in range(max(2, int(TURN_BYTES / (n * k)))):
        codes = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).to(FP8)
        scales = torch.rand(n, device="cuda") / 16
        weights.append(Fp8Weight(codes, scales, torch.bfloat16))
    return weights


def main() -> None:
    """Compile, then time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--only", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    args = parser.parse_args()
    all_rows = [int(rows) for rows in args.rows.split(",")]
    shapes = [(int(n), int(k)) for n, k in (name.split("x") for name in args.only.split(","))]
    compile_all(variants(all_rows, shapes), args.processes)
    gc.collect()
    gc.freeze()  # each capture collects what is not frozen
    for n, k in shapes:
        weights = random_weights(n, k)
        for rows in all_rows:
            case = Case(rows, n, k, weights)
            compare(case)


def compare(case: Case) -> None:
    """Time the ways and print them."""
    weight = case.weights[0]
    cublas = case.time(case.by_cublas)
    allowed = 2 * case.away(case.by_cublas(weight)) + 1e-4
    ruled, remark = case.choice()
    times, wrong = {}, []
    for tile in dict.fromkeys([ruled, *space(case.rows, case.n, case.k)]):
        try:
            away = case.away(case.by_tile(weight, tile))
            times[tile] = case.time(partial(case.by_tile, tile=tile))
        except Exception as error:  # such as one too large for a multiprocessor
            wrong.append(f"{tuple(tile)} {type(error).__name__}: {str(error)[:80]}")
            continue
        if not away <= allowed:
            wrong.append(f"{tuple(tile)} is off by {away:.2g}, allowed {allowed:.2g}")
    best = sorted(times, key=times.__getitem__)[:3]
    parts = [f"{case.n}x{case.k} {case.rows:4} rows: cuBLAS {cublas:.2f}"]
    if ruled in times:
        parts.append(f"rule {tuple(ruled)} {times[ruled]:.2f}{remark}")
    parts.append("best " + "; ".join(f"{tuple(tile)} {times[tile]:.2f}" for tile in best))
    print(", ".join(parts), *wrong, sep="\n  WRONG ", flush=True)


if __name__ == "__main__":
    main()
