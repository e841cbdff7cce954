"""Latent attention: the reference against plain torch, the CPU path and the kernels against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kernel_cases import TOLERANCE, error
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine_core.kernels import latent_attention
from engine_core.kernels.latent_attention import LatentCall, cpu, reference

# (queries, tokens): decode rows, a row of padding, chunks at the beginning and after others.
ROWS = [(1, 5), (1, 33), (1, 0), (1, 1), (7, 7), (3, 21), (40, 70)]


@dataclass(frozen=True)
class Latents:
    """A batch whose unused slots and table entries are poisoned, and its latent vectors."""

    call: LatentCall
    rows: tuple[tuple[int, int], ...]
    dense: tuple[Tensor, ...]

    def run(self, **changes: Any) -> Tensor:
        """By the public function."""
        names = [name for name in LatentCall.__slots__ if name not in ("q", "cache", "up")]
        given = {name: getattr(self.call, name) for name in names} | {"memo": {}} | changes
        return latent_attention(self.call.q, self.call.cache, self.call.up, **given)

    def expected(self) -> Tensor:
        """Keys and values of each head, by torch, in float64."""
        up, q, rank, nope = self.call.up.double(), self.call.q, self.call.rank, self.call.nope_dim
        out, begin = [], 0
        for (count, length), held in zip(self.rows, self.dense, strict=True):
            mine = q[begin : begin + count].double().transpose(0, 1)
            begin += count
            if length == 0:
                out.append(torch.zeros(count, len(up), up.shape[1] - nope, dtype=torch.float64))
                continue
            made = held[:, :rank].double() @ up.transpose(1, 2)
            rope = held[:, rank:].double().expand(len(up), -1, -1)
            seen = torch.ones(count, length, dtype=torch.bool, device=q.device)
            attended = scaled_dot_product_attention(
                mine,
                torch.cat((made[..., :nope], rope), -1),
                made[..., nope:],
                attn_mask=seen.tril(length - count),
                scale=self.call.scale,
            )
            out.append(attended.transpose(0, 1).cpu())
        return torch.cat(out)


def make(
    rows: Sequence[tuple[int, int]] = ROWS,
    *,
    heads: int = 4,
    rank: int = 32,
    nope: int = 24,
    rope: int = 16,
    v: int = 20,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Latents:
    """Blocks in random order, in a cache whose blocks are part of larger ones."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    counts = [-(-length // block_size) for _, length in rows]
    num_blocks = sum(counts) + 2
    blocks = torch.randperm(num_blocks, generator=generator, device=device)
    wide = torch.full((num_blocks, 2, block_size, rank + rope), torch.nan, device=device)
    cache = wide.to(dtype)[:, 0]
    tables = torch.full((len(rows), max(counts) + 1), -1, dtype=torch.int32, device=device)
    dense = []
    for row, (_, length) in enumerate(rows):
        own, blocks = blocks[: counts[row]], blocks[counts[row] :]
        tables[row, : counts[row]] = own.int()
        held = randn(length, rank + rope)
        j = torch.arange(length, device=device)
        cache[own[j // block_size], j % block_size] = held
        dense.append(held)
    decoding = 0
    while decoding < len(rows) and rows[decoding][0] == 1:
        decoding += 1
    call = LatentCall(
        q=randn(sum(n for n, _ in rows), heads, nope + rope),
        cache=cache,
        up=randn(heads, nope + v, rank) / rank**0.5,
        block_tables=tables,
        query_start=torch.tensor([0, *(n for n, _ in rows)], device=device).cumsum(0).int(),
        kv_lens=torch.tensor([n for _, n in rows], dtype=torch.int32, device=device),
        max_query_len=max(n for n, _ in rows),
        max_kv_len=max(n for _, n in rows),
        num_decode_rows=decoding,
        scale=(nope + rope) ** -0.5,
    )
    return Latents(call, tuple(rows), tuple(dense))


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_reference_and_cpu_match_plain_torch(block_size: int) -> None:
    latents = make(block_size=block_size)
    expected = latents.expected()
    assert error(reference.latent_attention(latents.call), expected) < 1e-6
    assert error(latents.run(), expected) < 2e-6


@pytest.mark.usefixtures("cpu_path")
def test_decode_rows_alone_match_plain_torch() -> None:
    latents = make([(1, 90), (1, 1), (1, 33)])
    assert error(latents.run(), latents.expected()) < 2e-6
    assert latents.run().is_contiguous()


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cpu_in_low_precision(dtype: torch.dtype) -> None:
    latents = make(dtype=dtype)
    assert error(latents.run(), latents.expected()) < 2 * TOLERANCE[dtype]


def test_chunks_are_expanded_where_that_takes_fewer_products() -> None:
    def counted(call: LatentCall, count: int, length: int, expanded: bool) -> int:
        rank, dims = call.rank, call.up.shape[1]
        rope = call.cache.shape[2] - rank
        pairs = sum(range(length - count + 1, length + 1))
        if expanded:
            return pairs * (dims + rope) + length * rank * dims
        return pairs * (2 * rank + rope) + count * rank * dims

    # The sizes of DeepSeek-V3.
    call = make([(1, 1)], heads=1, rank=512, nope=128, rope=64, v=128).call
    for count, length in [
        (1, 1),
        (1, 2),
        (2, 2),
        (1, 4000),
        (170, 4000),
        (171, 4000),
        (4000, 4000),
    ]:
        cheaper = counted(call, count, length, True) < counted(call, count, length, False)
        assert call.expands(count, length) == cheaper
    assert not call.expands(160, 4000)
    assert call.expands(175, 4000)


@pytest.mark.parametrize("expands", [False, True])
def test_chunks_are_the_same_expanded_or_not(
    expands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatentCall, "expands", lambda *_: expands)
    latents = make()
    assert error(cpu.latent_attention(latents.call), latents.expected()) < 2e-6


def test_chunks_equal_the_whole() -> None:
    latents = make([(60, 60)])
    whole = latents.run()
    for begin, end in [(0, 1), (1, 35), (35, 60)]:
        part = replace(
            latents.call,
            q=latents.call.q[begin:end],
            query_start=torch.tensor([0, end - begin], dtype=torch.int32),
            kv_lens=torch.tensor([end], dtype=torch.int32),
        )
        assert error(cpu.latent_attention(part), whole[begin:end]) < 2e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, 40)}, r"q must be \[T, H, nope \+ rope\]"),
        ({"q": torch.zeros(2, 4, 8)}, r"q must be \[T, H, nope \+ rope\]"),
        ({"q": torch.zeros(2, 4, 40).half()}, "one dtype"),
        ({"q": torch.zeros(2, 40, 4).transpose(1, 2)}, "stride 1"),
        ({"cache": torch.zeros(3, 4, 31)}, "rank"),
        ({"kv_lens": torch.zeros(3, dtype=torch.int32)}, "kv_lens has 3 rows"),
        ({"kv_lens": torch.zeros(2, dtype=torch.int64)}, "both must be int32"),
        ({"num_decode_rows": 3}, "3 decode rows of 2 rows"),
    ],
)
def test_preconditions(change: dict[str, Any], message: str) -> None:
    call = replace(make([(1, 3), (1, 9)]).call, **change)
    given = {name: getattr(call, name) for name in LatentCall.__slots__}
    with pytest.raises(ValueError, match=message):
        latent_attention(**given)


