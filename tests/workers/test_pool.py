"""The pool of worker processes: limits, deaths and ends."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine_core.errors import EngineDeadError, QueueFullError
from engine_core.workers import Limits, SharedBytes, WorkerError, WorkerPool, Workers

MIB = 2**20
LIMITS = Limits(seconds=30, memory_bytes=64 * MIB, stack_bytes=MIB)


def setup(pool: WorkerPool, limits: Limits = LIMITS, **settings: Any) -> Workers:
    return pool.setup("worker_tasks:begin", lambda: ("state",), limits, **settings)


def run(workers: Workers, task: str, *arguments: Any) -> Any:
    return workers.submit(f"worker_tasks:{task}", *arguments).result(60)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    pool = WorkerPool()
    yield setup(pool)
    pool.close()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def gone(pids: list[int], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_each_task_has_a_process_and_the_state_as_it_was_made(workers: Workers) -> None:
    seen = [run(workers, "look", text) for text in ("a", "b", "c")]
    assert [text for text, *_ in seen] == ["statea", "stateb", "statec"]
    assert [tasks for _, tasks, *_ in seen] == [1, 1, 1]
    pids = [pid for *_, pid, _ in seen]
    templates = {template for *_, template in seen}
    assert len({*pids, *templates, os.getpid()}) == 5
    assert gone(pids)


def test_workers_import_little(workers: Workers) -> None:
    assert not {"torch", "pydantic", "numpy", "asyncio"} & set(run(workers, "modules"))


def test_large_arguments_and_results(workers: Workers) -> None:
    data = os.urandom(10 * MIB)
    assert run(workers, "echo", data) == data[::-1]


def test_tasks_at_once(workers: Workers) -> None:
    async def all_of_them() -> list[bytes]:
        futures = (workers.submit("worker_tasks:echo", b"%d" % i) for i in range(10, 30))
        return await asyncio.gather(*map(asyncio.wrap_future, futures))

    assert asyncio.run(all_of_them()) == [str(i)[::-1].encode() for i in range(10, 30)]


def test_an_error_is_raised_where_it_is_waited_for(workers: Workers) -> None:
    with pytest.raises(KeyError, match="a culprit"):
        run(workers, "fail", "a culprit")


def test_memory_has_a_limit(workers: Workers) -> None:
    assert run(workers, "allocate", 32 * MIB) == 32 * MIB
    with pytest.raises(WorkerError, match="more than 64 MiB of memory"):
        run(workers, "allocate", 100 * MIB)


def test_the_stack_has_a_limit(workers: Workers) -> None:
    with pytest.raises(WorkerError, match=r"more than 1024 KiB of stack \(the worker ended by SIG"):
        run(workers, "recurse", 50_000)


@pytest.mark.parametrize("name", ["SIGABRT", "SIGILL", "SIGKILL"])
def test_a_death_is_told_by_name(workers: Workers, name: str) -> None:
    with pytest.raises(WorkerError, match=f"the worker ended by {name}"):
        run(workers, "die", name)
    with pytest.raises(WorkerError, match="exit code 3"):
        run(workers, "leave")
    assert run(workers, "look", "!")[0] == "state!"


def test_a_worker_that_dies_before_it_has_read_its_task_is_told_by_name() -> None:
    pool = WorkerPool()
    workers = setup(pool)
    *_, template = run(workers, "look", "")
    assert gone([child.pid for child in psutil.Process(template).children()])
    forked = Path(f"/proc/{template}/task/{template}/children")
    for _ in range(20):  # it may have read its task before it is found
        task = workers.submit("worker_tasks:echo", bytes(200 * MIB))
        while not (found := forked.read_text().split()) and not task.done():
            pass
        with suppress(IndexError, ProcessLookupError):
            os.kill(int(found[0]), signal.SIGKILL)
        error = task.exception(60)
        assert isinstance(error, WorkerError)
        if "the worker ended by SIGKILL" in str(error):
            break
    else:
        pytest.fail(f"never found in time: {error}")
    pool.close()


def test_time_has_a_limit() -> None:
    pool = WorkerPool()
    workers = setup(pool, Limits(1.5, 64 * MIB, MIB), what="the sleeper")
    _, _, _, template = run(workers, "look", "")
    with pytest.raises(WorkerError, match=r"took more than 1.5 s") as caught:
        run(workers, "sleep", 60)
    assert not caught.value.repeatable
    deadline = time.monotonic() + 60
    while psutil.Process(template).children():
        assert time.monotonic() < deadline, "it was not killed"
        time.sleep(0.01)
    pool.close()


def test_the_queue_has_a_limit() -> None:
    pool = WorkerPool(max_workers=1, max_queued=2)
    workers = setup(pool)
    futures: list[Future[Any]] = [workers.submit("worker_tasks:sleep", 60) for _ in range(3)]
    with pytest.raises(QueueFullError, match="3 requests wait for the worker already"):
        workers.submit("worker_tasks:sleep", 0)
    futures[1].cancel()
    futures[1] = workers.submit("worker_tasks:sleep", 60)
    pool.close()
    for future in futures:
        with pytest.raises(EngineDeadError, match="shut down"):
            future.result(60)
    assert workers.unfinished == 0


def test_a_worker_ends_when_its_task_is_cancelled() -> None:
    pool = WorkerPool(max_workers=1)
    workers = setup(pool)
    *_, template = run(workers, "look", "")
    task = workers.submit("worker_tasks:sleep", 60)
    early = workers.submit("worker_tasks:sleep", 60)
    waiting = workers.submit("worker_tasks:look", "next")
    while not psutil.Process(template).children():
        assert not task.done()
    assert not task.cancel()
    with pytest.raises(WorkerError, match="nobody waits for it any more"):
        task.result(60)
    # Before it has a worker, too.
    while not early.running():
        assert not early.done()
    assert not early.cancel()
    assert isinstance(early.exception(60), WorkerError)
    assert waiting.result(60)[0] == "statenext"
    pool.close()


def test_an_error_holds_nothing_that_was_sent(workers: Workers) -> None:
    gc.collect()
    gc.disable()
    try:
        task = workers.submit("worker_tasks:fail", "a culprit")
        assert task.exception(60)
        gone = weakref.ref(task)
        del task
        deadline = time.monotonic() + 60
        while gone() is not None:  # the thread that had it goes on to its next one
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        gc.enable()


def test_tasks_of_one_setup_hold_up_no_others() -> None:
    pool = WorkerPool(max_workers=2, max_queued=3)
    busy, other = setup(pool), setup(pool)
    other.start()
    waiting = [busy.submit("worker_tasks:sleep", 60) for _ in range(4)]
    assert run(other, "look", "a")[0] == "statea"
    with pytest.raises(QueueFullError, match="4 requests wait"):
        busy.submit("worker_tasks:sleep", 60)
    assert run(other, "look", "b")[0] == "stateb"
    assert sum(future.running() for future in waiting) == 1
    pool.close()


def test_clients_take_turns() -> None:
    pool = WorkerPool(max_workers=2)  # one of which this setup has
    workers = setup(pool)
    workers.start()
    begun: list[str] = []

    def ask(name: str) -> Future[Any]:
        task = workers.submit("worker_tasks:look", name, client=name[0])
        task.add_done_callback(lambda done: begun.append(name))
        return task

    first = workers.submit("worker_tasks:sleep", 60, client="a")
    tasks = [ask(name) for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1", "b3")]
    assert workers.unfinished == 9
    # What is cancelled leaves at once, and its client's next one has its place.
    assert tasks[5].cancel()
    assert workers.unfinished == 8
    first.cancel()
    for task in tasks[:5] + tasks[6:]:
        assert task.result(60)
    assert begun == ["b2", "a1", "b1", "c1", "a2", "b3", "a3", "a4"]
    assert workers.unfinished == 0
    pool.close()


def test_a_client_whose_tasks_take_long_leaves_places_to_others() -> None:
    pool = WorkerPool(max_workers=3)  # two of which this setup has
    workers = setup(pool, Limits(600, 64 * MIB, MIB))
    workers.start()
    long = [workers.submit("worker_tasks:sleep", 600, client="a") for _ in range(4)]
    quick = [workers.submit("worker_tasks:look", name, client="b") for name in "xyz"]
    assert not long[0].cancel()
    # The other one goes on, and no third begins before all of these have ended.
    assert [task.result(60)[0] for task in quick] == ["statex", "statey", "statez"]
    assert long[1].running()
    pool.close()


def test_a_full_queue_has_room_for_who_has_less_in_it() -> None:
    pool = WorkerPool(max_workers=1, max_queued=4)
    workers = setup(pool)

    def ask(client: str) -> Future[Any]:
        return workers.submit("worker_tasks:sleep", 60, client=client)

    many = [ask("a") for _ in range(5)]
    other = [ask("b"), ask("b")]
    for task in many[:-3:-1]:  # the newest
        with pytest.raises(QueueFullError, match="5 requests wait for the worker already"):
            task.result(60)
    for client in "ab":  # both have as many now
        with pytest.raises(QueueFullError, match="5 requests wait for the worker already"):
            ask(client)
    assert not any(task.done() for task in (*many[:3], *other))
    third = ask("c")
    with pytest.raises(QueueFullError):
        many[2].result(60)
    assert workers.unfinished == 5
    assert not third.done()
    pool.close()


def test_shared_memory_travels_both_ways() -> None:
    pool = WorkerPool()
    workers = setup(pool)
    blocks = [SharedBytes.of([(i, bytes([i]))], 5000 + i) for i in range(1, 150)]
    workers.start()
    gc.collect()  # of what other tests have left
    before = open_files()
    turned = run(workers, "turn", blocks)
    assert open_files() == before + len(blocks)
    for number, block in enumerate(turned, 1):
        content = block.map()
        assert len(content) == block.size == 5000 + number
        assert content[-1 - number] == number
        content[0] = 7  # this mapping's alone
        assert block.map()[0] == 0
        with pytest.raises(OSError, match="not permitted"):
            os.pwrite(block.fileno(), b"a", 0)
        with pytest.raises(OSError, match="not permitted"):
            os.truncate(block.fileno(), 10)
    del block, content
    turned.clear()
    assert open_files() == before
    # Nobody takes what a worker gave before it died, or what was not waited for.
    with pytest.raises(WorkerError, match="SIGKILL"):
        run(workers, "give_and_die", 10**7)
    pool.close()
    assert open_files() <= before


LOOK = """
import pickle, sys
block = pickle.load(sys.stdin.buffer)
print(block.lost or block.map()[:])
"""


def test_shared_memory_is_opened_again_where_its_pickle_is_read() -> None:
    def look(pickled: bytes) -> str:
        command = [sys.executable, "-c", LOOK]
        done = subprocess.run(command, input=pickled, capture_output=True, check=True)
        return done.stdout.decode().strip()

    block = SharedBytes.of([(3, b"abc")], 8)
    pickled = pickle.dumps(block)
    assert look(pickled) == repr(bytes(3) + b"abc" + bytes(2))
    number = block.fileno()
    del block
    assert "No such file" in look(pickled)
    block = SharedBytes.of([(0, b"another")], 8)
    assert block.fileno() == number
    assert look(pickled) == "its sender has dropped it"


def test_closing_ends_every_process() -> None:
    pool = WorkerPool()
    workers = setup(pool)
    *_, template = run(workers, "look", "")
    running = [workers.submit("worker_tasks:sleep", 60) for _ in range(2)]
    deadline = time.monotonic() + 60
    while len(psutil.Process(template).children()) < 2:
        assert time.monotonic() < deadline
    pids = [child.pid for child in psutil.Process(template).children()]
    pool.close()
    pool.close()
    assert gone([template, *pids])
    for future in running:
        with pytest.raises(EngineDeadError, match="shut down"):
            future.result(60)
    with pytest.raises(EngineDeadError, match="shut down"):
        workers.submit("worker_tasks:sleep", 0)
    with pytest.raises(EngineDeadError, match="shut down"):
        workers.start()


def test_a_template_that_was_killed_is_replaced_and_its_work_done_again_once() -> None:
    pool = WorkerPool()
    workers = setup(pool)
    *_, template = run(workers, "look", "")

    def kill() -> None:
        while not (children := psutil.Process(template).children()):
            time.sleep(0.01)
        os.kill(template, signal.SIGKILL)
        assert gone([child.pid for child in children])

    lost = workers.submit("worker_tasks:sleep", 60)
    kill()
    *_, other = run(workers, "look", "")
    assert other != template
    template = other
    kill()
    with pytest.raises(WorkerError, match="ended with all of its work"):
        lost.result(60)
    assert run(workers, "look", "")[3] != template
    pool.close()


def test_an_initializer_that_fails() -> None:
    pool = WorkerPool()
    workers = pool.setup("worker_tasks:begin_badly", lambda: ("state",), LIMITS)
    for _ in range(2):
        with pytest.raises(ValueError, match="no state"):
            run(workers, "look", "")
    pool.close()


PROGRAM = """
import os, signal, sys
from engine_core.workers import Limits, WorkerPool

pool = WorkerPool()
workers = pool.setup("worker_tasks:begin", lambda: ("state",), Limits(60, 2**26, 2**20))
*_, worker, template = workers.submit("worker_tasks:look", "").result()
child = os.fork()
if child == 0:
    *_, others = workers.submit("worker_tasks:look", "").result()
    assert others != template
    pool.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert workers.submit("worker_tasks:look", "").result()[3] == template
workers.submit("worker_tasks:sleep", 60)
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
