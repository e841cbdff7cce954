"""Inputs for the kernels and the native matrix, shared by the tests and benchmarks/kernels.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_core import kernels
from engine_core.kernels.activation import reference as activation_reference
from engine_core.kernels.attention import reference as attention_reference
from engine_core.kernels.kv_store import reference as kv_store_reference
from engine_core.kernels.linear import reference as linear_reference
from engine_core.kernels.norm import reference as norm_reference
from engine_core.kernels.rotary import reference as rotary_reference
from engine_core.kernels.rotary_store import reference as rotary_store_reference
from engine_core.kernels.sampling import GENERATED, PROMPTED, Adjustments, SamplingState
from engine_core.kernels.sampling.philox import uniform
from engine_core.kernels.segments import reference as segments_reference

if TYPE_CHECKING:
    import pytest

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Bounds of max |got - expected| / (1 + |expected|). A few roundings: float32 has 2**-24, summed
# over up to 28672 terms in both (1.3e-5 was seen there); float16 2**-11; bfloat16 2**-8.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def error(got: Tensor, expected: Tensor) -> float:
    """Largest difference relative to ``1 + |expected|``; infinite where got is not finite."""
    got, expected = got.double(), expected.double()
    difference = (got - expected).abs() / (1 + expected.abs())
    return difference.nan_to_num(torch.inf, torch.inf).max().item() if got.numel() else 0.0


def by_complex_numbers(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Turn pair ``p`` of section ``s`` of ``x [T, H, D]`` by ``angles[s, t, p]``, in float64."""
    x = x.double().clone()
    for section, turn in enumerate(torch.polar(torch.ones_like(angles), angles)):
        half = angles.shape[-1]
        for pair in range(half):
            start = 2 * half * section
            i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
            turned = torch.complex(x[..., start + i], x[..., start + j]) * turn[:, None, pair]
            x[..., start + i], x[..., start + j] = turned.real, turned.imag
    return x


def check_replays(chain: Callable[[], Sequence[Tensor]], expected: Sequence[Tensor]) -> None:
    """A graph of launches gives, each time, what they gave one by one."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(3):
        for got in captured:
            got.fill_(torch.nan if got.is_floating_point() else -1)
        graph.replay()
        for got, wanted in zip(captured, expected, strict=True):
            assert torch.equal(got, wanted)


def seen_endings(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what follows the products in each launch of the module's linear from now on."""
    seen: list[str] = []
    launched = module.linear

    def spy(x: Any, weight: Any, epilogue: Any, *more: Any) -> Tensor:
        seen.append(type(epilogue).__name__)
        out: Tensor = launched(x, weight, epilogue, *more)
        return out

    monkeypatch.setattr(module, "linear", spy)
    return seen


def stored(cache: Tensor, slots: Tensor) -> Tensor:
    """Read a cache that was full of NaN at the non-negative slots; elsewhere it must be NaN.

    ``[stored tokens, heads, D]`` of ``cache [num_blocks, block_size, heads, D]``.
    """
    flat, places = cache.flatten(0, 1), slots[slots >= 0]
    untouched = torch.ones(len(flat), dtype=torch.bool, device=flat.device)
    untouched[places] = False
    assert flat[untouched].isnan().all()
    return flat[places]


@dataclass(frozen=True)
class Paged:
    """A batch for paged attention whose every unused slot and table entry is poisoned."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    rows: tuple[tuple[int, int], ...]
    dense: tuple[tuple[Tensor, Tensor], ...]
    block_tables: Tensor
    query_start: Tensor
    kv_lens: Tensor

    @property
    def num_decode_rows(self) -> int:
        """Leading rows with one query."""
        count = 0
        while count < len(self.rows) and self.rows[count][0] == 1:
            count += 1
        return count

    def metadata(self) -> dict[str, Tensor]:
        """Attention metadata that place rows and tokens."""
        return {
            "block_tables": self.block_tables,
            "query_start": self.query_start,
            "kv_lens": self.kv_lens,
        }

    def sizes(self) -> dict[str, int]:
        """The host's bounds."""
        return {
            "max_query_len": max(n for n, _ in self.rows),
            "max_kv_len": max(max(n for _, n in self.rows), 1),
            "num_decode_rows": self.num_decode_rows,
        }

    def poisoned_out(self) -> Tensor:
        """An output full of NaN."""
        shape = (*self.q.shape[:2], self.v_cache.shape[3])
        return torch.full(shape, torch.nan, dtype=self.q.dtype, device=self.q.device)


