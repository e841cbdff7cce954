"""Golden checkpoints written as llama.cpp's converter writes them, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from golden_fixtures import GOLDEN, check_output, golden_prompts, greedy_params
from safetensors.numpy import load_file

from engine_core import LLM
from engine_core.checkpoint import GGUFFile
from engine_core.errors import CheckpointError
from engine_core_qwen2.gguf import Qwen2GGUFAdapter, Qwen3GGUFAdapter

ADAPTERS = {"qwen2": Qwen2GGUFAdapter, "qwen3": Qwen3GGUFAdapter}
FIXTURES = {"qwen2-gqa": "qwen2", "qwen2-tied-nowindow": "qwen2", "qwen3-tiny": "qwen3"}


@pytest.fixture(autouse=True)
def _own_disk_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def golden_config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text())
    return config


def write(
    path: Path,
    name: str,
    keys: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    config, architecture = golden_config(name), FIXTURES[name]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    for key, value in (keys or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{architecture}.{key}", value)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"]
    )
    for tensor, array in load_file(GOLDEN / name / "model.safetensors").items():
        writer.add_tensor(names.get_name(tensor, (".weight", ".bias")), array)
    for tensor, array in (extra_tensors or {}).items():
        writer.add_tensor(tensor, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def adapter(path: Path, name: str) -> Any:
    return ADAPTERS[FIXTURES[name]](GGUFFile(path))


@pytest.mark.parametrize("name", FIXTURES)
def test_a_golden_checkpoint_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "x.gguf", name)
    stated = golden_config(name)
    translated = adapter(path, name)
    config = translated.config()
    for key in config.keys() & stated.keys():
        assert config[key] == stated[key], key
    tensors = load_file(GOLDEN / name / "model.safetensors")
    file = GGUFFile(path)
    assert {translated.tensor_name(tensor) for tensor in file.tensors} == tensors.keys()
    for tensor in file.tensors:
        array = translated.transform(tensor, file.read(tensor))
        np.testing.assert_array_equal(array, tensors[translated.tensor_name(tensor)])


@pytest.mark.parametrize("name", FIXTURES)
def test_a_gguf_file_gives_the_golden_tokens_and_logits(tmp_path: Path, name: str) -> None:
    prompts = golden_prompts(name)
    path = write(tmp_path / "x.gguf", name, keys=None)
    with LLM(str(path), dtype="float32", skip_tokenizer_init=True, max_model_len=160) as llm:
        outputs = llm.generate([prompt.input_ids for prompt in prompts], greedy_params(name))
    for output, prompt in zip(outputs, prompts, strict=True):
        check_output(output, prompt)


def test_yarn_keys_become_a_rope_scaling(tmp_path: Path) -> None:
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32768,
    }
    path = write(tmp_path / "x.gguf", "qwen2-gqa", keys)
    assert adapter(path, "qwen2-gqa").config()["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }


def test_biases_of_qwen3_are_seen(tmp_path: Path) -> None:
    bias = {"blk.0.attn_q.bias": torch.zeros(128).numpy()}
    path = write(tmp_path / "x.gguf", "qwen3-tiny", extra_tensors=bias)
    assert adapter(path, "qwen3-tiny").config()["attention_bias"]


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"attention.sliding_window": 16}, "qwen2.attention.sliding_window"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "longrope"),
        ({"rope.dimension_count": 4}, "rope.dimension_count"),
        ({"attention.key_length": 0}, "attention.key_length"),
    ],
)
def test_a_key_that_cannot_be_translated_is_refused(
    tmp_path: Path, keys: dict[str, Any], names: str
) -> None:
    path = write(tmp_path / "x.gguf", "qwen2-gqa", keys)
    with pytest.raises(CheckpointError, match=names):
        adapter(path, "qwen2-gqa")


def test_a_tensor_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "qwen2-gqa")
    with pytest.raises(CheckpointError, match="attn_q_norm"):
        adapter(path, "qwen2-gqa").tensor_name("blk.0.attn_q_norm.weight")
