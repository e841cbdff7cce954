"""Paged attention: the reference against loops, the CPU path and the kernels against both."""

from __future__ import annotations

import math
import random
from collections.abc import Container
from itertools import product
from typing import Any

import pytest
import torch
from kernel_cases import TOLERANCE, Paged, error, make_paged
from random_examples import examples, pairwise
from torch import Tensor

from engine_core.kernels import paged_attention, store_kv
from engine_core.kernels.attention import reference
from engine_core.kernels.attention.call import Call
from engine_core.kernels.launch.quick import Quick, quickly

ROWS = [(1, 5), (1, 33), (1, 0), (1, 1), (7, 7), (3, 21)]
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
PREFIX = torch.tensor([3, 2, 0, 1, 6, 20], dtype=torch.int32)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi": {"alibi_slopes": SLOPES},
    "window": {"window": 4},
    "window1": {"window": 1},
    "softcap": {"softcap": 1.5},
    "prefix": {"prefix_lens": PREFIX},
    "window-alibi": {"window": 4, "alibi_slopes": SLOPES},
    "window-prefix": {"window": 4, "prefix_lens": PREFIX},
    "everything": {
        "window": 4,
        "prefix_lens": PREFIX,
        "alibi_slopes": SLOPES,
        "softcap": 1.5,
    },
}


def by_loops(
    paged: Paged,
    scale: float,
    *,
    alibi_slopes: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    prefix_lens: Tensor | None = None,
) -> Tensor:
    """The docstring of ``paged_attention``, one query, head and key at a time, in float64."""
    expected = torch.zeros(paged.poisoned_out().shape, dtype=torch.float64)
    token = 0
    for row, (num_queries, kv_len) in enumerate(paged.rows):
        k, v = (x.double() for x in paged.dense[row])
        for i in range(kv_len - num_queries, kv_len):
            if kv_len == 0:
                break
            for head in range(paged.q.shape[1]):
                kv_head = head * k.shape[1] // paged.q.shape[1]
                query = paged.q[token, head].double()
                weights, total = torch.zeros(v.shape[2], dtype=torch.float64), 0.0
                for j in range(kv_len):
                    near = j <= i and (window is None or j > i - window)
                    if not near and not (prefix_lens is not None and j < prefix_lens[row]):
                        continue
                    logit = scale * float(query @ k[j, kv_head])
                    if softcap is not None:
                        logit = softcap * math.tanh(logit / softcap)
                    if alibi_slopes is not None:
                        logit += float(alibi_slopes[head]) * (j - i)
                    weights += math.exp(logit) * v[j, kv_head]
                    total += math.exp(logit)
                expected[token, head] = weights / total
            token += 1
        token += num_queries if kv_len == 0 else 0
    return expected


def attend(paged: Paged, scale: float, **options: Any) -> Tensor:
    return paged_attention(
        paged.q,
        paged.k_cache,
        paged.v_cache,
        scale=scale,
        out=paged.poisoned_out(),
        **paged.metadata(),
        **paged.sizes(),
        **options,
    )


def attend_by_reference(paged: Paged, scale: float, **options: Any) -> Tensor:
    out = paged.poisoned_out().float()
    reference.paged_attention(
        paged.q, paged.k_cache, paged.v_cache, out, scale=scale, **paged.metadata(), **options
    )
    return out


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_reference_and_cpu_match_loops(options: dict[str, Any]) -> None:
    paged = make_paged(ROWS, head_dim=8, v_head_dim=6, block_size=4)
    expected = by_loops(paged, 0.4, **options)
    assert error(attend_by_reference(paged, 0.4, **options), expected) < 1e-6
    assert error(attend(paged, 0.4, **options), expected) < 1e-6


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_cpu_matches_reference_at_tile_boundaries(options: dict[str, Any], block_size: int) -> None:
    rows = [(1, 130), (1, 64), (1, 129), (1, 17), (64, 64), (130, 200)]
    paged = make_paged(rows, head_dim=32, block_size=block_size, fused=True)
    expected = attend_by_reference(paged, 0.2, **options)
    assert error(attend(paged, 0.2, **options), expected) < 2e-6


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_cpu_in_low_precision(options: dict[str, Any], dtype: torch.dtype) -> None:
    paged = make_paged([(1, 40), (1, 33), *ROWS[2:]], dtype=dtype)
    expected = attend_by_reference(paged, 0.125, **options)
    assert error(attend(paged, 0.125, **options), expected) < TOLERANCE[dtype]


def test_a_prefix_longer_than_the_window_in_a_chunk_is_seen_by_all() -> None:
    paged = make_paged([(70, 100)], head_dim=16)
    options = {"prefix_lens": torch.tensor([90], dtype=torch.int32), "window": 3}
    assert error(attend(paged, 0.25, **options), attend_by_reference(paged, 0.25, **options)) < 1e-6


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("window", [None, 1, 3, 12])
@pytest.mark.parametrize("length", [1, 3, 5])
def test_cpu_rows_of_one_length_that_do_not_fill_their_block(
    length: int, window: int | None
) -> None:
    """They need no mask, so nothing of the block beyond them may be gathered."""
    paged = make_paged([(1, length)] * 3, head_dim=16, block_size=4)
    expected = attend_by_reference(paged, 0.25, window=window)
    assert error(attend(paged, 0.25, window=window), expected) < 1e-6


