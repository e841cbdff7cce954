"""The convolution and the scan on a CPU.

Rows that decode are computed together, by operations that a recording can repeat. A chunk of a
prompt is computed in pieces, each by products of matrices: the tokens of a piece see each other as
in linear attention with a mask of decays, and all that came before by way of the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.kernels import compiled
from engine_core.kernels.state_space.reference import place_of, target_of

if TYPE_CHECKING:
    from engine_core.kernels.state_space import StateCache, StateRows, StateSpaceWeights

# Tokens of a piece. Pieces begin at multiples of it, wherever the chunks of a prompt begin: then a
# block that was computed before has the numbers that it would be computed with again.
_PIECE = 64


def run_state_space(
    xbc: Tensor, dt: Tensor, weights: StateSpaceWeights, cache: StateCache, rows: StateRows
) -> Tensor:
    """See :func:`engine_core.kernels.run_state_space`."""
    steps = F.softplus(dt.float() + weights.dt_bias).clamp(weights.dt_min, weights.dt_max)
    # Logarithms of the decays.
    falls = steps * -weights.a_log.exp()
    count = rows.num_decode_rows
    outs = []
    if count:
        outs.append(_decode(xbc[:count], steps[:count], falls[:count], weights, cache, rows))
    if count == len(rows.kv_lens):
        return outs[0]
    starts, lengths = rows.query_start.tolist(), rows.kv_lens.tolist()
    for row in range(count, len(lengths)):
        own = slice(starts[row], starts[row + 1])
        table = rows.block_tables[row].tolist()
        out = xbc.new_empty(own.stop - own.start, *cache.states.shape[2:4])
        size = rows.block_size
        _prefill(out, xbc[own], steps[own], falls[own], weights, cache, table, lengths[row], size)
        outs.append(out)
    return torch.cat(outs)


def _convolved(window: Tensor, weights: StateSpaceWeights) -> Tensor:
    """``[rows, K - 1 + T, channels]`` to ``[rows, T, channels]``, with the SiLU."""
    taps = weights.conv_weight.shape[1]
    tokens = window.shape[1] - taps + 1
    columns = weights.conv_weight.float().t()
    mixed = window[:, :tokens].float() * columns[0]
    for tap in range(1, taps):
        mixed.addcmul_(window[:, tap : tap + tokens].float(), columns[tap])
    if weights.conv_bias is not None:
        mixed += weights.conv_bias
    return F.silu(mixed).to(window.dtype).float()


def _decode(
    xbc: Tensor,
    steps: Tensor,
    falls: Tensor,
    weights: StateSpaceWeights,
    cache: StateCache,
    rows: StateRows,
) -> Tensor:
    """One token of each of the first rows."""
    count = len(xbc)
    heads, width, size = cache.states.shape[2:]
    starts = rows.kv_lens[:count] - 1
    fresh = starts <= 0
    tables = rows.block_tables[:count]
    places = torch.stack([starts - 1, starts], dim=1).clamp(min=0) // rows.block_size
    blocks = tables.gather(1, places.long()).long()
    source, block = blocks[:, 0], blocks[:, 1]
    place = (cache.lengths[source, 0] != starts).int()
    target = torch.where((source == block) & ~fresh, 1 - place, 0)

    inputs = cache.inputs[source, place].masked_fill_(fresh.view(-1, 1, 1), 0)
    window = torch.cat([inputs, xbc.unsqueeze(1)], dim=1)
    mixed = _convolved(window, weights)[:, 0]
    decays = falls.exp()
    if compiled.takes(cache.states):
        of_block, of_state = cache.states.stride()[:2]
        old = torch.where(fresh, -1, source * of_block + place * of_state)
        places = torch.stack([old, block * of_block + target * of_state])
        kernels = compiled.kernels("state_space")
        y: Tensor = kernels.step_states(mixed, steps, decays, weights.d, cache.states, places)
    else:
        state = cache.states[source, place].masked_fill_(fresh.view(-1, 1, 1, 1), 0)
        state.mul_(decays.view(count, heads, 1, 1))
        x = mixed[:, : heads * width].view(count, heads, width)
        b, c = mixed[:, heads * width :].view(count, 2, -1, size).unbind(1)
        by_group = state.view(count * b.shape[1], -1, size)
        added = (x * steps.unsqueeze(-1)).view(len(by_group), -1, 1)
        by_group.baddbmm_(added, b.reshape(len(by_group), 1, size))
        y = by_group.bmm(c.reshape(len(by_group), size, 1)).view(x.shape)
        y.addcmul_(x, weights.d.view(-1, 1))
        cache.states[block, target] = state
    cache.inputs[block, target] = window[:, 1:]
    cache.lengths[block, target] = starts + 1
    return y.to(xbc.dtype)


def _prefill(
    out: Tensor,
    xbc: Tensor,
    steps: Tensor,
    falls: Tensor,
    weights: StateSpaceWeights,
    cache: StateCache,
    table: list[int],
    length: int,
    block_size: int,
) -> None:
    """The tokens of one row."""
    heads, width, size = cache.states.shape[2:]
    start, source = length - len(xbc), 0
    inputs = xbc.new_zeros(cache.inputs.shape[2:])
    state = cache.states.new_zeros(heads * width, size)
    if start > 0:
        block = table[(start - 1) // block_size]
        source = place_of(cache, block, start)
        inputs = cache.inputs[block, source]
        state = cache.states[block, source].view(heads * width, size)
    window = torch.cat([inputs, xbc])
    mixed = _convolved(window.unsqueeze(0), weights)[0]
    x, b, c = mixed.split([heads * width, *[(xbc.shape[1] - heads * width) // 2] * 2], dim=1)
    begin = start
    while begin < length:
        end = min(length, *((begin // grain + 1) * grain for grain in (_PIECE, block_size)))
        own = slice(begin - start, end - start)
        y, state = _piece(x[own], b[own], c[own], steps[own], falls[own], state)
        out[own] = y.addcmul_(x[own].view(y.shape), weights.d.view(-1, 1)).to(out.dtype)
        if end == length or end % block_size == 0:
            block = table[(end - 1) // block_size]
            target = target_of(start, end - 1, block_size, source)
            cache.inputs[block, target] = window[end - start :][: len(inputs)]
            cache.states[block, target] = state.view(heads, width, size)
            cache.lengths[block, target] = end
        begin = end


def _piece(
    x: Tensor, b: Tensor, c: Tensor, steps: Tensor, falls: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """L tokens of a row, and the state after them.

    ``x [L, heads * P]``, ``b`` and ``c [L, groups * N]``, ``steps`` and ``falls [L, heads]``,
    ``state [heads * P, N]``; the result is ``[L, heads, P]``.
    """
    count, heads = steps.shape
    size = state.shape[1]
    b, c = (t.view(count, -1, size).transpose(0, 1) for t in (b, c))
    groups = len(b)
    fallen = falls.t().cumsum(1)  # [heads, L]
    # From each token to each later one.
    apart = (fallen.unsqueeze(2) - fallen.unsqueeze(1)).masked_fill_(
        falls.new_ones(count, count, dtype=torch.bool).triu_(1), -torch.inf
    )
    scores = apart.exp_().mul_(steps.t().unsqueeze(1)).view(groups, -1, count, count)
    scores *= (c @ b.transpose(1, 2)).unsqueeze(1)
    by_head = x.view(count, heads, -1).transpose(0, 1)
    y = scores.view(heads, count, count) @ by_head
    before = (c @ state.view(groups, -1, size).transpose(1, 2)).view(groups, count, -1, y.shape[2])
    before = before.transpose(1, 2).reshape(y.shape)
    y.addcmul_(before, fallen.exp().unsqueeze(2))
    left = (fallen[:, -1:] - fallen).exp_().mul_(steps.t())
    added = (by_head * left.unsqueeze(2)).transpose(1, 2).reshape(groups, -1, count)
    kept = state.view(heads, -1) * fallen[:, -1:].exp()
    state = kept.view(groups, -1, size).baddbmm_(added, b).view(-1, size)
    return y.transpose(0, 1), state
