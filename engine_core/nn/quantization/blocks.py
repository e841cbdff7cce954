"""Matrices in the blocks of a GGUF file, multiplied as they are, on a CPU and on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine_core.errors import OptionError
from engine_core.kernels import GroupWeight, linear
from engine_core.kernels.block_linear import (
    FORMS,
    block_linear,
    group_weight,
    pack_blocks,
    take_rows,
)
from engine_core.kernels.compiled import available
from engine_core.nn.embedding import VocabularyMethod, VocabularySplit
from engine_core.nn.epilogue import Call, Epilogue
from engine_core.nn.experts import StackedLinear
from engine_core.nn.linear import Linear, LinearMethod
from engine_core.nn.loading import ShapeMismatchError, copy_checked, set_weight_loader
from engine_core.nn.packing import MatrixModule, OneDNNMatrix, onednn_packs
from engine_core.nn.quantization.groups import GroupMethod
from engine_core.nn.quantization.scheme import QuantizationScheme

if TYPE_CHECKING:
    from engine_core.checkpoint import Checkpoint
    from engine_core.nn.loading import LoadAccount

logger = logging.getLogger(__name__)


class BlockMatrix:
    """A matrix of one block type. Products quantise the activations to 8 bits in groups of 32.

    Attributes:
        shape: ``(out_features, in_features)``.
        type_name: such as "Q4_K".
        dtype: what :meth:`dense` and :meth:`take` give.
        nbytes: bytes of the blocks.
    """

    def __init__(self, blocks: Tensor, type_name: str, dtype: torch.dtype) -> None:
        """``blocks [out_features, blocks of a row, bytes of a block]``, as in the file."""
        self.shape = (blocks.shape[0], blocks.shape[1] * FORMS[type_name].file_block)
        self.type_name = type_name
        self.dtype = dtype
        self._panels = pack_blocks(blocks, type_name)
        self.nbytes = self._panels.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ matrix.T + bias``."""
        flat = x.reshape(-1, self.shape[1])
        out = flat.new_empty(flat.shape[0], self.shape[0])
        self.multiply_into(flat, bias, out)
        return out.view(*x.shape[:-1], self.shape[0])

    def multiply_into(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """The same for ``x [M, in]``; ``out [M, out]`` may be columns of a larger tensor."""
        block_linear(x, self._panels, self.type_name, bias, out)

    def take(self, ids: Tensor) -> Tensor:
        """Rows of the matrix: ids ``[...]`` int64 to ``[..., in_features]``."""
        out = torch.empty(ids.numel(), self.shape[1], dtype=self.dtype)
        take_rows(ids.reshape(-1), self._panels, self.type_name, out)
        return out.view(*ids.shape, self.shape[1])

    def dense(self) -> Tensor:
        """The numbers that the blocks stand for."""
        return self.take(torch.arange(self.shape[0]))


class _NumbersMatrix:
    """Numbers beside blocks."""

    def __init__(self, weight: Tensor) -> None:
        self.shape, self.nbytes = weight.shape, weight.nbytes
        self._packed = OneDNNMatrix(weight.clone()) if onednn_packs(weight) else None
        self._weight = None if self._packed else weight.clone()

    def multiply_into(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if self._packed is not None:
            out.copy_(self._packed.multiply(x, bias))
        else:
            out.copy_(nn.functional.linear(x, self.dense(), bias))

    def dense(self) -> Tensor:
        if self._weight is not None:
            return self._weight
        assert self._packed is not None, "one of the two holds the numbers"
        return self._packed.dense()


class _JoinedMatrix:
    """Matrices of one input, one below the other."""

    def __init__(self, parts: Sequence[BlockMatrix | _NumbersMatrix]) -> None:
        self._parts = parts
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self._sizes = [part.shape[0] for part in parts]
        self.nbytes = sum(part.nbytes for part in parts)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = flat.new_empty(flat.shape[0], self.shape[0])
        biases = [None] * len(self._parts) if bias is None else bias.split(self._sizes)
        columns = out.split(self._sizes, dim=1)
        for part, own, mine in zip(self._parts, biases, columns, strict=True):
            part.multiply_into(flat, own, mine)
        return out.view(*x.shape[:-1], out.shape[1])

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self._parts])


