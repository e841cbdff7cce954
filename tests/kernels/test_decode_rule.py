"""The rule for cutting decode attention: what holds of every choice, and of its model of time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import examples

from engine_core.kernels.attention import rule
from engine_core.kernels.attention.rule import H200, Heads, Tile

# Bytes of shared memory that a program of an H200 can have.
SHARED = 227 * 1024
KINDS = st.builds(
    Heads,
    group_size=st.integers(1, 16),
    kv_heads=st.sampled_from([1, 2, 3, 4, 8, 16, 32]),
    dims=st.sampled_from([16, 64, 80, 96, 128, 192, 256, 512]).map(lambda dim: (dim, dim)),
    bytes=st.sampled_from([1, 2, 4]),
)
ROWS = st.integers(1, 512)
TOKENS = st.integers(1, 131072)


def heads_of(heads: int, kv_heads: int, dim: int, of_number: int = 2) -> Heads:
    return Heads(heads // kv_heads, kv_heads, (dim, dim), of_number)


@settings(max_examples=examples(100), deadline=None)
@given(KINDS, ROWS, st.none() | st.integers(1, 8192))
def test_a_choice_can_be_launched(heads: Heads, rows: int, window: int | None) -> None:
    cut = rule.launch(heads, rows, window)
    tile = Tile(cut.block_n, cut.num_warps, cut.num_stages)
    assert rule.shared_memory(heads, tile) <= SHARED
    assert rule.resident(heads, tile) >= 1
    assert cut.wanted >= 1
    assert cut.min_split >= cut.block_n / 2
    assert cut.block_g >= min(16, heads.group_size)
    for number in (*cut[:3], cut.merged_splits, cut.merged_heads):
        assert number & (number - 1) == 0
    # A round of merging is held in registers, beside the results.
    held = cut.merged_splits * cut.merged_heads * heads.widths[1]
    assert cut.merged_heads == 1 or held <= 32 * cut.num_warps * 64


@settings(max_examples=examples(100), deadline=None)
@given(KINDS, ROWS, TOKENS, TOKENS)
def test_more_tokens_or_rows_take_no_less(heads: Heads, rows: int, some: int, others: int) -> None:
    fewer, more = sorted((some, others))
    for tile in rule.tiles(heads):
        if rule.resident(heads, tile):
            least = rule.microseconds(heads, rows, fewer, tile, 1)
            assert least <= rule.microseconds(heads, rows, more, tile, 1)
            assert least <= rule.microseconds(heads, rows + 1, fewer, tile, 1)
            # Nor do they take less than their bytes.
            read = rows * heads.kv_heads * fewer * sum(heads.dims) * heads.bytes
            assert least >= read / H200.bandwidth


@settings(max_examples=examples(100), deadline=None)
@given(KINDS, ROWS, TOKENS)
def test_what_the_plan_cuts_holds_all_tokens(heads: Heads, rows: int, tokens: int) -> None:
    cut = rule.launch(heads, rows)
    splits = rule.splits_of(rows, tokens, cut.wanted, cut.min_split)
    tile = Tile(cut.block_n, cut.num_warps, cut.num_stages)
    used, each = rule.cuts(tokens, tile, splits)
    assert 1 <= used <= splits
    assert (used - 1) * each < tokens <= used * each


@pytest.mark.parametrize("heads", [heads_of(32, 8, 128), heads_of(14, 2, 64), heads_of(8, 1, 256)])
def test_few_long_rows_fill_the_device(heads: Heads) -> None:
    for rows in (1, 2, 4):
        cut = rule.launch(heads, rows)
        splits = rule.splits_of(rows, 65536, cut.wanted, cut.min_split)
        assert rows * heads.tiles * splits >= 0.45 * H200.multiprocessors


def test_many_rows_are_cut_only_where_they_are_long() -> None:
    for rows in (1024, 4096):
        assert rows / 2 <= rule.launch(heads_of(32, 8, 128), rows).wanted < rows


def test_a_window_bounds_what_a_choice_is_for() -> None:
    heads = heads_of(32, 8, 128)
    tile, wanted, least = rule.choose(heads, 2, 512)
    times = [
        rule.microseconds(heads, 2, 256, other, rule.splits_of(2, 256, splits, shortest))
        for other, splits, shortest in [(tile, wanted, least), rule.choose(heads, 2)]
    ]
    assert times[0] <= times[1]


# Bytes of shared memory and registers as Triton compiled the kernel for Hopper.
COMPILED = [
    ((32, 8, 64, 2), (32, 1, 2), 10240, 136),
    ((32, 8, 64, 2), (64, 2, 3), 36864, 128),
    ((32, 8, 64, 2), (128, 4, 2), 38912, 86),
    ((32, 32, 96, 2), (64, 4, 3), 71680, 128),
    ((32, 8, 128, 2), (32, 1, 3), 36864, 246),
    ((32, 8, 128, 2), (64, 2, 3), 71680, 181),
    ((16, 8, 256, 2), (32, 4, 3), 74752, 131),
    ((16, 2, 192, 2), (32, 2, 2), 41984, 192),
    ((32, 8, 128, 1), (64, 4, 3), 39936, 157),
    ((14, 2, 64, 1), (32, 1, 3), 10752, 141),
]


@pytest.mark.parametrize(("heads", "tile", "shared", "registers"), COMPILED, ids=str)
def test_a_program_takes_what_was_compiled(
    heads: tuple[int, int, int, int], tile: tuple[int, int, int], shared: int, registers: int
) -> None:
    kind, tokens = heads_of(*heads), Tile(*tile)
    assert rule.shared_memory(kind, tokens) == shared
    assert math.isclose(rule.registers(kind, tokens), registers, rel_tol=0.41)
    programs = rule.resident(kind, tokens)
    assert programs * (shared + 1024) <= 228 * 1024
    assert 1 <= programs <= 64 // tokens.num_warps


def test_heads_too_wide_are_refused() -> None:
    with pytest.raises(ValueError, match="heads of 576; 512 is the most"):
        rule.launch(heads_of(16, 1, 576), 4)
