"""Show what the device does in the workload of ``benchmarks/gpu.py``, and when it does nothing.

    python benchmarks/timeline.py qwen2_0_5b [--batches 1,256] [--quantization fp8]
        [--kv-cache-dtype fp8]

For each batch the workload's step time, as ``gpu.py`` has it; then its run of 129 tokens once more
with a profiler: how long decode steps take, from the first kernel of one to that of the next; what
they have between the choice of a token and the next step's first kernel; and how long the device
has nothing to do, with the longest gaps. A profiler makes the host slower, so gaps are longer with
it: they say where to look.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from benchmarks.gpu import build, release, runner, trace_events
from benchmarks.workloads import SHAPES
from engine_core import LLM
from engine_core.bench.workloads import measure as workload
from engine_core.bench.workloads import random_ids

# Of the kernels that a decode step begins with, and ends with.
FIRST, LAST = "_decode_inputs", ("_choose_greedy", "_settle")
PROMPT, TOKENS = 1024, 129
# Gaps that are shown.
LONGEST = 12


class Event(NamedTuple):
    """A kernel or a copy: its name, when it begins, and how long it takes; microseconds."""

    name: str
    begin: float
    length: float

    @property
    def end(self) -> float:
        """When it ends."""
        return self.begin + self.length


class Gap(NamedTuple):
    """Microseconds without a kernel or copy, from when on, and what comes then."""

    length: float
    begin: float
    before: str


def gaps(events: list[Event]) -> list[Gap]:
    """Times at which nothing runs between the first event and the last; events are in order."""
    found, end = [], events[0].begin
    for event in events:
        if event.begin > end:
            found.append(Gap(event.begin - end, end, event.name))
        end = max(end, event.end)
    return found


def decode_steps(events: list[Event]) -> list[list[Event]]:
    """The events of each decode step, from its first kernel to what comes before the next one's.

    A step with several cache groups has several such kernels, one behind the other. What comes
    behind the last step's begin is left out, since its end is not known.
    """
    begins = [
        index
        for index, event in enumerate(events)
        if FIRST in event.name and not (index and FIRST in events[index - 1].name)
    ]
    return [events[begin:end] for begin, end in pairwise(begins)]


def behind_choice(step: list[Event]) -> list[Event]:
    """Events of a step behind the choice of its tokens: copies, and steps of prompts beside it."""
    ends = [i for i, event in enumerate(step) if any(name in event.name for name in LAST)]
    return step[ends[-1] + 1 :] if ends else []


def profiled(llm: LLM, prompts: list[list[int]]) -> list[Event]:
    """All events of a run, in order."""
    with torch_profile(activities=[ProfilerActivity.CUDA], acc_events=True) as result:
        runner(llm)(prompts, [TOKENS] * len(prompts))
    found = trace_events(result, "kernel", "gpu_memcpy", "gpu_memset")
    return [Event(event["name"], event["ts"], event["dur"]) for event in found]


def show(events: list[Event]) -> None:
    """Print what a run's events say."""
    steps = decode_steps(events)
    times = [after[0].begin - step[0].begin for step, after in pairwise(steps)]
    if times:
        print(
            f"  {len(times)} decode steps from begin to begin, us: median {median(times):.1f}, "
            f"first {[round(each) for each in times[:4]]}, last {[round(e) for e in times[-4:]]}"
        )
    lengths: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for event in behind_choice(step):
            lengths[event.name[:40]].append(event.length)
    for name, each in sorted(lengths.items(), key=lambda item: -len(item[1]))[:6]:
        print(f"  behind the choice: {name}, {len(each)} times, median {median(each):.2f} us")
    idle = gaps(events)
    print(f"  idle {sum(gap.length for gap in idle) / 1e3:.3f} ms; the longest gaps:")
    for gap in sorted(idle, reverse=True)[:LONGEST]:
        at = (gap.begin - events[0].begin) / 1e3
        print(f"    {gap.length:8.1f} us at {at:9.2f} ms, before {gap.before[:50]}")


def measure(name: str, batches: list[int], options: dict[str, Any]) -> None:
    """Print the step time of each batch, and what a run of it shows."""
    vocab, draw = SHAPES[name]["vocab_size"], random.Random(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        build(name, Path(folder), deterministic=False, **options) as llm,
    ):
        run = runner(llm)
        run([[1000] * 64], [1])
        llm.warmup()
        figures = workload(run, vocab, batches=batches, mix=0)
        for batch in batches:
            print(f"{name}, {batch} rows: {figures[f'tpot_ms_b{batch}']:.4f} ms a step", flush=True)
            show(profiled(llm, [random_ids(PROMPT, vocab, draw) for _ in range(batch)]))
    release()


def main() -> None:
    """Show what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=list(SHAPES))
    parser.add_argument("--batches", default="1,256")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    options = {
        "quantization": arguments.quantization,
        "kv_cache_dtype": arguments.kv_cache_dtype,
    }
    measure(arguments.model, [int(part) for part in arguments.batches.split(",")], options)


if __name__ == "__main__":
    main()
