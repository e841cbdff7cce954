"""The inputs of a decode step, gathered from the persistent batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_core.kernels import DecodeInputs, decode_inputs


def check(op: Any, device: str = "cpu") -> None:
    """Two cache groups of different block sizes; the third row is padding."""
    generator = torch.Generator().manual_seed(1)
    tables = [
        torch.randint(1, 1000, (6, width), generator=generator, dtype=torch.int32)
        for width in (300, 900)
    ]
    sizes = [4, 1]
    rows, positions = [4, 0, 5, 2], [17, 0, -1, 899]
    last = torch.tensor([10, 11, 12, 13, 14, 15])
    got = op(
        torch.tensor(rows, device=device),
        torch.tensor(positions, device=device),
        last.to(device),
        [table.to(device) for table in tables],
        sizes,
    )
    assert got.input_ids.tolist() == [14, 10, 15, 12]
    assert got.position_ids.tolist() == [17, 0, 0, 899]
    assert got.kv_lens.tolist() == [18, 1, 0, 900]
    assert got.kv_lens.dtype == torch.int32
    for group, (table, size) in enumerate(zip(tables, sizes, strict=True)):
        blocks, slots = got.block_tables[group].cpu(), got.slot_mappings[group].tolist()
        assert blocks.shape == (4, table.shape[1])
        for place, (row, position) in enumerate(zip(rows, positions, strict=True)):
            if position < 0:
                assert slots[place] == -1
                continue
            used = position // size + 1
            assert torch.equal(blocks[place, :used], table[row, :used])
            assert slots[place] == int(table[row, position // size]) * size + position % size


def check_turn(op: Any, device: str = "cpu") -> None:
    """It is counted once, however many rows and cache groups there are."""
    rows = torch.tensor([2, 0, 2], device=device)
    tables = [torch.zeros(3, 4, dtype=torch.int32, device=device)] * 2
    for last, seen in ((3, [0, 1, 2, 0, 1]), (1, [0, 0])):
        turn = torch.tensor([-1], device=device)
        for expected in seen:
            op(rows, rows - 1, rows, tables, [1, 4], turn=turn, num_turns=last)
            assert turn.tolist() == [expected]
        op(rows[:0], rows[:0], rows, tables, [1, 4], turn=turn, num_turns=last)
        assert turn.tolist() == seen[-1:]


def test_gathers() -> None:
    check(decode_inputs)
    check_turn(decode_inputs)


def test_kernel(launch_device: str) -> None:
    from engine_core.kernels.decode_inputs import triton

    check(lambda *given: DecodeInputs(*triton.decode_inputs(*given)), launch_device)
    check_turn(triton.decode_inputs, launch_device)


def test_preconditions() -> None:
    rows, table = torch.zeros(2, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        decode_inputs(rows, torch.zeros(3, dtype=torch.int64), rows, [table], [4])
    with pytest.raises(ValueError, match="int64"):
        decode_inputs(rows, rows, rows.int(), [table], [4])
    with pytest.raises(ValueError, match="1 tables and 2"):
        decode_inputs(rows, rows, rows, [table], [4, 4])
    with pytest.raises(ValueError, match="contiguous"):
        decode_inputs(rows, rows, rows, [table.t()], [4])
    with pytest.raises(ValueError, match=r"turn must be \[1\] int64, got \(2,\)"):
        decode_inputs(rows, rows, rows, [table], [4], turn=rows)
    with pytest.raises(ValueError, match="num_turns must be at least 1, got 0"):
        decode_inputs(rows, rows, rows, [table], [4], turn=rows[:1], num_turns=0)
