"""Random choice against its definition in float64 with a sort, and what a step leaves behind.

Rounding may turn a token; :func:`kernel_cases.check_sampling` says where.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from kernel_cases import DTYPES, Sampling, check_sampling, make_sampling
from random_examples import FULL, pairwise
from torch import Tensor

from engine_core.kernels import Turns, sample_tokens
from engine_core.kernels.sampling import GENERATED, PENALISED, PROMPTED, Adjustments, SamplingState
from engine_core.kernels.sampling.philox import uniform

INF, NAN = float("inf"), float("nan")
# The last is of several chunks, and of more tokens than are gathered; "make soak" has more of them.
VOCABS = [(1, 2, 7, 500, 1701)] if FULL in os.environ else [(1, 500), (2, 1101)]


Op = Callable[..., tuple[Tensor, Tensor]]
# "kernels": all that weighs something is gathered. "sampled": what lies between two bounds that a
# sample gives. "one by one": more than can be, so that a program goes through the whole row.
WAYS = ["reference", "kernels", "sampled", "one by one"]


@pytest.fixture
def op(way: str, launch_device: str, monkeypatch: pytest.MonkeyPatch) -> Op:
    """The choice, by kernels with small blocks, so that a small vocabulary has many of them.

    Of five rows and more each has two parts, where one part is all that others have. Of these rows
    a program has several blocks: of nine and more all.
    """
    if way == "reference":
        return sample_tokens
    from engine_core.kernels.sampling import triton

    monkeypatch.setattr(triton, "_LANES", 64)
    monkeypatch.setattr(triton, "_MANY_ROWS", 5)
    monkeypatch.setattr(triton, "_PARTS_OF_MANY", 4)
    monkeypatch.setattr(triton, "_PROGRAMS_OF_MANY", 2)
    monkeypatch.setattr(triton, "_CHUNK", 512)
    monkeypatch.setattr(triton, "_SAMPLED", 2)
    if way != "kernels":
        most = {"sampled": 1000, "one by one": 2}[way]
        monkeypatch.setattr(triton, "_MOST_CANDIDATES", most)
        # More seen tokens than are kept.
        monkeypatch.setattr(triton, "_KEPT_SEEN", 128)
    return triton.sample_tokens


@pytest.fixture
def device(way: str, launch_device: str) -> str:
    return "cpu" if way == "reference" else launch_device


@pytest.mark.parametrize(
    ("way", "adjusted", "dtype", "vocabs"), pairwise(WAYS, [False, True], DTYPES, VOCABS), ids=str
)
def test_the_tokens_are_those_of_the_definition(
    op: Any, device: str, dtype: torch.dtype, adjusted: bool, vocabs: tuple[int, ...]
) -> None:
    compared = turned = 0
    # On a GPU Triton 3.6 compiles no kernel for a vocabulary of one token.
    for vocab in [each for each in vocabs if each > 1 or device == "cpu"]:
        batch = make_sampling(9, vocab, dtype, seed=vocab + 2, adjusted=adjusted)
        counts = check_sampling(batch, op, device)
        compared += counts[0]
        turned += counts[1]
    assert turned <= 0.01 * compared


@pytest.mark.parametrize("adjusted", [False, True], ids=["plain", "adjusted"])
def test_before_kernels_are_compiled_pytorch_chooses_for_some_rows_at_a_time(
    launch_device: str, adjusted: bool
) -> None:
    batch = make_sampling(40, 700, torch.bfloat16, seed=5, adjusted=adjusted)
    compared, turned = check_sampling(batch, partial(sample_tokens, plain=True), launch_device)
    assert turned <= 0.01 * compared


@pytest.mark.parametrize("way", WAYS[:3])
@pytest.mark.parametrize("adjusted", [False, True], ids=["plain", "adjusted"])
def test_a_row_by_itself_chooses_the_same(op: Any, device: str, adjusted: bool) -> None:
    batch = make_sampling(7, 1101, torch.bfloat16, seed=3, adjusted=adjusted)
    together, _ = batch.on(device).run(op)
    for place in range(7):
        if batch.positions[place] >= 0:
            alone, _ = batch.take(place).on(device).run(op)
            assert alone.item() == together[place]


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("adjusted", [False, True], ids=["plain", "adjusted"])
def test_each_turn_has_its_place(op: Any, device: str, adjusted: bool) -> None:
    batch = make_sampling(9, 1101, torch.bfloat16, seed=6, adjusted=adjusted)
    expected = batch.on(device).run(op)
    shapes = ((3, 16), (3, 9))
    turn = torch.tensor([2], device=device)
    tokens, status = (
        torch.full(shape, -7, dtype=dtype, device=device)[:, :9]
        for shape, dtype in zip(shapes, (torch.int64, torch.int8), strict=True)
    )
    of = batch.on(device)
    live = batch.positions >= 0
    for number in (2, 0):
        turn.fill_(number)
        positions, last = of.positions.clone(), of.last_tokens.clone()
        given = batch.on(device)
        got = op(
            given.logits, of.rows, positions, last, given.state, turns=Turns(tokens, status, turn)
        )
        for stored, chosen, wanted in zip((tokens, status), got, expected, strict=True):
            assert torch.equal(chosen, stored)
            assert torch.equal(stored[number].cpu()[live], wanted[live])
            assert stored[1].tolist() == [-7] * 9
    assert tokens[0].tolist() == tokens[2].tolist()


def of_equal_logits(rows: int, vocab: int, **numbers: float) -> Sampling:
    values = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    for index, name in enumerate(("temperature", "top_k", "top_p", "min_p")):
        values[index] = numbers.get(name, values[index])
    return Sampling(
        torch.zeros(rows, vocab),
        torch.arange(rows),
        torch.arange(rows) * 1000,
        torch.zeros(rows, dtype=torch.int64),
        SamplingState(values.repeat(rows, 1), torch.arange(rows) * 2**40 + 17),
    )


@pytest.mark.parametrize("way", WAYS[:2])
def test_the_random_numbers_are_those_of_philox(
    op: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equal logits the token's id tells 17 bits of the random number."""
    # So many are a long row for the interpreter in small blocks.
    monkeypatch.setattr("engine_core.kernels.sampling.triton._LANES", 1024)
    batch = of_equal_logits(2, 2**17)
    drawn = uniform(batch.state.seeds, batch.positions + 1)
    tokens, _ = batch.on(device).run(op)
    assert tokens.tolist() == (drawn * 2**17).to(torch.int64).tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("numbers", "kept"),
    [
        ({"top_k": 300}, 300),
        ({"top_p": 0.3001}, 301),
        ({"top_k": 500, "top_p": 0.1999}, 100),
        ({"min_p": 1.0}, 1000),
        ({"top_p": 1e-9}, 1),
    ],
)
def test_of_equal_logits_those_of_the_lowest_ids_are_kept(
    op: Any, device: str, numbers: dict[str, float], kept: int
) -> None:
    batch = of_equal_logits(3, 1000, **numbers)
    drawn = uniform(batch.state.seeds, batch.positions + 1)
    tokens, _ = batch.on(device).run(op)
    assert tokens.tolist() == (drawn * kept).to(torch.int64).tolist()


