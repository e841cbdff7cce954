"""Linears of few rows, with and without the gated activation."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_cases import TOLERANCE, check_replays, error
from random_examples import pairwise
from torch import Tensor

from engine_core.kernels import (
    DeferredRMSNorm,
    linear,
    linear_add,
    linear_add_norm,
    rms_norm,
)
from engine_core.kernels.gpu import GPU
from engine_core.kernels.launch.quick import Quick, quickly
from engine_core.kernels.linear import tiles

HOPPER, ADA = (GPU.of_capability(capability) for capability in ((9, 0), (8, 9)))
SHAPES = [(1, 40, 96), (3, 40, 96), (17, 40, 64), (5, 6, 24), (2, 130, 72), (64, 16, 8)]


def case(
    rows: int, n: int, k: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """x with gaps between its rows, a weight of unit variance in its results, a bias."""
    x = torch.randn(rows, k + 8, device=device)[:, :k].to(dtype)
    wide = torch.empty(rows, k + 8, device=device, dtype=dtype)
    wide[:, :k] = x
    weight = (torch.randn(n, k, device=device) / k**0.5).to(dtype)
    return wide[:, :k], weight, torch.randn(n, device=device).to(dtype)


def apart(values: Tensor) -> Tensor:
    """The same with a gap between any two."""
    return values.repeat_interleave(2, -1)[..., ::2]


def formula(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    y = x.double() @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if not gated:
        return y
    gate, up = y.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_the_formula(dtype: torch.dtype, with_bias: bool, gated: bool) -> None:
    x, weight, bias = case(3, 40, 96, dtype)
    chosen = bias if with_bias else None
    got = linear(x.view(3, 1, 96), weight, chosen, gated=gated)
    assert got.shape == (3, 1, 20 if gated else 40)
    assert got.dtype == dtype
    assert error(got[:, 0], formula(x, weight, chosen, gated)) < TOLERANCE[dtype]


def test_no_rows() -> None:
    assert linear(torch.zeros(0, 8), torch.zeros(4, 8), gated=True).shape == (0, 2)


def test_preconditions() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(5, 8)
    with pytest.raises(ValueError, match=r"weight \(5, 8\)"):
        linear(torch.zeros(2, 7), weight)
    with pytest.raises(ValueError, match=r"bias \(4,\)"):
        linear(x, weight, torch.zeros(4))
    with pytest.raises(ValueError, match="even N"):
        linear(x, weight, gated=True)
    with pytest.raises(ValueError, match="quick_gelu is the activation of a result"):
        linear(x, weight[:4], gated=True, activation="quick_gelu")
    for op in (linear_add, linear_add_norm):
        with pytest.raises(ValueError, match=rf"{op.__name__}: .*\(2, 4\)"):
            op(x, weight, None, torch.zeros(2, 4), torch.ones(5), 1e-5)
        with pytest.raises(ValueError, match=r"norm_weight \(4,\)"):
            op(x, weight, None, torch.zeros(2, 5), torch.ones(4), 1e-5)


TILES: list[dict[str, Any]] = [
    {"block_n": 16, "block_k": 32},
    {"block_n": 16, "block_k": 32, "splits": 2},
    {"block_n": 32, "block_k": 16, "splits": 4, "mode": "wx"},
    {"block_n": 16, "block_k": 64, "mode": "wx"},
    {"block_n": 4, "block_k": 32, "mode": "vector"},
    {"block_n": 8, "block_k": 16, "splits": 3, "mode": "vector"},
]


@pytest.mark.parametrize(
    ("shape", "tile", "gated"), pairwise(SHAPES, TILES, [False, True]), ids=str
)
def test_kernel(
    shape: tuple[int, int, int], tile: dict[str, Any], gated: bool, launch_device: str
) -> None:
    from engine_core.kernels.linear import triton

    if tile.get("mode") == "vector" and shape[0] > 1:
        shape = (1, *shape[1:])
    # Not bfloat16: the interpreter's products of it are wrong.
    for dtype, with_bias in ((torch.float32, True), (torch.float16, False)):
        x, weight, bias = case(*shape, dtype, launch_device)
        chosen = bias if with_bias else None
        expected = formula(x, weight, chosen, gated)
        for _ in range(2):  # the second launch finds the counts that the first one left
            epilogue = triton.Activated.of(x, len(weight), gated)
            reader = triton.DenseWeight(weight)
            got = triton.linear(x, reader, epilogue, triton.Tile(**tile), chosen)
            assert error(got, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("gated", [False, True])
def test_weights_that_wait_in_registers_give_the_same_bits(
    gated: bool, monkeypatch: pytest.MonkeyPatch, launch_device: str
) -> None:
    from engine_core.kernels.linear import triton

    x, weight, bias = case(1, 40, 264, torch.float16, launch_device)
    outs = []
    for most in (96, 0):
        monkeypatch.setattr(tiles, "HELD_REGISTERS", most)
        tile = tiles.Tile(4, 64, 1, "vector")
        held = tiles.tiles_held(tile, 10, 264, gated, 8)
        assert held == (5 if most else 0)
        epilogue = triton.Activated.of(x, len(weight), gated)
        outs.append(triton.linear(x, triton.DenseWeight(weight), epilogue, tile, bias))
    assert torch.equal(*outs)
    assert error(outs[0], formula(x, weight, bias, gated)) < TOLERANCE[torch.float16]


ACTIVATIONS: list[tuple[str, bool]] = [
    (activation, gated) for activation in ("silu", "gelu", "gelu_tanh") for gated in (False, True)
]
ACTIVATIONS.append(("quick_gelu", False))


def activated(y: Tensor, activation: str, gated: bool) -> Tensor:
    gate, up = y.chunk(2, dim=-1) if gated else (y, torch.ones_like(y))
    if activation == "silu":
        return gate * torch.sigmoid(gate) * up
    if activation == "quick_gelu":
        return gate * torch.sigmoid(1.702 * gate) * up
    if activation == "gelu":
        return gate * (1 + torch.erf(gate / 2**0.5)) / 2 * up
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return gate * (1 + torch.tanh(inner)) / 2 * up


@pytest.mark.parametrize(("activation", "gated"), ACTIVATIONS)
def test_activations_are_the_formulas(activation: Any, gated: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias = case(3, 40, 96, dtype)
        got = linear(x, weight, bias, gated=gated, activation=activation)
        expected = activated(formula(x, weight, bias, False), activation, gated)
        assert error(got, expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("activation", "gated", "tile"),
    [
        # Each with one of three tiles, in turn.
        pytest.param(*activation, tile, marks=() if i % 3 == j else pytest.mark.long)
        for i, activation in enumerate(ACTIVATIONS)
        for j, tile in enumerate((TILES[1], TILES[3], TILES[4]))
    ],
    ids=str,
)
def test_kernel_activates(
    activation: str, gated: bool, tile: dict[str, Any], launch_device: str
) -> None:
    from engine_core.kernels.linear import triton

    rows = 1 if tile.get("mode") == "vector" else 3
    x, weight, bias = case(rows, 40, 96, torch.float32, launch_device)
    expected = activated(formula(x, weight, bias, False), activation, gated)
    epilogue = triton.Activated.of(x, len(weight), gated, activation)
    got = triton.linear(x, triton.DenseWeight(weight), epilogue, triton.Tile(**tile), bias)
    assert error(got, expected) < TOLERANCE[torch.float32]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("activation", "gated"), ACTIVATIONS)
def test_activations_on_a_gpu(activation: Any, gated: bool, deterministic: bool) -> None:
    for rows in (1, 32, 100, 300):
        for n, k in ((9728, 896), (4096, 1024), (6144, 4096)):
            x, weight, bias = case(rows, n, k, torch.bfloat16, "cuda")
            x = x.contiguous()
            for chosen in (None, bias):
                options = {"gated": gated, "deterministic": deterministic}
                got = linear(x, weight, chosen, activation=activation, **options)
                product = formula(x, weight, chosen, False)
                expected = activated(product, activation, gated)
                assert error(got, expected) < 2 * TOLERANCE[torch.bfloat16]


def check_norm_between(op_add: Any, op: Any, rows: int, device: str, dtype: torch.dtype) -> None:
    """A linear, the sum with the residual, an RMSNorm, and a gated linear, with one norm fused."""
    hidden, out = 48, 20
    x, first, bias = case(rows, hidden, 64, dtype, device)
    _, second, second_bias = case(rows, 2 * out, hidden, dtype, device)
    residual = torch.randn(rows, hidden, device=device).to(dtype)
    norm_weight = apart((1 + 0.3 * torch.randn(hidden, device=device)).to(dtype))
    total = (formula(x, first, bias, False).to(dtype).double() + residual.double()).to(dtype)
    mean = total.double().square().mean(-1, keepdim=True)
    normed = total.double() / (mean + 1e-5).sqrt() * norm_weight.double()
    expected = formula(normed, second, second_bias, True)
    for _ in range(2):  # the second launch finds the counts that the first one left
        deferred, got_total = op_add(x, first, bias, residual, norm_weight, 1e-5)
        tolerance = 2 * TOLERANCE[dtype]
        assert error(got_total, total) < tolerance
        assert error(deferred.squares.double().sum(-1), total.double().square().sum(-1)) < (
            hidden * tolerance
        )
        got = op(replace(deferred, squares=apart(deferred.squares)), second, second_bias)
        assert error(got, expected) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_between_two_linears(dtype: torch.dtype) -> None:
    def gated(x: DeferredRMSNorm, weight: Tensor, bias: Tensor) -> Tensor:
        return linear(x, weight, bias, gated=True)

    check_norm_between(linear_add, gated, 3, "cpu", dtype)


@pytest.mark.parametrize("most_rows", [16, 128])
@pytest.mark.parametrize("options", TILES, ids=str)
def test_kernel_of_a_norm_between_two_linears(
    options: dict[str, Any], most_rows: int, launch_device: str
) -> None:
    from engine_core.kernels.linear import triton

    tile = triton.Tile(**options, most_rows=most_rows)

    def add(
        x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[DeferredRMSNorm, Tensor]:
        added = triton.Added.of(residual, norm_weight, tile)
        values = triton.linear(x, triton.DenseWeight(weight), added, tile, bias)
        return DeferredRMSNorm(values, added.squares, eps), added.total

    def gated(x: DeferredRMSNorm, weight: Tensor, bias: Tensor) -> Tensor:
        epilogue = triton.Activated.of(x.values, len(weight), True)
        return triton.linear(x, triton.DenseWeight(weight), epilogue, tile, bias)

    for dtype in (torch.float32, torch.float16):
        rows = 1 if tile.mode == "vector" else 21
        check_norm_between(add, gated, rows, launch_device, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [1, 20, 100, 300])
def test_vectors_with_gaps_are_read_as_what_they_are(rows: int) -> None:
    x, weight, bias = case(rows, 2048, 2048, torch.bfloat16, "cuda")
    norm_weight = torch.rand_like(bias)
    squares = torch.rand(rows, 4, device="cuda") * 1024
    deferred = DeferredRMSNorm(x.contiguous(), squares, 1e-5)
    for gated in (False, True):
        got = linear(replace(deferred, squares=apart(squares)), weight, apart(bias), gated=gated)
        assert torch.equal(got, linear(deferred, weight, bias, gated=gated))
    got, total = linear_add(x, weight, apart(bias), x, apart(norm_weight), 1e-5)
    wanted, wanted_total = linear_add(x, weight, bias, x, norm_weight, 1e-5)
    assert torch.equal(got.values, wanted.values)
    assert torch.equal(total, wanted_total)
    got, _ = linear_add_norm(x, weight, apart(bias), x, norm_weight, 1e-5)
    assert torch.equal(got, linear_add_norm(x, weight, bias, x, norm_weight, 1e-5)[0])
    with pytest.raises(ValueError, match="weight and bias must be contiguous"):
        linear_add_norm(x, weight, bias, x, apart(norm_weight), 1e-5)


def check_linear_add_norm(
    shape: tuple[int, int, int], dtype: torch.dtype, with_bias: bool, device: str
) -> None:
    """Against the formula in float32; the residual is overwritten only by leave."""
    rows, hidden, k = shape
    x, weight, bias = case(rows, hidden, k, dtype, device)
    x = x.contiguous()
    chosen = bias if with_bias else None
    residual = torch.randn(1, rows, hidden, device=device).to(dtype)
    norm_weight = (1 + 0.3 * torch.randn(hidden, device=device)).to(dtype)
    before = residual.clone()
    expected = formula(x, weight, chosen, False) + before.double()
    for may_overwrite in (False, True):
        normed, total = linear_add_norm(
            x[None], weight, chosen, residual, norm_weight, 1e-5, may_overwrite=may_overwrite
        )
        assert total is residual or torch.equal(residual, before)
        assert may_overwrite or total is not residual
        assert normed.shape == total.shape == residual.shape
        assert normed.dtype == total.dtype == dtype
        assert error(total[0], expected) < TOLERANCE[dtype]
        mean = total.double().square().mean(-1, keepdim=True)
        divided = total.double() / (mean + 1e-5).sqrt() * norm_weight.double()
        assert error(normed, divided) < 2 * TOLERANCE[dtype]
    normed, total = linear_add_norm(
        *(x[None], weight, chosen, before, norm_weight, 1e-5), norm_bias=bias, centred=True
    )
    assert error(total[0], expected) < TOLERANCE[dtype]
    centred = torch.nn.functional.layer_norm(
        total.double(), (hidden,), norm_weight.double(), bias.double(), 1e-5
    )
    assert error(normed, centred) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_and_the_norm_after_it(dtype: torch.dtype, with_bias: bool) -> None:
    for rows in (0, 3, 96, 300):
        check_linear_add_norm((rows, 48, 64), dtype, with_bias, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("hidden", "k"), [(4096, 4096), (896, 896), (896, 4864), (1000, 904), (99, 70)]
)
def test_a_linear_and_the_norm_after_it_on_a_gpu(
    hidden: int, k: int, dtype: torch.dtype, with_bias: bool
) -> None:
    for rows in (0, 1, 64, 65, 96, 256, 257, 1030):
        check_linear_add_norm((rows, hidden, k), dtype, with_bias, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_residual_is_overwritten_where_cublas_adds_it() -> None:
    x, weight, bias = case(300, 896, 896, torch.bfloat16, "cuda")
    x = x.contiguous()
    residual = torch.randn(300, 896, device="cuda").to(torch.bfloat16)
    for given, may_overwrite, overwritten in [
        (None, True, True),
        (None, False, False),
        (bias, True, False),
    ]:
        options = {"may_overwrite": may_overwrite}
        _, total = linear_add_norm(x, weight, given, residual, bias, 1e-5, **options)
        assert (total is residual) == overwritten


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [96, 256, 300])
def test_linears_and_norms_after_them_in_a_graph(rows: int) -> None:
    """As without one: each launch waits for what it reads, and none is asked for by the host."""
    x, up, _ = case(rows, 9728, 896, torch.bfloat16, "cuda")
    down = (torch.randn(896, 4864, device="cuda") / 4864**0.5).to(torch.bfloat16)
    norm_weight = torch.rand(896, device="cuda").to(torch.bfloat16) + 0.5

    def chain() -> tuple[Tensor, Tensor]:
        total = x.clone(memory_format=torch.contiguous_format)
        normed = rms_norm(total, norm_weight, 1e-5)
        for _ in range(6):
            gated = linear(normed, up, gated=True)
            normed, total = linear_add_norm(
                gated, down, None, total, norm_weight, 1e-5, may_overwrite=True
            )
        return normed, total

    check_replays(chain, chain())


@pytest.mark.parametrize(
    ("n", "k", "parts"),
    [
        *[(4096, 4096, 2), (4096, 14336, 2), (3584, 3584, 2), (3584, 18944, 2)],
        *[(896, 896, 2), (896, 4864, 4), (1536, 8960, 4)],
        # Wider than any that was seen, and parts whose rows would not begin at 16 bytes.
        *[(5120, 5120, 1), (896, 904, 1), (896, 4872, 1)],
    ],
)
def test_parts_of_a_linear_are_chosen_as_they_were_seen_to_be_faster(
    n: int, k: int, parts: int
) -> None:
    assert [tiles.choose_parts(rows, n, k, HOPPER) for rows in (65, 96, 256)] == [parts] * 3
    for rows in (0, 1, 64, 257, 8192):
        assert tiles.choose_parts(rows, n, k, HOPPER) == 1
    assert tiles.choose_parts(96, n, k, None) == 1
    assert tiles.choose_parts(96, n, k, ADA) == 1
    assert tiles.table_of(HOPPER).adds_from == tiles.table_of(ADA).adds_from == 257


@pytest.mark.parametrize(
    ("rows", "n", "k", "tile"),
    [
        *[(65, 896, 4864, (64, 6)), (128, 896, 4864, (64, 6)), (256, 896, 4864, (64, 3))],
        *[(128, 768, 4096, (64, 6)), (128, 512, 2048, (64, 4))],
        # Where cuBLAS is as fast, asks for whole rows, or is not asked for parts.
        *[(192, 896, 4864, None), (128, 2048, 8192, None), (128, 4096, 14336, None)],
        *[(128, 896, 4872, None), (128, 896, 896, None), (64, 896, 4864, None)],
        *[(224, 896, 4864, None), (128, 768, 1536, None)],
    ],
)
def test_parts_of_short_results_are_by_a_kernel_of_hopper(
    rows: int, n: int, k: int, tile: tuple[int, int] | None
) -> None:
    """Of which two thirds of the multiprocessors have a program at most."""
    assert tiles.choose_parts_tile(rows, n, k, HOPPER) == tile
    if tile is not None:
        cols, parts = tile
        assert parts * -(-rows // 128) * -(-n // cols) <= 2 / 3 * 132
        assert tiles.choose_parts(rows, n, k, HOPPER) > 1
    assert tiles.choose_parts_tile(rows, n, k, None) is None
    assert tiles.choose_parts_tile(rows, n, k, ADA) is None
    with quickly(Quick.PRODUCTS):
        assert tiles.choose_parts_tile(rows, n, k, HOPPER) is None


def test_a_hopper_gpu_of_few_multiprocessors_has_parts_only_where_there_are_two() -> None:
    few = replace(HOPPER, num_multiprocessors=78)
    assert tiles.choose_parts_tile(128, 1024, 4096, few) == (64, 3)
    assert tiles.choose_parts_tile(256, 1024, 4096, few) is None


@pytest.mark.parametrize(
    ("rows", "n", "k", "gated"),
    [(1, 28672, 4096, True), (32, 4096, 14336, False), (64, 896, 4864, False)],
)
def test_shapes_of_the_table_have_a_tile(rows: int, n: int, k: int, gated: bool) -> None:
    assert tiles.choose_tile(rows, n, k, gated, HOPPER) is not None
    assert tiles.choose_tile(rows, n, k + 4, gated, HOPPER) is None
    assert tiles.choose_tile(4096, n, k, gated, HOPPER) is None
    for other in (None, ADA):
        assert tiles.choose_tile(rows, n, k, gated, other) is None


@pytest.mark.parametrize(
    ("n", "k", "gated", "splits"),
    [
        # Of Llama 2 7B and 13B, Llama 3 70B, Qwen2.5 1.5B, BERT, SmolLM2 135M, and of an expert.
        *[(12288, 4096, False, 1), (15360, 5120, False, 1), (8192, 28672, False, 1)],
        *[(2048, 1536, False, 1), (3072, 768, False, 1), (3072, 576, True, 1)],
        *[(2816, 2048, True, 2), (5184, 1792, False, 1), (600, 65536, False, 8)],
    ],
)
def test_shapes_that_no_measured_one_is_like_have_a_tile(
    n: int, k: int, gated: bool, splits: int
) -> None:
    """So that what is before and after such a linear is part of its kernel."""
    for rows in (1, 2, 16, 17, 33, 64):
        tile = tiles.choose_tile(rows, n, k, gated, HOPPER)
        assert tile is not None, rows
        assert (tile.mode == "vector") == (rows == 1)
        assert tile.splits == (1 if rows == 1 else splits)
        # In bfloat16, beside x and, of a gate, up.
        weights = tile.num_stages * tile.block_n * tile.block_k * (2 + 2 * gated)
        x = tile.num_stages * max(16, rows) * tile.block_k * 2
        assert weights + x <= HOPPER.shared_memory
    assert tiles.choose_tile(65, n, k, gated, HOPPER) is None
    assert all(tiles.choose_tile(2, n, k, gated, other) is None for other in (None, ADA))


def test_vocabularies_and_linears_of_few_columns_are_left_to_cublas() -> None:
    for n, k, gated in ((151936, 896, False), (32000, 2040, False), (128, 4096, False)):
        assert tiles.choose_tile(2, n, k, gated, HOPPER) is None


def test_every_tile_can_multiply_its_rows() -> None:
    for shapes in tiles.HOPPER.tiles:
        assert shapes.rows[1] == 1 or shapes.tile.mode != "vector"
        assert shapes.tile.prefetch % 8 == 0
        # Arrivals are counted a tile.
        assert shapes.tile.splits == 1 or shapes.n[1] <= 4096 * shapes.tile.block_n


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1, 40, 96), (7, 40, 90), (130, 40, 96), (130, 36, 72), (300, 264, 40), (1050, 16, 64)],
)
def test_batch_invariant_kernels(
    rows: int, n: int, k: int, with_bias: bool, gated: bool, launch_device: str
) -> None:
    from engine_core.kernels.linear.invariant import triton

    for dtype in (torch.float32, torch.float16):
        x, weight, bias = case(rows, n, k, dtype, launch_device)
        chosen = bias if with_bias else None
        got = triton.linear(x, weight, chosen, gated=gated)
        assert error(got, formula(x, weight, chosen, gated)) < TOLERANCE[dtype]


def test_batch_invariant_preconditions() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    with pytest.raises(ValueError, match="on a GPU"):
        linear(x, weight, deterministic=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("n", "k"),
    [
        *[(6144, 4096), (4096, 14336), (28672, 4096), (1152, 896), (896, 4864), (151936, 896)],
        *[(520, 200), (2080, 24), (70, 99), (2, 7)],
    ],
)
def test_rows_do_not_depend_on_how_many_there_are(
    n: int, k: int, dtype: torch.dtype, gated: bool
) -> None:
    """Bit for bit, in any place: what makes a request's tokens independent of the batch."""
    many = 1030 if n * k < 2**28 else 300
    x, weight, bias = case(many, n, k, dtype, "cuda")
    every = linear(x, weight, bias, gated=gated, deterministic=True)
    for first, count in [
        *((0, count) for count in (1, 2, 5, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256, 257)),
        *((many - count, count) for count in (1, 16, 200)),
    ]:
        some = linear(x[first : first + count], weight, bias, gated=gated, deterministic=True)
        assert torch.equal(some, every[first : first + count]), f"{count} rows from {first}"


