"""The kernels of experts against their reference; see conftest for where they run."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine_core.kernels import DeferredRMSNorm, Fp8Weight, GroupWeight, Routing
from engine_core.kernels.experts import reference
from engine_core.kernels.linear.groups import pack_codes

EXPERTS, HIDDEN, INTER = 6, 64, 48


@pytest.fixture
def kernels(launch_device: str) -> Any:
    return import_module("engine_core.kernels.experts.triton")


def random(*shape: int, device: str, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


ROUTINGS = {
    "softmax": (Routing(3), False),
    "renormalised": (Routing(2, renormalize=True), False),
    "groups": (Routing(3, groups=4, top_groups=2, scale=1.5), False),
    "sigmoid": (Routing(4, "sigmoid", True, 4, 2, group_scores=2, scale=2.5), True),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_choice_is_that_of_the_reference(kernels: Any, launch_device: str, name: str) -> None:
    routing, biased = ROUTINGS[name]
    logits = random(9, 12, device=launch_device)
    logits[3] = 0.0  # ties
    bias = random(12, device=launch_device, seed=1) if biased else None
    slots = torch.tensor([0, 1, -1, 3, 4, -1, 6, 7, 8], device=launch_device)
    for given in (None, slots):
        ids, weights = kernels.choose_experts(logits, routing, bias, given)
        expected_ids, expected = reference.choose_experts(logits, routing, bias, given)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected)


def test_of_equal_scores_the_weights_are_those_of_topk(kernels: Any, launch_device: str) -> None:
    """torch takes any of equal scores, here it is the lowest; the weights are the same."""
    logits = torch.randint(0, 3, (40, 12), generator=torch.Generator().manual_seed(2)).float()
    ids, weights = kernels.choose_experts(logits.to(launch_device), Routing(5), None, None)
    scores = logits.softmax(-1)
    torch.testing.assert_close(weights.cpu(), scores.topk(5).values)
    for row, chosen in zip(scores.tolist(), ids.tolist(), strict=True):
        assert chosen == sorted(range(12), key=lambda expert: (-row[expert], expert))[:5]


# The interpreter computes with numpy.
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", ROUTINGS)
def test_a_score_that_is_no_number_spoils_its_token_alone(
    kernels: Any, launch_device: str, name: str
) -> None:
    """It may not leave the token without experts: the results are looked through for NaN."""
    routing, _ = ROUTINGS[name]
    logits = random(4, 12, device=launch_device)
    logits[1, 5] = torch.nan
    logits[3] = torch.nan
    slots = torch.tensor([0, 1, 2, -1], device=launch_device)
    ids, weights = kernels.choose_experts(logits, routing, None, slots)
    expected_ids, expected = reference.choose_experts(logits, routing, None, slots)
    assert torch.equal(ids[[0, 2, 3]], expected_ids[[0, 2, 3]])
    torch.testing.assert_close(weights[[0, 2]], expected[[0, 2]])
    x = random(4, HIDDEN, device=launch_device)
    gate_up = random(12, 2 * INTER, HIDDEN, device=launch_device)
    down = random(12, HIDDEN, INTER, device=launch_device)
    out = kernels.run_experts(x, ids, weights, gate_up, down, "silu")
    assert out.isnan().any(1).tolist() == [False, True, False, False]


CHOICES = {
    "all-to-one": lambda tokens: torch.full((tokens, 1), 4),
    "one-with-none": lambda tokens: torch.arange(tokens * 2).view(-1, 2) % (EXPERTS - 1),
    "random-and-padding": lambda tokens: (
        torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(3))
        .argsort(dim=1)[:, :3]
        .where(torch.arange(tokens).unsqueeze(1) % 4 != 1, -1)
    ),
    "of-another-rank": lambda tokens: torch.arange(tokens * 2).view(-1, 2) % (EXPERTS + 3) - 1,
}


@pytest.mark.parametrize("tokens", [1, 7, 130])
@pytest.mark.parametrize("name", CHOICES)
def test_pairs_are_grouped_by_expert(
    kernels: Any, launch_device: str, name: str, tokens: int
) -> None:
    ids = CHOICES[name](tokens).to(torch.int32)
    order, experts = kernels.group_pairs(ids.to(launch_device), EXPERTS, 16)
    flat, blocks = ids.flatten(), order.view(-1, 16).tolist()
    found: dict[int, list[int]] = {}
    for block, expert in zip(blocks, experts.tolist(), strict=True):
        if expert >= 0:
            pairs = [pair for pair in block if pair != flat.numel()]
            assert pairs, "a block that is used has pairs"
            found.setdefault(expert, []).extend(pairs)
    expected = {e: (flat == e).nonzero().flatten().tolist() for e in range(EXPERTS)}
    assert found == {expert: pairs for expert, pairs in expected.items() if pairs}


def test_a_long_prompts_pairs_are_grouped(kernels: Any, launch_device: str) -> None:
    """8,192 tokens, of which one expert has none and one half."""
    tokens = torch.arange(8192)
    ids = torch.stack([torch.where(tokens % 2 == 0, 2, tokens % 5), 5 + tokens % 2], dim=1)
    order, experts = kernels.group_pairs(ids.int().to(launch_device), 8, 128)
    order, experts = order.cpu().view(-1, 128), experts.cpu()
    for expert in range(8):
        pairs = order[experts == expert].flatten()
        assert torch.equal(
            pairs[pairs < ids.numel()], (ids.flatten() == expert).nonzero().flatten().int()
        )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("tokens", "name"), [(1, "one-with-none"), *((40, n) for n in CHOICES)])
def test_experts_are_those_of_the_reference(
    kernels: Any, launch_device: str, tokens: int, name: str, activation: Any
) -> None:
    ids = CHOICES[name](tokens).to(torch.int32).to(launch_device)
    x = random(tokens, HIDDEN, device=launch_device)
    weights = random(*ids.shape, device=launch_device, seed=1).softmax(-1)
    gate_up = random(EXPERTS, 2 * INTER, HIDDEN, device=launch_device, seed=2) / 8
    down = random(EXPERTS, HIDDEN, INTER, device=launch_device, seed=3) / 7
    given = (x, ids, weights, gate_up, down, activation)
    torch.testing.assert_close(
        kernels.run_experts(*given), reference.run_experts(*given), atol=1e-5, rtol=1e-5
    )


@pytest.fixture
def few(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With fewer and wider programs, for the interpreter."""
    monkeypatch.setattr(kernels.few, "GATE_TILE", (16, 128, 3))
    monkeypatch.setattr(kernels.few, "DOWN_TILE", (16, 16 * 8 * 256, 3))
    return kernels.few


