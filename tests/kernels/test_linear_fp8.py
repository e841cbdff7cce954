"""Linears by 8-bit floats: the codes, and every epilogue of the kernel of few rows."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from kernel_cases import TOLERANCE, by_complex_numbers, error, stored
from torch import Tensor

from engine_core.kernels import DeferredRMSNorm, Fp8Weight, linear, linear_add_norm
from engine_core.kernels.gpu import GPU
from engine_core.kernels.launch.gluon import runs_gluon
from engine_core.kernels.linear import fp8, tiles

HOPPER, ADA = (GPU.of_capability(capability) for capability in ((9, 0), (8, 9)))
# All finite numbers of e4m3.
CODES = [code for code in range(256) if code % 128 != 127]


def numbers_of(codes: Tensor) -> Tensor:
    """By the format's definition: a sign, 4 bits of exponent less 7, 3 of fraction; float64."""
    bits = codes.view(torch.uint8).int()
    sign, exponent, fraction = 1 - 2 * (bits >> 7), (bits >> 3) & 15, bits & 7
    normal = (8 + fraction) * 2.0 ** (exponent - 10).double()
    return sign * torch.where(exponent == 0, fraction * 2.0**-9, normal)


def random_weight(n: int, k: int, blocks: bool, dtype: torch.dtype, device: str) -> Fp8Weight:
    codes = torch.tensor(CODES, dtype=torch.uint8)[torch.randint(len(CODES), (n, k))]
    scales = (torch.rand((-(-k // 128), n) if blocks else (n,)) + 0.5) / 100 / k**0.5
    return Fp8Weight.of(codes.view(torch.float8_e4m3fn).to(device), scales.to(device), dtype)


def numbers(weight: Fp8Weight) -> Tensor:
    """By the definition of the attributes, one column after another."""
    codes, k = numbers_of(weight.codes.cpu()), weight.shape[1]
    if k % 128 == 0:
        places = [2 * (i % 64) + i // 64 for i in range(128)]
        codes = codes[:, [i // 128 * 128 + places[i % 128] for i in range(k)]]
    scales = weight.scales.double().cpu()
    wide = scales[:, None] if scales.dim() == 1 else scales.T.repeat_interleave(128, 1)[:, :k]
    return (codes * wide).to(weight.codes.device)


@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize("k", [256, 208])
def test_numbers_are_codes_times_scales(k: int, blocks: bool) -> None:
    weight = random_weight(48, k, blocks, torch.float32, "cpu")
    assert torch.equal(weight.dense(), numbers(weight).float())
    assert torch.equal(weight.numbers(torch.bfloat16), numbers(weight).to(torch.bfloat16))
    x = torch.randn(3, 5, k)
    assert error(linear(x, weight), x.double() @ numbers(weight).T) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_numbers_are_the_nearest(dtype: torch.dtype) -> None:
    x = torch.randn(1500, 64).to(dtype)
    x[3] = 0
    x[4] *= 1e-20
    weight = Fp8Weight.quantized(x)
    assert torch.equal(weight.scales, x.float().abs().amax(1) / 448)
    assert torch.equal(weight.dense()[3], x[3])
    table = numbers_of(torch.tensor(CODES, dtype=torch.uint8).view(torch.float8_e4m3fn))
    exact = x[:40].double() / torch.where(weight.scales[:40] == 0, 1, weight.scales[:40])[:, None]
    least = (exact[..., None] - table).abs().amin(-1)
    got = (exact - numbers_of(weight.codes[:40])).abs()
    assert (got <= least + 1e-4 * exact.abs()).all()


@pytest.mark.parametrize("with_bias", [False, True])
def test_scales_are_applied_apart(with_bias: bool, launch_device: str) -> None:
    from engine_core.kernels.linear.fp8 import triton
    from engine_core.kernels.norm import triton as norm

    product, residual = (torch.randn(5, 1040, device=launch_device).half() for _ in range(2))
    rows, cols, weight = (torch.rand(size, device=launch_device) for size in (5, 1040, 1040))
    bias = torch.randn(1040, device=launch_device).half() if with_bias else None
    expected = product.double() * rows.double()[:, None] * cols.double()
    expected = expected if bias is None else expected + bias.double()
    total = expected + residual.double()
    divided = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    normed, summed = norm.sum_add_norm(
        product[None], bias, residual, weight, 1e-5, scales=(rows, cols)
    )
    assert error(summed, total) < TOLERANCE[torch.float16]
    assert error(normed, divided * weight.double()) < TOLERANCE[torch.float16]
    assert error(triton.rescale(product, rows, cols, bias), expected) < TOLERANCE[torch.float16]


TILES: list[dict[str, Any]] = [
    {"block_n": 16, "block_k": 128, "splits": 2},
    {"block_n": 32, "block_k": 256, "mode": "wx"},
    {"block_n": 16, "block_k": 256, "mode": "vector"},
    {"block_n": 16, "block_k": 128, "mode": "vector", "splits": 3},
]
N, K = 64, 384


class Case:
    def __init__(self, tile: dict[str, Any], blocks: bool, device: str) -> None:
        from engine_core.kernels.linear import triton as kernels

        if blocks and tile.get("mode") != "vector":
            tile = {**tile, "block_k": 128}
        self.kernels, self.tile, self.device = kernels, kernels.Tile(**tile), device
        self.rows = 1 if self.tile.mode == "vector" else 5
        # Only a GPU multiplies bfloat16; the interpreter's products of it are wrong.
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.weight = random_weight(N, K, blocks, self.dtype, device)
        self.x, self.bias = self.randn(self.rows, K), self.randn(N)
        self.product = self.times(self.x)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def times(self, x: Tensor) -> Tensor:
        return x.double() @ numbers(self.weight).T + self.bias.double()

    def run(self, epilogue: Any, x: Any = None) -> Tensor:
        reader = self.kernels.reader_of(self.weight)
        out: Tensor = self.kernels.linear(
            self.x if x is None else x, reader, epilogue, self.tile, self.bias
        )
        return out

    def check(self, got: Tensor, expected: Tensor, times: float = 1.0) -> None:
        assert error(got, expected) < times * TOLERANCE[self.dtype]


@pytest.fixture(params=[False, True], ids=["rows", "blocks"])
def blocks(request: pytest.FixtureRequest) -> bool:
    chosen: bool = request.param
    return chosen


@pytest.fixture(params=TILES, ids=str)
def case(request: pytest.FixtureRequest, blocks: bool, launch_device: str) -> Case:
    return Case(request.param, blocks, launch_device)


def test_plain_and_gated(case: Case) -> None:
    gate, up = case.product.chunk(2, -1)
    case.check(case.run(case.kernels.Activated.of(case.x, N)), case.product)
    gated = case.run(case.kernels.Activated.of(case.x, N, True))
    case.check(gated, gate * torch.sigmoid(gate) * up)


def test_makes_up_for_the_division_of_a_norm(case: Case) -> None:
    squares = torch.rand(case.rows, 3, device=case.device) + 0.5
    mean = squares.double().sum(-1, keepdim=True) / K
    deferred = DeferredRMSNorm(case.x, squares, 1e-5)
    got = case.run(case.kernels.Activated.of(case.x, N), deferred)
    case.check(got, case.times(case.x.double() / (mean + 1e-5).sqrt()))


def test_adds_the_residual(case: Case) -> None:
    residual, norm_weight = case.randn(case.rows, N), case.randn(N)
    added = case.kernels.Added.of(residual, norm_weight, case.tile)
    got, total = case.run(added), case.product + residual.double()
    case.check(added.total, total)
    case.check(got, total * norm_weight.double(), 2)


def test_rotates_and_stores(case: Case) -> None:
    heads, kv_heads, dim = 2, 1, 16
    angles = 6 * torch.rand(1, case.rows, dim // 2, dtype=torch.float64, device=case.device)
    shape = (case.rows, 4, 1, dim)
    caches = [torch.full(shape, torch.nan, device=case.device, dtype=case.dtype) for _ in range(2)]
    slots = torch.randperm(4 * case.rows, device=case.device)[: case.rows]
    turns = (angles[0].cos().float(), angles[0].sin().float())
    epilogue = case.kernels.Stored.of(N, *turns, *caches, slots, False)
    q, k, v = case.product.view(case.rows, -1, dim).split((heads, kv_heads, kv_heads), 1)
    case.check(case.run(epilogue), by_complex_numbers(q, angles, False), 2)
    case.check(stored(caches[0], slots), by_complex_numbers(k, angles, False), 2)
    case.check(stored(caches[1], slots), v)


def test_float16_rows(blocks: bool, launch_device: str) -> None:
    from engine_core.kernels.linear import triton

    weight = random_weight(48, 256, blocks, torch.float16, launch_device)
    x = torch.randn(3, 256, device=launch_device).half()
    tile = triton.Tile(16, 128, mode="wx")
    reader = triton.reader_of(weight)
    got = triton.linear(x, reader, triton.Activated.of(x, 48), tile)
    assert error(got, x.double() @ numbers(weight).T) < TOLERANCE[torch.float16]


def test_few_rows_of_hopper_have_a_kernel() -> None:
    """For the linears of Llama 3 8B and Qwen2 0.5B, and of a rank of four."""
    shapes = [(6144, 4096), (4096, 4096), (4096, 14336), (1152, 896), (896, 896), (896, 4864)]
    shapes += [(1536, 4096), (4096, 1024), (4096, 3584)]
    for n, k in shapes:
        # Rows are quantised sooner for a large weight.
        most = 8 if n * k >= 4096 * 4096 else 64
        for rows in (1, 2, 8, most):
            assert fp8.has_kernel(rows, n, k, torch.bfloat16, HOPPER), (rows, n, k)
        assert not fp8.has_kernel(most + 1, n, k, torch.bfloat16, HOPPER)
        # Matrix units multiply no float16 by them: it would become numbers in each step.
        assert fp8.has_kernel(128, n, k, torch.float16, HOPPER)
        blocks = {"quantizes_rows": False}
        assert fp8.has_kernel(128, n, k, torch.bfloat16, HOPPER, **blocks)
        assert not fp8.has_kernel(129, n, k, torch.bfloat16, HOPPER, **blocks)
        assert not fp8.has_kernel(1, n, k, torch.bfloat16, ADA)
        assert not fp8.has_kernel(1, n, k, torch.float32, HOPPER)


def test_rows_whose_sums_the_norm_scales() -> None:
    cases = [(8, HOPPER, False), (9, HOPPER, True), (256, HOPPER, True), (257, HOPPER, False)]
    for rows, gpu, expected in [*cases, (65, ADA, True), (65, None, False)]:
        got = fp8.adds_residual(rows, 4096, 14336, torch.bfloat16, gpu)
        assert got == expected, (rows, gpu)
    for rows, expected in ((64, False), (65, True)):
        assert fp8.adds_residual(rows, 2048, 4096, torch.bfloat16, HOPPER) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 65, 200])
def test_adds_the_residual_whatever_is_chosen(rows: int) -> None:
    weight = random_weight(2048, 1024, False, torch.bfloat16, "cuda")
    x, residual, norm_weight = (
        torch.randn(*shape, device="cuda").bfloat16()
        for shape in ((rows, 1024), (rows, 2048), (2048,))
    )
    total = x.double() @ numbers(weight).T + residual.double()
    divided = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    normed, summed = linear_add_norm(x, weight, None, residual, norm_weight, 1e-5)
    allowed = 0.006 if rows <= 64 else 0.05
    assert (summed.double() - total).norm() / total.norm() < allowed
    expected = divided * norm_weight.double()
    assert (normed.double() - expected).norm() / expected.norm() < allowed


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 17, 64, 65, 128, 150, 192, 300])
def test_chosen_kernels(rows: int, blocks: bool) -> None:
    """Whatever is chosen, of many rows with quantised activations where a row has one scale."""
    for n, k, gated in ((6144, 4096, False), (2048, 1024, True), (2048, 14336, False)):
        weight = random_weight(n, k, blocks, torch.bfloat16, "cuda")
        x = torch.randn(rows, k, device="cuda").bfloat16()
        expected = x.double() @ numbers(weight).T
        if gated:
            gate, up = expected.chunk(2, -1)
            expected = gate * torch.sigmoid(gate) * up
        exact = rows <= (8 if n * k >= 4096 * 4096 else 64) or blocks
        got = linear(x, weight, gated=gated)
        away = (got.double() - expected).norm() / expected.norm()
        # e4m3 keeps 4 bits: a relative error of 2.6% a number, unrelated from one to the next.
        assert away < (0.006 if exact else 0.05)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "tile"),
    [
        *product(
            (1, 16, 32, 50, 96, 128, 150, 192),
            ((64, 1, 7, 4), (64, 2, 4, 4), (128, 1, 3, 4), (128, 4, 4, 8), (256, 1, 4, 8)),
        ),
        *product((1, 17, 32), ((64, 1, 16, 4), (64, 2, 12, 4))),
    ],
)
def test_products_of_hopper(rows: int, tile: tuple[int, ...]) -> None:
    """Columns that are not a whole of tiles, and steps that are not a whole of K's parts.

    Of some tiles more are in flight than there are steps.
    """
    from engine_core.kernels.linear.fp8.hopper import triton as hopper

    if not runs_gluon(torch.device("cuda")):
        pytest.skip("no GPU or Triton for it")
    chosen = tiles.ProductTile(*tile)
    weight = random_weight(400, 1360, False, torch.bfloat16, "cuda")
    x, scales = fp8.reference_quantize_rows(torch.randn(rows, 1360, device="cuda"))
    bias = torch.randn(400, device="cuda").bfloat16()
    assert hopper.fits(x, weight.codes)
    sums = numbers_of(x.cpu()).cuda() @ numbers_of(weight.codes.cpu()).cuda().T
    expected = sums * scales.double()[:, None] * weight.scales.double() + bias.double()
    if chosen.parts > 1:
        parts = hopper.sums_of_parts(x, weight.codes, chosen)
        assert parts.shape == (chosen.parts, rows, 400)
        assert (parts.double().sum(0) - sums).norm() / sums.norm() < 4e-3
        return
    given = (x, scales, weight.codes, weight.scales, bias, chosen, torch.bfloat16)
    got = hopper.product(*given)
    assert (got.double() - expected).norm() / expected.norm() < 6e-3
    plain = hopper.product(x, None, weight.codes, None, None, chosen, torch.bfloat16)
    assert (plain.double() - sums).norm() / sums.norm() < 6e-3


def test_tiles_of_products_fit() -> None:
    """In shared memory and registers, and results in the memory of what they were made of."""
    shapes = [(28672, 4096), (4096, 14336), (6144, 4096), (1024, 1024), (57344, 8192)]
    for rows in range(1, 257):
        first, more = tiles.product_rows(rows)
        assert rows <= first + more <= 256, rows
        assert rows > 192 or first + more <= max(8, 2 * rows, rows + 31), rows
        for n, k in shapes:
            for parted in (False, True):
                tile = tiles.product_tile(rows, n, k, HOPPER, parted=parted)
                of = (rows, n, k, tile)
                step = (tile.cols + first + more) * 128
                assert 3 * step <= tile.stages * step <= 226 * 1024, of
                assert tile.cols * (first + more) <= 192 * 32 * tile.num_warps, of
                assert first * tile.cols * 2 <= tile.stages * tile.cols * 128, of
                assert more * tile.cols * 2 <= tile.stages * first * 128, of
                assert parted or tile.parts == 1, of
                assert k >= 128 * tile.parts, of


def test_many_rows_and_other_gpus_leave_products_to_cublas() -> None:
    for gpu in (None, ADA):
        assert tiles.choose_product_tile(32, 28672, 4096, gpu) is None
    for n, k in ((28672, 4096), (6144, 4096)):
        assert tiles.choose_product_tile(257, n, k, HOPPER) is None
        assert tiles.choose_product_tile(32, n, k, HOPPER) is not None
    # A tile of 128 rows that cuBLAS fills, and one more.
    assert tiles.choose_product_tile(128, 28672, 4096, HOPPER) is None
    assert tiles.choose_product_tile(129, 28672, 4096, HOPPER) is not None
    assert tiles.choose_product_tile(32, 896, 896, HOPPER) is None
