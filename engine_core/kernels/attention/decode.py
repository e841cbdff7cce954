"""Splits and tiles of decode attention on a GPU, by arithmetic on the shapes of a call."""

from __future__ import annotations

from typing import NamedTuple

# Splits of a row at most, and how long they are at least, in square roots of the row's tokens: the
# last program of a row merges its splits one after the other.
MAX_SPLITS = 128
SPLIT_ROOTS = 4
# Splits that are merged at a time: as many as a row has, within these bounds.
_MERGED_SPLITS = (4, 16)
# Registers of each thread that hold splits' results while they are merged.
_MERGED = 128
# Where there are programs enough, only rows about so many times as long as the mean are split, with
# heads of up to 64 dimensions and with larger ones. ms of a step with 1.2 and 1.5, 256 rows of 200
# to 1860 tokens: 24 layers of 2 KV heads of 64, 2.19 and 2.27; 32 of 8 of 128, 16.2 and 16.0.
_NARROW_STRETCH, _STRETCH = 1.2, 1.5


class Launch(NamedTuple):
    """How a launch is cut, and what its kernel is compiled for.

    Attributes:
        block_g: query heads of a program, of one KV head.
        block_n: tokens of a tile.
        num_warps: warps of a program.
        num_stages: tiles in flight, their block numbers counted as one.
        wanted: so many splits would hold all rows' tokens.
        min_split: tokens of a split at least.
        merged_splits: splits of a row that are merged at a time.
        merged_heads: heads that are merged at a time.
    """

    block_g: int
    block_n: int
    num_warps: int
    num_stages: int
    wanted: int
    min_split: int
    merged_splits: int
    merged_heads: int


class _Tile(NamedTuple):
    """The tiles of a launch; of its fields those that :class:`Launch` has not are below.

    Attributes:
        programs: to be reached on each multiprocessor by splitting rows.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs: int = 1
    min_split: int = 64


def _tile(width: int, float32: bool, share: float) -> _Tile:
    """The tile for heads of ``width`` where unsplit rows make ``share`` programs a multiprocessor.

    Few programs take tiles of 64 tokens with many of them in flight, and splits; some take a warp
    each and are split where rows are long, so that the last of them do not run alone; many need no
    splits, and the fewer their bytes of shared memory the more of them are at work.
    """
    if float32:
        return _Tile(16 if width > 128 else 32, 8, 3, 2)
    if width <= 64:
        if share < 0.75:
            return _Tile(64, 2, 3, programs=3)
        return _Tile(32, 1, 3, programs=6, min_split=384) if share < 5 else _Tile(64, 2, 2)
    if width <= 128:
        if share < 0.75:
            return _Tile(64, 2, 3, programs=2, min_split=128)
        if share < 3:
            return _Tile(32, 1, 3, programs=6, min_split=384)
        return _Tile(64, 4, 2) if share < 24 else _Tile(32, 1, 3)
    if share < 1:
        return _Tile(32, 2, 3, programs=2, min_split=128)
    return _Tile(64, 4, 2) if share < 3 else _Tile(32, 2, 2)


def _power_of_2(count: int) -> int:
    """The least power of 2 that is no less than ``count``."""
    return 1 << (count - 1).bit_length()


def merging(splits: int, heads: int, num_warps: int, block_dv: int) -> tuple[int, int]:
    """Splits, of ``splits`` of a row, and heads that a program merges at a time."""
    least, most = _MERGED_SPLITS
    together = max(least, min(_power_of_2(splits), most))
    room = 32 * num_warps * _MERGED // (together * block_dv)
    return together, max(1, min(_power_of_2(heads), room))


def launch(
    num_rows: int, group_size: int, kv_heads: int, block_d: int, block_dv: int, float32: bool,
    multiprocessors: int,
) -> Launch:  # fmt: skip
    """Choose how ``num_rows`` rows of one query each are attended to.

    Args:
        num_rows: at least 1, padding included.
        group_size: query heads of a KV head.
        kv_heads: KV heads.
        block_d: the wider of a head's keys and values, up to a power of 2.
        block_dv: a head's values, up to a power of 2.
        float32: whether the cache is float32 and not of 16 bits.
        multiprocessors: of the device.
    """
    block_g = min(64, max(16, _power_of_2(group_size)))
    share = num_rows * kv_heads * -(-group_size // block_g) / multiprocessors
    tile = _tile(block_d, float32, share)
    splits = int(tile.programs / share)
    if splits > 1:
        wanted = num_rows * splits
        merged = merging(splits, min(group_size, block_g), tile.num_warps, block_dv)
    else:
        # Only rows much longer than the mean are split. One head is merged at a time: the kernel
        # needs fewer registers then, and more of its programs fit on a multiprocessor.
        wanted = max(1, int(num_rows / (_NARROW_STRETCH if block_d <= 64 else _STRETCH)))
        merged = _MERGED_SPLITS[0], 1
    return Launch(
        block_g, tile.block_n, tile.num_warps, tile.num_stages, wanted, tile.min_split, *merged
    )  # fmt: skip
