"""Ranks that are forks of the engine's process: they have nothing that is its user's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import forkserver
import pytest
import torch
from golden_fixtures import GOLDEN, golden_prompts

from engine_core import AsyncEngine, EngineConfig, own_process
from engine_core.engine.startup import open_engine
from engine_core.errors import OptionError
from engine_core.runtime import rank_processes

PROMPT = golden_prompts("llama-gqa")[2]

# A user's program, whose own part is a test's.
_PROGRAM = """
import io, json, logging, multiprocessing, os, signal, socket, sys, threading, time
from pathlib import Path
from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.errors import EngineError

model, ids, rest = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
logging.basicConfig(level=logging.INFO, format="HANDLED %(message)s")
told = {}

def start(**more):
    settings = dict(skip_tokenizer_init=True, tensor_parallel_size=2, max_model_len=160)
    return LLM(model, EngineConfig(**(settings | rest | more)))

def generate(llm):
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    return llm.generate(ids, params)[0].outputs[0].token_ids
"""
_TELL = "\nos.write(1, (json.dumps(told) + '\\n').encode())\n"

# A module map that says in every process that it was read, and in every rank that it starts.
_MAP = """
import functools, logging
from engine_core.runtime.worker import Worker
logging.getLogger("engine_core.map").warning("logged")
start = getattr(Worker.start, "__wrapped__", Worker.start)
@functools.wraps(start)
def printed(self, *given):
    print("printed", flush=True)
    return start(self, *given)
Worker.start = printed
MODULE_MAP = {}
"""


def run(part: str, **config: object) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    command = [sys.executable, "-c", _PROGRAM + part + _TELL, str(GOLDEN / "llama-gqa")]
    command += [json.dumps(PROMPT.input_ids), json.dumps(config)]
    done = forkserver.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done


def test_forked_ranks_have_nothing_of_the_user_s(tmp_path: Path) -> None:
    file = tmp_path / "map.py"
    file.write_text(_MAP)
    told, done = run(
        """
ours, theirs = socket.socketpair()
signal.signal(signal.SIGUSR2, lambda *_: None)
sys.stdout = io.StringIO()
with start() as llm:
    ranks = [rank.pid for rank in multiprocessing.active_children()]
    told["forked"] = llm.engine.core.executor._ranks.forked
    theirs.close()
    ours.settimeout(30)
    told["end"] = ours.recv(1) == b""
    told["stdin"] = [os.readlink(f"/proc/{pid}/fd/0") for pid in ranks]
    status = [Path(f"/proc/{pid}/status").read_text() for pid in ranks]
    caught = [int(text.split("SigCgt:")[1].split()[0], 16) for text in status]
    told["caught"] = [bool(mask >> (signal.SIGUSR2 - 1) & 1) for mask in caught]
    for pid in ranks:
        os.kill(pid, signal.SIGINT)
    told["tokens"] = generate(llm)
told["left"] = len(multiprocessing.active_children())
told["phases"] = [name for name in llm.startup if name in ("fork", "config") or "rank" in name]
told["printed"] = sys.stdout.getvalue()
""",
        custom_module_map=[str(file)],
    )
    assert told == {
        "forked": True,
        "end": True,
        "stdin": ["/dev/null"] * 2,
        "caught": [False, False],
        "tokens": PROMPT.new_tokens,
        "left": 0,
        "phases": ["fork", "config", "ranks", "rank open", "rank meet", "rank memory"],
        "printed": "",
    }
    # A line's end may come after the other rank's word.
    assert "".join(done.stdout.splitlines()[:-1]) == "printed" * 2
    lines = [line for line in done.stderr.splitlines() if "logged" in line]
    assert sorted(lines) == ["HANDLED logged", "logged", "logged"]


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("threading.Thread(target=time.sleep, args=(9,), daemon=True).start()", "this process"),
        # OpenMP's thread is none of Python's.
        ("import torch; torch.set_num_threads(2); torch.ones(1 << 22).add(1)", "a fork did not"),
        (
            "from engine_core.runtime import rank_processes as it; it._FORK_SECONDS = 0.1\n"
            "os.register_at_fork(after_in_child=lambda: time.sleep(100))",
            "a fork did not",
        ),
    ],
)
def test_where_a_fork_is_not_safe_ranks_are_new_processes(before: str, why: str) -> None:
    told, done = run(
        f"""
{before}
with start() as llm:
    told["forked"] = llm.engine.core.executor._ranks.forked
    told["tokens"] = generate(llm)
