"""Hopper's kernels compiled for a GPU that is not there, with the constants of real launches.

Run by itself, as ``compiled_ahead.py``. It prints a line for each kernel: its name, bytes of shared
memory, registers of a thread at its launch, bytes of its stack, where what does not fit into
registers is kept, and how many of its stores, copies of tiles to shared memory, and loads of
numbers may come before it waited for the kernel ahead. With names as arguments it compiles these
alone. Another release of Triton may be put first on the path.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from compiled_ahead import compile_launches
from early_lines import LAUNCH, LOADS, STORES, TILES, early_lines
from torch import Tensor

from engine_core.kernels import Chain, ChainNorm, DeferredRMSNorm, Fp8Weight, GroupWeight
from engine_core.kernels.attention.call import Call
from engine_core.kernels.attention.decode import Start
from engine_core.kernels.attention.hopper import triton as attention
from engine_core.kernels.block_linear import FORMS, group_weight
from engine_core.kernels.gpu import GPU
from engine_core.kernels.linear import triton as portable
from engine_core.kernels.linear.blocks.hopper import triton as blocks
from engine_core.kernels.linear.chain.groups.hopper import triton as group_chain
from engine_core.kernels.linear.chain.hopper import triton as chain
from engine_core.kernels.linear.fp8.hopper import triton as products
from engine_core.kernels.linear.groups.hopper import triton as codes
from engine_core.kernels.linear.held.hopper import triton as held
from engine_core.kernels.linear.hopper import triton as linear
from engine_core.kernels.linear.integers.hopper import triton as integers
from engine_core.kernels.linear.parts.hopper import triton as parts
from engine_core.kernels.linear.teams.hopper import triton as teams
from engine_core.kernels.linear.tiles import (
    PartsTile,
    Tile,
    choose_blocks_tile,
    choose_bytes_tile,
    choose_codes_tile,
    choose_held_tile,
    choose_teams_tile,
    product_tile,
)
from engine_core.kernels.segments.hopper import triton as segments

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16


def prefill(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    groups: int = 2,
) -> None:
    """Causal attention of two prompts."""
    q = torch.zeros(300, heads, head_dim, dtype=dtype)
    k_cache, v_cache = torch.zeros(2, 8, block_size, kv_heads, head_dim, dtype=dtype)
    tables = torch.zeros(2, 8, dtype=torch.int32)
    starts = torch.tensor([0, 100, 300], dtype=torch.int32)
    lens = torch.tensor([100, 200], dtype=torch.int32)
    call = Call(q, k_cache, v_cache, q.clone(), tables, starts, lens, 200, 200, 0, 0.1)
    assert attention.fits(q, k_cache, v_cache)
    attention.prefill(call, 0.1, 132, True, groups)


def gated_linear(
    dtype: torch.dtype, has_bias: bool, width: int = 128, groups: int = 2, divided: bool = True
) -> None:
    """Gate and up, perhaps of rows whose norm is left to be divided."""
    x, weight = undivided(300, 256, dtype), torch.zeros(512, 256, dtype=dtype)
    assert linear.fits(x.values, weight)
    bias = weight[:, 0].contiguous() if has_bias else None
    linear.gated_linear(x.values if divided else x, weight, bias, width, groups)


def quick_gelu_linear(dtype: torch.dtype, has_bias: bool) -> None:
    """Up, activated."""
    x, weight = torch.zeros(300, 256, dtype=dtype), torch.zeros(640, 256, dtype=dtype)
    assert linear.fits(x, weight)
    linear.quick_gelu_linear(x, weight, weight[:, 0].contiguous() if has_bias else None)


def undivided(rows: int, k: int, dtype: torch.dtype) -> DeferredRMSNorm:
    """Rows whose norm is left to be divided."""
    return DeferredRMSNorm(torch.zeros(rows, k, dtype=dtype), torch.zeros(rows, 64), 1e-5)


def epilogue_of(
    ending: str, rows: int, n: int, head_dim: int, x: Tensor, tile: Tile, start: Start
) -> Any:
    """The end that follows the products of ``x [rows, K]``."""
    residual = torch.zeros(rows, n, dtype=x.dtype)
    if ending == "added":
        return portable.Added.of(residual, residual[0], tile)
    if ending == "stored":
        cache = torch.zeros(8, 16, 2, head_dim, dtype=x.dtype)
        angles = torch.zeros(rows, head_dim // 2)
        slots = torch.zeros(rows, dtype=torch.int64)
        return portable.Stored.of(n, angles, angles, cache, cache, slots, False, late=start)
    return portable.Activated.of(x, n, ending == "gated")


def codes_linear(
    rows: int, ending: str, dtype: torch.dtype, start: Start = Start.MULTIPLIED
) -> None:
    """A linear of Llama 3 8B's shapes by 4-bit codes, with what follows its products."""
    n, k = {"gated": (28672, 4096), "added": (4096, 14336), "stored": (6144, 4096)}[ending]
    tile = choose_codes_tile(rows, n, k, ending == "gated", GPU.of_capability((9, 0)))
    assert tile is not None
    scales = torch.zeros(k // 128, n, dtype=torch.float16)
    words = torch.zeros(n, k // 128, 32, dtype=torch.int16)
    weight = GroupWeight(words, scales, scales.to(torch.int8), k, 128, dtype)
    x = undivided(rows, k, dtype)
    epilogue = epilogue_of(ending, rows, n, 128, x.values, tile, start)
    codes.linear(x.values if ending == "added" else x, weight, epilogue, tile)


def teams_linear(
    rows: int,
    ending: str,
    dtype: torch.dtype,
    has_zeros: bool = True,
    start: Start = Start.MULTIPLIED,
) -> None:
    """A linear by 4-bit codes of a program of two or four warp groups."""
    n, k = {"gated": (28672, 4096), "added": (4096, 14336), "stored": (4096, 4096)}[ending]
    tile = choose_teams_tile(rows, n, k, ending == "gated", GPU.of_capability((9, 0)))
    scales = torch.zeros(k // 128, n, dtype=torch.float16)
    words = torch.zeros(n, k // 128, 32, dtype=torch.int16)
    zeros = scales.to(torch.int8) if has_zeros else None
    by_teams(GroupWeight(words, scales, zeros, k, 128, dtype), tile, rows, ending, start)


def bytes_linear(
    rows: int, ending: str, dtype: torch.dtype, start: Start = Start.MULTIPLIED
) -> None:
    """A linear by 8-bit codes of a program of two or three warp groups."""
    n, k = {"gated": (37888, 3584), "added": (4096, 14336), "stored": (6144, 4096)}[ending]
    tile = choose_bytes_tile(rows, n, k, ending == "gated", GPU.of_capability((9, 0)))
    words = torch.zeros(n, k // 128, 32, dtype=torch.int32)
    by_teams(GroupWeight(words, torch.zeros(n), None, k, 0, dtype), tile, rows, ending, start)


def by_teams(weight: GroupWeight, tile: Tile | None, rows: int, ending: str, start: Start) -> None:
    assert tile is not None
    n, k = weight.shape
    x = undivided(rows, k, weight.dtype)
    assert teams.fits(x.values, weight)
    epilogue = epilogue_of(ending, rows, n, 128, x.values, tile, start)
    teams.linear(x.values if ending == "added" else x, weight, epilogue, tile)


def blocks_linear(
    rows: int, ending: str, kind: str, dtype: torch.dtype, start: Start = Start.MULTIPLIED
) -> None:
    """The same by the blocks of a GGUF file."""
    n, k = {"gated": (28672, 4096), "added": (4096, 14336), "stored": (6144, 4096)}[ending]
    form = FORMS[kind]
    raw = torch.zeros(n, k // form.file_block, form.file_bytes, dtype=torch.uint8)
    weight, x = group_weight(raw, kind, dtype), undivided(rows, k, dtype)
    gpu = GPU.of_capability((9, 0))
    tile = choose_blocks_tile(rows, n, k, ending == "gated", gpu, weight.block_kind)
    assert tile is not None
    module = integers if tile.mode == "integers" else blocks
    assert module.fits(x.values, weight)
    epilogue = epilogue_of(ending, rows, n, 128, x.values, tile, start)
    module.linear(x.values if ending == "added" else x, weight, epilogue, tile)


def held_linear(rows: int, ending: str, n: int, k: int, head_dim: int, dtype: torch.dtype) -> None:
    """A linear whose weight waits in shared memory, with what follows its products."""
    tile = choose_held_tile(rows, n, k, ending == "gated", GPU.of_capability((9, 0)))
    assert tile is not None
    x, weight = undivided(rows, k, dtype), torch.zeros(n, k, dtype=dtype)
    assert held.fits(x.values, weight)
    bias = weight[:, 0].contiguous() if ending == "stored" else None
    epilogue = epilogue_of(ending, rows, n, head_dim, x.values, tile, Start.MULTIPLIED)
    held.linear(x.values if ending == "added" else x, weight, epilogue, tile, bias)


def product(rows: int, n: int, k: int, parted: bool, has_bias: bool) -> None:
    """Rows in 8-bit floats by a weight of them, by one of Llama 3 8B's shapes."""
    tile = product_tile(rows, n, k, GPU.of_capability((9, 0)), parted=parted)
    x, weight = (torch.zeros(size, k).to(torch.float8_e4m3fn) for size in (rows, n))
    assert products.fits(x, weight)
    if tile.parts > 1:
        products.sums_of_parts(x, weight, tile)
        return
    scales = (torch.zeros(rows), torch.zeros(n)) if has_bias else (None, None)
    bias = torch.zeros(n, dtype=BFLOAT16) if has_bias else None
    products.product(x, scales[0], weight, scales[1], bias, tile, BFLOAT16)


def parts_linear(cols: int, dtype: torch.dtype) -> None:
    """Parts of 0.5B's down."""
    x, weight = torch.zeros(128, 4864, dtype=dtype), torch.zeros(896, 4864, dtype=dtype)
    assert parts.fits(x, weight)
    parts.partial_sums(x, weight, PartsTile(cols, 4))


def linears_chain(
    hidden: int, intermediate: int, qkv: int, has_bias: bool, bits: int = 8, has_zeros: bool = False
) -> None:
    """From the heads of an attention to the next one's products, or the end, of one row."""
    shapes = [(hidden, hidden), (2 * intermediate, hidden), (hidden, intermediate)]
    shapes += [(qkv, hidden)] if qkv else []
    weights: list[Any] = [
        Fp8Weight(torch.zeros(n, k).to(torch.float8_e4m3fn), torch.zeros(n), BFLOAT16)
        if bits == 8
        else group_codes(n, k, has_zeros)
        for n, k in shapes
    ]
    x = torch.zeros(1, hidden, dtype=BFLOAT16)
    norms = [ChainNorm(x[0], 1e-5)] * 2
    biases = [torch.zeros(n, dtype=BFLOAT16) if has_bias else None for n, _ in shapes]
    of_codes = chain if bits == 8 else group_chain
    of_codes.chain(x, x, Chain(tuple(weights), *norms, tuple(biases)))


def group_codes(n: int, k: int, has_zeros: bool) -> GroupWeight:
    """A weight of 4 bits in groups of 128."""
    words = torch.zeros(n, k // 128, 32, dtype=torch.int16)
    scales = torch.zeros(k // 128, n, dtype=FLOAT16 if has_zeros else BFLOAT16)
    return GroupWeight(
        words, scales, scales.to(torch.int8) if has_zeros else None, k, 128, BFLOAT16
    )


def attend(width: int, longest: int, dtype: torch.dtype) -> None:
    """Attention within one segment."""
    q, k, v = torch.zeros(3, longest, 4, width, dtype=dtype)
    assert segments.fits(q, k, v)
    segments.attend(q, k, v, torch.tensor([0, longest], dtype=torch.int32), longest, 0.1, 132)


LAUNCHES: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "8B": (prefill, (32, 8, 128, 64, BFLOAT16)),
    "0.5B": (prefill, (14, 2, 64, 64, FLOAT16)),
    "1B-long": (prefill, (32, 8, 64, 64, BFLOAT16, 3)),
    "small-blocks": (prefill, (28, 4, 128, 16, BFLOAT16)),
    "large-blocks": (prefill, (8, 8, 128, 256, BFLOAT16)),
    "heads-48": (prefill, (8, 8, 48, 64, BFLOAT16)),
    "heads-80": (prefill, (35, 5, 80, 64, BFLOAT16)),
    "heads-96": (prefill, (16, 2, 96, 16, FLOAT16)),
    "heads-192": (prefill, (12, 3, 192, 64, BFLOAT16)),
    "heads-256": (prefill, (14, 2, 256, 64, BFLOAT16)),
    "gated": (gated_linear, (BFLOAT16, False)),
    "gated-bias": (gated_linear, (FLOAT16, True)),
    "gated-narrow": (gated_linear, (BFLOAT16, False, 64)),
    "gated-undivided": (gated_linear, (BFLOAT16, True, 64, 2, False)),
    "gated-undivided-wide": (gated_linear, (BFLOAT16, True, 128, 2, False)),
    "gated-three": (gated_linear, (BFLOAT16, False, 64, 3)),
    "gated-odd": (gated_linear, (BFLOAT16, False, 80)),
    "gated-odd-widest": (gated_linear, (BFLOAT16, True, 144)),
    "gated-widest": (gated_linear, (BFLOAT16, False, 160)),
    "gated-odd-three": (gated_linear, (BFLOAT16, True, 48, 3, False)),
    "quick-gelu": (quick_gelu_linear, (BFLOAT16, False)),
    "quick-gelu-bias": (quick_gelu_linear, (BFLOAT16, True)),
    "codes-gated-1": (codes_linear, (1, "gated", BFLOAT16)),
    "codes-gated-32": (codes_linear, (32, "gated", BFLOAT16)),
    "codes-added-1": (codes_linear, (1, "added", BFLOAT16)),
    "codes-added-64": (codes_linear, (64, "added", FLOAT16)),
    "codes-stored-16": (codes_linear, (16, "stored", BFLOAT16)),
    "codes-stored-32": (codes_linear, (32, "stored", FLOAT16)),
    "codes-waited-32": (codes_linear, (32, "stored", BFLOAT16, Start.WAITED)),
    "teams-gated-2": (teams_linear, (2, "gated", BFLOAT16)),
    "teams-gated-32": (teams_linear, (32, "gated", BFLOAT16)),
    "teams-gated-64": (teams_linear, (64, "gated", FLOAT16, False)),
    "teams-gated-72": (teams_linear, (72, "gated", BFLOAT16)),
    "teams-gated-128": (teams_linear, (128, "gated", FLOAT16, False)),
    "teams-added-100": (teams_linear, (100, "added", BFLOAT16)),
    "teams-added-256": (teams_linear, (256, "added", BFLOAT16, False)),
    "teams-added-32": (teams_linear, (32, "added", BFLOAT16, False)),
    "teams-stored-17": (teams_linear, (17, "stored", FLOAT16)),
    "teams-waited-17": (teams_linear, (17, "stored", BFLOAT16, True, Start.WAITED)),
    "bytes-gated-1": (bytes_linear, (1, "gated", BFLOAT16)),
    "bytes-gated-64": (bytes_linear, (64, "gated", FLOAT16)),
    "bytes-gated-80": (bytes_linear, (80, "gated", BFLOAT16)),
    "bytes-gated-128": (bytes_linear, (128, "gated", BFLOAT16)),
    "bytes-added-32": (bytes_linear, (32, "added", FLOAT16)),
    "bytes-added-160": (bytes_linear, (160, "added", BFLOAT16)),
    "bytes-added-256": (bytes_linear, (256, "added", BFLOAT16)),
    "bytes-stored-16": (bytes_linear, (16, "stored", BFLOAT16)),
    "bytes-waited-100": (bytes_linear, (100, "stored", BFLOAT16, Start.WAITED)),
    "blocks-gated-1": (blocks_linear, (1, "gated", "Q4_K", BFLOAT16)),
    "blocks-gated-8": (blocks_linear, (8, "gated", "Q4_K", BFLOAT16)),
    "blocks-added-4": (blocks_linear, (4, "added", "Q5_K", FLOAT16)),
    "blocks-gated-32": (blocks_linear, (32, "gated", "Q4_K", BFLOAT16)),
    "blocks-added-16": (blocks_linear, (16, "added", "Q4_K", BFLOAT16)),
    "blocks-added-32": (blocks_linear, (32, "added", "Q5_K", FLOAT16)),
    "blocks-stored-1": (blocks_linear, (1, "stored", "Q6_K", BFLOAT16)),
    "blocks-stored-32": (blocks_linear, (32, "stored", "Q4_K", BFLOAT16)),
    "blocks-waited-32": (blocks_linear, (32, "stored", "Q4_K", BFLOAT16, Start.WAITED)),
    "blocks-waited-4": (blocks_linear, (4, "stored", "Q4_K", BFLOAT16, Start.WAITED)),
    "floats-gated-1": (blocks_linear, (1, "gated", "Q4_1", BFLOAT16)),
    "floats-added-3": (blocks_linear, (3, "added", "Q8_0", FLOAT16)),
    "floats-stored-1": (blocks_linear, (1, "stored", "Q5_0", BFLOAT16)),
    "floats-gated-16": (blocks_linear, (16, "gated", "Q8_0", BFLOAT16)),
    "floats-stored-16": (blocks_linear, (16, "stored", "Q5_1", BFLOAT16)),
    "floats-gated-32": (blocks_linear, (32, "gated", "Q4_0", BFLOAT16)),
    "products-1": (product, (1, 28672, 4096, False, True)),
    "products-parts-16": (product, (16, 4096, 14336, True, False)),
    "products-17": (product, (17, 6144, 4096, False, False)),
    "products-parts-96": (product, (96, 4096, 14336, True, False)),
    "products-wide-32": (product, (32, 28672, 4096, False, True)),
    "products-wide-150": (product, (150, 28672, 4096, False, True)),
    "products-wide-192": (product, (192, 28672, 4096, False, True)),
    "products-wide-256": (product, (256, 28672, 4096, False, True)),
    "held-gated-8": (held_linear, (8, "gated", 9728, 896, 0, BFLOAT16)),
    "held-gated-16": (held_linear, (16, "gated", 9728, 896, 0, FLOAT16)),
    "held-added-8": (held_linear, (8, "added", 896, 4864, 0, BFLOAT16)),
    "held-added-64": (held_linear, (64, "added", 896, 896, 0, BFLOAT16)),
    "held-added-225": (held_linear, (225, "added", 896, 896, 0, BFLOAT16)),
    "held-stored-3": (held_linear, (3, "stored", 1152, 896, 64, BFLOAT16)),
    "held-stored-16": (held_linear, (16, "stored", 1920, 1280, 128, FLOAT16)),
    "parts": (parts_linear, (64, BFLOAT16)),
    "parts-wide": (parts_linear, (128, FLOAT16)),
    "chain": (linears_chain, (1024, 1536, 1024, False)),
    "chain-bias": (linears_chain, (4096, 14336, 6144, True)),
    "chain-codes": (linears_chain, (1024, 1536, 1024, False, 4)),
    "chain-codes-zeros": (linears_chain, (4096, 14336, 6144, True, 4, True)),
    "chain-last": (linears_chain, (4096, 14336, 0, True)),
    "chain-codes-last": (linears_chain, (4096, 14336, 0, True, 4, True)),
    "segments-64": (attend, (64, 300, BFLOAT16)),
    "segments-64-long": (attend, (64, 2000, BFLOAT16)),
    "segments-80": (attend, (80, 2000, FLOAT16)),
    "segments-128": (attend, (128, 2000, BFLOAT16)),
}


def resources(cubin: bytes) -> str:
    """Registers and bytes of stack of the kernel in a cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return " ".join(found.groups())


def main(names: list[str]) -> None:
    """Compile the launches of these names, or all."""
    compiled = compile_launches()
    modules: tuple[Any, ...] = (
        *(linear, codes, teams, blocks, integers, held, products, parts, chain, group_chain),
    )
    for module in modules:
        module.pdl_options = lambda device: {"PDL": True, "launch_pdl": True}
    for name in names or LAUNCHES:
        launch, arguments = LAUNCHES[name]
        launch(*arguments)
        kernel = compiled[-1]
        shared, ptx = kernel.metadata.shared, kernel.asm["ptx"]
        kinds = (STORES, TILES, LOADS, LAUNCH) if "griddepcontrol" in ptx else ()
        early = [len(early_lines(ptx, kind)) for kind in kinds] or [0, 0, 0, 0]
        numbers = " ".join(map(str, (*early, len(LAUNCH.findall(ptx)))))
        sys.stdout.write(f"{name} {shared} {resources(kernel.asm['cubin'])} {numbers}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
