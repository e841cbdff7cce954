"""``new-plugin --from-transformers``: a first package of what a tiny random model shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import forkserver
import pytest
from typer.testing import CliRunner

from engine_core.cli import app

ROOT = Path(__file__).parents[2]
runner = CliRunner(env={"COLUMNS": "300"})


def make(architecture: str, out: Path) -> str:
    done = runner.invoke(
        app, ["new-plugin", "iris", "--from-transformers", architecture, "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.slow
def test_a_family_that_the_blocks_cover_passes_the_kit(tmp_path: Path) -> None:
    """Helium rotates interleaved pairs, which no name of it says."""
    assert "Left to do" not in make("HeliumForCausalLM", tmp_path)
    project = tmp_path / "engine-core-iris"
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "egg_info"]
    subprocess.run(command, check=True, cwd=project, capture_output=True)
    done = forkserver.run(
        [sys.executable, "-m", "pytest", "-qk", "not tensor_parallel", "-p", "no:cacheprovider"],
        cwd=project,
        env={
            **os.environ,
            "PYTHONPATH": f"{project}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_what_no_block_does_is_told_and_stands_in_the_model(tmp_path: Path) -> None:
    said = make("Olmo2ForCausalLM", tmp_path)
    model = (tmp_path / "engine-core-iris" / "engine_core_iris" / "model.py").read_text()
    for part in ("q_norm (Olmo2RMSNorm) is no RMSNorm of each head", "post_feedforward_layernorm"):
        assert part in said
        assert part in model
    readme = (tmp_path / "engine-core-iris" / "README.md").read_text()
    assert "Left to do" in readme


def test_embeddings_that_are_scaled_in_their_module_are_noticed(tmp_path: Path) -> None:
    make("GemmaForCausalLM", tmp_path)
    model = (tmp_path / "engine-core-iris" / "engine_core_iris" / "model.py").read_text()
    assert "return float(config.hidden_size**0.5)" in model
    assert "offset=1.0" in model


def test_layers_that_differ_are_noticed(tmp_path: Path) -> None:
    assert "layers differ in use_rope" in make("SmolLM3ForCausalLM", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from-transformers", "TulipForCausalLM"], "no causal language model named 'TulipFor"),
        (["--from-transformers", "LlamaForCausalLM"], "already known, by plugin 'llama'"),
        (["--from-transformers", "MambaForCausalLM"], "no num_attention_heads|keeps a state"),
        ([], "give one of --like and --from-transformers"),
        (["--like", "llama", "--from-transformers", "OlmoForCausalLM"], "give one of"),
    ],
)
def test_what_it_refuses(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = runner.invoke(app, ["new-plugin", "iris", *arguments, "--out", str(tmp_path)])
    assert done.exit_code in (1, 2)
    assert re.search(message, done.output), done.output
    assert not list(tmp_path.iterdir())
