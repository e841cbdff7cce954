"""Docstrings begin with a noun or an imperative."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for pattern in (
        "engine_core/**/*.py",
        "plugins/*/engine_core_*/**/*.py",
        "compat/*/engine_core_*/**/*.py",
        "examples/**/*.py",
        "tests/**/*.py",
        "benchmarks/*.py",
        "scripts/*.py",
    )
    for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_docstring_begins_with_what(path: Path) -> None:
    """ "What a step gave" makes a reader guess; "Results of a step" does not."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        (node.body[0].lineno, text.partition("\n")[0])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, holders)
        and (text := ast.get_docstring(node)) is not None
        and text.startswith("What ")
    ]
    assert found == []