@pytest.mark.usefixtures("cpu_path")
def test_a_row_does_not_depend_on_its_batch() -> None:
    rows = [(1, 1 + 37 * row % 300) for row in range(24)] + [(65, 90)]
    paged = make_paged(rows, heads=6, kv_heads=2, head_dim=64)
    together = attend(paged, 0.125)
    for row in range(len(rows)):
        begin, end = paged.query_start[row : row + 2].tolist()
        alone = paged_attention(
            paged.q[begin:end],
            paged.k_cache,
            paged.v_cache,
            block_tables=paged.block_tables[row : row + 1],
            query_start=torch.tensor([0, end - begin], dtype=torch.int32),
            kv_lens=paged.kv_lens[row : row + 1],
            max_query_len=end - begin,
            max_kv_len=rows[row][1],
            num_decode_rows=int(rows[row][0] == 1),
            scale=0.125,
        )
        assert (alone - together[begin:end]).abs().max() < 1e-6


def test_a_chunked_prompt_equals_a_whole_one() -> None:
    paged = make_paged([(150, 150)], head_dim=32)
    whole = attend(paged, 0.2)
    for begin, end in [(0, 1), (1, 65), (65, 150)]:
        part = paged_attention(
            paged.q[begin:end],
            paged.k_cache,
            paged.v_cache,
            block_tables=paged.block_tables,
            query_start=torch.tensor([0, end - begin], dtype=torch.int32),
            kv_lens=torch.tensor([end], dtype=torch.int32),
            max_query_len=end - begin,
            max_kv_len=end,
            scale=0.2,
        )
        assert (part - whole[begin:end]).abs().max() < 1e-6


@pytest.mark.usefixtures("cpu_path")
def test_adjoining_blocks_are_read_in_place() -> None:
    paged = make_paged([(1, 50)], head_dim=32)
    order = paged.block_tables[0, :4].long()
    k_cache, v_cache = paged.k_cache.clone(), paged.v_cache.clone()
    k_cache[1:5], v_cache[1:5] = paged.k_cache[order], paged.v_cache[order]
    out = paged_attention(
        paged.q,
        k_cache,
        v_cache,
        block_tables=torch.tensor([[1, 2, 3, 4]], dtype=torch.int32),
        query_start=paged.query_start,
        kv_lens=paged.kv_lens,
        scale=0.2,
        **paged.sizes(),
    )
    torch.testing.assert_close(out, attend(paged, 0.2), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(8, 4)}, r"q must be \[T, Hq, D\]"),
        ({"q": torch.zeros(8, 3, 8)}, "multiple"),
        ({"q": torch.zeros(8, 4, 8).half()}, "one dtype"),
        ({"q": torch.zeros(8, 8, 4).transpose(1, 2)}, "stride 1"),
        ({"v_cache": torch.zeros(3, 4, 2, 8)}, "agree in blocks"),
        ({"kv_lens": torch.zeros(3, dtype=torch.int32)}, "kv_lens has 3 rows"),
        ({"kv_lens": torch.zeros(2, dtype=torch.int64)}, "kv_lens torch.int64; both must be int32"),
        ({"alibi_slopes": torch.zeros(4).half()}, "float32, got .* torch.float16"),
        ({"num_decode_rows": 3}, "3 decode rows of 2 rows"),
        ({"window": 0}, "at least 1"),
        ({"alibi_slopes": torch.zeros(2)}, r"alibi_slopes must be \[4\]"),
        ({"prefix_lens": torch.zeros(1)}, r"prefix_lens must be \[2\]"),
        ({"out": torch.zeros(8, 4, 4)}, "out must be contiguous"),
    ],
)
def test_preconditions(change: dict[str, Any], message: str) -> None:
    paged = make_paged([(1, 3), (7, 9)], head_dim=8, block_size=4)
    arguments = {"q": paged.q, "k_cache": paged.k_cache, "v_cache": paged.v_cache}
    arguments |= paged.metadata() | paged.sizes() | {"scale": 1.0} | change
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments)


@pytest.fixture(params=[False, True], ids=["", "invariant"])
def deterministic(request: pytest.FixtureRequest) -> bool:
    """Whether the kernel is the one whose results do not depend on the batch."""
    chosen: bool = request.param
    return chosen


def launch(paged: Paged, scale: float, **options: Any) -> Tensor:
    from engine_core.kernels.attention import triton

    out = paged.poisoned_out()
    sizes = paged.metadata() | paged.sizes() | options
    triton.paged_attention(Call(paged.q, paged.k_cache, paged.v_cache, out, scale=scale, **sizes))
    return out


# Decode rows of one split and of several, a padding row, and chunks that fill a tile or do not.
KERNEL_ROWS = [(1, 1), (1, 33), (1, 0), (1, 150), (70, 70), (3, 130)]
KERNEL_PREFIX = torch.tensor([1, 20, 0, 70, 35, 128], dtype=torch.int32)


