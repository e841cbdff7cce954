"""Kernels that are compiled beside a start or ahead of it, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def alone(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script beside this one, by a process in which kernels are not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        env=environment | {"TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_processes_compiled_is_found_by_launches(tmp_path: Path) -> None:
    """Of whatever tensors; those that begin elsewhere in memory have a kernel of their own."""
    done = alone("launched_ahead.py", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["errors"] == []
    assert found["compiled"] == ["_choose_greedy_kernel", "_norm_kernel"]
    assert found["launches"] == 4
    assert found["hits"] == [True, True, False]
    assert found["summary"].startswith("2 variants of 2 kernels, 0 of them kept")
    again = json.loads(alone("launched_ahead.py", tmp_path).stdout)
    assert (again["compiled"], again["hits"]) == ([], [True, True, True])
