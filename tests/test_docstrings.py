"""Docstrings begin with a noun or an imperative."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATTERNS = (
    "engine_core/**/*.py",
    "plugins/*/engine_core_*/**/*.py",
    "compat/*/engine_core_*/**/*.py",
    "examples/**/*.py",
    "tests/**/*.py",
    "benchmarks/*.py",
    "scripts/*.py",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_docstring_begins_with_what(pattern: str) -> None:
    """ "What a step gave" makes a reader guess; "Results of a step" does not."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    files = sorted(ROOT.glob(pattern))
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{node.body[0].lineno}: {text.partition(chr(10))[0]}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, holders)
        and (text := ast.get_docstring(node)) is not None
        and text.startswith("What ")
    ]
    assert found == []
