"""One of two ranks on GPUs: run as ``rank_sums_gpu.py FOLDER RANK CARDS``. Prints what is wrong.

With one card both ranks are on it, and each waits for the driver to give it the other's turn.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed
from torch import Tensor

from engine_core.kernels import (
    RankMemory,
    fits_fused_sum,
    fits_rank_sum,
    rank_gather,
    rank_sum,
    rank_sum_add_norm,
    rms_norm,
)
from engine_core.kernels.rank_sum import layout, reference
from engine_core.runtime.capture import Agreement, CudaCapturer
from engine_core.runtime.rank_memory import keep_off_multicast, share_memory

FOLDER, RANK, CARDS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
SIZE = 2
# Of words and of shots, of one block of a program and of many, of more than buffers hold, and of
# rows of odd lengths.
SHAPES = [(1, 128), (1, 4096), (3, 577), (32, 4096), (33, 896), (128, 4096), (1000, 4096)]
SHAPES += [(4100, 4096)]
Operation = tuple[str, Callable[[Tensor], list[Tensor]], Callable[[Tensor], list[Tensor]]]


def operations(memory: RankMemory, shape: tuple[int, int], dtype: torch.dtype) -> list[Operation]:
    """Names of operations, what this rank runs on its term, and the expectation from all terms."""
    generator = torch.Generator("cuda").manual_seed(7)
    weight, bias = torch.randn(2, shape[1], device="cuda", generator=generator).to(dtype)
    residual = torch.randn(shape, device="cuda", generator=generator).to(dtype)

    def unfused(terms: Tensor) -> list[Tensor]:
        return [*rms_norm(reference.rank_sum(terms) + bias, weight, 1e-5, residual=residual)]

    def gathered(terms: Tensor) -> list[Tensor]:
        return [reference.rank_gather(terms)]

    def summed(terms: Tensor) -> list[Tensor]:
        return [reference.rank_sum(terms)]

    def add(x: Tensor) -> list[Tensor]:
        return [rank_sum(x, memory)]

    def add_norm(x: Tensor) -> list[Tensor]:
        return [*rank_sum_add_norm(x, memory, bias, residual, weight, 1e-5)]

    found: list[Operation] = [("gather", lambda x: [rank_gather(x, memory)], gathered)]
    if fits_rank_sum(residual, memory):
        found += [("sum", add, summed)]
    if fits_fused_sum(*shape, dtype, SIZE, memory.capacity):
        found += [("norm", add_norm, unfused)]
    if dtype is torch.bfloat16:
        found += [
            (f"{name}, two shots", in_two_shots(run), expect) for name, run, expect in found[1:]
        ]
    return found


def in_two_shots(run: Callable[[Tensor], list[Tensor]]) -> Callable[[Tensor], list[Tensor]]:
    """The same in two shots, which two ranks do not take by themselves."""

    def patched(x: Tensor) -> list[Tensor]:
        way_of, layout.way_of = layout.way_of, lambda nbytes, size: "two shots"
        try:
            return run(x)
        finally:
            layout.way_of = way_of

    return patched


def wrong(name: str, got: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether it is not the same bit for bit; a norm adds up its squares in another order."""
    if not name.startswith("norm"):
        return not torch.equal(got[0], expected[0])
    difference = (got[0].float() - expected[0].float()).abs() / (1 + expected[0].float().abs())
    return not torch.equal(got[1], expected[1]) or difference.max().item() > 1.6e-2


def main() -> None:
    if CARDS == 1:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(RANK % CARDS)
    device = torch.device("cuda", RANK % CARDS)
    keep_off_multicast()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{FOLDER}/meeting", rank=RANK, world_size=SIZE
    )
    group = torch.distributed.group.WORLD
    memory = share_memory(Agreement(group), group, device)
    assert memory is not None, "the ranks share no memory"
    numbers = torch.Generator("cuda").manual_seed(0)
    delays, capturer = random.Random(RANK), CudaCapturer(device)
    replayed = []
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = torch.zeros(shape, dtype=dtype, device=device)
            for name, run, expect in operations(memory, shape, dtype):
                terms = torch.randn(SIZE, *shape, device=device, generator=numbers).to(dtype)
                x.copy_(terms[RANK])
                if wrong(name, run(x), expect(terms)):
                    sys.stdout.write(f"{name} of {shape} {dtype}\n")
                if shape[0] <= 128:
                    capturer.run(lambda run=run, x=x: run(x))
                    graph, got = capturer.capture(lambda run=run, x=x: run(x))
                    replayed.append((f"{name} of {shape} {dtype}", x, graph, got, expect))
    order = random.Random(1)
    for number in range(300):
        named, x, graph, got, expect = order.choice(replayed)
        terms = torch.randn(SIZE, *x.shape, device=device, generator=numbers).to(x.dtype)
        x.copy_(terms[RANK])
        for _ in range(order.choice((1, 1, 5))):
            graph.replay()
        if wrong(named, got, expect(terms)):
            sys.stdout.write(f"replay {number}: {named}\n")
        if delays.random() < 0.2:
            time.sleep(0.002 * delays.random())
    torch.distributed.barrier()
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
