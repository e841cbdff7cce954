"""Latent attention on a CPU, by the attention of queries over keys and values.

A decode row, whose up-projections are absorbed, is all heads' queries over one KV head: its keys
are what the cache has of a token, and its values the first part of them. A row of several queries
takes the keys and values of every head, if making them costs less than it saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.kernels.attention import cpu
from engine_core.kernels.attention.call import Call

if TYPE_CHECKING:
    from engine_core.kernels.latent_attention import LatentCall


def latent_attention(call: LatentCall) -> Tensor:
    """See :func:`engine_core.kernels.latent_attention`."""
    decoding, num_rows = call.num_decode_rows, len(call.kv_lens)
    if decoding == num_rows and decoding == len(call.q):
        return _absorbed(call, 0, num_rows, 0, len(call.q))
    out = call.q.new_zeros((*call.q.shape[:2], call.up.shape[1] - call.nope_dim))
    if decoding:
        out[:decoding] = _absorbed(call, 0, decoding, 0, decoding)
    starts, lens = call.query_start.tolist(), call.kv_lens.tolist()
    for row in range(decoding, num_rows):
        begin, end = starts[row], starts[row + 1]
        if lens[row] and begin < end:
            attend = _expanded if call.expands(end - begin, lens[row]) else _absorbed
            out[begin:end] = attend(call, row, row + 1, begin, end)
    return out


def _absorbed(call: LatentCall, row: int, last_row: int, begin: int, end: int) -> Tensor:
    """Rows ``[row, last_row)``, of queries ``[begin, end)``, over what the cache has."""
    rows = slice(row, last_row)
    q = call.absorbed(call.q[begin:end])
    keys = call.cache.unsqueeze(2)
    attended = q.new_empty((*q.shape[:2], call.rank))
    starts = call.query_start[row : last_row + 1]
    cpu.paged_attention(
        Call(
            q, keys, keys[..., : call.rank], attended, call.block_tables[rows],
            starts - begin if begin else starts, call.kv_lens[rows], call.max_query_len,
            call.max_kv_len, min(call.num_decode_rows, last_row) - min(call.num_decode_rows, row),
            call.scale, memo=call.memo.setdefault((row, last_row), {}),
        )
    )  # fmt: skip
    return call.released(attended)


def _expanded(call: LatentCall, row: int, _: int, begin: int, end: int) -> Tensor:
    """One row, of queries ``[begin, end)``, over every head's keys and values."""
    num_heads, dims = call.up.shape[:2]
    nope, kv_len = call.nope_dim, int(call.kv_lens[row])
    blocks = call.block_tables[row, : -(-kv_len // call.cache.shape[1])]
    held = call.cache.index_select(0, blocks).flatten(0, 1)[:kv_len]
    made = F.linear(held[:, : call.rank], call.up.flatten(0, 1)).view(kv_len, num_heads, dims)
    rope = held[:, None, call.rank :].expand(-1, num_heads, -1)
    keys = torch.cat((made[..., :nope], rope), dim=-1)
    out = made.new_empty((end - begin, num_heads, dims - nope))
    # One block, as long as the row.
    where: Any = {"dtype": torch.int32}
    cpu.paged_attention(
        Call(
            call.q[begin:end], keys[None], made[None, ..., nope:], out,
            torch.zeros((1, 1), **where), torch.tensor([0, end - begin], **where),
            call.kv_lens[row : row + 1], end - begin, kv_len, 0, call.scale,
        )
    )  # fmt: skip
    return out
