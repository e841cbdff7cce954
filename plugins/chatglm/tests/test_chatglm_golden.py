"""The ChatGLM fixtures through the whole engine, against the original code's outputs."""

from __future__ import annotations

import json

import pytest
import torch
from golden_fixtures import (
    GOLDEN,
    SETTINGS,
    GoldenPrompt,
    check_generation,
    check_output,
    check_preemption,
    check_prefix_cache,
    golden_llm,
    golden_prompts,
    greedy_params,
    some_of,
    with_settings,
)
from safetensors.torch import load_file

from engine_core import LLM, SamplingParams
from engine_core.checkpoint import open_checkpoint
from engine_core.configs import ModelConfig
from engine_core.errors import RequestError
from engine_core.inputs import InputProcessor
from engine_core.registry import build_registry
from engine_core.runtime.loader import build_on_meta, load_weights
from engine_core.step_context import AttentionMetadata, BuildContext, GroupMetadata, StepContext

CAUSAL = ["chatglm2-tiny", "chatglm3-tiny"]
# Version 1 never cuts a context: the longest of its prompts has one of 71 tokens.
WHOLE_CONTEXTS = {
    **{name: setting for name, setting in SETTINGS.items() if name != "chunks-of-8"},
    "chunks-of-71": {"max_num_seqs": 4, "max_num_batched_tokens": 71},
}
# Of the vocabulary of 320 in chatglm1-tiny.
MASK, GMASK, BOS = 300, 301, 304


@pytest.mark.parametrize(("name", "settings"), with_settings(CAUSAL))
def test_tokens_and_logits_are_those_of_the_original_code(name: str, settings: dict) -> None:
    check_generation(name, settings)


@pytest.mark.parametrize(
    "settings",
    [
        # The conformance kit has the others.
        pytest.param(
            each, id=how, marks=[] if how in ("default", "chunks-of-71") else [pytest.mark.long]
        )
        for how, each in WHOLE_CONTEXTS.items()
    ],
)
def test_version_1_gives_the_tokens_and_logits_of_the_original_code(settings: dict) -> None:
    check_generation("chatglm1-tiny", settings)


@pytest.mark.parametrize("name", some_of(CAUSAL, "chatglm3-tiny"))
def test_a_second_run_from_the_prefix_cache_is_the_same(name: str) -> None:
    check_prefix_cache(name)


def test_version_1_takes_a_context_from_the_cache_whole_or_not_at_all() -> None:
    prompts = golden_prompts("chatglm1-tiny")
    params = greedy_params("chatglm1-tiny")
    with golden_llm("chatglm1-tiny", block_size=4) as llm:
        llm.generate([prompt.input_ids for prompt in prompts], params)
        for expected in prompts:
            (output,) = llm.generate(expected.input_ids, params)
            boundary = (len(expected.input_ids) - 1) // 4 * 4
            cached = boundary if boundary >= expected.input_ids.index(BOS) else 0
            assert output.metrics.num_cached_tokens == cached, expected.name
            check_output(output, expected)


@pytest.mark.parametrize("name", some_of(["chatglm1-tiny", *CAUSAL], "chatglm1-tiny"))
def test_preempted_requests_are_the_same(name: str) -> None:
    check_preemption(name)


def golden_prompt(prompt_name: str) -> GoldenPrompt:
    return next(p for p in golden_prompts("chatglm1-tiny") if p.name == prompt_name)


def test_an_answer_may_be_cut_but_not_its_context() -> None:
    answer = golden_prompt("answer-prefix")
    params = greedy_params("chatglm1-tiny", with_prompt=True)
    length = answer.input_ids.index(BOS)
    with golden_llm("chatglm1-tiny", max_num_seqs=1, max_num_batched_tokens=length) as llm:
        (output,) = llm.generate(answer.input_ids, params)
    check_output(output, answer)
    with (
        golden_llm("chatglm1-tiny", max_num_seqs=1, max_num_batched_tokens=length - 1) as llm,
        pytest.raises(RequestError, match="raise max_num_batched_tokens"),
    ):
        llm.generate(answer.input_ids, params)


def test_a_longer_context_shares_no_blocks_with_its_beginning() -> None:
    """Each token of a context sees all of it, so what follows a block changes the block."""
    whole = golden_prompt("gmask-first")
    with golden_llm("chatglm1-tiny", block_size=2) as llm:
        llm.generate([*whole.input_ids[:6], BOS], greedy_params("chatglm1-tiny"))
        (output,) = llm.generate(whole.input_ids, greedy_params("chatglm1-tiny"))
    assert output.metrics.num_cached_tokens == 0
    check_output(output, whole)


