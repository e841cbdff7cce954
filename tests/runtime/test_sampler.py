"""Drawing tokens: against transformers' warpers, known random numbers, and statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine_core.configs import SamplingParams
from engine_core.kernels.sampling.philox import philox4x32, uniform
from engine_core.runtime import memory
from engine_core.runtime.sampler import Sampler, token_logprobs

CPU = torch.device("cpu")
SEEDS, POSITIONS = 1000, 20


@dataclass(frozen=True)
class Row:
    params: SamplingParams
    seed: int
    position: int


def sample(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Tokens of ``rows`` in one step of a sampler made for them."""
    sampler = Sampler(len(rows), CPU)
    for index, row in enumerate(rows):
        sampler.admit(index, [0], 1, row.params.replace(seed=row.seed), ())
    result = sampler.sample(logits, range(len(rows)), [row.position for row in rows])
    assert result.status.tolist() == [0] * len(rows)
    return result.token_ids


def many(logits: Tensor, params: SamplingParams) -> Tensor:
    """``SEEDS * POSITIONS`` tokens drawn from ``logits [V]``."""
    sampler = Sampler(SEEDS, CPU)
    for seed in range(SEEDS):
        sampler.admit(seed, [0], 1, params.replace(seed=seed), ())
    drawn = [
        sampler.sample(logits.repeat(SEEDS, 1), range(SEEDS), [position] * SEEDS).token_ids
        for position in range(1, POSITIONS + 1)
    ]
    return torch.cat(drawn)


def test_philox_gives_the_known_answers_of_random123() -> None:
    # kat_vectors of Random123: philox4x32, 10 rounds, with a counter of two words.
    zero = torch.zeros(1, dtype=torch.int64)
    words = [int(word) for word in philox4x32(zero, zero)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_philox_is_that_of_a_plain_implementation_for_wide_counters_and_keys() -> None:
    def plain(counter: int, key: int) -> list[int]:
        c = [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
        k = [key & 0xFFFFFFFF, key >> 32]
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [
                (b >> 32) ^ c[1] ^ k[0],
                b & 0xFFFFFFFF,
                (a >> 32) ^ c[3] ^ k[1],
                a & 0xFFFFFFFF,
            ]
            k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
        return c

    counters = [0, 1, 2**32 + 5, 2**63 - 1]
    keys = [2**63 - 1, 7, 2**31, 2**40 + 1]
    words = philox4x32(torch.tensor(counters), torch.tensor(keys))
    for index, (counter, key) in enumerate(zip(counters, keys, strict=True)):
        assert [int(word[index]) for word in words] == plain(counter, key)


def test_uniform_numbers_are_uniform() -> None:
    count = 100_000
    values = uniform(torch.full((count,), 42), torch.arange(count))
    assert values.min() >= 0
    assert values.max() < 1
    counts = torch.histc(values, bins=100, min=0, max=1)
    chi_square = ((counts - count / 100) ** 2 / (count / 100)).sum()
    # 99 degrees of freedom: above 160 once in 10,000.
    assert chi_square < 160


def warpers(params: SamplingParams) -> LogitsProcessorList:
    every = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k > 0:
        every.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        every.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        every.append(MinPLogitsWarper(params.min_p))
    return every


CASES = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_k beyond": {"top_k": 5000},
    "top_p": {"top_p": 0.8},
    "top_p tiny": {"top_p": 1e-6},
    "min_p": {"min_p": 0.1},
    "top_k and top_p": {"top_k": 8, "top_p": 0.7, "temperature": 1.3},
    "top_p and min_p": {"top_p": 0.9, "min_p": 0.1, "temperature": 1.5},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 0.9},
}


@pytest.mark.parametrize("vocab", [7, 700])
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
def test_frequencies_are_those_of_transformers_warpers(settings: dict, vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    params = SamplingParams(**settings)
    beyond = params.top_k > vocab
    reference = warpers(params.replace(top_k=0) if beyond else params)
    expected = reference(None, logits[None].clone()).softmax(-1)[0]
    tokens = many(logits, params)
    draws = len(tokens)
    counts = torch.bincount(tokens, minlength=vocab).double()
    assert counts[expected == 0].sum() == 0, "a token was drawn that the filters remove"
    kept = expected > 0
    # Tokens expected fewer than 10 times are judged together.
    likely = kept & (expected * draws >= 10)
    observed = torch.cat([counts[likely], counts[kept & ~likely].sum()[None]])
    wanted = torch.cat([expected[likely], expected[kept & ~likely].sum()[None]]) * draws
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = max(1, len(wanted) - 1)
    # Six standard deviations above the mean of the distribution.
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom) + 6


def test_a_flat_distribution_needs_more_than_the_first_guess_of_a_nucleus() -> None:
    """top_p 0.9 over 1000 equal tokens keeps 900 of them: those of the lowest ids."""
    tokens = many(torch.zeros(1000), SamplingParams(top_p=0.9))
    assert len(tokens.unique()) in (900, 901)
    assert tokens.max() <= 900