def launch(latents: Latents, **changes: Any) -> Tensor:
    from engine_core.kernels.latent_attention import triton

    return triton.latent_attention(replace(latents.call, memo={}, **changes))


# Decode rows of one split and of several, a padding row, and chunks that fill a tile or do not.
KERNEL_ROWS = [(1, 1), (1, 33), (1, 0), (1, 150), (20, 20), (3, 130), (2, 0)]


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"block_size": 64, "heads": 5},
        {"block_size": 7, "rank": 40, "rope": 6, "heads": 3},
        {"heads": 20, "rank": 64, "dtype": torch.bfloat16, "block_size": 32},
        {"rank": 64, "dtype": torch.float16},
    ],
    ids=str,
)
def test_kernel_matches_plain_torch(shape: dict[str, Any], launch_device: str) -> None:
    latents = make(KERNEL_ROWS, device=launch_device, **shape)
    dtype = latents.call.q.dtype
    bound = 1e-5 if dtype == torch.float32 else 2 * TOLERANCE[dtype]
    assert error(launch(latents).cpu(), latents.expected()) < bound


def test_kernel_merges_splits_and_leaves_the_counts_as_they_were(launch_device: str) -> None:
    rows = [(1, 20)] * 5 + [(1, 900)] + [(1, 65)] * 3
    latents = make(rows, device=launch_device)
    for max_kv_len in (900, 4096):
        got = launch(latents, max_kv_len=max_kv_len)
        assert error(got.cpu(), latents.expected()) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_step_of_deepseeks_sizes(heads: int, dtype: torch.dtype) -> None:
    """A replay has other lengths than the step that was captured."""
    sizes = {"rank": 512, "nope": 128, "rope": 64, "v": 128, "block_size": 64, "heads": heads}
    latents = make([(1, 3000), (1, 70), (1, 0), (65, 300)], dtype=dtype, device="cuda", **sizes)
    lens = latents.call.kv_lens.clone()
    latents.call.kv_lens.copy_(torch.tensor([1, 1, 0, 65]))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        latents.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = latents.run()
    latents.call.kv_lens.copy_(lens)
    graph.replay()
    assert error(captured.cpu(), latents.expected()) < 4 * TOLERANCE[dtype]
