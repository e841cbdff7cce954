"""Eight-bit floats: e4m3 weights with a scale for each row, or for each 128 of its columns."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from engine_core.kernels import Fp8Weight
from engine_core.nn.linear import Linear, LinearMethod, UnquantizedLinearMethod
from engine_core.nn.packing import MatrixModule, PackedMatrix
from engine_core.nn.quantization.scheme import QuantizationScheme

logger = logging.getLogger(__name__)


class Fp8LinearMethod(UnquantizedLinearMethod):
    """Weights that are quantised to :class:`Fp8Weight` once they are loaded.

    A CPU, which has no kernel for them, multiplies by the numbers that the codes stand for.
    """

    fp8 = True

    def pack(self, weight: Tensor) -> PackedMatrix | None:
        """The quantised weight."""
        matrix = Fp8Weight.quantized(weight)
        if weight.is_cuda:
            return matrix
        weight.copy_(matrix.dense())
        return super().pack(weight)

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """Codes and scales instead of the weight, where it is not on a CPU."""
        n, k = layer.weight.shape
        return {} if self.on_cpu else {"weight": n * (k + 4)}

    def __init__(self, on_cpu: bool = False) -> None:
        self.on_cpu = on_cpu


class Fp8Scheme(QuantizationScheme):
    """Any checkpoint's linears, quantised to e4m3 once they are loaded; not the vocabulary."""

    takes = "linear layer has inputs and outputs in multiples of 16"
    _on_cpu = False

    def check_device(self, device: torch.device) -> None:
        """Say that a CPU gains nothing."""
        self._on_cpu = device.type == "cpu"
        if self._on_cpu:
            logger.warning(
                "quantization %r: no kernel of a CPU multiplies e4m3; the weights are quantised "
                "and turned back, which saves no memory. 'int8' and 'int4' do", self.name
            )  # fmt: skip

    def linear_method(self, name: str, layer: Linear) -> LinearMethod | None:
        """8-bit floats, for a shape that fits."""
        n, k = layer.weight.shape
        return Fp8LinearMethod(self._on_cpu) if n % 16 == k % 16 == 0 else None
