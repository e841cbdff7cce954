"""The text half of an engine: prompts to tokens, and the tokens that come back to outputs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import operator
import os
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from engine_core.checkpoint import resolve_model
from engine_core.configs import (
    EngineConfig,
    ModelConfig,
    PoolingConfig,
    PoolingParams,
    SamplingParams,
)
from engine_core.configs.generation import Recommendation, read_recommendation
from engine_core.engine.guided import GrammarTrials
from engine_core.engine.media import MediaIntake
from engine_core.engine.prompt_inputs import fitted_state, process_prompt
from engine_core.engine.router import Ticket
from engine_core.engine.sampling import resolve_sampling
from engine_core.errors import (
    CheckpointNotFoundError,
    ErrorCode,
    QueueFullError,
    RequestError,
    shown,
)
from engine_core.inputs import (
    InputProcessor,
    MediaItem,
    ProcessedPrompt,
    PromptState,
    packed_token_ids,
)
from engine_core.media.parts import MediaPart, prompt_media
from engine_core.media.shared import SharedArrays
from engine_core.steps import (
    CompletionOutput,
    NewSequence,
    RequestMetrics,
    RequestOutput,
    RowError,
    TokenLogprobs,
    TokenUpdate,
)
from engine_core.text import TextStream, Tokenizer, TokenNames, check_variables, load_tokenizer
from engine_core.text.template_choice import DEFAULT_TEMPLATE
from engine_core.workers import WorkerPool


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


class MediaPrompt(TypedDict, total=False):
    """A prompt that shows something: text or token ids, and what it shows by kind.

    ``multi_modal_data`` has one item, or a list of them, for "image", "video" and "audio", as
    :meth:`MediaProcessor.process_media` takes them, in the order of their placeholders in the
    prompt; or the path or address of a file, or None for what ``multi_modal_uuids`` name and an
    earlier prompt showed. ``mm_processor_kwargs`` are settings of the family's processing.
    """

    prompt: str
    prompt_token_ids: list[int]
    multi_modal_data: Mapping[str, Any]
    multi_modal_uuids: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]


Prompt = str | list[int] | TextPrompt | TokensPrompt | MediaPrompt
Message = Mapping[str, Any]
_MEDIA_KEYS = frozenset({"multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"})
# Of sequences that choose no tokens.
_NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)
# Texts longer than this are tokenised in a thread, so that an event loop goes on meanwhile.
_LONG_TEXT = 4096
# Of the host's memory, what features of requests under way may take until no more are processed.
_SHARE_OF_MEMORY = 0.25
# Prompts that show something are processed by so many threads, as far ahead of their turn.
_THREADS = min(8, os.cpu_count() or 1)
_AHEAD = 16


class TokenizedPrompt(NamedTuple):
    """A prompt as users see it, and as the engine needs it.

    Attributes:
        text: None if it was given as token ids.
        token_ids: its tokens.
        packed: the same, as :func:`packed_token_ids` makes them.
        processed: what the family's input processor says of it, if it shows something.
        types: of its tokens, for models that tell the two texts of a pair apart; None for all 0.
    """

    text: str | None
    token_ids: list[int]
    packed: array[int]
    processed: ProcessedPrompt | None = None
    types: list[int] | None = None


@dataclass(slots=True)
class Completion:
    """One of a request's ``n`` sequences, and its output that was not taken yet.

    Attributes:
        sequence_id: its id in the core.
        number: what the core's updates call it.
        stream: detokenises; None without a tokenizer.
        include_stop: whether the stop string that ended the text stays in it.
        token_ids: its tokens.
        text: its text, in pieces.
        logprobs: one mapping per token, or None if not asked for.
        cumulative_logprob: sum over all tokens, or None.
        finish_reason: None while it goes on.
        stop_reason: see :class:`CompletionOutput`.
        error: what went wrong if the reason is "error".
        num_tokens: all tokens, taken or not.
        num_preemptions: how often it lost its blocks.
        changed: whether anything came since :meth:`State.delta`.
        pooled: the vector or score that it gives in place of text.
    """

    sequence_id: str
    number: int
    stream: TextStream | None
    include_stop: bool
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: RowError | None = None
    num_tokens: int = 0
    num_preemptions: int = 0
    changed: bool = False
    pooled: bytes | None = None

    def output(self, index: int) -> CompletionOutput:
        """All output so far, which is kept."""
        if len(self.text) > 1:
            self.text = ["".join(self.text)]
        logprobs = None if self.logprobs is None else list(self.logprobs)
        return self._output(index, list(self.token_ids), logprobs)

    def delta(self, index: int) -> CompletionOutput:
        """All pending output, which is then dropped."""
        taken = self._output(index, self.token_ids, self.logprobs)
        self.token_ids = []
        self.text.clear()
        if self.logprobs is not None:
            self.logprobs = []
        self.changed = False
        return taken

    def _output(
        self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text="".join(self.text),
            token_ids=token_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=None if self.error is None else self.error.message,
            error_code=None if self.error is None else self.error.code,
            pooled=self.pooled,
        )

    def take_text(self) -> tuple[str, int] | None:
        """The pending text and its number of tokens, if nothing else is pending or was asked for.

        It is then dropped.
        """
        if self.finish_reason is not None or self.logprobs is not None or self.stream is None:
            return None
        taken = "".join(self.text), len(self.token_ids)
        self.token_ids.clear()
        self.text.clear()
        self.changed = False
        return taken


@dataclass(slots=True)
class State:
    """A request as the user gave it, with its completions.

    Attributes:
        request_id: the user's name for it, or the engine's.
        prompt: its text, or None.
        prompt_token_ids: its tokens.
        arrival_time: ``time.monotonic`` seconds.
        streaming: whether there is an output for new tokens, not only at the end.
        completions: its ``n`` sequences.
        unfinished: how many of them go on.
        prompt_logprobs: None at index 0, then one mapping per prompt token; None if not there.
        has_prompt_logprobs: whether they have come: each completion brings them, one is enough.
        first_token_time: as ``arrival_time``, or None.
        num_cached_tokens: prompt tokens taken from the prefix cache.
        media: what the prompt shows. The core, maybe another process, has it just as long.
        media_tokens: by kind, prompt tokens that each picture, video or sound takes.
        ticket: names the engine that has it, where there may be several.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    arrival_time: float
    streaming: bool
    completions: list[Completion] = field(default_factory=list)
    unfinished: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    has_prompt_logprobs: bool = False
    first_token_time: float | None = None
    num_cached_tokens: int = 0
    media: tuple[MediaItem, ...] = ()
    media_tokens: dict[str, list[int]] = field(default_factory=dict)
    ticket: Ticket | None = None

    def output(self) -> RequestOutput:
        """The whole request so far."""
        outputs = [item.output(index) for index, item in enumerate(self.completions)]
        return self._request_output(outputs, self.prompt_logprobs)

    def delta(self) -> RequestOutput:
        """The additions since the last call, of the completions that changed."""
        outputs = [c.delta(index) for index, c in enumerate(self.completions) if c.changed]
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return self._request_output(outputs, prompt_logprobs)

    @property
    def running(self) -> list[str]:
        """The core's ids of the completions that go on."""
        return [c.sequence_id for c in self.completions if c.finish_reason is None]

    def end(self, reason: str) -> None:
        """End the completions that go on."""
        for completion in self.completions:
            if completion.finish_reason is None:
                completion.finish_reason = reason
                completion.changed = True
        self.unfinished = 0

    def _request_output(
        self, outputs: list[CompletionOutput], prompt_logprobs: list[TokenLogprobs | None] | None
    ) -> RequestOutput:
        finished = self.unfinished == 0
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                first_token_time=self.first_token_time,
                finished_time=time.monotonic() if finished else None,
                num_cached_tokens=self.num_cached_tokens,
                num_preemptions=sum(c.num_preemptions for c in self.completions),
                media_tokens=self.media_tokens,
            ),
        )


