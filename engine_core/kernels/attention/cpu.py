"""Paged attention on a CPU, through torch's fused scaled_dot_product_attention.

Decode rows have a kernel of their own where kernels can be compiled. The code for them here is for
where they cannot.

torch's kernel packs the keys of one batch entry and head, then multiplies them with that entry's
queries. So the query heads of one KV head are given to it as query positions when decoding, and as
heads over stride-0 keys in a prefill chunk: neither copies a key more than once. ``enable_gqa`` is
up to 1.7 times slower when decoding in float32, and 20 times in bfloat16.

In low precision that kernel copies keys and values into another layout. Without AMX it costs more
than it saves: see :func:`_copies_into_tiles`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.kernels import compiled
from engine_core.kernels.attention import reference
from engine_core.kernels.attention.call import Call
from engine_core.kernels.codes import dequantized

# Decode rows are attended together until their padding costs more than one more call would: about
# 60 us, in which one core attends to 2**17 values.
_MAX_PADDING = 2**17
# Keys and values gathered at once. With 2**20 (4 MiB in float32) they are still in a cache when
# they are used: on one Zen 5 core 2**18 and 2**22 take 1.2 to 1.5 times as long (256 rows of 256
# tokens, 3 KV heads of 64). Many threads need more, to have two tasks each.
_MAX_GATHERED = 2**20
_MAX_GATHERED_PER_THREAD = 2**18
# An empty summand for :func:`torch.baddbmm`.
_NOTHING = torch.zeros(1, device="cpu")


class _Span(NamedTuple):
    """The place of adjoining tokens of a row.

    Attributes:
        num_tokens: how many.
        block: the block of the first, if all blocks adjoin.
        offset: of the first in its block.
        blocks: all blocks, if they do not adjoin; else None.
    """

    num_tokens: int
    block: int
    offset: int
    blocks: Tensor | None


class _Group(NamedTuple):
    """Decode rows that are attended together, padded to ``n`` tokens each.

    Attributes:
        rows: ``[R]`` int64.
        slots: ``[R, n]``, of a token that the row sees where it has none.
        bias: ``[R, 1, 1, n]``, -inf where it has none; None if all have n.
        distance: ``[R, 1, 1, n]``, each token's position less the query's.
    """

    rows: Tensor
    slots: Tensor
    bias: Tensor | None
    distance: Tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan of a step's attention, the same in all layers with equal caches.

    Attributes:
        empty: queries of rows of length 0, as ``(begin, end)``.
        rows: decode rows that are attended one by one.
        groups: decode rows that are attended together.
        chunks: ``(row, begin, end)`` of rows with several queries, or with a prefix and a window.
    """

    empty: list[tuple[int, int]]
    rows: list[tuple[int, _Span]]
    groups: list[_Group]
    chunks: list[tuple[int, int, int]]


def paged_attention(call: Call) -> None:
    """Write attention into ``call.out``."""
    window, prefix_lens = call.window, call.prefix_lens
    done = 0
    if call.num_decode_rows and (window is None or prefix_lens is None) and compiled.takes(call.q):
        done = call.num_decode_rows
        compiled.kernels("attention").decode_attention(call)
        if len(call.q) == done == len(call.kv_lens):
            return
    if call.softcap is not None:
        # Rows that are done have one query each.
        reference.paged_attention(
            call.q[done:],
            call.k_cache,
            call.v_cache,
            call.out[done:],
            block_tables=call.block_tables[done:],
            query_start=call.query_start[done:] - done,
            kv_lens=call.kv_lens[done:],
            scale=call.scale,
            alibi_slopes=call.alibi_slopes,
            window=window,
            softcap=call.softcap,
            prefix_lens=None if prefix_lens is None else prefix_lens[done:],
            k_scales=call.k_scales,
            v_scales=call.v_scales,
        )
        return
    key = (call.k_cache.shape, call.v_cache.shape, window)
    plan: _Plan | None = call.memo.get(key)
    if plan is None:
        plan = call.memo[key] = _plan(call, done)
    for begin, end in plan.empty:
        call.out[begin:end].zero_()
    for row, span in plan.rows:
        call.out[row].copy_(_attend_row(call, row, span).flatten(0, 1))
    for group in plan.groups:
        _attend_group(call, group)
    for row, begin, end in plan.chunks:
        _attend_chunk(call, row, begin, end)


