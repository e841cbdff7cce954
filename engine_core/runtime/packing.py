"""Packing of weights once they are loaded, and the bytes that they then take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from engine_core.kernels.half_linear import HALVES
from engine_core.nn.embedding import Embedding, VocabularySplit
from engine_core.nn.linear import Linear, UnquantizedLinearMethod
from engine_core.nn.loading import LoadAccount
from engine_core.nn.packing import (
    HalfMatrix,
    PackedMatrix,
    keeps_halves,
    onednn_multiplies,
    pack_matrix,
)


def weight_bytes(
    model: nn.Module, account: LoadAccount | None = None, *, on_cpu: bool = False
) -> int:
    """Bytes of the model's weights as they will be packed; shared ones once.

    The arguments are as for :func:`packed_sizes`.
    """
    return sum(packed_sizes(model, account, on_cpu=on_cpu).values())


def packed_sizes(
    model: nn.Module, account: LoadAccount | None = None, *, on_cpu: bool = False
) -> dict[int, int]:
    """Bytes of each parameter as it will be packed, by its id.

    Args:
        model: on meta.
        account: what fills the parameters, of which a CPU may keep matrices in the 16 bits in which
            they are stored; None for another device, or if that is not known.
        on_cpu: whether a CPU runs it.
    """
    sizes = {id(param): param.numel() * param.itemsize for param in model.parameters()}
    if on_cpu:
        sizes |= _kept_twice(model)
    if account is not None:
        sizes |= _halves(model, account)
    for module in model.modules():
        given: Mapping[str, int] = {}
        if isinstance(module, Linear):
            given = module.packed_sizes()
        elif isinstance(module, VocabularySplit) and module.method is not None:
            given = module.method.packed_sizes(module)
        for name, size in given.items():
            sizes[id(module.get_parameter(name))] = size
    return sizes


def _halves(model: nn.Module, account: LoadAccount) -> Iterator[tuple[int, int]]:
    """Ids and bytes of the matrices that :class:`Packer` keeps in 16 bits."""
    users = _users(model)

    def kept(param: nn.Parameter, others: int) -> bool:
        stored = account.stored_dtype(param)
        halves = stored in HALVES and keeps_halves(param.dtype)
        return halves and users[id(param)] == others

    for module in model.modules():
        if isinstance(module, Linear):
            method = type(module.method)
            plain = getattr(method, "pack", None) is UnquantizedLinearMethod.pack
            if plain and kept(module.weight, 1):
                shape = module.matrix_shape
                count = module.weight.numel() // max(shape.numel(), 1)
                yield id(module.weight), count * HalfMatrix.size(shape)
    for key, modules in _vocabularies(model).items():
        # An embedding alone is only looked up, and stays as it is.
        heads = any(not isinstance(module, Embedding) for module in modules)
        plain = all(module.method is None for module in modules)
        if heads and plain and kept(modules[0].weight, len(modules)):
            yield key, HalfMatrix.size(modules[0].weight.shape)


def _kept_twice(model: nn.Module) -> Iterator[tuple[int, int]]:
    """Ids and bytes of vocabularies that others look up beside their head's own matrix."""
    users = _users(model)
    for key, modules in _vocabularies(model).items():
        weight = modules[0].weight
        heads = sum(not isinstance(module, Embedding) for module in modules)
        plain = any(module.method is None for module in modules)
        if 0 < heads < users[key] and plain and onednn_multiplies(weight.dtype):
            yield key, 2 * weight.numel() * weight.itemsize


def _vocabularies(model: nn.Module) -> dict[int, list[VocabularySplit]]:
    """The modules that share a vocabulary's weight, by its id."""
    found: dict[int, list[VocabularySplit]] = {}
    for module in model.modules():
        if isinstance(module, VocabularySplit):
            found.setdefault(id(module.weight), []).append(module)
    return found


def _users(model: nn.Module) -> Counter[int]:
    """How many modules have each parameter, by its id."""
    return Counter(id(param) for m in model.modules() for param in m._parameters.values())


class Packer:
    """Packs layers as soon as all of their tensors are loaded.

    So memory never holds all weights both unpacked and packed.

    Attributes:
        seconds: what the packing took so far.
    """

    def __init__(self, model: nn.Module) -> None:
        self.seconds = 0.0
        users, modules = _users(model), list(model.modules())
        # Asked for all linears after each of a thousand tensors, this took half a second.
        self._params = {
            module: tuple(module.parameters()) for module in modules if isinstance(module, Linear)
        }
        for linear, own in list(self._params.items()):
            if any(users[id(param)] != 1 for param in own):
                del self._params[linear]
        self._linears = list(self._params)
        for linear in self._linears:
            linear.method.prepare_load(linear)
        self._owners = {id(p): module for module, own in self._params.items() for p in own}
        self._vocabularies = _vocabularies(model)
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
                if all(account.is_filled(param) for param in self._params[linear])
            ]
            for linear in ready:
                self._linears.remove(linear)
                for param in self._params.pop(linear):
                    del self._owners[id(param)]
            self._pack(ready)

    def pack_linears(self) -> None:
        """Pack the linears that are left."""
        self._params.clear()
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
