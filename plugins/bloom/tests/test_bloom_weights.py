"""Which tensors a BLOOM checkpoint may have, and what becomes of wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from golden_fixtures import GOLDEN, check_output, golden_prompts, greedy_params
from safetensors.torch import load_file, save_file

from engine_core import LLM
from engine_core.errors import ConfigError, WeightsMismatchError

NAME = "bloom-6heads"


def copy_checkpoint(
    folder: Path, tensors: dict[str, torch.Tensor], **changes: object
) -> dict[str, torch.Tensor]:
    config = json.loads((GOLDEN / NAME / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def golden_tensors() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / NAME / "model.safetensors")


def check_golden(folder: Path) -> None:
    prompts = golden_prompts(NAME)[:2]
    with LLM(str(folder), skip_tokenizer_init=True, max_model_len=160) as llm:
        outputs = llm.generate([prompt.input_ids for prompt in prompts], greedy_params(NAME))
    for output, prompt in zip(outputs, prompts, strict=True):
        check_output(output, prompt)


def test_a_checkpoint_saved_without_head_is_a_language_model(tmp_path: Path) -> None:
    copy_checkpoint(
        tmp_path,
        {name.removeprefix("transformer."): tensor for name, tensor in golden_tensors().items()},
        architectures=["BloomModel"],
    )
    check_golden(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_stored_copy_of_the_tied_head_is_accepted(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = golden_tensors()
    head = tensors["transformer.word_embeddings.weight"].to(dtype, copy=True)
    copy_checkpoint(tmp_path, {**tensors, "lm_head.weight": head})
    check_golden(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_head_that_is_tied_and_another_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = golden_tensors()
    head = tensors["transformer.word_embeddings.weight"].to(dtype, copy=True)
    head[-1, -1] += 1.0
    copy_checkpoint(tmp_path, {**tensors, "lm_head.weight": head})
    with pytest.raises(
        ConfigError, match=r"lm_head\.weight .*they differ; set tie_word_embeddings"
    ):
        LLM(str(tmp_path), skip_tokenizer_init=True)


def test_a_tied_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    tensors = golden_tensors()
    head = tensors["transformer.word_embeddings.weight"][:-1].clone()
    copy_checkpoint(tmp_path, {**tensors, "lm_head.weight": head})
    with pytest.raises(
        ConfigError, match=r"lm_head\.weight .*they differ; set tie_word_embeddings"
    ):
        LLM(str(tmp_path), skip_tokenizer_init=True)


def test_an_untied_head_is_read(tmp_path: Path) -> None:
    tensors = golden_tensors()
    head = tensors["transformer.word_embeddings.weight"]
    # Rows in another order give the same logits in that order.
    order = torch.randperm(len(head), generator=torch.Generator().manual_seed(0))
    copy_checkpoint(tmp_path, {**tensors, "lm_head.weight": head[order]}, tie_word_embeddings=False)
    prompt = golden_prompts(NAME)[1]
    params = greedy_params(NAME).replace(max_tokens=1)
    with LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=160) as llm:
        (output,) = llm.generate(prompt.input_ids, params)
    assert order[output.outputs[0].token_ids[0]] == prompt.new_tokens[0]


def test_a_missing_head_that_is_not_tied_is_reported(tmp_path: Path) -> None:
    copy_checkpoint(tmp_path, golden_tensors(), tie_word_embeddings=False)
    said = r"missing: lm_head\.weight; check .*, and that no shard is missing"
    with pytest.raises(WeightsMismatchError, match=said):
        LLM(str(tmp_path), skip_tokenizer_init=True)


def test_a_fused_tensor_of_the_wrong_size_is_reported(tmp_path: Path) -> None:
    tensors = golden_tensors()
    name = "transformer.h.1.self_attention.query_key_value.weight"
    tensors[name] = tensors[name][:-3].clone()
    copy_checkpoint(tmp_path, tensors)
    with pytest.raises(WeightsMismatchError, match="query_key_value") as caught:
        LLM(str(tmp_path), skip_tokenizer_init=True)
    assert "[285, 96]" in caught.value.wrong[0]
    assert "288 rows" in caught.value.wrong[0]


def test_sequences_may_be_longer_than_the_trained_length(tmp_path: Path) -> None:
    copy_checkpoint(tmp_path, golden_tensors(), seq_length=8)
    with LLM(str(tmp_path), skip_tokenizer_init=True) as llm:
        assert llm.engine.cache_plan.max_model_len == 8
    check_golden(tmp_path)