def make_paged(
    rows: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    fused: bool = False,
    own_caches: bool = False,
    seed: int = 0,
) -> Paged:
    """Rows of (queries, tokens); ``fused`` makes q a view of a wider tensor and the caches of one.

    With ``own_caches`` the caches are tensors of their own nevertheless, as the engine's are.
    Blocks are dealt in random order.
    """
    generator = torch.Generator(device).manual_seed(seed)
    randn = _normal(generator, dtype)
    v_head_dim = v_head_dim or head_dim
    counts = [-(-kv_len // block_size) for _, kv_len in rows]
    num_blocks = sum(counts) + 2
    blocks = torch.randperm(num_blocks, generator=generator, device=device)
    tables = torch.full((len(rows), max(counts) + 1), -1, dtype=torch.int32, device=device)
    options = {"dtype": dtype, "device": device}
    if fused and not own_caches:
        wide = max(head_dim, v_head_dim)
        both = torch.full((num_blocks, 2, block_size, kv_heads, wide), torch.nan, **options)
        k_cache, v_cache = both[:, 0, ..., :head_dim], both[:, 1, ..., :v_head_dim]
    else:
        k_cache = torch.full((num_blocks, block_size, kv_heads, head_dim), torch.nan, **options)
        v_cache = torch.full((num_blocks, block_size, kv_heads, v_head_dim), torch.nan, **options)
    dense = []
    for row, (_, kv_len) in enumerate(rows):
        own, blocks = blocks[: counts[row]], blocks[counts[row] :]
        tables[row, : counts[row]] = own.int()
        k, v = randn(kv_len, kv_heads, head_dim), randn(kv_len, kv_heads, v_head_dim)
        j = torch.arange(kv_len, device=device)
        k_cache[own[j // block_size], j % block_size] = k
        v_cache[own[j // block_size], j % block_size] = v
        dense.append((k, v))
    starts = torch.tensor([0, *(n for n, _ in rows)], device=device).cumsum(0).int()
    num_queries = sum(n for n, _ in rows)
    width = heads + 2 * kv_heads if fused else heads
    return Paged(
        q=randn(num_queries, width, head_dim)[:, :heads],
        k_cache=k_cache,
        v_cache=v_cache,
        rows=tuple(rows),
        dense=tuple(dense),
        block_tables=tables,
        query_start=starts,
        kv_lens=torch.tensor([n for _, n in rows], dtype=torch.int32, device=device),
    )


def attend(paged: Paged, **options: Any) -> Tensor:
    """Attention of a batch with a scale of 0.25, into an output that is poisoned."""
    return kernels.paged_attention(
        paged.q,
        paged.k_cache,
        paged.v_cache,
        scale=0.25,
        out=paged.poisoned_out(),
        **{**paged.metadata(), **paged.sizes(), **options},
    )


@dataclass(frozen=True)
class Case:
    """One comparison of a public op with its float32 reference; ``run`` gives the error."""

    op: str
    name: str
    dtype: torch.dtype
    run: Callable[[], float]

    def __str__(self) -> str:
        return f"{self.op}-{self.name}-{str(self.dtype).removeprefix('torch.')}"


def native_matrix(device: str) -> Iterator[Case]:
    """Every op in every dtype, for a GPU."""
    for dtype in DTYPES:
        yield from _norm_cases(device, dtype)
        yield from _activation_cases(device, dtype)
        yield from _quick_gelu_cases(device, dtype)
        yield from _segment_cases(device, dtype)
        yield from _rotary_cases(device, dtype)
        yield from _store_cases(device, dtype)
        yield from _rotary_store_cases(device, dtype)
        yield from _linear_cases(device, dtype)
        yield from _coded_linear_cases(device, dtype)
        yield from _linear_add_cases(device, dtype)
        yield from _linear_add_norm_cases(device, dtype)
        yield from _linear_rotary_store_cases(device, dtype)
        yield from _embedding_cases(device, dtype)
        yield from _greedy_cases(device, dtype)
        yield from _sampling_cases(device, dtype)
        yield from _attention_cases(device, dtype)


def _normal(generator: torch.Generator, dtype: torch.dtype) -> Callable[..., Tensor]:
    """A function that draws standard normal numbers of a shape and rounds them."""

    def randn(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, device=generator.device)
        return values.to(dtype)

    return randn


def _randn(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def _norm_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    def run(rows: int, size: int, op: str, residual: bool) -> float:
        x = _randn(rows, size + 8, device=device, dtype=dtype)[:, :size]
        weight = _randn(size, device=device, dtype=dtype)
        bias = _randn(size + 1, device=device, dtype=dtype)[1:]
        added = _randn(rows, size, device=device, dtype=dtype) if residual else None
        if op == "rms_norm":
            got = kernels.rms_norm(x, weight, 1e-5, residual=added)
        else:
            got = kernels.layer_norm(x, weight, bias, 1e-5, residual=added)
        total = x.float()
        worst = 0.0
        if isinstance(got, tuple):
            assert added is not None
            got, total_got = got
            total = (x + added).float()
            worst = error(total_got, total)
        if op == "rms_norm":
            expected = norm_reference.rms_norm(total, weight.float(), 1e-5)
        else:
            expected = norm_reference.layer_norm(total, weight.float(), bias.float(), 1e-5)
        return max(worst, error(got, expected))

    for op in ("rms_norm", "layer_norm"):
        for rows, size in [(1, 4096), (63, 576), (128, 63), (4096, 128), (512, 8192), (3, 16384)]:
            for residual in (False, True):
                name = f"{rows}x{size}{'-residual' if residual else ''}"
                yield Case(
                    op,
                    name,
                    dtype,
                    lambda r=rows, s=size, o=op, a=residual: run(r, s, o, a),  # type: ignore[misc]
                )

    def per_head() -> float:
        qkv = _randn(65, 12, 128, device=device, dtype=dtype)
        weight = _randn(128, device=device, dtype=dtype)
        got = kernels.rms_norm(qkv[:, 8:10], weight, 1e-6)
        return error(got, norm_reference.rms_norm(qkv[:, 8:10].float(), weight.float(), 1e-6))

    yield Case("rms_norm", "per-head", dtype, per_head)


def _activation_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    def run(rows: int, size: int, activation: str) -> float:
        x = 3 * _randn(rows, 2 * size, device=device, dtype=dtype)
        if activation == "silu":
            return error(kernels.silu_and_mul(x), activation_reference.silu_and_mul(x.float()))
        got = kernels.gelu_and_mul(x, activation)  # type: ignore[arg-type]
        return error(got, activation_reference.gelu_and_mul(x.float(), activation))

    for activation in ("silu", "tanh", "none"):
        op = "silu_and_mul" if activation == "silu" else f"gelu_and_mul[{activation}]"
        for rows, size in [(1, 1), (1, 14336), (63, 63), (128, 128), (2048, 11008)]:
            yield Case(
                op,
                f"{rows}x{size}",
                dtype,
                lambda r=rows, s=size, a=activation: run(r, s, a),  # type: ignore[misc]
            )


def _quick_gelu_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    def run(rows: int, size: int) -> float:
        x = 3 * _randn(rows, size, device=device, dtype=dtype)
        return error(kernels.quick_gelu(x), activation_reference.quick_gelu(x.float()))

    for rows, size in [(1, 1), (63, 63), (1024, 5120)]:
        yield Case("quick_gelu", f"{rows}x{size}", dtype, lambda r=rows, s=size: run(r, s))  # type: ignore[misc]


def _segment_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    def run(runs: Sequence[tuple[int, int]], heads: int, width: int) -> float:
        segments = kernels.Segments(runs, torch.device(device))
        qkv = _randn(segments.length, 3, heads, width, device=device, dtype=dtype)
        q, k, v = qkv.unbind(1)
        got = kernels.attend_segments(q, k, v, segments)
        parts = (part.float() for part in (q, k, v))
        return error(got, segments_reference.attend_segments(*parts, runs, width**-0.5))

    for runs, heads, width in [
        ([(1, 1)], 1, 8),
        ([(2, 64), (3, 16), (1, 7)], 2, 80),
        ([(4, 256)], 16, 64),
        ([(1, 1025), (1, 63)], 4, 72),
    ]:
        name = "+".join(f"{count}x{size}" for count, size in runs)
        yield Case(
            "attend_segments",
            f"{name}-{heads}x{width}",
            dtype,
            lambda r=runs, h=heads, w=width: run(r, h, w),  # type: ignore[misc]
        )


def _rotary_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    def run(tokens: int, head_dim: int, half: int, sections: int, interleaved: bool) -> float:
        qkv = _randn(tokens, 10, head_dim, device=device, dtype=dtype)
        angles = _randn(sections, tokens, half, device=device, dtype=torch.float32)
        cos, sin = angles.cos(), angles.sin()
        expected = qkv.float()
        rotary_reference.apply_rotary(
            expected[:, :7], expected[:, 7:9], cos, sin, interleaved=interleaved
        )
        kernels.apply_rotary(qkv[:, :7], qkv[:, 7:9], cos, sin, interleaved=interleaved)
        return error(qkv, expected)

    for interleaved in (False, True):
        for tokens, head_dim, half, sections in [
            (1, 64, 32, 1),
            (63, 80, 16, 1),
            (128, 128, 64, 1),
            (128, 128, 32, 2),
            (3000, 96, 48, 1),
            (64, 256, 64, 1),
        ]:
            yield Case(
                "apply_rotary",
                f"{tokens}x{head_dim}-{sections}x{half}{'-interleaved' if interleaved else ''}",
                dtype,
                lambda t=tokens, d=head_dim, h=half, s=sections, i=interleaved: run(  # type: ignore[misc]
                    t, d, h, s, i
                ),
            )


def _store_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    def run(tokens: int, head_dim: int, v_head_dim: int, block_size: int) -> float:
        qkv = _randn(tokens, 9, head_dim, device=device, dtype=dtype)
        k, v = qkv[:, 3:6], qkv[:, 6:, :v_head_dim]
        num_blocks = tokens // block_size + 2
        slots = torch.randperm(num_blocks * block_size, device=device)[:tokens]
        slots[::5] = -1
        k_cache = torch.zeros(num_blocks, block_size, 3, head_dim, dtype=dtype, device=device)
        v_cache = torch.zeros(num_blocks, block_size, 3, v_head_dim, dtype=dtype, device=device)
        k_expected, v_expected = k_cache.clone(), v_cache.clone()
        kv_store_reference.store_kv(k, v, k_expected, v_expected, slots)
        kernels.store_kv(k, v, k_cache, v_cache, slots)
        exact = torch.equal(k_cache, k_expected) and torch.equal(v_cache, v_expected)
        return 0.0 if exact else torch.inf

    for tokens, head_dim, v_head_dim, block_size in [
        (1, 64, 64, 16),
        (63, 80, 80, 16),
        (128, 128, 64, 5),
        (4096, 128, 128, 64),
        (100, 256, 256, 1),
    ]:
        yield Case(
            "store_kv",
            f"{tokens}x{head_dim}-{v_head_dim}-block{block_size}",
            dtype,
            lambda t=tokens, d=head_dim, e=v_head_dim, b=block_size: run(t, d, e, b),  # type: ignore[misc]
        )


def _rotary_store_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    def run(tokens: int, head_dim: int, half: int, interleaved: bool, norm: bool) -> float:
        heads, kv_heads, block_size = 14, 2, 16
        qkv = _randn(tokens, heads + 2 * kv_heads, head_dim, device=device, dtype=dtype)
        angles = _randn(tokens, half, device=device, dtype=torch.float32)
        weights = 1 + 0.3 * _randn(2, head_dim, device=device, dtype=dtype)
        slots = torch.randperm((tokens // block_size + 1) * block_size, device=device)[:tokens]
        slots[::5] = -1
        results = []
        for values, op in (
            (qkv.float(), rotary_store_reference.rotary_store),
            (qkv, kernels.rotary_store),
        ):
            q, k, v = values.split([heads, kv_heads, kv_heads], dim=1)
            cache = torch.zeros(
                2, tokens // block_size + 1, block_size, kv_heads, head_dim, device=device
            ).to(values.dtype)
            op(
                q,
                k,
                v,
                angles.cos(),
                angles.sin(),
                cache[0],
                cache[1],
                slots,
                q_weight=weights[0].to(values.dtype) if norm else None,
                k_weight=weights[1].to(values.dtype) if norm else None,
                eps=1e-6,
                interleaved=interleaved,
            )
            results.append((q, cache))
        (q_expected, cache_expected), (q_got, cache_got) = results
        worst = max(error(q_got, q_expected), error(cache_got, cache_expected))
        # With norms a value is rounded three times, in the other ops once or twice.
        return worst / 2 if norm else worst

    for tokens, head_dim, half in [(1, 64, 32), (63, 80, 16), (300, 128, 64), (64, 256, 64)]:
        for interleaved in (False, True):
            for norm in (False, True):
                name = f"{tokens}x{head_dim}-{half}"
                name += "-interleaved" * interleaved + "-norm" * norm
                yield Case(
                    "rotary_store",
                    name,
                    dtype,
                    lambda t=tokens, d=head_dim, h=half, i=interleaved, n=norm: run(t, d, h, i, n),  # type: ignore[misc]
                )


def _linear_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    def run(rows: int, n: int, k: int, gated: bool) -> float:
        generator = torch.Generator(device).manual_seed(rows + n + k)
        randn = _normal(generator, dtype)
        x, bias = randn(rows, k), randn(n)
        weight = randn(n, k) / k**0.5
        expected = linear_reference.linear(x.float(), weight.float(), bias.float(), gated=gated)
        # Every program count is used again: the second launch must find it as the first did.
        got = [kernels.linear(x, weight, bias, gated=gated) for _ in range(2)]
        if not torch.equal(*got):
            return torch.inf
        return error(got[0], expected)

    for rows in (1, 2, 16, 17, 33, 64, 100, 128):
        for n, k, gated in [
            (28672, 4096, True),
            (9728, 896, True),
            (65537, 2056, False),
            (6144, 4096, False),
            (4096, 14336, False),
            (4095, 4104, False),
            (896, 4864, False),
            (1152, 896, False),
            (1000, 904, False),
        ]:
            yield Case(
                "linear[gated]" if gated else "linear",
                f"{rows}x{n}x{k}",
                dtype,
                lambda r=rows, n=n, k=k, g=gated: run(r, n, k, g),  # type: ignore[misc]
            )


def _coded_linear_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    def run(rows: int, sizes: tuple[int, int, bool], kind: str) -> float:
        n, k, gated = sizes
        randn = _normal(torch.Generator(device).manual_seed(rows + n + k), dtype)
        x, bias, numbers = randn(rows, k), randn(n), randn(n, k) / k**0.5
        if kind == "e4m3":
            weight: kernels.CodedWeight = replace(
                kernels.Fp8Weight.quantized(numbers), quantizes_rows=False
            )
        else:
            bits, group = map(int, kind.split(" in "))
            weight = kernels.GroupWeight.quantized(numbers, bits, group)
        got = kernels.linear(x, weight, bias, gated=gated)
        # What the codes stand for has tests of its own. Many rows are multiplied with numbers that
        # were rounded to x's dtype: with 4096 of them two results differ by up to 0.017.
        return min(
            error(got, linear_reference.linear(x.float(), dense, bias.float(), gated=gated))
            for dense in (weight.numbers(torch.float32), weight.numbers(dtype).float())
        )

    shapes = [(28672, 4096, True), (4096, 14336, False), (896, 4864, False), (1000, 928, False)]
    for rows, sizes in itertools.product((1, 16, 33, 64, 100, 256, 300), shapes):
        for kind in ("4 in 128", "4 in 64", "4 in 32", "8 in 32", "8 in 0", "e4m3"):
            if " in " in kind and sizes[1] % max(int(kind.split(" in ")[1]), 1):
                continue
            yield Case(
                f"linear[{kind}]",
                f"{rows}x{sizes[0]}x{sizes[1]}",
                dtype,
                lambda r=rows, s=sizes, each=kind: run(r, s, each),  # type: ignore[misc]
            )


def _linear_add_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    def run(rows: int, sizes: tuple[int, int, int], gated: bool) -> float:
        k, hidden, n = sizes
        generator = torch.Generator(device).manual_seed(rows + n + k)
        randn = _normal(generator, dtype)
        x, residual, norm_weight = randn(rows, k), randn(rows, hidden), randn(hidden)
        first, second = randn(hidden, k) / k**0.5, randn(n, hidden) / hidden**0.5
        results = []
        for _ in range(2):
            normed, total = kernels.linear_add(x, first, None, residual, norm_weight, 1e-5)
            results.append(kernels.linear(normed, second, gated=gated))
        if not torch.equal(*results):
            return torch.inf
        expected_total = x.float() @ first.float().T + residual.float()
        # Each from the rounded result of the one before.
        expected_values = total.float() * norm_weight.float()
        inverse = (total.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        divided = normed.values.float() * inverse
        expected = linear_reference.linear(divided, second.float(), None, gated=gated)
        return max(
            error(total, expected_total),
            error(normed.values, expected_values),
            error(results[0], expected),
        )

    for rows in (1, 2, 16, 17, 33, 64, 65, 128, 200, 225, 256):
        for sizes, gated in [
            ((4096, 4096, 28672), True),
            ((14336, 4096, 6144), False),
            ((896, 896, 9728), True),
            ((4864, 896, 1152), False),
        ]:
            name = f"{rows}x{'-'.join(map(str, sizes))}"
            yield Case(
                "linear_add",
                name,
                dtype,
                lambda r=rows, s=sizes, g=gated: run(r, s, g),  # type: ignore[misc]
            )


def _linear_add_norm_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    def run(rows: int, n: int, k: int, with_bias: bool) -> float:
        generator = torch.Generator(device).manual_seed(rows + n + k)
        randn = _normal(generator, dtype)
        x, residual, norm_weight = randn(rows, k), randn(rows, n), randn(n)
        weight, bias = randn(n, k) / k**0.5, randn(n) if with_bias else None
        expected_total = x.float() @ weight.float().T + residual.float()
        if bias is not None:
            expected_total += bias.float()
        worst = 0.0
        for may_overwrite in (False, True):
            normed, total = kernels.linear_add_norm(
                x, weight, bias, residual, norm_weight, 1e-5, may_overwrite=may_overwrite
            )
            # From the rounded sum.
            expected = norm_reference.rms_norm(total.float(), norm_weight.float(), 1e-5)
            worst = max(worst, error(total, expected_total), error(normed, expected))
        return worst

    for rows in (1, 64, 65, 96, 128, 256, 257, 1000):
        for n, k in [(4096, 4096), (4096, 14336), (896, 896), (896, 4864), (1000, 904)]:
            for with_bias in (False, True):
                yield Case(
                    "linear_add_norm",
                    f"{rows}x{n}x{k}" + "-bias" * with_bias,
                    dtype,
                    lambda r=rows, n=n, k=k, b=with_bias: run(r, n, k, b),  # type: ignore[misc]
                )


def _linear_rotary_store_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    def run(tokens: int, heads: int, kv_heads: int, head_dim: int, interleaved: bool) -> float:
        n, k = (heads + 2 * kv_heads) * head_dim, heads * head_dim
        generator = torch.Generator(device).manual_seed(tokens + n)
        randn = _normal(generator, dtype)
        x, bias = randn(tokens, k), randn(n)
        weight = randn(n, k) / k**0.5
        angles = 6 * randn(tokens, head_dim // 2).float()
        slots = torch.randperm(2 * tokens, generator=generator, device=device)[:tokens]
        slots[1::3] = -1
        norm = 0.5 + torch.rand(tokens, 1, generator=generator, device=device)
        deferred = (x / norm).to(dtype)
        # Whose mean and 0.25 make up for the division by norm.
        squares = (k * (1 / norm**2 - 0.25) / 3).expand(tokens, 3).contiguous()
        worst = 0.0
        for given, rows in (
            (x, x.float()),
            (kernels.DeferredRMSNorm(deferred, squares, 0.25), deferred.float() * norm),
        ):
            shape = (tokens // 8 + 1, 16, kv_heads, head_dim)
            caches = [torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2)]
            expected_caches = [cache.float() for cache in caches]
            where = (angles.cos(), angles.sin())
            got = kernels.linear_rotary_store(
                given, weight, bias, *where, *caches, slots, interleaved=interleaved
            )
            qkv = linear_reference.linear(rows, weight.float(), bias.float(), gated=False)
            qkv = qkv.to(dtype).float()
            q, keys, values = qkv.view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], 1)
            rotary_store_reference.rotary_store(
                q,
                keys,
                values,
                *where,
                *expected_caches,
                slots,
                q_weight=None,
                k_weight=None,
                eps=0.0,
                interleaved=interleaved,
            )
            worst = max(worst, error(got, q))
            for cache, expected in zip(caches, expected_caches, strict=True):
                if not torch.equal(cache.isnan(), expected.isnan()):
                    return torch.inf
                worst = max(worst, error(cache.nan_to_num(), expected.nan_to_num()))
        # Of two roundings, one after the other.
        return worst / 2

    for tokens in (1, 2, 16, 17, 33, 64, 65, 96, 97, 256):
        for heads, kv_heads, head_dim in [(14, 2, 64), (32, 8, 128), (9, 3, 64)]:
            for interleaved in (False, True):
                name = f"{tokens}x{heads}x{kv_heads}x{head_dim}" + "-interleaved" * interleaved
                yield Case(
                    "linear_rotary_store",
                    name,
                    dtype,
                    lambda t=tokens, h=heads, v=kv_heads, d=head_dim, i=interleaved: run(  # type: ignore[misc]
                        t, h, v, d, i
                    ),
                )


def _embedding_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    def run(tokens: int, size: int, first: int | None) -> float:
        weight = _randn(500, size, device=device, dtype=dtype)
        ids = torch.arange(tokens, device=device) * 7919 % (500 if first is None else 1500)
        got = kernels.embed(ids.unsqueeze(0), weight, first)
        rows = ids - (first or 0)
        has_row = ((rows >= 0) & (rows < 500)).unsqueeze(-1)
        expected = torch.where(has_row, weight[rows.clamp(0, 499)], 0).unsqueeze(0)
        return 0.0 if torch.equal(got, expected) else torch.inf

    for tokens, size, first in itertools.product((1, 5, 3000), (896, 4096, 100), (None, 500)):
        part = "" if first is None else "-part"
        yield Case(
            "embed", f"{tokens}x{size}{part}", dtype, lambda t=tokens, s=size, f=first: run(t, s, f)
        )  # type: ignore[misc]


def _greedy_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    def run(rows: int, vocab: int) -> float:
        logits = _randn(rows, vocab, device=device, dtype=dtype)
        logits[:, vocab // 3] = logits[:, vocab // 2] = 9.0
        logits[::7, vocab - 1] = torch.nan
        tokens, status = kernels.choose_greedy(logits)
        good = torch.ones(rows, dtype=torch.bool, device=device)
        good[::7] = False
        exact = bool((tokens[good] == vocab // 3).all()) and torch.equal(status == 0, good)
        return 0.0 if exact else torch.inf

    for rows, vocab in [(1, 151936), (1, 100), (33, 128256), (512, 5000)]:
        name = f"{rows}x{vocab}"
        yield Case("choose_greedy", name, dtype, lambda r=rows, v=vocab: run(r, v))  # type: ignore[misc]


@dataclass(frozen=True)
class Sampling:
    """A batch of rows that choose by parameters of every kind; some rows are padding."""

    logits: Tensor
    rows: Tensor
    positions: Tensor
    last_tokens: Tensor
    state: SamplingState

    def on(self, device: str) -> Sampling:
        """A copy, for what is modified."""
        adjustments = self.state.adjustments
        if adjustments is not None:
            tensors = (getattr(adjustments, name) for name in adjustments.__slots__)
            adjustments = Adjustments(
                *(None if t is None else t.to(device, copy=True) for t in tensors)
            )
        return Sampling(
            *(
                getattr(self, name).to(device, copy=True)
                for name in ("logits", "rows", "positions", "last_tokens")
            ),
            SamplingState(self.state.numbers.to(device), self.state.seeds.to(device), adjustments),
        )

    def run(self, op: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Tokens and status, on the CPU."""
        tokens, status = op(self.logits, self.rows, self.positions, self.last_tokens, self.state)
        return tokens.cpu(), status.cpu()

    def take(self, place: int) -> Sampling:
        """One row by itself."""
        own = slice(place, place + 1)
        return Sampling(
            self.logits[own].clone(),
            self.rows[own].clone(),
            self.positions[own].clone(),
            self.last_tokens,
            self.state,
        )

    def expected(self, place: int) -> tuple[int | None, bool]:
        """The token of a row, None if there is none, and whether rounding can make no other of it.

        The definition in float64, with a sort.
        """
        row, target = int(self.rows[place]), int(self.positions[place]) + 1
        x = self.adjusted(place).astype(np.float64)
        if x.max() == -np.inf:
            return None, True
        temperature, top_k, top_p, min_p = self.state.numbers[row, :4].tolist()
        if temperature == 0:
            return int(x.argmax()), True
        weights = np.exp((x - x.max()) / temperature)
        order = np.argsort(-x, kind="stable")
        if 0 < top_k < len(x):
            order = order[: int(top_k)]
        margins = [1.0]
        if top_p < 1:
            shares = weights[order].cumsum() / weights[order].sum()
            order = order[: np.searchsorted(shares, top_p) + 1]
            margins.append(np.abs(shares - top_p).min())
        if min_p > 0:
            margins += np.abs(weights[x < x.max()] - min_p).tolist()
        kept = np.sort(order[weights[order] >= min_p])
        shares = weights[kept].cumsum() / weights[kept].sum()
        u = float(uniform(self.state.seeds[row], torch.tensor(target)))
        margins.append(np.abs(shares - u).min())
        index = min(int(np.searchsorted(shares, u, side="right")), len(kept) - 1)
        return int(kept[index]), min(margins) > 1e-5

    def adjusted(self, place: int) -> npt.NDArray[np.float32]:
        """A row's logits after its adjustments."""
        row, target = int(self.rows[place]), int(self.positions[place]) + 1
        x: npt.NDArray[np.float32] = self.logits[place].float().numpy().copy()
        adjustments = self.state.adjustments
        if adjustments is None:
            return x
        kinds = int(adjustments.kinds[row])
        if kinds & 1:
            x += adjustments.bias[row].numpy()
        if kinds & 2:
            repetition, frequency, presence = self.state.numbers[row, 4:].float().numpy()
            counts = adjustments.output_counts[row].numpy()
            seen = adjustments.seen[row].numpy() > 0
            x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
            x -= counts.astype(np.float32) * frequency
            x[counts > 0] -= presence
        if target < int(adjustments.ban_ends[row]):
            x[[token for token in adjustments.ban_ids[row].tolist() if token >= 0]] = -np.inf
        return x


def make_sampling(
    rows: int, vocab: int, dtype: torch.dtype, *, seed: int, adjusted: bool
) -> Sampling:
    """Logits of many kinds: steep, flat, with many ties, with -inf; parameters drawn at random."""
    generator = torch.Generator().manual_seed(seed)

    def any_of(*choices: float) -> Tensor:
        places = torch.randint(0, len(choices), (max_rows,), generator=generator)
        return torch.tensor(choices, dtype=torch.float64)[places]

    max_rows = rows + 3
    logits = torch.randn(rows, vocab, generator=generator)
    logits *= any_of(3.0, 1.0, 0.01, 8.0)[:rows, None].float()
    # What is the same for a third of the rows: few values, so that ties lie across every bound.
    logits[::3] = logits[::3].round()
    logits[1::4, ::3] = -torch.inf
    logits[:, vocab // 2] = 1.0
    numbers = torch.zeros(max_rows, 7, dtype=torch.float64)
    for column, choices in enumerate(
        [
            (0.0, 1.0, 1.0, 0.7, 0.7, 3.0, 100.0, 1e-30),
            (0.0, 0.0, -1.0, 1.0, 5.0, 50.0, 700.0, 1e6),
            (1.0, 1.0, 0.9013, 0.5127, 1e-6, 0.9991),
            (0.0, 0.0, 0.0503, 1.0),
            (1.0, 1.3, 0.6),
            (0.0, 0.3, -0.4),
            (0.0, 0.5),
        ]
    ):
        numbers[:, column] = any_of(*choices)
    adjustments = None
    if adjusted:
        bias = torch.randn(max_rows, vocab, generator=generator)
        bias[:, 5::7] = -torch.inf
        counts = torch.randint(-3, 3, (max_rows, vocab), generator=generator, dtype=torch.int32)
        counts.clamp_(min=0)
        prompted = torch.rand(max_rows, vocab, generator=generator) < 0.2
        seen = (PROMPTED * prompted + GENERATED * (counts > 0)).to(torch.uint8)
        # In any order: those that were seen are the first of a row, by twice as large numbers.
        order = torch.rand(max_rows, vocab, generator=generator) + 2 * (seen > 0)
        adjustments = Adjustments(
            kinds=torch.randint(0, 8, (max_rows,), generator=generator, dtype=torch.int32),
            ban_ids=torch.randint(-1, vocab, (max_rows, 5), generator=generator).int(),
            ban_ends=torch.randint(0, 40, (max_rows,), generator=generator),
            bias=bias,
            seen=seen,
            output_counts=counts,
            seen_ids=order.argsort(dim=-1, descending=True).int(),
            seen_sizes=(seen > 0).sum(dim=-1).int(),
        )
    # The last row of the batch is that of padding.
    numbers[-1] = 0.0
    places = torch.randperm(max_rows - 1, generator=generator)[:rows]
    positions = torch.randint(0, 30, (rows,), generator=generator)
    padding = torch.arange(rows) % 6 == 4
    return Sampling(
        logits.to(dtype),
        torch.where(padding, max_rows - 1, places),
        torch.where(padding, -1, positions),
        torch.arange(max_rows) + 1000,
        SamplingState(
            numbers, torch.randint(0, 2**62, (max_rows,), generator=generator), adjustments
        ),
    )


def check_sampling(
    batch: Sampling, op: Callable[..., tuple[Tensor, Tensor]], device: str
) -> tuple[int, int]:
    """Compare every row with the definition: how many rows there are, and how many of them
    rounding turned.

    It may where a share ends within 1e-5 of the random number, of top_p or of min_p. The state must
    have moved on, and nothing else.
    """
    ran = batch.on(device)
    tokens, status = ran.run(op)
    turned = 0
    last_tokens = batch.last_tokens.clone()
    live = (batch.positions >= 0).nonzero().squeeze(-1).tolist()
    counts = None
    if batch.state.adjustments is not None:
        assert batch.state.adjustments.output_counts is not None
        counts = batch.state.adjustments.output_counts.clone()
        seen = batch.state.adjustments.seen.clone()
    for place in live:
        row, token = int(batch.rows[place]), int(tokens[place])
        expected, clear = batch.expected(place)
        assert status[place] == (2 if expected is None else 0), f"row {place}: {status[place]}"
        turned += expected not in (None, token)
        assert expected in (None, token) or not clear, (
            f"row {place} with {batch.state.numbers[row].tolist()} chose {token}, not {expected}"
        )
        last_tokens[row] = token
        if counts is not None and int(batch.state.adjustments.kinds[row]) & 4:
            counts[row, token] += 1
            seen[row, token] |= GENERATED
    assert torch.equal(ran.positions.cpu(), batch.positions + (batch.positions >= 0))
    assert torch.equal(ran.last_tokens.cpu()[:-1], last_tokens[:-1])
    if counts is not None:
        assert torch.equal(ran.state.adjustments.output_counts.cpu(), counts)
        assert torch.equal(ran.state.adjustments.seen.cpu(), seen)
        ids, sizes = ran.state.adjustments.seen_ids.cpu(), ran.state.adjustments.seen_sizes
        for row, size in enumerate(sizes.tolist()):
            assert torch.equal(ids[row, :size].long().sort()[0], seen[row].nonzero().squeeze(-1))
    return len(live), turned


def _sampling_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    def run(rows: int, vocab: int, adjusted: bool) -> float:
        batch = make_sampling(rows, vocab, dtype, seed=rows + vocab, adjusted=adjusted)
        compared, turned = check_sampling(batch, kernels.sample_tokens, device)
        return 0.0 if turned <= 0.01 * compared + 1 else torch.inf

    for rows, vocab in [(40, 151936), (64, 128256), (1, 32000), (300, 4099), (64, 7), (64, 1)]:
        for adjusted in (False, True):
            name = f"{rows}x{vocab}{' adjusted' * adjusted}"
            yield Case(
                "sample_tokens",
                name,
                dtype,
                lambda r=rows, v=vocab, a=adjusted: run(r, v, a),  # type: ignore[misc]
            )


DECODE_ROWS = [(1, 1), (1, 63), (1, 128), (1, 0), (1, 1000), (1, 4097)]
PREFILL_ROWS = [(1, 1), (63, 63), (128, 128), (5, 300), (130, 1029), (700, 4300)]


def _attention_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    def run(
        rows: list[tuple[int, int]], shape: dict[str, int], options: dict[str, object]
    ) -> float:
        paged = make_paged(rows, dtype=dtype, device=device, fused=True, **shape)  # type: ignore[arg-type]
        if "alibi_slopes" in options:
            # Small, or a prefix of thousands of tokens ahead makes logits float32 cannot resolve.
            slopes = 0.03 / torch.arange(1.0, paged.q.shape[1] + 1, device=device)
            options = options | {"alibi_slopes": slopes}
        if "prefix_lens" in options:
            lens = torch.tensor([kv_len // 2 for _, kv_len in rows], dtype=torch.int32)
            lens[-1] = rows[-1][1]
            options = options | {"prefix_lens": lens.to(device)}
        out = paged.poisoned_out()
        scale = paged.q.shape[2] ** -0.5
        kernels.paged_attention(
            paged.q,
            paged.k_cache,
            paged.v_cache,
            out=out,
            scale=scale,
            **paged.metadata(),
            **paged.sizes(),
            **options,  # type: ignore[arg-type]
        )
        expected = torch.full(out.shape, torch.nan, device=device)
        attention_reference.paged_attention(
            paged.q.float(),
            paged.k_cache,
            paged.v_cache,
            expected,
            scale=scale,
            **paged.metadata(),
            **options,  # type: ignore[arg-type]
        )
        return error(out, expected)

    shapes = [
        {"heads": 14, "kv_heads": 2, "head_dim": 64},
        {"heads": 4, "kv_heads": 4, "head_dim": 80},
        {"heads": 6, "kv_heads": 2, "head_dim": 96, "v_head_dim": 64},
        {"heads": 8, "kv_heads": 2, "head_dim": 128},
        {"heads": 4, "kv_heads": 1, "head_dim": 256},
        {"heads": 71, "kv_heads": 1, "head_dim": 64},
        {"heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 1},
        {"heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 5},
        {"heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 256},
    ]
    options: list[dict[str, object]] = [
        {"alibi_slopes": None},
        {"window": 1},
        {"window": 200},
        {"softcap": 20.0},
        {"prefix_lens": None},
        {"window": 200, "alibi_slopes": None, "prefix_lens": None},
    ]
    base = shapes[3]
    # What the kernel for Hopper takes; among them tiles and blocks that end early.
    own = [
        {"heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 64},
        {"heads": 14, "kv_heads": 2, "head_dim": 64, "block_size": 64},
        {"heads": 4, "kv_heads": 4, "head_dim": 128, "block_size": 16},
        {"heads": 24, "kv_heads": 1, "head_dim": 64, "block_size": 32},
        {"heads": 6, "kv_heads": 2, "head_dim": 64, "block_size": 128},
        {"heads": 8, "kv_heads": 1, "head_dim": 128, "block_size": 256},
    ]
    for kind, rows in [
        ("prefill", PREFILL_ROWS),
        ("prefill-one", [(1500, 1500)]),
        ("prefill-many", [(4, 0), *((1 + 7 * row, 40 + 17 * row) for row in range(40))]),
        ("mixed", DECODE_ROWS + PREFILL_ROWS[3:]),
    ]:
        for shape in own if dtype != torch.float32 else ():
            parts = [f"{key}{value}" for key, value in shape.items()]
            yield Case(
                "paged_attention",
                f"{kind}-own-{'-'.join(parts)}",
                dtype,
                lambda r=rows, s=shape | {"own_caches": True}: run(r, s, {}),  # type: ignore[misc]
            )
    for kind, rows in [
        ("decode", DECODE_ROWS),
        ("decode-one", [(1, 777)]),
        ("decode-many", [(1, 1 + 13 * row) for row in range(80)]),
        ("prefill", PREFILL_ROWS),
        ("mixed", DECODE_ROWS[:3] + PREFILL_ROWS[3:5]),
    ]:
        cut = [(shape, {}) for shape in shapes] + [(base, option) for option in options]
        for shape, option in cut if kind in ("decode", "prefill") else cut[3:4]:
            parts = [f"{key}{value}" for key, value in shape.items()] + [
                key if value is None else f"{key}{value}" for key, value in option.items()
            ]
            yield Case(
                "paged_attention",
                f"{kind}-{'-'.join(parts)}",
                dtype,
                lambda r=rows, s=shape, o=option: run(r, s, o),  # type: ignore[misc]
            )
