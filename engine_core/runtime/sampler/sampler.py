"""The sampling state of the persistent batch, and the choice from a step's logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine_core.configs import SamplingParams
from engine_core.configs.sampling import takes_prompt
from engine_core.errors import ErrorCode
from engine_core.kernels.sampling import (
    BIASED,
    COUNTED,
    GENERATED,
    NUMBERS,
    PENALISED,
    PROMPTED,
    Adjustments,
    SamplingState,
    sample_tokens,
)
from engine_core.kernels.sampling.reference import apply_penalties, ban_tokens
from engine_core.kernels.sampling.state import FIRST_PENALTY
from engine_core.runtime.guided import GrammarCompiler, Guide, GuideBuilder
from engine_core.runtime.platform import all_to_device, to_device, to_host
from engine_core.steps import RowError

# Banned tokens that there is room for at first.
_BANS = 8

REASONS = {
    1: RowError(ErrorCode.NOT_FINITE, "the model gave logits that are not finite"),
    2: RowError(ErrorCode.NO_TOKEN, "the sampling parameters leave no token to choose"),
}
"""The meaning of each status that is not 0."""


def is_hosted(params: SamplingParams) -> bool:
    """Whether the host reads each token before the next one is chosen."""
    return bool(params.bad_words or params.logits_processors or params.guided is not None)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens that a step chose; the tensors may still be in flight.

    Attributes:
        token_ids: ``[S]`` int64.
        status: ``[S]`` int8, a key of :data:`REASONS` where a token means nothing.
        failures: what went wrong on the host, by place in the step.
    """

    token_ids: Tensor
    status: Tensor
    failures: dict[int, RowError]


@dataclass(slots=True)
class _Request:
    """The host's state of the sequence in a row.

    Attributes:
        params: its parameters, bad words as token ids.
        prompt: the prompt's tokens.
        output: generated tokens: those known at admission, and if ``params.needs_host`` all those
            of the steps before.
        stop_ids: what ``min_tokens`` bans.
        processors: its custom logits processors.
        guide: its grammar and state, or None.
        ready: whether its rows of the tensors over the vocabulary are filled.
    """

    params: SamplingParams
    prompt: Sequence[int]
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
        return is_hosted(self.params)


