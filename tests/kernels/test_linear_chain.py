"""The linears from one attention to the next, or to the end, together and one by one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine_core.kernels import (
    GPU,
    Chain,
    ChainForm,
    ChainNorm,
    Fp8Weight,
    GroupWeight,
    chain_declined,
    chains_run_on,
    linear_chain,
    rms_norm,
)
from engine_core.kernels.linear import chain as chains
from engine_core.kernels.linear.chain import barrier_count
from engine_core.kernels.linear.groups import quantize_groups

HOPPER = GPU.of_capability((9, 0))


def floats(weight: Tensor, device: str) -> Fp8Weight:
    made = Fp8Weight.quantized(weight)
    return Fp8Weight(made.codes.to(device), made.scales.to(device), made.dtype)


def codes(weight: Tensor, device: str, scales: torch.dtype, *, has_zeros: bool) -> GroupWeight:
    """4 bits in groups of 128; zeros need not be codes, as of some checkpoints of GPTQ."""
    of_codes, of_scales, zeros = quantize_groups(weight.to(device), 4, 128)
    if not has_zeros:
        # Around 8, as such weights are: a part that all have in common would make what is left of
        # large sums, and so each rounding, matter as no model's do.
        off = of_codes.short() - zeros.short().repeat_interleave(128, 1)
        of_codes = (off + 8).clamp(0, 15).to(torch.uint8)
    made = GroupWeight.of_codes(of_codes, of_scales.to(scales), 4, torch.bfloat16)
    points = (zeros.view(torch.int8).T + (zeros.T % 3 == 0)).to(torch.int8).contiguous()
    return replace(made, zeros=points if has_zeros else None)


KINDS: dict[str, Callable[[Tensor, str], Any]] = {
    "fp8": floats,
    "int4": partial(codes, scales=torch.float16, has_zeros=True),
    "int4, bfloat16, without zeros": partial(codes, scales=torch.bfloat16, has_zeros=False),
}


def chain(
    sizes: tuple[int, int, int, int],
    device: str = "cpu",
    *,
    has_bias: bool = False,
    offset: float = 0.0,
    kind: str = "fp8",
) -> Chain:
    """One of random numbers: columns of heads, hidden, intermediate, and of q, k and v.

    With none of these it ends with a norm.
    """
    heads, hidden, intermediate, qkv = sizes
    draw = torch.Generator(device).manual_seed(sum(sizes))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device).to(torch.bfloat16)

    shapes = [(hidden, heads), (2 * intermediate, hidden), (hidden, intermediate), (qkv, hidden)]
    shapes = shapes if qkv else shapes[:3]
    on_device = [KINDS[kind](normal(n, k) / k**0.5, device) for n, k in shapes]
    norms = [ChainNorm(normal(hidden) / 4 + 1, 1e-5, offset) for _ in range(2)]
    biases = [normal(n) if has_bias else None for n, _ in shapes]
    return Chain(tuple(on_device), norms[0], norms[1], tuple(biases))


def numbers(weight: Any) -> Tensor:
    """The numbers that the codes stand for."""
    if isinstance(weight, Fp8Weight):
        return weight.numbers(torch.float32).double()
    off = weight.codes().double().unflatten(1, (-1, 128))
    off -= 8 if weight.zeros is None else weight.zeros.double().T.unsqueeze(2)
    numbers: Tensor = (off * weight.scales.double().T.unsqueeze(2)).flatten(1)
    return numbers


def expected(x: Tensor, residual: Tensor, made: Chain) -> tuple[Tensor, Tensor]:
    """The same in float64, of the numbers that the codes stand for; nothing is rounded."""
    wide = [numbers(weight).to(x.device) for weight in made.weights]
    biases = [torch.zeros((), dtype=torch.float64, device=x.device)] * len(wide)
    biases = [
        zero if bias is None else bias.double()
        for bias, zero in zip(made.biases, biases, strict=True)
    ]

    def normed(total: Tensor, norm: ChainNorm) -> Tensor:
        root = torch.rsqrt(total.square().mean(-1, keepdim=True) + norm.eps)
        return total * root * (norm.weight.double() + norm.offset)

    total = x.double() @ wide[0].T + biases[0] + residual.double()
    gate, up = (normed(total, made.middle) @ wide[1].T + biases[1]).chunk(2, -1)
    total = total + (functional.silu(gate) * up) @ wide[2].T + biases[2]
    out = normed(total, made.end)
    return out @ wide[3].T + biases[3] if len(wide) == 4 else out, total


def rows(count: int, made: Chain, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Heads ``[1, count, heads]``, two numbers far larger than the others; a residual."""
    draw = torch.Generator().manual_seed(count)
    x = torch.randn(1, count, made.weights[0].shape[1], generator=draw)
    x[..., 5] *= 100
    x[..., 6] *= 10_000
    residual = torch.randn(1, count, made.weights[0].shape[0], generator=draw)
    return x.to(device, torch.bfloat16), residual.to(device, torch.bfloat16)


