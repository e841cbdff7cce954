"""Decode attention of several numbers of rows, and when it lets the next kernel be launched.

Run by itself, for a GPU that is not there, since Triton's interpreter takes the compiler's place in
the other tests. It prints a line for each number of rows that is given: where the machine code's
text lets the next kernel be launched, "first" or "last" by its waits and products, and how often.
"""

from __future__ import annotations

import sys

import torch
from triton.compiler import compile as compile_kernel

from engine_core.kernels import GPU
from engine_core.kernels.attention.call import Call
from engine_core.kernels.attention.triton import paged_attention
from engine_core.runtime.absent import absent_gpu
from engine_core.runtime.ahead import Part, Variant, recording, target_of

HOPPER = GPU.of_capability((9, 0))
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCKS = 32, 8, 128, 64, 16
LAUNCH, WAIT, PRODUCT = "griddepcontrol.launch_dependents", "griddepcontrol.wait", "mma.sync"


def launched(rows: int) -> Variant:
    """The kernel that attends to so many rows of one query."""
    found: list[Part] = []
    with absent_gpu(HOPPER, 1 << 30), recording(target_of(HOPPER.capability), found.append):
        q = torch.zeros(rows, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        caches = [q.new_zeros(rows * BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM) for _ in range(2)]
        starts, lens = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (rows + 1, rows))
        tables = torch.zeros(rows, BLOCKS, dtype=torch.int32, device="cuda")
        longest = BLOCKS * BLOCK_SIZE
        paged_attention(
            Call(q, *caches, torch.empty_like(q), tables, starts, lens, longest, 1, rows, 0.1)
        )
    variants = [part for part in found if isinstance(part, Variant)]
    (variant,) = {each.key: each for each in variants if each.name == "_decode_kernel"}.values()
    return variant


def main(numbers: list[str]) -> None:
    for rows in map(int, numbers):
        variant = launched(rows)
        made = compile_kernel(variant.source, target=variant.target, options=variant.options)
        ptx = made.asm["ptx"]
        at = ptx.index(LAUNCH)
        first, last = at < ptx.index(WAIT), at > max(ptx.rindex(WAIT), ptx.rindex(PRODUCT))
        place = "first" if first else "last" if last else "between"
        sys.stdout.write(f"{rows} {place} {ptx.count(LAUNCH)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
