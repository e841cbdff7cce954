"""The choice of tokens in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_core.kernels.sampling.philox import uniform
from engine_core.kernels.sampling.state import (
    BIASED,
    COUNTED,
    FIRST_PENALTY,
    GENERATED,
    PENALISED,
    Adjustments,
    SamplingState,
)

# Its reciprocal must not overflow in float32.
LEAST_TEMPERATURE = 1e-30
# Candidates for a nucleus, enough for a top_p of 0.95 on a confident model; where they are not,
# there are more.
_NUCLEUS_GUESS = 256
_NUCLEUS_GROWTH = 8


def mass_bits(vocab: int) -> int:
    """The weight 1 is the integer 2 to this power: ``vocab`` of them are at most 2**62."""
    return 62 - (vocab - 1).bit_length()


def sample_tokens(
    logits: Tensor, rows: Tensor, positions: Tensor, last_tokens: Tensor, state: SamplingState
) -> tuple[Tensor, Tensor]:
    """Tokens and status of ``logits [B, V]``."""
    live = positions >= 0
    # One pass for both; NaN is the largest.
    largest, tokens = logits.max(dim=-1)
    from_model = largest.isfinite()
    status = (~from_model & live).to(torch.int8)
    targets = positions + 1
    if state.adjustments is not None:
        logits = _adjust(logits, rows, targets, live, state, state.adjustments)
        largest, tokens = logits.max(dim=-1)
        status += 2 * (from_model & ~largest.isfinite() & live).to(torch.int8)
    drawn = (live & (status == 0) & (state.numbers[rows, 0] > 0)).nonzero().squeeze(-1)
    if drawn.numel():
        # Usually of all rows, and then nothing is copied.
        own = logits if len(drawn) == len(rows) else logits[drawn]
        draws = uniform(state.seeds[rows[drawn]], targets[drawn])
        tokens[drawn] = _draw(
            own.float(), largest[drawn].float(), state.numbers[rows[drawn]], draws
        )
    last_tokens[rows] = tokens
    positions += live
    if state.adjustments is not None and state.adjustments.output_counts is not None:
        assert state.adjustments.seen is not None, "goes with output_counts"
        assert state.adjustments.seen_ids is not None, "goes with output_counts"
        assert state.adjustments.seen_sizes is not None, "goes with output_counts"
        counted = (live & (state.adjustments.kinds[rows] & COUNTED > 0)).nonzero().squeeze(-1)
        at = rows[counted], tokens[counted]
        state.adjustments.output_counts[at] += 1
        unseen = counted[state.adjustments.seen[at] == 0]
        state.adjustments.seen[at] |= GENERATED
        own = rows[unseen]
        ends = state.adjustments.seen_sizes[own].to(torch.int64)
        state.adjustments.seen_ids[own, ends] = tokens[unseen].to(torch.int32)
        state.adjustments.seen_sizes[own] += 1
    return tokens, status


def _adjust(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    live: Tensor,
    state: SamplingState,
    adjustments: Adjustments,
) -> Tensor:
    """``[B, V]`` float32 after bias, penalties and bans; ``logits`` themselves are left alone."""
    kinds = adjustments.kinds[rows] * live
    biased = (kinds & BIASED).nonzero().squeeze(-1)
    penalised = (kinds & PENALISED).nonzero().squeeze(-1)
    banned = (live & (targets < adjustments.ban_ends[rows])).nonzero().squeeze(-1)
    if not (biased.numel() or penalised.numel() or banned.numel()):
        return logits
    logits = logits.to(torch.float32, copy=True)
    if biased.numel():
        assert adjustments.bias is not None, "rows are BIASED"
        logits[biased] += adjustments.bias[rows[biased]]
    if penalised.numel():
        assert adjustments.seen is not None, "rows are PENALISED"
        assert adjustments.output_counts is not None, "rows are PENALISED"
        at = rows[penalised]
        logits[penalised] = apply_penalties(
            logits[penalised],
            adjustments.seen[at],
            adjustments.output_counts[at],
            *state.numbers[at, FIRST_PENALTY:].unbind(-1),
        )
    if banned.numel():
        ids = adjustments.ban_ids[rows[banned]].to(torch.int64)
        logits[banned] = ban_tokens(logits[banned], ids)
    return logits


def apply_penalties(
    logits: Tensor,
    seen: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Logits after the repetition penalty, then the frequency and presence penalties.

    The repetition penalty is that of Keskar et al., "CTRL" (2019), as transformers and vLLM have
    it, over prompt and output. The other two are OpenAI's, over the output alone:
    ``logit - count * frequency - (count > 0) * presence``.

    Args:
        logits: ``[S, V]`` float32.
        seen: ``[S, V]`` integer, not 0 for the tokens of prompt and output.
        output_counts: ``[S, V]`` integer, how often each token was generated.
        repetition: ``[S]``, 1 for none.
        frequency: ``[S]``, 0 for none.
        presence: ``[S]``, 0 for none.

    Returns:
        ``[S, V]`` float32, a new tensor.
    """
    generated = output_counts > 0
    penalty = repetition.to(logits.dtype).unsqueeze(-1)
    repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
    logits = torch.where(seen > 0, repeated, logits)
    logits = logits - output_counts * frequency.to(logits.dtype).unsqueeze(-1)
    return logits - generated * presence.to(logits.dtype).unsqueeze(-1)


