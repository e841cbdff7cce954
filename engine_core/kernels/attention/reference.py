"""Paged attention in plain PyTorch: one row at a time, with all logits, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_core.kernels.codes import dequantized


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    *,
    block_tables: Tensor,
    query_start: Tensor,
    kv_lens: Tensor,
    scale: float,
    alibi_slopes: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    prefix_lens: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Write attention into ``out``; arguments as of :class:`Call`, on any device."""
    block_size, num_kv_heads = k_cache.shape[1:3]
    group_size = q.shape[1] // num_kv_heads
    starts, lens = query_start.tolist(), kv_lens.tolist()
    prefixes = [0] * len(lens) if prefix_lens is None else prefix_lens.tolist()
    for row, (kv_len, prefix_len) in enumerate(zip(lens, prefixes, strict=True)):
        begin, end = starts[row], starts[row + 1]
        if kv_len == 0:
            out[begin:end] = 0
            continue
        j = torch.arange(kv_len, device=q.device)
        i = j[kv_len - (end - begin) :, None]
        blocks, offsets = block_tables[row, j // block_size].long(), j % block_size
        k = _tokens(k_cache, k_scales, blocks, offsets).repeat_interleave(group_size, dim=1)
        v = _tokens(v_cache, v_scales, blocks, offsets).repeat_interleave(group_size, dim=1)

        logits = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if alibi_slopes is not None:
            logits = logits + alibi_slopes[:, None, None] * (j - i)
        visible = j <= i
        if window is not None:
            visible &= j > i - window
        visible |= j < prefix_len
        weights = logits.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)


def _tokens(cache: Tensor, scales: Tensor | None, blocks: Tensor, offsets: Tensor) -> Tensor:
    """``[n, Hk, D]`` float32, of codes times their scales."""
    if scales is None:
        return cache[blocks, offsets].float()
    codes = cache.view(torch.int8)[blocks, offsets].view(cache.dtype)
    return dequantized(codes, scales[blocks, :, offsets], torch.float32)
