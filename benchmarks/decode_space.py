"""The space of decode attention's cuts that ``decode_search.py`` times: tiles, and pieces of rows.

Of tiles there are those without which the best of 260 points would be over 2% slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from engine_core.kernels.attention import decode
from engine_core.kernels.attention.decode import Tile

# Bytes of shared memory that a program can have.
_SHARED = 227 * 1024


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
    def rests(self) -> tuple[int, int]:
        """Columns of the second parts of keys and values; 0 of heads that are one part."""
        if self.bytes == 1:
            return 0, 0
        first, second = map(decode.rest_of, self.dims, self.widths)
        return first, second

    @property
    def block_g(self) -> int:
        """Query heads of a program."""
        given = (self.group_size, max(self.widths), self.bytes, any(self.rests))
        return decode.heads_together(*given)

    @property
    def programs(self) -> int:
        """Programs of an unsplit row."""
        return self.kv_heads * -(-self.group_size // self.block_g)


_TilesByWidth = dict[int, tuple[tuple[int, int, int], ...]]
# By the wider of a head's keys and values, up to a power of 2.
_TILES: _TilesByWidth = {
    64: ((32, 1, 2), (32, 1, 3), (32, 1, 4), (64, 2, 3), (64, 2, 4)),
    128: ((32, 1, 3), (32, 1, 4), (32, 2, 3), (64, 2, 3)),
    256: ((16, 2, 3), (32, 2, 2), (32, 2, 3), (32, 4, 3), (64, 4, 2)),
    512: ((16, 4, 2), (16, 4, 3), (32, 4, 2), (32, 8, 2)),
}
_CODE_TILES: _TilesByWidth = {
    64: ((32, 1, 3), (64, 1, 3), (64, 2, 3), (64, 4, 3)),
    128: ((32, 1, 3), (32, 1, 4), (32, 2, 3), (64, 2, 3), (64, 4, 3)),
    256: ((32, 1, 3), (32, 2, 3), (32, 4, 3), (64, 4, 3)),
    512: ((16, 4, 3), (32, 8, 2)),
}
_FLOAT32_TILES: _TilesByWidth = {
    64: ((32, 8, 3),), 128: ((32, 8, 3),), 256: ((16, 8, 3),), 512: ((16, 8, 2),)
}  # fmt: skip


def cut_by(heads: Heads, rows: int, tile: Tile, multiprocessors: int) -> decode.Launch:
    """The engine's launch with another tile."""
    return decode.launch(
        rows, heads.group_size, heads.kv_heads, max(heads.widths), heads.widths[1], heads.bytes,
        multiprocessors, heads.rests, tile,
    )  # fmt: skip


def tiles(heads: Heads) -> tuple[Tile, ...]:
    """The tiles that are worth a try, and fit a multiprocessor.

    Raises:
        ValueError: heads are wider than 512.
    """
    width = max(64, *heads.widths)
    if width > max(_TILES):
        raise ValueError(f"decode attention: heads of {max(heads.dims)}; 512 is the most")
    by_bytes = {1: _CODE_TILES, 2: _TILES, 4: _FLOAT32_TILES}
    columns = decode.columns_of(heads.widths[0], heads.rests[0])
    given = heads.block_g, max(heads.widths), (columns, columns), heads.bytes
    return tuple(
        Tile(*tile)
        for tile in by_bytes[heads.bytes][width]
        if decode.shared_memory(*given, Tile(*tile)) <= _SHARED
    )


class Plan(NamedTuple):
    """Splits of all rows, tiles of the longest of them, and splits of a row at most."""

    count: int
    tiles: int
    splits: int


def plan(tiles: Sequence[int], pieces: int) -> Plan:
    """The plan of rows of so many ``tiles``, ``pieces`` quarters of a piece of the longest."""
    length = max(1, -(-4 * max(tiles) // pieces))
    most = decode.most_splits(len(tiles))
    used = [max(1, min(-(-n // length), most)) for n in tiles]
    each = [max(1, -(-n // splits)) for n, splits in zip(tiles, used, strict=True)]
    used = [max(1, -(-n // length)) for n, length in zip(tiles, each, strict=True)]
    return Plan(sum(used), max(each), max(used))


PIECES = tuple((4 + i % 4) << (i // 4) for i in range(29))


def chosen_pieces(tiles: Sequence[int], launch: decode.Launch) -> int:
    """The pieces that the plan of a step takes, as ``_plan_kernel`` has it."""
    costs = decode.H200
    reading = sum(tiles) * launch.read_us
    best = math.inf, 4
    most = decode.most_splits(len(tiles))
    for pieces in PIECES:
        length = max(1, -(-4 * max(tiles) // pieces))
        count = sum(max(1, min(-(-n // length), most)) for n in tiles)
        if (count > launch.items or pieces > 4 * most) and pieces > 4:
            continue
        turn = count / launch.held
        others = math.ceil(min(turn, 1.0) * launch.warps + costs.uneven) - 1
        working = launch.tile_us * length * max(1.0, turn) * (1.0 + launch.waiting * others)
        splits = -(-max(tiles) // length)
        turns = -(-splits // launch.merged_splits) * launch.turns
        merging = costs.split + decode.turn_of(launch) * turns if splits > 1 else 0.0
        cost = (working**4 + reading**4) ** 0.25 + costs.begin * turn + merging
        if launch.sharing:
            cost *= 1.0 + launch.sharing * min(turn, 1.0)
        elif 0.5 < turn < 1.0 and count < launch.items:
            cost *= costs.crowded
        best = min(best, (cost, pieces), key=lambda each: each[0])
    return best[1]
