"""A small random Mistral through the whole engine, against transformers' MistralForCausalLM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_fixtures import SETTINGS, GoldenPrompt, check_output
from transformers import MistralConfig
from transformers import MistralForCausalLM as Reference

from engine_core import LLM, SamplingParams

VOCAB = 160
NEW_TOKENS = 16
WINDOWS = {"window-of-12": 12, "no-window": None}


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    prompts: list[GoldenPrompt]


def reference_prompt(model: Reference, ids: list[int]) -> GoldenPrompt:
    """Greedy decoding that computes the whole sequence anew at each step."""
    sequence, rows = list(ids), []
    with torch.inference_mode():
        prefill = model(torch.tensor([ids]), use_cache=False).logits[0]
        for _ in range(NEW_TOKENS):
            rows.append(model(torch.tensor([sequence]), use_cache=False).logits[0, -1])
            sequence.append(int(rows[-1].argmax()))
    return GoldenPrompt(
        name=f"{len(ids)} tokens",
        input_ids=ids,
        new_tokens=sequence[len(ids) :],
        prefill_logits=prefill,
        step_logits=torch.stack(rows),
    )


@pytest.fixture(scope="module", params=WINDOWS.values(), ids=WINDOWS.keys())
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    torch.manual_seed(0)
    model = Reference(
        MistralConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=256,
            sliding_window=request.param,
            initializer_range=0.3,
            attn_implementation="eager",
        )
    ).eval()
    folder = tmp_path_factory.mktemp("mistral")
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        reference_prompt(model, torch.randint(3, VOCAB, (length,), generator=generator).tolist())
        for length in (1, 11, 12, 50)
    ]
    return Checkpoint(folder, prompts)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_tokens_and_logits_are_those_of_transformers(
    checkpoint: Checkpoint, settings: dict[str, Any]
) -> None:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        logprobs=VOCAB,
        prompt_logprobs=VOCAB,
    )
    with LLM(str(checkpoint.folder), skip_tokenizer_init=True, **settings) as llm:
        outputs = llm.generate([prompt.input_ids for prompt in checkpoint.prompts], params)
    for output, prompt in zip(outputs, checkpoint.prompts, strict=True):
        check_output(output, prompt)
