"""Attention of decode rows over a paged cache, compiled for a CPU.

Keys and values are read where they lie, each once, for all query heads that share them. The tokens
of all rows and KV heads stand in one line, of which each thread takes an equal part; a row that
two threads share leaves each one's sum and maximum, which are joined afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine_core.kernels.attention.call import Call
from engine_core.kernels.compiled import Kernel, threads
from engine_core.kernels.compiled.numbers import (
    STORED,
    all_parts,
    array,
    as_double,
    exp,
    float32,
    inline,
    narrow,
    this_part,
    unpack,
    widen,
)

# Products of queries and keys per thread, at least.
_LEAST = 2**15
# Tokens whose logits are held at once.
_TILE = 256
# Heads that are smaller, of tiny models, share code that is given its sizes: compiling takes 3 s.
_OWN_CODE = 64


def decode_attention(call: Call) -> None:
    """Attend the rows that have one query each, which come first."""
    q, k_cache, v_cache, num_rows = call.q, call.k_cache, call.v_cache, call.num_decode_rows
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads, v_head_dim = v_cache.shape[1:]
    group = num_heads // num_kv_heads
    alibi_slopes, window = call.alibi_slopes, call.window
    longest = call.max_kv_len if window is None else min(call.max_kv_len, window)
    parts = threads(num_rows * longest * num_heads * head_dim, _LEAST)
    # After what each thread needs, how many shared the work.
    stride = _scratch(group, head_dim, v_head_dim)[2]
    scratch = q.new_empty(parts * stride + 1, dtype=torch.float32)
    capped = call.softcap is not None
    sizes = (group, head_dim, v_head_dim)
    known = sizes if max(head_dim, v_head_dim) >= _OWN_CODE else (0, 0, 0)
    special = (q.dtype, k_cache.dtype, *known, alibi_slopes is not None, capped)
    k_scales, v_scales = call.k_scales, call.v_scales
    arguments = (
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        call.out.data_ptr(),
        call.block_tables.data_ptr(),
        call.kv_lens.data_ptr(),
        0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        scratch.data_ptr(),
        num_rows,
        num_kv_heads,
        block_size,
        call.block_tables.stride(0),
        window or 0,
        parts,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        0 if k_scales is None else k_scales.data_ptr(),
        0 if k_scales is None else k_scales.stride(0),
        0 if v_scales is None else v_scales.data_ptr(),
        0 if v_scales is None else v_scales.stride(0),
        call.scale,
        call.softcap or 0.0,
        *sizes,
    )
    _ATTEND.run(special, parts, *arguments)
    if parts > 1:
        _JOIN.run((q.dtype, *special[2:]), 1, *arguments)


def _make_attend(
    dtype: torch.dtype, kept: torch.dtype, heads: int, dims: int, v_dims: int, alibi: bool,
    capped: bool,
) -> Callable[..., None]:  # fmt: skip
    stored, size = STORED[dtype], dtype.itemsize
    held_as, kept_size, scaled = STORED[kept], kept.itemsize, kept != dtype

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        group, head_dim, v_head_dim = heads or args[29], dims or args[30], v_dims or args[31]
        private, piece, stride = _scratch_inside(group, head_dim, v_head_dim)
        num_rows, num_kv_heads, block_size, table_stride = args[8], args[9], args[10], args[11]
        window = args[12]
        scale, cap = float32(as_double(args[26])), float32(as_double(args[27]))
        part = this_part()
        kv_lens = array(args[5], np.int32, num_rows)
        mine = args[7] + part * stride * 4
        queries = array(mine, np.float32, group * head_dim).reshape((group, head_dim))
        mine += group * head_dim * 4
        logits = array(mine, np.float32, group * _TILE).reshape((group, _TILE))
        mine += group * _TILE * 4
        sums = array(mine, np.float32, group * v_head_dim).reshape((group, v_head_dim))
        mine += group * v_head_dim * 4
        numbers = array(mine, np.float32, max(head_dim, v_head_dim))
        pieces = array(args[7] + (part * stride + private) * 4, np.float32, 2 * piece)
        slopes = array(args[6], np.float32, num_kv_heads * group)

        line = _line(kv_lens, window, num_kv_heads)
        # There may be fewer threads than requested, or fewer tokens; then some threads get none.
        parts = max(min(all_parts(), line), 1)
        if part == 0:
            array(args[7] + args[13] * stride * 4, np.float32, 1)[0] = parts
        low, high = line * part // parts, line * (part + 1) // parts
        position = 0
        for row in range(num_rows):
            kv_len = kv_lens[row]
            span = _span(kv_len, window)
            if span == 0 and part == 0:
                width = num_kv_heads * group * v_head_dim
                array(args[3] + row * width * size, stored, width)[:] = 0
            if position + span * num_kv_heads <= low or position >= high:
                position += span * num_kv_heads
                continue
            table = array(args[4] + row * table_stride * 4, np.int32, kv_len // block_size + 1)
            for kv_head in range(num_kv_heads):
                begin, end = max(position, low), min(position + span, high)
                if begin < end:
                    start = kv_len - span + begin - position
                    stop = kv_len - span + end - position
                    for g in range(group):
                        place = row * args[14] + (kv_head * group + g) * args[15]
                        q = array(args[0] + place * size, stored, head_dim)
                        for d in range(head_dim):
                            queries[g, d] = widen(q[d]) * scale
                        for d in range(v_head_dim):
                            sums[g, d] = float32(0)
                    whole = begin == position and end == position + span
                    # Of a shared row: after another part's tokens, or before them.
                    held = pieces if begin > position else pieces[piece:]
                    stats = held[group * v_head_dim :]
                    for g in range(group):
                        stats[2 * g] = float32(-np.inf)
                        stats[2 * g + 1] = float32(0)
                    k_head = args[1] + kv_head * args[18] * kept_size
                    v_head = args[2] + kv_head * args[21] * kept_size
                    for first in range(start, stop, _TILE):
                        last = min(first + _TILE, stop)
                        token = first
                        while token < last:
                            offset = token % block_size
                            run = min(block_size - offset, last - token)
                            block = table[token // block_size] * args[16] + offset * args[17]
                            keys = k_head + block * kept_size
                            of_token = _scales(args, 22, table, token, kv_head)
                            for j in range(run):
                                k = array(keys + j * args[17] * kept_size, held_as, head_dim)
                                if scaled:
                                    for d in range(head_dim):
                                        numbers[d] = widen(k[d]) * of_token[j]
                                for g in range(group):
                                    product = float32(0)
                                    if scaled:
                                        for d in range(head_dim):
                                            product += queries[g, d] * numbers[d]
                                    else:
                                        for d in range(head_dim):
                                            product += queries[g, d] * widen(k[d])
                                    logits[g, token - first + j] = product
                            token += run
                        for g in range(group):
                            row_logits = logits[g]
                            if capped:
                                for j in range(last - first):
                                    # tanh(x) = 1 - 2 / (e^2x + 1)
                                    grown = exp(float32(2) * row_logits[j] / cap)
                                    tanh = float32(1) - float32(2) / (grown + float32(1))
                                    row_logits[j] = cap * tanh
                            if alibi:
                                slope = slopes[kv_head * group + g]
                                for j in range(last - first):
                                    row_logits[j] += slope * float32(first + j - kv_len + 1)
                            most = stats[2 * g]
                            for j in range(last - first):
                                most = max(most, row_logits[j])
                            shrunk = exp(stats[2 * g] - most)
                            total = float32(0)
                            for j in range(last - first):
                                row_logits[j] = exp(row_logits[j] - most)
                                total += row_logits[j]
                            stats[2 * g] = most
                            stats[2 * g + 1] = stats[2 * g + 1] * shrunk + total
                            for d in range(v_head_dim):
                                sums[g, d] *= shrunk
                        token = first
                        while token < last:
                            offset = token % block_size
                            run = min(block_size - offset, last - token)
                            block = table[token // block_size] * args[19] + offset * args[20]
                            values = v_head + block * kept_size
                            of_token = _scales(args, 24, table, token, kv_head)
                            for j in range(run):
                                v = array(values + j * args[20] * kept_size, held_as, v_head_dim)
                                if scaled:
                                    for d in range(v_head_dim):
                                        numbers[d] = widen(v[d]) * of_token[j]
                                for g in range(group):
                                    weight = logits[g, token - first + j]
                                    if scaled:
                                        for d in range(v_head_dim):
                                            sums[g, d] += weight * numbers[d]
                                    else:
                                        for d in range(v_head_dim):
                                            sums[g, d] += weight * widen(v[d])
                            token += run
                    if whole:
                        first_head = (row * num_kv_heads + kv_head) * group * v_head_dim
                        out = array(args[3] + first_head * size, stored, group * v_head_dim)
                        for g in range(group):
                            inverse = float32(1) / stats[2 * g + 1]
                            for d in range(v_head_dim):
                                out[g * v_head_dim + d] = narrow(sums[g, d] * inverse, out[0])
                    else:
                        for g in range(group):
                            for d in range(v_head_dim):
                                held[g * v_head_dim + d] = sums[g, d]
                position += span

    return body


def _make_join(
    dtype: torch.dtype, heads: int, dims: int, v_dims: int, alibi: bool, capped: bool
) -> Callable[..., None]:
    stored, size = STORED[dtype], dtype.itemsize

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        group, head_dim, v_head_dim = heads or args[29], dims or args[30], v_dims or args[31]
        private, piece, stride = _scratch_inside(group, head_dim, v_head_dim)
        num_rows, num_kv_heads, window = args[8], args[9], args[12]
        kv_lens = array(args[5], np.int32, num_rows)
        line = _line(kv_lens, window, num_kv_heads)
        scratch = array(args[7], np.float32, args[13] * stride + 1)
        parts = np.int64(scratch[args[13] * stride])
        part = 0
        position = 0
        for row in range(num_rows):
            span = _span(kv_lens[row], window)
            if span == 0:
                continue
            for kv_head in range(num_kv_heads):
                # The part that its first token fell to.
                while line * (part + 1) // parts <= position:
                    part += 1
                end = position + span
                if line * (part + 1) // parts < end:
                    last = part
                    while line * (last + 1) // parts < end:
                        last += 1
                    first_head = (row * num_kv_heads + kv_head) * group * v_head_dim
                    out = array(args[3] + first_head * size, stored, group * v_head_dim)
                    for g in range(group):
                        most = float32(-np.inf)
                        for p in range(part, last + 1):
                            begun = line * p // parts > position
                            held = scratch[p * stride + private + (0 if begun else piece) :]
                            most = max(most, held[group * v_head_dim + 2 * g])
                        total = float32(0)
                        target = scratch[g * v_head_dim : (g + 1) * v_head_dim]
                        for d in range(v_head_dim):
                            target[d] = float32(0)
                        for p in range(part, last + 1):
                            begun = line * p // parts > position
                            held = scratch[p * stride + private + (0 if begun else piece) :]
                            weight = exp(held[group * v_head_dim + 2 * g] - most)
                            total += weight * held[group * v_head_dim + 2 * g + 1]
                            for d in range(v_head_dim):
                                target[d] += weight * held[g * v_head_dim + d]
                        inverse = float32(1) / total
                        for d in range(v_head_dim):
                            out[g * v_head_dim + d] = narrow(target[d] * inverse, out[0])
                position = end

    return body


def _scratch(group: int, head_dim: int, v_head_dim: int) -> tuple[int, int, int]:
    """Numbers of a thread's own, of a piece of a shared row, and of all that a thread needs.

    Its own are queries, logits, sums, and the numbers that a head's codes are. A piece is the sums
    of a row and KV head so far, and each query's maximum and sum; a thread may share its first row
    and its last.
    """
    private = group * (head_dim + _TILE + v_head_dim) + max(head_dim, v_head_dim)
    piece = group * (v_head_dim + 2)
    return private, piece, private + 2 * piece


_scratch_inside = inline(_scratch)


@inline
def _scales(args: Any, place: int, table: Any, token: int, kv_head: int) -> Any:
    """The scales of a KV head's tokens from ``token`` to the end of its block."""
    block_size = args[10]
    first = table[token // block_size] * args[place + 1] + kv_head * block_size
    offset = token % block_size
    return array(args[place] + (first + offset) * 4, np.float32, block_size - offset)


@inline
def _line(kv_lens: Any, window: int, num_kv_heads: int) -> int:
    """The tokens that all rows and KV heads see, one after another."""
    tokens = 0
    for kv_len in kv_lens:
        tokens += _span(kv_len, window)
    return tokens * num_kv_heads


@inline
def _span(kv_len: int, window: int) -> int:
    """How many of its tokens a row's query sees."""
    return min(kv_len, window) if window > 0 else kv_len


# Sizes come last of the 32 that there may be.
_ARGUMENTS = "26q2d8x3q"
_ATTEND = Kernel(_make_attend, _ARGUMENTS)
_JOIN = Kernel(_make_join, _ARGUMENTS)
