"""A bound for the mix of ``benchmarks/gpu.py``: the sum of its steps' times measured alone.

    python benchmarks/mix_bound.py llama3_8b --prefill 46000 --replays 1:3.9,8:4.34,256:14.6
        [--coded]

``--replays`` are milliseconds of decode steps by rows of 1030 tokens, as ``decode.py`` measures
them, ``--prefill`` prompt tokens per second. Steps between those numbers of rows lie on a line, and
other contexts take more or less by their bytes at 4.28 TB/s. Rows that decode beside prompts take a
prompt token's time and their cache's bytes, which with ``--coded`` are those of 8-bit codes and
their scales. Nothing is run.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads import SHAPES
from engine_core.bench.workloads import mix_requests

BYTES_A_SECOND = 4.28e12
TOKENS_A_STEP = 8192
REPLAYED_TOKENS = 1030


def replay_seconds(rows: int, replays: dict[int, float]) -> float:
    """Of a decode step of rows of REPLAYED_TOKENS, between the sizes that are given."""
    sizes = sorted(replays)
    pairs = list(itertools.pairwise(sizes))
    low, high = next((pair for pair in pairs if rows <= pair[1]), pairs[-1])
    slope = (replays[high] - replays[low]) / (high - low)
    return (replays[low] + (rows - low) * slope) * 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=list(SHAPES))
    parser.add_argument("--prefill", type=float, required=True)
    parser.add_argument("--replays", required=True)
    parser.add_argument("--coded", action="store_true", help="the cache is one of 8 bits")
    arguments = parser.parse_args()
    pairs = [part.split(":") for part in arguments.replays.split(",")]
    if len(pairs) < 2:
        raise SystemExit("--replays must name two numbers of rows at least")
    replays = {int(rows): float(ms) for rows, ms in pairs}
    shape = SHAPES[arguments.model]
    head_dim = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    heads = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"]
    head_bytes = head_dim + 4 if arguments.coded else 2 * head_dim
    per_token = heads * head_bytes / BYTES_A_SECOND

    requests, outputs = mix_requests(shape["vocab_size"])
    prompts = [len(prompt) for prompt in requests]
    # The step in which each prompt ends, and with it its first token comes.
    ends = [(total - 1) // TOKENS_A_STEP for total in itertools.accumulate(prompts)]
    prompt_steps = ends[-1] + 1
    seconds = {"prompts": sum(prompts) / arguments.prefill, "decodes": 0.0}
    for step in range(max(end + size for end, size in zip(ends, outputs, strict=True))):
        contexts = [
            prompt + step - end
            for prompt, size, end in zip(prompts, outputs, ends, strict=True)
            if end < step < end + size
        ]
        if step < prompt_steps:
            seconds["prompts"] += len(contexts) / arguments.prefill + sum(contexts) * per_token
        elif contexts:
            other = sum(contexts) - REPLAYED_TOKENS * len(contexts)
            seconds["decodes"] += replay_seconds(len(contexts), replays) + other * per_token
    print(
        f"{arguments.model}: {sum(outputs) / sum(seconds.values()):.0f} output tokens/s; "
        f"{prompt_steps} steps with prompts {seconds['prompts']:.2f} s, the others "
        f"{seconds['decodes']:.2f} s"
    )


if __name__ == "__main__":
    main()
