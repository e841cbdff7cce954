"""Integers of 4 or 8 bits with scales of groups, as :class:`GroupWeight` or by torch on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from engine_core.kernels import ChainForm, CodedWeight, GroupWeight, linear
from engine_core.kernels.code_blocks import pack_blocks, unpack_blocks
from engine_core.kernels.linear.groups import BLOCK, fits_group, pack_codes, unpack_codes
from engine_core.kernels.linear.tiles import choose_group_tile
from engine_core.nn.embedding import VocabularyMethod, VocabularySplit
from engine_core.nn.epilogue import Call, Epilogue
from engine_core.nn.linear import Linear, UnquantizedLinearMethod
from engine_core.nn.loading import set_weight_loader
from engine_core.nn.packing import MatrixModule, PackedMatrix
from engine_core.nn.quantization.int4 import Int4Matrix, block_rows
from engine_core.nn.quantization.int8 import Int8Matrix

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The form of a linear's integers.

    Attributes:
        bits: 4 or 8.
        group_size: inputs that share a scale; 0 for all of them.
        zeros: the type of what groups have for zero: uint8 for one of the codes, bfloat16 for a
            number that is added to ``(code - middle) * scale``; None for neither.
        ordered: whether the inputs of a group are not neighbours (``g_idx``).
        scale_dtype: of the scales.
        quantizes_rows: whether many rows are quantised to 8 bits too, on a GPU.
    """

    bits: int
    group_size: int
    zeros: torch.dtype | None
    ordered: bool
    scale_dtype: torch.dtype
    quantizes_rows: bool = False

    def runs(self, on_cpu: bool, shape: torch.Size) -> bool:
        """Whether a kernel multiplies a matrix ``shape`` of this form as it is."""
        n, k = shape
        if not on_cpu:
            added = self.zeros == torch.bfloat16
            return fits_group(self.group_size) and (not added or self.group_size == 32)
        if self.bits == 8:
            return not self.group_size and self.zeros is None and Int8Matrix.fits(shape)
        return self.cpu_group(k) > 0 and n % 16 == 0

    def cpu_group(self, in_features: int) -> int:
        """The group that torch's kernel for 4 bits takes; 0 if there is none."""
        sizes = [each for each in (256, 128, 64, 32) if in_features % each == 0]
        wanted = self.group_size
        return next((each for each in sizes if not wanted or wanted % each == 0), 0)


class OrderedMatrix:
    """A packed matrix whose columns are in another order than its inputs."""

    def __init__(self, matrix: PackedMatrix, order: Tensor) -> None:
        """``order [K]`` names the input of each column."""
        self._matrix, self._order = matrix, order
        self.nbytes = matrix.nbytes + order.nbytes

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ matrix.T + bias``; the inputs are put in order first."""
        x = x.index_select(-1, self._order)
        if isinstance(self._matrix, CodedWeight):
            return linear(x, self._matrix, bias)
        return self._matrix.multiply(x, bias)

    def dense(self) -> Tensor:
        """The numbers, in the order of the inputs."""
        numbers = self._matrix.dense()
        return torch.empty_like(numbers).index_copy_(1, self._order.long(), numbers)


class GroupMethod(UnquantizedLinearMethod):
    """A weight that is a :class:`GroupWeight` on a GPU.

    Beyond some rows the numbers are written and read in each step, by which a step takes longer
    than with a plain weight by 4 bytes a weight over the memory's speed.
    """

    quantizes_rows = False

    def fits(
        self, layer: Linear, call: Call, *, gated: bool = False, deterministic: bool = False
    ) -> bool:
        """By the tiles of groups; deterministic mode multiplies by numbers."""
        if deterministic:
            return super().fits(layer, call, gated=gated, deterministic=True)
        shape = (call.rows, layer.out_features, layer.in_features, gated, call.gpu)
        limit = 64 if self.quantizes_rows else None
        return call.dtype in _SIXTEEN_BITS and choose_group_tile(*shape, limit) is not None

    def activates(self, layer: Linear, call: Call, gated: bool, activation: str) -> bool:
        """As a plain weight's, whose numbers many rows are multiplied by, or by codes."""
        packed = layer.packed
        if self.quantizes_rows:
            return False
        if gated and activation == "silu" and isinstance(packed, GroupWeight):
            by_codes = packed.tile_of_teams(call.rows, gated, call.gpu)
            if by_codes is not None and call.dtype in _SIXTEEN_BITS:
                return True
        return super().activates(layer, call, gated, activation)

    def adds_residual(self, layer: Linear, call: Call) -> bool:
        """Not by itself."""
        return False


