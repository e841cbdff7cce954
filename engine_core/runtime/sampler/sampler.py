"""The sampling state of the persistent batch, and what is done with a step's logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine_core.configs import SamplingParams
from engine_core.configs.sampling import takes_prompt
from engine_core.runtime.guided import GrammarCompiler, Guide
from engine_core.runtime.platform import to_device
from engine_core.runtime.sampler.draws import DrawParams, draw_from_all, draw_top_k, draw_top_p
from engine_core.runtime.sampler.transforms import apply_bitmask, apply_penalties, ban_tokens

# Enough for a top_p of 0.95 on a confident model; for rows that need more it grows.
_NUCLEUS_GUESS = 256
_NUCLEUS_GROWTH = 8
# Dividing by it must not overflow to 0 / 0 in float32.
_LEAST_TEMPERATURE = 1e-30

# What a row's parameters are on the device: those of a draw, then those of the penalties.
_NUMBERS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
_NUM_DRAW = 4

_REASONS = {
    1: "the model gave logits that are not finite",
    2: "the sampling parameters leave no token to choose",
}


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step chose; the tensors may still be on their way.

    Attributes:
        token_ids: ``[S]`` int64.
        status: ``[S]`` int8, for :meth:`error`.
        failures: what went wrong on the host, by place in the step.
    """

    token_ids: Tensor
    status: Tensor
    failures: dict[int, str]

    def error(self, place: int, status: int) -> str | None:
        """Why the token at ``place``, with its value of ``status``, means nothing; or None."""
        return self.failures.get(place) or _REASONS.get(status)


@dataclass(slots=True)
class _Request:
    """What the host knows of the request in a row.

    Attributes:
        params: its parameters, bad words as token ids.
        prompt: the prompt's tokens.
        output: generated tokens: those known at admission, and if ``params.needs_host`` all those
            of the steps before.
        stop_ids: what ``min_tokens`` bans.
        processors: its custom logits processors.
        guide: what its text must be, or None.
        ready: whether its rows of the tensors over the vocabulary are filled.
    """

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    stop_ids: tuple[int, ...]
    processors: list[_Processor]
    guide: Guide | None
    ready: bool = False

    @property
    def biased(self) -> bool:
        return bool(self.params.logit_bias) or self.params.allowed_token_ids is not None

    @property
    def hosted(self) -> bool:
        """Whether the host reads each token before the next one is chosen."""
        return bool(self.params.bad_words or self.processors or self.guide is not None)


