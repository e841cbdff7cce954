"""Paged attention on a CPU, through torch's fused scaled_dot_product_attention.

torch's kernel packs the keys of one batch entry and head, then multiplies them with that entry's
queries. So the query heads of one KV head are given to it as query positions when decoding, and as
heads over stride-0 keys in a prefill chunk: neither copies a key more than once. ``enable_gqa`` is
up to 1.7 times slower when decoding in float32, and 20 times in bfloat16.

In low precision that kernel copies keys and values into another layout. Without AMX it costs more
than it saves: see :func:`_copies_into_tiles`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.kernels.attention import reference

# Decode rows are attended together until their padding costs more than one more call would: about
# 60 us, in which one core attends to 2**17 values.
_MAX_PADDING = 2**17
# Keys and values gathered at once. With 2**20 (4 MiB in float32) they are still in a cache when
# they are used: on one Zen 5 core 2**18 and 2**22 take 1.2 to 1.5 times as long (256 rows of 256
# tokens, 3 KV heads of 64). Many threads need more, to have two tasks each.
_MAX_GATHERED = 2**20
_MAX_GATHERED_PER_THREAD = 2**18


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    *,
    block_tables: Tensor,
    query_start: Tensor,
    kv_lens: Tensor,
    num_decode_rows: int,
    scale: float,
    alibi_slopes: Tensor | None,
    window: int | None,
    softcap: float | None,
    prefix_lens: Tensor | None,
) -> None:
    """Write attention into ``out``; arguments as in the public wrapper."""
    if softcap is not None:
        reference.paged_attention(
            q,
            k_cache,
            v_cache,
            out,
            block_tables=block_tables,
            query_start=query_start,
            kv_lens=kv_lens,
            scale=scale,
            alibi_slopes=alibi_slopes,
            window=window,
            softcap=softcap,
            prefix_lens=prefix_lens,
        )
        return
    lens: list[int] = kv_lens.tolist()
    if num_decode_rows == len(lens) == 1 and prefix_lens is None and lens[0]:
        # One sequence: every microsecond here is spent again in each layer.
        _attend_row(
            q[0], k_cache, v_cache, out[0], block_tables[0], lens[0], scale, alibi_slopes, window
        )
        return
    prefixes: list[int] = [0] * len(lens) if prefix_lens is None else prefix_lens.tolist()
    batch: list[int] = []
    chunks: list[int] = []
    for row in range(num_decode_rows):
        if lens[row] == 0:
            out[row].zero_()
        elif window is not None and prefixes[row]:
            chunks.append(row)
        else:
            batch.append(row)
    if batch:
        values_per_token = k_cache.shape[2] * (k_cache.shape[3] + v_cache.shape[3])
        spans = lens if window is None else [min(kv_len, window) for kv_len in lens]
        for rows in _groups(batch, spans, values_per_token):
            if len(rows) == 1:
                row = rows[0]
                _attend_row(
                    q[row], k_cache, v_cache, out[row], block_tables[row], lens[row], scale,
                    alibi_slopes, window,
                )  # fmt: skip
            else:
                _attend_group(
                    q, k_cache, v_cache, out, block_tables, rows, lens, scale, alibi_slopes, window
                )
    chunks.extend(range(num_decode_rows, len(lens)))
    if chunks:
        starts = query_start.tolist()
        for row in chunks:
            begin, end = starts[row], starts[row + 1]
            if lens[row] == 0:
                out[begin:end].zero_()
            elif begin < end:
                _attend_chunk(
                    q[begin:end], k_cache, v_cache, out[begin:end], block_tables[row], lens[row],
                    scale, alibi_slopes, window, prefixes[row],
                )  # fmt: skip


def _attend_row(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    block_table: Tensor,
    kv_len: int,
    scale: float,
    alibi_slopes: Tensor | None,
    window: int | None,
) -> None:
    """One query ``[Hq, D]`` over the last ``window`` of ``kv_len`` tokens."""
    num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    start = 0 if window is None else max(kv_len - window, 0)
    k, v = _row_tokens(k_cache, v_cache, block_table, start, kv_len)
    if _copies_into_tiles(q):
        q, k, v = q.float(), k.float(), v.float()
    grouped = (1, num_kv_heads, num_heads // num_kv_heads)
    bias = None
    if alibi_slopes is not None:
        distance = torch.arange(start - kv_len + 1, 1)
        bias = alibi_slopes.view(*grouped, 1) * distance
    attended = F.scaled_dot_product_attention(
        q.reshape(*grouped, head_dim),
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=bias,
        scale=scale,
    )
    out.view(*grouped, -1).copy_(attended)


def _attend_group(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    block_tables: Tensor,
    rows: list[int],
    lens: list[int],
    scale: float,
    alibi_slopes: Tensor | None,
    window: int | None,
) -> None:
    """One query for each of several rows, their keys gathered into one padded batch."""
    num_rows = len(rows)
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    index = torch.tensor(rows)
    row_lens = [lens[row] for row in rows]
    row_starts = [0 if window is None else max(n - window, 0) for n in row_lens]
    ragged = len(set(row_lens)) > 1 or row_starts[0] > 0

    first = [start // block_size for start in row_starts]
    last = [(kv_len - 1) // block_size for kv_len in row_lens]
    num_columns = max(b - a for a, b in zip(first, last, strict=True)) + 1
    first_block = torch.tensor(first)[:, None]
    columns = torch.minimum(first_block + torch.arange(num_columns), torch.tensor(last)[:, None])
    blocks = block_tables.index_select(0, index).gather(1, columns)
    slots = blocks[:, :, None] * block_size + torch.arange(block_size, dtype=blocks.dtype)
    # What the longest row leaves of its last block is no token of anybody.
    num_slots = max(n - a * block_size for n, a in zip(row_lens, first, strict=True))
    slots = slots.view(num_rows, -1)[:, :num_slots]
    positions = first_block * block_size + torch.arange(num_slots)
    kv_len = torch.tensor(row_lens)[:, None]
    bias = None
    grouped = (num_rows, num_kv_heads, num_heads // num_kv_heads)
    if ragged:
        start = torch.tensor(row_starts)[:, None]
        visible = (positions >= start) & (positions < kv_len)
        # Masked slots must still hold numbers, since 0 * NaN is NaN: they read a visible one.
        some_slot = slots.gather(1, start - first_block * block_size)
        slots = torch.where(visible, slots, some_slot)
        bias = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None, None]
    if alibi_slopes is not None:
        distance = (positions - kv_len + 1)[:, None, None]
        alibi = alibi_slopes.view(1, *grouped[1:], 1) * distance
        bias = alibi if bias is None else alibi + bias
    k, v = (_gather_slots(cache, slots) for cache in (k_cache, v_cache))
    attended = F.scaled_dot_product_attention(
        q.index_select(0, index).view(*grouped, head_dim),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=bias,
        scale=scale,
    )
    out.index_copy_(0, index, attended.reshape(num_rows, num_heads, -1))


def _attend_chunk(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    block_table: Tensor,
    kv_len: int,
    scale: float,
    alibi_slopes: Tensor | None,
    window: int | None,
    prefix_len: int,
) -> None:
    """The last ``len(q)`` of a row's tokens, tile by tile, each over the keys that it can see.

    torch's ``is_causal`` computes the masked half too, and knows no cached prefix. A tile of 64
    queries computes little that is masked: 35% less time for 512 queries over 512 keys.
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = v_cache.shape[2:]
    grouped = (num_kv_heads, num_heads // num_kv_heads)
    # torch gives 32 queries of a head to a thread; several such tasks a thread balance.
    tile = 64 if num_heads * 2 >= 4 * torch.get_num_threads() else 128
    tile = min(tile, num_queries)
    start_pos = kv_len - num_queries
    prefix_len = min(prefix_len, kv_len)
    if window is None and prefix_len <= start_pos + 1:
        prefix_len = 0  # every query sees it anyway

    first_key = 0 if window is None or prefix_len else max(start_pos - window + 1, 0)
    k, v = _row_tokens(k_cache, v_cache, block_table, first_key, kv_len)
    by_products = _copies_into_tiles(q)
    if by_products:
        k = k.permute(1, 2, 0).to(torch.float32, memory_format=torch.contiguous_format)
        v = v.transpose(0, 1)
    else:
        k = k.transpose(0, 1)[:, None].expand(*grouped, -1, -1)
        v = v.transpose(0, 1)[:, None].expand(*grouped, -1, -1)
    q = q.view(num_queries, *grouped, head_dim).permute(1, 2, 0, 3)
    out = out.view(num_queries, *grouped, v_head_dim).permute(1, 2, 0, 3)

    # What a causal tile adds to its logits hangs only on j - i, so all tiles slice one band:
    # column c stands for the key at distance c - reach from the tile's first query.
    reach = start_pos + (num_queries - 1) // tile * tile - first_key
    if window is not None:
        reach = min(reach, window - 1)
    band = _bias(
        torch.arange(-reach, tile), torch.arange(tile)[:, None], alibi_slopes, grouped, window, 0
    )
    for begin in range(0, num_queries, tile):
        end = min(begin + tile, num_queries)
        pos = start_pos + begin
        low = first_key if window is None or prefix_len else max(pos - window + 1, 0)
        high = max(start_pos + end, prefix_len)
        if prefix_len:
            j = torch.arange(low, high)
            i = torch.arange(pos, start_pos + end)[:, None]
            bias = _bias(j, i, alibi_slopes, grouped, window, prefix_len)
        else:
            bias = band[..., : end - begin, low - pos + reach : high - pos + reach]
        keys = slice(low - first_key, high - first_key)
        if by_products:
            attended = _attend_tile(q[:, :, begin:end], k[..., keys], v[:, keys], bias, scale)
            out[:, :, begin:end] = attended
            continue
        out[:, :, begin:end] = F.scaled_dot_product_attention(
            q[:, :, begin:end], k[:, :, keys], v[:, :, keys], attn_mask=bias, scale=scale
        )


def _attend_tile(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """``q [Hk, G, m, D]`` over ``k [Hk, D, n]`` float32 and ``v [Hk, n, Dv]``, by two products.

    As in torch's kernel, probabilities are rounded to v's type and logits are not rounded.
    """
    num_kv_heads, group, num_queries, head_dim = q.shape
    queries = q.to(torch.float32, memory_format=torch.contiguous_format).mul_(scale)
    logits = torch.bmm(queries.view(num_kv_heads, group * num_queries, head_dim), k)
    logits.view(num_kv_heads, group, num_queries, -1).add_(bias)
    attended = torch.bmm(logits.softmax(dim=-1).to(v.dtype), v)
    return attended.view(num_kv_heads, group, num_queries, -1)


def _copies_into_tiles(q: Tensor) -> bool:
    """Whether attention of q's type is faster in float32 than in torch's kernel.

    On one Zen 5 core a token over 640 others takes 126 us in bfloat16 and 86 with all of it turned
    to float32 (3 KV heads of 64, nothing in a cache); 512 tokens over each other 4.8 ms in that
    kernel and 3.2 by :func:`_attend_tile`. AMX multiplies such tiles itself.
    """
    return q.dtype != torch.float32 and not _has_amx()


@cache
def _has_amx() -> bool:
    return bool(torch.cpu._is_amx_tile_supported())


def _bias(
    j: Tensor,
    i: Tensor,
    alibi_slopes: Tensor | None,
    grouped: tuple[int, int],
    window: int | None,
    prefix_len: int,
) -> Tensor:
    """Mask and ALiBi of keys ``j [n]``, queries ``i [m, 1]``: ``[m, n]`` or ``[Hk, G, m, n]``."""
    masked = j > i
    if window is not None:
        masked |= j <= i - window
    if prefix_len:
        masked &= j >= prefix_len
    bias = torch.zeros(masked.shape).masked_fill_(masked, -torch.inf)
    if alibi_slopes is None:
        return bias
    return bias + alibi_slopes.view(*grouped, 1, 1) * (j - i)


def _row_tokens(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, start: int, end: int
) -> tuple[Tensor, Tensor]:
    """Keys and values ``[end - start, Hk, D]`` of a row's tokens; views if its blocks adjoin."""
    block_size = k_cache.shape[1]
    first = start // block_size
    blocks = block_table[first : -(-end // block_size)]
    ids: list[int] = blocks.tolist()
    adjoining = ids == list(range(ids[0], ids[0] + len(ids)))
    begin = start - first * block_size
    tokens = slice(begin, begin + end - start)

    def gather(cache: Tensor) -> Tensor:
        held = cache[ids[0] : ids[-1] + 1] if adjoining else cache.index_select(0, blocks)
        return held.flatten(0, 1)[tokens]

    return gather(k_cache), gather(v_cache)


def _gather_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """The tokens in ``slots [R, n]`` of a cache: ``[R, n, Hk, D]``."""
    block_size = cache.shape[1]
    if cache.stride(0) == block_size * cache.stride(1):
        tokens = cache.flatten(0, 1).index_select(0, slots.flatten())
        return tokens.view(*slots.shape, *cache.shape[2:])
    return cache[slots // block_size, slots % block_size]


def _groups(rows: list[int], spans: list[int], values_per_token: int) -> Iterator[list[int]]:
    """Split decode rows into groups of similar length, longest first."""
    max_gathered = max(_MAX_GATHERED, _MAX_GATHERED_PER_THREAD * torch.get_num_threads())
    group: list[int] = []
    padding = 0
    for row in sorted(rows, key=spans.__getitem__, reverse=True):
        if group:
            widest = spans[group[0]]
            padding += (widest - spans[row]) * values_per_token
            gathered = (len(group) + 1) * widest * values_per_token
            if padding > _MAX_PADDING or gathered > max_gathered:
                yield group
                group, padding = [], 0
        group.append(row)
    yield group
