"""Tables of the tiles of linears, and of the kernel for each number of rows, by kind of GPU.

Another GPU gets a :class:`LinearTable` of its own in ``_TABLES``; without one it takes cuBLAS.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from engine_core.kernels.gpu import GPU
from engine_core.kernels.launch.quick import Quick, is_quick


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of a linear.

    Attributes:
        block_n: output columns of a program.
        block_k: columns of the weight that it multiplies at a time.
        splits: programs that share the columns of the weight.
        mode: "wx" multiplies the weight by x (the matrix units of Hopper want 64 rows of the
            first operand), "xw" x by the weight, "vector" without matrix units (one row). "codes"
            is of :mod:`engine_core.kernels.linear.groups.hopper`, "teams" of
            :mod:`engine_core.kernels.linear.teams.hopper`, "integers" of
            :mod:`engine_core.kernels.linear.integers.hopper`, "held" of
            :mod:`engine_core.kernels.linear.held.hopper`; all multiply as "wx".
        num_warps: warps of a program.
        num_stages: tiles in flight.
        prefetch: columns of the weight brought to the L2 cache before x is waited for.
        least_rows: rows that x is filled up to at least. From 64 on Hopper's matrix units read the
            first operand from shared memory.
        most_rows: rows of a program at most.
        more_rows: those of a second product of "teams", whose programs have all rows then.
        max_registers: of a thread; 0 for as many as there are.
        ahead: whether products of codes begin before those of the group before are added.
        teams: warp groups of a program that share x, each with ``block_n`` columns; 0 but of
            "teams".
    """

    block_n: int
    block_k: int
    splits: int = 1
    mode: str = "xw"
    num_warps: int = 4
    num_stages: int = 4
    prefetch: int = 0
    least_rows: int = 16
    most_rows: int = 128
    max_registers: int = 0
    ahead: bool = False
    teams: int = 0
    more_rows: int = 0


class ProductTile(NamedTuple):
    """The tile of a product of rows in 8-bit floats by 8-bit floats, on Hopper.

    Attributes:
        cols: output columns of a program, 64, 128 or 256.
        parts: of K, whose sums are left to what follows; 1 for a product.
        stages: tiles in flight.
        num_warps: warps of a program, 4 for each 192 x 128 results at least.
    """

    cols: int
    parts: int
    stages: int
    num_warps: int = 4


class PartsTile(NamedTuple):
    """The tile of a linear over parts of K, on Hopper.

    Attributes:
        cols: output columns of a program, 64, 128 or 256.
        parts: of K, whose sums are left to what follows.
    """

    cols: int
    parts: int


