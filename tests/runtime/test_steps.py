"""The inputs that a model gets for a step, and their way to the device."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from golden_fixtures import golden_llm, golden_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import examples
from torch import Tensor, nn

from engine_core.configs import (
    CacheConfig,
    CacheGroup,
    KVCacheSpec,
    SamplingParams,
    SchedulerConfig,
)
from engine_core.errors import ModelError
from engine_core.inputs import MediaItem, ProcessedPrompt
from engine_core.kernels import compiled
from engine_core.runtime.block_tables import BlockTables
from engine_core.runtime.memory import CachePlan
from engine_core.runtime.platform import all_to_device, written_to_host
from engine_core.runtime.runner import ModelRunner
from engine_core.runtime.step_batch import GraphKey, StepBatch
from engine_core.step_context import StepContext
from engine_core.steps import Admission, MediaUse, MediaWork, PlanRow, StepPlan

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCAB = 50
BLOCK_SIZE = 4


class Successor(nn.Module):
    """The token after t is t + 1; it keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.contexts: list[StepContext] = []

    def prepare_inputs_for_generation(
        self, past_key_values: Any, inputs_embeds: Any, context: StepContext
    ) -> dict[str, Any]:
        return {"context": context}

    def forward(self, context: StepContext) -> Tensor:
        self.contexts.append(context)
        # Not by one_hot, which waits for the device.
        tokens = torch.arange(VOCAB, device=context.input_ids.device)
        return ((context.input_ids + 1).unsqueeze(-1) % VOCAB == tokens).float()


def runner(model: nn.Module, device: str, *, eager: bool = True, **limits: int) -> ModelRunner:
    spec = KVCacheSpec(num_kv_heads=1, head_dim=4, v_head_dim=4, dtype="float32")
    plan = CachePlan(
        cache_config=CacheConfig(
            groups=(CacheGroup(spec=spec, block_size=BLOCK_SIZE),), num_blocks=20
        ),
        layer_groups=(),
        planes=(),
        max_model_len=40,
    )
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64, max_model_len=40, **limits)
    return ModelRunner(model, plan, config, torch.device(device), eager=eager)


def admission(
    name: str,
    row: int,
    tokens: list[int],
    prompt_len: int | None = None,
    params: SamplingParams | None = None,
    **prompt: Any,
) -> Admission:
    processed = ProcessedPrompt(array("q", tokens[:prompt_len]), **prompt)
    params = params or SamplingParams(temperature=0.0, seed=0)
    length = len(tokens) if prompt_len is None else prompt_len
    return Admission(name, row, array("q", tokens), length, params, processed)


