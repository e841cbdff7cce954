"""Linears by integers with scales of groups: the codes, and every epilogue of the kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from kernel_cases import TOLERANCE, by_complex_numbers, error, stored
from torch import Tensor

from engine_core.kernels import DeferredRMSNorm, GroupWeight, linear
from engine_core.kernels.gpu import GPU
from engine_core.kernels.linear.groups import pack_codes, quantize_groups
from engine_core.kernels.linear.tiles import choose_group_tile, choose_one_row_tile
from engine_core.nn.quantization import Int4Matrix

HOPPER, ADA, TURING = (GPU.of_capability(each) for each in ((9, 0), (8, 9), (7, 5)))


class Kind(NamedTuple):
    """A form of weight; K need not be a multiple of 128."""

    bits: int
    group: int
    zeros: bool
    k: int
    scales: torch.dtype = torch.float16


# Pairwise: bits, groups, zeros, ragged ends, and types of scales.
KINDS = [
    Kind(4, 128, False, 384),
    Kind(4, 128, True, 256, torch.float32),
    Kind(4, 64, True, 320),
    Kind(4, 64, False, 256, torch.bfloat16),
    Kind(4, 32, True, 288, torch.bfloat16),
    Kind(4, 32, False, 256),
    Kind(4, 256, True, 512),
    Kind(4, 0, True, 272),
    Kind(8, 128, True, 256),
    Kind(8, 32, False, 160, torch.float32),
    Kind(8, 64, True, 192, torch.bfloat16),
    Kind(8, 0, False, 272, torch.float32),
]


def made(kind: Kind, n: int, dtype: torch.dtype, device: str) -> tuple[GroupWeight, Tensor]:
    """A random weight, and its numbers by the definition, float64."""
    groups = kind.k // kind.group if kind.group else 1
    codes = torch.randint(2**kind.bits, (n, kind.k), dtype=torch.uint8)
    zeros = torch.randint(2**kind.bits, (n, groups), dtype=torch.uint8) if kind.zeros else None
    scales = ((torch.rand(n, groups) + 0.5) / 2**kind.bits / kind.k**0.5).to(kind.scales)
    numbers = torch.empty(n, kind.k, dtype=torch.float64)
    for column in range(kind.k):
        group = column // kind.group if kind.group else 0
        zero = 2 ** (kind.bits - 1) if zeros is None else zeros[:, group].double()
        numbers[:, column] = (codes[:, column].double() - zero) * scales[:, group].double()
    # The first code of a byte is its low half; those of 8 bits are around 0.
    middle = 128 if kind.bits == 8 else 0
    packed = pack_codes(codes - middle, kind.bits).to(device)
    zeros = None if zeros is None else (zeros - middle).to(device)
    weight = GroupWeight.of(packed, scales.to(device), zeros, kind.bits, dtype)
    return weight, numbers.to(device)


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


def test_numbers_are_codes_less_zeros_times_scales(kind: Kind, launch_device: str) -> None:
    from engine_core.kernels.linear.groups import triton

    weight, expected = made(kind, 40, torch.float32, launch_device)
    assert weight.shape == (40, kind.k)
    for dtype in (torch.float32, torch.float16):
        # In float32 one rounding, in another type one more.
        right = expected.float().to(dtype)
        assert torch.equal(weight.numbers(dtype), right)
        assert torch.equal(triton.numbers(weight, dtype), right)
    x = torch.randn(2, 3, kind.k, device=launch_device)
    assert error(linear(x, weight), x.double() @ expected.T) < TOLERANCE[torch.float32]
    size = GroupWeight.size(40, kind.k, kind.bits)
    zeros = 0 if weight.zeros is None else weight.zeros.nbytes
    assert weight.nbytes == size + weight.scales.nbytes + zeros


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_several_sizes_are_refused(bits: int) -> None:
    """Of 160 columns in groups of 64 the last has 32, and by their number they had 53."""
    packed = torch.zeros(32, 160 * bits // 8, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="160 columns are no 3 groups of equal size"):
        GroupWeight.of(packed, torch.ones(32, 3), None, bits, torch.float32)


def test_a_cpus_matrix_has_scales_of_all_its_groups() -> None:
    packed, scales = torch.zeros(32, 128, dtype=torch.uint8), torch.ones(32, 3)
    with pytest.raises(AssertionError, match=r"\[32, 3\] are not \[32, 8\]"):
        Int4Matrix.of_pairs(packed, scales, torch.zeros_like(scales), torch.float32)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_groups_are_near(bits: int) -> None:
    weight = torch.randn(64, 256) * torch.rand(64, 1)
    weight[3], weight[5, :128] = 0, 2.5
    codes, scales, zeros = quantize_groups(weight, bits, 128)
    got = GroupWeight.quantized(weight, bits, 128)
    spread = [each.double().repeat_interleave(128, 1) for each in (zeros, scales)]
    numbers = (codes.double() - spread[0]) * spread[1]
    assert torch.equal(got.numbers(torch.float32), numbers.float())
    low = weight.unflatten(1, (2, 128)).amin(-1).clamp(max=0)
    step = (weight.unflatten(1, (2, 128)).amax(-1).clamp(min=0) - low) / (2**bits - 1)
    off = (numbers - weight).unflatten(1, (2, 128)).abs().amax(-1)
    # Zeros are whole codes, so that the extremes may be cut off by half a step more.
    assert (off <= 1.01 * step).all()
    assert (numbers - weight).square().mean() < step.square().mean() / 11
    assert torch.equal(got.numbers(torch.float32)[3], weight[3])


def test_rows_quantised_to_8_bits_are_symmetric() -> None:
    weight = torch.randn(24, 80)
    weight[2] = 0
    got = GroupWeight.quantized(weight, 8, 0)
    assert torch.equal(got.scales, weight.abs().amax(1) / 127)
    assert (got.dense() - weight).abs().max() <= got.scales.max() / 2 * 1.001
    assert torch.equal(got.dense()[2], weight[2])


TILES: list[dict[str, Any]] = [
    {"block_n": 16, "block_k": 128, "splits": 2},
    {"block_n": 32, "block_k": 128, "mode": "wx"},
]
N = 64


class Case:
    def __init__(self, tile: dict[str, Any], kind: Kind, device: str) -> None:
        from engine_core.kernels.linear import triton as kernels

        self.kernels, self.tile, self.device = kernels, kernels.Tile(**tile), device
        self.rows, self.k = 5, kind.k
        # Only a GPU multiplies bfloat16; the interpreter's products of it are wrong.
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.weight, self.numbers = made(kind, N, self.dtype, device)
        self.x, self.bias = self.randn(self.rows, kind.k), self.randn(N)
        self.product = self.times(self.x)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def times(self, x: Tensor) -> Tensor:
        return x.double() @ self.numbers.T + self.bias.double()

    def run(self, epilogue: Any, x: Any = None) -> Tensor:
        reader = self.kernels.reader_of(self.weight)
        out: Tensor = self.kernels.linear(
            self.x if x is None else x, reader, epilogue, self.tile, self.bias
        )
        return out

    def check(self, got: Tensor, expected: Tensor, times: float = 1.0) -> None:
        assert error(got, expected) < times * TOLERANCE[self.dtype]


@pytest.fixture(params=TILES, ids=str)
def tile(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen: dict[str, Any] = request.param
    return chosen


def test_plain_and_gated(tile: dict[str, Any], kind: Kind, launch_device: str) -> None:
    case = Case(tile, kind, launch_device)
    gate, up = case.product.chunk(2, -1)
    case.check(case.run(case.kernels.Activated.of(case.x, N)), case.product)
    gated = case.run(case.kernels.Activated.of(case.x, N, True))
    case.check(gated, gate * torch.sigmoid(gate) * up)


def test_wide_tiles_of_row_scales(launch_device: str) -> None:
    for mode in ("wx", "vector"):
        tile = {"block_n": 16, "block_k": 256, "mode": mode}
        case = Case(tile, Kind(4, 0, True, 656), launch_device)
        rows = 1 if mode == "vector" else 5
        got = case.run(case.kernels.Activated.of(case.x[:rows], N), case.x[:rows])
        case.check(got, case.product[:rows])


EPILOGUE_KINDS = [KINDS[0], KINDS[4], KINDS[8]]


@pytest.mark.parametrize("form", EPILOGUE_KINDS, ids=str)
def test_norms_around_it(tile: dict[str, Any], form: Kind, launch_device: str) -> None:
    case = Case(tile, form, launch_device)
    squares = torch.rand(case.rows, 3, device=case.device) + 0.5
    mean = squares.double().sum(-1, keepdim=True) / case.k
    got = case.run(case.kernels.Activated.of(case.x, N), DeferredRMSNorm(case.x, squares, 1e-5))
    case.check(got, case.times(case.x.double() / (mean + 1e-5).sqrt()))
    residual, norm_weight = case.randn(case.rows, N), case.randn(N)
    added = case.kernels.Added.of(residual, norm_weight, case.tile)
    got, total = case.run(added), case.product + residual.double()
    case.check(added.total, total)
    case.check(got, total * norm_weight.double(), 2)


@pytest.mark.parametrize("form", EPILOGUE_KINDS, ids=str)
def test_rotates_and_stores(tile: dict[str, Any], form: Kind, launch_device: str) -> None:
    case = Case(tile, form, launch_device)
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


def test_float16_rows(launch_device: str) -> None:
    from engine_core.kernels.linear import triton

    for form in EPILOGUE_KINDS:
        weight, numbers = made(form, 48, torch.float16, launch_device)
        x = torch.randn(3, form.k, device=launch_device).half()
        tile = triton.Tile(16, 128, mode="wx")
        got = triton.linear(x, triton.reader_of(weight), triton.Activated.of(x, 48), tile)
        assert error(got, x.double() @ numbers.T) < TOLERANCE[torch.float16]


def test_zeros_that_are_added_as_numbers(launch_device: str) -> None:
    """As of an exported file: around the middle code, plus a bfloat16 of the group."""
    from engine_core.kernels.linear import triton

    dtype = torch.bfloat16 if launch_device == "cuda" else torch.float32
    codes, scales = torch.randint(16, (48, 160), dtype=torch.uint8), torch.rand(48, 5) / 64
    added = torch.randn(48, 5).to(torch.bfloat16) / 16
    spread = [each.double().repeat_interleave(32, 1) for each in (scales, added)]
    numbers = ((codes.double() - 8) * spread[0] + spread[1]).to(launch_device)
    given = (each.to(launch_device) for each in (pack_codes(codes, 4), scales, added))
    weight = GroupWeight.of(*given, 4, dtype)
    torch.testing.assert_close(weight.numbers(torch.float32), numbers.float(), rtol=0, atol=1e-7)
    x = torch.randn(3, 160, device=launch_device).to(dtype)
    epilogue = triton.Activated.of(x, 48)
    got = triton.linear(x, triton.reader_of(weight), epilogue, triton.Tile(16, 128, mode="wx"))
    assert error(got, x.double() @ numbers.T) < TOLERANCE[dtype]


def test_rows_and_their_product_in_8_bits(launch_device: str) -> None:
    from engine_core.kernels.linear.groups import triton

    weight, numbers = made(Kind(8, 0, False, 208, torch.float32), 40, torch.float32, launch_device)
    x, bias = torch.randn(7, 208, device=launch_device), torch.randn(40, device=launch_device)
    x[2] = 0
    spoilt = x.repeat(2, 1)
    # In a row of its own each, which is spoilt as a whole.
    spoilt[3, 5], spoilt[9, 200] = torch.nan, -torch.inf
    assert triton.quantize_rows(spoilt)[1].isnan().nonzero().flatten().tolist() == [3, 9]
    codes, scales = triton.quantize_rows(x)
    assert torch.allclose(scales, x.abs().amax(1) / 127)
    assert codes.shape == (7, 256)
    held = weight.words.view(torch.int8).view(40, -1)
    sums = (codes.double() @ held.double().T).int()
    got = triton.rescale(sums, scales, weight.scales, bias, torch.float32)
    nearest = (x.double() / torch.where(scales == 0, 1, scales)[:, None]).round()
    expected = nearest * scales.double()[:, None] @ numbers.T + bias.double()
    assert error(got, expected) < 1e-3


def test_few_rows_have_a_tile() -> None:
    """For the linears of Llama 3 8B and Qwen2 0.5B, on any GPU with bfloat16."""
    for n, k in ((6144, 4096), (4096, 14336), (1152, 896), (896, 4864), (28672, 4096)):
        for rows in (1, 64, 65, 256):
            for gated in (False, True):
                for gpu in (HOPPER, ADA):
                    tile = choose_group_tile(rows, n, k, gated, gpu)
                    # A tile has one block, whose scales its products are multiplied by.
                    assert tile is not None
                    assert tile.block_k == 128
        assert choose_group_tile(257, n, k, False, HOPPER) is None
        assert choose_group_tile(65, n, k, False, HOPPER, 64) is None
        assert choose_group_tile(1, n, k, False, TURING) is None
        assert choose_group_tile(1, n, k, False, None) is None


def test_narrow_and_short_weights_have_small_tiles() -> None:
    """Columns and splits; the measurements are in benchmarks/notes/quantisation.md."""

    def chosen(n: int, k: int, gated: bool) -> list[tuple[int, int]]:
        tiles = (choose_group_tile(rows, n, k, gated, HOPPER) for rows in (1, 16, 32, 64, 128))
        return [(tile.block_n, tile.splits) for tile in tiles if tile is not None]

    assert chosen(896, 896, False) == [(32, 4), (32, 4), (32, 2), (32, 2), (32, 1)]
    assert chosen(896, 4864, False) == [(64, 8)] * 4 + [(64, 4)]
    assert chosen(9728, 896, True) == [(64, 2)] * 4 + [(64, 1)]
    assert chosen(1536, 1536, False) == [(64, 4)] * 4 + [(64, 2)]
    assert choose_one_row_tile(1536, HOPPER) is not None
    for k, gpu in ((1280, HOPPER), (4096, HOPPER), (1536, ADA), (1536, None)):
        assert choose_one_row_tile(k, gpu) is None


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 64, 65, 128, 256, 300])
def test_chosen_kernels(rows: int, kind: Kind) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for gated in (False, True):
            weight, numbers = made(kind._replace(k=4 * kind.k), 1024, dtype, "cuda")
            x = torch.randn(rows, weight.shape[1], device="cuda").to(dtype)
            expected = x.double() @ numbers.T
            if gated:
                gate, up = expected.chunk(2, -1)
                expected = gate * torch.sigmoid(gate) * up
            got = linear(x, weight, gated=gated)
            assert (got.double() - expected).norm() / expected.norm() < 0.006


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 64, 65, 300])
def test_many_rows_are_quantised_too(rows: int) -> None:
    kind = Kind(8, 0, False, 1024, torch.float32)
    given, numbers = made(kind, 512, torch.bfloat16, "cuda")
    weight = GroupWeight(
        given.words, given.scales, None, 1024, 0, torch.bfloat16, quantizes_rows=True
    )
    x = torch.randn(rows, 1024, device="cuda").bfloat16()
    expected = x.double() @ numbers.T
    away = (linear(x, weight).double() - expected).norm() / expected.norm()
    assert away < (0.006 if rows <= 64 else 0.02)


def evaluate(code: str, inputs: list[int], first: int, dtype: torch.dtype) -> list[list[float]]:
    """The pairs of numbers that PTX makes of registers; ``first`` is the number of the first."""
    held = {f"${first + at}": value for at, value in enumerate(inputs)}

    def value(name: str) -> int:
        return held[name] if name in held else int(name, 0)

    def pair(bits: int) -> Tensor:
        halves = torch.tensor([bits & 0xFFFF, bits >> 16], dtype=torch.int32).to(torch.int16)
        return halves.view(dtype).double()

    for line in code.strip("{}\n").replace("\n", ";").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        to, *operands = rest.split(", ")
        a, *others = map(value, operands)
        if name == "mov.b32":
            held[to] = a
        elif name == "shr.u32":
            held[to] = a >> others[0]
        elif name == "shl.b32":
            held[to] = a << others[0] & 0xFFFFFFFF
        elif name == "prmt.b32":
            source = (a | others[0] << 32).to_bytes(8, "little")
            chosen = bytes(source[others[1] >> 4 * at & 7] for at in range(4))
            held[to] = int.from_bytes(chosen, "little")
        elif name == "lop3.b32":
            held[to] = 0
            for at in range(32):
                row = (a >> at & 1) << 2 | (others[0] >> at & 1) << 1 | others[1] >> at & 1
                held[to] |= (others[2] >> row & 1) << at
        else:
            assert name in ("fma.rn.bf16x2", "fma.rn.f16x2")
            halves = (pair(a) * pair(others[0]) + pair(others[1])).to(dtype).view(torch.int16)
            held[to] = int(halves[0]) & 0xFFFF | (int(halves[1]) & 0xFFFF) << 16
    return [pair(held[f"${part}"]).tolist() for part in range(first)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_instructions_make_the_numbers(bits: int, dtype: torch.dtype, launch_device: str) -> None:
    """Of every code, and less every zero that 4 bits have and some that others have."""
    from engine_core.kernels.linear.readers import triton as readers

    name = str(dtype).removeprefix("torch.")
    offset, middle = readers.offset_of(name, bits), 0 if bits == 8 else 2 ** (bits - 1)
    for start in range(0, 2**bits, 4):
        codes = torch.arange(start, start + 8).remainder(2**bits).tolist()
        zero = start if bits < 8 else start - 128
        added = int(torch.tensor(-offset - zero).to(dtype).view(torch.int16)) & 0xFFFF
        if bits == 8:
            words = [sum(c << 8 * at for at, c in enumerate(codes[i : i + 4])) for i in (0, 4)]
        else:
            places = [16 * (at // 4) + 4 * (at % 4) for at in range(8)]
            words = [sum((c & 15) << at for c, at in zip(codes, places, strict=True))]
        if bits in (5, 6):
            places = [16 * (at // 4) + (bits - 4) * (at % 4) for at in range(8)]
            words += [sum((c >> 4) << at for c, at in zip(codes, places, strict=True))]
        signed = [c if bits < 8 or c < 128 else c - 256 for c in codes]
        for given, added_by, less in (
            (None, [added | added << 16] * 4, zero),
            (float(middle), [], middle),
            (0.0, [], 0),
            (-offset, [], -offset),
        ):
            code, operands = readers.instructions(name, bits, given)
            inputs = [*words, *added_by]
            assert operands.split(",") == ["=r"] * 4 + ["r"] * len(inputs)
            expected = [[signed[at] - less, signed[4 + at] - less] for at in range(4)]
            assert evaluate(code, inputs, 4, dtype) == expected
