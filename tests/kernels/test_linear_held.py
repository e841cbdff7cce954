"""Linears whose weight waits in shared memory on Hopper: every end of it, and where it is used."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_cases import (
    TOLERANCE,
    by_complex_numbers,
    check_replays,
    error,
    seen_endings,
    stored,
)
from torch import Tensor

from engine_core.kernels import DeferredRMSNorm, linear
from engine_core.kernels.gpu import GPU
from engine_core.kernels.linear import linear_add, linear_rotary_store, tiles
from engine_core.kernels.linear.tiles import Tile, choose_held_tile, choose_tile

HOPPER, ADA, BLACKWELL = (GPU.of_capability(each) for each in ((9, 0), (8, 9), (10, 0)))
# Rows, columns, splits, steps in shared memory, and types: each compiles kernels of its own. The
# last step may be half a step, the last split have fewer steps, and steps take turns. 70 rows come
# in blocks of 64, 225 in blocks of 32 as those that the engine takes.
CASES = [
    (1, 896, 1, 7, torch.bfloat16),
    (5, 1088, 4, 3, torch.bfloat16),
    (16, 1152, 1, 4, torch.float16),
    (33, 576, 1, 5, torch.bfloat16),
    (70, 640, 2, 3, torch.bfloat16),
    (225, 960, 1, 8, torch.bfloat16),
]
of_all_cases = pytest.mark.parametrize(("rows", "k", "splits", "stages", "dtype"), CASES, ids=str)
on_hopper = pytest.mark.usefixtures("on_hopper")


class Case:
    """Rows by a weight of N rows, which need not end at a tile, and their products in float64."""

    def __init__(self, rows: int, n: int, k: int, dtype: torch.dtype) -> None:
        self.held: Any = importlib.import_module("engine_core.kernels.linear.held.hopper.triton")
        self.kernels: Any = importlib.import_module("engine_core.kernels.linear.triton")
        self.n, self.rows, self.k, self.dtype = n, rows, k, dtype
        self.x, self.bias = self.randn(rows, k + 8)[:, :k], self.randn(n)
        self.weight = (torch.randn(n, k, device="cuda") / k**0.5).to(dtype)
        self.product = self.x.double() @ self.weight.double().T + self.bias.double()
        assert self.held.fits(self.x, self.weight)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(self.dtype)

    def check(self, got: Tensor, expected: Tensor, times: float = 1.0) -> None:
        assert error(got, expected) < times * TOLERANCE[self.dtype]


def tile_of(rows: int, splits: int, stages: int, gated: bool = False) -> Tile:
    sizes = (32 if gated else 64, 128, splits, "held", 4, stages)
    return Tile(*sizes, least_rows=8, most_rows=64 if rows < 100 else 32)


@pytest.mark.gpu
@on_hopper
@of_all_cases
def test_products_and_what_activates_them(
    rows: int, k: int, splits: int, stages: int, dtype: torch.dtype
) -> None:
    case = Case(rows, 1056, k, dtype)

    def run(x: Any, gated: bool, name: str | None) -> Tensor:
        tile = tile_of(rows, splits, stages, gated)
        epilogues = [case.kernels.Activated.of(case.x, case.n, gated, name) for _ in range(2)]
        outs = [case.held.linear(x, case.weight, e, tile, case.bias) for e in epilogues]
        assert torch.equal(*outs)
        out: Tensor = outs[0]
        return out

    gate, up = case.product.chunk(2, -1)
    case.check(run(case.x, False, None), case.product)
    case.check(run(case.x, True, None), gate * torch.sigmoid(gate) * up, 2)
    gelu = torch.nn.functional.gelu(case.product)
    case.check(run(case.x, False, "gelu"), gelu)
    squares = torch.rand(rows, 3, device="cuda") + 0.5
    mean = squares.double().sum(-1, keepdim=True) / k
    divided = (case.product - case.bias.double()) / (mean + 1e-5).sqrt() + case.bias.double()
    undivided = DeferredRMSNorm(case.x, squares, 1e-5)
    case.check(run(undivided, False, None), divided)
    gate, up = divided.chunk(2, -1)
    case.check(run(undivided, True, None), gate * torch.sigmoid(gate) * up, 2)


@pytest.mark.gpu
@on_hopper
@of_all_cases
def test_the_residual_and_the_norm(
    rows: int, k: int, splits: int, stages: int, dtype: torch.dtype
) -> None:
    case, tile = Case(rows, 1056, k, dtype), tile_of(rows, splits, stages)
    residual, norm_weight = case.randn(rows, case.n), case.randn(case.n)
    added = case.kernels.Added.of(residual, norm_weight, tile, 1.0)
    got = case.held.linear(case.x, case.weight, added, tile, case.bias)
    total = case.product + residual.double()
    case.check(added.total, total)
    case.check(got, total * (norm_weight.double() + 1), 2)
    case.check(added.squares.sum(1) / case.n, total.square().mean(1))


@pytest.mark.gpu
@on_hopper
@of_all_cases
def test_heads_are_rotated_and_stored(
    rows: int, k: int, splits: int, stages: int, dtype: torch.dtype
) -> None:
    heads, kv_heads, rotates = 3, 2, rows != 33
    head_dim = {1: 64, 5: 128, 16: 64, 33: 128, 70: 256, 225: 64}[rows]
    case, tile = Case(rows, 7 * head_dim, k, dtype), tile_of(rows, splits, stages)
    angles = 6 * torch.rand(1, rows, head_dim // 2, dtype=torch.float64, device="cuda")
    turns = (angles[0].cos().float(), angles[0].sin().float()) if rotates else (None, None)
    if not rotates:
        angles.zero_()
    slots = torch.randperm(4 * rows, device="cuda")[:rows]
    slots[1::3] = -1
    whole = torch.full((rows, 4, 2, kv_heads, head_dim), torch.nan, device="cuda", dtype=dtype)
    caches = whole.unbind(2)
    epilogue = case.kernels.Stored.of(case.n, *turns, *caches, slots, False)
    got = case.held.linear(case.x, case.weight, epilogue, tile, case.bias)
    parts = case.product.view(rows, -1, head_dim).split((heads, kv_heads, kv_heads), 1)
    case.check(got, by_complex_numbers(parts[0], angles, False), 2)
    keys = by_complex_numbers(parts[1], angles, False)
    case.check(stored(caches[0], slots), keys[slots >= 0], 2)
    case.check(stored(caches[1], slots), parts[2][slots >= 0])


@pytest.mark.gpu
@on_hopper
def test_the_engines_linears_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the rule says so and its tensors fit; else the portable kernel's tiles are taken."""
    case = Case(5, 1152, 896, torch.bfloat16)
    seen = seen_endings(case.held, monkeypatch)
    gate, up = case.product.chunk(2, -1)
    case.check(linear(case.x, case.weight, case.bias), case.product)
    got = linear(case.x, case.weight, case.bias, gated=True)
    case.check(got, gate * torch.sigmoid(gate) * up, 2)
    residual, norm_weight = case.randn(5, 1152), case.randn(1152)
    given = (case.x, case.weight, case.bias)
    normed, total = linear_add(*given, residual, norm_weight, 1e-5)
    case.check(total, case.product + residual.double())
    case.check(normed.values, (case.product + residual.double()) * norm_weight.double(), 2)
    angles = 6 * torch.rand(1, 5, 32, dtype=torch.float64, device="cuda")
    turns = (angles[0].cos().float(), angles[0].sin().float())
    k_cache, v_cache = torch.zeros(2, 1, 8, 2, 64, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(5, device="cuda")

    def rotate(**options: Any) -> None:
        q = linear_rotary_store(*given, *turns, k_cache, v_cache, slots, **options)
        heads = case.product.view(5, 18, 64)[:, :14]
        case.check(q, by_complex_numbers(heads, angles, options.get("interleaved", False)), 2)

    rotate()
    taken = ["Activated", "Activated", "Added", "Stored"]
    assert seen == taken
    rotate(interleaved=True)
    linear(case.randn(5, 904)[:, 4:900], case.weight)
    linear(case.x, case.weight, deterministic=True)
    assert seen == taken


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_they_wait_for_what_they_read(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph they begin before the kernel ahead has ended, which lets them at once."""
    monkeypatch.setattr(tiles, "HELD_FROM", 1)
    down, up = Case(rows, 896, 4864, torch.bfloat16), Case(rows, 9728, 896, torch.bfloat16)
    norm_weight = (torch.rand(896, device="cuda") + 0.5).bfloat16()

    def chain() -> list[Tensor]:
        x, residual, results = down.x, down.randn(rows, 896).zero_(), []
        for _ in range(6):
            normed, residual = linear_add(x, down.weight, None, residual, norm_weight, 1e-5)
            x = linear(normed, up.weight, gated=True)
            results += [normed.values, residual, x]
        return results

    check_replays(chain, chain())


@pytest.fixture
def held() -> ModuleType:
    pytest.importorskip("triton", reason="triton is not installed")
    return importlib.import_module("engine_core.kernels.linear.held.hopper.triton")


def test_what_it_does_not_fit(held: ModuleType, launch_device: str) -> None:
    del launch_device  # where Triton may be imported
    x, weight = torch.zeros(3, 512).bfloat16(), torch.zeros(64, 512).bfloat16()
    assert held.fits(x, weight)
    assert held.fits(torch.zeros(3, 1024).bfloat16()[:, 512:], weight)
    assert not held.fits(x.half(), weight)
    assert not held.fits(x.float(), weight.float())
    assert not held.fits(torch.zeros(3, 514).bfloat16()[:, :512], weight)
    assert not held.fits(torch.zeros(3, 528).bfloat16()[:, 4:516], weight)
    assert not held.fits(x, torch.zeros(64, 1024).bfloat16()[:, :512])
    assert not held.fits(x, torch.zeros(64 * 512 + 4).bfloat16()[4:].view(64, 512))
    assert not held.fits(x[:, :480], torch.zeros(64, 480).bfloat16())


def test_weights_that_have_room_wait_in_shared_memory() -> None:
    """Of a small model all of them, with up to 16 rows; no larger ones."""
    small = ((9728, 896, True), (1152, 896, False), (896, 896, False), (896, 4864, False))
    for n, k, gated in small:
        for rows in (2, 3, 8, 16):
            tile = choose_held_tile(rows, n, k, gated, HOPPER)
            assert tile is not None
            assert tile.mode == "held"
            assert choose_tile(rows, n, k, gated, HOPPER) is not None
            programs = -(-(n // (2 if gated else 1)) // tile.block_n) * tile.splits
            # The steps and x, of all programs of a multiprocessor.
            steps = -(-k // (128 * tile.splits))
            x_bytes = 256 * (steps + 1) * max(8, rows)
            held = (tile.num_stages * 2**14 + x_bytes) * -(-programs // 132)
            assert held < 227 * 1024
            assert 2 * tile.num_stages >= steps
        assert choose_held_tile(1, n, k, gated, HOPPER) is None
        assert choose_held_tile(8, n, k + 8, gated, HOPPER) is None
        assert all(choose_held_tile(8, n, k, gated, g) is None for g in (ADA, BLACKWELL, None))
    for n, k, gated in ((28672, 4096, True), (6144, 4096, False), (151936, 896, False)):
        assert choose_held_tile(8, n, k, gated, HOPPER) is None


def test_blocks_of_more_rows_have_programs_that_hold_the_whole_weight() -> None:
    """Each on a multiprocessor of its own, of linears whose portable kernel takes so many rows."""
    for n in (1152, 896):
        for rows in (65, 96, 128, 200, 224):
            tile = choose_held_tile(rows, n, 896, False, HOPPER)
            assert tile is not None
            assert (tile.mode, tile.most_rows, tile.splits, tile.num_stages) == ("held", 32, 1, 7)
            assert -(-n // 64) * -(-rows // 32) <= 132
            assert choose_tile(rows, n, 896, False, HOPPER) is not None
    assert choose_held_tile(225, 1152, 896, False, HOPPER) is None
    assert choose_held_tile(257, 896, 896, False, HOPPER) is None
    for n, k, gated in ((9728, 896, True), (896, 4864, False), (2048, 2048, False)):
        assert all(choose_held_tile(rows, n, k, gated, HOPPER) is None for rows in (65, 128, 256))


def test_weights_of_one_row_that_have_room_wait_in_registers() -> None:
    def held(n: int, k: int, gated: bool) -> int:
        tile = choose_tile(1, n, k, gated, HOPPER)
        assert tile is not None
        assert tile.mode == "vector"
        programs = -(-(n // (2 if gated else 1)) // tile.block_n) * tile.splits
        count = tiles.tiles_held(tile, programs, k, gated, 132)
        assert count in (0, -(-k // (tile.splits * tile.block_k)))
        return count

    small = ((9728, 896, True), (1152, 896, False), (896, 896, False), (896, 4864, False))
    assert [held(*each) for each in small] == [1, 1, 1, 5]
    assert [held(*each) for each in ((5632, 1280, True), (1280, 2816, False))] == [2, 3]
    assert [held(*each) for each in ((28672, 4096, True), (4096, 14336, False))] == [0, 0]
