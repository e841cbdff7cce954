"""A model's name and config, opened and checked but not yet loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from engine_core.checkpoint import Checkpoint, is_local, open_checkpoint, resolve_model
from engine_core.checkpoint.gguf import read_architecture
from engine_core.configs import EngineConfig, HFConfig, ModelConfig
from engine_core.configs.engine import UNPACKED, KVCacheDType, ModelImpl
from engine_core.errors import (
    ConfigError,
    CorruptCheckpointError,
    ErrorCode,
    OptionError,
    PluginError,
    UnknownArchitectureError,
)
from engine_core.inputs import check_media_options
from engine_core.kernels import gpu_of
from engine_core.kernels.block_linear import is_fast
from engine_core.nn.quantization import QuantizationScheme, kv_scales
from engine_core.nn.quantization.facts import facts_of
from engine_core.nn.quantization.scheme import QUANTIZATION_KEYS
from engine_core.plugin_code import contained, failed_at, package_of
from engine_core.registry import Registry
from engine_core.runtime import platform
from engine_core.runtime.memory import MediaPlan, plan_media
from engine_core.runtime.task import as_decoder, with_task

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from engine_core.inputs import InputProcessor, MediaLimit, PromptState

# Families' names for the number of layers; each layer has at least one tensor.
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_MOST_LAYERS = 10_000
# A tensor may be a transposed, packed or split part of what the config speaks of, but no dimension
# of a model is so many times larger than every dimension of its tensors.
_MOST_SPLIT = 64


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checkpoint and what runs it.

    Attributes:
        name: the model as the user named it.
        checkpoint: its files, open and checked.
        model_config: what the family's builder read.
        model_class: the family's class.
        registry: has the class of a text model inside it.
        device: where it will run.
        dtype: the element type that it will run with.
        has_input_processor: whether the family has an input processor for the model.
        prompt_state: the state that the input processor declares; None if it declares none.
        media: what an item of each kind that the model takes besides text takes at most.
        scheme: how its weights are quantised; None if they are not.
        kv_cache_dtype: element type of keys and values in the cache, as of the config or, if that
            leaves it open, of the checkpoint.
    """

    name: str
    checkpoint: Checkpoint
    model_config: ModelConfig
    model_class: type
    registry: Registry
    device: torch.device
    dtype: torch.dtype
    has_input_processor: bool
    prompt_state: PromptState | None
    scheme: QuantizationScheme | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    media: Mapping[str, MediaLimit | None] = field(default_factory=dict)

    def plan_media(self, config: EngineConfig) -> MediaPlan:
        """The memory that pictures, videos and sounds will take."""
        size, itemsize = self.model_config.hidden_size, self.dtype.itemsize
        return plan_media(self.media, config.encoder_cache_tokens, size, itemsize)

    @property
    def state_known(self) -> bool:
        """Whether it is known what is kept of rows and tokens, or the first request shows it."""
        return self.prompt_state is not None or not self.has_input_processor


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


