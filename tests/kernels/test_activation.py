"""Gated activations."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from kernel_cases import TOLERANCE, error

from engine_core.kernels import gelu_and_mul, quick_gelu, silu_and_mul

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def expected(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The definitions, in float64."""
    gate, up = x.double().tensor_split(2, dim=-1)
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if activation == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return gate / 2 * (1 + torch.tanh(inner)) * up
    return gate / 2 * (1 + torch.erf(gate / math.sqrt(2))) * up


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 126), (2, 5, 64)])
def test_definitions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (4 * torch.randn(shape)).to(dtype)
    assert error(silu_and_mul(x), expected(x, "silu")) < TOLERANCE[dtype]
    assert error(gelu_and_mul(x), expected(x, "gelu_tanh")) < TOLERANCE[dtype]
    assert error(gelu_and_mul(x, "none"), expected(x, "gelu")) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_quick_gelu(dtype: torch.dtype, launch_device: str) -> None:
    from engine_core.kernels.activation import triton

    x = (4 * torch.randn(3, 700)).to(dtype)
    wanted = x.double() / (1 + torch.exp(-1.702 * x.double()))
    assert error(quick_gelu(x), wanted) < TOLERANCE[dtype]
    assert error(triton.quick_gelu(x.to(launch_device)).cpu(), wanted) < TOLERANCE[dtype]
    with pytest.raises(ValueError, match="contiguous"):
        quick_gelu(torch.zeros(4, 2).t())


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", [silu_and_mul, gelu_and_mul])
def test_gates_beyond_exps_range(op: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    gates = [-3e4, -100.0, -89.0, -88.0, -0.0, 0.0, 88.0, 89.0, 100.0, 3e4, torch.nan]
    x = torch.cat([torch.tensor(gates), torch.ones(len(gates))]).to(dtype)
    got = op(x)
    wanted = expected(x, "silu" if op is silu_and_mul else "gelu_tanh")
    assert got[-1].isnan()
    assert error(got[:-1], wanted[:-1]) < TOLERANCE[dtype]


@pytest.mark.parametrize("op", [silu_and_mul, gelu_and_mul])
@pytest.mark.parametrize("shape", [(1, 126), (5, 126), (3, 2)])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_threads_share_columns(
    op: Callable[..., torch.Tensor],
    shape: tuple[int, ...],
    count: int,
    share_among: Callable[[int], None],
) -> None:
    x = 4 * torch.randn(shape)
    share_among(count)
    wanted = expected(x, "silu" if op is silu_and_mul else "gelu_tanh")
    assert error(op(x), wanted) < TOLERANCE[torch.float32]


def test_preconditions() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        silu_and_mul(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="stride 1"):
        gelu_and_mul(torch.zeros(4, 2).t())
    with pytest.raises(ValueError, match="'erf'"):
        gelu_and_mul(torch.zeros(2, 4), "erf")  # type: ignore[arg-type]


# sigmoid(-100) is 1 / (1 + inf): numpy, under the interpreter, warns of what is meant.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("size", [1, 63, 128, 1500])
def test_kernel(size: int, activation: str, dtype: torch.dtype, launch_device: str) -> None:
    from engine_core.kernels.activation import triton

    x = (4 * torch.randn(3, 2 * size + 8, device=launch_device)).to(dtype)[:, : 2 * size]
    assert error(triton.act_and_mul(x, activation), expected(x, activation)) < TOLERANCE[dtype]
