"""One rank of a model: loads its share and runs its steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from engine_core import own_process
from engine_core.configs import CacheSpec, EngineConfig, GuidedParams, SchedulerConfig
from engine_core.nn.attention import cache_specs
from engine_core.runtime import platform
from engine_core.runtime.capture import Agreement
from engine_core.runtime.compiles import NOBODY, Compiles
from engine_core.runtime.guided import GrammarCompiler
from engine_core.runtime.layer_trace import LayerTrace
from engine_core.runtime.loader import build_on_meta, dummy_weights, load_weights, match_weights
from engine_core.runtime.memory import CachePlan
from engine_core.runtime.packing import weight_bytes
from engine_core.runtime.phases import Phases
from engine_core.runtime.runner import ModelRunner, PendingStep
from engine_core.runtime.source import ModelSource
from engine_core.runtime.stages import StageLink, cut, joined, parts_of, stage_plan
from engine_core.runtime.task import without_head
from engine_core.step_context import BuildContext
from engine_core.steps import StepPlan

# Seconds. It takes 1.4 ms, and a step's tensors take their pages anew.
_TRIM_EVERY = 5.0


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A rank's report after loading.

    Attributes:
        specs: the spec of each layer with a cache, on this rank.
        cache_budget: bytes that this rank has for its KV cache.
        phases: seconds that each part of loading took.
    """

    specs: tuple[CacheSpec, ...]
    cache_budget: int
    phases: Phases