class Sampler:
    """Chooses tokens for the rows of the persistent batch.

    A row's choice depends on its own logits, parameters, seed, position and tokens only.

    Args:
        max_rows: rows of the persistent batch.
        device: where the logits are.
        grammar_compiler: makes the compiler for guided requests; called at the first of them. None
            if there are none.
        is_compiled: whether a GPU's kernels need no compile now, for so many rows by logits as the
            model gives them, or for others if it is asked with None. Until then PyTorch's choose.

    Attributes:
        last_tokens: ``[max_rows]`` int64 on the device, the token that each row sampled last.
        guides: compiles the grammars of guided requests; None if there are none.
    """

    def __init__(
        self,
        max_rows: int,
        device: torch.device,
        grammar_compiler: Callable[[], GrammarCompiler] | None = None,
        is_compiled: Callable[[int | None], bool] = lambda count: True,
    ) -> None:
        self._is_compiled = is_compiled
        self._max_rows = max_rows
        self._device = device
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        # Of hosted rows: the tokens of the step that sampled last, on their way to the host, and
        # the place among them. A captured step leaves its own best token in last_tokens.
        self._chosen: dict[int, tuple[_HostTokens, int]] = {}
        self.guides = None if grammar_compiler is None else GuideBuilder(grammar_compiler)
        # Parameters by row; rows that are plainly greedy have zeros.
        self._numbers = torch.zeros(max_rows, len(NUMBERS), dtype=torch.float64, device=device)
        self._seeds = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._set_rows: set[int] = set()
        # Numbers and seeds of rows that were admitted since the last flush.
        self._unwritten: dict[int, tuple[list[float], int]] = {}
        self._adjustments: Adjustments | None = None
        self._adjusted_rows: set[int] = set()
        self._requests: dict[int, _Request] = {}

    @property
    def state(self) -> SamplingState:
        """How the rows choose, as it is kept on the device; see :meth:`flush`.

        The tensors stay the same ones, but for ``adjustments``, which is replaced when one of its
        tensors is made or grows.
        """
        return SamplingState(self._numbers, self._seeds, self._adjustments)

    def admit(
        self,
        row: int,
        token_ids: Sequence[int],
        prompt_len: int,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
    ) -> None:
        """Give ``row`` to a request. The device is told by :meth:`flush`.

        Args:
            row: in ``[0, max_rows)``; what was there is forgotten.
            token_ids: the prompt, and after a preemption what was generated before it.
            prompt_len: length of the prompt alone.
            params: with a seed, and with bad words as token ids.
            eos_token_ids: what ``min_tokens`` bans besides the request's own stop tokens.
        """
        assert params.seed is not None, "the engine gives every request a seed"
        adjusted = params.changes_logits
        if adjusted or not params.greedy:
            numbers = [getattr(params, name) for name in NUMBERS]
            self._unwritten[row] = (numbers, params.seed)
            self._set_rows.add(row)
        elif row in self._set_rows:
            self._unwritten[row] = ([0.0] * len(NUMBERS), 0)
            self._set_rows.remove(row)
        self._requests[row] = _Request(
            params=params,
            prompt=token_ids[:prompt_len],
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
        if adjusted or row in self._adjusted_rows:
            self._set_adjustments(row, self._requests[row])

    def flush(self) -> None:
        """Write newly admitted rows' parameters to the device, all in one transfer.

        :meth:`sample` begins with it; a captured step does not.
        """
        if not self._unwritten:
            return
        numbers, seeds = zip(*self._unwritten.values(), strict=True)
        where, sent_numbers, sent_seeds = all_to_device(
            [
                np.fromiter(self._unwritten, np.int64, len(self._unwritten)),
                np.array(numbers, dtype=np.float64),
                np.array(seeds, dtype=np.int64),
            ],
            self._device,
        )
        self._unwritten.clear()
        self._numbers[where] = sent_numbers
        self._seeds[where] = sent_seeds

    def _set_adjustments(self, row: int, request: _Request) -> None:
        """Write to the device which changes of the row's logits are made there.

        Of a hosted request :meth:`_adjust` makes them all, to keep their order with the host's own.
        """
        adjustments = self._adjustments
        if adjustments is None:
            adjustments = Adjustments(
                torch.zeros(self._max_rows, dtype=torch.int32, device=self._device),
                torch.full((self._max_rows, _BANS), -1, dtype=torch.int32, device=self._device),
                torch.zeros(self._max_rows, dtype=torch.int64, device=self._device),
            )
        kinds = COUNTED if request.params.has_penalties else 0
        ban_end = 0
        if not request.hosted:
            kinds += PENALISED if request.params.has_penalties else 0
            kinds += BIASED if request.biased else 0
            if request.stop_ids and request.params.min_tokens:
                ban_end = len(request.prompt) + request.params.min_tokens
                ids = request.stop_ids
                width = adjustments.ban_ids.shape[1]
                if len(ids) > width:
                    width = 1 << (len(ids) - 1).bit_length()
                    wider = adjustments.ban_ids.new_full((self._max_rows, width), -1)
                    wider[:, : adjustments.ban_ids.shape[1]] = adjustments.ban_ids
                    adjustments = replace(adjustments, ban_ids=wider)
                padded = torch.tensor([*ids, *[-1] * (width - len(ids))], dtype=torch.int32)
                adjustments.ban_ids[row] = to_device(padded, self._device)
        # A kernel's argument: an assignment would wait for the steps in flight.
        adjustments.kinds[row].fill_(kinds)
        adjustments.ban_ends[row].fill_(ban_end)
        self._adjustments = adjustments
        if kinds or ban_end:
            self._adjusted_rows.add(row)
        else:
            self._adjusted_rows.discard(row)

    @property
    def _compiler(self) -> GrammarCompiler:
        assert self.guides is not None, "requests are not guided without a tokenizer"
        return self.guides.compiler

    def _guide(self, request: _Request) -> Guide:
        """A request's guide, advanced by its output so far."""
        assert request.params.guided is not None, "asked for a guided request"
        guide = self._compiler.guide(request.params.guided, request.stop_ids)
        guide.advance(request.output)
        return guide

    def sample(
        self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]
    ) -> SampledTokens:
        """Choose a token for each of some rows, and remember it.

        Args:
            logits: ``[S, V]`` as the model gave them; not modified.
            rows: S different rows of the persistent batch, all admitted.
            positions: linear positions that the chosen tokens will have. A row's positions follow
                one another without a gap.
        """
        self.flush()
        requests = [self._requests[row] for row in rows]
        for row, request in zip(rows, requests, strict=True):
            if not request.ready:
                self._fill(row, request, logits.shape[-1])
        failures: dict[int, RowError] = {}
        hosted = [place for place, request in enumerate(requests) if request.hosted]
        where = from_model = None
        if hosted:
            where = self._tensor(hosted)
            from_model = logits[where].amax(dim=-1).isfinite()
            logits = logits.to(torch.float32, copy=True)
            self._read_tokens(hosted, requests, rows, positions)
            self._adjust(logits, hosted, requests, rows, positions, failures)
        chosen = np.array([rows, positions], dtype=np.int64)
        row_tensor, last_positions = all_to_device([chosen[0], chosen[1] - 1], self._device)
        tokens, status = sample_tokens(
            logits,
            row_tensor,
            last_positions,
            self.last_tokens,
            self.state,
            plain=not self._is_compiled(
                len(rows) if not hosted and self._adjustments is None else None
            ),
        )
        if where is not None and from_model is not None:
            left = status[where] == 0
            status[where] = torch.where(from_model, torch.where(left, 0, 2), 1).to(torch.int8)
            host_tokens = _HostTokens(tokens)
            self._chosen.update({rows[place]: (host_tokens, place) for place in hosted})
        return SampledTokens(tokens, status, failures)

    def load_plain(self, vocab_size: int, dtype: torch.dtype) -> None:
        """Choose for nobody as where kernels are missing.

        A GPU loads those of PyTorch as they are first launched, and may wait for a step for each.

        Args:
            vocab_size: logits of a row.
            dtype: of the logits.
        """
        ways: list[dict[str, float]] = [{}, {"top_k": 8.0}, {"top_p": 0.5}]
        plain = dict.fromkeys(NUMBERS, 0.0) | {"temperature": 1.0, "top_p": 1.0}
        numbers = [[*(plain | way).values()] for way in ways]
        sent = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        count = len(ways)
        where, positions, seeds, last = (torch.arange(count, device=self._device) for _ in range(4))
        logits = torch.zeros(count, vocab_size, dtype=dtype, device=self._device)
        sample_tokens(logits, where, positions, last, SamplingState(sent, seeds), plain=True)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        # Through numpy: torch takes ten times as long for a list, or an array, of Python's.
        numbers = np.array(values, dtype=np.int64)
        return to_device(torch.from_numpy(numbers), self._device)

    def _adjust(
        self,
        logits: Tensor,
        places: Sequence[int],
        requests: Sequence[_Request],
        rows: Sequence[int],
        positions: Sequence[int],
        failures: dict[int, RowError],
    ) -> None:
        """Bias, penalties, bans, processors and guides of hosted requests, in place."""
        for place in places:
            request, row = requests[place], rows[place]
            params = request.params
            own = logits[place : place + 1]
            if request.biased:
                assert self._adjustments is not None, "made at admission"
                assert self._adjustments.bias is not None, "filled before"
                own += self._adjustments.bias[row]
            if params.has_penalties:
                assert self._adjustments is not None, "made at admission"
                assert self._adjustments.seen is not None, "filled before"
                assert self._adjustments.output_counts is not None, "filled before"
                at = slice(row, row + 1)
                own.copy_(
                    apply_penalties(
                        own,
                        self._adjustments.seen[at],
                        self._adjustments.output_counts[at],
                        *self._numbers[at, FIRST_PENALTY:].unbind(-1),
                    )
                )
            bans = _last_of_bad_words(request)
            if positions[place] - len(request.prompt) < params.min_tokens:
                bans += request.stop_ids
            if bans:
                ban_tokens(own, self._tensor(bans).unsqueeze(0))
            for processor in request.processors:
                error = processor.apply(request.prompt, request.output, logits[place])
                if error is not None:
                    failures[place] = RowError(ErrorCode.LOGITS_PROCESSOR, error)
                    break
        guided = [place for place in places if requests[place].guide is not None]
        if guided:
            self._apply_guides(logits, guided, requests, failures)

    def _apply_guides(
        self,
        logits: Tensor,
        places: Sequence[int],
        requests: Sequence[_Request],
        failures: dict[int, RowError],
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

    def _fill(self, row: int, request: _Request, vocab_size: int) -> None:
        """Write the request's rows of the tensors over the vocabulary."""
        request.ready = True
        params = request.params
        if not (params.has_penalties or request.biased):
            return
        adjustments = self._adjustments
        assert adjustments is not None, "made at admission"
        shape = (self._max_rows, vocab_size)
        if params.has_penalties:
            if adjustments.seen is None:
                counts, seen_ids = torch.zeros((2, *shape), dtype=torch.int32, device=self._device)
                adjustments = replace(
                    adjustments,
                    seen=torch.zeros(shape, dtype=torch.uint8, device=self._device),
                    output_counts=counts,
                    seen_ids=seen_ids,
                    seen_sizes=torch.zeros_like(adjustments.kinds),
                )
            seen, counts = adjustments.seen, adjustments.output_counts
            seen_ids, seen_sizes = adjustments.seen_ids, adjustments.seen_sizes
            assert seen is not None, "made just now or before"
            assert counts is not None, "made with seen"
            assert seen_ids is not None, "made with seen"
            assert seen_sizes is not None, "made with seen"
            seen[row].zero_().index_fill_(0, self._tensor(request.prompt), PROMPTED)
            output = self._tensor(request.output)
            seen[row, output] |= GENERATED
            counts = counts[row].zero_()
            counts.index_put_((output,), counts.new_ones(()), accumulate=True)
            ids = sorted({*request.prompt, *request.output})
            seen_ids[row, : len(ids)] = self._tensor(ids).to(torch.int32)
            seen_sizes[row].fill_(len(ids))
        if request.biased:
            if adjustments.bias is None:
                bias = torch.zeros(shape, dtype=torch.float32, device=self._device)
                adjustments = replace(adjustments, bias=bias)
            assert adjustments.bias is not None, "made just now"
            own = adjustments.bias[row]
            own.zero_()
            if params.allowed_token_ids is not None:
                own.fill_(-torch.inf)
                own.index_fill_(0, self._tensor(params.allowed_token_ids), 0.0)
            if params.logit_bias:
                values = torch.tensor(list(params.logit_bias.values()))
                own[self._tensor(list(params.logit_bias))] += to_device(values, self._device)
        self._adjustments = adjustments

    def _read_tokens(
        self,
        places: Sequence[int],
        requests: Sequence[_Request],
        rows: Sequence[int],
        positions: Sequence[int],
    ) -> None:
        """Fetch the output up to the positions to the host.

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


def apply_bitmask(logits: Tensor, words: Tensor) -> Tensor:
    """Logits of the tokens whose bit is set, in place; the others become minus infinity.

    Args:
        logits: ``[S, V]``.
        words: ``[S, B]`` uint8, eight tokens per byte, the lowest bit first; at least V bits per
            row.
    """
    bits = torch.bitwise_left_shift(
        torch.ones(8, dtype=torch.uint8, device=words.device),
        torch.arange(8, dtype=torch.uint8, device=words.device),
    )
    banned = ((words.unsqueeze(-1) & bits) == 0).flatten(1)
    return logits.masked_fill_(banned[:, : logits.shape[-1]], -torch.inf)


class _HostTokens:
    """A step's tokens on their way to the host."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens, self._event = to_host(tokens), None
        if tokens.is_cuda:
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

    def apply(self, prompt: Sequence[int], output: list[int], logits: Tensor) -> str | None:
        """Change ``logits [V]`` in place; the message of the error if the function failed."""
        tokens = ([*prompt], [*output]) if self._takes_prompt else ([*output],)
        shape = logits.shape
        try:
            result = self._function(*tokens, logits)
            if isinstance(result, Tensor) and result.shape == shape == logits.shape:
                if result is not logits:
                    logits.copy_(result)
                return None
        except KeyboardInterrupt:  # the user's, not the function's
            raise
        except BaseException as error:  # sys.exit() too ends its own request alone
            return f"logits processor {self._name} failed: {type(error).__name__}: {error}"
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        return (
            f"logits processor {self._name} must return logits of shape {tuple(shape)}, got {got}, "
            "and leave the shape of its argument as it is"
        )