def ban_tokens(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Logits without some tokens, in place.

    Args:
        logits: ``[S, V]``.
        token_ids: ``[S, K]`` int64, repetitions allowed, -1 for none.
    """
    # The smaller of a logit and infinity is the logit, so that padding may point anywhere.
    none = token_ids < 0
    values = torch.full_like(token_ids, -torch.inf, dtype=logits.dtype).masked_fill(none, torch.inf)
    return logits.scatter_reduce_(-1, token_ids.clamp(min=0), values, "amin")


def _draw(logits: Tensor, largest: Tensor, numbers: Tensor, draws: Tensor) -> Tensor:
    """A token for each row of ``logits [S, V]`` float32.

    Args:
        logits: with a finite ``largest [S]``.
        largest: of each row.
        numbers: ``[S, 7]``, a row of parameters each.
        draws: ``[S]`` float64 in ``[0, 1)``.
    """
    vocab = logits.shape[-1]
    temperature, top_k, top_p, min_p = numbers[:, :FIRST_PENALTY].unbind(-1)
    steepness = 1.0 / temperature.float().clamp(min=LEAST_TEMPERATURE)

    def weigh(values: Tensor, of: Tensor) -> Tensor:
        # Shifted first: a tiny temperature would otherwise overflow.
        return (values - largest[of, None]).mul_(steepness[of, None]).exp_()

    def masses(weights: Tensor) -> Tensor:
        return (weights * 2.0 ** mass_bits(vocab)).to(torch.int64)

    def invert(values: Tensor, of: Tensor) -> Tensor:
        """The index of the drawn one of each row's values, which are in the order of their ids."""
        weights = weigh(values, of)
        kept = masses(weights).masked_fill_(weights < min_p[of, None].float(), 0)
        cumulative = kept.cumsum(dim=-1)
        total = cumulative[:, -1]
        limit = torch.minimum((draws[of] * total.double()).to(torch.int64), total - 1)
        # The first whose cumulative mass is above the limit.
        return torch.searchsorted(cumulative, limit.unsqueeze(-1), right=True).squeeze(-1)

    is_limited = (top_k >= 1) & (top_k < vocab)
    has_nucleus = top_p < 1.0
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    whole = (~is_limited & ~has_nucleus).nonzero().squeeze(-1)
    if whole.numel():
        tokens[whole] = invert(_rows(logits, whole), whole)
    limited = is_limited.nonzero().squeeze(-1)
    if limited.numel():
        own = _rows(logits, limited)
        best = own.topk(int(top_k[limited].max()), dim=-1).values
        count = top_k[limited].to(torch.int64)
        beyond = torch.arange(best.shape[-1], device=logits.device) >= count.unsqueeze(-1)
        heavy = masses(weigh(best, limited)).masked_fill_(beyond, 0).cumsum(dim=-1)
        reaching = _reaching(heavy, _share(top_p[limited], heavy[:, -1]))
        count = torch.where(has_nucleus[limited], torch.minimum(reaching, count), count)
        ids, values = _best(own, best, count)
        tokens[limited] = ids.gather(-1, invert(values, limited).unsqueeze(-1)).squeeze(-1)
    rest = (~is_limited & has_nucleus).nonzero().squeeze(-1)
    if rest.numel():
        total = masses(weigh(_rows(logits, rest), rest)).sum(dim=-1)
        needed = _share(top_p[rest], total)
        candidates = min(_NUCLEUS_GUESS, vocab)
        while rest.numel():
            own = _rows(logits, rest)
            best = own.topk(candidates, dim=-1).values
            count = _reaching(masses(weigh(best, rest)).cumsum(dim=-1), needed)
            held = (count <= candidates).nonzero().squeeze(-1)
            if held.numel():
                of = rest[held]
                ids, values = _best(_rows(own, held), best[held], count[held])
                tokens[of] = ids.gather(-1, invert(values, of).unsqueeze(-1)).squeeze(-1)
            missed = count > candidates
            rest, needed = rest[missed], needed[missed]
            candidates = min(_NUCLEUS_GROWTH * candidates, vocab)
    return tokens


def _rows(values: Tensor, where: Tensor) -> Tensor:
    """Those of the rows, in rising order; a copy only if they are not all."""
    return values if len(where) == len(values) else values[where]


def _share(top_p: Tensor, total: Tensor) -> Tensor:
    """The least integer that is at least ``top_p`` of ``total``, and from 1 to ``total``."""
    needed = (top_p * total.double()).ceil().to(torch.int64)
    return torch.minimum(needed.clamp(min=1), total)


def _reaching(cumulative: Tensor, needed: Tensor) -> Tensor:
    """How many of each row's entries ``[S, N]`` it takes to reach ``needed``; N + 1 if too few."""
    return torch.searchsorted(cumulative, needed.unsqueeze(-1)).squeeze(-1) + 1


def _best(logits: Tensor, best: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The ``count [S]`` largest logits of each row, equal ones by token id.

    Args:
        logits: ``[S, V]``.
        best: ``[S, N]`` the largest of them in falling order, at least ``count``.
        count: at least 1.

    Returns:
        Their ids, rising, and values, both ``[S, max(count)]``; beyond a row's own -inf.
    """
    threshold = best.gather(-1, count.unsqueeze(-1) - 1)
    room = count - (best > threshold).sum(dim=-1)
    rows, ids = (logits >= threshold).nonzero(as_tuple=True)
    values = logits[rows, ids]
    equal = values == threshold[rows, 0]
    ranks = equal.cumsum(dim=0)
    first = torch.searchsorted(rows, torch.arange(len(count), device=rows.device))
    kept = ~equal | (ranks - (ranks[first] - equal[first].long())[rows] <= room[rows])
    rows, ids, values = rows[kept], ids[kept], values[kept]
    places = torch.arange(len(rows), device=rows.device) - (count.cumsum(dim=0) - count)[rows]
    shape = (len(count), int(count.max()))
    out_ids = ids.new_zeros(shape)
    out_ids[rows, places] = ids
    out_values = values.new_full(shape, -torch.inf)
    out_values[rows, places] = values
    return out_ids, out_values