class _JoinedWeights:
    """Weights of one input on a GPU, one below the other: a launch for each."""

    def __init__(self, parts: Sequence[Tensor | GroupWeight], deterministic: bool) -> None:
        self._parts, self._deterministic = parts, deterministic
        self._sizes = [len(part) for part in parts]
        self.nbytes = sum(part.nbytes for part in parts)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        biases = [None] * len(self._parts) if bias is None else bias.split(self._sizes)
        each = zip(self._parts, biases, strict=True)
        return torch.cat([linear(x, *part, deterministic=self._deterministic) for part in each], -1)

    def dense(self) -> Tensor:
        return torch.cat([p if isinstance(p, Tensor) else p.dense() for p in self._parts])


class BlockLinearMethod(GroupMethod):
    """A weight whose parts are in blocks, of a type each, or in plain numbers.

    On a GPU a weight of one type is a :class:`~engine_core.kernels.GroupWeight`.
    """

    def __init__(self, types: Mapping[Hashable, str | None], on_cpu: bool) -> None:
        """Types by shard id, or one for all parts; None for plain numbers."""
        self._types, self._on_cpu = types, on_cpu

    def create_weights(
        self,
        layer: Linear,
        in_features: int,
        out_features: int,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> None:
        """Make ``weight``: the bytes of all parts, uint8."""
        # Numbers before blocks, so that they are aligned.
        parts = sorted(layer.part_rows.items(), key=lambda item: self._type(item[0]) is not None)
        self._places: dict[Hashable, tuple[int, tuple[int, ...]]] = {}
        end, sizes = 0, {}
        for shard_id, rows in parts:
            type_name = self._type(shard_id)
            if type_name is None:
                shape: tuple[int, ...] = (rows, in_features * layer.dtype.itemsize)
            else:
                form = FORMS[type_name]
                shape = (rows, in_features // form.file_block, form.file_bytes)
            self._places[shard_id] = end, shape
            sizes[shard_id] = prod(shape)
            end += sizes[shard_id]
        weight = nn.Parameter(
            torch.empty(end, dtype=torch.uint8, device=device), requires_grad=False
        )
        weight.shard_sizes = sizes  # type: ignore[attr-defined]

        def load(param: nn.Parameter, tensor: Tensor, shard_id: Hashable = None) -> None:
            for key, piece in layer.shard(tensor, shard_id).items():
                target = self._part(param, key, layer.dtype)
                if list(piece.shape) != list(target.shape):
                    raise ShapeMismatchError(
                        f"has shape {list(tensor.shape)}, of which part {key!r} is "
                        f"{list(piece.shape)}; the model wants {list(target.shape)}"
                    )
                copy_checked(target, piece)

        set_weight_loader(weight, load)
        layer.register_parameter("weight", weight)

    def _type(self, shard_id: Hashable) -> str | None:
        return (
            self._types[shard_id] if shard_id in self._types else next(iter(self._types.values()))
        )

    def _part(self, weight: Tensor, shard_id: Hashable, dtype: torch.dtype) -> Tensor:
        start, shape = self._places[shard_id]
        part = weight.detach()[start : start + prod(shape)].view(shape)
        return part.view(dtype) if self._type(shard_id) is None else part

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """Blocks in panels, and numbers."""
        size = 0
        for shard_id, (_, shape) in self._places.items():
            type_name = self._type(shard_id)
            if type_name is None:
                size += prod(shape)
            else:
                size += _packed_bytes(type_name, shape[0], shape[1], self._on_cpu)
        return {"weight": size}

    def _runs(self, layer: Linear) -> list[tuple[str | None, list[Hashable]]]:
        """Neighbouring parts of one type."""
        by_type = groupby(layer.part_rows, self._type)
        return [(type_name, list(shard_ids)) for type_name, shard_ids in by_type]

    def process_after_load(self, layer: Linear) -> None:
        """Bring the blocks into a kernel's layout; neighbours of one type become one matrix."""
        weight, dtype = layer.get_parameter("weight"), layer.dtype
        matrices: list[Any] = []
        for type_name, shard_ids in self._runs(layer):
            parts = [self._part(weight, shard_id, dtype) for shard_id in shard_ids]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            if type_name is not None:
                matrices.append(_packed(whole, type_name, dtype, self._on_cpu))
            else:
                matrices.append(_NumbersMatrix(whole) if self._on_cpu else whole.clone())
        joined: Any = matrices[0]
        if len(matrices) > 1 or not isinstance(joined, BlockMatrix | GroupWeight):
            deterministic = layer.context.deterministic
            joined = (
                _JoinedMatrix(matrices) if self._on_cpu else _JoinedWeights(matrices, deterministic)
            )
        layer.set_packed(joined, "weight")

    def declined(self, layer: Linear, epilogue: Epilogue, call: Call) -> str | None:
        """As of any codes; parts of several types are products of their own and fuse nothing."""
        if len(self._runs(layer)) > 1:
            return "its parts are in blocks of several types, each of which is a product"
        return super().declined(layer, epilogue, call)


def _packed(
    blocks: Tensor, type_name: str, dtype: torch.dtype, on_cpu: bool
) -> BlockMatrix | GroupWeight:
    make = BlockMatrix if on_cpu else group_weight
    return make(blocks, type_name, dtype)


def _packed_bytes(type_name: str, rows: int, count: int, on_cpu: bool) -> int:
    """Bytes of a matrix of so many blocks a row, in the layout of a kernel."""
    form = FORMS[type_name]
    size = form.nbytes if on_cpu else form.group_bytes
    return size(rows, count * form.file_block)


class BlockVocabularyMethod:
    """A vocabulary's matrix in blocks of one type."""

    def __init__(self, type_name: str, dtype: torch.dtype, on_cpu: bool) -> None:
        self._type_name, self._dtype, self._on_cpu = type_name, dtype, on_cpu

    def weight(self, layer: VocabularySplit) -> nn.Parameter:
        """A parameter on meta for the blocks, in the place of the layer's ``weight``."""
        form, (rows, columns) = FORMS[self._type_name], layer.weight.shape
        shape = (rows, columns // form.file_block, form.file_bytes)
        weight = nn.Parameter(
            torch.empty(shape, dtype=torch.uint8, device="meta"), requires_grad=False
        )
        set_weight_loader(weight, layer._load)
        return weight

    def pack(self, weight: Tensor) -> BlockMatrix | GroupWeight:
        """The blocks in a kernel's layout."""
        return _packed(weight.detach(), self._type_name, self._dtype, self._on_cpu)

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """The blocks in that layout."""
        rows, count, _ = layer.weight.shape
        return {"weight": _packed_bytes(self._type_name, rows, count, self._on_cpu)}


class GGUFScheme(QuantizationScheme):
    """The blocks of a GGUF file as they are, of linears and of the vocabulary.

    Experts become numbers.
    """

    converts_gguf = False
    takes = "linear layer is in blocks"
    _on_cpu = True

    def check_device(self, device: torch.device) -> None:
        """Refuse a CPU for which nothing can be compiled."""
        self._on_cpu = device.type == "cpu"
        if device.type not in ("cpu", "cuda"):
            raise OptionError(
                f"quantization {self.name!r} has no kernels for {device}; set device='cpu', or "
                "leave it out"
            )
        if self._on_cpu and not available():
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
        fills = account.fills()
        self._types: dict[int, dict[Hashable, str | None]] = {}
        names: dict[int, set[str]] = {}
        for module in model.modules():
            if not isinstance(module, Linear | VocabularySplit) or isinstance(
                module, StackedLinear
            ):
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
        return None if types is None else BlockLinearMethod(types, self._on_cpu)

    def vocabulary_method(self, name: str, layer: VocabularySplit) -> VocabularyMethod | None:
        """Blocks, for a vocabulary in them."""
        types = self._types.get(id(layer))
        type_name = None if types is None else types.get(None)
        if type_name is None:
            return None
        return BlockVocabularyMethod(type_name, layer.dtype, self._on_cpu)