def open_model(
    model: str,
    config: EngineConfig,
    registry: Registry,
    *,
    convert: bool = True,
    quiet: bool = False,
) -> ModelSource:
    """Find ``model``, check its files and find the class that runs it.

    ``convert`` is that of :func:`open_checkpoint`. If ``quiet`` nothing is said of how the model
    runs here.

    Raises:
        EngineError: it cannot run; the subclass says why.
    """
    check_revision(model, config)
    device = platform.resolve_device(config)
    check_deterministic(config, device)
    check_kv_cache(config.kv_cache_dtype, device)
    option = option_scheme(config, registry, device)
    checkpoint = open_files(model, config, registry, device, option, convert=convert)
    scheme = find_scheme(checkpoint, config, option, registry, device)
    model_config = read_config(registry, checkpoint, config.model_impl)
    if scheme is not None:
        scheme.quiet = quiet
        facts = () if quiet else facts_of(scheme, device, model_config.hidden_size)
        for fact in facts:
            level = logging.WARNING if fact.severe else logging.INFO
            logger.log(level, "quantization %s: %s", scheme.name, fact.text)
        says = checkpoint.has_weights and not quiet
        for remark in scheme.remarks(checkpoint.headers) if says else ():
            logger.warning("quantization %s: %s", scheme.name, remark)
    model_class = registry.model_class(model_config.architecture)
    model_config = with_task(model_config, model_class, checkpoint, config)
    processor = registry.input_processor(model_config)
    check_media_options(processor, config.mm_processor_kwargs, model_config.architecture)
    kv_cache_dtype, why = find_kv_cache(config, scheme, model_config, device)
    slower = check_kv_cache(kv_cache_dtype, device)
    for warning in (why, slower):
        if warning is not None and not quiet:
            logger.warning("%s", warning)
    return ModelSource(
        name=model,
        checkpoint=checkpoint,
        model_config=model_config,
        model_class=model_class,
        registry=registry,
        device=device,
        dtype=getattr(torch, platform.resolve_dtype(config, device, model_config.dtype)),
        has_input_processor=processor is not None,
        prompt_state=getattr(processor, "prompt_state", None),
        scheme=scheme,
        kv_cache_dtype=kv_cache_dtype,
        media=taken_media(media_limits(processor, config.mm_processor_kwargs), config),
    )


def taken_media(
    limits: Mapping[str, MediaLimit | None], config: EngineConfig
) -> dict[str, MediaLimit | None]:
    """Those of the kinds of which a prompt may have any, by ``limit_mm_per_prompt``."""
    most: Mapping[str, int] = config.limit_mm_per_prompt  # type: ignore[assignment]
    return {kind: limit for kind, limit in limits.items() if most.get(kind) != 0}


def media_limits(
    processor: InputProcessor | None, options: Mapping[str, Any]
) -> dict[str, MediaLimit | None]:
    """The limit of each kind that a processor takes, None where it states none; {} for text.

    Args:
        processor: the family's, if it has one.
        options: ``mm_processor_kwargs`` of the engine, which the processor knows.

    Raises:
        PluginError: it fails at it, or gives no limits.
    """
    kinds: tuple[str, ...] = getattr(processor, "media_kinds", ())
    if not kinds:
        return {}
    name = f"{type(processor).__name__}.media_limits"
    try:
        with contained():
            given: Any = getattr(processor, "media_limits", lambda _: {})(options)
    except Exception as error:
        place = failed_at(error, package_of(type(processor)))
        raise PluginError(f"{name} failed: {type(error).__name__}: {error}{place}") from error
    fine = isinstance(given, Mapping) and set(given) <= set(kinds)
    if not fine or not all(type(limit).__name__ == "MediaLimit" for limit in given.values()):
        raise PluginError(f"{name} is to give a MediaLimit by kind of {kinds}, it gave {given!r}")
    return {kind: given.get(kind) for kind in kinds}


def option_scheme(
    config: EngineConfig, registry: Registry, device: torch.device
) -> QuantizationScheme | None:
    """The quantisation scheme that ``config`` asks for, if it does.

    Raises:
        OptionError: no scheme has this name, and none knows a ``quant_method`` of this name; or it
            cannot run on ``device``.
        PluginError: its package is broken, or two bring the name.
    """
    asked = config.quantization
    if asked is None or asked == UNPACKED:
        return None
    try:
        scheme = registry.quantization_scheme(asked)
    except OptionError:
        if registry.recognise_quantization({"quant_method": asked}) is None:
            raise
        return _MethodOfCheckpoint(asked)
    scheme.check_device(device)
    return scheme


class _MethodOfCheckpoint(QuantizationScheme):
    """The name of a checkpoint's ``quant_method`` that no scheme has: the same as no option."""

    def check_checkpoint(self, checkpoint: Checkpoint, model: str) -> None:
        """Refuse a checkpoint that no tool quantised; :func:`find_scheme` looks at the others."""
        if not any(checkpoint.hf_config.get(key) for key in QUANTIZATION_KEYS):
            raise OptionError(
                f"quantization {self.name!r} is for checkpoints that are quantised so, and {model} "
                "is not; leave it out"
            )


