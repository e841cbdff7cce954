"""The check: start-up's own steps, one by one, each problem collected instead of raised."""

from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

import engine_core
from engine_core.check.deep import (
    DeepModel,
    compare_with_golden,
    compare_with_transformers,
    measure_quantization,
    read_golden_file,
)
from engine_core.check.gpus import NamedGPU, find_gpu
from engine_core.check.report import (
    HINTS,
    CacheGroupInfo,
    CheckReport,
    Code,
    Comparison,
    FusionInfo,
    MediaInfo,
    MemoryInfo,
    ModelInfo,
    PluginInfo,
    Problem,
    QuantizationCost,
    ReplicatedInfo,
    Severity,
    TokenizerInfo,
    WeightsInfo,
)
from engine_core.checkpoint import Checkpoint, resolve_model
from engine_core.configs import CacheSpec, EngineConfig, ModelConfig
from engine_core.configs.builder import token_ids
from engine_core.configs.generation import read_recommendation
from engine_core.engine.frontend import choose_tokenizer
from engine_core.engine.startup import (
    find_eos_token_ids,
    find_max_model_len,
    unread_message,
)
from engine_core.errors import (
    CacheMemoryError,
    CheckpointError,
    ConfigError,
    EngineError,
    ErrorCode,
    PluginError,
    RequestError,
    WeightsMismatchError,
)
from engine_core.inputs import MediaLimit, check_media_options
from engine_core.kernels import GPU, gpu_of
from engine_core.nn.attention import cache_specs
from engine_core.nn.blocks import DecoderLayer
from engine_core.nn.fusions import fusions
from engine_core.nn.linear import Linear, UnquantizedLinearMethod
from engine_core.nn.loading import LoadAccount
from engine_core.nn.quantization import QuantizationScheme, ScaleKind, kv_scales
from engine_core.nn.quantization.facts import facts_of
from engine_core.nn.quantization.scale_values import WrongScale, wrong_scales
from engine_core.registry import Registry, build_registry
from engine_core.runtime import platform, rank_memory
from engine_core.runtime.executor import (
    check_devices,
    check_experts,
    check_stages,
    small_for_ranks,
)
from engine_core.runtime.loader import build_on_meta, match_weights
from engine_core.runtime.memory import CachePlan, MediaPlan, check_memory, plan_cache, plan_media
from engine_core.runtime.packing import packed_sizes, weight_bytes
from engine_core.runtime.pooling import read_dense
from engine_core.runtime.source import (
    check_deterministic,
    check_kv_cache,
    check_revision,
    could_keep_blocks,
    find_kv_cache,
    find_scheme,
    media_limits,
    open_files,
    option_scheme,
    read_config,
    taken_media,
)
from engine_core.runtime.stages import of_each_stage, whole_budget
from engine_core.runtime.task import with_task, without_head
from engine_core.step_context import BuildContext
from engine_core.testing.reference import Prompt
from engine_core.text import Tokenizer

# Errors that do not prevent loading the model and running it on token ids.
_ABOUT_TEXT: frozenset[Code] = frozenset({"chat-template-invalid", "tokenizer-unusable"})
# Last names of tensors that only quantised weights have.
_CODE_LEAVES = frozenset(
    {"qweight", "qzeros", "scales", "weight_packed", "weight_scale", "weight_scale_inv"}
)
_SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


def check_model(
    path: str | Path,
    config: EngineConfig | None = None,
    *,
    memory: int | None = None,
    gpu: str | None = None,
    deep: bool = False,
    against: str | Path | None = None,
    list_fusions: bool = False,
) -> CheckReport:
    """Find out whether a model will run, without loading it and without its GPU.

    Every step of start-up that can refuse a model is gone through in start-up's order, from the
    headers of the files alone; every problem is collected, not only the first.

    Args:
        path: a checkpoint folder, a GGUF file or a hub id.
        config: the settings that it is to run with.
        memory: bytes for weights and KV cache together, of each process that shares the model.
        gpu: plan for a GPU of this name (``"H100"``, ``"RTX 4090"``) instead of this machine.
        deep: also look for weights that are not finite, then load it in float32 and compare it,
            layer by layer, with transformers' class for it.
        against: the same, but with the golden outputs in this file.
        list_fusions: also list which operations are fused with which linears on its device.

    Raises:
        ConfigError: an argument is wrong: the GPU is not known, ``against`` cannot be read, or two
            that exclude each other are given. Nothing about the model itself is raised.
    """
    start = time.perf_counter()
    if memory is not None and gpu is not None:
        raise ConfigError("memory and gpu both say how much memory there is; give one of them")
    if deep and against is not None:
        raise ConfigError("deep compares with transformers, against with a file; give one of them")
    other = "; for any other give memory in its place (--memory SIZE)"
    named = None if gpu is None else find_gpu(gpu, other)
    golden = None if against is None else read_golden_file(Path(against))
    check = _Check(str(path), config or EngineConfig(), memory, named)
    check.run()
    if list_fusions:
        check.ask_fusions()
    if deep or golden is not None:
        check.compare(against, golden or ())
    return check.report(time.perf_counter() - start)


