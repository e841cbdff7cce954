"""Builds a model and fills it from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from inspect import isgenerator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine_core.checkpoint import Checkpoint
from engine_core.configs import ModelConfig
from engine_core.errors import CheckpointError, ConfigError, EngineError, OptionError
from engine_core.nn.attention import Attention
from engine_core.nn.blocks import agree
from engine_core.nn.distributed import IndivisibleError
from engine_core.nn.loading import LoadAccount, Weights, load_account, materialize
from engine_core.nn.quantization import QuantizationScheme, ScaleKind, kv_scales
from engine_core.nn.quantization.fp8_checkpoint import Fp8Checkpoint
from engine_core.nn.quantization.packed import PackedCheckpoint
from engine_core.nn.quantization.scale_values import check_scale
from engine_core.plugin_code import described, failed_at, is_own, package_of, silent
from engine_core.runtime.first_pass import refuse
from engine_core.runtime.packing import Packer
from engine_core.runtime.weight_reader import AHEAD_BYTES, read_weights
from engine_core.step_context import BuildContext, StepContextManager, building

# Scales of codes, and those that activations are divided by.
_SCALE_LEAVES: dict[str, ScaleKind] = {
    **dict.fromkeys(("weight_scale", "weight_scale_inv"), "multiplied"),
    **dict.fromkeys(("input_scale", "activation_scale"), "divided"),
}


class WeightSource(Protocol):
    """The interface of a checkpoint that the loader needs."""

    @property
    def headers(self) -> Mapping[str, Any]:
        """Names to objects with ``dtype`` and ``shape``."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, one after another."""


def build_on_meta(
    model_class: type,
    model_config: ModelConfig,
    context: BuildContext,
    scheme: QuantizationScheme | None = None,
) -> nn.Module:
    """The model without memory for its parameters, its layers given the methods of ``scheme``.

    Raises:
        ConfigError: its class cannot be built from this config.
        OptionError: it cannot be split over so many ranks, has no layer that ``scheme`` quantises,
            cannot be deterministic, or keeps no keys and values of ``kv_cache_dtype``.
    """
    try:
        model = _construct(model_class, model_config, context)
    except EngineError:
        raise
    except IndivisibleError as error:
        raise OptionError(
            f"{model_class.__name__} of this size cannot be split over {context.tp_size} ranks: "
            f"{error}; {_possible(model_class, model_config, context)}"
        ) from error
    except Exception as error:
        # A family's code may raise anything here; the config is its only input.
        packages = {package_of(each) for each in model_class.__mro__ if is_own(each)}
        raise ConfigError(
            f"{model_class.__name__} cannot be built from this config: "
            f"{type(error).__name__}: {error}{failed_at(error, *packages)}"
        ) from error
    _update_weights(model)
    if context.deterministic:
        _check_deterministic(model)
    if context.kv_cache_dtype != "auto":
        _check_kv_cache(model, context.kv_cache_dtype)
    if scheme is not None:
        scheme.prepare(model)
    return model.eval()


def _construct(model_class: type, model_config: ModelConfig, context: BuildContext) -> nn.Module:
    with silent(), building(context), torch.device("meta"):
        model: nn.Module = model_class(
            model_config.hf_config,
            StepContextManager(context),
            dtype=context.dtype,
            device=torch.device("meta"),
        )
    return model


def _possible(model_class: type, model_config: ModelConfig, context: BuildContext) -> str:
    """Advice: the numbers of ranks, up to those of a machine, that the model splits over."""
    sizes = []
    for size in range(2, 9):
        with suppress(IndivisibleError, EngineError):
            _construct(model_class, model_config, replace(context, tp_rank=0, tp_size=size))
            sizes.append(str(size))
    return f"set it to {' or '.join(['1', *sizes])}"


def _check_deterministic(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Bilinear | nn.modules.conv._ConvNd):
            raise OptionError(
                f"deterministic: {name} of {type(model).__name__} is a torch.nn."
                f"{type(module).__name__}, whose result for a token depends on the number of tokens"
                "; leave deterministic out, or build the layer with engine_core.nn"
            )


def _check_kv_cache(model: nn.Module, dtype: str) -> None:
    if not any(isinstance(module, Attention) for module in model.modules()):
        raise OptionError(
            f"kv_cache_dtype is {dtype!r}, but {type(model).__name__} has no engine_core.nn."
            "Attention, which keeps keys and values so; leave kv_cache_dtype out"
        )


def _update_weights(model: nn.Module) -> None:
    """Call each module's ``update_weights``, where models share or derive weights.

    Called after construction too, so that shared weights need no tensor of their own.
    """
    for module in model.modules():
        update = getattr(module, "update_weights", None)
        if callable(update):
            update()


def check_weights(model: nn.Module, source: WeightSource, where: str) -> LoadAccount:
    """Load a model on meta from headers alone; returns which tensors fill which parameters.

    Raises:
        WeightsMismatchError: tensors are missing, unexpected or of the wrong shape or kind.
        CheckpointError: the model's own ``load_weights`` fails on a tensor.
    """
    with load_account(model) as account:
        headers = (
            (name, torch.empty(header.shape, dtype=getattr(torch, header.dtype), device="meta"))
            for name, header in source.headers.items()
        )
        _fill(model, account.watch(headers), account, where)
    account.raise_mismatch(where, _spare(source))
    return account


