"""Four bits a weight, a scale and a zero point for each group of 32."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from engine_core.kernels.code_blocks import pack_blocks
from engine_core.kernels.linear.groups import unpack_codes
from engine_core.nn.linear import UnquantizedLinearMethod
from engine_core.nn.packing import MatrixModule

GROUP_SIZE = 32
# torch's kernel wants the outputs in sixteens.
_ROW_COUNT_MULTIPLE = 16
_REFITS = 3
# Numbers that are quantised, or turned back, at once: the temporaries stay in a cache.
_CHUNK = 2**20
# Rows of outputs that torch packs as one block, with AVX-512 and with AVX2, and the tokens up to
# which the kernel is faster than turning back. On two Zen 5 cores 512 tokens by 960 x 576 take 6.4
# ms in the kernel and 2.7 turned back, 128 tokens 0.9 and 1.8; with AVX2 33 and 19, 8.7 and 6.7.
_MOST_KERNEL_ROWS = {64: 256, 32: 128}


# Looking the overload up takes a microsecond a call.
_int4pack_mm = torch.ops.aten._weight_int4pack_mm_for_cpu.default


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zero points such that ``(code - 8) * scale + zero`` is near ``weight``.

    It begins with each group's least and greatest number at the codes 0 and 15, as llama.cpp's
    Q4_1 does. Then the scale and the zero are fitted to the codes by least squares and the codes
    chosen anew, three times; each lowers the squared error.

    Args:
        weight: ``[N, K]``, K a multiple of 32.

    Returns:
        codes ``[N, K]`` uint8, scales and zeros ``[N, K / 32]`` bfloat16.
    """
    groups = weight.float().unflatten(1, (-1, GROUP_SIZE))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scales = (high - low) / 15
    zeros = low + 8 * scales
    mean = groups.mean(dim=-1, keepdim=True)
    for _ in range(_REFITS):
        codes = _nearest(groups, scales, zeros)
        code_mean = codes.mean(dim=-1, keepdim=True)
        variance = codes.square().mean(dim=-1, keepdim=True) - code_mean.square()
        covariance = (codes * groups).mean(dim=-1, keepdim=True) - code_mean * mean
        # A group of equal numbers has one code: any scale does, and the zero is the number.
        scales = torch.where(variance > 0, covariance / variance, scales)
        zeros = mean - scales * code_mean
    scales, zeros = scales.to(torch.bfloat16), zeros.to(torch.bfloat16)
    codes = _nearest(groups, scales.float(), zeros.float())
    return (codes + 8).to(torch.uint8).flatten(1), scales.squeeze(-1), zeros.squeeze(-1)


