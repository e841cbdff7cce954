"""``engine-core export`` and ``import``."""

from __future__ import annotations

from pathlib import Path

import packed_checkpoints
import pytest
import torch
from golden_fixtures import GOLDEN
from typer.testing import CliRunner

from engine_core.cli.root import app

MODEL = str(GOLDEN / "llama-gqa")


def test_a_file_and_a_folder_are_written(tmp_path: Path) -> None:
    out, folder = tmp_path / "out.safetensors", tmp_path / "folder"
    run = CliRunner().invoke
    done = run(app, ["export", MODEL, str(out), "--quantization", "int4"])
    assert done.exit_code == 0, done.output
    # Its inputs are no groups of 32.
    assert "not quantised: 3 linears (model.layers.0.mlp.down_proj" in done.output
    again = run(app, ["export", MODEL, str(out)])
    assert again.exit_code == 1
    assert "there already" in again.output
    assert run(app, ["export", MODEL, str(out), "--force"]).exit_code == 0
    assert run(app, ["import", str(out), str(folder)]).exit_code == 0
    assert (folder / "config.json").is_file()
    wrong = run(app, ["export", MODEL, str(tmp_path / "out.gguf")])
    assert wrong.exit_code == 2
    assert "must end with .safetensors" in wrong.output


@pytest.mark.parametrize(
    ("cache", "dequantize", "needs"),
    [(False, False, True), (False, True, False), (True, True, True)],
)
def test_a_folder_that_needs_compressed_tensors_is_said(
    tmp_path: Path, cache: bool, dequantize: bool, needs: bool
) -> None:
    """Codes do, and scales of a cache, which --dequantize leaves."""
    form = packed_checkpoints.FORMATS["compressed"]
    held, _ = packed_checkpoints.packed(
        packed_checkpoints.llama(), form, lambda name: "lm_head" in name
    )
    settings = dict(form.settings)
    if cache:
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
        settings["kv_cache_scheme"] = scheme
        for layer in (0, 1):
            place = f"model.layers.{layer}.self_attn."
            held |= {f"{place}{leaf}": torch.tensor(0.02) for leaf in ("k_scale", "v_scale")}
    source, out = tmp_path / "source", tmp_path / "out.safetensors"
    packed_checkpoints.write(source, held, settings)
    run = CliRunner().invoke
    assert run(app, ["export", str(source), str(out)]).exit_code == 0
    options = ["--dequantize"] if dequantize else []
    done = run(app, ["import", str(out), str(tmp_path / "folder"), *options])
    assert done.exit_code == 0, done.output
    assert ("transformers needs compressed-tensors to load it" in done.output) == needs
