"""Decoders as embedders: last-token and mean pooling over chunks, with a head or without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoint_files import write_llama_gguf
from golden_fixtures import GOLDEN
from safetensors.torch import load_file, save_file
from tiny_bert import states, write_modules
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

from engine_core import LLM, EngineConfig, PoolingParams, SamplingParams
from engine_core.check import check_model
from engine_core.engine.export import export_model
from engine_core.errors import ConfigError, RequestError, WeightsMismatchError

LENGTHS = [1, 5, 40, 23, 2, 64, 17, 40]
NAMES = ["qwen3-tiny", "llama-gqa", "llama-tied-llama3", "bloom-pow2"]


def prompts(vocab_size: int) -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(0, vocab_size, size=size).tolist() for size in LENGTHS]


def reference(name: str) -> tuple[Any, list[list[int]]]:
    model = AutoModel.from_pretrained(GOLDEN / name, dtype=torch.float32).eval()
    return model, prompts(model.config.vocab_size)


def wanted(model: Any, ids: list[int], kind: str) -> np.ndarray:
    hidden = states(model, ids)
    weights = torch.arange(1.0, len(ids) + 1).unsqueeze(1)
    pooled = {
        "mean": hidden.mean(0),
        "cls": hidden[0],
        "last": hidden[-1],
        "max": hidden.amax(0),
        "mean_sqrt_len_tokens": hidden.sum(0) / len(ids) ** 0.5,
        "weightedmean": (hidden * weights).sum(0) / weights.sum(),
    }[kind].numpy()
    return pooled / np.linalg.norm(pooled)


def check(llm: LLM, model: Any, given: list[list[int]], kind: str, atol: float = 1e-4) -> None:
    for ids, output in zip(given, llm.embed(given), strict=True):
        np.testing.assert_allclose(output.outputs.vector, wanted(model, ids, kind), atol=atol)
    llm.engine.scheduler.check()


def copied(name: str, folder: Path) -> Path:
    shutil.copytree(GOLDEN / name, folder / name)
    return folder / name


@pytest.mark.parametrize("name", NAMES)
def test_the_last_token_s_state_is_the_vector(name: str) -> None:
    model, given = reference(name)
    # Chunks, more prompts than rows, and a cache too small for all of them at once.
    small = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "block_size": 4}
    options: dict[str, Any] = {"task": "embed", "dtype": "float32", "skip_tokenizer_init": True}
    with LLM(GOLDEN / name, **options, **small, max_model_len=96) as llm:
        check(llm, model, given, "last")
        check(llm, model, given, "last")
        assert llm.engine.scheduler.prefix_cache_hits > 0
        with pytest.raises(RequestError, match="runs for the task 'embed'"):
            llm.generate([1, 2], SamplingParams(max_tokens=1))


@pytest.mark.parametrize("kind", ["mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean"])
def test_other_poolings_add_up_over_chunks(kind: str, tmp_path: Path) -> None:
    model, given = reference("qwen3-tiny")
    folder = copied("qwen3-tiny", tmp_path)
    write_modules(folder, {"pooling_mode": kind})
    small = {"max_num_batched_tokens": 16, "max_num_seqs": 3, "block_size": 4}
    with LLM(folder, dtype="float32", skip_tokenizer_init=True, **small) as llm:
        assert llm.model_config.pooling is not None
        check(llm, model, given, kind)
        check(llm, model, given, kind)
        # A prefix that is not computed would be missing.
        assert llm.engine.scheduler.prefix_cache_hits == 0


def test_preempted_prompts_begin_anew(tmp_path: Path) -> None:
    model, given = reference("qwen3-tiny")
    folder = copied("qwen3-tiny", tmp_path)
    write_modules(folder, {"pooling_mode": "mean"})
    with LLM(folder, dtype="float32", skip_tokenizer_init=True, max_num_batched_tokens=16) as llm:
        engine = llm.engine
        tokenized = engine.frontend.tokenize_all(given)
        request_id = engine.add_pooled(tokenized, PoolingParams())
        engine.step()
        for sequence in list(engine.scheduler._running):
            engine.scheduler._preempt(sequence)
        outputs: list[Any] = []
        while not outputs:
            outputs = engine.step()
        assert outputs[0].request_id == request_id
        for ids, completion in zip(given, outputs[0].outputs, strict=True):
            vector = np.frombuffer(completion.pooled, np.float32)
            np.testing.assert_allclose(vector, wanted(model, ids, "mean"), atol=1e-4)


def test_a_checkpoint_may_lack_the_head(tmp_path: Path) -> None:
    """As Qwen3-Embedding is published, and as ``AutoModel`` saves decoders."""
    model, given = reference("qwen3-tiny")
    folder = copied("qwen3-tiny", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    bare = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if not name.startswith("lm_head.")
    }
    save_file(bare, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for architecture in ("Qwen3ForCausalLM", "Qwen3Model"):
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
        task = {"task": "embed"} if architecture == "Qwen3ForCausalLM" else {}
        with LLM(folder, dtype="float32", skip_tokenizer_init=True, **task) as llm:
            check(llm, model, given, "last")
        report = check_model(folder, EngineConfig(**task, skip_tokenizer_init=True))
        assert report.will_run, report.problems
        # A file of it is read as it is itself, and so is a file of that.
        source = folder
        for step in range(2):
            out = tmp_path / f"{architecture}-{step}.safetensors"
            export_model(str(source), out)
            with LLM(out, dtype="float32", skip_tokenizer_init=True, **task) as llm:
                check(llm, model, given, "last")
            source = out


def test_a_file_has_what_its_model_needs_for_some_task(tmp_path: Path) -> None:
    """Without the head that is embedding; without more there is none."""
    folder = copied("qwen3-tiny", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"], tensors["model.layers.0.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    missing = r"missing: model.layers.0.mlp.down_proj.weight, lm_head.weight"
    with pytest.raises(WeightsMismatchError, match=missing):
        export_model(str(folder), tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("quantise", ["F32", "Q4_0", "Q8_0"])
def test_a_gguf_file_with_a_head_embeds(
    quantise: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.1))
    tensors = {name: tensor.numpy() for name, tensor in made.state_dict().items()}
    path = write_llama_gguf(tmp_path / "tiny.gguf", tensors, sizes, quantise=quantise)
    kind = gguf.GGMLQuantizationType[quantise]
    for param in made.parameters():
        if param.dim() > 1:
            data = gguf.dequantize(gguf.quantize(param.detach().numpy(), kind), kind)
            param.data = torch.from_numpy(np.array(data))
    model = made.model.eval()
    settings: dict[str, Any] = {"task": "embed", "skip_tokenizer_init": True, "dtype": "float32"}
    with LLM(path, **settings) as llm:
        # Blocks are multiplied by inputs that are rounded to 8 bits.
        check(llm, model, prompts(96), "last", 1e-5 if quantise == "F32" else 0.03)
    assert "unpacked" not in caplog.text  # the head, which is not there
    report = check_model(path, EngineConfig(**settings))
    assert report.will_run, report.problems


def test_a_file_of_codes_embeds_as_the_model_does(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
    given = prompts(128)
    with LLM(GOLDEN / "llama-gqa", task="embed", quantization="int8", **settings) as llm:
        expected = [output.outputs.vector for output in llm.embed(given)]
    file = tmp_path / "codes.safetensors"
    export_model(str(GOLDEN / "llama-gqa"), file, EngineConfig(quantization="int8"))
    with LLM(file, task="embed", **settings) as llm:
        for output, vector in zip(llm.embed(given), expected, strict=True):
            np.testing.assert_allclose(output.outputs.vector, vector, atol=1e-5)


@pytest.mark.parametrize(
    "stated",
    [
        {"is_causal": False},
        {"use_bidirectional_attention": True},
        {"text_config": {"use_bidirectional_attention": True}},
    ],
)
@pytest.mark.parametrize("task", ["embed", "auto"])
def test_a_decoder_that_sees_later_tokens_is_refused(stated: dict[str, Any], task: str) -> None:
    with pytest.raises(ConfigError, match=r"(is_causal|attention) is .*both directions"):
        LLM(GOLDEN / "qwen3-tiny", task=task, hf_overrides=stated, skip_tokenizer_init=True)


def test_two_ranks_embed_as_one() -> None:
    model, given = reference("llama-gqa")
    options: dict[str, Any] = {"task": "embed", "dtype": "float32", "skip_tokenizer_init": True}
    with LLM(GOLDEN / "llama-gqa", **options, tensor_parallel_size=2, max_model_len=96) as llm:
        for ids, output in zip(given, llm.embed(given), strict=True):
            np.testing.assert_allclose(output.outputs.vector, wanted(model, ids, "last"), atol=1e-4)
