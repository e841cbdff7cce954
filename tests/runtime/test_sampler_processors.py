"""Logits processors against those of transformers and the published formulas."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from engine_core.configs import SamplingParams
from engine_core.errors import ErrorCode
from engine_core.kernels.sampling.reference import apply_penalties, ban_tokens
from engine_core.runtime.sampler import REASONS, Sampler

CPU = torch.device("cpu")
VOCAB = 60
EOS = (7, 9)


def subtract_openai_penalties(
    logits: list[float], output: list[int], frequency: float, presence: float
) -> list[float]:
    """``mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence``, OpenAI's API guide."""
    return [
        mu - output.count(j) * frequency - float(output.count(j) > 0) * presence
        for j, mu in enumerate(logits)
    ]


def reference(params: SamplingParams, prompt: list[int], output: list[int], raw: Tensor) -> Tensor:
    """The logits ``[VOCAB]`` that transformers' processors and OpenAI's formula make of ``raw``."""
    ids = torch.tensor([prompt + output])
    scores = raw[None].clone()
    if params.logit_bias:
        bias = [[[token], value] for token, value in params.logit_bias.items()]
        scores = SequenceBiasLogitsProcessor(bias)(ids, scores)
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = torch.tensor(
        [
            subtract_openai_penalties(
                scores[0].tolist(), output, params.frequency_penalty, params.presence_penalty
            )
        ]
    )
    bans = LogitsProcessorList()
    if params.min_tokens:
        stops = [*EOS, *params.stop_token_ids]
        bans.append(
            MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, stops, device="cpu")
        )
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        bans.append(PrefixConstrainedLogitsProcessor(lambda batch, sequence: allowed, 1))
    scores = bans(ids, scores)
    if params.bad_words:
        # As in vLLM a bad word does not begin in the prompt: transformers is shown none of it.
        words = [list(word) for word in params.bad_words]
        seen = torch.tensor([output], dtype=torch.int64)
        scores = NoBadWordsLogitsProcessor(words)(seen, scores)
    return scores[0]


