"""Kernels of experts, against every expert on every token in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import TOLERANCE, error

from engine_core.kernels import Fp8Weight, Routing
from engine_core.kernels.experts import reference
from engine_core.kernels.experts.tiles import Tiles, choose_tiles

FEW = Tiles(False, 16, 32, 32, 64, 4, 2)
SORTED = Tiles(True, 16, 32, 64, 64, 4, 2)
EXPERTS = 5


def draw(
    tokens: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(tokens)]
    ).int()
    weights = torch.rand(tokens, top_k, generator=generator)
    x = torch.randn(tokens, hidden, generator=generator)
    gate_up = torch.randn(EXPERTS, 2 * inner, hidden, generator=generator) * hidden**-0.5
    down = torch.randn(EXPERTS, hidden, inner, generator=generator) * inner**-0.5
    return x.to(dtype), ids, weights, gate_up.to(dtype), down.to(dtype)


def both(
    device: str, tiles: Tiles, x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, act: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels make of it, and the reference in float32."""
    from engine_core.kernels.experts import triton

    def moved(weight: Any) -> Any:
        if isinstance(weight, Fp8Weight):
            return Fp8Weight(weight.codes.to(device), weight.scales.to(device), weight.dtype)
        return weight.to(device)

    def numbers(weight: Any) -> torch.Tensor:
        plain: torch.Tensor = weight.dense() if isinstance(weight, Fp8Weight) else weight
        return plain.float()

    operands = (x.to(device), ids.to(device), weights.to(device), moved(gate_up), moved(down))
    got = triton.run_experts(*operands, act, tiles).cpu()
    gates, downs = numbers(gate_up), numbers(down)
    hidden = x.shape[1]
    downs = downs.view(EXPERTS, hidden, -1)
    gates = gates.view(EXPERTS, -1, hidden)
    return got, reference.run_experts(x.float(), ids, weights, gates, downs, act)


@pytest.mark.parametrize("tiles", [FEW, SORTED], ids=["few", "sorted"])
@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden", "inner", "dtype", "act"),
    [
        (1, 2, 64, 32, torch.bfloat16, "silu"),
        (1, 1, 72, 40, torch.float32, "gelu"),
        (7, 3, 96, 48, torch.float16, "gelu_tanh"),
        (40, 2, 64, 32, torch.float32, "silu"),
    ],
)
def test_every_token_has_its_experts(
    tiles: Tiles,
    tokens: int,
    top_k: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    act: Any,
    launch_device: str,
) -> None:
    if dtype == torch.bfloat16 and launch_device == "cpu":
        dtype = torch.float16  # the interpreter's products of bfloat16 are wrong
    drawn = draw(tokens, top_k, hidden, inner, dtype)
    got, wanted = both(launch_device, tiles, *drawn, act)
    assert got.dtype == dtype
    assert error(got, wanted) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("tiles", [FEW, SORTED], ids=["few", "sorted"])
@pytest.mark.parametrize(
    "choice",
    [
        [[2, 3]] * 20,  # more of one than a program takes, and three with none
        [[0, 4], [-1, -1], [4, 0], [-1, 2]],  # padding, and another rank's
        [[5, 1], [7, -3]],  # beyond the last
        [[-1, -1]],
    ],
)
def test_choices_at_the_edges(tiles: Tiles, choice: list[list[int]], launch_device: str) -> None:
    ids = torch.tensor(choice, dtype=torch.int32)
    x, _, weights, gate_up, down = draw(len(ids), 2, 64, 32, torch.float32)
    # An expert that nobody chose may hold anything.
    for expert in set(range(EXPERTS)) - set(ids.flatten().tolist()):
        gate_up[expert] = torch.nan
    got, _ = both(launch_device, tiles, x, ids, weights, gate_up, down, "silu")
    _, wanted = both(launch_device, tiles, x, ids, weights, gate_up.nan_to_num(), down, "silu")
    assert error(got, wanted) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("tiles", [FEW, SORTED], ids=["few", "sorted"])
@pytest.mark.parametrize(("hidden", "inner"), [(128, 256), (96, 128)])
@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
def test_codes_of_8_bits(
    tiles: Tiles, hidden: int, inner: int, blocks: bool, launch_device: str
) -> None:
    x, ids, weights, gate_up, down = draw(6, 2, hidden, inner, torch.float16)

    def coded(weight: torch.Tensor) -> Fp8Weight:
        whole = Fp8Weight.quantized(weight.flatten(0, 1))
        if not blocks:
            return whole
        parts = -(-weight.shape[-1] // 128)
        scales = whole.scales * torch.arange(1, parts + 1).unsqueeze(1)
        return Fp8Weight(whole.codes, scales.contiguous(), weight.dtype)

    got, wanted = both(launch_device, tiles, x, ids, weights, coded(gate_up), coded(down), "silu")
    assert error(got, wanted) < 2 * TOLERANCE[torch.float16]


def test_the_rule_reads_shapes_alone() -> None:
    """Few rows have programs for all multiprocessors, where there are so many columns."""
    for pairs in (1, 8, 256, 2048, 4096):
        tiles = choose_tiles(pairs, 128, 768, 2048, torch.bfloat16, None)
        assert not tiles.sorts
        programs = min(pairs, 128) * -(-768 // tiles.gate_columns)
        assert programs >= 264 or tiles.gate_columns == 16
    assert choose_tiles(65536, 128, 768, 2048, torch.bfloat16, None).sorts


@pytest.mark.parametrize(
    "routing",
    [
        Routing(2),
        Routing(3, renormalize=True, scale=2.5),
        Routing(1, scoring="sigmoid"),
        Routing(6, scoring="sigmoid", renormalize=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("biased", [False, True])
def test_choices(routing: Routing, biased: bool, launch_device: str) -> None:
    from engine_core.kernels.experts import triton

    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, 11, generator=generator)
    logits[2] = 0.5  # all alike
    logits[3, 4:] = logits[3, 4]
    bias = torch.randn(11, generator=generator) if biased else None
    slots = torch.tensor([0, 5, 7, 9, -1, 3, -1])
    operands = [None if each is None else each.to(launch_device) for each in (bias, slots)]
    ids, weights = triton.choose_experts(logits.to(launch_device), routing, *operands)
    wanted_ids, wanted_weights = reference.choose_experts(logits, routing, bias, slots)
    assert ids.cpu().tolist() == wanted_ids.tolist()
    assert ids.dtype == torch.int32
    torch.testing.assert_close(weights.cpu(), wanted_weights)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_that_is_no_number_chooses_none(launch_device: str) -> None:
    from engine_core.kernels.experts import triton

    logits = torch.full((1, 5), torch.nan, device=launch_device)
    ids, _ = triton.choose_experts(logits, Routing(2), None, None)
    assert ids.tolist() == [[-1, -1]]