class GatedTile(NamedTuple):
    """The tile of Hopper's kernel of gate and up.

    Attributes:
        width: output columns of a program.
        groups: warp groups that multiply, each 64 rows.
    """

    width: int
    groups: int


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes for which a tile was seen to win; bounds are inclusive."""

    gated: bool
    rows: tuple[int, int]
    n: tuple[int, int]
    k: tuple[int, int]
    tile: Tile


@dataclass(frozen=True, slots=True)
class LinearTable:
    """The fastest measured kernel by shape and rows, on one kind of GPU.

    Attributes:
        tiles: shapes that take a kernel of ours.
        parted_rows: rows for which cuBLAS multiplies parts of K, which the norm adds up.
        parted_columns: the widest results for which it does.
        adds_from: rows from which cuBLAS adds its product to the residual, where it may.
        most_rows: rows beyond which no shape has a tile: prompts ask several times per layer.
    """

    tiles: tuple[Shapes, ...] = ()
    parted_rows: range = range(0)
    parted_columns: int = 0
    adds_from: int = 257
    most_rows: int = 0


# On an H200 in bfloat16. Above the tiles are the shapes that they were chosen at, and us of a chain
# with cuBLAS and with a first tile: 8 layers of Llama 3 8B, or 24 of Qwen2 0.5B, at 1024 tokens,
# and their heads, in a CUDA graph. Some tiles were replaced since by better ones in whole decode
# steps in which the norms are fused.
_HOPPER_TILES = (
    # 28672x4096: 1 row 1331, 1296; 16 rows 1503, 1465; 32 rows 1746, 1705; 64 rows 1924, 1886;
    # 128 rows 2485, 2450.
    Shapes(True, (1, 1), (8192, 1 << 20), (2048, 1 << 15), Tile(2, 1024, 1, "vector", 4, 3)),
    Shapes(True, (17, 32), (8192, 1 << 20), (2048, 1 << 15), Tile(64, 128, 1, "wx", 4, 4, 256)),
    Shapes(True, (2, 64), (8192, 1 << 20), (2048, 1 << 15), Tile(64, 128, 1, "wx", 4, 4)),
    # One turn of 132 multiprocessors, where Hopper's kernel does not take them: 37888x3584 takes
    # more, and 117 us where cuBLAS with an activation takes 79. So does what leaves many without a
    # program: 80 rows by 16384x2048 28.6, 21.8; by 16384x3072 40.5, 29.7.
    Shapes(True, (65, 128), (25344, 33792), (2048, 1 << 15), Tile(128, 64, 1, "xw", 8, 4, 256)),
    # 9728x896: 1 row 1002, 914; 16 rows 1119, 1020; 32 rows 1246, 1144; 64 rows 1357, 1273.
    Shapes(True, (1, 16), (4096, 1 << 20), (512, 2047), Tile(64, 128, 1, "wx", 4, 4)),
    Shapes(True, (17, 64), (4096, 1 << 20), (512, 2047), Tile(64, 64, 1, "wx", 4, 6, 256)),
    # Alone cuBLAS is as fast, but with it the norm before needs a launch. ms of a decode step with
    # cuBLAS and with this: 80 rows 1.207, 1.185; 96 rows 1.268, 1.241; 128 rows 1.378, 1.347; in
    # two blocks of rows 160 rows 1.520, 1.680. 17920x1536 alone took twice cuBLAS's time.
    Shapes(True, (65, 128), (4096, 12288), (512, 1023), Tile(64, 64, 1, "wx", 8, 4, 256)),
    # 128256x4096: 1 row 1237, 1224; 16 rows 1413, 1403; 32 rows 1646, 1631; 64 rows 1843, 1819.
    # 151936x896: a step of 1 row 0.560 ms, with cuBLAS and the norm before it 0.563.
    Shapes(False, (1, 1), (65536, 1 << 20), (512, 8192), Tile(16, 256, 1, "vector", 4, 4, 512)),
    Shapes(False, (2, 32), (65536, 1 << 20), (2048, 8192), Tile(64, 128, 1, "wx", 4, 4, 256)),
    Shapes(False, (33, 64), (65536, 1 << 20), (2048, 8192), Tile(128, 64, 1, "wx", 4, 4)),
    # 6144x4096: 1 row 1267, 1264; 16 rows 1444, 1438; 32 rows 1682, 1669; 64 rows 1862, 1855.
    Shapes(False, (1, 1), (5121, 8192), (2048, 8192), Tile(8, 512, 1, "vector", 4, 3, 512)),
    Shapes(False, (2, 16), (5121, 8192), (2048, 8192), Tile(64, 256, 1, "wx", 4, 3, 256)),
    Shapes(False, (17, 32), (5121, 8192), (2048, 8192), Tile(64, 256, 1, "wx", 4, 4, 256)),
    Shapes(False, (33, 64), (5121, 8192), (2048, 8192), Tile(64, 128, 1, "wx", 4, 4, 256)),
    # 4096x14336: 1 row 1296, 1267; 4096x4096: 1264, 1237.
    Shapes(False, (1, 1), (2048, 5120), (2048, 8191), Tile(4, 1024, 1, "vector", 4, 3, 1024)),
    Shapes(False, (1, 1), (2048, 5120), (8192, 1 << 15), Tile(8, 512, 1, "vector", 4, 3, 512)),
    # 4096x14336: 16 rows 1465, 1444; 32 rows 1705, 1682; 4096x4096: 1438, 1413; 1669, 1648.
    Shapes(False, (2, 32), (2048, 5120), (2048, 1 << 15), Tile(64, 256, 2, "wx", 4, 3, 256)),
    # 4096x14336: 64 rows 1886, 1862; 4096x4096: 1855, 1843.
    Shapes(False, (33, 64), (2048, 5120), (8192, 1 << 15), Tile(64, 128, 2, "xw", 4, 4, 256)),
    Shapes(False, (33, 64), (2048, 5120), (2048, 8191), Tile(32, 256, 1, "xw", 4, 4, 512)),
    # 896x4864: 1 row 914, 826; 16 rows 1020, 963; 32 rows 1144, 1095; 64 rows 1273, 1234.
    Shapes(False, (1, 1), (512, 2047), (2048, 1 << 15), Tile(4, 1024, 1, "vector", 4, 3)),
    Shapes(False, (2, 16), (512, 2047), (2048, 1 << 15), Tile(64, 128, 4, "wx", 4, 4, 256)),
    Shapes(False, (17, 32), (512, 2047), (2048, 1 << 15), Tile(64, 256, 4, "wx", 4, 3, 256)),
    Shapes(False, (33, 64), (512, 2047), (2048, 1 << 15), Tile(32, 256, 4, "xw", 4, 4, 512)),
    # 1152x896: 1 row 826, 747; 16 rows 962, 934. 896x896: 16 rows 934, 919. For 1 row, and for 17
    # and more, cuBLAS is as fast, but fuses no norm: with it 64 rows take 1223, without 1121.
    # 896x896 with tiles of 8 rows and 512 columns: a step of 1 row 0.563 ms, with these 0.556.
    Shapes(False, (1, 1), (512, 2047), (512, 2047), Tile(4, 1024, 1, "vector", 4, 3)),
    Shapes(False, (2, 64), (1024, 2047), (512, 2047), Tile(64, 128, 1, "wx", 4, 4, 256)),
    Shapes(False, (2, 16), (512, 1023), (512, 2047), Tile(64, 256, 2, "wx", 4, 3, 512)),
    Shapes(False, (17, 32), (512, 1023), (512, 2047), Tile(32, 128, 1, "xw", 8, 4, 256)),
    Shapes(False, (33, 64), (512, 1023), (512, 2047), Tile(16, 128, 1, "xw", 4, 4, 256)),
    # Alone cuBLAS is as fast, but it is launched late and fuses nothing. ms of a decode step with
    # it, with the first for 1152x896, which rotates and stores, and with both: 80 rows 1.355,
    # 1.253, 1.186; 128 rows 1.518, 1.429, 1.370; 192 rows 1.807, 1.712, 1.676; 256 rows 2.054,
    # 1.979, 1.942.
    Shapes(
        False, (65, 96), (1024, 2047), (512, 1023), Tile(32, 128, 1, "xw", 4, 4, 256, most_rows=64)
    ),
    Shapes(
        False, (97, 256), (1024, 2047), (512, 1023), Tile(64, 128, 1, "wx", 4, 4, 256, most_rows=64)
    ),
    Shapes(
        False, (65, 256), (512, 1023), (512, 1023), Tile(32, 128, 1, "xw", 4, 4, 256, most_rows=64)
    ),
)

PORTABLE = LinearTable()
# cuBLAS: fewer than 65 rows have kernels of ours. For more than 256, 896x4864 in parts still gains
# (512 rows 10.8, 9.5 us) and 4096x4096 loses (320 rows 17.3, 18.6). No columns beyond 4096 were
# seen. us of linear, addition and norm, and with the addition in the linear, at 4096 and 8192 rows:
# 4096x4096 219, 200; 450, 417. 896x896 17.1, 15.3; 37.2, 32.1. 896x4864 54.0, 52.3; 126.6, 120.8.
HOPPER = LinearTable(
    _HOPPER_TILES,
    parted_rows=range(65, 257),
    parted_columns=4096,
    most_rows=max(shapes.rows[1] for shapes in _HOPPER_TILES),
)
# By the least shared memory of a program that a table's tiles need, in bytes; the first that fits.
_TABLES = ((227 * 1024, HOPPER), (0, PORTABLE))


@functools.cache
def table_of(gpu: GPU | None) -> LinearTable:
    """The table of a kind of GPU; :data:`PORTABLE` for those that were not measured."""
    if gpu is None:
        return PORTABLE
    return next(table for least, table in _TABLES if gpu.shared_memory >= least)


def choose_tile(rows: int, n: int, k: int, gated: bool, gpu: GPU | None) -> Tile | None:
    """The tile for ``rows`` of 16-bit values by a weight ``[n, k]``, or None where cuBLAS wins."""
    table = table_of(gpu)
    if rows > table.most_rows or k % 8 or is_quick(Quick.PRODUCTS):
        return None
    tile = _fitting(table.tiles, rows, n, k, gated)
    if gpu is None or table is not HOPPER:
        return tile
    if rows == 1 and gated and n >= 1024 and k >= 512:
        held = Tile(4, 1024, 1, "vector", 4, 3)
        if tiles_held(held, -(-n // (2 * held.block_n)), k, gated, gpu.num_multiprocessors):
            return held
    return tile or _few_rows_tile(rows, n, k, gated, gpu)


def _few_rows_tile(rows: int, n: int, k: int, gated: bool, gpu: GPU) -> Tile | None:
    """The tile for up to 64 rows of a shape that no measured one is like.

    That such a kernel is launched early, and that the norm before it and what follows are part of
    it, is worth more than the best tile is: with cuBLAS for 5184x1792 a layer of 22 has two norms,
    the rotation and storing as launches of their own. Columns of a vocabulary that are shorter than
    2048 are left to cuBLAS, which was as fast there.
    """
    outputs = n // 2 if gated else n
    if not 0 < rows <= 64 or k < 512 or outputs < 512 or (not gated and n > 8192 and k < 2048):
        return None
    if rows == 1:
        # As many numbers of the weight at a time as in the table.
        columns = 2 if gated else 4 if n <= 5120 else 8 if n <= 8192 else 16
        return Tile(columns, 4096 // max(4, columns), 1, "vector", 4, 3, 512)
    if rows > 32 and outputs > 8192:
        return Tile(128, 64, 1, "wx", 4, 4)
    # Split while half of the multiprocessors have no program, if a program keeps its 1024 columns:
    # so are the tables' 4096x4096, 896x4864 and 6144x4096.
    splits, programs = 1, -(-outputs // 64)
    while 2 * splits * programs <= gpu.num_multiprocessors and k >= 2048 * splits:
        splits *= 2
    return Tile(64, 128, splits, "wx", 4, 4, 256)


def _fitting(table: tuple[Shapes, ...], rows: int, n: int, k: int, gated: bool) -> Tile | None:
    for shapes in table:
        if shapes.gated == gated and all(
            low <= size <= high
            for size, (low, high) in ((rows, shapes.rows), (n, shapes.n), (k, shapes.k))
        ):
            return shapes.tile
    return None


# Registers of a thread at most in which a weight waits, those that a program needs beside them, and
# those of a multiprocessor.
HELD_REGISTERS, _OTHER_REGISTERS, _REGISTERS = 96, 24, 65536


def tiles_held(tile: Tile, programs: int, k: int, gated: bool, multiprocessors: int) -> int:
    """Tiles of a run of K if all of them can wait for x in registers, or 0. Of 16-bit numbers.

    What is asked for before the wait is on its way while the kernel before ends: the launch takes
    as long as reading the weight or as waiting, not both. That is so where nearly all programs of
    the launch have room at once.
    """
    count = -(-k // (tile.splits * tile.block_k))
    threads = 32 * tile.num_warps
    registers = count * tile.block_n * tile.block_k * (2 if gated else 1) // (2 * threads)
    used = programs * threads * (registers + _OTHER_REGISTERS)
    fits = registers <= HELD_REGISTERS and used <= 1.1 * multiprocessors * _REGISTERS
    return count if fits else 0


# Rows of a weight that a program has if they wait in shared memory, and columns of a step.
HELD_ROWS, HELD_COLUMNS = 64, 128
# Rows of x for which that is done: one row's weights wait in registers. More than so many come in
# blocks, where programs have room for all of the weight and one of them.
HELD_FROM, HELD_TO, HELD_AT_ONCE, HELD_BLOCK = 2, 256, 64, 32
# Bytes of shared memory that programs of a multiprocessor share, and those that each has besides.
_SHARED, _SHARED_BESIDE = 227 * 1024, 1280
# Columns of a split at most, while there are multiprocessors for more of them: half of the shared
# memory, so that the weight of the next launch has room beside it.
_HELD_SPLIT = 1024


def choose_held_tile(rows: int, n: int, k: int, gated: bool, gpu: GPU | None) -> Tile | None:
    """The tile of a weight of 16-bit numbers that waits for x in shared memory, or None.

    So does one that takes at most three quarters of all there is, half of it at least beside x: it
    is on its way while the kernel before ends. Of more than 64 rows, blocks of 32 are programs of
    their own, if all of these have a multiprocessor and the whole weight waits. ms of a step of
    0.5B without, with blocks of 64 and of 32, rows of 1030 tokens, and of 200 to 1860 in brackets:
    128 rows 1.346, 1.332, 1.302 (1.124, 1.102, 1.062).
    """
    if gpu is None or gpu.capability != (9, 0) or not HELD_FROM <= rows <= HELD_TO or k % 64:
        return None
    if 8 * n * k > 3 * gpu.num_multiprocessors * _SHARED:
        return None
    block_n = HELD_ROWS // 2 if gated else HELD_ROWS
    tiles = -(-(n // 2 if gated else n) // block_n)
    most = HELD_AT_ONCE if rows <= HELD_AT_ONCE else HELD_BLOCK
    blocks = -(-rows // most)
    splits = 1
    while 2 * splits * tiles * blocks <= gpu.num_multiprocessors and k > splits * _HELD_SPLIT:
        splits *= 2
    steps = -(-k // (HELD_COLUMNS * splits))
    step_bytes = 2 * HELD_COLUMNS * HELD_ROWS
    # Chunks of 64 columns come four at a time.
    x_bytes = 512 * -(-steps // 2) * min(most, max(8, 1 << (rows - 1).bit_length()))
    neighbours = -(-tiles * splits * blocks // gpu.num_multiprocessors)
    room = _SHARED // neighbours - _SHARED_BESIDE - x_bytes
    stages = min(steps, room // step_bytes)
    if 2 * stages < steps or (blocks > 1 and (stages < steps or neighbours > 1)):
        return None
    return Tile(block_n, HELD_COLUMNS, splits, "held", 4, stages, least_rows=8, most_rows=most)


# By 8-bit floats, whose codes become 16 bits in registers: "wx" multiplies from there. On an H200,
# us with bfloat16 and with these, of single linears in a CUDA graph, with weights that take turns.
_FP8_TILES = (
    # 28672x4096: 1 row 54.8, 32.9 ("vector" 35.3); 16 rows 57.8, 32.9; 32 rows 59.7, 33.6.
    Shapes(True, (1, 32), (16384, 1 << 20), (2048, 1 << 15), Tile(64, 256, 1, "wx", 4, 3, 256)),
    # 64 rows 61.1, 48.0.
    Shapes(True, (33, 64), (16384, 1 << 20), (512, 1 << 15), Tile(64, 128, 1, "wx", 4, 3, 256)),
    # Not measured, as are those for narrow or short weights below.
    Shapes(True, (1, 1), (0, 16383), (512, 1 << 15), Tile(8, 512, 1, "vector", 4, 4, 512)),
    Shapes(True, (2, 64), (0, 16383), (512, 1 << 15), Tile(64, 128, 2, "wx", 4, 4, 256)),
    Shapes(True, (1, 64), (0, 1 << 20), (512, 1 << 15), Tile(64, 128, 1, "wx", 4, 4, 256)),
    # 6144x4096: 1 row 15.1, 9.6; 16 rows 15.9, 10.7; 32 rows 16.6, 13.3; 64 rows 17.2, 15.7.
    Shapes(False, (1, 1), (5121, 1 << 20), (512, 1 << 15), Tile(8, 1024, 1, "vector", 4, 3, 1024)),
    Shapes(False, (2, 16), (5121, 8192), (512, 1 << 15), Tile(64, 256, 2, "wx", 4, 4, 512)),
    Shapes(False, (17, 32), (5121, 8192), (512, 1 << 15), Tile(64, 128, 4, "wx", 4, 4, 256)),
    Shapes(False, (2, 64), (5121, 1 << 20), (512, 1 << 15), Tile(64, 256, 1, "wx", 4, 3, 512)),
    # 4096x4096: 1 row 10.4, 7.7; 16 rows 10.7, 9.0; 32 rows 11.2, 11.9; 64 rows 11.8, 12.3.
    # 4096x14336: 1 row 40.2, 20.6; 16 rows 30.9, 24.3; 32 rows 31.7, 28.9; 64 rows 33.8, 28.8.
    Shapes(False, (1, 1), (0, 5120), (2048, 1 << 15), Tile(4, 2048, 1, "vector", 4, 3, 2048)),
    Shapes(False, (1, 1), (0, 5120), (512, 2047), Tile(4, 1024, 1, "vector", 4, 3)),
    Shapes(False, (2, 16), (2048, 5120), (2048, 1 << 15), Tile(64, 256, 2, "wx", 4, 4, 512)),
    Shapes(False, (17, 64), (2048, 5120), (2048, 1 << 15), Tile(64, 128, 4, "wx", 4, 4, 256)),
    Shapes(False, (2, 64), (0, 2047), (512, 1 << 15), Tile(64, 128, 4, "wx", 4, 4, 256)),
    Shapes(False, (2, 64), (2048, 5120), (512, 2047), Tile(64, 128, 1, "wx", 4, 4, 256)),
)


# Numbers of a weight from which MOST_LARGE_ROWS take tiles and not MOST_FP8_ROWS. Steps of Llama 3
# 8B on an H200, by tiles and with rows quantised: 1 row 2.81 and 2.98 ms, 16 rows 3.42 and 3.26; by
# tiles and by cuBLAS 32 rows 4.01 and 3.93, 48 rows 4.80 and 4.29, 64 rows 5.09 and 4.55. Smaller
# weights were not measured.
LARGE_WEIGHT = 1 << 24
MOST_FP8_ROWS, MOST_LARGE_ROWS = 64, 8


def choose_fp8_tile(
    rows: int,
    n: int,
    k: int,
    gated: bool,
    gpu: GPU | None,
    *,
    blocks: bool = False,
    quantizes_rows: bool = True,
) -> Tile | None:
    """The tile for ``rows`` of 16-bit values by 8-bit floats ``[n, k]``, or None for many rows.

    ``blocks`` says that each 128 columns of a row have a scale of their own. If many rows are not
    quantised, the weight becomes numbers for them, which takes longer than these tiles do up to 128
    rows (for a layer of Llama 3 8B 370 us by their bytes, and 170 with the fastest tiles).
    """
    most = MOST_LARGE_ROWS if n * k >= LARGE_WEIGHT else MOST_FP8_ROWS
    if table_of(gpu) is not HOPPER or rows > (most if quantizes_rows else 128) or k % 128:
        return None
    if rows > 64:
        return Tile(128, 128, 1, "wx", 8, 3, 256) if gated else Tile(64, 128, 1, "wx", 4, 3, 512)
    tile = _fitting(_FP8_TILES, rows, n, k, gated)
    if tile is None or not blocks or tile.mode == "vector":
        return tile
    return replace(tile, block_k=128)


# Rows up to which Hopper's own kernel multiplies 8-bit floats by rows in 8-bit floats; cuBLAS
# multiplies more. For results of more than WIDE columns; for narrower ones that a norm adds up; and
# for others. us on an H200 of cuBLAS and of this, each with the activation or the norm after it, by
# 28672x4096, 4096x14336, 4096x4096 and 6144x4096: 16 rows 41.2, 33.1; 22.1, 19.4; 10.5, 8.8; 9.0,
# 8.1; 64 rows 41.9, 37.6; 22.1, 21.0; 10.5, 9.5; 9.1, 8.3; 128 rows 40.9, 41.2; 24.6, 22.8; 11.2,
# 10.5; 9.3, 9.2; 160 rows 55.6, 45.1; 27.6, 27.9; 12.2, 13.6; 10.8, 10.8; 192 rows 56.3, 49.9.
WIDE = 8192
MOST_WIDE_ROWS, MOST_PARTED_ROWS, MOST_NARROW_ROWS = 192, 128, 64
# Of wide results those that nearly fill cuBLAS's tiles of 128 rows are left to it.
FILLED_ROWS = range(65, 129)


def choose_product_tile(
    rows: int, n: int, k: int, gpu: GPU | None, *, parted: bool = False
) -> ProductTile | None:
    """The tile for ``rows`` in 8-bit floats by a weight ``[n, k]``, or None where cuBLAS is asked.

    ``parted`` says that what follows adds up parts of K.
    """
    if gpu is None or gpu.capability != (9, 0) or k % 16 or k < 1024 or n < 1024:
        return None
    most = MOST_WIDE_ROWS
    if n <= WIDE:
        most = MOST_PARTED_ROWS if parted else MOST_NARROW_ROWS
    if not 0 < rows <= most or (n > WIDE and rows in FILLED_ROWS):
        return None
    return product_tile(rows, n, k, gpu, parted=parted)


def product_rows(rows: int) -> tuple[int, int]:
    """Rows of the two products of a program, powers of 2 from 8 to 128; the second may be 0.

    Together they are 8 or 16, or the rows up to the next multiple of 32; for more than 192, 256.
    """
    if rows <= 16:
        return 8 if rows <= 8 else 16, 0
    if rows > 192:
        return 128, 128
    padded = -(-rows // 32) * 32
    first = 1 << (padded.bit_length() - 1)
    return min(128, first), padded - min(128, first)


def product_tile(rows: int, n: int, k: int, gpu: GPU, *, parted: bool) -> ProductTile:
    """That tile, whether or not cuBLAS is faster.

    Every program reads its rows again from the L2 cache: more rows want more columns a program, as
    long as all multiprocessors have one. us by 28672x4096 with 64, 128 and 256 columns: 32 rows
    35.0, 36.1, 35.5; 64 rows 38.3, 38.0, 37.6; 160 rows 48.4, 45.1, 47.7; 192 rows 55.8, 52.8,
    49.9. By 4096x14336, 64 columns in 2 parts and 128 in 4: 32 rows 19.9, 20.6; 128 rows 22.8,
    31.0.
    """
    padded = sum(product_rows(rows))
    if padded == 32:
        return _tile_of_32_rows(n, k, gpu, parted)
    cols = 64
    if n > WIDE:
        large = padded in (64, 192) and n <= 256 * gpu.num_multiprocessors
        cols = 256 if large else 128
    programs = -(-n // cols)
    parts = _parts(programs, k, gpu) if parted else 1
    # Two programs share a multiprocessor's memory if there are as many and three tiles are left.
    step = (cols + padded) * 128
    stages = 112 * 1024 // step
    if programs * parts <= gpu.num_multiprocessors or stages < 3:
        stages = 226 * 1024 // step
    return ProductTile(cols, parts, min(8, stages), 8 if cols == 256 or padded == 256 else 4)


def _parts(programs: int, k: int, gpu: GPU) -> int:
    """Parts of K until three quarters of the multiprocessors have a program."""
    parts = 1
    while parts < 8 and k >= 1024 * parts and programs * parts < 0.75 * gpu.num_multiprocessors:
        parts *= 2
    return parts


# Steps of K that are long enough to have more tiles in flight.
_LONG_STEPS = 48


def _tile_of_32_rows(n: int, k: int, gpu: GPU, parted: bool) -> ProductTile:
    """The tile for 17 to 32 rows, by whole steps of Llama 3 8B on an H200 and not by single times.

    The tiles that are on their way while a small kernel runs, an activation or a norm, are read at
    no cost. What is there before that only takes the memory from the product before: so a program
    that starts when the one before has left its multiprocessor, with all of its memory, is better
    than one beside it. A projection back is the exception, for attention ends multiprocessor by
    multiprocessor, but without parts the norm behind it reads a quarter. ms of a step of 32 rows,
    3.522 to 3.526 with 64 columns and 8 tiles in flight everywhere: down in 2 parts with 12 tiles
    3.495, in 4 parts with 8 3.527; o in one part with 16 tiles 3.507, in two with 16 3.599, both in
    one 3.615; q, k and v with 16 tiles 3.501, and 4 3.627. On another card 3.495, with these
    together 3.333, and with gate and up of 128 columns besides, 3 and 5 tiles, 3.451 and 3.376.
    """
    programs = -(-n // 64)
    short = k < 128 * 2 * _LONG_STEPS
    few = 0.45 * gpu.num_multiprocessors <= programs <= gpu.num_multiprocessors
    parts = _parts(programs, k, gpu) if parted and not (short and few) else 1
    if parts * programs > gpu.num_multiprocessors:
        return ProductTile(64, parts, 8)
    most = 8 if short else 12
    if parts == 1:
        most = 16
    return ProductTile(64, parts, max(3, min(most, -(-k // (128 * parts)))))


# Rows up to which the portable kernel multiplies codes of groups as they are. For more they become
# numbers first, which writes and reads 4 bytes for each code; up to here cuBLAS's time is that of
# reading weights.
MOST_GROUP_ROWS = 256


def choose_group_tile(
    rows: int, n: int, k: int, gated: bool, gpu: GPU | None, most_rows: int | None = None
) -> Tile | None:
    """The tile for ``rows`` of 16 bits by integers with scales of groups, or None for many rows.

    A tile has one block of 128 columns, so that scales are applied to its products. K is split
    until multiprocessors have programs enough. With capability 9.0 chosen by times of Llama 3 8B's
    linears in 4 bits, us a layer by 1, 32 and 128 rows: 69, 92 and 199, of the fastest tiles for
    each 68, 88 and 190, and of bfloat16 120, 122 and 134. More than 64 rows of a program spill, so
    that rows come in blocks of 64. Narrow and short weights have :func:`_small_group_tile`.
    """
    known = gpu is not None and gpu.capability >= (8, 0)
    if gpu is None or not known or not 0 < rows <= (most_rows or MOST_GROUP_ROWS) or k % 8:
        return None
    outputs = n // 2 if gated else n
    if table_of(gpu) is HOPPER and (k < 2048 or (outputs < 2048 and not gated)):
        return _small_group_tile(rows, outputs, k, gated, gpu.num_multiprocessors)
    if table_of(gpu) is not HOPPER:
        tile = Tile(64, 128, 1, "wx", 8 if gated and rows > 64 else 4, 2 if rows > 64 else 3, 256)
        enough = 1.5 if rows <= 64 else 0
    elif rows <= 16:
        tile, enough = Tile(64, 128, 1, "wx", 4, 4 if gated else 6, 1024), 2.2
    elif rows <= 64:
        tile, enough = Tile(128 if rows <= 32 else 64, 128, 1, "wx", 4, 4, 1024), 1.4
    else:
        tile = Tile(64 if gated else 128, 128, 1, "wx", 4, 3, 1024, most_rows=64)
        enough = 1.4
    programs = -(-outputs // tile.block_n) * -(-rows // tile.most_rows)
    splits = 1
    while splits < 8 and programs * splits < gpu.num_multiprocessors * enough:
        splits *= 2
    while splits > 1 and k < 512 * splits:
        splits //= 2
    return replace(tile, splits=splits)


def choose_one_row_tile(k: int, gpu: GPU | None) -> Tile | None:
    """The tile of one row by 8-bit codes with scales of whole rows, or None where others are.

    A program has whole rows of the weight. us on an H200 with the tile of
    :func:`choose_group_tile` and with this: 2048x1536 5.1, 4.0; 1536x1536 6.2, 5.0; 17920x1536,
    gated, 15.1, 13.8. Where columns are no multiple of a step it takes two to four times as long.
    """
    if table_of(gpu) is not HOPPER or k % 512 or k > 2048:
        return None
    return Tile(4, 512, 1, "vector", 4, 3)


def _small_group_tile(rows: int, outputs: int, k: int, gated: bool, room: int) -> Tile:
    """The tile of weights that give few programs, or short ones: 64 columns, or 32 if those do.

    K is split until there are programs enough, but into runs that are long enough. Within 1 to 5%
    on average of the fastest of 12 tiles for 12 weights of 0.5B, 1.5B and between, in 4 and in 8
    bits, on an H200, where splits of 512 columns at least, and 128 output columns for 17 to 32
    rows, took 12, 10, 29, 9 and 19% longer with 1, 16, 32, 64 and 128 rows. us of these, with 4
    bits, by the tiles before and by these: 896x896 7.7, 5.3; 7.8, 5.5; 9.9, 7.1; 10.2, 8.6; 13.4,
    9.6. 1536x1536 8.3, 6.4; 8.7, 7.0; 11.1, 7.6; 11.3, 9.2; 14.7, 11.0.
    """
    if rows <= 16:
        stages, enough, least, wide = 4 if gated else 6, 1.2, 224, 0.5
    elif rows <= 64:
        stages, enough, least, wide = 4, 1.2 if rows <= 32 else 0.8, 384, 0.25
    else:
        stages, enough, least, wide = 3, 0.8, 512, 0.25
    most_rows, most_splits = 64 if rows > 64 else 128, 2 if gated else 8
    block_n, splits = 0, 1
    for block_n in (64, 32):
        programs, splits = -(-outputs // block_n) * -(-rows // most_rows), 1
        while splits < most_splits and programs * splits < room * enough:
            more = 2 * splits
            # Steps of 128 columns of each; the last one has some, too.
            steps = -(-k // (128 * more))
            if k < least * more or steps * (more - 1) * 128 >= k:
                break
            splits = more
        if programs * splits >= room * wide:
            break
    return Tile(block_n, 128, splits, "wx", 4, stages, 1024, most_rows=most_rows)


# Output columns of a program that multiplies by 4-bit codes on Hopper.
CODES_BLOCK_N = 64
# Columns of a step of 8-bit codes.
BYTES_STEP = 128


def choose_codes_tile(rows: int, n: int, k: int, gated: bool, gpu: GPU | None) -> Tile | None:
    """The tile of Hopper's own kernel for 4-bit codes, or None where it was not seen to be faster.

    By the times of Llama 3 8B's linears on an H200, us with the tile of :func:`choose_group_tile`
    and with this. 28672x4096, gated: 1 row 34.1, 22.2; 16 rows 35.2, 25.1; 32 rows 42.7, 27.5; 64
    rows 54.7, 69.5. 4096x14336: 18.6, 13.0; 19.5, 14.9; 24.2, 18.9; 35.8, 23.9. 6144x4096: 10.8,
    8.1; 11.2, 9.1; 14.0, 10.4; 19.8, 15.4. 4096x4096: 7.3, 6.4; 7.9, 8.0; 10.2, 9.2; 12.9, 12.5.
    Narrower and shorter weights were not measured.
    """
    outputs = n // 2 if gated else n
    if gpu is None or gpu.capability != (9, 0) or outputs < 2048 or k < 2048 or k % 8:
        return None
    if not 0 < rows <= (32 if gated else 64):
        return None
    if rows <= 16:
        enough, stages, registers = 2.2, 2, 0 if gated else 128
    elif rows <= 32:
        enough, stages, registers = 1.6, 3 if gated else 2, 0 if gated else 168
    else:
        enough, stages, registers = 1.4, 2, 168
    splits = 1
    while splits < 8 and -(-outputs // CODES_BLOCK_N) * splits < gpu.num_multiprocessors * enough:
        splits *= 2
    while splits > 1 and k < 512 * splits:
        splits //= 2
    if not gated and 16 < rows <= 32 and k >= 2048 * splits:
        stages = 4
    return Tile(
        *(CODES_BLOCK_N, 256, splits, "codes", 4, stages),
        least_rows=8,
        most_rows=64,
        max_registers=registers,
    )


# Rows up to which teams multiply by codes where they are faster than by the numbers.
MOST_TEAMS_ROWS = 1024


def _most_rows_of_teams() -> int:
    """By numbers quick steps of many rows have the kernels of all others."""
    return MOST_GROUP_ROWS if is_quick(Quick.PRODUCTS) else MOST_TEAMS_ROWS


def _in_blocks(rows: int) -> int:
    """As many rows as their tile is chosen for: whole blocks of 128 of many, for few variants."""
    return rows if rows <= MOST_GROUP_ROWS else -(-rows // 128) * 128


def _numbers_us(rows: int, n: int, k: int, bits: int) -> float:
    """Microseconds on an H200 of making numbers of codes and multiplying ``rows`` by these.

    As by 140 times of 257 to 1024 rows by ten weights: numbers take 1.25 times as long as the bytes
    that are read and written at 4.28 TB/s.
    """
    return n * k * ((bits / 8 + 2) * 1.25 / 4.28e6 + 2 * (rows + 64) / 850e6) + 5


# Programs of teams that have room at once: the least share that has to be there.
_TEAMS_SHARE = 0.8
# Rows of a program of teams with two products, each of a power of 2.
_TWO_PRODUCTS = {48: (32, 16), 80: (64, 16), 96: (64, 32), 160: (128, 32), 192: (128, 64)}
# Microseconds on an H200 of a step of 256 columns by so many teams with so many rows of x, of a
# program's beginning and end, and of splitting K once more; and the least part of the
# multiprocessors that has a program.
_TEAMS_STEPS = {
    (2, 64): 0.85, (2, 80): 1.15, (2, 96): 1.25, (2, 128): 1.5, (2, 160): 2.0, (4, 64): 1.7,
}  # fmt: skip
_TEAMS_BEGIN, _TEAMS_SPLIT, _TEAMS_LEAST_SHARE = 7.0, 3.0, 0.45


def choose_teams_tile(rows: int, n: int, k: int, gated: bool, gpu: GPU | None) -> Tile | None:
    """The tile of 4-bit codes by teams, or None where another takes less.

    For more than 64 rows :func:`_teams_of_many_rows` says which, and for more than 32 of a gated
    weight that has not nearly one program a multiprocessor. For more than 256 it is None where
    numbers are faster. Else it is None where teams were not seen to be faster by the times of Llama
    3 8B's linears on an H200, us with the tile of :func:`choose_codes_tile` and with this.
    28672x4096, gated: 16 rows 24.6, 19.1; 32 rows 25.6, 21.1; 64 rows 54.7 (with the tile of
    :func:`choose_group_tile`), 40.4. 32 rows by 4096x14336 16.9, 13.9; by 4096x4096 7.8, 7.2; but
    by 6144x4096 8.5, 9.3 at best, and 16 rows by 4096x14336 13.2, 13.2. Only where all programs
    have room at once, and few multiprocessors are left without one. In layers of 32 rows, where
    launches follow one another, 4096x14336 takes 0.5 us less with three tiles in flight than with
    four, and 4096x4096 0.3 with three and half of the registers.
    """
    if gpu is None or gpu.capability != (9, 0) or k < 2048 or k % 256:
        return None
    if not 2 <= rows <= _most_rows_of_teams():
        return None
    room = gpu.num_multiprocessors
    outputs = n // 2 if gated else n
    if rows > 64:
        return _teams_of_many_rows(_in_blocks(rows), outputs, k, gated, room)
    block_n, teams, splits, registers = CODES_BLOCK_N, 2, 1, 0
    stages, least, ahead = 4, 8, False
    if gated:
        block_n //= 2
        if rows <= 16:
            # Fewer rows than 16 were not measured: they are filled up.
            teams, least = 4, 16
        elif rows <= 32:
            # Two programs a multiprocessor; one of four teams takes 23.0 us.
            room, stages, registers = 2 * room, 3, 80
        else:
            teams, stages = 4, 2
    elif 16 < rows <= 32:
        while splits < 4 and 2 * splits * -(-outputs // (teams * block_n)) <= room:
            splits *= 2
        if k < 1024 * splits:
            return None
        stages, ahead = 3, k > 1024 * splits
        if not ahead:
            # A program of the gated weight behind has room beside this one, and this one beside two
            # of attention before: their first tiles come while others end. Products that are begun
            # ahead would not fit: ptxas has each wait for the one before then.
            registers = 88
    else:
        return None
    programs = splits * -(-outputs // (teams * block_n))
    if not _TEAMS_SHARE * room <= programs <= room:
        many = gated and rows > 32
        return _teams_of_many_rows(rows, outputs, k, gated, room) if many else None
    return Tile(
        *(block_n, 256, splits, "teams", 4, stages),
        least_rows=least,
        most_rows=64,
        max_registers=registers,
        ahead=ahead,
        teams=teams,
    )


@functools.cache
def _teams_of_many_rows(rows: int, outputs: int, k: int, gated: bool, room: int) -> Tile | None:
    """The tile of many rows that takes the least time, by turns of the multiprocessors.

    A program reads and converts its part of the weight once for all of its rows: us of Llama 3 8B's
    linears on an H200 with the tile of :func:`choose_group_tile`, whose programs have 64, and with
    this: 28672x4096, gated: 128 rows 104, 54; 256 rows 201, 109. 4096x14336 57.9, 33.9; 88.6, 52.8.
    4096x4096 25.3, 16.4; 32.4, 21.3. 6144x4096 39.4, 22.7; 49.5, 35.9. 80 rows by 28672x4096 with
    128 rows of a program and with 64 and 32 in two products 55.5, 48.7; by 37888x3584 72.9, 64.3;
    by 4096x14336 35.0, 30.3. 48 rows by 37888x3584 with the tile of :func:`choose_group_tile` and
    with these 89.2, 50.8, by 16384x2048 19.6, 12.3. Programs of 80 and of 160 rows, and before: 80
    rows by 28672x4096 47.7, 48.9; by 37888x3584 62.9, 68.0; 160 rows 77.5, 94.3; 103, 114; by
    4096x14336 44.8, 51.5; by 16384x2048 22.4, 33.5.
    """
    found: list[tuple[float, Tile]] = []
    for (teams, of_program), step_us in _TEAMS_STEPS.items():
        block_m, more = _TWO_PRODUCTS.get(of_program, (of_program, 0))
        if (teams > 2 and not gated) or (more and not block_m < rows <= of_program):
            continue
        if rows <= 64 < of_program:
            continue
        block_n = CODES_BLOCK_N // 2 if gated else CODES_BLOCK_N
        tiles = -(-outputs // (teams * block_n)) * -(-rows // of_program)
        for doubled in range(1 if gated else 3):
            splits = 1 << doubled
            turns = -(-tiles * splits // room)
            run_us = -(-k // (256 * splits)) * step_us + _TEAMS_BEGIN + _TEAMS_SPLIT * doubled
            if k < 1024 * splits or tiles * splits < _TEAMS_LEAST_SHARE * room:
                continue
            # More numbers of a program leave no room for a third tile in flight or products ahead.
            small = teams * of_program == 128
            tile = Tile(
                *(block_n, 256, splits, "teams", 4, 3 if small else 2),
                least_rows=block_m,
                most_rows=block_m,
                ahead=small,
                teams=teams,
                more_rows=more,
            )
            found.append((turns * run_us, tile))
    return _faster_than_numbers(found, rows, outputs * (2 if gated else 1), k, 4)


def _faster_than_numbers(
    found: list[tuple[float, Tile]], rows: int, n: int, k: int, bits: int
) -> Tile | None:
    """The one of least microseconds; for many rows None if the numbers take no longer."""
    us, tile = min(found, key=lambda each: each[0], default=(0.0, None))
    # What is said of turns is a tenth too much on average.
    if rows > MOST_GROUP_ROWS and us * 0.9 >= _numbers_us(rows, n, k, bits):
        return None
    return tile


# Microseconds on an H200 of a step of 128 columns of 8-bit codes by two teams with so many rows of
# x, of programs that share a multiprocessor; of those that are alone, which have more tiles in
# flight; and of three teams.
_BYTES_SHARED = {16: 0.6, 32: 0.83, 48: 0.9, 64: 0.94, 80: 1.2, 96: 1.32}
_BYTES_ALONE = {
    16: 0.41, 32: 0.45, 48: 0.55, 64: 0.52, 80: 0.72, 96: 0.8, 128: 0.85, 160: 1.16, 192: 1.2,
}  # fmt: skip
_BYTES_OF_THREE = {80: 1.06, 96: 1.1, 128: 1.25, 160: 1.55}
# Of a launch, of splitting K once more, and of each million of sums that splits leave.
_BYTES_BEGIN, _BYTES_SPLIT, _BYTES_SUMS = 3.7, 1.3, 2.7
# Steps from which a program is faster that leaves another no room, and the least part of the
# multiprocessors that has a program. Bytes of tiles in flight, by teams and programs that share a
# multiprocessor.
_BYTES_LONG, _BYTES_LEAST_SHARE = 14, 1 / 3
_BYTES_FLIGHT = {(2, 2): 97 * 1024, (2, 1): 197 * 1024, (3, 1): 172 * 1024}
# Codes of a weight from which 33 to 64 rows take the tile.
_BYTES_LEAST_CODES = 1 << 23


def choose_bytes_tile(rows: int, n: int, k: int, gated: bool, gpu: GPU | None) -> Tile | None:
    """The tile of 8-bit codes with scales of whole rows by teams, or None where another takes less.

    The one that takes least by turns of the multiprocessors and steps. us on an H200 with the tile
    of :func:`choose_group_tile` and with this, 4, 32, 64, 128 and 256 rows: 28672x4096, gated,
    45.9, 31.6; 54.0, 32.8; 54.0, 35.1; 102, 58.3; 199, 116. 4096x14336 27.4, 21.3; 28.2, 23.4;
    36.3, 26.9; 49.2, 39.5; 76.4, 54.6. 4096x4096 14.9, 10.1; 15.6, 11.1; 17.5, 15.1; 24.4, 17.4;
    29.8, 23.7. 6144x4096 16.0, 12.8; 18.3, 15.3; 22.8, 19.2; 31.3, 24.5; 47.7, 35.3. 2048x2048
    7.1, 7.0; 9.5, 8.0; 9.7, 10.2 (left to the other); 14.3, 11.6; 17.3, 12.4. By one product and by
    two, 80 rows by 64 and 32, 160 by 128 and 64: 28672x4096 59.0, 47.2; 113, 78.8. 4096x14336 39.3,
    34.2; 56.7, 54.4. By 64 and 16, and by 128 and 32: 28672x4096 42.7; 76.5. 4096x14336 30.5; 48.4.
    """
    if gpu is None or gpu.capability != (9, 0) or k < 2048 or k % 8:
        return None
    if not 0 < rows <= _most_rows_of_teams() or (32 < rows <= 64 and n * k < _BYTES_LEAST_CODES):
        return None
    outputs = n // 2 if gated else n
    return _bytes_tile(_in_blocks(rows), outputs, k, gated, gpu.num_multiprocessors)


def _rows_of_teams(rows: int) -> list[int]:
    """Rows that a program of teams may have of so many."""
    both = [all_ for all_, (first, _) in _TWO_PRODUCTS.items() if first < rows <= all_]
    single = [64, 128] if rows > 64 else [max(16, 1 << (rows - 1).bit_length())]
    return single + both


def _bytes_step(
    teams: int, of_program: int, rows: int, steps: int, has_room: bool
) -> tuple[float | None, int]:
    """Microseconds of a step, None without a tile, and programs that share a multiprocessor.

    ``has_room`` says that each of the launch has one of its own. There the ones that leave another
    room let the first tiles of the next launch come early, which is worth more than tiles in flight
    where steps are few.
    """
    if teams == 3:
        return _BYTES_OF_THREE.get(of_program), 1
    if of_program >= 128:
        return _BYTES_ALONE[of_program], 1
    if not has_room:
        return _BYTES_SHARED[of_program], 2
    leaves_room = of_program == 48 or (
        of_program <= 64 and (rows > 64 or (of_program < 64 and steps < _BYTES_LONG))
    )
    return _BYTES_ALONE[of_program], 2 if leaves_room else 1


@functools.cache
def _bytes_tile(rows: int, outputs: int, k: int, gated: bool, multiprocessors: int) -> Tile | None:
    block_n = CODES_BLOCK_N // 2 if gated else CODES_BLOCK_N
    found: list[tuple[float, Tile]] = []
    forms = itertools.product(_rows_of_teams(rows), (2, 3), range(1 if gated else 4))
    for of_program, teams, doubled in forms:
        splits = 1 << doubled
        blocks = -(-rows // of_program)
        programs = -(-outputs // (teams * block_n)) * blocks * splits
        steps = -(-k // (BYTES_STEP * splits))
        has_room = programs <= multiprocessors
        step_us, neighbours = _bytes_step(teams, of_program, rows, steps, has_room)
        few = programs < _BYTES_LEAST_SHARE * multiprocessors
        if step_us is None or few or k < 512 * splits:
            continue
        turns = -(-programs // (neighbours * multiprocessors))
        # Of the blocks' rows, so that few numbers of rows have all tiles that there are.
        sums = blocks * of_program * outputs * splits / 1e6 if doubled else 0
        us = turns * steps * step_us + doubled * _BYTES_SPLIT + sums * _BYTES_SUMS
        block_m, more = _TWO_PRODUCTS.get(of_program, (of_program, 0))
        step_bytes = BYTES_STEP * (teams * CODES_BLOCK_N + 2 * of_program)
        # With 80 rows five take up to 6% longer than four.
        most = 6 if of_program <= 64 else 4
        stages = min(most, _BYTES_FLIGHT[teams, neighbours] // step_bytes)
        if neighbours == 2 and of_program == 64 and not (gated or has_room or doubled):
            # Heads that are rotated need 32 KiB to bring results to their order, others 16.
            stages -= 1
        tile = Tile(
            *(block_n, BYTES_STEP, splits, "teams", 4, stages),
            least_rows=block_m,
            most_rows=block_m,
            max_registers=80 if neighbours == 2 else 0,
            teams=teams,
            more_rows=more,
        )
        found.append((_BYTES_BEGIN + us, tile))
    return _faster_than_numbers(found, rows, outputs * (2 if gated else 1), k, 8)


# Columns at most of a program that multiplies integers on Hopper.
INTEGERS_RUN = 4096


class BlockKind(NamedTuple):
    """A weight in GGUF blocks, as far as its tile depends on it.

    Attributes:
        group: codes that share a scale.
        bits: of a code.
        floats: whether scales are floats, and not factors of those of super-blocks.
        minima: whether there are minima.
    """

    group: int
    bits: int
    floats: bool
    minima: bool


def choose_blocks_tile(
    rows: int, n: int, k: int, gated: bool, gpu: GPU | None, kind: BlockKind
) -> Tile | None:
    """The tile of Hopper's own kernels for GGUF blocks.

    None where neither was seen to be faster than that of :func:`choose_group_tile`. By the times of
    Llama 3 8B's linears on an H200, us with that one and as numbers. 28672x4096, gated, Q4_K: 1 row
    62.4, 35.3; 16 rows 65.4, 41.0; 32 rows 153, 51.1; Q6_K 16 rows 73.0, 54.8; Q4_0 8 rows 38.1,
    23.3; 32 rows 46.8, 36.1; Q5_1 8 rows 98.8, 37.9; 32 rows 216, 52.4; Q8_0 8 rows 52.9, 37.9; 32
    rows 81.2, 38.3. 4096x14336, Q4_K: 16 rows 37.0, 22.3; 32 rows 46.2, 26.4; Q6_K 16 rows 59.0,
    34.5; 32 rows 60.3, 47.3; Q8_0 16 rows 33.5, 20.1, but with 32 rows 25.1, 27.6.

    As numbers and as integers. 28672x4096, Q4_K: 1 row 34.9, 21.5; 8 rows 34.6, 31.2; Q4_0: 4 rows
    23.2, 21.1; 8 rows 23.3, 30.2; Q5_1: 4 rows 37.3, 31.9. 4096x14336, Q4_K: 1 row 18.5, 12.9; 8
    rows 19.0, 19.6; Q4_0: 4 rows 17.3, 12.7; 8 rows 17.5, 22.1. Q6_K, 1 row: 298, 101 for
    128256x4096 and 36.2, 15.7 for 4096x14336.
    """
    tile = choose_codes_tile(rows, n, k, gated, gpu)
    narrow = kind.group == 16
    if gpu is None or tile is None or rows > (16 if gated and narrow else 32):
        return None
    if kind.bits == 8 and rows > 16 and not gated and k > 8192:
        return None
    splits, tiles = tile.splits, -(-(n // 2 if gated else n) // CODES_BLOCK_N)
    two_each = 2 * gpu.num_multiprocessors
    # Two programs have room, and a third would wait: us of 28672x4096, Q8_0, 1 row in two splits
    # and in one, as integers 36.8, 32.3, as numbers 36.9, 34.1.
    while kind.bits == 8 and gated and splits > 1 and tiles * splits > two_each:
        splits //= 2
    # Four have: us of 4096x14336, Q4_0, 32 rows in four splits and in eight 29.1, 19.9.
    small = kind.bits == 4 and kind.floats and not kind.minima
    if small and rows > 16 and not gated and tiles * splits <= two_each and k >= 1024 * splits:
        splits *= 2
    # Takes registers, so that no more than two programs with minima have room: us of Q5_1, 32 rows,
    # without and with that, for 4096x14336 38.1, 28.0, for 6144x4096 14.7, 20.2.
    ahead = not kind.minima or (not gated and tiles * splits <= two_each)
    tile = replace(
        tile, splits=splits, num_stages=2, max_registers=128 if rows <= 16 else 0,
        ahead=ahead and rows > 16,
    )  # fmt: skip
    most = 8 if gated and not narrow and not kind.floats else 4
    if rows > most or k > INTEGERS_RUN * splits:
        return tile
    width = 256 if gated or narrow or kind.bits == 8 else 512
    # No program has steps behind the last column; where columns end in one, x is 0 there.
    splits = -(-k // (width * -(-k // (width * splits))))
    return replace(
        tile, mode="integers", block_k=width, splits=splits, least_rows=kind.group // 8,
        most_rows=8, max_registers=96 if rows == 1 and not narrow else 128,
        # us of 4096x14336, Q8_0, 1 row with 2, 3 and 4: 19.1, 17.5, 19.7. More rows of x take the
        # memory of the third.
        num_stages=3 if kind.bits == 8 and rows == 1 and not gated else 2,
    )  # fmt: skip


def choose_parts(rows: int, n: int, k: int, gpu: GPU | None) -> int:
    """Parts to cut K into for cuBLAS and ``rows`` of 16 bits by ``[n, k]``; 1 to leave it whole.

    us of a linear and of its parts without their sum, at 96 and 256 rows: 4096x4096 15.0, 11.7;
    17.0, 15.2. 4096x14336 37.5, 32.1; 48.7, 43.9. 3584x3584 10.9, 9.6; 12.5, 12.5. 896x4864, in 4
    parts, 8.7, 5.8 (in 2 parts 6.9); 10.4, 6.8. 1536x8960, in 4, 12.4, 9.9; 18.6, 12.9.
    """
    table = table_of(gpu)
    parts = 4 if n <= 2048 and k >= 4 * n else 2
    # Each part's rows begin at a multiple of 16 bytes, as cuBLAS's faster kernels want.
    fits = rows in table.parted_rows and n <= table.parted_columns and k % (8 * parts) == 0
    return parts if fits else 1


# Results of so many columns at most have parts by Hopper's kernel; no wider ones gained in all
# their rows. The share of the multiprocessors that has a program of it.
_MOST_PARTS_COLUMNS, _PARTS_SHARE = 1024, 0.65


def choose_parts_tile(rows: int, n: int, k: int, gpu: GPU | None) -> PartsTile | None:
    """The tile of Hopper's kernel of parts of K for ``rows`` by ``[n, k]``; None for cuBLAS.

    It is launched early, and begins on the multiprocessors that the kernel ahead leaves free, where
    cuBLAS begins after that. ms of a step of 0.5B, whose 896x4864 is the only one, with cuBLAS's
    parts and with these, rows of 1030 tokens, and of 200 to 1860 in brackets: 80 rows 1.014, 0.991
    (0.883, 0.854); 96 rows 1.059, 1.041 (0.903, 0.881); 256 rows 1.805, 1.796 (1.385, 1.372). With
    fewer parts, 80 rows 1.008 and 256 rows, with more, 1.813. us of gate and up, parts and norm,
    cuBLAS and this: 192 rows 19.0, 20.5; 224 rows 19.6, 20.5. 128 rows by 2048x8192 35.7, 35.1; by
    1536x8960 31.8, 31.5; by 4096x14336 100.0, 98.9; 100 rows by 2048x8192 35.7, 35.4; by 3584x18944
    113.6, 114.7; 80 rows by 2048x8192 35.6, 37.6.
    """
    if gpu is None or gpu.capability != (9, 0) or is_quick(Quick.PRODUCTS):
        return None
    if not (rows <= 128 or rows >= 240) or n > _MOST_PARTS_COLUMNS or k < 2048:
        return None
    if choose_parts(rows, n, k, gpu) == 1:
        return None
    cols, most = 64, min(6, k // 512)
    programs = -(-rows // 128) * -(-n // cols)
    parts = min(most, int(_PARTS_SHARE * gpu.num_multiprocessors) // programs)
    return PartsTile(cols, parts) if parts > 1 else None


def few_rows_of_invariant(n: int) -> int:
    """Rows up to which the batch-invariant kernel is that of few rows, for N columns.

    It reads the weight from memory once; where the weight has few rows, that counts for less.
    """
    return 128 if n > 2048 else 64


def choose_invariant_tile(
    rows: int, n: int, k: int, gated: bool, gpu: GPU | None, dtype: torch.dtype
) -> Tile:
    """A tile that does not split K, for any number of rows.

    Chosen as those of :func:`choose_tile`, of which the ones that do not split are taken too.
    """
    if dtype == torch.float32:
        return Tile(32, 32, num_stages=2)
    if table_of(gpu) is PORTABLE or k % 8 or rows > 128:
        return Tile(64, 64, mode="wx", num_stages=3)
    tile = choose_tile(max(rows, 2), n, k, gated, gpu)
    if tile is not None and tile.splits == 1:
        return tile
    if gated and rows > 64:
        # choose_tile leaves most of these to cuBLAS, which is not to be had here.
        return Tile(128 if k >= 2048 else 64, 64, num_warps=8, prefetch=256)
    if gated:
        # Two weights' tiles are in flight at a time.
        return Tile(64, 64, mode="wx", num_stages=4, prefetch=256)
    if n > 5120:
        return Tile(64, 128, mode="wx", prefetch=256)
    if rows > 64:
        return Tile(32, 64, num_stages=6, prefetch=256)
    # Few columns make few programs, each of which reads a long run of the weight.
    least = 16 if rows <= 16 else 64
    if n <= 2048:
        return Tile(16, 256 if k > 2048 else 128, prefetch=256, least_rows=least)
    return Tile(32, 256, prefetch=512, least_rows=least)


# What a gated activation by itself takes of the time of cuBLAS, times K: it reads and writes 3
# values at 4 TB/s where cuBLAS multiplies and adds 2 K at 700 TFLOP/s. One of a result: 2 values,
# where cuBLAS multiplies and adds K.
_ACTIVATION = {True: 262, False: 350}
# Columns of a tile of Hopper's gate and up, by warp groups. Two products make up those that are no
# power of 2.
GATED_WIDTHS = {2: (64, 80, 96, 128, 144, 160), 3: (48, 64)}
# Columns of a weight that tiles of less than 128 were measured with, a third more. The least share
# of the multiprocessors that has a tile, if there is one for each at most, and of those of weights
# of fewer columns than 1024, before which up to 128 rows' norm without a division needs no launch.
_MOST_NARROW_K = 4096
_BUSY_SHARE, _UNDIVIDED_SHARE = 0.65, 0.55


def gated_tile(rows: int, n: int, k: int, programs: int) -> GatedTile | None:
    """The tile of Hopper's gate and up for ``rows`` by ``[n, k]``; None where others are faster.

    Up to 256 rows the narrowest tiles that are one turn of the programs: more of them multiply, and
    read less each. us on an H200 of gate, up and activation, down in parts by cuBLAS, and the norm,
    by cuBLAS with an activation, by tiles of 128 or (in brackets) 64 columns, and by these:
    9728x896, 192 rows 19.4, (19.7), 19.0; 256 rows 22.0, 22.1, 19.7. 17920x1536, 80 rows 32.8,
    32.0, 31.4; 128 rows 34.2, 33.5, 31.8. 37888x3584, 80 rows 114.6, 134.3, 112.2; 128 rows 117.5,
    136.8, 114.7. 22016x2048, 128 rows 49.6, 47.5, 45.6. 19456x2560, 80 rows 53.3, 49.5, 49.2.
    16384x2048, 128 rows 38.0, 39.5, 35.7; 192 rows 42.1, 43.8, 39.0. 12288x2048, 256 rows 38.0,
    40.0, 36.7. 9728x2560, 224 rows 41.4, 44.3, 39.3. ms of a step of 0.5B by tiles of 128 columns
    or, up to 192 rows, 64, and by these: 160 rows 1.515, 1.496; 192 rows 1.595, 1.577; 200 rows
    1.685, 1.607; 256 rows 1.849, 1.790.
    """
    if rows <= 64:
        return None
    tile = _one_turn_tile(rows, n, k, programs)
    if tile is not None:
        return tile
    if rows > 256:
        taken = _fills_turns(rows, n, k, programs, gated=True)
    else:
        row_tiles = -(-rows // 128)
        tiles = row_tiles * -(-n // 256)
        busy, filled = _busy_share(tiles, programs), rows / (row_tiles * 128)
        # us as above, by cuBLAS and by tiles of 128: 28672x4096, 224 rows 129.0, 134.0; 256 rows
        # 141.9, 139.4. 27648x5120, 256 rows 171.5, 182.0.
        taken = tiles > programs and filled >= (0.75 if row_tiles == 1 else 0.93) and busy > 0.83
    return GatedTile(128, 2) if taken else None


def _one_turn_tile(rows: int, n: int, k: int, programs: int) -> GatedTile | None:
    """The narrowest tile of which each program has one at most; None where it is no faster.

    Three warp groups take all of 129 to 192 rows. us as above, by cuBLAS and by such tiles, where
    these are not used: 16384x2048, 80 rows 35.6, 36.4; 160 rows 39.5, 39.0. 12288x2048, 80 rows
    29.9, 31.8; 160 rows 32.4, 33.9; 224 rows 36.6, 37.2. 16384x3072, 224 rows 65.0, 67.3 (but
    16384x2048 43.8, 42.9). 17920x1536, 256 rows 41.3, 43.2. By two groups and 48 columns: 9728x896,
    128 rows 16.3, by 64 columns 16.6; but steps of 0.5B are no shorter, and 3% longer (96 rows)
    with parts of down by a kernel that then has fewer multiprocessors to begin on.
    """
    groups = 3 if 128 < rows <= 192 else 2
    row_tiles = -(-rows // (64 * groups))
    if row_tiles > 2:
        return None
    # Of longer rows tiles of less than 128 columns were not measured.
    widths = [width for width in GATED_WIDTHS[groups] if width >= 128 or k <= _MOST_NARROW_K]
    counts = ((width, row_tiles * -(-n // (2 * width))) for width in widths)
    found = next(((width, tiles) for width, tiles in counts if tiles <= programs), None)
    if found is None:
        return None
    width, tiles = found
    share = _UNDIVIDED_SHARE if k < 1024 else _BUSY_SHARE
    if tiles < share * programs:
        return None
    if groups == 3:
        least = 129 if k < 1024 else 183
    elif row_tiles == 1:
        least = 96 if width < 80 else 80
    elif width > 128:
        return None
    elif width <= 80:
        least = 200
    else:
        least = 218 if width == 128 and k <= 2048 else 240
    return GatedTile(width, groups) if rows >= least else None


def _busy_share(tiles: int, programs: int) -> float:
    """The share of the programs' turns that have a tile."""
    return tiles / (-(-tiles // programs) * programs)


def _fills_turns(rows: int, n: int, k: int, programs: int, *, gated: bool) -> bool:
    """Whether tiles of 128 rows by 256 columns leave less empty than the activation takes."""
    row_tiles = -(-rows // 128)
    busy, filled = _busy_share(row_tiles * -(-n // 256), programs), rows / (row_tiles * 128)
    return busy * filled * (1 + _ACTIVATION[gated] / k) >= 0.99


def hopper_wins(rows: int, n: int, k: int, programs: int, *, gated: bool = True) -> bool:
    """Whether cuBLAS and an activation by itself are slower for a weight ``[n, k]``.

    It depends on how much of the last turn of the programs through the tiles of 128 rows and 256
    columns has work, and on the activation's share. Without a gate, 256 rows and fewer were not
    measured, and are left to cuBLAS; 5120x1280, us of cuBLAS alone and of this with a quick GELU:
    1024 rows 22.4 and 32.3, 2048 rows 40.4 and 48.6, 5476 rows 97 and 112, where an activation by
    itself reads and writes 21, 42 and 112 MB. With a gate, us on H200s, cuBLAS and
    this: 28672x4096, 96 rows 68.1 and 64.7, 128 rows 72.8 and 65.9 (70.6 with a tile of
    :mod:`engine_core.kernels.linear.triton`), 192 rows 84.8 and 96.8, 256 rows 106.5 and 96.5, 512
    rows 186 and 205, 1024 rows 371 and 362, 1536 rows 529 and 593, 4096 rows 1499 and 1453, 8192
    rows 2951 and 2891; 17920x1536, 8192 rows 748 and 690; 9728x896, 512 rows 20.1 and 22.1, 1024
    rows 36.5 and 34.0, 4096 rows 159 and 125.
    """
    if gated:
        return gated_tile(rows, n, k, programs) is not None
    return rows > 256 and _fills_turns(rows, n, k, programs, gated=False)
