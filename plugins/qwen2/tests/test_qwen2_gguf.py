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
from engine_core.checkpoint import GGUFFile, open_checkpoint
from engine_core.errors import CheckpointError, WeightsMismatchError
from engine_core_qwen2.gguf import (
    Qwen2GGUFAdapter,
    Qwen2MoeGGUFAdapter,
    Qwen3GGUFAdapter,
    Qwen3MoeGGUFAdapter,
)

ADAPTERS = {
    "qwen2": Qwen2GGUFAdapter,
    "qwen2moe": Qwen2MoeGGUFAdapter,
    "qwen3": Qwen3GGUFAdapter,
    "qwen3moe": Qwen3MoeGGUFAdapter,
}
DENSE = {"qwen2-gqa": "qwen2", "qwen2-tied-nowindow": "qwen2", "qwen3-tiny": "qwen3"}
FIXTURES = {**DENSE, "qwen2moe-shared": "qwen2moe", "qwen3moe-stacked": "qwen3moe"}


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
    stated: dict[str, Any] | None = None,
    without: str | None = None,
) -> Path:
    """The fixture ``name`` with another config or tensors, or without one, by llama.cpp's name."""
    config, architecture = {**golden_config(name), **(stated or {})}, FIXTURES[name]
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
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    for key, value in (keys or {}).items():
        add = {
            int: writer.add_uint32,
            bool: writer.add_bool,
            float: writer.add_float32,
            str: writer.add_string,
        }
        add[type(value)](f"{architecture}.{key}", value)
    # llama.cpp's mixtures have experts in all layers; layers without are named as a dense model's.
    maps = [
        gguf.get_tensor_name_map(gguf.MODEL_ARCH[each.upper()], config["num_hidden_layers"])
        for each in (architecture, architecture.removesuffix("moe"))
    ]
    for tensor, array in merged(load_file(GOLDEN / name / "model.safetensors")).items():
        # What has one row only becomes a vector.
        array = array[0] if tensor.endswith("shared_expert_gate.weight") else array
        known = [names.get_name(tensor, (".weight", ".bias")) for names in maps]
        if (known[0] or known[1]) != without:
            writer.add_tensor(known[0] or known[1], array)
    for tensor, array in (extra_tensors or {}).items():
        writer.add_tensor(tensor, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merged(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts as llama.cpp's converter writes them: a tensor for all, gate and up apart."""
    found: dict[str, Any] = {}
    for name in sorted(tensors):
        before, experts, after = name.partition(".experts.")
        if not experts:
            found[name] = tensors[name]
        elif after == "gate_up_proj":
            for part, array in zip(("gate", "up"), np.split(tensors[name], 2, axis=1), strict=True):
                found[f"{before}.experts.{part}_proj.weight"] = array.copy()
        elif after == "down_proj":
            found[f"{name}.weight"] = tensors[name]
        else:
            number, _, leaf = after.partition(".")
            found.setdefault(f"{before}.experts.{leaf}", {})[int(number)] = tensors[name]
    return {
        name: np.stack([value[i] for i in range(len(value))]) if isinstance(value, dict) else value
        for name, value in found.items()
    }


def adapter(path: Path, name: str) -> Any:
    return ADAPTERS[FIXTURES[name]](GGUFFile(path))


@pytest.mark.parametrize("name", DENSE)
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


@pytest.mark.parametrize("name", [name for name in FIXTURES if name not in DENSE])
def test_experts_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "x.gguf", name)
    stated, translated = golden_config(name), adapter(path, name)
    config = translated.config()
    # Layers without experts are told by their tensors.
    told = {"decoder_sparse_step", "mlp_only_layers"}
    for key in config.keys() & stated.keys() - told:
        assert config[key] == stated[key], key
    layers = range(stated["num_hidden_layers"])
    assert config["mlp_only_layers"] == [
        layer
        for layer in layers
        if layer in stated["mlp_only_layers"] or (layer + 1) % stated["decoder_sparse_step"]
    ]
    tensors = merged(load_file(GOLDEN / name / "model.safetensors"))
    names = {tensor: translated.tensor_name(tensor) for tensor in GGUFFile(path).tensors}
    assert set(names.values()) == tensors.keys()
    opened = open_checkpoint(
        path, gguf_adapters={FIXTURES[name]: ADAPTERS[FIXTURES[name]]}, dtype="float32"
    )
    for tensor, numbers in opened.weights():
        np.testing.assert_array_equal(numbers, tensors[tensor])


def test_a_statement_about_norms_of_weights_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "qwen3moe-stacked", {"expert_weights_norm": False})
    assert adapter(path, "qwen3moe-stacked").config()["norm_topk_prob"] is False
    path = write(tmp_path / "y.gguf", "qwen3moe-stacked", {"expert_weights_norm": 1})
    with pytest.raises(
        CheckpointError, match=r"qwen3moe\.expert_weights_norm must be true or false"
    ):
        adapter(path, "qwen3moe-stacked")
    path = write(tmp_path / "z.gguf", "qwen3moe-stacked", {"expert_gating_func": 2})
    with pytest.raises(CheckpointError, match=r"qwen3moe\.expert_gating_func have no meaning"):
        adapter(path, "qwen3moe-stacked")


@pytest.mark.parametrize("name", ["ffn_gate_inp", "ffn_gate_exps", "ffn_down_exps"])
def test_a_layer_without_some_tensor_of_its_experts_is_refused(tmp_path: Path, name: str) -> None:
    """A layer without a router is not taken for a dense one."""
    path = write(tmp_path / "x.gguf", "qwen3moe-stacked", without=f"blk.1.{name}.weight")
    with pytest.raises(CheckpointError, match=rf"but not 'blk\.1\.{name}\.weight'; a layer"):
        adapter(path, "qwen3moe-stacked")


def test_more_experts_of_a_token_than_there_are_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "qwen3moe-stacked", stated={"num_experts_per_tok": 7})
    match = r"x\.gguf: qwen3moe\.expert_used_count 7 is more than qwen3moe\.expert_count 6"
    with pytest.raises(CheckpointError, match=match):
        adapter(path, "qwen3moe-stacked")


def test_a_count_that_the_tensors_do_not_have_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "qwen3moe-stacked", stated={"num_experts": 7})
    with pytest.raises(WeightsMismatchError, match="the model wants 7 experts"):
        LLM(str(path), dtype="float32", skip_tokenizer_init=True)
