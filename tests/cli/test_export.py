"""``engine-core export`` and ``import``."""

from __future__ import annotations

from pathlib import Path

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