@pytest.mark.parametrize("name", OPTIONS)
def test_kernel_options(name: str, deterministic: bool, launch_device: str) -> None:
    options = dict(OPTIONS[name])
    if "prefix_lens" in options:
        options["prefix_lens"] = KERNEL_PREFIX
    if options.get("window") == 4:
        options["window"] = 40
    options = {
        key: value.to(launch_device) if isinstance(value, Tensor) else value
        for key, value in options.items()
    }
    paged = make_paged(KERNEL_ROWS, device=launch_device, fused=True)
    expected = attend_by_reference(paged, 0.125, **options)
    got = launch(paged, 0.125, deterministic=deterministic, **options)
    assert error(got, expected) < 1e-5


# Heads that are columns of products, and such of which keys or values have two parts.
DECODE_SHAPES: list[dict[str, Any]] = [
    {"heads": 7, "kv_heads": 1, "head_dim": 24, "v_head_dim": 16},
    {"heads": 16, "kv_heads": 2, "head_dim": 64, "v_head_dim": 128, "block_size": 5},
    {"heads": 3, "kv_heads": 3, "head_dim": 120, "v_head_dim": 56, "block_size": 64},
    {"heads": 10, "kv_heads": 2, "head_dim": 80, "v_head_dim": 64},
    {"heads": 4, "kv_heads": 1, "head_dim": 64, "v_head_dim": 80},
]


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    pairwise([*OPTIONS], DECODE_SHAPES, [torch.bfloat16, torch.float16]),
    ids=str,
)
def test_kernel_options_of_decode_rows_of_16_bits(
    name: str, shape: dict[str, Any], dtype: torch.dtype, launch_device: str
) -> None:
    options, rows = dict(OPTIONS[name]), [row for row in KERNEL_ROWS if row[0] == 1]
    if "prefix_lens" in options:
        options["prefix_lens"] = KERNEL_PREFIX[: len(rows)].to(launch_device)
    if options.get("window") == 4:
        options["window"] = 40
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(shape["heads"], device=launch_device)
    paged = make_paged(rows, device=launch_device, dtype=dtype, fused=True, **shape)
    expected = attend_by_reference(paged, 0.125, **options)
    assert error(launch(paged, 0.125, **options), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("block_size", "head_dim"), [(5, 64), (64, 64), (64, 128)])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65, 385, 513, 1000])
