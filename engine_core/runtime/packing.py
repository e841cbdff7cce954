"""Packing of weights once they are loaded, and the bytes that they then take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from engine_core.nn.embedding import Embedding, VocabularySplit
from engine_core.nn.linear import Linear
from engine_core.nn.loading import LoadAccount
from engine_core.nn.packing import HalfMatrix, PackedMatrix, pack_matrix


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the model's weights as they will be packed; shared ones once."""
    return sum(packed_sizes(model).values())


def packed_sizes(model: nn.Module) -> dict[int, int]:
    """Bytes of each parameter as it will be packed, by its id."""
    sizes = {id(param): param.numel() * param.itemsize for param in model.parameters()}
    for module in model.modules():
        given: Mapping[str, int] = {}
        if isinstance(module, Linear):
            given = module.packed_sizes()
        elif isinstance(module, VocabularySplit) and module.method is not None:
            given = module.method.packed_sizes(module)
        for name, size in given.items():
            sizes[id(module.get_parameter(name))] = size
    return sizes


class Packer:
    """Packs layers as soon as all of their tensors are loaded.

    So memory never holds all weights both unpacked and packed.

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
        # Asked for all linears after each of a thousand tensors, this took half a second.
        self._owners = {id(p): module for module in self._linears for p in module.parameters()}
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
        """Pass tensors on, and pack each layer once the last of its tensors was taken."""
        for item in weights:
            account.noted.clear()
            yield item
            touched = {self._owners[key]: None for key in account.noted if key in self._owners}
            ready = [
                linear
                for linear in touched
                if all(account.is_filled(param) for param in linear.parameters())
            ]
            for linear in ready:
                self._linears.remove(linear)
                for param in linear.parameters():
                    del self._owners[id(param)]
            self._pack(ready)

    def pack_linears(self) -> None:
        """Pack the linears that are left."""
        self._pack(self._linears)
        self._linears = []

    def finish(self) -> None:
        """Pack what is left, and the vocabulary."""
        self.pack_linears()
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
    packed: PackedMatrix | None
    method = modules[0].method
    if method is not None and alone and all(module.method is not None for module in modules):
        packed = method.pack(weight)
        for module in modules:
            module.set_packed(packed, "weight")
        return
    heads = [module for module in modules if not isinstance(module, Embedding)]
    packed = pack_matrix(weight) if heads else None
    if packed is None:
        return
    # An embedding can look its rows up in a matrix of 16 bits, else in the weight as it is.
    takers = modules if isinstance(packed, HalfMatrix) else heads
    given_up = ("weight",) if alone and len(takers) == len(modules) else ()
    for module in takers:
        module.set_packed(packed, *given_up)