def _nearest(groups: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The codes less 8, -8 to 7, as float32."""
    divisor = torch.where(scales == 0, 1, scales)
    return (groups - zeros).div_(divisor).round_().clamp_(-8, 7)


class Int4Matrix:
    """A matrix of 4-bit codes in the layout of ``torch._weight_int4pack_mm_for_cpu``.

    Products of few rows are computed in bfloat16, whatever the dtype of the activations: torch's
    kernel is vectorised for that only. It unpacks the weight for each row anew, so for many rows
    the weight is turned back first and multiplied as an ordinary one.

    Attributes:
        shape: ``(out_features, in_features)``.
        dtype: what :meth:`dense` gives.
        nbytes: bytes of codes, scales and zeros.
    """

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor,
        dtype: torch.dtype,
        group_size: int = GROUP_SIZE,
    ) -> None:
        """As :func:`quantize_int4` returns them; scales and zeros are rounded to bfloat16.

        Groups may be of 32, 64, 128 or 256.
        """
        self.shape, self._group = codes.shape, group_size
        fits = self.fits(self.shape) and codes.shape[1] % group_size == 0
        assert fits, f"{tuple(self.shape)} cannot be multiplied in int4"
        self.dtype = dtype
        self._packed = torch.empty(codes.shape[0], codes.shape[1] // 2, dtype=torch.uint8)
        step = _rows_at_once(codes.shape)
        for start in range(0, codes.shape[0], step):
            part = codes[start : start + step].to(torch.int32)
            self._packed[start : start + step] = _pack(part)
        self._set_scales(scales, zeros)

    @classmethod
    def quantized(cls, weight: Tensor) -> Int4Matrix:
        """``weight [N, K]`` by :func:`quantize_int4`."""
        step = _rows_at_once(weight.shape)
        parts = [quantize_int4(rows) for rows in weight.split(step)]
        codes, scales, zeros = (torch.cat(kind) for kind in zip(*parts, strict=True))
        return cls(codes, scales, zeros, weight.dtype)

    @classmethod
    def of_pairs(
        cls,
        pairs: Tensor,
        scales: Tensor,
        zeros: Tensor,
        dtype: torch.dtype,
        group_size: int = GROUP_SIZE,
    ) -> Int4Matrix:
        """The matrix of ``pairs [N, K / 2]`` uint8: columns 2j and 2j + 1 in a byte, 2j low."""
        block = block_rows()
        if not block or pairs.shape[0] % block:
            return cls(unpack_codes(pairs, 4), scales, zeros, dtype, group_size)
        # As torch packs, but without 32-bit codes.
        packed = torch.empty(pairs.shape, dtype=torch.uint8)
        pack_blocks(pairs, block, packed)
        return cls.of_packed(packed, scales, zeros, dtype, group_size)

    @classmethod
    def of_packed(
        cls,
        packed: Tensor,
        scales: Tensor,
        zeros: Tensor,
        dtype: torch.dtype,
        group_size: int = GROUP_SIZE,
    ) -> Int4Matrix:
        """The matrix of codes in blocks of :func:`block_rows`, as :func:`pack_blocks` writes."""
        made = cls.__new__(cls)
        made.shape = torch.Size((packed.shape[0], 2 * packed.shape[1]))
        made.dtype, made._group, made._packed = dtype, group_size, packed
        made._set_scales(scales, zeros)
        return made

    def _set_scales(self, scales: Tensor, zeros: Tensor) -> None:
        # torch's kernel does not check their shape, and would read beyond them.
        shape = (self.shape[0], self.shape[1] // self._group)
        assert scales.shape == zeros.shape == shape, f"{list(scales.shape)} are not {list(shape)}"
        both = torch.stack((scales.T, zeros.T), dim=-1)
        self._scales_and_zeros = both.to(torch.bfloat16).contiguous()
        self.nbytes = self._packed.nbytes + self._scales_and_zeros.nbytes

    @staticmethod
    def fits(shape: torch.Size) -> bool:
        """Whether torch's kernel can multiply a matrix of this shape."""
        return shape[0] % _ROW_COUNT_MULTIPLE == 0 and shape[1] % GROUP_SIZE == 0

    @staticmethod
    def size(shape: torch.Size, group_size: int = GROUP_SIZE) -> int:
        """Bytes of the codes, scales and zeros of a matrix of this shape."""
        return shape[0] * (shape[1] // 2 + shape[1] // group_size * 4)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ matrix.T + bias``."""
        # torch's kernel takes nothing else than contiguous rows.
        flat = x.reshape(-1, self.shape[1]).contiguous()
        if self._can_unpack and len(flat) > _MOST_KERNEL_ROWS[block_rows()]:
            out = self._multiply_dense(flat)
        elif x.dtype == torch.bfloat16:
            # Without conversions, which cost 0.7 us where there is nothing to convert.
            out = _int4pack_mm(flat, self._packed, self._group, self._scales_and_zeros)
        else:
            out = self._multiply_packed(flat.to(torch.bfloat16)).to(x.dtype)
        out = out.view(*x.shape[:-1], self.shape[0])
        return out if bias is None else out.add_(bias)

    def dense(self) -> Tensor:
        """The numbers that the codes stand for."""
        # Every CPU packs in its own way; a product with the identity needs to know none.
        columns = torch.eye(self.shape[1], dtype=torch.bfloat16)
        return self._multiply_packed(columns).T.to(self.dtype).contiguous()

    @property
    def _can_unpack(self) -> bool:
        block = block_rows()
        return bool(block) and self.shape[0] % block == 0

    def _multiply_packed(self, x: Tensor) -> Tensor:
        out: Tensor = _int4pack_mm(x, self._packed, self._group, self._scales_and_zeros)
        return out

    def _multiply_dense(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], self.shape[0])
        step = _rows_at_once(self.shape)
        for start in range(0, self.shape[0], step):
            rows = slice(start, min(start + step, self.shape[0]))
            torch.mm(x, self._transposed_rows(rows, x.dtype), out=out[:, rows])
        return out

    def _transposed_rows(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """The numbers of some whole blocks of rows, ``[in_features, rows]``."""
        in_features = self.shape[1]
        codes = _unpack(self._packed[rows], block_rows()).unflatten(0, (-1, self._group)).to(dtype)
        scales, zeros = self._scales_and_zeros[:, rows].to(dtype).unbind(-1)
        numbers = torch.addcmul(zeros.unsqueeze(1), codes, scales.unsqueeze(1))
        return numbers.view(in_features, -1)


def _pack(codes: Tensor) -> Tensor:
    return torch._convert_weight_to_int4pack_for_cpu(codes, 1)


def _unpack(packed: Tensor, block: int) -> Tensor:
    """Whole blocks ``[N, K / 2]`` to the codes less 8, ``[K, N]`` int8.

    A block of 64 rows is ``[K, 32]`` bytes: the low half of a byte is of one of the first 32 rows,
    the high half of one of the others. One of 32 rows has 16 and 16.
    """
    blocks = packed.view(-1, 2 * packed.shape[1], block // 2)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=2).view(torch.int8).sub_(8)
    return codes.permute(1, 0, 2, 3).reshape(blocks.shape[1], -1)


@cache
def block_rows() -> int:
    """The rows of a block that torch packs on this CPU; 0 if :func:`_unpack` does not undo it."""
    for rows in _MOST_KERNEL_ROWS:
        codes = torch.arange(2 * rows * GROUP_SIZE, dtype=torch.int32)
        codes = (codes * 7 + codes // 16).remainder_(16).view(-1, GROUP_SIZE)
        if torch.equal(_unpack(_pack(codes), rows).T + 8, codes):
            return rows
    return 0


def _rows_at_once(shape: torch.Size) -> int:
    most = max(_MOST_KERNEL_ROWS)
    return max(_CHUNK // shape[1] // most, 1) * most


class Int4LinearMethod(UnquantizedLinearMethod):
    """Weights that are quantised to :class:`Int4Matrix` once they are loaded."""

    def pack(self, weight: Tensor) -> Int4Matrix:
        """The quantised weight."""
        return Int4Matrix.quantized(weight)

    def packed_sizes(self, layer: MatrixModule) -> Mapping[str, int]:
        """Codes and scales instead of the weight."""
        return {"weight": Int4Matrix.size(layer.weight.shape)}
