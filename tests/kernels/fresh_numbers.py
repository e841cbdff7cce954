"""Hopper's gate and up by a weight that is there, and by one whose numbers were just made.

Run by itself, for a GPU that is not there, since Triton's interpreter takes the compiler's place in
the other tests. It prints a line for each: its name, and whether the warp that loads waits for the
kernel before ahead of its first tile, by the machine code's text.
"""

from __future__ import annotations

import sys

import torch
from triton.compiler import compile as compile_kernel

from engine_core.kernels import GPU, GroupWeight
from engine_core.kernels.linear import linear
from engine_core.runtime.absent import absent_gpu
from engine_core.runtime.ahead import Part, Variant, recording, target_of

HOPPER = GPU.of_capability((9, 0))
ROWS, N, K = 1024, 9728, 896


def launched(*, coded: bool) -> list[Variant]:
    """Launches of a linear whose weight is of 4-bit codes or of 16-bit numbers."""
    found: list[Part] = []
    with absent_gpu(HOPPER, 1 << 30), recording(target_of(HOPPER.capability), found.append):
        x = torch.zeros(ROWS, K, dtype=torch.bfloat16, device="cuda")
        numbers = torch.zeros(N, K, dtype=torch.bfloat16, device="cuda")
        words = torch.zeros(N, K // 128, 32, dtype=torch.int16, device="cuda")
        scales = torch.zeros(K // 128, N, dtype=torch.float16, device="cuda")
        codes = GroupWeight(words, scales, None, K, 128, torch.bfloat16)
        linear(x, codes if coded else numbers, gated=True)
    variants = {part.key: part for part in found if isinstance(part, Variant)}
    return list(variants.values())


def waits_first(variant: Variant) -> bool:
    """Whether no tile is brought before a wait in the part of the code that brings them."""
    compiled = compile_kernel(variant.source, target=variant.target, options=variant.options)
    ptx = compiled.asm["ptx"]
    first = ptx.index("cp.async.bulk.tensor.2d.shared")
    # A block of code begins with what the barrier of all warps lets go.
    begin = ptx.rindex("barrier.sync", 0, first)
    return "griddepcontrol.wait" in ptx[begin:first]


def main() -> None:
    for coded in (False, True):
        *before, last = launched(coded=coded)
        names = " ".join(each.name for each in before) or "nothing"
        sys.stdout.write(f"{names} {last.name} {waits_first(last)}\n")


if __name__ == "__main__":
    main()