def _plan(call: Call, done: int) -> _Plan:
    """A plan of all rows but the first ``done``."""
    window, block_tables, block_size = call.window, call.block_tables, call.k_cache.shape[1]
    values_per_token = call.k_cache.shape[2] * (call.k_cache.shape[3] + call.v_cache.shape[3])
    starts, lens = call.query_start.tolist(), call.kv_lens.tolist()
    prefixes = None if call.prefix_lens is None else call.prefix_lens.tolist()
    plan = _Plan([], [], [], [])
    batch: list[int] = []
    for row in range(done, len(lens)):
        kv_len = lens[row]
        if kv_len == 0:
            plan.empty.append((starts[row], starts[row + 1]))
        elif row >= call.num_decode_rows or (window is not None and prefixes and prefixes[row]):
            if starts[row] < starts[row + 1]:
                plan.chunks.append((row, starts[row], starts[row + 1]))
        else:
            batch.append(row)
    spans = lens if window is None else [min(kv_len, window) for kv_len in lens]
    for rows in _groups(batch, spans, values_per_token):
        if len(rows) > 1:
            plan.groups.append(_group(block_tables, rows, spans, lens, block_size))
            continue
        row = rows[0]
        span = _span(block_tables[row], lens[row] - spans[row], lens[row], block_size)
        plan.rows.append((row, span))
    return plan


