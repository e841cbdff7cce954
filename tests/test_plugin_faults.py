"""Installed plugins with a fault: each is named with its cause, and the other families serve."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forkserver
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "llama-gqa"

PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "engine-core-thistle"
version = "0.3.1"

[project.entry-points.engine_core]
thistle = "engine_core_thistle.plugin"

[tool.setuptools.packages.find]
include = ["engine_core_thistle*"]
"""
SOUND = """
from engine_core import hookimpl

requires_api = "0.1"


@hookimpl
def module_map():
    return {"ThistleForCausalLM": "engine_core_thistle.model.ThistleForCausalLM"}
"""


@dataclass(frozen=True)
class Installed:
    """An environment in which pip has installed plugins beside those of this repository."""

    targets: tuple[Path, ...]

    def run(
        self, *arguments: str | Path, start: Callable[..., Any] = forkserver.run, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """In a process of its own if ``start`` is subprocess.run."""
        paths = os.pathsep.join(map(str, (*self.targets, ROOT)))
        return start(
            [sys.executable, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "400"},
            capture_output=True,
            text=True,
            check=False,
            cwd=self.targets[0],
            **options,
        )

    def cli(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """A command that may ask the fallback which architectures transformers has."""
        given = ("-m", "engine_core.cli", *arguments)
        return self.run(*given, preloaded=forkserver.TRANSFORMERS)

    def generate(self, folder: Path) -> subprocess.CompletedProcess[str]:
        prompt = ("--token-ids", "1,2,3", "--skip-tokenizer-init", "--max-tokens", "4")
        return self.cli("generate", folder, *prompt, "--kv-cache-memory", "1MiB")


Install = Callable[[str], Installed]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed the sound plugin."""
    project, target = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("target")
    package = project / "engine_core_thistle"
    package.mkdir()
    (project / "pyproject.toml").write_text(PROJECT)
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(SOUND)
    command = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    done = subprocess.run(
        [sys.executable, *command, "--no-index", "--no-compile", "--target", target, project],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def install(sound: Path, tmp_path: Path) -> Install:
    def make(plugin: str) -> Installed:
        target = Path(shutil.copytree(sound, tmp_path / "target"))
        (target / "engine_core_thistle" / "plugin.py").write_text(plugin)
        return Installed((target,))

    return make


def copy_as(name: str, plugin: str, sound: Path, target: Path) -> Path:
    """Lay what pip installed into ``target`` under another name, with another plugin."""
    shutil.copytree(sound, target)
    for path in sorted(target.rglob("*"), reverse=True):
        if path.is_file():
            path.write_text(path.read_text().replace("thistle", name))
        path.rename(path.with_name(path.name.replace("thistle", name)))
    (target / f"engine_core_{name}" / "plugin.py").write_text(plugin)
    return target


def checkpoint_of(architecture: str, folder: Path) -> Path:
    """The golden checkpoint under another name."""
    folder.mkdir()
    config = json.loads((GOLDEN / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    (folder / "model.safetensors").symlink_to(GOLDEN / "model.safetensors")
    return folder


def check_llama_serves(installed: Installed) -> None:
    served = installed.generate(GOLDEN)
    assert served.returncode == 0, served.stderr
    assert len(served.stdout.split()) == 4


FAILING = """

class Thistle:
    @classmethod
    def condition(cls, model):
        return 1 // 0 > 0

    @classmethod
    def build(cls, hf_config, model_path=None, **kwargs): ...

    def process(self, token_ids): ...


@hookimpl
def HOOK():
    return [Thistle]
"""


@dataclass(frozen=True)
class Fault:
    plugin: str
    message: str


FAULTS = {
    "thistle": Fault(  # a syntax error is named with its line
        SOUND + "\ndef broken(:\n", "SyntaxError: invalid syntax (plugin.py, line 11)"
    ),
    "down": Fault(  # a dependency is missing
        "import thistledown\n" + SOUND, "ModuleNotFoundError: No module named 'thistledown'"
    ),
    "hook": Fault(
        SOUND.replace("def module_map", "def modulemap"),
        "implements unknown hook modulemap; the hooks are module_map, config_builders",
    ),
    "foreign": Fault(
        SOUND.replace('"0.1"', '"0.7"'),
        "asks for plugin API 0.7, this core offers 0.3 and the minor versions before it",
    ),
    "exit": Fault(
        "raise SystemExit(3)\n" + SOUND,
        "engine_core_exit.plugin cannot be imported: SystemExit: 3",
    ),
    "condition": Fault(
        (SOUND + FAILING.replace("HOOK", "config_builders")).replace("Thistle", "Condition"),
        "Condition.condition() failed: ZeroDivisionError",
    ),
}


@dataclass(frozen=True)
class Faulty:
    """All plugins of FAULTS in one environment, and what the commands say there."""

    installed: Installed
    listed: subprocess.CompletedProcess[str]
    checked: subprocess.CompletedProcess[str]
    refused: subprocess.CompletedProcess[str]

    @property
    def reports(self) -> dict[str, Any]:
        return {report["name"]: report for report in json.loads(self.listed.stdout)}


@pytest.fixture(scope="module")
def faulty(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Faulty:
    folder = tmp_path_factory.mktemp("faulty")
    targets = (copy_as(name, FAULTS[name].plugin, sound, folder / name) for name in FAULTS)
    installed = Installed(tuple(targets))
    model = checkpoint_of("ThistleForCausalLM", folder / "model")
    return Faulty(
        installed,
        installed.cli("plugins", "--json"),
        installed.cli("check-model", model, "--skip-tokenizer-init"),
        installed.generate(model),
    )


@pytest.mark.parametrize(("name", "fault"), FAULTS.items(), ids=FAULTS.keys())
def test_a_fault_is_named(faulty: Faulty, name: str, fault: Fault) -> None:
    """It is in the list, and in what is said when a model is asked for that it may have."""
    report = faulty.reports[name]
    assert fault.message in report["error"]
    assert f"'{name}'" in report["error"]
    assert report["distribution"] == f"engine-core-{name}"
    assert report["version"] == "0.3.1"
    assert f"{name}: {report['error']}" in faulty.checked.stdout + faulty.checked.stderr
    assert f"{name}: {report['error']}" in faulty.refused.stderr

    alone = Installed((faulty.installed.targets[list(FAULTS).index(name)],))
    strict = alone.cli("plugins", "--plugin-errors", "strict")
    assert strict.returncode == 1
    assert fault.message in strict.stderr


def test_faults_are_nowhere_else(faulty: Faulty) -> None:
    assert faulty.listed.returncode == 1, faulty.listed.stderr
    assert [name for name, report in faulty.reports.items() if report["error"]] == sorted(FAULTS)
    assert faulty.checked.returncode == 1
    assert faulty.refused.returncode == 1
    unknown = "no installed plugin knows the architecture 'ThistleForCausalLM'"
    assert unknown in faulty.refused.stderr
    assert "Plugins that could not be used: " in faulty.refused.stderr
    assert "Traceback" not in faulty.refused.stderr
    check_llama_serves(faulty.installed)


def test_a_processor_whose_condition_fails_stops_its_own_models_only(
    install: Install, tmp_path: Path
) -> None:
    installed = install(SOUND + FAILING.replace("HOOK", "input_processors"))
    (installed.targets[0] / "engine_core_thistle" / "model.py").write_text(
        "from engine_core_llama.model import LlamaForCausalLM as ThistleForCausalLM"
    )
    message = "plugin 'thistle': Thistle.condition() failed: ZeroDivisionError"
    listed = json.loads(installed.cli("plugins", "--json").stdout)
    assert [report["name"] for report in listed if report["error"]] == ["thistle"]
    checked = installed.cli("check-model", GOLDEN, "--skip-tokenizer-init")
    assert checked.returncode == 0, checked.stderr
    assert f"warning plugin-broken: {message}" in checked.stdout
    check_llama_serves(installed)

    model = checkpoint_of("ThistleForCausalLM", tmp_path / "model")
    checked = installed.cli("check-model", model, "--skip-tokenizer-init")
    assert checked.returncode == 1
    assert f"ERROR plugin-broken: {message}" in checked.stdout
    refused = installed.generate(model)
    assert refused.returncode == 1
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_builder_that_returns_nothing_is_named(install: Install, tmp_path: Path) -> None:
    plugin = SOUND + FAILING.replace("HOOK", "config_builders")
    asks = 'hf_config.get("architectures") == ["ThistleForCausalLM"]'
    plugin = plugin.replace("condition(cls, model)", "condition(cls, hf_config)")
    installed = install(plugin.replace("1 // 0 > 0", asks))
    model = checkpoint_of("ThistleForCausalLM", tmp_path / "model")
    message = "plugin 'thistle': Thistle.build() returned None, not a ModelConfig"
    checked = installed.cli("check-model", model, "--skip-tokenizer-init")
    assert checked.returncode == 1
    assert f"ERROR plugin-broken: {message}" in checked.stdout
    refused = installed.generate(model)
    assert refused.returncode == 1
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    check_llama_serves(installed)


def test_a_stolen_architecture_names_both_and_a_file_decides(
    install: Install, tmp_path: Path
) -> None:
    """Only who asks for the architecture that two claim is refused."""
    stolen = SOUND.replace('"ThistleForCausalLM":', '"LlamaForCausalLM":')
    installed = install(stolen)
    listed = installed.cli("plugins", "--json")
    claims = [
        report["name"]
        for report in json.loads(listed.stdout)
        if "LlamaForCausalLM" in report["architectures"]
    ]
    assert claims == ["llama", "thistle"]

    refused = installed.generate(GOLDEN)
    assert refused.returncode == 1
    assert (
        "architecture 'LlamaForCausalLM' is claimed by 'llama' and 'thistle'; uninstall one, or "
        "say which in a custom_module_map file"
    ) in refused.stderr

    # The rest of the family goes on, and so does this architecture once a file says whose it is.
    mistral = checkpoint_of("MistralForCausalLM", tmp_path / "model")
    assert installed.generate(mistral).returncode == 0
    file = tmp_path / "mine.py"
    file.write_text('MODULE_MAP = {"LlamaForCausalLM": "engine_core_llama.model.LlamaForCausalLM"}')
    prompt = ("--token-ids", "1,2,3", "--skip-tokenizer-init", "--max-tokens", "4")
    served = installed.cli("generate", GOLDEN, *prompt, "--custom-module-map", file)
    assert served.returncode == 0, served.stderr
    assert "takes LlamaForCausalLM over from plugin" in served.stderr


DISCOVERY = """
import sys, time
start = time.perf_counter()
from engine_core.registry import build_registry
registry = build_registry(plugin_errors="strict")
milliseconds = 1000 * (time.perf_counter() - start)
print(milliseconds, len(registry.reports), *sys.modules.keys() & {"torch", "transformers"})
"""


def test_discovery_of_all_plugins_brings_no_torch(
    record_testsuite_property: Callable[[str, object], None], tmp_path: Path
) -> None:
    """How long it takes is written into the report; the claim is under 100 ms."""
    done = Installed((tmp_path,)).run("-c", DISCOVERY, start=subprocess.run)
    assert done.returncode == 0, done.stderr
    milliseconds, plugins, *heavy = done.stdout.split()
    record_testsuite_property("discovery_milliseconds", float(milliseconds))
    assert int(plugins) >= 2
    assert heavy == []