class Worker:
    """One rank of a model; the executor itself if there is no other rank.

    Attributes:
        ranks_per_machine: 1, as an executor.
    """

    ranks_per_machine = 1

    def __init__(
        self,
        source: ModelSource,
        config: EngineConfig,
        context: BuildContext,
        link: StageLink | None = None,
        agreement: Agreement | None = None,
        compiles: Compiles = NOBODY,
    ) -> None:
        """``context`` says which rank it is; its dtype is taken from ``source``.

        ``link`` says which stage of a pipeline; None if there is one. ``agreement`` is with the
        other ranks, if they may capture steps. ``compiles`` are kernels compiled beside this.
        """
        self._source = source
        self._config = config
        self._context = replace(
            context,
            dtype=source.dtype,
            deterministic=config.deterministic,
            kv_cache_dtype=source.kv_cache_dtype,
            expert_parallel=config.enable_expert_parallel,
            model_class=source.registry.model_class,
        )
        self._model: nn.Module | None = None
        self._runner: ModelRunner | None = None
        self._trace: LayerTrace | None = None
        self._trim_at = 0.0
        self._link = link
        self._agreement = agreement
        self._compiles = compiles
        self._cached = range(0)  # the layers with a cache of this stage

    def load(self) -> WorkerReport:
        """Build the model and read this rank's weights.

        Raises:
            WeightsMismatchError: the checkpoint's tensors do not fit; nothing was allocated.
            ConfigError: the model cannot be split over the ranks.
        """
        with platform.on(self._source.device):
            return self._load()

    def _load(self) -> WorkerReport:
        source, config, phases = self._source, self._config, Phases()
        with phases.timed("model"):
            model = self._model = build_on_meta(
                source.model_class, source.model_config, self._context, source.scheme
            )
            checkpoint: Any = without_head(model, source.checkpoint, source.model_config)
            account = None
            has_tensors = config.load_format != "dummy"
            reads = has_tensors and self._compiles.reads_weights
            # Of quantised weights the tensors say which linears are, and how.
            if reads or (has_tensors and source.scheme is not None):
                checkpoint, account = match_weights(model, checkpoint, source.name, source.scheme)
            elif source.scheme is not None:
                source.scheme.match_dummy()
            if self._link is not None:
                tensors = checkpoint if reads else None
                checkpoint, self._cached = cut(model, tensors, source.name, self._link)
            specs = cache_specs(model)
            on_cpu = source.device.type == "cpu"
            size = weight_bytes(model, account if on_cpu else None, on_cpu=on_cpu)
            if source.device.type == "cuda":
                # All weights that are quantised at load are there as they were first.
                size = max(size, sum(param.nbytes for param in model.parameters()))
            platform.check_weights_fit(size, source.device)
        with phases.timed("weights"):
            if not reads:
                packing = dummy_weights(model, source.device, config.seed)
            else:
                packing = load_weights(
                    model,
                    checkpoint,
                    source.name,
                    source.device,
                    pack=True,
                    tp_size=self._context.tp_size,
                )
                source.checkpoint.release()
        self._compiles.loaded(model)
        phases["weights"] -= packing
        phases["packing"] = packing
        media = source.plan_media(config).total
        budget = platform.cache_budget(config, source.device, pending=media)
        return WorkerReport(specs, budget, phases)

    def start(
        self,
        plan: CachePlan,
        scheduler_config: SchedulerConfig,
        eos_token_ids: tuple[int, ...],
        grammar_compiler: Callable[[], GrammarCompiler] | None,
    ) -> None:
        """Make the cache and the persistent batch; see :class:`ModelRunner`."""
        assert self._model is not None, "load comes first"
        if self._source.device.type == "cpu":
            own_process.keep_freed_memory()
        else:
            platform.sum_in_float32()
        # Before steps are captured: that may begin with a full collection of garbage.
        own_process.freeze()
        with platform.on(self._source.device):
            self._runner = ModelRunner(
                self._model,
                plan if self._link is None else stage_plan(plan, self._cached),
                scheduler_config,
                self._source.device,
                eos_token_ids=eos_token_ids,
                # Ranks that capture agree on it. Messages between stages are for a host to launch.
                eager=self._config.eager or (self._context.tp_size > 1 and self._agreement is None),
                capture_at_start=self._source.state_known,
                prompt_state=self._source.prompt_state,
                grammar_compiler=grammar_compiler,
                vocab_size=self._source.model_config.vocab_size,
                deterministic=self._config.deterministic,
                pooling=self._source.model_config.pooling,
                link=self._link,
                agreement=self._agreement,
                compiles=self._compiles,
            )

    def prepare(self, params: GuidedParams | None) -> Future[None]:
        """Compile a request's grammar beside the steps; see :meth:`GuideBuilder.prepare`."""
        assert self.runner.guides is not None, "requests are not guided without a tokenizer"
        return self.runner.guides.prepare(params)

    def poll(self) -> None:
        """Do nothing: futures of this process complete by themselves."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """Run a step; see :meth:`ModelRunner.submit`."""
        step = nullcontext() if self._trace is None else self._trace.step(plan)
        with platform.on(self._source.device), step:
            if self._link is None:
                pending = self.runner.submit(plan)
            else:
                parts = [self.runner.submit(part) for part in parts_of(plan, self._link.stages)]
                pending = PendingStep(
                    lambda: joined([part.result() for part in parts]), plan.num_tokens
                )
        if self._source.device.type == "cpu" and time.monotonic() >= self._trim_at:
            # What grows between the tensors of steps of ever other sizes cuts up the room that
            # they leave. Without this, the heap of a busy server grows for an hour.
            own_process.return_freed_memory()
            self._trim_at = time.monotonic() + _TRIM_EVERY
        return pending

    def wait_for_prompts(self) -> None:
        """Return once no prompt waits for a kernel; see :meth:`ModelRunner.wait_for_prompts`."""
        with platform.on(self._source.device):
            self.runner.wait_for_prompts()

    def capture_next(self, *, part: bool = False) -> bool:
        """Capture one more step; see :meth:`ModelRunner.capture_next`."""
        with platform.on(self._source.device):
            return self.runner.capture_next(part=part)

    @property
    def runner(self) -> ModelRunner:
        """The model with its cache, after :meth:`start`."""
        assert self._runner is not None, "it was not started, or was closed"
        return self._runner

    def apply_model(self, function: Callable[[nn.Module], Any]) -> list[Any]:
        """``[function(model)]``, after :meth:`start`."""
        return [function(self.runner.model)]

    @contextmanager
    def trace_layers(self) -> Iterator[LayerTrace]:
        """Record layers' outputs of the steps submitted in the ``with`` block."""
        self._trace = LayerTrace(self.runner.model)
        try:
            yield self._trace
        finally:
            self._trace = None

    def close(self) -> None:
        """Drop the model and its cache."""
        if self._runner is not None and self._runner.guides is not None:
            self._runner.guides.close()
        self._compiles.close()
        self._model = self._runner = None
        own_process.thaw()
        if self._source.device.type == "cuda":
            # Parameters and layers refer to each other; free their memory now.
            gc.collect()
            torch.cuda.empty_cache()
