"""The step loop, and what belongs to a request between its steps."""

from __future__ import annotations

import gc
import hashlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from engine_core.configs import EngineConfig, ModelConfig, SamplingParams
from engine_core.engine.sampling import resolve_sampling
from engine_core.engine.startup import load
from engine_core.engine.step_stats import StepStats
from engine_core.errors import EngineDeadError, RequestError
from engine_core.inputs import ProcessedPrompt
from engine_core.runtime.layer_trace import LayerTrace
from engine_core.runtime.runner import PendingStep
from engine_core.scheduler import Request, RequestUpdate
from engine_core.steps import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    StepPlan,
    TokenLogprobs,
)
from engine_core.text import TextStream, Tokenizer

# How many steps in a row must be done early, or be waited for, before repeats change.
_EARLY_STEPS = 4
_WAITING_STEPS = 64


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


Prompt = str | list[int] | TextPrompt | TokensPrompt


@dataclass(slots=True)
class _Completion:
    """One of a request's ``n`` sequences."""

    request: Request
    stream: TextStream | None
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None

    def output(self, index: int) -> CompletionOutput:
        request = self.request
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=list(request.output_token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
        )


@dataclass(slots=True)
class _State:
    """A request as the user gave it, with its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    streaming: bool
    arrival_time: float
    completions: list[_Completion] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    first_token_time: float | None = None


class Engine:
    """Runs one model. ``add_request`` takes work, ``step`` advances all of it.

    It is not thread-safe: one thread owns it.

    Attributes:
        model_config: the model's.
        tokenizer: None with ``skip_tokenizer_init``.
        eos_token_ids: the tokens that end a sequence.
        startup: seconds that each phase of loading took.
        step_stats: where the time of its steps went; put a new one here to begin anew.
    """

    def __init__(self, model: str, config: EngineConfig | None = None) -> None:
        """Load ``model``: a checkpoint folder, a GGUF file or a hub id.

        Raises:
            EngineError: it cannot run.
        """
        self.config = config or EngineConfig()
        loaded = load(model, self.config)
        self.model_config: ModelConfig = loaded.model_config
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self.startup: Mapping[str, float] = loaded.phases
        self.max_model_len = loaded.cache_plan.max_model_len
        self.cache_plan = loaded.cache_plan
        self.scheduler = loaded.scheduler
        self._generation_config = loaded.generation_config
        self.eos_token_ids: tuple[int, ...] = loaded.eos_token_ids
        self._input_processor = loaded.input_processor
        self._executor = loaded.executor
        self._depth = loaded.depth
        self._flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self.step_stats = StepStats()
        self._states: dict[str, _State] = {}
        self._owners: dict[str, tuple[_State, int]] = {}
        self._drawn_seeds = 0
        self.scheduler.repeat_limit = 1
        self._early = 0
        self._waits = 0
        self._dead: BaseException | None = None
        # What was made so far lives as long as the engine. A full collection that visits all of it
        # would cost several steps.
        gc.freeze()

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's ``generation_config.json`` recommends, over our own defaults."""
        given = self._generation_config
        names = {
            "temperature": "temperature",
            "top_k": "top_k",
            "top_p": "top_p",
            "min_p": "min_p",
            "repetition_penalty": "repetition_penalty",
            "max_new_tokens": "max_tokens",
        }
        values = {ours: given[name] for name, ours in names.items() if given.get(name) is not None}
        if given.get("do_sample") is False:
            values["temperature"] = 0.0
        return SamplingParams(**values)

    @property
    def has_unfinished(self) -> bool:
        """Whether a call of :meth:`step` can still bring something."""
        return bool(self._states) or bool(self._flight)

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        streaming: bool = True,
    ) -> str:
        """Queue a request.

        Args:
            prompt: text or token ids.
            sampling_params: the checkpoint's defaults if None.
            request_id: a name of the caller's choice.
            streaming: whether :meth:`step` returns an output for each new token, or only the
                last one.

        Returns:
            The request's id.

        Raises:
            RequestError: it cannot be served; nothing of it is kept.
            EngineDeadError: the engine has stopped.
        """
        self._check_alive()
        params = resolve_sampling(
            sampling_params or self.default_sampling_params(),
            self.model_config.vocab_size,
            self.tokenizer,
        )
        if params.logits_processors and self.config.tensor_parallel_size > 1:
            raise RequestError(
                "logits_processors are functions of this process, and with tensor_parallel_size "
                f"{self.config.tensor_parallel_size} tokens are chosen in others; leave them out"
            )
        text, token_ids = self.tokenize(prompt)
        if request_id is None:
            request_id = f"request-{len(self._owners)}-{self._drawn_seeds}"
        if request_id in self._states:
            raise RequestError(f"there is already a request {request_id!r}; choose another id")
        processed = (
            ProcessedPrompt(token_ids=tuple(token_ids))
            if self._input_processor is None
            else self._input_processor.process(token_ids)
        )
        now = time.monotonic()
        state = _State(request_id, text, token_ids, streaming, now)
        seed = self._draw_seed() if params.seed is None else params.seed
        added: list[str] = []
        try:
            for index in range(params.n):
                own = params.replace(n=1, seed=(seed + index) % 2**63)
                child = request_id if params.n == 1 else f"{request_id}#{index}"
                request = Request(
                    child,
                    processed,
                    own,
                    eos_token_ids=self.eos_token_ids,
                    arrival_time=now,
                    max_model_len=self.max_model_len,
                )
                self.scheduler.add(request)
                added.append(child)
                stream = None
                if self.tokenizer is not None:
                    stream = TextStream(self.tokenizer, own, token_ids)
                completion = _Completion(request, stream)
                if own.logprobs is not None:
                    completion.logprobs, completion.cumulative_logprob = [], 0.0
                state.completions.append(completion)
        except RequestError:
            for child in added:
                self.scheduler.abort(child)
            raise
        for index, child in enumerate(added):
            self._owners[child] = (state, index)
        self._states[request_id] = state
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; None if it is not running (any more)."""
        state = self._states.pop(request_id, None)
        if state is None:
            return None
        for completion in state.completions:
            del self._owners[completion.request.request_id]
            if completion.request.finish_reason is None:
                self.scheduler.abort(completion.request.request_id)
        return self._output(state, finished=True)

    def step(self) -> list[RequestOutput]:
        """Submit a step if there is one, and take the results of the oldest in flight if due.

        Returns:
            One output a request that has something new: each new token for a streaming request,
            the last one for every request.

        Raises:
            EngineDeadError: the model failed; every request is lost.
        """
        self._check_alive()
        stats = self.step_stats
        try:
            stats.begin()
            plan = self.scheduler.schedule()
            stats.scheduled()
            if plan is not None:
                self._flight.append((plan, self._executor.submit(plan)))
                stats.submitted(plan)
            if not self._flight or (plan is not None and len(self._flight) <= self._depth):
                return []
            done, pending = self._flight.popleft()
            self._adapt_repeats(done, pending)
            result = pending.result()
            stats.waited(done)
            outputs = self._apply(self.scheduler.update(result))
            stats.applied()
            return outputs
        except Exception as error:
            self._dead = error
            self._executor.close()
            raise EngineDeadError(
                f"the engine stopped in a step: {type(error).__name__}: {error}"
            ) from error

    def _adapt_repeats(self, plan: StepPlan, pending: PendingStep) -> None:
        """Have decode steps repeated on the device if it waits for the host, and only then.

        A step that is done before its result is asked for was shorter than the host's work for
        one; with more tokens a plan there is less of that.
        """
        scheduler = self.scheduler
        if plan.rows[-1].num_tokens > 1 or plan.repeat < scheduler.repeat_limit:
            return
        if pending.done:
            self._waits = 0
            self._early += 1
            if self._early >= _EARLY_STEPS:
                self._early = 0
                scheduler.repeat_limit = min(2 * plan.repeat, scheduler.config.max_repeat)
        else:
            self._early = 0
            self._waits += 1
            if self._waits >= _WAITING_STEPS:
                self._waits = 0
                scheduler.repeat_limit = max(1, plan.repeat // 2)

    def trace_layers(self) -> AbstractContextManager[LayerTrace]:
        """Record what each layer gives in the first prefill and the first decode step.

        ::

            with engine.trace_layers() as trace:
                ...  # add_request, step
            for step in trace.steps:
                print(step.phase, step.first_non_finite)

        Steps are slower while they are recorded, and forward hooks are there only then.

        Raises:
            ConfigError: ``tensor_parallel_size`` is above 1, or a GPU is used without ``eager``.
        """
        return self._executor.trace_layers()

    def close(self) -> None:
        """Drop the model and its cache; the engine cannot be used after."""
        while self._flight:
            self._flight.popleft()
        self._states.clear()
        self._owners.clear()
        if self._dead is None:
            self._dead = RuntimeError("the engine was closed")
        gc.unfreeze()
        self._executor.close()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine has stopped: {self._dead}") from self._dead

    def _in_vocabulary(self, token: Any) -> bool:
        return (
            isinstance(token, int)
            and not isinstance(token, bool)
            and 0 <= token < self.model_config.vocab_size
        )

    def _draw_seed(self) -> int:
        self._drawn_seeds += 1
        text = f"{self.config.seed}:{self._drawn_seeds}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, None if it was given as token ids, and its token ids.

        Raises:
            RequestError: it is no prompt, or its token ids are outside the vocabulary.
        """
        given: Any = prompt
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if keys not in ({"prompt"}, {"prompt_token_ids"}):
                raise RequestError(
                    "a prompt given as a dictionary has exactly one key, 'prompt' or "
                    f"'prompt_token_ids'; got {sorted(map(str, keys))}"
                )
            given = next(iter(prompt.values()))
        if isinstance(given, str):
            if self.tokenizer is None:
                raise RequestError(
                    "this engine has no tokenizer, so prompts must be token ids; got text"
                )
            return given, self.tokenizer.encode(given)
        if not isinstance(given, Sequence):
            raise RequestError(
                f"a prompt is text or a list of token ids, got {type(given).__name__}"
            )
        vocab_size = self.model_config.vocab_size
        # Looked at as a whole first: a prompt of a million tokens is checked in a few milliseconds.
        if set(map(type, given)) != {int} or not 0 <= min(given) <= max(given) < vocab_size:
            for position, token in enumerate(given):
                if not self._in_vocabulary(token):
                    raise RequestError(
                        f"token {token!r} at position {position} of the prompt is not a token id "
                        f"of the vocabulary of {vocab_size}"
                    )
        return None, list(given)

    def _apply(self, updates: Sequence[RequestUpdate]) -> list[RequestOutput]:
        now = time.monotonic()
        changed: dict[str, _State] = {}
        for update in updates:
            owner = self._owners.get(update.request.request_id)
            if owner is None:
                continue
            state, index = owner
            self._take(state, state.completions[index], update, now)
            changed[state.request_id] = state
        outputs = []
        for state in changed.values():
            finished = all(c.request.finish_reason is not None for c in state.completions)
            if finished:
                del self._states[state.request_id]
                for completion in state.completions:
                    del self._owners[completion.request.request_id]
            if finished or state.streaming:
                outputs.append(self._output(state, finished))
        return outputs

    def _take(
        self, state: _State, completion: _Completion, update: RequestUpdate, now: float
    ) -> None:
        """Add what a step brought to one completion."""
        if update.prompt_logprobs is not None and state.prompt_logprobs is None:
            state.prompt_logprobs = [None, *map(self._decoded, update.prompt_logprobs)]
        if update.new_token_ids and state.first_token_time is None:
            state.first_token_time = now
        if completion.logprobs is not None and update.logprobs is not None:
            for token, entry in zip(update.new_token_ids, update.logprobs, strict=True):
                completion.logprobs.append(self._decoded(entry))
                assert completion.cumulative_logprob is not None, "it starts with logprobs"
                completion.cumulative_logprob += entry[token].logprob
        stream = completion.stream
        if stream is None:
            return
        request = completion.request
        include_stop = request.sampling.include_stop_str_in_output
        new = update.new_token_ids
        if request.finish_reason == "stop" and new and not include_stop:
            # The token that ended it (end of sequence or a stop token) is not part of the text.
            new = new[:-1]
        if new:
            text = stream.append(new)
            completion.text += text.delta
            if text.stopped_by is not None:
                self.scheduler.finish(request.request_id, "stop", text.stopped_by)
        if request.finish_reason is not None:
            completion.text += stream.finish()
            if include_stop:
                completion.text += stream.stopped_by or ""

    def _decoded(self, entry: TokenLogprobs) -> TokenLogprobs:
        if self.tokenizer is None:
            return entry
        decode = self.tokenizer.decode
        return {
            token: replace(value, decoded_token=decode([token], skip_special_tokens=False))
            for token, value in entry.items()
        }

    def _output(self, state: _State, finished: bool) -> RequestOutput:
        requests = [completion.request for completion in state.completions]
        return RequestOutput(
            request_id=state.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=[c.output(index) for index, c in enumerate(state.completions)],
            finished=finished,
            prompt_logprobs=state.prompt_logprobs,
            metrics=RequestMetrics(
                arrival_time=state.arrival_time,
                first_token_time=state.first_token_time,
                finished_time=time.monotonic() if finished else None,
                num_cached_tokens=requests[0].num_cached_tokens,
                num_preemptions=sum(request.num_preemptions for request in requests),
            ),
        )


__all__ = ["Engine", "Prompt"]