def check_revision(model: str, config: EngineConfig) -> None:
    """Refuse a revision for a model that is not a hub id.

    Raises:
        OptionError: model and tokenizer are both on this machine, or the tokenizer is the model's.
    """
    named = {"model": model, "tokenizer": config.tokenizer}
    local = [f"{what} {name!r}" for what, name in named.items() if name is not None]
    if config.revision is not None and all(is_local(name) for name in named.values() if name):
        raise OptionError(
            f"revision {config.revision!r} is for a hub id, but the {' and the '.join(local)} "
            f"{'is' if len(local) == 1 else 'are'} on this machine: leave revision out"
        )


def open_files(
    model: str,
    config: EngineConfig,
    registry: Registry,
    device: torch.device,
    scheme: QuantizationScheme | None = None,
    *,
    convert: bool = True,
) -> Checkpoint:
    """Find ``model`` and open its files.

    ``scheme`` is that of :func:`option_scheme`, ``convert`` that of :func:`open_checkpoint`.

    Raises:
        CheckpointError: a file is not there or cannot be used.
        OptionError: the quantisation asked for is not possible with these files.
        UnknownArchitectureError: no plugin reads a GGUF file of this architecture.
    """
    path = resolve_model(model, config.revision)
    try:
        opened = partial(
            open_checkpoint,
            path,
            load_format=config.load_format,
            gguf_adapters=_GGUFAdapters(registry),
            dtype=platform.resolve_dtype(config, device, None),
            hf_overrides=config.hf_overrides,
        )
        plain = convert and (scheme is None or scheme.converts_gguf)
        # Blocks may be kept, or could be; the file has to be looked at before it is unpacked.
        choice = plain and config.quantization is None
        checkpoint = opened(convert=plain and not choice)
        if choice and checkpoint.gguf and not keeps_blocks(checkpoint, config, device):
            could = could_keep_blocks(checkpoint, config, device)
            if could is not None:
                logger.info("%s: %s", path, could)
            elif checkpoint.gguf.block_types and device.type == "cpu":
                logger.warning("%s is unpacked: to keep its blocks, which take less memory, needs "
                               "'engine-core-llm[cpu]' and a CPU with AVX2", path)  # fmt: skip
            checkpoint = opened(convert=True)
    except UnknownArchitectureError as error:
        advice = registry.gguf_advice(read_architecture(path))
        raise UnknownArchitectureError(f"{error}. {advice}") from error
    if config.quantization == UNPACKED:
        check_unpacked(model, is_gguf=path.suffix.lower() == ".gguf")
    if scheme is not None:
        scheme.check_checkpoint(checkpoint, model)
    as_decoder(checkpoint, config, registry)
    return checkpoint


def check_unpacked(model: str, *, is_gguf: bool) -> None:
    """Refuse to unpack what is no GGUF file.

    Raises:
        OptionError: says so.
    """
    if not is_gguf:
        raise OptionError(
            f"quantization {UNPACKED!r} turns the blocks of a GGUF file into numbers, and {model} "
            "is no GGUF file; leave it out"
        )