def _span(block_table: Tensor, start: int, end: int, block_size: int) -> _Span:
    """The place of tokens ``start`` to ``end`` of a row."""
    first = start // block_size
    blocks = block_table[first : -(-end // block_size)]
    ids: list[int] = blocks.tolist()
    adjoining = ids == list(range(ids[0], ids[0] + len(ids)))
    offset = start - first * block_size
    return _Span(end - start, ids[0], offset, None if adjoining else blocks)


def _group(
    block_tables: Tensor, rows: list[int], spans: list[int], lens: list[int], block_size: int
) -> _Group:
    """The last ``spans[row]`` tokens of each row."""
    index = torch.tensor(rows)
    kv_len = torch.tensor([lens[row] for row in rows])[:, None]
    start = kv_len - torch.tensor([spans[row] for row in rows])[:, None]
    # Beyond a row's last token its first is read: masked values must be numbers, since 0 * NaN is
    # NaN.
    num_slots = int((kv_len - start).max())
    positions = start + torch.arange(num_slots)
    visible = positions < kv_len
    shown = torch.where(visible, positions, start)
    blocks = block_tables.index_select(0, index).gather(1, shown // block_size)
    slots = blocks * block_size + shown % block_size
    bias = None
    if not bool(visible.all()):
        bias = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None, None]
    return _Group(index, slots, bias, (positions - kv_len + 1)[:, None, None])


def _attend_row(call: Call, row: int, span: _Span) -> Tensor:
    """One query ``[Hq, D]`` over a span's tokens: ``[Hk, Hq / Hk, Dv]``.

    In float32, or in q's type.
    """
    q, scale, alibi_slopes = call.q[row], call.scale, call.alibi_slopes
    num_heads, head_dim = q.shape
    num_kv_heads = call.k_cache.shape[2]
    k, v = _row_tokens(call, span)
    grouped = (num_kv_heads, num_heads // num_kv_heads)
    bias = None
    if alibi_slopes is not None:
        bias = alibi_slopes.view(*grouped, 1) * torch.arange(1 - span.num_tokens, 1)
    if _copies_into_tiles(q):
        # Two products take 64 us where torch's kernel takes 73: 527 tokens, 3 KV heads of 64, on
        # two Zen 5 cores, with keys and values in main memory.
        logits = torch.baddbmm(
            _NOTHING if bias is None else bias,
            q.float().view(*grouped, head_dim),
            k.float().permute(1, 2, 0),
            beta=0 if bias is None else 1,
            alpha=scale,
        )
        return torch.bmm(logits.softmax(dim=-1), v.float().transpose(0, 1))
    return F.scaled_dot_product_attention(
        q.reshape(1, *grouped, head_dim),
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=bias,
        scale=scale,
    )[0]


def _attend_group(call: Call, group: _Group) -> None:
    """One query for each of several rows, their keys gathered into one padded batch."""
    num_rows = len(group.rows)
    num_heads, head_dim = call.q.shape[1:]
    num_kv_heads = call.k_cache.shape[2]
    grouped = (num_rows, num_kv_heads, num_heads // num_kv_heads)
    bias = group.bias
    if call.alibi_slopes is not None:
        alibi = call.alibi_slopes.view(1, *grouped[1:], 1) * group.distance
        bias = alibi if bias is None else alibi + bias
    k = _gather_slots(call.k_cache, call.k_scales, group.slots, call.q.dtype)
    v = _gather_slots(call.v_cache, call.v_scales, group.slots, call.q.dtype)
    attended = F.scaled_dot_product_attention(
        call.q.index_select(0, group.rows).view(*grouped, head_dim),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=bias,
        scale=call.scale,
    )
    call.out.index_copy_(0, group.rows, attended.reshape(num_rows, num_heads, -1))


def _attend_chunk(call: Call, row: int, first: int, behind: int) -> None:
    """Queries ``[first, behind)`` of a row, each over the keys that it can see."""
    if compiled.available() and _has_no_prefix(call, row, behind - first):
        kernel = compiled.kernels("attention.chunk")
        if kernel.takes(call):
            kernel.attend_chunk(call, row, first, behind)
            return
    _attend_by_tiles(call, row, first, behind)


def _has_no_prefix(call: Call, row: int, num_queries: int) -> bool:
    """Whether no query of a row sees a token behind it."""
    if call.prefix_lens is None:
        return True
    kv_len = int(call.kv_lens[row])
    prefix_len = min(int(call.prefix_lens[row]), kv_len)
    return prefix_len == 0 or (call.window is None and prefix_len <= kv_len - num_queries + 1)


def _attend_by_tiles(call: Call, row: int, first: int, behind: int) -> None:
    """The same by torch's operations, tile by tile.

    torch's ``is_causal`` computes the masked half too, and knows no cached prefix. A tile of 64
    queries computes little that is masked: 35% less time for 512 queries over 512 keys.
    """
    q, window = call.q[first:behind], call.window
    alibi_slopes, scale, kv_len = call.alibi_slopes, call.scale, int(call.kv_lens[row])
    num_queries, num_heads, head_dim = q.shape
    block_size, num_kv_heads, v_head_dim = call.v_cache.shape[1:]
    grouped = (num_kv_heads, num_heads // num_kv_heads)
    # torch gives 32 queries of a head to a thread; several such tasks a thread balance.
    tile = 64 if num_heads * 2 >= 4 * torch.get_num_threads() else 128
    tile = min(tile, num_queries)
    start_pos = kv_len - num_queries
    prefix_len = 0 if call.prefix_lens is None else min(int(call.prefix_lens[row]), kv_len)
    if window is None and prefix_len <= start_pos + 1:
        prefix_len = 0  # every query sees it anyway

    first_key = 0 if window is None or prefix_len else max(start_pos - window + 1, 0)
    span = _span(call.block_tables[row], first_key, kv_len, block_size)
    k, v = _row_tokens(call, span)
    by_products = _copies_into_tiles(q)
    if by_products:
        k = k.permute(1, 2, 0).to(torch.float32, memory_format=torch.contiguous_format)
        v = v.transpose(0, 1)
    else:
        k = k.transpose(0, 1)[:, None].expand(*grouped, -1, -1)
        v = v.transpose(0, 1)[:, None].expand(*grouped, -1, -1)
    q = q.view(num_queries, *grouped, head_dim).permute(1, 2, 0, 3)
    out = call.out[first:behind].view(num_queries, *grouped, v_head_dim).permute(1, 2, 0, 3)

    # The bias of a causal tile depends only on j - i, so all tiles slice one band: column c stands
    # for the key at distance c - reach from the tile's first query.
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


def _row_tokens(call: Call, span: _Span) -> tuple[Tensor, Tensor]:
    """Keys and values ``[n, Hk, D]`` of a span's tokens; views if its blocks adjoin."""
    end = span.block - -(span.offset + span.num_tokens) // call.k_cache.shape[1]

    def held(of_blocks: Tensor) -> Tensor:
        if span.blocks is None:
            return of_blocks[span.block : end]
        return of_blocks.index_select(0, span.blocks)

    def gather(cache: Tensor, scales: Tensor | None) -> Tensor:
        strides = cache.stride()
        if scales is not None:
            codes = held(cache.view(torch.int8)).view(cache.dtype)
            tokens = dequantized(codes, held(scales).transpose(1, 2), call.q.dtype)
        elif span.blocks is None and strides[0] == cache.shape[1] * strides[1]:
            first = cache.storage_offset() + span.block * strides[0] + span.offset * strides[1]
            return cache.as_strided((span.num_tokens, *cache.shape[2:]), strides[1:], first)
        else:
            tokens = held(cache)
        return tokens.flatten(0, 1)[span.offset : span.offset + span.num_tokens]

    return gather(call.k_cache, call.k_scales), gather(call.v_cache, call.v_scales)


def _gather_slots(
    cache: Tensor, scales: Tensor | None, slots: Tensor, dtype: torch.dtype
) -> Tensor:
    """The tokens in ``slots [R, n]`` of a cache: ``[R, n, Hk, D]``."""
    block_size = cache.shape[1]
    if scales is not None:
        codes = _gather_slots(cache.view(torch.int8), None, slots, dtype).view(cache.dtype)
        return dequantized(codes, scales[slots // block_size, :, slots % block_size], dtype)
    if cache.stride(0) == block_size * cache.stride(1):
        tokens = cache.flatten(0, 1).index_select(0, slots.view(-1))
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
    if group:
        yield group