class _BlockWriter:
    """Copies rows of codes into a parameter as blocks, and knows which.

    A family may fill parameters by itself, and then nothing, or not all, was copied here.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        # Addresses of blocks: what is only compared is written to memory of its own.
        self._written: set[int] = set()

    def __call__(self, target: Tensor, pairs: Tensor) -> None:
        pack_blocks(pairs, self._block, target)
        self._written.update(self._addresses(target))

    def has_written(self, codes: Tensor) -> bool:
        """Whether all of ``codes`` are in blocks; if only some are, these are turned back."""
        written = [address in self._written for address in self._addresses(codes)]
        if all(written):
            return True
        for rows, is_block in zip(codes.split(self._block), written, strict=True):
            if is_block:
                rows.copy_(unpack_blocks(rows, self._block))
        return False

    def _addresses(self, rows: Tensor) -> range:
        start = rows.data_ptr()
        return range(start, start + rows.nbytes, self._block * rows.shape[1])


class GroupLinearMethod(GroupMethod):
    """A checkpoint's integers, in the form that all of its formats are brought into.

    Its tensors are ``weight [out, in * bits / 8]`` uint8, of 4 bits the even input in the low half,
    of 8 bits the bytes of int8, ``weight_scale [out, groups]``, and
    perhaps ``weight_zero_point`` of that shape and ``weight_g_idx [in]`` int32. On a CPU torch's
    kernels multiply them, by scales that are rounded to bfloat16.
    """

    def __init__(self, layout: GroupLayout, on_cpu: bool) -> None:
        self._layout = layout
        self._on_cpu = on_cpu
        self.quantizes_rows = layout.quantizes_rows

    def create_weights(
        self,
        layer: Linear,
        in_features: int,
        out_features: int,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> None:
        """Make the tensors above."""
        layout, n, k = self._layout, out_features, in_features
        share = 8 // layout.bits
        packed = torch.empty(n, k // share, dtype=torch.uint8, device=device)
        layer.add_parameter("weight", packed, input_dim=1, packed_dim=1, pack_factor=share)
        size = layout.group_size
        grouped = partial(layer.add_parameter, input_dim=1 if size else None, group_size=size or 1)
        shape = (n, -(-k // size) if size else 1)
        scales = torch.empty(shape, dtype=layout.scale_dtype, device=device)
        grouped("weight_scale", scales)
        if layout.zeros is not None:
            zeros = torch.empty(shape, dtype=layout.zeros, device=device)
            grouped("weight_zero_point", zeros)
        if layout.ordered:
            groups = torch.empty(layer.num_parts, k, dtype=torch.int32, device=device)
            layer.add_parameter("weight_g_idx", groups, output_dim=None)

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """Codes in the kernels' layout; on a CPU scales and zeros in torch's."""
        n, packed = layer.get_parameter("weight").shape
        layout, k = self._layout, packed * 8 // self._layout.bits
        sizes = {"weight": GroupWeight.size(n, k, layout.bits)}
        if layout.ordered:
            sizes["weight_g_idx"] = k * 4
        if self._on_cpu:
            shape = torch.Size((n, k))
            four = layout.bits == 4
            sizes["weight"] = (
                Int4Matrix.size(shape, layout.cpu_group(k)) if four else Int8Matrix.size(shape)
            )
            sizes |= {"weight_scale": 0} | ({"weight_zero_point": 0} if layout.zeros else {})
        return sizes

    def prepare_load(self, layer: Linear) -> None:
        """Have codes written in the blocks of a CPU's kernel at once, not first as they are."""
        codes = layer.get_parameter("weight")
        if (
            self._on_cpu
            and self._layout.bits == 4
            and not self._layout.ordered
            and layer.context.tp_size == 1
            and codes.shape[0] == layer.matrix_shape[0]
            and (block := block_rows())
            and not any(rows % block for rows in layer.part_rows.values())
        ):
            codes.copy_rows = _BlockWriter(block)  # type: ignore[attr-defined]

    def process_after_load(self, layer: Linear) -> None:
        """Bring the codes into the layout of a kernel."""
        names = [name for name in layer._parameters if name.startswith("weight")]
        layout, held = self._layout, {name: layer.get_parameter(name).data for name in names}
        writer: _BlockWriter | None = getattr(layer.get_parameter("weight"), "copy_rows", None)
        packed, scales = held["weight"], held["weight_scale"]
        in_blocks = writer is not None and writer.has_written(packed)
        zeros = held.get("weight_zero_point")
        order = None
        if layout.ordered:
            order = held["weight_g_idx"][0].argsort(stable=True).int()
            codes = unpack_codes(packed, layout.bits).index_select(1, order)
            packed = pack_codes(codes, layout.bits)
        make = partial(self._matrix, layer.dtype, in_blocks)
        matrix = layer.pack_by(make, packed, scales, zeros)
        assert matrix is not None, "there is one for each"
        layer.set_packed(matrix if order is None else OrderedMatrix(matrix, order), *names)

    def _matrix(
        self,
        dtype: torch.dtype,
        in_blocks: bool,
        packed: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
    ) -> PackedMatrix:
        layout = self._layout
        if not self._on_cpu:
            columns = packed.shape[1] * 8 // layout.bits
            # It has the groups' size from their number, and would have a wrong one.
            assert columns % (layout.group_size or 1) == 0, "the last group is shorter"
            return GroupWeight.of(
                *(packed, scales, zeros, layout.bits, dtype), quantizes_rows=layout.quantizes_rows
            )
        if layout.bits == 8:
            return Int8Matrix.of(packed.view(torch.int8), scales.squeeze(1), dtype)
        return self._int4(packed, scales, zeros, dtype, in_blocks)

    def _int4(
        self,
        pairs: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        dtype: torch.dtype,
        in_blocks: bool,
    ) -> Int4Matrix:
        size = self._layout.cpu_group(2 * pairs.shape[1])
        if zeros is None:
            zeros = torch.zeros_like(scales)
        elif zeros.dtype == torch.uint8:
            scales = scales.float()
            zeros = (8 - zeros.float()) * scales
        columns = 2 * pairs.shape[1]
        times = (self._layout.group_size or columns) // size
        if times > 1:
            # The last group may have fewer inputs.
            scales, zeros = (
                each.repeat_interleave(times, dim=1)[:, : columns // size]
                for each in (scales, zeros)
            )
        make = Int4Matrix.of_packed if in_blocks else Int4Matrix.of_pairs
        return make(pairs, scales, zeros, dtype, size)

    def chain_form(self, layer: Linear) -> ChainForm | None:
        """That of codes of 4 bits in groups of 128 neighbours."""
        layout = self._layout
        has_zeros = layout.zeros == torch.uint8
        if layout.ordered or layout.scale_dtype not in _SIXTEEN_BITS:
            return None
        if (layout.bits, layout.group_size) != (4, BLOCK) or (layout.zeros and not has_zeros):
            return None
        kept = isinstance(layer.packed, GroupWeight | None)
        return ChainForm(4, layout.scale_dtype, has_zeros) if kept else None

    def declined(self, layer: Linear, epilogue: Epilogue, call: Call) -> str | None:
        """As of any weight; one whose inputs have an order of their own fuses nothing."""
        if self._layout.ordered:
            return "the inputs are put into the order of the groups first"
        return super().declined(layer, epilogue, call)


class Int8VocabularyMethod(VocabularyMethod):
    """A vocabulary's matrix of 8-bit codes with a scale for each row, for a CPU.

    Embedding and head may share it. Its tensors are those of :class:`GroupLinearMethod`.
    """

    def __init__(self, layers: list[VocabularySplit], scale_dtype: torch.dtype) -> None:
        """Give each layer on meta parameters for codes and scales."""
        self._layers = layers
        shape = layers[0].weight.shape
        weight = torch.empty(shape, dtype=torch.uint8, device="meta")
        scale = torch.empty(shape[0], 1, dtype=scale_dtype, device="meta")
        for name, data in (("weight", weight), ("weight_scale", scale)):
            param = nn.Parameter(data, requires_grad=False)
            set_weight_loader(param, layers[0]._load)
            for layer in layers:
                layer.register_parameter(name, param)

    def pack(self, weight: Tensor) -> Int8Matrix:
        """Codes and scales."""
        # A layer that another stage has stays on meta.
        held = [layer.get_parameter("weight_scale").data for layer in self._layers]
        scales = next(each for each in held if not each.is_meta)
        for layer in self._layers:
            del layer._parameters["weight_scale"]
        codes = weight.data.view(torch.int8)
        return Int8Matrix.of(codes, scales.squeeze(1), self._layers[0].dtype)

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """Codes, and scales in bfloat16."""
        return {"weight": Int8Matrix.size(layer.weight.shape), "weight_scale": 0}


class GroupAtLoadMethod(GroupMethod):
    """Weights that become a :class:`GroupWeight` once they are loaded, on a GPU."""

    def __init__(self, bits: int, group_size: int) -> None:
        self._bits, self._group_size = bits, group_size

    def pack(self, weight: Tensor) -> GroupWeight:
        """The quantised weight."""
        return GroupWeight.quantized(weight, self._bits, self._group_size)

    def chain_form(self, layer: Linear) -> ChainForm | None:
        """That of codes of 4 bits in groups of 128."""
        if (self._bits, self._group_size) != (4, BLOCK):
            return None
        return ChainForm(4, torch.float16, has_zeros=True)

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """Codes, scales and zeros instead of the weight."""
        n, k = layer.weight.shape
        scales = 3 * n * k // self._group_size if self._group_size else 4 * n
        return {"weight": GroupWeight.size(n, k, self._bits) + scales}