def test_a_row_whose_last_token_is_seen_by_itself(
    length: int,
    block_size: int,
    head_dim: int,
    launch_device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where tokens are asked for before the kernel that stores the last one is complete.

    It may be alone in its tile, or in its split. The row beside has no tokens.
    """
    from engine_core.kernels.attention import decode

    monkeypatch.setattr(decode, "start_of", lambda *_: decode.Start.AT_ONCE)
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": head_dim, "v_head_dim": 56}
    paged = make_paged(
        [(1, length), (1, 0)],
        device=launch_device,
        dtype=torch.float16,
        block_size=block_size,
        **sizes,  # type: ignore[arg-type]
    )
    expected = attend_by_reference(paged, 0.125)
    assert error(launch(paged, 0.125), expected) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("name", ["plain", "window", "prefix"])
def test_quick_steps_take_rows_that_decode_for_prompts_of_one_token(
    name: str, launch_device: str
) -> None:
    rows = [row for row in KERNEL_ROWS if row[1]]
    options: dict[str, Any] = {"window": 40} if name == "window" else {}
    if name == "prefix":
        options["prefix_lens"] = torch.tensor([1, 20, 70, 35, 128], dtype=torch.int32)
        options["prefix_lens"] = options["prefix_lens"].to(launch_device)
    paged = make_paged(rows, device=launch_device, dtype=torch.float16, fused=True)
    expected = attend_by_reference(paged, 0.125, **options)
    # In a step of so many tokens, padding included.
    sizes = {"num_decode_rows": 0, "max_query_len": 128}
    with quickly(Quick.ATTENTION):
        got = launch(paged, 0.125, **sizes, **options)
    assert error(got, expected) < TOLERANCE[torch.float16]


KERNEL_SHAPES: list[dict[str, Any]] = [
    {"head_dim": 80},
    {"head_dim": 96, "v_head_dim": 64},
    {"head_dim": 72, "v_head_dim": 192},
    {"head_dim": 100, "v_head_dim": 40},
    {"head_dim": 128},
    {"head_dim": 256},
    {"heads": 7, "kv_heads": 1},
    {"heads": 71, "kv_heads": 1},
    {"heads": 3, "kv_heads": 3},
    {"block_size": 1},
    {"block_size": 5},
    {"block_size": 256},
    {"dtype": torch.float16},
]


@pytest.mark.parametrize(
    ("shape", "deterministic"),
    [
        # Each shape with one of the kernels, in turn.
        pytest.param(shape, chosen, marks=() if index % 2 == chosen else pytest.mark.long)
        for index, shape in enumerate(KERNEL_SHAPES)
        for chosen in (False, True)
    ],
    ids=str,
)
def test_kernel_shapes(shape: dict[str, Any], deterministic: bool, launch_device: str) -> None:
    paged = make_paged([(1, 63), (1, 130), (20, 70)], device=launch_device, **shape)
    expected = attend_by_reference(paged, 0.1)
    got = launch(paged, 0.1, deterministic=deterministic)
    assert error(got, expected) < TOLERANCE[paged.q.dtype]


@pytest.mark.parametrize(
    ("options", "block_size", "deterministic"),
    pairwise(
        [{}, {"window": 1}, {"window": 50}, {"window": 131}], [32, 64, 128, 256], [False, True]
    ),
    ids=str,
)
def test_kernel_tiles_within_blocks(
    block_size: int, options: dict[str, Any], deterministic: bool, launch_device: str
) -> None:
    rows = [(1, 1), (1, 64), (1, 200), (1, 0), (1, 129), (1, 500), (70, 300)]
    paged = make_paged(rows, block_size=block_size, device=launch_device)
    expected = attend_by_reference(paged, 0.125, **options)
    got = launch(paged, 0.125, deterministic=deterministic, **options)
    assert error(got, expected) < 1e-5


def test_kernel_without_splits(deterministic: bool, launch_device: str) -> None:
    paged = make_paged([(1, 30), (1, 0), (1, 7)], device=launch_device)
    got = launch(paged, 0.125, deterministic=deterministic)
    assert error(got, attend_by_reference(paged, 0.125)) < 1e-5


def test_kernel_merges_128_splits(launch_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a row that has the device to itself may have."""
    from engine_core.kernels.attention import decode

    launch_as_chosen, made = decode.launch, []

    def cut(*given: Any) -> decode.Launch:
        made.append(launch_as_chosen(*given)._replace(pieces=4 * 128, items=128))
        return made[-1]

    monkeypatch.setattr(decode, "launch", cut)
    paged = make_paged([(1, 128 * 32)], heads=4, kv_heads=1, device=launch_device)
    assert error(launch(paged, 0.125), attend_by_reference(paged, 0.125)) < 1e-5
    assert {each.block_n for each in made} == {32}


@pytest.mark.parametrize("options", [{}, {"window": 100}], ids=str)
def test_kernel_merges_splits_in_rounds(
    options: dict[str, Any], launch_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine_core.kernels.attention import decode

    launch_as_chosen = decode.launch
    monkeypatch.setattr(
        decode,
        "launch",
        lambda *given: launch_as_chosen(*given)._replace(
            pieces=4 * 7, items=14, merged_splits=2, merged_heads=2
        ),
    )
    paged = make_paged([(1, 200), (1, 97)], heads=6, device=launch_device)
    expected = attend_by_reference(paged, 0.125, **options)
    for _ in range(2):  # the second launch finds the counts that the first one left
        assert error(launch(paged, 0.125, **options), expected) < 1e-5


def planned(
    device: str,
    lengths: list[int],
    window: int | None,
    group_size: int = 4,
    number_bytes: int = 2,
    kv_heads: int = 8,
    **changed: Any,
) -> list[list[int]]:
    """Items of a plan for heads of 128, on a device of 132 multiprocessors.

    Those of no row are left out, and a row's first item is counted without them.
    """
    from engine_core.kernels.attention import decode, triton

    cut = decode.launch(len(lengths), group_size, kv_heads, 128, 128, number_bytes, 132)
    cut = cut._replace(**changed)
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    items, _ = triton.plan_splits(kv_lens, len(lengths), 1 << 17, window, cut, {})
    places = [place for place, item in enumerate(items.tolist()) if item[0] >= 0]
    # Where there are so many they are the last, or else the first.
    last = 0 < cut.last_from <= len(places)
    begin = len(items) - len(places) if last else 0
    assert places == list(range(begin, begin + len(places)))
    made = items[begin : begin + len(places)].tolist()
    return [[*item[:3], item[3] - begin, item[4]] for item in made]


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("pieces", [0, 4, 6, 8, 28, 256])
def test_splits_of_a_plan_are_whole_rows(
    window: int | None, pieces: int, launch_device: str
) -> None:
    lengths = [0, 1, 31, 32, 33, 1030, 5000, 7, 40000]
    items = planned(launch_device, lengths, window, pieces=pieces, items=9 * 64)
    at = 0
    for row, length in enumerate(lengths):
        made = [item for item in items if item[0] == row]
        assert items[at : at + len(made)] == made
        assert {tuple(item[3:5]) for item in made} == {(at, len(made))}
        at += len(made)
        # The first tile that the window reaches into is there from its beginning.
        first = max(0, length - window) // 32 * 32 if window else 0
        assert (made[0][1], made[-1][2]) == (first, length)
        assert [item[1] for item in made[1:]] == [item[2] for item in made[:-1]]
        assert all(item[1] % 32 == 0 for item in made)
        assert len(made) == 1 or all(item[2] > item[1] for item in made)
    if pieces == 4:
        assert len(items) == len(lengths)


@pytest.mark.parametrize("last_from", [0, 1, 12, 13, 1000])
def test_splits_are_the_last_items_where_there_are_so_many(
    last_from: int, launch_device: str
) -> None:
    lengths = [3000, 300, 200, 100, 0]
    plain = planned(launch_device, lengths, None, pieces=32, last_from=0, items=77)
    assert [item[4] for item in plain] == [8] * 8 + [1] * 4
    # That they are where they are to be is seen to in there.
    assert planned(launch_device, lengths, None, pieces=32, last_from=last_from, items=77) == plain


@pytest.mark.parametrize(
    ("lengths", "splits"),
    [
        ([20] * 4, {1}),
        ([1030], range(8, 17)),
        ([128000], range(24, 65)),
        ([1030] * 32, range(1, 3)),
        ([1030] * 256, {1}),
    ],
    ids=["short", "one", "long", "some", "many"],
)
def test_splits_are_as_many_as_pay(
    lengths: list[int], splits: Container[int], launch_device: str
) -> None:
    items = planned(launch_device, lengths, None)
    assert all(item[4] in splits for item in items), {item[4] for item in items}


@pytest.mark.parametrize("lengths", [[15000] * 4, [60000] * 2, [4000] * 16], ids=str)
def test_over_codes_a_scheduler_has_a_warp_if_that_is_enough(
    lengths: list[int], launch_device: str
) -> None:
    """Of 132 multiprocessors with four each: 528 programs, in which 8 KV heads are 66 splits."""
    items = planned(launch_device, lengths, None, number_bytes=1)
    assert 40 <= len(items) <= 60
    # Some schedulers have a second one with 64 splits, which were best if it did not wait.
    assert len(planned(launch_device, lengths, None, number_bytes=1, waiting=0.0)) == 64


@pytest.mark.parametrize("others", [1, 15, 40, 98, 99, 200, 500])
def test_the_others_do_not_wait_for_a_row_that_is_much_longer(
    others: int, launch_device: str
) -> None:
    """However many they are: a captured launch, too, has room for its splits."""
    items = planned(launch_device, [300] * others + [100000], None)
    assert {item[4] for item in items if item[0] < others} == {1}
    assert items[-1][4] >= 28


def test_a_plan_takes_what_its_costs_say(launch_device: str) -> None:
    """The same arithmetic elsewhere, of rows of many lengths."""
    from benchmarks.decode_space import chosen_pieces, plan
    from engine_core.kernels.attention import decode

    draw = random.Random(7)
    for _ in range(examples(600)):
        longest = draw.choice([100, 1000, 10000, 100000])
        rows = draw.choice([1, 4, 15, 30, 60, 90, 110, 250])
        lengths = [draw.randint(longest // 5, longest) for _ in range(rows)]
        lengths[0] *= draw.choice([1, 20])
        tiles = [-(-length // 32) for length in lengths]
        group_size, number_bytes = draw.choice([(4, 2), (16, 2), (4, 1)])
        heads = group_size, number_bytes, draw.choice([1, 8])
        cut = decode.launch(rows, group_size, heads[2], 128, 128, number_bytes, 132)
        expected = plan(tiles, chosen_pieces(tiles, cut))
        items = planned(launch_device, lengths, None, *heads)
        assert (len(items), max(item[4] for item in items)) == (expected.count, expected.splits)


@pytest.mark.parametrize(("rows", "expected"), [(1, 128), (2, 64)])
def test_a_row_alone_may_have_more_splits(rows: int, expected: int, launch_device: str) -> None:
    """Of one KV head, whose other rows would have the rest of the device."""
    items = planned(launch_device, [131072] * rows, None, 16, 2, 1, pieces=4 * 128)
    assert [item[4] for item in items] == [expected] * (rows * expected)


@pytest.mark.parametrize("options", [{}, {"window": 100}], ids=str)
def test_kernel_splits_of_one_long_row_among_short_ones(
    options: dict[str, Any], launch_device: str
) -> None:
    paged = make_paged([(1, 20)] * 7 + [(1, 1500)] + [(1, 65)] * 4, device=launch_device)
    expected = attend_by_reference(paged, 0.125, **options)
    assert error(launch(paged, 0.125, **options), expected) < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="devices of other sizes are interpreted")
def test_kernel_on_devices_of_all_sizes(
    launch_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits come first or last among items, and programs beyond them do nothing.

    Programs come to a multiple of the multiprocessors where a launch says so.
    """
    from engine_core.kernels.attention import triton

    draw = random.Random(11)
    kernel, programs = triton._decode_kernel, []

    class Watched:
        def __getitem__(self, grid: tuple[int]) -> Any:
            programs.append(grid[0])
            return kernel[grid]

    monkeypatch.setattr(triton, "_decode_kernel", Watched())
    found = set()
    for seed in range(examples(100)):
        size = draw.choice([1, 7, 20, 20, 20, 108])
        monkeypatch.setattr(triton, "num_multiprocessors", lambda _, size=size: size)
        lengths = [draw.choice([0, 1, 40, draw.randint(0, 100)]) for _ in range(13)]
        lengths = [draw.choice([0, 33, 400, 600]), *lengths][: draw.choice([1, 5, 5, 14])]
        group, kv_heads = draw.choice([1, 7, 17]), draw.choice([1, 3, 3])
        dtype = draw.choice([torch.float32, torch.bfloat16])
        paged = make_paged(
            [(1, length) for length in lengths], heads=group * kv_heads, kv_heads=kv_heads,
            head_dim=draw.choice([24, 64, 64]), dtype=dtype, seed=seed,
        )  # fmt: skip
        window = draw.choice([None, None, None, 1, 100])
        memo: dict[Any, Any] = {}
        most = draw.choice([paged.sizes()["max_kv_len"], 4096])
        options = {"memo": memo, "window": window, "max_kv_len": most}
        expected = attend_by_reference(paged, 0.125, window=window)
        for _ in range(2):  # the second launch finds the counts that the first one left
            assert error(launch(paged, 0.125, **options), expected) < TOLERANCE[dtype]
        (((_, _, cut), items),) = memo.items()
        whole = len(items) * kv_heads * -(-group // cut.block_g)
        assert {programs.pop(), programs.pop()} == {-(-whole // size) * size if cut.even else whole}
        is_split = items[items[:, 0] >= 0][:, 4] > 1
        found.add((cut.even and whole % size > 0, bool(is_split.any()), bool(items[0, 0] < 0)))
    # With programs beyond the items, and splits that are the last of these, or the first.
    assert {(True, True, True), (True, True, False), (False, True, False)} <= found


def test_kernel_layers_share_what_they_find_out_of_a_step(launch_device: str) -> None:
    """Layers of a step have caches, and may have windows, of their own.

    The narrowest window is first: by its plan the others would miss tokens.
    """
    rows = [(1, 20)] * 7 + [(1, 900), (1, 0), (1, 65)]
    memo: dict[Any, Any] = {}
    for options in ({"window": 100}, {"window": 300}, {}, {"window": 100}, {}):
        paged = make_paged(rows, device=launch_device)
        expected = attend_by_reference(paged, 0.125, **options)
        assert error(launch(paged, 0.125, memo=memo, **options), expected) < 1e-5


def test_kernel_grid_of_a_larger_context(deterministic: bool, launch_device: str) -> None:
    """A captured graph has splits for the longest context; short rows leave them unwritten."""
    from engine_core.kernels.attention import triton

    paged = make_paged([(1, 340), (1, 40), (1, 3)], device=launch_device)
    out = paged.poisoned_out()
    sizes = paged.sizes() | {"max_kv_len": 4096}
    options = {"scale": 0.125, "deterministic": deterministic}
    for _ in range(2):  # the second launch finds the counts that the first one left
        given = options | paged.metadata() | sizes
        triton.paged_attention(Call(paged.q, paged.k_cache, paged.v_cache, out, **given))
    assert error(out, attend_by_reference(paged, 0.125)) < 1e-5


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
def test_hopper_kernel_takes_the_engines_caches_and_is_captured() -> None:
    from engine_core.kernels.attention.hopper import triton as hopper

    shape = {"heads": 14, "kv_heads": 2, "head_dim": 128, "block_size": 64}
    rows = [(300, 300), (65, 1000)]
    options = {"dtype": torch.bfloat16, "device": "cuda", "fused": True}
    paged = make_paged(rows, own_caches=True, **options, **shape)
    assert hopper.fits(paged.q, paged.k_cache, paged.v_cache)
    interleaved = make_paged(rows, **options, **shape)
    assert not hopper.fits(interleaved.q, interleaved.k_cache, interleaved.v_cache)

    out = attend(paged, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(paged, 0.1)
    graph.replay()
    torch.testing.assert_close(captured, out, rtol=0, atol=0)
    assert error(captured, attend_by_reference(paged, 0.1)) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    "rows",
    [
        [(1, 70), (1, 0), (300, 1000), (77, 0), (0, 0)],
        [(300, 1000), (20, 20), *[(0, 0)] * 28, (500, 0)],
        [(2, 0), (33, 40), (2, 0), (65, 65), (2, 0)],
        [*[(2, 40)] * 150, *[(0, 0)] * 120, (3, 0)],
        [(50, 0), (0, 0)],
    ],
    ids=["decode", "few", "between", "many", "only"],
)
def test_hopper_kernel_leaves_zeros_for_rows_of_padding(rows: list[tuple[int, int]]) -> None:
    options = {"dtype": torch.bfloat16, "device": "cuda", "own_caches": True}
    paged = make_paged(rows, heads=8, kv_heads=2, head_dim=128, block_size=64, **options)
    assert error(attend(paged, 0.1), attend_by_reference(paged, 0.1)) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [
        (8, 2, 48, 64), (6, 3, 72, 16), (35, 5, 80, 64), (16, 2, 96, 32), (8, 8, 96, 256),
        (4, 1, 160, 64), (12, 3, 192, 64), (9, 9, 192, 128), (14, 2, 256, 16), (8, 1, 256, 64),
    ],
)  # fmt: skip
def test_hopper_kernel_takes_heads_of_many_widths(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Long rows turn over the places of queries and keys; others end within tiles, or are empty."""
    from engine_core.kernels.attention.hopper import triton as hopper

    rows = [(1, 70), (700, 1500), (65, 65), (129, 640), (30, 0), (2, 0)]
    paged = make_paged(
        rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
        dtype=dtype, device="cuda", own_caches=True,
    )  # fmt: skip
    assert hopper.fits(paged.q, paged.k_cache, paged.v_cache)
    scale = head_dim**-0.5
    assert error(attend(paged, scale), attend_by_reference(paged, scale)) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(32, 8, 64, 64), (14, 2, 64, 16), (8, 8, 48, 128), (12, 2, 56, 32)],
)
def test_three_warp_groups_of_the_hopper_kernel_give_what_two_do(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Few programs, so that each takes many tiles; the other form runs once before, of no rows."""
    from engine_core.kernels.attention.hopper import triton as hopper

    rows = [(1, 70), (700, 1500), (65, 65), (129, 640), (30, 0), (2, 0)]
    paged = make_paged(
        rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
        dtype=dtype, device="cuda", own_caches=True,
    )  # fmt: skip
    scale = head_dim**-0.5
    expected = attend_by_reference(paged, scale)
    for groups in (3, 2):
        hopper._launched.clear()
        out = paged.poisoned_out()
        call = Call(
            paged.q, paged.k_cache, paged.v_cache, out, paged.block_tables, paged.query_start,
            paged.kv_lens, 700, 1500, 0, scale,
        )  # fmt: skip
        hopper.prefill(call, scale * math.log2(math.e), 8, False, groups)
        assert error(out, expected) < TOLERANCE[dtype]


def hopper_call(heads: int, kv_heads: int, head_dim: int, rows: int, tokens: int) -> Call:
    """Prompts of so many tokens each, after a row that decodes."""
    q = torch.empty((1, heads, head_dim), dtype=torch.bfloat16).expand(1 + rows * tokens, -1, -1)
    k_cache, v_cache = torch.empty((2, 1, 64, kv_heads, head_dim), dtype=torch.bfloat16)
    lens = torch.empty(1 + rows, dtype=torch.int32)
    tables = lens.unsqueeze(1)
    return Call(q, k_cache, v_cache, q, tables, lens, lens, tokens, tokens, 1, 0.1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rows", "tokens", "groups"),
    [
        (32, 8, 64, 1, 8192, 3), (32, 8, 64, 4, 2048, 3), (16, 2, 64, 4, 2048, 3),
        # Few tiles, short prompts, no heads side by side, and more registers than there are.
        (32, 8, 64, 1, 2048, 2), (32, 8, 64, 8, 1024, 2), (14, 2, 64, 2, 8192, 2),
        (32, 8, 128, 1, 8192, 2),
    ],
)  # fmt: skip
def test_long_prompts_with_narrow_heads_have_three_warp_groups(
    heads: int, kv_heads: int, head_dim: int, rows: int, tokens: int, groups: int
) -> None:
    hopper = pytest.importorskip("engine_core.kernels.attention.hopper.triton")
    call = hopper_call(heads, kv_heads, head_dim, rows, tokens)
    assert hopper.groups_for(call, 132) == groups


@pytest.mark.parametrize(
    ("heads", "groups", "expected"),
    [(8, 2, [(3, 0), (2, 5), (2, 5)]), (8, 3, [(2, 0), (3, 5), (3, 5)]), (6, 2, [(2, 5), (2, 5)])],
)
def test_the_first_launch_has_the_kernel_of_as_many_groups_as_others_need(
    heads: int, groups: int, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which prompt comes first decides nothing; the one launched beside has no rows."""
    hopper = pytest.importorskip("engine_core.kernels.attention.hopper.triton")
    launched = []

    def launch(*args: Any, **options: Any) -> None:
        launched.append((options["FORM"].groups, args[13]))

    monkeypatch.setattr(hopper, "_hopper_prefill_kernel", {(8,): launch, (1,): launch})
    monkeypatch.setattr(hopper, "_launched", set())
    call = hopper_call(heads, 2, 64, 5, 1000)
    for _ in range(2):
        hopper.prefill(call, 0.1, 8, False, groups)
    assert launched == expected


@pytest.mark.parametrize(
    ("head_dim", "groups"), [*product(range(40, 257, 8), [2]), (48, 3), (64, 3)]
)
def test_hopper_kernels_parts_of_a_head_hold_it_and_fit(head_dim: int, groups: int) -> None:
    hopper = pytest.importorskip("engine_core.kernels.attention.hopper.triton")
    form = hopper._Form.of(head_dim, groups)
    columns = form.main + form.rest
    assert head_dim <= columns <= max(64, 1.25 * head_dim + 8)
    assert form.main % 64 == 0
    assert all(size & (size - 1) == 0 for size in (form.main, form.keys))
    assert form.rest in (0, 16, 32, 64)
    shared = 2 * (form.slots * groups * 64 + form.stages * 2 * form.keys) * columns
    assert shared <= 227 * 1024 - 2048
    assert form.stages >= 2
    # Results, logits and weights of a thread, of the 232 registers that it has, or 160.
    assert (columns + form.keys + form.keys / 2) / 2 <= {2: 180, 3: 130}[groups]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("num_rows", [2, 30, 150])
def test_a_captured_step_finds_out_anew_how_long_its_rows_are(num_rows: int) -> None:
    """Layers share how rows are cut, some see a window; a replay has other lengths."""
    lengths = [1 + 37 * row % 300 for row in range(num_rows - 1)]
    paged = make_paged(
        [(1, 5000), *[(1, length) for length in lengths]],
        heads=32,
        kv_heads=8,
        head_dim=128,
        block_size=64,
        dtype=torch.bfloat16,
        device="cuda",
        own_caches=True,
    )
    kv_lens = paged.kv_lens.clone()
    newest = (kv_lens - 1).long()
    blocks = paged.block_tables.gather(1, (newest // 64).unsqueeze(1)).squeeze(1).long()
    slots = blocks * 64 + newest % 64
    k, v = (cache.flatten(0, 1)[slots].clone() for cache in (paged.k_cache, paged.v_cache))
    windows = [None, 100, None, 100]

    def layers(memo: dict[Any, Any] | None) -> list[Tensor]:
        results = []
        for window in windows:
            store_kv(k, v, paged.k_cache, paged.v_cache, slots)
            results.append(
                paged_attention(
                    paged.q,
                    paged.k_cache,
                    paged.v_cache,
                    **paged.metadata(),
                    **paged.sizes(),
                    scale=0.1,
                    window=window,
                    memo=memo,
                )
            )
        return results

    paged.kv_lens.fill_(1)
    stream = torch.cuda.Stream()
    # What is stored again must have been read before.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layers({})
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = layers({})
    for lens in (kv_lens, kv_lens // 2, kv_lens.flip(0).clamp(max=1), kv_lens):
        paged.kv_lens.copy_(lens)
        graph.replay()
        for got, expected in zip(captured, layers(None), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
    for got, window in zip(captured, windows, strict=True):
        expected = attend_by_reference(paged, 0.1, window=window)
        assert error(got, expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 64},
        {"heads": 14, "kv_heads": 2, "head_dim": 64, "block_size": 16},
        {"heads": 4, "kv_heads": 4, "head_dim": 256},
        {"heads": 71, "kv_heads": 1, "head_dim": 96, "v_head_dim": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["plain", "alibi", "window", "softcap", "prefix"])
def test_queries_do_not_depend_on_what_else_there_is(
    name: str, shape: dict[str, Any], dtype: torch.dtype
) -> None:
    """Bit for bit: alone, as decode rows or chunks of any size, with splits for any context."""
    rows = [(1, 700), (1, 1), (700, 700), (130, 900), (3, 257), *[(1, 64 * n) for n in range(40)]]
    rows.sort(key=lambda row: row[0] > 1)
    paged = make_paged(rows, device="cuda", dtype=dtype, **shape)
    prefix = torch.tensor([min(n, 333) for _, n in rows], dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {
        "plain": {},
        "alibi": {"alibi_slopes": 2.0 ** -torch.arange(1, shape["heads"] + 1, device="cuda")},
        "window": {"window": 300},
        "softcap": {"softcap": 1.5},
        "prefix": {},
    }[name]

    def chunk(row: int, begin: int, end: int, max_kv_len: int, decode: bool = False) -> Tensor:
        """Queries ``[begin, end)`` of a row, which have their place in the row's tokens."""
        first = int(paged.query_start[row])
        num_queries, kv_len = rows[row]
        given = {"prefix_lens": prefix[row : row + 1]} if name == "prefix" else {}
        return paged_attention(
            paged.q[first + begin : first + end],
            paged.k_cache,
            paged.v_cache,
            block_tables=paged.block_tables[row : row + 1],
            query_start=torch.tensor([0, end - begin], dtype=torch.int32, device="cuda"),
            kv_lens=torch.tensor([kv_len - num_queries + end], dtype=torch.int32, device="cuda"),
            max_query_len=end - begin,
            max_kv_len=max_kv_len,
            num_decode_rows=int(decode),
            scale=0.1,
            deterministic=True,
            **options,
            **given,
        )

    given = {"prefix_lens": prefix} if name == "prefix" else {}
    together = attend(paged, 0.1, deterministic=True, **options, **given)
    expected = attend_by_reference(paged, 0.1, **options, **given)
    assert error(together, expected) < TOLERANCE[dtype]
    for row, (num_queries, kv_len) in enumerate(rows):
        first = int(paged.query_start[row])
        mine = together[first : first + num_queries]
        assert torch.equal(chunk(row, 0, num_queries, 2560), mine), rows[row]
        if num_queries == 1:
            for most in (kv_len or 1, 8192, 131072):
                assert torch.equal(chunk(row, 0, 1, most, decode=True), mine), (rows[row], most)
        # A prefix makes earlier chunks look at tokens that a later one stores.
        elif name != "prefix":
            for begin in range(0, num_queries, 97):
                end = min(begin + 97, num_queries)
                assert torch.equal(chunk(row, begin, end, 1024), mine[begin:end]), (row, begin)
            for query in range(0, num_queries, 41):
                one = chunk(row, query, query + 1, 4096, decode=True)
                assert torch.equal(one, mine[query : query + 1]), (row, query)
