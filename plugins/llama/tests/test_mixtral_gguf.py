"""The Mixtral fixture as llama.cpp's converter writes it, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import write_llama_gguf
from golden_fixtures import GOLDEN, check_output, golden_prompts, greedy_params
from safetensors.numpy import load_file

from engine_core import LLM
from engine_core.checkpoint import open_checkpoint
from engine_core.errors import CheckpointError
from engine_core.nn.experts import Router, StackedLinear
from engine_core.nn.linear import Linear
from engine_core.nn.quantization import BlockMatrix
from engine_core_llama.gguf import LlamaGGUFAdapter

FOLDER = GOLDEN / "mixtral-tiny"
KEYS = {"llama.expert_count": 4, "llama.expert_used_count": 2}


@pytest.fixture(autouse=True)
def _own_disk_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def merged() -> dict[str, np.ndarray]:
    """The fixture's tensors, with one for each matrix of all experts."""
    tensors = load_file(FOLDER / "model.safetensors")
    found = {name: array for name, array in tensors.items() if ".experts." not in name}
    for before in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        for leaf in ("w1", "w2", "w3"):
            each = [tensors[f"{before}.experts.{i}.{leaf}.weight"] for i in range(4)]
            found[f"{before}.experts.{leaf}.weight"] = np.stack(each)
    return found


def write(path: Path, **options: Any) -> Path:
    config = json.loads((FOLDER / "config.json").read_text())
    return write_llama_gguf(path, merged(), config, **{"keys": KEYS, **options})


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf")
    opened = open_checkpoint(path, gguf_adapters={"llama": LlamaGGUFAdapter}, dtype="float32")
    stated = json.loads((FOLDER / "config.json").read_text())
    config = opened.hf_config.to_dict()
    for key in stated.keys() - {"torch_dtype", "router_aux_loss_coef", "bos_token_id"}:
        if not key.endswith("_token_id"):
            assert config[key] == stated[key], key
    read, tensors = dict(opened.weights()), merged()
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read[name], tensor)


def test_it_gives_the_golden_tokens_and_logits(tmp_path: Path) -> None:
    prompts = golden_prompts("mixtral-tiny")
    path = write(tmp_path / "x.gguf")
    with LLM(str(path), dtype="float32", skip_tokenizer_init=True, max_model_len=160) as llm:
        outputs = llm.generate([p.input_ids for p in prompts], greedy_params("mixtral-tiny"))
    for output, prompt in zip(outputs, prompts, strict=True):
        check_output(output, prompt)


def test_experts_and_their_router_are_unpacked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "x.gguf", quantise="Q8_0")
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
    with LLM(str(path), quantization="gguf", **options) as llm:
        (model,) = llm.apply_model(lambda model: model)
        for layer in model.modules():
            if isinstance(layer, Linear):
                kept = not isinstance(layer, StackedLinear | Router)
                assert isinstance(layer.packed, BlockMatrix) == kept
        first = llm.generate([[1, 5, 9]], greedy_params("mixtral-tiny"))[0].outputs[0]
    assert "8 tensors in Q8_0 blocks are unpacked, such as " in caplog.text
    with LLM(str(path), quantization="unpacked", **options) as llm:
        second = llm.generate([[1, 5, 9]], greedy_params("mixtral-tiny"))[0].outputs[0]
    # Activations of 8 bits in one of them.
    assert first.token_ids[0] == second.token_ids[0]


def test_a_count_of_experts_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    def read(keys: dict[str, Any]) -> None:
        path = write(tmp_path / "x.gguf", keys=keys)
        open_checkpoint(path, gguf_adapters={"llama": LlamaGGUFAdapter}, convert=False)

    with pytest.raises(CheckpointError, match=r"llama\.expert_used_count must be a positive"):
        read({"llama.expert_count": 4})
    with pytest.raises(CheckpointError, match=r"used_count 5 is more than llama\.expert_count 4"):
        read({"llama.expert_count": 4, "llama.expert_used_count": 5})
    with pytest.raises(CheckpointError, match=r"no tensor 'blk\.0\.ffn_gate\.weight'"):
        read({"llama.expert_count": 0, "llama.expert_used_count": 0})