def test_a_row_depends_on_nothing_but_itself() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(CASES) + 1, 500, generator=generator)
    rows = [
        Row(SamplingParams(**settings), seed=index, position=1 + index * 7)
        for index, settings in enumerate(CASES.values())
    ]
    rows.append(Row(SamplingParams(temperature=0.0), seed=0, position=1))
    together = sample(logits.clone(), rows)
    alone = [int(sample(logits[i : i + 1].clone(), [row])) for i, row in enumerate(rows)]
    assert together.tolist() == alone
    backwards = sample(logits.flip(0).clone(), rows[::-1])
    assert backwards.flip(0).tolist() == alone


@pytest.mark.parametrize("settings", [{"top_k": 9}, {"top_p": 0.3}, {"top_k": 30, "top_p": 0.5}])
def test_equal_logits_are_chosen_alike_whatever_the_batch(settings: dict) -> None:
    """A neighbour's larger top_k may change how many candidates are looked at, not the choice."""
    # Few different values, as bfloat16 has, so that ties lie across every boundary.
    logits = torch.randint(0, 4, (64, 600), generator=torch.Generator().manual_seed(1)).float()
    params = SamplingParams(**settings)
    rows = [Row(params, seed, 5) for seed in range(64)]
    alone = sample(logits.clone(), rows)
    neighbour = Row(SamplingParams(top_k=555), 1, 1)
    with_neighbour = sample(torch.cat([logits, logits[:1]]), [*rows, neighbour])
    assert with_neighbour[:-1].tolist() == alone.tolist()
    # Of equal ones those with the lowest ids are kept: order by a stable sort to say which.
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    kept = params.top_k if params.top_k > 0 else 600
    ranks = (order == alone[:, None]).int().argmax(-1)
    assert ranks.max() < kept
    assert len(ranks.unique()) > 4


def test_seeds_and_positions_both_matter() -> None:
    logits = torch.zeros(64, 10_000)
    params = SamplingParams()
    by_seed = sample(logits.clone(), [Row(params, seed, 5) for seed in range(64)])
    by_position = sample(logits.clone(), [Row(params, 5, place) for place in range(1, 65)])
    assert len(by_seed.unique()) > 60
    assert len(by_position.unique()) > 60


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([[30.0, 31.0, -5.0]])
    assert sample(logits, [Row(SamplingParams(temperature=1e-30), 4, 2)]).tolist() == [1]


def test_logprobs_are_those_of_log_softmax() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([4, int(logits[1].argmax()), 9, 11])
    expected = logits.log_softmax(-1)
    entries = token_logprobs(logits, tokens, [0, 3, 50, -1])
    assert [len(entry) for entry in entries] == [1, 3, 50, 50]
    for row, (entry, token) in enumerate(zip(entries, tokens.tolist(), strict=True)):
        order = expected[row].argsort(descending=True).tolist()
        assert next(iter(entry)) == token
        for item, value in entry.items():
            assert value.logprob == pytest.approx(float(expected[row, item]), abs=1e-6)
            assert order[value.rank - 1] == item


def test_the_tokens_of_a_penalised_row_are_listed_once_each_as_they_come() -> None:
    """Of the prompt, of the output so far, and of each step; another request has its own."""
    sampler = Sampler(3, CPU)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.01, seed=1)

    def listed(row: int) -> list[int]:
        adjustments = sampler.state.adjustments
        assert adjustments is not None
        assert adjustments.seen is not None
        assert adjustments.seen_ids is not None
        assert adjustments.seen_sizes is not None
        ids = adjustments.seen_ids[row, : int(adjustments.seen_sizes[row])].tolist()
        assert sorted(ids) == adjustments.seen[row].nonzero().squeeze(-1).tolist()
        return ids

    sampler.admit(1, [7, 5, 5, 2, 7], 3, params, ())
    for position, token in ((5, 9), (6, 5), (7, 9), (8, 3)):
        logits = torch.zeros(1, 12)
        logits[0, token] = 4.0
        assert sampler.sample(logits, [1], [position]).token_ids.tolist() == [token]
    assert sorted(listed(1)[:3]) == [2, 5, 7]
    assert listed(1)[3:] == [9, 3]
    sampler.admit(1, [4, 4], 2, params, ())
    sampler.sample(torch.arange(12.0)[None], [1], [2])
    assert listed(1) == [4, 11]


def test_tensors_over_the_vocabulary_are_those_that_the_memory_was_planned_for() -> None:
    rows, vocab = 4, 1000
    sampler = Sampler(rows, CPU)
    params = SamplingParams(repetition_penalty=1.2, logit_bias={3: 1.0}, seed=0)
    sampler.admit(0, [1, 2], 1, params, ())
    sampler.sample(torch.zeros(1, vocab), [0], [2])
    adjustments = sampler.state.adjustments
    assert adjustments is not None
    kept = [getattr(adjustments, field.name) for field in fields(adjustments)]
    wide = [each for each in kept if isinstance(each, Tensor) and each.shape == (rows, vocab)]
    assert sum(each.nbytes for each in wide) == rows * vocab * memory._ROW_BYTES_PER_TOKEN
