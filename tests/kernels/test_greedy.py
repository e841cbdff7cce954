"""Greedy choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_core.kernels import choose_greedy

INF = float("inf")
NAN = float("nan")


def check(op: Any, device: str = "cpu") -> None:
    """Rows of known answers in a vocabulary of several blocks, and a view with gaps."""
    vocab = 9000
    logits = torch.randn(8, vocab + 3, device=device)[:, :vocab]
    expected = [0, vocab - 1, 4096, 5, 7, 0, 0, 0]
    for row, token in enumerate(expected[:5]):
        logits[row, token] = 50.0
    logits[3, 8000] = 50.0  # a tie across blocks: the first wins
    logits[4] = torch.where(logits[4] == 50.0, logits[4], -INF)
    logits[5, 8999], logits[6, 17], logits[7] = NAN, INF, -INF
    for _ in range(2):
        tokens, status = op(logits)
        assert tokens.dtype == torch.int64
        assert status.dtype == torch.int8
        assert tokens[:5].tolist() == expected[:5]
        assert status.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    narrow = torch.randn(3, 33, device=device, dtype=torch.float64).to(torch.bfloat16)
    tokens, _ = op(narrow)
    for row, token in enumerate(tokens.tolist()):
        values = narrow[row].tolist()
        assert token == values.index(max(values))


def test_chooses() -> None:
    check(choose_greedy)


def test_kernel(launch_device: str) -> None:
    from engine_core.kernels.greedy import triton

    check(triton.choose_greedy, launch_device)
    assert triton.choose_greedy(torch.empty(0, 5, device=launch_device))[0].shape == (0,)


def test_preconditions() -> None:
    with pytest.raises(ValueError, match=r"\(5,\)"):
        choose_greedy(torch.zeros(5))
    with pytest.raises(ValueError, match="V > 0"):
        choose_greedy(torch.zeros(2, 0))
    with pytest.raises(ValueError, match="stride 1"):
        choose_greedy(torch.zeros(4, 3).t())
