"""Linears by GGUF blocks in a GPU's layout, against the gguf package's numbers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import forkserver
import gguf
import pytest
import torch
from gguf_blocks import random_blocks
from kernel_cases import TOLERANCE, error
from torch import Tensor

from engine_core.kernels import DeferredRMSNorm, GroupWeight, linear
from engine_core.kernels.block_linear import FORMS, group_weight
from engine_core.kernels.gpu import GPU

# Rows that are no whole tile, and of the small blocks no whole block of 128 columns either.
N = 24
HOPPER = GPU.of_capability((9, 0))


def columns_of(type_name: str) -> int:
    return 256 if FORMS[type_name].file_block == 256 else 160


def made(
    type_name: str, n: int, k: int, dtype: torch.dtype, device: str
) -> tuple[GroupWeight, Tensor]:
    """A random matrix, and the gguf package's numbers of it."""
    raw, numbers = random_blocks(type_name, n, k)
    weight = group_weight(torch.from_numpy(raw).to(device), type_name, dtype)
    return weight, torch.from_numpy(numbers).to(device)


@pytest.mark.parametrize("type_name", FORMS)
def test_numbers_are_those_of_the_gguf_package(type_name: str, launch_device: str) -> None:
    """Bit for bit: a factor times a code is exact in float32."""
    from engine_core.kernels.linear.groups import triton

    k = columns_of(type_name)
    weight, expected = made(type_name, N, k, torch.float32, launch_device)
    assert weight.shape == expected.shape
    ids = torch.tensor([[N - 1, 0], [7, 7]], device=launch_device)
    assert torch.equal(weight.take(ids), expected[ids])
    assert torch.equal(triton.numbers(weight, torch.float32, ids.view(-1)), expected[ids.view(-1)])
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(weight.numbers(dtype), expected.to(dtype))
        assert torch.equal(triton.numbers(weight, dtype), expected.to(dtype))
    assert weight.nbytes == FORMS[type_name].group_bytes(N, k)


@pytest.mark.parametrize("type_name", FORMS)
def test_memory_is_that_of_the_file(type_name: str) -> None:
    form, kind = FORMS[type_name], gguf.GGMLQuantizationType[type_name]
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    in_file = 64 * 2048 // size * nbytes
    assert in_file <= form.group_bytes(64, 2048) <= (1.03 if form.layered else 1.0) * in_file


def test_parts_are_joined_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_core.kernels.block_linear import forms

    monkeypatch.setattr(forms, "_CHUNK", 16 * 256)
    weight, expected = made("Q5_K", N, 256, torch.float32, "cpu")
    assert torch.equal(weight.dense(), expected)


@pytest.mark.parametrize("type_name", FORMS)
def test_products(type_name: str, launch_device: str) -> None:
    """In both orders of the operands, whole and in parts, gated, and without a norm's division."""
    from engine_core.kernels.linear import triton

    # Only a GPU multiplies bfloat16; the interpreter's products of it are wrong.
    dtype = torch.bfloat16 if launch_device == "cuda" else torch.float32
    k = columns_of(type_name)
    weight, numbers = made(type_name, N, k, dtype, launch_device)
    block = 64 if FORMS[type_name].group == 16 else 128
    chosen = weight.tile(4, False, HOPPER)
    assert chosen is not None
    assert chosen.block_k == block
    x = (torch.randn(5, k, device=launch_device) / numbers.norm() * N**0.5).to(dtype)
    bias = torch.randn(N, device=launch_device).to(dtype)
    exact = x.double() @ numbers.double().T
    reader = triton.reader_of(weight)
    squares = torch.rand(5, 3, device=launch_device) + 0.5
    inverse = (squares.double().sum(-1, keepdim=True) / k + 1e-5).rsqrt()
    deferred, tile = DeferredRMSNorm(x, squares, 1e-5), triton.Tile(16, block, 2)
    got = triton.linear(deferred, reader, triton.Activated.of(x, N), tile, bias)
    assert error(got, exact * inverse + bias.double()) < TOLERANCE[dtype]
    gate, up = (exact + bias.double()).chunk(2, -1)
    tile = triton.Tile(16, block, mode="wx")
    got = triton.linear(x, reader, triton.Activated.of(x, N, True), tile, bias)
    assert error(got, gate * torch.sigmoid(gate) * up) < TOLERANCE[dtype]


def test_minima_have_tiles_that_leave_them_registers() -> None:
    ada = GPU.of_capability((8, 9))
    for type_name, minima in (("Q4_K", True), ("Q6_K", False)):
        weight, _ = made(type_name, 128, 512, torch.bfloat16, "cpu")
        for rows, crowded in ((32, False), (64, minima)):
            on_hopper, on_ada = (weight.tile(rows, True, each) for each in (HOPPER, ada))
            assert on_hopper is not None
            assert on_ada is not None
            assert (on_hopper.num_warps, on_ada.block_n) == ((8, 32) if crowded else (4, 64))


def test_float16_products(launch_device: str) -> None:
    from engine_core.kernels.linear import triton

    for type_name in ("Q4_K", "Q6_K"):
        weight, numbers = made(type_name, N, 256, torch.float16, launch_device)
        x = (torch.randn(3, 256, device=launch_device) / numbers.norm()).half()
        tile = triton.Tile(32, 64 if type_name == "Q6_K" else 128, mode="wx")
        got = triton.linear(x, triton.reader_of(weight), triton.Activated.of(x, N), tile)
        assert error(got, x.double() @ numbers.double().T) < TOLERANCE[torch.float16]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 31, 64, 65, 256, 300])
@pytest.mark.parametrize("type_name", FORMS)
def test_chosen_kernels(type_name: str, rows: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        weight, numbers = made(type_name, 4096, 2048, dtype, "cuda")
        x = torch.randn(rows, 2048, device="cuda").to(dtype) / 64
        exact = x.double() @ numbers.double().T
        for gated in (False, True):
            gate, up = exact.chunk(2, -1)
            expected = gate * torch.sigmoid(gate) * up if gated else exact
            got = linear(x, weight, gated=gated)
            assert (got.double() - expected).norm() / expected.norm() < 0.006
        ids = torch.randint(4096, (rows,), device="cuda")
        assert torch.equal(weight.take(ids), numbers[ids].to(dtype))


MORE_FORMS = ["Q4_K", "Q5_1", "all_experts", "all_rank_sums", "sampling", "few_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["int4", "Q6_K", "experts", "rank_sums", "row_codes", "head", "plain_tokens"],
        pytest.param(MORE_FORMS, marks=pytest.mark.long),
    ],
    ids=["each kind", "more forms"],
)
def test_they_compile_for_a_gpu_that_is_not_there(names: list[str], tmp_path: Path) -> None:
    """Ways to keep codes and scales, experts, sums over ranks, rows in codes, heads, sampling.

    By a child, for here kernels are interpreted. Each form of a kernel takes seconds.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    script = Path(__file__).with_name("compiled_ahead.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = forkserver.run(
        [sys.executable, str(script), *names],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "".join(f"{name} True\n" for name in names), done.stderr
