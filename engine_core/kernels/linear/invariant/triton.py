"""Linears on a GPU whose rows do not depend on how many there are.

An entry of the result is one chain of products, added up in the order of K by the matrix units, 16
at a time, and rounded once. That order is the same whatever the tile and whichever operand comes
first, so that few and many rows may be cut differently; what changes it, and what no kernel here
does, is to split K. cuBLAS splits it where the rows are few (He et al., "Defeating nondeterminism
in LLM inference", 2025).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine_core.kernels.gpu import gpu_of
from engine_core.kernels.launch.triton import (
    launch_dependents,
    num_multiprocessors,
    pdl_options,
    wait,
)
from engine_core.kernels.linear import tiles
from engine_core.kernels.linear import triton as few_rows
from engine_core.kernels.linear.reference import Activation, activate


@triton.jit(do_not_specialize=["num_rows", "num_programs", "K"])
def _matmul_kernel(
    out_desc,
    x_desc,
    weight_desc,
    bias_ptr,
    num_rows,
    num_programs,
    K,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles of ``x [M, K] @ weight [N, K].T``; a program takes every ``num_programs``-th.

    Eight tiles of rows share the tiles of the weight that they meet in the L2 cache. K is no
    constant: of a single step Triton would make the bias what its products are added to.
    """
    launch_dependents(PDL)
    ROW_TILES: tl.constexpr = 8
    COL_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    wait(PDL)
    for tile in tl.range(tl.program_id(0), row_tiles * COL_TILES, num_programs):
        first = tile // (ROW_TILES * COL_TILES) * ROW_TILES
        size = tl.minimum(row_tiles - first, ROW_TILES)
        m = (first + tile % (ROW_TILES * COL_TILES) % size) * BLOCK_M
        n = tile % (ROW_TILES * COL_TILES) // size * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            x = x_desc.load([m, k])
            weight = weight_desc.load([n, k])
            acc = tl.dot(x, weight.T, acc)
        if HAS_BIAS:
            cols = n + tl.arange(0, BLOCK_N)
            acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        out_desc.store([m, n], acc.to(out_desc.dtype))


def _block(rows: int, n: int) -> tuple[int, int, int, int, int]:
    """Rows, columns and K of a tile, its warps, and tiles in flight, for many rows.

    Chosen on an H200 in bfloat16 at the shapes of Llama 3 8B and Qwen2 0.5B.
    """
    if n <= 2048:
        if rows <= 256:
            return 64, 32, 128, 4, 5
        if rows <= 1024:
            return 64, 64, 128, 4, 4
        return (128, 128, 64, 4, 4) if rows <= 4096 else (128, 256, 64, 8, 3)
    # The largest tiles of which there are enough.
    if triton.cdiv(rows, 128) * triton.cdiv(n, 256) >= 96:
        return 128, 256, 64, 8, 3
    if triton.cdiv(rows, 128) * triton.cdiv(n, 128) >= 96:
        return 128, 128, 64, 4, 4
    return 64, 128, 64, 4, 5


def _has_tensor_maps(x: Tensor, n: int) -> bool:
    """Whether rows of x, the weight and the result lie at multiples of 16 bytes, and are 16-bit."""
    return (
        x.dtype != torch.float32
        and x.shape[1] % 8 == 0
        and n % 8 == 0
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and (x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) >= (9, 0))
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gated: bool,
    activation: Activation | None = None,
) -> Tensor:
    """``x [..., K]`` by ``weight [N, K]`` to N columns, or N / 2 if ``gated``; activated.

    The weight is contiguous and begins at a multiple of 16 bytes.
    """
    n, k = weight.shape
    shape = x.shape[:-1]
    x = x.reshape(-1, k)
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows = len(x)
    if num_rows == 0:
        return x.new_empty((*shape, n // 2 if gated else n))
    if num_rows <= tiles.few_rows_of_invariant(n) or not _has_tensor_maps(x, n):
        tile = tiles.choose_invariant_tile(num_rows, n, k, gated, gpu_of(x.device), x.dtype)
        epilogue = few_rows.Activated.of(x, n, gated, activation)
        out = few_rows.linear(x, few_rows.DenseWeight(weight), epilogue, tile, bias)
        return out.view(*shape, -1)
    block_m, block_n, block_k, num_warps, num_stages = _block(num_rows, n)
    out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(num_rows, block_m) * triton.cdiv(n, block_n)
    # Of small tiles two fit on a multiprocessor.
    programs = min(blocks, num_multiprocessors(x.device) * (1 if num_warps == 8 else 2))
    _matmul_kernel[(programs,)](
        TensorDescriptor.from_tensor(out, [block_m, block_n]),
        TensorDescriptor.from_tensor(x, [block_m, block_k]),
        TensorDescriptor.from_tensor(weight, [block_n, block_k]),
        bias,
        num_rows,
        programs,
        k,
        N=n,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=num_stages,
        HAS_BIAS=bias is not None,
        num_warps=num_warps,
        **pdl_options(x.device),
    )
    return activate(out, gated, activation).view(*shape, -1)
