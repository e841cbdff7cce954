"""Schemes for any checkpoint: int8 and int4 made at load."""

from __future__ import annotations

import torch

from engine_core.nn.embedding import VocabularyMethod, VocabularySplit
from engine_core.nn.linear import Linear, LinearMethod
from engine_core.nn.quantization.groups import GroupAtLoadMethod
from engine_core.nn.quantization.int4 import Int4LinearMethod, Int4Matrix
from engine_core.nn.quantization.int8 import Int8LinearMethod, Int8Matrix
from engine_core.nn.quantization.scheme import QuantizationScheme


class Int8Scheme(QuantizationScheme):
    """Any checkpoint's weights, quantised once they are loaded: with a scale for each row.

    To :class:`Int8Matrix` on a CPU, to a :class:`~engine_core.kernels.GroupWeight` on a GPU, where
    the vocabulary stays as it is.
    """

    takes = (
        "linear layer has a shape that can be multiplied so (inputs in multiples of 32, with int4 "
        "outputs in multiples of 16)"
    )
    _on_cpu = True

    def check_device(self, device: torch.device) -> None:
        """Take note of the device; all will do."""
        self._on_cpu = device.type == "cpu"

    def linear_method(self, name: str, layer: Linear) -> LinearMethod | None:
        """8 bits, for a shape that fits."""
        if not Int8Matrix.fits(layer.matrix_shape):
            return None
        return Int8LinearMethod() if self._on_cpu else GroupAtLoadMethod(8, 0)

    def vocabulary_method(self, name: str, layer: VocabularySplit) -> VocabularyMethod | None:
        """8 bits on a CPU, for a shape that fits."""
        fits = self._on_cpu and Int8Matrix.fits(layer.weight.shape)
        return Int8LinearMethod() if fits else None


class Int4Scheme(Int8Scheme):
    """Any checkpoint's weights, quantised once they are loaded: with a scale for each group.

    To :class:`Int4Matrix` in groups of 32 on a CPU. A GPU has groups of 128 too, where a linear has
    2048 inputs: narrower models lose more by them, and have less to read. The vocabulary's matrices
    take 8 bits on a CPU: with 4 the divergence from float32 would grow by a quarter (see
    ``benchmarks/README.md``).
    """

    def linear_method(self, name: str, layer: Linear) -> LinearMethod | None:
        """4 bits, for a shape that fits."""
        shape = layer.matrix_shape
        if not Int4Matrix.fits(shape):
            return None
        if self._on_cpu:
            return Int4LinearMethod()
        wide = shape[1] >= 2048 and shape[1] % 128 == 0
        return GroupAtLoadMethod(4, 128 if wide else 32)
