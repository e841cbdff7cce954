"""Time each way to choose a token, beside what a greedy step takes.

    python benchmarks/sampling.py [qwen2_0_5b llama3_8b] [--batches 1,32,256] [--set _PARTS=4]
    python benchmarks/sampling.py --engine [qwen2_0_5b] [--batches 1,32,256]

By itself in a CUDA graph of many calls, from bfloat16 logits: microseconds a call, and by how many
per cent of a greedy step it is longer than the greedy choice. "peaked" logits are as those of real
models: normal, with a deviation of 4. "even" ones have a deviation of 0.5, so that most of the
vocabulary is in the nucleus, the hardest case of top-p. Marked is what takes more than it is to: of
peaked logits 10% of a step of 0.5B and 3% of one of 8B, of even ones twice that.
``--set`` changes a constant of the kernels' module.

With ``--engine``, whole steps of an engine with random weights, whose logits are even, but at a
temperature of 0.05. A step is (time for 65 tokens - time for 1) / 64 at prompts of 256 tokens, of
two runs the smaller.
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
from benchmarks.workloads import SHAPES
from engine_core import LLM, SamplingParams
from engine_core.kernels import choose_greedy, sample_tokens
from engine_core.kernels.sampling import (
    COUNTED,
    GENERATED,
    NUMBERS,
    PENALISED,
    PROMPTED,
    Adjustments,
    SamplingState,
)

WAYS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "top-p 0.99": {"top_p": 0.99},
    "top-k, top-p, min-p": {"top_k": 100, "top_p": 0.95, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
    "greedy penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
    },
    "penalties, top-p 0.9": {"top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
DEVIATIONS = {"peaked": 4.0, "even": 0.5}

# Milliseconds of a greedy step by rows, on one H200, and the share of it that sampling may take.
STEPS = {
    "qwen2_0_5b": ({1: 0.551, 8: 0.587, 32: 0.789, 256: 1.9}, 0.10),
    "llama3_8b": ({1: 3.9, 32: 5.3, 256: 15.5}, 0.03),
}
# Calls of a graph, and its replays.
CALLS = 20
REPLAYS = 7

ENGINE_WAYS = {
    "greedy": {"temperature": 0.0},
    **WAYS,
    "top-p 0.9, peaked": {"temperature": 0.05, "top_p": 0.9},
}


def microseconds(call: Any) -> float:
    """Of one call, in a graph of many."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / CALLS * 1e3)
    return min(times)


def list_seen(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of ``seen [rows, V]`` that are not 0, first in each row, and how many they are."""
    is_seen = (seen > 0).int()
    return is_seen.argsort(dim=-1, descending=True).int(), is_seen.sum(dim=-1).int()


def make_state(way: dict[str, Any], rows: int, vocab: int) -> SamplingState:
    """Rows that all choose in one way; prompt and output of a penalised one have 1% of all ids."""
    values = [{**NEUTRAL, **way}.get(name, 0.0) for name in NUMBERS]
    numbers = torch.tensor(values, dtype=torch.float64, device="cuda").repeat(rows, 1)
    adjustments = None
    if "repetition_penalty" in way:
        kinds = torch.full((rows,), PENALISED + COUNTED, dtype=torch.int32, device="cuda")
        counts = torch.zeros(rows, vocab, dtype=torch.int32, device="cuda")
        counts[:, ::300] = 2
        prompted = torch.rand(rows, vocab, device="cuda") < 0.01
        seen = PROMPTED * prompted + GENERATED * (counts > 0)
        adjustments = Adjustments(
            kinds,
            torch.full((rows, 8), -1, dtype=torch.int32, device="cuda"),
            torch.zeros(rows, dtype=torch.int64, device="cuda"),
            None,
            seen.to(torch.uint8),
            counts,
            *list_seen(seen),
        )
    return SamplingState(numbers, torch.arange(rows, device="cuda") * 7, adjustments)


def time_choices(name: str, rows: int) -> None:
    """Print a table of one batch of a model's shape."""
    vocab = SHAPES[name]["vocab_size"]
    steps, share = STEPS[name]
    step = steps.get(rows, 0.0) * 1e3
    places = torch.arange(rows, device="cuda")
    last_tokens, positions = torch.zeros(2, rows, dtype=torch.int64, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for kind, deviation in DEVIATIONS.items():
        logits = torch.randn(rows, vocab, device="cuda", generator=generator) * deviation
        logits = logits.to(torch.bfloat16)
        greedy = microseconds(
            lambda x=logits: choose_greedy(
                x, rows=places, last_tokens=last_tokens, positions=positions
            )
        )
        print(f"{name}, {rows} rows, {kind}: greedy choice {greedy:.1f} us of a step of {step:.0f}")
        allowed = share * (2 if kind == "even" else 1)
        for way, settings in WAYS.items():
            state = make_state(settings, rows, vocab)
            took = microseconds(
                lambda x=logits, s=state: sample_tokens(x, places, positions, last_tokens, s)
            )
            more = f"{(took - greedy) / step:6.1%} of the step" if step else ""
            mark = "  too much" if step and took - greedy > allowed * step else ""
            print(f"    {way:22}{took:8.1f} us{took - greedy:+8.1f}{more}{mark}", flush=True)


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


def time_steps(name: str, batches: list[int]) -> None:
    """Print a line for each batch: a step with each way to choose."""
    generator = random.Random(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        build(name, Path(folder), deterministic=False) as llm,
    ):
        for batch in batches:
            cells = (
                f"{way} {step_ms(llm, batch, settings, generator):.3f}"
                for way, settings in ENGINE_WAYS.items()
            )
            print(f"{name}, {batch} rows, ms a step: " + ", ".join(cells), flush=True)


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="shapes, by default both")
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--engine", action="store_true", help="whole steps")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    names = args.names or list(STEPS)
    if unknown := set(names) - set(STEPS):
        parser.error(f"no steps are known of {', '.join(sorted(unknown))}: take {', '.join(STEPS)}")
    batches = [int(part) for part in args.batches.split(",")]
    print(torch.cuda.get_device_name(), torch.__version__, *args.set)
    if args.set:
        from engine_core.kernels.sampling import triton

        for setting in args.set:
            name, _, value = setting.partition("=")
            assert hasattr(triton, name), f"the kernels have no {name}"
            setattr(triton, name, int(value))
    for name in names:
        if args.engine:
            time_steps(name, batches)
        else:
            for rows in batches:
                time_choices(name, rows)


if __name__ == "__main__":
    main()
