"""Attention of a prompt's tokens in float32 over a paged cache, compiled for a CPU with AVX2.

Keys and values of some tokens are copied into panels that stay in a core's second cache. Six
queries of a head at a time are multiplied with the keys, and their weights with the values, in
registers. Each query's maximum and sum are kept, and corrected when the maximum grows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine_core.kernels.attention.chunk.native import TILE
from engine_core.kernels.compiled.numbers import (
    all_parts,
    array,
    as_double,
    exp,
    float32,
    inline,
    matrix,
    this_part,
    unpack,
)
from engine_core.kernels.compiled.sizes import PANEL, ROWS
from engine_core.kernels.compiled.vectors import greatest, multiply


def make() -> Callable[..., None]:
    """Each part's share of the heads and queries of a row."""

    def body(arguments: Any) -> None:
        args = unpack(arguments)
        num_queries, kv_len, num_kv_heads, group = args[6], args[7], args[8], args[9]
        block_size, window, head_dim, v_head_dim = args[10], args[11], args[13], args[14]
        scale = float32(as_double(args[25]))
        start_pos = kv_len - num_queries
        part = this_part()
        keys_at = args[5] + part * args[12] * 4
        values_at = keys_at + TILE * head_dim * 4
        logits_at = values_at + TILE * v_head_dim * 4
        unused_at = logits_at + ROWS * TILE * 4
        stats_at = unused_at + v_head_dim * 4
        stats = array(stats_at, np.float32, 2 * num_queries * group)
        logits = matrix(logits_at, np.float32, ROWS, TILE)
        array(unused_at, np.float32, v_head_dim)[:] = 0
        table = array(args[4], np.int32, (kv_len + block_size - 1) // block_size)

        tiles = (num_queries + ROWS - 1) // ROWS
        work = 0
        for tile in range(tiles):
            work += _seen(tile, num_queries, start_pos, window)
        low = work * num_kv_heads * part // all_parts()
        high = work * num_kv_heads * (part + 1) // all_parts()
        for kv_head in range(num_kv_heads):
            # The tiles that begin in this part of all work.
            position = kv_head * work
            begin, end = tiles, 0
            for tile in range(tiles):
                if low <= position < high:
                    begin, end = min(begin, tile), tile + 1
                position += _seen(tile, num_queries, start_pos, window)
            if begin >= end:
                continue
            last_query = min(end * ROWS, num_queries)
            for query in range(begin * ROWS, last_query):
                for g in range(group):
                    place = query * args[23] + (kv_head * group + g) * args[24]
                    array(args[3] + place * 4, np.float32, v_head_dim)[:] = 0
                    stats[2 * (query * group + g)] = float32(-np.inf)
                    stats[2 * (query * group + g) + 1] = float32(0)
            first_key = _first(begin * ROWS, start_pos, window)
            for start in range(first_key, start_pos + last_query, TILE):
                stop = min(start + TILE, start_pos + last_query)
                _pack(args, table, kv_head, start, stop, keys_at, values_at)
                for tile in range(begin, end):
                    query = tile * ROWS
                    rows = min(ROWS, num_queries - query)
                    seen = min(stop, start_pos + query + rows) - start
                    unseen = max(_first(query, start_pos, window) - start, 0)
                    if seen <= unseen:
                        continue
                    left, panels = unseen // PANEL, (seen + PANEL - 1) // PANEL
                    for g in range(group):
                        head = kv_head * group + g
                        q_at = args[0] + (query * args[15] + head * args[16]) * 4
                        step = args[15] * 4
                        for panel in range(left, panels):
                            to = logits_at + panel * PANEL * 4
                            multiply(
                                0, keys_at + panel * PANEL * head_dim * 4, head_dim,
                                q_at, q_at + min(1, rows - 1) * step,
                                q_at + min(2, rows - 1) * step, q_at + min(3, rows - 1) * step,
                                q_at + min(4, rows - 1) * step, q_at + min(5, rows - 1) * step,
                                to, to + TILE * 4, to + 2 * TILE * 4, to + 3 * TILE * 4,
                                to + 4 * TILE * 4, to + 5 * TILE * 4,
                            )  # fmt: skip
                        out_at = args[3] + (query * args[23] + head * args[24]) * 4
                        for r in range(rows):
                            a = max(_first(query + r, start_pos, window) - start, 0)
                            b = min(stop, start_pos + query + r + 1) - start
                            weights = logits[r]
                            if a >= b:
                                for j in range(left * PANEL, seen):
                                    weights[j] = float32(0)
                                continue
                            for j in range(left * PANEL, a):
                                weights[j] = float32(0)
                            for j in range(b, seen):
                                weights[j] = float32(0)
                            place = 2 * ((query + r) * group + g)
                            before = stats[place]
                            row_logits = weights[a:b]
                            # Logits are scaled where their exponentials are taken.
                            most = greatest(logits_at + (r * TILE + a) * 4, b - a, before)
                            shrunk = exp((before - most) * scale)
                            total = float32(0)
                            for j in range(b - a):
                                row_logits[j] = exp((row_logits[j] - most) * scale)
                                total += row_logits[j]
                            stats[place] = most
                            stats[place + 1] = stats[place + 1] * shrunk + total
                            if start > first_key and most != before:
                                sums = array(out_at + r * args[23] * 4, np.float32, v_head_dim)
                                for d in range(v_head_dim):
                                    sums[d] *= shrunk
                        x = logits_at + left * PANEL * 4
                        for column in range(0, v_head_dim, PANEL):
                            to = out_at + column * 4
                            step = args[23] * 4
                            unused = unused_at + column * 4
                            multiply(
                                1, values_at + (column * TILE + left * PANEL * PANEL) * 4,
                                seen - left * PANEL,
                                x, x + TILE * 4, x + 2 * TILE * 4, x + 3 * TILE * 4,
                                x + 4 * TILE * 4, x + 5 * TILE * 4,
                                to, to + step if rows > 1 else unused,
                                to + 2 * step if rows > 2 else unused,
                                to + 3 * step if rows > 3 else unused,
                                to + 4 * step if rows > 4 else unused,
                                to + 5 * step if rows > 5 else unused,
                            )  # fmt: skip
            for query in range(begin * ROWS, last_query):
                for g in range(group):
                    inverse = float32(1) / stats[2 * (query * group + g) + 1]
                    place = query * args[23] + (kv_head * group + g) * args[24]
                    sums = array(args[3] + place * 4, np.float32, v_head_dim)
                    for d in range(v_head_dim):
                        sums[d] *= inverse

    return body


@inline
def _first(query: int, start_pos: int, window: int) -> int:
    """The first token that a query sees."""
    return max(start_pos + query - window + 1, 0) if window > 0 else 0


@inline
def _seen(tile: int, num_queries: int, start_pos: int, window: int) -> int:
    """The tokens that the queries of a tile see."""
    query = tile * ROWS
    return start_pos + min(query + ROWS, num_queries) - _first(query, start_pos, window)


@inline
def _pack(
    args: Any, table: Any, kv_head: int, start: int, stop: int, keys_at: int, values_at: int
) -> None:
    """Copy a head's tokens: keys ``[panels, D, PANEL]``, values ``[Dv / PANEL, TILE, PANEL]``."""
    block_size, head_dim, v_head_dim = args[10], args[13], args[14]
    panels = (stop - start + PANEL - 1) // PANEL
    keys = matrix(keys_at, np.float32, panels * head_dim, PANEL)
    for token in range(start, stop):
        block, offset = table[token // block_size], token % block_size
        place = block * args[17] + offset * args[18] + kv_head * args[19]
        k = array(args[1] + place * 4, np.float32, head_dim)
        place = block * args[20] + offset * args[21] + kv_head * args[22]
        v = array(args[2] + place * 4, np.float32, v_head_dim)
        panel, column = (token - start) // PANEL, (token - start) % PANEL
        for d in range(head_dim):
            keys[panel * head_dim + d, column] = k[d]
        for first in range(0, v_head_dim, PANEL):
            to = values_at + (first * TILE + (token - start) * PANEL) * 4
            values = array(to, np.float32, PANEL)
            for d in range(PANEL):
                values[d] = v[first + d]
    # What is not there is multiplied too, and its products are not read.
    for column in range(stop - start, panels * PANEL):
        for d in range(head_dim):
            keys[(panels - 1) * head_dim + d, column % PANEL] = float32(0)
