"""From a model's name and a config to everything that an engine holds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engine_core import own_process
from engine_core.configs import EngineConfig, ModelConfig, SchedulerConfig
from engine_core.configs.builder import token_ids
from engine_core.configs.generation import (
    GENERATION_CONFIG,
    has_long_bad_words,
    read_recommendation,
    unread_keys,
)
from engine_core.engine.arguments import check_children
from engine_core.engine.frontend import find_max_length
from engine_core.engine.grammar_source import find_grammar_compiler
from engine_core.errors import OptionError, shown
from engine_core.kernels import compiled
from engine_core.kernels.launch import gluon
from engine_core.registry import Registry, build_registry
from engine_core.runtime import platform
from engine_core.runtime.compiles import NOBODY, Compiles
from engine_core.runtime.executor import Executor, ProcessExecutor, build_executor
from engine_core.runtime.guided import GrammarCompiler
from engine_core.runtime.memory import CachePlan, check_memory, plan_cache
from engine_core.runtime.phases import Phases
from engine_core.runtime.rank_processes import RankProcesses, ended_on_failure, fork_ranks
from engine_core.runtime.ranks import sizes
from engine_core.runtime.source import ModelSource, open_model
from engine_core.runtime.swap import count_swap_blocks
from engine_core.runtime.worker import WorkerReport
from engine_core.scheduler import Scheduler
from engine_core.text import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """A model that was found and understood, and not loaded yet.

    Attributes:
        registry: the plugins.
        source: the checkpoint and what runs it.
        config: the engine's settings.
        generation_config: the checkpoint's.
        eos_token_ids: the tokens that end a sequence.
        max_model_len: the longest sequence wanted.
        phases: seconds that each part took.
        ranks: processes that wait for the executor; None if that starts its own.
    """

    registry: Registry
    source: ModelSource
    config: EngineConfig
    generation_config: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    phases: Phases
    ranks: RankProcesses | None = None

    @contextmanager
    def on_failure_ended(self) -> Iterator[None]:
        """End the ranks if the ``with`` block, in which it is to be loaded, fails."""
        with ended_on_failure(self.ranks):
            yield


@dataclass(frozen=True, slots=True)
class Loaded:
    """The parts of an engine's core.

    Attributes:
        scheduler: with an empty cache.
        executor: ready for steps.
        cache_plan: the blocks there are, and the longest sequence.
        scheduler_config: the scheduler's limits.
        depth: steps submitted before the first result is read.
        eos_token_ids: the tokens that end a sequence.
    """

    scheduler: Scheduler
    executor: Executor
    cache_plan: CachePlan
    scheduler_config: SchedulerConfig
    depth: int
    eos_token_ids: tuple[int, ...]


# Characters of a value that a message shows.
_SHOWN = 60
# Steps submitted before the first result is read. A CPU computes a step while it is submitted.
_DEPTH = {"cpu": 0, "cuda": 2}
# Most replays of a plan before the host reads their results and notices that a request has ended.
_MAX_REPEAT = {"cpu": 1, "cuda": 8}


def open_engine(
    model: str, config: EngineConfig, *, fork: bool = False, convert: bool = True
) -> Opened:
    """Find and check a model; no memory is taken for it.

    ``fork`` has processes of several ranks, where they may be copies of this one, begin beside it:
    before this process asks a GPU for anything. ``convert`` is that of
    :func:`~engine_core.checkpoint.open_checkpoint`.

    Raises:
        EngineError: the model cannot run; the subclass says why.
    """
    if config.num_ranks > 1 and config.distributed_executor != "ray":
        check_children(sizes(config))
    phases = Phases()
    with phases.timed("plugins"):
        registry = build_registry(config.custom_module_map, plugin_errors=config.plugin_errors)
    ranks = None
    if fork and config.num_ranks > 1 and config.distributed_executor != "ray":
        with phases.timed("fork"):
            ranks = fork_ranks(model, config)
    with ended_on_failure(ranks):
        return _open(model, config, registry, phases, ranks, convert)


def _open(
    model: str,
    config: EngineConfig,
    registry: Registry,
    phases: Phases,
    ranks: RankProcesses | None,
    convert: bool,
) -> Opened:
    with phases.timed("config"):
        source = open_model(model, config, registry, convert=convert)
        if source.model_config.caveat is not None:
            logger.warning("%s", source.model_config.caveat)
        generation_config = source.checkpoint.generation_config
        eos_token_ids = find_eos_token_ids(source.model_config, generation_config)
        read_recommendation(generation_config, source.model_config)
        unread = unread_message(generation_config)
        if unread is not None:
            logger.warning("%s", unread)
        max_model_len = find_max_model_len(source.model_config, config, model)
    return Opened(
        registry=registry,
        source=source,
        config=config,
        generation_config=generation_config,
        eos_token_ids=eos_token_ids,
        max_model_len=max_model_len,
        phases=phases,
        ranks=ranks,
    )


class _Begun:
    """Makes something in a thread from now on, and gives it to whoever calls it."""

    def __init__(self, make: Callable[[], GrammarCompiler]) -> None:
        self._made: Future[GrammarCompiler] = Future()
        # A daemon: a process that is to end does not wait for it.
        threading.Thread(target=self._run, args=(make,), name="begun", daemon=True).start()

    def __call__(self) -> GrammarCompiler:
        return self._made.result()

    def _run(self, make: Callable[[], GrammarCompiler]) -> None:
        try:
            self._made.set_result(make())
        except BaseException as error:
            self._made.set_exception(error)


def load(
    opened: Opened,
    tokenizer: Tokenizer | None = None,
    *,
    compiles: Compiles = NOBODY,
    guides: bool = False,
    executor: Executor | None = None,
) -> Loaded:
    """Load a model and make its cache; ``opened.phases`` says how long each part took.

    Args:
        opened: the model.
        tokenizer: the model's if this process has it.
        compiles: the kernels that are compiled beside this.
        guides: whether the compiler of grammars is made now, while weights and kernels are waited
            for. It holds the interpreter for a second, in which later steps would wait.
        executor: what loads and runs it; None for what the config asks for.

    Raises:
        EngineError: the model cannot run; the subclass says why.
    """
    source, config, phases = opened.source, opened.config, opened.phases
    stages = config.pipeline_parallel_size
    pooling = source.model_config.pooling
    if pooling is not None and pooling.kinds != ("last",):
        # Tokens that are not computed would be missing in the mean.
        config = config.replace(enable_prefix_caching=False)
    if source.device.type == "cpu" and not compiled.available():
        logger.info("decode steps would be faster with numba: pip install 'engine-core-llm[cpu]'")
    if gluon.is_hopper(source.device):
        line = hopper_kernels([source.device])
        level = logging.INFO if line.startswith("on") else logging.WARNING
        logger.log(level, "Hopper's kernels are %s", line)
    grammars = find_grammar_compiler(source, config, tokenizer)
    if guides and grammars is not None and config.num_ranks == 1:
        grammars = _Begun(grammars)
    executor = executor or build_executor(source, config, compiles, opened.ranks)
    if opened.ranks is not None and not isinstance(executor, ProcessExecutor):
        opened.ranks.end()
    try:
        report = executor.load()
        phases.update(report.phases)
        with phases.timed("cache"):
            plan = _plan_cache(report, executor, source, config, opened.max_model_len)
            scheduler_config = SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=plan.max_model_len,
                # Between repeats stages would wait for one another.
                max_repeat=1 if stages > 1 else _MAX_REPEAT[source.device.type],
                num_swap_blocks=count_swap_blocks(
                    config.swap_space, plan, executor.ranks_per_machine
                ),
                # Of a family's models some may see, and others of the same class not.
                encoder_cache_tokens=config.encoder_cache_tokens if source.media else 0,
            )
            scheduler = Scheduler(scheduler_config, plan.cache_config)
            scheduler.media_in_parts = hasattr(source.model_class, "embed_media_parts")
            executor.start(
                plan,
                scheduler_config,
                opened.eos_token_ids,
                grammars,
            )
    except BaseException:
        executor.close()
        raise
    own_process.freeze()
    return Loaded(
        scheduler=scheduler,
        executor=executor,
        cache_plan=plan,
        scheduler_config=scheduler_config,
        # A stage computes a step while those after it compute the one before.
        depth=max(_DEPTH[source.device.type], int(stages > 1)),
        eos_token_ids=opened.eos_token_ids,
    )


def hopper_kernels(devices: Iterable[torch.device]) -> str:
    """Whether a Hopper GPU among these devices runs the kernels for Hopper, and why, in a line."""
    return gluon.support(devices)


def find_eos_token_ids(
    model_config: ModelConfig, generation_config: dict[str, Any]
) -> tuple[int, ...]:
    """The tokens that end a sequence, by config.json and generation_config.json together.

    An id outside the vocabulary is left out: the model cannot generate it.
    """
    more = token_ids(generation_config.get("eos_token_id"), "eos_token_id", GENERATION_CONFIG)
    ids = dict.fromkeys((*model_config.eos_token_ids, *more))
    outside = [token for token in ids if not 0 <= token < model_config.vocab_size]
    if outside:
        logger.warning(
            "eos_token_id %s is outside the vocabulary of %d and is left out",
            ", ".join(map(str, outside)),
            model_config.vocab_size,
        )
    return tuple(token for token in ids if token not in outside)


def unread_message(generation_config: dict[str, Any]) -> str | None:
    """A warning about keys of ``generation_config.json`` that matter and are not kept, or None."""
    messages = []
    unread = unread_keys(generation_config)
    if unread:
        named = ", ".join(f"{name} {shown(value, _SHOWN)}" for name, value in unread.items())
        messages.append(
            f"{GENERATION_CONFIG} asks for {named}: not supported, tokens are chosen without it"
        )
    if has_long_bad_words(generation_config):
        words = shown(generation_config["bad_words_ids"], _SHOWN)
        messages.append(
            f"{GENERATION_CONFIG} asks for bad_words_ids {words}: a word of several tokens is kept "
            "out of the output, but not where it begins in the prompt"
        )
    return "; ".join(messages) or None


def find_max_model_len(model_config: ModelConfig, config: EngineConfig, model: str) -> int:
    """The longest sequence wanted, before the cache's memory is looked at; ``model`` is its name.

    Raises:
        OptionError: more is asked for than the model can do.
    """
    longest = model_config.max_position_embeddings
    wanted = config.max_model_len or find_max_length(model_config)
    if wanted > longest and not model_config.may_exceed_length:
        stretch = (
            ", or stretch the model with a rope_scaling of type linear or yarn in hf_overrides"
            if model_config.reads_rope_scaling
            else ""
        )
        raise OptionError(
            f"max_model_len {wanted} is above the {longest} tokens that {model} is made for; set "
            f"it lower{stretch}"
        )
    return wanted


def _plan_cache(
    report: WorkerReport,
    executor: Executor,
    source: ModelSource,
    config: EngineConfig,
    max_model_len: int,
) -> CachePlan:
    plan = plan_cache(
        report.specs,
        config,
        block_size=platform.resolve_block_size(config, source.device),
        budget=report.cache_budget,
        max_model_len=max_model_len,
    )
    check_memory(
        plan,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        vocab_size=source.model_config.vocab_size,
        hidden_bytes=source.model_config.hidden_size * source.dtype.itemsize,
        # Each stage keeps a part of every block.
        total=platform.rank_memory(source.device, executor.ranks_per_machine)
        * config.pipeline_parallel_size,
        media=source.plan_media(config),
    )
    if plan.max_model_len < max_model_len:
        logger.warning(
            "the KV cache holds %d tokens: max_model_len is cut from %d to that; set "
            "kv_cache_memory higher, or max_model_len lower to accept it",
            plan.max_model_len,
            max_model_len,
        )
    return plan
