"""The golden fixtures: checkpoints with the outputs of each family's original code.

A family's tests run each of its fixtures under :data:`SETTINGS` with :func:`check_generation`, and
with :func:`check_prefix_cache` and :func:`check_preemption`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine_core import LLM, Logprob, RequestOutput, SamplingParams

GOLDEN = Path(__file__).parent / "golden"

# What an engine may do to a request: none of it may show in the tokens or the logits.
SETTINGS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "one-by-one": {"max_num_seqs": 1},
    "blocks-of-1": {"block_size": 1},
    "blocks-of-7": {"block_size": 7},
    "chunks-of-8": {"max_num_seqs": 4, "max_num_batched_tokens": 8},
    "no-prefix-cache": {"enable_prefix_caching": False},
}


def with_settings(fixtures: Sequence[str], settings: Mapping[str, Any] = SETTINGS) -> list[Any]:
    """Cases of a fixture's name and settings: all, of which most are for ``make soak``.

    Each fixture is tried as it is and each of the settings with one fixture, in turn: what settings
    do is the engine's business, which is the same for all.
    """
    plain, *others = settings
    kept = {(name, plain) for name in fixtures}
    kept |= {(fixtures[i % len(fixtures)], other) for i, other in enumerate(others)}
    return [
        pytest.param(name, each, id=f"{name}-{how}", marks=_long_unless((name, how) in kept))
        for name in fixtures
        for how, each in settings.items()
    ]


def some_of(fixtures: Sequence[str], *kept: str) -> list[Any]:
    """Cases of a fixture's name: all, of which ``make test`` tries those that are ``kept``."""
    assert set(kept) < set(fixtures), kept
    return [pytest.param(name, marks=_long_unless(name in kept)) for name in fixtures]


def _long_unless(kept: bool) -> Collection[pytest.MarkDecorator]:
    return () if kept else (pytest.mark.long,)


@dataclass(frozen=True)
class GoldenPrompt:
    name: str
    input_ids: list[int]
    new_tokens: list[int]
    prefill_logits: torch.Tensor  # [prompt length, vocab]
    step_logits: torch.Tensor  # [16, vocab]


@functools.cache
def golden_prompts(name: str) -> list[GoldenPrompt]:
    folder = GOLDEN / name
    expected = json.loads((folder / "expected.json").read_text())
    tensors = load_file(folder / "expected.safetensors")
    return [
        GoldenPrompt(
            name=prompt["name"],
            input_ids=prompt["input_ids"],
            new_tokens=prompt["new_tokens"],
            prefill_logits=tensors[prompt["prefill_logits"]],
            step_logits=tensors[prompt["step_logits"]],
        )
        for prompt in expected["prompts"]
    ]


def golden_llm(name: str, **settings: Any) -> LLM:
    if settings.get("tensor_parallel_size", 1) > max(1, torch.cuda.device_count()):
        settings = {"device": "cpu", **settings}
    # Long enough for the longest prompt; for dynamic NTK that is beyond the config's own length.
    return LLM(str(GOLDEN / name), skip_tokenizer_init=True, max_model_len=160, **settings)


def greedy_params(name: str, *, with_prompt: bool = False) -> SamplingParams:
    """Greedy decoding that reports the whole vocabulary at each step, and of the prompt if asked.

    A prompt whose rows are all wanted reads nothing from the prefix cache.
    """
    vocab = golden_prompts(name)[0].step_logits.shape[-1]
    return SamplingParams(
        temperature=0.0,
        max_tokens=16,
        ignore_eos=True,
        logprobs=vocab,
        prompt_logprobs=vocab if with_prompt else None,
    )


