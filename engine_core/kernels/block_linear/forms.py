"""The block types of GGUF files, and the layouts in which a CPU and a GPU multiply by them.

https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h has the layouts of the files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine_core.kernels import compiled
from engine_core.kernels.linear.groups import GroupWeight

# Rows of a panel, of which a vector holds four columns each.
PANEL = 16
# Columns of a block of a panel.
BLOCK = 32
# Rows that are repacked at once, so that temporaries stay small.
_CHUNK = 2**22


@dataclass(frozen=True, slots=True)
class BlockForm:
    """One block type.

    A number is ``scale * code + minimum``, or ``scale * (code - offset)`` without minima.

    Panels of 16 rows follow each other, and in them blocks of 32 columns. A block has the codes'
    low halves (``[4, 16, 4]`` bytes; the columns of the two halves of a byte are four apart), or of
    8 bits the whole signed codes ``[8, 16, 4]``; then their high bits, those of column ``4 j + i``
    in byte ``[j // per, 16, i]``; then scales ``[32 / group, 16]`` and minima ``[16]``, in float16.
    In layers eight blocks follow a header of float16 ``[16]``, and their scales and minima are int8
    factors of it.

    Attributes:
        file_block: numbers of a block in a file.
        file_bytes: bytes of it.
        bits: of a code.
        group: columns that share a scale.
        offset: None with minima.
        layered: whether scales and minima are in two layers.
    """

    file_block: int
    file_bytes: int
    bits: int
    group: int
    offset: int | None
    layered: bool

    @property
    def affine(self) -> bool:
        """Whether there are minima."""
        return self.offset is None

    @property
    def scales(self) -> int:
        """Scales of each row in a block."""
        return BLOCK // self.group

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of a panel."""
        return self.bits * 64 + (self.scales + self.affine) * PANEL * (1 if self.layered else 2)

    @property
    def header_bytes(self) -> int:
        """Bytes of the header of :attr:`run` blocks."""
        return (1 + self.affine) * PANEL * 2 if self.layered else 0

    @property
    def run(self) -> int:
        """Blocks that share a header."""
        return self.file_block // BLOCK

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of a block with a byte for each code and float32 scales and minima."""
        return 512 + PANEL * 4 * (self.scales + self.affine)

    def panel_bytes(self, columns: int) -> int:
        """Bytes of a panel."""
        return columns // self.file_block * (self.header_bytes + self.run * self.block_bytes)

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix in panels; the last panel is a whole one."""
        return -(-rows // PANEL) * self.panel_bytes(columns)

    def group_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix as :func:`group_weight` makes it."""
        scales = columns // self.group * (1 if self.layered else 2)
        scales += columns // self.file_block * 2 if self.layered else 0
        codes = GroupWeight.size(rows, columns, self.bits)
        return codes + rows * scales * (1 + self.affine)


FORMS = {
    "Q4_0": BlockForm(32, 18, 4, 32, 8, False),
    "Q4_1": BlockForm(32, 20, 4, 32, None, False),
    "Q5_0": BlockForm(32, 22, 5, 32, 16, False),
    "Q5_1": BlockForm(32, 24, 5, 32, None, False),
    "Q8_0": BlockForm(32, 34, 8, 32, 128, False),
    "Q4_K": BlockForm(256, 144, 4, 32, None, True),
    "Q5_K": BlockForm(256, 176, 5, 32, None, True),
    "Q6_K": BlockForm(256, 210, 6, 16, 32, True),
}


def pack_blocks(blocks: Tensor, type_name: str) -> Tensor:
    """A matrix's blocks as they are in the file, in panels.

    Args:
        blocks: ``[rows, blocks of a row, bytes of a block]`` uint8.
        type_name: one of :data:`FORMS`.

    Returns:
        uint8, as :class:`BlockForm` says.
    """
    form = FORMS[type_name]
    rows, count, _ = blocks.shape
    columns = count * form.file_block
    panel_bytes = form.panel_bytes(columns)
    panels = torch.empty(-(-rows // PANEL), panel_bytes, dtype=torch.uint8)
    if blocks.is_contiguous() and blocks.data_ptr() % 2 == 0 and compiled.available():
        compiled.kernels("block_panels").pack_blocks(blocks, type_name, panels)
        return panels.view(-1)
    step = max(_CHUNK // columns // PANEL, 1) * PANEL
    for start in range(0, rows, step):
        part = blocks[start : start + step]
        short = -part.shape[0] % PANEL
        if short:
            part = torch.cat((part, part.new_zeros(short, *part.shape[1:])))
        packed = _pack(part, form, type_name).view(-1, panel_bytes)
        panels[start // PANEL : start // PANEL + packed.shape[0]] = packed
    return panels.view(-1)


def _pack(raw: Tensor, form: BlockForm, type_name: str) -> Tensor:
    """Whole panels of rows as ``[panels, runs, bytes]``."""
    codes, header, scales, minima = unpack_blocks(raw, type_name)
    panels, runs = raw.shape[0] // PANEL, raw.shape[1]
    # [panels, blocks, 8, 64]: vectors of four columns of each row.
    vectors = codes.reshape(panels, PANEL, -1, 8, 4).permute(0, 2, 3, 1, 4).flatten(3)
    parts = []
    if form.bits == 8:
        parts.append(vectors.flatten(2))
    else:
        low = vectors & 15
        parts.append((low[:, :, 0::2] | low[:, :, 1::2] << 4).flatten(2))
        high, width = vectors >> 4, form.bits - 4
        for first in range(0, 8 * width, 8):
            byte = torch.zeros_like(high[:, :, 0])
            for i in range(8 // width):
                byte |= high[:, :, first // width + i] << (i * width)
            parts.append(byte)

    def by_panel(numbers: Tensor, groups: int) -> Tensor:
        """``[rows, groups of all columns]`` to bytes ``[panels, groups / groups, 16 * groups]``."""
        grouped = numbers.reshape(panels, PANEL, -1, groups).permute(0, 2, 3, 1)
        return grouped.contiguous().view(torch.uint8).flatten(2)

    parts.append(by_panel(scales, form.scales))
    if minima is not None:
        parts.append(by_panel(minima, 1))
    packed = torch.cat(parts, dim=2)
    if header:
        runs_of_blocks = packed.view(panels, runs, -1)
        packed = torch.cat((*(by_panel(each, 1) for each in header), runs_of_blocks), dim=2)
    return packed


def group_weight(blocks: Tensor, type_name: str, dtype: torch.dtype) -> GroupWeight:
    """A matrix's blocks as they are in the file, for a GPU.

    Args:
        blocks: ``[rows, blocks of a row, bytes of a block]`` uint8.
        type_name: one of :data:`FORMS`.
        dtype: of what is multiplied by it.
    """
    form = FORMS[type_name]
    parts = []
    for raw in blocks.split(max(_CHUNK // (blocks.shape[1] * form.file_block), 1)):
        codes, header, scales, minima = unpack_blocks(raw, type_name)
        codes = codes.reshape(len(raw), -1)
        if form.layered:
            # Of Q6_K they have a sign, and the others are below 64.
            scales, minima = (
                scales.view(torch.int8),
                minima if minima is None else minima.view(torch.int8),
            )
        given = (codes, scales, form.bits, dtype, minima, header)
        parts.append(GroupWeight.of_codes(*given, centred=not form.affine))
    return parts[0] if len(parts) == 1 else GroupWeight.joined(parts)


# Codes [rows, columns], the header's numbers [rows, runs], scales and minima [rows, groups].
_Parts = tuple[Tensor, tuple[Tensor, ...], Tensor, Tensor | None]


def unpack_blocks(raw: Tensor, type_name: str) -> _Parts:
    """Codes and scales of blocks ``[rows, blocks of a row, bytes of a block]``.

    Codes are from 0 on, but of 8 bits have a sign; the header is what 8-bit scales and minima are
    factors of, with the minima's sign.
    """
    return _READERS[type_name](raw)


def _half(raw: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block."""
    return raw[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _halves(run: Tensor) -> Tensor:
    """Low halves of each byte of a run, then the high ones: ``[..., n]`` to ``[..., 2 n]``."""
    return torch.cat((run & 15, run >> 4), dim=-1)


def _bit_of(word: Tensor) -> Tensor:
    """The bits of some bytes from the lowest, as 0 or 16: ``[..., n]`` to ``[..., 8 n]``."""
    shifts = torch.arange(8, dtype=torch.uint8, device=word.device)
    return ((word.unsqueeze(-1) >> shifts & 1) << 4).flatten(-2)


def _q8_0(raw: Tensor) -> _Parts:
    return raw[..., 2:], (), _half(raw, 0), None


def _q4_0(raw: Tensor) -> _Parts:
    return _halves(raw[..., 2:]), (), _half(raw, 0), None


def _q4_1(raw: Tensor) -> _Parts:
    return _halves(raw[..., 4:]), (), _half(raw, 0), _half(raw, 2)


def _q5_0(raw: Tensor) -> _Parts:
    return _halves(raw[..., 6:]) | _bit_of(raw[..., 2:6]), (), _half(raw, 0), None


def _q5_1(raw: Tensor) -> _Parts:
    return _halves(raw[..., 8:]) | _bit_of(raw[..., 4:8]), (), _half(raw, 0), _half(raw, 2)


def _factors(raw: Tensor) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """The header of Q4_K and Q5_K, and the 6-bit factors of its scales and minima."""
    scale, least, low = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = torch.cat((scale & 63, low & 15 | scale >> 6 << 4), dim=-1)
    minima = torch.cat((least & 63, low >> 4 | least >> 6 << 4), dim=-1)
    return (_half(raw, 0), -_half(raw, 2)), scales.flatten(1), minima.flatten(1)


def _q4_k(raw: Tensor) -> _Parts:
    header, scales, minima = _factors(raw)
    return _halves(raw[..., 16:].unflatten(-1, (4, 32))), header, scales, minima


def _q5_k(raw: Tensor) -> _Parts:
    header, scales, minima = _factors(raw)
    groups = torch.arange(8, dtype=torch.uint8, device=raw.device).view(8, 1)
    high = (raw[..., 16:48].unsqueeze(-2) >> groups & 1) << 4
    low = _halves(raw[..., 48:].unflatten(-1, (4, 32)))
    return low.flatten(-2) | high.flatten(-2), header, scales, minima


def _q6_k(raw: Tensor) -> _Parts:
    # Two halves of 128: runs of 32 in the low halves of 64 bytes, then in their high ones.
    low = _halves(raw[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device).view(4, 1)
    high = raw[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3
    return low | high << 4, (_half(raw, 208),), raw[..., 192:208].flatten(1), None


_READERS = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
