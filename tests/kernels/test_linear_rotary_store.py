"""A linear to queries, keys and values that rotates and stores, against the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import TOLERANCE, by_complex_numbers, error, stored
from random_examples import pairwise
from torch import Tensor

from engine_core.kernels import DeferredRMSNorm, linear_rotary_store, rotary_store

ROWS = 5
SHAPES: list[dict[str, int]] = [
    {"heads": 4, "kv_heads": 2, "head_dim": 16},
    {"heads": 2, "kv_heads": 1, "head_dim": 64},
    {"heads": 5, "kv_heads": 1, "head_dim": 24},
]
TILES: list[dict[str, Any]] = [
    {"block_n": 16, "block_k": 32},
    {"block_n": 32, "block_k": 16, "splits": 2},
    {"block_n": 64, "block_k": 64, "mode": "wx"},
    {"block_n": 16, "block_k": 32, "mode": "vector"},
    {"block_n": 32, "block_k": 16, "splits": 3, "mode": "vector"},
]
# Many programs, so for one shape alone: the interpreter takes them one by one.
NARROW: list[dict[str, Any]] = [
    {"block_n": 4, "block_k": 32, "mode": "vector"},
    {"block_n": 8, "block_k": 16, "splits": 3, "mode": "vector"},
]


class Case:
    """Inputs, every third token without a slot, caches full of NaN, and what must come out."""

    def __init__(
        self,
        rows: int,
        dtype: torch.dtype,
        interleaved: bool,
        device: str = "cpu",
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        sections: int = 1,
        rotates: bool = True,
        norm_offset: float | None = None,
    ) -> None:
        n, k, half = (heads + 2 * kv_heads) * head_dim, 48, head_dim // 2 // sections
        self.x = torch.randn(rows, k, device=device).to(dtype)
        self.weight = (torch.randn(n, k, device=device) / k**0.5).to(dtype)
        self.bias = torch.randn(n, device=device).to(dtype)
        angles = 6 * torch.rand(sections, rows, half, dtype=torch.float64, device=device)
        self.cos, self.sin = (
            (t if sections > 1 else t[0]).float() for t in (angles.cos(), angles.sin())
        )
        if not rotates:
            angles.zero_()
        self.rotates = rotates
        self.slots = torch.randperm(4 * rows, device=device)[:rows]
        self.slots[1::3] = -1
        shape = (rows, 4, kv_heads, head_dim)
        self.caches = [torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2)]
        qkv = (self.x.double() @ self.weight.double().T + self.bias.double()).to(dtype)
        q, keys, values = qkv.view(rows, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
        self.norms: dict[str, Any] = {}
        if norm_offset is not None:
            q_weight, k_weight = (torch.randn(2, head_dim, device=device) / 2 + 1).to(dtype)
            # Some heads are small, so that what is added to their mean squares counts.
            q, keys = (
                x.double()
                / (x.double().square().mean(-1, keepdim=True) + 0.25).sqrt()
                * (weight.double() + norm_offset)
                for x, weight in ((q, q_weight), (keys, k_weight))
            )
            self.norms = {"q_weight": q_weight, "k_weight": k_weight}
            self.norms |= {"eps": 0.25, "offset": norm_offset}
        self.q, self.keys = (by_complex_numbers(x, angles, interleaved) for x in (q, keys))
        self.values = values

    def arguments(self) -> tuple[Any, ...]:
        angles = (self.cos, self.sin) if self.rotates else (None, None)
        return *angles, *self.caches, self.slots

    def check(self, q: Tensor) -> None:
        # Of two roundings, one after the other, and of two more by a norm.
        tolerance = (4 if self.norms else 2) * TOLERANCE[self.x.dtype]
        assert error(q.reshape(self.q.shape), self.q) < tolerance
        for cache, expected in zip(self.caches, (self.keys, self.values), strict=True):
            assert error(stored(cache, self.slots), expected[self.slots >= 0]) < tolerance


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sections", [1, 2])
def test_is_the_formula(sections: int, dtype: torch.dtype, interleaved: bool) -> None:
    case = Case(ROWS, dtype, interleaved, sections=sections, **SHAPES[0])
    got = linear_rotary_store(
        case.x[None], case.weight, case.bias, *case.arguments(), interleaved=interleaved
    )
    assert got.shape == (ROWS, 4, 16)
    case.check(got)


def test_stores_without_rotation() -> None:
    case = Case(ROWS, torch.float32, False, rotates=False, **SHAPES[0])
    case.check(linear_rotary_store(case.x, case.weight, case.bias, *case.arguments()))


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_heads(dtype: torch.dtype, offset: float, rotates: bool) -> None:
    case = Case(ROWS, dtype, False, rotates=rotates, norm_offset=offset, **SHAPES[2])
    case.check(linear_rotary_store(case.x, case.weight, case.bias, *case.arguments(), **case.norms))


def test_makes_up_for_the_division_of_a_norm() -> None:
    case = Case(ROWS, torch.float32, False, **SHAPES[0])
    scale = torch.rand(ROWS, 1) + 0.5
    squares = (48 / scale**2 - 48 * 0.25).expand(ROWS, 2) / 2
    x = DeferredRMSNorm(case.x / scale, squares, 0.25)
    case.check(linear_rotary_store(x, case.weight, case.bias, *case.arguments()))


def test_preconditions() -> None:
    case = Case(ROWS, torch.float32, False, **SHAPES[0])
    with pytest.raises(ValueError, match=r"weight \(120, 48\) does not have the rows"):
        linear_rotary_store(case.x, case.weight[:120], None, *case.arguments())
    with pytest.raises(ValueError, match=r"slot_mapping must be \[5\] int64"):
        linear_rotary_store(
            case.x, case.weight, None, case.cos, case.sin, *case.caches, case.slots.int()
        )
    given = (case.x, case.weight, None, *case.arguments())
    with pytest.raises(ValueError, match=r"linear_rotary_store: q_weight and k_weight must both"):
        linear_rotary_store(*given, k_weight=torch.ones(16))


BOTH = [False, True]


@pytest.mark.parametrize(
    ("shape", "options", "interleaved"),
    [*pairwise(SHAPES, TILES, BOTH), *pairwise(SHAPES[:1], NARROW, BOTH)],
    ids=str,
)
def test_kernel(
    shape: dict[str, int], options: dict[str, Any], interleaved: bool, launch_device: str
) -> None:
    from engine_core.kernels.linear import triton

    tile = triton.Tile(**options, most_rows=16)
    # More than a program takes.
    rows = 1 if tile.mode == "vector" else 21
    # Not bfloat16: the interpreter's products of it are wrong.
    for dtype, rotates in ((torch.float32, True), (torch.float16, True), (torch.float32, False)):
        if not rotates and (interleaved or options is not TILES[1]):
            continue
        case = Case(rows, dtype, interleaved, launch_device, rotates=rotates, **shape)
        for _ in range(min(tile.splits, 2)):  # the second launch finds the counts of the first
            stored = triton.Stored.of(len(case.weight), *case.arguments(), interleaved)
            reader = triton.DenseWeight(case.weight)
            case.check(triton.linear(case.x, reader, stored, tile, case.bias))


@pytest.mark.parametrize(
    ("shape", "options", "dtype", "interleaved", "rotates"),
    [
        # Tiles that are a head, several, and a part of one.
        (SHAPES[0], TILES[0], torch.float16, False, True),
        (SHAPES[0], TILES[1], torch.float32, True, True),
        (SHAPES[0], TILES[2], torch.float32, False, False),
        (SHAPES[0], NARROW[1], torch.float16, True, True),
        (SHAPES[1], TILES[1], torch.float16, False, True),
        (SHAPES[1], TILES[2], torch.float32, True, True),
        (SHAPES[1], TILES[3], torch.float32, False, True),
    ],
    ids=str,
)
def test_kernel_with_norms_of_heads(
    shape: dict[str, int],
    options: dict[str, Any],
    dtype: torch.dtype,
    interleaved: bool,
    rotates: bool,
    launch_device: str,
) -> None:
    from engine_core.kernels.linear import triton

    tile = triton.Tile(**options, most_rows=16)
    rows = 1 if tile.mode == "vector" else 21
    given: dict[str, Any] = {"rotates": rotates, "norm_offset": float(interleaved)}
    case = Case(rows, dtype, interleaved, launch_device, **given, **shape)
    x = DeferredRMSNorm(case.x, torch.full((rows, 3), 12.0, device=launch_device), 0.25)
    reader = triton.DenseWeight(case.weight)
    for _ in range(2):  # the second launch finds the counts of the first
        stored = triton.Stored.of(len(case.weight), *case.arguments(), interleaved, **case.norms)
        case.check(triton.linear(x, reader, stored, tile, case.bias))


def test_norms_of_heads_do_not_depend_on_the_tile(launch_device: str) -> None:
    """Bit for bit, nor on the kernel: products are single numbers, so only the norms add up."""
    from engine_core.kernels.linear import triton
    from engine_core.kernels.rotary_store import triton as apart

    shape, rows, k = SHAPES[1], 1, 16
    heads, kv_heads, dim = shape.values()
    case = Case(rows, torch.float32, False, launch_device, norm_offset=0.0, **shape)
    weight = torch.randn((heads + 2 * kv_heads) * dim, k, device=launch_device)
    x = torch.eye(k, device=launch_device)[:rows]
    slots = torch.zeros(rows, dtype=torch.int64, device=launch_device)
    turns = (case.cos, case.sin)
    qkv = weight[:, :rows].T.reshape(rows, -1, dim).contiguous()
    q, keys, values = qkv.split((heads, kv_heads, kv_heads), 1)
    caches = [t.clone() for t in case.caches]
    given = (q, keys, values, *turns, *caches, slots)
    apart.rotary_store(*given, **case.norms, interleaved=False)
    for options in (*TILES[2:4], TILES[0], {"block_n": 128, "block_k": 16}):
        mine = [t.clone() for t in case.caches]
        stored = triton.Stored.of(len(weight), *turns, *mine, slots, False, **case.norms)
        got = triton.linear(x, triton.DenseWeight(weight), stored, triton.Tile(**options))
        assert torch.equal(got, q)
        for cache, expected in zip(mine, caches, strict=True):
            assert torch.equal(cache.nan_to_num(), expected.nan_to_num())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 64, 65])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "k"), [(32, 8, 128, 4096), (14, 2, 64, 896)])
def test_norms_of_heads_on_a_gpu(rows: int, heads: int, kv_heads: int, dim: int, k: int) -> None:
    """As the linear and the other kernel one after the other, and again in a graph."""
    x = torch.randn(rows, k, device="cuda").bfloat16()
    weight = (torch.randn((heads + 2 * kv_heads) * dim, k, device="cuda") / k**0.5).bfloat16()
    norms: dict[str, Any] = {
        "q_weight": 1 + torch.randn(dim, device="cuda").bfloat16() / 4,
        "k_weight": 1 + torch.randn(dim, device="cuda").bfloat16() / 4,
        "eps": 1e-6,
    }
    angles = 6 * torch.rand(rows, dim // 2, device="cuda")
    slots = torch.arange(rows, device="cuda")
    turns = (angles.cos(), angles.sin())
    caches = [x.new_zeros(rows, 1, kv_heads, dim) for _ in range(4)]
    qkv = (x.double() @ weight.double().T).bfloat16().view(rows, -1, dim)
    q, keys, values = qkv.split((heads, kv_heads, kv_heads), 1)
    rotary_store(q, keys, values, *turns, *caches[:2], slots, **norms)

    def run() -> Tensor:
        return linear_rotary_store(x, weight, None, *turns, *caches[2:], slots, **norms)

    got = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = [run() for _ in range(8)]
    graph.replay()
    assert all(torch.equal(each, got) for each in again)
    for mine, expected in zip((got, *caches[2:]), (q, *caches[:2]), strict=True):
        # A product may round to a neighbour of 2**-8, which the norm and the rotation pass on.
        assert error(mine, expected) < 4 * TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm_offset", [None, 0.0, 1.0])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(14, 2, 64), (32, 8, 128)])
def test_rows_do_not_depend_on_how_many_there_are(
    heads: int,
    kv_heads: int,
    head_dim: int,
    norm_offset: float | None,
    interleaved: bool,
    rotates: bool,
) -> None:
    """Bit for bit, whether one kernel does it all or the rotation has a kernel of its own."""
    rows, n, k = 300, (heads + 2 * kv_heads) * head_dim, heads * head_dim
    x = torch.randn(rows, k, device="cuda").bfloat16()
    weight, bias = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16(), x.new_ones(n)
    angles = 6 * torch.rand(rows, head_dim // 2, device="cuda")
    slots = torch.arange(rows, device="cuda")
    norms: dict[str, Any] = {}
    if norm_offset is not None:
        norms = {"q_weight": x[0, :head_dim].clone(), "k_weight": x[1, :head_dim].clone()}
        norms |= {"eps": 1e-6, "offset": norm_offset}

    def run(part: slice) -> list[Tensor]:
        caches = [x.new_zeros(rows, 1, kv_heads, head_dim) for _ in range(2)]
        turns = (angles.cos()[part], angles.sin()[part]) if rotates else (None, None)
        options = {"interleaved": interleaved, "deterministic": True, **norms}
        q = linear_rotary_store(x[part], weight, bias, *turns, *caches, slots[part], **options)
        return [q, caches[0][part, 0], caches[1][part, 0]]

    every = run(slice(0, rows))
    for first, count in ((0, 1), (7, 2), (40, 33), (100, 64), (3, 128)):
        part = slice(first, first + count)
        for got, expected in zip(run(part), every, strict=True):
            assert torch.equal(got, expected[part])
