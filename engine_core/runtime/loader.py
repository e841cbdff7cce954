"""Builds a model and fills it from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine_core.configs import ModelConfig
from engine_core.errors import CheckpointError, ConfigError, EngineError
from engine_core.nn.linear import Linear
from engine_core.nn.loading import load_account, materialize
from engine_core.step_context import BuildContext, StepContextManager, building


class WeightSource(Protocol):
    """What the loader asks of a checkpoint."""

    @property
    def headers(self) -> Mapping[str, Any]:
        """Names to objects with ``dtype`` and ``shape``."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, one after another."""


def build_on_meta(model_class: type, model_config: ModelConfig, context: BuildContext) -> nn.Module:
    """The model without memory for its parameters.

    Raises:
        ConfigError: its class cannot be built from this config.
    """
    try:
        with building(context), torch.device("meta"):
            model: nn.Module = model_class(
                model_config.hf_config,
                StepContextManager(context),
                dtype=context.dtype,
                device=torch.device("meta"),
            )
    except EngineError:
        raise
    except (
        Exception
    ) as error:  # Whatever a family's code trips over, the config is all it was given.
        raise ConfigError(
            f"{model_class.__name__} cannot be built from this config: "
            f"{type(error).__name__}: {error}"
        ) from error
    return model.eval()


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the model's parameters, shared ones once."""
    return sum(param.numel() * param.itemsize for param in dict.fromkeys(model.parameters()))


def check_weights(model: nn.Module, source: WeightSource, where: str) -> None:
    """Load a model on meta from headers alone.

    Raises:
        WeightsMismatchError: tensors are missing, unexpected or of the wrong shape or kind.
        CheckpointError: the model's own ``load_weights`` fails on a tensor.
    """
    with load_account(model) as account:
        headers = (
            (name, torch.empty(header.shape, dtype=getattr(torch, header.dtype), device="meta"))
            for name, header in source.headers.items()
        )
        try:
            model.load_weights(account.watch(headers))  # type: ignore[operator]
        except EngineError:
            raise
        except Exception as error:  # A family may reshape or take apart what it does not expect.
            raise CheckpointError(
                f"{type(model).__name__}.load_weights failed on tensor {account.current!r} of "
                f"{where}: {type(error).__name__}: {error}"
            ) from error
    account.raise_mismatch(where)


def load_weights(model: nn.Module, source: WeightSource, where: str, device: torch.device) -> None:
    """Give a model on meta its memory and its weights.

    Raises:
        WeightsMismatchError: as :func:`check_weights`.
    """
    materialize(model, device)
    with load_account(model) as account:
        model.load_weights(account.watch(source.weights()))  # type: ignore[operator]
    account.raise_mismatch(where)
    _process_after_load(model)


def dummy_weights(model: nn.Module, device: torch.device, seed: int) -> None:
    """Give a model on meta its memory and small random weights."""
    materialize(model, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    for param in dict.fromkeys(model.parameters()):
        if param.dim() == 1:
            # Norm weights near one keep the activations of a deep model finite.
            param.data.fill_(1.0)
        else:
            param.data.normal_(0.0, 0.02, generator=generator)
    _process_after_load(model)


def _process_after_load(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Linear):
            module.method.process_after_load(module)
