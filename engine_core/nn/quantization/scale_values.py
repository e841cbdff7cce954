"""Scales that are no numbers to scale by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from engine_core.errors import ConfigError, ErrorCode
from engine_core.nn.quantization.scheme import ScaleKind


class WrongScale(NamedTuple):
    """A tensor with a scale that is none.

    Attributes:
        name: the tensor's.
        value: its scale.
        usable: whether it can be computed with; no tool writes such a scale.
    """

    name: str
    value: float
    usable: bool

    def __str__(self) -> str:
        return f"{self.name} has {self.value:.6g}"


def refused(wrong: WrongScale) -> ConfigError:
    """The error of a checkpoint with such a scale."""
    return ConfigError(
        f"{wrong}, which is no scale; take another checkpoint of the model",
        code=ErrorCode.QUANTIZATION,
    )


def check_scale(name: str, scales: Tensor, kind: ScaleKind) -> None:
    """Refuse scales by which nothing can be computed.

    Each request would end with logits that are not finite.

    Raises:
        ConfigError: one is NaN or infinite, or to divide by and not positive.
    """
    for wrong in wrong_scales({name: kind}, [(name, scales)]):
        if not wrong.usable:
            raise refused(wrong)


def wrong_scales(
    kinds: Mapping[str, ScaleKind], weights: Iterable[tuple[str, Tensor]]
) -> Iterator[WrongScale]:
    """Look at the numbers of scales, which are few beside the codes.

    Args:
        kinds: how the scales are used, by the names of their tensors.
        weights: tensors by name; those of other names are passed over.
    """
    for name, tensor in weights if kinds else ():
        kind = kinds.get(name)
        if kind is None or tensor.numel() == 0:
            continue
        # Of a tensor with a NaN both are.
        low, high = (float(each) for each in tensor.float().aminmax())
        if not math.isfinite(low) or not math.isfinite(high):
            yield WrongScale(name, high if math.isfinite(low) else low, usable=False)
        elif kind == "divided" and low <= 0:
            yield WrongScale(name, low, usable=False)
        elif kind == "multiplied" and low < 0:
            # It is computed as it stands.
            yield WrongScale(name, low, usable=True)
