"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import TOLERANCE, by_complex_numbers, error
from torch import Tensor
from transformers.models.llama import modeling_llama

from engine_core.kernels import apply_rotary, rotary_angles


def case(shape: dict[str, Any], device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """A fused qkv, and cos and sin's angles."""
    tokens, half = shape.get("tokens", 3), shape.get("half", 8)
    heads = shape.get("heads", 4) + 2
    qkv = torch.randn(tokens, heads + 1, shape.get("head_dim", 16), device=device)
    angles = 6 * torch.rand(shape.get("sections", 1), tokens, half, dtype=torch.float64)
    return qkv.to(shape.get("dtype", torch.float32)), angles.to(device), torch.tensor(heads - 2)


SHAPES: list[dict[str, Any]] = [
    {},
    {"tokens": 1},
    {"tokens": 63},
    {"half": 4},
    {"half": 3, "head_dim": 20},
    {"sections": 2, "half": 4},
    {"sections": 2, "half": 3},
    {"head_dim": 80, "half": 40},
    {"head_dim": 256, "half": 128},
    {"heads": 33},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16},
]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotates(shape: dict[str, Any], interleaved: bool) -> None:
    qkv, angles, heads = case(shape)
    expected = by_complex_numbers(qkv, angles, interleaved)
    expected[:, heads + 2 :] = qkv[:, heads + 2 :]
    cos, sin = angles.cos().float(), angles.sin().float()
    if len(cos) == 1:
        cos, sin = cos[0], sin[0]
    q, k = qkv[:, :heads], qkv[:, heads : heads + 2]
    got_q, got_k = apply_rotary(q, k, cos, sin, interleaved=interleaved)
    assert got_q is q
    assert got_k is k
    assert error(qkv, expected) < TOLERANCE[qkv.dtype]


def test_tensors_of_their_own_and_llamas_formula() -> None:
    q, k = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    angles = torch.rand(5, 8)
    full = torch.cat([angles, angles], dim=-1)[None]
    expected_q, expected_k = modeling_llama.apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], full.cos(), full.sin()
    )
    apply_rotary(q, k, angles.cos(), angles.sin())
    assert error(q, expected_q[0].transpose(0, 1)) < 1e-6
    assert error(k, expected_k[0].transpose(0, 1)) < 1e-6


def test_preconditions() -> None:
    q, k, cos = torch.zeros(3, 4, 16), torch.zeros(3, 2, 16), torch.zeros(3, 8)
    with pytest.raises(ValueError, match="one dtype"):
        apply_rotary(q, k.half(), cos, cos)
    with pytest.raises(ValueError, match=r"\(4, 8\)"):
        apply_rotary(q, k, torch.zeros(4, 8), torch.zeros(4, 8))
    with pytest.raises(ValueError, match="exceed the head dimension 16"):
        apply_rotary(q, k, torch.zeros(2, 3, 8), torch.zeros(2, 3, 8))
    with pytest.raises(ValueError, match="stride 1"):
        apply_rotary(torch.zeros(3, 16, 4).transpose(1, 2), k, cos, cos)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(shape: dict[str, Any], interleaved: bool, launch_device: str) -> None:
    from engine_core.kernels.rotary import triton

    qkv, angles, heads = case(shape, launch_device)
    expected = by_complex_numbers(qkv, angles, interleaved)
    expected[:, heads + 2 :] = qkv[:, heads + 2 :]
    cos, sin = angles.cos().float(), angles.sin().float()
    q, k = qkv[:, :heads], qkv[:, heads : heads + 2]
    triton.apply_rotary(q, k, cos, sin, interleaved=interleaved)
    assert error(qkv, expected) < TOLERANCE[qkv.dtype]


@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (0,), (1,), (300,)], ids=str)
def test_angles(shape: tuple[int, ...], factor: float, launch_device: str) -> None:
    from engine_core.kernels.rotary import triton

    positions = torch.randint(0, 131072, shape)
    inv_freq = 10000.0 ** -(torch.arange(0, 40, 2) / 40)
    # The product is rounded to float32, as models do; only what follows is exact here.
    angles = (positions.unsqueeze(-1).float() * inv_freq).double()
    given = positions.to(launch_device), inv_freq.to(launch_device), factor
    for op in (rotary_angles, triton.rotary_angles):
        for got, expected in zip(op(*given), (angles.cos(), angles.sin()), strict=True):
            assert got.dtype == torch.float32
            assert got.shape == (*shape, 20)
            assert error(got.cpu(), factor * expected) < 1e-6


def test_angles_preconditions() -> None:
    with pytest.raises(ValueError, match=r"inv_freq must be \[half\] float32.*float64"):
        rotary_angles(torch.arange(3), torch.ones(4, dtype=torch.float64))