# Tokens, experts of each, hidden and intermediate size: one and several steps of each product, the
# last one whole or not, and columns that no tile divides.
FEW = [(1, 8, 256, 192), (4, 3, 72, 136), (2, 6, 264, 392), (3, 1, 40, 24)]


@pytest.mark.parametrize(("tokens", "top_k", "hidden", "inter"), FEW)
def test_the_experts_of_few_tokens_are_those_of_the_reference(
    few: Any, launch_device: str, tokens: int, top_k: int, hidden: int, inter: int
) -> None:
    """An expert's numbers are not read for ids that are none's."""
    experts = 9
    order = random(tokens, experts, device=launch_device, seed=4).argsort(dim=1)
    # The last expert has NaN for numbers; -1 is padding's, and 9 and more are another rank's.
    ids = (order[:, :top_k] - 1).int()
    ids = torch.where(ids == experts - 1, experts + 1, ids)
    ids[-1, 0] = -1
    x = random(tokens, hidden, device=launch_device)
    weights = random(tokens, top_k, device=launch_device, seed=1).softmax(-1)
    gate_up = random(experts, 2 * inter, hidden, device=launch_device, seed=2) / hidden**0.5
    down = random(experts, hidden, inter, device=launch_device, seed=3) / inter**0.5
    gate_up[-1] = down[-1] = torch.nan
    got, _ = few.run_experts(x, ids, weights, gate_up, down, "silu")
    expected = reference.run_experts(x, ids, weights, gate_up[:-1], down[:-1], "silu")
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def undivided(x: Tensor, weight: Tensor, parts: int, eps: float) -> tuple[DeferredRMSNorm, Tensor]:
    """The RMSNorm of x without its division, its squares in so many parts, and with it."""
    squares = x.square().unflatten(1, (parts, -1)).sum(2)
    divided = x * weight / (x.square().mean(1, keepdim=True) + eps).sqrt()
    return DeferredRMSNorm(x * weight, squares, eps), divided


