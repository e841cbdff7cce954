"""Attention in both directions within segments of a sequence, without a cache: for encoders."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Segments", "attend_segments"]

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
# Tokens of the longest segment from which on the kernel for Hopper is taken.
_LONG = 256
# Heads that PyTorch's flash kernel takes: up to so wide, in steps of 8.
_WIDEST_FLASH = 256


class Segments:
    """The segments of a sequence. The tokens of each see each other and no others.

    Where they begin is computed on the device from the host's numbers, so that nobody waits and a
    CUDA graph may contain it.

    Attributes:
        runs: how many segments of equal size follow each other, and that size.
        length: tokens in all; -1 if only the device knows.
        longest: tokens of the largest segment.
        starts: ``[segments + 1]`` int32 on a GPU, where each begins and the last one ends; None on
            a CPU.
    """

    def __init__(self, runs: Iterable[tuple[int, int]], device: torch.device) -> None:
        """``runs``: as the attribute, each of at least one segment of at least one token.

        Raises:
            ValueError: there are none, or one is not positive.
        """
        given = [(count, size) for count, size in runs]
        if not given or min(map(min, given)) <= 0:
            raise ValueError(f"Segments: runs must be positive counts and sizes, got {given}")
        self.runs = [
            (sum(count for count, _ in same), size)
            for size, same in groupby(given, key=lambda run: run[1])
        ]
        self.length = sum(count * size for count, size in self.runs)
        self.longest = max(size for _, size in self.runs)
        self.starts: Tensor | None = None
        if device.type == "cuda":
            begin, parts = 0, []
            for count, size in self.runs:
                end = begin + count * size
                parts.append(torch.arange(begin, end, size, dtype=torch.int32, device=device))
                begin = end
            parts.append(torch.full((1,), begin, dtype=torch.int32, device=device))
            self.starts = torch.cat(parts)

    @classmethod
    def between(cls, starts: Tensor, longest: int) -> Segments:
        """Those that begin at ``starts [segments + 1]`` int32, whose last is the end of all.

        On a GPU with kernels for them nobody waits for the starts.
        """
        if starts.device.type != "cuda":
            return cls([(1, size) for size in starts.diff().tolist()], starts.device)
        made = cls.__new__(cls)
        made.starts, made.longest, made.length = starts, longest, -1
        return made

    def parts(self, count: int) -> list[Segments]:
        """Whole segments, in their order, in at most ``count`` parts about equally long; on a CPU.

        A segment is in the part that its middle falls to.
        """
        parts: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        begin = 0
        for number, size in self.runs:
            for _ in range(number):
                parts[(2 * begin + size) * count // (2 * self.length)].append((1, size))
                begin += size
        return [Segments(part, torch.device("cpu")) for part in parts if part]

    def __getattr__(self, name: str) -> Any:
        if name != "runs":
            raise AttributeError(name)
        assert self.starts is not None, "runs are there on a CPU"
        sizes = self.starts.diff().tolist()
        self.runs = [(len(list(same)), size) for size, same in groupby(sizes)]
        return self.runs


def attend_segments(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float | None = None
) -> Tensor:
    """Softmax attention of each token to all tokens of its segment.

    Segments do not influence each other, bit for bit. On a GPU all of them are one launch in 16
    bits: on Hopper of our own kernel where segments are long and heads 64 to 128 wide, else of
    PyTorch's flash kernel. Elsewhere those of one size are attended to at once.

    Args:
        q: ``[N, heads, D]``, last dimension contiguous, on the device of the segments.
        k: the same.
        v: the same.
        segments: N tokens.
        scale: multiplies the scores; ``D ** -0.5`` if None.

    Returns:
        ``[N, heads, D]``.

    Raises:
        ValueError: shapes are not as above.
    """
    fits = segments.length in (-1, len(q))
    if q.dim() != 3 or not q.shape == k.shape == v.shape or not fits:
        raise ValueError(
            f"attend_segments: q, k and v must be [{segments.length}, heads, D], got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    width = q.shape[-1]
    flash = q.dtype in _FLASH_DTYPES and width % 8 == 0 and width <= _WIDEST_FLASH
    if segments.starts is not None and flash:
        starts, longest = segments.starts, segments.longest
        if longest >= _LONG and (scale is None or scale > 0):
            from engine_core.kernels.launch.gluon import runs_gluon

            if runs_gluon(q.device):
                from engine_core.kernels.launch.triton import num_multiprocessors
                from engine_core.kernels.segments.hopper import triton as hopper

                if hopper.fits(q, k, v) and hopper.is_trusted(q, longest):
                    scale = width**-0.5 if scale is None else scale
                    programs = num_multiprocessors(q.device)
                    return hopper.attend(q, k, v, starts, longest, scale, programs)
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, False, False, scale=scale
        )[0]
        return out
    lengths = [count * size for count, size in segments.runs]
    pieces = zip(segments.runs, q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([_attend(*piece, scale) for piece in pieces])


def _attend(run: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """A run of segments of one size, ``[count * size, heads, D]``."""
    q, k, v = (part.unflatten(0, run).transpose(1, 2) for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)
