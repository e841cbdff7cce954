"""Sums over ranks on gloo: bit for bit those of plain additions in the order of the ranks."""

from __future__ import annotations

import logging
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spawned import DTYPES, SHAPES, add_up, terms
from torch import Tensor

from engine_core.kernels import GPU, RankMemory, rms_norm
from engine_core.nn import LayerNorm, RMSNorm, build_o_proj, distributed
from engine_core.nn.distributed import rehearsing
from engine_core.nn.epilogue import AddNorm, Call
from engine_core.nn.linear import Linear
from engine_core.runtime.capture import Agreement
from engine_core.runtime.rank_memory import share_memory
from engine_core.step_context import BuildContext, building


@pytest.mark.parametrize("size", [2, 4])
def test_sums_are_those_in_the_order_of_the_ranks(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=add_up, args=(i, size, str(tmp_path))) for i in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
    every = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for shape in SHAPES:
        for dtype in DTYPES:
            expected = torch.zeros(shape)
            for rank in range(size):
                expected = expected + terms(rank, shape, dtype).float()
            for sums in every:
                assert sums[shape, dtype].dtype == dtype
                assert torch.equal(sums[shape, dtype], expected.to(dtype)), (shape, dtype)


H200 = GPU.of_capability((9, 0))
MEMORY = RankMemory(0, 2, torch.zeros(2, dtype=torch.int64), torch.zeros(64).int(), 8 << 20)


def projection(memory: RankMemory | None = MEMORY, **options: Any) -> Linear:
    """A linear of 512 outputs, whose 256 inputs two ranks share, with a bias."""
    context = BuildContext(torch.float32, tp_size=2, rank_memory=memory, **options)
    with building(context):
        linear = build_o_proj(256, 512, bias=True)
    for param in linear.parameters():
        torch.nn.init.normal_(param, std=0.1)
    return linear


def test_a_linear_over_ranks_fuses_what_follows_where_their_memory_has_kernels() -> None:
    norm = AddNorm(RMSNorm(512))

    def declined(linear: Linear, add: AddNorm = norm, rows: int = 1, gpu: GPU | None = H200) -> str:
        return linear.declined(add, Call(rows, torch.bfloat16, gpu)) or ""

    assert declined(projection()) == declined(projection(), rows=4096) == ""
    small = RankMemory(0, 2, MEMORY.addresses, MEMORY.epochs, 1 << 17)
    assert "rows of this size" in declined(projection(small))
    assert "comes before" in declined(projection(None))
    assert "comes before" in declined(projection(), gpu=None)
    assert "batch-invariant" in declined(projection(deterministic=True))
    assert "sums of squares" in declined(projection(), AddNorm(RMSNorm(512), deferred=True))
    assert "norm of its own" in declined(projection(), AddNorm(RMSNorm(512), RMSNorm(512)))
    assert "LayerNorm" in declined(projection(), AddNorm(LayerNorm(512)))


def test_the_fused_form_is_what_the_plain_one_composes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank's term is the same, and the kernel its reference."""
    linear, add = projection(), AddNorm(RMSNorm(512, offset=1.0))
    torch.nn.init.normal_(add.norm.weight)
    x, residual = torch.randn(1, 3, 128), torch.randn(1, 3, 512)
    calls = []

    def fused(
        x: Tensor,
        memory: RankMemory,
        bias: Tensor | None,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        offset: float,
    ) -> tuple[Tensor, Tensor]:
        calls.append(memory)
        whole = 2 * x if bias is None else 2 * x + bias
        return rms_norm(whole, weight, eps, residual=residual, offset=offset)

    monkeypatch.setattr(distributed, "rank_sum_add_norm", fused)
    monkeypatch.setattr("engine_core.nn.linear.all_reduce", lambda x, _: 2 * x)
    with torch.inference_mode():
        expected = linear(x, add, residual, False)
        assert calls == []
        monkeypatch.setattr(Call, "of", lambda _: Call(3, torch.float32, H200))
        got = linear(x, add, residual, False)
        assert calls == [MEMORY]
        with rehearsing():
            rehearsed = linear(x, add, residual, False)
    assert calls == [MEMORY]
    assert [part.shape for part in rehearsed] == [part.shape for part in expected]
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


class Told(Agreement):
    """The first of two ranks, which is told the other's words."""

    def __init__(self, *words: Any) -> None:
        super().__init__()
        self.size, self.words = 2, list(words)

    def gather(self, mine: Any) -> list[Any]:
        return [mine, self.words.pop(0)]


def without_atomics(driver: str) -> Any:
    """NVIDIA's driver, of two GPUs whose link carries reads and writes alone."""
    assert driver == "libcuda.so.1"

    def ask(answer: Any, attribute: int, own: int, other: int) -> int:
        assert (attribute, own, other) == (3, 0, 1)
        answer._obj.value = 0
        return 0

    return SimpleNamespace(cuDeviceGetP2PAttribute=ask)


@pytest.mark.parametrize(
    ("words", "reads", "why"),
    [
        (
            [("RuntimeError: triton is not installed", False)],
            False,
            "rank 1: RuntimeError: triton is not",
        ),
        (
            [None, ("elsewhere", "GPU-b"), None],
            False,
            "rank 0: RuntimeError: rank 1 is on another machine",
        ),
        ([None, ("here", "GPU-a"), None], False, "rank 0: RuntimeError: rank 1 is on the same GPU"),
        ([None, ("here", "GPU-c"), None], True, "the GPU of rank 1 is not visible to this process"),
        ([None, ("here", "GPU-b"), None], False, "its GPU cannot read that of rank 1"),
        (
            [None, ("here", "GPU-b"), None],
            True,
            "its link to the GPU of rank 1 carries no atomic operations",
        ),
    ],
)
def test_without_memory_of_all_ranks_a_line_says_why(
    words: list[Any],
    reads: bool,
    why: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr("engine_core.runtime.rank_memory._place", lambda _: ("here", "GPU-a"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    uuids = [SimpleNamespace(uuid="GPU-a"), SimpleNamespace(uuid="GPU-b")]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: uuids[number])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: reads)
    monkeypatch.setattr("ctypes.CDLL", without_atomics)
    with caplog.at_level(logging.INFO):
        assert share_memory(Told(*words), None, torch.device("cuda", 0)) is None
    (record,) = caplog.records
    assert record.getMessage().startswith("sums over ranks go by NCCL: ")
    assert why in record.getMessage()
