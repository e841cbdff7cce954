"""``engine-core plugins`` and ``engine-core env``."""

import json
import platform
import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
from installed_plugins import install
from typer.testing import CliRunner

from engine_core.cli import app

runner = CliRunner(env={"COLUMNS": "100"})


@pytest.fixture
def broken_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "brokenfamily", "raise RuntimeError('out of order')\n")
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
        "0.3",
        "LlamaForCausalLM",
        "ok",
    ]


@pytest.mark.usefixtures("broken_plugin")
def test_broken_plugin_is_shown_beside_the_others() -> None:
    result = runner.invoke(app, ["plugins", "--json"])
    assert result.exit_code == 1
    reports = {report["name"]: report for report in json.loads(result.stdout)}
    assert reports["llama"]["error"] is None
    assert "RuntimeError: out of order" in reports["brokenfamily"]["error"]
    assert reports["brokenfamily"]["version"] == "1.2"
    table = runner.invoke(app, ["plugins"]).stdout
    assert "LlamaForCausalLM" in table
    assert "out of order" in " ".join(table.replace("│", " ").split())


SOUND = """
from engine_core import hookimpl

requires_api = "0.1"


@hookimpl
def module_map():
    return {"ThistleForCausalLM": "engine_core_llama.model.LlamaForCausalLM"}


@hookimpl
def tool_parsers():
    return {"thistle": "engine_core_qwen2.tools.NoSuchParser"}
"""


def test_what_would_be_refused_later_is_said_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = "engine_core_llama.model.NoSuchClass"
    bodies = {
        "thistle": SOUND,
        "teasel": SOUND.replace("engine_core_llama.model.LlamaForCausalLM", lost),
        "unmarked": SOUND.replace("@hookimpl\ndef tool", "def tool"),
        "foreign": SOUND.replace('"0.1"', '"0.7"'),
        "mode": SOUND.replace("tool_parsers", "quantization_schemes").replace("thistle", "int8"),
    }
    for name, body in bodies.items():
        install(tmp_path, name, body)
    monkeypatch.syspath_prepend(tmp_path)
    result = runner.invoke(app, ["plugins", "--json"])
    assert result.exit_code == 1
    reports = {report["name"]: report for report in json.loads(result.stdout)}
    architecture = (
        "architecture 'ThistleForCausalLM' is claimed by 'mode' and 'teasel' and 'thistle'; "
        "uninstall one"
    )
    parser = "tool parser 'thistle' is claimed by 'teasel' and 'thistle'; uninstall one"
    for name in ("thistle", "teasel"):
        assert architecture in reports[name]["refusals"]
        assert parser in reports[name]["refusals"]
        assert reports[name]["tool_parsers"] == ["thistle"]
        assert reports[name]["error"] is None
    (missing,) = [each for each in reports["teasel"]["refusals"] if lost in each]
    assert missing.startswith(
        f"architecture 'ThistleForCausalLM': plugin 'teasel': {lost} cannot be imported: "
    )
    scheme = "quantization 'int8' is claimed by 'engine-core-llm' and 'mode'; uninstall one"
    assert scheme in reports["mode"]["refusals"]
    assert reports["unmarked"]["error"] == (
        "plugin 'unmarked': tool_parsers has the name of a hook and lacks its mark; write "
        "@hookimpl above it (from engine_core import hookimpl)"
    )
    assert "asks for plugin API 0.7" in reports["foreign"]["error"]
    assert reports["foreign"]["requires_api"] == "0.7"
    assert reports["llama"]["refusals"] == []
    assert reports["llama"]["requires_api"] == "0.3"

    # A module-map file decides whose the architecture is.
    file = tmp_path / "mine.py"
    file.write_text(f"MODULE_MAP = {{'ThistleForCausalLM': {lost!r}}}\n")
    result = runner.invoke(app, ["plugins", "--json", "--custom-module-map", str(file)])
    reports = {report["name"]: report for report in json.loads(result.stdout)}
    assert reports["thistle"]["refusals"][-1] == parser
    assert architecture not in reports["thistle"]["refusals"]
    assert lost in reports[str(file)]["refusals"][0]


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
    capabilities = [device["capability"] for device in about["cuda"]["devices"]]
    assert about["cuda"]["hopper_kernels"].startswith("on" if "9.0" in capabilities else "off: ")
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
    assert re.search(r"^hopper kernels +(on|off)", result.stdout, re.MULTILINE)
    assert str(tmp_path) not in result.stdout
