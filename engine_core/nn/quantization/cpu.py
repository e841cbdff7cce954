"""The schemes of the core: int8, int4 and a GGUF file's blocks, by torch's CPU kernels."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import nn

from engine_core.errors import OptionError
from engine_core.nn.embedding import VocabularyMethod, VocabularySplit
from engine_core.nn.linear import Linear, LinearMethod
from engine_core.nn.quantization.blocks import BlockLinearMethod
from engine_core.nn.quantization.int4 import Int4LinearMethod, Int4Matrix
from engine_core.nn.quantization.int8 import Int8LinearMethod, Int8Matrix
from engine_core.nn.quantization.scheme import QuantizationScheme

if TYPE_CHECKING:
    from engine_core.checkpoint import Checkpoint
    from engine_core.nn.loading import LoadAccount


class _CPUScheme(QuantizationScheme):
    takes = (
        "linear layer has a shape that torch can multiply so (inputs in multiples of 32, with int4 "
        "outputs in multiples of 16)"
    )

    def check_device(self, device: torch.device) -> None:
        """Refuse what is no CPU."""
        if device.type != "cpu":
            raise OptionError(
                f"quantization {self.name!r} is multiplied by torch's CPU kernels and cannot run "
                f"on {device}; set device='cpu', or leave it out"
            )


class Int8Scheme(_CPUScheme):
    """Any checkpoint's weights, quantised to :class:`Int8Matrix` once they are loaded."""

    def linear_method(self, name: str, layer: Linear) -> LinearMethod | None:
        """8 bits, for a shape that fits."""
        return Int8LinearMethod() if Int8Matrix.fits(layer.weight.shape) else None

    def vocabulary_method(self, name: str, layer: VocabularySplit) -> VocabularyMethod | None:
        """8 bits, for a shape that fits."""
        return Int8LinearMethod() if Int8Matrix.fits(layer.weight.shape) else None


class Int4Scheme(Int8Scheme):
    """Any checkpoint's weights, quantised to :class:`Int4Matrix` once they are loaded.

    The vocabulary's matrices take 8 bits: with 4 the divergence from float32 would grow by a
    quarter (see ``benchmarks/README.md``).
    """

    def linear_method(self, name: str, layer: Linear) -> LinearMethod | None:
        """4 bits, for a shape that fits."""
        return Int4LinearMethod() if Int4Matrix.fits(layer.weight.shape) else None


class GGUFScheme(_CPUScheme):
    """The 4-bit blocks of a GGUF file as they are; the vocabulary in plain numbers."""

    converts_gguf = False
    takes = (
        "linear layer of the file is in Q4_0, Q4_1 or Q4_K and of a shape that torch can multiply"
    )

    def check_checkpoint(self, checkpoint: Checkpoint, model: str) -> None:
        """Refuse what is no GGUF file."""
        if checkpoint.gguf is None:
            raise OptionError(
                f"quantization {self.name!r} keeps the blocks of a GGUF file, and {model} is none; "
                "'int8' and 'int4' quantise any checkpoint"
            )

    def prepare(self, model: nn.Module) -> None:
        """Leave the layers plain: the types of the tensors that fill them say who is taken."""

    def match(self, model: nn.Module, checkpoint: Checkpoint, account: LoadAccount) -> Checkpoint:
        """Keep the blocks of each linear all of whose tensors are in blocks."""
        assert checkpoint.gguf is not None, "check_checkpoint asks for a GGUF file"
        tensors = {
            id(layer): account.sources(layer.weight)
            for layer in model.modules()
            if isinstance(layer, Linear)
        }
        self._in_blocks: Collection[int] = {
            layer for layer, names in tensors.items() if names <= checkpoint.gguf.block_tensors
        }
        taken = self.give_methods(model)
        return checkpoint.keeping_blocks({name for layer in taken for name in tensors[id(layer)]})

    def linear_method(self, name: str, layer: Linear) -> LinearMethod | None:
        """Blocks, for a linear that has them and whose shape fits."""
        fits = id(layer) in self._in_blocks and Int4Matrix.fits(layer.weight.shape)
        return BlockLinearMethod() if fits else None
