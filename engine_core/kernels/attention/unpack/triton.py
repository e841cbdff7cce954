"""Keys and values of a step's rows as numbers, on a GPU: a small cache of their own.

Long prompts are products more than bytes, and Hopper's products read numbers from shared memory. So
the codes that a step's rows see are made numbers first, once a layer: a token is read and written
once, and multiplied by all queries of its row. A captured step does not know its rows' lengths, and
room for rows as long as any may be is more than there is: which rows there was room for is found
out on the device.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.attention.call import Call
from engine_core.kernels.codes.triton import high_codes, low_codes
from engine_core.kernels.launch.triton import (
    launch_dependents,
    num_multiprocessors,
    pdl_options,
    wait,
)

# Programs of a multiprocessor.
_PROGRAMS = 8
# Rows that a program looks at together, at least: steps of fewer share a compiled kernel.
_LEAST_ROWS = 64


@triton.jit
def _unpack(
    numbers_ptr,
    cache_ptr,
    strides,
    scales_ptr,
    scales_strides,
    block,
    head,
    target,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CODE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One head of a block."""
    HALF: tl.constexpr = BLOCK_D // 2
    slots = tl.arange(0, BLOCK_SIZE)
    pair = tl.arange(0, HALF)
    rows = cache_ptr + block * strides[0] + head * strides[2] + slots * strides[1]
    pairs = tl.load(rows[:, None] + pair[None, :], mask=(2 * pair < D)[None, :], other=0)
    scales = tl.load(scales_ptr + block * scales_strides[0] + head * scales_strides[1] + slots)
    low = low_codes(pairs, CODE, NATIVE).to(tl.float32) * scales[:, None]
    high = high_codes(pairs, CODE, NATIVE).to(tl.float32) * scales[:, None]
    numbers = tl.reshape(tl.join(low, high), [BLOCK_SIZE, BLOCK_D])
    dims = tl.arange(0, BLOCK_D)
    rows = numbers_ptr + (target * BLOCK_SIZE + slots) * (HEADS * D) + head * D
    tl.store(
        rows[:, None] + dims[None, :],
        numbers.to(numbers_ptr.dtype.element_ty),
        mask=(dims < D)[None, :],
    )


@triton.jit(do_not_specialize=["room", "first_row", "num_rows", "table_stride", "new_stride"])
def _unpack_kernel(
    k_ptr,
    v_ptr,
    new_tables_ptr,
    new_lens_ptr,
    num_fitting_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    tables_ptr,
    kv_lens_ptr,
    k_strides,
    v_strides,
    k_scales_strides,
    v_scales_strides,
    room,
    first_row,
    num_rows,
    table_stride,
    new_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CODE: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Blocks of the rows from ``first_row`` on, one after another, each by heads.

    They become blocks 0, 1, ... of ``k`` and ``v``, and the new tables say so, up to the last row
    that ends within ``room`` blocks. Rows behind it have a new length of 0.
    """
    launch_dependents(PDL)
    rows = tl.arange(0, BLOCK_ROWS)
    wait(PDL)
    mask = rows < num_rows
    lengths = tl.load(kv_lens_ptr + first_row + rows, mask=mask, other=0)
    ends = tl.cumsum(tl.cdiv(lengths, BLOCK_SIZE))
    fits = ends <= room
    items = tl.max(tl.where(fits, ends, 0)) * HEADS
    if tl.program_id(0) == 0:
        tl.store(new_lens_ptr + first_row + rows, tl.where(fits, lengths, 0), mask=mask)
        tl.store(num_fitting_ptr, tl.sum((fits & mask).to(tl.int32)))
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        target = item // HEADS
        head = item % HEADS
        before = ends <= target
        row = first_row + tl.sum(before.to(tl.int32))
        place = target - tl.max(tl.where(before, ends, 0))
        block = tl.load(tables_ptr + row.to(tl.int64) * table_stride + place).to(tl.int64)
        _unpack(
            k_ptr, k_cache_ptr, k_strides, k_scales_ptr, k_scales_strides, block, head, target,
            BLOCK_SIZE, HEADS, DK, BLOCK_DK, CODE, NATIVE,
        )  # fmt: skip
        _unpack(
            v_ptr, v_cache_ptr, v_strides, v_scales_ptr, v_scales_strides, block, head, target,
            BLOCK_SIZE, HEADS, DV, BLOCK_DV, CODE, NATIVE,
        )  # fmt: skip
        if head == 0:
            tl.store(new_tables_ptr + row.to(tl.int64) * new_stride + place, target)


def unpacked(call: Call, most_bytes: int) -> tuple[Call, Tensor | None]:
    """The call with numbers in place of codes, for its rows but the first ``num_decode_rows``.

    Numbers are a code times its scale, computed in float32 and rounded to the queries' dtype. Heads
    have an even number of dimensions, blocks a power of 2 of slots, and ``most_bytes`` are less
    than 2**32. Slots beyond a row's length hold anything.

    Returns:
        The call, whose numbers take ``most_bytes`` at most, or one block; and ``[1]`` int32, how
        many of the rows have numbers. Rows behind these have a length of 0. None if there is room
        for all rows, however long they are.
    """
    assert call.k_scales is not None, "the call has codes"
    assert call.v_scales is not None, "the call has codes"
    width = call.block_tables.shape[1]
    num_rows = len(call.kv_lens) - call.num_decode_rows
    block_size, heads, head_dim = call.k_cache.shape[1:]
    v_head_dim, device = call.v_cache.shape[3], call.q.device
    block_bytes = block_size * heads * (head_dim + v_head_dim) * call.q.element_size()
    room = min(num_rows * width, max(1, most_bytes // block_bytes))
    k, v = (
        torch.empty((room, block_size, heads, dims), dtype=call.q.dtype, device=device)
        for dims in (head_dim, v_head_dim)
    )
    tables = torch.empty_like(call.block_tables, memory_format=torch.contiguous_format)
    kv_lens = torch.empty_like(call.kv_lens, memory_format=torch.contiguous_format)
    num_fitting = torch.empty(1, dtype=torch.int32, device=device)
    k_cache, v_cache = call.k_cache.view(torch.int16), call.v_cache.view(torch.int16)
    _unpack_kernel[(min(num_multiprocessors(device) * _PROGRAMS, room * heads),)](
        k,
        v,
        tables,
        kv_lens,
        num_fitting,
        k_cache,
        v_cache,
        call.k_scales,
        call.v_scales,
        call.block_tables,
        call.kv_lens,
        k_cache.stride()[:3],
        v_cache.stride()[:3],
        call.k_scales.stride()[:2],
        call.v_scales.stride()[:2],
        room,
        call.num_decode_rows,
        num_rows,
        call.block_tables.stride(0),
        tables.stride(0),
        BLOCK_ROWS=max(_LEAST_ROWS, triton.next_power_of_2(num_rows)),
        BLOCK_SIZE=block_size,
        HEADS=heads,
        DK=head_dim,
        DV=v_head_dim,
        BLOCK_DK=triton.next_power_of_2(head_dim),
        BLOCK_DV=triton.next_power_of_2(v_head_dim),
        CODE="int8" if call.k_cache.dtype == torch.int8 else "e4m3",
        NATIVE=call.q.is_cuda,
        num_warps=4,
        **pdl_options(device),
    )
    made = replace(
        call,
        k_cache=k,
        v_cache=v,
        k_scales=None,
        v_scales=None,
        block_tables=tables,
        kv_lens=kv_lens,
        memo={},
    )
    return made, num_fitting if room < num_rows * width else None