@pytest.fixture
def hopper() -> ModuleType:
    """The kernel for many rows; it can be imported anywhere."""
    return importlib.import_module("engine_core.kernels.linear.hopper.triton")


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    "sizes", [(), (64, 2), (64, 3), (128, 2), (40, 2), (80, 2), (144, 2), (160, 2), (48, 3)]
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        *[(1, 256, 64), (65, 2000, 192), (128, 28672, 4096), (129, 9728, 896)],
        *[(192, 9728, 896), (193, 2000, 192)],
        *[(1000, 48, 4096), (1030, 1040, 320), (4097, 9728, 896), (8200, 28672, 4096)],
        (5476, 5120, 1280),
    ],
)
def test_activated_linear_on_hopper(
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    with_bias: bool,
    sizes: tuple[int, ...],
    hopper: ModuleType,
) -> None:
    """By tiles of so many columns, and so many warp groups, if it is gated."""
    x, weight, bias = case(rows, n, k, dtype, "cuda")
    assert hopper.fits(x, weight)
    given = x, weight, bias if with_bias else None
    op = hopper.gated_linear if sizes else hopper.quick_gelu_linear
    got = op(*given, *sizes)
    expected = torch.cat([formula(part, *given[1:], bool(sizes)) for part in x.split(1024)])
    if not sizes:
        expected = activated(expected, "quick_gelu", False)
    assert error(got, expected) < TOLERANCE[dtype]
    assert torch.equal(op(*given, *sizes), got)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("sizes", [(64, 2), (64, 3), (128, 2), (40, 2), (144, 2), (48, 3)])
