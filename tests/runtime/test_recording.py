"""Decode steps that are repeated without the model's Python give what the model gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from golden_fixtures import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.kernels import compiled, rms_norm
from engine_core.nn.decoder import Decoder
from engine_core.runtime.block_tables import BlockTables
from engine_core.runtime.recording import RecordedSteps
from engine_core.runtime.step_batch import Choice, StepBatch, StepOutputs, StepState
from engine_core.step_context import StepContext

MAX_ROWS, BLOCK_SIZE, MAX_LEN = 20, 4, 64
WIDTH, VOCAB = 8, 11

Model = Callable[[StepContext], Tensor]

# An operation of someone else, which might keep a state.
LIBRARY = torch.library.Library("engine_core_tests", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: 2 * x, "CPU")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Toy:
    """A model of some operations of torch and a kernel of ours; counts its calls."""

    def __init__(self, extra: Callable[[StepContext, Tensor], Tensor] | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(64, WIDTH, generator=generator)
        self.head = torch.randn(VOCAB, WIDTH, generator=generator)
        self.norm = torch.ones(WIDTH)
        self.calls = 0
        self.extra = extra

    def __call__(self, context: StepContext) -> Tensor:
        self.calls += 1
        x = torch.nn.functional.embedding(context.input_ids[0], self.embedding)
        x = x + context.position_ids[0].unsqueeze(-1).float().sin()
        x = x * context.attn_metadata.kv_lens.unsqueeze(-1)
        x = x + context.attn_metadata.groups[0].slot_mapping.unsqueeze(-1)
        x = x + context.attn_metadata.groups[0].block_tables[:, :1]
        x = x - context.row_state["prompt_len"].unsqueeze(-1)
        if self.extra is not None:
            x = self.extra(context, x)
        x = rms_norm(x, self.norm, 1e-5)
        x.add_(0.5)
        return nn.functional.linear(x, self.head)


class Steps:
    """RecordedSteps of a toy, and what the toy gives of the same numbers each time."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        self.state = StepState(
            [BlockTables(MAX_ROWS, MAX_LEN // BLOCK_SIZE, BLOCK_SIZE, torch.device("cpu"))],
            torch.arange(MAX_ROWS + 1),
            MAX_LEN,
            {"prompt_len": torch.arange(MAX_ROWS + 1) * 2},
        )
        for row in range(MAX_ROWS):
            first = 100 * row
            self.state.tables[0].append(row, tuple(range(first, first + MAX_LEN // BLOCK_SIZE)))
        self.steps = RecordedSteps(self.state, toy)

    def run(self, rows: list[int], positions: list[int]) -> Tensor | None:
        """A step of rows whose blocks are numbered on from a hundred times their own number."""
        outputs = self.steps.run(self.state.decode_batch(rows, positions, Choice.GREEDY))
        return None if outputs is None else outputs.logits

    def expected(self, rows: list[int], positions: list[int], more: float | Tensor = 0.0) -> Tensor:
        """By the definition of :class:`Toy`, without a context; ``more`` is what it adds extra."""
        index, places = torch.tensor(rows), torch.tensor(positions)
        slots = 100 * index * BLOCK_SIZE + places
        x = self.toy.embedding[self.state.last_tokens[index]] + places.float().sin()[:, None]
        x = x * (places + 1)[:, None] + slots[:, None] + (100 * index)[:, None]
        x = x - self.state.row_state["prompt_len"][index][:, None] + more
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) + 0.5
        return x @ self.toy.head.T


needs_kernels = pytest.mark.skipif(
    not compiled.available(), reason="steps are only recorded with compiled kernels"
)


@needs_kernels
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_recorded_steps_follow_their_numbers(data: st.DataObject) -> None:
    with torch.inference_mode():
        steps = Steps(Toy())
        for _ in range(data.draw(st.integers(1, 12), label="steps")):
            rows = data.draw(
                st.lists(st.integers(0, MAX_ROWS - 1), min_size=1, max_size=4, unique=True)
            )
            positions = [data.draw(st.integers(0, MAX_LEN - 1)) for _ in rows]
            steps.state.last_tokens.random_(0, 64)
            logits = steps.run(rows, positions)
            if logits is not None:
                torch.testing.assert_close(
                    logits, steps.expected(rows, positions), rtol=1e-4, atol=1e-4
                )


@needs_kernels
def test_the_model_is_called_to_record_and_to_prove() -> None:
    toy = Toy()
    steps = Steps(toy)
    results = [steps.run([3, 1], [place, place + 7]) for place in range(10)]
    assert [result is None for result in results] == [True] + [False] * 9
    assert toy.calls == 2
    for place in (9, 4):
        logits = steps.run([1, 3], [place, place])
        assert logits is not None
        torch.testing.assert_close(logits, steps.expected([1, 3], [place, place]))
    assert toy.calls == 2


@needs_kernels
@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(lambda context, x: x * int(context.position_ids[0, 0]), id="item"),
        pytest.param(lambda context, x: x[x[:, 0] > 0], id="mask"),
        pytest.param(lambda context, x: x[(x[:, 0] > 0).nonzero(as_tuple=True)], id="nonzero"),
        pytest.param(lambda context, x: x[torch.where(x[:, 0] > 0)], id="where"),
        pytest.param(lambda context, x: x if torch.equal(x, x) else -x, id="equal"),
        pytest.param(lambda context, x: x + torch.rand(x.shape), id="random"),
        pytest.param(lambda context, x: torch.ops.engine_core_tests.twice(x), id="operation"),
        pytest.param(lambda context, x: x * sum(context.position_ids[0].tolist()), id="tolist"),
        pytest.param(lambda context, x: x * context.position_ids.numpy().max(), id="numpy"),
        pytest.param(lambda context, x: x * np.asarray(context.position_ids)[0, 0], id="asarray"),
    ],
)
def test_what_cannot_be_repeated_is_not_recorded(
    extra: Callable[[StepContext, Tensor], Tensor],
) -> None:
    toy = Toy(extra)
    steps = Steps(toy)
    assert [steps.run([2], [place]) for place in range(5)] == [None] * 5
    assert toy.calls == 1


@needs_kernels
def test_a_state_of_python_is_noticed() -> None:
    slope = torch.arange(WIDTH)
    turns = count()
    toy = Toy(lambda context, x: x + slope * next(turns))
    steps = Steps(toy)
    assert steps.run([2], [5]) is None
    for turn, place in enumerate((6, 7)):
        logits = steps.run([2], [place])
        assert logits is not None
        expected = steps.expected([2], [place], slope * turn)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert toy.calls == 2
    assert steps.run([2], [8]) is None
    assert steps.run([2], [9]) is None


@needs_kernels
def test_many_rows_and_large_tensors_are_not_recorded() -> None:
    steps = Steps(Toy())
    for _ in range(3):
        assert steps.run(list(range(17)), [1] * 17) is None

    def wide(context: StepContext, x: Tensor) -> Tensor:
        torch.empty(2**27, dtype=torch.uint8)
        return x

    steps = Steps(Toy(wide))
    given = [[steps.run([row], [1]), steps.run([row, 9], [1, 1])] for row in range(4)]
    # The first recording takes all that recordings may take.
    assert [[result is None for result in pair] for pair in given] == [
        [True, True], [False, True], [False, True], [False, True],
    ]  # fmt: skip


@needs_kernels
@pytest.mark.parametrize(
    "name", ["llama-gqa", "bloom-6heads", "qwen2-swa", "chatglm2-tiny", "mamba2-tiny"]
)
def test_an_engine_gives_the_tokens_of_eager_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16, 17]]
    params = [
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=1.0, seed=3, max_tokens=18, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    ]
    calls: list[int] = []
    record = RecordedSteps.run

    def spy(self: RecordedSteps, batch: StepBatch) -> StepOutputs | None:
        outputs = record(self, batch)
        calls.append(outputs is not None)
        return outputs

    monkeypatch.setattr(RecordedSteps, "run", spy)

    def run(**options: Any) -> list[tuple[int, ...]]:
        config = EngineConfig(
            dtype="float32",
            kv_cache_memory="8MiB",
            max_model_len=96,
            skip_tokenizer_init=True,
            **options,
        )
        with LLM(str(GOLDEN / name), config) as llm:
            outputs = llm.generate(prompts, params)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    recorded = run()
    assert sum(calls) >= 20
    calls.clear()
    assert run(eager=True) == recorded
    assert not calls