class Sampler:
    """Chooses tokens for the rows of the persistent batch.

    A row's choice depends on its own logits, parameters, seed, position and tokens only.

    Args:
        max_rows: rows of the persistent batch.
        device: where the logits are.
        grammar_compiler: makes the compiler for guided requests; called at the first of them. None
            if there are none.

    Attributes:
        last_tokens: ``[max_rows]`` int64 on the device, the token that each row sampled last.
    """

    def __init__(
        self,
        max_rows: int,
        device: torch.device,
        grammar_compiler: Callable[[], GrammarCompiler] | None = None,
    ) -> None:
        self._max_rows = max_rows
        self._device = device
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        # The same on its way to the host: the step's tokens, and the row's place among them. Not
        # what a captured step leaves in last_tokens, which is its own best token.
        self._chosen: dict[int, tuple[_HostTokens, int]] = {}
        self._make_compiler = grammar_compiler
        self._numbers = torch.zeros(max_rows, len(_NUMBERS), dtype=torch.float64, device=device)
        self._seeds = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._requests: dict[int, _Request] = {}
        # Over the vocabulary, [max_rows, V]; made when the first request needs them.
        self._prompt_mask: Tensor | None = None
        self._output_counts: Tensor | None = None
        self._bias: Tensor | None = None

    def admit(
        self,
        row: int,
        token_ids: Sequence[int],
        prompt_len: int,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
    ) -> None:
        """Give ``row`` to a request.

        Args:
            row: in ``[0, max_rows)``; what was there is forgotten.
            token_ids: the prompt, and after a preemption what was generated before it.
            prompt_len: length of the prompt alone.
            params: with a seed, and with bad words as token ids.
            eos_token_ids: what ``min_tokens`` bans besides the request's own stop tokens.
        """
        assert params.seed is not None, "the engine gives every request a seed"
        if params.changes_logits or not params.greedy:
            numbers = [getattr(params, name) for name in _NUMBERS]
            self._numbers[row] = to_device(torch.tensor(numbers, dtype=torch.float64), self._device)
            self._seeds[row] = params.seed
        self._requests[row] = _Request(
            params=params,
            prompt=list(token_ids[:prompt_len]),
            output=list(token_ids[prompt_len:]),
            stop_ids=(
                *params.stop_token_ids,
                *(() if params.ignore_eos else eos_token_ids),
            ),
            processors=[_Processor(function) for function in params.logits_processors],
            guide=None,
        )
        if params.guided is not None:
            self._requests[row].guide = self._guide(self._requests[row])

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        assert self._make_compiler is not None, "requests are not guided without a tokenizer"
        return self._make_compiler()

    def _guide(self, request: _Request) -> Guide:
        """The guide of a request where its output has come to."""
        assert request.params.guided is not None, "asked for a guided request"
        guide = self._compiler.guide(request.params.guided, request.stop_ids)
        guide.advance(request.output)
        return guide

    def sample(
        self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]
    ) -> SampledTokens:
        """Choose a token for each of some rows, and remember it.

        Args:
            logits: ``[S, V]`` float32, as the model gave them; overwritten.
            rows: S different rows of the persistent batch, all admitted.
            positions: linear positions that the chosen tokens will have. A row's positions follow
                one another without a gap.
        """
        requests = [self._requests[row] for row in rows]
        device_rows = self._tensor(rows)
        from_model = logits.amax(dim=-1).isfinite()
        status = (~from_model).to(torch.int8)
        failures: dict[int, str] = {}
        if self._adjust(logits, requests, rows, positions, failures):
            left = logits.amax(dim=-1).isfinite()
            status += 2 * (from_model & ~left).to(torch.int8)
        tokens = logits.argmax(dim=-1)
        self._draw(tokens, logits, requests, device_rows, positions)
        self.last_tokens[device_rows] = tokens
        hosted = [place for place, request in enumerate(requests) if request.hosted]
        if hosted:
            host_tokens = _HostTokens(tokens)
            self._chosen.update({rows[place]: (host_tokens, place) for place in hosted})
        counted = [place for place, request in enumerate(requests) if request.params.has_penalties]
        if counted:
            assert self._output_counts is not None, "the penalties were applied just now"
            where = self._tensor(counted)
            self._output_counts[device_rows[where], tokens[where]] += 1
        return SampledTokens(tokens, status, failures)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self._device)

    def _adjust(
        self,
        logits: Tensor,
        requests: Sequence[_Request],
        rows: Sequence[int],
        positions: Sequence[int],
        failures: dict[int, str],
    ) -> bool:
        """Bias, penalties, bans, processors and guides, in place; whether there were any."""
        biased: list[int] = []
        penalised: list[int] = []
        hosted: list[int] = []
        guided: list[int] = []
        bans: list[tuple[int, ...]] = [()] * len(requests)
        for place, (request, row, position) in enumerate(
            zip(requests, rows, positions, strict=True)
        ):
            params = request.params
            if request.biased:
                biased.append(place)
            if params.has_penalties:
                penalised.append(place)
            if not request.ready:
                self._fill(row, request, logits.shape[-1])
            if request.hosted:
                hosted.append(place)
            if request.guide is not None:
                guided.append(place)
            if position - len(request.prompt) < params.min_tokens:
                bans[place] = request.stop_ids
        if hosted:
            self._read_tokens(hosted, requests, rows, positions)
        if biased:
            assert self._bias is not None, "filled above"
            where = self._tensor(biased)
            logits[where] += self._bias[self._tensor([rows[place] for place in biased])]
        if penalised:
            assert self._prompt_mask is not None, "filled above"
            assert self._output_counts is not None, "filled above"
            where = self._tensor(penalised)
            at = self._tensor([rows[place] for place in penalised])
            logits[where] = apply_penalties(
                logits[where],
                self._prompt_mask[at],
                self._output_counts[at],
                *self._numbers[at, _NUM_DRAW:].unbind(-1),
            )
        for place in hosted:
            bans[place] += _last_of_bad_words(requests[place])
        banned = [place for place, ids in enumerate(bans) if ids]
        if banned:
            where = self._tensor(banned)
            logits[where] = ban_tokens(logits[where], self._padded([bans[p] for p in banned]))
        for place in hosted:
            request = requests[place]
            for processor in request.processors:
                error = processor.apply(request.prompt, request.output, logits[place])
                if error is not None:
                    failures[place] = error
                    break
        if guided:
            self._apply_guides(logits, guided, requests, failures)
        return bool(biased or penalised or banned or hosted)

    def _apply_guides(
        self,
        logits: Tensor,
        places: Sequence[int],
        requests: Sequence[_Request],
        failures: dict[int, str],
    ) -> None:
        """Leave only what the guides allow, in place."""
        guides = {place: guide for place in places if (guide := requests[place].guide) is not None}
        masks = self._compiler.masks(list(guides.values()))
        words = to_device(torch.from_numpy(masks.view(np.uint8)), self._device)
        if len(places) == len(requests):
            apply_bitmask(logits, words)
        else:
            where = self._tensor(places)
            logits[where] = apply_bitmask(logits[where], words)
        for place, guide in guides.items():
            if guide.error is not None:
                failures.setdefault(place, guide.error)

    def _padded(self, ids: Sequence[tuple[int, ...]]) -> Tensor:
        width = max(map(len, ids))
        return torch.tensor(
            [[*own, *[-1] * (width - len(own))] for own in ids],
            dtype=torch.int64,
            device=self._device,
        )

    def _fill(self, row: int, request: _Request, vocab_size: int) -> None:
        """Write the request's rows of the tensors over the vocabulary."""
        request.ready = True
        params = request.params
        shape = (self._max_rows, vocab_size)
        if params.has_penalties:
            if self._prompt_mask is None or self._output_counts is None:
                self._prompt_mask = torch.zeros(shape, dtype=torch.bool, device=self._device)
                self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._prompt_mask[row] = False
            self._prompt_mask[row, self._tensor(request.prompt)] = True
            output = self._tensor(request.output)
            counts = self._output_counts[row].zero_()
            counts.index_put_((output,), counts.new_ones(()), accumulate=True)
        if request.biased:
            if self._bias is None:
                self._bias = torch.zeros(shape, dtype=torch.float32, device=self._device)
            own = self._bias[row]
            own.zero_()
            if params.allowed_token_ids is not None:
                own.fill_(-torch.inf)
                own[self._tensor(params.allowed_token_ids)] = 0.0
            if params.logit_bias:
                values = torch.tensor(list(params.logit_bias.values()), device=self._device)
                own[self._tensor(list(params.logit_bias))] += values

    def _read_tokens(
        self,
        places: Sequence[int],
        requests: Sequence[_Request],
        rows: Sequence[int],
        positions: Sequence[int],
    ) -> None:
        """Bring the host's knowledge of the output up to the positions.

        It waits for the step that sampled the tokens, not for the one that runs now.
        """
        for place in places:
            request = requests[place]
            missing = positions[place] - len(request.prompt) - len(request.output)
            assert missing in (0, 1), f"{missing} tokens were sampled where the host needed each"
            if missing:
                tokens, index = self._chosen[rows[place]]
                request.output.append(tokens.values[index])
                if request.guide is not None:
                    request.guide.advance(request.output[-1:])

    def _draw(
        self,
        tokens: Tensor,
        logits: Tensor,
        requests: Sequence[_Request],
        device_rows: Tensor,
        positions: Sequence[int],
    ) -> None:
        """Write the tokens of the rows that are not greedy into ``tokens``."""
        vocab_size = logits.shape[-1]
        every: list[int] = []
        limited: list[int] = []
        nucleus: list[int] = []
        for place, request in enumerate(requests):
            params = request.params
            if params.greedy:
                continue
            if 0 < params.top_k < vocab_size:
                limited.append(place)
            elif params.top_p < 1.0:
                nucleus.append(place)
            else:
                every.append(place)
        if not (every or limited or nucleus):
            return
        temperature, top_k, top_p, min_p = self._numbers[device_rows, :_NUM_DRAW].unbind(-1)
        draws = DrawParams(
            temperature.clamp(min=_LEAST_TEMPERATURE),
            top_k,
            top_p,
            min_p,
            self._seeds[device_rows],
            self._tensor(positions),
        )
        if every:
            where = self._tensor(every)
            tokens[where] = draw_from_all(logits[where], draws.take(where))
        if limited:
            where = self._tensor(limited)
            most = max(requests[place].params.top_k for place in limited)
            tokens[where] = draw_top_k(logits[where], draws.take(where), most)
        if nucleus:
            where = self._tensor(nucleus)
            count = min(_NUCLEUS_GUESS, vocab_size)
            while True:
                tokens[where], complete = draw_top_p(logits[where], draws.take(where), count)
                if count == vocab_size:
                    break
                where = where[~complete]
                if not where.numel():
                    break
                count = min(_NUCLEUS_GROWTH * count, vocab_size)


