"""Random choice of tokens, with parameters a row and random numbers of seed and position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine_core.runtime.philox import uniform


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How rows draw: tensors ``[S]``, the first four float64, the others int64.

    Attributes:
        temperature: above 0 in float32.
        top_k: in ``[1, V]`` where it is used.
        top_p: 1 for none.
        min_p: 0 for none.
        seeds: of each row's completion.
        positions: linear positions that the chosen tokens will have.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor

    def take(self, rows: Tensor) -> DrawParams:
        """Those of the rows that ``rows`` (int64) names."""
        return DrawParams(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seeds[rows],
            self.positions[rows],
        )


def draw_from_all(logits: Tensor, params: DrawParams) -> Tensor:
    """A token of the whole vocabulary for each row; ``top_k`` and ``top_p`` are not looked at.

    Args:
        logits: ``[S, V]`` float32; at least one entry of a row is finite.
        params: S of them.

    Returns:
        ``[S]`` int64.
    """
    weights = _weights(logits, logits.amax(dim=-1, keepdim=True), params)
    return _draw(weights, params)


def draw_top_k(logits: Tensor, params: DrawParams, count: int) -> Tensor:
    """A token of the ``top_k`` most probable ones, ``top_p`` taken of what they share.

    Args:
        logits: ``[S, V]`` float32.
        params: ``top_k`` is at most ``count``.
        count: candidates looked at, at most V.

    Returns:
        ``[S]`` int64.
    """
    values = logits.topk(count, dim=-1).values
    rank = torch.arange(count, device=logits.device)
    values = values.masked_fill(rank >= params.top_k.unsqueeze(-1), -torch.inf)
    weights = _weights(values, values[:, :1], params)
    total = weights.sum(dim=-1, dtype=torch.float64)
    return _token_of_rank(logits, values, _draw(_apply_top_p(weights, total, params), params))


def draw_top_p(logits: Tensor, params: DrawParams, count: int) -> tuple[Tensor, Tensor]:
    """A token of the smallest set of most probable ones whose probability reaches ``top_p``.

    Args:
        logits: ``[S, V]`` float32.
        params: S of them; ``top_k`` is not looked at.
        count: candidates looked at, at most V.

    Returns:
        Tokens ``[S]`` int64, and ``[S]`` bool: whether the candidates held the row's whole set.
        Where they did not, draw again with more.
    """
    values = logits.topk(count, dim=-1).values
    weights = _weights(values, values[:, :1], params)
    total = _weights(logits, values[:, :1], params).sum(dim=-1, dtype=torch.float64)
    complete = weights.sum(dim=-1, dtype=torch.float64) >= params.top_p * total
    rank = _draw(_apply_top_p(weights, total, params), params)
    return _token_of_rank(logits, values, rank), complete


def _weights(logits: Tensor, largest: Tensor, params: DrawParams) -> Tensor:
    """Softmax at each row's temperature but for its denominator, float32: at most 1."""
    # Shifted first: a tiny temperature would otherwise overflow.
    return (logits - largest).div_(params.temperature.float().unsqueeze(-1)).exp_()


def _apply_top_p(weights: Tensor, total: Tensor, params: DrawParams) -> Tensor:
    """Weights in falling order without those beyond the share ``top_p`` of ``total [S]``."""
    before = weights.cumsum(dim=-1, dtype=torch.float64) - weights
    return weights.masked_fill(before >= (params.top_p * total).unsqueeze(-1), 0.0)


def _draw(weights: Tensor, params: DrawParams) -> Tensor:
    """Index of the chosen entry of each row after min_p, by inversion; never one of weight 0.

    The largest weight of a row is 1.
    """
    weights = weights.masked_fill(weights < params.min_p.float().unsqueeze(-1), 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    threshold = uniform(params.seeds, params.positions).unsqueeze(-1) * cumulative[:, -1:]
    return _count_up_to(cumulative, threshold)


def _token_of_rank(logits: Tensor, values: Tensor, rank: Tensor) -> Tensor:
    """The token of each row that has this rank when equal logits are ordered by token id.

    In what order ``topk`` gives equal ones, and which of them, depends on how many it is asked
    for, and so on the batch; in bfloat16 equal logits are common.
    """
    value = values.gather(-1, rank.unsqueeze(-1))
    offset = rank.unsqueeze(-1) - (values > value).sum(dim=-1, keepdim=True)
    return _count_up_to((logits == value).cumsum(dim=-1), offset)


def _count_up_to(rising: Tensor, limit: Tensor) -> Tensor:
    """How many of each row's entries ``[S, N]`` are at most ``limit [S, 1]``, but below N."""
    count = torch.searchsorted(rising, limit, right=True).squeeze(-1)
    return count.clamp(max=rising.shape[-1] - 1)
