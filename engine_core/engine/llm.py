"""Offline use: prompts in, texts out."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from itertools import islice
from typing import Any, Self

import numpy as np

from engine_core.configs import EngineConfig, ModelConfig, PoolingParams, SamplingParams
from engine_core.configs.sampling import BeamSearchParams
from engine_core.engine.arguments import check_model_and_config
from engine_core.engine.beam import BeamSearchOutput, beam_search
from engine_core.engine.core import CALLED_FROM_STEP
from engine_core.engine.engine import Engine
from engine_core.engine.frontend import (
    MediaPrompt,
    Message,
    Prompt,
    TokenizedPrompt,
    TokensPrompt,
    shows_media,
)
from engine_core.engine.interrupts import held_interrupt
from engine_core.engine.pooled import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    Vector,
    paired,
    similarities,
    vector,
)
from engine_core.errors import RequestError
from engine_core.media import split_media
from engine_core.steps import RequestOutput
from engine_core.text import Tokenizer


class LLM:
    """A model for offline use, in the manner of vLLM's class of this name.

    ::

        with LLM("path/to/checkpoint") as llm:
            for output in llm.generate(["Hello", "Bonjour"], SamplingParams(max_tokens=20)):
                print(output.outputs[0].text)

    Any number of threads may use it: their requests are batched together.

    Attributes:
        engine: runs the model.
        model_config: the model's config, as the family's builder read it.
        tokenizer: None with ``skip_tokenizer_init``.
        startup: seconds that each phase of loading took.
    """

    def __init__(
        self, model: str | os.PathLike[str], config: EngineConfig | None = None, **overrides: Any
    ) -> None:
        """Load ``model``.

        Args:
            model: a checkpoint folder, a GGUF file or a hub id.
            config: the engine's settings.
            **overrides: single fields of :class:`EngineConfig`, over those of ``config``.

        Raises:
            ConfigError: ``model`` is no path or text, or ``config`` no :class:`EngineConfig`.
            EngineError: it cannot run.
        """
        path, config = check_model_and_config(model, config)
        self.engine = Engine(path, config.replace(**overrides) if overrides else config)
        self.model_config: ModelConfig = self.engine.model_config
        self.tokenizer: Tokenizer | None = self.engine.tokenizer
        self.startup: Mapping[str, float] = self.engine.startup
        # Several streams may be read in turn: what a step brings for another waits here.
        self._inboxes: dict[str, deque[RequestOutput]] = {}
        self._finished: set[str] = set()  # of those, the requests that a step has ended
        self._lock = threading.RLock()
        # Held by the thread that takes the lock next, so that no loop of steps keeps others out.
        self._turn = threading.Lock()
        self._inside: int | None = None  # the thread that uses the engine
        self._dropped: deque[str] = deque()  # requests whose streams are gone

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model's memory."""
        with self._entered():
            self.engine.close()

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Sampling parameters: fields ``given``, else the checkpoint's, else our defaults.

        The checkpoint's ``min_new_tokens`` are cut to the ``max_tokens`` given, which
        ``SamplingParams.replace`` would not do.

        Raises:
            ConfigError: a field given is unknown or out of range, or fields contradict each other.
        """
        return self.engine.default_sampling_params(**given)

    def warmup(self) -> None:
        """Capture now the CUDA graphs of likely steps, so that no later call waits for them.

        These are decode steps, greedy or random, prompts that come alone, and steps full of
        prompts. Other steps are still captured when they are needed; see :meth:`Engine.warmup`.

        Raises:
            EngineDeadError: the model failed, or was closed.
        """
        with self._entered():
            self.engine.warmup()

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call ``function(model)`` between two steps, to read the model's parts or hook into them.

        ::

            llm.apply_model(lambda model: model.lm_head.register_forward_hook(look))

        While a part has a forward hook, nothing is fused, captured or recorded, so that each part
        is called in each step; a hook gets the tokens of all rows at once. An error in a hook ends
        the engine, one in ``function`` does not.

        Args:
            function: takes the ``nn.Module``.

        Returns:
            The result in a list, as vLLM's method of this name gives one per rank.

        Raises:
            OptionError: ``tensor_parallel_size`` is above 1: the model is in other processes.
            RequestError: it was called from within a step, as by a hook.
            EngineDeadError: the engine has stopped, or was closed.
        """
        with self._entered():
            self.engine.core.check_alive()
            return self.engine.core.executor.apply_model(function)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete one or many prompts.

        Args:
            prompts: ``str``, ``list[int]``, ``{"prompt": str}`` or ``{"prompt_token_ids": [...]}``,
                or a list of these.
            sampling_params: for all prompts, or one per prompt; the checkpoint's defaults if None.
            priority: an integer for all prompts, or one per prompt; lower runs first, and None
                means 0.
            progress: show a progress bar on standard error.

        Returns:
            One finished output per prompt, in their order.

        Raises:
            RequestError: a prompt cannot be served, or what is given with it is of another type;
                names which. Nothing is run then, but for pictures, videos and sounds: these are
                decoded and processed beside the first steps, unless priorities differ.
            EngineDeadError: the model failed, or was closed.
        """
        self.engine.core.check_alive()
        every = _as_prompts(prompts)
        params = _one_each(sampling_params, len(every), "sampling_params")
        priorities = _one_each(priority, len(every), "priorities")
        ids: list[str] = []
        try:
            with closing(self.engine.frontend.tokenize_each(every)) as tokenized:
                coming = self._add_each(tokenized, params, priorities)
                if len(set(priorities)) > 1 or not any(map(shows_media, every)):
                    ids.extend(coming)
                return self._run(ids, coming, len(every), progress=progress)
        except BaseException:
            for request_id in ids:
                self._drop(request_id)
            raise

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Complete one prompt; yields its whole output so far after each step that adds to it.

        The request is queued now, and ends when the generator is closed or dropped.

        Raises:
            RequestError: the prompt cannot be served, or ``sampling_params`` is of another type.
            EngineDeadError: the model failed, or was closed.
        """
        outputs = self._stream(self._add(prompt, sampling_params, streaming=True))
        # Up to its first yield: a generator that never began would not clean up after itself.
        next(outputs)
        return outputs

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of one or many prompts, from a model that embeds (``task``).

        Args:
            prompts: as in :meth:`generate`, without pictures.
            pooling_params: dimensions and normalisation; the model's own if None.
            prompt_name: which of the checkpoint's prompts goes before each text; its default one,
                if it has one, if None.
            truncate_prompt_tokens: keep only so many tokens of each prompt, its first and the
                special ones; -1 for as many as the model takes. A longer prompt is refused if None.
            priority: lower runs first.

        Returns:
            One output per prompt, in their order.

        Raises:
            RequestError: a prompt cannot be served, which it names, or the model generates text.
            ModelError: the model gave a vector that is not finite.
            EngineDeadError: the model failed, or was closed.
        """
        self.engine.core.check_alive()
        pooling = self.engine.frontend.pooling
        if pooling.task != "embed":
            raise RequestError("the model scores pairs of texts and gives no vectors; use score")
        texts = [_plain(prompt) for prompt in _as_prompts(prompts)]
        tokenized = self._tokenized(texts, truncate_prompt_tokens, prompt_name)
        request_id, vectors = self._pool(tokenized, pooling_params, priority)
        return [
            EmbeddingRequestOutput(f"{request_id}#{i}", prompt.token_ids, EmbeddingOutput(each))
            for i, (prompt, each) in enumerate(zip(tokenized, vectors, strict=True))
        ]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
    ) -> list[ScoringRequestOutput]:
        """How well texts go with others: a cross encoder's score, or how alike two vectors are.

        Args:
            queries: one text for all of ``documents``, or as many.
            documents: likewise.
            pooling_params: whether a cross encoder's score passes its activation.
            truncate_prompt_tokens: see :meth:`embed`; of a pair the longer text is cut first.
            priority: lower runs first.

        Returns:
            One output per pair, in their order.

        Raises:
            RequestError: a text cannot be served, or the model generates text.
            ModelError: the model gave a score that is not finite.
            EngineDeadError: the model failed, or was closed.
        """
        self.engine.core.check_alive()
        pooling = self.engine.frontend.pooling
        ones, others = paired(queries, documents)
        if pooling.task == "score":
            pairs = list(zip(ones, others, strict=True))
            tokenized = self._tokenized(pairs, truncate_prompt_tokens)
            request_id, given = self._pool(tokenized, pooling_params, priority)
            scores = [float(each[0]) for each in given]
            ids = [prompt.token_ids for prompt in tokenized]
        else:
            each = list(dict.fromkeys((*ones, *others)))
            tokenized = self._tokenized(each, truncate_prompt_tokens)
            request_id, given = self._pool(tokenized, pooling_params, priority)
            found = dict(zip(each, zip(tokenized, given, strict=True), strict=True))
            first, second = (
                np.array([found[text][1] for text in texts]) for texts in (ones, others)
            )
            scores = similarities(first, second, pooling.similarity) if ones else []
            ids = [
                found[one][0].token_ids + found[other][0].token_ids
                for one, other in zip(ones, others, strict=True)
            ]
        return [
            ScoringRequestOutput(f"{request_id}#{i}", ids[i], ScoringOutput(score))
            for i, score in enumerate(scores)
        ]

    def _tokenized(
        self, inputs: Sequence[Any], most: int | None, prompt_name: str | None = None
    ) -> list[TokenizedPrompt]:
        frontend = self.engine.frontend
        return frontend.tokenize_all(inputs, prompt_name=prompt_name, most=most)

    def _pool(
        self, prompts: Sequence[TokenizedPrompt], params: PoolingParams | None, priority: int
    ) -> tuple[str, list[Vector]]:
        """The id of a request for these prompts, and what it gave for each."""
        if not isinstance(params, PoolingParams | None):
            raise RequestError(f"pooling_params must be a PoolingParams or None, got {params!r}")
        if not prompts:
            return "", []
        with self._entered():
            params = params or PoolingParams()
            request_id = self.engine.add_pooled(prompts, params, priority=priority)
            self._inboxes[request_id] = deque()
        try:
            (output,) = self._run([request_id], iter(()), 1, progress=False)
        except BaseException:
            self._drop(request_id)
            raise
        return request_id, [vector(completion) for completion in output.outputs]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The most probable completions of one or many prompts, as beam search finds them.

        The result is that of transformers' ``generate`` with ``num_beams``, as many
        ``num_return_sequences`` and ``early_stopping="never"``: a search ends when no beam can
        become better than what was found. Each step is a request of one token a beam, whose
        beginning is in the prefix cache if that is enabled.

        Args:
            prompts: as in :meth:`generate`.
            params: width, length and length penalty.

        Raises:
            RequestError: a prompt cannot be served, which it names, or ``params`` is of another
                type.
            EngineDeadError: the model failed, or was closed.
        """
        self.engine.core.check_alive()
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be a BeamSearchParams, got {params!r}")
        every = []
        for index, prompt in enumerate(_as_prompts(prompts)):
            try:
                if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
                    raise RequestError("beam search takes no multi_modal_data; use generate")
                every.append(self.engine.tokenize(prompt)[1])
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}") from error
        return beam_search(self, every, params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the model's chat template.

        Args:
            messages: ``[{"role": ..., "content": ...}, ...]``, or a list of such lists.
            sampling_params: as in :meth:`generate`.
            progress: as in :meth:`generate`.
            add_generation_prompt: end the prompt with the beginning of the model's turn.
            chat_template: a Jinja template in place of the model's own.
            tools: descriptions passed to the template.
            mm_processor_kwargs: settings of the family's processing of what messages show.

        Raises:
            RequestError: the messages do not fit the template, or there is none, or the model
                generates no text.
            EngineDeadError: the model failed, or was closed.
        """
        self.engine.core.check_alive()
        self.engine.frontend.check_task("generate")
        conversations = _as_conversations(messages)
        prompts: list[Prompt] = [
            self.render_chat(
                conversation, add_generation_prompt, chat_template, tools, mm_processor_kwargs
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, progress=progress)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Answer one conversation as :meth:`stream` completes a prompt."""
        self.engine.core.check_alive()
        self.engine.frontend.check_task("generate")
        prompt = self.render_chat(
            messages, add_generation_prompt, chat_template, tools, mm_processor_kwargs
        )
        return self.stream(prompt, sampling_params)

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> TokensPrompt | MediaPrompt:
        """The prompt that :meth:`chat` makes of one conversation.

        A user's content may have parts: text, ``{"type": "image", "image": ...}`` and the same of
        "video" and "audio" with what ``multi_modal_data`` takes, and OpenAI's ``image_url``,
        ``video_url``, ``audio_url`` and ``input_audio``. ``type`` may be left out where a key says
        it, as in ``[{"image": ...}, {"text": ...}]``.

        Raises:
            RequestError: the messages do not fit the template, or there is none, or the model
                cannot take a picture.
        """
        messages, parts = split_media(messages)
        media = self.engine.frontend.shown(parts)
        token_ids = self.engine.frontend.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            tools=tools,
        )
        if not media and not mm_processor_kwargs:
            return {"prompt_token_ids": token_ids}
        return {
            "prompt_token_ids": token_ids,
            "multi_modal_data": media,
            "mm_processor_kwargs": mm_processor_kwargs or {},
        }

    def _add(
        self,
        prompt: Prompt | TokenizedPrompt,
        params: SamplingParams | None,
        *,
        streaming: bool,
        patient: bool = False,
        priority: int = 0,
    ) -> str:
        with self._entered():
            request_id = self.engine.add_request(
                prompt, params, streaming=streaming, patient=patient, priority=priority
            )
            self._inboxes[request_id] = deque()
        return request_id

    def _add_each(
        self,
        prompts: Iterator[TokenizedPrompt],
        params: Sequence[SamplingParams | None],
        priorities: Sequence[int | None],
    ) -> Iterator[str]:
        """Queue prompt after prompt, each when it is asked for; gives their ids."""
        # If all have a row at a time; else some begin as others end. What is of another type is
        # refused in its turn.
        count = sum(getattr(param, "n", 1) for param in params)
        patient = count <= self.engine.core.scheduler.config.max_num_seqs
        for index, (param, priority) in enumerate(zip(params, priorities, strict=True)):
            try:
                prompt = next(prompts)
                request_id = self._add(
                    prompt, param, streaming=False, patient=patient,
                    priority=0 if priority is None else priority,
                )  # fmt: skip
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}") from error
            yield request_id

    def _drop(self, request_id: str) -> None:
        self._dropped.append(request_id)
        # The garbage collector may drop a stream anywhere, amid this thread's own step too.
        if self._inside != threading.get_ident():
            with self._lock:
                self._inside = threading.get_ident()
                self._leave()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Keep other threads out of the engine, and this one if it is in there.

        Raises:
            RequestError: this thread is in a step, whose processor or hook called it.
        """
        if self._inside == threading.get_ident():
            raise RequestError(CALLED_FROM_STEP)
        with self._turn:
            self._lock.acquire()
        self._inside = threading.get_ident()
        try:
            yield
        finally:
            self._leave()
            self._lock.release()

    def _leave(self) -> None:
        while self._dropped:
            request_id = self._dropped.popleft()
            self.engine.abort(request_id)
            self._inboxes.pop(request_id, None)
            self._finished.discard(request_id)
        self._inside = None

    def _step(self, mine: Collection[str], inbox: Collection[object] = ()) -> set[str]:
        """Run a step, unless another thread's brought something into ``inbox`` or ended ``mine``.

        Returns:
            Those of ``mine`` that have ended.
        """
        # An interrupt ends one call; what the step brought others is theirs.
        with self._entered(), held_interrupt():
            if not inbox and self._finished.isdisjoint(mine):
                for output in self.engine.step():
                    if output.request_id in self._inboxes:
                        self._inboxes[output.request_id].append(output)
                        if output.finished:
                            self._finished.add(output.request_id)
            ended = self._finished.intersection(mine)
            self._finished -= ended
        return ended

    def _has_prompts_ahead(self) -> bool:
        with self._entered():
            return self.engine.core.scheduler.has_prompts_ahead

    def _run(
        self,
        ids: list[str],
        coming: Iterator[str],
        total: int,
        *,
        progress: bool,
    ) -> list[RequestOutput]:
        """The outputs of ``ids`` and of the requests, of ``total`` in all, that ``coming`` queues.

        Before each step as many are queued as can be of any use to it: by the state of the
        scheduler and not by the clock, so that equal runs have equal steps.
        """
        waiting = set(ids)
        more = True
        # Making a bar takes longer than the rest of what a call does besides its steps.
        with _progress_bar(total) if progress else nullcontext() as count:
            while True:
                while more and not (waiting and self._has_prompts_ahead()):
                    new = [*islice(coming, 1)]
                    ids += new
                    waiting.update(new)
                    more = bool(new)
                if not waiting:
                    break
                ended = self._step(waiting)
                waiting -= ended
                if count is not None:
                    for request_id in ended:
                        count(self._inboxes[request_id][-1])
        return [self._inboxes.pop(request_id)[-1] for request_id in ids]

    def _stream(self, request_id: str) -> Generator[Any, None, None]:
        """Yields None once, when nothing was done yet, and then outputs."""
        inbox = self._inboxes[request_id]
        try:
            yield None
            while True:
                while inbox:
                    output = inbox.popleft()
                    yield output
                    if output.finished:
                        return
                self._step((request_id,), inbox)
        finally:
            self._drop(request_id)


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[RequestOutput], None]]:
    """Show finished requests and tokens a second on stderr; yield the function to count one by."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    tokens = 0
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task("generating", total=total, speed="")

        def count(output: RequestOutput) -> None:
            nonlocal tokens
            tokens += sum(len(completion.token_ids) for completion in output.outputs)
            elapsed = progress.tasks[0].elapsed or 0.0
            speed = f"{tokens / elapsed:.0f} tokens/s" if elapsed else ""
            progress.update(task, advance=1, speed=speed)

        yield count


def _as_prompts(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray | memoryview):
        raise RequestError(
            f"prompts must be text, token ids or a list of these, got {type(prompts).__name__}"
        )
    if prompts and all(issubclass(kind, int) for kind in set(map(type, prompts))):
        return [list(prompts)]
    return list(prompts)


def _plain(prompt: Any) -> Any:
    """The text or the token ids of a prompt."""
    if not isinstance(prompt, Mapping):
        return prompt
    if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
        raise RequestError(
            "a prompt to embed has a key 'prompt' or 'prompt_token_ids' and no other, got "
            f"{sorted(map(str, prompt))}"
        )
    return next(iter(prompt.values()))


def _as_conversations(messages: Any) -> list[Sequence[Message]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            "messages must be a list of {'role': ..., 'content': ...} dictionaries, or a list of "
            f"such lists; got {messages!r}"
        )
    if isinstance(messages[0], Mapping):
        return [messages]
    return list(messages)


def _one_each(given: Any, count: int, name: str) -> list[Any]:
    """One value per prompt, from one for all or a list; its user checks the type."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray | memoryview):
        return [given] * count
    if len(given) != count:
        raise RequestError(
            f"{count} prompts, but {len(given)} {name}: give one for all or one for each"
        )
    return list(given)
