"""Time of a layer of experts on a GPU, of Qwen3-30B-A3B's shape, beside floors by bytes.

    python benchmarks/experts.py

Weights and routing are random. Each number of rows is captured as a CUDA graph of several layers
whose weights do not fit the L2 cache together. The floor is the bytes of the experts that the rows
chose, at the bandwidth that a copy reaches on the same GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine_core.kernels import Fp8Weight, Routing, choose_experts, run_experts

HIDDEN, INTER, EXPERTS, TOP_K = 2048, 768, 128, 8
LAYERS = 4
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192)


def milliseconds(step: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a captured ``step``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def bandwidth() -> float:
    """Bytes per millisecond that a copy of 2 GiB reads and writes."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source))


def layer(fp8: bool, device: str) -> tuple[Any, Any]:
    """Weights of one layer: gates and ups, and downs."""
    gate_up = torch.randn(EXPERTS, 2 * INTER, HIDDEN, dtype=torch.bfloat16, device=device)
    down = torch.randn(EXPERTS, HIDDEN, INTER, dtype=torch.bfloat16, device=device)
    gate_up, down = gate_up.mul_(HIDDEN**-0.5), down.mul_(INTER**-0.5)
    if not fp8:
        return gate_up, down
    return Fp8Weight.quantized(gate_up.flatten(0, 1)), Fp8Weight.quantized(down.flatten(0, 1))


def run(x: Tensor, logits: Sequence[Tensor], layers: Sequence[tuple[Any, Any]]) -> Tensor:
    """The layers one after another, each with a choice of its own."""
    routing = Routing(TOP_K, renormalize=True)
    for (gate_up, down), own in zip(layers, logits, strict=True):
        ids, weights = choose_experts(own, routing)
        x = run_experts(x, ids, weights, gate_up, down, "silu")
    return x


def touched(logits: Sequence[Tensor]) -> int:
    """Experts that are chosen, of all layers."""
    return sum(len(own.topk(TOP_K).indices.unique()) for own in logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    options = parser.parse_args()
    torch.manual_seed(0)
    speed = bandwidth()
    print(f"{torch.cuda.get_device_name()}: a copy moves {speed / 1e9:.2f} TB/s")
    for fp8 in (False, True):
        layers = [layer(fp8, "cuda") for _ in range(LAYERS)]
        size = sum(part.nbytes for part in layers[0]) / EXPERTS
        print(f"{'e4m3' if fp8 else 'bfloat16'}: us a layer, floor by bytes, times the floor")
        for rows in options.rows:
            x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
            logits = [torch.randn(rows, EXPERTS, device="cuda") for _ in range(LAYERS)]
            floor = touched(logits) * size / speed / LAYERS
            took = milliseconds(partial(run, x, logits, layers)) / LAYERS
            experts = touched(logits) / LAYERS
            print(
                f"{rows:5} rows, {experts:5.1f} experts: {took * 1e3:8.1f} {floor * 1e3:8.1f} "
                f"{took / floor:6.2f}"
            )
        del layers


if __name__ == "__main__":
    main()
