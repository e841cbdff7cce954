"""The contract of a weight that is kept as codes, of fewer bits than numbers have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from engine_core.kernels.gpu import GPU
from engine_core.kernels.linear.tiles import Tile


class CodedWeight(ABC):
    """A matrix ``[N, K]`` of codes, which operations of linears take in a plain weight's place.

    Few rows are multiplied by a kernel that reads the codes. Many rows are multiplied by
    :meth:`product`, or else by the numbers.

    Attributes:
        dtype: of what is multiplied by it.
    """

    __slots__ = ()
    dtype: torch.dtype

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """``(N, K)``."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all that it keeps."""

    @abstractmethod
    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The numbers ``[N, K]`` that the codes stand for, computed in float32, rounded once."""

    @abstractmethod
    def tile(self, rows: int, gated: bool, gpu: GPU | None) -> Tile | None:
        """The tile of a kernel for so few rows of 16 bits; None if there is none."""

    @abstractmethod
    def reader(self) -> Any:
        """The reader that brings tiles to it (:mod:`engine_core.kernels.linear.readers`)."""

    @property
    def multiplies_codes(self) -> bool:
        """Whether many rows are quantised too, and multiplied by the codes at twice the rate."""
        return False

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """``x [..., K] @ weight.T + bias`` without numbers; None if they are as fast."""
        return None

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``."""
        out = self.product(x, bias)
        return torch.nn.functional.linear(x, self.numbers(x.dtype), bias) if out is None else out

    def dense(self) -> Tensor:
        """The numbers in the weight's own dtype."""
        return self.numbers(self.dtype)

    def __len__(self) -> int:
        return self.shape[0]


def numbers_of(weight: Tensor | CodedWeight, dtype: torch.dtype) -> Tensor:
    """A weight's numbers ``[N, K]``; a plain one as it is."""
    return weight.numbers(dtype) if isinstance(weight, CodedWeight) else weight
