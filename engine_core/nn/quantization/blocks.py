"""Matrices in the blocks of a GGUF file, multiplied as they are."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn

from engine_core.kernels import DeferredRMSNorm
from engine_core.kernels.block_linear import FORMS, block_linear, pack_blocks, take_rows
from engine_core.nn.embedding import VocabularySplit
from engine_core.nn.linear import Linear, LinearMethod
from engine_core.nn.loading import ShapeMismatchError, copy_checked, set_weight_loader
from engine_core.nn.packing import MatrixModule, OneDNNMatrix, onednn_packs


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


class BlockLinearMethod(LinearMethod):
    """A weight whose parts are in blocks, of a type each, or in plain numbers."""

    def __init__(self, types: Mapping[Hashable, str | None]) -> None:
        """Types by shard id, or one for all parts; None for plain numbers."""
        self._types = types

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
                form = FORMS[type_name]
                size += form.nbytes(shape[0], shape[1] * form.file_block)
        return {"weight": size}

    def process_after_load(self, layer: Linear) -> None:
        """Bring the blocks into panels; neighbours of one type become one matrix."""
        weight = layer.get_parameter("weight")
        matrices: list[BlockMatrix | _NumbersMatrix] = []
        runs: list[tuple[str | None, list[Tensor]]] = []
        for shard_id in layer.part_rows:
            type_name = self._type(shard_id)
            if not runs or runs[-1][0] != type_name:
                runs.append((type_name, []))
            runs[-1][1].append(self._part(weight, shard_id, layer.dtype))
        for type_name, parts in runs:
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            matrices.append(
                _NumbersMatrix(whole)
                if type_name is None
                else BlockMatrix(whole, type_name, layer.dtype)
            )
        first = matrices[0]
        if len(matrices) == 1 and isinstance(first, BlockMatrix):
            layer.set_packed(first, "weight")
        else:
            layer.set_packed(_JoinedMatrix(matrices), "weight")

    def apply(self, layer: Linear, x: Tensor | DeferredRMSNorm, bias: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``."""
        assert isinstance(x, Tensor), "it agrees to no norm without its division"
        assert layer.packed is not None, "the weights are packed after they are loaded"
        return layer.packed.multiply(x, bias)


class BlockVocabularyMethod:
    """A vocabulary's matrix in blocks of one type."""

    def __init__(self, type_name: str, dtype: torch.dtype) -> None:
        self._type_name = type_name
        self._dtype = dtype

    def weight(self, layer: VocabularySplit) -> nn.Parameter:
        """A parameter on meta for the blocks, in the place of the layer's ``weight``."""
        form, (rows, columns) = FORMS[self._type_name], layer.weight.shape
        shape = (rows, columns // form.file_block, form.file_bytes)
        weight = nn.Parameter(
            torch.empty(shape, dtype=torch.uint8, device="meta"), requires_grad=False
        )
        set_weight_loader(weight, layer._load)
        return weight

    def pack(self, weight: Tensor) -> BlockMatrix:
        """The blocks in panels."""
        return BlockMatrix(weight.detach(), self._type_name, self._dtype)

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """The blocks in panels."""
        rows, count, _ = layer.weight.shape
        form = FORMS[self._type_name]
        return {"weight": form.nbytes(rows, count * form.file_block)}
