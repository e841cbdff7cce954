"""Damaged checkpoints of every kind are refused by name or run, within seconds and 2 GB.

Each case is seeded. To try one again, fill a folder GOOD with ``damaged_checkpoints.write_good``,
and run ``python tests/fuzz/worker.py GOOD KIND 17 18`` with ``tests`` on the path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from damaged_checkpoints import KINDS, GGUFParts, write_good
from forkserver import Popen
from random_examples import FULL

from engine_core import LLM
from engine_core.check import check_model
from engine_core.errors import EngineError

WORKER = Path(__file__).with_name("worker.py")
CASES = 500 if os.environ.get(FULL) else 8


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    write_good(folder)
    return folder


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has a disk cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_refused_or_runs(good: Path, kind: str) -> None:
    found: dict[int, str] = {}
    path = os.pathsep.join([str(WORKER.parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "RUST_BACKTRACE": "0"}
    done = 0
    while done < CASES and len(found) < 30:
        command = [sys.executable, str(WORKER), str(good), kind, str(done), str(CASES)]
        begun = None
        with Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as worker:
            for line in worker.stdout or ():
                told = json.loads(line)
                begun = told["case"]
                if "problem" in told:
                    done = begun + 1
                    if told["problem"]:
                        found[begun] = told["problem"]
        code = worker.returncode
        assert begun is not None, f"the good one of {kind} does not run: exit code {code}"
        if begun == done:  # it ended inside a case
            found[begun] = str(signal.strsignal(-code)) if code < 0 else f"exit code {code}"
            done += 1
    told_all = "\n".join(f"{kind} {case}: {problem}" for case, problem in found.items())
    assert not found, f"{len(found)} of {done} cases:\n{told_all}"


def refused(path: Path, message: str) -> None:
    """The check and the engine refuse ``path`` alike."""
    report = check_model(path)
    assert json.loads(report.to_json())["will_run"] is False
    assert any(re.search(message, problem.message) for problem in report.errors), report.errors
    with pytest.raises(EngineError, match=message):
        LLM(str(path))


def change_pair(key: str, kind: int, value: bytes) -> Callable[[GGUFParts], None]:
    def change(parts: GGUFParts) -> None:
        names = [name for name, _, _ in parts.pairs]
        parts.pairs[names.index(key)] = (key, kind, value)

    return change


def change_type(code: int) -> Callable[[GGUFParts], None]:
    def change(parts: GGUFParts) -> None:
        tensor = next(info for info in parts.tensors if info[0] == "blk.0.attn_q.weight")
        parts.data += b"\0" * (-len(parts.data) % 32)
        tensor[2:] = [code, len(parts.data)]
        parts.data += b"\0" * 2 * 64 * 64  # more than any of its types takes

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            change_pair("llama.block_count", 4, struct.pack("<I", 10**9)),
            "block_count is 1000000000",
        ),
        (
            change_pair("tokenizer.ggml.tokens", 4, b"\1\0\0\0"),
            "tokens must be an array of strings",
        ),
        (change_pair("tokenizer.ggml.token_type", 4, b"\1\0\0\0"), "must be an array of 261 numb"),
        (
            change_pair("tokenizer.ggml.model", 9, struct.pack("<IQ2I", 4, 2, 1, 2)),
            "tokenizer of the kind array",
        ),
        (
            change_pair("llama.block_count", 9, struct.pack("<IQ2I", 4, 2, 1, 2)),
            "block_count must be a positive integer, got array",
        ),
        (change_type(9), "type Q8_1, which the installed gguf package cannot dequantise"),
        (change_type(24), "type I8, which the installed gguf package cannot dequantise"),
    ],
)
def test_a_gguf_file_with_values_of_other_types(
    good: Path, tmp_path: Path, change: Callable[[GGUFParts], None], message: str
) -> None:
    parts = GGUFParts((good / "good.gguf").read_bytes())
    change(parts)
    path = tmp_path / "changed.gguf"
    path.write_bytes(parts.bytes())
    refused(path, message)


def changed(good: Path, kind: str, file: str, to: Path, **values: object) -> Path:
    folder = Path(shutil.copytree(good / kind, to / "model"))
    settings = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**settings, **values}))
    return folder


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_half_of_a_surrogate_pair(good: Path, tmp_path: Path, file: str) -> None:
    refused(changed(good, "folder", file, tmp_path, x=["\ud800"]), rf"{file} is not JSON: .*surrog")


@pytest.mark.parametrize("name", ["a" * 300, "é" * 2500, "a/" * 3000])
def test_a_shard_whose_name_no_file_can_have(good: Path, tmp_path: Path, name: str) -> None:
    index = "model.safetensors.index.json"
    refused(changed(good, "sharded", index, tmp_path, weight_map={"x": name}), "1 are missing")


@pytest.mark.parametrize("prefix", ["##", "é", "x" * 1000])
def test_a_prefix_that_the_merges_lack(good: Path, tmp_path: Path, prefix: str) -> None:
    model = json.loads((good / "folder" / "tokenizer.json").read_text())["model"]
    model["continuing_subword_prefix"] = prefix
    refused(changed(good, "folder", "tokenizer.json", tmp_path, model=model), "second piece of the")


@pytest.mark.parametrize("value", [["x"], {"a": 1}, 5])
def test_a_tokenizer_class_that_is_no_name(good: Path, tmp_path: Path, value: object) -> None:
    folder = changed(good, "folder", "tokenizer_config.json", tmp_path, tokenizer_class=value)
    refused(folder, "tokenizer_class must be a name")


def test_a_pickle_of_two_gigabytes(good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good / "bin", tmp_path / "model"))
    huge = b"\x80\x02cbuiltins\nbytearray\nJ" + struct.pack("<i", 2**31 - 1) + b"\x85R."
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", huge)
        archive.writestr("archive/version", "3")
    refused(folder, "builtins.bytearray is no part of a tensor")
