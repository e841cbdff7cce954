"""Splits and tiles of decode attention, from bytes, programs and what a multiprocessor holds.

A model of a launch's time, whose constants a GPU is measured for, is asked for all tiles and splits
of a small space. The lengths of rows are not known when a launch is cut, since a graph is replayed
with any: the choice is the one that is least off the best over lengths from 32 tokens up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from engine_core.kernels.attention.decode import (
    MAX_SPLITS,
    MERGED_SPLITS,
    RARELY_MERGED_SPLITS,
    Launch,
    power_of_2,
    stretch,
)

# Lengths of rows for which a launch is cut, and what each counts for.
LENGTHS = (
    (32, 0.5), (128, 1.0), (512, 1.0), (1024, 2.0), (4096, 1.0), (16384, 1.0), (65536, 1.0)
)  # fmt: skip
# Programs to be reached on each multiprocessor by splitting rows, and tokens of a split at least.
PROGRAMS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
SHORTEST = (64, 128, 256, 384)
# Registers that hold splits' results while they are merged, of each thread.
_MERGED = 64
# Registers of a number of a tile's keys; codes are there twice, as they are and as 16 bits.
_KEY_REGISTERS, _CODE_REGISTERS = 0.53, 0.6
# Of a multiprocessor of Hopper: 32-bit registers, bytes of shared memory, and those kept back for
# each program; warps and programs at most.
_REGISTERS, _SHARED, _RESERVED, _WARPS, _PROGRAMS = 65536, 228 * 1024, 1024, 64, 32


class Machine(NamedTuple):
    """Parts of a launch's time, on one kind of GPU.

    Attributes:
        multiprocessors: of the device.
        bandwidth: bytes that the device reads a microsecond.
        pull: bytes that one multiprocessor reads a microsecond while others are idle.
        latency: microseconds from asking for a tile to having it.
        launch: microseconds of a launch without tokens.
        program: microseconds of a program beside its tiles.
        tile: microseconds of a tile whose numbers are there, beside its warps' work.
        work: warp instructions that a multiprocessor issues a microsecond.
        token: warp instructions of a token, and those of each of its numbers of keys.
        merge: microseconds of splitting rows at all, and of each round of merging.
    """

    multiprocessors: int = 132
    bandwidth: float = 4.5e6
    pull: float = 5.5e4
    latency: float = 0.8
    launch: float = 2.3
    program: float = 1.1
    tile: float = 0.35
    work: float = 5.0e3
    token: tuple[float, float] = (4.0, 0.17)
    merge: tuple[float, float] = (1.3, 0.8)


H200 = Machine()


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
        return max(16, power_of_2(self.dims[0])), max(16, power_of_2(self.dims[1]))

    @property
    def block_g(self) -> int:
        """Query heads of a program."""
        return min(64, max(16, power_of_2(self.group_size)))

    @property
    def tiles(self) -> int:
        """Programs of an unsplit row."""
        return self.kv_heads * -(-self.group_size // self.block_g)


_TilesByWidth = dict[int, tuple[tuple[int, int, int], ...]]
# By the wider of a head's keys and values, up to a power of 2.
_TILES: _TilesByWidth = {
    64: ((32, 1, 2), (32, 1, 3), (64, 2, 2), (64, 2, 3), (64, 2, 4), (64, 4, 3), (128, 4, 2)),
    128: ((32, 1, 3), (32, 2, 3), (32, 2, 4), (64, 2, 2), (64, 2, 3), (64, 4, 2), (64, 4, 3)),
    256: ((16, 2, 3), (32, 2, 2), (32, 2, 3), (32, 4, 2), (32, 4, 3), (64, 4, 2)),
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
    numbers = sum(heads.widths) * heads.bytes + (8 if heads.bytes == 1 else 0)
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


def merging(splits: int, heads: Heads, tile: Tile) -> tuple[int, int]:
    """Splits, of about ``splits`` of a row, and heads that a program merges at a time."""
    if splits <= 1:
        return RARELY_MERGED_SPLITS, 1
    least, most = MERGED_SPLITS
    together = least if splits <= least else most
    room = 32 * tile.num_warps * _MERGED // (together * heads.widths[1])
    return together, max(1, min(power_of_2(min(heads.group_size, heads.block_g)), room))


def microseconds(
    heads: Heads, rows: int, tokens: int, tile: Tile, splits: int, gpu: Machine = H200
) -> float:
    """The time of a launch of rows of ``tokens`` each, cut into ``splits``, by the model.

    It is the longest of three: the device's reading, the fullest multiprocessor's reading, and its
    work; and what begins and ends a launch, a program and a merge.
    """
    held = resident(heads, tile)
    if not held:
        return math.inf
    used, each = cuts(tokens, tile, splits)
    programs = rows * heads.tiles * used
    fullest = -(-programs // gpu.multiprocessors)
    active = min(fullest, held)
    token_bytes = sum(heads.dims) * heads.bytes
    token_work = gpu.token[0] + gpu.token[1] * max(heads.widths)
    count = -(-each // tile.block_n)
    # One program alone: it waits for what is in flight, and works.
    work = tile.block_n * token_work / tile.num_warps / (gpu.work / 4)
    step = max((gpu.latency + gpu.tile + work) / (tile.num_stages - 1), gpu.tile + work)
    alone = count * step
    rounds = fullest / active
    # All of the fullest multiprocessor's programs, by what it can read and issue.
    reading = fullest * each * token_bytes / gpu.pull
    issuing = fullest * count * tile.block_n * token_work / gpu.work
    device = rows * heads.tiles * tokens * token_bytes / gpu.bandwidth
    busy = max(rounds * alone, reading, issuing, device)
    start = gpu.program * (1 + 0.5 * (math.ceil(rounds) - 1) / active)
    end = 0.0
    if used > 1:
        together, at_once = merging(used, heads, tile)
        merged = -(-used // together) * -(-min(heads.group_size, heads.block_g) // at_once)
        end = gpu.merge[0] + gpu.merge[1] * merged
    return gpu.launch + start + busy + end


def cuts(tokens: int, tile: Tile, splits: int) -> tuple[int, int]:
    """Splits of a row of ``tokens`` that is cut into ``splits``, and the tokens of each at most."""
    each = -(-tokens // max(1, splits))
    each = max(1, -(-each // tile.block_n)) * tile.block_n
    return max(1, -(-tokens // each)), min(each, max(1, tokens))


def splits_of(rows: int, tokens: int, wanted: int, min_split: int) -> int:
    """Splits of each of equal rows, as the plan of a step makes them."""
    length = max(-(-rows * tokens // wanted), min_split)
    return max(1, min(-(-tokens // length), MAX_SPLITS))


def _choices(heads: Heads, rows: int, gpu: Machine) -> Iterator[tuple[Tile, int, int]]:
    """Tiles, splits wanted of all rows, and tokens of a split at least."""
    unsplit = stretch(rows, max(heads.widths))
    for tile in tiles(heads):
        if not resident(heads, tile):
            continue
        yield tile, unsplit, SHORTEST[0]
        for programs in PROGRAMS:
            wanted = int(programs * gpu.multiprocessors) // heads.tiles
            if programs <= resident(heads, tile) and wanted > rows:
                for least in SHORTEST:
                    yield tile, wanted, least


@functools.lru_cache(1024)
def choose(
    heads: Heads, rows: int, longest: int | None = None, gpu: Machine = H200
) -> tuple[Tile, int, int]:
    """A tile, splits wanted of all rows, and tokens of a split at least.

    ``longest`` is a window, or None: no row shows more tokens.
    """
    lengths = [(n, w) for n, w in LENGTHS if longest is None or n <= longest]
    lengths = lengths or [(max(1, longest or 1), 1.0)]
    times: dict[tuple[int, Tile, int], float] = {}

    def time(tokens: int, tile: Tile, splits: int) -> float:
        key = tokens, tile, splits
        if key not in times:
            times[key] = microseconds(heads, rows, tokens, tile, splits, gpu)
        return times[key]

    choices = [
        (choice, [time(n, choice[0], splits_of(rows, n, *choice[1:])) for n, _ in lengths])
        for choice in _choices(heads, rows, gpu)
    ]
    if not choices:
        raise ValueError(f"decode attention: no tile of {heads} fits a multiprocessor")
    least = [min(taken[i] for _, taken in choices) for i in range(len(lengths))]

    def off(taken: list[float]) -> float:
        return sum(
            weight * (us / best - 1)
            for us, best, (_, weight) in zip(taken, least, lengths, strict=True)
        )

    return min(choices, key=lambda each: off(each[1]))[0]


def launch(heads: Heads, rows: int, window: int | None = None, gpu: Machine = H200) -> Launch:
    """Choose how ``rows`` rows of one query each are attended to.

    Args:
        heads: of the model and its cache.
        rows: at least 1, padding included.
        window: tokens that a query sees at most; None: all.
        gpu: what it is measured to be.

    Raises:
        ValueError: heads are wider than 512, or no tile fits a multiprocessor.
    """
    tile, wanted, min_split = choose(heads, rows, window, gpu)
    splits = -(-wanted // rows) if wanted > rows else 1
    return Launch(heads.block_g, *tile, wanted, min_split, *merging(splits, heads, tile))
