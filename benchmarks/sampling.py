"""Time decode steps of Qwen2 0.5B's shapes with each way to choose a token.

    python benchmarks/sampling.py [--batches 1,32,256]

Random weights, whose logits are spread evenly: a nucleus of them holds most of the vocabulary,
which is the hardest case of top-p. At a temperature of 0.05 it holds few tokens, as those of real
models do. A step is (time for 65 tokens - time for 1) / 64 at prompts of 256 tokens, of two runs
the smaller.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.gpu import build
from engine_core import LLM, SamplingParams

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "top-p 0.9, peaked": {"temperature": 0.05, "top_p": 0.9},
    "top-k, top-p, min-p": {"top_k": 100, "top_p": 0.95, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
}


def step_ms(llm: LLM, batch: int, way: dict[str, Any], generator: random.Random) -> float:
    """Milliseconds of a decode step."""

    def seconds(tokens: int) -> float:
        prompts = [[generator.randrange(1000, 100_000) for _ in range(256)] for _ in range(batch)]
        params = [
            SamplingParams(**way, seed=index, max_tokens=tokens, ignore_eos=True)
            for index in range(batch)
        ]
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - start

    seconds(3)
    once = min(seconds(1) for _ in range(2))
    many = min(seconds(65) for _ in range(2))
    return (many - once) / 64 * 1e3


def main() -> None:
    """Print one line per batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,32,256")
    batches = [int(part) for part in parser.parse_args().batches.split(",")]
    print(torch.cuda.get_device_name(), torch.__version__)
    generator = random.Random(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        build("qwen2_0_5b", Path(folder), deterministic=False) as llm,
    ):
        for batch in batches:
            cells = (
                f"{name} {step_ms(llm, batch, way, generator):.2f}" for name, way in WAYS.items()
            )
            print(f"{batch} rows, ms a step: " + ", ".join(cells), flush=True)


if __name__ == "__main__":
    main()
