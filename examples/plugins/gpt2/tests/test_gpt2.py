"""A tiny random GPT-2 through the whole engine, against transformers' GPT2LMHeadModel."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config
from transformers import GPT2LMHeadModel as Reference

from engine_core import LLM, SamplingParams
from engine_core.configs import HFConfig
from engine_core.errors import ConfigError
from engine_core.registry import build_registry

VOCAB, LONGEST, NEW_TOKENS = 101, 64, 12
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=VOCAB, prompt_logprobs=VOCAB
)


@dataclass(frozen=True)
class Prompt:
    """Token ids, and what transformers makes of them, computed anew at each step."""

    token_ids: list[int]
    continuation: list[int]
    logits: torch.Tensor  # [prompt length + NEW_TOKENS - 1, VOCAB]


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    prompts: list[Prompt]


def expected(model: Reference, token_ids: list[int]) -> Prompt:
    sequence = list(token_ids)
    for _ in range(NEW_TOKENS):
        logits = model(torch.tensor([sequence]), use_cache=False).logits[0]
        sequence.append(int(logits[-1].argmax()))
    return Prompt(token_ids, sequence[len(token_ids) :], logits)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=48,
        n_layer=3,
        n_head=4,
        n_positions=LONGEST,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    model = Reference(config).eval()
    # Fresh biases are zero and fresh norms one: then no test could tell them apart.
    with torch.inference_mode():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
        folder = tmp_path_factory.mktemp("gpt2")
        model.save_pretrained(folder)
        generator = torch.Generator().manual_seed(1)
        prompts = [
            expected(model, torch.randint(0, VOCAB, (length,), generator=generator).tolist())
            for length in (1, 9, 17, LONGEST - NEW_TOKENS)
        ]
    return Checkpoint(folder, prompts)


def check(folder: Path, prompts: list[Prompt], **settings: Any) -> None:
    """All prompts in one batch: the same tokens, and every logit within 1e-4."""
    with LLM(str(folder), skip_tokenizer_init=True, **settings) as llm:
        outputs = llm.generate([prompt.token_ids for prompt in prompts], PARAMS)
    for output, prompt in zip(outputs, prompts, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == prompt.continuation
        rows = [*output.prompt_logprobs[1:], *completion.logprobs]
        reported = torch.tensor([[row[token].logprob for token in range(VOCAB)] for row in rows])
        torch.testing.assert_close(reported, prompt.logits.log_softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 4, "max_num_batched_tokens": 8},
        {"block_size": 7},
        {"enable_prefix_caching": False},
    ],
    ids=["batched", "one-by-one", "chunks-of-8", "blocks-of-7", "no-prefix-cache"],
)
def test_tokens_and_logits_are_those_of_transformers(
    checkpoint: Checkpoint, settings: dict[str, Any]
) -> None:
    check(checkpoint.folder, checkpoint.prompts, **settings)


def test_a_second_run_from_the_prefix_cache_is_the_same(checkpoint: Checkpoint) -> None:
    prompt = checkpoint.prompts[2]
    params = PARAMS.replace(prompt_logprobs=None)
    with LLM(str(checkpoint.folder), skip_tokenizer_init=True, block_size=4) as llm:
        [first] = llm.generate(prompt.token_ids, params)
        [second] = llm.generate(prompt.token_ids, params)
    assert first.metrics.num_cached_tokens == 0
    assert second.metrics.num_cached_tokens == 16
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == prompt.continuation


def rewritten(checkpoint: Checkpoint, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((checkpoint.folder / "config.json").read_bytes())
    return folder


def test_names_without_prefix_and_stored_masks_are_read(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """As the first published checkpoints are."""
    stored = load_file(checkpoint.folder / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    assert "h.0.attn.c_attn.weight" in tensors
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, LONGEST, LONGEST).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    check(rewritten(checkpoint, tmp_path, tensors), checkpoint.prompts)


def test_a_head_of_its_own_is_read_if_the_config_says_so(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    tensors = load_file(checkpoint.folder / "model.safetensors")
    # Rows in another order give the same logits in that order.
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"][order]
    folder = str(rewritten(checkpoint, tmp_path, tensors))
    with pytest.raises(ConfigError, match=r"they differ; set tie_word_embeddings to false"):
        LLM(folder, skip_tokenizer_init=True)
    prompt = checkpoint.prompts[1]
    params = PARAMS.replace(max_tokens=1, prompt_logprobs=None)
    untied = {"tie_word_embeddings": False}
    with LLM(folder, skip_tokenizer_init=True, hf_overrides=untied) as llm:
        [output] = llm.generate(prompt.token_ids, params)
    assert order[output.outputs[0].token_ids[0]] == prompt.continuation[0]


def test_learned_positions_end(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=f"max_model_len {LONGEST + 1} is above the {LONGEST}"):
        LLM(str(checkpoint.folder), skip_tokenizer_init=True, max_model_len=LONGEST + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"n_head": None}, "num_attention_heads"),
        ({"n_positions": 0}, "max_position_embeddings"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(
    checkpoint: Checkpoint, change: dict[str, Any], message: str
) -> None:
    values = json.loads((checkpoint.folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        build_registry(plugin_errors="strict").model_config(HFConfig(values, **change))


def test_the_config_means_what_transformers_reads() -> None:
    """The small GPT-2's config, as published in 2019."""
    published = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    theirs = GPT2Config(**published)
    config = build_registry(plugin_errors="strict").model_config(HFConfig(published))
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.num_layers == theirs.num_hidden_layers
    assert config.num_attention_heads == theirs.num_attention_heads
    assert config.hf_config.layer_norm_epsilon == theirs.layer_norm_epsilon
    assert config.hf_config.intermediate_size == 4 * theirs.hidden_size