class Frontend:
    """The user's side of requests: text, ``n``, stop strings, outputs.

    It does not know where the core runs: it makes :class:`NewSequence` and takes
    :class:`TokenUpdate`.

    Args:
        config: the engine's settings.
        model_config: the model's.
        tokenizer: None if everything is token ids.
        input_processor: the family's, or None.
        generation_config: the checkpoint's ``generation_config.json``.
        finish: tells the core that a sequence's text is complete: its id, the reason, and the stop
            string.
        name: of this frontend among those that share a core; part of ids and seeds.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        input_processor: InputProcessor | None,
        generation_config: Mapping[str, Any],
        finish: Callable[[str, str, str], None],
        name: str = "",
    ) -> None:
        self._config = config
        self._model_config = model_config
        self._tokenizer = tokenizer
        self._input_processor = input_processor
        self._generation_config = generation_config
        self._finish = finish
        self._name = name
        self._pool = WorkerPool()
        self.grammars = GrammarTrials(
            tokenizer, model_config.vocab_size, config.guided_compile_timeout, self._pool
        )
        self.media = MediaIntake(input_processor, model_config, config, self._pool)
        # Row state of the dtypes and shapes that all requests have, by name.
        declared = getattr(input_processor, "prompt_state", None) or PromptState()
        self._row_state: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(shape, dtype) for name, (dtype, shape) in declared.row_state.items()
        }
        self._states: dict[str, State] = {}
        # By the number of the sequence.
        self._owners: dict[int, tuple[State, Completion]] = {}
        self._drawn_seeds = 0
        self._serials = itertools.count()
        self._numbers = itertools.count()

    @property
    def states(self) -> Mapping[str, State]:
        """The unfinished requests."""
        return self._states

    @cached_property
    def _recommendation(self) -> Recommendation:
        return read_recommendation(self._generation_config, self._model_config)

    @cached_property
    def _default_sampling_params(self) -> SamplingParams:
        return self._recommendation.sampling_params()

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Fields ``given``, else those of ``generation_config.json``, else our defaults.

        Raises:
            ConfigError: a field given is unknown or out of range, or fields contradict each other.
        """
        if not given:
            return self._default_sampling_params
        return self._recommendation.sampling_params(**given)

    def tokenize(self, prompt: Prompt, cache_salts: tuple[Hashable, ...] = ()) -> TokenizedPrompt:
        """A prompt as text or token ids, or a dictionary with either and with what it shows.

        Only requests of equal ``cache_salts`` share what was made of pictures.

        Raises:
            RequestError: it is no prompt, its token ids are outside the vocabulary, or the model
                cannot take what it shows.
            QueueFullError: too many prompts wait for what they show to be processed.
            EngineDeadError: the engine is being shut down.
        """
        tokenized, shown = self._begin(prompt, cache_salts, here=True)
        return tokenized if shown is None else _with_media(tokenized, shown.result().pop())

    def tokenize_each(self, prompts: Iterable[Prompt]) -> Generator[TokenizedPrompt, None, None]:
        """Each prompt as :meth:`tokenize` gives it; what several show is processed side by side.

        Most of that is resizing and hashing, which leave other threads the interpreter.
        """
        left = iter(prompts)
        begun: deque[Future[TokenizedPrompt] | Prompt] = deque()
        with contextlib.ExitStack() as stack:
            threads: ThreadPoolExecutor | None = None
            while True:
                for prompt in itertools.islice(left, _AHEAD - len(begun)):
                    if not shows_media(prompt) or _names(prompt):  # a name means what came last
                        begun.append(prompt)
                        continue
                    if threads is None:
                        threads = ThreadPoolExecutor(_THREADS, "engine-core-prompts")
                        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
                    begun.append(threads.submit(self.tokenize, prompt))
                if not begun:
                    return
                each = begun.popleft()
                yield each.result() if isinstance(each, Future) else self.tokenize(each)

    async def tokenize_async(
        self,
        prompt: Prompt,
        cache_salts: tuple[Hashable, ...] = (),
        client: Hashable = None,
        longest: int | None = None,
    ) -> TokenizedPrompt:
        """The same without holding up the event loop.

        See :meth:`MediaIntake.begin` for ``client`` and ``longest``.
        """
        if not _takes_long(prompt) and not self.media.finds_names:
            return self.tokenize(prompt, cache_salts)
        if shows_media(prompt) or self.media.finds_names:
            self._check_room()
        tokenized, shown = await asyncio.to_thread(
            self._begin, prompt, cache_salts, here=False, client=client, longest=longest
        )
        if shown is None:
            return tokenized
        return _with_media(tokenized, (await asyncio.wrap_future(shown)).pop())

    def _check_room(self) -> None:
        """Refuse more to be held while requests under way hold much.

        Raises:
            QueueFullError: they do.
        """
        features = (item.features for state in self._states.values() for item in state.media)
        blocks = {each.block for each in features if isinstance(each, SharedArrays)}
        held = sum(block.size for block in blocks)
        if held > _SHARE_OF_MEMORY * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise QueueFullError(
                f"the pictures, videos and sounds of {len(self._states)} requests under way take "
                f"{held >> 20} MiB of memory; send the request again later"
            )

    def _begin(
        self,
        prompt: Prompt,
        cache_salts: tuple[Hashable, ...],
        *,
        here: bool,
        client: Hashable = None,
        longest: int | None = None,
    ) -> tuple[TokenizedPrompt, Future[list[ProcessedPrompt]] | None]:
        """A prompt's tokens as given, and what becomes of it if it shows something."""
        given: Any = {}
        plain: Any = prompt
        if isinstance(prompt, Mapping):
            given = prompt
            plain = {key: value for key, value in given.items() if key not in _MEDIA_KEYS}
        tokenized = self._tokenize(plain)
        options: Any = given.get("mm_processor_kwargs") or {}
        if not isinstance(options, Mapping):
            name = "mm_processor_kwargs"
            raise RequestError(f"{name} is a dictionary, got {shown(options)}", param=name)
        media = prompt_media(given.get("multi_modal_data"), given.get("multi_modal_uuids"))
        media = media or self.media.named(tokenized.token_ids)
        self.media.check(media)
        if options and not media:
            raise RequestError(
                "mm_processor_kwargs are for multi_modal_data, and there are none; leave them out",
                param="mm_processor_kwargs",
            )
        if not media:
            return tokenized, None
        begun = self.media.begin(
            tokenized.token_ids,
            media,
            options,
            cache_salts,
            here=here,
            client=client,
            longest=longest,
        )
        return tokenized, begun

    def _tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """A prompt that shows nothing."""
        given: Any = prompt
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if keys not in ({"prompt"}, {"prompt_token_ids"}):
                raise RequestError(
                    "a prompt given as a dictionary has exactly one key, 'prompt' or "
                    f"'prompt_token_ids'; got {sorted(map(str, keys))}"
                )
            ((key, given),) = prompt.items()
            if isinstance(given, str) != (key == "prompt"):
                wanted = "text" if key == "prompt" else "a list of token ids"
                raise RequestError(
                    f"the key {key!r} of a prompt holds {wanted}, got {type(given).__name__}"
                )
        if isinstance(given, str):
            if self._tokenizer is None:
                raise RequestError(
                    "prompts must be token ids, got text: this engine has no tokenizer "
                    "(skip_tokenizer_init)"
                )
            token_ids = self._tokenizer.encode(given)
            return TokenizedPrompt(given, token_ids, packed_token_ids(token_ids))
        if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray | memoryview):
            raise RequestError(
                f"a prompt is text or a list of token ids, got {type(given).__name__}"
            )
        packed = check_token_ids(given, self._model_config.vocab_size, "prompt")
        return TokenizedPrompt(None, list(given), packed)

    def shown(self, parts: Sequence[MediaPart]) -> dict[str, list[MediaPart]]:
        """The pictures of a conversation by kind, as ``multi_modal_data`` has them.

        Raises:
            RequestError: the model takes none.
        """
        media: dict[str, list[MediaPart]] = {}
        for part in parts:
            media.setdefault(part.kind, []).append(part)
        self.media.check(media)
        return media

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        check_text: Callable[[str], None] | None = None,
    ) -> list[int]:
        """The prompt that the chat template makes of one conversation, as token ids.

        ``check_text`` is called with the prompt's text before it is tokenised. A template writes
        special tokens itself; the tokenizer adds its own only with ``add_special_tokens``.

        Raises:
            RequestError: the messages do not fit the template, or there is none.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError(
                "this engine has no tokenizer (skip_tokenizer_init), so it cannot chat; complete a "
                "prompt of token ids"
            )
        variables = {} if template_kwargs is None else template_kwargs
        check_variables(variables)
        if chat_template is None and not tokenizer.chat_templates:
            chat_template = self._model_config.default_chat_template
        text = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            **variables,
        )
        if check_text is not None:
            check_text(text)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def resolve(self, sampling_params: SamplingParams | None) -> SamplingParams:
        """Sampling parameters that fit the model; the checkpoint's defaults if None.

        Their grammar is not checked here, but by ``grammars``.

        Raises:
            RequestError: they do not fit, or are of another type.
        """
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        if not isinstance(sampling_params, SamplingParams):
            raise RequestError(
                "sampling_params must be a SamplingParams, or None for the checkpoint's defaults; "
                f"got {sampling_params!r}"
            )
        self.check_task("generate")
        params = resolve_sampling(sampling_params, self._model_config.vocab_size, self._tokenizer)
        if params.logits_processors and self._config.num_ranks > 1:
            raise RequestError(
                "logits_processors are functions of this process, and on "
                f"{self._config.num_ranks} ranks tokens are chosen in others; leave them out"
            )
        return params

    def prepare(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        streaming: bool = True,
        patient: bool = False,
        priority: int = 0,
        unique_ids: bool = False,
        arrival_time: float | None = None,
        cache_salts: tuple[Hashable, ...] = (),
    ) -> tuple[State, list[NewSequence]]:
        """Make a request's state and the sequences for the core. :meth:`keep` keeps the state.

        Args:
            prompt: as :meth:`tokenize` returned it.
            params: as :meth:`resolve` returned them.
            request_id: a name of the caller's choice.
            streaming: whether there is an output for new tokens, not only at the end.
            patient: whether it may begin to decode with others that came with it.
            priority: lower runs first.
            unique_ids: whether sequences get ids that are never used again, for a core that may
                still send updates of a request that was dropped here.
            arrival_time: ``time.monotonic`` seconds; now if None.
            cache_salts: see :class:`ProcessedPrompt`; they come after the input processor's.

        Raises:
            RequestError: it cannot be served.
        """
        priority = _priority(priority)
        if not isinstance(request_id, str | None):
            raise RequestError(f"request_id must be a string or None, got {request_id!r}")
        serial = next(self._serials)
        if request_id is None:
            request_id = f"request-{serial}"
        if request_id in self._states:
            raise RequestError(f"there is already a request {request_id!r}; choose another id")
        processed = self._processed(prompt)
        if cache_salts:
            processed = replace(processed, cache_salts=processed.cache_salts + cache_salts)
        arrived = time.monotonic() if arrival_time is None else arrival_time
        state = State(
            request_id, prompt.text, prompt.token_ids, arrived, streaming, unfinished=params.n
        )
        state.media = processed.media
        for item in processed.media:
            state.media_tokens.setdefault(item.kind, []).append(item.num_embeddings)
        seed = self._draw_seed() if params.seed is None else params.seed
        base = f"{request_id}@{self._name}{serial}" if unique_ids else request_id
        sequences = []
        for index in range(params.n):
            # Nothing that needs to be validated is changed.
            own = params.model_copy(update={"n": 1, "seed": _seed_of(seed, index)})
            child = base if params.n == 1 else f"{base}#{index}"
            number = next(self._numbers)
            sequences.append(
                NewSequence(child, processed, own, arrived, priority, number, patient=patient)
            )
            stream = None
            if self._tokenizer is not None:
                stream = TextStream(self._tokenizer, own, prompt.token_ids)
            completion = Completion(child, number, stream, own.include_stop_str_in_output)
            if own.logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            state.completions.append(completion)
        return state, sequences

    def _processed(self, prompt: TokenizedPrompt) -> ProcessedPrompt:
        """The prompt as the input processor, if there is one, returns it.

        Raises:
            RequestError: the processor refuses it, or its row state does not fit the dtype and
                shape that the first request's had.
            ModelError: the processor fails, or returns what is no processed prompt.
        """
        if self._input_processor is None:
            return ProcessedPrompt(prompt.packed)
        processed = prompt.processed
        if processed is None:
            vocab_size = self._model_config.vocab_size
            asked = (vocab_size, prompt.token_ids)
            processed = process_prompt(self._input_processor, "process", *asked)
        if not processed.row_state:
            return processed
        fitted = {
            name: fitted_state(name, value, self._row_state.get(name))
            for name, value in processed.row_state.items()
        }
        self._row_state = fitted | self._row_state
        return replace(processed, row_state=fitted)

    def check_task(self, task: str) -> None:
        """Refuse what the model does not run for: "generate", or "pool" for vectors and scores.

        Raises:
            RequestError: it runs for another task.
        """
        pooling = self._model_config.pooling
        if (pooling is None) == (task == "generate"):
            return
        if pooling is None:
            raise RequestError(
                "the model generates text here, and gives no vectors or scores; start it with "
                "task='embed' (--task embed) for those",
                code=ErrorCode.TASK,
            )
        made, method, path = (
            ("vectors", "LLM.embed or LLM.score", "/v1/embeddings")
            if pooling.task == "embed"
            else ("scores", "LLM.score", "/v1/score")
        )
        raise RequestError(
            f"the model runs for the task {pooling.task!r}: it gives {made} of texts and generates "
            f"none; use {method} in Python, or {path} of 'engine-core serve'",
            code=ErrorCode.TASK,
        )

    @property
    def pooling(self) -> PoolingConfig:
        """How vectors or scores are made.

        Raises:
            RequestError: none are.
        """
        self.check_task("pool")
        assert self._model_config.pooling is not None, "it was checked"
        return self._model_config.pooling

    def tokenize_all(
        self,
        inputs: Sequence[Any],
        *,
        prompt_name: str | None = None,
        most: int | None = None,
    ) -> list[TokenizedPrompt]:
        """Texts, lists of token ids and pairs of texts (tuples), to be pooled.

        Args:
            inputs: all of one kind, or texts and lists of token ids mixed.
            prompt_name: of the prompt that goes before each text, of a pair the first; the model's
                default one if None.
            most: tokens that are kept of each; -1 for as many as the model takes, None for all.
                Token ids lose those at the side at which the tokenizer cuts texts.

        Raises:
            RequestError: one is of another kind, or there is no tokenizer or no such prompt.
        """
        pooling = self.pooling
        name = pooling.default_prompt if prompt_name is None else prompt_name
        if name is not None and (not isinstance(name, str) or name not in pooling.prompts):
            raise RequestError(
                f"the model has no prompt {shown(name)}; it has "
                f"{', '.join(map(repr, pooling.prompts)) or 'none'}",
                param="prompt_name",
            )
        before = "" if name is None else pooling.prompts[name]
        if most is not None and (type(most) is not int or (most < 1 and most != -1)):
            raise RequestError(
                f"truncate_prompt_tokens must be a positive integer, or -1 for as many as the "
                f"model takes, got {shown(most)}",
                param="truncate_prompt_tokens",
            )
        if most == -1:
            most = self._config.max_model_len or find_max_length(self._model_config)
        texts: list[Any] = [each for each in inputs if isinstance(each, str | tuple)]
        if texts and self._tokenizer is None:
            raise RequestError(
                "prompts must be token ids, got text: this engine has no tokenizer "
                "(skip_tokenizer_init)"
            )
        if before:
            texts = [
                before + each if isinstance(each, str) else (before + each[0], each[1])
                for each in texts
            ]
        encoded = iter(self._tokenizer.encode_all(texts, most) if self._tokenizer else ())
        kept = slice(most)
        if most is not None and self._tokenizer and self._tokenizer.truncation_side == "left":
            kept = slice(-most, None)
        done = []
        for index, each in enumerate(inputs):
            if isinstance(each, str | tuple):
                ids, types = next(encoded)
                text = each if isinstance(each, str) else None
                own = types if any(types) else None
                done.append(TokenizedPrompt(text, ids, packed_token_ids(ids), None, own))
                continue
            try:
                tokenized = self._tokenize(each)
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}", param=error.param) from error
            ids = tokenized.token_ids[kept]
            done.append(tokenized._replace(token_ids=ids, packed=tokenized.packed[kept]))
        return done

    def prepare_pooled(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: PoolingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        unique_ids: bool = False,
        arrival_time: float | None = None,
        cache_salts: tuple[Hashable, ...] = (),
    ) -> tuple[State, list[NewSequence]]:
        """One request for what each of several prompts gives; the arguments are :meth:`prepare`'s.

        The prompts are its completions, in their order. ``params`` fit the model.

        Raises:
            RequestError: it cannot be served.
        """
        whole = self.pooling.whole
        priority = _priority(priority)
        serial = next(self._serials)
        request_id = f"request-{serial}" if request_id is None else request_id
        if request_id in self._states:
            raise RequestError(f"there is already a request {request_id!r}; choose another id")
        arrived = time.monotonic() if arrival_time is None else arrival_time
        state = State(request_id, None, [], arrived, streaming=False, unfinished=len(prompts))
        base = f"{request_id}@{self._name}{serial}" if unique_ids else request_id
        sequences = []
        for index, prompt in enumerate(prompts):
            processed = self._processed(prompt)
            changes: dict[str, Any] = {}
            if prompt.types is not None:
                changes["token_state"] = {**processed.token_state, "token_type_ids": [prompt.types]}
            if whole:
                changes["atomic_spans"] = ((0, len(prompt.packed)),)
            if cache_salts and not whole:
                changes["cache_salts"] = processed.cache_salts + cache_salts
            if changes:
                processed = replace(processed, **changes)
            number, child = next(self._numbers), f"{base}#{index}"
            sequences.append(
                NewSequence(child, processed, _NO_SAMPLING, arrived, priority, number, params)
            )
            state.completions.append(Completion(child, number, None, include_stop=False))
        return state, sequences

    def keep(self, state: State) -> None:
        """Expect updates for a request."""
        self._states[state.request_id] = state
        for completion in state.completions:
            self._owners[completion.number] = (state, completion)

    def drop(self, request_id: str) -> State | None:
        """Forget a request; None if there is none. Updates that still come are ignored."""
        state = self._states.pop(request_id, None)
        if state is not None:
            state.media = ()
            for completion in state.completions:
                self._owners.pop(completion.number, None)
        return state

    def start_workers(self) -> None:
        """Import what workers need now, and not while the first request for them waits."""
        self.grammars.start()
        self.media.start()

    def close_workers(self) -> None:
        """End the processes that try grammars and process pictures, and refuse what needs them."""
        self.media.close()
        self._pool.close()

    def close(self) -> None:
        """End these processes, and forget the items of earlier prompts."""
        self.close_workers()

    def clear(self) -> None:
        """Forget every request."""
        self._states.clear()
        self._owners.clear()

    def apply(
        self,
        updates: Sequence[TokenUpdate],
        numbers: Sequence[int] = (),
        tokens: Sequence[int] = (),
    ) -> Iterator[State]:
        """Take in what a step brought, as far as the result is iterated over.

        Args:
            updates: of sequences of which more is to be said than a token.
            numbers: those of sequences that go on.
            tokens: the one that each of these brought.

        Yields:
            the requests that changed, each once, and those of one completion as soon as it has its
            token: while that is in the processor's cache its text is best sent.
        """
        now = time.monotonic()
        changed: dict[str, State] = {}
        owners = self._owners
        for number, token in zip(numbers, tokens, strict=True):
            owner = owners.get(number)
            if owner is None:  # it ended on a stop string, or was aborted
                continue
            state, completion = owner
            completion.changed = True
            completion.token_ids.append(token)
            completion.num_tokens += 1
            stream = completion.stream
            if stream is not None and stream.push is not None:
                completion.text.append(stream.push(token))
            elif stream is not None:
                self._read(completion, stream, (token,))
                if completion.finish_reason is not None:
                    self._ended(state, completion)
            if len(state.completions) == 1:
                yield state
            else:
                changed[state.request_id] = state
        for update in updates:
            owner = owners.get(update.number)
            if owner is None:
                continue
            state, completion = owner
            self._take(state, completion, update, now)
            changed[state.request_id] = state
            if completion.finish_reason is not None:
                self._ended(state, completion)
        yield from changed.values()

    def _ended(self, state: State, completion: Completion) -> None:
        """Forget a completion, and a request with its last one."""
        del self._owners[completion.number]
        state.unfinished -= 1
        if state.unfinished == 0:
            state.media = ()
            del self._states[state.request_id]

    def _take(self, state: State, completion: Completion, update: TokenUpdate, now: float) -> None:
        """Add what a step brought to one completion."""
        completion.changed = True
        new = update.new_token_ids
        completion.token_ids.extend(new)
        completion.num_tokens += len(new)
        completion.finish_reason = reason = update.finish_reason
        completion.stop_reason = update.stop_reason
        completion.error = update.error
        completion.pooled = update.pooled
        completion.num_preemptions = update.num_preemptions
        if completion is state.completions[0]:
            state.num_cached_tokens = update.num_cached_tokens
        if update.prompt_logprobs is not None and not state.has_prompt_logprobs:
            state.has_prompt_logprobs = True
            state.prompt_logprobs = [None, *map(self._decoded, update.prompt_logprobs)]
        if state.first_token_time is None and new:
            state.first_token_time = now
        if completion.logprobs is not None and update.logprobs is not None:
            for token, entry in zip(new, update.logprobs, strict=True):
                completion.logprobs.append(self._decoded(entry))
                assert completion.cumulative_logprob is not None, "it starts with logprobs"
                completion.cumulative_logprob += entry[token].logprob
        if completion.stream is not None:
            if reason == "stop" and not completion.include_stop:
                # The token that ended it (end of sequence or a stop token) is not part of the text.
                new = new[:-1]
            self._read(completion, completion.stream, new)

    def _read(self, completion: Completion, stream: TextStream, new: Sequence[int]) -> None:
        """Add the text of new tokens, and what was held back if it ended or a stop string does."""
        reason = completion.finish_reason
        if new:
            completion.text.append(stream.append(new))
            if stream.stopped_by is not None and reason is None:
                reason = "stop"
                completion.finish_reason, completion.stop_reason = reason, stream.stopped_by
                self._finish(completion.sequence_id, reason, stream.stopped_by)
        if reason is not None:
            completion.text.append(stream.finish())
            if completion.include_stop:
                completion.text.append(stream.stopped_by or "")
            if reason == "length" and stream.stopped_by is not None:
                # The last token completed it: the core had already ended the sequence.
                completion.finish_reason, completion.stop_reason = "stop", stream.stopped_by

    def _decoded(self, entry: TokenLogprobs) -> TokenLogprobs:
        names = self._token_names
        if names is None:
            return entry
        return {
            token: replace(value, decoded_token=names.text(token)) for token, value in entry.items()
        }

    @cached_property
    def _token_names(self) -> TokenNames | None:
        return None if self._tokenizer is None else TokenNames(self._tokenizer)

    def _draw_seed(self) -> int:
        self._drawn_seeds += 1
        return _hashed(f"{self._config.seed}:{self._name}{self._drawn_seeds}")


class HasFrontend:
    """Methods of an engine that its frontend alone answers."""

    frontend: Frontend

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Fields ``given``, else those of ``generation_config.json``, else our defaults.

        Raises:
            ConfigError: a field given is unknown or out of range, or fields contradict each other.
        """
        return self.frontend.default_sampling_params(**given)

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, None if it was given as token ids, and its token ids.

        Raises:
            RequestError: it is no prompt, or its token ids are outside the vocabulary.
        """
        return self.frontend.tokenize(prompt)[:2]


def _with_media(tokenized: TokenizedPrompt, made: ProcessedPrompt) -> TokenizedPrompt:
    packed = packed_token_ids(made.token_ids)
    return TokenizedPrompt(tokenized.text, list(made.token_ids), packed, made)


def find_max_length(model_config: ModelConfig) -> int:
    """Tokens of the longest sequence, as the checkpoint says."""
    pooling = model_config.pooling
    longest = model_config.max_position_embeddings
    return longest if pooling is None else min(longest, pooling.max_length or longest)


def shows_media(prompt: Any) -> bool:
    """Whether a prompt has pictures, videos or sounds beside its tokens."""
    return isinstance(prompt, Mapping) and bool(prompt.get("multi_modal_data"))


def _names(prompt: Any) -> bool:
    """Whether what a prompt shows has names (uuids)."""
    data = prompt["multi_modal_data"]
    values = data.values() if isinstance(data, Mapping) else ()
    given = [each for one in values for each in (one if isinstance(one, list) else [one])]
    named = (each.uuid for each in given if isinstance(each, MediaPart))
    return bool(prompt.get("multi_modal_uuids")) or any(named)


def _takes_long(prompt: Any) -> bool:
    """Whether a prompt is long text, or shows something."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return shows_media(prompt) or (isinstance(text, str) and len(text) > _LONG_TEXT)


