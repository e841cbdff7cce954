"""Overrides of rotary positions on a checkpoint as transformers 5 saves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as Reference

from engine_core import LLM, SamplingParams
from engine_core.errors import ConfigError

VOCAB, LENGTH = 160, 64
IDS = list(range(3, 43))
LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose config has its base in ``rope_parameters``, and nothing beside it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )
    Reference(config).save_pretrained(folder)
    return folder


def reference_logprobs(folder: Path, rope: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities ``[prompt, vocabulary]`` with other rotary positions than the config's."""
    config = LlamaConfig.from_pretrained(folder)
    config.rope_parameters = rope
    model = Reference.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return logprobs


OVERRIDES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {"rope_type": "default", "rope_theta": 700.0}),
    "scaling": ({"rope_scaling": LINEAR}, {**LINEAR, "rope_theta": 700.0}),
    "older type": (
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {**LINEAR, "rope_theta": 700.0},
    ),
    "parameters": ({"rope_parameters": LINEAR}, {**LINEAR, "rope_theta": 700.0}),
    "base": ({"rope_theta": 90.0}, {"rope_type": "default", "rope_theta": 90.0}),
    "both": ({"rope_theta": 90.0, "rope_scaling": LINEAR}, {**LINEAR, "rope_theta": 90.0}),
}


@pytest.mark.parametrize(("overrides", "rope"), OVERRIDES.values(), ids=OVERRIDES.keys())
def test_an_override_takes_effect_under_whichever_name(
    folder: Path, overrides: dict[str, Any], rope: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=VOCAB)
    with LLM(str(folder), skip_tokenizer_init=True, dtype="float32", hf_overrides=overrides) as llm:
        (output,) = llm.generate([IDS], params)
    expected = reference_logprobs(folder, rope)
    assert output.prompt_logprobs is not None
    for position, row in enumerate(output.prompt_logprobs[1:]):
        assert row is not None
        ours = torch.tensor([row[token].logprob for token in range(VOCAB)])
        torch.testing.assert_close(ours, expected[position], atol=1e-4, rtol=1e-4)


def test_a_scaling_that_is_given_stretches_the_model(folder: Path) -> None:
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 4 * LENGTH}
    with pytest.raises(ConfigError, match="or stretch the model with a rope_scaling of type"):
        LLM(str(folder), **settings)
    with LLM(str(folder), hf_overrides={"rope_scaling": LINEAR}, **settings) as llm:
        assert llm.engine.max_model_len == 4 * LENGTH
    with pytest.raises(ConfigError, match="max_model_len 257 is above the 256 tokens"):
        LLM(
            str(folder),
            hf_overrides={"rope_scaling": LINEAR},
            **{**settings, "max_model_len": 4 * LENGTH + 1},
        )
