"""Splits and tiles of decode attention on a GPU, by arithmetic on the shapes of a call."""

from __future__ import annotations

from typing import NamedTuple

# Splits of a row at most: enough for 8 programs on each of 132 multiprocessors from 16 unsplit.
MAX_SPLITS = 64
# Splits merged at a time: as many as a row has, within these bounds.
MERGED_SPLITS = (4, 16)
# Where splits are rare, these with one head at a time: the kernel needs 128 registers a thread then
# and not 164, so that 8 programs of 2 warps fit on a multiprocessor and not 6.
RARELY_MERGED_SPLITS = 4
# Heads that are columns leave registers for more at a time.
RARELY_MERGED_HEADS = 4
# Where there are programs enough, only rows about so many times as long as the mean are split, with
# heads of up to 64 dimensions and with larger ones. ms of a step with 1.2 and 1.5, 256 rows of 200
# to 1860 tokens: 24 layers of 2 KV heads of 64, 2.19 and 2.27; 32 of 8 of 128, 16.2 and 16.0.
_NARROW_STRETCH, _STRETCH = 1.2, 1.5
# Of the GPU on which tiles were measured.
_MULTIPROCESSORS = 132
# Of a multiprocessor of Hopper: 32-bit registers, bytes of shared memory, and those kept back for
# each program.
_REGISTERS, _SHARED, _RESERVED = 65536, 228 * 1024, 1024
# Heads that are columns of products over codes at most, and the widest of them: 8 of 256 took 83 us
# where as rows they take 74.
_TURNED_HEADS, _TURNED_DIMS = 8, 128


class Launch(NamedTuple):
    """How a launch is cut, and what its kernel is compiled for.

    Attributes:
        block_g: query heads of a program, of one KV head.
        block_n: tokens of a tile.
        num_warps: warps of a program.
        num_stages: tiles in flight, their block numbers counted as one.
        wanted: so many splits would hold all rows' tokens.
        min_split: tokens of a split at least, or merging it costs more than it saves.
        merged_splits: splits of a row that are merged at a time.
        merged_heads: heads that are merged at a time.
        uneven: as ``wanted``, of rows whose lengths differ; 0 for as many.
        registers: of a thread at most; 0 leaves that to the compiler.
    """

    block_g: int
    block_n: int
    num_warps: int
    num_stages: int
    wanted: int
    min_split: int
    merged_splits: int
    merged_heads: int
    uneven: int = 0
    registers: int = 0


