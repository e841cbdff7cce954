"""Parts of models that see and hear."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on ``device``, without waiting for what the device is doing."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def finished(parts: Generator[Any, Any, _T]) -> _T:
    """The result of work in parts, all of which are done now."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: _T = end.value
            return result