class _HostTokens:
    """A step's tokens on their way to the host."""

    def __init__(self, tokens: Tensor) -> None:
        self._event = None
        if tokens.device.type == "cpu":
            self._tokens = tokens
            return
        self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self._tokens.copy_(tokens, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    @cached_property
    def values(self) -> list[int]:
        """The tokens; waits for the step that chose them."""
        if self._event is not None:
            self._event.synchronize()
        values: list[int] = self._tokens.tolist()
        return values


def _last_of_bad_words(request: _Request) -> tuple[int, ...]:
    """The tokens that would complete a bad word."""
    output = request.output
    last = []
    for word in request.params.bad_words:
        assert not isinstance(word, str), "the engine tokenises bad words"
        begun = len(word) - 1
        if list(word[:begun]) == output[len(output) - begun :] and len(output) >= begun:
            last.append(word[-1])
    return tuple(last)


class _Processor:
    """A custom logits processor, whichever of the two forms it has."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._takes_prompt = takes_prompt(function)

    def apply(self, prompt: list[int], output: list[int], logits: Tensor) -> str | None:
        """Change ``logits [V]`` in place; the error if the function failed."""
        tokens = ([*prompt], [*output]) if self._takes_prompt else ([*output],)
        try:
            result = self._function(*tokens, logits)
        except Exception as error:
            return f"logits processor {self._name} failed: {type(error).__name__}: {error}"
        if not isinstance(result, Tensor) or result.shape != logits.shape:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            return (
                f"logits processor {self._name} must return logits of shape "
                f"{tuple(logits.shape)}, got {got}"
            )
        if result is not logits:
            logits.copy_(result)
        return None
