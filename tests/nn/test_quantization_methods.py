"""Quantised and packed matrices against their definition and against the gguf package."""

from __future__ import annotations

import re

import gguf
import pytest
import torch
from gguf_blocks import random_blocks

from engine_core.errors import ConfigError, OptionError, PluginLoadError
from engine_core.nn import (
    build_embedding,
    build_gateup_linear,
    build_lm_head,
    build_qkv_proj,
    build_rowwise_linear,
    load_weight,
)
from engine_core.nn.linear import Linear, UnquantizedLinearMethod
from engine_core.nn.loading import ShapeMismatchError, stacked_loader
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
from engine_core.nn.quantization.exported import form_shapes, pack_form
from engine_core.nn.quantization.groups import GroupLayout, GroupLinearMethod
from engine_core.step_context import BuildContext, building

ROWS = [1, 3, 17, 24, 25, 128, 129, 256, 257, 300]
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
        # What a product with the operands exchanged leaves.
        assert_product(matrix, x.T.contiguous().T, None)


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


@pytest.mark.parametrize("rows", [48, 64, 96, 192])
def test_int4_of_pairs_of_codes_is_that_of_the_codes(rows: int) -> None:
    """Also where the rows are no whole blocks of the layout that torch has on this CPU."""
    codes, scales, zeros = quantize_int4(random(rows, 64))
    pairs = codes[:, ::2] + 16 * codes[:, 1::2]
    matrix = Int4Matrix.of_pairs(pairs, scales, zeros, torch.float32)
    assert torch.equal(matrix.dense(), Int4Matrix(codes, scales, zeros, torch.float32).dense())


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