@pytest.mark.parametrize("way", WAYS[:2])
def test_of_equal_logits_the_greedy_choice_is_the_first(op: Any, device: str) -> None:
    """Wherever they lie: in eight of a thread, in a block's parts, in blocks, or all over."""
    batch = of_equal_logits(7, 1100, temperature=0.0)
    places = [(305, 303), (999, 40, 7), (511, 512), (700, 300), (1099, 1024), (1023, 1024), ()]
    for row, equal in enumerate(places):
        batch.logits[row, list(equal)] = 3.0
    tokens, _ = batch.on(device).run(op)
    assert tokens.tolist() == [min(equal, default=0) for equal in places]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_lies_just_below_the_kept_set_is_not_in_it(
    op: Any, device: str, dtype: torch.dtype
) -> None:
    """The first bound may fall between two neighbouring logits of 16 bits."""
    batch = of_equal_logits(7, 600, top_k=3, temperature=0.77)
    logits = torch.full_like(batch.logits, -20.0)
    logits[:, 100:103] = 10.0
    logits[:, 5:10] = 9.5625
    tokens, _ = replace(batch, logits=logits.to(dtype)).on(device).run(op)
    assert set(tokens.tolist()) == {100, 101, 102}


@pytest.mark.parametrize(
    ("way", "dtype", "numbers"),
    pairwise(WAYS, DTYPES, [{"top_k": 3}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.9}]),
    ids=str,
)
def test_the_largest_of_negative_logits_is_drawn_however_far_apart_they_are(
    op: Any, device: str, dtype: torch.dtype, numbers: dict[str, float]
) -> None:
    """All that weighs anything lies between two neighbouring logits of 16 bits."""
    batch = of_equal_logits(2, 1100, temperature=0.001, **numbers)
    logits = torch.full_like(batch.logits, -67.0)
    logits[0, 123], logits[1, 1099] = -64.0, -65.0
    tokens, _ = replace(batch, logits=logits.to(dtype)).on(device).run(op)
    assert tokens.tolist() == [123, 1099]


