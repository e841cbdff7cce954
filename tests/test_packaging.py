"""The wheels that people install: what is in them, and that they work outside this tree."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import forkserver
import pytest
from random_examples import FULL

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "plugins" / "llama"
COMPAT = ROOT / "compat" / "lmdeploy"
GOLDEN = ROOT / "tests" / "golden" / "llama-gqa"
GENERATE = ("generate", str(GOLDEN), "--token-ids", "1,2,3", "--skip-tokenizer-init")


def _run(*command: str | Path, check: bool = True, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=environment,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@dataclass(frozen=True)
class Wheels:
    core: Path
    plugin: Path
    compat: Path
    chatglm: Path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    folder = tmp_path_factory.mktemp("build")
    projects = (ROOT, PLUGIN, COMPAT, ROOT / "plugins" / "chatglm")
    # From copies: a build leaves files behind, and takes up what an earlier one left.
    sources = [
        shutil.copytree(
            project,
            folder / "source" / project.name,
            ignore=shutil.ignore_patterns(
                ".*", "build", "*.egg-info", "__pycache__", "plugins", "compat", "tests", "docs"
            ),
        )
        for project in projects
    ]
    _run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
        *("--no-index", "--wheel-dir", folder / "wheels", *sources),
        cwd=folder,
    )
    shutil.rmtree(folder / "source")
    names = ("llm", "llama", "lmdeploy", "chatglm")
    found = [list((folder / "wheels").glob(f"engine_core_{name}-*.whl")) for name in names]
    assert [len(each) for each in found] == [1, 1, 1, 1]
    return Wheels(*(wheel for (wheel,) in found))


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees this one's dependencies, and nothing of engine-core's."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def pip(self, *arguments: str | Path) -> None:
        _run(sys.executable, "-m", "pip", "--python", self.python, *arguments, cwd=self.folder)

    def cli(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return _run(self.folder / "bin" / "engine-core", *arguments, check=check, cwd=self.folder)

    def evaluate(self, code: str) -> object:
        script = f"import json; print(json.dumps({code}))"
        return json.loads(_run(self.python, "-c", script, cwd=self.folder).stdout)


@pytest.fixture(scope="module")
def environment(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("engine_core", "__editable__")) and path.suffix != ".pth":
            (borrowed / path.name).symlink_to(path)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "borrowed.pth").write_text(f"{borrowed}\n")
    made = Environment(folder)
    made.pip("install", "--no-deps", "--no-index", wheels.core, wheels.plugin)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        _lend_compiled_code(folder / "cache" / "engine-core" / "code")
        yield made
    shutil.rmtree(folder)


def _lend_compiled_code(folder: Path) -> None:
    """Lay what was compiled here for the same sources where the installed engine finds it.

    It is told by its sources, so that nothing else is found. All kernels would take 15 s. In
    ``make soak`` an activation is compiled anew: the wheel has all that this takes.
    """
    first = [sys.executable, "-m", "engine_core.cli", *GENERATE, "--max-tokens", "4"]
    forkserver.run(first, capture_output=True, check=True, cwd=ROOT)
    folder.mkdir(parents=True)
    for path in (ROOT / "engine_core" / "kernels").rglob("*.code"):
        if FULL not in os.environ or not path.name.startswith("activation"):
            shutil.copy(path, folder)


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [item for item in archive.namelist() if item.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def test_wheels_carry_licence_and_types(wheels: Wheels) -> None:
    for wheel, package in (
        (wheels.core, "engine_core"),
        (wheels.plugin, "engine_core_llama"),
        (wheels.compat, "engine_core_lmdeploy"),
    ):
        names = zipfile.ZipFile(wheel).namelist()
        assert f"{package}/py.typed" in names
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
        tops = {name.partition("/")[0] for name in names}
        assert {top for top in tops if not top.endswith(".dist-info")} == {package}


def test_wheels_carry_every_module(wheels: Wheels) -> None:
    for wheel, folder, package in (
        (wheels.core, ROOT, "engine_core"),
        (wheels.plugin, PLUGIN, "engine_core_llama"),
        (wheels.compat, COMPAT, "engine_core_lmdeploy"),
        (wheels.chatglm, ROOT / "plugins" / "chatglm", "engine_core_chatglm"),
    ):
        sources = {str(path.relative_to(folder)) for path in (folder / package).rglob("*.py")}
        assert sources <= set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_names_the_kits_plugin_to_pytest(wheels: Wheels) -> None:
    with zipfile.ZipFile(wheels.core) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
        stated = archive.read(name).decode()
    section = stated.partition("[pytest11]")[2].partition("[")[0]
    assert "engine_core.testing.plugin" in section


def test_the_wheel_carries_the_web_page_and_its_licences(wheels: Wheels) -> None:
    names = set(zipfile.ZipFile(wheels.core).namelist())
    page = ROOT / "engine_core" / "server" / "web"
    files = {str(path.relative_to(ROOT)) for path in page.rglob("*") if path.is_file()}
    assert len([name for name in files if name.endswith(".woff2")]) > 10
    assert files <= names
    for path in (page / "vendor").glob("LICENSE.*"):
        assert any(
            ".dist-info/licenses/" in name and name.endswith(f"/{path.name}") for name in names
        ), path.name
    stated = _metadata(wheels.core)["License-Expression"]
    assert stated == "Apache-2.0 AND MIT AND BSD-3-Clause AND OFL-1.1"


def test_nothing_requires_the_strangers_package(wheels: Wheels) -> None:
    core, plugin = _metadata(wheels.core), _metadata(wheels.plugin)
    assert core["Name"] == "engine-core-llm"
    assert plugin["Name"] == "engine-core-llama"
    assert plugin.get_all("Requires-Dist") == ["engine-core-llm<0.2,>=0.1"]
    compat = _metadata(wheels.compat)
    assert compat["Name"] == "engine-core-lmdeploy"
    assert compat.get_all("Requires-Dist") == ["engine-core-llm<0.2,>=0.1"]
    names = [re.split(r"[^\w.-]", item)[0] for item in core.get_all("Requires-Dist", [])]
    # An extra may name another one of its own distribution.
    assert "engine-core" not in names
    assert {name for name in names if name.startswith("engine")} <= {"engine-core-llm"}


def test_import_belongs_to_our_distribution(environment: Environment) -> None:
    owners = environment.evaluate(
        "__import__('importlib.metadata').metadata.packages_distributions()['engine_core']"
    )
    assert owners == ["engine-core-llm"]
    place = environment.evaluate("__import__('engine_core').__file__")
    assert isinstance(place, str)
    assert Path(place).is_relative_to(environment.folder)
    versions = environment.evaluate(
        "[__import__('engine_core').__version__, "
        "__import__('importlib.metadata').metadata.version('engine-core-llm')]"
    )
    assert isinstance(versions, list)
    assert versions[0] == versions[1]


def test_installed_plugin_is_found_and_removed(environment: Environment, wheels: Wheels) -> None:
    [report] = json.loads(environment.cli("plugins", "--json", "--plugin-errors", "strict").stdout)
    assert report["distribution"] == "engine-core-llama"
    assert report["architectures"] == [
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
    ]
    assert len(environment.cli(*GENERATE, "--max-tokens", "4").stdout.split()) == 4

    environment.pip("uninstall", "--yes", "engine-core-llama")
    try:
        assert json.loads(environment.cli("plugins", "--json").stdout) == []
        refused = environment.cli(*GENERATE, check=False)
        assert refused.returncode == 1
        assert "no installed plugin knows the architecture 'LlamaForCausalLM'" in refused.stderr
        assert "Traceback" not in refused.stderr
    finally:
        environment.pip("install", "--no-deps", "--no-index", wheels.plugin)


def test_installed_command_writes_a_plugin(environment: Environment) -> None:
    """Its templates are in the core's wheel, and its pattern's source in the plugin's."""
    environment.cli("new-plugin", "marigold", "--like", "llama", "--out", environment.folder)
    package = environment.folder / "engine-core-marigold" / "engine_core_marigold"
    made = {path.name for path in package.iterdir()}
    assert {"plugin.py", "config.py", "model.py", "conformance.py", "py.typed"} <= made


def test_a_familys_wheel_is_checked_by_its_own_reference(wheels: Wheels, tmp_path: Path) -> None:
    """The kit compares this family with plain torch; no golden files are in the wheel.

    What is in the wheel comes before its source, by forks: what pip does with one is shown above.
    """
    site = tmp_path / "site"
    with zipfile.ZipFile(wheels.chatglm) as archive:
        names = archive.namelist()
        archive.extractall(site)
    assert "engine_core_chatglm/reference.py" in names
    assert not [name for name in names if "golden" in name or name.endswith(".safetensors")]

    def run(*words: str) -> str:
        done = forkserver.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            preloaded=forkserver.TRANSFORMERS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    said = run("-c", "import engine_core_chatglm.reference as r; print(r.__file__)")
    assert Path(said.strip()).is_relative_to(site)
    checked = run(
        *("-m", "pytest", "-p", "engine_core.testing.plugin", "-p", "no:cacheprovider", "-q"),
        *("--pyargs", "engine_core.testing", "--model-package", "engine_core_chatglm"),
        *("-k", "test_logits"),
    )
    assert "3 passed" in checked
