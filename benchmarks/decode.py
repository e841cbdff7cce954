"""Time replays of decode graphs, with rows of equal and of very different lengths.

    python benchmarks/decode.py [llama3_8b] [qwen2_0_5b] [--batches 8,32,64,128,256]

Random weights. A replay is timed on the device, between two CUDA events around 20 of them, of
three times the least: no host, no prompts. The lengths are 1030 for all rows, or drawn from 200 to
1860, and the rows' blocks lie apart in the cache. It reaches into the engine for the graphs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.gpu import build
from benchmarks.workloads import SHAPES

REPLAYS = 20


def replay_ms(graphs: Any, positions: list[int]) -> float:
    """Milliseconds of a greedy step whose rows compute tokens at these positions."""
    times = []
    for _ in range(3):
        graph = graphs.begin(list(range(len(positions))), positions).graph
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / REPLAYS)
    return min(times)


@torch.inference_mode()
def measure(name: str, batches: list[int], folder: Path) -> None:
    """Print one line a batch size."""
    with build(name, folder, deterministic=False) as llm:
        runner = llm.engine.core.executor._worker._runner
        graphs, (table,) = runner._decode_graphs, runner._tables
        most = (1860 + 4 * REPLAYS) // table.block_size + 1
        num_blocks = runner.kv_cache[0][0].shape[0]
        for row in range(max(batches)):
            blocks = torch.arange(row * most, (row + 1) * most, dtype=torch.int32) % num_blocks
            table.device_table[row, :most] = blocks.to(table.device_table.device)
        generator = random.Random(1)
        for batch in batches:
            lengths = [generator.randint(200, 1860) for _ in range(batch)]
            equal, unequal = replay_ms(graphs, [1030] * batch), replay_ms(graphs, lengths)
            print(
                f"{name} {batch:4} rows: {equal:7.3f} ms at 1030 tokens a row, {unequal:7.3f} at "
                f"200 to 1860, {sum(lengths) / batch:.0f} on average",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=", ".join(SHAPES))
    parser.add_argument("--batches", default="8,32,64,128,256")
    arguments = parser.parse_args()
    batches = [int(part) for part in arguments.batches.split(",")]
    print(torch.cuda.get_device_name(), torch.__version__)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models or list(SHAPES):
            measure(name, batches, Path(folder))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