@pytest.mark.parametrize(
    ("rows", "n", "k", "parts"), [(96, 9728, 896, 28), (128, 9728, 896, 14), (300, 2000, 192, 1)]
)
def test_gated_linear_on_hopper_makes_up_for_a_division(
    rows: int, n: int, k: int, parts: int, sizes: tuple[int, int], with_bias: bool,
    hopper: ModuleType,
) -> None:  # fmt: skip
    x, weight, bias = case(rows, n, k, torch.bfloat16, "cuda")
    squares = torch.rand(rows, parts, device="cuda") * 4 * k / parts
    given = DeferredRMSNorm(x, squares, 1e-6), weight, bias if with_bias else None
    root = (squares.double().sum(1, keepdim=True) / k + 1e-6).sqrt()
    product = (x.double() @ weight.double().T) / root
    if with_bias:
        product += bias.double()
    gate, up = product.chunk(2, -1)
    got = hopper.gated_linear(*given, *sizes)
    assert error(got, gate * gate.sigmoid() * up) < TOLERANCE[torch.bfloat16]
    assert hopper.is_trusted(given[0], with_bias, True, *sizes)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("cols", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "n", "k", "parts"),
    # The last has columns beyond the last step, and rows and columns beyond the last tile.
    [(96, 896, 4864, 4), (128, 896, 4864, 9), (256, 2048, 8192, 2), (1, 72, 200, 3)],
)
def test_partial_sums_on_hopper(
    rows: int, n: int, k: int, parts: int, dtype: torch.dtype, cols: int
) -> None:
    kernel = importlib.import_module("engine_core.kernels.linear.parts.hopper.triton")
    x, weight, _ = case(rows, n, k, dtype, "cuda")
    x = x.contiguous()
    assert kernel.fits(x, weight)
    got = kernel.partial_sums(x, weight, tiles.PartsTile(cols, parts))
    assert got.shape == (parts, rows, n)
    ends = [-(-k // 64) * part // parts * 64 for part in range(parts)] + [k]
    for part, begin, end in zip(got, ends, ends[1:], strict=False):
        expected = x[:, begin:end].double() @ weight[:, begin:end].double().T
        assert (part - expected).abs().max() < 1e-3


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quick_gelu_on_hopper_far_from_zero(dtype: torch.dtype, hopper: ModuleType) -> None:
    """Where nothing is left of the product, and where all of it is."""
    far = torch.full((1, 64), 1e4 / 64, dtype=dtype, device="cuda")
    ones = torch.ones((16, 64), dtype=dtype, device="cuda")
    assert hopper.quick_gelu_linear(-far, ones, None).eq(0).all()
    assert torch.equal(hopper.quick_gelu_linear(far, ones, None), linear(far, ones))


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("rows", [128, 256, 1024])
def test_gated_linear_on_hopper_waits_for_what_it_reads(rows: int, hopper: ModuleType) -> None:
    """In a graph it begins before the norm ahead of it has ended, which lets it at once."""
    x, up, _ = case(rows, 28672, 4096, torch.bfloat16, "cuda")
    down = (torch.randn(4096, 14336, device="cuda") / 14336**0.5).to(torch.bfloat16)
    norm_weight = torch.rand(4096, device="cuda").to(torch.bfloat16) + 0.5

    def chain() -> list[Tensor]:
        results = [x.contiguous()]
        for _ in range(6):
            normed = rms_norm(results[-1], norm_weight, 1e-5)
            gated = hopper.gated_linear(normed, up, None)
            results += [normed, gated, linear(gated, down)]
        return results

    expected = []
    chain()
    torch.cuda.synchronize()
    for got in chain():
        torch.cuda.synchronize()
        expected.append(got.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(3):
        for got in captured[1:]:
            got.fill_(torch.nan)
        graph.replay()
        for got, wanted in zip(captured, expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
def test_gated_linear_on_hopper_leaves_what_it_does_not_fit(hopper: ModuleType) -> None:
    x, weight, _ = case(128, 512, 256, torch.bfloat16, "cuda")
    assert hopper.fits(x, weight)
    assert not hopper.fits(x.float(), weight.float())
    assert not hopper.fits(x[:, :200].contiguous(), weight[:, :200].contiguous())
    assert not hopper.fits(x, weight[:500])
    assert not hopper.fits(x[:, 1:193], weight[:, 1:193])


@pytest.mark.parametrize(
    ("n", "k", "rows", "worse"),
    [
        (28672, 4096, (80, 96, 128, 256, 1024, 4096, 8192), (0, 1, 64, 192, 224, 512, 1536)),
        (37888, 3584, (80, 100, 128, 8192), (160, 192, 224, 256, 512)),
        (17920, 1536, (80, 100, 128, 8192), (160, 224, 256)),
        (9728, 896, (96, 128, 129, 192, 200, 256, 1024, 2048, 4096, 8192), (95, 193, 512)),
        (16384, 2048, (96, 100, 128, 183, 192, 224, 256), (64, 65, 80, 129, 160, 182, 200)),
        (16384, 3072, (96, 128, 256), (80, 224)),
        (12288, 2048, (128, 192, 256), (80, 160, 224)),
        (22016, 2048, (80, 100, 128), (160, 192, 224, 256)),
        (19456, 2560, (80, 100, 128), (160, 192, 224, 256)),
        (9728, 2560, (224, 256), (80, 100, 160)),
        (27648, 5120, (80, 100, 128), (160, 192, 224, 256)),
        # So few columns that few multiprocessors have a tile.
        (4096, 2048, (), (96, 128, 192)),
    ],
)
def test_the_gated_linear_on_hopper_is_used_where_it_was_seen_to_be_faster(
    n: int, k: int, rows: tuple[int, ...], worse: tuple[int, ...]
) -> None:
    """The measurements are in benchmarks/notes/linears.md."""
    assert [count for count in sorted(rows + worse) if tiles.hopper_wins(count, n, k, 132)] == [
        *rows
    ]


@pytest.mark.parametrize(
    ("rows", "n", "k", "tile"),
    [
        *[(96, 9728, 896, (64, 2)), (129, 9728, 896, (48, 3)), (192, 9728, 896, (48, 3))],
        *[(200, 9728, 896, (80, 2)), (256, 9728, 896, (80, 2))],
        *[(128, 16384, 2048, (64, 2)), (192, 16384, 2048, (64, 3)), (256, 16384, 2048, (128, 2))],
        *[(128, 17920, 1536, (80, 2)), (128, 22016, 2048, (96, 2)), (80, 37888, 3584, (144, 2))],
        *[(128, 28672, 4096, (128, 2)), (4096, 9728, 896, (128, 2))],
        # Narrow tiles of longer rows were not measured.
        *[(128, 16384, 8192, None), (100, 22528, 8192, (128, 2))],
    ],
)
def test_the_gated_linear_on_hopper_has_the_narrowest_tiles_that_are_one_turn(
    rows: int, n: int, k: int, tile: tuple[int, int] | None
) -> None:
    assert tiles.gated_tile(rows, n, k, 132) == tile
    if tile is not None and rows <= 256:
        width, groups = tile
        counts = {
            each: -(-rows // (64 * groups)) * -(-n // (2 * each))
            for each in tiles.GATED_WIDTHS[groups]
            if each >= 128 or k <= 4096
        }
        assert counts[width] <= 132
        assert all(count > 132 for each, count in counts.items() if each < width)


def test_most_multiprocessors_have_a_program_of_the_tile_of_gate_and_up() -> None:
    """That of the portable kernel: fewer took half as long again as cuBLAS."""
    for n, taken in ((16384, False), (22016, False), (28672, True)):
        tile = tiles.choose_tile(80, n, 4096, True, HOPPER)
        assert (tile is not None) == taken
        assert tile is None or n // 2 // tile.block_n >= 0.75 * 132


@pytest.mark.parametrize(
    ("rows", "used"),
    [*[(0, False), (64, False), (256, False), (1024, False)], *[(2048, True), (5476, True)]],
)
def test_a_quick_gelu_on_hopper_is_part_of_a_product_of_many_rows(rows: int, used: bool) -> None:
    """Of Qwen2-VL's encoder, 5120x1280."""
    assert tiles.hopper_wins(rows, 5120, 1280, 132, gated=False) == used