@pytest.mark.parametrize("device", DEVICES)
def test_a_mixed_step_is_given_to_the_model_row_by_row(device: str) -> None:
    model = Successor()
    run = runner(model, device)
    a, b = [3, 1, 4, 1, 5], [9, 2, 6]
    state = {"mark": 7, "scale": 0.5, "span": [1, 2]}
    first = StepPlan(
        0,
        (
            PlanRow("a", 2, 0, 5, ((11, 5),), sample=True),
            PlanRow("b", 0, 0, 3, ((7,),), sample=True),
        ),
        (
            admission("a", 2, a, row_state=state, token_state={"kind": [[1, 1, 2, 2, 3]]}),
            admission("b", 0, b, row_state={"mark": 8, "scale": 1.5, "span": [3, 4]}),
        ),
    )
    result = run.submit(first).result()
    assert [row.token_ids for row in result.rows] == [(6,), (7,)]
    (context,) = model.contexts
    metadata = context.attn_metadata
    assert context.input_ids.tolist() == [a + b]
    assert context.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert context.row_ids.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert metadata.query_start.tolist() == [0, 5, 8]
    assert metadata.query_start.dtype == metadata.kv_lens.dtype == torch.int32
    assert metadata.kv_lens.tolist() == [5, 3]
    assert (metadata.max_query_len, metadata.max_kv_len, metadata.num_decode_rows) == (5, 5, 0)
    (group,) = metadata.groups
    assert group.slot_mapping.tolist() == [44, 45, 46, 47, 20, 28, 29, 30]
    assert group.block_tables[0].tolist() == [11, 5]
    assert group.block_tables[1, 0].item() == 7
    assert {name: value.tolist() for name, value in context.row_state.items()} == {
        "prompt_len": [5, 3],
        "mark": [7, 8],
        "scale": [0.5, 1.5],
        "span": [[1, 2], [3, 4]],
    }
    assert context.row_state["scale"].dtype == torch.float32
    assert context.token_state["kind"].tolist() == [[1, 1, 2, 2, 3, 0, 0, 0]]

    # One decodes a token that only the device knows for sure; one goes on after a preemption, with
    # a part of its prompt in the cache; one takes the row of one that has ended.
    c, d = [8, 8, 8, 8, 8, 20, 21], [30, 31]
    second = StepPlan(
        1,
        (
            PlanRow("a", 2, 5, 1, ((),), sample=True),
            PlanRow("c", 4, 4, 3, ((1, 2),), sample=True),
            PlanRow("d", 0, 0, 2, ((3,),), sample=False),
        ),
        (
            admission("c", 4, c, 5, row_state={"mark": 1, "scale": 2.5, "span": [5, 6]}),
            admission("d", 0, d, row_state={"mark": 2, "scale": 3.5, "span": [7, 8]}),
        ),
    )
    result = run.submit(second).result()
    assert [row.token_ids for row in result.rows] == [(7,), (22,), ()]
    context = model.contexts[1]
    metadata = context.attn_metadata
    assert context.input_ids.tolist() == [[6, 8, 20, 21, 30, 31]]
    assert context.position_ids.tolist() == [[5, 4, 5, 6, 0, 1]]
    assert context.row_ids.tolist() == [0, 1, 1, 1, 2, 2]
    assert metadata.query_start.tolist() == [0, 1, 4, 6]
    assert metadata.kv_lens.tolist() == [6, 7, 2]
    assert (metadata.max_query_len, metadata.max_kv_len, metadata.num_decode_rows) == (3, 7, 1)
    (group,) = metadata.groups
    assert group.slot_mapping.tolist() == [21, 8, 9, 10, 12, 13]
    assert group.block_tables[:2].tolist() == [[11, 5], [1, 2]]
    assert group.block_tables[2, 0].item() == 3
    assert {name: value.tolist() for name, value in context.row_state.items()} == {
        "prompt_len": [5, 5, 2],
        "mark": [7, 1, 2],
        "scale": [0.5, 2.5, 3.5],
        "span": [[1, 2], [5, 6], [7, 8]],
    }
    assert context.token_state["kind"].tolist() == [[0] * 6]


