"""Gathering the inputs of a decode step on a GPU: one program per row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.decode_inputs.reference import Parts
from engine_core.kernels.launch.triton import launch_dependents, pdl_options, wait


@triton.jit(do_not_specialize=["num_turns"])
def _decode_inputs_kernel(
    input_ids_ptr,
    position_ids_ptr,
    kv_lens_ptr,
    block_tables_ptr,
    slots_ptr,
    rows_ptr,
    positions_ptr,
    last_tokens_ptr,
    table_ptr,
    turn_ptr,
    num_turns,
    MAX_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WRITES_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    # In a graph it is the first. Without one the kernel before may write the last tokens.
    wait(PDL)
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + place)
    position = tl.load(positions_ptr + place)
    clamped = tl.maximum(position, 0)
    table_ptr += row * MAX_BLOCKS
    if turn_ptr is not None:
        turn = tl.load(turn_ptr, mask=place == 0, other=0) + 1
        tl.store(turn_ptr, tl.where(turn < num_turns, turn, 0), mask=place == 0)
    if WRITES_TOKENS:
        tl.store(input_ids_ptr + place, tl.load(last_tokens_ptr + row))
        tl.store(position_ids_ptr + place, clamped)
        tl.store(kv_lens_ptr + place, tl.maximum(position + 1, 0).to(tl.int32))
    last_block = tl.load(table_ptr + clamped // BLOCK_SIZE).to(tl.int64)
    slot = last_block * BLOCK_SIZE + clamped % BLOCK_SIZE
    tl.store(slots_ptr + place, tl.where(position < 0, -1, slot))
    used = clamped // BLOCK_SIZE + 1
    for start in range(0, used, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        blocks = tl.load(table_ptr + columns, mask=columns < used)
        tl.store(block_tables_ptr + place * MAX_BLOCKS + columns, blocks, mask=columns < used)


def decode_inputs(
    rows: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    tables: Sequence[Tensor],
    block_sizes: Sequence[int],
    turn: Tensor | None = None,
    num_turns: int = 1,
) -> Parts:
    """The fields of ``DecodeInputs`` in their order."""
    count = rows.shape[0]
    input_ids = torch.empty_like(rows)
    position_ids = torch.empty_like(rows)
    kv_lens = torch.empty(count, dtype=torch.int32, device=rows.device)
    block_tables = tuple(table.new_empty(count, table.shape[1]) for table in tables)
    slot_mappings = tuple(torch.empty_like(rows) for _ in tables)
    for group, (table, block_size) in enumerate(zip(tables, block_sizes, strict=True)):
        if count:
            _decode_inputs_kernel[(count,)](
                input_ids,
                position_ids,
                kv_lens,
                block_tables[group],
                slot_mappings[group],
                rows,
                positions,
                last_tokens,
                table,
                turn if group == 0 else None,
                num_turns,
                MAX_BLOCKS=table.shape[1],
                BLOCK_SIZE=block_size,
                BLOCK=256,
                WRITES_TOKENS=group == 0,
                num_warps=4,
                **pdl_options(rows.device),
            )
    return input_ids, position_ids, kv_lens, block_tables, slot_mappings
