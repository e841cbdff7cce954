"""How decode attention is cut: what holds of every choice, whatever it is."""

from __future__ import annotations

import os
import sys
from itertools import product
from pathlib import Path

import forkserver
import pytest

from engine_core.kernels.attention import decode

H200 = 132
# Bytes of shared memory and registers that a program of an H200 can have.
SHARED, REGISTERS = 227 * 1024, 65536
SHAPES = [
    (32, 8, 64),
    (14, 2, 64),
    (32, 32, 80),
    (64, 4, 128),
    (16, 2, 192),
    (8, 1, 256),
    (71, 1, 64),
]


def launch(rows: int, heads: int, kv_heads: int, dim: int, size: int = 2) -> decode.Launch:
    width = max(16, 1 << (dim - 1).bit_length())
    return decode.launch(rows, heads // kv_heads, kv_heads, width, width, size, H200)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_program_fits_a_multiprocessor(shape: tuple[int, int, int], size: int) -> None:
    heads, kv_heads, dim = shape
    width = 1 << (dim - 1).bit_length()
    for rows in (1, 4, 8, 32, 64, 128, 256, 1000):
        cut = launch(rows, *shape, size)
        # Triton counts the tile that is multiplied among those in flight.
        tiles = 2 * (cut.num_stages - 1) * cut.block_n * width * size
        assert tiles <= SHARED
        assert cut.block_g >= min(16, heads // kv_heads)
        # Results of splits are float32 in registers, beside those of the loop.
        held = cut.merged_splits * cut.merged_heads * width
        assert held <= REGISTERS // 2
        assert cut.merged_heads == 1 or held <= 32 * cut.num_warps * 128


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_many_programs_as_have_room_are_bounded_in_registers(
    shape: tuple[int, int, int],
) -> None:
    heads, kv_heads, dim = shape
    width = 1 << (dim - 1).bit_length()
    for rows in (1, 8, 64, 256):
        cut = launch(rows, *shape)
        head_tiles = kv_heads * -(-heads // kv_heads // cut.block_g)
        programs = round(cut.held * head_tiles / H200)
        assert 1 <= programs <= 12
        tiles = 2 * (cut.num_stages - 1) * cut.block_n * width * 2
        assert programs * tiles <= SHARED
        if cut.registers:
            assert 128 <= cut.registers <= 255
            assert programs * 32 * cut.num_warps * cut.registers <= REGISTERS


def test_the_bound_leaves_what_a_loop_needs() -> None:
    """By what Triton 3.6 takes for these without one, if it is not to ask late for a block."""
    assert launch(1, 16, 8, 64).registers >= 180
    cut = launch(1, 40, 8, 128)
    assert cut.registers >= 252
    # As many of them hold splits while these are merged as leave half for all else.
    assert cut.merged_splits * cut.merged_heads * 128 == 128 * 32 * cut.num_warps
    # 64 heads to a program are merged with more than their loop takes.
    assert launch(1, 71, 1, 64).registers == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_rows_have_room_for_splits(size: int, shape: tuple[int, int, int]) -> None:
    """Few rows for half as many as the device holds at a time, and many for a few.

    Some for all of them, or half if heads are rows of numbers: there programs without one take more
    time. Over codes two thirds, and for few rows of up to 64 dimensions. Few and some for three
    programs of a multiprocessor, if it has room for them.
    """
    heads, kv_heads, _ = shape
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1000):
        cut = launch(rows, *shape, size)
        head_tiles = kv_heads * -(-heads // kv_heads // cut.block_g)
        programs = rows * head_tiles
        few = rows + min(rows // 2, 64)
        three = int(min(cut.held, 3 * H200 / head_tiles))
        if programs <= H200:
            part = 2 / 3 if size == 1 and shape[2] <= 64 else 1 / 2
            items = max(few, int(part * cut.held), three)
            assert launch(rows, *shape, 4).items * programs >= 0.9 * rows * H200
        elif rows <= cut.held:
            part = 2 / 3 if size == 1 else 1 if cut.block_g < 16 else 0.5
            items = max(rows * 3 // 2, int(part * cut.held), three)
        else:
            items = few
        held = resident(cut, shape[2], size)
        begins = start(rows, *shape, size)
        if begins == decode.Start.AT_ONCE and rows > 1:
            items = min(items, max(rows, 3 * H200 // head_tiles))
        late = begins == decode.Start.MULTIPLIED
        if size == 1:
            late = shape[2] <= 64 and programs > 0.9 * H200
            held = resident(cut._replace(shared=0), shape[2], size) if late else held
        assert cut.even == (late and few * head_tiles <= held * H200)
        if cut.even:
            # What all multiprocessors have alike, as far as they have room.
            each = min(held, -(-items * head_tiles // H200))
            items = max(rows, each * H200 // head_tiles)
        assert cut.items == items


def resident(cut: decode.Launch, dim: int, size: int) -> int:
    """Programs that a multiprocessor holds by the shared memory that it is to have."""
    width = max(16, 1 << (dim - 1).bit_length())
    tile = decode.Tile(cut.block_n, cut.num_warps, cut.num_stages)
    memory = decode.shared_memory(cut.block_g, width, (width, width), size, tile)
    return max(1, min(1024 * (cut.shared or 228) // (memory + 1024), 12 // cut.num_warps))


def test_splits_are_the_last_where_they_fill_multiprocessors() -> None:
    """So few that each has a multiprocessor to itself are the first, and those that wait."""
    assert launch(32, 32, 8, 128).last_from == 10
    assert launch(128, 14, 2, 64).last_from == 40
    for few in (launch(1, 14, 2, 64), launch(16, 14, 2, 64), launch(64, 32, 8, 128, 1)):
        assert (few.even, few.last_from) == (False, 0)
    assert (launch(256, 32, 8, 128).even, launch(256, 32, 8, 128).last_from) == (False, 0)


def test_wide_rows_have_room_for_splits() -> None:
    """Of latent vectors, of which a multiprocessor attends to 64 heads at a time."""
    tile = decode.Tile(32, 8, 2)
    for rows in (33, 40, 64, 66, 67, 200):
        cut = decode.cut(tile, rows, 128, 1, 512, 512, (576, 0), 2, H200, 64)
        assert round(cut.held) == 66
        assert cut.items >= min(rows * 3 // 2, rows + 64)
    # A program for each multiprocessor, which has room for no more.
    assert decode.cut(tile, 1, 128, 1, 512, 512, (576, 0), 2, H200, 64).items == 66


def test_costs_are_of_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 4.2 TB/s: 32 tokens of 8 heads of 128 numbers of keys and of values."""
    monkeypatch.setattr(decode, "H200", decode.Costs(bandwidth=4.2e6))
    assert launch(1, 32, 8, 128).read_us == pytest.approx(32 * 8 * 256 * 2 / 4.2e6)
    assert launch(1, 32, 8, 128, 1).read_us == pytest.approx(32 * 8 * 256 / 4.2e6)
    # A warp works on a tile for longer than it waits, unless but one tile is in flight.
    costs = decode.H200
    assert launch(1, 32, 8, 128).tile_us == pytest.approx(costs.tile + 16 * costs.kilobyte)
    assert launch(200, 14, 2, 64).tile_us == costs.latency
    work = costs.tile + 8 * costs.kilobyte + costs.code
    assert launch(1, 32, 8, 128, 1).tile_us == pytest.approx(work)
    # As rows, by four warps, which exchange: 16 heads of a KV head of 256.
    work = costs.tile + 16 / 4 * costs.kilobyte + costs.exchange + costs.rows + costs.code
    assert launch(1, 16, 1, 256, 1).tile_us == pytest.approx(work)
    # Programs share what heads as rows of numbers wait for.
    shared = [
        launch(1, *given).sharing for given in ((32, 8, 128), (32, 8, 128, 1), (16, 1, 256, 1))
    ]
    assert shared == [0, 0, 0]
    assert launch(1, 64, 4, 128).sharing == launch(1, 16, 8, 256).sharing == costs.sharing
    # Of float32 and of latent vectors a multiprocessor has one program.
    assert launch(1, 64, 4, 128, 4).sharing == 0
    latent = decode.Tile(32, 8, 2)
    assert decode.cut(latent, 1, 128, 1, 512, 512, (576, 0), 2, H200, 64).sharing == 0
    # Warps of codes wait for each other: 8 programs of one, or 3 of four, have four schedulers.
    codes = [launch(1, 32, 8, 128, 1), launch(1, 16, 1, 256, 1)]
    assert [(cut.waiting, cut.warps) for cut in codes] == [(costs.waiting, 2), (costs.waiting, 3)]
    assert launch(1, 32, 8, 128).waiting == 0
    # Turns of merging are said to take longer over codes.
    turns = [decode.turn_of(launch(1, 32, 8, 128, size)) for size in (1, 2, 4)]
    assert turns == [costs.code_turn, costs.turn, costs.turn]
    assert costs.code_turn > costs.turn
    # A warp merges 8 of 16 heads of 128 at a time.
    assert (launch(1, 32, 8, 128).turns, launch(1, 128, 8, 128).turns) == (1, 2)
    # Of heads of 80 numbers 16 more than 64 are read, and not 64 more.
    cut = decode.launch(1, 1, 32, 128, 128, 2, H200, (16, 16))
    assert cut.read_us == pytest.approx(32 * 32 * 160 * 2 / 4.2e6)


def test_the_next_kernel_is_launched_at_once_where_programs_leave_room() -> None:
    """Else it waits for their products: programs have a third on their multiprocessor, or few."""

    def at_once(rows: int, kv_heads: int, dim: int = 128, number_bytes: int = 2) -> bool:
        return decode.leaves_room(rows * kv_heads, dim, number_bytes, H200)

    assert all(at_once(rows, 8) for rows in (25, 32, 33))
    assert at_once(64, 4)
    assert not any(at_once(rows, 8) for rows in (1, 8, 16, 24, 34, 40, 64, 256))
    for dim in (64, 256):
        assert not any(at_once(rows, 8, dim) for rows in (1, 8, 32, 64, 256))
    for number_bytes in (1, 4):
        assert not at_once(32, 8, number_bytes=number_bytes)


def test_a_chain_is_launched_at_once_behind_caches_of_codes() -> None:
    """Programs over numbers, and over wider heads, have no room beside a chain of 8-bit floats.

    Those over 16 bits have room beside a chain of 4-bit codes, which takes less.
    """

    def at_once(number_bytes: int, dims: int, bits: int = 8) -> bool:
        return decode.leaves_room(8, dims, number_bytes, H200, chained=bits)

    for bits in (4, 8):
        assert at_once(1, 64, bits)
        assert at_once(1, 128, bits)
        assert not any((at_once(1, 256, bits), at_once(2, 256, bits), at_once(4, 64, bits)))
    assert at_once(2, 128, 4)
    # Narrow heads were not measured beside it.
    assert not any((at_once(2, 64, 4), at_once(2, 128), at_once(4, 128, 4)))


def test_programs_are_spread_evenly_by_what_multiprocessors_have_room_for() -> None:
    """KiB that they keep as shared memory; 0 where more than an even share gains something."""

    def kept(rows: int, heads: int, kv_heads: int, dim: int, size: int = 2) -> int:
        return launch(rows, heads, kv_heads, dim, size).shared

    assert [kept(rows, 32, 8, 128, 1) for rows in (1, 16, 17, 256, 1000)] == [0, 0, 132, 132, 132]
    assert [kept(rows, 32, 8, 128) for rows in (8, 15, 48, 50)] == [0, 132, 132, 0]
    assert [kept(rows, 14, 2, 64) for rows in (1, 2, 16, 17, 128, 256)] == [0, 100, 100, 0, 132, 0]
    assert [kept(rows, 32, 8, 64) for rows in (16, 32, 48, 100, 200)] == [100, 132, 0, 0, 132]
    # Heads as rows of products were not measured.
    assert not any(kept(rows, 32, 2, 128, 1) for rows in (1, 64, 256))
    assert not any(kept(rows, 16, 8, 256) for rows in (1, 16, 64))
    assert not any(kept(rows, 32, 8, 128, 4) for rows in (1, 32, 256))


def start(rows: int, heads: int, kv_heads: int, dim: int, size: int = 2) -> decode.Start:
    return decode.start_of(rows, heads // kv_heads, kv_heads, dim, dim, size, H200)


def test_attention_of_few_rows_starts_before_the_linear_ahead_has_multiplied() -> None:
    """At once with up to 16, and later as long as a multiprocessor has a program at most.

    Rows count as a power of 2, beyond which linears take other tiles, too.
    """
    assert [start(rows, 14, 2, 64) for rows in (1, 16, 17, 64, 65)] == [
        decode.Start.AT_ONCE,
        decode.Start.AT_ONCE,
        decode.Start.WAITED,
        decode.Start.WAITED,
        decode.Start.MULTIPLIED,
    ]
    assert start(16, 32, 8, 64) == decode.Start.AT_ONCE
    assert start(17, 32, 8, 64) == decode.Start.MULTIPLIED
    assert start(32, 16, 4, 64) == decode.Start.WAITED
    assert start(33, 16, 4, 64) == decode.Start.MULTIPLIED


def test_attention_starts_late_where_asking_early_gains_nothing() -> None:
    """Of wide heads, of codes and float32, and of heads that are rows of products.

    These are so if there are many, or if keys or values have two parts.
    """
    late = [start(1, 32, 8, 128), start(1, 14, 2, 64, 1), start(1, 14, 2, 64, 4)]
    late += [start(1, 32, 2, 64), start(1, 14, 2, 40), decode.start_of(1, 7, 2, 64, 40, 2, H200)]
    assert set(late) == {decode.Start.MULTIPLIED}
    assert decode.start_of(1, 7, 2, 64, 56, 2, H200) == decode.Start.AT_ONCE


def test_attention_that_starts_early_does_not_let_its_successor_start_at_once() -> None:
    """It reads the plan before it waits: of this attention and the one before, one has waited."""
    for rows, kv_heads, dim, size in product((1, 12, 25, 50), (1, 2, 8), (64, 128), (1, 2)):
        if start(rows, 4 * kv_heads, kv_heads, dim, size) < decode.Start.MULTIPLIED:
            for chained in (0, 4, 8):
                assert not decode.leaves_room(rows * kv_heads, dim, size, H200, chained=chained)


@pytest.mark.parametrize(
    ("rows", "heads"), [(1, (14, 2, 64)), (4, (4, 2, 24)), (16, (32, 8, 64)), (64, (8, 1, 56))]
)
def test_attention_that_starts_early_has_heads_as_columns(
    rows: int, heads: tuple[int, int, int]
) -> None:
    """Others ask for nothing before they wait."""
    assert start(rows, *heads) < decode.Start.MULTIPLIED
    block = max(16, decode.power_of_2(heads[2]))
    rests = (decode.rest_of(heads[2], block),) * 2
    group = heads[0] // heads[1]
    assert decode.launch(rows, group, heads[1], block, block, 2, H200, rests).block_g < 16


@pytest.mark.slow
def test_what_attention_and_the_linear_ahead_do_before_they_wait(tmp_path: Path) -> None:
    """When the next kernel is launched, and what is asked for; nothing is stored.

    And how much shared memory the driver is told that it prefers, if any.

    By a child, which compiles them, for here kernels are interpreted.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    script = Path(__file__).with_name("early_attention.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    expected = [
        *("24 last 1 0 0 57", "32 first 1 0 0 57", "1-codes last 1 0 0 any"),
        *("64-codes last 1 0 0 57", "1-codes-chained first 1 0 0 any", "1-chained last 1 0 0 any"),
        *("1-chained4 first 1 0 0 any", "1-narrow-chained4 last 1 0 0 any"),
        *("1-narrow last 1 96 0 any", "3-narrow last 1 64 0 43", "65-narrow last 1 0 0 any"),
        # It launches no kernel beside the one ahead, nor was any preference measured.
        *("1-narrow-ada none 0 0 0 any", "3-narrow-ada none 0 0 0 any"),
        # What is asked for here is a weight.
        *("8-linear first 1 7 0 any", "17-linear between 1 7 0 any", "65-linear last 1 7 0 any"),
        *("1-linear first 1 0 0 57", "1-linear-deterministic last 1 0 0 any"),
        "1-linear-codes first 1 0 0 any",
    ]
    name = ("_paged_decode_kernel", "_linear_kernel")
    split = [line.rsplit(" ", 1) for line in expected]
    # Of numbers of one row, whose programs keep half of the first cache as shared memory.
    ends = ["_of_one_row" if line.startswith("1-linear first") else "" for line in expected]
    expected = [
        f"{line} {name['linear' in line]}{end} {percent}"
        for (line, percent), end in zip(split, ends, strict=True)
    ]
    done = forkserver.run(
        [sys.executable, str(script), *(line.split()[0] for line in expected)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == expected, done.stderr


def test_a_launch_is_of_powers_of_2() -> None:
    for rows, shape in product((1, 3, 77, 300), SHAPES):
        cut = launch(rows, *shape)
        for number in (cut.block_g, cut.block_n, cut.num_warps, cut.merged_splits):
            assert number & (number - 1) == 0
        assert cut.merged_heads & (cut.merged_heads - 1) == 0


def test_tiles_in_flight_follow_from_the_programs_of_rows() -> None:
    """Of codes of 128 four stages for a program a multiprocessor, of numbers for 4 that have room.

    Over codes of 64 two warps have tiles of 64 tokens, and of 256 four for rows between few and
    many, but not with more than 16 heads.

    Heads in two parts have room for more than 4, and wide ones for fewer unless tiles are short.
    Over codes heads as rows, and over numbers more than 16 of them, take no fourth stage.
    """

    def stages(rows: int, heads: int, kv_heads: int, dim: int = 128, size: int = 2) -> int:
        return launch(rows, heads, kv_heads, dim, size).num_stages

    assert [stages(rows, 32, 8, size=1) for rows in (1, 16, 17, 256)] == [4, 4, 3, 3]
    assert [stages(rows, 14, 2, 64, 1) for rows in (1, 256)] == [3, 3]
    for heads in (28, 64):
        assert [stages(rows, heads, 4) for rows in (1, 99, 100, 132, 133)] == [3, 3, 4, 4, 3]
    assert decode.launch(132, 16, 4, 128, 128, 2, H200, (16, 16)).num_stages == 3
    narrow = [launch(rows, 14, 2, 64) for rows in (1, 2, 3, 66, 67)]
    assert [(cut.block_n, cut.num_stages) for cut in narrow] == [
        (64, 3), (64, 3), (32, 4), (32, 4), (32, 3)
    ]  # fmt: skip
    assert [stages(rows, 64, 4, size=1) for rows in (1, 33)] == [3, 3]
    assert [stages(rows, 128, 4) for rows in (100, 132)] == [3, 3]
    assert [launch(rows, 32, 1, 256).block_n for rows in (1, 400)] == [32, 32]
    wide = [launch(rows, 16, 8, 256) for rows in (1, 49, 50, 256)]
    assert [(cut.block_n, round(cut.held * 8 / H200)) for cut in wide] == [
        (32, 3), (32, 3), (16, 5), (16, 5)
    ]  # fmt: skip
    # Of codes many rows have a warp for each head, few rows four.
    coded = [launch(rows, 16, 8, 256, 1) for rows in (1, 4, 5, 49, 50, 256)]
    assert [(cut.block_n, cut.num_warps) for cut in coded] == [
        (32, 4), (32, 4), (64, 4), (64, 4), (32, 1), (32, 1)
    ]  # fmt: skip
    coded = [launch(rows, 14, 2, 64, 1) for rows in (1, 256)] + [launch(1, 64, 4, 64, 1)]
    assert [(cut.block_n, cut.num_warps) for cut in coded] == [(64, 2), (64, 2), (32, 1)]
    assert launch(100, 32, 1, 256, 1).block_n == 32
    assert [launch(rows, 256, 8, 256, 1).num_warps for rows in (1, 256)] == [8, 2]


def test_two_parts_have_room_for_what_their_columns_take() -> None:
    """Programs of a multiprocessor as one was compiled for an H200: 8 of 96, and 4 of 192."""

    def programs(group_size: int, kv_heads: int, block: int, rest: int) -> float:
        cut = decode.launch(1, group_size, kv_heads, block, block, 2, H200, (rest, rest))
        return cut.held * kv_heads / H200

    assert programs(1, 32, 128, 16) == pytest.approx(9)
    assert programs(1, 32, 128, 32) == pytest.approx(8)
    assert programs(8, 2, 256, 64) == pytest.approx(4)


def test_few_heads_are_columns_of_products() -> None:
    """But of wide heads, and of those in two parts."""

    def heads(rows: int, group: int, dims: int, number_bytes: int = 1) -> int:
        return launch(rows, 8 * group, 8, dims, number_bytes).block_g

    assert {heads(rows, 4, 128) for rows in (1, 32, 64, 100, 128, 160, 256, 1000)} == {8}
    assert {heads(rows, 8, 64) for rows in (1, 112, 256)} == {8}
    assert {heads(rows, 4, 128, 2) for rows in (1, 32, 100, 128, 1000)} == {8}
    assert {heads(96, 9, 128), heads(96, 4, 256), heads(96, 4, 128, 4)} == {16}
    # Heads of 80, which are multiplied as 64 and 16 numbers.
    assert decode.launch(96, 4, 8, 128, 128, 2, H200, (16, 16)).block_g == 16
