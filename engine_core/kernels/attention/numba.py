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

from engine_core.kernels.attention.native import LOGITS, TILE, scratch_sizes
from engine_core.kernels.compiled.numbers import (
    STORED,
    all_parts,
    array,
    as_double,
    exp,
    float32,
    inline,
    matrix,
    narrow,
    this_part,
    unpack,
    widen,
)
from engine_core.kernels.compiled.sizes import DOTS
from engine_core.kernels.compiled.vectors import dots, greatest, weigh

# Tokens by which keys, and values, are fetched ahead.
_AHEAD = 16

_scratch_inside = inline(scratch_sizes)


def make_attend(
    dtype: torch.dtype, kept: torch.dtype, heads: int, dims: int, v_dims: int
) -> Callable[..., None]:
    """Each part's share of the tokens; sizes that are 0 are arguments."""
    stored, size = STORED[dtype], dtype.itemsize
    held_as, kept_size, scaled = STORED[kept], kept.itemsize, kept != dtype

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        group, head_dim, v_head_dim = heads or args[29], dims or args[30], v_dims or args[31]
        private, piece, stride = _scratch_inside(group, head_dim, v_head_dim, args[32])
        num_rows, num_kv_heads, block_size, table_stride = args[8], args[9], args[10], args[11]
        window = args[12]
        scale, cap = float32(as_double(args[26])), float32(as_double(args[27]))
        alibi, capped = args[6] != 0, cap < np.inf
        part = this_part()
        kv_lens = array(args[5], np.int32, num_rows)
        mine = args[7] + part * stride * 4
        queries = matrix(mine, np.float32, group, head_dim)
        mine += group * head_dim * 4
        logits = matrix(mine, np.float32, group, LOGITS)
        mine += group * LOGITS * 4
        sums = matrix(mine, np.float32, group, v_head_dim)
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
                    for first in range(start, stop, TILE):
                        last = min(first + TILE, stop)
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