def _priority(value: Any) -> int:
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise RequestError(f"priority must be an integer, got {value!r}")


def _seed_of(seed: int, index: int) -> int:
    """The seed of completion ``index`` of a request with ``seed``.

    Hashed, so that requests with neighbouring seeds have no completion in common.
    """
    return seed if index == 0 else _hashed(f"{seed}#{index}")


def _hashed(text: str) -> int:
    """A seed that ``text`` determines."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def check_token_ids(token_ids: Sequence[Any], vocab_size: int, name: str) -> array[int]:
    """The token ids, packed; refuses a list with anything in it but ids of the vocabulary.

    Args:
        token_ids: the list.
        vocab_size: columns of the logits.
        name: of the list, for the error.

    Raises:
        RequestError: an item is no such id; names the first one and its position.
    """
    # Looked at as a whole first: a prompt of a million tokens is checked in a few milliseconds.
    if list(map(type, token_ids)).count(int) == len(token_ids):
        with contextlib.suppress(struct.error):  # one does not fit 64 bits
            packed = packed_token_ids(token_ids)
            # As unsigned numbers negative ones are the largest.
            if not packed or int(np.frombuffer(packed, dtype=np.uint64).max()) < vocab_size:
                return packed
    for position, token in enumerate(token_ids):
        is_integer = isinstance(token, int) and not isinstance(token, bool)
        if not is_integer or not 0 <= token < vocab_size:
            raise RequestError(
                f"token {shown(token)} at position {position} of the {name} is not a token id of "
                f"the vocabulary of {vocab_size}",
                param=name,
            )
    return packed_token_ids(token_ids)


def choose_tokenizer(
    config: EngineConfig, folder: Callable[[], Path], model_config: ModelConfig | None
) -> Tokenizer | None:
    """The tokenizer of ``config.tokenizer`` or else the model's own; None if none is wanted.

    Args:
        config: the engine's settings.
        folder: returns the folder of the model's own tokenizer.
        model_config: says how a bare SentencePiece file is used; None if it is not known.

    Raises:
        TokenizerError: it cannot be read.
        CheckpointNotFoundError: there is nothing at ``config.tokenizer``.
    """
    if config.skip_tokenizer_init:
        return None
    sentencepiece = None if model_config is None else model_config.sentencepiece
    tiktoken = None if model_config is None else model_config.tiktoken
    if config.tokenizer is None:
        path = folder()
    else:
        try:
            path = resolve_model(config.tokenizer, config.revision)
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(f"tokenizer: {error}") from error
    tokenizer = load_tokenizer(path, sentencepiece, tiktoken)
    if model_config is not None and model_config.chat_template is not None:
        tokenizer.chat_templates = {DEFAULT_TEMPLATE: model_config.chat_template}
    pooling = None if model_config is None else model_config.pooling
    if pooling is not None and pooling.lower_case:
        tokenizer.lower()
    return tokenizer


def with_texts(model_config: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """The config with the tokens of the texts that the family's input processor needs."""
    if tokenizer is None or not model_config.texts:
        return model_config
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return model_config.replace(texts={text: tuple(encode(text)) for text in model_config.texts})