def blocks(type_name: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks, and their numbers."""
    raw, numbers = random_blocks(type_name, rows, columns)
    return torch.from_numpy(raw), torch.from_numpy(numbers.copy())


def assert_blocks_product(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, on_cpu: bool = True
) -> None:
    """On a CPU activations are rounded to 8 bits."""
    exact = x @ weight.T
    assert (out - exact).norm() < (0.01 if on_cpu else 1e-5) * exact.norm()


on_both = pytest.mark.parametrize("on_cpu", [True, False], ids=["for-a-cpu", "for-a-gpu"])


@on_both
def test_blocks_reach_the_rank_that_they_belong_to(on_cpu: bool) -> None:
    q, q_numbers = blocks("Q4_1", 64, 64)
    k, k_numbers = blocks("Q4_1", 32, 64)
    _, v_numbers = blocks("Q6_K", 32, 256)
    x = random(4, 256)
    for rank in range(2):
        with building(BuildContext(tp_size=2, tp_rank=rank)):
            linear = build_qkv_proj(64, 4, 2, 16)
            fused = build_qkv_proj(256, 2, 1, 16)
            down = build_rowwise_linear(64, 64)
        linear.set_method(BlockLinearMethod({"q": "Q4_1", "k": "Q4_1", "v": None}, on_cpu))
        for shard_id, part in (("v", v_numbers[:, :64]), ("q", q), ("k", k)):
            load_weight(linear.weight, part, shard_id)
        linear.method.process_after_load(linear)
        own = [part.chunk(2)[rank] for part in (q_numbers, k_numbers, v_numbers[:, :64])]
        assert_blocks_product(linear(x[:, :64]), x[:, :64], torch.cat(own), on_cpu)

        if rank == 0:  # One head of keys and values, of which both ranks have a copy.
            fused.set_method(BlockLinearMethod({None: "Q6_K"}, on_cpu))
            both, numbers = blocks("Q6_K", 64, 256)
            load_weight(fused.weight, both)
            fused.method.process_after_load(fused)
            own = [numbers[:16], numbers[32:48], numbers[48:]]
            assert_blocks_product(fused(x), x, torch.cat(own), on_cpu)

        down.set_method(BlockLinearMethod({None: "Q4_1"}, on_cpu))
        load_weight(down.weight, q)
        down.method.process_after_load(down)
        own_x = x[:, :32]
        out = down.method.apply(down, own_x, None)
        assert_blocks_product(out, own_x, q_numbers.chunk(2, dim=1)[rank], on_cpu)


@on_both
def test_parts_of_several_types_are_one_linear(on_cpu: bool) -> None:
    """A Q4_K_M file has v in Q6_K beside q and k in Q4_K."""
    parts = {
        "q": ("Q6_K", *blocks("Q6_K", 64, 256)),
        "k": (None, *[random(32, 256)] * 2),
        "v": ("Q4_1", *blocks("Q4_1", 32, 256)),
    }
    linear = build_qkv_proj(256, 4, 2, 16, bias=True)
    linear.bias.copy_(random(128))
    types = {shard_id: type_name for shard_id, (type_name, _, _) in parts.items()}
    linear.set_method(BlockLinearMethod(types, on_cpu))
    (size,) = linear.method.packed_sizes(linear).values()
    for shard_id, (_, loaded, _) in parts.items():
        load_weight(linear.weight, loaded, shard_id)
    linear.method.process_after_load(linear)
    # 6.5625 and 5 bits a number, and float32.
    assert size == linear.packed.nbytes == 64 * 256 * 105 // 128 + 32 * 256 * 5 // 8 + 32 * 256 * 4
    weight = torch.cat([numbers for _, _, numbers in parts.values()])
    assert torch.equal(linear.weight, weight)
    x = random(3, 7, 256)
    assert_blocks_product(linear(x) - linear.bias, x, weight, on_cpu)


def test_blocks_of_another_shape_are_refused() -> None:
    linear = build_rowwise_linear(64, 32)
    linear.set_method(BlockLinearMethod({None: "Q4_1"}, on_cpu=True))
    for shape in ((32, 2, 18), (32, 1, 20), (16, 2, 20)):
        with pytest.raises(ShapeMismatchError, match=re.escape(f"has shape {list(shape)}")):
            load_weight(linear.weight, torch.zeros(shape, dtype=torch.uint8))


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


class Corrected(Linear):
    """A linear that has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(128, [(None, 64, 0, 64)], bias=True)
        self.register_parameter("correction", torch.nn.Parameter(torch.zeros(64)))


def test_another_method_takes_what_the_one_before_made_alone() -> None:
    with building(BuildContext(dtype=torch.float32)):
        layer = Corrected()
    layout = GroupLayout(4, 32, torch.uint8, False, torch.float16)
    for method, own in (
        (GroupLinearMethod(layout, True), {"weight", "weight_scale", "weight_zero_point"}),
        (UnquantizedLinearMethod(), {"weight"}),
    ):
        layer.set_method(method)
        held = {name for name, param in layer._parameters.items() if param is not None}
        assert held == {"bias", "correction"} | own


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


@pytest.mark.parametrize("form", ["int8", "int4", "int4-zeros"])
@pytest.mark.parametrize("columns", [32, 96])
def test_a_file_has_packed_matrices_of_one_group_of_inputs_and_of_several(
    form: str, columns: int
) -> None:
    made = pack_form(form, torch.randn(16, columns))
    found = {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in made.items()
    }
    assert found == form_shapes(form, 16, columns)


def group_linear(parts: list[int], inputs: int) -> Linear:
    """A merged linear whose integers of 4 bits a CPU multiplies."""
    linear = build_gateup_linear(inputs, parts)
    layout = GroupLayout(4, 32, torch.bfloat16, False, torch.bfloat16)
    linear.set_method(GroupLinearMethod(layout, on_cpu=True))
    return linear


@pytest.mark.parametrize("filled", ["by load_weight", "by itself", "in part by itself"])
@pytest.mark.parametrize("parts", [[64, 192], [64, 96], [48, 32]])
def test_codes_are_packed_as_they_are_read(parts: list[int], filled: str) -> None:
    """A model may fill what it wants by itself, and parts need not be whole blocks."""
    linear = group_linear(parts, 64)
    linear.method.prepare_load(linear)
    exact, start = [], 0
    for index, rows in enumerate(parts):
        codes, scales, zeros = quantize_int4(random(rows, 64, seed=index))
        pairs = codes[:, ::2] + 16 * codes[:, 1::2]
        if filled == "by itself" or (filled == "in part by itself" and index == 1):
            linear.weight.data[start : start + rows] = pairs
        else:
            # The second time replaces the first.
            load_weight(linear.weight, pairs.flip(0), shard_id=index)
            load_weight(linear.weight, pairs, shard_id=index)
        load_weight(linear.get_parameter("weight_scale"), scales, shard_id=index)
        load_weight(linear.get_parameter("weight_zero_point"), zeros, shard_id=index)
        exact.append(numbers_of_int4(codes, scales, zeros))
        start += rows
    linear.method.process_after_load(linear)
    numbers = torch.cat(exact)
    assert (linear.weight - numbers).abs().max() <= 2**-8 * numbers.abs().max()
    x = random(5, 64, seed=9)
    product = x.double() @ numbers.double().T
    assert (linear(x) - product).abs().max() < BFLOAT16 * product.abs().max()


def test_codes_that_are_compared_are_not_taken_for_the_parameters() -> None:
    """A linear that two names share may have tensors under both; the second is compared."""
    linear = group_linear([64, 192], 64)
    linear.method.prepare_load(linear)
    exact = []
    module = torch.nn.ModuleDict({"a": linear, "b": linear})
    names = {"gate": ("a", 0), "up": ("a", 1), "other": ("b", 1)}
    load = stacked_loader(module, names)
    for index, (rows, name) in enumerate(((64, "gate"), (192, "up"))):
        codes, scales, zeros = quantize_int4(random(rows, 64, seed=index))
        pairs = codes[:, ::2] + 16 * codes[:, 1::2]
        for leaf, tensor in (("", pairs), ("_scale", scales), ("_zero_point", zeros)):
            load(f"{name}.weight{leaf}", tensor)
        exact.append(numbers_of_int4(codes, scales, zeros))
    load("other.weight", pairs)
    with pytest.raises(ConfigError, match="but in the checkpoint they differ"):
        load("other.weight", pairs.flip(0))
    linear.method.process_after_load(linear)
    numbers = torch.cat(exact)
    assert (linear.weight - numbers).abs().max() <= 2**-8 * numbers.abs().max()
