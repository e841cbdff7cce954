"""Which weights of a model are quantised, and their packing once they are loaded."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from engine_core.errors import OptionError
from engine_core.nn.embedding import Embedding, VocabularySplit
from engine_core.nn.linear import Linear
from engine_core.nn.loading import LoadAccount
from engine_core.nn.packing import OneDNNMatrix, PackedMatrix, onednn_packs
from engine_core.nn.quantization import (
    BlockLinearMethod,
    Int4LinearMethod,
    Int4Matrix,
    Int8LinearMethod,
    Int8Matrix,
)

if TYPE_CHECKING:
    from engine_core.configs import Quantization

logger = logging.getLogger(__name__)

_Fits = {"int8": Int8Matrix.fits, "int4": Int4Matrix.fits, "gguf": Int4Matrix.fits}


def quantize(
    model: nn.Module, mode: Quantization, blocks: Collection[nn.Parameter] | None = None
) -> list[nn.Parameter]:
    """Give the layers of a model on meta the methods of a quantisation.

    A layer stays as it is if torch's kernels cannot multiply its shape, if another module shares
    its weight, or if the model's class names it, or a module around it, in ``quantization_skip``.
    The vocabulary's matrices take 8 bits with ``int8`` and ``int4``: with 4 the divergence from
    float32 would grow by a quarter (see ``benchmarks/README.md``).

    Args:
        model: on meta, nothing is loaded yet.
        mode: which.
        blocks: for ``gguf`` the weights that the file has in 4-bit blocks.

    Returns:
        the weights that will not be loaded as numbers, but as blocks.

    Raises:
        OptionError: nothing at all can be quantised.
    """
    skip: Collection[str] = getattr(model, "quantization_skip", ())
    users = Counter(id(param) for m in model.modules() for param in m._parameters.values())
    replaced: list[nn.Parameter] = []
    left: list[str] = []
    count = 0
    for name, module in model.named_modules():
        if not isinstance(module, Linear | VocabularySplit):
            continue
        skipped = any(f".{part}." in f".{name}." for part in skip)
        weight = module.weight
        if isinstance(module, VocabularySplit):
            module.quantized = mode != "gguf" and not skipped and Int8Matrix.fits(weight.shape)
            continue
        known = blocks is None or any(weight is block for block in blocks)
        if skipped or not known or users[id(weight)] > 1 or not _Fits[mode](weight.shape):
            left.append(name)
            continue
        count += 1
        if mode == "gguf":
            replaced.append(weight)
        module.set_method(_METHODS[mode]())
    if not count:
        what = (
            "the file has no linear layer in Q4_0, Q4_1 or Q4_K whose shape torch can multiply"
            if mode == "gguf"
            else "no linear layer has a shape that torch can multiply so (inputs in multiples of "
            "32, with int4 outputs in multiples of 16)"
        )
        raise OptionError(f"quantization {mode!r}: {what}; leave it out")
    if left:
        logger.info("quantization %s leaves %d of %d linears as they are: %s", mode, len(left),
                    len(left) + count, ", ".join(left[:4]))  # fmt: skip
    return replaced


_METHODS: dict[str, type[Int8LinearMethod | Int4LinearMethod | BlockLinearMethod]] = {
    "int8": Int8LinearMethod,
    "int4": Int4LinearMethod,
    "gguf": BlockLinearMethod,
}


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the model's weights as they will be packed; shared ones once."""
    sizes = {id(param): param.numel() * param.itemsize for param in model.parameters()}
    for module in model.modules():
        if isinstance(module, Linear) and isinstance(module.method, Int4LinearMethod):
            sizes[id(module.weight)] = Int4Matrix.size(module.weight.shape)
        elif (isinstance(module, Linear) and isinstance(module.method, Int8LinearMethod)) or (
            isinstance(module, VocabularySplit) and module.quantized
        ):
            sizes[id(module.weight)] = Int8Matrix.size(module.weight.shape)
        elif isinstance(module, Linear) and isinstance(module.method, BlockLinearMethod):
            shape = module.get_parameter("qweight").shape
            sizes[id(module.qweight)] = Int4Matrix.size(shape)
            sizes[id(module.scales)] = sizes[id(module.minima)] = 0
    return sum(sizes.values())


class Packer:
    """Packs layers as soon as all that they consist of is loaded.

    So the weights of a model are never there as a whole both before and after it.

    Attributes:
        seconds: what the packing took so far.
    """

    def __init__(self, model: nn.Module) -> None:
        self.seconds = 0.0
        users = Counter(id(param) for m in model.modules() for param in m._parameters.values())
        self._linears = [
            module
            for module in model.modules()
            if isinstance(module, Linear) and all(users[id(p)] == 1 for p in module.parameters())
        ]
        self._vocabularies: dict[int, list[VocabularySplit]] = {}
        for module in model.modules():
            if isinstance(module, VocabularySplit):
                self._vocabularies.setdefault(id(module.weight), []).append(module)
        self._only_vocabularies = {
            key for key, modules in self._vocabularies.items() if users[key] == len(modules)
        }

    def watch(
        self, account: LoadAccount, weights: Iterator[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Pass tensors on; before each, pack the layers that are whole by now."""
        for item in weights:
            yield item
            ready = [
                linear
                for linear in self._linears
                if all(account.is_filled(param) for param in linear.parameters())
            ]
            self._pack(ready)
            if ready:
                self._linears = [linear for linear in self._linears if linear not in ready]

    def finish(self) -> None:
        """Pack what is left, and the vocabulary."""
        self._pack(self._linears)
        self._linears = []
        start = time.perf_counter()
        for key, modules in self._vocabularies.items():
            _pack_vocabulary(modules, key in self._only_vocabularies)
        self._vocabularies.clear()
        self.seconds += time.perf_counter() - start

    def _pack(self, linears: list[Linear]) -> None:
        start = time.perf_counter()
        for linear in linears:
            linear.method.process_after_load(linear)
        self.seconds += time.perf_counter() - start


def _pack_vocabulary(modules: list[VocabularySplit], alone: bool) -> None:
    """Pack one matrix for all the modules that share it; ``alone`` if nobody else does."""
    weight = modules[0].weight
    packed: PackedMatrix
    if all(module.quantized for module in modules) and alone:
        packed = Int8Matrix(weight)
        for module in modules:
            module.set_packed(packed, "weight")
        return
    heads = [module for module in modules if not isinstance(module, Embedding)]
    if heads and onednn_packs(weight):
        packed = OneDNNMatrix(weight)
        # An embedding looks its rows up in the weight as it is.
        given_up = ("weight",) if alone and len(heads) == len(modules) else ()
        for head in heads:
            head.set_packed(packed, *given_up)
