"""The benchmark of how steps grow with their rows: what is above its trend, and its shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forkserver
import pytest

from benchmarks.rows import PUBLISHED, above_trend, show

ROOT = Path(__file__).parents[1]


def test_a_step_is_above_the_line_through_its_neighbours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = {1: 1.0, 32: 1.0, 33: 1.3, 64: 1.3, 128: 2.0}
    above = above_trend(times)
    assert list(above) == [32, 33, 64]
    assert above[33] == pytest.approx(1.3 / (1 + 0.3 / 32) - 1)
    assert above[32] < 0
    show("a shape", times, dict.fromkeys(times, 0.5))
    assert "a shape above its trend: 33 rows by 29%\n" in capsys.readouterr().out
    show("another", {1: 1.0, 2: 1.05, 3: 1.0}, dict.fromkeys((1, 2, 3), 0.5))
    assert "another above its trend: nowhere\n" in capsys.readouterr().out


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/rows.py", *arguments]
    return forkserver.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)


def test_shapes_are_those_of_published_models_and_of_draws() -> None:
    done = run("--dry-run", "--rows", "1,256")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[::2]] == list(PUBLISHED)
    done = run("--dry-run", "llama3_8b", "--draw", "0", "--rows", "256,1", "--layers", "32")
    shapes = done.stdout.splitlines()
    assert "hidden=1280" in shapes[2]
    # Of 8.03B weights in bfloat16, but for the embedding, at 4.28 TB/s.
    first = float(shapes[1].split(";")[0].split(":")[1])
    assert first == pytest.approx(2 * 7.505e9 / 4.28e9, rel=0.01)
    done = run("--dry-run", "llama3_9b")
    assert done.returncode == 2
    assert "no shape 'llama3_9b'; there are qwen2_0_5b" in done.stderr