@pytest.mark.parametrize("way", ["sampled"])
@pytest.mark.parametrize("deviation", [0.5, 4.0], ids=["even", "peaked"])
def test_a_sample_bounds_the_least_kept_logit(
    op: Any, device: str, deviation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are kept: no program goes through a whole row."""
    from engine_core.kernels.sampling import triton

    settle, gathered = triton._settle_kernel, []

    class Settle:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                gathered.append(args[2].sizes[:, 0].cpu())
                settle[grid](*args, **options)

            return launch

    monkeypatch.setattr(triton, "_settle_kernel", Settle())
    monkeypatch.setattr(triton, "_LANES", 512)
    monkeypatch.setattr(triton, "_SAMPLED", 10)
    monkeypatch.setattr(triton, "_MOST_CANDIDATES", 6000)
    if device == "cpu":  # compiled kernels keep what they call
        monkeypatch.setattr(triton, "_load_unlisted_chunk", None)
    batch = of_equal_logits(11, 20000)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(batch.logits.shape, generator=generator) * deviation
    numbers = batch.state.numbers
    for row, top_p in enumerate((0.05, 0.3, 0.7, 0.95, 0.999)):
        numbers[row, 2] = top_p
    for row, top_k in enumerate((1, 40, 3000, 15000), start=5):
        numbers[row, 1] = top_k
    for row, top_p in enumerate((0.5, 0.999), start=9):
        numbers[row, 1], numbers[row, 2] = 3000, top_p
    numbers[3, 3] = 0.02
    _, turned = check_sampling(replace(batch, logits=logits.bfloat16()), op, device)
    assert turned <= 1
    assert gathered[0].max() <= 6000


@pytest.mark.parametrize("way", ["sampled"])
@pytest.mark.parametrize("adjusted", [False, True], ids=["plain", "adjusted"])
@pytest.mark.parametrize("rows", [8, 17], ids=["two programs", "one program"])
def test_the_first_reading_finds_what_the_bounds_are_guessed_by(
    op: Any, device: str, rows: int, adjusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every so many logits of a row, as they are adjusted, and what the whole row weighs."""
    from engine_core.kernels.sampling import triton

    bounds, found, shape = triton._bounds_kernel, [], {}

    class Bounds:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                found.extend(getattr(args[1], name).cpu() for name in ("sample", "totals", "modes"))
                shape.update(options)
                bounds[grid](*args, **options)

            return launch

    monkeypatch.setattr(triton, "_bounds_kernel", Bounds())
    monkeypatch.setattr(triton, "_SAMPLED", 10)
    batch = make_sampling(rows, 2900, torch.float32, seed=3, adjusted=adjusted)
    batch.on(device).run(op)
    sample, totals, modes = found
    index = torch.arange(shape["SAMPLE"])
    places = index // shape["PICKS"] * shape["PART"] + index % shape["PICKS"] * (
        8 * shape["DISTANCE"]
    )
    there = places < 2900
    assert int(there.sum()) >= 290
    kinds = []
    for place, kind in enumerate((modes % 4).tolist()):
        row = int(batch.rows[place])
        x = torch.from_numpy(batch.adjusted(place)).double()
        if kind >= 2:
            assert torch.allclose(sample[place, there].double(), x[places[there]], atol=1e-5)
        if kind == 2:
            weights = ((x - x.max()) / batch.state.numbers[row, 0]).exp()
            assert totals[place] == pytest.approx(float(weights.sum()), rel=1e-4)
        kinds.append(kind)
    assert {2, 3} <= set(kinds)


def penalised(
    state: SamplingState, seen: Tensor, counts: Tensor, ids: Tensor, sizes: Tensor
) -> SamplingState:
    """The state with penalties of every row for such tokens, and nothing else that adjusts."""
    rows = len(seen)
    adjustments = Adjustments(
        torch.full((rows,), PENALISED, dtype=torch.int32),
        torch.full((rows, 1), -1, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int64),
        None,
        *(seen, counts, ids, sizes),
    )
    return replace(state, adjustments=adjustments)


