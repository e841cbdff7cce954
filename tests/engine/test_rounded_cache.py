"""Caches of 8 bits in whole engines, against transformers with keys and values rounded alike."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from golden_fixtures import GOLDEN, golden_llm, golden_prompts
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from engine_core import LLM, RequestOutput, SamplingParams
from engine_core.testing.reference import cache_argument

# Grouped heads; ALiBi; soft caps and windows; windows alone.
FAMILIES = ["llama-gqa", "bloom-6heads", "gemma2-caps", "qwen2-swa"]


class RoundedCache(DynamicCache):
    """Keys and values of each token and head, rounded to 8 bits."""

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name = name

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Keep ``[B, heads, T, D]``."""
        return super().update(self._rounded(keys), self._rounded(values), *args, **kwargs)

    def _rounded(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / (127 if self.name == "int8" else 448)
        codes = x / scale
        rounded = codes.round() if self.name == "int8" else codes.to(torch.float8_e4m3fn).float()
        return scale * rounded


@functools.cache
def expected(name: str, dtype: str) -> list[Tensor]:
    """Log-probabilities ``[tokens, vocab]`` of prompts and what the original code added."""
    model = AutoModelForCausalLM.from_pretrained(
        GOLDEN / name, dtype=torch.float32, attn_implementation="eager"
    )
    found = []
    for prompt in golden_prompts(name):
        ids = torch.tensor([prompt.input_ids + prompt.new_tokens])
        held = RoundedCache(dtype, config=model.config)
        with torch.inference_mode():
            logits = model(ids, **{cache_argument(model): held}).logits
            found.append(logits[0].float().log_softmax(-1))
    return found


def computed(output: RequestOutput) -> Tensor:
    """Log-probabilities of the prompt but for its last token, of all tokens."""
    entries = output.prompt_logprobs
    assert entries is not None
    return rows_of(entries[1:])


def rows_of(entries: list[Any]) -> Tensor:
    """``[tokens, vocab]`` of what an engine reports."""
    return torch.tensor([[entry[i].logprob for i in range(len(entry))] for entry in entries])


def whole(name: str, llm: LLM) -> list[RequestOutput]:
    vocab = golden_prompts(name)[0].step_logits.shape[-1]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=vocab)
    return llm.generate([p.input_ids + p.new_tokens for p in golden_prompts(name)], params)


def distance(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The mean difference of log-probabilities, over the rows that both have."""
    pairs = zip(got, wanted, strict=True)
    return torch.cat([(a[: len(b)] - b[: len(a)]).abs().flatten() for a, b in pairs]).mean().item()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        # Each with one of them, in turn.
        pytest.param(name, dtype, marks=() if i % 2 == j else pytest.mark.long)
        for i, name in enumerate(FAMILIES)
        for j, dtype in enumerate(("int8", "fp8"))
    ],
)
def test_logits_are_those_of_rounded_keys_and_values(name: str, dtype: str) -> None:
    """However prompts are chunked: all tokens see what is in the cache."""
    exact = [prompt.prefill_logits.log_softmax(-1) for prompt in golden_prompts(name)]
    for settings in ({}, {"max_num_seqs": 4, "max_num_batched_tokens": 8}):
        with golden_llm(name, kv_cache_dtype=dtype, **settings) as llm:
            got = [computed(output) for output in whole(name, llm)]
        # A number between two codes may become either, by the last bit of a float32.
        assert distance(got, expected(name, dtype)) < distance(got, exact) / 50
