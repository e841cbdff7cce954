"""The kernels of experts against their reference; see conftest for where they run."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_core.kernels import Fp8Weight, Routing
from engine_core.kernels.experts import reference

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