class Counting(nn.Module):
    """A model that changes with every token it computes, on tensors alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.zeros(1, dtype=torch.int64)

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        self.tokens += input_ids.shape[1]
        return torch.eye(VOCAB)[self.tokens.expand(1, input_ids.shape[1])]


def test_a_model_may_refuse_that_steps_are_run_twice() -> None:
    model = Counting()
    model.support_cuda_graph = False
    run = runner(model, "cpu", eager=False)
    rows = [PlanRow("a", 0, 0, 2, ((1, 2),), sample=True)]
    rows += [PlanRow("a", 0, start, 1, ((),), sample=True) for start in range(2, 7)]
    admitted = (admission("a", 0, [1, 2]),)
    tokens = []
    for row in rows:
        step = run.submit(StepPlan(0, (row,), admitted))
        admitted = ()
        assert step.way == "eager"
        tokens += step.result().rows[0].token_ids
    assert tokens == [2, 3, 4, 5, 6, 7]


@pytest.mark.skipif(
    not compiled.available(), reason="steps are only recorded with compiled kernels"
)
@pytest.mark.parametrize("kind", ["row_state", "token_state"])
def test_state_that_a_later_request_brings_is_in_steps_recorded_before(kind: str) -> None:
    class Marked(Successor):
        def forward(self, context: StepContext) -> Tensor:
            step = 11 if "mark" in getattr(context, kind) else 1
            return torch.eye(VOCAB)[(context.input_ids + step) % VOCAB]

    run = runner(Marked(), "cpu", eager=False)

    def tokens_of(number: int, **state: Any) -> list[int]:
        name, row = str(number), number
        first = PlanRow(name, row, 0, 2, ((row + 1, row + 5),), sample=True)
        plans = [StepPlan(0, (first,), (admission(name, row, [1, 2], **state),))]
        later = (PlanRow(name, row, start, 1, ((),), sample=True) for start in range(2, 7))
        plans += [StepPlan(0, (plan_row,), ()) for plan_row in later]
        steps = [run.submit(plan) for plan in plans]
        assert steps[-1].way == "recorded"
        return [token for step in steps for token in step.result().rows[0].token_ids]

    assert tokens_of(0) == [3, 4, 5, 6, 7, 8]
    state = {"row_state": {"mark": 1}, "token_state": {"mark": [[1, 1]]}}
    assert tokens_of(1, **{kind: state[kind]}) == [13, 24, 35, 46, 7, 18]


class Padded:
    """Captured steps whose graphs there is no memory for: steps are padded and then run eagerly."""

    def fit(self, key: GraphKey) -> tuple[GraphKey, bool]:
        return GraphKey(key.tokens + 6, key.decode_rows + 1, key.prefill_rows + 2), True

    def fit_decodes(self, key: GraphKey) -> tuple[GraphKey, bool]:
        return GraphKey(key.tokens + 6, 0, key.rows + 2), True  # as in a quick step

    def run(self, batch: StepBatch) -> None:
        assert batch.padded or batch.decodes

    def forget(self) -> None: ...


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_padding_are_rows_that_store_nothing(device: str) -> None:
    model = Successor()
    run = runner(model, device)
    prompt = StepPlan(
        0, (PlanRow("a", 2, 0, 3, ((11, 5),), sample=True),), (admission("a", 2, [3, 1, 4]),)
    )
    assert [row.token_ids for row in run.submit(prompt).result().rows] == [(5,)]
    run._graph_steps = Padded()  # type: ignore[assignment]
    plan = StepPlan(
        1,
        (
            PlanRow("a", 2, 3, 1, ((),), sample=True),
            PlanRow("b", 4, 0, 2, ((1,),), sample=False),
            PlanRow("c", 0, 0, 3, ((3,),), sample=True),
        ),
        (
            admission("b", 4, [8, 20, 21], token_state={"kind": [[1, 2, 3]]}),
            admission("c", 0, [30, 31, 32], token_state={"kind": [[4, 5, 6]]}),
        ),
    )
    result = run.submit(plan).result()
    assert [row.token_ids for row in result.rows] == [(6,), (), (33,)]
    context = model.contexts[1]
    metadata = context.attn_metadata
    nothing = [0] * 5
    assert context.input_ids.tolist() == [[5, 0, 8, 20, 30, 31, 32, *nothing]]
    assert context.position_ids.tolist() == [[3, 0, 0, 1, 0, 1, 2, *nothing]]
    assert context.row_ids.tolist() == [0, 1, 2, 2, 3, 3, 3, *nothing]
    assert context.token_state["kind"].tolist() == [[0, 0, 1, 2, 4, 5, 6, *nothing]]
    assert metadata.query_start.tolist() == [0, 1, 2, 4, 7, 7, 7]
    assert metadata.kv_lens.tolist() == [4, 0, 2, 3, 0, 0]
    assert metadata.num_decode_rows == 2
    assert metadata.max_query_len >= 3
    assert metadata.max_kv_len >= 4
    (group,) = metadata.groups
    assert group.slot_mapping.tolist() == [47, -1, 4, 5, 12, 13, 14, *[-1] * 5]
    assert group.block_tables[[0, 2, 3], 0].tolist() == [11, 1, 3]
    assert context.row_state["prompt_len"].tolist() == [3, 0, 3, 3, 0, 0]


class Shown(Successor):
    """A model whose embedding is the token, and those of an item what its features say."""

    def get_input_embeddings(self) -> Any:
        return lambda token_ids: token_ids.unsqueeze(-1).float()

    def embed_media(self, kind: str, items: list[dict[str, Tensor]]) -> list[Tensor]:
        assert [item["size"].device.type for item in items] == ["cpu"] * len(items)
        return [item["values"][: item["size"]].unsqueeze(-1) for item in items]


@pytest.mark.parametrize("device", DEVICES)
def test_embeddings_come_in_where_they_are_shown(device: str) -> None:
    """Two pictures in three steps, of which the second has padding and the third no picture."""

    def shown(*spans: tuple[int, int]) -> tuple[MediaItem, ...]:
        return tuple(
            MediaItem(
                "image",
                bytes([first]),
                (first, last),
                {
                    "values": np.arange(100 * first, 100 * first + 9, dtype=np.float32),
                    "size": np.array(last - first),
                },
            )
            for first, last in spans
        )

    model = Shown()
    run = runner(model, device)
    admitted = (
        admission("a", 1, [1, 2, 3, 4, 5, 6], media=shown((1, 5))),
        admission("b", 3, [11, 12, 13], media=shown((2, 3))),
    )
    first = (
        PlanRow("a", 1, 0, 3, ((11, 5),), sample=False),
        PlanRow("b", 3, 0, 3, ((7,),), sample=True),
    )
    uses = MediaUse(0, 0, 0), MediaUse(1, 0, 1)
    work = MediaWork(1, 0, 0, 0, 4, 4), MediaWork(3, 0, 1, 0, 1, 1)
    run.submit(StepPlan(0, first, admitted, media=uses, media_work=work)).result()
    run._graph_steps = Padded()  # type: ignore[assignment]
    second = (
        PlanRow("b", 3, 3, 1, ((),), sample=True),
        PlanRow("a", 1, 3, 3, ((),), sample=True),
    )
    run.submit(StepPlan(1, second, media=(MediaUse(1, 0, 0),))).result()
    third = (PlanRow("c", 2, 0, 2, ((2,),), sample=True),)
    added = (admission("c", 2, [8, 9]),)
    run._graph_steps = None
    run.submit(StepPlan(2, third, added, freed_media=(1,))).result()
    one, two, three = (context.inputs_embeds for context in model.contexts)
    assert one is not None
    assert two is not None
    assert one[0, :, 0].tolist() == [1, 100, 101, 11, 12, 200]
    # The token that was chosen last stands at the place of the first picture's row.
    assert two[0, :, 0].tolist() == [14, 0, 102, 103, 6, *[0] * 5]
    assert three is None


class InParts(Shown):
    """Computes an item in as many parts as its features say, and counts them."""

    computed = 0

    def embed_media_parts(self, kind: str, items: list[dict[str, Tensor]]) -> Any:
        parts = int(items[0]["parts"])
        for part in range(parts):
            self.computed += 1
            yield (part + 1) / parts
        return self.embed_media(kind, items)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 60), st.integers(0, 6000), st.data())
def test_a_plan_says_after_which_of_its_parts_a_model_stops(
    parts: int, more: int, data: st.DataObject
) -> None:
    """By embeddings of which there are enough; and the result says how many parts there are."""
    size = parts + more
    model = InParts()
    run = runner(model, "cpu", encoder_cache_tokens=size)
    values = np.arange(size, dtype=np.float32)
    features = {"values": values, "size": np.array(size), "parts": np.array(parts)}
    item = MediaItem("image", b"", (1, 1 + size), features)
    added = (
        admission("a", 1, [1, 2]),
        admission("b", 2, [1, 2], media=(item,)),
    )
    stops = sorted(data.draw(st.sets(st.integers(1, parts), max_size=5)) | {parts})
    begin = 0
    for step, stop in enumerate(stops):
        end = stop * size // parts
        work = (MediaWork(2, 0, 0, begin, end, size),)
        row = PlanRow("a", 1, step, 1, ((),) if step else ((3,),), sample=True)
        plan = StepPlan(step, (row,), () if step else added, media_work=work)
        result = run.submit(plan).result()
        assert model.computed == (stop if len(stops) > 1 else 0)  # else it was computed at once
        assert result.media_parts == ({("image", size): parts} if len(stops) > 1 else {})
        begin = end
    assert run._media is not None
    given = run._media.table[torch.from_numpy(run._media.rows(0))]
    assert torch.equal(given[:, 0], torch.from_numpy(values))


def test_a_model_that_shows_nothing_refuses_pictures() -> None:
    item = MediaItem("image", b"", (1, 2))
    row = PlanRow("a", 1, 0, 3, ((11, 5),), sample=True)
    plan = StepPlan(
        0,
        (row,),
        (admission("a", 1, [1, 2, 3], media=(item,)),),
        media=(MediaUse(0, 0, 0),),
        media_work=(MediaWork(1, 0, 0, 0, 1, 1),),
    )
    with pytest.raises(ModelError, match="Successor has no embed_media"):
        runner(Successor(), "cpu").submit(plan)


def test_a_padded_step_gives_what_it_gives_without() -> None:
    prompts = golden_prompts("llama-gqa")
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with golden_llm("llama-gqa", device="cpu", eager=True, max_num_batched_tokens=24) as llm:
        llm.engine.core.executor._runner._graph_steps = Padded()
        outputs = llm.generate([prompt.input_ids for prompt in prompts], params)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.outputs[0].token_ids == prompt.new_tokens, prompt.name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("company", ["alone", "together"])
def test_rows_admitted_together_choose_as_each_wants(device: str, company: str) -> None:
    """Greedy rows follow the model; a bias, or the seed and the temperature, lead others away.

    So do rows that were another kind of request's before.
    """
    run = runner(Successor(), device)
    greedy = SamplingParams(temperature=0.0, seed=0)
    biased = SamplingParams(temperature=0.0, seed=0, logit_bias={33: 90.0})
    # The model's token has a logit of 1, all others 0: at this temperature it is one of 50.
    hot = SamplingParams(temperature=100.0, seed=5)
    again = SamplingParams(temperature=100.0, seed=6)
    chosen: dict[str, list[tuple[int, ...]]] = {}
    step = 0
    for turn in (0, 1):
        wanted = [greedy, biased, hot, again, greedy]
        if turn == 1:
            wanted = [hot, greedy, biased, greedy, again]
        names = [f"{turn} {index}" for index in range(len(wanted))]
        admitted = [
            admission(name, row, [10, 11], params=params)
            for row, (name, params) in enumerate(zip(names, wanted, strict=True))
        ]
        rows = [
            PlanRow(name, row, 0, 2, ((row + 1,),), sample=True) for row, name in enumerate(names)
        ]
        parts = [slice(i, i + 1) for i in range(5)] if company == "alone" else [slice(0, 5)]
        for part in parts:
            result = run.submit(StepPlan(step, tuple(rows[part]), tuple(admitted[part]))).result()
            step += 1
            for row, params in zip(result.rows, wanted[part], strict=True):
                assert row.error is None
                chosen.setdefault(str(params), []).append(row.token_ids)
    assert chosen[str(greedy)] == [(12,)] * 4
    assert chosen[str(biased)] == [(33,)] * 2
    for params in (hot, again):
        assert len(set(chosen[str(params)])) == 1
    assert chosen[str(hot)] != chosen[str(again)]


@pytest.mark.parametrize("device", DEVICES)
def test_block_tables_on_the_device_follow_those_of_the_host(device: str) -> None:
    generator = random.Random(0)
    tables = BlockTables(5, 12, BLOCK_SIZE, torch.device(device))
    expected: list[list[int]] = [[] for _ in range(5)]
    for _ in range(200):
        for _ in range(generator.randrange(1, 6)):
            row = generator.randrange(5)
            if generator.random() < 0.3:
                tables.clear(row)
                expected[row] = []
            room = 12 - len(expected[row])
            blocks = tuple(generator.choices(range(1, 99), k=min(room, generator.randrange(4))))
            tables.append(row, blocks)
            expected[row] += blocks
        tables.flush()
        for row, blocks_of_row in enumerate(expected):
            assert tables.device_table[row, : len(blocks_of_row)].tolist() == blocks_of_row
        rows = [row for row in range(5) if expected[row]]
        if not rows:
            continue
        spans = []
        for row in rows:
            end = generator.randint(1, len(expected[row]) * BLOCK_SIZE)
            spans.append(range(generator.randrange(end), end))
        slots = tables.slots(
            np.array(rows), np.array([len(s) for s in spans]), np.concatenate(spans)
        )
        assert slots.tolist() == [
            expected[row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for row, span in zip(rows, spans, strict=True)
            for position in span
        ]


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_are_sent_together_as_they_are(device: str) -> None:
    arrays = [
        np.arange(7),
        np.array([[1, 2, 3]], dtype=np.int32).T,
        np.zeros(0, dtype=np.int64),
        np.array([0.1, -2.5e300]),
        np.array([True, False, True]),
        np.arange(40, dtype=np.int8).reshape(2, 4, 5),
        np.arange(12).reshape(4, 3)[:, 1],
    ]
    sent = all_to_device(arrays, torch.device(device))
    for array_, tensor in zip(arrays, sent, strict=True):
        assert tensor.device.type == device
        assert np.array_equal(tensor.cpu().numpy(), array_)
        assert tensor.cpu().numpy().dtype == array_.dtype
        # Triton compiles a kernel anew for tensors that lie otherwise.
        assert device == "cpu" or tensor.data_ptr() % 16 == 0


@pytest.mark.gpu
def test_what_is_sent_to_a_busy_device_arrives_as_it_was() -> None:
    """The pinned memory of a transfer is not written again before the transfer is done."""
    device = torch.device("cuda")
    all_to_device([np.zeros(5000, dtype=np.int64)], device)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    sent = []
    for number in range(50):
        array_ = np.full(5000, number)
        sent.append(all_to_device([array_, array_ + 1], device))
        array_[:] = -1
    for number, (first, second) in enumerate(sent):
        assert first.unique().tolist() == [number]
        assert second.unique().tolist() == [number + 1]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_bytes_are_written_to_memory_that_was_pinned_beside_another_gpu() -> None:
    """An engine may be on the second GPU where somebody used the first."""
    torch.zeros(1, device="cuda:0")
    pinned = torch.full((3 << 20,), 7, dtype=torch.uint8).pin_memory()
    place = pinned.data_ptr()
    del pinned
    again = torch.empty(3 << 20, dtype=torch.uint8, pin_memory=True)
    assert again.data_ptr() == place
    del again
    with torch.cuda.device(1):
        given = (torch.arange(3 << 20, device="cuda") % 251).to(torch.uint8)
        got = written_to_host(given)
        torch.cuda.synchronize()
    assert not got.is_cuda
    assert got.equal(given.cpu())


@pytest.mark.parametrize("copied", [False, True])
def test_bytes_are_written_wherever_pytorch_takes_memory_to_be(
    copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of memory that it takes to be on another device it makes a copy, which nobody reads."""
    made: list[Tensor] = []

    def pinned(shape: tuple[int, ...], dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory
        made.append(torch.zeros(shape, dtype=dtype))
        return made[-1]

    def seen(host: Any, device: torch.device) -> Tensor:
        interface = host.__cuda_array_interface__
        assert interface["data"] == (made[-1].data_ptr(), False)
        assert (interface["shape"], interface["typestr"]) == ((2, 5), "|u1")
        return made[-1].clone() if copied else made[-1]

    given = torch.arange(10, dtype=torch.uint8).view(2, 5)
    expected = given.tolist()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch, "as_tensor", seen)
    assert written_to_host(given).tolist() == expected


