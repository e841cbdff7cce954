"""Garbage collector and heap: a user's are left alone, a process of ours has its own ways."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import multiprocessing.util
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import forkserver
import pytest
from golden_fixtures import GOLDEN

from engine_core import AsyncEngine, EngineConfig, SamplingParams, own_process

MODEL = str(GOLDEN / "llama-gqa")
IDS = [5, 6, 7]

# What an engine in this process does to it, as JSON.
_IN_PROCESS = """
import ctypes, gc, json, sys
libraries = []
class CDLL(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        libraries.append(name)
        super().__init__(name, *args, **kwargs)
ctypes.CDLL = CDLL
from engine_core import LLM, EngineConfig, own_process
def run():
    llm = LLM(sys.argv[1], EngineConfig(skip_tokenizer_init=True, max_model_len=64))
    loaded = gc.get_freeze_count()
    llm.generate([5, 6, 7])
    llm.close()
    return loaded
run()  # Imports what an engine needs.
found = {}
for whose in ("user's", "ours"):
    if whose == "ours":
        own_process.claim()
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    libraries.clear()
    counts = [gc.get_freeze_count(), run(), gc.get_freeze_count()]
    found[whose] = [counts, "libc.so.6" in libraries]
print(json.dumps(found))
"""

# A module map that writes down, in the engine process, what is frozen when a step begins.
_WATCH = """
import gc
from pathlib import Path
from engine_core.runtime.worker import Worker
submit = Worker.submit
def watched(self, plan):
    Path(__file__).with_name("count").write_text(str(gc.get_freeze_count()))
    return submit(self, plan)
Worker.submit = watched
MODULE_MAP = {}
"""


# Prompts of 160 lengths, each of which oneDNN compiles products for; MiB that they leave in use.
_LENGTHS = """
import ctypes, sys
from engine_core import LLM, SamplingParams, own_process
own_process.claim()
fields = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in fields]
libc = ctypes.CDLL("libc.so.6")
libc.mallinfo2.restype = Heap
llm = LLM(sys.argv[1], skip_tokenizer_init=True, max_model_len=512, enable_prefix_caching=False)
llm.generate([5] * 500, SamplingParams(max_tokens=1))
before = libc.mallinfo2().uordblks
for length in range(1, 161):
    llm.generate([5] * length, SamplingParams(max_tokens=1))
print((libc.mallinfo2().uordblks - before) / 2**20)
"""


# What torch's OpenMP library says of itself when it is loaded.
_POLLS = """
import sys
if sys.argv[1] == "first":
    import torch
from engine_core import LLM
"""


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP")
@pytest.mark.parametrize(
    ("torch", "environment", "polls"),
    [
        ("later", {}, "200"),
        # What the library itself takes for these.
        pytest.param("later", {"OMP_WAIT_POLICY": "passive"}, "0", marks=pytest.mark.long),
        pytest.param("first", {}, "300000", marks=pytest.mark.long),
    ],
    ids=["default", "policy", "too-late"],
)
def test_idle_threads_of_openmp_poll_briefly(
    torch: str, environment: dict[str, str], polls: str
) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP_", "OMP_WAIT"))}
    done = subprocess.run(
        [sys.executable, "-c", _POLLS, torch],
        capture_output=True,
        text=True,
        check=True,
        env={**kept, "OMP_DISPLAY_ENV": "verbose", **environment},
    )
    found = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    if found is None:
        pytest.skip("torch's OpenMP library is not GNU's")
    assert found[1] == polls


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads by Linux's list of them")
@pytest.mark.parametrize("asked", [None, "2"])
def test_numpy_starts_no_threads_unless_it_is_told_to(asked: str | None) -> None:
    script = (
        "import os; from engine_core import own_process; own_process.claim(); import numpy; "
        "print(len(os.listdir('/proc/self/task')), os.environ['OPENBLAS_NUM_THREADS'])"
    )
    kept = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=kept if asked is None else {**kept, "OPENBLAS_NUM_THREADS": asked},
    )
    threads, told = map(int, done.stdout.split())
    assert told == int(asked or 1)
    if asked is None:
        assert threads == 1
    elif own_process.count_cores() > 1 and threads == 1:
        pytest.skip("NumPy's library of products is not OpenBLAS with threads of its own")


@functools.cache
def in_process() -> dict[str, tuple[list[int], bool]]:
    """Counts of frozen objects, before, with a model and after; whether the heap's limits are set.

    As long as the process is its user's, and once it is the engine's alone.
    """
    done = subprocess.run(
        [sys.executable, "-c", _IN_PROCESS, MODEL], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_a_user_keeps_what_was_frozen_and_the_heap_as_it_was() -> None:
    (before, loaded, closed), heap = in_process()["user's"]
    assert before > 100_000
    # Some that were frozen are no longer referred to, and gone; none is added, none thawed.
    assert before - 1_000 < closed <= loaded <= before
    assert not heap


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_a_process_of_ours_freezes_what_was_loaded_and_keeps_its_heap() -> None:
    (before, loaded, closed), heap = in_process()["ours"]
    assert loaded > before
    assert closed == 0
    assert heap


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_a_process_of_ours_keeps_few_compiled_products() -> None:
    command = [sys.executable, "-c", _LENGTHS, MODEL]
    done = forkserver.run(command, capture_output=True, text=True, check=True)
    # 320 if each were kept in both of the caches, 50 with their limits.
    assert float(done.stdout) < 120


def test_the_engine_process_freezes_what_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a fork of the tests' server all that it imported is frozen before.
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", forkserver.spawn_afresh)
    module_map = tmp_path / "watch.py"
    module_map.write_text(_WATCH)

    async def generate() -> None:
        config = EngineConfig(
            skip_tokenizer_init=True, max_model_len=64, custom_module_map=str(module_map)
        )
        engine = await AsyncEngine.start(MODEL, config)
        try:
            async with await engine.add_request(IDS, SamplingParams(max_tokens=2)) as stream:
                _ = [output async for output in stream]
        finally:
            await engine.close()

    asyncio.run(generate())
    assert int((tmp_path / "count").read_text()) > 50_000


class Cycle:
    """Garbage that only a collection finds, once nobody else holds it."""

    def __init__(self) -> None:
        self.me = self


def lives_through(block: Callable[[], None]) -> bool:
    """Whether a cycle is there after so many new objects that a collection is due."""
    made: list[bool] = []
    before = gc.get_threshold()
    gc.set_threshold(10)
    try:
        with own_process.uncollected():
            seen = weakref.ref(Cycle())
            block()
            kept = [[] for _ in range(1000)]
            made.append(seen() is not None and len(kept) == 1000)
    finally:
        gc.set_threshold(*before)
    return made[0]


def test_no_garbage_is_collected_while_one_thread_asks_for_it() -> None:
    leave, left = threading.Event(), threading.Event()
    inside = threading.Event()

    def other() -> None:
        with own_process.uncollected():
            inside.set()
            leave.wait()
        left.set()

    def let_it_leave() -> None:
        leave.set()
        assert left.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    # The other thread came first and leaves first: the collector is not its to turn on.
    assert lives_through(let_it_leave)
    thread.join()
    assert gc.isenabled()


def test_a_collector_that_its_user_turned_off_stays_off() -> None:
    gc.disable()
    try:
        assert lives_through(lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()