@needs_kernels
def test_layers_that_are_watched_are_called() -> None:
    config = EngineConfig(
        dtype="float32", kv_cache_memory="8MiB", max_model_len=96, skip_tokenizer_init=True
    )
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    with LLM(str(GOLDEN / "llama-gqa"), config) as llm:
        (first,) = llm.generate([[5, 6, 7]], params)
        with llm.engine.trace_layers() as trace:
            (second,) = llm.generate([[5, 6, 7, *first.outputs[0].token_ids[:3]]], params)
        assert [step.phase for step in trace.steps] == ["prefill", "decode"]
        names = [[layer.name for layer in step.layers] for step in trace.steps]
        assert names[0] == names[1] != []
    assert second.outputs[0].token_ids[:7] == first.outputs[0].token_ids[3:]


@needs_kernels
def test_a_decoder_is_hardly_called(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Decoder.forward
    calls: list[int] = []

    def counted(self: Decoder, *args: Any) -> Tensor:
        calls.append(1)
        return forward(self, *args)

    monkeypatch.setattr(Decoder, "forward", counted)
    config = EngineConfig(
        dtype="float32", kv_cache_memory="8MiB", max_model_len=96, skip_tokenizer_init=True
    )
    with LLM(str(GOLDEN / "llama-gqa"), config) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=40, ignore_eos=True))
    # The prompt, a first step, one to record and one to prove.
    assert len(calls) == 4
