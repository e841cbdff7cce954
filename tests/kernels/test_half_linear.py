"""Products of float32 with 16-bit matrices against float64, and their forms in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import examples
from torch import Tensor

from engine_core.kernels.half_linear import (
    as_halves,
    half_linear,
    pack_halves,
    panel_width,
    unpack_halves,
)

pytestmark = pytest.mark.skipif(panel_width() == 0, reason="needs numba and AVX2")
BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def check(rows: int, outputs: int, inputs: int, dtype: torch.dtype, with_bias: bool) -> None:
    x = torch.randn(rows, inputs)
    matrix = torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs) if with_bias else None
    # Beside each row there is room for what a whole tile would write.
    wide = torch.full((rows, outputs + 128), 5.0)
    out = half_linear(x, pack_halves(matrix), bias, wide[:, 64:-64])
    exact = x.double() @ matrix.double().T
    if bias is not None:
        exact += bias
    # Each of the products and sums of a number is rounded once.
    bound = inputs * 2**-24 * (x.double().abs() @ matrix.double().abs().T + exact.abs())
    assert ((out - exact).abs() <= bound + 1e-12).all()
    assert (wide[:, :64] == 5).all()
    assert (wide[:, -64:] == 5).all()


@settings(max_examples=examples(40), deadline=None)
@given(
    rows=st.integers(1, 9),
    outputs=st.integers(1, 150),
    inputs=st.integers(1, 70),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    with_bias=st.booleans(),
)
def test_few_rows_are_as_exact_as_float32(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, with_bias: bool
) -> None:
    check(rows, outputs, inputs, dtype, with_bias)


@BOTH
@pytest.mark.parametrize("rows", [191, 192, 193, 241])
def test_many_rows_are_as_exact_as_float32(rows: int, dtype: torch.dtype) -> None:
    check(rows, 37, 101, dtype, True)


def test_rows_that_leave_the_cache_are_multiplied_in_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from engine_core.kernels.half_linear import native

    monkeypatch.setattr(native, "_CHUNK", 4 * 64 * 18)
    check(200, 37, 64, torch.bfloat16, True)


@BOTH
@pytest.mark.parametrize("rows", [2, 3, 7, 13, 16, 17, 25])
def test_tiles_of_two_heights_are_all_rows(rows: int, dtype: torch.dtype) -> None:
    check(rows, 90, 70, dtype, True)


@pytest.mark.parametrize("together", [1, 2, 3, 100])
def test_expanded_panels_pass_in_groups(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_core.kernels.half_linear import native

    monkeypatch.setattr(native, "_GROUP", together * 4 * 16 * 24)
    check(200, 150, 24, torch.bfloat16, True)


@BOTH
def test_a_row_is_the_same_beside_others(dtype: torch.dtype) -> None:
    x, panels = torch.randn(200, 90), pack_halves(torch.randn(200, 90).to(dtype))

    def product(rows: Tensor) -> Tensor:
        return half_linear(rows, panels, None, torch.empty(len(rows), 200))

    alone = torch.cat([product(row[None]) for row in x])
    for count in (2, 3, 4, 5, 7, 8, 13, 16, 60, 200):
        assert torch.equal(product(x[:count]), alone[:count])


@pytest.mark.parametrize("rows", [1, 2, 8, 60, 200])
def test_threads_share_the_panels(rows: int, share_among: Callable[[int], None]) -> None:
    x, panels = torch.randn(rows, 64), pack_halves(torch.randn(150, 64).bfloat16())
    alone = half_linear(x, panels, None, torch.empty(rows, 150))
    for threads in (2, 3, 7, 16):
        share_among(threads)
        assert torch.equal(half_linear(x, panels, None, torch.empty(rows, 150)), alone)


def test_no_rows_are_no_work() -> None:
    panels = pack_halves(torch.randn(16, 8).bfloat16())
    assert half_linear(torch.empty(0, 8), panels, None, torch.empty(0, 16)).shape == (0, 16)


@BOTH
def test_panels_keep_every_bit(dtype: torch.dtype) -> None:
    """Also of the least numbers, of zeros with a sign, and of what is not a number."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    matrix = bits.view(dtype).view(-1, 64)[:1021]
    ids = torch.randint(len(matrix), (300,))
    taken = unpack_halves(pack_halves(matrix), ids)
    assert torch.equal(taken.view(torch.int16), matrix[ids].view(torch.int16))


def test_the_least_numbers_are_multiplied_as_they_are() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        least = torch.tensor([[1, 3], [-32767, 5]], dtype=torch.int16).view(dtype)
        x = torch.tensor([[2.0**30, 0.0], [0.0, 2.0**30]])
        out = half_linear(x, pack_halves(least), None, torch.empty(2, 2))
        # bfloat16's are below float32's normal numbers, but these are large enough.
        torch.testing.assert_close(out, least.float().T * 2.0**30, rtol=0, atol=0)


def test_the_type_of_16_bits_is_one_that_has_every_number() -> None:
    def stored(numbers: Tensor) -> torch.dtype | None:
        halves = as_halves(numbers)
        assert halves is None or torch.equal(halves.float(), numbers)
        return None if halves is None else halves.dtype

    numbers = torch.randn(8, 6)
    assert stored(numbers.bfloat16().float()) is torch.bfloat16
    assert stored(numbers.half().float()) is torch.float16
    assert stored(numbers) is None
    # A number beyond float16's, which bfloat16 has, and one after the first row that neither has.
    assert stored(torch.tensor([[1.0, 2.0**100]])) is torch.bfloat16
    assert stored(torch.tensor([[1.0], [1.0 + 2**-20]])) is None
    assert stored(torch.tensor([[1.0 + 2**-10], [2.0**100]])) is None
