"""``engine-core plugins`` and ``engine-core env``."""

import json
import platform
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from engine_core.cli import app

runner = CliRunner(env={"COLUMNS": "100"})


def _plugin(folder: Path, name: str, body: str) -> None:
    """Install a package ``name`` with one entry point into ``folder``, as pip would."""
    (folder / f"{name}.py").write_text(body)
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[engine_core]\n{name} = {name}\n")


@pytest.fixture
def broken_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _plugin(tmp_path, "brokenfamily", "raise RuntimeError('out of order')\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_plugins_lists_installed_families() -> None:
    result = runner.invoke(app, ["plugins"])
    assert result.exit_code == 0
    [row] = [line for line in result.stdout.splitlines() if "engine-core-llama" in line]
    version = metadata.version("engine-core-llama")
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "llama",
        "engine-core-llama",
        version,
        "LlamaForCausalLM",
        "ok",
    ]


@pytest.mark.usefixtures("broken_plugin")
def test_broken_plugin_is_shown_beside_the_others() -> None:
    result = runner.invoke(app, ["plugins", "--json"])
    assert result.exit_code == 0
    reports = {report["name"]: report for report in json.loads(result.stdout)}
    assert reports["llama"]["error"] is None
    assert "RuntimeError: out of order" in reports["brokenfamily"]["error"]
    assert reports["brokenfamily"]["version"] == "1.2"
    table = runner.invoke(app, ["plugins"]).stdout
    assert "LlamaForCausalLM" in table
    assert "out of order" in " ".join(table.replace("│", " ").split())


@pytest.mark.usefixtures("broken_plugin")
def test_strict_exits_with_1() -> None:
    result = runner.invoke(app, ["plugins", "--plugin-errors", "strict"])
    assert result.exit_code == 1
    assert result.stderr.startswith("engine-core: error: plugin 'brokenfamily'")


def test_module_map_file_is_listed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine: ...\nMODULE_MAP = {'MineForCausalLM': 'Mine'}\n")
    result = runner.invoke(app, ["plugins", "--json", "--custom-module-map", str(file)])
    assert json.loads(result.stdout)[-1]["architectures"] == ["MineForCausalLM"]


def test_env_as_json() -> None:
    about = json.loads(runner.invoke(app, ["env", "--json"]).stdout)
    assert about["versions"]["python"] == platform.python_version()
    assert about["versions"]["torch"] == metadata.version("torch")
    assert about["versions"]["engine-core-llm"] == metadata.version("engine-core-llm")
    assert about["cpu"]["threads"] == torch.get_num_threads()
    assert len(about["cuda"]["devices"]) == torch.cuda.device_count()
    assert "llama" in [plugin["name"] for plugin in about["plugins"]]


def test_env_as_text_hides_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "secret" / "mine.py"
    file.parent.mkdir()
    file.write_text("MODULE_MAP = {}\n")
    result = runner.invoke(app, ["env", "--custom-module-map", str(file)])
    assert result.exit_code == 0
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert rows["torch"] == metadata.version("torch")
    assert "plugin ~/secret/mine.py" in result.stdout
    assert str(tmp_path) not in result.stdout
