"""Poolings and dense layers, against what sentence-transformers gave (``make_pooled.py``)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_bert import change
from typer.testing import CliRunner

from engine_core import LLM
from engine_core.check import check_model
from engine_core.cli import app
from engine_core.engine.export import export_model, import_model
from engine_core.errors import ConfigError

POOLED = Path(__file__).parent / "pooled"
EXPECTED = json.loads((POOLED / "expected.json").read_text())
MODES = [mode for mode in EXPECTED["vectors"] if mode != "all"]


def check(folder: Path, mode: str) -> None:
    with LLM(folder) as llm:
        outputs = llm.embed(EXPECTED["texts"])
    for output, expected in zip(outputs, EXPECTED["vectors"][mode], strict=True):
        np.testing.assert_allclose(output.outputs.vector, expected, atol=1e-5)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(POOLED, tmp_path / "pooled"))


def test_all_poolings_dense_layers_and_normalisation() -> None:
    check(POOLED, "all")


def test_dense_weights_may_be_pickled(copy: Path) -> None:
    weights = copy / "2_Dense" / "model.safetensors"
    torch.save(load_file(weights), copy / "2_Dense" / "pytorch_model.bin")
    weights.unlink()
    check(copy, "all")


def test_exported_files_hold_all_of_it(copy: Path, tmp_path: Path) -> None:
    """The longest text, under an old name, and dense layers, one of them pickled."""
    weights = copy / "2_Dense" / "model.safetensors"
    torch.save(load_file(weights), copy / "2_Dense" / "pytorch_model.bin")
    weights.unlink()
    (copy / "sentence_bert_config.json").unlink()
    change(copy / "sentence_roberta_config.json", max_seq_length=20)
    file, folder = tmp_path / "one.safetensors", tmp_path / "folder"
    export_model(str(copy), file)
    import_model(file, folder)
    for path in (file, folder):
        check(path, "all")
        with LLM(path) as llm:
            assert llm.engine.max_model_len == 20


def test_the_check_names_what_was_read(copy: Path) -> None:
    change(
        copy / "config_sentence_transformers.json",
        truncate_dim=4,
        prompts={"query": "the "},
        default_prompt_name="query",
    )
    modes = "cls and max and mean and mean_sqrt and weighted_mean and last"
    shown = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["check-model", str(copy)])
    assert shown.exit_code == 0, shown.output
    assert (
        f"embed, by {modes} pooling, 2 dense, normalised, cut to 4 numbers, texts of 40 tokens, "
        "prompt 'query'"
    ) in shown.output


@pytest.mark.parametrize("mode", MODES)
def test_each_pooling_alone(mode: str, copy: Path) -> None:
    modules = json.loads((copy / "modules.json").read_text())
    (copy / "modules.json").write_text(json.dumps(modules[:2]))
    change(copy / "1_Pooling/config.json", pooling_mode=mode)
    check(copy, mode)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("3_Dense", {"in_features": 96}, "3_Dense/config.json: in_features .* 96 and 8; 12, as"),
        (
            "2_Dense",
            {"activation_function": "torch.nn.modules.activation.Mish"},
            "activation.Mish'",
        ),
        ("2_Dense", {"activation_function": "mine.Tanh"}, "activation_function 'mine.Tanh' is not"),
        ("2_Dense", {"module_output_name": "x"}, "module_output_name 'x' is not supported"),
        ("2_Dense", {"use_residual": True}, "use_residual is not supported"),
        ("3_Dense", {"bias": True}, r"3_Dense has the tensors .*linear.bias"),
    ],
)
def test_other_dense_layers_are_refused(
    name: str, values: dict[str, Any], message: str, copy: Path
) -> None:
    change(copy / name / "config.json", **values)
    with pytest.raises(ConfigError, match=message):
        LLM(copy)


def test_missing_files_are_named(copy: Path) -> None:
    (copy / "1_Pooling" / "config.json").rename(copy / "pooling.json")
    with pytest.raises(
        ConfigError, match=r"names 1_Pooling/config.json, and there is no such file"
    ):
        LLM(copy)
    (copy / "pooling.json").rename(copy / "1_Pooling" / "config.json")
    (copy / "3_Dense" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"3_Dense has neither model.safetensors nor pytorch"):
        LLM(copy)
    report = check_model(copy)
    assert not report.will_run
    assert [each.code for each in report.problems] == ["config-invalid"]
    (copy / "1_Pooling" / "config.json").unlink()
    # Nothing is said of ends and chat templates, which this model has no use for.
    assert [each.code for each in check_model(copy).problems] == ["config-invalid"]