@pytest.mark.parametrize("way", WAYS[:3])
@pytest.mark.parametrize("numbers", [{}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.3}], ids=str)
def test_what_a_penalty_takes_from_far_above_weighs_what_is_left_of_it(
    op: Any, device: str, numbers: dict[str, float]
) -> None:
    """By itself it would weigh more than there are numbers for.

    Of five blocks each of two programs has some, but not as many of the seen tokens.
    """
    vocab = 4100
    batch = of_equal_logits(6, vocab, temperature=0.05, **numbers)
    generator = torch.Generator().manual_seed(2)
    logits = torch.rand(batch.logits.shape, generator=generator)
    seen = torch.zeros(6, vocab, dtype=torch.uint8)
    ids = torch.zeros(6, vocab, dtype=torch.int32)
    for row in range(6):
        own = torch.randperm(vocab, generator=generator)[: 200 * row]
        ids[row, : len(own)] = own.int()
        seen[row, own] = PROMPTED
        logits[row, own] += 300
    batch.state.numbers[:, 4] = 301
    counts, sizes = torch.zeros(6, vocab, dtype=torch.int32), 200 * torch.arange(6).int()
    state = penalised(batch.state, seen, counts, ids, sizes)
    _, turned = check_sampling(replace(batch, logits=logits, state=state), op, device)
    assert turned == 0


@pytest.mark.parametrize("way", WAYS[:3])
@pytest.mark.parametrize("numbers", [{}, {"top_k": 99}, {"top_p": 0.9}], ids=str)
def test_where_no_token_was_seen_none_is_drawn(
    op: Any, device: str, numbers: dict[str, float]
) -> None:
    """Penalties leave 0 of the seen ones, as what threads without any have; token 0 has no mass."""
    batch = of_equal_logits(6, 1500, **numbers)
    sizes = torch.tensor([1, 3, 63, 65, 130, 200], dtype=torch.int32)
    ids = (torch.arange(1500, dtype=torch.int32) + 1).repeat(6, 1)
    counts = (torch.arange(1500) < sizes[:, None]).int().roll(1, dims=-1)
    logits = torch.full((6, 1500), -INF).masked_fill_(counts > 0, 3.0)
    batch.state.numbers[:, 5] = 3.0
    state = penalised(batch.state, (GENERATED * counts).to(torch.uint8), counts, ids, sizes)
    _, turned = check_sampling(replace(batch, logits=logits, state=state), op, device)
    assert turned == 0


@pytest.mark.parametrize("way", WAYS[:2])
def test_zeros_of_both_signs_are_equal(op: Any, device: str) -> None:
    batch = of_equal_logits(8, 600, top_k=100)
    batch.logits[:, ::2] = -0.0
    drawn = uniform(batch.state.seeds, batch.positions + 1)
    tokens, _ = batch.on(device).run(op)
    assert tokens.tolist() == (drawn * 100).to(torch.int64).tolist()


@pytest.mark.parametrize("way", WAYS[:2])
def test_what_means_nothing_has_a_status(op: Any, device: str) -> None:
    """Rows 6 and 7 are padding, and theirs mean nothing to anybody."""
    batch = of_equal_logits(8, 700)
    logits = batch.logits
    logits[0, 5], logits[1, 699], logits[2] = NAN, INF, -INF
    logits[6] = NAN
    batch.positions[6:] = -1
    kinds = torch.tensor([0, 0, 0, 1, 0, 1, 4, 4], dtype=torch.int32)
    bias = torch.full((8, 700), -INF)
    bias[5, 9] = 0.0
    adjustments = Adjustments(
        kinds,
        torch.full((8, 2), -1, dtype=torch.int32),
        torch.zeros(8, dtype=torch.int64),
        bias,
        torch.zeros(8, 700, dtype=torch.uint8),
        torch.zeros(8, 700, dtype=torch.int32),
        torch.zeros(8, 700, dtype=torch.int32),
        torch.zeros(8, dtype=torch.int32),
    )
    greedy = batch.state.numbers.clone()
    greedy[:, 0] = 0.0
    for numbers in (batch.state.numbers, greedy):
        state = replace(batch.state, numbers=numbers, adjustments=adjustments)
        ran = replace(batch, state=state).on(device)
        tokens, status = ran.run(op)
        assert status.tolist() == [1, 1, 1, 2, 0, 0, 0, 0]
        assert tokens[5] == 9
        assert all(0 <= token < 700 for token in tokens[:6].tolist())
        assert ran.positions.tolist() == [1, 1001, 2001, 3001, 4001, 5001, -1, -1]
        assert int(ran.state.adjustments.output_counts.sum()) == 0


