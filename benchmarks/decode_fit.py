"""Fit the constants of the rule for decode attention to times that decode_search.py took.

    python benchmarks/decode_fit.py FILE [--tries 400] [--choices 40] [--seed 1]

First the model's times are fitted to those measured, the ways near a point's best counting most.
Then the constants are moved so that what the rule takes is near the best. Every second point, by
the order of the file, is held out: prints the constants, how far the model is off, and what the
rule takes of the points that were fitted and of those that were not. Needs no GPU.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decode_search import Point, effective, judged, read, time_of
from engine_core.kernels.attention import rule
from engine_core.kernels.attention.decode import Launch
from engine_core.kernels.attention.rule import H200, Machine, Tile

# An excess over the best that is as good as none: two runs of one way differ by as much.
_NOISE = 0.01


class Timed(NamedTuple):
    """A point and its times: of every launch, and of each tile and splits of a row."""

    point: Point
    times: dict[Launch, float]
    ways: list[tuple[Tile, int, float]]
    best: float


def timed(path: Path) -> list[Timed]:
    """The points of a file."""
    found = []
    for line in read(path):
        point = Point.named(line["point"])
        times = {Launch(*each[:-1]): float(each[-1]) for each in line["times"]}
        if times:
            ways = [(Tile(*cut[1:4]), effective(point, cut), us) for cut, us in times.items()]
            found.append(Timed(point, times, ways, min(times.values())))
    return found


def numbers(gpu: Machine) -> list[float]:
    """The constants in one list, without the multiprocessors."""
    return [*gpu[1:8], *gpu.token, *gpu.merge]


def machine(values: list[float]) -> Machine:
    """The constants of :func:`numbers`."""
    token, merge = (values[7], values[8]), (values[9], values[10])
    return Machine._make([H200.multiprocessors, *values[:7], token, merge])


def model_error(points: list[Timed], gpu: Machine) -> float:
    """Root of the mean square of the logarithm of modelled by measured times."""
    total = weights = 0.0
    for each in points:
        heads = each.point.model.shape
        for tile, splits, us in each.ways:
            weight = (each.best / us) ** 4
            modelled = rule.microseconds(heads, each.point.rows, each.point.seen, tile, splits, gpu)
            total += weight * math.log(modelled / us) ** 2
            weights += weight
    return math.sqrt(total / weights)


def excesses(points: list[Timed], gpu: Machine) -> list[float]:
    """Times of the rule by the best of each point's space; unknown ones are left out."""
    found = []
    for each in points:
        model = each.point.model
        us = time_of(
            each.point, rule.launch(model.shape, each.point.rows, model.window, gpu), each.times
        )
        if us is not None:
            found.append(us / each.best)
    return found


def choice_error(points: list[Timed], gpu: Machine) -> float:
    """Mean excess of the rule, each point that is more than 5% off counting thrice."""
    found = excesses(points, gpu)
    return statistics.mean(
        max(0.0, ratio - 1 - _NOISE) + 2 * max(0.0, ratio - 1.05) for ratio in found
    )


def descend(
    error: Callable[[Machine], float], gpu: Machine, tries: int, step: float, drawn: random.Random
) -> Machine:
    """Constants near ``gpu`` with a smaller error, by random steps that grow shorter."""
    least = error(gpu)
    for done in range(tries):
        length = step * (1 - 0.8 * done / tries)
        moved = [
            value * math.exp(drawn.gauss(0, length)) if drawn.random() < 0.3 else value
            for value in numbers(gpu)
        ]
        other = machine(moved)
        if (found := error(other)) < least:
            gpu, least = other, found
    return gpu


def report(name: str, points: list[Timed], gpu: Machine) -> None:
    """Print how far the model and the rule are off."""
    found = sorted(excesses(points, gpu))
    near = sum(ratio <= 1.05 for ratio in found)
    print(
        f"{name}: model off by {model_error(points, gpu):.3f}; rule within 5% in {near} of "
        f"{len(found)}, {statistics.geometric_mean(found):.3f} times the best, worst "
        f"{found[-1]:.2f}"
    )


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--tries", type=int, default=400)
    parser.add_argument("--choices", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    points = timed(args.file)
    if len(points) < 4:
        parser.error(f"{args.file} has {len(points)} points; 4 are needed at least")
    fitted, held = points[::2], points[1::2]
    for name, part in (("all", points), ("fitted", fitted), ("held out", held)):
        report(f"before, {name}", part, H200)
    table = [
        each.choices["table"][1] / each.best_us
        for each in map(judged, read(args.file))
        if each is not None and "table" in each.choices
    ]
    near = sum(ratio <= 1.05 for ratio in table)
    print(f"table: within 5% in {near} of {len(table)}, {statistics.geometric_mean(table):.3f}")
    drawn = random.Random(args.seed)
    gpu = descend(lambda gpu: model_error(fitted, gpu), H200, args.tries, 0.3, drawn)
    report("model fitted, fitted", fitted, gpu)
    report("model fitted, held out", held, gpu)
    gpu = descend(lambda gpu: choice_error(fitted, gpu), gpu, args.choices, 0.15, drawn)
    report("choices fitted, fitted", fitted, gpu)
    report("choices fitted, held out", held, gpu)
    print(gpu)
    return 0


if __name__ == "__main__":
    sys.exit(main())
