"""``engine-core warm``: the kernels of a start, compiled without its GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import forkserver
import pytest
import torch
from golden_fixtures import GOLDEN
from packed_checkpoints import FORMATS, write

from engine_core.check.gpus import gpu_names

pytest.importorskip("triton", reason="triton is not installed")

SMALL = ["--max-num-seqs", "1", "--max-num-batched-tokens", "64", "--max-model-len", "128"]


def warm(
    *arguments: str, model: Path = GOLDEN / "llama-gqa", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run it by a process in which kernels are not interpreted."""
    others = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return forkserver.run(
        [sys.executable, "-m", "engine_core.cli", "warm", str(model), *arguments],
        env=others | {"COLUMNS": "1000"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "H9000"], "the GPU 'H9000' is not in the table"),
        (["--gpu", "A100"], "may be any of A100-40GB, A100-80GB"),
        (["--gpu", "H200", "--eager"], "leave out eager"),
        (["--gpu", "H200", "--pipeline-parallel-size", "2"], "and pipeline_parallel_size"),
        (["--gpu", "H200", "--output", __file__], "cannot be a folder"),
    ],
)
def test_refusals(arguments: list[str], said: str) -> None:
    done = warm(*arguments)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_without_triton_it_says_what_to_install() -> None:
    # As where it is not installed.
    code = "import sys; sys.modules['triton'] = None; from engine_core.cli import main; main()"
    command = [sys.executable, "-c", code, "warm", str(GOLDEN / "llama-gqa"), "--gpu", "H200"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'engine-core-llm[triton]'" in done.stderr


def test_a_gpu_is_named_where_there_is_none() -> None:
    # A process of its own, which this variable makes it, is needed where there is one.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.is_available() else {}
    done = warm(**hidden)
    assert done.returncode == 2
    assert f"known are {', '.join(gpu_names())}" in done.stderr


def test_quantised_weights_have_to_be_there(tmp_path: Path) -> None:
    """A config does not say which linears have codes."""
    model = write(tmp_path / "awq", {}, FORMATS["awq"].settings)
    (model / "model.safetensors").unlink()
    done = warm("--gpu", "H200", model=model)
    assert done.returncode == 1
    assert f"{model} has no weight files" in done.stderr
    assert "it holds config.json" in done.stderr


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("a.gguf",), "a.gguf is no GGUF file: it does not begin with GGUF"),
        (("a.gguf", "b.gguf"), "has several GGUF files; name one: a.gguf, b.gguf"),
        ((), "does not exist"),
    ],
)
def test_what_is_wrong_with_a_gguf_file_is_said(
    names: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """No config beside it says what its weights would be."""
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 64)
    done = warm("--gpu", "H200", model=tmp_path if len(names) > 1 else tmp_path / "a.gguf")
    assert done.returncode == 1
    assert said in done.stderr
    assert "dummy" not in done.stderr


@pytest.mark.slow
def test_kernels_are_compiled_once(tmp_path: Path) -> None:
    """A second time all are there, and one that is missing is compiled again.

    How good the code is does not matter here, and to make it better takes half of the time.
    """
    quick = {"DISABLE_LLVM_OPT": "1", "DISABLE_PTXAS_OPT": "1"}
    settings = ["--gpu", "T4", "--dtype", "float16", "--output", str(tmp_path), *SMALL]
    settings += ["--custom-module-map", str(Path(__file__).parents[1] / "few_kernels.py")]
    first = warm(*settings, **quick)
    assert first.returncode == 0, first.stderr
    head, *counts = first.stdout.splitlines()
    kernels, variants = map(int, re.findall(r"(\d+) kernels in (\d+) variants", head)[0])
    listed = [line.split() for line in counts[:kernels]]
    assert sum(int(count) for count, _ in listed) == variants
    assert {"_decode_kernel", "_norm_kernel"} <= {name for _, name in listed}
    assert f"0 were there, {variants} compiled" in first.stdout
    machine_code = list(tmp_path.glob("*/*.cubin"))
    assert len(machine_code) == variants
    (note,) = tmp_path.glob("engine-core-*.json")
    assert f"{variants} were there, 0 compiled" in warm(*settings, **quick).stdout
    shutil.rmtree(machine_code[0].parent)
    assert f"{variants - 1} were there, 1 compiled" in warm(*settings, **quick).stdout
    assert len(list(tmp_path.glob("*/*.cubin"))) == variants
    assert note.exists()
