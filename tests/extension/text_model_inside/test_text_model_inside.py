"""A text model inside another model: its own golden outputs come out of the model around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from extension_imports import check_imports
from golden_fixtures import GOLDEN, check_output, golden_prompts, greedy_params
from safetensors.torch import load_file, save_file

from engine_core import LLM, EngineConfig
from engine_core.check import check_model
from engine_core.configs import HFConfig
from engine_core.errors import CorruptCheckpointError, UnknownArchitectureError
from engine_core.registry import build_registry, text_processor

MAP = Path(__file__).with_name("around.py")
SETTINGS: dict[str, Any] = {"custom_module_map": str(MAP), "skip_tokenizer_init": True}


def around(name: str, folder: Path, **changes: Any) -> Path:
    """The fixture ``name`` inside of a checkpoint of the file's model."""
    tensors = load_file(GOLDEN / name / "model.safetensors")
    named = {f"llm.{key}": tensor for key, tensor in tensors.items()}
    # Old checkpoints of Llama store a table that the family ignores.
    named["llm.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file({"eye.weight": torch.eye(6), **named}, folder / "model.safetensors")
    llm = json.loads((GOLDEN / name / "config.json").read_text()) | changes
    config = {"architectures": ["Around"], "llm": llm, "width": 6}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# Dynamic NTK, whose forward pass takes more than tokens; a tied head; another kind of layer.
@pytest.mark.parametrize("name", ["llama-dynamic", "qwen2-tied-nowindow"])
def test_tokens_and_logits_are_those_of_the_text_model(name: str, tmp_path: Path) -> None:
    prompts = golden_prompts(name)
    with LLM(str(around(name, tmp_path)), max_model_len=160, **SETTINGS) as llm:
        assert llm.apply_model(lambda model: model.eye.weight.trace().item()) == [6]
        tied = llm.apply_model(
            lambda model: model.lm_head.weight is model.get_input_embeddings().weight
        )
        assert tied == [name == "qwen2-tied-nowindow"]
        outputs = llm.generate(
            [prompt.input_ids for prompt in prompts], greedy_params(name, with_prompt=True)
        )
        with llm.engine.trace_layers() as trace:
            llm.generate(prompts[0].input_ids, greedy_params(name))
    for output, prompt in zip(outputs, prompts, strict=True):
        check_output(output, prompt)
    names = {layer.name for layer in trace.steps[0].layers}
    assert names > {"language_model.model.layers.0", "language_model.model.layers.1"}


def test_the_text_model_is_quantised_as_it_is_alone(tmp_path: Path) -> None:
    name = "llama-gqa"
    prompts: Any = [prompt.input_ids for prompt in golden_prompts(name)]
    tokens = []
    for folder in (GOLDEN / name, around(name, tmp_path)):
        with LLM(str(folder), quantization="int8", **SETTINGS) as llm:
            outputs = llm.generate(prompts, greedy_params(name))
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]


def test_two_ranks(tmp_path: Path) -> None:
    name = "llama-gqa"
    prompts = golden_prompts(name)
    folder = around(name, tmp_path)
    with LLM(str(folder), tensor_parallel_size=2, max_model_len=160, **SETTINGS) as llm:
        outputs = llm.generate([prompt.input_ids for prompt in prompts], greedy_params(name))
    for output, prompt in zip(outputs, prompts, strict=True):
        check_output(output, prompt)


def test_check_model_plans_it(tmp_path: Path) -> None:
    report = check_model(around("llama-gqa", tmp_path), EngineConfig(**SETTINGS))
    assert report.will_run, report.problems
    assert report.model_info is not None
    assert report.model_info.config["text_model"]["hf_config"]["num_hidden_layers"] == 3
    assert json.loads(report.to_json())["memory"]["groups"]


def test_a_text_model_that_nobody_brings_is_named_with_its_package(tmp_path: Path) -> None:
    folder = around("llama-gqa", tmp_path, architectures=["NobodysForCausalLM"])
    said = r"text model inside .* 'NobodysForCausalLM', .* 'pip install engine-core-nobodys'"
    with pytest.raises(UnknownArchitectureError, match=said):
        LLM(str(folder), **SETTINGS)
    report = check_model(folder, EngineConfig(**SETTINGS))
    (problem,) = report.errors
    assert problem.code == "architecture-unknown"
    assert "pip install engine-core-nobodys" in problem.message
    folder = around("llama-gqa", tmp_path, architectures=["OthersForCausalLM"])
    with pytest.raises(UnknownArchitectureError, match=r"text model inside: .* 'OthersFor"):
        LLM(str(folder), **SETTINGS)


def test_what_is_wrong_in_its_config_is_said(tmp_path: Path) -> None:
    folder = around("llama-gqa", tmp_path, num_hidden_layers=10**9)
    with pytest.raises(CorruptCheckpointError, match="num_hidden_layers is 1000000000"):
        LLM(str(folder), **SETTINGS)


def test_the_input_processor_of_the_text_model(tmp_path: Path) -> None:
    folder = around("llama-dynamic", tmp_path)
    registry = build_registry([str(MAP)])
    processor = text_processor(registry.model_config(HFConfig.from_folder(folder), folder))
    assert processor is not None
    assert processor.process([1] * 70).cache_salts == (70,)
    folder = around("llama-gqa", tmp_path)
    assert text_processor(registry.model_config(HFConfig.from_folder(folder), folder)) is None


def test_it_imports_public_names_only() -> None:
    check_imports(MAP)
