"""The kit from a shell, in a folder that knows nothing of this repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import forkserver
import pytest

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).parent / "tiny_family" / "engine_core_tiny"


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In an empty folder, with the packages of ``folder/site`` installed."""
    # The plugin is an entry point of the installed package; that of a source tree may be older.
    command = [sys.executable, "-m", "pytest", "-p", "engine_core.testing.plugin"]
    command += ["-p", "no:cacheprovider", "--pyargs", "engine_core.testing", *arguments]
    paths = os.pathsep.join([str(folder / "site"), str(ROOT)])
    (folder / "empty").mkdir(exist_ok=True)
    return forkserver.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder / "empty",
        env={**os.environ, "PYTHONPATH": paths},
        preloaded=forkserver.TRANSFORMERS,
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The tiny family, installed."""
    shutil.copytree(SOURCE, tmp_path / "site" / "engine_core_tiny")
    metadata = tmp_path / "site" / "engine_core_tiny-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: engine-core-tiny\nVersion: 1\n"
    )
    (metadata / "entry_points.txt").write_text("[engine_core]\ntiny = engine_core_tiny.plugin\n")
    return tmp_path


def test_an_installed_package_is_checked(site: Path) -> None:
    wanted = "discovery or import_rules or (config_builder or logits) and biases"
    done = run_pytest(site, "--model-package", "engine_core_tiny", "-v", "-k", wanted)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "test_discovery_without_torch PASSED",
        "test_import_rules PASSED",
        "test_config_builder[biases] PASSED",
        "test_logits[biases] PASSED",
    ):
        assert line in done.stdout


def test_no_check_is_skipped_unless_the_one_that_says_why_has_failed(site: Path) -> None:
    plugin = site / "site" / "engine_core_tiny" / "plugin.py"
    plugin.write_text(plugin.read_text().replace("model.TinyForCausalLM", "model.Nope"))
    arguments = ("--model-package", "engine_core_tiny", "-v", "-rs", "-k")
    done = run_pytest(site, *arguments, "(config_builder or weights or logits) and biases")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_config_builder[biases] FAILED" in done.stdout
    assert "test_logits[biases] SKIPPED" in done.stdout
    assert "test_weights[biases] SKIPPED" in done.stdout
    assert "test_config_builder says why this cannot be checked" in done.stdout
    assert "Nope" in done.stdout
    # With the check that says why left out, the others say it themselves.
    done = run_pytest(site, *arguments, "logits and biases and not gpu")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_logits[biases] FAILED" in done.stdout
    assert "Nope" in done.stdout


def test_the_package_must_be_named(tmp_path: Path) -> None:
    done = run_pytest(tmp_path)
    assert done.returncode != 0
    assert "name its package with --model-package engine_core_<family>" in done.stdout + done.stderr


def test_the_plugin_brings_nothing_heavy() -> None:
    script = "import sys, engine_core.testing.plugin; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    modules = done.stdout.split()
    assert not {"torch", "transformers", "pydantic", "engine_core.testing.suite"} & {*modules}
