"""Packages that were built for an older plugin API answer as before, with the core of today."""

import json
import os
import sys
import zipfile
from pathlib import Path

import forkserver
from golden_fixtures import GOLDEN, golden_prompts

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
WHEELS = sorted((HERE / "api-0.1").glob("*.whl"))
CHECKPOINTS = ("llama-gqa", "bloom-pow2", "chatglm1-tiny", "qwen2-gqa", "qwen2vl-tiny")


def test_wheels_for_api_0_1_give_the_original_codes_tokens(tmp_path: Path) -> None:
    """They are found before what is installed."""
    for wheel in WHEELS:
        zipfile.ZipFile(wheel).extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, str(HERE / "answers_of_wheels.py")]
    command += [str(GOLDEN / name) for name in CHECKPOINTS]
    done = forkserver.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for wheel in WHEELS:
        family = wheel.name.split("-")[0].removeprefix("engine_core_")
        api, error, file = found["reports"][family]
        assert (api, error) == ("0.1", None)
        assert Path(file).is_relative_to(tmp_path)
    assert found["answers"] == {
        name: [prompt.new_tokens for prompt in golden_prompts(name)] for name in CHECKPOINTS
    }
