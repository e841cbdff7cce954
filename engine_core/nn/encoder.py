"""Attention in both directions over the prompts of a step, for models that keep no cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine_core.kernels import Segments, attend_segments
from engine_core.nn.linear import build_o_proj, build_qkv_proj
from engine_core.nn.module import Module
from engine_core.step_context import AttentionMetadata


def step_segments(attn_metadata: AttentionMetadata) -> Segments:
    """The prompts of a step, each of which attends to itself: for :class:`EncoderAttention`.

    A model's ``forward`` makes them once for all layers.
    """
    return Segments.between(attn_metadata.query_start, attn_metadata.max_query_len)


class EncoderAttention(Module):
    """Project to q, k and v, attend within each prompt, project back. Split over ranks by heads."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        bias: bool = True,
        scale: float | None = None,
    ) -> None:
        """``num_heads`` is the whole model's; ``scale`` is ``head_dim ** -0.5`` if None."""
        super().__init__()
        self.qkv_proj = build_qkv_proj(hidden_size, num_heads, num_heads, head_dim, bias=bias)
        self.o_proj = build_o_proj(num_heads * head_dim, hidden_size, bias=bias)
        self.scale = scale

    def forward(self, x: Tensor, segments: Segments) -> Any:
        """``x [1, T, H]`` to ``[1, T, H]``; see :func:`step_segments`."""
        q, k, v = self.qkv_proj.split_qkv(self.qkv_proj(x))
        heads = attend_segments(q, k, v, segments, scale=self.scale)
        return self.o_proj(heads.flatten(1).unsqueeze(0))
