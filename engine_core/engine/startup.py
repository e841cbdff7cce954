"""From a model's name and a config to everything that an engine holds."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_core.cache import KVCacheGroup
from engine_core.checkpoint import Checkpoint, open_checkpoint, resolve_model
from engine_core.configs import EngineConfig, ModelConfig, SchedulerConfig
from engine_core.configs.builder import token_ids
from engine_core.errors import ConfigError
from engine_core.inputs import InputProcessor
from engine_core.nn.attention import Attention
from engine_core.registry import Registry, build_registry
from engine_core.runtime import platform
from engine_core.runtime.loader import build_on_meta, check_weights, dummy_weights, load_weights
from engine_core.runtime.memory import CachePlan, plan_cache
from engine_core.runtime.runner import ModelRunner
from engine_core.scheduler import Scheduler
from engine_core.step_context import BuildContext
from engine_core.text import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


class Phases(dict[str, float]):
    """Names of start-up phases and their seconds, in the order they ran."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the ``with`` block as phase ``name``."""
        start = time.perf_counter()
        yield
        self[name] = self.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an engine is made of."""

    registry: Registry
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    input_processor: InputProcessor | None
    scheduler: Scheduler
    runner: ModelRunner
    cache_plan: CachePlan
    generation_config: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    phases: Phases


def load(model: str, config: EngineConfig) -> Loaded:
    """Find, check and load a model.

    Everything that can be refused is refused before memory is taken for it.

    Raises:
        EngineError: the model cannot run; which part of the tree says why.
    """
    phases = Phases()
    with phases.timed("plugins"):
        registry = build_registry(config.custom_module_map, plugin_errors=config.plugin_errors)
    with phases.timed("config"):
        device = platform.resolve_device(config)
        checkpoint = _open(model, config, device, registry)
        model_config = registry.model_config(checkpoint.hf_config, checkpoint.folder)
        dtype = platform.resolve_dtype(config, device, model_config.dtype)
        model_class = registry.model_class(model_config.architecture)
        eos_token_ids = _eos_token_ids(model_config, checkpoint.generation_config)
    with phases.timed("tokenizer"):
        tokenizer = _tokenizer(config, checkpoint.folder)
    with phases.timed("model"):
        context = BuildContext(dtype=getattr(torch, dtype))
        network = build_on_meta(model_class, model_config, context)
        specs = [layer.cache_spec() for layer in network.modules() if isinstance(layer, Attention)]
        if config.load_format != "dummy":
            check_weights(network, checkpoint, model)
    with phases.timed("weights"):
        if config.load_format == "dummy":
            dummy_weights(network, device, config.seed)
        else:
            load_weights(network, checkpoint, model, device)
    with phases.timed("cache"):
        longest = model_config.max_position_embeddings
        wanted = config.max_model_len or longest
        if wanted > longest and not model_config.may_exceed_length:
            raise ConfigError(
                f"max_model_len {wanted} is above the {longest} tokens that "
                f"{model} is made for; to stretch it, give a rope_scaling in hf_overrides"
            )
        plan = plan_cache(
            specs,
            block_size=platform.resolve_block_size(config, device),
            budget=platform.cache_budget(config, device),
            max_num_seqs=config.max_num_seqs,
            max_model_len=wanted,
            shorten=config.max_model_len is None,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        if plan.max_model_len < wanted:
            logger.warning(
                "the KV cache holds %d tokens: max_model_len is cut from %d to that; set "
                "kv_cache_memory higher, or max_model_len lower to accept it",
                plan.max_model_len,
                wanted,
            )
        scheduler_config = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
        )
        groups = [KVCacheGroup(spec, plan.cache_config) for spec in plan.groups]
        scheduler = Scheduler(scheduler_config, groups)
        runner = ModelRunner(network, plan, scheduler_config, device, eos_token_ids=eos_token_ids)
    return Loaded(
        registry=registry,
        model_config=model_config,
        tokenizer=tokenizer,
        input_processor=registry.input_processor(model_config),
        scheduler=scheduler,
        runner=runner,
        cache_plan=plan,
        generation_config=checkpoint.generation_config,
        eos_token_ids=eos_token_ids,
        phases=phases,
    )


class _GGUFAdapters(Mapping[str, type]):
    """The adapters by GGUF architecture; only the one asked for is imported."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._names = registry.gguf_adapters()

    def __getitem__(self, name: str) -> type:
        if name not in self._names:
            raise KeyError(name)
        return self._registry.gguf_adapter(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _open(model: str, config: EngineConfig, device: torch.device, registry: Registry) -> Checkpoint:
    path = resolve_model(model, config.revision)
    return open_checkpoint(
        path,
        load_format=config.load_format,
        gguf_adapters=_GGUFAdapters(registry),
        dtype=platform.resolve_dtype(config, device, None),
        hf_overrides=config.hf_overrides,
    )


def _tokenizer(config: EngineConfig, folder: Path) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        return load_tokenizer(resolve_model(config.tokenizer, config.revision))
    return load_tokenizer(folder)


def _eos_token_ids(model_config: ModelConfig, generation_config: dict[str, Any]) -> tuple[int, ...]:
    more = token_ids(generation_config.get("eos_token_id"), "generation_config eos_token_id")
    return tuple(dict.fromkeys((*model_config.eos_token_ids, *more)))