class Capturable(Successor):
    """One with a weight, by whose size it is found out which steps are captured."""

    support_cuda_graph = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("repeat", [1, 3])
def test_tokens_of_a_busy_device_are_those_of_its_steps(repeat: int) -> None:
    """Of steps that nobody waits for they are written to memory that nobody else has yet."""
    run = runner(Capturable(), "cuda", eager=False, max_repeat=4)
    first = PlanRow("a", 0, 0, 3, ((1, 2, 3, 4, 5, 6, 7, 8, 9, 10),), sample=True)
    (row,) = run.submit(StepPlan(0, (first,), (admission("a", 0, [3, 1, 4]),))).result().rows
    assert row.token_ids == (5,)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    steps = []
    for number in range(10):
        going_on = PlanRow("a", 0, 3 + number * repeat, 1, ((),), sample=True)
        step = run.submit(StepPlan(number, (going_on,), repeat=repeat))
        assert (step.way, step.done) == ("graph", False)
        steps.append(step)
    kept = steps[::2]
    del step, steps
    others = [torch.full((size,), 7, dtype=torch.uint8).pin_memory() for size in (256, 1024) * 20]
    torch.cuda.synchronize()
    assert all((other == 7).all() for other in others)
    tokens = [step.result().rows[0].token_ids for step in kept]
    firsts = [6 + 2 * number * repeat for number in range(5)]
    assert tokens == [tuple(range(first, first + repeat)) for first in firsts]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, seed=0),
        SamplingParams(seed=1, frequency_penalty=0.5, min_tokens=2),
    ],
    ids=["greedy", "adjusted"],
)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_is_submitted_without_waiting_for_the_device(params: SamplingParams) -> None:
    run = runner(Successor(), "cuda")
    rows = [PlanRow(str(i), i, 0, 3, ((i + 1,),), sample=True) for i in range(2)]
    plans = [
        StepPlan(i, (rows[i],), (admission(str(i), i, [3, 1, 4], None, params),)) for i in (0, 1)
    ]
    run.submit(plans[0]).result()  # makes what is made once
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = run.submit(plans[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(pending.result().rows) == 1
