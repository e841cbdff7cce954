"""Families with errors planted in them, and the conformance kit run on them."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from engine_core.testing import ConformanceTests
from engine_core.testing.imports import package_folder
from engine_core.testing.reference import TinyCheckpoint, kinds_of
from engine_core.testing.subject import Subject, find_family
from engine_core.testing.suite import cases_of

HERE = Path(__file__).parent / "testing"
# Spawns processes, and is checked by sound families alone.
SLOW = "test_tensor_parallel"
TINY = "engine_core_tiny"
LOOKS = "engine_core_looks"
FOLDERS = {TINY: HERE / "tiny_family" / TINY, LOOKS: HERE / "media_family" / LOOKS}


@dataclass(frozen=True)
class Fault:
    """An edit of the sound family.

    Attributes:
        file: which of its files.
        old: what stands there, once.
        new: what stands there instead.
        fails: the checks that fail, with what each says.
        case: the case in which it is looked for; the first one if None.
        blocked: checks that cannot run then.
        more: other edits of the file, from old to new.
    """

    file: str
    old: str
    new: str
    fails: dict[str, str]
    case: str | None = None
    blocked: set[str] = field(default_factory=set)
    more: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def installed(
    folder: Path,
    edits: Mapping[str, str] = MappingProxyType({}),
    file: str = "model.py",
    package: str = TINY,
) -> Iterator[None]:
    """A sound family as pip leaves a package behind: on the path, with its entry points.

    ``edits`` of one of its files are from what stands there once to what stands there instead.
    Of a family that is installed a copy comes before it.
    """
    ours = package in FOLDERS
    source = FOLDERS[package] if ours else package_folder(package)
    shutil.copytree(source, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / package / file
    text = path.read_text()
    for old, new in edits.items():
        assert text.count(old) == 1, f"{file} of {package} has {old!r} {text.count(old)} times"
        text = text.replace(old, new)
    path.write_text(text)
    if ours:
        _write_metadata(folder, package)
    _forget(package)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        _forget(package)


def _forget(package: str) -> None:
    """Have the package's modules imported anew."""
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]


def _write_metadata(folder: Path, package: str) -> None:
    name = package.removeprefix("engine_core_")
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: engine-core-{name}\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(f"[engine_core]\n{name} = {package}.plugin\n")


def run_kit(
    checkpoints: Mapping[str, TinyCheckpoint],
    package: str = TINY,
    only: Collection[str] | None = None,
    *,
    first: bool = False,
) -> tuple[dict[tuple[str, str], str], set[tuple[str, str]]]:
    """Messages of the failing checks, and the blocked ones; keys are check and case.

    Cases without a checkpoint are left out. ``only`` are the checks that are run; None for all of
    them. With ``first`` the checks end with the first one that fails.
    """
    family = find_family(package)
    failed: dict[tuple[str, str], str] = {}
    blocked: set[tuple[str, str]] = set()
    suite = ConformanceTests()
    subjects = {
        case.name: Subject(family, case, checkpoints[case.name])
        for case in family.cases
        if case.name in checkpoints
    }
    sees = any(kinds_of(case) for case in family.cases)
    # In the order in which pytest runs them.
    for name in vars(ConformanceTests):
        method = getattr(suite, name)
        if not name.startswith("test_") or name == SLOW or hasattr(method, "pytestmark"):
            continue
        if (only is not None and name not in only) or (name.startswith("test_media") and not sees):
            continue
        each: Mapping[str, Any] = {"": family}
        if "subject" in inspect.signature(method).parameters:
            names = [case.name for case in cases_of(name, family.cases)]
            each = {name: subjects[name] for name in names if name in subjects}
        for case, argument in each.items():
            try:
                method(argument)
            except pytest.skip.Exception:
                blocked.add((name, case))
            except Exception as error:
                failed[name, case] = f"{type(error).__name__}: {error}"
        if first and failed:
            break
    return failed, blocked