def match_weights(
    model: nn.Module, checkpoint: Any, where: str, scheme: QuantizationScheme | None
) -> tuple[Any, LoadAccount]:
    """:func:`check_weights`, and what ``scheme`` makes of the tensors: what to load from.

    Raises:
        EngineError: as :func:`check_weights` and :meth:`QuantizationScheme.match`.
    """
    if scheme is None:
        return checkpoint, check_weights(model, checkpoint, where)
    kv_scales.set_aside(model, checkpoint.headers, scheme)
    plain = scheme.plain(checkpoint)
    account = check_weights(model, plain, where)
    placed = kv_scales.place(model, account, checkpoint.headers, scheme)
    matched = scheme.match(model, checkpoint, account)
    if placed or plain is not checkpoint:
        account = check_weights(model, matched, where)
    return matched, account


def _fill(
    model: nn.Module, weights: Iterator[tuple[str, Tensor]], account: LoadAccount, where: str
) -> None:
    """Have the model load its weights itself, as one of the author's methods."""
    try:
        with silent(), torch.no_grad():
            given = model.load_weights(kv_scales.routed(model, weights))  # type: ignore[operator]
            _update_weights(model)
    except (EngineError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # A family may reshape or take apart what it does not expect.
        raise CheckpointError(
            f"load_weights failed on tensor {account.current!r} of {where}: {described(error)}"
        ) from error
    if given is not None:
        hint = "None is expected" + ("; is there a yield in it?" if isgenerator(given) else "")
        raise refuse(model, "load_weights", given, hint)


def load_weights(
    model: nn.Module,
    source: WeightSource,
    where: str,
    device: torch.device,
    *,
    pack: bool = False,
    tp_size: int = 1,
) -> float:
    """Give a model on meta its memory and its weights.

    Args:
        model: as :func:`build_on_meta` made it.
        source: the checkpoint.
        where: its name for messages.
        device: where the model will run.
        pack: whether layers repack, or quantise, their weights for their kernels. Without it, all
            parameters are there under their names, and quantised layers cannot run.
        tp_size: ranks that load the model, each in a process of its own.

    Returns:
        seconds that the packing took.

    Raises:
        WeightsMismatchError: as :func:`check_weights`.
        CorruptCheckpointError: a file cannot be read, or was truncated meanwhile.
    """
    materialize(model, device)
    packer = Packer(model) if pack else None
    with load_account(model) as account, _opened(source, device, tp_size) as tensors:
        # That of packed codes looks at scales itself, also of what becomes numbers.
        packed = isinstance(source, PackedCheckpoint)
        weights = account.watch(tensors if packed else _with_scales_checked(tensors))
        if packer is not None:
            weights = packer.watch(account, weights)
        _fill(model, weights, account, where)
    account.raise_mismatch(where, _spare(source))
    kv_scales.settle(model)
    if packer is not None:
        packer.finish()
    _give_back(device)
    agree(model, device)
    return 0.0 if packer is None else packer.seconds


def _spare(source: WeightSource) -> frozenset[str]:
    """Tensors that a model may leave."""
    return source.spare if isinstance(source, PackedCheckpoint) else frozenset()


def _with_scales_checked(weights: Weights) -> Weights:
    """Pass tensors on.

    Raises:
        ConfigError: one holds scales, and some cannot be used.
    """
    for name, tensor in weights:
        kind = _SCALE_LEAVES.get(name.rpartition(".")[2])
        if kind is not None and tensor.is_floating_point():
            check_scale(name, tensor, kind)
        yield name, tensor


def _give_back(device: torch.device) -> None:
    """Leave the memory of the checkpoint's tensors, and of packed weights, for the cache."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _opened(
    source: WeightSource, device: torch.device, tp_size: int
) -> AbstractContextManager[Iterator[tuple[str, Tensor]]]:
    """The tensors of ``source``, from where they are read fastest."""
    if isinstance(source, PackedCheckpoint | Fp8Checkpoint):
        return _converted(source, _opened(source.source, device, tp_size))
    # One of several ranks copies its part out of the mapped files. If each read all of them, the
    # machine would copy the weights once per rank, which takes longer with eight ranks.
    if device.type == "cuda" and tp_size == 1 and isinstance(source, Checkpoint):
        files = source.safetensors_files()
        largest = max((header.nbytes for header in source.headers.values()), default=0)
        # Tensors from mapped files take no room on the device; two large ones may be neighbours.
        room = torch.cuda.mem_get_info(device)[0] >= AHEAD_BYTES + 2 * largest
        if files is not None and room:
            return closing(read_weights(files, device))
    return nullcontext(source.weights())


@contextmanager
def _converted(
    source: PackedCheckpoint | Fp8Checkpoint,
    opened: AbstractContextManager[Iterator[tuple[str, Tensor]]],
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    with opened as tensors:
        yield source.convert(tensors)


def dummy_weights(model: nn.Module, device: torch.device, seed: int) -> float:
    """Give a model on meta its memory and small random weights; seconds that packing them took."""
    materialize(model, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    for param in dict.fromkeys(model.parameters()):
        if param.dim() == 1:
            # Norm weights near one keep the activations of a deep model finite.
            param.data.fill_(1.0)
        elif not param.is_floating_point():
            param.data.random_(generator=generator)
        else:
            param.data.normal_(0.0, 0.02, generator=generator)
    packer = Packer(model)
    packer.pack_linears()
    _update_weights(model)
    packer.finish()
    _give_back(device)
    agree(model, device)
    return packer.seconds
