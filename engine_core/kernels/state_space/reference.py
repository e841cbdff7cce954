"""The convolution and the scan in plain PyTorch, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from engine_core.kernels.state_space import StateCache, StateRows, StateSpaceWeights


def place_of(cache: StateCache, block: int, length: int) -> int:
    """Which of a block's two states is the one after ``length`` tokens."""
    return 0 if int(cache.lengths[block, 0]) == length else 1


def target_of(start: int, position: int, block_size: int, source: int) -> int:
    """Which of its block's two states becomes that after ``position``, in a step from ``start``.

    ``source`` is the place of the state that the step began with.
    """
    shared = start > 0 and position // block_size == (start - 1) // block_size
    return 1 - source if shared else 0


def run_state_space(
    xbc: Tensor, dt: Tensor, weights: StateSpaceWeights, cache: StateCache, rows: StateRows
) -> Tensor:
    """See :func:`engine_core.kernels.run_state_space`."""
    heads, width, size = cache.states.shape[2:]
    group = heads // ((xbc.shape[1] - heads * width) // (2 * size))
    out = xbc.new_zeros(len(xbc), heads, width)
    steps = F.softplus(dt.float() + weights.dt_bias).clamp(weights.dt_min, weights.dt_max)
    decays = torch.exp(steps * -weights.a_log.exp())
    starts, tables = rows.query_start.tolist(), rows.block_tables.tolist()
    for row, length in enumerate(rows.kv_lens.tolist()):
        if length == 0:
            continue
        begin, count = starts[row], starts[row + 1] - starts[row]
        start, source = length - count, 0
        inputs = xbc.new_zeros(cache.inputs.shape[2:])
        state = cache.states.new_zeros(heads, width, size)
        if start > 0:
            block = tables[row][(start - 1) // rows.block_size]
            source = place_of(cache, block, start)
            inputs, state = cache.inputs[block, source], cache.states[block, source].clone()
        for token, position in enumerate(range(start, length), begin):
            window = torch.cat([inputs, xbc[token : token + 1]])
            inputs = window[1:]
            mixed = (window.float() * weights.conv_weight.float().t()).sum(0)
            if weights.conv_bias is not None:
                mixed = mixed + weights.conv_bias.float()
            mixed = F.silu(mixed).to(xbc.dtype).float()
            x = mixed[: heads * width].view(heads, width)
            b, c = mixed[heads * width :].view(2, -1, size).repeat_interleave(group, dim=1)
            state *= decays[token].view(-1, 1, 1)
            state += (steps[token].view(-1, 1) * x).unsqueeze(-1) * b.unsqueeze(1)
            y = (state * c.unsqueeze(1)).sum(-1) + weights.d.view(-1, 1) * x
            out[token] = y.to(out.dtype)
            end = position + 1
            if end == length or end % rows.block_size == 0:
                block = tables[row][position // rows.block_size]
                target = target_of(start, position, rows.block_size, source)
                cache.inputs[block, target] = inputs
                cache.states[block, target] = state
                cache.lengths[block, target] = end
    return out
