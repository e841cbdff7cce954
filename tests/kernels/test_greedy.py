"""Greedy choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_core.kernels import Turns, choose_greedy

INF = float("inf")
NAN = float("nan")


def check(op: Any, device: str = "cpu") -> None:
    """Rows of known answers in a vocabulary of several blocks, and a view with gaps."""
    vocab = 9000
    logits = torch.randn(8, vocab + 3, device=device)[:, :vocab]
    expected = [0, vocab - 1, 4096, 5, 7, 0, 0, 0]
    for row, token in enumerate(expected[:5]):
        logits[row, token] = 50.0
    logits[3, 8000] = logits[3, 4101] = 50.0  # ties across blocks: the first wins
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


def check_state(op: Any, device: str = "cpu") -> None:
    """Rows 3 and 0 decode, the other two are padding, all in row 5."""
    logits = torch.randn(4, 9000, device=device).to(torch.float16)
    logits[0, 7], logits[1, 8999] = 60.0, 60.0
    last_tokens = torch.arange(100, 106, device=device)
    positions = torch.tensor([4, 0, -1, -1], device=device)
    rows = torch.tensor([3, 0, 5, 5], device=device)
    tokens, _ = op(logits, rows=rows, last_tokens=last_tokens, positions=positions)
    assert tokens[:2].tolist() == [7, 8999]
    assert last_tokens[:5].tolist() == [8999, 101, 102, 7, 104]
    assert positions.tolist() == [5, 1, -1, -1]


def check_turns(op: Any, device: str = "cpu") -> None:
    """Each turn's choice is at its place, in views with gaps, and the others stay."""
    tokens = torch.full((4, 5), -7, device=device)[:, :2]
    status = torch.full((4, 8), -7, dtype=torch.int8, device=device)[:, :2]
    turn = torch.zeros(1, dtype=torch.int64, device=device)
    expected_tokens, expected_status = tokens.cpu().clone(), status.cpu().clone()
    for number in (2, 0, 3, 2):
        turn.fill_(number)
        logits = torch.zeros(2, 9000, device=device)
        logits[0, 10 * number], logits[1, 8000 + number] = 1.0, INF if number == 3 else 2.0
        given = op(logits, turns=Turns(tokens, status, turn))
        expected_tokens[number] = torch.tensor([10 * number, 8000 + number])
        expected_status[number] = torch.tensor([0, number == 3])
        for got, stored, expected in zip(
            given, (tokens, status), (expected_tokens, expected_status), strict=True
        ):
            assert torch.equal(got, stored)
            assert torch.equal(got.cpu(), expected)
    op(torch.eye(2, 9000, device=device), turns=Turns(tokens, status, None))
    assert tokens[:3].tolist() == [[0, 1], [-7, -7], [20, 8002]]


def test_chooses() -> None:
    check(choose_greedy)
    check_state(choose_greedy)
    check_turns(choose_greedy)


def test_kernel(launch_device: str) -> None:
    from engine_core.kernels.greedy import triton

    check(triton.choose_greedy, launch_device)
    check_state(triton.choose_greedy, launch_device)
    check_turns(triton.choose_greedy, launch_device)
    assert triton.choose_greedy(torch.empty(0, 5, device=launch_device))[0].shape == (0,)


@pytest.mark.parametrize("programs", [1, 2, 100])
def test_kernel_of_many_rows(
    programs: int, launch_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose programs have all blocks of a row, every second of them, or one."""
    from engine_core.kernels.greedy import triton

    monkeypatch.setattr(triton, "_MANY_ROWS", 2)
    monkeypatch.setattr(triton, "_PROGRAMS_OF_MANY", programs)
    monkeypatch.setattr(triton, "num_multiprocessors", lambda device: 8)
    check(triton.choose_greedy, launch_device)
    check_state(triton.choose_greedy, launch_device)


def test_kernel_of_more_rows_than_are_counted_at_first(
    launch_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine_core.kernels.greedy import triton
    from engine_core.kernels.launch import triton as launch

    monkeypatch.setattr(launch, "_LEAST_ARRIVALS", 32)
    expected = torch.arange(70) % 3
    logits = torch.nn.functional.one_hot(expected, 3).float().to(launch_device)
    assert triton.choose_greedy(logits)[0].tolist() == expected.tolist()


def test_preconditions() -> None:
    with pytest.raises(ValueError, match=r"\(5,\)"):
        choose_greedy(torch.zeros(5))
    with pytest.raises(ValueError, match="V > 0"):
        choose_greedy(torch.zeros(2, 0))
    rows = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="1 of the three"):
        choose_greedy(torch.zeros(4, 3), rows=rows)
    with pytest.raises(ValueError, match=r"\[3\]"):
        choose_greedy(torch.zeros(3, 3), rows=rows, last_tokens=rows, positions=rows)
    with pytest.raises(ValueError, match="stride 1"):
        choose_greedy(torch.zeros(4, 3).t())
    tokens, status = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"tokens of turns must be \(3, 5\)"):
        choose_greedy(torch.zeros(5, 3), turns=Turns(tokens, status, None))
    with pytest.raises(ValueError, match=r"status of turns must be .* torch.int8"):
        choose_greedy(torch.zeros(4, 3), turns=Turns(tokens, tokens, None))
    with pytest.raises(ValueError, match=r"tokens of turns must be .* strides \(1, 3\)"):
        choose_greedy(torch.zeros(4, 3), turns=Turns(tokens.view(4, 3).t(), status, None))
    with pytest.raises(ValueError, match=r"turn must be \[1\] int64, got \(3, 4\) torch.int8"):
        choose_greedy(torch.zeros(4, 3), turns=Turns(tokens, status, status))
