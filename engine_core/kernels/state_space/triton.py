"""The convolution and the scan on a GPU.

Three kernels: the convolution of any rows, one token of rows that decode, and the tokens of chunks.
No grid depends on numbers that only the device knows. A program of the last goes through a chunk of
one row in pieces, with some numbers of one head, and keeps their state in registers. Pieces begin
at multiples of their length, wherever a chunk begins.

Of a row's two states nobody writes the one that is read. One program writes a length while others
may still compare ``lengths[block, 0]`` with the row's start: if that is of the state which is read
it stays, and if it is not, neither the old nor the new length is the start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from engine_core.kernels.state_space import StateCache, StateRows, StateSpaceWeights


@triton.jit
def _row_of(row, starts_ptr, kv_lens_ptr):
    """A row's first token, its number of tokens, and its length with them; 0 for padding."""
    begin = tl.load(starts_ptr + row)
    length = tl.load(kv_lens_ptr + row)
    count = tl.load(starts_ptr + row + 1) - begin
    return begin, tl.where(length > 0, count, 0), length


@triton.jit
def _source_of(table_ptr, lengths_ptr, lengths_stride, start, BLOCK_SIZE: tl.constexpr):
    """The block with the state after ``start`` tokens, and which of its states that is."""
    block = tl.load(table_ptr + (tl.maximum(start, 1) - 1) // BLOCK_SIZE).to(tl.int64)
    other = tl.load(lengths_ptr + block * lengths_stride) != start
    return block, tl.where(start > 0, other.to(tl.int32), 0)


@triton.jit
def _target_of(start, position, place, BLOCK_SIZE: tl.constexpr):
    """Which of its block's states becomes that after ``position``."""
    source = tl.where(start > 0, (tl.maximum(start, 1) - 1) // BLOCK_SIZE, -1)
    return tl.where(position // BLOCK_SIZE == source, 1 - place, 0)


@triton.jit
def _step_of(dt, bias, DT_MIN: tl.constexpr, DT_MAX: tl.constexpr):
    dt = dt.to(tl.float32) + bias
    dt = tl.where(dt > 20.0, dt, tl.log(1.0 + tl.exp(tl.minimum(dt, 20.0))))
    return tl.minimum(tl.maximum(dt, DT_MIN), DT_MAX)


@triton.jit(do_not_specialize=["first_row"])
def _conv_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    inputs_ptr,
    lengths_ptr,
    starts_ptr,
    kv_lens_ptr,
    tables_ptr,
    first_row,
    x_stride,
    inputs_stride,
    lengths_stride,
    table_stride,
    channels,
    TAPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """BLOCK_T tokens of a row by BLOCK_C channels; TAPS inputs before a token count."""
    row = first_row + tl.program_id(0)
    begin, count, length = _row_of(row, starts_ptr, kv_lens_ptr)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = cols < channels
    if tl.program_id(1) * BLOCK_T < count:
        start = length - count
        table_ptr = tables_ptr + row.to(tl.int64) * table_stride
        block, place = _source_of(table_ptr, lengths_ptr, lengths_stride, start, BLOCK_SIZE)
        old_ptr = inputs_ptr + block * inputs_stride + place * TAPS * channels
        # The state after the last token, and those at the ends of blocks, are kept.
        positions = start + tokens
        ends = (tokens < count) & ((tokens == count - 1) | ((positions + 1) % BLOCK_SIZE == 0))
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=ends, other=0).to(tl.int64)
        targets = _target_of(start, positions, place, BLOCK_SIZE)
        kept_ptr = inputs_ptr + blocks * inputs_stride + targets * TAPS * channels
        mixed = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
        for tap in tl.static_range(TAPS + 1):
            at = tokens - (TAPS - tap)
            new = ((at >= 0) & (at < count))[:, None] & there[None, :]
            old = ((at < 0) & (at >= -start))[:, None] & there[None, :]
            x_rows = (begin + at).to(tl.int64) * x_stride
            x = tl.load(x_ptr + x_rows[:, None] + cols[None, :], mask=new, other=0.0)
            before = old_ptr + ((TAPS + at) * channels)[:, None] + cols[None, :]
            x += tl.load(before, mask=old, other=0.0)
            weight = tl.load(weight_ptr + cols * (TAPS + 1) + tap, mask=there, other=0.0)
            mixed += x.to(tl.float32) * weight.to(tl.float32)[None, :]
            if tap > 0:
                kept = kept_ptr[:, None] + (tap - 1) * channels + cols[None, :]
                tl.store(kept, x, mask=ends[:, None] & there[None, :])
        if bias_ptr is not None:
            mixed += tl.load(bias_ptr + cols, mask=there, other=0.0).to(tl.float32)[None, :]
        mixed = mixed / (1.0 + tl.exp(-mixed))
        rows = (begin + tokens).to(tl.int64) * channels
        tl.store(
            out_ptr + rows[:, None] + cols[None, :],
            mixed.to(out_ptr.dtype.element_ty),
            mask=(tokens < count)[:, None] & there[None, :],
        )


@triton.jit
def _decode_kernel(
    out_ptr,
    mixed_ptr,
    dt_ptr,
    a_log_ptr,
    d_ptr,
    dt_bias_ptr,
    states_ptr,
    lengths_ptr,
    starts_ptr,
    kv_lens_ptr,
    tables_ptr,
    dt_stride,
    states_stride,
    lengths_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    DT_MIN: tl.constexpr,
    DT_MAX: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_P numbers of one head of a row's one token."""
    row, head = tl.program_id(0), tl.program_id(1)
    begin, count, length = _row_of(row, starts_ptr, kv_lens_ptr)
    dims = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    cols = tl.arange(0, BLOCK_N)
    out = out_ptr + begin.to(tl.int64) * HEADS * P + head * P + dims
    if count == 0:
        tl.store(out, tl.zeros([BLOCK_P], dtype=out_ptr.dtype.element_ty), mask=dims < P)
    else:
        start = length - 1
        table_ptr = tables_ptr + row.to(tl.int64) * table_stride
        block, place = _source_of(table_ptr, lengths_ptr, lengths_stride, start, BLOCK_SIZE)
        step = _step_of(
            tl.load(dt_ptr + begin.to(tl.int64) * dt_stride + head),
            tl.load(dt_bias_ptr + head), DT_MIN, DT_MAX,
        )  # fmt: skip
        decay = tl.exp(-tl.exp(tl.load(a_log_ptr + head)) * step)
        CHANNELS: tl.constexpr = HEADS * P + 2 * GROUPS * N
        token_ptr = mixed_ptr + begin.to(tl.int64) * CHANNELS
        group_ptr = token_ptr + HEADS * P + head // (HEADS // GROUPS) * N + cols
        x = tl.load(token_ptr + head * P + dims, mask=dims < P, other=0.0).to(tl.float32)
        b = tl.load(group_ptr, mask=cols < N, other=0.0).to(tl.float32)
        c = tl.load(group_ptr + GROUPS * N, mask=cols < N, other=0.0).to(tl.float32)
        places = (head * P + dims)[:, None] * N + cols[None, :]
        mask = (dims < P)[:, None] & (cols < N)[None, :]
        old_ptr = states_ptr + block * states_stride + place * HEADS * P * N
        held = mask & (cols < tl.where(start > 0, N, 0))[None, :]
        state = tl.load(old_ptr + places, mask=held, other=0.0)
        state = state * decay + (step * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], axis=1) + tl.load(d_ptr + head) * x
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=dims < P)
        target = _target_of(start, start, place, BLOCK_SIZE)
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        new_ptr = states_ptr + block * states_stride + target * HEADS * P * N
        tl.store(new_ptr + places, state, mask=mask)
        if (head == 0) & (tl.program_id(2) == 0):
            tl.store(lengths_ptr + block * lengths_stride + target, length)


@triton.jit(do_not_specialize=["first_row"])
def _scan_kernel(
    out_ptr,
    mixed_ptr,
    dt_ptr,
    a_log_ptr,
    d_ptr,
    dt_bias_ptr,
    states_ptr,
    lengths_ptr,
    starts_ptr,
    kv_lens_ptr,
    tables_ptr,
    first_row,
    dt_stride,
    states_stride,
    lengths_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    DT_MIN: tl.constexpr,
    DT_MAX: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_P numbers of one head of a row, in pieces of up to PIECE tokens."""
    row, head = first_row + tl.program_id(0), tl.program_id(1)
    begin, count, length = _row_of(row, starts_ptr, kv_lens_ptr)
    if count > 0:
        start = length - count
        dims = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
        cols, own = tl.arange(0, BLOCK_N), tl.arange(0, PIECE)
        table_ptr = tables_ptr + row.to(tl.int64) * table_stride
        block, place = _source_of(table_ptr, lengths_ptr, lengths_stride, start, BLOCK_SIZE)
        bias, d = tl.load(dt_bias_ptr + head), tl.load(d_ptr + head)
        a = -tl.exp(tl.load(a_log_ptr + head))
        CHANNELS: tl.constexpr = HEADS * P + 2 * GROUPS * N
        group = HEADS * P + head // (HEADS // GROUPS) * N
        places = (head * P + dims)[:, None] * N + cols[None, :]
        mask = (dims < P)[:, None] & (cols < N)[None, :]
        old_ptr = states_ptr + block * states_stride + place * HEADS * P * N
        held = mask & (cols < tl.where(start > 0, N, 0))[None, :]
        state = tl.load(old_ptr + places, mask=held, other=0.0)
        # Row by column of a piece: who sees whom.
        seen = own[:, None] >= own[None, :]
        position = start
        while position < length:
            end = tl.minimum(length, (position // PIECE + 1) * PIECE)
            end = tl.minimum(end, (position // BLOCK_SIZE + 1) * BLOCK_SIZE)
            there = own < end - position
            tokens = (begin + position - start + own).to(tl.int64)
            dt = tl.load(dt_ptr + tokens * dt_stride + head, mask=there, other=0.0)
            step = tl.where(there, _step_of(dt, bias, DT_MIN, DT_MAX), 0.0)
            fallen = tl.cumsum(step * a, axis=0)
            total = tl.sum(step * a, axis=0)
            token_ptrs = (mixed_ptr + tokens * CHANNELS)[:, None]
            x_mask = there[:, None] & (dims < P)[None, :]
            n_mask = there[:, None] & (cols < N)[None, :]
            x = tl.load(token_ptrs + (head * P + dims)[None, :], mask=x_mask, other=0.0)
            b = tl.load(token_ptrs + (group + cols)[None, :], mask=n_mask, other=0.0)
            c = tl.load(token_ptrs + (group + GROUPS * N + cols)[None, :], mask=n_mask, other=0.0)
            scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
            apart = tl.where(seen, fallen[:, None] - fallen[None, :], 0.0)
            scores = tl.where(seen, tl.exp(apart) * scores * step[None, :], 0.0)
            y = tl.dot(scores.to(x.dtype), x, input_precision=PRECISION)
            before = tl.dot(c.to(tl.float32), tl.trans(state), input_precision=PRECISION)
            wide = x.to(tl.float32)
            y += before * tl.exp(fallen)[:, None] + d * wide
            out = out_ptr + (tokens * HEADS * P)[:, None] + (head * P + dims)[None, :]
            tl.store(out, y.to(out_ptr.dtype.element_ty), mask=x_mask)
            added = wide * (tl.exp(total - fallen) * step)[:, None]
            state = state * tl.exp(total)
            state += tl.dot(tl.trans(added.to(x.dtype)), b, input_precision=PRECISION)
            if (end == length) | (end % BLOCK_SIZE == 0):
                target = _target_of(start, end - 1, place, BLOCK_SIZE)
                block = tl.load(table_ptr + (end - 1) // BLOCK_SIZE).to(tl.int64)
                new_ptr = states_ptr + block * states_stride + target * HEADS * P * N
                tl.store(new_ptr + places, state, mask=mask)
                if (head == 0) & (tl.program_id(2) == 0):
                    tl.store(lengths_ptr + block * lengths_stride + target, end)
            position = end


def run_state_space(
    xbc: Tensor, dt: Tensor, weights: StateSpaceWeights, cache: StateCache, rows: StateRows
) -> Tensor:
    """See :func:`engine_core.kernels.run_state_space`."""
    heads, width, size = cache.states.shape[2:]
    channels, taps = weights.conv_weight.shape
    num_rows, decode = len(rows.kv_lens), rows.num_decode_rows
    groups = (channels - heads * width) // (2 * size)
    mixed = xbc.new_empty(len(xbc), channels)
    shape = (len(xbc), heads, width)
    # A captured step has tokens of no row behind those of its chunks.
    out = xbc.new_empty(shape) if decode == num_rows else xbc.new_zeros(shape)
    for first, count, longest in (
        (0, decode, 1),
        (decode, num_rows - decode, rows.max_query_len),
    ):
        # A captured step has room for chunks even where it has none for their tokens.
        if count == 0 or longest == 0:
            continue
        block_t = min(16, triton.next_power_of_2(longest))
        block_c = 256 if longest == 1 else 128
        grid = (count, triton.cdiv(longest, block_t), triton.cdiv(channels, block_c))
        _conv_kernel[grid](
            mixed,
            xbc,
            weights.conv_weight,
            weights.conv_bias,
            cache.inputs,
            cache.lengths,
            rows.query_start,
            rows.kv_lens,
            rows.block_tables,
            first,
            xbc.stride(0),
            cache.inputs.stride(0),
            cache.lengths.stride(0),
            rows.block_tables.stride(0),
            channels,
            TAPS=taps - 1,
            BLOCK_SIZE=rows.block_size,
            BLOCK_T=block_t,
            BLOCK_C=block_c,
            num_warps=4,
        )
    operands = (
        *(out, mixed, dt, weights.a_log, weights.d, weights.dt_bias),
        *(cache.states, cache.lengths, rows.query_start, rows.kv_lens, rows.block_tables),
    )
    strides = (
        *(dt.stride(0), cache.states.stride(0), cache.lengths.stride(0)),
        rows.block_tables.stride(0),
    )
    constants = {
        "HEADS": heads,
        "GROUPS": groups,
        "P": width,
        "N": size,
        "DT_MIN": weights.dt_min,
        "DT_MAX": weights.dt_max,
        "BLOCK_SIZE": rows.block_size,
    }
    block_n = triton.next_power_of_2(size)
    if decode:
        # 4096 numbers of a state are 32 for each thread.
        block_p = max(1, min(triton.next_power_of_2(width), 4096 // block_n))
        _decode_kernel[(decode, heads, triton.cdiv(width, block_p))](
            *operands, *strides, **constants, BLOCK_P=block_p, BLOCK_N=block_n, num_warps=4
        )
    if decode < num_rows and rows.max_query_len:
        # Larger tiles of a state of 128 columns do not fit the registers of compute capability 9.0;
        # float32 is multiplied without matrix instructions.
        wide = xbc.dtype == torch.float32
        tile = 16 if wide or block_n > 128 else 32
        block_p = max(16, min(triton.next_power_of_2(width), tile))
        _scan_kernel[(num_rows - decode, heads, triton.cdiv(width, block_p))](
            *operands,
            decode,
            *strides,
            **constants,
            BLOCK_P=block_p,
            BLOCK_N=max(16, block_n),
            PIECE=16 if wide else 32,
            PRECISION="ieee" if wide else "tf32",
            num_warps=4,
        )
    return out
