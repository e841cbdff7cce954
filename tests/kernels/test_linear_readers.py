"""A reader of a weight that the engine does not have goes with every epilogue that it has."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from kernel_cases import TOLERANCE, by_complex_numbers, error, stored
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")
tl = triton.language


@triton.jit
def _begin(reader, rows, cols, K):
    """The pointers, and the scales, which are asked for before the products."""
    pointers = reader.weight + rows.to(tl.int64)[:, None] * K + cols[None, :]
    return pointers, tl.load(reader.scales + rows)


@triton.jit
def _load(reader, cursor, k_mask, EVEN_K: tl.constexpr):
    pointers, scales = cursor
    tile = tl.load(pointers) if EVEN_K else tl.load(pointers, mask=k_mask[None, :], other=0)
    return tile, (pointers + tile.shape[1], scales)


@triton.jit
def _scale(reader, cursor, acc):
    return acc * cursor[1][None, :]


@triton.jit
def _prefetch(reader, rows, low, high, K, part, PARTS: tl.constexpr):
    pass


class ScaledRows(NamedTuple):
    """An int8 weight ``[N, K]``, each of whose rows has a float32 scale."""

    weight: Tensor
    scales: Tensor
    PARTS: Any = tl.constexpr(1)
    prefetch: Any = _prefetch
    begin: Any = _begin
    load: Any = _load
    scale: Any = _scale

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape


TILES: list[dict[str, Any]] = [
    {"block_n": 16, "block_k": 32, "splits": 2},
    {"block_n": 32, "block_k": 16, "mode": "wx"},
    {"block_n": 8, "block_k": 16, "mode": "vector"},
]
N, K = 64, 48


class Case:
    def __init__(self, tile: dict[str, Any], device: str) -> None:
        from engine_core.kernels.linear import triton as kernels

        self.kernels, self.tile = kernels, kernels.Tile(**tile)
        self.rows = 1 if self.tile.mode == "vector" else 5
        self.device = device
        integers = torch.randint(-127, 128, (N, K), dtype=torch.int8, device=device)
        scales = (torch.rand(N, device=device) + 0.5) / 127 / K**0.5
        self.reader = ScaledRows(integers, scales)
        self.x = self.randn(self.rows, K)
        self.bias = self.randn(N)
        self.product = self.times(self.x)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device)

    def times(self, x: Tensor) -> Tensor:
        """The product in plain float64."""
        weight = self.reader.weight.double() * self.reader.scales.double()[:, None]
        return x.double() @ weight.T + self.bias.double()

    def run(self, epilogue: Any, x: Any = None) -> Tensor:
        given = self.x if x is None else x
        out: Tensor = self.kernels.linear(given, self.reader, epilogue, self.tile, self.bias)
        return out


@pytest.fixture(params=TILES, ids=str)
def case(request: pytest.FixtureRequest, launch_device: str) -> Case:
    return Case(request.param, launch_device)


def test_plain_and_activated(case: Case) -> None:
    gate, up = case.product.chunk(2, -1)
    silu = case.product * torch.sigmoid(case.product)
    gelu = gate * (1 + torch.erf(gate / 2**0.5)) / 2 * up
    for options, expected in (
        ((False, None), case.product),
        ((False, "silu"), silu),
        ((True, "gelu"), gelu),
    ):
        got = case.run(case.kernels.Activated.of(case.x, N, *options))
        assert error(got, expected) < TOLERANCE[torch.float32]


def test_makes_up_for_the_division_of_a_norm(case: Case) -> None:
    from engine_core.kernels import DeferredRMSNorm

    squares = torch.rand(case.rows, 3, device=case.device) + 0.5
    mean = squares.double().sum(-1, keepdim=True) / K
    expected = case.times(case.x.double() / (mean + 1e-5).sqrt())
    deferred = DeferredRMSNorm(case.x, squares, 1e-5)
    got = case.run(case.kernels.Activated.of(case.x, N), deferred)
    assert error(got, expected) < TOLERANCE[torch.float32]


def test_adds_the_residual(case: Case) -> None:
    residual, norm_weight = case.randn(case.rows, N), case.randn(N)
    added = case.kernels.Added.of(residual, norm_weight, case.tile, 1.0)
    got, total = case.run(added), case.product + residual.double()
    assert error(added.total, total) < TOLERANCE[torch.float32]
    assert error(got, total * (1 + norm_weight.double())) < TOLERANCE[torch.float32]
    assert error(added.squares.sum(-1), total.square().sum(-1)) < N * TOLERANCE[torch.float32]


def test_rotates_and_stores(case: Case) -> None:
    heads, kv_heads, dim = 2, 1, 16
    angles = 6 * torch.rand(1, case.rows, dim // 2, dtype=torch.float64, device=case.device)
    caches = [torch.full((case.rows, 4, 1, dim), torch.nan, device=case.device) for _ in range(2)]
    slots = torch.randperm(4 * case.rows, device=case.device)[: case.rows]
    turns = (angles[0].cos().float(), angles[0].sin().float())
    epilogue = case.kernels.Stored.of(N, *turns, *caches, slots, False)
    q, k, v = case.product.view(case.rows, -1, dim).split((heads, kv_heads, kv_heads), 1)
    assert error(case.run(epilogue), by_complex_numbers(q, angles, False)) < 2e-5
    assert error(stored(caches[0], slots), by_complex_numbers(k, angles, False)) < 2e-5
    assert error(stored(caches[1], slots), v) < 2e-5
