"""Linears by codes in Hopper's own kernels: every end of them, and where they are used."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterable
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

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
from test_linear_blocks import made as made_of_blocks
from test_linear_groups import Kind, made
from torch import Tensor

from engine_core.kernels import DeferredRMSNorm, linear
from engine_core.kernels.block_linear import FORMS
from engine_core.kernels.gpu import GPU
from engine_core.kernels.launch.quick import Quick, quickly
from engine_core.kernels.linear import linear_add, linear_rotary_store
from engine_core.kernels.linear.tiles import (
    BYTES_STEP,
    CODES_BLOCK_N,
    BlockKind,
    Tile,
    choose_blocks_tile,
    choose_bytes_tile,
    choose_codes_tile,
    choose_teams_tile,
)

HOPPER, ADA, BLACKWELL = (GPU.of_capability(each) for each in ((9, 0), (8, 9), (10, 0)))


class Teams(NamedTuple):
    """A kind by warp groups that share x: how many, registers of a thread, and whether ahead.

    Rows of a program are ``most_rows`` at most, and ``more_rows`` of a second product.
    """

    kind: Kind
    teams: int
    max_registers: int = 0
    ahead: bool = False
    most_rows: int = 64
    more_rows: int = 0

    @property
    def k(self) -> int:
        return self.kind.k

    @property
    def step(self) -> int:
        return BYTES_STEP if self.kind.bits == 8 else 256


class Blocks(NamedTuple):
    """A type of a GGUF file's blocks, and K."""

    name: str
    k: int


class Integers(Blocks):
    """The same where rows become integers."""


# Kinds, rows, splits and types of numbers: each compiles kernels of its own. The last step may be
# of half a block, or a split have none.
CASES = [
    (Kind(4, 128, True, 1024), 1, 4, torch.bfloat16),
    (Kind(4, 128, False, 1152, torch.bfloat16), 32, 1, torch.float16),
    (Kind(4, 256, True, 1536, torch.float32), 70, 4, torch.bfloat16),
    (Kind(4, 0, True, 272), 11, 1, torch.bfloat16),
    (Teams(Kind(4, 128, True, 1280), 4), 11, 1, torch.bfloat16),
    (Teams(Kind(4, 128, False, 1280, torch.bfloat16), 2, 80), 32, 1, torch.float16),
    (Teams(Kind(4, 128, True, 1792), 2, ahead=True), 32, 4, torch.bfloat16),
    (Teams(Kind(4, 128, True, 512, torch.float32), 2, 88), 3, 4, torch.bfloat16),
    (Teams(Kind(4, 128, False, 1280), 4), 70, 1, torch.bfloat16),
    (Teams(Kind(4, 128, True, 1792), 2, ahead=True), 130, 2, torch.bfloat16),
    # The rows that are there come in boxes, or all at once.
    (Teams(Kind(4, 128, True, 1280), 2, most_rows=128), 66, 1, torch.bfloat16),
    (Teams(Kind(4, 128, False, 1280, torch.bfloat16), 2, most_rows=128), 200, 1, torch.float16),
    (Teams(Kind(4, 128, True, 1792), 2, most_rows=128), 127, 2, torch.bfloat16),
    (Teams(Kind(4, 128, True, 1792), 2, most_rows=128), 200, 2, torch.bfloat16),
    (Teams(Kind(4, 128, True, 1280), 2, more_rows=32), 70, 1, torch.bfloat16),
    (Teams(Kind(4, 128, False, 1792), 2, more_rows=32), 96, 2, torch.float16),
    (Teams(Kind(4, 128, True, 1792), 2, more_rows=16), 66, 2, torch.bfloat16),
    (Teams(Kind(4, 128, True, 1280), 2, most_rows=128, more_rows=32), 160, 1, torch.float16),
    (Teams(Kind(4, 128, False, 1280), 4), 300, 1, torch.bfloat16),
    # A scale for each row; the last step may be of a part of a block.
    (Teams(Kind(8, 0, False, 1280, torch.float32), 2, 80), 11, 4, torch.bfloat16),
    (Teams(Kind(8, 0, False, 272, torch.float32), 2, 80), 3, 1, torch.float16),
    (Teams(Kind(8, 0, False, 1280), 2), 70, 2, torch.bfloat16),
    (Teams(Kind(8, 0, False, 1328, torch.bfloat16), 2, most_rows=128), 66, 1, torch.bfloat16),
    (Teams(Kind(8, 0, False, 1280, torch.float32), 2, most_rows=128), 200, 2, torch.float16),
    (Teams(Kind(8, 0, False, 1280, torch.float32), 3, most_rows=128), 130, 2, torch.bfloat16),
    (Teams(Kind(8, 0, False, 1280), 2, 80, most_rows=32, more_rows=16), 33, 1, torch.bfloat16),
    (Teams(Kind(8, 0, False, 1328), 3, more_rows=32), 70, 2, torch.float16),
    (Teams(Kind(8, 0, False, 1280), 2, 80, more_rows=16), 80, 1, torch.bfloat16),
    (Teams(Kind(8, 0, False, 1280), 3, most_rows=128, more_rows=32), 131, 2, torch.bfloat16),
    (Teams(Kind(8, 0, False, 1280), 3, most_rows=128), 300, 2, torch.float16),
    # Of more than four blocks the last does not come in boxes.
    (Teams(Kind(8, 0, False, 1280), 2, most_rows=128), 600, 1, torch.bfloat16),
    # The second product's rows come in boxes, or all at once.
    (Teams(Kind(8, 0, False, 1280), 2, most_rows=128, more_rows=64), 130, 2, torch.bfloat16),
    (Teams(Kind(8, 0, False, 1280), 2, most_rows=128, more_rows=64), 191, 1, torch.bfloat16),
    (Blocks("Q4_K", 1280), 11, 4, torch.bfloat16),
    (Integers("Q4_K", 1280), 1, 4, torch.bfloat16),
    (Integers("Q4_K", 2304), 8, 1, torch.float16),
    (Integers("Q5_K", 768), 3, 2, torch.bfloat16),
    (Integers("Q6_K", 512), 1, 1, torch.float16),
    (Integers("Q6_K", 1280), 8, 4, torch.bfloat16),
    (Blocks("Q5_K", 768), 11, 2, torch.float16),
    (Blocks("Q6_K", 512), 32, 1, torch.bfloat16),
    (Blocks("Q4_K", 512), 32, 2, torch.float16),
    (Integers("Q8_0", 2304), 1, 4, torch.bfloat16),
    (Integers("Q8_0", 768), 8, 1, torch.float16),
    (Integers("Q4_0", 1280), 3, 2, torch.float16),
    (Integers("Q4_1", 1280), 8, 4, torch.bfloat16),
    (Integers("Q5_0", 768), 8, 1, torch.bfloat16),
    (Integers("Q5_1", 768), 1, 1, torch.float16),
    (Blocks("Q8_0", 1280), 11, 4, torch.bfloat16),
    (Blocks("Q8_0", 768), 32, 1, torch.float16),
    (Blocks("Q4_0", 512), 32, 2, torch.bfloat16),
    (Blocks("Q4_1", 512), 11, 1, torch.bfloat16),
    (Blocks("Q5_0", 512), 11, 2, torch.float16),
    (Blocks("Q5_1", 512), 32, 1, torch.bfloat16),
]
of_all_cases = pytest.mark.parametrize(("kind", "rows", "splits", "dtype"), CASES, ids=str)
on_hopper = pytest.mark.usefixtures("on_hopper")