@dataclass(slots=True)
class _Check:
    """One check, and what it found so far."""

    model: str
    config: EngineConfig
    memory: int | None
    gpu: NamedGPU | None
    problems: list[Problem] = field(default_factory=list)
    path: Path | None = None
    registry: Registry | None = None
    device: torch.device | None = None
    checkpoint: Checkpoint | None = None
    model_config: ModelConfig | None = None
    model_class: type | None = None
    generates: bool = True
    scheme: QuantizationScheme | None = None
    dtype: str | None = None
    tokenizer: Tokenizer | None = None
    media_of_model: Mapping[str, MediaLimit | None] = field(default_factory=dict)
    network: nn.Module | None = None
    whole: nn.Module | None = None  # what ranks share out
    num_parameters: int | None = None
    matched: Checkpoint | None = None
    account: LoadAccount | None = None
    memory_info: MemoryInfo | None = None
    comparison: Comparison | None = None
    comparison_asked: bool = False
    quantization_cost: QuantizationCost | None = None
    fusions: tuple[FusionInfo, ...] | None = None

    def run(self) -> None:
        """Go through start-up; a step whose inputs are missing is left out."""
        config = self.config
        with self._collecting():
            self.registry = build_registry(
                config.custom_module_map, plugin_errors=config.plugin_errors
            )
        if self.registry is None:
            return
        self._report_plugins(self.registry)
        with self._collecting("device-unavailable"):
            # A GPU that is planned for need not be here.
            self.device = (
                platform.resolve_device(config) if self.gpu is None else torch.device("cuda")
            )
        if self.device is not None:
            with self._collecting():
                if self.gpu is None:
                    check_devices(config, self.device)
            with self._collecting():
                capability = None if self.gpu is None else self.gpu.capability
                check_deterministic(config, self.device, capability)
                slower = check_kv_cache(config.kv_cache_dtype, self.device, capability)
                if slower is not None:
                    self._add("kv-cache-slower", "info", slower)
        with self._collecting():
            check_revision(self.model, config)
        with self._collecting():
            self.path = resolve_model(self.model, config.revision)
        if self.path is None:
            return
        self._open(self.registry, self.device or torch.device("cpu"))
        if self.checkpoint is not None:
            self._understand(self.registry, self.checkpoint)
            self._report_plugins(self.registry)  # Some fail only when asked about a model.
        else:
            return
        self._check_tokenizer(self.checkpoint)
        if self.model_config is not None and self.dtype is not None:
            self._check_network(self.model_config, self.dtype, self.checkpoint)

    def _report_plugins(self, registry: Registry) -> None:
        for report in registry.reports:
            if report.error is not None:
                self._add("plugin-broken", "warning", report.error)

    def _open(self, registry: Registry, device: torch.device) -> None:
        with self._collecting():
            self.scheme = option_scheme(self.config, registry, device)
        with self._collecting():
            checkpoint = open_files(
                self.model, self.config, registry, device, self.scheme, convert=False
            )
            _ = checkpoint.headers  # Those of a .bin file are read only now.
            self.checkpoint = checkpoint
        if self.checkpoint is None and self.path is not None and self.path.is_dir():
            # The weights are unusable, but more may be said about config and tokenizer.
            with self._collecting():
                config = self.config.replace(load_format="dummy")
                self.checkpoint = open_files(self.model, config, registry, device)

    def _understand(self, registry: Registry, checkpoint: Checkpoint) -> None:
        device = self.device or torch.device("cpu")
        option, self.scheme = self.scheme, None
        with self._collecting():
            self.scheme = find_scheme(checkpoint, self.config, option, registry, device)
        if self.scheme is None and option is not None:
            # Tensors are judged as the checkpoint has them: the option is at fault already.
            with suppress(EngineError):
                self.scheme = find_scheme(checkpoint, self.config, None, registry, device)
        with self._collecting():
            self.model_config = read_config(registry, checkpoint, self.config.model_impl)
        if self.model_config is None:
            return
        if self.model_config.caveat is not None:
            self._add("fallback", "warning", self.model_config.caveat)
        if self.scheme is not None:
            capability = None if self.gpu is None else self.gpu.capability
            size = self.model_config.hidden_size
            for fact in facts_of(self.scheme, device, size, capability):
                code = "quantization-loses" if fact.loses else "quantization-slower"
                text = f"quantization {self.scheme.name!r}: {fact.text}"
                self._add(code, "warning" if fact.severe else "info", text)
        could = could_keep_blocks(
            checkpoint, self.config, device, None if self.gpu is None else self.gpu.capability
        )
        if could is not None:
            self._add("blocks-unpacked", "info", could)
        with self._collecting():
            self.model_class = registry.model_class(self.model_config.architecture)
            self.generates = False  # as far as is known, where the task itself is at fault
            self.model_config = with_task(
                self.model_config, self.model_class, checkpoint, self.config
            )
            self.generates = self.model_config.pooling is None
        with self._collecting():
            processor = registry.input_processor(self.model_config)
            given = self.config.mm_processor_kwargs
            check_media_options(processor, given, self.model_config.architecture)
            self.media_of_model = media_limits(processor, given)
        self.dtype = platform.resolve_dtype(self.config, device, self.model_config.dtype)
        self._check_special_ids(self.model_config, checkpoint)
        with self._collecting("generation-config-invalid"):
            read_recommendation(checkpoint.generation_config, self.model_config)
            unread = unread_message(checkpoint.generation_config)
            if unread is not None:
                self._add("generation-config-unread", "warning", unread)

    def _check_special_ids(self, model_config: ModelConfig, checkpoint: Checkpoint) -> None:
        generation_config = checkpoint.generation_config
        with self._collecting():
            ends = find_eos_token_ids(model_config, generation_config)
            stated = {
                "config.json eos_token_id": model_config.eos_token_ids,
                "generation_config.json eos_token_id": token_ids(
                    generation_config.get("eos_token_id"), "eos_token_id"
                ),
                "config.json bos_token_id": (
                    () if model_config.bos_token_id is None else (model_config.bos_token_id,)
                ),
            }
            for where, ids in stated.items():
                self._check_in_range(where, ids)
            if not ends and self.generates:
                self._add(
                    "eos-missing",
                    "warning",
                    "neither config.json nor generation_config.json names a token of the "
                    "vocabulary that ends a sequence",
                )

    def _check_in_range(self, where: str, ids: tuple[int, ...]) -> None:
        assert self.model_config is not None, "ids are compared with the model's vocabulary"
        size = self.model_config.vocab_size
        outside = [str(token) for token in ids if not 0 <= token < size]
        if outside:
            self._add(
                "special-id-out-of-range",
                "warning",
                f"{where} {', '.join(outside)} is outside the model's vocabulary of {size}",
            )

    def _check_tokenizer(self, checkpoint: Checkpoint) -> None:
        with self._collecting():
            self.tokenizer = choose_tokenizer(
                self.config, lambda: checkpoint.tokenizer_folder, self.model_config
            )
        tokenizer = self.tokenizer
        if tokenizer is None:
            return
        if self.model_config is not None:
            size = self.model_config.vocab_size
            if tokenizer.vocab_size > size:
                self._add(
                    "tokenizer-larger-than-vocabulary",
                    "warning",
                    f"the tokenizer has {tokenizer.vocab_size} tokens, the model's vocabulary "
                    f"{size}",
                )
            named = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
            for name, token in named.items():
                if token is not None:
                    self._check_in_range(f"the tokenizer's {name}", (token,))
        self._check_chat_template(tokenizer)

    def _check_chat_template(self, tokenizer: Tokenizer) -> None:
        if not self.generates:
            return
        family = self._family_template
        if not tokenizer.chat_templates and family is None:
            self._add(
                "chat-template-missing", "info", "neither tokenizer nor family has a chat template"
            )
            return
        for name in (None, *tokenizer.chat_templates):
            chosen = name if tokenizer.chat_templates else family
            try:
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": "Hello"}], chat_template=chosen
                )
            except RequestError as error:
                # What does not compile, or was stopped, is not the messages' fault.
                if error.code is ErrorCode.CHAT_TEMPLATE:
                    self._add("chat-template-invalid", "error", str(error))
                    return
                if name is None:
                    self._add("chat-template-failed", "warning", str(error))

    def _check_network(self, model_config: ModelConfig, dtype: str, checkpoint: Checkpoint) -> None:
        if self.model_class is None:
            return
        with self._collecting():
            assert self.registry is not None, "it found the model's class"
            device = self.device or torch.device("cpu")
            capability = None if self.gpu is None else self.gpu.capability
            kv_cache_dtype, why = find_kv_cache(
                self.config, self.scheme, model_config, device, capability
            )
            if why is not None:
                self._add("kv-cache-scheme", "warning", why)
            context = BuildContext(
                tp_size=self.config.tensor_parallel_size,
                dtype=getattr(torch, dtype),
                deterministic=self.config.deterministic,
                kv_cache_dtype=kv_cache_dtype,
                expert_parallel=self.config.enable_expert_parallel,
                model_class=self.registry.model_class,
            )
            if context.tp_size > 1:
                alone = dataclasses.replace(context, tp_size=1)
                self.whole = build_on_meta(self.model_class, model_config, alone)
            self.network = build_on_meta(self.model_class, model_config, context, self.scheme)
            check_experts(self.config, self.network)
            pools = model_config.pooling is not None
            check_stages(self.config, self.network, pools=pools)
        if self.network is not None:
            parameters = dict.fromkeys(self.network.parameters())
            self.num_parameters = sum(param.numel() for param in parameters)
        max_model_len = None
        with self._collecting():
            max_model_len = find_max_model_len(model_config, self.config, self.model)
        if self.network is None:
            return
        if self.config.load_format == "dummy" and self.scheme is not None:
            with self._collecting():
                self.scheme.match_dummy()
        if checkpoint.has_weights:
            if model_config.pooling is not None:
                with self._collecting():
                    read_dense(model_config.pooling)
            try:
                weights = without_head(self.network, checkpoint, model_config)
                matched, account = match_weights(self.network, weights, self.model, self.scheme)
                self.matched, self.account = matched, account
                for pair in account.uncompared:
                    self._add(
                        "tied-head-unread",
                        "warning",
                        f"the config ties {pair[0]} and {pair[1]} (tie_word_embeddings), and the "
                        "checkpoint has both: if they differ, it will be refused",
                        pair,
                    )
            except WeightsMismatchError as error:
                self._add_mismatch(error)
            except EngineError as error:
                self._add(_code(error), "error", str(error))
            if self.scheme is None or self.scheme.settings is None:
                self._check_dtype(checkpoint, dtype)
            if self.scheme is not None and self.scheme.cache_settings and self.account is not None:
                with self._collecting():
                    self._check_scales(self.scheme, self.network, checkpoint)
                for remark in self.scheme.remarks(checkpoint.headers):
                    text = f"quantization {self.scheme.name!r}: {remark}"
                    self._add("quantization-settings", "warning", text)
        if max_model_len is not None:
            with self._collecting():
                self._plan(self.network, cache_specs(self.network), max_model_len)

    def _check_dtype(self, checkpoint: Checkpoint, dtype: str) -> None:
        stored = Counter[str]()
        for header in checkpoint.headers.values():
            stored[header.dtype] += header.nbytes
        ((most, _),) = stored.most_common(1) or [(dtype, 0)]
        if most != dtype:
            self._add(
                "dtype-converted",
                "info",
                f"the weights are stored in {most} and will be run in {dtype}",
            )

    def _check_scales(
        self, scheme: QuantizationScheme, network: nn.Module, checkpoint: Checkpoint
    ) -> None:
        """Look at the numbers of scales, which are few beside the codes."""
        kinds: dict[str, ScaleKind] = {**scheme.scales(checkpoint.headers)}
        kinds |= dict.fromkeys(kv_scales.used(network), "divided")
        found: dict[Severity, list[WrongScale]] = {"error": [], "warning": []}
        for wrong in wrong_scales(kinds, checkpoint.weights()):
            found["warning" if wrong.usable else "error"].append(wrong)
        for severity, scales in found.items():
            if scales:
                more = f" and {len(scales) - 4} more" if len(scales) > 4 else ""
                shown = ", ".join(map(str, scales[:4]))
                message = f"{len(scales)} tensors hold numbers that are no scales: {shown}{more}"
                self._add("scales-wrong", severity, message, tuple(each.name for each in scales))

    def _add_mismatch(self, error: WeightsMismatchError) -> None:
        stray = [name for name in error.unexpected if name.rpartition(".")[2] in _CODE_LEAVES]
        if self.scheme is None and stray:
            if any(problem.code == "quantization-unsupported" for problem in self.problems):
                # They are not named one by one, as weights that do not fit.
                return
            self._add(
                "quantization-unsupported",
                "warning",
                f"{stray[0]} belongs to quantised weights, and config.json has no "
                "quantization_config that says how they are quantised",
                tuple(stray),
            )
        kinds: tuple[tuple[Code, str, tuple[str, ...]], ...] = (
            ("weights-wrong", "do not fit", error.wrong),
            ("weights-missing", "of the model are missing", error.missing),
            ("weights-unexpected", "are not of this model", error.unexpected),
        )
        for code, what, names in kinds:
            if names:
                more = f" and {len(names) - 4} more" if len(names) > 4 else ""
                message = f"{len(names)} tensors {what}: {', '.join(names[:4])}{more}"
                self._add(code, "error", message, names)

    def _plan(self, network: nn.Module, specs: tuple[CacheSpec, ...], max_model_len: int) -> None:
        config, device, alone = self.config, self.device, self.whole
        ranks, stages = config.num_ranks, config.pipeline_parallel_size
        on_cpu = device is not None and device.type == "cpu"
        account = self.account if on_cpu else None
        held = partial(weight_bytes, account=account, on_cpu=on_cpu)
        each = [(held(network), specs)]
        if stages > 1:
            each = of_each_stage(network, stages, lambda m: (held(m), cache_specs(m)))
        weights = max(own for own, _ in each)
        media = self._plan_media()
        on_gpu = self.gpu is not None or (device is not None and device.type == "cuda")
        if on_gpu and self.model_config is not None:
            small = small_for_ranks(config, self.model_config.num_layers, weights)
            if small is not None:
                self._add("ranks-slower", "warning", small)
        sums = rank_memory.planned_bytes(config) if on_gpu and self.memory is None else 0
        taken = weights + media.total + sums
        source: Literal["memory", "gpu", "machine"] = "machine"
        if self.memory is not None:
            source, total, budget = "memory", self.memory, self.memory - taken
        elif self.gpu is not None:
            source, total = "gpu", self.gpu.memory
            budget = platform.gpu_cache_budget(total - taken, total)
        elif device is not None:
            total = platform.rank_memory(device, ranks)
            budget = platform.cache_budget(config, device, pending=taken)
        else:
            return
        if weights > total:
            where = {"gpu": self.gpu and self.gpu.name, "memory": "the memory given"}.get(
                source, device
            )
            self._add(
                "memory-weights-too-large",
                "error",
                f"the weights alone take {weights} bytes, but {where} has {total}",
            )
        elif config.kv_cache_memory is not None and source != "machine":
            budget = config.kv_cache_memory
            if taken + budget > total:
                encoder = f", the encoder {media.total}" if media.total else ""
                self._add(
                    "memory-cache-too-small",
                    "error",
                    f"the weights take {weights} bytes{encoder} and kv_cache_memory is {budget}, "
                    f"together more than the {total} that there are",
                )
        budget = max(budget, 0) if specs else 0
        block_size = platform.resolve_block_size(config, device or torch.device("cuda"))
        whole = budget
        if stages > 1:
            spare = [weights - own if config.kv_cache_memory is None else 0 for own, _ in each]
            budgets = [(own, budget + more) for (_, own), more in zip(each, spare, strict=True)]
            specs, whole = whole_budget(budgets, block_size)
        of_tokens = [spec.bytes_per_block(block_size) for spec in specs if not spec.keeps_state]
        of_states = [spec.bytes_per_block(block_size) for spec in specs if spec.keeps_state]
        plan: CachePlan | None = None
        try:
            plan = plan_cache(
                specs, config, block_size=block_size, budget=whole, max_model_len=max_model_len
            )
        except CacheMemoryError as error:
            if weights <= total:
                self._add("memory-cache-too-small", "error", str(error))
        else:
            self._check_batch(plan, source, total * stages, media)
        planned = 0 if plan is None else plan.max_model_len
        if 0 < planned < max_model_len:
            self._add(
                "length-cut",
                "warning",
                f"the KV cache holds {planned} tokens, so sequences may be no longer than that, "
                f"not the {max_model_len} that the model can do",
            )
        self._check_items(planned)
        limits = self.media_of_model.values()
        modules = {name for limit in limits if limit for name in limit.modules}
        encoder_weights = 0
        with self._collecting():
            named = _named_modules(network, modules)
            encoder_weights = sum(map(held, named))
        counts = Counter(specs)
        self.memory_info = MemoryInfo(
            source=source,
            gpu=self.gpu.name if self.gpu else None,
            num_ranks=ranks,
            total_bytes=total,
            weights_bytes=weights,
            encoder_weights_bytes=encoder_weights,
            encoder_cache_bytes=media.cache,
            encoder_activation_bytes=media.activations,
            rank_sums_bytes=sums,
            kv_bytes_per_token=sum(of_tokens) // block_size,
            state_bytes=sum(of_states),
            state_tokens=max(
                (g.block_size for g in plan.cache_config.groups if g.spec.keeps_state), default=0
            )
            if plan
            else 0,
            block_size=block_size,
            cache_bytes=budget,
            max_tokens=0 if plan is None else plan.max_tokens,
            max_model_len=planned,
            full_sequences=0 if plan is None else plan.full_sequences,
            groups=tuple(CacheGroupInfo.of(spec, count) for spec, count in counts.items()),
            replicated=()
            if alone is None
            else _replicated(
                network, alone, ranks // stages, packed_sizes(network, account, on_cpu=on_cpu)
            ),
        )

    @property
    def media(self) -> dict[str, MediaLimit | None]:
        """The limits of what a prompt may show."""
        return taken_media(self.media_of_model, self.config)

    def _plan_media(self) -> MediaPlan:
        assert self.model_config is not None, "its network was built"
        assert self.dtype is not None, "its network was built"
        size, itemsize = self.model_config.hidden_size, getattr(torch, self.dtype).itemsize
        return plan_media(self.media, self.config.encoder_cache_tokens, size, itemsize)

    def _check_items(self, max_model_len: int) -> None:
        """Say which items are refused although the model could take them."""
        limits = {"encoder_cache_tokens": self.config.encoder_cache_tokens}
        if max_model_len:
            limits["max_model_len"] = max_model_len
        option, most = min(limits.items(), key=lambda item: item[1])
        for kind, limit in self.media.items():
            if limit is not None and (limit.num_embeddings or 0) > most:
                self._add(
                    "media-too-large",
                    "warning",
                    f"an {kind} of {limit.largest} takes {limit.num_embeddings} tokens, and "
                    f"{option} is {most}: the largest are refused",
                )

    def _check_batch(self, plan: CachePlan, source: str, total: int, media: MediaPlan) -> None:
        if source == "memory" or any(p.code == "memory-cache-too-small" for p in self.problems):
            # The memory given is for weights and cache alone.
            return
        assert self.model_config is not None, "its network was built"
        assert self.dtype is not None, "its network was built"
        with self._collecting():
            check_memory(
                plan,
                max_num_seqs=self.config.max_num_seqs,
                max_num_batched_tokens=self.config.max_num_batched_tokens,
                vocab_size=self.model_config.vocab_size,
                hidden_bytes=self.model_config.hidden_size * getattr(torch, self.dtype).itemsize,
                total=total,
                media=media,
            )

    def ask_fusions(self) -> None:
        """Ask the linears of the model, if it was built, what they fuse on the device."""
        if self.network is None or self.dtype is None:
            return
        gpu = None
        if self.gpu is not None:
            gpu = GPU.of_capability(self.gpu.capability)
        elif self.device is not None:
            gpu = gpu_of(self.device)
        if self.config.pipeline_parallel_size > 1:
            for layer in self.network.modules():
                if isinstance(layer, DecoderLayer):
                    # Those of stages have no chains, and the network is one that is not cut.
                    layer.may_chain = False
        self.fusions = tuple(
            FusionInfo(**dataclasses.asdict(fusion))
            for fusion in fusions(self.network, gpu, getattr(torch, self.dtype))
        )

    def compare(self, file: str | Path | None, golden: Sequence[Prompt]) -> None:
        """Load the model and compare it with ``golden`` of ``file``, or else with transformers.

        Skipped if an error found so far would prevent loading.
        """
        self.comparison_asked = True
        errors = {problem.code for problem in self.problems if problem.severity == "error"}
        if errors - _ABOUT_TEXT:
            return
        held = None if self.checkpoint is None else self.checkpoint.one_file
        if held is not None:
            changed = held.changed()
            if changed:
                shown = ", ".join(changed[:4]) + (
                    f" and {len(changed) - 4} more" * (len(changed) > 4)
                )
                message = f"{len(changed)} tensors are not those that were exported: {shown}"
                self._add("weights-changed", "error", message, changed)
                return
        if self.model_config is not None and self.model_config.pooling is not None:
            message = "logits are compared, and a model that embeds or scores has none"
            hint = "Compare what LLM.embed or LLM.score gives with outputs of the original code."
            self._add("comparison-unavailable", "warning", message, hint=hint)
            return
        try:
            model = DeepModel(self.model, self.config)
            bad = model.not_finite()
            if bad:
                shown = ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
                message = f"{len(bad)} tensors hold NaN or infinite numbers: {shown}"
                self._add("weights-not-finite", "error", message, bad)
                return
            if file is None and model.source.scheme is not None:
                cost = measure_quantization(model, self.tokenizer)
                self.quantization_cost = cost
                if cost.mean_kl is None:
                    self._add(
                        "comparison-differs",
                        "error",
                        f"quantization {cost.scheme}: the next tokens' probabilities are not "
                        "finite, with the weights as they are used or with the same weights as "
                        "numbers",
                    )
            self.comparison = (
                compare_with_transformers(model)
                if file is None
                else compare_with_golden(model, Path(file), golden)
            )
        except (CheckpointError, ConfigError) as error:
            self._add(_code(error), "error", str(error))
            return
        except EngineError as error:
            # Where a file was given, this is what does not fit.
            of_file = None if file is None else "Check that the FILE of --against is of this model."
            self._add("comparison-unavailable", "warning", str(error), hint=of_file)
            return
        # Loading has compared them.
        self.problems = [p for p in self.problems if p.code != "tied-head-unread"]
        for prompt in self.comparison.prompts:
            if prompt.first_difference is not None:
                part = next(p for p in prompt.parts if p.part == prompt.first_difference)
                amount = "not finite" if part.relative is None else f"{part.relative:.2g}"
                self._add(
                    "comparison-differs",
                    "error",
                    f"prompt {prompt.name}: {part.part} is the first part that differs from "
                    f"{self.comparison.reference}, by {amount} of its size",
                )
            elif prompt.first_wrong_token is not None:
                self._add(
                    "comparison-differs",
                    "error",
                    f"prompt {prompt.name}: generated token {prompt.first_wrong_token} is not that "
                    f"of {self.comparison.reference}",
                )

    def report(self, seconds: float) -> CheckReport:
        """Everything found, as a report."""
        most: Mapping[str, int] = self.config.limit_mm_per_prompt  # type: ignore[assignment]
        errors = {problem.code for problem in self.problems if problem.severity == "error"}
        exit_code: Literal[0, 1, 3, 4] = 0
        if errors - {"comparison-differs"}:
            exit_code = 1
        elif errors:
            exit_code = 3
        elif self.comparison_asked and self.comparison is None:
            exit_code = 4
        return CheckReport(
            engine_version=engine_core.__version__,
            model=self.model,
            path=None if self.path is None else str(self.path),
            will_run=exit_code != 1,
            exit_code=exit_code,
            problems=tuple(sorted(self.problems, key=lambda p: _SEVERITIES.index(p.severity))),
            device=None if self.device is None else str(self.device),
            dtype=self.dtype,
            model_info=self._model_info(),
            weights=self._weights_info(),
            tokenizer=self._tokenizer_info(),
            memory=self.memory_info,
            media=tuple(
                MediaInfo(
                    kind=kind,
                    max_tokens=limit.num_embeddings if limit else None,
                    largest=limit.largest or None if limit else None,
                    max_items=most.get(kind),
                )
                for kind, limit in self.media.items()
            ),
            comparison=self.comparison,
            quantization_cost=self.quantization_cost,
            fusions=self.fusions,
            plugins=tuple(
                PluginInfo.model_validate(report, from_attributes=True)
                for report in (self.registry.reports if self.registry else ())
            ),
            seconds=seconds,
        )

    def _model_info(self) -> ModelInfo | None:
        if self.model_config is None or self.registry is None:
            return None
        values = self.model_config.model_dump(mode="python")
        architecture = self.model_config.architecture
        cls = self.model_class
        return ModelInfo(
            architecture=architecture,
            plugin=self.registry.architectures.get(architecture),
            model_class=None if cls is None else f"{cls.__module__}.{cls.__qualname__}",
            config=values,
        )

    def _weights_info(self) -> WeightsInfo | None:
        if self.checkpoint is None or not self.checkpoint.has_weights:
            return None
        headers = self.checkpoint.headers.values()
        gguf = (self.matched or self.checkpoint).gguf
        return WeightsInfo(
            num_tensors=len(headers),
            num_files=len({header.file for header in headers}),
            total_bytes=self.checkpoint.total_bytes,
            dtypes=dict(Counter(header.dtype for header in headers)),
            num_parameters=self.num_parameters,
            scheme=self._scheme(),
            kept=None if gguf is None else gguf.kept,
            unpacked=None if gguf is None else gguf.unpacked,
        )

    def _scheme(self) -> str | None:
        if self.scheme is None or self.network is None:
            return None
        linears = [module for module in self.network.modules() if isinstance(module, Linear)]
        taken = sum(type(layer.method) is not UnquantizedLinearMethod for layer in linears)
        return f"{self.scheme.name}, {taken} of {len(linears)} linears"

    def _tokenizer_info(self) -> TokenizerInfo | None:
        if self.tokenizer is None:
            return None
        template: Literal["checkpoint", "family", "none"] = "none"
        if self.tokenizer.chat_templates:
            template = "checkpoint"
        elif self._family_template is not None:
            template = "family"
        return TokenizerInfo(
            kind=type(self.tokenizer).__name__,
            vocab_size=self.tokenizer.vocab_size,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            chat_template=template,
        )

    def _collecting(self, code: Code | None = None) -> _Collecting:
        """Collect what the ``with`` block raises, and go on after it."""
        return _Collecting(lambda error: self._add(code or _code(error), "error", str(error)))

    @property
    def _family_template(self) -> str | None:
        return None if self.model_config is None else self.model_config.default_chat_template

    def _add(
        self,
        code: Code,
        severity: Severity,
        message: str,
        names: tuple[str, ...] = (),
        hint: str | None = None,
    ) -> None:
        problem = Problem(
            code=code, severity=severity, message=message, hint=hint or HINTS[code], names=names
        )
        if problem not in self.problems:
            self.problems.append(problem)


