"""The golden fixtures on a GPU, in float32: the same tokens, logits within 1e-4."""

import pytest
from golden_fixtures import (
    SETTINGS,
    check_generation,
    check_prefix_cache,
    golden_llm,
    golden_prompts,
)

from engine_core import SamplingParams

pytestmark = pytest.mark.gpu

FIXTURES = [
    "llama-bias-linear",
    "llama-dynamic",
    "llama-gqa",
    "llama-tied-llama3",
    "llama-yarn",
    "qwen2-gqa",
    "qwen2-swa",
    "qwen2-tied-nowindow",
    "qwen3-tiny",
    "bloom-6heads",
    "bloom-postln",
    "bloom-pow2",
]


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("settings", ["default", "blocks-of-7", "chunks-of-8"])
def test_tokens_and_logits_are_those_of_the_original_code(name: str, settings: str) -> None:
    check_generation(name, {**SETTINGS[settings], "device": "cuda"})


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-swa"])
def test_a_second_run_from_the_prefix_cache_is_the_same(name: str) -> None:
    check_prefix_cache(name, device="cuda")


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", FIXTURES)
def test_plain_greedy_decoding_gives_the_tokens(name: str, eager: bool) -> None:
    """Without logprobs, tokens are chosen inside the captured step and fetched late."""
    prompts = golden_prompts(name)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with golden_llm(name, device="cuda", eager=eager, block_size=4, max_num_seqs=20) as llm:
        outputs = llm.generate([p.input_ids for p in prompts] * 3, params)
    for output, prompt in zip(outputs, prompts * 3, strict=True):
        assert output.outputs[0].token_ids == prompt.new_tokens


def test_graphs_change_nothing_of_random_sampling() -> None:
    prompt = golden_prompts("llama-gqa")[2]
    params = SamplingParams(seed=3, max_tokens=30, n=5, repetition_penalty=1.2, top_p=0.9)
    tokens = []
    for eager in (False, True):
        with golden_llm("llama-gqa", device="cuda", eager=eager) as llm:
            (output,) = llm.generate(prompt.input_ids, params)
            tokens.append([completion.token_ids for completion in output.outputs])
    assert tokens[0] == tokens[1]


def test_stopping_late_loses_and_adds_nothing() -> None:
    """The end is found out after more steps were submitted."""
    prompts = golden_prompts("llama-gqa")
    with golden_llm("llama-gqa", device="cuda", max_num_seqs=4) as llm:
        for _ in range(2):
            stops = [prompt.new_tokens[index % 7] for index, prompt in enumerate(prompts)]
            params = [
                SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, stop_token_ids=(s,))
                for s in stops
            ]
            outputs = llm.generate([prompt.input_ids for prompt in prompts], params)
            for output, prompt, stop in zip(outputs, prompts, stops, strict=True):
                end = prompt.new_tokens.index(stop) + 1
                assert output.outputs[0].token_ids == prompt.new_tokens[:end]
        llm.engine.scheduler.check()