def keeps_blocks(checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> bool:
    """Whether blocks of a GGUF file are multiplied as they are without being asked for.

    They are on a CPU with AVX2, where Numba is installed. On a GPU steps of more than 16 tokens
    take longer by blocks than by numbers: there they are kept for whoever asks.
    """
    if config.quantization is not None or checkpoint.gguf is None or device.type != "cpu":
        return False
    return is_fast() and bool(checkpoint.gguf.block_types)


def could_keep_blocks(
    checkpoint: Checkpoint,
    config: EngineConfig,
    device: torch.device,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Advice on how a GPU keeps the blocks of a GGUF file; None if it has no kernels for them.

    ``capability`` is that of :func:`check_deterministic`.
    """
    if config.quantization is not None or checkpoint.gguf is None or device.type != "cuda":
        return None
    if capability is None:
        gpu = gpu_of(device) if torch.cuda.is_available() else None
        capability = (0, 0) if gpu is None else gpu.capability
    types = sorted(set(checkpoint.gguf.block_types.values()))
    if not types or capability < (8, 0):
        return None
    return (
        f"blocks ({', '.join(types)}) are unpacked on a GPU; quantization='gguf' would keep them, "
        "which takes less memory, and longer in steps of many tokens"
    )


def check_deterministic(
    config: EngineConfig, device: torch.device, capability: tuple[int, int] | None = None
) -> None:
    """Refuse deterministic mode where results would still depend on the batch.

    ``capability`` is the compute capability of a GPU that is planned for; that of ``device`` if
    None.

    Raises:
        OptionError: it is asked for, and ``device`` is no GPU on which it is known to hold.
    """
    if not config.deterministic:
        return
    if device.type != "cuda":
        raise OptionError(
            f"deterministic is for GPUs: on {device} torch multiplies few rows and many in "
            "different ways; leave deterministic out, or set device='cuda'"
        )
    named = capability is not None
    capability = capability or torch.cuda.get_device_capability(device)
    hip = not named and torch.version.hip is not None
    if not (8, 0) <= capability < (10, 0) or hip:
        raise OptionError(
            "deterministic relies on how matrix units add up, which is known of compute capability "
            f"9.0 and expected of 8.x; {'that GPU' if named else device} has "
            f"{'.'.join(map(str, capability))}: leave deterministic out"
        )


def find_kv_cache(
    config: EngineConfig,
    scheme: QuantizationScheme | None,
    model_config: ModelConfig,
    device: torch.device,
    capability: tuple[int, int] | None = None,
) -> tuple[KVCacheDType, str | None]:
    """The element type of keys and values: that of ``config``, or what the checkpoint asks for.

    ``capability`` is that of :func:`check_deterministic`.

    Returns:
        that type, and why it is not the one that the checkpoint asks for; None if it is.

    Raises:
        ConfigError: the checkpoint asks for one that is not supported.
    """
    asked = None if scheme is None else kv_scales.stated(scheme.cache_settings)
    if asked is None:
        return config.kv_cache_dtype, None
    says = "kv_cache_scheme of the checkpoint asks for a cache of e4m3"
    if config.kv_cache_dtype != "auto":
        if config.kv_cache_dtype == "fp8" or asked == "dynamic":
            return config.kv_cache_dtype, None
        return config.kv_cache_dtype, f"{says}, whose scales kv_cache_dtype 'int8' does not use"
    why = None
    pooling = model_config.pooling
    if pooling is not None and pooling.whole:
        return "auto", None
    if config.deterministic:
        why = "deterministic takes none"
    elif config.block_size is not None and config.block_size % 4:
        why = f"block_size {config.block_size} is no multiple of 4"
    else:
        try:
            check_kv_cache("fp8", device, capability)
        except OptionError:
            why = "this GPU does not convert it"
    return ("fp8", None) if why is None else ("auto", f"{says}, and {why}: it keeps the numbers")


def check_kv_cache(
    dtype: KVCacheDType, device: torch.device, capability: tuple[int, int] | None = None
) -> str | None:
    """Refuse a cache of codes that the GPU cannot make.

    ``capability`` is that of :func:`check_deterministic`.

    Returns:
        what is slower with such a cache; None if nothing is.

    Raises:
        OptionError: ``kv_cache_dtype`` is "fp8", and ``device`` is a GPU without e4m3.
    """
    if dtype == "auto" or device.type != "cuda":
        return None
    if capability is None:
        hip = torch.version.hip is not None
        capability = (0, 0) if hip else torch.cuda.get_device_capability(device)
    if dtype == "fp8" and capability < (8, 9):
        raise OptionError(
            "kv_cache_dtype 'fp8' needs a GPU of compute capability 8.9 or more, which converts "
            "e4m3: take kv_cache_dtype='int8', or leave it out"
        )
    if capability != (9, 0):
        return None
    return (
        f"kv_cache_dtype {dtype!r}: prompts of a step whose contexts take more than 1 GiB of a "
        "layer as 16-bit numbers, all together, are attended to beyond that by the portable "
        "kernel, which is slower than the one for compute capability 9.0"
    )


def find_scheme(
    checkpoint: Checkpoint,
    config: EngineConfig,
    option: QuantizationScheme | None,
    registry: Registry,
    device: torch.device,
) -> QuantizationScheme | None:
    """The scheme of a checkpoint that a tool quantised, else the one that the option asks for.

    The latter also where a tool quantised the cache alone: it has its settings for that then.
    Without either the one that :func:`keeps_blocks` of a GGUF file. An option that names the
    checkpoint's own ``quant_method`` asks for the checkpoint's scheme, whatever that is called.

    Raises:
        ConfigError: no scheme recognises what the tool wrote; names the tool's method.
        OptionError: the option asks for another scheme, or the checkpoint's cannot run on
            ``device``.
        PluginError: the scheme's package is broken, or two schemes recognise the checkpoint.
    """
    if keeps_blocks(checkpoint, config, device):
        return registry.quantization_scheme("gguf")
    hf_config = checkpoint.hf_config
    key = next((key for key in QUANTIZATION_KEYS if hf_config.get(key) is not None), None)
    if key is None:
        # That a method is named where there is none was said when the files were opened.
        return None if isinstance(option, _MethodOfCheckpoint) else option
    settings = hf_config.get(key)
    method, name = settings, None
    if isinstance(settings, dict):
        method = settings.get("quant_method")
        name = registry.recognise_quantization(settings)
    if name is None:
        raise ConfigError(
            f"config.json: the weights are quantised ({key} says {method!r}), which cannot be "
            "read; take the model's unquantised checkpoint or a GGUF file of it",
            code=ErrorCode.QUANTIZATION,
        )
    if option is not None and option.name not in (name, method):
        if isinstance(option, _MethodOfCheckpoint) or not _weights_are_plain(
            registry, name, settings
        ):
            raise OptionError(
                f"quantization {option.name!r} is asked for, but the checkpoint's weights are "
                f"quantised by {method or name!r} ({key}); leave quantization out"
            )
        option.cache_settings = settings
        return option
    scheme = registry.quantization_scheme(name, settings)
    scheme.check_device(device)
    return scheme


def _weights_are_plain(registry: Registry, name: str, settings: Any) -> bool:
    """Whether a checkpoint's cache alone is quantised, so that an option may quantise the rest."""
    try:
        return not registry.quantization_scheme(name, settings).takes_weights
    except ConfigError:  # What the config says of the weights cannot be read.
        return False


def read_config(registry: Registry, checkpoint: Checkpoint, impl: ModelImpl) -> ModelConfig:
    """The model config that the family's builder makes of the checkpoint's.

    Sizes far beyond what the files hold are refused before anything is built of that size.

    Raises:
        EngineError: as :meth:`Registry.model_config`.
        CorruptCheckpointError: a size is far larger than the tensors allow.
    """
    hf_config = checkpoint.hf_config
    _check_layers(hf_config, checkpoint)
    model_config = registry.model_config(hf_config, checkpoint.folder, impl)
    if checkpoint.has_weights:
        _check_sizes(model_config, checkpoint)
    return model_config


def _check_layers(hf_config: HFConfig, checkpoint: Checkpoint) -> None:
    # Before the builder, which may make a list of that length.
    most = len(checkpoint.headers) if checkpoint.has_weights else _MOST_LAYERS
    held = f"the whole checkpoint {checkpoint.folder} holds {most} tensors"
    stated = hf_config.to_dict()
    parts = [stated, *(value for value in stated.values() if isinstance(value, dict))]
    for part, key in product(parts, _LAYER_KEYS):
        value = part.get(key)
        if isinstance(value, int) and value > most:
            raise CorruptCheckpointError(
                f"config.json: {key} is {value}, but "
                + (held if checkpoint.has_weights else f"no model has more than {most}")
            )


def _check_sizes(model_config: ModelConfig, checkpoint: Checkpoint) -> None:
    headers = checkpoint.headers
    largest = max((size for header in headers.values() for size in header.shape), default=0)
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    for name in names:
        value = getattr(model_config, name)
        if value > _MOST_SPLIT * largest:
            raise CorruptCheckpointError(
                f"config.json says that {name} is {value}, but no tensor of the checkpoint "
                f"{checkpoint.folder} has a dimension above {largest}"
            )
