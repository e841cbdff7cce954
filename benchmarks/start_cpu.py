"""Time starts of `engine-core generate` on a CPU beside the import of torch, in turns.

    python benchmarks/start_cpu.py MODEL [--rounds 10] [--prompt Hello] [--tokens 1]
        [--trees BEFORE,AFTER]

Each round starts, in an order that is turned each time, a process that imports torch, prints and
ends, and one that generates so many tokens and ends, of each tree if there are several. A tree is
a checkout, with its plugins in ``plugins/``. It says when the first byte of output came and when
the process had ended, since it was started, by the clock and in processor seconds (user and system,
of the process and its children); ``inside`` is what the line ``import torch`` took there. What a
start takes beside that import is the median of the rounds' differences, by three definitions: to
the first byte of both, to the first byte but of the import what it took inside its process (so that
the interpreter's own start counts), and to the end of both. A process that only imports torch takes
half a second to end, which the engine leaves out.

The files are read once before, so that they are in the page cache, and Python's bytecode is
written. Processor seconds are what to compare where other processes are at work.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORT = """
import time
begin, cpu = time.perf_counter(), time.process_time()
import torch
print(time.perf_counter() - begin, time.process_time() - cpu, flush=True)
"""


@dataclass(frozen=True)
class Start:
    """Seconds since a process was started, by the clock and of processors."""

    first: tuple[float, float]
    end: tuple[float, float]
    output: str


def processor_seconds(process: int) -> float:
    """Seconds of processors that a process and its children have taken so far."""
    seconds = time.clock_gettime((~process << 3) | 2)  # the clock of another process, by its id
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        seconds += sum(map(processor_seconds, map(int, children.read_text().split())))
    return seconds


def run(command: Sequence[str], environment: dict[str, str]) -> Start:
    """Run a command that prints."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert process.stdout
    assert process.stderr
    output = os.read(process.stdout.fileno(), 1)
    first = time.perf_counter() - begin, processor_seconds(process.pid)
    output += process.stdout.read()
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    end = time.perf_counter() - begin, usage.ru_utime + usage.ru_stime
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with {process.returncode}: {errors.decode()}")
    return Start(first, end, output.decode())


def environment_of(tree: Path) -> dict[str, str]:
    """The environment in which a tree's packages are imported, and their bytecode is kept."""
    places = [tree, *sorted((tree / "plugins").iterdir())]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


def median(values: Sequence[tuple[float, float]]) -> str:
    """The medians of seconds by the clock and of processors, with the quarters of the former."""
    clock, processor = zip(*values, strict=True)
    low, middle, high = statistics.quantiles(clock, n=4) if len(clock) > 1 else clock * 3
    return f"{middle:6.2f} ({low:.2f} to {high:.2f}) {statistics.median(processor):6.2f}"


def main() -> None:
    """Time them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--prompt", default="Hello")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--trees", default=str(ROOT))
    arguments = parser.parse_args()
    program = shutil.which("engine-core", path=str(Path(sys.executable).parent))
    generate = [
        *([program] if program else [sys.executable, "-m", "engine_core.cli"]),
        *("generate", arguments.model, arguments.prompt),
        *("--max-tokens", str(arguments.tokens), "--temperature", "0"),
    ]
    trees = [Path(tree).resolve() for tree in arguments.trees.split(",")]
    kinds = {"import of torch": ([sys.executable, "-c", IMPORT], environment_of(trees[0]))}
    kinds |= {f"generate, {tree}": (generate, environment_of(tree)) for tree in trees}
    for command, environment in kinds.values():  # kernels and bytecode are kept from then on
        run(command, environment)
        run(command, environment)
    starts: dict[str, list[Start]] = defaultdict(list)
    for number in range(arguments.rounds):
        order = list(kinds)
        turn = number % len(order)
        for kind in order[turn:] + order[:turn]:
            starts[kind].append(run(*kinds[kind]))
    imports = starts["import of torch"]
    inside = [tuple(map(float, start.output.split())) for start in imports]
    print(
        f"s, medians of {arguments.rounds} (quarters), and processor seconds; load "
        f"{os.getloadavg()[0]:.1f}"
    )
    print(f"import of torch, inside      {median(inside)}")
    for kind, each in starts.items():
        print(f"{kind}")
        print(f"  to the first byte          {median([start.first for start in each])}")
        print(f"  to the end                 {median([start.end for start in each])}")
        if kind == "import of torch":
            continue
        pairs = list(zip(each, imports, inside, strict=True))
        print(
            f"  more, first bytes          {median([less(a.first, b.first) for a, b, _ in pairs])}"
        )
        print(f"  more, first byte to inside {median([less(a.first, c) for a, _, c in pairs])}")
        print(f"  more, ends                 {median([less(a.end, b.end) for a, b, _ in pairs])}")


def less(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """Both differences."""
    return one[0] - other[0], one[1] - other[1]


if __name__ == "__main__":
    main()