@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden", "inter", "offset"), [(*FEW[0], 0.0), (*FEW[2], 1.0)]
)
def test_the_experts_of_few_tokens_divide_and_end_with_the_next_norm(
    kernels: Any,
    few: Any,
    launch_device: str,
    tokens: int,
    top_k: int,
    hidden: int,
    inter: int,
    offset: float,
) -> None:
    experts, eps = 9, 0.5
    norms = [1 + random(hidden, device=launch_device, seed=seed) / 4 for seed in (5, 6)]
    x, divided = undivided(random(tokens, hidden, device=launch_device), norms[0], hidden // 8, eps)
    ids = random(tokens, experts, device=launch_device, seed=4).argsort(dim=1)[:, :top_k].int()
    ids[-1, 0] = -1
    weights = random(tokens, top_k, device=launch_device, seed=1).softmax(-1)
    gate_up = random(experts, 2 * inter, hidden, device=launch_device, seed=2) / hidden**0.5
    down = random(experts, hidden, inter, device=launch_device, seed=3) / inter**0.5
    residual = random(tokens, hidden, device=launch_device, seed=7)
    matrices = (ids, weights, gate_up, down, "silu")
    total = reference.run_experts(divided, *matrices) + residual
    normed, got = kernels.run_experts_add(x, *matrices, residual, norms[1], eps, offset)
    torch.testing.assert_close(got, total, atol=1e-5, rtol=1e-5)
    assert normed.squares.shape == (tokens, -(-hidden // few.DOWN_TILE[0]))
    _, expected = undivided(total, norms[1] + offset, 1, eps)
    torch.testing.assert_close(normed.divided(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CHOICES)
def test_the_sum_of_experts_ends_with_the_next_norm(
    kernels: Any, launch_device: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Numbers that were in memory where pairs have no expert do not count."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    ids = CHOICES[name](40).to(torch.int32).to(launch_device)
    x, residual = (random(40, HIDDEN, device=launch_device, seed=seed) for seed in (0, 7))
    weights = random(*ids.shape, device=launch_device, seed=1).softmax(-1)
    gate_up = random(EXPERTS, 2 * INTER, HIDDEN, device=launch_device, seed=2) / 8
    down = random(EXPERTS, HIDDEN, INTER, device=launch_device, seed=3) / 7
    norm_weight, norm_bias = (random(HIDDEN, device=launch_device, seed=seed) for seed in (5, 6))
    given = (x, ids, weights, gate_up, down, "silu")
    total = reference.run_experts(*given) + residual
    shape = (HIDDEN,)
    for centred in (False, True):
        normed, got = kernels.run_experts_add_norm(
            *(*given, residual, norm_weight, 0.5),
            norm_bias=norm_bias if centred else None,
            norm_offset=0.0,
            centred=centred,
        )
        expected = torch.rms_norm(total, shape, norm_weight, 0.5)
        if centred:
            expected = torch.layer_norm(total, shape, norm_weight, norm_bias, 0.5)
        torch.testing.assert_close(got, total, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(normed, expected, atol=1e-5, rtol=1e-5)


def test_tokens_that_share_no_experts_are_not_grouped(kernels: Any) -> None:
    """A single token shares none, however few there are; Mixtral has 8, of which it takes 2."""
    assert [n for n in (1, 2, 4, 5, 32) if kernels.sizes.are_few(n, 8, 128)] == [1, 2, 4]
    assert [n for n in (1, 2, 4) if kernels.sizes.are_few(n, 2, 8)] == [1]
    assert not kernels.sizes.are_few(1, 17, 256)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_router_is_its_product_and_the_choice(
    kernels: Any, launch_device: str, monkeypatch: pytest.MonkeyPatch, name: str, tokens: int
) -> None:
    # Some experts for each program; the last one to arrive chooses.
    monkeypatch.setattr(kernels.sizes, "ROUTER_BYTES", 1024)
    routing, biased = ROUTINGS[name]
    hidden = 72
    x = random(tokens, 2 * hidden, device=launch_device)[:, :hidden]
    matrix = random(12, hidden, device=launch_device, seed=2) / hidden**0.5
    matrix[7] = matrix[4]  # ties
    bias = random(12, device=launch_device, seed=1) if biased else None
    slots = torch.tensor([0, -1, 2, 3, -1], device=launch_device)[:tokens]
    for matrix_bias in (None, random(12, device=launch_device, seed=3)):
        ids, weights = kernels.route(x, matrix, matrix_bias, routing, bias, slots)
        logits = x.double() @ matrix.double().T
        logits = (logits if matrix_bias is None else logits + matrix_bias).float()
        expected_ids, expected = reference.choose_experts(logits, routing, bias, slots)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected)
    assert kernels.sizes.fits_route(tokens, *matrix.shape, matrix.itemsize)


def test_a_router_makes_up_for_a_division(kernels: Any, launch_device: str) -> None:
    norm_weight = random(64, device=launch_device, seed=5)
    given, divided = undivided(random(3, 64, device=launch_device), norm_weight, 16, 0.5)
    matrix = random(12, 64, device=launch_device, seed=2) / 8
    bias = random(12, device=launch_device, seed=3)
    ids, weights = kernels.route(given, matrix, bias, Routing(4), None, None)
    logits = divided @ matrix.T + bias
    expected_ids, expected = reference.choose_experts(logits, Routing(4), None, None)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected)


def test_a_router_of_16_bits_rounds_its_product(kernels: Any, launch_device: str) -> None:
    """As the linear would. One in float32 takes x as it is, and rounds nothing."""
    x = random(3, 64, device=launch_device).bfloat16()
    matrix = random(12, 64, device=launch_device, seed=2).bfloat16()
    for each in (matrix, matrix.float()):
        ids, weights = kernels.route(x, each, None, Routing(12), None, None)
        logits = (x.double() @ matrix.double().T).to(each.dtype)
        expected_ids, expected = reference.choose_experts(logits, Routing(12), None, None)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("tokens", [32, 128, 192, 256, 384, 512])
def test_few_experts_of_a_random_choice_need_a_second_block(kernels: Any, tokens: int) -> None:
    """It would read the expert's weight again, which is most of the time."""
    experts, top_k = 128, 8
    block_m = kernels._tiles(tokens * top_k, experts)[0]
    chosen = random(tokens, experts, device="cpu", seed=tokens).argsort(dim=1)[:, :top_k]
    pairs = chosen.flatten().bincount(minlength=experts)
    assert (pairs > block_m).float().mean() < 0.05


def test_the_tiles_of_many_pairs_multiply_the_same(kernels: Any, launch_device: str) -> None:
    tokens, experts = 150, 2
    ids = (torch.arange(tokens).view(-1, 1) % experts).to(torch.int32).to(launch_device)
    assert kernels._tiles(ids.numel(), experts)[0] == 128
    x = random(tokens, HIDDEN, device=launch_device)
    gate_up = random(experts, 2 * INTER, HIDDEN, device=launch_device, seed=2) / 8
    down = random(experts, HIDDEN, INTER, device=launch_device, seed=3) / 7
    given = (x, ids, torch.ones(tokens, 1, device=launch_device), gate_up, down, "silu")
    torch.testing.assert_close(
        kernels.run_experts(*given), reference.run_experts(*given), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
def test_experts_of_8_bit_floats_are_read_as_they_are(
    kernels: Any, launch_device: str, blocks: bool
) -> None:
    def quantised(rows: int, cols: int, seed: int) -> Fp8Weight:
        weight = random(rows, cols, device=launch_device, seed=seed) / 16
        codes = (weight * 64).to(torch.float8_e4m3fn)
        shape = (cols // 128, rows) if blocks else (rows,)
        scales = random(*shape, device=launch_device, seed=seed + 1).abs() / 64
        return Fp8Weight.of(codes, scales, torch.float32)

    hidden, inter, experts = 256, 128, 3
    ids = torch.tensor([[0, 2], [2, 0], [-1, -1]], dtype=torch.int32, device=launch_device)
    given = (
        random(3, hidden, device=launch_device),
        ids,
        random(3, 2, device=launch_device, seed=1).softmax(-1),
        quantised(experts * 2 * inter, hidden, 5),
        quantised(experts * hidden, inter, 7),
        "silu",
    )
    torch.testing.assert_close(
        kernels.run_experts(*given), reference.run_experts(*given), atol=1e-5, rtol=1e-4
    )


def integers(rows: int, cols: int, bits: int, group: int, device: str, seed: int) -> GroupWeight:
    """With zeros if there are groups, which are numbers in groups of 32."""
    draw = torch.Generator().manual_seed(seed)
    groups = -(-cols // group) if group else 1
    codes = torch.randint(2**bits, (rows, cols), dtype=torch.uint8, generator=draw)
    zeros = torch.randint(2**bits, (rows, groups), dtype=torch.uint8, generator=draw)
    scales = (torch.rand(rows, groups, generator=draw) + 0.5) / 2**bits / cols**0.5
    packed = pack_codes(codes, bits).to(device)
    if group == 32:
        zeros = torch.rand(rows, groups, generator=draw) / cols**0.5
    held = zeros.to(device) if group else None
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return GroupWeight.of(packed, scales.to(device), held, bits, dtype)


# Tokens, experts, bits, groups, hidden and intermediate size: each tile, ragged last blocks, and
# groups below and above one block.
INTEGERS = [
    (3, 4, 4, 32, 160, 96),
    (40, 4, 4, 64, 192, 64),
    (3, 4, 4, 128, 256, 128),
    (150, 2, 4, 0, 144, 80),
    (40, 4, 8, 0, 96, 64),
    (3, 2, 8, 256, 512, 256),
]


@pytest.mark.parametrize(("tokens", "experts", "bits", "group", "hidden", "inter"), INTEGERS)
def test_experts_of_integers_are_read_as_they_are(
    kernels: Any,
    launch_device: str,
    tokens: int,
    experts: int,
    bits: int,
    group: int,
    hidden: int,
    inter: int,
) -> None:
    gate_up = integers(experts * 2 * inter, hidden, bits, group, launch_device, 5)
    down = integers(experts * hidden, inter, bits, group, launch_device, 7)
    ids = (torch.arange(tokens * 2).view(-1, 2) % (experts + 1) - 1).int().to(launch_device)
    weights = random(tokens, 2, device=launch_device, seed=1).softmax(-1)
    x = random(tokens, hidden, device=launch_device).to(gate_up.dtype)
    got = kernels.run_experts(x, ids, weights, gate_up, down, "silu")
    # Of the numbers in float32, by the definition.
    numbers = [each.numbers(torch.float32) for each in (gate_up, down)]
    expected = reference.run_experts(x.float(), ids, weights, *numbers, "silu")
    off = (got.float() - expected).norm() / expected.norm()
    assert off < (1e-2 if x.dtype == torch.bfloat16 else 1e-5)


@pytest.fixture
def products_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's are NumPy's, whose order of sums may depend on a row's place."""
    multiply = np.matmul

    def exactly(a: Any, b: Any, dtype: Any = np.float32) -> Any:
        return multiply(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    monkeypatch.setattr(np, "matmul", exactly)


@pytest.mark.parametrize("form", ["numbers", "fp8", "integers"])
@pytest.mark.usefixtures("products_in_double")
def test_a_token_alone_and_in_company_is_the_same(
    kernels: Any, launch_device: str, form: str
) -> None:
    """Bit for bit in deterministic mode.

    Each product of a pair is one chain over K, cut as one tile says; a token's results are added in
    the order of its choice. Neither the block that a pair comes to, nor its row there, is in it.
    """
    hidden, inter, experts, tokens = 256, 128, 2, 100
    dtype = torch.bfloat16 if launch_device == "cuda" else torch.float32
    made: list[Any] = []
    for rows, cols, seed in ((2 * inter, hidden, 2), (hidden, inter, 3)):
        if form == "integers":
            made.append(integers(experts * rows, cols, 4, 64, launch_device, seed))
            continue
        weight = random(experts * rows, cols, device=launch_device, seed=seed).to(dtype) / 12
        made.append(
            Fp8Weight.quantized(weight) if form == "fp8" else weight.view(experts, rows, -1)
        )
    x = random(tokens, hidden, device=launch_device).to(dtype)
    ids = random(tokens, 3, device=launch_device, seed=4).argsort(dim=1)[:, :2].int() - 1
    weights = random(tokens, 2, device=launch_device, seed=1).softmax(-1)
    whole = kernels.run_experts(x, ids, weights, *made, "silu", True)
    for some in (slice(77, 78), slice(60, 65)):
        part = kernels.run_experts(x[some], ids[some], weights[some], *made, "silu", True)
        assert torch.equal(part, whole[some])
    expected = reference.run_experts(x, ids, weights, *made, "silu")
    atol = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(whole, expected, atol=atol, rtol=atol)
