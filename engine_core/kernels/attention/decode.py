"""Splits and tiles of decode attention on a GPU, by arithmetic on the shapes of a call."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

# Splits of a row at most, and of one that has the device to itself.
_MOST_SPLITS, _MOST_ALONE = 64, 128
# Splits merged at a time, at least and at most.
MERGED_SPLITS = (4, 16)
# Of Hopper's multiprocessors: 32-bit registers, bytes of shared memory, and those kept back for
# each program; warps of all programs, with 168 registers a thread; schedulers of warps.
_REGISTERS, SHARED, _RESERVED, _WARPS, _SCHEDULERS = 65536, 228 * 1024, 1024, 12, 4
# Heads that are columns of products at most, and the widest of them: 8 of 256 took 83 us where as
# rows they take 74.
_TURNED_HEADS, _TURNED_DIMS = 8, 128
# KiB that leave room for 3 programs over 128 numbers, of 34 KiB, and for 6 over as many codes.
_HALF = 132


class Costs(NamedTuple):
    """Microseconds of the parts of a launch, fitted to times on an H200.

    Attributes:
        begin: of a program beside its tiles.
        split: of a row that has splits at all.
        turn: of merging some splits of some heads.
        code_turn: the same over codes: a step of one row of Llama 3 8B, weights and cache in 8-bit
            floats, takes 2.378 ms, and with that of numbers 2.402. One of Qwen2 0.5B in bfloat16
            would take 0.563 with this, and takes 0.548.
        latency: from asking for a tile to having it.
        tile: of a tile whose numbers are there, of one warp.
        kilobyte: of a tile, for each KiB of keys and values of a warp.
        exchange: of a tile, if its program has several warps.
        rows: of a tile, if heads are rows of products.
        code: of a tile of codes.
        bandwidth: bytes the device reads in one.
        crowded: times as long if more than half of the room is taken and programs find no split.
        sharing: heads as rows of numbers take that part longer if all room is taken, instead, where
            three programs or more share a multiprocessor.
        waiting: a tile of codes takes that part longer for each other warp of its scheduler.
        uneven: warps that some schedulers have beyond the mean.
    """

    begin: float = 1.6
    split: float = 1.2
    turn: float = 0.6
    code_turn: float = 0.9
    latency: float = 1.15
    tile: float = 0.145
    kilobyte: float = 0.034
    exchange: float = 0.13
    rows: float = 0.07
    code: float = 0.43
    bandwidth: float = 4.28e6
    crowded: float = 1.05
    sharing: float = 0.2
    waiting: float = 0.35
    uneven: float = 0.05


H200 = Costs()


class Launch(NamedTuple):
    """How a launch is cut, and what its kernel is compiled for.

    Attributes:
        block_g: query heads of a program, of one KV head.
        block_n: tokens of a tile.
        num_warps: warps of a program.
        num_stages: tiles in flight, their block numbers counted as one.
        merged_splits: splits of a row that are merged at a time.
        merged_heads: heads that are merged at a time.
        registers: of a thread at most; 0 leaves that to the compiler.
        items: splits of all rows at most, also those that ``pieces`` make.
        held: splits that the device attends to at a time.
        turns: turns of merging ``merged_splits`` of all heads of a program.
        tile_us: microseconds of a tile where a program's own work or wait is the longest.
        read_us: microseconds of reading a tile of all heads.
        pieces: quarters of the splits of the longest row; 0 leaves them to the plan.
        sharing: part that all takes longer where as many splits as ``held`` share the device; if
            0, programs without a split may take time.
        waiting: part that a tile takes longer for each other warp of its scheduler.
        warps: of a scheduler where as many splits as ``held`` share the device.
        shared: KiB of shared memory that multiprocessors are to have; 0 leaves it to the driver.
        even: programs come to a multiple of the multiprocessors, as :func:`evenly` has it.
        last_from: from so many splits on they are the last of all items; 0: they never are.
    """

    block_g: int
    block_n: int
    num_warps: int
    num_stages: int
    merged_splits: int
    merged_heads: int
    registers: int
    items: int
    held: float
    turns: int
    tile_us: float
    read_us: float
    pieces: int = 0
    sharing: float = 0.0
    waiting: float = 0.0
    warps: float = 0.0
    shared: int = 0
    even: bool = False
    last_from: int = 0


def turn_of(launch: Launch) -> float:
    """Microseconds of merging some splits of some heads in this launch."""
    return H200.code_turn if launch.waiting else H200.turn


class Tile(NamedTuple):
    """A tile of tokens: how many, warps of its program, tiles in flight as Triton counts them."""

    block_n: int
    num_warps: int
    num_stages: int


def tile_of(
    dims: int, number_bytes: int, block_g: int, programs: float, in_parts: bool = False
) -> Tile:
    """The tile for heads of ``dims`` dimensions, whose unsplit rows make ``programs``.

    That many of a multiprocessor. A warp with tiles of 32 tokens, which exchanges nothing with
    others, is best or near it nearly everywhere if rows are split as a plan has it. Wide heads, and
    more than 16 of them in a program, ``block_g``, take more, for their registers. Over codes heads
    of up to 64 take two, with 64 tokens.
    """
    # A fourth stage leaves room for 4 programs of 128 numbers, which are no more than with 3
    # before. Heads in two parts have room for more, and take up to 10% longer with it.
    fourth = 3 < programs <= 4 and not in_parts
    sixteens = max(1, block_g // 16)
    if number_bytes == 4:
        return Tile(16 if dims > 128 else 32, 8, 3 if dims <= 256 else 2)
    if dims > 256:
        return Tile(32, 8 if number_bytes == 1 else min(8, 4 * sixteens), 2)
    if dims > 128 and number_bytes == 2 and sixteens == 1 and programs > 3:
        # More than have room at a time with 32 tokens; with 16 there is room for 5 of 256.
        return Tile(16, 2, 3)
    if dims > 128:
        if number_bytes == 1 and sixteens == 1 and 0.3 < programs <= 3:
            # With these more rows are best unsplit, or nearly so. 8 KV heads, 32 rows of 2000
            # tokens 72 us and with 32 tokens a tile 86, of 4000 on average 139 and 169; but 24 rows
            # of 1030 40 and 35.
            return Tile(64, 4, 3)
        # Of codes four warps share a tile, but for many rows, whose programs are enough by
        # themselves: 16 query heads of 256, 8 KV heads, 64 rows of 1030 tokens 97.7 us and 71.2.
        of_codes = 4 if programs <= 3 else 1
        return Tile(32, min(8, sixteens * (of_codes if number_bytes == 1 else 2)), 3)
    if number_bytes == 1 and dims <= 64 and block_g < 16:
        # Two warps wait for half as many tiles, and a row has half as many splits to merge: 14
        # query heads, 2 KV heads, 2 rows of 60,000 tokens 27 us and with 32 tokens of a warp 32.
        return Tile(64, 2, 3)
    if number_bytes == 1:
        # Half of the bytes: a fourth stage leaves room for 8 of 128, and few programs ask for more.
        return Tile(32, sixteens, 4 if dims > 64 and block_g < 16 and programs <= 1 else 3)
    if block_g >= 16:
        return Tile(32, sixteens, 4 if dims > 64 and block_g == 16 and fourth else 3)
    if dims > 64:
        return Tile(32, 1, 4 if fourth else 3)
    if 2.9 < programs < 6:
        # In whole steps the launches before and after find more room: 256 rows of Qwen2 0.5B of
        # 1030 tokens 1.87 ms and with four stages 1.92, of 200 to 1860 1.95 and 2.02.
        return Tile(32, 1, 2)
    if programs <= 1 / 32:
        # A row has more splits than are merged in a turn or two: a step of one row of Qwen2 0.5B
        # with 1,030 tokens takes 0.545 ms and not 0.548, with 340 0.530 and not 0.532.
        return Tile(64, 1, 3)
    # With four stages there is room for 8, of which few rows' splits take the half.
    return Tile(32, 1, 4 if programs <= 1 or 6 <= programs <= 8 else 3)


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


def columns_of(block: int, rest: int) -> int:
    """Columns of a head that is ``block`` wide, or two parts if ``rest`` is not 0."""
    return block // 2 + rest if rest else block


def shared_memory(
    block_g: int, block_d: int, columns: tuple[int, int], number_bytes: int, tile: Tile
) -> int:
    """Bytes of shared memory of a program: tiles in flight, the queries, and weights exchanged."""
    numbers = sum(columns) * number_bytes + (8 if number_bytes == 1 else 0)
    held = 2 if number_bytes < 4 else 4
    weights = block_g * tile.block_n * held if tile.num_warps > 1 else 0
    tiles = (tile.num_stages - 1) * tile.block_n * numbers
    # Of heads in two parts there are as many columns of queries, too, and not ``block_d``.
    return tiles + block_g * min(block_d, columns[0]) * held + weights


def programs_held(memory: int, num_warps: int, room: int = SHARED) -> int:
    """Programs of ``memory`` bytes that a multiprocessor with ``room`` for them holds at a time."""
    return max(1, min(room // (memory + _RESERVED), _WARPS // num_warps))


def registers(memory: int, num_warps: int, turned: bool) -> int:
    """Registers of a thread that leave room for as many programs as ``memory`` of each does.

    Without a bound the compiler takes fewer than a loop needs to ask for a tile's block early and
    to overlap products, though nothing else would use them: 96 of 180 with 2 query heads of 64, 168
    of 252 with 5 of 128, where a tile took 1.1 us and not 0.65. 0 where a bound would be so low
    that numbers may be spilled. ``turned``: heads are columns, which takes fewer.
    """
    programs = programs_held(memory, num_warps)
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


def most_splits(num_rows: int) -> int:
    """Splits of a row at most.

    us of one row of 128,000 tokens with 64 and 128 on an H200: 8 heads of 256 and a KV head 86.9,
    70.3; 16 of 128 and one 69.0, 62.9; 14 of 64 and two 33.6, 30.4; latent attention of 16 heads
    179.5, 167.1. Of two rows of 30,000 the last took 85.9, 91.5.
    """
    return _MOST_ALONE if num_rows == 1 else _MOST_SPLITS


def least_items(num_rows: int) -> int:
    """Splits of rows that nothing else asks to be cut.

    However many rows there are, a few of them may be much longer than the others, which would end
    long before: 1 of 100,000 tokens beside 200 of 300.
    """
    return num_rows + min(num_rows // 2, _MOST_SPLITS)


def cut(
    tile: Tile, num_rows: int, group_size: int, kv_heads: int, block_d: int, block_dv: int,
    columns: tuple[int, int], number_bytes: int, multiprocessors: int, block_g: int,
) -> Launch:  # fmt: skip
    """The launch with a ``tile``; ``columns`` are those of a token's keys and of its values."""
    turned = block_g < 16
    memory = shared_memory(block_g, block_d, columns, number_bytes, tile)
    # More heads than 16 need more registers than that leaves, if not in the loop.
    bound = registers(memory, tile.num_warps, turned) if block_g <= 16 else 0
    resident = programs_held(memory, tile.num_warps)
    head_tiles = kv_heads * -(-group_size // block_g)
    held = resident * multiprocessors / head_tiles
    # Programs that find no split take time, so that there are few: half of those that are attended
    # to at a time where unsplit rows are no more than a program for each multiprocessor, though
    # three for each if they have room. Where rows alone are more, all of those if heads are columns
    # over numbers, which took 1% longer for it; half if heads are rows, which took 9% longer, up to
    # 21%; two thirds over codes, which took 4% longer for all of those. Few rows have two thirds
    # over codes of up to 64 dimensions, too: 24 of 128,000 tokens on average took 156 us, and with
    # half 174. Not of 128 dimensions: a step of 16 rows of Llama 3 8B took 3.106 ms with two thirds
    # and 3.063 with half.
    items = least_items(num_rows)
    three = min(held, 3 * multiprocessors / head_tiles)
    if num_rows * head_tiles <= multiprocessors:
        part = 2 / 3 if number_bytes == 1 and block_d <= 64 else 0.5
        items = max(items, int(max(part * held, three)), multiprocessors // head_tiles)
    elif num_rows <= held:
        part = 2 / 3 if number_bytes == 1 else 1.0 if turned else 0.5
        items = max(int(max(part * held, three)), num_rows * 3 // 2)
    kilobytes = tile.block_n * sum(columns) * number_bytes / 1024
    work = H200.tile + H200.kilobyte * kilobytes / tile.num_warps
    work += H200.exchange * (tile.num_warps > 1)
    work += H200.rows * (not turned) + H200.code * (number_bytes == 1)
    splits, heads = merging(bound, tile.num_warps, block_dv, group_size, block_g)
    # Measured where 3 to 9 have room. One or two programs share too little, as latent attention's,
    # those of float32 and of heads of 512 do.
    shares = resident > 2 and not turned and number_bytes > 1
    return Launch(
        block_g, *tile, splits, heads, bound, items, held,
        -(-min(group_size, block_g) // heads),
        max(work, H200.latency / (tile.num_stages - 1)),
        1024 * kilobytes * kv_heads / H200.bandwidth,
        sharing=H200.sharing if shares else 0.0,
        waiting=H200.waiting if number_bytes == 1 else 0.0,
        warps=resident * tile.num_warps / _SCHEDULERS,
    )  # fmt: skip


def launch(
    num_rows: int, group_size: int, kv_heads: int, block_d: int, block_dv: int,
    number_bytes: int,
    multiprocessors: int,
    rests: tuple[int, int] = (0, 0),
    tile: Tile | None = None,
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
        rests: of keys and values of heads that are two parts, as :func:`rest_of` has them.
        tile: the tile, if not that of :func:`tile_of`.
    """
    block_g = heads_together(group_size, block_d, number_bytes, any(rests))
    head_tiles = kv_heads * -(-group_size // block_g)
    columns = columns_of(block_d, rests[0]), columns_of(block_dv, rests[1])
    programs = num_rows * head_tiles / multiprocessors
    if tile is None:
        tile = tile_of(block_d, number_bytes, block_g, programs, any(rests))
    return evenly(
        cut(
            tile, num_rows, group_size, kv_heads, block_d, block_dv, columns, number_bytes,
            multiprocessors, block_g,
        ),
        num_rows, group_size, kv_heads, block_d, columns, number_bytes, multiprocessors,
    )  # fmt: skip


def evenly(
    launch: Launch, num_rows: int, group_size: int, kv_heads: int, block_d: int,
    columns: tuple[int, int], number_bytes: int, multiprocessors: int,
) -> Launch:  # fmt: skip
    """The launch with programs that come to all multiprocessors alike, and room for no more.

    The device gives each multiprocessor the same part of a grid's programs, if it has room for it,
    but gives 8 of an H200's 132 theirs first: 9% of those that it begins with. Programs with a
    split were the first: of 512 among 968, these had 6, others 3 or 4, and such a launch took a
    fifth longer than the 512 by themselves. Where the programs are a multiple of the
    multiprocessors, and those with a split the last, all have their part of these: 4, and 2 of the
    8.

    So it is where all have room, a row that is much longer than the others with its splits too: 128
    rows of Qwen2 0.5B take 1.184 ms a step on an H200, and 1.198 with splits first. Not where
    attention starts early, whose programs come beside those of the linear ahead (0.5B, 4 rows,
    0.551, 0.546), nor over codes of more than 64 dimensions, where rows of unequal lengths take
    longer with no more splits than have room (Llama 3 8B, 64 rows, 4.397, 4.199). Codes of up to 64
    gain, with all the shared memory that there is: over int8 Llama 3.2 1B, 32 rows, takes 1.143 ms
    and even 1.117, of unequal lengths 1.174, 1.143; Qwen2 0.5B, 200 rows, 1.487, 1.473 and 1.539,
    1.496. Few rows lose by it, who have multiprocessors to themselves (0.5B, 16 rows, 0.655 and
    0.658).

    Args:
        launch: as :func:`cut` has it.
        num_rows: as of :func:`launch`, as all that follow.
        group_size: likewise.
        kv_heads: likewise.
        block_d: likewise.
        columns: as of :func:`cut`.
        number_bytes: likewise.
        multiprocessors: likewise.
    """
    head_tiles = kv_heads * -(-group_size // launch.block_g)
    programs = num_rows * head_tiles / multiprocessors
    turned = launch.block_g < 16
    start = start_by(launch.block_g, num_rows, kv_heads, block_d, number_bytes, multiprocessors)
    at_once = start == Start.AT_ONCE and num_rows > 1
    shared = shared_of(programs, block_d, number_bytes, turned=turned, early=at_once)
    launch = launch._replace(shared=shared)
    if at_once:
        # What it prefers has room for three, beyond which some would wait for others.
        items = max(num_rows, 3 * multiprocessors // head_tiles)
        return launch._replace(items=min(launch.items, items))
    codes = number_bytes == 1
    if codes and (block_d > 64 or programs <= 0.9):
        return launch
    shared = 0 if codes else shared
    tile = Tile(launch.block_n, launch.num_warps, launch.num_stages)
    memory = shared_memory(launch.block_g, block_d, columns, number_bytes, tile)
    resident = programs_held(memory, launch.num_warps, 1024 * shared or SHARED)
    fits = least_items(num_rows) * head_tiles <= resident * multiprocessors
    if start < Start.MULTIPLIED or not fits:
        return launch
    each = min(resident, -(-launch.items * head_tiles // multiprocessors))
    items = max(num_rows, each * multiprocessors // head_tiles)
    # So few come to multiprocessors of their own also as the first.
    last_from = 1 + 3 * multiprocessors // (5 * head_tiles)
    return launch._replace(items=items, even=True, last_from=last_from, shared=shared)


def leaves_room(
    programs: int, dims: int, number_bytes: int, multiprocessors: int, *, chained: int = 0
) -> bool:
    """Whether the kernel behind attention is launched as soon as all programs of attention run.

    It may then bring its weight, which it does not wait for, while the last of these end. That is
    so where unsplit rows make two programs on most multiprocessors, which all have room beside
    others. us of a layer of Llama 3 8B on an H200 with 4-bit weights, launched behind the products
    and at once: 32 rows 94.9, 93.2, of unequal lengths 100.3, 100.1; 24 rows 85.5, 85.7; 48 rows
    139.0, 140.2. Weights of 16 bits, whose first tiles do not wait in shared memory, gain nothing:
    32 rows 154.8, 155.2. Heads of up to 64 or more than 128 and caches of 8 bits were not measured.

    A chain of linears, if one follows, leaves shared memory for one program of a multiprocessor
    over codes of up to 128 dimensions. One of 4-bit codes takes less, and leaves it over 16 bits,
    too, if heads have more than 64 dimensions; narrower ones were not measured. ms of a step of one
    row of that model, behind the products and at once: in 8-bit floats with 1,030 tokens 2.434,
    2.424, with 475 tokens 2.392, 2.363; in 4 bits 1.780, 1.765 and 1.741, 1.717.

    Args:
        programs: of unsplit rows.
        dims: of a head.
        number_bytes: of the cache.
        multiprocessors: of the device.
        chained: bits of the codes of a chain of linears that follows; 0: none does.
    """
    if chained:
        over_numbers = chained == 4 and number_bytes == 2 and dims > 64
        return dims <= 128 and (number_bytes == 1 or over_numbers)
    measured = number_bytes == 2 and 64 < dims <= 128
    return measured and 3 * multiprocessors < 2 * programs <= 4 * multiprocessors


def shared_of(
    programs: float, dims: int, number_bytes: int, *, turned: bool, early: bool = False
) -> int:
    """KiB of a multiprocessor's first cache that its programs prefer as shared memory; 0: no wish.

    The device places programs where room is first. With all that there is, some multiprocessors
    take half as many again as others, or more, and the launch waits for these. What an even share
    needs makes it even; the rest is a larger cache.

    ms of a step of 1,030 tokens on an H200, as the driver chooses and with 132 KiB: Llama 3 8B in
    8-bit floats 16 rows 3.057, 3.066; 20 rows 3.255, 3.138; 32 rows 3.423, 3.307; 64 rows 4.471,
    4.167; 128 rows 5.861, 5.492; 256 rows 9.404, 8.962. In 4 bits, over a cache in bfloat16, 16
    rows 2.484, 2.467; 32 rows 3.167, 3.132; 48 rows 4.905, 4.390; but 64 rows 4.963, 5.072. Llama
    3.2 1B, 32 rows 1.236, 1.209; 100 rows 1.872, 2.003; 200 rows 2.916, 2.875. Qwen2 0.5B, 16 rows
    0.598, 0.593 and with 100 KiB 0.578; 24 rows 0.681, 0.682.

    Args:
        programs: of a multiprocessor, of unsplit rows.
        dims: of a head's numbers, up to a power of 2.
        number_bytes: of the cache.
        turned: heads are columns of products.
        early: attention is launched at once, and asks for tokens early, of two rows or more.
    """
    if not turned or number_bytes > 2:
        return 0
    if number_bytes == 1:
        return _HALF if programs > 1 else 0
    if dims > 64:
        return _HALF if 0.9 < programs <= 3 else 0
    if early:
        return 100
    return _HALF if 1 < programs < 2.9 or programs > 8 else 0


class Start(IntEnum):
    """When the linear ahead of decode attention lets it be launched."""

    AT_ONCE = 0
    WAITED = 1
    MULTIPLIED = 2


def start_of(
    num_rows: int, group_size: int, kv_heads: int, head_dim: int, v_head_dim: int,
    number_bytes: int, multiprocessors: int,
) -> Start:  # fmt: skip
    """When attention of so many rows starts; before ``MULTIPLIED`` it asks for tokens early.

    It has its first tiles by the time that the linear ahead ends, which stores the last token
    alone. That one then takes work of its own, so that asking early is slower where attention
    starts late: over codes behind a rotation 2% of a step of Llama 3 8B.

    ms of a step on an H200, late and by this rule: Qwen2 0.5B, 2 KV heads of 64, 1 row 0.568,
    0.545; 4 rows 0.564, 0.546; 16 rows 0.606, 0.600; 32 rows 0.744, 0.732; 64 rows 0.964, 0.953;
    Llama 3.2 1B, 8 KV heads of 64, 1 row 0.910, 0.877; 16 rows 1.051, 1.016. Up to 16 rows at once
    is best (1B, 16 rows, 1.044 once it has waited), with more it is not (0.5B, 64 rows, 1.040).
    Heads of 128 gain nothing: Llama 3 8B, 8 rows, 4.262 late, 4.276 at once.

    Rows count as a power of 2. Linears take other tiles beyond 32 and 64 of them: where that number
    lay in between, a few numbers of rows alone would have a variant of a linear to themselves.

    Args:
        num_rows: as of :func:`launch`.
        group_size: likewise.
        kv_heads: likewise.
        head_dim: of queries and keys.
        v_head_dim: of values.
        number_bytes: of the cache.
        multiprocessors: of the device.
    """
    dims = max(head_dim, v_head_dim)
    in_parts = any(rest_of(dim, max(16, power_of_2(dim))) for dim in (head_dim, v_head_dim))
    block_g = heads_together(group_size, max(16, power_of_2(dims)), number_bytes, in_parts)
    return start_by(block_g, num_rows, kv_heads, dims, number_bytes, multiprocessors)


def start_by(
    block_g: int, num_rows: int, kv_heads: int, dims: int, number_bytes: int, multiprocessors: int
) -> Start:
    """As :func:`start_of`, of programs of ``block_g`` query heads of up to ``dims`` numbers.

    Heads that are columns of products are of one part.
    """
    few = power_of_2(num_rows) * kv_heads <= multiprocessors
    if number_bytes != 2 or dims > 64 or block_g > _TURNED_HEADS or not few:
        return Start.MULTIPLIED
    return Start.AT_ONCE if num_rows <= 16 else Start.WAITED
