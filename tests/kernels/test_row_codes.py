"""Rows in 8-bit floats: by a launch of their own, and by norms and activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_examples import pairwise
from torch import Tensor

from engine_core.kernels import (
    CodedRows,
    Fp8Weight,
    RowForm,
    gelu_and_mul,
    gelu_and_mul_codes,
    layer_norm,
    layer_norm_codes,
    linear,
    linear_add_norm,
    linear_rotary_store,
    rms_norm,
    rms_norm_codes,
    rotary_store,
    silu_and_mul,
    silu_and_mul_codes,
)

WIDTHS = [(256, True), (176, False), (384, True), (4096, True)]


def in_order(codes: Tensor, pairs: bool) -> Tensor:
    """Columns of codes in their own order, one after another."""
    places = [2 * (i % 64) + i // 64 for i in range(128)] if pairs else list(range(128))
    k = codes.shape[-1]
    return codes.view(torch.uint8)[..., [i // 128 * 128 + places[i % 128] for i in range(k)]]


def quantized(x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """Bytes of codes and scales of ``x [M, K]``, by the definition."""
    wide = x.float()
    scales = wide.abs().amax(1) / 448 if given is None else given.expand(len(x))
    codes = wide / torch.where(scales == 0, 1, scales)[:, None]
    return codes.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scales


def check(coded: CodedRows, numbers: Tensor, form: RowForm) -> None:
    """That the codes are those of the numbers, as torch and as our kernel makes them."""
    from engine_core.kernels.row_codes import triton

    k = numbers.shape[-1]
    rows, given = numbers.reshape(-1, k), form.scale
    codes, scales = triton.quantize_rows(rows, given, pairs=form.pairs)
    assert coded.shape == numbers.shape
    assert coded.dtype == numbers.dtype
    assert torch.equal(coded.codes.view(torch.uint8).view(-1, k), codes.view(torch.uint8))
    assert torch.equal(coded.scales, scales)
    expected, expected_scales = quantized(rows.cpu(), None if given is None else given.cpu())
    # A GPU's division may differ in its last bit, which moves what is halfway between two codes.
    assert torch.allclose(scales.cpu(), expected_scales, rtol=1e-6)
    same = in_order(codes.cpu(), form.pairs) == expected
    assert same.float().mean() > (0.99 if numbers.is_cuda else 0.99999)


@pytest.fixture
def form(static: bool, width: tuple[int, bool], launch_device: str) -> RowForm:
    scale = torch.tensor(0.01, device=launch_device) if static else None
    return RowForm(scale, width[1])


@pytest.mark.parametrize("pairs", [False, True], ids=["plain", "pairs"])
@pytest.mark.parametrize("given", [False, True], ids=["dynamic", "static"])
def test_kernel_quantises_rows(given: bool, pairs: bool, launch_device: str) -> None:
    from engine_core.kernels.row_codes import triton

    k = 256 if pairs else 176
    x = torch.randn(9, k + 8, device=launch_device)[:, :k]
    x[2] = 0
    x[3] *= 100
    scale = torch.tensor(0.01, device=launch_device) if given else None
    codes, scales = triton.quantize_rows(x, scale, pairs=pairs)
    expected, expected_scales = quantized(x.cpu(), None if scale is None else scale.cpu())
    assert torch.allclose(scales.cpu(), expected_scales, rtol=1e-6)
    # A division that rounds otherwise may move a number that is halfway between two codes.
    assert (in_order(codes.cpu(), pairs) == expected).float().mean() > 0.99
    # What is not a number is none as a code either, and spoils its row's products alone.
    x[5, 3] = torch.nan
    codes, scales = triton.quantize_rows(x, scale, pairs=pairs)
    numbers = codes.float() * scales[:, None]
    assert numbers.isnan().any(1).nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize(
    ("kind", "width", "static"),
    pairwise(["rms", "offset", "centred"], WIDTHS, [False, True]),
    ids=str,
)
def test_a_norm_quantises_what_it_rounds_to(
    kind: str, width: tuple[int, bool], form: RowForm, launch_device: str
) -> None:
    from engine_core.kernels.norm import triton

    k = width[0]
    x, residual = torch.randn(2, 2, 3, k, device=launch_device).bfloat16()
    weight, bias = torch.randn(2, k, device=launch_device).bfloat16()
    options: dict[str, Any] = {"residual": residual, "centred": kind == "centred"}
    options["offset"] = 1.0 if kind == "offset" else 0.0
    given = (x, weight, bias if kind == "centred" else None, 1e-5)
    numbers, total = triton.norm(*given, **options)
    coded, coded_total = triton.norm(*given, **options, form=form)
    assert torch.equal(coded_total, total)
    check(coded, numbers, form)


@pytest.mark.parametrize(("width", "static"), pairwise(WIDTHS, [False, True]), ids=str)
def test_a_norm_of_scaled_sums_quantises_too(
    width: tuple[int, bool], form: RowForm, launch_device: str
) -> None:
    from engine_core.kernels.norm import triton

    k = width[0]
    product, residual = torch.randn(2, 5, k, device=launch_device).bfloat16()
    rows, cols, weight = (torch.rand(size, device=launch_device) for size in (5, k, k))
    given = (product[None], None, residual, weight, 1e-5)
    numbers, total = triton.sum_add_norm(*given, scales=(rows, cols))
    coded, coded_total = triton.sum_add_norm(*given, scales=(rows, cols), form=form)
    assert torch.equal(coded_total, total)
    check(coded, numbers, form)


@pytest.mark.parametrize(
    ("activation", "width", "static"),
    pairwise(["silu", "gelu_tanh", "gelu"], WIDTHS, [False, True]),
    ids=str,
)
def test_an_activation_quantises_what_it_rounds_to(
    activation: str, width: tuple[int, bool], form: RowForm, launch_device: str
) -> None:
    from engine_core.kernels.activation import triton

    x = torch.randn(2, 3, 2 * width[0] + 8, device=launch_device).bfloat16()[..., : 2 * width[0]]
    x[1, 1] = 0
    numbers = triton.act_and_mul(x, activation)
    check(triton.act_and_mul_codes(x, activation, form), numbers, form)


@pytest.mark.parametrize("pairs", [False, True])
def test_operations_give_the_rows_of_their_numbers(pairs: bool) -> None:
    form = RowForm(None, pairs)
    x, residual = torch.randn(2, 2, 5, 256).bfloat16()
    weight, bias = torch.randn(2, 256).bfloat16()
    cases = [
        (
            rms_norm_codes(x, weight, 1e-5, form, residual=residual, offset=1.0),
            rms_norm(x, weight, 1e-5, residual=residual, offset=1.0),
        ),
        (
            layer_norm_codes(x, weight, bias, 1e-5, form, residual=residual),
            layer_norm(x, weight, bias, 1e-5, residual=residual),
        ),
    ]
    for (coded, coded_total), (numbers, total) in cases:
        assert torch.equal(coded_total, total)
        codes, scales = quantized(numbers.view(10, 256), None)
        assert torch.equal(in_order(coded.codes, pairs).view(10, 256), codes)
        assert torch.equal(coded.scales, scales)
    for coded, numbers in (
        (silu_and_mul_codes(x, form), silu_and_mul(x)),
        (gelu_and_mul_codes(x, form), gelu_and_mul(x)),
        (gelu_and_mul_codes(x, form, "none"), gelu_and_mul(x, "none")),
    ):
        codes, scales = quantized(numbers.view(10, 128), None)
        assert torch.equal(in_order(coded.codes, pairs).view(10, 128), codes)
        exact = codes.view(torch.float8_e4m3fn).float().view(2, 5, 128) * scales.view(2, 5, 1)
        assert torch.equal(coded.numbers(), exact.bfloat16())
    with pytest.raises(ValueError, match=r"2 \* I"):
        silu_and_mul_codes(x[..., :255], form)
    with pytest.raises(ValueError, match="residual"):
        rms_norm_codes(x, weight, 1e-5, form, residual=residual[:1])


def test_no_rows_have_no_codes() -> None:
    coded = CodedRows.of(torch.zeros(2, 0, 256, dtype=torch.bfloat16), RowForm(pairs=True))
    assert coded.numbers().shape == (2, 0, 256)


def test_a_product_of_rows_in_codes() -> None:
    weight = Fp8Weight.quantized(torch.randn(32, 256))
    coded = CodedRows.of(torch.randn(3, 4, 256), weight.row_form)
    expected = coded.numbers() @ weight.dense().T
    torch.testing.assert_close(linear(coded, weight), expected)
    with pytest.raises(ValueError, match=r"Fp8Weight of their form, got Tensor \(32, 256\)"):
        linear(coded, weight.dense())
    with pytest.raises(ValueError, match="pairs=False"):
        linear(CodedRows.of(torch.randn(3, 256), RowForm()), weight)
    with pytest.raises(ValueError, match="must be 256"):
        linear(CodedRows.of(torch.randn(3, 128), weight.row_form), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65, 128, 256, 300])
@pytest.mark.parametrize("static", [False, True])
def test_products_are_those_of_numbers(rows: int, static: bool) -> None:
    """Bit for bit, as the codes are, whichever kernel makes them."""
    for n, k, gated in ((28672, 4096, True), (6144, 4096, False), (4096, 14336, False)):
        weight = Fp8Weight.quantized(torch.randn(n, k, device="cuda").bfloat16())
        if static:
            scale = torch.tensor(0.02, device="cuda")
            weight = Fp8Weight(weight.codes, weight.scales, weight.dtype, scale)
        x = torch.randn(1, rows, 2 * k, device="cuda").bfloat16()
        numbers, coded = silu_and_mul(x), silu_and_mul_codes(x, weight.row_form)
        got, expected = (linear(each, weight, gated=gated) for each in (coded, numbers))
        assert torch.equal(got, expected)
        if n == 4096:
            residual, norm_weight = torch.randn(rows + 1, n, device="cuda").bfloat16().split(rows)
            given = (weight, None, residual[None], norm_weight[0], 1e-5)
            form = RowForm(None, True)
            after, total = linear_add_norm(coded, *given, form=form)
            plain, plain_total = linear_add_norm(numbers, *given)
            assert torch.equal(total, plain_total)
            check(after, plain, form)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65, 256, 300])
@pytest.mark.parametrize("code", [torch.bfloat16, torch.float8_e4m3fn])
def test_rotation_applies_the_scales(rows: int, code: torch.dtype) -> None:
    """Bit for bit as a launch of its own does."""
    heads, kv_heads, dim, block = 8, 2, 128, 16
    weight = Fp8Weight.quantized(torch.randn(1536, 1024, device="cuda").bfloat16())
    bias = torch.randn(1536, device="cuda").bfloat16()
    x = torch.randn(1, rows, 1024, device="cuda").bfloat16()
    angles = torch.rand(rows, dim // 2, device="cuda")
    wide = dim + 4 * (code != torch.bfloat16)
    shape = (rows // block + 1, block, kv_heads, wide)
    slots = torch.randperm(rows, device="cuda")

    def stored(*product: Tensor) -> list[Tensor]:
        caches = [torch.zeros(shape, device="cuda").to(code) for _ in range(2)]
        given = (angles.cos(), angles.sin(), *caches, slots)
        if not product:
            return [linear_rotary_store(x, weight, bias, *given), *caches]
        rotary_store(*product, *given)
        return [product[0], *caches]

    qkv = linear(x, weight, bias).view(rows, heads + 2 * kv_heads, dim)
    expected = stored(*qkv.split((heads, kv_heads, kv_heads), 1))
    for got, wanted in zip(stored(), expected, strict=True):
        assert torch.equal(
            got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
        )
