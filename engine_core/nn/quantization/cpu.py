"""Schemes for any checkpoint: int8 and int4 made at load, and a GGUF file's blocks on a CPU."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from torch import nn

from engine_core.errors import OptionError
from engine_core.kernels import gpu_of
from engine_core.kernels.block_linear import FORMS
from engine_core.kernels.compiled import available
from engine_core.nn.embedding import VocabularyMethod, VocabularySplit
from engine_core.nn.linear import Linear, LinearMethod
from engine_core.nn.quantization.blocks import BlockLinearMethod, BlockVocabularyMethod
from engine_core.nn.quantization.groups import GroupAtLoadMethod, warn_of_slower
from engine_core.nn.quantization.int4 import Int4LinearMethod, Int4Matrix
from engine_core.nn.quantization.int8 import Int8LinearMethod, Int8Matrix
from engine_core.nn.quantization.scheme import QuantizationScheme

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from engine_core.checkpoint import Checkpoint
    from engine_core.nn.loading import LoadAccount


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
        """Say where a GPU gains no time."""
        self._on_cpu = device.type == "cpu"
        if not self._on_cpu and torch.cuda.is_available():
            warn_of_slower(self.name, gpu_of(device))

    def linear_method(self, name: str, layer: Linear) -> LinearMethod | None:
        """8 bits, for a shape that fits."""
        if not Int8Matrix.fits(layer.matrix_shape):
            return None
        return Int8LinearMethod() if self._on_cpu else self._grouped(layer, 8, 0)

    def _grouped(self, layer: Linear, bits: int, group_size: int) -> LinearMethod:
        if layer.matrix_shape != layer.weight.shape:
            raise OptionError(
                f"quantization {self.name!r} has no kernel for experts on a GPU; take 'fp8', or "
                "leave it out"
            )
        return GroupAtLoadMethod(bits, group_size)

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
        return self._grouped(layer, 4, 128 if wide else 32)


class GGUFScheme(QuantizationScheme):
    """The blocks of a GGUF file as they are, of linears and of the vocabulary."""

    converts_gguf = False
    takes = "linear layer is in blocks"

    def check_device(self, device: torch.device) -> None:
        """Refuse what is no CPU, and a CPU for which nothing can be compiled."""
        if device.type != "cpu":
            raise OptionError(
                f"quantization {self.name!r} is multiplied by kernels for CPUs and cannot run "
                f"on {device}; set device='cpu', or leave it out"
            )
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
