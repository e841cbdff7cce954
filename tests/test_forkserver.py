"""A forked command is to its test what a process of its own is."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forkserver
import pytest

START = [subprocess.Popen, forkserver.Popen]
TELLS = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "folder": sys.path[0], "home": os.environ.get("HOME"),
    "here": os.environ.get("FORKSERVER_TEST"), "parent": os.getppid(), "name": __name__,
    "session": os.getsid(0) == os.getpid(), "group": os.getpgrp() == os.getpid(),
    "encodings": [sys.stdin.encoding, sys.stdout.encoding, sys.stderr.errors],
    "through": sys.stdout.write_through, "line": sys.stderr.line_buffering,
    "interrupt": str(__import__("signal").getsignal(2)),
    "open": sorted(os.listdir("/proc/self/fd")),
    "read": sys.stdin.read(),
}))
"""


@pytest.fixture(autouse=True)
def _forked() -> None:
    if forkserver.server() is None:
        pytest.skip("every process is its own here")


@pytest.mark.parametrize(
    ("form", "unbuffered", "session"),
    [("command", "", False), ("command", "1", True), ("file", "1", False), ("module", "", True)],
)
def test_it_finds_what_a_process_of_its_own_finds(
    tmp_path: Path, form: str, unbuffered: str, session: bool
) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    words = {"command": ["-c", TELLS], "file": ["tells.py"], "module": ["-m", "tells"]}[form]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FORKSERVER_TEST": "a"}
    environment |= {"PYTHONUNBUFFERED": unbuffered}
    told = []
    for start in START:
        with start(
            [sys.executable, *words, "one", "two"],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=session,
            text=True,
        ) as process:
            out, _ = process.communicate("given")
        assert process.returncode == 0
        told.append(eval(out, {"true": True, "false": False, "null": None}))
    own, fork = told
    # The numbers of one file, which tells it apart from a process of its own.
    assert len(fork.pop("open")) == len(own.pop("open")) + 1
    assert fork == own
    assert fork["parent"] == os.getpid()
    assert fork["read"] == "given"


@pytest.mark.parametrize("start", START)
@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os._exit(5)", 5, ""),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'bye')", 0, "bye"),
    ],
)
def test_it_ends_as_a_process_of_its_own(start: Any, program: str, code: int, said: str) -> None:
    with start([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        _, errors = process.communicate()
    assert process.returncode == code
    assert errors.endswith(said)
    assert bool(errors) == bool(said)


@pytest.mark.parametrize("start", START)
def test_a_signal_reaches_it_and_its_end_is_waited_for(start: Any) -> None:
    program = "import time; print('here', flush=True); time.sleep(60)"
    with start(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout.readline() == b"here\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT


def test_run_is_that_of_subprocess() -> None:
    command = [sys.executable, "-c", "print(input()); raise SystemExit(3)"]
    done = forkserver.run(command, input="a", capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.args) == (3, "a\n", command)
    with pytest.raises(subprocess.CalledProcessError):
        forkserver.run(command, input="a", capture_output=True, text=True, check=True)
    started = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        forkserver.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.1)
    assert time.monotonic() - started < 30


def test_its_processes_are_its_own_and_forked_too() -> None:
    """A child of multiprocessing's spawn, and a child of that: each knows its parent."""
    done = forkserver.run(
        [sys.executable, "-m", "forked_family"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert done.stdout.split() == ["child", "True", "grandchild", "True"], done.stderr


def test_what_is_read_at_an_import_makes_it_a_process_of_its_own() -> None:
    program = "import sys; print('torch' in sys.modules)"
    for threads, expected in (("1", "True"), ("2", "False")):
        done = forkserver.run(
            [sys.executable, "-c", program],
            env={**os.environ, "OMP_NUM_THREADS": threads},
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == expected
    assert forkserver.afresh["OMP_NUM_THREADS"], "the report does not say why it was no fork"


def test_a_variable_that_ray_leaves_is_the_forks_too() -> None:
    program = "import os, sys; print('torch' in sys.modules, breakpoint() == os.getpid())"
    done = forkserver.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONBREAKPOINT": "os.getpid"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_what_a_client_of_metrics_reads_at_its_import_is_read_in_the_fork(tmp_path: Path) -> None:
    program = "import sys; from prometheus_client import values; "
    program += "print('torch' in sys.modules, values.ValueClass.__name__)"
    for folder, kind in ({}, "MutexValue"), ({"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}, "Mmaped"):
        done = forkserver.run(
            [sys.executable, "-c", program],
            env={**os.environ, "OMP_NUM_THREADS": "1", **folder},
            capture_output=True,
            text=True,
        )
        assert done.stdout.startswith(f"True {kind}"), done.stdout + done.stderr


def test_spawned_in_this_process_is_a_child_of_this_process() -> None:
    server = forkserver.server()
    assert server is not None
    assert server.offers(dict(os.environ)), "an import has set a variable that forbids it"
    process = multiprocessing.get_context("spawn").Process(target=os.getppid)
    process.start()
    assert process in multiprocessing.active_children()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("interpret", "kind"), [("0", "JITFunction"), ("1", "InterpretedFunction")]
)
def test_a_fork_chooses_whether_kernels_are_interpreted(interpret: str, kind: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    program = "import sys; print('torch' in sys.modules); "
    program += "import triton; print(type(triton.language.max).__name__)"
    done = forkserver.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": interpret},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["True", kind], done.stderr