def make_vectors(
    dtype: torch.dtype, group: int, head_dim: int, v_head_dim: int
) -> Callable[..., None]:
    """The same for caches of q's type and heads that are whole vectors.

    KV heads that a part has all of are attended together, so that the cache is read nearly in its
    order, and what comes next is fetched into the second cache: 16 rows of 300 tokens that no cache
    has take 0.79 ms on one Zen 4 core (3 KV heads of 64, float32), 0.99 without fetching, and 1.16
    if it is fetched into the first.
    """
    stored, size = STORED[dtype], dtype.itemsize

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        together = args[32]
        private, piece, stride = _scratch_inside(group, head_dim, v_head_dim, together)
        num_rows, num_kv_heads, block_size, table_stride = args[8], args[9], args[10], args[11]
        window = args[12]
        scale, cap = float32(as_double(args[26])), float32(as_double(args[27]))
        alibi, capped = args[6] != 0, cap < np.inf
        k_stride, v_stride = args[17] * size, args[20] * size
        part = this_part()
        kv_lens = array(args[5], np.int32, num_rows)
        # Of each KV head there is a group of rows of all of these.
        heads = together * group
        queries_at = args[7] + part * stride * 4
        logits_at = queries_at + heads * head_dim * 4
        sums_at = logits_at + heads * LOGITS * 4
        queries = array(queries_at, np.float32, heads * head_dim)
        logits = matrix(logits_at, np.float32, heads, LOGITS)
        sums = matrix(sums_at, np.float32, heads, v_head_dim)
        stats = array(sums_at + heads * v_head_dim * 4, np.float32, 2 * heads)
        pieces = array(args[7] + (part * stride + private) * 4, np.float32, 2 * piece)
        slopes = array(args[6], np.float32, num_kv_heads * group)

        line = _line(kv_lens, window, num_kv_heads)
        # There may be fewer threads than requested, or fewer tokens; then some threads get none.
        parts = max(min(all_parts(), line), 1)
        if part == 0:
            array(args[7] + args[13] * stride * 4, np.float32, 1)[0] = parts
        low, high = line * part // parts, line * (part + 1) // parts
        row_begin = 0
        for row in range(num_rows):
            kv_len = kv_lens[row]
            span = _span(kv_len, window)
            if span == 0 and part == 0:
                width = num_kv_heads * group * v_head_dim
                array(args[3] + row * width * size, stored, width)[:] = 0
            table = array(args[4] + row * table_stride * 4, np.int32, kv_len // block_size + 1)
            kv_head = 0
            while kv_head < num_kv_heads:
                position = row_begin + kv_head * span
                begin, end = max(position, low), min(position + span, high)
                if begin >= end:
                    kv_head += 1
                    continue
                whole = end - begin == span
                count = 1
                if whole:
                    most = min(together, num_kv_heads - kv_head)
                    count = max(min(most, (high - position) // span), 1)
                start = kv_len - span + begin - position
                stop = kv_len - span + end - position
                taken = count * group
                for h in range(taken):
                    place = row * args[14] + (kv_head * group + h) * args[15]
                    q = array(args[0] + place * size, stored, head_dim)
                    query = queries[h * head_dim : (h + 1) * head_dim]
                    for d in range(head_dim):
                        query[d] = widen(q[d]) * scale
                    stats[2 * h] = float32(-np.inf)
                    stats[2 * h + 1] = float32(0)
                    for d in range(v_head_dim):
                        sums[h, d] = float32(0)
                for first in range(start, stop, TILE):
                    last = min(first + TILE, stop)
                    token = first
                    while token < last:
                        offset = token % block_size
                        run = min(block_size - offset, last - token)
                        block = table[token // block_size] * args[16] + offset * args[17]
                        keys = args[1] + (block + kv_head * args[18]) * size
                        for j in range(0, run, DOTS):
                            k0, k1 = keys + j * k_stride, keys + min(j + 1, run - 1) * k_stride
                            k2 = keys + min(j + 2, run - 1) * k_stride
                            k3 = keys + min(j + 3, run - 1) * k_stride
                            to = logits_at + (token - first + j) * 4
                            for h in range(count):
                                head = h * args[18] * size
                                dots(
                                    group, head_dim, size, queries_at + h * group * head_dim * 4,
                                    to + h * group * LOGITS * 4, LOGITS * 4, _AHEAD * k_stride,
                                    k0 + head, k1 + head, k2 + head, k3 + head,
                                )  # fmt: skip
                        token += run
                    for h in range(taken):
                        row_logits = logits[h]
                        if capped:
                            for j in range(last - first):
                                # tanh(x) = 1 - 2 / (e^2x + 1)
                                grown = exp(float32(2) * row_logits[j] / cap)
                                tanh = float32(1) - float32(2) / (grown + float32(1))
                                row_logits[j] = cap * tanh
                        if alibi:
                            slope = slopes[kv_head * group + h]
                            for j in range(last - first):
                                row_logits[j] += slope * float32(first + j - kv_len + 1)
                        before = stats[2 * h]
                        greatest_logit = greatest(logits_at + h * LOGITS * 4, last - first, before)
                        shrunk = exp(before - greatest_logit)
                        total = float32(0)
                        for j in range(last - first):
                            row_logits[j] = exp(row_logits[j] - greatest_logit)
                            total += row_logits[j]
                        stats[2 * h] = greatest_logit
                        stats[2 * h + 1] = stats[2 * h + 1] * shrunk + total
                        if first > start:
                            for d in range(v_head_dim):
                                sums[h, d] *= shrunk
                    token = first
                    while token < last:
                        offset = token % block_size
                        run = min(block_size - offset, last - token)
                        block = table[token // block_size] * args[19] + offset * args[20]
                        values = args[2] + (block + kv_head * args[21]) * size
                        weights = logits_at + (token - first) * 4
                        for h in range(count):
                            weigh(
                                group, v_head_dim, size, sums_at + h * group * v_head_dim * 4,
                                weights + h * group * LOGITS * 4, LOGITS * 4,
                                values + h * args[21] * size, v_stride, run, _AHEAD * v_stride,
                            )  # fmt: skip
                        token += run
                if whole:
                    first_head = (row * num_kv_heads + kv_head) * group * v_head_dim
                    out = array(args[3] + first_head * size, stored, taken * v_head_dim)
                    for h in range(taken):
                        inverse = float32(1) / stats[2 * h + 1]
                        for d in range(v_head_dim):
                            out[h * v_head_dim + d] = narrow(sums[h, d] * inverse, out[0])
                else:
                    # Of a shared row: after another part's tokens, or before them.
                    held = pieces if begin > position else pieces[piece:]
                    for g in range(group):
                        for d in range(v_head_dim):
                            held[g * v_head_dim + d] = sums[g, d]
                        held[group * v_head_dim + 2 * g] = stats[2 * g]
                        held[group * v_head_dim + 2 * g + 1] = stats[2 * g + 1]
                kv_head += count
            row_begin += span * num_kv_heads

    return body


def make_join(dtype: torch.dtype) -> Callable[..., None]:
    """The pieces of a row that several parts had, joined, whatever the sizes."""
    stored, size = STORED[dtype], dtype.itemsize

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        group, head_dim, v_head_dim = args[29], args[30], args[31]
        private, piece, stride = _scratch_inside(group, head_dim, v_head_dim, args[32])
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
