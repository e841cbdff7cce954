"""Linears whose weight is kept as integers of 4 to 8 bits, with scales of groups of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine_core.kernels.codes import INT8_TOP
from engine_core.kernels.gpu import GPU, gpu_of
from engine_core.kernels.linear import tiles
from engine_core.kernels.linear.coded import CodedWeight

# Columns whose codes lie in 32 neighbouring words: column j in word j % 32, place j // 32.
BLOCK = 128
# Of groups of 16 columns words have columns 16 apart, and a block has 64.
_LANES, _NARROW_LANES = 32, 16
_ROWS = 1024
# The zero points of symmetric codes. 8 bits are kept as -128 to 127, fewer from 0 on.
MIDDLE = {4: 8, 5: 16, 6: 32, 8: 0}
_TENSORS = ("words", "high", "scales", "zeros", "minima", "headers")
# Rows from which matrix units multiply them quantised, where the scheme has it so. Fewer keep
# their 16 bits.
_LEAST_QUANTIZED = 65


def fits_group(group_size: int) -> bool:
    """Whether kernels know groups of so many columns of a checkpoint; 0 for whole rows."""
    return group_size in (32, 64) or group_size % BLOCK == 0


@dataclass(frozen=True, slots=True, eq=False)
class GroupWeight(CodedWeight):
    """A matrix ``[N, K]`` as ``(codes - zeros) * scales + minima``.

    Make it by :meth:`of` or :meth:`of_codes`.

    Attributes:
        words: ``[N, ceil(K / 128), 32]``, contiguous: int16 with the low 4 bits of 4 codes, or
            int32 with 4 codes of 8 bits. Word j has columns j, j + 32, j + 64 and j + 96 of each
            128, the first in its lowest bits. Columns from K on are any. In groups of 16 columns it
            is ``[N, ceil(K / 64), 16]``, and a word's columns are 16 apart.
        scales: of any float type: ``[N]``, one of each row; or ``[ceil(K / group_size), N]``. With
            headers int8 ``[K / 256, N, 256 / group_size]``.
        zeros: int8, shape of ``scales``; None for :attr:`middle`.
        in_features: K.
        group_size: columns that share a scale; 0 for whole rows.
        dtype: of what is multiplied by it.
        quantizes_rows: whether many rows are quantised to 8 bits too. Only of 8 bits with a scale
            a row and no zeros.
        high: uint8, the fifth bits of codes of 5 bits ``[N, blocks, 16]``, those of word j in the
            low half of byte j, and of word j + 16 in the high one; or the two high bits of 6
            ``[N, blocks, words]``, of a word in a byte; in both the first column's are the lowest.
            None for codes of 4 and 8 bits.
        minima: shape of ``scales``, of groups of 16 or 32; None for none.
        centred: whether codes without zeros stand for 0, or a minimum, in their middle; else the
            code 0 does.
        headers: float16 ``[1 or 2, K / 256, N]``: what the scales, and the minima, of each 256
            columns are factors of, integers; None if these are whole. Minima then are 0 or more,
            and scales too where there are minima.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    in_features: int
    group_size: int
    dtype: torch.dtype
    quantizes_rows: bool = False
    high: Tensor | None = None
    minima: Tensor | None = None
    headers: Tensor | None = None
    centred: bool = True

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
            scales: ``[N, groups]``, floats; groups of equal size.
            zeros: ``[N, groups]`` uint8, the codes that stand for 0, of 8 bits as bytes of int8;
                or floats that are added to numbers around the middle; None for the middle.
            bits: 4 or 8.
            dtype: of what is multiplied by it.
            quantizes_rows: as the attribute.
        """
        added = None
        if zeros is not None and zeros.is_floating_point():
            added, zeros = zeros, None
        made = cls.of_codes(unpack_codes(packed, bits), scales, bits, dtype, added)
        if zeros is not None:
            zeros = zeros.view(torch.int8).T.reshape(made.scales.shape).contiguous()
        return replace(made, zeros=zeros, quantizes_rows=quantizes_rows)

    @classmethod
    def of_codes(
        cls,
        codes: Tensor,
        scales: Tensor,
        bits: int,
        dtype: torch.dtype,
        minima: Tensor | None = None,
        headers: Sequence[Tensor] = (),
        *,
        centred: bool = True,
    ) -> GroupWeight:
        """The matrix of codes in their plain order.

        Args:
            codes: ``[N, K]`` uint8, from 0 on; of 8 bits the bytes of int8.
            scales: ``[N, groups]``; groups of equal size.
            bits: 4, 5, 6 or 8.
            dtype: of what is multiplied by it.
            minima: ``[N, groups]``, or None.
            headers: of the scales, and of the minima: ``[N, K / 256]`` float16, or none.
            centred: as the attribute.
        """
        n, k = codes.shape
        groups = scales.shape[1]
        assert k % groups == 0, f"{k} columns are no {groups} groups of equal size"
        # A group of all columns is one for the row, whatever its size is called.
        whole = groups == 1 and minima is None
        size = 0 if whole else k // groups
        shape = (-1,) if whole else (groups, -1)
        lanes = _NARROW_LANES if size == _NARROW_LANES else _LANES

        def by_groups(values: Tensor) -> Tensor:
            if headers:
                return values.view(n, headers[0].shape[1], -1).transpose(0, 1).contiguous()
            return values.T.reshape(shape).contiguous()

        codes = torch.nn.functional.pad(codes, (0, -k % (4 * lanes)))
        codes = codes.view(n, -1, 4, lanes)
        return cls(
            _words(codes, bits),
            by_groups(scales),
            None,
            k,
            size,
            dtype,
            high=_high(codes >> 4, bits - 4) if bits in (5, 6) else None,
            minima=None if minima is None else by_groups(minima),
            headers=torch.stack([each.T for each in headers]).contiguous() if headers else None,
            centred=centred,
        )

    @classmethod
    def joined(cls, parts: Sequence[GroupWeight]) -> GroupWeight:
        """Matrices of one form, one below the other."""
        first = parts[0]
        tensors: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts], dim)
            for name, dim in first._row_dimensions().items()
        }
        return replace(first, **tensors)

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
                scales[part] = rows.abs().amax(1, keepdim=True) / INT8_TOP
                divisor = torch.where(scales[part] == 0, 1, scales[part])
                codes = (rows / divisor).round_().to(torch.int8).view(torch.uint8)
            packed[part] = pack_codes(codes, bits)
        held = zeros if group_size else None
        return cls.of(packed, scales, held, bits, weight.dtype)

    @property
    def bits(self) -> int:
        """4, 5, 6 or 8."""
        if self.words.dtype == torch.int32:
            return 8
        return 4 if self.high is None else 4 + 2 * self.high.shape[2] // self.words.shape[2]

    @property
    def middle(self) -> int:
        """The code that stands for 0, or for the minimum, where there are no zeros."""
        return MIDDLE[self.bits] if self.centred else 0

    @property
    def block_kind(self) -> tiles.BlockKind:
        """The kind that its tile depends on if its groups are as small as those of GGUF blocks."""
        floats, minima = self.headers is None, self.minima is not None
        return tiles.BlockKind(self.group_size, self.bits, floats, minima)

    @property
    def shape(self) -> torch.Size:
        """``(N, K)``."""
        return torch.Size((self.words.shape[0], self.in_features))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, zeros, minima and headers."""
        return sum(getattr(self, name).nbytes for name in self._row_dimensions())

    def _row_dimensions(self) -> dict[str, int]:
        """The dimension of each tensor that there is along which the matrix's rows lie."""
        inner = ("scales", "minima") if self.headers is not None else ()
        dims = dict.fromkeys(_TENSORS, -1) | {"words": 0, "high": 0} | dict.fromkeys(inner, 1)
        return {name: dim for name, dim in dims.items() if getattr(self, name) is not None}

    def _by_rows(self, values: Tensor) -> Tensor:
        """Values of groups as ``[N, groups]``."""
        n = len(self)
        whole = values.view(-1, n).T if self.headers is None else values.transpose(0, 1).flatten(1)
        return whole.float()

    @staticmethod
    def size(n: int, k: int, bits: int) -> int:
        """Bytes of the codes of a matrix."""
        return n * -(-k // BLOCK) * BLOCK * bits // 8

    def codes(self) -> Tensor:
        """``[N, K]`` int8, in the order of columns."""
        n, _, lanes = self.words.shape
        words, bits = self.words, self.bits
        bytes_ = words.view(torch.uint8).view(n, -1, lanes, words.itemsize)
        if bits < 8:
            bytes_ = torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)
        if self.high is not None:
            high = self.high
            if bits == 5:
                high = torch.cat((high & 15, high >> 4), -1)
            places = torch.arange(4, dtype=torch.uint8, device=high.device) * (bits - 4)
            bytes_ = bytes_ | (high[..., None] >> places & 2 ** (bits - 4) - 1) << 4
        codes = bytes_.transpose(2, 3).reshape(n, -1)[:, : self.in_features]
        return codes.contiguous().view(torch.int8)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The numbers ``[N, K]``, computed in float32 and rounded once."""
        if gpu_of(self.words.device) is not None:
            from engine_core.kernels.linear.groups import triton

            return triton.numbers(self, dtype)
        n, k = self.shape
        out = torch.empty(n, k, dtype=dtype, device=self.words.device)
        codes, width = self.codes(), self.group_size or k
        scales, zeros, minima = (
            None if each is None else self._by_rows(each)
            for each in (self.scales, self.zeros, self.minima)
        )
        assert scales is not None, "there are scales"
        if self.headers is not None:
            shared = self.scales.shape[2]
            header = self.headers.float().transpose(1, 2).repeat_interleave(shared, dim=2)
            scales = scales * header[0]
            minima = None if minima is None else minima * header[1]
        for start in range(0, n, _ROWS):
            rows = slice(start, start + _ROWS)
            off = codes[rows].float()
            off -= self.middle if zeros is None else _spread(zeros[rows], width, k)
            off *= _spread(scales[rows], width, k)
            out[rows] = off if minima is None else off.add_(_spread(minima[rows], width, k))
        return out

    def take(self, ids: Tensor) -> Tensor:
        """Rows of the matrix: ids ``[...]`` int64 to ``[..., K]``, as :meth:`numbers`."""
        flat = ids.flatten()
        if gpu_of(self.words.device) is not None:
            from engine_core.kernels.linear.groups import triton

            taken = triton.numbers(self, self.dtype, flat)
        else:
            rows: dict[str, Any] = {
                name: getattr(self, name).index_select(dim, flat)
                for name, dim in self._row_dimensions().items()
            }
            taken = replace(self, **rows).numbers(self.dtype)
        return taken.view(*ids.shape, self.in_features)

    def tile(self, rows: int, gated: bool, gpu: GPU | None) -> tiles.Tile | None:
        """By the rule for groups."""
        narrow = self.words.shape[2] == _NARROW_LANES
        if self.words.data_ptr() % 16 or not (narrow or fits_group(self.group_size)):
            return None
        n, k = self.shape
        if rows == 1 and self.bits == 8 and not self.group_size:
            tile = tiles.choose_one_row_tile(k, gpu)
            if tile is not None:
                return tile
        limit = _LEAST_QUANTIZED - 1 if self.quantizes_rows else None
        tile = tiles.choose_group_tile(rows, n, k, gated, gpu, limit)
        if tile is None:
            return None
        if narrow:
            tile = replace(tile, block_k=4 * _NARROW_LANES)
        if gpu is None or self.minima is None or not gated or rows <= 32:
            return tile
        # Bytes that a thread spills, of Q4_K at 64 rows: with capability 9.0 392 by 4 warps, and 8
        # by 8; with 8.0 some 3700 by either, and 56 by 4 and half of the columns.
        half = gpu.capability < (9, 0)
        return replace(tile, block_n=32) if half else replace(tile, num_warps=8)

    def tile_of_teams(self, rows: int, gated: bool, gpu: GPU | None) -> tiles.Tile | None:
        """The tile of Hopper's kernel of teams; None where others are faster."""
        shape = (rows, *self.shape, gated, gpu)
        if self.bits == 8:
            fits = not self.group_size and not self.quantizes(rows)
            return tiles.choose_bytes_tile(*shape) if fits else None
        return tiles.choose_teams_tile(*shape) if self.group_size == BLOCK else None

    def reader(self) -> Any:
        """Four codes a word."""
        from engine_core.kernels.linear.readers.triton import GroupReader

        return GroupReader.of(self)

    @property
    def multiplies_codes(self) -> bool:
        """Whether many rows are quantised too, as the checkpoint says."""
        return self.quantizes_rows

    def quantizes(self, rows: int) -> bool:
        """Whether so many are."""
        return self.quantizes_rows and rows >= _LEAST_QUANTIZED

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Of many rows that are quantised too, on a GPU."""
        n, k = self.shape
        rows = x.numel() // k
        if not self.quantizes(rows) or not x.is_cuda or n % 8:
            return None
        from engine_core.kernels.linear.groups import triton

        codes, scales = triton.quantize_rows(x.reshape(-1, k))
        sums = torch._int_mm(codes, self.words.view(torch.int8).view(n, -1).t())
        out = triton.rescale(sums, scales, self.scales, bias, x.dtype)
        return out.view(*x.shape[:-1], n)


def _spread(values: Tensor, width: int, columns: int) -> Tensor:
    return values.repeat_interleave(width, dim=1)[:, :columns]


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[N, blocks, 4, lanes]`` as :attr:`GroupWeight.words`."""
    if bits == 8:
        return codes.transpose(2, 3).contiguous().view(torch.int32).squeeze(-1)
    low = codes & 15
    halves = (low[:, :, 0] | low[:, :, 1] << 4, low[:, :, 2] | low[:, :, 3] << 4)
    return torch.stack(halves, -1).view(torch.int16).squeeze(-1)


def _high(high: Tensor, width: int) -> Tensor:
    """High bits ``[N, blocks, 4, lanes]`` of codes as :attr:`GroupWeight.high`."""
    bits = high[:, :, 0]
    for place in range(1, 4):
        bits = bits | high[:, :, place] << place * width
    if width == 2:
        return bits
    low, others = bits.chunk(2, -1)
    return low | others << 4


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
