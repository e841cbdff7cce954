"""Errors planted in the families that are installed: the conformance kit finds each and says where.

``planted_errors.toml`` lists them. An entry that does not say by which check it is found is tried
with all of them, and the test's message says what was found.
"""

from __future__ import annotations

import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from planted import installed, run_kit
from random_examples import FULL

from engine_core.testing.imports import package_folder
from engine_core.testing.reference import TinyCheckpoint, prepare
from engine_core.testing.subject import find_family

LIST = Path(__file__).with_name("planted_errors.toml")
ERRORS = tomllib.loads(LIST.read_text())["error"]
TRIED = [error for error in ERRORS if os.environ.get(FULL) or error.get("quick")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(package: str) -> dict[str, TinyCheckpoint]:
        cases = find_family(package).cases
        return {case.name: prepare(case, tmp_path_factory.mktemp("case")) for case in cases}

    return made


def test_each_error_has_a_place() -> None:
    """Code that an edit looks for may have changed; here all are looked for, run or not."""
    lost = [
        f"{error['family']}: {error['name']}: {error['file']} has {error['old']!r} {count} times"
        for error in ERRORS
        if (count := _text(error).count(error["old"])) != 1
    ]
    assert not lost, "\n".join(lost)


def _text(error: dict[str, Any]) -> str:
    return (package_folder(f"engine_core_{error['family']}") / error["file"]).read_text()


@pytest.mark.parametrize("error", TRIED, ids=[f"{e['family']}: {e['name']}" for e in TRIED])
def test_an_error_is_found(error: dict[str, Any], checkpoints: Any, tmp_path: Path) -> None:
    package = f"engine_core_{error['family']}"
    made, check = checkpoints(package), error.get("check")
    edit = {error["old"]: error["new"]}
    with installed(tmp_path, edit, error["file"], package):
        only = None if check is None else {f"test_{check}"}
        failed, _ = run_kit(made, package, only, first=True)
    found = "\n".join(f"{name}[{case}]: {text}" for (name, case), text in failed.items())
    assert found, "it survives: no check fails"
    assert check is not None, f"say in {LIST.name} that it is found so: {found}"
    messages = [Exception(text) for text in failed.values()]
    assert any(pytest.RaisesExc(Exception, match=error["says"]).matches(m) for m in messages), found