def assert_near(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """Within a few roundings to bfloat16 of the rows' sizes.

    What the linears one by one give, which round as often, is up to 0.0085 from these numbers.
    """
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        assert got.dtype == torch.bfloat16
        error = (got.double() - want).norm() / want.norm()
        assert error < 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("qkv", [192, 0])
def test_it_is_what_the_linears_are(qkv: int, count: int, has_bias: bool, kind: str) -> None:
    sizes, offset = (256, 256, 384, qkv), 1.0 if has_bias else 0.0
    made = chain(sizes, has_bias=has_bias, offset=offset, kind=kind)
    x, residual = rows(count, made)
    assert_near(linear_chain(x, residual, made), expected(x, residual, made))


@pytest.mark.parametrize(
    ("count", "shapes", "dtype", "gpu", "why"),
    [
        (1, [(4096, 4096)] * 4, torch.bfloat16, None, "compute capability 9.0"),
        (1, [(4096, 4096)] * 4, torch.bfloat16, GPU.of_capability((8, 0)), "9.0"),
        (2, [(4096, 4096)] * 4, torch.bfloat16, HOPPER, "one by one"),
        (1, [(4096, 4096)] * 4, torch.float16, HOPPER, "float16"),
        (1, [(4096, 4096)] * 3 + [(4096, 896)], torch.bfloat16, HOPPER, "multiple of 512"),
        (1, [(4096, 4096)] * 3 + [(4104, 4096)], torch.bfloat16, HOPPER, "of 16"),
        (1, [(4096, 4096)] * 3 + [(16, 131072)], torch.bfloat16, HOPPER, "65536 at most"),
        (1, [(1024, 1024)] * 4, torch.bfloat16, HOPPER, "such small weights"),
        (1, [(4096, 4096)] * 2 + [(4096, 896)], torch.bfloat16, HOPPER, "multiple of 512"),
        (1, [(2048, 2048)] * 3, torch.bfloat16, HOPPER, "such small weights"),
    ],
)
def test_what_has_no_kernel_is_declined_with_the_reason(
    count: int, shapes: list[tuple[int, int]], dtype: torch.dtype, gpu: GPU | None, why: str
) -> None:
    assert why in (chain_declined(count, shapes, dtype, gpu) or "")
    for linears in (3, 4):
        assert chain_declined(1, [(4096, 4096)] * linears, torch.bfloat16, HOPPER) is None


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ([(4096, 4096), (4112, 4096), (4096, 4096), (4096, 4096)], "up one of 32"),
        ([(4096, 4096)] * 3 + [(4096, 4224)], "multiple of 256"),
        ([(4096, 4096)] * 3 + [(16, 65536)], "32768 at most"),
        ([(4096, 4096), (4096, 4096), (4096, 4096), (1024, 4096)], "such small weights"),
    ],
)
def test_what_4_bits_decline(shapes: list[tuple[int, int]], why: str) -> None:
    assert why in (chain_declined(1, shapes, torch.bfloat16, HOPPER, 4) or "")
    assert chain_declined(1, [(4096, 4096)] * 4, torch.bfloat16, HOPPER, 4) is None
    last = [(4096, 4096), (28672, 4096), (4096, 14336)]
    assert chain_declined(1, last, torch.bfloat16, HOPPER, 4) is None


def test_weights_of_a_chain_have_a_form() -> None:
    weight = torch.randn(256, 256, dtype=torch.bfloat16)
    assert ChainForm.of(floats(weight, "cpu")) == ChainForm(8)
    made = codes(weight, "cpu", torch.float16, has_zeros=True)
    assert ChainForm.of(made) == ChainForm(4, torch.float16, has_zeros=True)
    narrow = GroupWeight.quantized(weight, 4, 32)
    for other in (
        GroupWeight.quantized(weight, 8, 128),
        narrow,
        replace(made, scales=made.scales.float()),
        replace(made, centred=False),
    ):
        assert ChainForm.of(other) is None
    assert ChainForm.shared([ChainForm(8)] * 4) == ChainForm(8)
    for differing in ([ChainForm(8), ChainForm(4)], [ChainForm(4), None], [None, None]):
        assert ChainForm.shared(differing) is None


