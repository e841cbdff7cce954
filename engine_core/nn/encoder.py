"""Attention in both directions over the prompts of a step, for models that keep no cache."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.kernels import Segments, attend_segments, compiled
from engine_core.nn.linear import build_o_proj, build_qkv_proj
from engine_core.nn.module import Module, hooks_registered
from engine_core.step_context import AttentionMetadata, current_build_context

# Of fewer tokens for each thread all threads compute each operation together.
_LEAST = 32
# Nor where a thread would have more than so many times its share.
_LONGEST = 1.5


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


class EncoderLayers(nn.ModuleList):
    """Layers one after another, through which the prompts of a step may go in parts.

    On a CPU each thread takes some of the prompts through all layers: threads that compute every
    operation together wait for each other after each, and where other processes want the cores, for
    whoever has lost its turn. Beside eight such processes two threads took 1.3 s instead of 3.8 for
    200 sentences of all-MiniLM-L6-v2.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__(layers)
        self._alone = current_build_context().tp_size == 1

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        """``[1, T, H]`` to ``[1, T, H]``; see :func:`step_segments`. A layer takes both."""
        parts = self._parts(x, segments)
        if len(parts) < 2:
            return self._run(x, segments)
        pieces = x.split([part.length for part in parts], 1)
        runs = [partial(self._run, *each) for each in zip(pieces, parts, strict=True)]
        return torch.cat(compiled.openmp().each(runs, len(parts)), 1)

    def _parts(self, x: Tensor, segments: Segments) -> list[Segments]:
        """Each thread's share; none if it is better that all compute it together."""
        threads = torch.get_num_threads()
        if not (x.is_cpu and self._alone and compiled.available() and compiled.openmp().found):
            return []
        if segments.length < _LEAST * threads or hooks_registered(self):
            return []
        parts = segments.parts(threads)
        longest = max(part.length for part in parts)
        return parts if longest * threads <= _LONGEST * segments.length else []

    def _run(self, x: Tensor, segments: Segments) -> Tensor:
        for layer in self:
            x = layer(x, segments)
        return x
