"""From logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_core.configs import SamplingParams
from engine_core.runtime.philox import uniform
from engine_core.steps import Logprob, TokenLogprobs

# Enough for a top_p of 0.95 on a confident model; a row that needs more is sorted whole.
_NUCLEUS_GUESS = 256


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How one row of logits is to be sampled.

    Attributes:
        params: the request's sampling parameters.
        seed: the seed of this very completion.
        position: linear position that the chosen token will have.
        banned: token ids that may not be chosen now.
    """

    params: SamplingParams
    seed: int
    position: int
    banned: tuple[int, ...] = ()


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Choose a token for each row.

    A row's choice depends on its own logits, parameters, seed and position only.

    Args:
        logits: ``[S, V]`` float32; banned tokens are overwritten.
        rows: S of them.

    Returns:
        ``[S]`` int64.
    """
    for index, row in enumerate(rows):
        if row.banned:
            logits[index, list(row.banned)] = -torch.inf
    tokens = logits.argmax(dim=-1)
    kinds: dict[str, list[int]] = {"plain": [], "top_k": [], "top_p": []}
    for index, row in enumerate(rows):
        if not row.params.greedy:
            kinds[_kind(row.params, logits.shape[-1])].append(index)
    for kind, indices in kinds.items():
        if indices:
            chosen = [rows[index] for index in indices]
            where = torch.tensor(indices, device=logits.device)
            tokens[where] = _SAMPLERS[kind](logits[where], chosen)
    return tokens


def _kind(params: SamplingParams, vocab_size: int) -> str:
    if 0 < params.top_k < vocab_size:
        return "top_k"
    return "top_p" if params.top_p < 1.0 else "plain"


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)


def _probabilities(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Softmax at each row's temperature, ``[S, V]`` float64."""
    scores = logits.double()
    # Shifted first: a tiny temperature would otherwise overflow.
    scores = scores - scores.amax(dim=-1, keepdim=True)
    return (scores / _column([row.params.temperature for row in rows], logits)).softmax(dim=-1)


def _draw(probabilities: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Index of the chosen entry of each row, by inversion; zero entries are never chosen."""
    device = probabilities.device
    seeds = torch.tensor([row.seed for row in rows], device=device)
    positions = torch.tensor([row.position for row in rows], device=device)
    cumulative = probabilities.cumsum(dim=-1)
    threshold = uniform(seeds, positions).unsqueeze(-1) * cumulative[:, -1:]
    return (cumulative <= threshold).sum(dim=-1).clamp(max=probabilities.shape[-1] - 1)


def _apply_min_p(probabilities: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    least = _column([row.params.min_p for row in rows], probabilities)
    least = least * probabilities.amax(dim=-1, keepdim=True)
    return probabilities.masked_fill(probabilities < least, 0.0)


def _sample_plain(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    return _draw(_apply_min_p(_probabilities(logits, rows), rows), rows)


def _sample_sorted(probabilities: Tensor, tokens: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """From entries in falling order, ``[S, K]``, after top_p and min_p."""
    limit = _column([row.params.top_p for row in rows], probabilities)
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities = probabilities.masked_fill(before >= limit, 0.0)
    drawn = _draw(_apply_min_p(probabilities, rows), rows)
    return tokens.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)


def _sample_top_k(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    largest = max(row.params.top_k for row in rows)
    values, tokens = logits.topk(largest, dim=-1)
    rank = torch.arange(largest, device=logits.device)
    kept = _column([row.params.top_k for row in rows], logits)
    values = values.masked_fill(rank >= kept, -torch.inf)
    return _sample_sorted(_probabilities(values, rows), tokens, rows)


def _sample_top_p(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    probabilities = _probabilities(logits, rows)
    guess = min(_NUCLEUS_GUESS, logits.shape[-1])
    top, tokens = probabilities.topk(guess, dim=-1)
    chosen = _sample_sorted(top, tokens, rows)
    limit = _column([row.params.top_p for row in rows], logits).squeeze(-1)
    short = (top.sum(dim=-1) < limit).nonzero().flatten()
    if short.numel() and guess < logits.shape[-1]:
        every, tokens = probabilities[short].sort(dim=-1, descending=True, stable=True)
        chosen[short] = _sample_sorted(every, tokens, [rows[i] for i in short.tolist()])
    return chosen


_SAMPLERS = {"plain": _sample_plain, "top_k": _sample_top_k, "top_p": _sample_top_p}


def token_logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """The log-probability of each row's token and of its most probable ones.

    Args:
        logits: ``[S, V]`` float32, as the model gave them.
        tokens: ``[S]`` the token of each row.
        counts: how many of the most probable tokens each row reports besides it.

    Returns:
        One mapping a row, the row's token first.
    """
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(-1, tokens.unsqueeze(-1))
    ranks = ((logprobs > own).sum(dim=-1) + 1).tolist()
    most = min(max(counts), logits.shape[-1])
    values, indices = logprobs.topk(most, dim=-1)
    out: list[TokenLogprobs] = []
    for token, logprob, rank, top_values, top_indices, count in zip(
        tokens.tolist(),
        own.squeeze(-1).tolist(),
        ranks,
        values.tolist(),
        indices.tolist(),
        counts,
        strict=True,
    ):
        entry = {token: Logprob(logprob, rank)}
        for place in range(min(count, most)):
            entry.setdefault(top_indices[place], Logprob(top_values[place], place + 1))
        out.append(entry)
    return out