def check_output(output: RequestOutput, prompt: GoldenPrompt) -> None:
    """The same tokens, and logits within 1e-4."""
    completion = output.outputs[0]
    assert completion.token_ids == prompt.new_tokens, prompt.name
    assert completion.finish_reason == "length"
    # Log-softmax only shifts a row, so this holds the logits to the same tolerance.
    _assert_close(completion.logprobs, prompt.step_logits)
    if output.prompt_logprobs is not None and len(prompt.input_ids) > 1:
        assert output.prompt_logprobs[0] is None
        _assert_close(output.prompt_logprobs[1:], prompt.prefill_logits[:-1])


def assert_nearly(found: Mapping[int, Logprob], logits: torch.Tensor) -> None:
    """Log-probabilities of the whole vocabulary with int8 weights, beside ``logits [vocab]``.

    8 bits of a weight keep its product to some 1%: a tenth of what random weights tell apart.
    """
    wanted = logits.log_softmax(-1)
    got = torch.tensor([found[token].logprob for token in range(len(wanted))])
    assert 0 < (got - wanted).abs().mean() < 0.15 * wanted.std()


def check_int8(name: str) -> None:
    """With int8 weights on a CPU log-probabilities are nearly the same, while the tokens are."""
    prompts = golden_prompts(name)
    with golden_llm(name, quantization="int8", device="cpu") as llm:
        outputs = llm.generate([prompt.input_ids for prompt in prompts], greedy_params(name))
    for output, prompt in zip(outputs, prompts, strict=True):
        found = output.outputs[0]
        same = 0
        while same < len(found.token_ids) and found.token_ids[same] == prompt.new_tokens[same]:
            same += 1
        # The second comes from a step in which every row decodes.
        assert same > 1, prompt.name
        for step, logits in zip(found.logprobs[:same], prompt.step_logits, strict=False):
            assert_nearly(step, logits)


def check_generation(name: str, settings: Mapping[str, Any]) -> None:
    """All prompts of a fixture at once, in one engine."""
    prompts = golden_prompts(name)
    with golden_llm(name, **settings) as llm:
        outputs = llm.generate(
            [prompt.input_ids for prompt in prompts], greedy_params(name, with_prompt=True)
        )
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt_logprobs is not None
        check_output(output, prompt)


def check_prefix_cache(name: str, **settings: Any) -> None:
    """A second run, from the prefix cache, is the same."""
    prompts = golden_prompts(name)
    with golden_llm(name, block_size=4, **settings) as llm:
        llm.generate([prompt.input_ids for prompt in prompts], greedy_params(name))
        for prompt in prompts:
            (output,) = llm.generate(prompt.input_ids, greedy_params(name))
            expected = (len(prompt.input_ids) - 1) // 4 * 4
            assert output.metrics.num_cached_tokens == expected, prompt.name
            check_output(output, prompt)


def check_preemption(name: str, copies: int = 3) -> None:
    """Requests that lost their cache blocks on the way end the same; ``copies`` of each prompt."""
    prompts = golden_prompts(name)
    with golden_llm(name, block_size=4) as llm:
        plan = llm.engine.cache_plan
    # Blocks of 4 for one sequence of 160 tokens, so that running together they must preempt.
    memory = plan.bytes_per_block * (1 + plan.cache_config.max_blocks(160, 256))
    settings = {"block_size": 4, "kv_cache_memory": memory, "max_num_batched_tokens": 256}
    with golden_llm(name, **settings) as llm:
        outputs = llm.generate([p.input_ids for p in prompts] * copies, greedy_params(name))
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for output, prompt in zip(outputs, list(prompts) * copies, strict=True):
        check_output(output, prompt)


def _assert_close(entries: list[dict[int, Any]], logits: torch.Tensor) -> None:
    """``entries`` report every token of a row; ``logits [rows, vocab]``."""
    reported = torch.full_like(logits, torch.nan)
    tokens = torch.tensor([list(entry) for entry in entries])
    values = [[value.logprob for value in entry.values()] for entry in entries]
    reported.scatter_(1, tokens, torch.tensor(values, dtype=reported.dtype))
    torch.testing.assert_close(reported, logits.log_softmax(-1), atol=1e-4, rtol=0)
