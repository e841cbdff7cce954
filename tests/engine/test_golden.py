"""The llama fixtures through the whole engine, against the original code's outputs."""

from __future__ import annotations

import functools

import pytest
import torch
from golden_fixtures import GOLDEN, GoldenPrompt, golden_prompts

from engine_core import LLM, RequestOutput, SamplingParams

FIXTURES = [
    "llama-bias-linear",
    "llama-dynamic",
    "llama-gqa",
    "llama-tied-llama3",
    "llama-yarn",
]
VOCAB = 320
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=VOCAB, prompt_logprobs=VOCAB
)

# What an engine may do to a request: none of it may show in the tokens or the logits.
SETTINGS = {
    "default": {},
    "one-by-one": {"max_num_seqs": 1},
    "blocks-of-1": {"block_size": 1},
    "blocks-of-7": {"block_size": 7},
    "chunks-of-8": {"max_num_seqs": 4, "max_num_batched_tokens": 8},
    "no-prefix-cache": {"enable_prefix_caching": False},
}


@functools.cache
def fixture(name: str) -> list[GoldenPrompt]:
    return golden_prompts(name)


def engine(name: str, **settings: object) -> LLM:
    # Long enough for the longest prompt; for dynamic NTK that is beyond the config's own length.
    return LLM(str(GOLDEN / name), skip_tokenizer_init=True, max_model_len=160, **settings)


def reported(entries: list) -> torch.Tensor:
    """``[rows, vocab]`` from mappings that report every token."""
    rows = torch.empty(len(entries), VOCAB)
    for row, entry in zip(rows, entries, strict=True):
        row[list(entry)] = torch.tensor([value.logprob for value in entry.values()])
    return rows


def check(output: RequestOutput, prompt: GoldenPrompt) -> None:
    completion = output.outputs[0]
    assert completion.token_ids == prompt.new_tokens, prompt.name
    assert completion.finish_reason == "length"
    # Log-softmax only shifts a row, so this holds the logits to the same tolerance.
    expected = prompt.step_logits.log_softmax(-1)
    torch.testing.assert_close(reported(completion.logprobs), expected, atol=1e-4, rtol=0)
    if output.prompt_logprobs is not None and len(prompt.input_ids) > 1:
        assert output.prompt_logprobs[0] is None
        expected = prompt.prefill_logits[:-1].log_softmax(-1)
        torch.testing.assert_close(
            reported(output.prompt_logprobs[1:]), expected, atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("name", FIXTURES)
def test_tokens_and_logits_are_those_of_the_original_code(name: str, settings: dict) -> None:
    prompts = fixture(name)
    with engine(name, **settings) as llm:
        outputs = llm.generate([prompt.input_ids for prompt in prompts], GREEDY)
    for output, prompt in zip(outputs, prompts, strict=True):
        check(output, prompt)


@pytest.mark.parametrize("name", FIXTURES)
def test_a_second_run_from_the_prefix_cache_is_the_same(name: str) -> None:
    prompts = fixture(name)
    params = GREEDY.replace(prompt_logprobs=None)
    with engine(name, block_size=4) as llm:
        llm.generate([prompt.input_ids for prompt in prompts], params)
        for prompt in prompts:
            (output,) = llm.generate(prompt.input_ids, params)
            expected = (len(prompt.input_ids) - 1) // 4 * 4
            assert output.metrics.num_cached_tokens == expected, prompt.name
            check(output, prompt)


@pytest.mark.parametrize("name", FIXTURES)
def test_preempted_requests_are_the_same(name: str) -> None:
    prompts = fixture(name)
    params = GREEDY.replace(prompt_logprobs=None)
    with engine(name) as llm:
        one_token = llm.engine.cache_plan.bytes_per_block // 16
    # 40 blocks of 4 hold one sequence of 160 tokens, so that running together they must preempt.
    memory = one_token * 4 * 41
    with engine(name, block_size=4, kv_cache_memory=memory, max_num_batched_tokens=256) as llm:
        outputs = llm.generate([prompt.input_ids for prompt in prompts] * 3, params)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for output, prompt in zip(outputs, list(prompts) * 3, strict=True):
        check(output, prompt)


def test_dynamic_rope_shares_no_blocks_between_prompts_of_other_lengths() -> None:
    """Beyond the trained length the angles depend on the prompt's length."""
    long = next(p for p in fixture("llama-dynamic") if p.name == "long")
    params = GREEDY.replace(prompt_logprobs=None)
    with engine("llama-dynamic", block_size=4) as llm:
        llm.generate(long.input_ids[:120], params)
        (output,) = llm.generate(long.input_ids, params)
    assert output.metrics.num_cached_tokens == 0
    check(output, long)
