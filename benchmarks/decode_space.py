"""The space of decode attention's cuts that ``decode_search.py`` times: tiles, and what fits.

What a program takes of a multiprocessor is estimated, so that kernels that spill are left out.
"""

from __future__ import annotations

from typing import NamedTuple

from engine_core.kernels.attention import decode

# Registers that may hold splits' results while they are merged, of each thread.
MERGED = (64, 128)
# Registers of a number of a tile's keys; codes are there twice, as they are and as 16 bits.
_KEY_REGISTERS, _CODE_REGISTERS = 0.53, 0.6
# Of a multiprocessor of Hopper: 32-bit registers, bytes of shared memory, and those kept back for
# each program; warps and programs at most.
_REGISTERS, _SHARED, _RESERVED, _WARPS, _PROGRAMS = 65536, 228 * 1024, 1024, 64, 32


class Tile(NamedTuple):
    """A tile of tokens: how many, warps of its program, tiles in flight as Triton counts them."""

    block_n: int
    num_warps: int
    num_stages: int


class Heads(NamedTuple):
    """Heads of a model, and the numbers of its cache, for which a launch is cut.

    Attributes:
        group_size: query heads of a KV head.
        kv_heads: KV heads.
        dims: a head's keys, and its values.
        bytes: of a number in the cache: 4 of float32, 1 of codes.
    """

    group_size: int
    kv_heads: int
    dims: tuple[int, int]
    bytes: int

    @property
    def widths(self) -> tuple[int, int]:
        """Both of ``dims`` up to a power of 2."""
        return max(16, decode.power_of_2(self.dims[0])), max(16, decode.power_of_2(self.dims[1]))

    @property
    def in_parts(self) -> bool:
        """Whether a head of numbers is multiplied as two parts."""
        parts = map(decode.rest_of, self.dims, self.widths)
        return self.bytes > 1 and any(parts)

    @property
    def block_g(self) -> int:
        """Query heads of a program."""
        given = (self.group_size, max(self.widths), self.bytes, self.in_parts)
        return decode.heads_together(*given)

    @property
    def programs(self) -> int:
        """Programs of an unsplit row."""
        return self.kv_heads * -(-self.group_size // self.block_g)


_TilesByWidth = dict[int, tuple[tuple[int, int, int], ...]]
# By the wider of a head's keys and values, up to a power of 2.
_TILES: _TilesByWidth = {
    64: (
        (32, 1, 2), (32, 1, 3), (32, 1, 4), (32, 1, 5), (64, 2, 2), (64, 2, 3), (64, 2, 4),
        (64, 4, 3), (128, 4, 2),
    ),
    128: (
        (32, 1, 3), (32, 1, 4), (32, 1, 5), (32, 2, 3), (32, 2, 4), (64, 2, 2), (64, 2, 3),
        (64, 4, 2), (64, 4, 3),
    ),
    256: ((16, 2, 3), (16, 2, 5), (32, 2, 2), (32, 2, 3), (32, 4, 2), (32, 4, 3), (64, 4, 2)),
    512: ((16, 4, 2), (16, 4, 3), (32, 4, 2), (32, 8, 2)),
}  # fmt: skip
# Codes take half the memory and more registers: tiles of as many bytes would spill.
_CODE_TILES: _TilesByWidth = {
    64: ((32, 1, 3), (64, 1, 3), (64, 2, 3), (64, 2, 4), (64, 4, 3)),
    128: ((32, 1, 3), (32, 1, 4), (32, 2, 3), (64, 2, 3), (64, 2, 4), (64, 4, 3)),
    256: ((32, 1, 3), (32, 2, 3), (32, 4, 3), (64, 4, 3)),
    512: ((16, 4, 3), (32, 8, 3)),
}
_FLOAT32_TILES: _TilesByWidth = {
    64: ((32, 8, 3),), 128: ((32, 8, 3),), 256: ((16, 8, 3),), 512: ((16, 8, 2),)
}  # fmt: skip


def tiles(heads: Heads) -> tuple[Tile, ...]:
    """The tiles that are worth a try.

    Raises:
        ValueError: heads are wider than 512.
    """
    width = max(64, *heads.widths)
    if width > max(_TILES):
        raise ValueError(f"decode attention: heads of {max(heads.dims)}; 512 is the most")
    by_bytes = {1: _CODE_TILES, 2: _TILES, 4: _FLOAT32_TILES}
    return tuple(Tile(*tile) for tile in by_bytes[heads.bytes][width])


def shared_memory(heads: Heads, tile: Tile) -> int:
    """Bytes of shared memory of a program: tiles in flight, the queries, and weights exchanged."""
    columns = (
        width // 2 + rest if (rest := decode.rest_of(dim, width)) and heads.bytes > 1 else width
        for dim, width in zip(heads.dims, heads.widths, strict=True)
    )
    numbers = sum(columns) * heads.bytes + (8 if heads.bytes == 1 else 0)
    held = 2 if heads.bytes < 4 else 4
    weights = heads.block_g * tile.block_n * held if tile.num_warps > 1 else 0
    return (
        (tile.num_stages - 1) * tile.block_n * numbers + heads.block_g * heads.widths[0] * held
        + weights
    )  # fmt: skip


def registers(heads: Heads, tile: Tile) -> int:
    """Registers of a thread, about as many as Triton needs on Hopper; 255 at most.

    They hold a part of the addresses and numbers of a tile, the results, and the logits.
    """
    threads = 32 * tile.num_warps
    keys, results, logits = (
        rows * columns / threads
        for rows, columns in (
            (tile.block_n, max(heads.widths)),
            (heads.block_g, heads.widths[1]),
            (heads.block_g, tile.block_n),
        )
    )
    of_key = _CODE_REGISTERS if heads.bytes == 1 else _KEY_REGISTERS
    return min(255, int(52 + of_key * keys + 1.2 * results + 1.5 * logits))


def resident(heads: Heads, tile: Tile) -> int:
    """Programs that a multiprocessor holds at a time; 0 if one is too large for it."""
    held = -(-registers(heads, tile) // 8) * 8 * 32 * tile.num_warps
    memory = shared_memory(heads, tile) + _RESERVED
    return min(_REGISTERS // held, _SHARED // memory, _WARPS // tile.num_warps, _PROGRAMS)


def merging(splits: int, heads: Heads, tile: Tile, registers: int) -> tuple[int, int]:
    """Splits, of about ``splits`` of a row, and heads that a program merges at a time.

    ``registers`` of each thread hold them.
    """
    if splits <= 1:
        return decode.RARELY_MERGED_SPLITS, 1
    least, most = decode.MERGED_SPLITS
    together = least if splits <= least else most
    room = 32 * tile.num_warps * registers // (together * heads.widths[1])
    return together, max(1, min(decode.power_of_2(min(heads.group_size, heads.block_g)), room))


def splits_of(rows: int, tokens: int, wanted: int, min_split: int) -> int:
    """Splits of each of equal rows, as the plan of a step makes them."""
    length = max(-(-rows * tokens // wanted), min_split)
    return max(1, min(-(-tokens // length), decode.MAX_SPLITS))
