"""Every program in examples/ runs, is short, and does what it says."""

import os
import sys
from pathlib import Path

import forkserver
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def _run(name: str) -> str:
    done = forkserver.run(
        [sys.executable, f"examples/{name}"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_offline_batch() -> None:
    output = _run("offline_batch.py")
    assert "'The capital of France is' -> ' Paris" in output
    answers = [line for line in output.splitlines() if line[:2] in ("0:", "1:", "2:")]
    assert len({line[3:] for line in answers}) == 3


def test_streaming_chat() -> None:
    output = _run("streaming_chat.py")
    first, second = output.split("> And of Italy?")
    assert "Paris" in first
    assert "Rome" in second
    assert "(0 prompt tokens" in first
    assert "(0 prompt tokens" not in second


def test_embeddings() -> None:
    first, *ranked = _run("embeddings.py").splitlines()
    assert first == "5 vectors of 384 numbers"
    assert "lid on the cup" in ranked[0]
    assert "thermos" in ranked[1]


def test_custom_module_map() -> None:
    [line] = _run("custom_module_map.py").splitlines()
    assert line.startswith("My favourite fruits are apples ")
    assert "," not in line  # without the map the model goes on with ", oranges, and grapes"


def test_examples_are_short_and_all_run_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES:
        assert f'_run("{path.name}")' in source
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 30
