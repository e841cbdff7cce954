"""Products with blocks against the gguf package's dequantisation."""

from __future__ import annotations

import pytest
import torch
from gguf_blocks import random_blocks

from engine_core.kernels import compiled
from engine_core.kernels.block_linear import FORMS, block_linear, is_fast, pack_blocks, take_rows

pytestmark = pytest.mark.skipif(not compiled.available(), reason="needs numba")

# A panel of 16 rows that is not whole; two blocks of the largest kind.
ROWS, COLUMNS = 36, 512


def whole_numbers(rows: int) -> torch.Tensor:
    """Activations that 8 bits hold exactly, as each group of 32 has 127 among them."""
    draw = torch.Generator().manual_seed(rows)
    x = torch.randint(-127, 128, (rows, COLUMNS), generator=draw).float()
    x[:, ::32] = 127
    return x / 64


def check(type_name: str, rows: int) -> None:
    raw, numbers = random_blocks(type_name, ROWS, COLUMNS)
    panels = pack_blocks(torch.from_numpy(raw), type_name)
    x, bias = whole_numbers(rows), torch.linspace(-1, 1, ROWS)
    wide = torch.full((rows, ROWS + 7), 5.0)
    out = block_linear(x, panels, type_name, bias, wide[:, 3:-4])
    exact = x.double() @ torch.from_numpy(numbers).double().T + bias
    assert (out - exact).abs().max() < 1e-6 * exact.abs().max()
    assert (wide[:, :3] == 5).all()
    assert (wide[:, -4:] == 5).all()


@pytest.mark.parametrize("type_name", FORMS)
def test_blocks_are_multiplied_exactly(type_name: str) -> None:
    check(type_name, 1)
    check(type_name, 11)
    raw, numbers = random_blocks(type_name, ROWS, COLUMNS)
    panels = pack_blocks(torch.from_numpy(raw), type_name)
    ids = torch.tensor([35, 0, 17, 16, 0])
    taken = take_rows(ids, panels, type_name, torch.empty(5, COLUMNS))
    torch.testing.assert_close(taken, torch.from_numpy(numbers[ids]), rtol=2e-7, atol=0)


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_few_rows_are_multiplied_exactly(rows: int) -> None:
    check("Q6_K", rows)


@pytest.mark.parametrize("type_name", ["Q8_0", pytest.param("Q6_K", marks=pytest.mark.long)])
def test_a_cpu_without_such_instructions_multiplies_exactly(
    type_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = compiled.kernels("block_linear")
    monkeypatch.setattr(native, "instructions", lambda: native.PORTABLE)
    check(type_name, 1)
    check(type_name, 5)
    assert not is_fast()


def test_a_row_does_not_depend_on_the_others() -> None:
    panels = pack_blocks(torch.from_numpy(random_blocks("Q6_K", ROWS, COLUMNS)[0]), "Q6_K")
    x = torch.randn(11, COLUMNS, generator=torch.Generator().manual_seed(0))
    together = block_linear(x, panels, "Q6_K", None, torch.empty(11, ROWS))
    for count in (1, 2, 3):
        some = block_linear(x[:count], panels, "Q6_K", None, torch.empty(count, ROWS))
        assert torch.equal(some, together[:count])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_of_two_bytes(dtype: torch.dtype) -> None:
    raw, numbers = random_blocks("Q6_K", ROWS, COLUMNS)
    panels = pack_blocks(torch.from_numpy(raw), "Q6_K")
    weight = torch.from_numpy(numbers)
    for rows in (1, 11):
        x = whole_numbers(rows).to(dtype)
        out = block_linear(x, panels, "Q6_K", None, torch.empty(rows, ROWS, dtype=dtype))
        exact = x.double() @ weight.double().T
        assert (out - exact).abs().max() < torch.finfo(dtype).eps * exact.abs().max()
    ids = torch.tensor([3, 20])
    taken = take_rows(ids, panels, "Q6_K", torch.empty(2, COLUMNS, dtype=dtype))
    torch.testing.assert_close(taken, weight[ids].to(dtype))


def test_eight_bits_of_activations_cost_half_a_percent() -> None:
    """Rounding to 1/254 of the largest of 32 normal numbers, whose mean is about 2."""
    raw, numbers = random_blocks("Q6_K", ROWS, COLUMNS)
    panels = pack_blocks(torch.from_numpy(raw), "Q6_K")
    x = torch.randn(11, COLUMNS, generator=torch.Generator().manual_seed(0))
    out = block_linear(x, panels, "Q6_K", None, torch.empty(11, ROWS))
    exact = x @ torch.from_numpy(numbers).T
    error = (out - exact).norm() / exact.norm()
    assert 0.002 < error < 0.008


def test_what_is_not_finite_is_not_hidden() -> None:
    panels = pack_blocks(torch.from_numpy(random_blocks("Q6_K", ROWS, COLUMNS)[0]), "Q6_K")
    x = torch.zeros(4, COLUMNS)
    x[1, 5], x[2, 40], x[3, 500] = torch.nan, torch.inf, -torch.inf
    out = block_linear(x, panels, "Q6_K", None, torch.empty(4, ROWS))
    assert (out[0] == 0).all()
    assert not out[1:].isfinite().any()
