"""Linears whose weight is kept as integers of 4 or 8 bits, with scales of groups of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine_core.kernels.gpu import GPU, gpu_of
from engine_core.kernels.linear import tiles
from engine_core.kernels.linear.coded import CodedWeight

# Columns whose codes lie in 32 neighbouring words: column j in word j % 32, place j // 32.
BLOCK = 128
_WORDS = 32
_ROWS = 1024
# The zero points of symmetric codes: 4 bits are kept as 0 to 15, 8 bits as -128 to 127.
MIDDLE = {4: 8, 8: 0}
# Rows from which matrix units multiply them quantised, where the scheme has it so. Fewer keep
# their 16 bits.
_LEAST_QUANTIZED = 65


def fits_group(group_size: int) -> bool:
    """Whether the kernels know groups of so many columns; 0 for whole rows."""
    return group_size in (32, 64) or group_size % BLOCK == 0


@dataclass(frozen=True, slots=True, eq=False)
class GroupWeight(CodedWeight):
    """A matrix ``[N, K]`` as ``(codes - zeros) * scales``. Make it by :meth:`of`.

    Attributes:
        words: ``[N, ceil(K / 128), 32]``, contiguous: int16 with 4 codes of 4 bits each, or int32
            with 4 of 8 bits. Word j has columns j, j + 32, j + 64 and j + 96 of each 128, the
            first in its lowest bits. Columns from K on are any.
        scales: of any float type: ``[N]``, one of each row; or ``[ceil(K / group_size), N]``.
        zeros: int8, shape of ``scales``; None for 8 of 4 bits, and for 0 of 8 bits.
        in_features: K.
        group_size: columns that share a scale; 0 for whole rows.
        dtype: of what is multiplied by it.
        quantizes_rows: whether many rows are quantised to 8 bits too. Only of 8 bits with a scale
            a row and no zeros.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    in_features: int
    group_size: int
    dtype: torch.dtype
    quantizes_rows: bool = False

    @classmethod
    def of(
        cls,
        packed: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bits: int,
        dtype: torch.dtype,
        *,
        quantizes_rows: bool = False,
    ) -> GroupWeight:
        """The matrix of codes, those of 4 bits from 0 on, those of 8 bits around 0.

        Args:
            packed: ``[N, K * bits / 8]`` uint8; of 4 bits the even column in the low half, of 8
                bits the bytes of int8.
            scales: ``[N, groups]``, floats; groups of equal size, but for a shorter last one.
            zeros: ``[N, groups]`` uint8, the codes that stand for 0, of 8 bits as bytes of int8;
                None for the middle.
            bits: 4 or 8.
            dtype: of what is multiplied by it.
            quantizes_rows: as the attribute.
        """
        k = packed.shape[1] * 8 // bits
        groups = scales.shape[1]
        if zeros is not None:
            zeros = zeros.view(torch.int8)
        # A group of all columns is one for the row, whatever its size is called.
        shape = (-1,) if groups == 1 else (groups, -1)
        return cls(
            _words(packed, bits),
            scales.T.reshape(shape).contiguous(),
            None if zeros is None else zeros.T.reshape(shape).contiguous(),
            k,
            0 if groups == 1 else k // groups,
            dtype,
            quantizes_rows,
        )

    @classmethod
    def quantized(cls, weight: Tensor, bits: int, group_size: int) -> GroupWeight:
        """``weight [N, K]``, whose K is a multiple of the group's size; symmetric if that is 0.

        The scale of a symmetric row is such that its greatest number becomes 127. Groups are
        quantised by :func:`quantize_groups`.
        """
        n, k = weight.shape
        groups = k // group_size if group_size else 1
        packed = torch.empty(n, k * bits // 8, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(n, groups, dtype=torch.float16, device=weight.device)
        zeros = torch.empty(n, groups, dtype=torch.uint8, device=weight.device)
        if not group_size:
            scales = scales.float()
        # In parts, so that temporaries stay small.
        for start in range(0, n, _ROWS):
            part = slice(start, start + _ROWS)
            rows = weight[part].float()
            if group_size:
                codes, scales[part], points = quantize_groups(rows, bits, group_size)
                codes, zeros[part] = (each ^ 128 if bits == 8 else each for each in (codes, points))
            else:
                scales[part] = rows.abs().amax(1, keepdim=True) / 127
                divisor = torch.where(scales[part] == 0, 1, scales[part])
                codes = (rows / divisor).round_().to(torch.int8).view(torch.uint8)
            packed[part] = pack_codes(codes, bits)
        held = zeros if group_size else None
        return cls.of(packed, scales, held, bits, weight.dtype)

    @property
    def bits(self) -> int:
        """4 or 8."""
        return 4 if self.words.dtype == torch.int16 else 8

    @property
    def shape(self) -> torch.Size:
        """``(N, K)``."""
        return torch.Size((self.words.shape[0], self.in_features))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.words.nbytes + self.scales.nbytes + zeros

    @staticmethod
    def size(n: int, k: int, bits: int) -> int:
        """Bytes of the codes of a matrix."""
        return n * -(-k // BLOCK) * BLOCK * bits // 8

    def codes(self) -> Tensor:
        """``[N, K]`` int8, in the order of columns."""
        n = self.words.shape[0]
        bytes_ = self.words.view(torch.uint8).view(n, -1, _WORDS, self.bits // 2)
        if self.bits == 4:
            bytes_ = torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)
        codes = bytes_.transpose(2, 3).reshape(n, -1)[:, : self.in_features]
        return (
            codes.view(torch.int8) if codes.is_contiguous() else codes.contiguous().view(torch.int8)
        )

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The numbers ``[N, K]``, computed in float32 and rounded once."""
        if gpu_of(self.words.device) is not None:
            from engine_core.kernels.linear.groups import triton

            return triton.numbers(self, dtype)
        n, k = self.shape
        out = torch.empty(n, k, dtype=dtype, device=self.words.device)
        codes = self.codes()
        width = self.group_size or k
        scales, zeros = (
            None if each is None else each.view(-1, n).T for each in (self.scales, self.zeros)
        )
        assert scales is not None, "there are scales"
        for start in range(0, n, _ROWS):
            rows = slice(start, start + _ROWS)
            middle = MIDDLE[self.bits] if zeros is None else _spread(zeros[rows], width, k)
            off = codes[rows].float() - middle
            out[rows] = off.mul_(_spread(scales[rows], width, k).float())
        return out

    def tile(self, rows: int, gated: bool, gpu: GPU | None) -> tiles.Tile | None:
        """By the rule for groups."""
        if self.words.data_ptr() % 16 or not fits_group(self.group_size):
            return None
        n, k = self.shape
        limit = _LEAST_QUANTIZED - 1 if self.quantizes_rows else None
        return tiles.choose_group_tile(rows, n, k, gated, gpu, limit)

    def reader(self) -> Any:
        """Four codes a word."""
        from engine_core.kernels.linear.readers.triton import GroupReader

        return GroupReader.of(self)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Of many rows that are quantised too, on a GPU."""
        n, k = self.shape
        rows = x.numel() // k
        if not self.quantizes_rows or rows < _LEAST_QUANTIZED or not x.is_cuda or n % 8:
            return None
        from engine_core.kernels.linear.groups import triton

        codes, scales = triton.quantize_rows(x.reshape(-1, k))
        sums = torch._int_mm(codes, self.words.view(torch.int8).view(n, -1).t())
        out = triton.rescale(sums, scales, self.scales, bias, x.dtype)
        return out.view(*x.shape[:-1], n)


def _spread(values: Tensor, width: int, columns: int) -> Tensor:
    return values.repeat_interleave(width, dim=1)[:, :columns]


def _words(packed: Tensor, bits: int) -> Tensor:
    """Codes ``[N, K * bits / 8]`` as :attr:`GroupWeight.words`."""
    n = packed.shape[0]
    packed = torch.nn.functional.pad(packed, (0, -packed.shape[1] % (BLOCK * bits // 8)))
    if bits == 8:
        codes = packed.view(n, -1, 4, _WORDS).transpose(2, 3).contiguous()
        return codes.view(torch.int32).view(n, -1, _WORDS)
    codes = unpack_codes(packed, 4).view(n, -1, 4, _WORDS)
    halves = (codes[:, :, 0] | codes[:, :, 1] << 4, codes[:, :, 2] | codes[:, :, 3] << 4)
    return torch.stack(halves, -1).view(torch.int16).view(n, -1, _WORDS)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[N, K]`` uint8 as ``[N, K * bits / 8]``; of 4 bits the even one is the low half."""
    return codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`pack_codes`."""
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def quantize_groups(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros such that ``(codes - zeros) * scales`` is near ``weight [N, K]``.

    The least and the greatest number of a group, or 0, get the first and the last code. To fit the
    scale to the codes by least squares lowers the squared error by 6%, but not the divergence from
    float32: in groups of up to 128, 0.079 and 0.374 so, 0.080 and 0.367 fitted (two small models).

    Returns:
        codes ``[N, K]`` uint8, scales ``[N, K / group_size]`` float16, zeros of their shape, uint8.
    """
    most = 2**bits - 1
    groups = weight.float().unflatten(1, (-1, group_size))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    low, high = low.clamp_(max=0), high.clamp_(min=0)
    scales = ((high - low) / most).half()
    divisor = torch.where(scales == 0, 1, scales).float()
    zeros = (-low / divisor).round_().clamp_(0, most)
    codes = (groups / divisor + zeros).round_().clamp_(0, most).to(torch.uint8)
    return codes.flatten(1), scales.squeeze(-1), zeros.squeeze(-1).to(torch.uint8)