def _replicated(
    network: nn.Module, whole: nn.Module, ranks: int, sizes: Mapping[int, int]
) -> tuple[ReplicatedInfo, ...]:
    """A rank's parameters beyond an even share of the ``whole``, the most bytes first.

    ``sizes`` are bytes of a rank's parameters, by their ids. Padding, which is less than 1 %, is
    left out, and so are parameters that only a scheme has.
    """
    totals = {name: param.numel() for name, param in whole.named_parameters()}
    alike: dict[tuple[str, bool], list[float]] = {}
    for name, param in network.named_parameters():
        own, total = param.numel(), totals.get(name, 0)
        if own * ranks > 1.01 * total > 0:
            excess = sizes[id(param)] * (1 - total / (own * ranks))
            pattern = re.sub(r"\.\d+(?=\.)", ".*", name)
            alike.setdefault((pattern, own == total), []).append(excess)
    every = [
        ReplicatedInfo(
            tensors=pattern, whole=kept, num_tensors=len(bytes_), excess_bytes=round(sum(bytes_))
        )
        for (pattern, kept), bytes_ in alike.items()
    ]
    return tuple(sorted(every, key=lambda each: -each.excess_bytes))


def _named_modules(network: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    for name in names:
        try:
            yield network.get_submodule(name)
        except AttributeError:
            raise PluginError(
                f"the input processor's media_limits name a module {name!r}, and "
                f"{type(network).__name__} has none"
            ) from None


@dataclass(slots=True)
class _Collecting:
    """Gives an :class:`EngineError` to :attr:`add` instead of raising it."""

    add: Callable[[EngineError], None]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, EngineError):
            self.add(error)
        return isinstance(error, EngineError)


def _code(error: EngineError) -> Code:
    return error.code.value if error.code.value in HINTS else "config-invalid"
