"""Time random sampling by itself on a GPU, without a model.

    python benchmarks/sampling_kernels.py

Each way to choose is captured 16 times in a CUDA graph, whose replays are timed on the device: of
seven times the least, in microseconds a call. Logits are normal in bfloat16, with a deviation of 4
(peaked: a nucleus of 0.9 holds hundreds of tokens) or of 0.5 (even: it holds most).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from engine_core.kernels import sample_tokens
from engine_core.kernels.sampling import NUMBERS, Adjustments, SamplingState
from engine_core.kernels.sampling.state import COUNTED, PENALISED

VOCAB = 151936
ROWS = (1, 32, 256)
DEVIATIONS = {"peaked": 4.0, "even": 0.5}
CALLS = 16
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5}
WAYS = {
    "temperature": {},
    "top-k 50": {"top_k": 50.0},
    "top-p 0.9": {"top_p": 0.9},
    "top-k, top-p, min-p": {"top_k": 100.0, "top_p": 0.95, "min_p": 0.01},
    "penalties": PENALTIES,
    "penalties, top-p 0.9": {**PENALTIES, "top_p": 0.9, "temperature": 0.7},
}


def state_of(way: dict[str, float], rows: int, device: str) -> SamplingState:
    """What all rows choose by, with a hundredth of the vocabulary seen before."""
    max_rows = rows + 1  # the last is that of padding
    numbers = torch.tensor([{**NEUTRAL, **way}.get(name, 0.0) for name in NUMBERS]).double()
    adjustments = None
    if way.keys() & PENALTIES.keys():
        adjustments = Adjustments(
            torch.full((max_rows,), PENALISED + COUNTED, dtype=torch.int32, device=device),
            torch.full((max_rows, 8), -1, dtype=torch.int32, device=device),
            torch.zeros(max_rows, dtype=torch.int64, device=device),
            None,
            torch.rand(max_rows, VOCAB, device=device) < 0.01,
            torch.zeros(max_rows, VOCAB, dtype=torch.int32, device=device),
        )
    seeds = torch.arange(max_rows, device=device) * 2**40 + 17
    return SamplingState(numbers.repeat(max_rows, 1).to(device), seeds, adjustments)


def microseconds(logits: Tensor, way: dict[str, float]) -> float:
    """Of a call in a graph."""
    rows = logits.shape[0]
    places = torch.arange(rows, device="cuda")
    positions = places * 1000
    last_tokens = torch.zeros(rows + 1, dtype=torch.int64, device="cuda")
    state = state_of(way, rows, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sample_tokens(logits, places, positions, last_tokens, state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            sample_tokens(logits, places, positions, last_tokens, state)

    def measure(replays: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / (replays * CALLS)

    measure(1)
    # About 8 ms of work a measurement.
    replays = max(1, round(8000 / (measure(1) * CALLS)))
    return min(measure(replays) for _ in range(7))


def main() -> None:
    """Print one line a way to choose and kind of logits."""
    print(torch.cuda.get_device_name(), torch.__version__)
    print(f"{'us a call':30}" + "".join(f"{rows:>9} rows" for rows in ROWS))
    normal = torch.randn(max(ROWS), VOCAB, device="cuda")
    for kind, deviation in DEVIATIONS.items():
        logits = (normal * deviation).to(torch.bfloat16)
        for name, way in WAYS.items():
            cells = (f"{microseconds(logits[:rows], way):14.1f}" for rows in ROWS)
            print(f"{f'{name}, {kind}':30}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
