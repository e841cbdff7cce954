"""Prints and exits of plugins at their import stay out of the commands' output and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import forkserver
import pytest
from golden_fixtures import GOLDEN
from installed_plugins import install

MODEL = GOLDEN / "llama-gqa"
LOUD = """
import os, subprocess, sys
from engine_core import hookimpl

print("printed at import")
os.write(1, b"written at import\\n")
subprocess.run(["echo", "a child's at import"], check=True)
requires_api = "0.1"


class Builder:
    @classmethod
    def condition(cls, hf_config):
        print("printed by condition")
        return False

    @classmethod
    def build(cls, hf_config, model_path=None, **kwargs): ...


@hookimpl
def module_map():
    print("printed by a hook", file=sys.__stdout__)
    return {}


@hookimpl
def config_builders():
    return [Builder]
"""


def run(*command: str | Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return forkserver.run(
        [sys.executable, "-m", "engine_core.cli", *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_they_print_goes_to_stderr(tmp_path: Path) -> None:
    environment = install(tmp_path, "loud", LOUD)
    checked = run("check-model", MODEL, "--skip-tokenizer-init", "--json", environment=environment)
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["plugins"]
    prompt = ("--token-ids", "1,2,3", "--skip-tokenizer-init", "--max-tokens", "4")
    generated = run(
        "generate", MODEL, *prompt, "--kv-cache-memory", "1MiB", environment=environment
    )
    assert generated.returncode == 0, generated.stderr
    assert len(generated.stdout.split()) == 4
    for done in (checked, generated):
        for text in ("printed at import", "written at import", "a child's at import"):
            assert text in done.stderr
        assert "printed by condition" in done.stderr
        assert "printed by a hook" in done.stderr


def test_an_exit_at_import_names_the_plugin_and_ends_nothing(tmp_path: Path) -> None:
    body = "import os\nif os.fork() == 0:\n    os._exit(0)\nos._exit(3)\n"
    environment = install(tmp_path, "leaver", body)
    done = run("plugins", "--json", environment=environment)
    assert done.returncode == 1
    reports = {report["name"]: report for report in json.loads(done.stdout)}
    assert reports["leaver"]["error"] == (
        "plugin 'leaver': leaver cannot be imported: SystemExit: os._exit(3) (leaver.py:4, in "
        "<module>)"
    )
    assert reports["llama"]["error"] is None


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("raise KeyboardInterrupt\n", 130),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n", 130),
        ("import ctypes\nctypes.CDLL(None)._exit(3)\n", 3),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", -signal.SIGKILL),
    ],
)
def test_what_ends_the_process_is_named(body: str, code: int, tmp_path: Path) -> None:
    """C code ends it with no more than the line before, which --verbose prints."""
    done = run("plugins", "--verbose", environment=install(tmp_path, "leaver", body))
    assert done.returncode == code
    last = done.stderr.splitlines()[-1]
    if code == 130:
        assert last == "engine-core: interrupted while plugin 'leaver' was imported (leaver)"
    else:
        assert last == "DEBUG: importing plugin 'leaver' (leaver)"
