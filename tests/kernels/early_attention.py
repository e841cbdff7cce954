"""Decode attention of some rows, and the linear ahead of it: what each does before it waits.

Run by itself, for a GPU that is not there, since Triton's interpreter takes the compiler's place in
the other tests. It prints a line for each number of rows that is given, perhaps with "-codes" for a
cache of 8-bit floats, "-chained" before a chain of linears of 8-bit floats, "-chained4" before one
of 4-bit codes and "-narrow" for 2 KV heads of 64; with
"-linear" of the linear to such queries, keys and values, with "-codes" of 8-bit floats and with
"-deterministic" whatever the other rows. "-ada" is for such a GPU. A line says where the machine
code's text lets the next kernel be launched, "first", or "last" by its waits and products,
"between", or "none"; how often; how many lines that ask for tiles, or store, need not have waited;
by which name the code is known; and how many per cent of a multiprocessor's first cache the driver
is told to prefer as shared memory, "any" for none. Where nothing waits, it says in place of the
tiles whether the last token is seen by itself.
"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from early_lines import LAUNCH, STORES, WAIT, early_lines
from triton import knobs
from triton.compiler import compile as compile_kernel

from engine_core.kernels import GPU, Fp8Weight, linear_rotary_store
from engine_core.kernels.codes import SCALE_BYTES
from engine_core.kernels.launch import shared
from engine_core.nn import Attention
from engine_core.runtime.absent import absent_gpu
from engine_core.runtime.ahead import Part, Variant, recording, target_of
from engine_core.step_context import AttentionMetadata, BuildContext, GroupMetadata, building

ADA, HOPPER = GPU.of_capability((8, 9)), GPU.of_capability((9, 0))
BLOCK_SIZE, BLOCKS = 64, 16
# Of matrix units; those of one row have none.
PRODUCT = re.compile(r"mma\.sync|mma_async")
ASKED = re.compile(r"\bcp\.async\.c[ag]\.shared\.global|\.tensor\.\dd\.shared::\w+\.global")


def attend(rows: int, words: list[str]) -> None:
    """Attend to so many rows of one query."""
    codes, chained = "codes" in words, 4 if "chained4" in words else 8 * ("chained" in words)
    heads, kv_heads, head_dim = (14, 2, 64) if "narrow" in words else (32, 8, 128)
    built = BuildContext(dtype=torch.bfloat16, kv_cache_dtype="fp8" if codes else "auto")
    with building(built):
        layer = Attention(heads, head_dim, num_kv_heads=kv_heads)
    q = torch.zeros(rows, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    size = (rows * BLOCKS, BLOCK_SIZE, kv_heads, head_dim + SCALE_BYTES * codes)
    dtype = torch.float8_e4m3fn if codes else torch.bfloat16
    caches = [torch.zeros(size, dtype=dtype, device="cuda") for _ in range(2)]
    starts, lens = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (rows + 1, rows))
    tables = torch.zeros(rows, BLOCKS, dtype=torch.int32, device="cuda")
    group = GroupMetadata(tables, torch.zeros(rows, dtype=torch.int64, device="cuda"))
    metadata = AttentionMetadata(starts, lens, 1, BLOCKS * BLOCK_SIZE, rows, (group,))
    layer.attend(q, *caches, metadata, chained=chained)


def multiply(rows: int, words: list[str]) -> None:
    """Make queries, keys and values of so many rows, and store these."""
    x = torch.zeros(rows, 896, dtype=torch.bfloat16, device="cuda")
    weight: Any = torch.zeros(1152, 896, dtype=torch.bfloat16, device="cuda")
    if "codes" in words:
        weight = Fp8Weight(
            weight.to(torch.float8_e4m3fn), torch.zeros(1152, device="cuda"), torch.bfloat16
        )
    cache = torch.zeros(BLOCKS, BLOCK_SIZE, 2, 64, dtype=torch.bfloat16, device="cuda")
    angles = torch.zeros(rows, 32, device="cuda")
    slots = torch.zeros(rows, dtype=torch.int64, device="cuda")
    linear_rotary_store(
        *(x, weight, None, angles, angles, cache, cache.clone(), slots),
        deterministic="deterministic" in words,
    )


def launched(rows: int, words: list[str]) -> Variant:
    """The kernel of a layer's attention, or of the linear ahead of it."""
    found: list[Part] = []
    gpu = ADA if "ada" in words else HOPPER
    with absent_gpu(gpu, 1 << 30), recording(target_of(gpu.capability), found.append):
        if "linear" in words:
            multiply(rows, words)
        else:
            attend(rows, words)
    name = "_linear_kernel" if "linear" in words else "_decode_kernel"
    # A linear may have been tried before, on other heads.
    return [part for part in found if isinstance(part, Variant) and part.name == name][-1]


def preferred(name: str) -> str:
    """Tell what the driver would hear if a kernel of this name were loaded now."""
    told: list[int] = []
    driver = SimpleNamespace(cuFuncSetAttribute=lambda _function, _which, to: told.append(to))
    with patch.object(shared, "_driver", lambda: driver):
        knobs.runtime.kernel_load_end_hook(None, 1, name, {}, "")
    return str(told[0]) if told else "any"


def main(names: list[str]) -> None:
    for name in names:
        rows, *words = name.split("-")
        variant = launched(int(rows), words)
        made = compile_kernel(variant.source, target=variant.target, options=variant.options)
        ptx = made.asm["ptx"]
        launches = [found.start() for found in LAUNCH.finditer(ptx)]
        at = launches[0] if launches else -1
        waits = [found.start() for found in re.finditer(WAIT, ptx)]
        ends = waits[-1:] + [found.start() for found in PRODUCT.finditer(ptx)][-1:]
        place = "first" if at < min(waits, default=0) else "last" if at > max(ends) else "between"
        early = [len(early_lines(ptx, what)) for what in (ASKED, STORES)]
        if not waits:
            given = variant.source.constants.items()
            constants = {variant.source.fn.arg_names[path[0]]: value for path, value in given}
            early = [int(constants["EARLY"]), 0]
        known = made.metadata.name
        told = (name, place if launches else "none", len(launches), *early, known)
        sys.stdout.write(" ".join(map(str, (*told, preferred(known)))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
