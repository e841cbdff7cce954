"""Time replays of decode graphs, with rows of equal and of very different lengths.

    python benchmarks/decode.py [llama3_8b] [qwen2_0_5b] [--batches 8,32,64,128,256] [--seconds 3]
        [--profile] [--quantization fp8|int4|int8 | --gguf Q4_K]

Weights and cache hold random values: with zeros a card takes less power, and so keeps a higher
clock. Replays are timed on the device, between CUDA events around 20 of them. There are no prompts,
and the host only sets the rows. Each figure has two values: the second 20 replays after a second of
rest, and the mean of the last half of ``--seconds`` of them without rest, when the card has warmed
up and its clocks have sunk. Clock and power are nvidia-smi's. The lengths are 1030 for all rows, or
drawn from 200 to 1860 with the longest first, as the scheduler puts them. The rows' blocks lie in
the cache as an engine that has just begun deals them out: the full ones row by row, then the last
of all rows in turn. ``--profile`` adds the time of each kernel in steps of equal rows, without
rest, and how kernels in the middle of a step overlap. The script uses private parts of the engine
to reach the graphs.
"""

from __future__ import annotations

import argparse
import itertools
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from benchmarks.gpu import build, by_kernel, release, trace_events
from benchmarks.workloads import SHAPES
from engine_core.kernels.codes import cache_parts
from engine_core.runtime.compiles import ALL

REPLAYS = 20
# Kernels of a step whose overlaps are printed: those of two layers or so.
KERNELS = 12
CLOCK_AND_POWER = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]