def test_a_mask_after_the_bos_shares_no_blocks_with_prompts_without_it() -> None:
    """It changes the positions of the whole answer, also of what stands before it."""
    start = [5, 6, MASK, 7, BOS, *range(20, 32)]
    later = [*start, GMASK, 9]
    with golden_llm("chatglm1-tiny", block_size=4) as llm:
        (alone,) = llm.generate(later, greedy_params("chatglm1-tiny"))
    with golden_llm("chatglm1-tiny", block_size=4) as llm:
        llm.generate(start, greedy_params("chatglm1-tiny"))
        (after,) = llm.generate(later, greedy_params("chatglm1-tiny"))
    assert after.outputs[0].token_ids == alone.outputs[0].token_ids
    for got, wanted in zip(after.outputs[0].logprobs, alone.outputs[0].logprobs, strict=True):
        for token, value in wanted.items():
            assert got[token].logprob == pytest.approx(value.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("ids", "missing"),
    [([1, 2, GMASK], "without <sop>"), ([1, 2, BOS], "without a mask"), ([1], "without <sop>")],
)
def test_a_prompt_without_its_special_tokens_is_refused(ids: list[int], missing: str) -> None:
    with (
        golden_llm("chatglm1-tiny") as llm,
        pytest.raises(RequestError, match=f"{missing}.*End the prompt with"),
    ):
        llm.generate(ids)


def load(name: str) -> tuple[torch.nn.Module, ModelConfig, InputProcessor | None]:
    """The model by itself, in float32."""
    registry = build_registry()
    checkpoint = open_checkpoint(GOLDEN / name)
    config = registry.model_config(checkpoint.hf_config, checkpoint.folder)
    model = build_on_meta(
        registry.model_class(config.architecture), config, BuildContext(dtype=torch.float32)
    )
    load_weights(model, checkpoint, name, torch.device("cpu"))
    return model, config, registry.input_processor(config)


def step_context(ids: list[int], row_state: dict[str, int]) -> StepContext:
    """One row that computes all of ``ids`` at once, in one block."""
    length = len(ids)
    return StepContext(
        input_ids=torch.tensor([ids]),
        position_ids=torch.arange(length)[None],
        row_ids=torch.zeros(length, dtype=torch.int64),
        attn_metadata=AttentionMetadata(
            query_start=torch.tensor([0, length], dtype=torch.int32),
            kv_lens=torch.tensor([length], dtype=torch.int32),
            max_query_len=length,
            max_kv_len=length,
            num_decode_rows=0,
            groups=(
                GroupMetadata(
                    block_tables=torch.tensor([[0]], dtype=torch.int32),
                    slot_mapping=torch.arange(length),
                ),
            ),
        ),
        row_state={key: torch.tensor([value]) for key, value in row_state.items()},
    )


@torch.inference_mode()
def test_real_ids_give_the_original_tokens_and_logits() -> None:
    name = "chatglm1-realids"
    expected = json.loads((GOLDEN / name / "expected.json").read_text())
    tensors = load_file(GOLDEN / name / "expected.safetensors")
    prompts = expected["prompts"]
    settings = {"max_model_len": 160, "skip_tokenizer_init": True, "dtype": "float32"}
    with LLM(str(GOLDEN / name), **settings) as llm:
        outputs = llm.generate(
            [p["input_ids"] for p in prompts],
            SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
        )
    assert [o.outputs[0].token_ids for o in outputs] == [p["new_tokens"] for p in prompts]

    model, config, processor = load(name)
    shown = expected["logits_token_ids"]
    for p in prompts:
        processed = processor.process(p["input_ids"])
        context = step_context([*p["input_ids"], *p["new_tokens"][:-1]], processed.row_state)
        shape = (1, len(context.row_ids), config.num_key_value_heads, config.head_dim)
        cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_layers)]
        hidden = model(**model.prepare_inputs_for_generation(cache, None, context))
        logits = model.get_logits(hidden[0])
        prefill, steps = logits[: len(p["input_ids"])], logits[-16:]
        for got, key in ((prefill, "prefill_logits_sub"), (steps, "step_logits_sub")):
            torch.testing.assert_close(got[:, shown], tensors[p[key]], atol=1e-4, rtol=0)


def test_positions_are_those_of_the_original_code() -> None:
    model, _, processor = load("chatglm1-tiny")
    prompts = json.loads((GOLDEN / "chatglm1-tiny" / "expected.json").read_text())["prompts"]
    for p in prompts:
        processed = processor.process(p["input_ids"])
        context = step_context(p["input_ids"], processed.row_state)
        inputs = model.prepare_inputs_for_generation([], None, context)
        wanted = [p["position_ids"], p["block_position_ids"]]
        assert inputs["position_ids"].tolist() == wanted, p["name"]
        assert inputs["attn_metadata"].prefix_lens.tolist() == [p["input_ids"].index(BOS)]


@pytest.mark.parametrize("name", ["chatglm1-tiny", *CAUSAL])
def test_inputs_are_prepared_without_reading_a_value(name: str) -> None:
    """On the meta device there are no values, so that a CUDA graph could hold it all."""
    model, _, _ = load(name)
    with torch.device("meta"):
        context = step_context([1] * 5, {"mask_pos": 0, "context_len": 0})
        inputs = model.prepare_inputs_for_generation([], None, context)
    assert inputs["position_ids"].is_meta
    assert inputs["position_ids"].shape == ((2, 5) if name == "chatglm1-tiny" else (1, 5))
