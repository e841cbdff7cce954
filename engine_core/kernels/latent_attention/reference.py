"""Latent attention in plain PyTorch: every head's keys and values, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine_core.kernels.latent_attention import LatentCall


def latent_attention(call: LatentCall) -> Tensor:
    """See :func:`engine_core.kernels.latent_attention`."""
    q, up, rank, nope = call.q.float(), call.up.float(), call.rank, call.nope_dim
    block_size = call.cache.shape[1]
    out = call.q.new_zeros((*q.shape[:2], up.shape[1] - nope))
    starts = call.query_start.tolist()
    for row, kv_len in enumerate(call.kv_lens.tolist()):
        queries = slice(starts[row], starts[row + 1])
        if kv_len == 0 or starts[row] == starts[row + 1]:
            continue
        j = torch.arange(kv_len, device=q.device)
        held = call.cache[call.block_tables[row, j // block_size].long(), j % block_size].float()
        keys, values = torch.einsum("hdr,kr->hkd", up, held[:, :rank]).split(
            (nope, up.shape[1] - nope), dim=-1
        )
        logits = torch.einsum("qhd,hkd->hqk", q[queries, :, :nope], keys)
        logits += torch.einsum("qhd,kd->hqk", q[queries, :, nope:], held[:, rank:])
        i = j[kv_len - (starts[row + 1] - starts[row]) :, None]
        weights = (logits * call.scale).masked_fill(j > i, -torch.inf).softmax(dim=-1)
        out[queries] = torch.einsum("hqk,hkd->qhd", weights, values).to(out.dtype)
    return out
