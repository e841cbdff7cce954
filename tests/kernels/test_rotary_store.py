"""Norms of q and k, rotation and storing in one op, against the formulas one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_cases import TOLERANCE, error, stored
from torch import Tensor

from engine_core.kernels import rotary_store

CASES: list[dict[str, Any]] = [
    {},
    {"norm": True},
    {"interleaved": True},
    {"interleaved": True, "norm": True},
    {"half": 5},
    {"half": 5, "norm": True},
    {"half": 4, "interleaved": True, "norm": True},
    {"tokens": 1},
    {"heads": 33, "kv_heads": 3},
    {"head_dim": 80, "half": 40},
    {"head_dim": 256, "half": 64, "norm": True},
    {"v_head_dim": 24},
    {"block_size": 1},
    {"sections": 2, "half": 4},
    {"dtype": torch.float16, "norm": True},
    {"dtype": torch.bfloat16, "norm": True},
]


def make(
    device: str = "cpu",
    tokens: int = 7,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    half: int = 8,
    sections: int = 1,
    block_size: int = 4,
    norm: bool = False,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Tensor], dict[str, Any]]:
    """Positional and keyword arguments; every third token is not stored, the caches are NaN."""
    v_head_dim = v_head_dim or head_dim
    qkv = torch.randn(tokens, heads + 2 * kv_heads, max(head_dim, v_head_dim), device=device)
    q, k, v = qkv.to(dtype).split([heads, kv_heads, kv_heads], dim=1)
    angles = 6 * torch.rand(sections, tokens, half, device=device)
    if sections == 1:
        angles = angles[0]
    num_blocks = tokens // block_size + 2
    slots = torch.randperm(num_blocks * block_size)[:tokens].to(device)
    slots[1::3] = -1
    caches = [
        torch.full((num_blocks, block_size, kv_heads, size), torch.nan, dtype=dtype, device=device)
        for size in (head_dim, v_head_dim)
    ]
    weights = (
        (1 + 0.3 * torch.randn(2, head_dim, device=device)).to(dtype) if norm else (None, None)
    )
    given = [q[..., :head_dim], k[..., :head_dim], v[..., :v_head_dim]]
    options = {
        "q_weight": weights[0],
        "k_weight": weights[1],
        "eps": 1e-5,
        "interleaved": interleaved,
    }
    return [*given, angles.cos(), angles.sin(), *caches, slots], options


def turned(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, options: Any) -> Tensor:
    """Normalised and rotated, in float64."""
    x = x.double()
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + options["eps"]).sqrt() * weight.double()
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    half = cos.shape[-1]
    out = x.clone()
    for section in range(cos.shape[0]):
        for pair in range(half):
            start = 2 * half * section
            i, j = (2 * pair, 2 * pair + 1) if options["interleaved"] else (pair, pair + half)
            c, s = cos[section, :, None, pair].double(), sin[section, :, None, pair].double()
            out[..., start + i] = x[..., start + i] * c - x[..., start + j] * s
            out[..., start + j] = x[..., start + j] * c + x[..., start + i] * s
    return out


def check(op: Any, given: list[Tensor], options: dict[str, Any]) -> None:
    q, k, v, cos, sin, k_cache, v_cache, slots = given
    expected_q = turned(q, cos, sin, options["q_weight"], options)
    expected_k = turned(k, cos, sin, options["k_weight"], options)
    v_before = v.clone()
    op(*given, **options)
    # Two roundings with norms: a normalised value, then its product.
    tolerance = 2 * TOLERANCE[q.dtype]
    assert error(q, expected_q) < tolerance
    assert error(stored(k_cache, slots), expected_k[slots >= 0]) < tolerance
    assert torch.equal(stored(v_cache, slots), v_before[slots >= 0])


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("options", CASES, ids=str)
def test_is_the_formula(options: dict[str, Any]) -> None:
    check(rotary_store, *make(**options))


@pytest.mark.parametrize("count", [2, 3, 7, 9])
@pytest.mark.parametrize("options", [{"norm": True}, {"sections": 2, "half": 4}], ids=str)
def test_threads_share_tokens(
    options: dict[str, Any], count: int, share_among: Callable[[int], None]
) -> None:
    share_among(count)
    check(rotary_store, *make(**options))


@pytest.mark.parametrize("options", [case for case in CASES if "sections" not in case], ids=str)
def test_kernel(options: dict[str, Any], launch_device: str) -> None:
    """The wrapper takes the separate ops for sections."""
    from engine_core.kernels.rotary_store import triton

    check(triton.rotary_store, *make(launch_device, **options))


def test_slots_may_have_gaps(each_device: str) -> None:
    given, options = make(each_device)
    given[-1] = given[-1].repeat_interleave(2)[::2]
    check(rotary_store, given, options)


@pytest.mark.usefixtures("cpu_path")
def test_keys_are_left_alone() -> None:
    given, options = make(norm=True)
    before = given[1].clone()
    rotary_store(*given, **options)
    assert torch.equal(given[1], before)


def test_preconditions() -> None:
    given, options = make()

    def call(index: int, value: Tensor, **changed: Any) -> None:
        rotary_store(*given[:index], value, *given[index + 1 :], **{**options, **changed})

    with pytest.raises(ValueError, match="slot_mapping"):
        call(7, given[7].int())
    with pytest.raises(ValueError, match="the caches"):
        call(5, given[5][..., :8])
    with pytest.raises(ValueError, match="one dtype"):
        call(1, given[1].half())
    with pytest.raises(ValueError, match="stride 1"):
        call(6, given[6].transpose(1, 3).contiguous().transpose(1, 3))
    with pytest.raises(ValueError, match="cos and sin"):
        call(3, given[3][:2])
    with pytest.raises(ValueError, match=r"float32, got torch\.float64"):
        call(3, given[3].double())
    with pytest.raises(ValueError, match="both be"):
        call(0, given[0], q_weight=torch.ones(16))
    with pytest.raises(ValueError, match=r"k_weight must be contiguous, got stride \(2,\)"):
        call(0, given[0], q_weight=torch.ones(16), k_weight=torch.ones(32)[::2])
    wide = torch.zeros(7, 9)
    with pytest.raises(ValueError, match="exceed the head dimension 16"):
        rotary_store(*given[:3], wide, wide, *given[5:], **options)


PRODUCTS: list[dict[str, Any]] = [
    {},
    {"norm": True, "dtype": torch.bfloat16},
    {"half": 5, "v_head_dim": 24, "dtype": torch.float16},
    {"interleaved": True, "heads": 33, "kv_heads": 3},
]


@pytest.mark.parametrize("where", ["operation", "kernel"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("options", PRODUCTS, ids=str)
def test_applies_the_scales_of_a_product(
    options: dict[str, Any], with_bias: bool, where: str, launch_device: str
) -> None:
    """The same as of what was scaled and rounded; bit for bit if a launch of its own did that."""
    from engine_core.kernels.linear.fp8 import triton as fp8
    from engine_core.kernels.rotary_store import triton

    op = rotary_store if where == "operation" else triton.rotary_store
    device = "cpu" if where == "operation" else launch_device
    given, norms = make(device, **options)
    parts, dtype = given[:3], given[0].dtype
    width = sum(part[0].numel() for part in parts)
    rows, columns = (torch.rand(size, device=device) + 0.5 for size in (len(parts[0]), width))
    bias = torch.randn(width, device=device).to(dtype) if with_bias else None
    flat = torch.cat([part.flatten(1) for part in parts], 1)
    whole = flat.double() * rows.double()[:, None] * columns.double()
    whole = (whole if bias is None else whole + bias.double()).to(dtype)
    if where == "kernel":
        exact, whole = whole, fp8.rescale(flat.clone(), rows, columns, bias)
        assert error(whole, exact) < TOLERANCE[dtype]
    sizes = [part[0].numel() for part in parts]
    scaled = [
        each.unflatten(1, part.shape[1:]).contiguous()
        for each, part in zip(whole.split(sizes, 1), parts, strict=True)
    ]
    expected = [each.clone() for each in (*scaled, *given[3:])]
    op(*expected, **norms)
    op(*given, **norms, scales=(rows, columns), bias=bias)
    # q, and the caches.
    for index in (0, 5, 6):
        got, wanted = given[index], expected[index]
        assert torch.equal(got.isnan(), wanted.isnan())
        assert error(got.nan_to_num(), wanted.nan_to_num()) < 3 * TOLERANCE[dtype]
        assert where == "operation" or torch.equal(got.nan_to_num(), wanted.nan_to_num())


def test_scales_that_do_not_fit() -> None:
    given, norms = make()
    rows, columns = torch.ones(7), torch.ones(128)
    with pytest.raises(ValueError, match=r"scales of rows must be contiguous \(7,\)"):
        rotary_store(*given, **norms, scales=(columns, columns))
    with pytest.raises(ValueError, match=r"scales of columns must be contiguous \(128,\)"):
        rotary_store(*given, **norms, scales=(rows, torch.ones(256)[::2]))
    with pytest.raises(ValueError, match="add it before"):
        rotary_store(*given, **norms, bias=columns)
