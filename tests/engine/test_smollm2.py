"""A real model through the whole engine, against transformers on the same dequantised weights."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_core import LLM, EngineConfig, SamplingParams

REFERENCE = Path(__file__).parent.parent / "references" / "smollm2_greedy.json"
NEAR_TIE = 1e-3
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    config = EngineConfig(
        dtype="float32", quantization="unpacked", kv_cache_memory="1GiB", max_model_len=2048
    )
    with LLM(str(smollm2_gguf), config) as llm:
        yield llm


@pytest.mark.parametrize(
    ("count", "length"), [(4, 32), pytest.param(32, 64, marks=pytest.mark.long)]
)
def test_greedy_tokens_are_those_of_transformers(llm: LLM, count: int, length: int) -> None:
    """All prompts in one batch; after a step where the two best nearly tie, either may follow."""
    reference = json.loads(REFERENCE.read_text(encoding="utf-8"))["prompts"]
    assert len(reference) == 32
    reference = reference[:: 32 // count]
    params = GREEDY.replace(max_tokens=length)
    outputs = llm.generate([entry["prompt"] for entry in reference], params)
    ties = []
    for entry, output in zip(reference, outputs, strict=True):
        assert output.prompt_token_ids == entry["prompt_token_ids"]
        ours, theirs = output.outputs[0].token_ids, entry["token_ids"][:length]
        differing = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
        if not differing:
            assert len(ours) == len(theirs), entry["prompt"]
            continue
        step = differing[0]
        assert entry["margins"][step] < NEAR_TIE, (entry["prompt"], step, entry["margins"][step])
        assert ours[step] == entry["runner_up_ids"][step]
        ties.append((entry["prompt"], step))
    steps = sum(len(entry["token_ids"][:length]) for entry in reference)
    assert len(ties) <= steps // 100, f"near ties that went the other way: {ties}"


def test_a_question_is_answered_in_text_and_the_stream_adds_up_to_it(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    (whole,) = llm.chat(messages, GREEDY)
    completion = whole.outputs[0]
    assert "Paris" in completion.text
    assert completion.finish_reason == "stop"
    assert "<|im_end|>" not in completion.text
    texts = [output.outputs[0].text for output in llm.stream_chat(messages, GREEDY)]
    assert texts[-1] == completion.text
    assert all(late.startswith(early) for early, late in itertools.pairwise(texts))
    assert len(set(texts)) > 3


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    prompt = "1, 2, 3, 4, 5, 6,"
    params = GREEDY.replace(max_tokens=20)
    (free,) = llm.generate(prompt, params)
    assert " 9" in free.outputs[0].text
    (cut,) = llm.generate(prompt, params.replace(stop="9,"))
    completion = cut.outputs[0]
    assert completion.text == free.outputs[0].text.split("9,")[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "9,")
    count = len(completion.token_ids)
    assert completion.token_ids == free.outputs[0].token_ids[:count]


def test_logprobs_carry_their_text(llm: LLM) -> None:
    (output,) = llm.generate(
        "The capital of France is", GREEDY.replace(max_tokens=1, logprobs=2, prompt_logprobs=0)
    )
    (entry,) = output.outputs[0].logprobs
    assert entry[output.outputs[0].token_ids[0]].decoded_token == " Paris"
    tokens = [next(iter(e.values())).decoded_token for e in output.prompt_logprobs[1:]]
    assert tokens == [" capital", " of", " France", " is"]