class _Tile(NamedTuple):
    """The tiles of a launch; of its fields those that :class:`Launch` has not are below.

    Attributes:
        programs: to be reached on each multiprocessor by splitting rows.
        merged: registers of each thread that hold splits' results while they are merged.
        uneven: splits of a row of the mean length if rows differ, where equal ones have one.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs: float
    merged: int = 64
    min_split: int = 64
    uneven: int = 0


def _tile(dims: int, number_bytes: int, num_programs: int, few_heads: bool) -> _Tile:
    """The tile for heads of ``dims`` dimensions where unsplit rows make ``num_programs``.

    ``few_heads``: whether so few query heads have a KV head that they may be columns of products.

    By 260 points of a search on an H200 in bfloat16, heads of 64 to 256, 1 to 128,000 tokens
    (benchmarks/notes/attention.md): 1.05 times the best of the space on average. A warp with tiles
    of 32 tokens, which exchanges nothing with others, is best as soon as there are programs enough.

    Splits are merged with 128 registers of a thread where that leaves as many programs on a
    multiprocessor as are wanted: with 64 a warp takes 8 turns, each a wait for memory, for 6 splits
    of 16 heads of 128, and four take 8 for 59 of 4 heads of 192.
    """
    if number_bytes == 1:
        return _code_tile(dims, num_programs, few_heads)
    if number_bytes == 4:
        return _Tile(16 if dims > 128 else 32, 8, 3, 2)
    if few_heads:
        return _few_heads_tile(dims, num_programs)
    if dims > 128:
        if num_programs < 32:
            tile = (32, 4, 3) if num_programs < 8 else (64, 4, 2)
            return _Tile(*tile, 2, merged=128, min_split=128)
        if num_programs < 128:
            return _Tile(32, 2, 3, 2, merged=128, min_split=128)
        if 400 <= num_programs < 1024:
            return _Tile(32, 2, 2, 1)
        return _Tile(16, 2, 3, 3 if num_programs < 400 else 1)
    if dims > 64:
        if num_programs < 16:
            few = num_programs < 8
            return _Tile(64, 2, 3, 1 if few else 1.5, merged=128, min_split=64 if few else 128)
        if num_programs < 64:
            few = num_programs < 32
            return _Tile(64, 2, 3, 1 if few else 1.5, min_split=128 if few else 64)
        if num_programs < 256:
            return _Tile(32, 1, 3, 3, merged=128, min_split=256)
        if num_programs < 512:
            return _Tile(32, 2, 4, 4)
        return _Tile(32, 1, 3, 6 if num_programs < 1024 else 1, min_split=128)
    if num_programs < 4:
        return _Tile(128, 4, 2, 8)
    if num_programs < 24:
        few = num_programs < 16
        return _Tile(64, 2, 4, 1.5 if few else 1, merged=128, min_split=128 if few else 64)
    if num_programs < 64:
        return _Tile(64, 2, 3, 3)
    if num_programs < 384:
        return _Tile(32, 1, 3, 4 if num_programs < 128 else 6, min_split=128)
    if num_programs < 1024:
        # Unsplit rows have room at once with four stages, 8 programs on each multiprocessor. Of 8
        # KV heads of 64, 100 rows of 750 tokens take 5 us a layer less than with two, rows of 100
        # to 1,400 tokens 8.
        return _Tile(32, 1, 4 if num_programs >= 6 * _MULTIPROCESSORS else 2, 6)
    return _Tile(32, 1, 3, 8)


def _few_heads_tile(dims: int, num_programs: int) -> _Tile:
    """The tile for heads of up to 128 dimensions that are columns of products, of numbers.

    By 258 points of a search on an H200 in bfloat16: 1.04 times the best of the space on average,
    where tiles for heads as rows took 1.07 times. Few programs whose rows differ are cut: a step of
    32 rows of Llama 3 8B, of 200 to 1860 tokens, 5.62 and 5.34 ms.
    """
    if dims > 64:
        if num_programs < 16:
            few = num_programs < 8
            return _Tile(64, 2, 3, 1 if few else 1.5, merged=128, min_split=64 if few else 128)
        if num_programs < 32:
            return _Tile(64, 2, 3, 1, merged=128, min_split=64 if num_programs < 24 else 128)
        if num_programs < 64:
            return _Tile(64, 2, 3, 1, min_split=256)
        if num_programs < 256:
            return _Tile(32, 1, 3, 3, merged=128, min_split=256)
        if num_programs < 384:
            return _Tile(32, 1, 3, 1, min_split=256, uneven=2)
        if num_programs < 512:
            return _Tile(32, 1, 4, 1, min_split=256, uneven=2)
        if num_programs < 800:
            return _Tile(32, 1, 4, 1)
        return _Tile(32, 2, 3, 1) if num_programs < 1024 else _Tile(32, 1, 3, 1)
    if num_programs < 4:
        return _Tile(64, 2, 4, 1, merged=128)
    if num_programs < 16:
        return _Tile(64, 2, 4, 1.5, merged=128, min_split=128)
    if num_programs < 24:
        return _Tile(64, 2, 4, 1.5)
    if num_programs < 32:
        return _Tile(64, 2, 3, 2)
    if num_programs < 48:
        return _Tile(32, 1, 4, 3, min_split=128)
    if num_programs < 64:
        return _Tile(64, 2, 3, 2, min_split=256)
    if num_programs < 128:
        return _Tile(32, 1, 3, 4, min_split=128)
    if num_programs < 256:
        return _Tile(32, 1, 3, 3)
    if num_programs < 384:
        return _Tile(32, 1, 3, 6, min_split=128)
    if num_programs < 1024:
        return _Tile(32, 1, 4 if num_programs >= 6 * _MULTIPROCESSORS else 2, 6)
    return _Tile(32, 1, 3, 1)


def _code_tile(dims: int, num_programs: int, few_heads: bool) -> _Tile:
    """The tile for codes of 8 bits.

    By 90 points of a search on an H200, with heads of 64, 128 and 256 and 1 to 128,000 tokens: 1.05
    times the best of the space on average, where the tiles of numbers take 1.18 times. The work on
    a code is what the kernel waits for: few warps exchange less.
    """
    if dims > 128:
        if num_programs >= 128:
            return _Tile(32, 4, 3, 1)
        few = num_programs < 32
        return _Tile(64, 4, 3, 3 if few else 8, min_split=128 if few else 256)
    if dims > 64:
        if few_heads and num_programs >= 480:
            return _many_code_tile(num_programs)
        if 1056 < num_programs <= 1600:
            # 8 programs of a warp fit on each of 132 multiprocessors: the last of unsplit rows run
            # nearly alone.
            return _Tile(64, 2, 3, 1)
        if num_programs >= 256:
            return _Tile(32, 1, 3, 5 if num_programs < 1024 else 1)
        if num_programs >= 128:
            return _Tile(64, 2, 3, 2, min_split=128)
        return _Tile(64, 2, 3, 4 if num_programs < 64 else 2)
    if num_programs >= 64:
        return _Tile(32, 1, 3, 6 if num_programs < 384 else 16)
    return _Tile(64, 2, 3, 1, min_split=128) if num_programs < 8 else _Tile(64, 2, 3, 5)


def _many_code_tile(num_programs: int) -> _Tile:
    """The tile for codes of few heads of 65 to 128 dimensions, so many programs that none is split.

    Of these tiles a multiprocessor has room for 4, 6, 8 and 8 programs at a time. Equal rows take
    long where the last programs run nearly alone. us on an H200 with 8 KV heads of 4 heads of 128,
    rows of 1030 tokens and in brackets of 1000 on average: 64 rows 42, 46, 46 (45, 45, 50); 96 rows
    64, 59, 63 (56, 56, 66); 160 rows 101, 98, 108 (99, 99, 101); 192 rows 116, 114, 119 (112, 110,
    111); 256 rows 152, 154, 149 (149, 148, 148). 128 rows 80, 86, 76 (78, 77, 82), with heads as
    rows 73 (82).
    """
    if num_programs <= 4 * _MULTIPROCESSORS:
        return _Tile(64, 2, 4, 1)
    if _heads_are_rows(num_programs):
        return _Tile(32, 1, 3, 1)
    return _Tile(64, 2, 3, 1) if num_programs <= 12 * _MULTIPROCESSORS else _Tile(32, 1, 4, 1)


def _heads_are_rows(num_programs: int) -> bool:
    """Whether heads of more than 64 dimensions are rows of products, however few they are.

    All programs have room at once then, and a multiprocessor has hardly more than another.
    """
    return 6 * _MULTIPROCESSORS < num_programs <= 8 * _MULTIPROCESSORS


def power_of_2(count: int) -> int:
    """The least power of 2 that is no less than ``count``."""
    return 1 << (count - 1).bit_length()


def rest_of(dim: int, block: int) -> int:
    """Columns of the second of two parts of a head of ``dim`` numbers; 0 for one of ``block``.

    The first part has half of ``block``, the power of 2 that holds the head. Two parts are taken
    where they have fewer columns: 64 and 16 for 80, 64 and 32 for 96, 128 and 64 for 192.
    """
    if dim <= block // 2:
        return 0
    columns = max(16, power_of_2(dim - block // 2))
    return columns if columns < block // 2 else 0


def shared_memory(
    block_g: int, columns: tuple[int, int], number_bytes: int, block_n: int, num_warps: int,
    num_stages: int,
) -> int:  # fmt: skip
    """Bytes of shared memory of a program: tiles in flight, the queries, and weights exchanged.

    ``columns`` are those of a token's keys and of its values.
    """
    numbers = sum(columns) * number_bytes + (8 if number_bytes == 1 else 0)
    held = 2 if number_bytes < 4 else 4
    weights = block_g * block_n * held if num_warps > 1 else 0
    return (num_stages - 1) * block_n * numbers + block_g * columns[0] * held + weights


def registers(memory: int, num_warps: int, turned: bool) -> int:
    """Registers of a thread that leave as many programs as shared memory does, with ``memory`` each.

    Without a bound the compiler takes fewer than a loop needs to ask for a tile's block early and
    to overlap products, though nothing else would use them: 96 of 180 with 2 query heads of 64, 168
    of 252 with 5 of 128, where a tile took 1.1 us and not 0.65. 0 where a bound would be so low
    that numbers may be spilled. ``turned``: heads are columns, which takes fewer.
    """
    programs = max(1, min(_SHARED // (memory + _RESERVED), 16 // num_warps))
    most = _REGISTERS // (32 * num_warps * programs) // 8 * 8
    return 0 if most < (128 if turned else 168) else min(most, 255)


def merging(
    bound: int, num_warps: int, block_dv: int, group_size: int, block_g: int
) -> tuple[int, int]:
    """Splits and heads that are merged at a time: all heads if there is room, and then splits.

    Each turn is a wait for memory. ``bound`` is that of a thread's registers, of which half or more
    hold what is merged.
    """
    room = 32 * num_warps * (128 if bound >= 200 else 64) // block_dv
    heads = max(1, min(power_of_2(min(group_size, block_g)), room // MERGED_SPLITS[0]))
    return max(MERGED_SPLITS[0], min(MERGED_SPLITS[1], room // heads)), heads


def stretch(num_rows: int, block_d: int) -> int:
    """The splits wanted of rows that are many: only rows much longer than the mean are cut."""
    return max(1, int(num_rows / (_NARROW_STRETCH if block_d <= 64 else _STRETCH)))


def heads_together(group_size: int, block_d: int, number_bytes: int, in_parts: bool) -> int:
    """Query heads of a program, a power of 2; fewer than 16 are columns of its products.

    us of attention over codes with heads as rows and as columns, 8 KV heads of 4 heads of 128: 1
    row of 1030 tokens 8.6 and 7.9, 32 rows 26.5 and 25.0; rows of 1000 tokens on average, 96 of
    them 68 and 55, 192 112 and 107. Of bfloat16, 2 KV heads of 7 heads of 64: 1 row 6.2 and 5.9,
    256 rows 43.5 and 40.5; 8 of 4 heads of 64, 100 rows of 750 tokens 53.3 and 47.5.
    """
    few = group_size <= _TURNED_HEADS and block_d <= _TURNED_DIMS
    if few and number_bytes <= 2 and not in_parts:
        return _TURNED_HEADS
    return min(64, max(16, power_of_2(group_size)))


def launch(
    num_rows: int, group_size: int, kv_heads: int, block_d: int, block_dv: int,
    number_bytes: int,
    multiprocessors: int,
    in_parts: bool = False,
) -> Launch:  # fmt: skip
    """Choose how ``num_rows`` rows of one query each are attended to.

    Args:
        num_rows: at least 1, padding included.
        group_size: query heads of a KV head.
        kv_heads: KV heads.
        block_d: the wider of a head's keys and values, up to a power of 2.
        block_dv: a head's values, up to a power of 2.
        number_bytes: of the cache: 4 of float32, 2 of 16 bits, 1 of codes.
        multiprocessors: of the device.
        in_parts: whether a head is two parts, as :func:`rest_of` has it.
    """
    block_g = heads_together(group_size, block_d, number_bytes, in_parts)
    head_tiles = kv_heads * -(-group_size // block_g)
    tile = _tile(block_d, number_bytes, num_rows * head_tiles, block_g < 16)
    if number_bytes == 1 and block_d > 64 and _heads_are_rows(num_rows * head_tiles):
        block_g = max(16, block_g)
    wanted, uneven = max(1, int(tile.programs * multiprocessors) // head_tiles), 0
    if wanted <= num_rows:
        # Only rows much longer than the mean are split.
        wanted, uneven = stretch(num_rows, block_d), tile.uneven * num_rows
        merged_splits = RARELY_MERGED_SPLITS
        few_registers = block_g < 16 and number_bytes == 1
        merged_heads = min(power_of_2(group_size), RARELY_MERGED_HEADS) if few_registers else 1
    else:
        least, most = MERGED_SPLITS
        merged_splits = max(least, min(power_of_2(wanted // num_rows + 1), most))
        merged_heads = 32 * tile.num_warps * tile.merged // (merged_splits * block_dv)
        merged_heads = max(1, min(power_of_2(min(group_size, block_g)), merged_heads))
    return Launch(
        block_g, tile.block_n, tile.num_warps, tile.num_stages, wanted, tile.min_split,
        merged_splits, merged_heads, uneven,
    )  # fmt: skip
