"""Convolution and scan over cached states; see conftest for where the kernels run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine_core.kernels import StateCache, StateRows, StateSpaceWeights, run_state_space
from engine_core.kernels.state_space import cpu, reference

HEADS, WIDTH, SIZE, GROUPS, TAPS = 4, 6, 8, 2, 4
CHANNELS = HEADS * WIDTH + 2 * GROUPS * SIZE
LENGTHS = (1, 75, 13, 200)
Run = Callable[[Tensor, Tensor, StateSpaceWeights, StateCache, StateRows], Tensor]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_weights(bias: bool = True) -> StateSpaceWeights:
    return StateSpaceWeights(
        conv_weight=random(CHANNELS, TAPS, seed=1) / 2,
        conv_bias=random(CHANNELS, seed=2) if bias else None,
        a_log=random(HEADS, seed=3).abs(),
        d=random(HEADS, seed=4),
        dt_bias=random(HEADS, seed=5) - 2,
        dt_min=0.02,
        dt_max=0.5,
    )


def inputs_of(length: int, seed: int) -> tuple[Tensor, Tensor]:
    return random(length, CHANNELS, seed=seed), random(length, HEADS, seed=seed + 50)


def whole(xbc: Tensor, dt: Tensor, weights: StateSpaceWeights) -> Tensor:
    """A sequence at once, by a matrix of every token's share in every later one; in float64."""
    padded = F.pad(xbc.double().t().unsqueeze(0), (TAPS - 1, 0))
    bias = None if weights.conv_bias is None else weights.conv_bias.double()
    kernel = weights.conv_weight.double().unsqueeze(1)
    mixed = F.silu(F.conv1d(padded, kernel, bias, groups=CHANNELS))[0].t()
    x, b, c = mixed.split([HEADS * WIDTH, GROUPS * SIZE, GROUPS * SIZE], dim=1)
    x = x.view(-1, HEADS, WIDTH)
    b, c = (t.reshape(-1, GROUPS, SIZE).repeat_interleave(HEADS // GROUPS, 1) for t in (b, c))
    steps = F.softplus(dt.double() + weights.dt_bias).clamp(weights.dt_min, weights.dt_max)
    falls = steps * -weights.a_log.double().exp()
    share = torch.zeros(HEADS, len(x), len(x), dtype=torch.float64)
    for later in range(len(x)):
        for earlier in range(later + 1):
            fallen = falls[earlier + 1 : later + 1].sum(0).exp()
            share[:, later, earlier] = fallen * steps[earlier] * (c[later] * b[earlier]).sum(-1)
    return torch.einsum("hls,shp->lhp", share, x) + weights.d.double().view(-1, 1) * x


class States:
    """A cache in pieces of other data, and steps over sequences in it."""

    def __init__(self, block_size: int, device: str = "cpu", dtype: Any = torch.float32) -> None:
        self.block_size, self.device, self.dtype = block_size, device, dtype
        self.blocks = -(-max(LENGTHS) // block_size)
        count = 1 + self.blocks * len(LENGTHS)
        # What the last owner of a block left.
        self.cache = StateCache(
            torch.randint(0, 9, (count, 2), dtype=torch.int32, device=device),
            torch.full((count, 2, TAPS - 1, CHANNELS), torch.nan, dtype=dtype, device=device),
            torch.full((count, 2, HEADS, WIDTH, SIZE), torch.nan, device=device),
        )
        order = torch.randperm(count - 1, generator=torch.Generator().manual_seed(6)) + 1
        self.tables = order.view(len(LENGTHS), -1).int().to(device)

    def step(self, run: Run, weights: StateSpaceWeights, parts: list[tuple[int, int, int]],
             padding: int = 0, times: int = 1) -> dict[int, Tensor]:  # fmt: skip
        """Rows ``(sequence, start, end)``; the decode rows are put first, then rows of padding."""
        parts = sorted(parts, key=lambda part: part[2] - part[1] > 1)
        decode = sum(end - start == 1 for _, start, end in parts)
        each = [inputs_of(LENGTHS[s], s) for s, _, _ in parts]
        pad = [(torch.zeros(1, CHANNELS), torch.zeros(1, HEADS))] * padding
        cut = [(x[a:b], d[a:b]) for (x, d), (_, a, b) in zip(each, parts, strict=True)]
        cut[decode:decode] = pad
        counts = [len(x) for x, _ in cut]
        lens = [end for _, _, end in parts]
        lens[decode:decode] = [0] * padding
        tables = torch.zeros(len(cut), self.blocks, dtype=torch.int32, device=self.device)
        rows = [*range(decode), *range(decode + padding, len(cut))]
        for row, (sequence, _, _) in zip(rows, parts, strict=True):
            tables[row] = self.tables[sequence]
        starts = torch.tensor([0, *counts]).cumsum(0).int().to(self.device)
        state_rows = StateRows(
            starts, torch.tensor(lens).int().to(self.device), max(counts), decode + padding,
            tables, self.block_size,
        )  # fmt: skip
        xbc, dt = (torch.cat(t).to(self.device, self.dtype) for t in zip(*cut, strict=True))
        for _ in range(times):
            out = run(xbc, dt, weights, self.cache, state_rows)
        ends = starts.tolist()
        pairs = zip(rows, parts, strict=True)
        return {part[0]: out[ends[row] : ends[row + 1]].cpu() for row, part in pairs}


def in_chunks(states: States, run: Run, weights: StateSpaceWeights, budget: int,
              padding: int = 0, times: int = 1, count: int = 4) -> dict[int, Tensor]:  # fmt: skip
    """Sequences side by side, of each ``budget`` tokens a step until its last 4 decode."""
    lengths = LENGTHS[:count]
    done, outs = [0] * count, {s: [] for s in range(count)}
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        parts = []
        for s, length in enumerate(lengths):
            prompt = max(1, length - 4)
            end = min(prompt, done[s] + budget) if done[s] < prompt else done[s] + 1
            if end <= length:
                parts.append((s, done[s], end))
                done[s] = end
        for s, out in states.step(run, weights, parts, padding, times).items():
            outs[s].append(out)
    return {s: torch.cat(out) for s, out in outs.items()}


@pytest.fixture(scope="module")
def expected() -> dict[int, Tensor]:
    weights = make_weights()
    return {s: whole(*inputs_of(n, s), weights).float() for s, n in enumerate(LENGTHS)}


@pytest.mark.parametrize("run", [reference.run_state_space, cpu.run_state_space])
@pytest.mark.parametrize(
    ("block_size", "budget"), [(32, 200), (32, 7), (64, 64), (7, 33), (1, 50), (256, 200)]
)
def test_chunks_and_decoding_are_the_whole_sequence(
    run: Run, expected: dict[int, Tensor], block_size: int, budget: int
) -> None:
    outs = in_chunks(States(block_size), run, make_weights(), budget, padding=2)
    for s, out in outs.items():
        torch.testing.assert_close(out, expected[s], atol=2e-5, rtol=1e-5)


def test_both_cpu_paths_give_the_whole_sequence(cpu_path: str, expected: dict[int, Tensor]) -> None:
    outs = in_chunks(States(32), cpu.run_state_space, make_weights(), 60, padding=1, times=2)
    for s, out in outs.items():
        torch.testing.assert_close(out, expected[s], atol=2e-5, rtol=1e-5)


def test_threads_share_the_heads(
    share_among: Callable[[int], None], expected: dict[int, Tensor]
) -> None:
    for count in (1, 3):
        share_among(count)
        outs = in_chunks(States(32), cpu.run_state_space, make_weights(), 60, count=3)
        for s, out in outs.items():
            torch.testing.assert_close(out, expected[s], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("run", [reference.run_state_space, cpu.run_state_space])
def test_a_step_that_runs_twice_gives_the_same(run: Run) -> None:
    states, again = States(16), States(16)
    weights = make_weights()
    once = in_chunks(states, run, weights, 40)
    twice = in_chunks(again, run, weights, 40, times=3)
    for s, out in twice.items():
        assert torch.equal(out, once[s])


@pytest.mark.parametrize("cut", [32, 64, 96, 160])
def test_states_at_the_end_of_blocks_serve_other_sequences(
    expected: dict[int, Tensor], cut: int
) -> None:
    """As the prefix cache hands them on: bit for bit what is computed from the beginning."""
    weights, states = make_weights(), States(32)
    cold = states.step(run_state_space, weights, [(3, 0, 200)])[3]
    other = States(32)
    other.cache = states.cache
    other.tables = states.tables.clone()
    free = sorted(set(range(1, len(states.cache.lengths))) - set(states.tables[3].tolist()))
    other.tables[3, cut // 32 :] = torch.tensor(free[: other.blocks - cut // 32])
    hit = other.step(run_state_space, weights, [(3, cut, 200)])[3]
    torch.testing.assert_close(hit, expected[3][cut:], atol=2e-5, rtol=1e-5)
    if cut % 64 == 0:
        assert torch.equal(hit, cold[cut:])


def test_a_convolution_without_bias_and_bfloat16() -> None:
    weights = make_weights(bias=False)
    outs = [
        in_chunks(States(32, dtype=torch.bfloat16), run, weights, 50)
        for run in (reference.run_state_space, cpu.run_state_space)
    ]
    for s, out in outs[0].items():
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(outs[1][s], out, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"channels": CHANNELS + 1}, "57 channels are not 4 heads of 6"),
        ({"dt": HEADS + 1}, r"dt \[T, 4\], got \(1, 56\) and \(1, 5\)"),
        ({"taps": 3}, r"inputs must be \[num_blocks, 2, 2, 56\]"),
        ({"states": torch.bfloat16}, "states must be float32"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(fault: dict[str, Any], message: str) -> None:
    cache = States(32).cache
    cache = cache._replace(states=cache.states.to(fault.get("states", torch.float32)))
    channels = fault.get("channels", CHANNELS)
    weights = make_weights()._replace(conv_weight=torch.zeros(channels, fault.get("taps", TAPS)))
    rows = StateRows(torch.tensor([0, 1]), torch.tensor([1]), 1, 1, torch.ones(1, 1), 32)
    dt = torch.zeros(1, fault.get("dt", HEADS))
    with pytest.raises(ValueError, match=message):
        run_state_space(torch.zeros(1, CHANNELS), dt, weights, cache, rows)


@pytest.fixture
def kernels(launch_device: str) -> Any:
    return import_module("engine_core.kernels.state_space.triton")


@pytest.mark.parametrize(("block_size", "budget"), [(32, 48), (17, 80)])
def test_the_kernels_give_the_whole_sequence(
    kernels: Any, launch_device: str, expected: dict[int, Tensor], block_size: int, budget: int
) -> None:
    weights = StateSpaceWeights(
        *(each.to(launch_device) if isinstance(each, Tensor) else each for each in make_weights())
    )
    states = States(block_size, launch_device)
    outs = in_chunks(states, kernels.run_state_space, weights, budget, padding=1, times=2, count=3)
    for s, out in outs.items():
        torch.testing.assert_close(out, expected[s], atol=5e-5, rtol=1e-4)


def test_the_kernels_round_16_bits_as_the_reference(kernels: Any, launch_device: str) -> None:
    weights = make_weights(bias=False)
    there = StateSpaceWeights(
        *(each.to(launch_device) if isinstance(each, Tensor) else each for each in weights)
    )
    states = States(32, launch_device, torch.bfloat16)
    outs = in_chunks(states, kernels.run_state_space, there, 72, count=2)
    other = States(32, dtype=torch.bfloat16)
    for s, out in in_chunks(other, reference.run_state_space, weights, 72, count=2).items():
        torch.testing.assert_close(outs[s], out, atol=5e-2, rtol=5e-2)


def test_a_captured_step_may_have_a_chunk_without_room_for_tokens(
    kernels: Any, launch_device: str, expected: dict[int, Tensor]
) -> None:
    """As one of as many tokens as rows that decode."""
    weights = StateSpaceWeights(
        *(each.to(launch_device) if isinstance(each, Tensor) else each for each in make_weights())
    )
    states = States(32, launch_device)
    starts = torch.tensor([0, 1, 1], dtype=torch.int32, device=launch_device)
    lens = torch.tensor([1, 0], dtype=torch.int32, device=launch_device)
    rows = StateRows(starts, lens, 0, 1, states.tables[:2], 32)
    xbc, dt = (part[:1].to(launch_device) for part in inputs_of(LENGTHS[0], 0))
    out = kernels.run_state_space(xbc, dt, weights, states.cache, rows)
    torch.testing.assert_close(out.cpu(), expected[0][:1], atol=5e-5, rtol=1e-4)