def replay_ms(graphs: Any, positions: list[int], seconds: float) -> tuple[float, float, str]:
    """Milliseconds of a greedy step whose rows compute tokens at these positions.

    Rested, and after ``seconds``; and nvidia-smi's clock and power then.
    """
    graphs.begin(list(range(len(positions))), positions)  # captured now, if it was not
    torch.cuda.synchronize()
    time.sleep(1)
    times: list[float] = []
    reading = None
    while sum(times) * REPLAYS < seconds * 1e3 or len(times) < 4:
        # Four rounds at a time: the device waits for the host after each fourth alone.
        events = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
        events[0].record()
        for event in events[1:]:
            graph = graphs.begin(list(range(len(positions))), positions).graph
            for _ in range(REPLAYS):
                graph.replay()
            event.record()
        events[-1].synchronize()
        times += [a.elapsed_time(b) / REPLAYS for a, b in itertools.pairwise(events)]
        if reading is None and sum(times) * REPLAYS > seconds * 500:
            reading = subprocess.Popen(CLOCK_AND_POWER, stdout=subprocess.PIPE, text=True)
    last = times[len(times) // 2 :]
    said = "" if reading is None else reading.communicate()[0].strip()
    return times[1], sum(last) / len(last), said


def placed(positions: list[int], block_size: int) -> torch.Tensor:
    """Block tables of rows that compute tokens at these positions and the next REPLAYS."""
    sizes = [(position + REPLAYS) // block_size + 1 for position in positions]
    full = [position // block_size for position in positions]
    tables = torch.zeros(len(sizes), max(sizes), dtype=torch.int32)
    dealt = itertools.count(1)
    for row, count in enumerate(full):
        tables[row, :count] = torch.tensor(list(itertools.islice(dealt, count)))
    for turn in range(REPLAYS // block_size + 2):
        for row, (size, count) in enumerate(zip(sizes, full, strict=True)):
            if count + turn < size:
                tables[row, count + turn] = next(dealt)
    return tables


def place_rows(runner: Any, positions: list[int]) -> None:
    """Give the first rows of an engine's runner these blocks."""
    (table,) = runner._tables
    blocks = placed(positions, table.block_size) % runner.kv_cache[0][0].shape[0]
    table.device_table[: len(positions), : blocks.shape[1]] = blocks.cuda()


def wait_for_kernels(runner: Any) -> None:
    """Return once all are compiled: until then steps launch others, which are compiled soon."""
    runner._decode_graphs._state.compiles.wait(ALL)


def fill_cache(runner: Any) -> None:
    """Give the cache of an engine's runner random numbers, or codes and a scale."""
    for cache in itertools.chain.from_iterable(runner.kv_cache):
        held, scales = cache_parts(cache)
        if scales is None:
            held.normal_()
        else:
            held.view(torch.int8).random_(0, 112)  # of e4m3 all numbers up to 128
            scales.fill_(0.01)


def profile(graph: torch.cuda.CUDAGraph) -> None:
    """Print how long each kernel of REPLAYS steps takes, and how often it runs."""
    with torch_profile(activities=[ProfilerActivity.CUDA]) as result:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    print(f"profile of {REPLAYS} steps\n{by_kernel(result)}", flush=True)
    print(overlaps(result), flush=True)


def overlaps(result: torch_profile) -> str:
    """Kernels in the middle of the last step: start after the end of the one before, and time.

    A start below 0 is an overlap: programs of the kernel had room beside those of the one before.
    """
    kernels = trace_events(result, "kernel")
    kernels = kernels[-(len(kernels) // REPLAYS) :]
    middle = len(kernels) // 2
    lines = ["start (us), time, programs, registers, shared memory, kernel"]
    for before, kernel in itertools.pairwise(kernels[middle - 1 : middle + KERNELS]):
        start = kernel["ts"] - before["ts"] - before["dur"]
        used = kernel["args"]
        sizes = [used.get(key) for key in ("grid", "registers per thread", "shared memory")]
        lines.append(f"{start:+8.2f} {kernel['dur']:7.2f}  {sizes}  {kernel['name'][:40]}")
    return "\n".join(lines)


@torch.inference_mode()
def measure(
    name: str,
    batches: list[int],
    seconds: float,
    folder: Path,
    *,
    profiled: bool,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    gguf: str | None = None,
) -> None:
    """Print one line per batch size."""
    options: dict[str, Any] = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    options["gguf"] = gguf
    with build(name, folder, deterministic=False, **options) as llm:
        runner = llm.engine.core.executor._runner
        graphs = runner._decode_graphs
        wait_for_kernels(runner)
        fill_cache(runner)
        generator = random.Random(1)
        for batch in batches:
            lengths = [generator.randint(200, 1860) for _ in range(batch)]
            lengths.sort(reverse=True)
            place_rows(runner, lengths)
            unequal = replay_ms(graphs, lengths, seconds)
            place_rows(runner, [1030] * batch)
            equal = replay_ms(graphs, [1030] * batch, seconds)
            print(
                f"{name} {batch:4} rows, ms rested and after {seconds:g} s: {equal[0]:7.3f} "
                f"{equal[1]:7.3f} ({equal[2]}) at 1030 tokens a row, {unequal[0]:7.3f} "
                f"{unequal[1]:7.3f} ({unequal[2]}) at 200 to 1860, {sum(lengths) / batch:.0f} on "
                "average",
                flush=True,
            )
            if profiled:
                profile(graphs.begin(list(range(batch)), [1030] * batch).graph)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=", ".join(SHAPES))
    parser.add_argument("--batches", default="8,32,64,128,256")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--quantization", help="fp8, int4 (groups of 128) or int8: the linears")
    parser.add_argument("--gguf", help="type of a GGUF file's linears; its vocabulary is Q6_K")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto, fp8 or int8")
    arguments = parser.parse_args()
    batches = [int(part) for part in arguments.batches.split(",")]
    print(torch.cuda.get_device_name(), torch.__version__)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models or list(SHAPES):
            measure(
                name,
                batches,
                arguments.seconds,
                Path(folder),
                profiled=arguments.profile,
                quantization=arguments.quantization,
                kv_cache_dtype=arguments.kv_cache_dtype,
                gguf=arguments.gguf,
            )
            release()


if __name__ == "__main__":
    main()
