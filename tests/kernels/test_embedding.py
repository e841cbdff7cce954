"""Looking tokens up in the embedding's matrix, or in a rank's part of it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from engine_core.kernels import embed

# Sizes of a row; the last is that of several programs, not all of them full.
SIZES = [1, 8, 100, 2500]


def check(op: Any, device: str = "cpu") -> None:
    for size in SIZES:
        weight = torch.randn(7, size, device=device).to(torch.bfloat16)
        for dtype in (torch.int64, torch.int32):
            ids = torch.tensor([[6, 0, 3], [3, 3, 5]], dtype=dtype, device=device)
            for given in (ids, ids.t(), ids[0], ids[:, :0]):
                got = op(given, weight, None)
                assert got.shape == (*given.shape, size)
                assert torch.equal(got, weight[given.long()])


def check_part(op: Any, device: str = "cpu") -> None:
    """Ids of other ranks, near and far, give zeros, though numbers there would be none."""
    around = torch.full((9, 24), torch.nan, device=device)
    weight = around[3:6]
    weight.copy_(torch.randn(3, 24))
    far = 2**31 - 1
    ids = torch.tensor([9, 10, 12, 13, 0, far, -far], device=device)
    got = op(ids, weight, 10)
    assert torch.equal(got[1:3], weight[[0, 2]])
    assert not got[[0, 3, 4, 5, 6]].any()
    # The first rank's: others have ids behind its own alone.
    got = op(torch.tensor([0, 2, 3, far], device=device), weight, 0)
    assert torch.equal(got[:2], weight[[0, 2]])
    assert not got[2:].any()


def test_looks_up() -> None:
    check(embed)
    check_part(embed)


def test_kernel(launch_device: str) -> None:
    from engine_core.kernels.embedding import triton

    check(triton.embed, launch_device)
    check_part(triton.embed, launch_device)


def test_an_id_without_a_row_is_an_error() -> None:
    for wrong in (-1, 3):
        with pytest.raises(IndexError):
            embed(torch.tensor([0, wrong]), torch.zeros(3, 4))


def test_preconditions() -> None:
    ids, weight = torch.tensor([0, 2]), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"weight must be \[R, H\], contiguous, got \(4, 3\)"):
        embed(ids, weight.t())
    with pytest.raises(ValueError, match=r"weight must be \[R, H\], contiguous, got \(4,\)"):
        embed(ids, weight[0])
    with pytest.raises(ValueError, match=r"ids must be int64 or int32, got torch\.float32"):
        embed(ids.float(), weight)


def test_the_kernel_reads_nothing_beside_the_matrix(launch_device: str) -> None:
    """Also where nothing asserts."""
    from engine_core.kernels.embedding import triton

    if launch_device != "cpu":
        pytest.skip("an id without a row ends the use of a GPU")
    around = torch.full((5, 4), torch.nan)
    around[1:4] = 1.0
    got = triton.embed(torch.tensor([-1, 0, 3]), around[1:4], None)
    assert got.tolist() == [[0.0] * 4, [1.0] * 4, [0.0] * 4]


OUTSIDE = """
import sys
import torch
from engine_core.kernels import embed

weight, ids = torch.zeros(3, 896, device="cuda"), torch.tensor([0, int(sys.argv[1])], device="cuda")
embed(ids[:1], weight)
torch.cuda.synchronize()
print("there", flush=True)
embed(ids, weight)
torch.cuda.synchronize()
print("beyond", flush=True)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("wrong", ["-1", "3", "1000000000000"])
def test_a_gpu_asserts_that_an_id_has_a_row(wrong: str) -> None:
    """In a process of its own, whose GPU can then do nothing any more."""
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE, wrong], capture_output=True, text=True, check=False
    )
    assert done.stdout == "there\n"
    assert "device-side assert" in done.stderr
    assert "a token's id is not in the embedding" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_the_head_of_a_step_is_launched_early_and_right(rows: int) -> None:
    """Each kernel is launched while those before it still run, in a graph and without one."""
    from kernel_cases import check_replays

    from engine_core.kernels import choose_greedy, decode_inputs, rms_norm, rotary_angles

    draw = torch.Generator("cuda").manual_seed(rows)
    vocab, size, turns = 5000, 896, 6

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device="cuda", dtype=torch.bfloat16)

    weight, scale, head = numbers(vocab, size), numbers(size), numbers(vocab, size)
    numbered = torch.arange(rows, device="cuda")
    tables = [torch.arange(rows * 8, device="cuda", dtype=torch.int32).view(rows, 8)] * 2
    inv_freq = torch.rand(32, generator=draw, device="cuda")

    def run() -> list[torch.Tensor]:
        last = numbered * 11
        positions = numbered.clone()
        found = []
        for _ in range(turns):
            inputs = decode_inputs(numbered, positions, last, tables, [16, 16])
            x = embed(inputs.input_ids, weight)
            cos, sin = rotary_angles(inputs.position_ids, inv_freq, 1.0)
            normed = rms_norm(x, scale, 1e-6)
            logits = normed @ head.t()
            tokens, _ = choose_greedy(logits, rows=numbered, last_tokens=last, positions=positions)
            found += [inputs.input_ids, inputs.slot_mappings[1], x, cos, sin, normed, tokens]
        return found

    expected = run()
    torch.cuda.synchronize()
    last, positions = numbered * 11, numbered
    for begin in range(0, len(expected), 7):
        ids, slots, x, cos, _, normed, tokens = expected[begin : begin + 7]
        assert torch.equal(ids, last)
        assert torch.equal(
            slots, tables[1].gather(1, positions[:, None] // 16)[:, 0] * 16 + positions % 16
        )
        assert torch.equal(x, weight[ids])
        torch.testing.assert_close(cos, (positions[:, None] * inv_freq).cos())
        wanted = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        torch.testing.assert_close(normed, wanted.bfloat16() * scale, rtol=1.6e-2, atol=1.6e-2)
        last, positions = tokens, positions + 1
    check_replays(run, expected)
