"""Time decoding through the fallback for transformers' models beside the native package.

    python benchmarks/fallback.py [llama3_8b] [--batches 1,8,32,128] [--rounds 2]

Both run the same shape with random weights, greedily, from prompts of 64 tokens. A step's time is
the difference between answers of 161 and of 33 tokens, over 128, so that prompts and starts drop
out; the least of the rounds counts. nvidia-smi's clock and power are read after each batch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.decode import CLOCK_AND_POWER
from benchmarks.workloads import SHAPES, write_config
from engine_core import LLM, EngineConfig, SamplingParams, own_process

SHORT, LONG, PROMPT = 33, 161, 64


def seconds(llm: LLM, rows: int, length: int) -> float:
    """How long answers of so many tokens take."""
    prompts = [[row + 1] * PROMPT for row in range(rows)]
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - start


def steps(model: Path, implementation: str, batches: list[int], rounds: int) -> dict[int, float]:
    """Milliseconds of a step by rows."""
    config = EngineConfig(
        model_impl=implementation,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=1024,
        max_num_seqs=max(batches),
    )
    start = time.perf_counter()
    result: dict[int, float] = {}
    with LLM(str(model), config) as llm:
        print(f"{implementation}: started in {time.perf_counter() - start:.1f} s", flush=True)
        for rows in batches:
            seconds(llm, rows, SHORT)
            result[rows] = min(
                (seconds(llm, rows, LONG) - seconds(llm, rows, SHORT)) * 1e3 / (LONG - SHORT)
                for _ in range(rounds)
            )
            reading = subprocess.run(CLOCK_AND_POWER, capture_output=True, text=True)
            clock = reading.stdout.strip()
            print(f"{implementation}: {rows:4} rows {result[rows]:7.3f} ms ({clock})", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="llama3_8b", choices=list(SHAPES))
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    batches = [int(part) for part in arguments.batches.split(",")]
    own_process.claim()
    print(torch.cuda.get_device_name(), torch.__version__)
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(arguments.model, Path(folder) / arguments.model)
        taken = {
            implementation: steps(model, implementation, batches, arguments.rounds)
            for implementation in ("native", "transformers")
        }
    for rows in batches:
        share = taken["native"][rows] / taken["transformers"][rows]
        print(f"{rows:4} rows: the fallback decodes at {share:.0%} of the native package's speed")


if __name__ == "__main__":
    main()
