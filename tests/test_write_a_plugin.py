"""docs/write-a-plugin.md: its code is the example package's, and its commands work."""

from __future__ import annotations

import ast
import io
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import tokenize
import venv
import zipfile
from pathlib import Path
from textwrap import indent

import forkserver
import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    file
    for pattern in ("*.md", "docs/*.md", "benchmarks/**/*.md", "plugins/*/*.md", "compat/*/*.md")
    for file in ROOT.glob(pattern)
)
DOCUMENT = ROOT / "docs" / "write-a-plugin.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def code_blocks() -> list[tuple[Path, str]]:
    """Each block of code, with the file that was linked last before it."""
    text = DOCUMENT.read_text()
    found = []
    for block in BLOCK.finditer(text):
        if block[1] in ("python", "toml"):
            link = LINK.findall(text, 0, block.start())[-1]
            found.append(((DOCUMENT.parent / link).resolve(), block[2]))
    return found


def test_the_document_shows_code() -> None:
    names = [file.name for file, _ in code_blocks()]
    assert {"pyproject.toml", "plugin.py", "config.py", "model.py", "conformance.py"} <= set(names)


@pytest.mark.parametrize(
    ("file", "code"),
    code_blocks(),
    ids=[f"{index}-{file.name}" for index, (file, _) in enumerate(code_blocks())],
)
def test_every_block_is_the_files_own_lines(file: Path, code: str) -> None:
    source = f"\n{file.read_text()}"
    assert f"\n{code}" in source, f"{file} has not these lines:\n{indent(code, '    ')}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    links = LINK.findall(document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


LINES = re.compile(r"^\| \[.+\]\((.+)\) \| (\d+) \|$", re.MULTILINE)
STATED = [
    (DOCUMENT.parent / path, int(lines)) for path, lines in LINES.findall(DOCUMENT.read_text())
]


def lines_of_code(file: Path) -> int:
    """Lines with something on them that is no comment and no docstring."""
    source = file.read_text()
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef)
    strings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, holders) and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return len(
        {
            line
            for token in tokens
            if token.type not in {*empty, tokenize.ENDMARKER}
            for line in range(token.start[0], token.end[0] + 1)
        }
        - strings
    )


def test_the_lines_of_code_are_those_stated() -> None:
    assert len(STATED) > 4
    assert {file.parent.name: lines_of_code(file) for file, _ in STATED} == {
        file.parent.name: lines for file, lines in STATED
    }


# All of its checks are run where the example's own tests are.
FEW_CHECKS = "-q -p no:cacheprovider -k 'discovery or config_builder or test_logits'"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder that looks like a clone as far as the document's commands look."""
    folder = tmp_path / "clone"
    shutil.copytree(
        ROOT / "examples" / "plugins" / "gpt2",
        folder / "examples" / "plugins" / "gpt2",
        ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "build", ".*"),
    )
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A virtual environment with everything of this one but the example."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for place in site.getsitepackages():
        for path in Path(place).iterdir():
            if "engine_core_gpt2" not in path.name:
                (borrowed / path.name).symlink_to(path)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    link = folder / "lib" / version / "site-packages" / "borrowed.pth"
    link.write_text(f"import site; site.addsitedir({str(borrowed)!r})\n")
    for name, module in (("pip", "pip"), ("pytest", "pytest"), ("engine-core", "engine_core.cli")):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -m {module} "$@"\n')
        script.chmod(0o755)
    return {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this one the other way round
        "PYTEST_ADDOPTS": FEW_CHECKS,
    }


def commands() -> list[str]:
    """The document's commands, a line each."""
    blocks = (block for block in BLOCK.finditer(DOCUMENT.read_text()) if block[1] == "sh")
    found = [line for block in blocks for line in block[2].splitlines()]
    assert len(found) == 8
    return found


def check_output(output: str, clone: Path) -> None:
    """Check what the commands wrote, and the package that one of them made."""
    assert (clone / "my-plugins" / "engine-core-my-model" / "pyproject.toml").is_file()
    assert " passed" in output
    assert re.search(r"gpt2 .*engine-core-gpt2 .*GPT2LMHeadModel .*ok", output)
    assert re.search(r"^\d+( \d+)* *$", output, re.MULTILINE)


@pytest.mark.slow
def test_the_commands_work_with_the_package_installed(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks run all but pip's two: what pip makes of a package is shown in test_packaging.py."""
    monkeypatch.setenv("PYTEST_ADDOPTS", FEW_CHECKS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    modules = {"engine-core": ["-m", "engine_core.cli"], "pytest": ["-m", "pytest"], "python": []}
    output, left_out = "", []
    for command in commands():
        name, *words = shlex.split(command)
        if name not in modules:
            left_out.append(name)
            continue
        done = forkserver.run(
            [sys.executable, *modules[name], *words],
            cwd=clone,
            capture_output=True,
            text=True,
            check=False,
            preloaded=forkserver.TRANSFORMERS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        output += done.stdout
    assert left_out == ["pip", "pip"]
    check_output(output, clone)


@pytest.mark.long
@pytest.mark.slow
def test_the_commands_work_one_after_the_other(clone: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-eux", "-c", "\n".join(commands())],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_output(done.stdout, clone)
    [wheel] = (clone / "dist").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert "engine_core_gpt2/model.py" in names
    assert "engine_core_gpt2/py.typed" in names
