"""Decode attention of several numbers of rows, and when it lets the next kernel be launched.

Run by itself, for a GPU that is not there, since Triton's interpreter takes the compiler's place in
the other tests. It prints a line for each number of rows that is given, perhaps with "-codes" for a
cache of 8-bit floats and "-chained" before a chain of linears: where the machine code's text lets
the next kernel be launched, "first" or "last" by its waits and products, and how often.
"""

from __future__ import annotations

import sys

import torch
from triton.compiler import compile as compile_kernel

from engine_core.kernels import GPU
from engine_core.kernels.codes import SCALE_BYTES
from engine_core.nn import Attention
from engine_core.runtime.absent import absent_gpu
from engine_core.runtime.ahead import Part, Variant, recording, target_of
from engine_core.step_context import AttentionMetadata, BuildContext, GroupMetadata, building

HOPPER = GPU.of_capability((9, 0))
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCKS = 32, 8, 128, 64, 16
LAUNCH, WAIT, PRODUCT = "griddepcontrol.launch_dependents", "griddepcontrol.wait", "mma.sync"


def launched(rows: int, words: list[str]) -> Variant:
    """The kernel with which a layer attends to so many rows of one query."""
    found: list[Part] = []
    codes, chained = "codes" in words, "chained" in words
    built = BuildContext(dtype=torch.bfloat16, kv_cache_dtype="fp8" if codes else "auto")
    with absent_gpu(HOPPER, 1 << 30), recording(target_of(HOPPER.capability), found.append):
        with building(built):
            layer = Attention(HEADS, HEAD_DIM, num_kv_heads=KV_HEADS)
        q = torch.zeros(rows, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        size = (rows * BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM + SCALE_BYTES * codes)
        dtype = torch.float8_e4m3fn if codes else torch.bfloat16
        caches = [torch.zeros(size, dtype=dtype, device="cuda") for _ in range(2)]
        starts, lens = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (rows + 1, rows))
        tables = torch.zeros(rows, BLOCKS, dtype=torch.int32, device="cuda")
        group = GroupMetadata(tables, torch.zeros(rows, dtype=torch.int64, device="cuda"))
        metadata = AttentionMetadata(starts, lens, 1, BLOCKS * BLOCK_SIZE, rows, (group,))
        layer.attend(q, *caches, metadata, chained=chained)
    variants = [part for part in found if isinstance(part, Variant)]
    (variant,) = {each.key: each for each in variants if each.name == "_decode_kernel"}.values()
    return variant


def main(names: list[str]) -> None:
    for name in names:
        rows, *words = name.split("-")
        variant = launched(int(rows), words)
        made = compile_kernel(variant.source, target=variant.target, options=variant.options)
        ptx = made.asm["ptx"]
        at = ptx.index(LAUNCH)
        first, last = at < ptx.index(WAIT), at > max(ptx.rindex(WAIT), ptx.rindex(PRODUCT))
        place = "first" if first else "last" if last else "between"
        sys.stdout.write(f"{name} {place} {ptx.count(LAUNCH)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