class Recorder:
    """A custom processor that keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], list[int], Tensor]] = []

    def __call__(self, prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
        self.seen.append((prompt, output, logits.clone()))
        return logits


def generate(
    sampler: Sampler, requests: dict[int, tuple[list[int], SamplingParams]], raw: Tensor
) -> dict[int, list[int]]:
    """Runs rows together from ``raw [steps, VOCAB]`` plus their row number; their outputs."""
    outputs: dict[int, list[int]] = {row: [] for row in requests}
    for logits in raw:
        rows = list(requests)
        positions = [len(requests[row][0]) + len(outputs[row]) for row in rows]
        batch = torch.stack([logits.roll(row) for row in rows])
        result = sampler.sample(batch, rows, positions)
        assert result.status.tolist() == [0] * len(rows)
        for row, token in zip(rows, result.token_ids.tolist(), strict=True):
            outputs[row].append(token)
    return outputs


SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.9},
    "negative": {"presence_penalty": -0.7, "frequency_penalty": -0.4},
    "bias": {"logit_bias": {3: 4.0, 59: -100.0, 0: 1.5}},
    "allowed": {"allowed_token_ids": (3, 5, 8, 13, 21)},
    "allowed and bias": {"allowed_token_ids": (3, 5, 8), "logit_bias": {5: 2.0, 6: 100.0}},
    "bad words": {"bad_words": ((3,), (4, 5), (5, 6, 4), (6,), (1, 1))},
    "min tokens": {"min_tokens": 20, "stop_token_ids": (7, 30)},
    "everything": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {4: 3.0, 5: 3.0, 9: 5.0},
        "bad_words": ((4, 5), (0, 0), (11,)),
        "min_tokens": 25,
        "allowed_token_ids": tuple(range(40)),
    },
}


def make(settings: dict[str, Any], seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **settings, **more}, seed=seed)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "random"])
def test_logits_are_those_of_transformers_step_by_step(
    settings: dict[str, Any], temperature: float
) -> None:
    """Forty steps in a batch with a row of every other setting; few tokens, so many repeat."""
    generator = torch.Generator().manual_seed(5)
    raw = torch.randn(40, VOCAB, generator=generator)
    raw[:, :12] += 2.0
    sampler = Sampler(32, CPU)
    recorder = Recorder()
    chooser = random.Random(1)
    requests: dict[int, tuple[list[int], SamplingParams]] = {}
    mine = 11
    for row, other in [(mine, settings), *enumerate(SETTINGS.values(), start=12)]:
        prompt = [chooser.randrange(15) for _ in range(chooser.randrange(1, 9))]
        processors = (recorder,) if row == mine else ()
        params = make(other, row, temperature=temperature, logits_processors=processors)
        requests[row] = (prompt, params)
        sampler.admit(row, prompt, len(prompt), params, EOS)
    output = generate(sampler, requests, raw)[mine]
    prompt, params = requests[mine]
    assert len(recorder.seen) == 40
    for step, (seen_prompt, seen_output, logits) in enumerate(recorder.seen):
        assert (seen_prompt, seen_output) == (prompt, output[:step])
        expected = reference(params, prompt, output[:step], raw[step].roll(mine))
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        if temperature == 0.0:
            assert output[step] == int(expected.argmax())


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("stop_at", [1, 17])
def test_a_row_taken_again_after_a_preemption_goes_on_alike(
    settings: dict[str, Any], stop_at: int
) -> None:
    raw = torch.randn(30, VOCAB, generator=torch.Generator().manual_seed(8))
    prompt = [3, 5, 3, 12]
    params = make(settings, 4, temperature=0.9)
    whole = Sampler(4, CPU)
    whole.admit(2, prompt, len(prompt), params, EOS)
    expected = generate(whole, {2: (prompt, params)}, raw)[2]

    sampler = Sampler(4, CPU)
    sampler.admit(2, prompt, len(prompt), params, EOS)
    begun = generate(sampler, {2: (prompt, params)}, raw[:stop_at])[2]
    # Another request had the row meanwhile: nothing of it may stay.
    other = make(SETTINGS["everything"], 9)
    sampler.admit(2, [1, 2], 2, other, EOS)
    generate(sampler, {2: ([1, 2], other)}, raw[:5])
    sampler.admit(2, prompt + begun, len(prompt), params, EOS)
    for step in range(stop_at, 30):
        logits = raw[step : step + 1].roll(2, dims=-1)
        token = int(sampler.sample(logits, [2], [len(prompt) + step]).token_ids)
        assert token == expected[step]


def test_a_plainly_greedy_request_inherits_nothing_of_its_row() -> None:
    """Its neighbour draws, so that both are chosen together."""
    sampler = Sampler(3, CPU)
    neighbour = make({"temperature": 1.0}, 3)
    sampler.admit(0, [1], 1, neighbour, EOS)
    logits = torch.zeros(2, VOCAB)
    logits[1, [7, 20]] = torch.tensor([3.0, 2.0])
    for settings in ({"temperature": 50.0, "min_tokens": 4, "logit_bias": {7: -100.0}}, {}):
        sampler.admit(2, [1, 2], 2, make(settings, 5), EOS)
        result = sampler.sample(logits.clone(), [0, 2], [1, 2])
        assert result.status.tolist() == [0, 0]
    assert result.token_ids[1] == 7


def test_there_is_room_for_any_number_of_stop_tokens() -> None:
    """Each has more than the one before; their bans are for its row alone, and end."""
    sampler = Sampler(4, CPU)
    logits = -torch.arange(float(VOCAB))
    counts = [3, 9, 40]
    for row, count in enumerate(counts):
        stops = make({"min_tokens": 2, "stop_token_ids": range(count)}, 0, ignore_eos=True)
        sampler.admit(row, [1, 2, 3], 3, stops, EOS)
    for position, expected in ((3, counts), (4, counts), (5, [0, 0, 0])):
        result = sampler.sample(logits.repeat(3, 1), range(3), [position] * 3)
        assert result.token_ids.tolist() == expected


def test_the_output_is_what_was_chosen_whatever_a_captured_step_leaves_behind() -> None:
    """A decode graph writes its own best token to ``last_tokens`` before the sampler chooses."""
    seen: list[list[int]] = []

    def look(output: list[int], logits: Tensor) -> Tensor:
        seen.append(output)
        return logits

    sampler = Sampler(1, CPU)
    params = make({"bad_words": ((5, 6),)}, 0, logits_processors=(look,))
    sampler.admit(0, [1], 1, params, ())
    logits = torch.zeros(1, 8)
    logits[0, 5] = 2.0
    assert sampler.sample(logits, [0], [1]).token_ids.tolist() == [5]
    sampler.last_tokens.fill_(3)
    logits = torch.tensor([[0.0, 0, 0, 0, 0, 0, 2, 1]])
    assert sampler.sample(logits, [0], [2]).token_ids.tolist() == [7]
    assert sampler.last_tokens.tolist() == [7]
    assert seen == [[], [5]]


def test_the_two_forms_of_a_processor() -> None:
    calls: list[Any] = []

    def two(output: list[int], logits: Tensor) -> Tensor:
        calls.append(list(output))
        output.append(99)  # its own copy
        logits[0] = 50.0  # in place
        return logits

    def three(prompt: list[int], output: list[int], logits: Tensor, scale: float = 3.0) -> Tensor:
        calls.append((list(prompt), list(output)))
        assert logits[0] == 50.0
        changed = logits * scale
        changed[4] = 1000.0
        return changed

    sampler = Sampler(1, CPU)
    sampler.admit(0, [5, 6], 2, make({}, 0, logits_processors=(two, three)), ())
    for position in (2, 3):
        assert sampler.sample(torch.zeros(1, 8), [0], [position]).token_ids.tolist() == [4]
    assert calls == [[], ([5, 6], []), [4], ([5, 6], [4])]


def _raise(output: list[int], logits: Tensor) -> Tensor:
    raise KeyError("lost")


FAILING: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (_raise, "logits processor _raise failed: KeyError: 'lost'"),
    "nothing": (lambda output, logits: None, r"must return logits of shape \(8,\), got NoneType"),
    "shape": (lambda output, logits: logits[:3], r"of shape \(8,\), got \(3,\)"),
    "another shape of its argument": (
        lambda output, logits: logits.resize_(0),
        r"must return logits of shape \(8,\), got \(0,\), and leave the shape of its",
    ),
    "no data": (lambda output, logits: logits.to("meta"), "failed: NotImplementedError: "),
    "all banned": (
        lambda output, logits: torch.full_like(logits, -torch.inf),
        "leave no token to choose",
    ),
    "not a number": (lambda output, logits: logits * torch.nan, "leave no token to choose"),
}


@pytest.mark.parametrize(("processor", "message"), FAILING.values(), ids=FAILING.keys())
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_a_failing_processor_fails_its_own_row_only(
    processor: Callable[..., Any], message: str, settings: dict[str, Any]
) -> None:
    sampler = Sampler(2, CPU)
    sampler.admit(0, [1], 1, make(settings, 0, logits_processors=(processor,)), ())
    sampler.admit(1, [1], 1, make({}, 0), ())
    result = sampler.sample(torch.eye(8)[[3, 5]], [0, 1], [1, 1])
    assert int(result.status[1]) == 0
    assert int(result.token_ids[1]) == 5
    error = result.failures.get(0) or REASONS[int(result.status[0])]
    with pytest.raises(RuntimeError, match=message):
        raise RuntimeError(error.message)
    assert 0 <= int(result.token_ids[0]) < 8


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_k": 3}, {"bad_words": ((2,),)}])
def test_logits_that_are_not_finite_are_the_models_fault(
    bad: float, settings: dict[str, Any]
) -> None:
    sampler = Sampler(1, CPU)
    sampler.admit(0, [1], 1, make(settings, 0), ())
    logits = torch.zeros(1, 8)
    logits[0, 2] = bad
    result = sampler.sample(logits, [0], [1])
    error = REASONS[int(result.status)]
    assert error == (ErrorCode.NOT_FINITE, "the model gave logits that are not finite")


def test_banning_leaves_no_token() -> None:
    sampler = Sampler(1, CPU)
    params = make({"allowed_token_ids": (7,), "min_tokens": 1}, 0)
    sampler.admit(0, [1], 1, params, EOS)
    result = sampler.sample(torch.zeros(1, VOCAB), [0], [1])
    error = REASONS[int(result.status)]
    assert error.code is ErrorCode.NO_TOKEN
    assert "leave no token" in error.message


def test_penalties_on_tensors_of_any_batch() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, VOCAB, generator=generator) * 3
    prompts = torch.randint(0, VOCAB, (6, 5), generator=generator)
    outputs = torch.randint(0, VOCAB, (6, 40), generator=generator)
    seen = torch.zeros(6, VOCAB, dtype=torch.uint8).scatter_(1, prompts, 1).scatter_(1, outputs, 2)
    counts = torch.zeros(6, VOCAB, dtype=torch.int32).scatter_add_(
        1, outputs, torch.ones_like(outputs, dtype=torch.int32)
    )
    repetition = torch.tensor([1.0, 1.5, 0.5, 2.0, 1.1, 1.0])
    frequency = torch.tensor([0.0, 0.5, -0.5, 2.0, 0.0, 0.1])
    presence = torch.tensor([0.0, -1.0, 0.5, 2.0, 0.3, 0.0])
    got = apply_penalties(logits, seen, counts, repetition, frequency, presence)
    for row in range(6):
        ids = torch.cat([prompts[row], outputs[row]])[None]
        processor = RepetitionPenaltyLogitsProcessor(float(repetition[row]))
        expected = subtract_openai_penalties(
            processor(ids, logits[row : row + 1].clone())[0].tolist(),
            outputs[row].tolist(),
            float(frequency[row]),
            float(presence[row]),
        )
        torch.testing.assert_close(got[row], torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_banned_tokens_and_padding() -> None:
    logits = torch.arange(1.0, 11.0).view(2, 5)
    banned = ban_tokens(logits.clone(), torch.tensor([[0, 3, -1], [2, 2, -1]]))
    expected = logits.clone()
    expected[0, [0, 3]] = -torch.inf
    expected[1, 2] = -torch.inf
    assert torch.equal(banned, expected)
