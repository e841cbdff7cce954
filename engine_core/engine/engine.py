"""An engine in this process: requests in, outputs out, a step at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from engine_core.configs import EngineConfig, ModelConfig, PoolingParams, SamplingParams
from engine_core.engine.arguments import check_model_and_config
from engine_core.engine.beside import Begun, begun_early, compile_beside
from engine_core.engine.core import EngineCore
from engine_core.engine.frontend import (
    Frontend,
    HasFrontend,
    Prompt,
    State,
    TokenizedPrompt,
    choose_tokenizer,
    with_texts,
)
from engine_core.engine.interrupts import held_interrupt
from engine_core.engine.startup import Loaded, Opened, load, open_engine
from engine_core.engine.step_stats import StepStats
from engine_core.errors import RequestError
from engine_core.runtime.layer_trace import LayerTrace
from engine_core.scheduler import Scheduler
from engine_core.steps import NewSequence, RequestOutput
from engine_core.text import Tokenizer


class Engine(HasFrontend):
    """Runs one model. ``add_request`` takes work, ``step`` advances all of it.

    It is not thread-safe: one thread owns it.

    Attributes:
        core: the half that knows tokens: scheduler, executor and the steps in flight.
        frontend: the half that knows text.
        model_config: the model's.
        tokenizer: None with ``skip_tokenizer_init``.
        eos_token_ids: the tokens that end a sequence.
        startup: seconds that each phase of loading took.
    """

    def __init__(self, model: str, config: EngineConfig | None = None) -> None:
        """Load ``model``: a checkpoint folder, a GGUF file or a hub id.

        Raises:
            EngineError: it cannot run.
        """
        model, self.config = check_model_and_config(model, config)
        with begun_early(self.config) as begun:
            opened = open_engine(model, self.config, fork=True)
            self.model_config: ModelConfig = opened.source.model_config
            with opened.on_failure_ended():
                loaded = self._load(opened, begun)
            self.startup: Mapping[str, float] = opened.phases
            self.max_model_len = loaded.cache_plan.max_model_len
            self.cache_plan = loaded.cache_plan
            self.eos_token_ids: tuple[int, ...] = loaded.eos_token_ids
            self.core = EngineCore(loaded)
            self.frontend = Frontend(
                self.config,
                self.model_config,
                self.tokenizer,
                opened.registry.input_processor(self.model_config),
                opened.generation_config,
                self.core.finish,
            )

    def _load(self, opened: Opened, begun: Begun) -> Loaded:
        compiles = compile_beside(opened, begun)
        with opened.phases.timed("tokenizer"):
            checkpoint = opened.source.checkpoint
            self.tokenizer: Tokenizer | None = choose_tokenizer(
                self.config, lambda: checkpoint.tokenizer_folder, self.model_config
            )
        self.model_config = with_texts(self.model_config, self.tokenizer)
        return load(opened, self.tokenizer, compiles=compiles)

    @property
    def scheduler(self) -> Scheduler:
        """Decides what each step computes."""
        return self.core.scheduler

    @property
    def step_stats(self) -> StepStats:
        """Where the time of its steps went; put a new one here to begin anew."""
        return self.core.step_stats

    @step_stats.setter
    def step_stats(self, stats: StepStats) -> None:
        self.core.step_stats = stats

    @property
    def has_unfinished(self) -> bool:
        """Whether a call of :meth:`step` can still bring something."""
        return bool(self.frontend.states) or self.core.has_unfinished

    def add_request(
        self,
        prompt: Prompt | TokenizedPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        streaming: bool = True,
        patient: bool = False,
        priority: int = 0,
    ) -> str:
        """Queue a request.

        Args:
            prompt: text or token ids, or what ``frontend.tokenize`` made of them.
            sampling_params: the checkpoint's defaults if None.
            request_id: a name of the caller's choice.
            streaming: whether :meth:`step` returns an output for each new token, or only the
                last one.
            patient: whether it may wait, once it has its first token, until no step is full of
                patient prompts any more, so that all begin to decode together. That spares time if
                no more come at once than ``max_num_seqs``.
            priority: lower runs first; requests of equal priority run in the order of their
                arrival.

        Returns:
            The request's id.

        Raises:
            RequestError: it cannot be served; nothing of it is kept.
            EngineDeadError: the engine has stopped.
        """
        self.core.check_alive()
        params = self.frontend.resolve(sampling_params)
        if params.guided is not None:
            self.frontend.grammars.check(params.guided)
        if not isinstance(prompt, TokenizedPrompt):
            prompt = self.frontend.tokenize(prompt)
        state, sequences = self.frontend.prepare(
            prompt,
            params,
            request_id=request_id,
            streaming=streaming,
            patient=patient,
            priority=priority,
        )
        return self._queue(state, sequences)

    def add_pooled(
        self, prompts: Sequence[TokenizedPrompt], params: PoolingParams, *, priority: int = 0
    ) -> str:
        """Queue one request for the vectors or scores of several prompts.

        Args:
            prompts: as ``frontend.tokenize_all`` returned them.
            params: what is wanted of each.
            priority: see :meth:`add_request`.

        Returns:
            The request's id; its output has a completion for each prompt.

        Raises:
            RequestError: one cannot be served, which it names; nothing is kept then.
            EngineDeadError: the engine has stopped.
        """
        self.core.check_alive()
        params = self.frontend.pooling.resolve(params)
        state, sequences = self.frontend.prepare_pooled(prompts, params, priority=priority)
        # Prompts of one length are computed side by side.
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].packed))
        return self._queue(state, [sequences[index] for index in order], order)

    def _queue(
        self, state: State, sequences: list[NewSequence], places: Sequence[int] | None = None
    ) -> str:
        """Hand sequences to the core; ``places`` are those of their prompts, for errors."""
        added: list[str] = []
        try:
            for sequence in sequences:
                self.core.add(sequence)
                added.append(sequence.sequence_id)
        except RequestError as error:
            for child in added:
                self.core.abort(child)
            if places is None:
                raise
            raise RequestError(f"prompt {places[len(added)]}: {error}", param=error.param) from None
        self.frontend.keep(state)
        return state.request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; None if it is not running, as after :meth:`close`."""
        self.core.check_outside()
        state = self.frontend.drop(request_id)
        if state is None:
            return None
        for child in state.running:
            self.core.abort(child)
        state.end("abort")
        return state.output()

    def step(self) -> list[RequestOutput]:
        """Submit a step if there is one, and take the results of the oldest in flight if due.

        Returns:
            One output per request with something new: each new token for a streaming request, the
            last one for every request.

        An interrupt (SIGINT) that comes meanwhile takes effect at its end, a second one at once.

        Raises:
            EngineDeadError: the model failed; every request is lost.
        """
        with held_interrupt():
            updates = self.core.step()
            if not updates:
                return []
            try:
                changed = list(self.frontend.apply(updates.others, *updates.pairs))
            except Exception as error:
                raise self.core.fail(error) from error
        outputs = [state.output() for state in changed if state.streaming or state.unfinished == 0]
        self.core.step_stats.applied()
        if self.core.trace is not None:
            self.core.trace.sent()
        return outputs

    def warmup(self) -> None:
        """Capture now the CUDA graphs of likely steps, not when such a step is first needed.

        Without it a request may wait for that, a fraction of a second each time, or seconds where
        kernels are to be compiled. Captured at the start is what a greedy request with a prompt of
        up to 64 tokens needs by itself; here follow decode steps of every size of batch, greedy and
        random, prompts that come alone, and steps as full of prompts as they may be, with any
        number of rows that decode. Still captured when they are needed are other steps with several
        prompts or with prompts beside decodes, and decode steps with penalties, biases or bans.

        It ends, with a warning in the log, where less memory is free than the largest step takes,
        on any rank, or if a capture fails. With an input processor it does nothing before the first
        request. On a CPU, with ``eager``, with stages of a pipeline, and for a model without
        ``support_cuda_graph`` there is nothing to do. An interrupt (SIGINT) that comes meanwhile
        takes effect at the end of a capture, a second one at once.

        Raises:
            EngineDeadError: the model failed, or the engine has stopped.
        """
        more = True
        while more:
            with held_interrupt():
                more = self.core.capture_next()

    def trace_layers(self) -> AbstractContextManager[LayerTrace]:
        """Record what each layer gives in the first prefill and the first decode step.

        ::

            with engine.trace_layers() as trace:
                ...  # add_request, step
            for step in trace.steps:
                print(step.phase, step.first_non_finite)

        Only those two steps have forward hooks, and so run without CUDA graphs.

        Raises:
            OptionError: ``tensor_parallel_size`` is above 1.
            EngineDeadError: the engine has stopped, or was closed.
        """
        return self.core.trace_layers()

    def close(self) -> None:
        """Drop the model and its cache; the engine cannot be used after."""
        self.core.check_outside()
        self.frontend.clear()
        self.frontend.close()
        self.core.close()


__all__ = ["Engine"]
