"""RMSNorms whose weight has an offset, as Gemma's have, wherever a kernel normalises."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import TOLERANCE, error
from torch import Tensor

from engine_core.kernels import linear_add, linear_add_norm, rms_norm, rotary_store


def formula(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + weight.double())


def numbers(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_are_the_formula(dtype: torch.dtype) -> None:
    x, residual, weight = (numbers(*shape, dtype=dtype) for shape in ((3, 48), (3, 48), (48,)))
    assert error(rms_norm(x, weight, 1e-5, offset=1.0), formula(x, weight)) < TOLERANCE[dtype]
    got, total = rms_norm(x, weight, 1e-5, residual=residual, offset=1.0)
    assert error(got, formula(total, weight)) < TOLERANCE[dtype]
    matrix = (numbers(48, 48) / 7).to(dtype)
    got, total = linear_add_norm(x, matrix, None, residual, weight, 1e-5, norm_offset=1.0)
    assert error(got, formula(total, weight)) < TOLERANCE[dtype]
    deferred, total = linear_add(x, matrix, None, residual, weight, 1e-5, norm_offset=1.0)
    assert error(deferred.values, total.double() * (1 + weight.double())) < TOLERANCE[dtype]


def test_heads_are_normalised_with_an_offset() -> None:
    q, k, v = (numbers(3, heads, 16) for heads in (4, 2, 2))
    weights = numbers(16), numbers(16)
    turns, slots = (torch.ones(3, 8), torch.zeros(3, 8)), torch.arange(3)
    caches = torch.zeros(2, 1, 4, 2, 16)
    expected = formula(q, weights[0]), formula(k, weights[1])
    rotary_store(
        q, k, v, *turns, *caches, slots, q_weight=weights[0], k_weight=weights[1], eps=1e-5,
        offset=1.0,
    )  # fmt: skip
    assert error(q, expected[0]) < TOLERANCE[torch.float32]
    assert error(caches[0, 0, :3], expected[1]) < TOLERANCE[torch.float32]


def test_kernels_are_the_formula(launch_device: str) -> None:
    from engine_core.kernels.linear import triton as linear
    from engine_core.kernels.norm import triton as norm
    from engine_core.kernels.rotary_store import triton as rotary

    x, residual = (numbers(3, 48, device=launch_device) for _ in range(2))
    weight = numbers(48, device=launch_device)
    got, total = norm.norm(x, weight, None, 1e-5, residual=residual, centred=False, offset=1.0)
    assert total is not None
    assert error(got, formula(total, weight)) < TOLERANCE[torch.float32]
    matrix = numbers(48, 48, device=launch_device) / 7
    tile = linear.Tile(16, 32)
    added = linear.Added.of(residual, weight, tile, 1.0)
    values = linear.linear(x, linear.DenseWeight(matrix), added, tile)
    total = added.total
    assert error(values, total.double() * (1 + weight.double())) < TOLERANCE[torch.float32]
    q, k, v = (numbers(2, heads, 16, device=launch_device) for heads in (4, 2, 2))
    expected = formula(q, weight[:16])
    turns = torch.ones(2, 8, device=launch_device), torch.zeros(2, 8, device=launch_device)
    caches = torch.zeros(2, 1, 4, 2, 16, device=launch_device)
    slots = torch.arange(2, device=launch_device)
    given = {"q_weight": weight[:16].clone(), "k_weight": weight[:16].clone(), "eps": 1e-5}
    rotary.rotary_store(q, k, v, *turns, *caches, slots, **given, offset=1.0, interleaved=False)
    assert error(q, expected) < TOLERANCE[torch.float32]
