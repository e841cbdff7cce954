"""The benchmark of pictures runs, on a CPU with tiny models, and every part prints its table."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import forkserver
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("parts", "shape", "tables"),
    [
        (
            ("attention", "encoder", "streams"),
            "qwen2_vl_7b",
            {"Attention": 1, "Pictures a second": 1, "Tokens a second": 1},
        ),
        pytest.param(
            ("first", "gaps"),
            "internvl2_5_8b",
            {"Milliseconds to": 1, "Gaps between": 4},
            marks=(pytest.mark.slow, pytest.mark.long),
        ),
    ],
)
def test_each_part_prints_a_table(
    parts: tuple[str, ...], shape: str, tables: dict[str, int]
) -> None:
    command = [sys.executable, "benchmarks/media.py", *parts, "--tiny", "--shapes", shape]
    command += ["--batches", "1", "--seconds", "0.01" if "gaps" not in parts else "0.5"]
    done = forkserver.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sections = done.stdout.split("## ")[1:]
    assert len(sections) == len(tables)
    for section, (title, count) in zip(sections, tables.items(), strict=True):
        lines = section.splitlines()
        assert lines[0].startswith(title)
        head, _, *rows = [line.split("|")[1:-1] for line in lines if line.startswith("|")]
        assert len(rows) == count
        assert {len(row) for row in rows} == {len(head)}
        assert all(cell.strip() not in ("", "nan") for row in rows for cell in row)