told["left"] = len(multiprocessing.active_children())
"""
    )
    assert told == {"forked": False, "tokens": PROMPT.new_tokens, "left": 0}
    assert f"HANDLED ranks are started as new processes: {why}" in done.stderr


def test_forks_without_their_gpus_give_way_to_new_processes() -> None:
    """As where a driver was begun before the fork; here no fork has a GPU."""
    told, done = run(
        """
import torch
from types import SimpleNamespace
from engine_core.runtime.executor import ProcessExecutor
make = ProcessExecutor.__init__

def made(self, source, config, ranks=None, compiles=None):
    told["given"] = ranks.forked
    make(self, SimpleNamespace(name=source.name, device=torch.device("cuda")), config, ranks)
    self._device = source.device

ProcessExecutor.__init__ = made
with start() as llm:
    told["forked"] = llm.engine.core.executor._ranks.forked
    told["tokens"] = generate(llm)
told["left"] = len(multiprocessing.active_children())
"""
    )
    assert told == {"given": True, "forked": False, "tokens": PROMPT.new_tokens, "left": 0}
    assert "HANDLED a fork of this process could not use its GPU" in done.stderr


def test_a_gpu_that_was_used_keeps_ranks_from_being_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are they if each has threads that OpenMP was not told to have poll briefly."""
    config = EngineConfig(tensor_parallel_size=2)
    monkeypatch.setattr(rank_processes.threading, "active_count", lambda: 1)
    monkeypatch.setattr(rank_processes, "_parent", lambda: 1)
    monkeypatch.setattr(rank_processes, "has_gpu", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert rank_processes._why_not(config) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert "several threads" in str(rank_processes._why_not(config))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "used a GPU" in str(rank_processes._why_not(config))
    with (tmp_path / "uvm").open("w"):
        assert rank_processes._has_open(str(tmp_path / "uvm"))
    assert not rank_processes._has_open(str(tmp_path / "uvm"))


def test_a_refused_model_ends_the_forks() -> None:
    told, _ = run(
        """
begun = []
from engine_core.engine import startup
fork = startup.fork_ranks
startup.fork_ranks = lambda *given: begun.append(fork(*given)) or begun[-1]
for wrong in ({"hf_overrides": {"intermediate_size": 85}}, {"max_model_len": 10**9}):
    try:
        start(**wrong)
    except EngineError as error:
        told.setdefault("errors", []).append(str(error))
told["begun"] = [len(ranks.processes) for ranks in begun]
told["left"] = len(multiprocessing.active_children())
told["folders"] = [os.path.exists(ranks.folder.name) for ranks in begun]
"""
    )
    assert "not divisible" in told["errors"][0]
    assert "max_model_len" in told["errors"][1]
    assert (told["begun"], told["left"], told["folders"]) == ([2, 2], 0, [False, False])


@pytest.mark.parametrize("kind", ["Fork", "Spawn"])
def test_a_process_that_cannot_be_started_ends_those_before(kind: str) -> None:
    told, _ = run(
        f"""
from engine_core.runtime import rank_processes
one = multiprocessing.context.{kind}Process
begin, begun = one.start, []
def start_one(self):
    if begun:
        raise OSError("no room for a process")
    begin(self)
    begun.append(self.pid)
one.start = start_one
if one is multiprocessing.context.SpawnProcess:
    rank_processes._why_not = lambda config: "a test wants none"
try:
    start()
except OSError as error:
    told["error"], kept = str(error), error  # whose frames would keep connections open
told["begun"] = len(begun)
told["left"] = len(multiprocessing.active_children())
"""
    )
    assert told == {"error": "no room for a process", "begun": 1, "left": 0}


def test_forked_ranks_end_with_their_parent() -> None:
    part = """
llm = start()
ranks = [rank.pid for rank in multiprocessing.active_children()]
told["forked"] = llm.engine.core.executor._ranks.forked
os.kill(ranks[0], signal.SIGSTOP)  # it cannot read that its parent is gone
print(json.dumps(told | {"ranks": ranks}), flush=True)
time.sleep(100)
"""
    command = [sys.executable, "-c", _PROGRAM + part, str(GOLDEN / "llama-gqa"), "[]", "{}"]
    with forkserver.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["forked"] is True
        os.kill(process.pid, signal.SIGKILL)
    limit = time.monotonic() + 60
    while any(_is_alive(pid) for pid in told["ranks"]):
        assert time.monotonic() < limit, "one lives on"
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# As Python runs what comes by stdin, in a fork.
_BY_STDIN = """
import sys
__file__ = "<stdin>"
exec(compile(sys.stdin.read(), __file__, "exec"))
"""


@pytest.mark.parametrize(
    "by", ["file", "stdin", pytest.param("stdin of a new process", marks=pytest.mark.long)]
)
def test_new_processes_do_not_read_the_program(tmp_path: Path, by: str) -> None:
    """It would start an engine in each of them, or is not found."""
    part = """
threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
print("read", flush=True)
with start() as llm:
    told["forked"] = llm.engine.core.executor._ranks.forked
    told["tokens"] = generate(llm)
"""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM + part + _TELL)
    ways: dict[str, list[str]] = {"file": [str(program)], "stdin": ["-c", _BY_STDIN]}
    command = [sys.executable, *ways.get(by, ["-"]), str(GOLDEN / "llama-gqa")]
    command += [json.dumps(PROMPT.input_ids), "{}"]
    with program.open() as text:
        done = forkserver.run(command, stdin=text, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    read, told = done.stdout.splitlines()
    assert (read, json.loads(told)) == ("read", {"forked": False, "tokens": PROMPT.new_tokens})


def test_what_is_the_program_s_own_has_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own:
        pass

    def told(given: object) -> set[str]:
        with own_process.main_left_out(given):
            return {name for name in spawn.get_preparation_data("one") if "main" in name}

    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", "program.py", raising=False)
    whole = {"init_main_from_path"}
    assert told(("model", EngineConfig())) == set()
    Own.__module__, Own.__qualname__ = "__main__", "Own"
    monkeypatch.setattr(main, "Own", Own, raising=False)
    assert told(("model", Own())) == whole
    # As in a process that was spawned itself.
    Own.__module__ = "__mp_main__"
    monkeypatch.setitem(sys.modules, "__mp_main__", main)
    assert told(("model", Own())) == whole
    with own_process.main_left_out(()):
        other = concurrent.futures.ThreadPoolExecutor(1)
        data = other.submit(spawn.get_preparation_data, "another thread's").result()
    assert whole <= data.keys()
    assert whole <= spawn.get_preparation_data("one").keys()


def test_ranks_in_a_daemonic_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiprocessing's own word for it is an AssertionError."""
    monkeypatch.setattr(own_process, "may_have_children", lambda: False)
    with pytest.raises(OptionError, match="tensor_parallel_size 2 starts processes, which a daem"):
        open_engine(str(GOLDEN / "llama-gqa"), EngineConfig(tensor_parallel_size=2), fork=True)
    open_engine(str(GOLDEN / "llama-gqa"), EngineConfig(), fork=True)
    with pytest.raises(OptionError, match="AsyncEngine starts processes, which a daemonic"):
        asyncio.run(AsyncEngine.start(str(GOLDEN / "llama-gqa"), EngineConfig()))
