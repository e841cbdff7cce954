"""Which steps are captured as CUDA graphs, when, and what happens if there is no memory for one.

PyTorch's graphs are replaced by ones that capture nothing, so that no GPU is needed: what is
captured shows in the steps that the model is asked to run. ``tests/engine/test_gpu.py`` has the
real ones.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from replaying import Replaying
from torch import Tensor, nn

from engine_core.configs import (
    CacheConfig,
    CacheGroup,
    KVCacheSpec,
    SamplingParams,
    SchedulerConfig,
)
from engine_core.errors import EngineError, OptionError
from engine_core.inputs import ProcessedPrompt, PromptState
from engine_core.kernels import (
    GPU,
    CodedWeight,
    Fp8Weight,
    GroupWeight,
    decode_inputs,
    has_activated_kernel,
    has_kernel,
    sample_tokens,
)
from engine_core.kernels.launch.quick import Quick, is_quick, quickly
from engine_core.kernels.sampling import Adjustments
from engine_core.nn import Embedding
from engine_core.nn.linear import Linear
from engine_core.runtime.block_tables import BlockTables, IntArray
from engine_core.runtime.capture import AttemptError, CudaCapturer
from engine_core.runtime.compiles import QUICK, Compiles
from engine_core.runtime.eager import ForwardPass
from engine_core.runtime.graphs import (
    DecodeGraphs,
    GraphState,
    GraphSteps,
    largest_step_bytes,
    launch_bound_tokens,
)
from engine_core.runtime.media_graphs import MediaGraphs
from engine_core.runtime.memory import CachePlan
from engine_core.runtime.runner import ModelRunner
from engine_core.runtime.sampler import Sampler
from engine_core.runtime.step_batch import Choice, GraphKey, StepOutputs, StepState
from engine_core.step_context import BuildContext, StepContext, building
from engine_core.steps import Admission, PlanRow, StepPlan

ROWS, VOCAB, MAX_MODEL_LEN = 20, 32, 4096
# Prompts alone, the largest first.
LONG = [2048, 1792, 1536, 1280, 1024, 896, 768, 640, 512, 448, 384, 320, 256, 192, 128]


class Device:
    """A GPU whose captures are counted.

    Attributes:
        captured: tokens and decode rows of each step that was captured, in order.
        failure: what is raised in the middle of a capture.
        outside: the same before it, where the step is run once.
        free: bytes that no process has.
        reserved: bytes that PyTorch's allocator has.
        allocated: bytes of these that are in tensors.
        modes: what of other threads' work makes a capture fail, of each.
    """

    def __init__(self) -> None:
        self.captured: list[tuple[int, int]] = []
        self.failure: Exception | None = None
        self.outside: Exception | None = None
        self.capturing = False
        self.free, self.reserved, self.allocated = 1000, 0, 0
        self.modes: set[str] = set()

    def logits(self, context: StepContext, places: Tensor | None) -> Tensor:
        tokens = context.input_ids.shape[1]
        failure = self.failure if self.capturing else self.outside
        if failure is not None:
            raise failure
        if self.capturing:
            self.captured.append((tokens, context.attn_metadata.num_decode_rows))
        return torch.zeros(tokens if places is None else len(places), VOCAB)

    @contextlib.contextmanager
    def graph(self, *_: Any, capture_error_mode: str = "global", **__: Any) -> Iterator[None]:
        self.modes.add(capture_error_mode)
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def take(self) -> list[tuple[int, int]]:
        """The captures since the last call."""
        captured, self.captured = self.captured, []
        return captured


class Graph:
    def replay(self) -> None: ...


class Stream:
    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    empty = torch.empty

    def pageable(*args: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        del pin_memory
        return empty(*args, **more)

    monkeypatch.setattr(torch, "empty", pageable)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", device.graph)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (device.free, 10**6))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: device.reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: device.allocated)
    return device


def state_of(device: Device, max_rows: int) -> GraphState:
    cpu = torch.device("cpu")
    sampler = Sampler(max_rows + 1, cpu)
    tables = [BlockTables(max_rows, MAX_MODEL_LEN // 16, 16, cpu)]
    steps = StepState(tables, sampler.last_tokens, MAX_MODEL_LEN)
    return GraphState(steps, device.logits, lambda: sampler.state, 1000)


@pytest.fixture
def state(device: Device) -> GraphState:
    return state_of(device, ROWS)


@dataclass
class Known:
    token_ids: IntArray
    token_state: dict[str, IntArray]


def run(graphs: GraphSteps, tokens: int, prompts: int = 1, decodes: int = 0) -> StepOutputs | None:
    """A step of so many tokens of prompts, and rows that decode before them."""
    lengths = [1] * decodes + [tokens // prompts] * prompts
    for extra in range(tokens % prompts):
        lengths[decodes + extra] += 1
    rows = [
        PlanRow(str(row), row, 0, length, ((),), sample=True) for row, length in enumerate(lengths)
    ]
    known = {row: Known(np.ones(length, np.int64), {}) for row, length in enumerate(lengths)}
    return graphs.run(graphs._steps.batch(rows, known, Choice.GREEDY, graphs.fit))


def rows(count: int) -> tuple[list[int], list[int]]:
    return list(range(count)), [5] * count


def test_decode_steps_of_the_largest_batch_come_first_and_the_others_one_by_one(
    device: Device, state: GraphState
) -> None:
    graphs = DecodeGraphs(state)
    list(graphs.starts())
    assert device.take() == [(20, 20), (1, 1)]
    each = []
    while graphs.capture_next():
        each.append(device.take())
    # Random choice for one row and for the largest batch, and then both kinds of each.
    smaller = [(size, size) for size in (2, 4, 8, 16) for _ in range(2)]
    assert each == [[size] for size in [(1, 1), (20, 20), *smaller]]
    for count in range(1, ROWS + 1):
        for choice in (Choice.GREEDY, Choice.RANDOM):
            assert graphs.begin(*rows(count), choice) is not None
    assert device.take() == []


def test_penalties_never_wait_for_a_capture_once_the_expected_steps_are_captured(
    device: Device, state: GraphState
) -> None:
    graphs = DecodeGraphs(state)
    assert graphs.offer(3, Choice.ADJUSTED) is Choice.ADJUSTED
    assert graphs.begin(*rows(3), Choice.ADJUSTED) is not None
    while graphs.capture_next():
        pass
    device.take()
    assert graphs.offer(3, Choice.ADJUSTED) is Choice.ADJUSTED
    # The others choose by the logits until the engine has been idle.
    for _ in range(2):
        assert graphs.offer(7, Choice.ADJUSTED) is None
    assert [graphs.offer(7, choice) for choice in (Choice.RANDOM, None)] == [Choice.RANDOM, None]
    assert graphs.capture_next()
    assert graphs.offer(2, Choice.ADJUSTED) is None
    assert device.take() == [(8, 8)]
    assert graphs.offer(7, Choice.ADJUSTED) is Choice.ADJUSTED
    assert graphs.begin(*rows(7), Choice.ADJUSTED) is not None
    assert graphs.capture_next()
    assert not graphs.capture_next()
    assert device.take() == [(2, 2)]


def test_a_step_that_was_run_with_other_adjustments_is_run_anew(
    device: Device, state: GraphState
) -> None:
    """Before it is captured: its kernels may be others."""
    plain, count = state.sampling(), ROWS + 1
    made = []
    for width in (8, 16):
        kinds, ends = (torch.zeros(count, dtype=dtype) for dtype in (torch.int32, torch.int64))
        bans = torch.zeros(count, width, dtype=torch.int32)
        made.append(replace(plain, adjustments=Adjustments(kinds, bans, ends)))
    state.sampling, state.compiles = lambda: made[0], Compiles()
    graphs = DecodeGraphs(state)
    while graphs.capture_next():
        pass
    captured = graphs.num_captured
    for _ in range(2):
        made.reverse()
        assert graphs.offer(7, Choice.ADJUSTED) is None
        assert graphs.capture_next(part=True)
        assert graphs.num_captured == captured
    assert graphs.capture_next(part=True)
    assert graphs.num_captured == captured + 1
    assert graphs.offer(7, Choice.ADJUSTED) is Choice.ADJUSTED


def test_up_to_1024_rows_decode_in_few_sizes(device: Device) -> None:
    state = state_of(device, 1024)
    graphs = DecodeGraphs(state)
    while graphs.capture_next():
        pass
    captured = device.take()
    assert len(captured) == 84
    sizes = sorted({size for size, _ in captured})
    assert sizes[-1] == 1024
    assert all(high <= low * 9 / 8 for low, high in pairwise(sizes) if low >= 128)
    # Packed weights have kernels for one more.
    state.packed = True
    graphs = DecodeGraphs(state)
    while graphs.capture_next():
        pass
    assert {size for size, _ in device.take()} == {*sizes, 80}


def test_other_threads_may_use_the_device_beside_a_capture(
    device: Device, state: GraphState
) -> None:
    list(DecodeGraphs(state).starts())
    assert device.modes == {"thread_local"}


def test_what_was_needed_meanwhile_is_not_captured_again(device: Device, state: GraphState) -> None:
    graphs = DecodeGraphs(state)
    list(graphs.starts())
    assert graphs.begin(*rows(3)) is not None
    assert device.take() == [(20, 20), (1, 1), (4, 4)]
    while graphs.capture_next():
        pass
    both = [(size, size) for size in (8, 16) for _ in range(2)]
    assert device.take() == [(1, 1), (20, 20), (2, 2), (2, 2), (4, 4), *both]


def test_one_row_at_a_time_has_few_graphs(device: Device) -> None:
    graphs = DecodeGraphs(state_of(device, 1))
    list(graphs.starts())
    assert graphs.capture_next()
    assert not graphs.capture_next()
    assert device.take() == [(1, 1), (1, 1)]


@pytest.mark.parametrize(
    ("max_tokens", "max_batched", "start", "later"),
    [
        (10**6, 2048, [64], LONG),
        # The size that holds the longest chunk.
        (10**6, 1100, [64], LONG[3:]),
        (10**6, 160, [64], [192, 128]),
        # A larger step takes the device longer than the launch of its kernels.
        (300, 8192, [64], [256, 192, 128]),
        (10**6, 64, [64], []),
        (10**6, 8, [64], []),
        (63, 8192, [], []),
    ],
)
def test_a_short_prompt_comes_first_and_longer_ones_after_it(
    device: Device,
    max_tokens: int,
    max_batched: int,
    start: list[int],
    later: list[int],
) -> None:
    graphs = GraphSteps(state_of(device, 1), max_tokens, max_batched)
    list(graphs.starts())
    assert device.take() == [(tokens, 0) for tokens in start]
    while graphs.capture_next():
        pass
    captured = device.take()
    assert captured[:1] == [(tokens, 0) for tokens in later[:1]]
    assert sorted(captured) == sorted((tokens, 0) for tokens in later)
    # A row of one token counts among those that decode.
    for tokens in range(2, min(max_batched, max([0, *start, *later])) + 1):
        assert run(graphs, tokens) is not None
    assert device.take() == []


@pytest.mark.parametrize(
    ("max_rows", "max_batched", "full"),
    [
        (20, 1024, [(1024, 0)] * 2 + [(1056, 32)] * 3),
        # 2 rows are one that decodes and one prompt at least, or two prompts.
        (2, 1024, [(1024, 0), (1056, 32)]),
        (40, 1024, [(1024, 0)] * 2 + [(1056, 32)] * 3 + [(1088, 64)] * 2),
        # One prompt has 4096 tokens at most.
        (20, 8192, [(8192, 0)] * 2 + [(8224, 32)] * 2),
        (1, 8192, []),
    ],
)
def test_full_steps_are_captured_before_they_come(
    device: Device,
    max_rows: int,
    max_batched: int,
    full: list[tuple[int, int]],
) -> None:
    graphs = GraphSteps(state_of(device, max_rows), 10**6, max_batched)
    while graphs.capture_next():
        pass
    largest = min(max_batched, MAX_MODEL_LEN)
    captured = device.take()
    assert captured[0] == (64, 0)
    assert captured[1] == max(captured)
    for step in {*full, (largest, 0)}:
        assert captured.count(step) >= [*full, (largest, 0)].count(step)
    for decodes in (0, 1, max_rows // 2, max_rows - 1):
        # As few prompts as a full step can have, and as many as a captured one.
        for prompts in {-(-max_batched // MAX_MODEL_LEN), min(32, max_rows - decodes)}:
            if prompts * MAX_MODEL_LEN >= max_batched and decodes + prompts <= max_rows:
                assert run(graphs, max_batched, prompts, decodes) is not None
    assert device.take() == []


@pytest.mark.parametrize(("max_rows", "widest"), [(2, 32), (33, 32), (34, 64), (300, 512)])
def test_prompts_beside_decodes_are_captured_before_they_come(
    device: Device, max_rows: int, widest: int
) -> None:
    graphs = GraphSteps(state_of(device, max_rows), 10**6, 1024)
    while graphs.capture_next():
        pass
    captured = device.take()
    assert max(decode for _, decode in captured) == widest
    # Whatever comes now finds a graph that holds it, or runs without one: nobody waits.
    for decodes in {1, 31, 32, 33, max_rows - 1}:
        for tokens in (2, 65, 500, 700, 1000):
            if decodes < max_rows:
                assert run(graphs, tokens, 1, decodes) is not None
    if max_rows == 300:
        assert run(graphs, 1000, 8, 200) is not None
        assert run(graphs, 1000, 33, 100) is None
        assert run(graphs, 1025, 1, 100) is None
        # Attention meets as many decoding rows as in a captured step, and compiles nothing then.
        assert graphs.fit(GraphKey(100 + 1025, 100, 1)) == (GraphKey(128 + 1025, 128, 1), False)
        assert graphs.fit(GraphKey(1025, 0, 9)) == (GraphKey(1025, 0, 9), False)
    assert device.take() == []


def test_prompts_beside_decodes_have_graphs_where_the_host_would_be_busy(device: Device) -> None:
    """Up to twice the tokens at which launching kernels takes as long as running them."""
    graphs = GraphSteps(state_of(device, 20), 600, 1280)
    while graphs.capture_next():
        pass
    device.take()
    # Whole tiles with the decoding rows, so that none is begun for these alone.
    assert graphs.fit(GraphKey(19 + 480, 19, 2)) == (GraphKey(512, 32, 8), True)
    assert graphs.fit(GraphKey(19 + 481, 19, 2)) == (GraphKey(640, 32, 32), True)
    assert graphs.fit(GraphKey(2 + 992, 2, 1)) == (GraphKey(1024, 32, 32), True)
    assert graphs.fit(GraphKey(900, 0, 1)) == (GraphKey(1024, 32, 32), True)
    assert graphs.fit(GraphKey(2 + 1280, 2, 1)) == (GraphKey(32 + 1280, 32, 1), False)
    assert device.take() == []


def test_until_all_expected_steps_are_captured_others_are_when_they_come(device: Device) -> None:
    graphs = GraphSteps(state_of(device, 20), 10**6, 1024)
    list(graphs.starts())
    assert run(graphs, 64, 1, 1) is not None
    assert device.take() == [(64, 0), (96, 32)]


def test_shortly_after_a_capture_steps_take_a_larger_graph_that_is_there(device: Device) -> None:
    """So that no request waits for two in a row."""
    state = state_of(device, 20)
    decode, mixed = DecodeGraphs(state), GraphSteps(state, 10**6, 1024)
    list(decode.starts())
    list(mixed.starts())
    assert mixed.capture_next()
    assert device.take() == [(20, 20), (1, 1), (64, 0), (1056, 32)]
    turns = 0
    while not device.captured:
        turns += 1
        captured = decode.begin(*rows(3))
        assert captured is not None
        assert captured.logits is not None
        assert len(captured.logits) == (4 if device.captured == [(4, 4)] else 20)
    assert 10 < turns < 100
    assert device.take() == [(4, 4)]
    # Whose own graph is there takes it, and what nothing else holds is captured all the same.
    assert decode.begin(*rows(1)) is not None
    assert device.take() == []
    assert decode.begin(*rows(20), Choice.RANDOM) is not None
    assert device.take() == [(20, 20)]


def test_the_first_captures_leave_little_padding_to_prompts_of_any_length(device: Device) -> None:
    graphs = GraphSteps(state_of(device, 1), 10**6, 8192)
    list(graphs.starts())
    for _ in range(5):
        assert graphs.capture_next()
    sizes = sorted(tokens for tokens, _ in device.take())
    assert (sizes[0], sizes[-1]) == (64, MAX_MODEL_LEN)
    assert all(larger <= 5 * smaller for smaller, larger in pairwise(sizes))


def test_a_prompt_does_not_wait_for_a_capture_nor_go_through_a_much_larger_step(
    device: Device,
) -> None:
    """Its kernels are launched in the padded form; a server that is never idle captures all."""
    mixed = GraphSteps(state_of(device, 20), 530, 1024)
    list(mixed.starts())
    assert mixed.capture_next()
    assert device.take() == [(64, 0), (1056, 32)]
    turns = 0
    while not device.captured:
        assert turns < 5000
        turns += 1
        captured = run(mixed, 300, 2, 1)
        assert (captured is not None) is bool(device.captured)
    assert turns > 500
    assert device.take() == [(352, 32)]
    # One that is little larger does as well, and one that takes the device no longer than a launch.
    for tokens in (300, 270, 320, 20):
        assert run(mixed, tokens, 2, 1) is not None
    assert run(mixed, 400, 2, 1) is None
    assert run(mixed, 900, 2, 1) is not None
    assert device.take() == []


def test_steps_that_take_the_device_longer_than_their_launch_have_little_padding(
    device: Device,
) -> None:
    graphs = GraphSteps(state_of(device, 20), 300, 1024)
    while graphs.capture_next():
        pass
    assert max(device.take()) == (512, 32)


OUT_OF_MEMORY = {
    "allocator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
    "runtime": RuntimeError("CUDA error: out of memory"),
    "triton": RuntimeError("Triton Error [CUDA]: out of memory"),
}


@pytest.mark.parametrize("when", ["failure", "outside"])
@pytest.mark.parametrize("error", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY.keys())
def test_without_memory_a_step_runs_without_a_graph(
    device: Device,
    state: GraphState,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    when: str,
) -> None:
    decode, mixed = DecodeGraphs(state), GraphSteps(state, 10**6, 8192)
    list(decode.starts())
    list(mixed.starts())
    setattr(device, when, error)
    with caplog.at_level(logging.WARNING):
        assert decode.begin(*rows(4)) is None
        assert run(mixed, 500) is None
    said = [record.getMessage() for record in caplog.records]
    assert ["a decode step of up to 4 rows" in said[0], "of up to 512 tokens" in said[1]] == [
        True
    ] * 2
    assert all("set kv_cache_memory lower" in line for line in said)
    device.take()
    setattr(device, when, None)
    # Nothing is captured that nobody needs; what is needed and is not known to fail is tried.
    assert not decode.capture_next()
    assert not mixed.capture_next()
    assert decode.begin(*rows(4)) is None
    assert run(mixed, 500) is None
    assert device.take() == []
    state.since_capture = 1000
    for count in (1, 2, 20):
        assert decode.begin(*rows(count)) is not None
    assert run(mixed, 64) is not None
    assert device.take() == [(2, 2)]
    assert len(caplog.records) == 2


def test_memory_that_runs_out_ends_what_is_captured_ahead(
    device: Device, state: GraphState, caplog: pytest.LogCaptureFixture
) -> None:
    decode, mixed = DecodeGraphs(state), GraphSteps(state, 10**6, 8192)
    list(decode.starts())
    list(mixed.starts())
    assert decode.capture_next()
    device.take()
    device.failure = OUT_OF_MEMORY["allocator"]
    assert not decode.capture_next()
    assert not mixed.capture_next()
    device.failure = None
    assert not decode.capture_next()
    assert not mixed.capture_next()
    assert device.take() == []
    assert len(caplog.records) == 1


def test_without_memory_for_the_first_request_there_is_no_start(
    device: Device, state: GraphState
) -> None:
    device.failure = OUT_OF_MEMORY["allocator"]
    with pytest.raises(OptionError, match=r"20 rows .*set kv_cache_memory lower to leave more"):
        list(DecodeGraphs(state).starts())
    with pytest.raises(OptionError, match=r"64 tokens .*set kv_cache_memory lower to leave more"):
        list(GraphSteps(state, 10**6, 8192).starts())


def test_another_failure_is_not_taken_for_a_lack_of_memory(
    device: Device, state: GraphState, caplog: pytest.LogCaptureFixture
) -> None:
    decode, mixed = DecodeGraphs(state), GraphSteps(state, 10**6, 8192)
    device.failure = ValueError("operation not permitted when stream is capturing")
    said = (
        "could not be captured as a CUDA graph: ValueError: operation not permitted when stream is "
        "capturing; with eager=True (--eager) nothing is captured"
    )
    with pytest.raises(EngineError, match=re.escape(f"20 rows (greedy choice) {said}")):
        list(decode.starts())
    with pytest.raises(RuntimeError, match=re.escape(f"4 rows (random choice) {said}")):
        decode.begin(*rows(4), Choice.RANDOM)
    with pytest.raises(RuntimeError, match=re.escape(f"512 tokens with prompts among them {said}")):
        run(mixed, 500)
    # What nobody has asked for yet is left alone, and with it the rest.
    assert caplog.records == []
    assert not decode.capture_next()
    (record,) = caplog.records
    assert f"20 rows (greedy choice) {said}" in record.getMessage()
    device.failure = None
    assert not decode.capture_next()
    assert not mixed.capture_next()
    state.since_capture = None  # as in an engine that captures nothing ahead
    assert decode.begin(*rows(20)) is None
    assert decode.begin(*rows(4)) is not None
    assert run(mixed, 500) is not None
    assert device.take() == [(4, 4), (512, 0)]
    assert len(caplog.records) == 1


def test_nothing_is_captured_ahead_with_less_memory_than_a_step_needs(
    device: Device, state: GraphState, caplog: pytest.LogCaptureFixture
) -> None:
    decode, mixed = DecodeGraphs(state), GraphSteps(state, 10**6, 8192)
    # What PyTorch keeps for later use counts, what is in tensors does not.
    device.free, device.reserved, device.allocated = 400, 900, 300
    assert decode.capture_next()
    assert mixed.capture_next()
    assert caplog.records == []
    device.take()
    device.allocated = 301
    for _ in range(2):
        assert not decode.capture_next()
        assert not mixed.capture_next()
    assert device.take() == []
    (record,) = caplog.records
    assert "set kv_cache_memory lower to leave more" in record.getMessage()
    # What is needed is captured.
    for needed in (lambda: decode.begin(*rows(4)), lambda: run(mixed, 200)):
        state.since_capture = 1000
        assert needed() is not None
    assert device.take() == [(4, 4), (256, 0)]


def test_memory_of_the_largest_step_is_there_before_a_smaller_one_is_captured(
    device: Device, state: GraphState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with prompts that is needed at once may be the smallest."""
    reserved: list[int] = []
    reserve = CudaCapturer.reserve

    def noted(self: CudaCapturer, count: int) -> None:
        assert device.captured == []
        reserved.append(count)
        reserve(self, count)

    monkeypatch.setattr(CudaCapturer, "reserve", noted)
    device.free = 10**9
    for _ in range(2):
        graphs = GraphSteps(state, 10**6, 1024)
        for tokens in (200, 1000):
            assert run(graphs, tokens) is not None
        while graphs.capture_next():
            pass
        assert max(device.take()) == (1024 + 32, 32)
        # Where little is free, nobody is to take more of it than is needed.
        device.free, state.ahead, state.since_capture = 1999, True, None
    # 1000 bytes for 1024 tokens and 20 rows.
    assert reserved == [1000 * (1024 + 32) // (1024 + ROWS)]


def test_a_step_takes_twice_its_widest_activation() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = Embedding(1000, 8, torch.bfloat16, None)
            self.up = nn.Linear(8, 48, dtype=torch.bfloat16)
            self.down = nn.Linear(48, 8, dtype=torch.bfloat16)
            self.head = nn.Linear(8, 1000, dtype=torch.bfloat16)

    assert largest_step_bytes(Model(), 100) == 100 * 48 * 2 * 2
    assert largest_step_bytes(nn.Embedding(10, 4), 100) == 0


def test_weights_that_are_packed_count_as_what_they_were() -> None:
    """Their parameters are gone, but not their products nor their results."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (
                Linear(k, [(None, n, 0, n)], bias=False) for k, n in ((512, 2048), (2048, 512))
            )

    def sizes(pack: Callable[[Tensor], CodedWeight] | None) -> tuple[int, int]:
        with building(BuildContext(dtype=torch.bfloat16)):
            model = Model()
        for layer in (model.up, model.down) if pack is not None else ():
            nn.init.normal_(layer.weight)
            layer.set_packed(pack(layer.weight.data), "weight")
        assert pack is None or not list(model.parameters())
        return largest_step_bytes(model, 100), launch_bound_tokens(model, 1)

    plain, tokens = sizes(None)
    assert plain == 100 * 2048 * 2 * 2
    assert tokens == int(1e-3 * 600e12 / (2 * 2 * 512 * 2048))
    assert sizes(lambda weight: GroupWeight.quantized(weight, 4, 128)) == (plain, tokens)
    # Codes of 8-bit floats are multiplied twice as fast, if the weight has a scale for each row,
    # and take twice as long to launch.
    assert sizes(Fp8Weight.quantized) == (plain, int(2e-3 * 600e12 / (2 * 512 * 2048)))


class Successor(nn.Module):
    """The token after t is t + 1."""

    def prepare_inputs_for_generation(
        self, past_key_values: Any, inputs_embeds: Any, context: StepContext
    ) -> dict[str, Any]:
        return {"input_ids": context.input_ids}

    def forward(self, input_ids: Tensor) -> Tensor:
        return nn.functional.one_hot(input_ids + 1, VOCAB).float()


def make_runner(*, eager: bool = True, **settings: Any) -> ModelRunner:
    spec = KVCacheSpec(num_kv_heads=1, head_dim=4, v_head_dim=4, dtype="float32")
    plan = CachePlan(
        cache_config=CacheConfig(groups=(CacheGroup(spec=spec, block_size=16),), num_blocks=20),
        layer_groups=(),
        planes=(),
        max_model_len=64,
    )
    config = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=64, max_model_len=64)
    return ModelRunner(Successor(), plan, config, torch.device("cpu"), eager=eager, **settings)


@pytest.fixture
def runner(device: Device) -> ModelRunner:
    return make_runner()


def submit(runner: ModelRunner, **prompt: Any) -> tuple[int, ...]:
    """Admit a request to row 0 and run its prompt."""
    processed = ProcessedPrompt(array("q", [1, 2, 3]), **prompt)
    params = SamplingParams(temperature=0.0, seed=0)
    admitted = Admission("a", 0, array("q", [1, 2, 3]), 3, params, processed)
    first = PlanRow("a", 0, 0, 3, ((1, 2),), sample=True)
    (row,) = runner.submit(StepPlan(0, (first,), admitted=(admitted,))).result().rows
    return row.token_ids


def test_prompts_whose_graph_is_missing_have_their_tokens_by_its_padded_step(
    device: Device, runner: ModelRunner
) -> None:
    """With its places, for which kernels were compiled, though fewer are sampled."""
    shared = replace(state_of(device, ROWS), steps=runner._state, since_capture=0)
    runner._graph_steps = GraphSteps(shared, 10**6, 256)
    places: list[int] = []
    logits = runner._forward.logits

    def noted(hidden: Tensor) -> Tensor:
        places.append(len(hidden))
        return logits(hidden)

    runner._forward.logits = noted  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, seed=0)
    admitted, rows = [], []
    for row in range(2):
        prompt = array("q", [1 + row, 2 + row])
        given = (prompt, 2, params, ProcessedPrompt(prompt))
        admitted.append(Admission(str(row), row, *given))
        rows.append(PlanRow(str(row), row, 0, 2, ((1 + row,),), sample=True))
    result = runner.submit(StepPlan(0, tuple(rows), admitted=tuple(admitted))).result()
    assert [row.token_ids for row in result.rows] == [(3,), (4,)]
    assert (places, device.take()) == ([8], [])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_model_is_asked_for_all_tokens(
    device: Device, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its family would leave out those that nobody asks for."""
    asked: list[bool] = []

    def forward(self: Successor, input_ids: Tensor, wanted: Tensor | None = None) -> Tensor:
        asked.append(wanted is not None)
        hidden = nn.functional.one_hot(input_ids + 1, VOCAB).float()
        return hidden if wanted is None else hidden[:, wanted]

    monkeypatch.setattr(Successor, "forward", forward)
    assert submit(make_runner(deterministic=deterministic)) == (4,)
    assert asked == [not deterministic]


def test_other_row_state_has_everything_captured_anew(device: Device, runner: ModelRunner) -> None:
    shared = replace(state_of(device, ROWS), steps=runner._state)
    graphs = runner._graph_steps = GraphSteps(shared, 10**6, 256)
    while graphs.capture_next():
        pass
    every = device.take()
    assert every[0] == (64, 0)
    submit(runner)
    assert device.take() == []
    for state in ({"row_state": {"mark": 1}}, {"token_state": {"kind": np.zeros((1, 3))}}):
        submit(runner, **state)
        assert device.captured == [(64, 0)]
        while graphs.capture_next():
            pass
        assert sorted(device.take()) == sorted(every)
        submit(runner, **state)
        submit(runner)
        assert not graphs.capture_next()
        assert device.take() == []


def test_declared_state_is_there_before_the_first_request(device: Device) -> None:
    declared = PromptState({"mark": ("int32", ()), "span": ("float32", (2,))}, {"kind": 3})
    runner = make_runner(prompt_state=declared)
    shared = replace(state_of(device, ROWS), steps=runner._state)
    graphs = runner._graph_steps = GraphSteps(shared, 10**6, 256)
    while graphs.capture_next():
        pass
    device.take()
    given = {"mark": np.int32(7), "span": np.array([1, 2], np.float32)}
    submit(runner, row_state=given, token_state={"kind": np.zeros((3, 3))})
    assert device.take() == []
    state = runner._state.row_state
    assert {name: state[name].dtype for name in given} == {
        "mark": torch.int32,
        "span": torch.float32,
    }
    assert [state[name][0].tolist() for name in given] == [7, [1.0, 2.0]]
    assert len(state["mark"]) == len(state["span"]) == ROWS + 1


class Showing(Successor):
    """A model whose embedding is the token, and those of an item its values, twice."""

    support_media_graph = True

    def get_input_embeddings(self) -> Any:
        return lambda token_ids: token_ids.unsqueeze(-1).float()

    def embed_media(self, kind: str, items: list[dict[str, Tensor]]) -> list[Tensor]:
        if kind == "video":
            raise RuntimeError("it waits for the device")
        return [2 * item["values"].unsqueeze(-1) for item in items]

    def usual_media(self) -> list[tuple[str, list[dict[str, Tensor]]]]:
        return [("image", [{"values": torch.zeros(3)}])]


def test_encoders_are_captured_for_usual_sizes_and_for_those_that_come_again(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = MediaGraphs(ForwardPass(Showing(), []), torch.device("cpu"))

    def values(count: int, places: list[int]) -> list[dict[str, Tensor]]:
        return [{"values": torch.ones(count), "places": torch.tensor(places)}]

    usual = [{"values": torch.ones(3)}]
    assert graphs.run("image", usual) is None
    assert graphs.capture_next()
    # A replay, which does nothing here: what was computed at the capture, of zeros.
    (given,) = graphs.run("image", usual) or []
    assert given.shape == (3, 1)
    assert not graphs.capture_next()
    for places in ([1], [2], [1]):
        assert not graphs.capture_next()
        assert graphs.run("image", values(5, places)) is None
    assert graphs.capture_next()
    assert not graphs.capture_next()
    assert graphs.run("image", values(5, [1])) is not None
    assert graphs.run("image", values(5, [2])) is None
    assert graphs.run("image", [*usual, *usual]) is None
    # One that fails is the last; what was captured before is replayed.
    for _ in range(2):
        assert graphs.run("video", usual) is None
    with caplog.at_level(logging.WARNING):
        while graphs.capture_next():
            pass
    assert "Showing.embed_media could not be captured as a CUDA graph" in caplog.text
    assert "it waits for the device" in caplog.text
    assert graphs.run("image", usual) is not None
    for _ in range(3):
        assert graphs.run("image", values(6, [])) is None
    assert not graphs.capture_next()


def test_decode_steps_without_a_graph_do_not_take_those_of_mixed_steps(
    device: Device, state: GraphState, runner: ModelRunner
) -> None:
    """Where there is no memory for one graph there is none for another."""
    assert submit(runner, token_state={"kind": np.zeros(3, np.int64)}) == (4,)

    def no_memory(*_: Any) -> Tensor:
        raise OUT_OF_MEMORY["allocator"]

    runner._decode_graphs = DecodeGraphs(replace(state, logits_of=no_memory))
    runner._graph_steps = GraphSteps(state, 10**6, 64)
    rows = [PlanRow("a", 0, start, 1, ((),), sample=True) for start in (3, 11)]
    steps = [runner.submit(StepPlan(1 + i, (row,), repeat=8)) for i, row in enumerate(rows)]
    assert [step.result().rows[0].token_ids for step in steps] == [
        tuple(range(5, 13)),
        tuple(range(13, 21)),
    ]
    assert device.take() == []


def following(context: StepContext, places: Tensor | None) -> Tensor:
    """Logits of a token that depends on the one before and on its position."""
    tokens = 3 * context.input_ids[0] + context.position_ids[0] + 1
    return nn.functional.one_hot(tokens % VOCAB, VOCAB).float()


@pytest.mark.parametrize("max_repeat", [1, 3, 8])
def test_a_plan_has_the_tokens_of_all_its_turns_at_once(
    device: Device, runner: ModelRunner, max_repeat: int
) -> None:
    """And of as many more as there is no room for, whatever was captured or planned before."""
    draw = random.Random(max_repeat)
    params = SamplingParams(temperature=0.0, seed=0)
    prompt = array("q", [1])
    admitted = tuple(
        Admission(str(row), row, prompt, 1, params, ProcessedPrompt(prompt)) for row in range(ROWS)
    )
    first = tuple(PlanRow(str(row), row, 0, 1, ((1,),), sample=True) for row in range(ROWS))
    runner.submit(StepPlan(0, first, admitted=admitted))
    graphs = runner._decode_graphs = DecodeGraphs(
        replace(
            state_of(device, ROWS),
            steps=runner._state,
            sampling=lambda: runner._sampler.state,
            logits_of=following,
            capturer=Replaying,
            max_repeat=max_repeat,
        )
    )
    last, at = [2] * ROWS, [1] * ROWS
    waiting: list[tuple[Any, list[tuple[int, ...]]]] = []
    for number in range(40):
        repeat, count = draw.choice([1, 1, 2, 3, 5, 8]), draw.choice([1, 1, 2, 3, 7, ROWS])
        some = [row for row in draw.sample(range(ROWS), count) if at[row] + repeat < 64]
        if not some:
            continue
        choice = draw.choice([Choice.GREEDY, Choice.RANDOM, None])
        plan_rows = []
        for row in some:
            runner._rows[row].choice = choice
            plan_rows.append(PlanRow(str(row), row, at[row], 1, ((),), sample=True))
            at[row] += repeat
        expected: list[tuple[int, ...]] = []
        for plan_row in plan_rows:
            tokens: list[int] = []
            for turn in range(repeat):
                before = tokens[-1] if tokens else last[plan_row.row]
                tokens.append((3 * before + plan_row.start + turn + 1) % VOCAB)
            last[plan_row.row] = tokens[-1]
            expected.append(tuple(tokens))
        plan = StepPlan(number, tuple(plan_rows), repeat=repeat)
        waiting.append((runner.submit(plan), expected))
        assert waiting[-1][0].way == "graph"
        if draw.random() < 0.2:
            graphs.capture_next(part=draw.random() < 0.5)
        # The host reads what it asked for a step or two before.
        while len(waiting) > draw.choice([0, 1, 2]):
            step, wanted = waiting.pop(0)
            assert [row.token_ids for row in step.result().rows] == wanted


@pytest.mark.parametrize("choice", [Choice.GREEDY, Choice.RANDOM])
def test_turns_are_sent_together(device: Device, state: GraphState, choice: Choice) -> None:
    graphs = DecodeGraphs(replace(state, max_repeat=8, logits_of=following, capturer=Replaying))
    captured = graphs.begin(*rows(3), choice)
    assert captured is not None
    (outputs,) = graphs.replays(captured, 8, 3, chosen=True)
    assert outputs.room is not None
    tokens, status = outputs.room.to_host(outputs.turn, outputs.turns)
    assert (tokens.shape, tokens.dtype, tokens.stride(1)) == ((8, 4), torch.int64, 1)
    assert (status.shape, status.dtype, status.stride(1)) == ((8, 4), torch.int8, 1)
    # Of one tensor, so that they are sent at once.
    assert tokens.untyped_storage().data_ptr() == status.untyped_storage().data_ptr()
    assert tokens[:, 0].tolist() == tokens[:, 2].tolist()
    assert len(set(tokens[:, 0].tolist())) > 1


@pytest.mark.parametrize("max_rows", [20, 21])
def test_what_decode_steps_read_and_write_is_aligned(
    device: Device, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tensors are for which kernels are compiled beforehand: for others they would be anew."""
    shared = replace(state_of(device, max_rows), max_repeat=3, capturer=Replaying)
    graphs, seen = DecodeGraphs(shared), []

    def noted(rows: Tensor, positions: Tensor, *given: Any, turn: Tensor, **more: Any) -> Any:
        seen.extend([rows, positions, turn])
        return decode_inputs(rows, positions, *given, turn=turn, **more)

    monkeypatch.setattr("engine_core.runtime.graphs.decode_inputs", noted)
    for count in (1, 2, 3, max_rows):
        captured = graphs.begin(*rows(count))
        assert captured is not None
        for each in captured.room.turns[:2]:
            assert each.stride(0) % 16 == 0
            seen.extend(each)
    assert len(seen) >= 4 * (3 + 6)
    assert [each.data_ptr() % 16 for each in seen] == [0] * len(seen)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the steps that rows and positions were sent to the device for."""
    found, send = [], DecodeGraphs._send

    def noted(self: DecodeGraphs, bucket: int, *given: Any) -> None:
        found.append(bucket)
        send(self, bucket, *given)

    monkeypatch.setattr(DecodeGraphs, "_send", noted)
    return found


def plan_of(
    graphs: DecodeGraphs,
    numbers: list[int],
    positions: list[int],
    turns: int,
    choice: Choice = Choice.GREEDY,
) -> list[list[int]]:
    """The tokens of each turn of a plan, whose turns are sent together if there is room for all."""
    captured = graphs.begin(numbers, positions, choice)
    assert captured is not None
    found, copies = [], 0
    for outputs in graphs.replays(captured, turns, len(numbers), chosen=True):
        assert outputs.room is not None
        tokens, _ = outputs.room.to_host(outputs.turn, outputs.turns)
        found += tokens[:, : len(numbers)].tolist()
        copies += 1
    assert copies == -(-turns // len(captured.room.room))
    return found


def test_a_plan_that_goes_on_with_the_same_rows_sends_nothing(
    device: Device, state: GraphState, sent: list[int]
) -> None:
    """Whatever else has rows that the device does not have at its place is sent."""
    graphs = DecodeGraphs(replace(state, max_repeat=4, logits_of=following, capturer=Replaying))
    plan = partial(plan_of, graphs)
    assert len(plan([0, 1, 2], [5, 6, 7], 3)) == 3
    # Turns 0 to 2 of the room anew, and then 3.
    first = plan([0, 1, 2], [8, 9, 10], 3)
    (next_tokens,) = plan([0, 1, 2], [11, 12, 13], 1)
    assert sent == [4]
    wanted = [
        (3 * token + place + 1) % VOCAB
        for token, place in zip(first[-1], [11, 12, 13], strict=True)
    ]
    assert next_tokens == wanted
    # Rows that moved on in another way, that are others, more or fewer, or in another order.
    plan([0, 1, 2], [12, 13, 14], 1)
    assert sent == [4]
    plan([0, 1, 2], [13, 14, 16], 1)
    plan([0, 1, 3], [16, 17, 19], 1)
    plan([0, 1], [17, 18], 1)
    plan([0, 1, 2, 3], [18, 19, 19, 20], 1)
    plan([1, 0, 2, 3], [19, 20, 20, 21], 1)
    assert len(sent) == 6
    # A capture in between, which moves what is there, and a plan whose step was not replayed here.
    plan([1, 0, 2, 3], [20, 21, 21, 22], 1)
    assert len(sent) == 6
    graphs.capture_next()
    plan([1, 0, 2, 3], [21, 22, 22, 23], 1)
    assert len(sent) == 7
    captured = graphs.begin([1, 0, 2, 3], [22, 23, 23, 24])
    assert captured is not None
    captured.graph.replay()
    assert len(sent) == 7
    plan([1, 0, 2, 3], [22, 23, 23, 24], 1)
    assert len(sent) == 8


def test_rows_that_go_on_in_a_step_of_more_are_sent(
    device: Device, state: GraphState, sent: list[int]
) -> None:
    """As where the step of their number was not captured for another choice."""
    shared = replace(state, logits_of=following, capturer=Replaying)
    graphs = DecodeGraphs(shared)
    assert graphs.begin(*rows(20), Choice.RANDOM) is not None
    plan_of(graphs, [0, 1, 2], [5, 6, 7], 1)
    shared.since_capture = 0
    plan_of(graphs, [0, 1, 2], [6, 7, 8], 1, Choice.RANDOM)
    assert sent == [20, 4, 20]
    captured = graphs.begin([0, 1, 2], [7, 8, 9])
    assert captured is not None
    assert graphs.begin([0, 1, 2], [8, 9, 10], Choice.RANDOM) is not None
    with pytest.raises(AssertionError, match="a step of 20 rows has begun, not one of 4"):
        next(graphs.replays(captured, 1, 3, chosen=True))


def test_arrays_of_a_plan_are_its_own(device: Device, state: GraphState, sent: list[int]) -> None:
    graphs = DecodeGraphs(replace(state, max_repeat=4, logits_of=following, capturer=Replaying))
    numbers, positions = np.array([2, 0]), np.array([5, 9])
    for turn in range(3):
        captured = graphs.begin(numbers, positions)
        assert captured is not None
        assert len([*graphs.replays(captured, 2, 2, chosen=True)]) == 1
        assert (numbers.tolist(), positions.tolist()) == ([2, 0], [5 + 2 * turn, 9 + 2 * turn])
        positions += 2
    assert sent == [2]
    numbers[:] = [0, 2]
    assert graphs.begin(numbers, positions) is not None
    assert sent == [2, 2]


@pytest.mark.parametrize("max_repeat", [1, 3, 8])
def test_plans_of_any_length_that_go_on_are_sent_together(
    device: Device, state: GraphState, sent: list[int], max_repeat: int
) -> None:
    """Wherever in the room the first of their turns would be."""
    shared = replace(state, max_repeat=max_repeat, logits_of=following, capturer=Replaying)
    graphs = DecodeGraphs(shared)
    draw, at, last = random.Random(max_repeat), [3, 40, 7], [0, 0, 0]
    for _ in range(30):
        turns = draw.choice([1, 2, 3, 8, 11])
        found = plan_of(graphs, [4, 0, 9], at, turns)
        assert len(found) == turns
        for tokens in found:
            last = [(3 * token + place + 1) % VOCAB for token, place in zip(last, at, strict=True)]
            assert tokens == last
            at = [place + 1 for place in at]
    assert sent == [4]


def test_turns_that_were_run_in_different_ways_go_together(
    device: Device, runner: ModelRunner
) -> None:
    """The first in a step of prompts, which has rows of padding, the others without a graph."""
    assert submit(runner) == (4,)
    shared = replace(state_of(device, ROWS), steps=runner._state, capturer=Replaying)
    shared.logits_of = lambda context, places: runner._forward(context, places)
    graphs = runner._graph_steps = GraphSteps(shared, 10**6, 64)
    run, fits = graphs.run, [(GraphKey(96, 32, 8), True)]
    graphs.fit_decodes = lambda key: fits.pop() if fits else (key, False)  # type: ignore[method-assign]
    ways = []

    def noted(batch: Any) -> StepOutputs | None:
        outputs = run(batch)
        ways.append(None if outputs is None else outputs.room)
        return outputs

    graphs.run = noted  # type: ignore[method-assign]
    row = PlanRow("a", 0, 3, 1, ((),), sample=True)
    (result,) = runner.submit(StepPlan(1, (row,), repeat=3)).result().rows
    assert result.token_ids == (5, 6, 7)
    assert [way is None for way in ways] == [False, True, True]


def test_what_fails_on_the_host_is_told_of_its_own_row(device: Device, runner: ModelRunner) -> None:
    """Of the first row nothing is chosen, so that the others are elsewhere among the results."""

    def fail(output: list[int], logits: Tensor) -> Tensor:
        raise KeyError("lost")

    prompt, plain = array("q", [1, 2]), SamplingParams(temperature=0.0, seed=0)
    failing = plain.replace(logits_processors=[fail])
    admitted, rows = [], []
    for row, params in enumerate((plain, plain, failing)):
        admitted.append(Admission(str(row), row, prompt, 2, params, ProcessedPrompt(prompt)))
        rows.append(PlanRow(str(row), row, 0, 2 - (row == 0), ((row + 1,),), sample=row > 0))
    result = runner.submit(StepPlan(0, tuple(rows), admitted=tuple(admitted))).result()
    assert [row.token_ids for row in result.rows] == [(), (3,), ()]
    errors = [row.error for row in result.rows]
    assert errors[:2] == [None, None]
    assert errors[2] is not None
    assert "fail failed: KeyError: 'lost'" in errors[2].message


class Coming(Compiles):
    """Kernels that are compiled, or to be loaded, when a test says so, and what was waited for."""

    def __init__(self) -> None:
        self.compiled: set[Any] = set()
        self.unloaded = 0
        self.waited: list[Any] = []
        self.silent = False  # of quick steps

    def ready(self, step: Any, seconds: float = 0.0) -> bool:
        del seconds
        return step in self.compiled

    def load_next(self) -> bool:
        before, self.unloaded = self.unloaded, max(0, self.unloaded - 1)
        return before > 0

    def wait(self, step: Any) -> None:
        self.waited.append(step)
        if step != QUICK or not self.silent:
            self.compiled.add(step)


FIRST = GraphKey(128, 0, 1, quick=Quick.ATTENTION)


class UnderWay(Coming):
    """Kernels of a start that found none."""

    under_way = True


def test_a_start_without_kernels_captures_what_has_few_of_them(
    device: Device, state: GraphState
) -> None:
    """Larger steps than are needed take the place of all."""
    state.compiles = coming = UnderWay()
    decode, prompts = DecodeGraphs(state), GraphSteps(state, 2048, 2048)
    list(decode.starts())
    list(prompts.starts())
    assert device.take() == [(20, 20), (128, 0)]
    assert coming.waited == [GraphKey(20, 20, 0), FIRST]
    assert decode.begin(*rows(1)) is not None
    assert run(prompts, 50) is not None
    assert device.take() == []
    # An idle engine goes on with a request by itself.
    coming.compiled.add(GraphKey(1, 1, 0))
    assert decode.capture_next()
    assert device.take() == [(1, 1)]
    # What is quick makes room for the same as it should be, unless there is no memory for that.
    coming.compiled.add(GraphKey(128, 0, 1))
    device.failure = OUT_OF_MEMORY["allocator"]
    assert not prompts.capture_next()
    assert prompts.fit(GraphKey(100, 0, 1)) == (FIRST, True)
    device.failure, state.ahead = None, True
    state.uncaptured.clear()
    assert prompts.capture_next()
    assert (device.take(), prompts.num_captured) == ([(128, 0)], 1)
    assert prompts.fit(GraphKey(50, 0, 1)) == (GraphKey(128, 0, 1), True)
    coming.waited.clear()
    for max_tokens, deterministic, start in ((64, False, 64), (2048, True, 64), (32, False, None)):
        state.deterministic = deterministic
        list(GraphSteps(state, max_tokens, max_tokens).starts())
        quick = (
            [] if start is None else [GraphKey(start, 0, 1, quick=Quick(0 if deterministic else 2))]
        )
        assert coming.waited == quick
        coming.waited.clear()


def test_quick_steps_have_no_kernels_that_compile_for_long(
    device: Device, state: GraphState, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    logits = device.logits

    def noted(context: StepContext, places: Tensor | None) -> Tensor:
        asked.append(is_quick(Quick.ATTENTION))
        return logits(context, places)

    state.logits_of = noted
    state.compiles = coming = UnderWay()
    graphs = GraphSteps(state, 2048, 2048)
    list(graphs.starts())
    coming.compiled.add(GraphKey(256, 0, 1))
    assert run(graphs, 200) is not None
    graphs.run_quick()
    assert asked == [True, True, False, False, *[True] * 5]
    hopper = GPU.of_capability((9, 0))

    def kernels() -> list[bool]:
        shape = (64, 4096, 4096, torch.bfloat16, hopper)
        return [has_kernel(*shape), has_activated_kernel(4096, 28672, 4096, hopper, gated=True)]

    assert kernels() == [True, True]
    with quickly(Quick.PRODUCTS):
        assert kernels() == [False, False]
        assert not is_quick(Quick.ATTENTION)


def test_decode_steps_take_what_is_compiled_or_wait_for_the_largest(
    device: Device, state: GraphState
) -> None:
    state.compiles = coming = UnderWay()
    coming.compiled.add(GraphKey(8, 8, 0))
    assert DecodeGraphs(state).begin(*rows(3)) is not None
    assert device.take() == [(8, 8)]
    coming.compiled.clear()
    assert DecodeGraphs(state).begin(*rows(3)) is not None
    assert device.take() == [(20, 20)]


def test_an_idle_server_runs_a_step_and_captures_it_in_its_next_turn(device: Device) -> None:
    """A request that comes meanwhile waits for one of the two."""
    state = state_of(device, 1)
    ran: list[int] = []
    logits = device.logits

    def noted(context: StepContext, places: Tensor | None) -> Tensor:
        ran.append(context.input_ids.shape[1])
        return logits(context, places)

    state.logits_of, state.compiles = noted, Compiles()
    graphs = GraphSteps(state, 512, 512)
    list(graphs.starts())
    for turn, count in enumerate((1, 2)):
        ran.clear()
        assert graphs.capture_next(part=True)
        assert (len(ran), graphs.num_captured) == (1, count)
        state.since_capture = 1000
        assert graphs.capture_next(part=True)
        assert (len(ran), graphs.num_captured) == (2, count + 1)
        assert (state.since_capture, state.compiles.late) == (0, turn + 1)
    # Who needs it before captures it.
    ran.clear()
    assert graphs.capture_next(part=True)
    state.since_capture = 1000
    assert run(graphs, ran[0]) is not None
    assert len(ran) == 2
    # There is no memory to run the next.
    device.outside = OUT_OF_MEMORY["allocator"]
    before = graphs.num_captured
    assert not graphs.capture_next(part=True)
    assert (state.ahead, graphs.num_captured) == (False, before)


def test_kernels_are_loaded_one_by_one_before_a_step_that_launches_them(
    device: Device, state: GraphState
) -> None:
    """A request waits for one of them at most, and not for a capture besides."""
    state.compiles = coming = Coming()
    coming.compiled |= {GraphKey(size, size, 0) for size in (1, 2, ROWS)}
    graphs = DecodeGraphs(state)
    list(graphs.starts())
    assert device.take() == [(20, 20), (1, 1)]
    coming.unloaded = 2
    for left in (1, 0):
        assert graphs.capture_next(part=True)
        assert (coming.unloaded, graphs.num_captured, state.since_capture) == (left, 2, 32)
    assert graphs.capture_next(part=True)
    assert coming.late == 3
    # A server that is never idle loads them in steps whose graph is missing.
    state.since_capture, coming.unloaded = 40, 1
    assert graphs.begin(*rows(2)) is not None
    assert (coming.unloaded, device.take()) == (0, [])
    assert graphs.begin(*rows(2)) is not None
    assert device.take() == [(2, 2)]
    # Who captures all at once, as at a start, need not look for requests in between.
    coming.unloaded = 1
    coming.compiled.add(GraphKey(4, 4, 0))
    assert graphs.capture_next()
    assert (coming.unloaded, device.take()) == (1, [(4, 4)])


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_kernel_is_loaded_in_a_step_that_is_captured_all_the_same(
    device: Device, state: GraphState, deterministic: bool
) -> None:
    """Nothing stands in for it: no logits in a deterministic engine, and else no kernels for it."""
    state.compiles = coming = Coming()
    state.deterministic = deterministic
    coming.compiled |= {GraphKey(size, size, 0) for size in (1, ROWS)}
    coming.compiled |= {GraphKey(4, 4, 0, Choice.RANDOM)}
    if deterministic:
        coming.compiled |= {GraphKey(2, 2, 0, Choice.RANDOM)}
    graphs = DecodeGraphs(state)
    list(graphs.starts())
    device.take()
    state.since_capture, coming.unloaded = 40, 1
    assert graphs.offer(3, Choice.RANDOM) is Choice.RANDOM
    assert graphs.begin(*rows(3), Choice.RANDOM) is not None
    assert (device.take(), coming.unloaded) == ([(4, 4)], 1)


def test_one_kernel_is_loaded_in_a_step_that_chooses_by_logits(
    device: Device, state: GraphState
) -> None:
    """Neither its own graph is there nor that of greedy rows."""
    state.compiles = coming = Coming()
    coming.compiled |= {GraphKey(size, size, 0) for size in (1, 2, ROWS)}
    coming.compiled |= {GraphKey(2, 2, 0, Choice.RANDOM)}
    graphs = DecodeGraphs(state)
    list(graphs.starts())
    device.take()
    state.since_capture, coming.unloaded = 40, 3
    for left in (2, 1):
        assert graphs.offer(2, Choice.RANDOM) is None
        assert graphs.begin(*rows(2)) is not None
        assert (device.take(), coming.unloaded) == ([], left)
    # A greedy step loads one as well.
    assert graphs.offer(2, Choice.GREEDY) is Choice.GREEDY
    assert graphs.begin(*rows(2)) is not None
    assert (device.take(), coming.unloaded) == ([], 0)
    assert graphs.begin(*rows(2)) is not None
    assert device.take() == [(2, 2)]


def test_no_kernel_is_loaded_in_a_step_that_has_its_graph(
    device: Device, state: GraphState
) -> None:
    state.compiles = coming = Coming()
    graphs = GraphSteps(state, 10**6, 1024)
    coming.compiled |= {GraphKey(64, 0, 1), GraphKey(128, 0, 1)}
    state.since_capture = 1000
    assert run(graphs, 100) is not None
    assert device.take() == [(128, 0)]
    state.since_capture, coming.unloaded = 2000, 1
    assert run(graphs, 100) is not None
    assert (device.take(), coming.unloaded) == ([], 1)
    # One whose graph is missing loads it, and takes the next larger one or launches its kernels.
    run(graphs, 50)
    assert (device.take(), coming.unloaded) == ([], 0)


def test_a_random_choice_is_made_by_logits_once_a_captured_step_has_its_kernels(
    device: Device, state: GraphState
) -> None:
    """So that no request waits for a capture until there are those of all choices."""
    state.compiles = coming = Coming()
    coming.compiled |= {GraphKey(size, size, 0) for size in (1, ROWS)}
    coming.compiled |= {GraphKey(size, size, 0, Choice.RANDOM) for size in (1, 2, 4)}
    graphs = DecodeGraphs(state)
    list(graphs.starts())
    state.since_capture = 5
    device.take()
    # Three choose as in a captured step of two: there is none of three.
    for count in (1, 3):
        assert graphs.chooses(count)
        assert graphs.offer(count, Choice.RANDOM) is None
        assert graphs.begin(*rows(count)) is not None
    # Eight do not: their own kernels are still to come. Nor where something adjusts logits.
    assert not graphs.chooses(8)
    assert not graphs.chooses(None)
    assert graphs.offer(8, Choice.RANDOM) is None
    assert device.take() == []
    # After so many steps it is captured all the same.
    state.since_capture = 40
    assert graphs.offer(3, Choice.RANDOM) is Choice.RANDOM
    assert graphs.begin(*rows(3), Choice.RANDOM) is not None
    assert device.take() == [(4, 4)]


def test_steps_of_any_shape_are_quick_until_their_kernels_are_compiled(
    device: Device, state: GraphState
) -> None:
    """To launch others would compile them in the engine, one after another."""
    state.compiles = coming = UnderWay()
    decode, graphs = DecodeGraphs(state), GraphSteps(state, 2048, 2048)
    list(graphs.starts())
    graphs.wait_for_prompts()
    assert device.take() == [(128, 0)]
    assert coming.waited == [FIRST, QUICK]
    # They are launched kernel by kernel, rows that decode like prompts of one token.
    quick = GraphKey(256, 0, 1, quick=Quick.ATTENTION)
    assert graphs.fit(GraphKey(200, 0, 1)) == (quick, True)
    assert run(graphs, 200) is None
    assert graphs.fit(GraphKey(3005, 5, 4)) == (GraphKey(3072, 0, 20, quick=quick.quick), True)
    assert decode.begin(*rows(3)) is None
    assert graphs.fit_decodes(GraphKey(3, 3, 0)) == (GraphKey(128, 0, 8, quick=quick.quick), True)
    assert device.take() == []
    assert run(graphs, 50) is not None  # by the first token's graph
    # Attention is the first that is no longer quick.
    coming.compiled.add(GraphKey(2048, 0, 1))
    assert graphs.fit(GraphKey(200, 0, 2)) == (GraphKey(256, 0, 8, quick=Quick.PRODUCTS), True)
    coming.compiled |= {GraphKey(256, 0, 1), GraphKey(8, 8, 0)}
    assert run(graphs, 200) is not None
    assert decode.begin(*rows(3)) is not None
    assert device.take() == [(256, 0), (8, 8)]
    coming.compiled.add("GraphSteps others")
    assert run(graphs, 3000, prompts=2) is None
    assert graphs.fit(GraphKey(3000, 0, 2)) == (GraphKey(3000, 0, 2), False)
    assert graphs.fit_decodes(GraphKey(3, 3, 0)) == (GraphKey(3, 3, 0), False)
    # Nothing was waited for that was not there.
    assert {step for step in coming.waited[2:] if step != QUICK} == {
        GraphKey(256, 0, 1),
        GraphKey(8, 8, 0),
        GraphKey(2048, 0, 1),
    }


def test_of_codes_attention_is_quick_until_all_is_compiled(
    device: Device, state: GraphState
) -> None:
    """They are turned into numbers by kernels for so many prompts and tokens."""
    state.compiles, state.coded = UnderWay(), True
    state.compiles.compiled.add(GraphKey(2048, 0, 1))
    graphs = GraphSteps(state, 2048, 2048)
    list(graphs.starts())
    for key in (GraphKey(200, 0, 2), GraphKey(3, 3, 0)):
        quick = graphs.fit_decodes(key)[0].quick
        assert quick is Quick.ATTENTION
    assert device.take() == [(128, 0)]


def test_quick_steps_of_many_rows_are_bounded_by_their_longest_prompt(
    device: Device, state: GraphState
) -> None:
    """Attention has programs for each row and all tokens that it may have."""
    state.compiles = UnderWay()
    graphs = GraphSteps(state, 2048, 2048)
    list(graphs.starts())
    known = {row: Known(np.ones(300, np.int64), {}) for row in range(ROWS)}

    def bound(*lengths: int) -> tuple[int, int, int]:
        plan = [
            PlanRow(str(row), row, 0, length, ((),), sample=True)
            for row, length in enumerate(lengths)
        ]
        batch = state.steps.batch(plan, known, Choice.GREEDY, graphs.fit)
        assert batch.key.quick
        return batch.max_query_len, batch.key.tokens, batch.key.rows

    assert bound(*[1] * 5, 300, *[100] * 14) == (384, 1792, 20)
    assert bound(*[100] * 20) == (128, 2048, 20)
    assert bound(250) == (256, 256, 1)
    assert bound(20) == (128, 128, 1)
    assert device.take() == [(128, 0)]


@pytest.mark.parametrize("deterministic", [True, False])
def test_without_quick_steps_long_prompts_wait_for_their_kernels(
    device: Device, state: GraphState, deterministic: bool
) -> None:
    """In a deterministic engine, and in one whose compiling process has no word of them."""
    state.compiles = coming = UnderWay()
    state.deterministic = deterministic
    coming.silent = True
    graphs = GraphSteps(state, 2048, 2048)
    list(graphs.starts())
    longest, due = GraphKey(2048, 0, 1), GraphKey(256, 0, 1)
    assert run(graphs, 200) is not None
    assert device.take() == [(64 if deterministic else 128, 0), (256, 0)]
    assert [step for step in coming.waited if step != QUICK][1:] == [due, due]
    # Of no expected size: it is launched kernel by kernel.
    coming.waited.clear()
    assert run(graphs, 3000, prompts=2) is None
    graphs.wait_for_prompts()
    assert [step for step in coming.waited if step != QUICK] == [longest, longest]
    coming.waited.clear()
    coming.under_way = False
    graphs.wait_for_prompts()
    assert coming.waited == []


def test_until_its_kernels_are_compiled_a_larger_step_takes_its_place(
    device: Device, state: GraphState
) -> None:
    state.compiles = coming = Coming()
    graphs = DecodeGraphs(state)
    list(graphs.starts())
    greedy = [GraphKey(size, size, 0) for size in (20, 1)]
    assert coming.waited == greedy
    assert device.take() == [(20, 20), (1, 1)]
    # An idle engine looks for requests instead of waiting.
    assert graphs.capture_next()
    assert graphs.capture_next()
    assert (device.take(), coming.late, coming.waited) == ([], 2, greedy)
    captured = graphs.begin(*rows(3))
    assert captured is not None
    assert (captured.room.rows, device.take()) == (20, [])
    coming.compiled.add(GraphKey(4, 4, 0))
    assert graphs.begin(*rows(3)) is not None
    assert device.take() == [(4, 4)]
    # A random choice is made by the logits of a greedy step, until one takes its place.
    assert graphs.offer(3, Choice.RANDOM) is None
    assert graphs.offer(3, Choice.ADJUSTED) is None
    coming.compiled.add(GraphKey(20, 20, 0, Choice.RANDOM))
    assert graphs.capture_next()
    assert device.take() == [(20, 20)]
    assert graphs.offer(3, Choice.RANDOM) is Choice.RANDOM
    captured = graphs.begin(*rows(3), Choice.RANDOM)
    assert captured is not None
    assert (captured.room.rows, device.take()) == (20, [])
    coming.compiled.add(GraphKey(4, 4, 0, Choice.ADJUSTED))
    # PyTorch would choose by logits, so that a capture is the sooner, and draw other tokens.
    assert graphs.offer(3, Choice.ADJUSTED) is Choice.ADJUSTED
    # By kernels nobody waits for a second capture in a row: an idle engine has just made one.
    coming.compiled.add("DecodeGraphs others")
    assert graphs.offer(3, Choice.ADJUSTED) is None
    state.deterministic = True
    assert graphs.offer(3, Choice.ADJUSTED) is Choice.ADJUSTED
    state.deterministic, state.since_capture = False, 100
    assert graphs.offer(3, Choice.ADJUSTED) is Choice.ADJUSTED


def test_prompts_whose_step_is_not_compiled_run_without_a_graph(
    device: Device, state: GraphState
) -> None:
    state.compiles = coming = Coming()
    graphs = GraphSteps(state, 2048, 2048)
    list(graphs.starts())
    assert device.take() == [(64, 0)]
    assert run(graphs, 200) is None
    assert run(graphs, 50) is not None
    coming.compiled.add(GraphKey(256, 0, 1))
    assert run(graphs, 200) is not None
    assert coming.waited == [GraphKey(64, 0, 1), GraphKey(256, 0, 1)]
    # The smallest larger one that is compiled, and not yet captured.
    coming.compiled |= {GraphKey(1024, 0, 1), GraphKey(768, 0, 1)}
    assert device.take() == [(256, 0)]
    assert run(graphs, 500) is not None
    assert device.take() == [(768, 0)]


PROMPT, MOST, ONE = GraphKey(64, 0, 1), GraphKey(ROWS, ROWS, 0), GraphKey(1, 1, 0)


class Listed(Compiles):
    """Kernels of these steps are compiled in this order, while somebody waits for them."""

    class Capturer:
        def __init__(self, *_: Any) -> None: ...

        def run(self, function: Callable[[], Any]) -> Any:
            return function()

        def capture(self, function: Callable[[], Any]) -> tuple[Graph, Any]:
            return Graph(), function()

        def reserve(self, count: int) -> None: ...

        def free_memory(self) -> int:
            return 1 << 40

    capturer = Replaying

    def __init__(self, *coming: Any) -> None:
        self.coming = list(coming)
        self.captured: list[Any] = []

    def ready(self, step: Any, seconds: float = 0.0) -> bool:
        if seconds and self.coming:
            del self.coming[0]
        return step not in self.coming

    def wait(self, step: Any) -> None:
        assert step not in self.coming, "what is compiled is captured first"
        self.captured.append(step)


@pytest.mark.parametrize(
    ("coming", "captured"),
    [
        ([], [PROMPT, MOST, ONE]),
        ([PROMPT], [MOST, ONE, PROMPT]),
        ([MOST, PROMPT], [MOST, ONE, PROMPT]),
        ([ONE, PROMPT, MOST], [PROMPT, MOST, ONE]),
    ],
)
def test_a_start_captures_first_what_is_compiled_first(
    monkeypatch: pytest.MonkeyPatch, coming: list[GraphKey], captured: list[GraphKey]
) -> None:
    """Prompts if all is compiled; an idle engine goes on with both kinds in turns."""
    monkeypatch.setattr("engine_core.runtime.runner.launch_bound_tokens", lambda *_: 2048)
    compiles = Listed(*coming)
    runner = make_runner(eager=False, compiles=compiles)
    assert compiles.captured == captured
    compiles.captured.clear()
    random = GraphKey(1, 1, 0, Choice.RANDOM)
    for _ in range(2):
        assert runner.capture_next()
    assert compiles.captured == [GraphKey(96, 32, 32), random]
    # What waits for kernels keeps nothing else waiting.
    compiles.coming = [GraphKey(ROWS, ROWS, 0, Choice.RANDOM), "never"]
    while runner.capture_next():
        pass
    assert GraphKey(ROWS, ROWS, 0, Choice.RANDOM) in compiles.captured


def test_a_first_token_waits_for_no_decode_step_whose_kernels_are_still_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine_core.runtime.runner.launch_bound_tokens", lambda *_: 2048)
    quick = PROMPT._replace(quick=Quick.ATTENTION)
    compiles = Listed(quick, MOST, ONE)
    monkeypatch.setattr(Listed, "under_way", True)
    runner = make_runner(eager=False, compiles=compiles)
    assert compiles.captured == [quick]
    compiles.coming.clear()
    assert runner.capture_next()
    assert compiles.captured == [quick, MOST]
    runner.wait_for_prompts()
    assert compiles.captured[2:] == [QUICK]


def test_while_a_start_waits_it_loads_what_is_there_and_what_chooses_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine_core.runtime.runner.launch_bound_tokens", lambda *_: 2048)
    done: list[str] = []

    def chosen(logits: Tensor, *arguments: Any, plain: bool) -> Any:
        tokens, status = sample_tokens(logits, *arguments, plain=plain)
        done.append("choice of all")
        assert (plain, logits.shape[1]) == (True, VOCAB)
        assert status.tolist() == [0] * len(logits)
        return tokens, status

    class Loading(Listed):
        left = 2

        def load_next(self) -> bool:
            self.left -= 1
            if self.left >= 0:
                done.append("kernel")
            return self.left >= 0

    monkeypatch.setattr("engine_core.runtime.sampler.sampler.sample_tokens", chosen)
    for coming in ([MOST, PROMPT], [PROMPT]):
        done.clear()
        make_runner(eager=False, compiles=Loading(*coming), vocab_size=VOCAB)
        assert done == ["kernel", "kernel", "choice of all"]
    # Nobody waits where all is compiled.
    done.clear()
    make_runner(eager=False, compiles=Loading(), vocab_size=VOCAB)
    assert done == []


def test_a_start_goes_on_if_what_chooses_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first request that draws a token will say why, if it cannot be then."""
    monkeypatch.setattr("engine_core.runtime.runner.launch_bound_tokens", lambda *_: 2048)

    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("none is left")

    monkeypatch.setattr("engine_core.runtime.sampler.sampler.sample_tokens", fails)
    caplog.set_level(logging.INFO)
    compiles = Listed(MOST, PROMPT)
    make_runner(eager=False, compiles=compiles, vocab_size=VOCAB)
    assert (PROMPT in compiles.captured, compiles.coming) == (True, [])
    assert "none is left" in caplog.text


def test_a_server_finds_what_cannot_be_captured_before_a_request_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A decode step that synchronises with the host, say; a start without kernels leaves it."""
    monkeypatch.setattr("engine_core.runtime.runner.launch_bound_tokens", lambda *_: 2048)
    monkeypatch.setattr(Listed, "under_way", True)
    runner = make_runner(
        eager=False, compiles=Listed(PROMPT._replace(quick=Quick.ATTENTION), MOST, ONE)
    )

    def fails(*_: Any) -> Any:
        raise AttemptError("cudaErrorStreamCaptureUnsupported", out_of_memory=False)

    monkeypatch.setattr(DecodeGraphs, "_make", fails)
    with pytest.raises(EngineError, match=r"20 rows .*with eager=True \(--eager\)"):
        runner.wait_for_prompts()


@pytest.mark.parametrize("eager", [False, True])
def test_until_kernels_of_choices_are_compiled_pytorchs_choose(
    monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    """Where nothing is captured nobody compiles them ahead, and so nothing is waited for."""
    monkeypatch.setattr("engine_core.runtime.runner.launch_bound_tokens", lambda *_: 2048)
    asked: list[bool] = []

    def noted(*arguments: Any, plain: bool) -> Any:
        asked.append(plain)
        return sample_tokens(*arguments, plain=plain)

    monkeypatch.setattr("engine_core.runtime.sampler.sampler.sample_tokens", noted)
    compiles = Listed("DecodeGraphs others", GraphKey(1, 1, 0, Choice.RANDOM))
    runner = make_runner(eager=eager, compiles=compiles)
    params = SamplingParams(temperature=1.0, seed=0)
    for turn in range(3):
        prompt = ProcessedPrompt(array("q", [1, 2, 3]))
        admitted = Admission("a", 0, array("q", [1, 2, 3]), 3, params, prompt)
        first = PlanRow("a", 0, 0, 3, ((1, 2),), sample=True)
        (row,) = runner.submit(StepPlan(turn, (first,), admitted=(admitted,))).result().rows
        assert len(row.token_ids) == 1
        # A captured step has the same kernels, but for what adjusts logits.
        del compiles.coming[turn == 0 :]
    assert asked == [not eager, False, False]
