"""State-space layers: a causal convolution and a selective scan (Mamba-2), over cached states.

The scan is that of Dao and Gu, "Transformers are SSMs" (2024). A state decays by a factor of each
token and head, and takes up the token: ``state = exp(dt * a) * state + dt * outer(x, B)``; the
result is ``state @ C + d * x``.

A block of the cache keeps two states, and of how many tokens each is the state. The state after a
sequence's last token takes the place of the one that it was not made of. So a step that runs twice
finds what it began with. A full block keeps the state at its end, for the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine_core.kernels.gpu import gpu_of
from engine_core.kernels.state_space import cpu, reference

__all__ = ["StateCache", "StateRows", "StateSpaceWeights", "run_state_space"]


class StateCache(NamedTuple):
    """One layer's cache; all dimensions but the first are contiguous.

    Attributes:
        lengths: ``[num_blocks, 2]`` int32, the tokens of which each state is the state.
        inputs: ``[num_blocks, 2, K - 1, channels]``, the convolution's last inputs before it.
        states: ``[num_blocks, 2, heads, P, N]`` float32.
    """

    lengths: Tensor
    inputs: Tensor
    states: Tensor


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a step, as of :class:`~engine_core.step_context.AttentionMetadata`.

    Attributes:
        query_start: ``[R + 1]`` int32, where each row's tokens begin.
        kv_lens: ``[R]`` int32, tokens of each row with this step's; 0 for padding.
        max_query_len: the largest number of tokens of a row.
        num_decode_rows: the first so many rows have one token.
        block_tables: ``[R, max_blocks]`` int32.
        block_size: tokens of a block.
    """

    query_start: Tensor
    kv_lens: Tensor
    max_query_len: int
    num_decode_rows: int
    block_tables: Tensor
    block_size: int


class StateSpaceWeights(NamedTuple):
    """The parameters of one layer.

    Attributes:
        conv_weight: ``[channels, K]``; the last column is of the token itself.
        conv_bias: ``[channels]``, or None.
        a_log: ``[heads]`` float32; ``a`` is ``-exp(a_log)``.
        d: ``[heads]`` float32.
        dt_bias: ``[heads]`` float32, added to ``dt`` before its softplus.
        dt_min: the least ``dt`` after that.
        dt_max: the greatest.
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    a_log: Tensor
    d: Tensor
    dt_bias: Tensor
    dt_min: float
    dt_max: float


def run_state_space(
    xbc: Tensor, dt: Tensor, weights: StateSpaceWeights, cache: StateCache, rows: StateRows
) -> Tensor:
    """The convolution with its SiLU, then the scan; the cache is written in place.

    Args:
        xbc: ``[T, channels]``: x of all heads ``[heads * P]``, then B and C of all groups
            ``[groups * N]``; the last dimension contiguous. Head h is of group
            ``h // (heads // groups)``.
        dt: ``[T, heads]``, likewise.
        weights: see :class:`StateSpaceWeights`.
        cache: see :class:`StateCache`.
        rows: see :class:`StateRows`.

    Returns:
        ``[T, heads, P]``, xbc's dtype. What rows of padding get is not said.

    Raises:
        ValueError: shapes or dtypes are not as above.
    """
    _check(xbc, dt, weights, cache)
    if not xbc.is_cuda:
        return cpu.run_state_space(xbc, dt, weights, cache, rows)
    if gpu_of(xbc.device) is not None:
        from engine_core.kernels.state_space import triton

        out: Tensor = triton.run_state_space(xbc, dt, weights, cache, rows)
        return out
    return reference.run_state_space(xbc, dt, weights, cache, rows)


def _check(xbc: Tensor, dt: Tensor, weights: StateSpaceWeights, cache: StateCache) -> None:
    heads, width, size = cache.states.shape[2:]
    channels, taps = weights.conv_weight.shape
    groups = (channels - heads * width) // (2 * size)
    if groups < 1 or heads % groups or channels != heads * width + 2 * groups * size:
        raise ValueError(
            f"run_state_space: {channels} channels are not {heads} heads of {width} and B and C of "
            f"groups that divide them, {size} numbers each"
        )
    if xbc.shape[1:] != (channels,) or dt.shape != (len(xbc), heads):
        raise ValueError(
            f"run_state_space: xbc must be [T, {channels}] and dt [T, {heads}], got "
            f"{tuple(xbc.shape)} and {tuple(dt.shape)}"
        )
    if cache.inputs.shape[1:] != (2, taps - 1, channels) or cache.inputs.dtype != xbc.dtype:
        raise ValueError(
            f"run_state_space: the cache's inputs must be [num_blocks, 2, {taps - 1}, {channels}] "
            f"{xbc.dtype}, got {tuple(cache.inputs.shape)} {cache.inputs.dtype}"
        )
    if cache.states.dtype != torch.float32 or cache.lengths.dtype != torch.int32:
        raise ValueError(
            "run_state_space: the cache's states must be float32 and its lengths int32, got "
            f"{cache.states.dtype} and {cache.lengths.dtype}"
        )