def test_processes_that_share_a_gpu_by_mps_have_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    chains._shares_multiprocessors.cache_clear()
    try:
        assert not chains_run_on(torch.device("cuda", 0))
    finally:
        chains._shares_multiprocessors.cache_clear()


def launched(x: Tensor, residual: Tensor, made: Chain) -> tuple[Tensor, Tensor]:
    """Results of the kernel for ``[1, 1, heads]``, whatever the rule says of so small a chain."""
    of_codes = isinstance(made.weights[0], GroupWeight)
    name = "chain.groups" if of_codes else "chain"
    kernel = importlib.import_module(f"engine_core.kernels.linear.{name}.hopper.triton")
    product, total = kernel.chain(x[0], residual[0], made)
    return product[None], total[None]


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("qkv", [6144, 0])
def test_the_kernel_runs_where_it_is_not_declined(qkv: int, kind: str) -> None:
    made = chain((4096, 4096, 14336, qkv), "cuda", kind=kind)
    x, residual = rows(1, made, "cuda")
    count = barrier_count(x.device)
    assert count is not None
    before = int(count[0])
    found = linear_chain(x, residual, made)
    assert int(count[0]) > before
    for got, wanted in zip(found, launched(x, residual, made), strict=True):
        assert torch.equal(got, wanted)
    # Tiles of the next launch are dealt out from the first again.
    assert int(count[1]) == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        # Less than one step of K, and fewer tiles than multiprocessors.
        (512, 512, 512, 512),
        # Steps that are not whole, and more heads than hidden.
        (2048, 1024, 3072, 4096),
        (3584, 3584, 18944, 4608),
        (4096, 4096, 14336, 6144),
        # 16 tiles of gate and up for each multiprocessor of an H200, neither more nor fewer.
        (512, 512, 16896, 512),
        # Behind the last attention.
        (512, 512, 512, 0),
        (4096, 4096, 14336, 0),
    ],
)
def test_one_launch_is_what_the_linears_are(
    sizes: tuple[int, int, int, int], has_bias: bool, kind: str
) -> None:
    offset = 1.0 if has_bias else 0.0
    made = chain(sizes, "cuda", has_bias=has_bias, offset=offset, kind=kind)
    x, residual = rows(1, made, "cuda")
    first = launched(x, residual, made)
    assert_near(first, expected(x, residual, made))
    for _ in range(20):
        again = launched(x, residual, made)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    small = x * 2.0**-60
    assert_near(launched(small, residual, made), expected(small, residual, made))


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("qkv", [1024, 0])
def test_what_is_no_number_stays_none(qkv: int, number: float, kind: str) -> None:
    made = chain((512, 512, 1024, qkv), "cuda", kind=kind)
    x, residual = rows(1, made, "cuda")
    x[..., 7] = number
    assert not any(found.isfinite().any() for found in launched(x, residual, made))
    x[..., 7] = 0.0
    assert_near(launched(x, residual, made), expected(x, residual, made))


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_captured_and_replayed_between_other_kernels(kind: str) -> None:
    """And between chains of other sizes, which count as it does."""
    made = chain((1024, 1024, 3072, 2048), "cuda", kind=kind)
    last = chain((1024, 1024, 2048, 0), "cuda", kind=kind)
    x, residual = rows(1, made, "cuda")
    wanted, end = launched(x, residual, made), launched(x, residual, last)
    given = torch.zeros_like(x)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launched(given, residual, made)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        first = launched(given + 0.0, residual, made)
        ended = launched(given + 0.0, residual, last)
        again = launched(given + 0.0, residual, last)
        second = launched(given + 0.0, first[1] * 0 + residual, made)
    for _ in range(3):
        given.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        for found in (first, second):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        for found in (ended, again):
            assert all(torch.equal(a, b) for a, b in zip(found, end, strict=True))
        given.zero_()


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_at_the_end_the_norm_rounds_as_one_by_itself(offset: float, kind: str) -> None:
    made = chain((512, 512, 1024, 0), "cuda", offset=offset, kind=kind)
    x, residual = rows(1, made, "cuda")
    normed, total = launched(x, residual, made)
    by_itself = rms_norm(total, made.end.weight, made.end.eps, offset=offset)
    # Sums of squares are added up in another order.
    assert torch.allclose(normed, by_itself, rtol=2**-6, atol=0.0)
    assert (normed != by_itself).float().mean() < 0.01
