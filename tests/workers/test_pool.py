"""The pool of worker processes: limits, deaths and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine_core.errors import QueueFullError
from engine_core.workers import Limits, WorkerError, WorkerPool

MIB = 2**20
LIMITS = Limits(seconds=30, memory_bytes=64 * MIB, stack_bytes=MIB)


def make(limits: Limits = LIMITS, **settings: Any) -> WorkerPool:
    return WorkerPool("worker_tasks:begin", ("state",), limits, **settings)


def run(pool: WorkerPool, task: str, *arguments: Any) -> Any:
    return pool.submit(f"worker_tasks:{task}", *arguments).result(60)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = make()
    yield pool
    pool.close()


def gone(pids: list[int], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_each_task_has_a_process_and_the_state_as_it_was_made(pool: WorkerPool) -> None:
    seen = [run(pool, "look", text) for text in ("a", "b", "c")]
    assert [text for text, *_ in seen] == ["statea", "stateb", "statec"]
    assert [tasks for _, tasks, *_ in seen] == [1, 1, 1]
    pids = [pid for *_, pid, _ in seen]
    templates = {template for *_, template in seen}
    assert len({*pids, *templates, os.getpid()}) == 5
    assert gone(pids)


def test_workers_import_little(pool: WorkerPool) -> None:
    assert not {"torch", "pydantic", "numpy", "asyncio"} & set(run(pool, "modules"))


def test_large_arguments_and_results(pool: WorkerPool) -> None:
    data = os.urandom(10 * MIB)
    assert run(pool, "echo", data) == data[::-1]


def test_tasks_at_once(pool: WorkerPool) -> None:
    async def all_of_them() -> list[bytes]:
        futures = (pool.submit("worker_tasks:echo", b"%d" % i) for i in range(10, 30))
        return await asyncio.gather(*map(asyncio.wrap_future, futures))

    assert asyncio.run(all_of_them()) == [str(i)[::-1].encode() for i in range(10, 30)]


def test_an_error_is_raised_where_it_is_waited_for(pool: WorkerPool) -> None:
    with pytest.raises(KeyError, match="a culprit"):
        run(pool, "fail", "a culprit")


def test_memory_has_a_limit(pool: WorkerPool) -> None:
    assert run(pool, "allocate", 32 * MIB) == 32 * MIB
    with pytest.raises(WorkerError, match="more than 64 MiB of memory"):
        run(pool, "allocate", 100 * MIB)


def test_the_stack_has_a_limit(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"more than 1024 KiB of stack \(the worker ended by SIG"):
        run(pool, "recurse", 50_000)


@pytest.mark.parametrize("name", ["SIGABRT", "SIGILL", "SIGKILL"])
def test_a_death_is_told_by_name(pool: WorkerPool, name: str) -> None:
    with pytest.raises(WorkerError, match=f"the worker ended by {name}"):
        run(pool, "die", name)
    with pytest.raises(WorkerError, match="exit code 3"):
        run(pool, "leave")
    assert run(pool, "look", "!")[0] == "state!"


def test_time_has_a_limit() -> None:
    pool = make(Limits(0.3, 64 * MIB, MIB), what="the sleeper")
    _, _, _, template = run(pool, "look", "")
    with pytest.raises(WorkerError, match=r"took more than 0.3 s") as caught:
        run(pool, "sleep", 60)
    assert not caught.value.repeatable
    deadline = time.monotonic() + 5
    while psutil.Process(template).children():
        assert time.monotonic() < deadline, "it was not killed"
        time.sleep(0.01)
    pool.close()


def test_the_queue_has_a_limit() -> None:
    pool = make(max_workers=1, max_queued=2)
    futures: list[Future[Any]] = [pool.submit("worker_tasks:sleep", 60) for _ in range(3)]
    with pytest.raises(QueueFullError, match="3 requests wait for the worker already"):
        pool.submit("worker_tasks:sleep", 0)
    pool.close()
    with pytest.raises(WorkerError, match="shut down"):
        futures[0].result(10)
    for future in futures[1:]:
        with pytest.raises((CancelledError, WorkerError)):
            future.result(10)


def test_closing_ends_every_process() -> None:
    pool = make()
    *_, template = run(pool, "look", "")
    running = [pool.submit("worker_tasks:sleep", 60) for _ in range(2)]
    deadline = time.monotonic() + 10
    while len(psutil.Process(template).children()) < 2:
        assert time.monotonic() < deadline
    workers = [child.pid for child in psutil.Process(template).children()]
    pool.close()
    pool.close()
    assert gone([template, *workers])
    for future in running:
        with pytest.raises(WorkerError, match="shut down"):
            future.result(10)
    with pytest.raises(WorkerError, match="shut down"):
        pool.submit("worker_tasks:sleep", 0)


def test_a_template_that_was_killed_is_replaced() -> None:
    pool = make()
    *_, template = run(pool, "look", "")
    lost = pool.submit("worker_tasks:sleep", 60)
    while not (workers := psutil.Process(template).children()):
        time.sleep(0.01)
    os.kill(template, signal.SIGKILL)
    with pytest.raises(WorkerError, match="ended with all of its work"):
        lost.result(10)
    assert gone([worker.pid for worker in workers])
    assert run(pool, "look", "")[3] != template
    pool.close()


def test_an_initializer_that_fails() -> None:
    pool = WorkerPool("worker_tasks:begin_badly", ("state",), LIMITS)
    for _ in range(2):
        with pytest.raises(ValueError, match="no state"):
            run(pool, "look", "")
    pool.close()


PROGRAM = """
import os, signal, sys
from engine_core.workers import Limits, WorkerPool

pool = WorkerPool("worker_tasks:begin", ("state",), Limits(60, 2**26, 2**20))
*_, worker, template = pool.submit("worker_tasks:look", "").result()
child = os.fork()
if child == 0:
    *_, others = pool.submit("worker_tasks:look", "").result()
    assert others != template
    pool.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert pool.submit("worker_tasks:look", "").result()[3] == template
pool.submit("worker_tasks:sleep", 60)
print(template, flush=True)
sys.stdin.read()
"""


def test_forks_and_the_death_of_the_user(tmp_path: Path) -> None:
    # Without a guard against being imported again, as a script may be.
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        template = psutil.Process(int(process.stdout.readline()))
        while not (workers := template.children()):
            time.sleep(0.01)
        process.kill()
    assert gone([template.pid, *(worker.pid for worker in workers)])