def tile_of(kind: Kind | Blocks | Teams, splits: int, gated: bool = False) -> Tile:
    if isinstance(kind, Teams):
        return Tile(
            *(CODES_BLOCK_N // 2 if gated else CODES_BLOCK_N, kind.step, splits, "teams", 4, 2),
            least_rows=8 if kind.most_rows == 64 and not kind.more_rows else kind.most_rows,
            most_rows=kind.most_rows,
            max_registers=kind.max_registers,
            ahead=kind.ahead,
            teams=kind.teams,
            more_rows=kind.more_rows,
        )
    sizes = (CODES_BLOCK_N, 256, splits, "codes", 4, 2)
    if isinstance(kind, Integers):
        return Tile(*sizes, least_rows=2 if kind.name == "Q6_K" else 4, most_rows=8)
    # Of many rows; either way is that of some shapes.
    return Tile(*sizes, least_rows=8, most_rows=64, ahead=splits == 2)


class Case:
    """Rows by a weight of N rows, which need not end at a tile, and their products in float64."""

    def __init__(self, kind: Kind | Blocks | Teams, rows: int, n: int, dtype: torch.dtype) -> None:
        name = "blocks" if isinstance(kind, Blocks) else "groups"
        name = "integers" if isinstance(kind, Integers) else name
        name = "teams" if isinstance(kind, Teams) else name
        self.hopper: Any = importlib.import_module(
            f"engine_core.kernels.linear.{name}.hopper.triton"
        )
        self.kernels: Any = importlib.import_module("engine_core.kernels.linear.triton")
        self.n, self.rows, self.dtype = n, rows, dtype
        self.x, self.bias = self.randn(rows, kind.k), self.randn(n)
        if isinstance(kind, Blocks):
            weight, numbers = made_of_blocks(kind.name, n, kind.k, dtype, "cuda")
            self.weight, self.numbers = weight, numbers.double()
            self.x *= n**0.5 / self.numbers.norm()
        else:
            plain = kind.kind if isinstance(kind, Teams) else kind
            self.weight, self.numbers = made(plain, n, dtype, "cuda")
        self.product = self.x.double() @ self.numbers.T + self.bias.double()
        assert self.hopper.fits(self.x, self.weight)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(self.dtype)

    def check(self, got: Tensor, expected: Tensor, times: float = 1.0) -> None:
        assert error(got, expected) < times * TOLERANCE[self.dtype]


@pytest.mark.gpu
@on_hopper
@of_all_cases
def test_products_and_what_activates_them(
    kind: Kind | Blocks | Teams, rows: int, splits: int, dtype: torch.dtype
) -> None:
    case = Case(kind, rows, 1056, dtype)

    def run(x: Any, gated: bool, name: str | None) -> Tensor:
        tile = tile_of(kind, splits, gated)
        epilogues = [case.kernels.Activated.of(case.x, case.n, gated, name) for _ in range(2)]
        outs = [case.hopper.linear(x, case.weight, e, tile, case.bias) for e in epilogues]
        assert torch.equal(*outs)
        out: Tensor = outs[0]
        return out

    gate, up = case.product.chunk(2, -1)
    case.check(run(case.x, False, None), case.product)
    case.check(run(case.x, True, None), gate * torch.sigmoid(gate) * up, 2)
    gelu = torch.nn.functional.gelu(case.product)
    case.check(run(case.x, False, "gelu"), gelu)
    # Means of about 1: activated, larger numbers would be too sensitive.
    squares = (torch.rand(rows, 3, device="cuda") + 0.5) * kind.k / 3
    mean = squares.double().sum(-1, keepdim=True) / kind.k
    divided = (case.product - case.bias.double()) / (mean + 1e-5).sqrt() + case.bias.double()
    case.check(run(DeferredRMSNorm(case.x, squares, 1e-5), False, None), divided)
    gate, up = divided.chunk(2, -1)
    gated = gate * torch.sigmoid(gate) * up
    case.check(run(DeferredRMSNorm(case.x, squares, 1e-5), True, None), gated, 2)


@pytest.mark.gpu
@on_hopper
@of_all_cases
def test_the_residual_and_the_norm(
    kind: Kind | Blocks | Teams, rows: int, splits: int, dtype: torch.dtype
) -> None:
    case, tile = Case(kind, rows, 1056, dtype), tile_of(kind, splits)
    residual, norm_weight = case.randn(rows, case.n), case.randn(case.n)
    added = case.kernels.Added.of(residual, norm_weight, tile, 1.0)
    got = case.hopper.linear(case.x, case.weight, added, tile, case.bias)
    total = case.product + residual.double()
    case.check(added.total, total)
    case.check(got, total * (norm_weight.double() + 1), 2)
    case.check(added.squares.sum(1) / case.n, total.square().mean(1))


@pytest.mark.gpu
@on_hopper
@of_all_cases
def test_heads_are_rotated_and_stored(
    kind: Kind | Blocks | Teams, rows: int, splits: int, dtype: torch.dtype
) -> None:
    heads, kv_heads, rotates = 3, 2, rows != 32
    head_dim = {1: 128, 3: 64, 8: 256, 11: 64, 70: 256, 127: 64, 130: 256}.get(rows, 128)
    case, tile = Case(kind, rows, 7 * head_dim, dtype), tile_of(kind, splits)
    angles = 6 * torch.rand(1, rows, head_dim // 2, dtype=torch.float64, device="cuda")
    turns = (angles[0].cos().float(), angles[0].sin().float()) if rotates else (None, None)
    if not rotates:
        angles.zero_()
    slots = torch.randperm(4 * rows, device="cuda")[:rows]
    slots[1::3] = -1
    # Blocks have the heads of both, so that they are further apart than a cache is large.
    whole = torch.full((rows, 4, 2, kv_heads, head_dim), torch.nan, device="cuda", dtype=dtype)
    caches = whole.unbind(2)
    epilogue = case.kernels.Stored.of(case.n, *turns, *caches, slots, False)
    got = case.hopper.linear(case.x, case.weight, epilogue, tile, case.bias)
    parts = case.product.view(rows, -1, head_dim).split((heads, kv_heads, kv_heads), 1)
    case.check(got, by_complex_numbers(parts[0], angles, False), 2)
    keys = by_complex_numbers(parts[1], angles, False)
    case.check(stored(caches[0], slots), keys[slots >= 0], 2)
    case.check(stored(caches[1], slots), parts[2][slots >= 0])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "kind",
    [Kind(4, 128, True, 2048), Integers("Q4_K", 2048), Integers("Q8_0", 2048)],
    ids=str,
)
def test_the_engines_linears_take_it(kind: Kind | Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the rule says so and its tensors fit; else the portable kernel's tiles are taken."""
    rows = 3 if isinstance(kind, Integers) else 5
    case = Case(kind, rows, 4096, torch.bfloat16)
    seen = seen_endings(case.hopper, monkeypatch)
    gate, up = case.product.chunk(2, -1)
    case.check(linear(case.x, case.weight, case.bias), case.product)
    got = linear(case.x, case.weight, case.bias, gated=True)
    case.check(got, gate * torch.sigmoid(gate) * up, 2)
    residual, norm_weight = case.randn(rows, 4096), case.randn(4096)
    given = (case.x, case.weight, case.bias)
    normed, total = linear_add(*given, residual, norm_weight, 1e-5)
    case.check(total, case.product + residual.double())
    case.check(normed.values, (case.product + residual.double()) * norm_weight.double(), 2)
    angles = 6 * torch.rand(1, rows, 64, dtype=torch.float64, device="cuda")
    turns = (angles[0].cos().float(), angles[0].sin().float())
    k_cache, v_cache = torch.zeros(2, 1, 8, 4, 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(rows, device="cuda")

    def rotate(**options: Any) -> None:
        q = linear_rotary_store(*given, *turns, k_cache, v_cache, slots, **options)
        heads = case.product.view(rows, 32, 128)[:, :24]
        turned = by_complex_numbers(heads, angles, options.get("interleaved", False))
        case.check(q, turned, 2)

    rotate()
    taken = ["Activated", "Activated", "Added", "Stored"]
    assert seen == taken
    rotate(interleaved=True)
    shifted = case.randn(rows, 2056)[:, 4:2052]
    linear(shifted, case.weight)
    linear(case.x, case.weight, deterministic=True)
    assert seen == taken


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("rows", [32, 100])
def test_the_engines_linears_take_teams(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in a graph these begin before the kernel ahead has ended, which lets them at once."""
    case = Case(Teams(Kind(4, 128, True, 4096), 2), rows, 4096, torch.bfloat16)
    seen = seen_endings(case.hopper, monkeypatch)
    norm_weight = (torch.rand(4096, device="cuda") + 0.5).bfloat16()
    k_cache, v_cache = torch.zeros(2, rows // 4, 4, 4, 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(rows, device="cuda")

    def chain() -> list[Tensor]:
        x, residual, results = case.x, case.x.clone(), []
        for _ in range(4):
            normed, residual = linear_add(x, case.weight, None, residual, norm_weight, 1e-5)
            x = linear(normed, case.weight)
            q = linear_rotary_store(x, case.weight, None, None, None, k_cache, v_cache, slots)
            results += [normed.values, residual, x, q, k_cache.clone(), v_cache.clone()]
        return results

    results = chain()
    assert seen == ["Added", "Activated", "Stored"] * 4
    case.check(results[1], case.x.double() @ case.numbers.T + case.x.double())
    product = results[2].double() @ case.numbers.T
    case.check(results[3].view(rows, -1), product[:, :3072])
    stored_keys = results[4].view(rows, -1)
    case.check(stored_keys, product[:, 3072:3584])
    check_replays(chain, results)
    seen.clear()
    linear(case.x[:16], case.weight)
    linear(torch.cat((case.x, case.x))[:64], case.weight)
    shifted = torch.zeros(32, 4104, device="cuda", dtype=torch.bfloat16)[:, 4:4100]
    linear(shifted, case.weight)
    assert seen == []


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "kind",
    [
        Kind(4, 128, True, 2048),
        *(of(name, 2048) for of in (Blocks, Integers) for name in ("Q4_K", "Q4_1")),
    ],
    ids=str,
)
def test_it_waits_for_what_it_reads(kind: Kind | Blocks) -> None:
    """In a graph it begins before the kernel ahead has ended, which lets it at once."""
    rows = 4 if isinstance(kind, Integers) else 16
    down, up = (Case(kind, rows, n, torch.bfloat16) for n in (2048, 4096))
    norm_weight = (torch.rand(2048, device="cuda") + 0.5).bfloat16()

    def chain() -> list[Tensor]:
        x, residual, results = down.x, down.x.clone(), []
        for _ in range(6):
            normed, residual = linear_add(x, down.weight, None, residual, norm_weight, 1e-5)
            x = linear(normed, up.weight, gated=True)
            results += [normed.values, residual, x]
        return results

    check_replays(chain, chain())


@pytest.fixture
def hopper() -> ModuleType:
    pytest.importorskip("triton", reason="triton is not installed")
    return importlib.import_module("engine_core.kernels.linear.groups.hopper.triton")


def test_what_it_does_not_fit(hopper: ModuleType, launch_device: str) -> None:
    del launch_device  # where Triton may be imported
    x = torch.zeros(3, 512, dtype=torch.bfloat16)

    def fits(kind: Kind, x: Tensor = x, dtype: torch.dtype = torch.bfloat16) -> bool:
        answer: bool = hopper.fits(x, made(kind._replace(k=512), 64, dtype, "cpu")[0])
        return answer

    plain = Kind(4, 128, True, 512)
    assert fits(plain)
    assert fits(Kind(4, 0, True, 512))
    assert fits(plain, torch.zeros(3, 1024, dtype=torch.bfloat16)[:, 512:])
    assert not fits(Kind(4, 64, True, 512))
    assert not fits(Kind(8, 128, True, 512))
    assert not fits(plain, x, torch.float16)
    assert not fits(plain, torch.zeros(3, 514, dtype=torch.bfloat16)[:, :512])
    assert not fits(plain, torch.zeros(3, 528, dtype=torch.bfloat16)[:, 4:516])


def test_what_teams_do_not_fit(launch_device: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    del launch_device  # where Triton may be imported
    teams = importlib.import_module("engine_core.kernels.linear.teams.hopper.triton")
    x = torch.zeros(3, 512, dtype=torch.bfloat16)

    def fits(kind: Kind, n: int = 64, x: Tensor = x, dtype: torch.dtype = torch.bfloat16) -> bool:
        answer: bool = teams.fits(x, made(kind, n, dtype, "cpu")[0])
        return answer

    plain = Kind(4, 128, True, 512)
    assert fits(plain)
    assert fits(plain._replace(zeros=False, scales=torch.float32))
    assert not fits(plain, 48)
    assert not fits(plain._replace(group=256))
    assert not fits(plain._replace(group=0))
    assert not fits(plain._replace(group=64))
    assert not fits(plain._replace(bits=8))
    assert not fits(plain._replace(k=384), x=x[:, :384].contiguous())
    assert not fits(plain, dtype=torch.float16)
    assert not fits(plain, x=torch.zeros(3, 528, dtype=torch.bfloat16)[:, 4:516])


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q5_1", "Q8_0"])
def test_what_blocks_it_fits(name: str, launch_device: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    del launch_device  # where Triton may be imported
    blocks = importlib.import_module("engine_core.kernels.linear.blocks.hopper.triton")
    weight, _ = made_of_blocks(name, 64, 512, torch.bfloat16, "cpu")
    x = torch.zeros(3, 512, dtype=torch.bfloat16)
    assert blocks.fits(x, weight)
    assert blocks.fits(x, made_of_blocks(name, 40, 512, torch.bfloat16, "cpu")[0]) == (
        name.endswith("K")
    )
    assert not blocks.fits(x.half(), weight)
    assert not blocks.fits(torch.zeros(3, 520, dtype=torch.bfloat16)[:, 4:516], weight)


def test_where_it_was_seen_to_be_faster() -> None:
    """The measurements are in benchmarks/notes/quantisation.md."""

    def splits(n: int, k: int, gated: bool, gpu: GPU | None = HOPPER) -> list[int]:
        tiles = (choose_codes_tile(rows, n, k, gated, gpu) for rows in (1, 16, 32, 64, 65))
        return [0 if tile is None else tile.splits for tile in tiles]

    assert splits(28672, 4096, True) == [2, 2, 1, 0, 0]
    assert splits(4096, 14336, False) == [8, 8, 4, 4, 0]
    assert splits(6144, 4096, False) == [4, 4, 4, 2, 0]
    assert splits(4096, 4096, False) == [8, 8, 4, 4, 0]
    assert splits(896, 4864, False) == splits(4096, 896, False) == [0] * 5
    for gpu in (ADA, BLACKWELL, None):
        assert splits(4096, 4096, False, gpu) == [0] * 5


def test_where_teams_were_seen_to_be_faster() -> None:
    """The measurements are in benchmarks/notes/quantisation.md."""

    def chosen(n: int, k: int, gated: bool, gpu: GPU | None = HOPPER) -> list[tuple[int, int]]:
        tiles = (choose_teams_tile(rows, n, k, gated, gpu) for rows in (1, 2, 16, 17, 32, 64))
        return [(0, 0) if tile is None else (tile.teams, tile.splits) for tile in tiles]

    no = (0, 0)
    assert chosen(28672, 4096, True) == [no, (4, 1), (4, 1), (2, 1), (2, 1), (4, 1)]
    assert chosen(4096, 14336, False) == [no, no, no, (2, 4), (2, 4), no]
    assert chosen(4096, 4096, False) == [no, no, no, (2, 4), (2, 4), no]
    assert chosen(8192, 8192, False) == [no, no, no, (2, 2), (2, 2), no]
    for n, k in ((6144, 4096), (2048, 8192), (4096, 2048), (4096, 14464), (896, 4864)):
        assert chosen(n, k, False) == [no] * 6
    # More programs than have room at once, and too few: but 33 to 64 rows take turns.
    assert chosen(37888, 3584, True) == [no] * 5 + [(2, 1)]
    assert chosen(14336, 4096, True) == [no] * 5 + [(2, 1)]
    assert chosen(14336, 1920, True) == [no] * 6
    for gpu in (ADA, BLACKWELL, None):
        assert chosen(28672, 4096, True, gpu) == [no] * 6


MANY = (65, 96, 128, 160, 192, 256, 512, 768, 1025)


def of_teams(tiles: Iterable[Tile | None]) -> list[tuple[int, ...]]:
    """Teams, rows of a program and splits; () without a tile."""
    return [
        () if tile is None else (tile.teams, tile.most_rows + tile.more_rows, tile.splits)
        for tile in tiles
    ]


def test_how_teams_share_many_rows() -> None:
    """By the fewest turns of the multiprocessors, each as long as its steps; measured likewise."""

    def chosen(n: int, k: int, gated: bool, gpu: GPU | None = HOPPER) -> list[tuple[int, ...]]:
        return of_teams(choose_teams_tile(rows, n, k, gated, gpu) for rows in MANY)

    narrow, halves, wide, wide_halves = (2, 64, 1), (2, 64, 2), (2, 128, 1), (2, 128, 2)
    assert chosen(28672, 4096, True) == [
        *((2, 80, 1), (2, 96, 1), wide),
        *((2, 160, 1), (4, 64, 1), wide, wide, wide, ()),
    ]
    assert chosen(4096, 14336, False) == [
        *((2, 80, 4), (2, 96, 4), halves),
        *((2, 160, 4), wide_halves, wide_halves, wide, wide_halves, ()),
    ]
    # Some of many rows take numbers.
    assert chosen(4096, 4096, False) == [*[halves] * 3, *[narrow] * 3, wide, (), ()]
    assert chosen(6144, 4096, False) == [
        *((2, 80, 2), (2, 96, 2), narrow),
        *((2, 160, 2), wide, wide, narrow, (), ()),
    ]
    assert chosen(2048, 8192, False) == [
        *[(2, 64, 4)] * 3,
        *(halves, halves, halves, wide_halves, wide, ()),
    ]
    # Too few programs, and K of no whole steps.
    assert chosen(512, 2048, False) == chosen(4096, 14464, False) == [()] * 9
    for gpu in (ADA, BLACKWELL, None):
        assert chosen(28672, 4096, True, gpu) == [()] * 9
    # Kernels of all numbers of rows there are by numbers alone.
    with quickly(Quick.PRODUCTS):
        assert chosen(28672, 4096, True)[5:7] == [wide, ()]


def test_a_gated_program_has_room_beside_that_of_a_short_run() -> None:
    """Its first tiles come while the launch before it runs."""
    of_gated = choose_teams_tile(32, 28672, 4096, True, HOPPER)
    short, long = (choose_teams_tile(32, 4096, k, False, HOPPER) for k in (4096, 14336))
    assert of_gated is not None
    assert short is not None
    assert long is not None

    def registers(tile: Tile) -> int:
        # The warp that loads is one of four, so that registers can be dealt out.
        return 128 * (tile.teams + 1) * tile.max_registers

    def memory(tile: Tile) -> int:
        # Codes and two scales and zeros of 64 rows a team, and two tiles of x.
        return tile.num_stages * (tile.teams * 64 * (128 + 2 * 3) + 2 * 32 * 256) + 1024

    assert registers(short) + registers(of_gated) <= 65536
    assert memory(short) + memory(of_gated) <= 227 * 1024
    assert not long.max_registers


def test_teams_of_any_shape_fit_a_multiprocessor() -> None:
    """Random weights, with zeros and the widest scales. Registers are those of the whole launch."""
    module: Any = importlib.import_module("engine_core.kernels.linear.teams.hopper.triton")
    shapes, seen = random.Random(0), set()
    for _ in range(20_000):
        rows, n = shapes.randint(1, 1024), 64 * shapes.randint(4, shapes.choice((160, 1024)))
        k, gated = shapes.choice((128, 1024)) * shapes.randint(2, 16), shapes.random() < 0.5
        tile = choose_teams_tile(rows, n, k, gated, HOPPER)
        if tile is None:
            continue
        seen.add((tile.teams, tile.max_registers, tile.ahead))
        block_m = min(tile.most_rows, max(tile.least_rows, 1 << (rows - 1).bit_length()))
        block_m += tile.more_rows
        step = tile.teams * 64 * (128 + 2 * 5) + 2 * block_m * 256
        # A gate and up, and heads that are rotated, bring each team's results to their order.
        alone = tile.teams * (64 if gated else tile.most_rows) * 128
        beside = alone if tile.splits == 1 else 1024
        # Of barriers, 16 bytes for each tile in flight.
        assert tile.num_stages * (step + 16) + beside <= 227 * 1024
        # The warp that loads is one of four, and without a bound a launch has all that there are.
        threads = 128 * (tile.teams + 1)
        launched = tile.max_registers or 65536 // threads // 8 * 8
        of_team = module._REGISTERS[tile.teams, tile.max_registers]
        assert 128 * (tile.teams * of_team + 32) <= threads * launched <= 65536
        # A team that has less waits for each product, by its machine code.
        assert of_team >= 168 or not tile.ahead
    bounded = {(2, 80, False), (2, 88, False)}
    assert seen == {(4, 0, False), (2, 0, False), (2, 0, True)} | bounded


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("rows", [1, 32, 100, 400])
def test_the_engines_linears_take_teams_for_8_bits(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not where rows are quantised, too."""
    case = Case(Teams(Kind(8, 0, False, 4096, torch.float32), 2), rows, 4096, torch.bfloat16)
    seen = seen_endings(case.hopper, monkeypatch)
    norm_weight = (torch.rand(4096, device="cuda") + 0.5).bfloat16()

    def chain() -> list[Tensor]:
        x, residual, results = case.x, case.x.clone(), []
        for _ in range(4):
            normed, residual = linear_add(x, case.weight, None, residual, norm_weight, 1e-5)
            x = linear(normed, case.weight)
            results += [normed.values, residual, x]
        return results

    results = chain()
    assert seen == ["Added", "Activated"] * 4
    case.check(results[1], case.x.double() @ case.numbers.T + case.x.double())
    check_replays(chain, results)
    seen.clear()
    linear(case.x, case.weight, deterministic=True)
    quantised = replace(case.weight, quantizes_rows=True)
    many = linear(case.x.repeat(128, 1), quantised)
    assert error(many[: len(case.x)], case.product - case.bias.double()) < 0.02
    assert seen == []


def test_where_bytes_by_teams_were_seen_to_be_faster() -> None:
    """The measurements are in benchmarks/notes/quantisation.md."""

    def chosen(n: int, k: int, gated: bool, gpu: GPU | None = HOPPER) -> list[tuple[int, ...]]:
        rows = (1, 32, 40, 64, 80, 96, 128, 160, 192, 256, 768, 1025)
        return of_teams(choose_bytes_tile(each, n, k, gated, gpu) for each in rows)

    assert chosen(28672, 4096, True) == [
        *((2, 16, 1), (2, 32, 1), (2, 48, 1), (2, 64, 1), (2, 80, 1), (2, 96, 1)),
        *((2, 128, 1), (2, 160, 1), (2, 192, 1), (2, 128, 1), (3, 128, 1), ()),
    ]
    assert chosen(37888, 3584, True)[4:] == [
        *((3, 80, 1), (3, 96, 1), (3, 128, 1)),
        *((3, 160, 1), (2, 192, 1), (3, 128, 1), (3, 128, 1), ()),
    ]
    assert chosen(4096, 14336, False) == [
        *((2, 16, 8), (2, 32, 4), (2, 64, 4), (2, 64, 4), (2, 80, 4), (2, 96, 4)),
        *((2, 128, 4), (2, 160, 4), (2, 192, 4), (2, 128, 2), (3, 128, 1), ()),
    ]
    assert chosen(4096, 4096, False) == [
        *((2, 16, 4), (2, 32, 4), (2, 48, 4), (2, 64, 4), (2, 80, 4), (2, 64, 2)),
        *((2, 64, 2), (2, 64, 1), (2, 64, 1), (2, 64, 1), (3, 128, 1), ()),
    ]
    # 33 to 64 rows of small weights, short ones, and such as make few programs.
    assert chosen(2048, 2048, False)[3] == ()
    assert chosen(4096, 896, False) == chosen(128, 2048, False) == [()] * 12
    for gpu in (ADA, BLACKWELL, None):
        assert chosen(28672, 4096, True, gpu) == [()] * 12


def test_bytes_of_any_shape_fit_a_multiprocessor() -> None:
    """Random weights. Registers are those of the whole launch; programs may share it."""
    module: Any = importlib.import_module("engine_core.kernels.linear.teams.hopper.triton")
    shapes, seen = random.Random(0), set()
    for _ in range(5_000):
        rows, n = shapes.randint(1, 1024), 64 * shapes.randint(4, shapes.choice((160, 1024)))
        k, gated = 8 * shapes.randint(256, 2048), shapes.random() < 0.5
        tile = choose_bytes_tile(rows, n, k, gated, HOPPER)
        if tile is None:
            continue
        of_program = tile.most_rows + tile.more_rows
        seen.add((tile.teams, of_program, tile.max_registers))
        assert tile.splits == 1 or not gated
        assert k >= 512 * tile.splits
        assert not tile.more_rows or tile.most_rows < rows <= of_program
        programs = 2 if tile.max_registers else 1
        step = tile.teams * 64 * 128 + 2 * of_program * 128
        # Results are brought to the order of their rows; of heads those of both halves.
        block_n = 32 if gated else 64
        blocks = -(-rows // of_program) * tile.splits
        crowded = -(-n // (2 if gated else 1) // (tile.teams * block_n)) * blocks > 132
        beside = 0 if gated or tile.splits > 1 or not crowded else tile.teams * tile.most_rows * 256
        assert programs * (tile.num_stages * step + 1024) <= 227 * 1024
        assert programs < 2 or 2 * (tile.num_stages * step + beside + 1024) <= 228 * 1024
        assert tile.num_stages >= 2
        threads = 128 * (tile.teams + 1)
        launched = tile.max_registers or 65536 // threads // 8 * 8
        of_team = module._REGISTERS[tile.teams, tile.max_registers]
        assert 128 * (tile.teams * of_team + 32) <= threads * launched <= 65536 // programs
    few = {(2, rows, registers) for rows in (16, 32, 64) for registers in (0, 80)}
    both = {(2, 48, 80), (2, 80, 0), (2, 80, 80), (3, 80, 0), (2, 96, 0), (2, 96, 80), (3, 96, 0)}
    both |= {(2, 160, 0), (3, 160, 0), (2, 192, 0)}
    assert seen == few | both | {(2, 128, 0), (3, 128, 0)}


def test_where_blocks_were_seen_to_be_faster() -> None:
    """The measurements are in benchmarks/notes/quantisation.md."""

    def chosen(name: str, rows: int, n: int, k: int, gpu: GPU = HOPPER) -> Tile | None:
        form = FORMS[name]
        kind = BlockKind(form.group, form.bits, not form.layered, form.affine)
        return choose_blocks_tile(rows, n, k, n == 28672, gpu, kind)

    for name, rows, n, k, mode, parts, ahead in (
        ("Q4_K", 1, 28672, 4096, "integers", 2, False),
        ("Q5_K", 8, 28672, 4096, "integers", 2, False),
        ("Q4_0", 4, 28672, 4096, "integers", 2, False),
        ("Q4_0", 8, 28672, 4096, "codes", 2, False),
        ("Q8_0", 1, 28672, 4096, "integers", 1, False),
        ("Q8_0", 16, 28672, 4096, "codes", 1, False),
        ("Q4_K", 16, 28672, 4096, "codes", 2, False),
        ("Q6_K", 16, 28672, 4096, "codes", 2, False),
        ("Q4_K", 32, 28672, 4096, "codes", 1, False),
        ("Q5_0", 32, 28672, 4096, "codes", 1, True),
        ("Q4_K", 1, 4096, 14336, "integers", 7, False),
        ("Q8_0", 1, 4096, 14336, "integers", 8, False),
        ("Q4_K", 8, 4096, 14336, "codes", 8, False),
        ("Q4_1", 32, 4096, 14336, "codes", 4, True),
        ("Q4_1", 32, 6144, 4096, "codes", 4, False),
        ("Q4_0", 32, 4096, 14336, "codes", 8, True),
        ("Q4_0", 32, 6144, 4096, "codes", 4, True),
        ("Q8_0", 32, 4096, 4096, "codes", 4, True),
        ("Q6_K", 32, 4096, 14336, "codes", 4, True),
        ("Q6_K", 4, 128256, 4096, "integers", 1, False),
        ("Q6_K", 8, 128256, 4096, "codes", 1, False),
        ("Q4_K", 1, 8192, 28672, "codes", 4, False),
    ):
        tile = chosen(name, rows, n, k)
        assert tile is not None
        assert (tile.mode, tile.splits, tile.ahead) == (mode, parts, ahead), (name, rows, n, k)
    for name, rows, n, k in (
        ("Q4_K", 33, 4096, 4096),
        ("Q6_K", 17, 28672, 4096),
        ("Q8_0", 17, 4096, 14336),
        ("Q5_0", 1, 896, 896),
    ):
        assert chosen(name, rows, n, k) is None
    assert chosen("Q4_K", 1, 4096, 4096, ADA) is None
