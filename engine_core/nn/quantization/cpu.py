"""The schemes of the core, for CPUs: int8 and int4 by torch's kernels, a GGUF file's blocks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from torch import nn

from engine_core.errors import OptionError
from engine_core.kernels.block_linear import FORMS
from engine_core.kernels.compiled import available
from engine_core.nn.embedding import VocabularyMethod, VocabularySplit
from engine_core.nn.linear import Linear, LinearMethod
from engine_core.nn.quantization.blocks import BlockLinearMethod, BlockVocabularyMethod
from engine_core.nn.quantization.int4 import Int4LinearMethod, Int4Matrix
from engine_core.nn.quantization.int8 import Int8LinearMethod, Int8Matrix
from engine_core.nn.quantization.scheme import QuantizationScheme

logger = logging.getLogger(__name__)

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
                f"quantization {self.name!r} is multiplied by kernels for CPUs and cannot run "
                f"on {device}; set device='cpu', or leave it out"
            )


class Int8Scheme(_CPUScheme):
    """Any checkpoint's weights, quantised to :class:`Int8Matrix` once they are loaded."""

    def linear_method(self, name: str, layer: Linear) -> LinearMethod | None:
        """8 bits, for a shape that fits."""
        return Int8LinearMethod() if Int8Matrix.fits(layer.matrix_shape) else None

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
        return Int4LinearMethod() if Int4Matrix.fits(layer.matrix_shape) else None


class GGUFScheme(_CPUScheme):
    """The blocks of a GGUF file as they are, of linears and of the vocabulary."""

    converts_gguf = False

    def check_device(self, device: torch.device) -> None:
        """Refuse what is no CPU, and a CPU for which nothing can be compiled."""
        super().check_device(device)
        if not available():
            raise OptionError(
                f"quantization {self.name!r} multiplies blocks by kernels that Numba compiles, "
                "which is not installed: pip install 'engine-core-llm[cpu]', or leave it out"
            )

    def check_checkpoint(self, checkpoint: Checkpoint, model: str) -> None:
        """Refuse what has no blocks."""
        if checkpoint.gguf is None or not checkpoint.gguf.block_types:
            has = "is none" if checkpoint.gguf is None else f"has none of {', '.join(FORMS)}"
            raise OptionError(
                f"quantization {self.name!r} keeps the blocks of a GGUF file, and {model} {has}; "
                "'int8' and 'int4' quantise any checkpoint"
            )

    def prepare(self, model: nn.Module) -> None:
        """Leave the layers plain: the types of the tensors that fill them say who is taken."""

    def match(self, model: nn.Module, checkpoint: Checkpoint, account: LoadAccount) -> Checkpoint:
        """Keep the blocks of each matrix that is filled from whole tensors, each by itself."""
        assert checkpoint.gguf is not None, "check_checkpoint asks for a GGUF file"
        types = checkpoint.gguf.block_types
        fills = Counter(name for param in model.parameters() for name in account.sources(param))
        self._types: dict[int, dict[Hashable, str | None]] = {}
        names: dict[int, set[str]] = {}
        for module in model.modules():
            if not isinstance(module, Linear | VocabularySplit):
                continue
            shards = account.shards(module.weight)
            columns = module.weight.shape[1]
            found: dict[Hashable, str | None] = {}
            for shard_id, (first, *others) in shards.items():
                kept = not others and fills[first] == 1 and first in types
                fits = kept and columns % FORMS[types[first]].file_block == 0
                found[shard_id] = types[first] if fits else None
            if any(found.values()):
                self._types[id(module)] = found
                names[id(module)] = {
                    name for key, (name, *_) in shards.items() if found[key] is not None
                }
        taken: list[nn.Module] = [*self.give_methods(model), *self._take_vocabulary(model)]
        matched = checkpoint.keeping_blocks({name for layer in taken for name in names[id(layer)]})
        assert matched.gguf is not None, "blocks are kept of a GGUF file"
        for type_name, unpacked in matched.gguf.unpacked.items():
            logger.warning("%d tensors in %s blocks are unpacked, such as %s: they take more memory"
                           " than in the file", len(unpacked), type_name, unpacked[0])  # fmt: skip
        return matched

    def _take_vocabulary(self, model: nn.Module) -> list[VocabularySplit]:
        """Give each vocabulary's matrix that has a method a parameter for its blocks."""
        users: dict[int, list[nn.Module]] = {}
        for module in model.modules():
            for param in module._parameters.values():
                users.setdefault(id(param), []).append(module)
        taken = []
        for modules in users.values():
            layers = [module for module in modules if isinstance(module, VocabularySplit)]
            methods = [layer.method for layer in layers if layer.method is not None]
            if len(methods) < len(modules):
                for layer in layers:
                    layer.method = None
                continue
            assert isinstance(methods[0], BlockVocabularyMethod), "vocabulary_method gives these"
            weight = methods[0].weight(layers[0])
            for layer in layers:
                layer.weight = weight
            taken += layers
        return taken

    def linear_method(self, name: str, layer: Linear) -> LinearMethod | None:
        """Blocks, for a linear that has them."""
        types = self._types.get(id(layer))
        return None if types is None else BlockLinearMethod(types)

    def vocabulary_method(self, name: str, layer: VocabularySplit) -> VocabularyMethod | None:
        """Blocks, for a vocabulary in them."""
        types = self._types.get(id(layer))
        type_name = None if types is None else types.get(None)
        return None if type_name is None else BlockVocabularyMethod(type_name, layer.dtype)
