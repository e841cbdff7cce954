"""Writing keys and values into the paged cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine_core.kernels import store_kv
from engine_core.kernels.kv_store import reference

CASES: list[dict[str, Any]] = [
    {},
    {"tokens": 0},
    {"tokens": 1},
    {"tokens": 63},
    {"head_dim": 80, "v_head_dim": 64},
    {"heads": 1},
    {"block_size": 1},
    {"block_size": 5},
    {"skip": False},
    {"interleaved": True},
    {"dtype": torch.bfloat16},
]


def case(
    device: str = "cpu",
    tokens: int = 7,
    heads: int = 3,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    block_size: int = 16,
    skip: bool = True,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Tensor], list[Tensor]]:
    """Arguments whose caches are full of NaN, and the caches expected."""
    v_head_dim = v_head_dim or head_dim
    fused = torch.randn(tokens, 3 * heads, head_dim).to(dtype)
    k, v = fused[:, heads : 2 * heads], fused[:, 2 * heads :, :v_head_dim]
    num_blocks = tokens // block_size + 2
    slots = torch.randperm(num_blocks * block_size)[:tokens]
    if skip:
        slots[::3] = -1
    k_expected = torch.full((num_blocks, block_size, heads, head_dim), torch.nan, dtype=dtype)
    v_expected = torch.full((num_blocks, block_size, heads, v_head_dim), torch.nan, dtype=dtype)
    k_cache, v_cache = k_expected.clone(), v_expected.clone()
    if interleaved:
        both = torch.stack([k_cache, v_cache], dim=1)
        k_cache, v_cache = both[:, 0], both[:, 1]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_expected[slot // block_size, slot % block_size] = k[token]
            v_expected[slot // block_size, slot % block_size] = v[token]
    given = [k, v, k_cache, v_cache, slots]
    if device != "cpu":
        given = [tensor.to(device) for tensor in given]
    return given, [k_expected, v_expected]


def check(given: list[Tensor], expected: list[Tensor]) -> None:
    for cache, wanted in zip(given[2:4], expected, strict=True):
        torch.testing.assert_close(cache.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("store", [store_kv, reference.store_kv], ids=["public", "reference"])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_stores(options: dict[str, Any], store: Any) -> None:
    given, expected = case(**options)
    store(*given)
    check(given, expected)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_kernel(options: dict[str, Any], launch_device: str) -> None:
    from engine_core.kernels.kv_store import triton

    given, expected = case(launch_device, **options)
    triton.store_kv(*given)
    check(given, expected)


def test_slots_may_have_gaps(each_device: str) -> None:
    given, expected = case(each_device)
    given[-1] = given[-1].repeat_interleave(2)[::2]
    store_kv(*given)
    check(given, expected)


def test_preconditions() -> None:
    (k, v, k_cache, v_cache, slots), _ = case()
    with pytest.raises(ValueError, match=r"k must be \[T, Hk, D\]"):
        store_kv(k[0], v, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="the caches must be"):
        store_kv(k, v, k_cache[..., :32], v_cache, slots)
    with pytest.raises(ValueError, match="one dtype"):
        store_kv(k.half(), v, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="int64"):
        store_kv(k, v, k_cache, v_cache, slots.int())
    with pytest.raises(ValueError, match="stride 1"):
        store_kv(k, v, k_cache, v_cache.transpose(1, 3).contiguous().transpose(1, 3), slots)