@pytest.mark.parametrize("way", WAYS[:2])
def test_bans_end(op: Any, device: str) -> None:
    """Until the token at position 5 the first two of three tokens are banned."""
    adjustments = Adjustments(
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([[0, 1, -1, 1]], dtype=torch.int32),
        torch.tensor([5]),
    )
    numbers = torch.zeros(1, 7, dtype=torch.float64)
    state = SamplingState(numbers, torch.zeros(1, dtype=torch.int64), adjustments)
    batch = Sampling(
        torch.tensor([[3.0, 2.0, 1.0]]),
        torch.tensor([0]),
        torch.tensor([2]),
        torch.tensor([0]),
        state,
    ).on(device)
    assert [batch.run(op)[0].item() for _ in range(4)] == [2, 2, 0, 0]
    assert batch.positions.tolist() == [6]


@pytest.mark.parametrize("way", WAYS[:2])
def test_no_rows(op: Any, device: str) -> None:
    batch = of_equal_logits(3, 5)
    none = Sampling(
        batch.logits[:0], batch.rows[:0], batch.positions[:0], batch.last_tokens, batch.state
    )
    tokens, status = none.on(device).run(op)
    assert tokens.shape == status.shape == (0,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("adjusted", [False, True], ids=["plain", "adjusted"])
def test_a_cuda_graph_goes_on_by_itself(adjusted: bool) -> None:
    """A replay reads the tensors as they are then, and leaves them as a launch would."""
    batch = make_sampling(16, 20000, torch.bfloat16, seed=4, adjusted=adjusted)
    captured, launched = batch.on("cuda"), batch.on("cuda")

    def step(of: Sampling) -> tuple[Tensor, Tensor]:
        return sample_tokens(of.logits, of.rows, of.positions, of.last_tokens, of.state)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(batch.on("cuda"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step(captured)
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(20):
        captured.logits.normal_(generator=generator).mul_(3)
        launched.logits.copy_(captured.logits)
        graph.replay()
        for replayed, expected in zip(results, step(launched), strict=True):
            assert torch.equal(replayed, expected)
        assert torch.equal(captured.positions, launched.positions)
        assert torch.equal(captured.last_tokens[:-1], launched.last_tokens[:-1])
    if captured.state.adjustments is not None and launched.state.adjustments is not None:
        counts = captured.state.adjustments.output_counts
        assert counts is not None
        assert torch.equal(counts, launched.state.adjustments.output_counts)


def test_preconditions() -> None:
    batch = of_equal_logits(2, 5)

    def call(**changed: Any) -> None:
        replace(batch, **changed).run(sample_tokens)

    with pytest.raises(ValueError, match=r"0 < V.*\(2, 0\)"):
        call(logits=torch.zeros(2, 0))
    with pytest.raises(ValueError, match="stride 1"):
        call(logits=torch.zeros(5, 2).t())
    with pytest.raises(ValueError, match=r"floats.*int64"):
        call(logits=torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"rows must be \[2\] int64, got \(3,\)"):
        call(rows=torch.arange(3))
    with pytest.raises(ValueError, match=r"positions must be .*\.int32"):
        call(positions=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"numbers must be \(2, 7\) float64"):
        call(state=replace(batch.state, numbers=batch.state.numbers.float()))
    adjustments = Adjustments(
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, 1, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int64),
        bias=torch.zeros(2, 4),
    )
    with pytest.raises(ValueError, match=r"bias must be \(2, 5\)"):
        call(state=replace(batch.state, adjustments=adjustments))
    counted = replace(
        adjustments,
        bias=None,
        output_counts=torch.zeros(2, 5, dtype=torch.int32),
        seen_sizes=torch.zeros(2, dtype=torch.int32),
    )
    with pytest.raises(ValueError, match=r"together, got only output_counts and seen_sizes"):
        call(state=replace(batch.state, adjustments=counted))
    turns = Turns(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3).to(torch.int8), None)
    with pytest.raises(ValueError, match=r"sample_tokens: tokens of turns must be \(1, 2\)"):
        sample_tokens(
            batch.logits, batch.rows, batch.positions, batch.last_tokens, batch.state, turns=turns
        )
