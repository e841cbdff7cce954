"""Quantised and packed matrices against their definition and against the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine_core.errors import OptionError, PluginLoadError
from engine_core.nn import (
    build_embedding,
    build_gateup_linear,
    build_lm_head,
    build_qkv_proj,
    build_rowwise_linear,
    load_weight,
)
from engine_core.nn.packing import OneDNNMatrix, onednn_packs
from engine_core.nn.quantization import (
    BlockLinearMethod,
    Int4LinearMethod,
    Int4Matrix,
    Int4Scheme,
    Int8LinearMethod,
    Int8Matrix,
    Int8Scheme,
    QuantizationScheme,
    quantize_int4,
)
from engine_core.step_context import BuildContext, building

ROWS = [1, 3, 17, 24, 25, 256, 257, 300]
# Products are rounded to bfloat16: 8 bits.
BFLOAT16 = 2**-7


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def onednn_matrix(weight: torch.Tensor) -> OneDNNMatrix:
    if not onednn_packs(weight):
        pytest.skip(f"oneDNN does not multiply {weight.dtype} on this CPU")
    return OneDNNMatrix(weight)


def assert_product(matrix, x: torch.Tensor, bias: torch.Tensor | None) -> None:
    """``matrix`` multiplies as its numbers do in float64."""
    out = matrix.multiply(x, bias)
    exact = x.double() @ matrix.dense().double().T
    if bias is not None:
        exact = exact + bias.double()
    assert out.dtype == x.dtype
    assert out.shape == exact.shape
    assert (out.double() - exact).abs().max() < BFLOAT16 * exact.abs().max()


def numbers_of_int4(codes, scales, zeros) -> torch.Tensor:
    groups = (codes.double() - 8).unflatten(1, (-1, 32))
    return (groups * scales.double()[..., None] + zeros.double()[..., None]).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Int8Matrix, Int4Matrix.quantized, onednn_matrix])
@pytest.mark.parametrize("shape", [(64, 32), (192, 96), (48, 64)])
def test_products_are_those_of_the_numbers(kind, shape, dtype) -> None:
    matrix = kind(random(*shape, dtype=dtype))
    for rows in ROWS:
        x = random(rows, shape[1], seed=rows, dtype=dtype)
        assert_product(matrix, x, None)
        assert_product(matrix, x[None], random(shape[0], seed=1, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onednn_keeps_the_numbers(dtype) -> None:
    weight = random(50, 70, dtype=dtype)
    assert torch.equal(onednn_matrix(weight).dense(), weight)


def test_int8_is_off_by_half_a_step_at_most() -> None:
    weight = random(40, 96)
    weight[3] = 0
    weight[5] *= 1000
    matrix = Int8Matrix(weight)
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    # The scale itself is rounded to 8 bits, which the greatest codes feel.
    assert ((matrix.dense() - weight).abs() <= step * (0.5 + 127 / 256)).all()
    assert (matrix.dense() - weight).square().mean() < (step.square() / 12).mean() * 1.1
    assert torch.equal(matrix.dense()[3], weight[3])
    assert matrix.nbytes == Int8Matrix.size(weight.shape) == 40 * 98


def test_rows_of_int8_are_looked_up() -> None:
    matrix = Int8Matrix(random(40, 96, dtype=torch.bfloat16))
    ids = torch.tensor([[3, 0], [39, 3]])
    assert torch.equal(matrix.take(ids), matrix.dense()[ids])
    assert matrix.take(ids).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_is_nearer_than_q4_1(dtype) -> None:
    """Also for groups with an outlier, and where the mean is far from zero."""
    weight = random(256, 256, dtype=dtype)
    weight[::3, ::40] *= 8
    weight[64:128] += 3
    kind = gguf.GGMLQuantizationType.Q4_1
    exact = weight.float().numpy()
    q4_1 = gguf.dequantize(gguf.quantize(exact, kind), kind)
    ours = numbers_of_int4(*quantize_int4(weight)).numpy()
    # By row, so that no kind of row pays for another.
    ours_off, q4_1_off = (((numbers - exact) ** 2).mean(axis=1) for numbers in (ours, q4_1))
    assert ours_off.mean() < 0.95 * q4_1_off.mean()
    for rows in (slice(0, 64), slice(64, 128)):
        assert ours_off[rows].mean() <= q4_1_off[rows].mean()


def test_int4_of_equal_numbers_is_exact() -> None:
    weight = torch.zeros(16, 64)
    weight[1] = 1.5
    weight[2, :32] = -3
    assert torch.equal(numbers_of_int4(*quantize_int4(weight)).float(), weight)


def test_int4_stands_for_its_codes() -> None:
    codes, scales, zeros = quantize_int4(random(128, 64))
    matrix = Int4Matrix(codes, scales, zeros, torch.float32)
    expected = numbers_of_int4(codes, scales, zeros)
    assert codes.min() == 0
    assert codes.max() == 15
    assert (matrix.dense() - expected).abs().max() <= 2**-8 * expected.abs().max()
    assert matrix.nbytes == Int4Matrix.size(codes.shape) == 128 * (32 + 2 * 4)


@pytest.mark.parametrize("method", [Int8LinearMethod, Int4LinearMethod, None])
def test_a_merged_linear_is_packed_with_its_bias(method) -> None:
    gate, up, bias = random(32, 64), random(32, 64, seed=1), random(64, seed=2)
    linear = build_gateup_linear(64, [32, 32], bias=True)
    if method is not None:
        linear.set_method(method())
    load_weight(linear.weight, gate, shard_id=0)
    load_weight(linear.weight, up, shard_id=1)
    load_weight(linear.bias, bias)
    loaded = linear.weight
    linear.method.process_after_load(linear)
    assert loaded.numel() == 0
    assert [name for name, _ in linear.named_parameters()] == ["bias"]
    x = random(5, 64, seed=3)
    exact = x @ torch.cat([gate, up]).T + bias
    tolerance = {Int8LinearMethod: 0.02, Int4LinearMethod: 0.15, None: 1e-5}[method]
    assert (linear(x) - exact).norm() < tolerance * exact.norm()
    # Whoever wants the weight itself still gets its numbers.
    assert (linear.weight - torch.cat([gate, up])).norm() < tolerance * gate.norm() * 2
    assert linear.weight.dtype == torch.float32


def test_blocks_reach_the_rank_that_they_belong_to() -> None:
    draw = np.random.default_rng(0)
    q, k, v = (
        {
            "qweight": torch.from_numpy(draw.integers(0, 16, (rows, 64), dtype=np.uint8)),
            "scales": torch.from_numpy(draw.random((rows, 2), dtype=np.float32)),
            "minima": torch.from_numpy(draw.standard_normal((rows, 2), dtype=np.float32)),
        }
        for rows in (64, 32, 32)
    )

    def numbers(part) -> torch.Tensor:
        groups = part["qweight"].float().unflatten(1, (-1, 32))
        return (groups * part["scales"][..., None] + part["minima"][..., None]).flatten(1)

    x = random(4, 64)
    for rank in range(2):
        with building(BuildContext(tp_size=2, tp_rank=rank)):
            linear = build_qkv_proj(64, 4, 2, 16)
            down = build_rowwise_linear(64, 64)
        linear.set_method(BlockLinearMethod())
        for shard_id, part in (("q", q), ("k", k), ("v", v)):
            for leaf, tensor in part.items():
                load_weight(linear.get_parameter(leaf), tensor, shard_id)
        linear.method.process_after_load(linear)
        own = torch.cat([numbers(part).chunk(2)[rank] for part in (q, k, v)])
        exact = x @ own.T
        assert (linear(x) - exact).abs().max() < BFLOAT16 * exact.abs().max()

        down.set_method(BlockLinearMethod())
        for leaf, tensor in q.items():
            load_weight(down.get_parameter(leaf), tensor)
        down.method.process_after_load(down)
        own = numbers(q).chunk(2, dim=1)[rank]
        exact = x[:, :32] @ own.T
        out = down.method.apply(down, x[:, :32], None)
        assert (out - exact).abs().max() < BFLOAT16 * exact.abs().max()


class Layers(torch.nn.Module):
    """A linear of each kind, the last with a shared weight."""

    quantization_skip = ("careful",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = build_embedding(32, 64)
        self.head = build_lm_head(64, 32, tied_to=self.embed)
        self.careful = build_rowwise_linear(64, 32)
        self.odd = build_rowwise_linear(40, 32)
        self.even = build_gateup_linear(64, [32, 32])
        self.first, self.second = build_rowwise_linear(64, 32), build_rowwise_linear(64, 32)
        self.second.weight = self.first.weight


@pytest.mark.parametrize(
    ("scheme", "settings", "linears", "vocabulary"),
    [
        (Int8Scheme, None, ["even"], True),
        (Int4Scheme, None, ["even"], True),
        # The class has no say in what a tool has done.
        (Int8Scheme, {"bits": 8}, ["careful", "even"], True),
    ],
)
def test_a_scheme_takes_what_it_can(scheme, settings, linears, vocabulary) -> None:
    model = Layers()
    taken = scheme("int", settings).give_methods(model)
    names = {id(layer): name for name, layer in model.named_children()}
    assert [names[id(layer)] for layer in taken] == linears
    assert (model.embed.method is not None) == (model.head.method is not None) == vocabulary


class OnlyFails(QuantizationScheme):
    """As a package with a mistake has it."""

    def linear_method(self, name, layer):
        """Fail at one layer, and take no other."""
        if name == self.settings:
            raise KeyError(name)


def test_a_scheme_that_fails_is_named() -> None:
    with pytest.raises(PluginLoadError, match=r"'only': .*OnlyFails fails at odd: KeyError: 'odd'"):
        OnlyFails("only", "odd").give_methods(Layers())
    with pytest.raises(OptionError, match=r"'only': no linear layer has a shape .*; leave it out"):
        OnlyFails("only").give_methods(Layers())
    assert OnlyFails("only", "nowhere").give_methods(Layers()) == []
