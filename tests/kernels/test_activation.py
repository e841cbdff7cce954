"""Gated activations."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import TOLERANCE, error

from engine_core.kernels import gelu_and_mul, silu_and_mul

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 126), (2, 5, 64)])
def test_definitions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (4 * torch.randn(shape)).to(dtype)
    assert error(silu_and_mul(x), expected(x, "silu")) < TOLERANCE[dtype]
    assert error(gelu_and_mul(x), expected(x, "gelu_tanh")) < TOLERANCE[dtype]
    assert error(gelu_and_mul(x, "none"), expected(x, "gelu")) < TOLERANCE[dtype]


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
