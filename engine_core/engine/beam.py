"""Beam search, built on log-probabilities; the prefix cache makes a step cheap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine_core.configs import SamplingParams
from engine_core.configs.sampling import BeamSearchParams
from engine_core.errors import RequestError
from engine_core.steps import CompletionOutput, TokenLogprobs

if TYPE_CHECKING:
    from engine_core.engine.frontend import Prompt
    from engine_core.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One sequence that a search found.

    Attributes:
        token_ids: what was generated, with the end-of-sequence token if there is one.
        text: the same as text without special tokens; empty without a tokenizer.
        cumulative_logprob: the sum over ``token_ids``.
        score: what sequences are ordered by, see :class:`BeamSearchParams`.
        finish_reason: "stop" or "length".
    """

    token_ids: list[int]
    text: str
    cumulative_logprob: float
    score: float
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """Results for one prompt: ``beam_width`` sequences, or fewer, the best first."""

    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class _Beam:
    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0


@dataclass(slots=True)
class _Search:
    """One prompt's search. ``limit`` is how many tokens a sequence may generate."""

    prompt: list[int]
    params: BeamSearchParams
    limit: int
    eos_token_ids: frozenset[int]
    live: list[_Beam] = field(default_factory=lambda: [_Beam()])
    done: list[tuple[float, _Beam]] = field(default_factory=list)

    @property
    def num_candidates(self) -> int:
        """Best continuations to ask for per beam: if some of them end, enough others go on."""
        return (1 + max(1, len(self.eos_token_ids))) * self.params.beam_width

    def advance(self, entries: Sequence[TokenLogprobs]) -> None:
        """Replace the live beams by the best of ``entries``, the continuations of each beam."""
        width = self.params.beam_width
        candidates = [
            _Beam((*beam.token_ids, token), beam.logprob + value.logprob)
            for beam, entry in zip(self.live, entries, strict=True)
            for token, value in entry.items()
        ]
        candidates.sort(key=lambda beam: beam.logprob, reverse=True)
        self.live = []
        for rank, beam in enumerate(candidates[: self.num_candidates]):
            ended = beam.token_ids[-1] in self.eos_token_ids
            if ended or len(beam.token_ids) == self.limit:
                # As in transformers, an end counts only among the best of the step.
                if rank < width:
                    self.done.append((self._score(beam.logprob, len(beam.token_ids)), beam))
            elif len(self.live) < width:
                self.live.append(beam)
        self.done.sort(key=lambda item: item[0], reverse=True)
        del self.done[width:]
        if len(self.done) == width and self.live and self._bound() <= self.done[-1][0]:
            self.live = []

    def _score(self, logprob: float, length: int) -> float:
        return logprob / float(length**self.params.length_penalty)

    def _bound(self) -> float:
        """No continuation of a live beam scores above this: log-probabilities only fall."""
        length = len(self.live[0].token_ids) + 1
        longest = self.limit if self.params.length_penalty > 0 else length
        return self._score(self.live[0].logprob, longest)


def beam_search(
    llm: LLM, prompts: Sequence[list[int]], params: BeamSearchParams
) -> list[BeamSearchOutput]:
    """See :meth:`LLM.beam_search`; the prompts are token ids."""
    engine = llm.engine
    eos_token_ids = frozenset() if params.ignore_eos else frozenset(engine.eos_token_ids)
    searches = []
    for index, prompt in enumerate(prompts):
        room = engine.max_model_len - len(prompt)
        if not prompt or room <= 0:
            raise RequestError(
                f"prompt {index}: {len(prompt)} tokens; a prompt has at least one and fewer than "
                f"max_model_len {engine.max_model_len}"
            )
        limit = min(params.max_tokens, room)
        searches.append(_Search(prompt, params, limit, eos_token_ids))
    while running := [search for search in searches if search.live]:
        requests: list[Prompt] = [
            {"prompt_token_ids": [*search.prompt, *beam.token_ids]}
            for search in running
            for beam in search.live
        ]
        count = min(running[0].num_candidates, llm.model_config.vocab_size)
        step = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=count)
        outputs = iter(llm.generate(requests, step))
        for search in running:
            search.advance([_next_tokens(next(outputs).outputs[0]) for _ in search.live])
    return [_output(llm, search) for search in searches]


def _next_tokens(completion: CompletionOutput) -> TokenLogprobs:
    if not completion.logprobs:
        raise RequestError(f"beam search: {completion.error}")
    return completion.logprobs[0]


def _output(llm: LLM, search: _Search) -> BeamSearchOutput:
    sequences = []
    for score, beam in search.done:
        tokens = list(beam.token_ids)
        text = "" if llm.tokenizer is None else llm.tokenizer.decode(tokens)
        reason = "stop" if tokens[-1] in search.eos_token_ids else "length"
        sequences.append(BeamSearchSequence(tokens, text, beam.logprob, score, reason))
    return BeamSearchOutput(search.prompt, sequences)
