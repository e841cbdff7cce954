"""Launches of a start on a GPU, found out without one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import forkserver
import pytest
from golden_fixtures import GOLDEN

pytest.importorskip("triton", reason="triton is not installed")

# Layers: all alike, and two kinds of which every third is the other.
MODELS = ["llama-gqa", "gemma3-ropes", "mixtral-tiny"]


def test_all_steps_of_a_start_run_on_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """Of layers that are alike few are run, and the same variants are launched as of all."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = forkserver.run(
        [
            sys.executable,
            str(Path(__file__).with_name("rehearsed.py")),
            *(f"{GOLDEN / model}=bfloat16" for model in MODELS),
        ],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = dict(zip(MODELS, map(json.loads, done.stdout.splitlines()), strict=True))
    for model, rehearsed in found.items():
        assert rehearsed["same"], model
        steps = {
            name.replace("<Choice.", "").split(":")[0]: s for name, s in rehearsed["steps"].items()
        }
        # Prompts take longest to compile; then the largest steps of both kinds, for all others.
        assert [*steps][:5] == [
            "(64, 0, 1, GREEDY",
            "(3, 3, 0, GREEDY",
            "(1, 1, 0, GREEDY",
            "(96, 32, 8, GREEDY",
            "(1, 1, 0, RANDOM",
        ]
        # Greedy and random steps of 1, 2 and 3 rows; prompts alone and beside rows; what remains.
        assert {"(3, 3, 0, GREEDY", "(1, 1, 0, RANDOM", "(64, 0, 1, GREEDY"} <= set(steps)
        assert {"DecodeGraphs others", "GraphSteps others"} <= set(steps)
        assert "_choose_greedy_kernel" in steps["(3, 3, 0, GREEDY"]
        assert {"_peaks_kernel", "_settle_kernel"} <= set(steps["(1, 1, 0, RANDOM"])
        # Logits of 16 and of 32 bits, with adjustments of any kind and without.
        assert rehearsed["counts"]["_settle_kernel"] == 4
        assert "_decode_kernel" in steps["(3, 3, 0, GREEDY"]
        assert "_decode_kernel" not in steps["(64, 0, 1, GREEDY"]
    assert found["mixtral-tiny"]["steps"].keys() == found["llama-gqa"]["steps"].keys()
