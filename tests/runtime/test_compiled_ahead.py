"""Kernels that are compiled beside a start or ahead of it, without a GPU."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forkserver
import pytest
import torch
from golden_fixtures import GOLDEN

pytest.importorskip("triton", reason="triton is not installed")

from engine_core import Engine, EngineConfig
from engine_core.engine import beside, engine, kept_kernels
from engine_core.engine.beside import Begun, begun_early, compile_beside, usable_cores
from engine_core.engine.rehearsal import live
from engine_core.kernels import GPU
from engine_core.runtime.absent import absent_gpu
from engine_core.runtime.ahead import Compilers, Module, Need
from engine_core.runtime.compiles import NOBODY, CompileProcess, Forked, name_of
from engine_core.runtime.step_batch import GraphKey


def alone(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script beside this one, by a process in which kernels are not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return forkserver.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        env=environment | {"TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_numbers_are_drawn_on_a_gpu_that_is_not_there() -> None:
    """As the trials of kernels draw them, whose own launches are compiled ahead too."""
    with absent_gpu(GPU.of_capability((9, 0)), 1 << 30):
        draw = torch.Generator("cuda").manual_seed(0)
        numbers = torch.randn((2, 3), generator=draw, device="cuda")
        codes = torch.randint(16, (4,), generator=draw, device="cuda", dtype=torch.uint8)
        assert numbers.is_cuda
        assert (numbers.shape, codes.shape, codes.dtype) == ((2, 3), (4,), torch.uint8)


def test_what_processes_compiled_is_found_by_launches(tmp_path: Path) -> None:
    """Of whatever tensors; those that begin elsewhere in memory have a kernel of their own."""
    done = alone("launched_ahead.py", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["errors"] == []
    assert found["compiled"] == ["_choose_greedy_kernel", "_norm_kernel"]
    assert found["launches"] == 4
    assert found["handles"] == found["compiled"]
    # What was loaded is not looked for by launches, and it is loaded once.
    assert (found["loaded"], found["hits"]) == ([True, True], [False])
    # Triton's own class of launches finds the modules that some releases have.
    assert found["modules_made"] == 0
    assert found["summary"].startswith("2 variants of 2 kernels, 0 of them kept")
    again = json.loads(alone("launched_ahead.py", tmp_path).stdout)
    assert (again["compiled"], again["hits"]) == ([], [True])


def test_a_kernel_can_be_loaded_once_all_that_its_launch_needs_is_there(tmp_path: Path) -> None:
    """Compiled or kept from before; not one that failed. Ranks are other processes."""
    *alone_twice, ranks = json.loads(alone("told_ahead.py", tmp_path).stdout)
    for told in alone_twice:
        loads = [place for place, (kind, _) in enumerate(told) if kind == "load"]
        names = sorted(told[place][1] for place in loads)
        assert names == ["_choose_greedy_kernel", "_norm_kernel"]
        assert all(["compiled", told[place][1]] in told[:place] for place in loads)
        assert [name for _, name in told].count("_norm_kernel") == 3  # one is compiled in vain
    assert {kind for kind, _ in ranks} == {"compiled"}


def scripted(*events: object, end: str = "", silence: float = 60.0) -> tuple[CompileProcess, Path]:
    """A process that writes these events, each once there is a line more in what it was sent."""
    code = (
        "import sys\n"
        "sys.stdin.read()\n"
        "import time, pathlib\n"
        f"for number, event in enumerate({[json.dumps(event) for event in events]!r}):\n"
        "    while not pathlib.Path(sys.argv[1], str(number)).exists(): time.sleep(0.005)\n"
        "    print(event, flush=True)\n"
        f"{end}\n"
    )
    folder = Path(tempfile.mkdtemp())
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    compiles = CompileProcess(process, process.stdin, process.stdout, silence)
    compiles.send(b"all")
    return compiles, folder


STEP, OTHER = GraphKey(1, 1, 0), GraphKey(8, 8, 0)


def test_a_step_is_ready_once_all_its_kernels_are_compiled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    compiles, folder = scripted(
        {"compiled": "a"},
        {"recorded": name_of(STEP), "kernels": ["a", "b"]},
        {"compiled": "b"},
        {"ended": "2 variants"},
    )
    for number in range(3):
        assert not compiles.ready(STEP)
        (folder / str(number)).touch()
        assert compiles.ready(STEP, 10.0 if number == 2 else 0.05) == (number == 2)
    assert not compiles.ready(OTHER)
    (folder / "3").touch()
    compiles.wait(OTHER)  # nobody compiles it any more
    compiles.close()
    assert "kernels ahead: 2 variants" in caplog.text


def test_compiled_kernels_are_loaded_while_others_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One at a time for who asks; one that cannot be loaded is left to its first launch."""
    compiles, folder = scripted(
        *({"load": name} for name in ("a", "bad", "b")),
        {"recorded": name_of(STEP), "kernels": []},
    )
    loaded: list[str] = []

    def load(text: str) -> None:
        loaded.append(text)
        if text == "bad":
            raise RuntimeError("no room on the device")
        if text == "b":
            (folder / "3").touch()

    monkeypatch.setattr("engine_core.runtime.ahead.load", load)
    caplog.set_level(logging.INFO)
    assert not compiles.load_next()
    (folder / "0").touch()
    while not compiles.load_next():
        time.sleep(0.001)
    assert loaded == ["a"]
    for number in (1, 2):
        (folder / str(number)).touch()
    compiles.wait(STEP)
    compiles.close()
    assert loaded == ["a", "bad", "b"]
    assert "no room on the device" in caplog.text


def test_nobody_waits_for_a_process_that_died(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    compiles, folder = scripted({"recorded": name_of(STEP), "kernels": ["a"]}, end="sys.exit(3)")
    assert not compiles.ready(STEP)
    (folder / "0").touch()
    compiles.wait(STEP)
    compiles.close()
    assert "a start takes longer: the process ended" in caplog.text


def test_nobody_waits_for_a_process_that_is_stuck(caplog: pytest.LogCaptureFixture) -> None:
    compiles, _ = scripted({"recorded": name_of(STEP), "kernels": ["a"]}, silence=0.2)
    assert not compiles.ready(STEP)
    assert compiles.ready(STEP, 10.0)
    compiles.close()  # returns, so the process has ended
    (record,) = caplog.records
    assert "their process was silent" in record.message


def test_a_process_that_writes_something_else_is_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    compiles, folder = scripted(5, silence=5.0)
    (folder / "0").touch()
    compiles.wait(STEP)
    compiles.close()
    assert "a start takes longer: TypeError" in caplog.text


@pytest.mark.parametrize("kept", [False, True])
def test_no_start_fails_by_what_compiles_ahead(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """No process is begun where all seems to be there."""
    caplog.set_level(logging.INFO)
    source = SimpleNamespace(
        device=torch.device("cuda"), model_config=SimpleNamespace(pooling=None), state_known=True
    )
    opened: Any = SimpleNamespace(source=source, config=EngineConfig(), ranks=None)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    begun = []

    class Noted(Forked):
        def __init__(self, pid: int) -> None:
            super().__init__(pid)
            begun.append(pid)

    monkeypatch.setattr(beside, "Forked", Noted)
    monkeypatch.setattr(kept_kernels, "may_be_kept", lambda *_: kept)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(beside, "gpu_of", lambda _: GPU.of_capability((9, 0)))
    assert compile_beside(opened, Begun()) is NOBODY  # this is no model
    (record,) = caplog.records
    assert record.message.startswith("kernels are not compiled ahead: ")
    # What was forked meanwhile is gone.
    assert len(begun) == (not kept)
    for pid in begun:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("settings", "here", "begins"),
    [
        ({}, {}, True),
        ({}, {"has_gpu": False}, False),
        ({}, {"kept": True}, False),
        ({}, {"threads": 2}, False),
        ({"device": "cpu"}, {}, False),
        ({"eager": True}, {}, False),
        ({"compile_processes": 0}, {}, False),
        ({"tensor_parallel_size": 2}, {}, False),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_process_is_begun_before_the_gpu_is_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    here: dict[str, Any],
    begins: bool,
    fails: bool,
) -> None:
    """If the model is refused meanwhile it is gone."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(beside, "has_gpu", lambda: here.get("has_gpu", True))
    monkeypatch.setattr(threading, "active_count", lambda: here.get("threads", 1))
    if here.get("kept"):
        (tmp_path / "engine-core-0.json").write_text("")
    with contextlib.suppress(KeyError), begun_early(EngineConfig(**settings)) as begun:
        process = begun.process
        assert (process is not None) == begins
        if fails:
            raise KeyError
    if process is not None:
        assert isinstance(process._process, Forked)
        assert process._process._ended == fails
        process.close()


def test_an_interrupt_of_a_start_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is forked, before it is told what to do, and once the model is loaded."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(beside, "has_gpu", lambda: True)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    fork, forked = os.fork, []

    def interrupted() -> int:
        pid = fork()
        if pid:
            forked.append(pid)
            os.kill(os.getpid(), signal.SIGINT)
        return pid

    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", interrupted)
        with pytest.raises(KeyboardInterrupt), begun_early(EngineConfig()):
            pytest.fail("it was interrupted")

    def noted() -> int:
        pid = fork()
        forked.extend([pid] if pid else [])
        return pid

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fork", noted)
    for step in ("compile_beside", "choose_tokenizer", "Frontend"):
        with monkeypatch.context() as patch:
            patch.setattr(engine, step, interrupt)
            if step != "compile_beside":
                patch.setattr(engine, "compile_beside", lambda _, begun: begun.process)
            with pytest.raises(KeyboardInterrupt):
                Engine(str(GOLDEN / "llama-gqa"), EngineConfig(skip_tokenizer_init=True))
    assert len(forked) == 4
    for pid in forked:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "30000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_cores_are_those_whose_time_a_container_has(
    tmp_path: Path, files: dict[str, str], most: int | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    assert usable_cores(tmp_path) == (most or len(os.sched_getaffinity(0)))


class Fake:
    """A variant that a process compiles at once."""

    is_slow = False

    def __init__(self, name: str) -> None:
        self.name, self.file = name, f"{name}.json"
        self.key = name.encode().hex()

    def compile(self) -> None:
        assert os.environ["TRITON_CACHE_DIR"]


def queued(*names: str) -> Compilers:
    compilers = Compilers(2)
    for name in names:
        assert compilers.add(Fake(name))  # type: ignore[arg-type]
    return compilers


def test_with_too_few_processes_fewer_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fork, forks, files = os.fork, 0, len(list(Path("/proc/self/fd").iterdir()))

    def limited() -> int:
        nonlocal forks
        forks += 1
        if forks == 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    compilers = queued("a", "b", "c")
    ends = []
    while compilers.busy:
        ends += compilers.poll(wait=True)
    assert [end.part.name for end in ends] == ["a", "b", "c"]
    assert compilers.failed == []
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    forks = 1
    with pytest.raises(BlockingIOError):
        queued("d").poll()


def test_of_several_engines_one_compiles_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas start together and need the same."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.runtime.cache import get_cache_manager

    other = os.open(get_cache_manager(Fake("theirs").key).cache_dir, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    compilers = queued("theirs", "ours")
    (end,) = compilers.poll(wait=True)
    assert end.part.name == "ours"
    assert compilers.busy
    fcntl.flock(other, fcntl.LOCK_UN)
    (end,) = compilers.poll(wait=True)
    assert (end.part.name, end.error) == ("theirs", None)
    os.close(other)


def test_with_one_process_what_is_needed_first_is_compiled_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of that what takes longest, however late it is known."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compilers = Compilers(1)
    for name, need in (
        ("last", Need.LATER),
        ("soon", Need.SOON),
        ("slow and soon", Need.SOON),
        ("first", Need.FIRST),
        ("slow and first", Need.FIRST),
    ):
        part = Fake(name)
        part.is_slow = name.startswith("slow")
        assert compilers.add(part, need)  # type: ignore[arg-type]
    ends = []
    while compilers.busy:
        ends += compilers.poll(wait=True)
    names = [end.part.name for end in ends]
    assert names == ["slow and first", "first", "slow and soon", "soon", "last"]


def test_half_of_the_processes_wait_while_something_is_needed_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a core with two threads each slows down the other."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.runtime.cache import get_cache_manager

    names = ["now", "later", "last"]
    held = {}
    for name in names:
        folder = get_cache_manager(Fake(name).key).cache_dir
        held[name] = os.open(folder, os.O_RDONLY)
        fcntl.flock(held[name], fcntl.LOCK_EX)
    compilers = Compilers(4)
    for name in ("later", "now", "last"):
        compilers.add(Fake(name), Need.FIRST if name == "now" else Need.LATER)  # type: ignore[arg-type]
    assert compilers.poll() == []
    fcntl.flock(held["last"], fcntl.LOCK_UN)
    time.sleep(0.2)
    assert compilers.poll() == []  # it was not begun
    fcntl.flock(held["now"], fcntl.LOCK_UN)
    ends = [end.part.name for end in compilers.poll(wait=True)]
    ends += [end.part.name for end in compilers.poll(wait=True)]
    assert ends == ["now", "last"]
    fcntl.flock(held["later"], fcntl.LOCK_UN)
    (end,) = compilers.poll(wait=True)
    assert (end.part.name, compilers.busy) == ("later", False)
    for descriptor in held.values():
        os.close(descriptor)


def test_modules_are_linked_with_a_driver_that_need_not_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.cache import get_cache_manager

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    begin = '#include "cuda.h"\n#include <Python.h>\n'
    good = Module.of("good", begin + "int version(void) { int v; return cuDriverGetVersion(&v); }")
    compilers = Compilers(2)
    for module in (good, Module.of("bad", begin + "nothing that C allows")):
        assert compilers.add(module, Need.LATER)
    ends = []
    while compilers.busy:
        ends += compilers.poll(wait=True)
    errors = {end.part.name: end.error for end in ends}
    assert errors["good"] is None
    assert errors["bad"] is not None
    assert "error" in errors["bad"]
    made = get_cache_manager(good.key).get_file(good.file)
    assert made is not None
    assert b"libcuda.so.1" in Path(made).read_bytes()
    assert not Compilers(1).add(good)  # it is there
    assert compilers.summary().startswith("0 variants")
    assert "with 1 modules to launch them, and 1 not compiled" in compilers.summary()


def test_of_what_is_needed_later_processes_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    class Asked(Fake):
        def compile(self) -> None:
            raise RuntimeError(str(os.nice(0)))

    compilers = Compilers(2)
    for name in ("now", "later"):
        compilers.add(Asked(name), Need.LATER if name == "later" else Need.FIRST)  # type: ignore[arg-type]
    while compilers.busy:
        compilers.poll(wait=True)
    (now,), (later,) = (
        [int((end.error or "").split()[-1]) for end in compilers.failed if end.part.name == name]
        for name in ("now", "later")
    )
    assert now == os.nice(0) < later


def test_on_a_gpu_that_is_not_there_operations_have_the_shapes_and_types_of_others() -> None:
    """Those that are worked out without PyTorch's own Python."""

    def results(device: str) -> list[tuple[torch.Size, torch.dtype]]:
        column = torch.zeros(3, 1, dtype=torch.float16, device=device)
        row = torch.zeros(4, dtype=torch.int64, device=device)
        found = [row < 0, column >= row, column != 1.5, row.eq(row)]
        found += [torch.where(row > 0, column, row), torch.where(column == 0, row, row.int())]
        found += [torch.where(row > 0, row, torch.tensor(1.5)), torch.where(row > 0, row, 2)]
        return [(each.shape, each.dtype) for each in found]

    with absent_gpu(GPU.of_capability((9, 0)), 1 << 30):
        absent = results("cuda")
    assert absent == results("cpu")


def test_signals_are_for_the_engine() -> None:
    """It ends what compiles, if it ends itself; its handlers of signals are not for that."""
    task, events = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.close(task[1])
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            try:
                live(task[0], events[1])
            except EOFError:
                os._exit(7)
        os._exit(1)
    os.close(task[0])
    ignored, until = 0, time.monotonic() + 20
    while not ignored & 1 << signal.SIGINT - 1:
        status = Path(f"/proc/{pid}/status").read_text()
        ignored = int(status.split("SigIgn:")[1].split()[0], 16)
        assert time.monotonic() < until
    assert not ignored & 1 << signal.SIGCHLD - 1  # else it would not hear of its compilers
    os.kill(pid, signal.SIGINT)
    os.close(task[1])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    for file in events:
        os.close(file)


def test_an_engine_that_is_closed_ends_the_process() -> None:
    compiles, _ = scripted({"ended": "never"})
    compiles.close()
    compiles.wait(STEP)


MADE: kept_kernels.MadeFor = {
    "model": "m",
    "class": "C",
    "dtype": "torch.bfloat16",
    "kv_cache_dtype": "auto",
    "scheme": None,
    "settings": {"max_num_seqs": 4},
    "gpu": [[9, 0], 232448, 132],
    "triton": "3.6.0",
    "ptxas": "p",
    "torch": "2.11",
    "python": "3.12",
    "engine-core": "e",
}


def test_a_note_says_for_what_all_kernels_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels of another version are no more than a line of the log."""
    from triton.runtime.cache import get_cache_manager

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert not kept_kernels.are_kept(MADE)
    module = SimpleNamespace(file="launch.so", key=f"{2:064x}")
    get_cache_manager(module.key).put(b"", module.file)
    kernels = [
        SimpleNamespace(file=f"_k{number}.json", key=f"{number:064x}") for number in range(2)
    ]
    for kernel in kernels:
        manager = get_cache_manager(kernel.key)
        file = manager.put("{}", kernel.file, binary=False)
        manager.put_group(kernel.file, {kernel.file: file})
    kernels.append(module)
    note = kept_kernels.keep(MADE, kernels)  # type: ignore[arg-type]
    assert note.parent == tmp_path
    assert kept_kernels.are_kept(MADE)
    assert not kept_kernels.are_kept(MADE | {"dtype": "torch.float16"})
    assert caplog.text == ""
    assert not kept_kernels.are_kept(MADE | {"triton": "3.7.0", "torch": "2.12"})
    (record,) = caplog.records
    assert "of another triton and torch (3.6.0, 2.11, here 3.7.0, 2.12)" in record.message
    shutil.rmtree(Path(file).parent)
    assert not kept_kernels.are_kept(MADE)
    note.write_text("{")
    assert not kept_kernels.are_kept(MADE)


def test_a_start_knows_before_it_imports_triton_whether_kernels_may_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source: Any = SimpleNamespace(
        model_config=SimpleNamespace(model_dump_json=lambda: "{}"),
        model_class=Fake,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        scheme=SimpleNamespace(name="s", settings={}, cache_settings={}),
        checkpoint=SimpleNamespace(gguf=None, headers={}),
    )
    config, gpu = EngineConfig(max_num_seqs=4), GPU.of_capability((9, 0))
    assert not kept_kernels.may_be_kept(source, config, gpu)
    (tmp_path / "engine-core-0.json").write_text("{")
    made = kept_kernels.made_for(source, config, gpu)
    note = kept_kernels.keep(made, [])
    assert kept_kernels.may_be_kept(source, config, gpu)
    for other in (None, GPU.of_capability((9, 0), 78), GPU.of_capability((8, 0))):
        assert not kept_kernels.may_be_kept(source, config, other)
    assert not kept_kernels.may_be_kept(source, EngineConfig(max_num_seqs=5), gpu)
    source.dtype = torch.float16
    assert not kept_kernels.may_be_kept(source, config, gpu)
    source.dtype = torch.bfloat16
    # Which linears are quantised is not in the config.
    source.checkpoint.headers["w"] = SimpleNamespace(name="w", dtype="int32", shape=(4, 8))
    assert not kept_kernels.may_be_kept(source, config, gpu)
    source.checkpoint.headers.clear()
    # Another Triton's kernels are seen only later; another engine's now.
    for name, may_be in (("triton", True), ("torch", False), ("engine-core", False)):
        note.write_text(json.dumps({"made_for": made | {name: "another"}, "kernels": []}))
        assert kept_kernels.may_be_kept(source, config, gpu) is may_be


_WHERE = """
import os, sys
from engine_core.engine.kept_kernels import folder

def found():
    places = []
    for name in ("", "TRITON_HOME", "TRITON_CACHE_DIR"):
        if name:
            os.environ[name] = "/" + name
        places.append(folder())
    del os.environ["TRITON_HOME"], os.environ["TRITON_CACHE_DIR"]
    return places

before = found()
assert "triton" not in sys.modules
import triton
assert before == found(), (before, found())
assert len(set(before)) == 3
"""


def test_the_cache_is_found_without_triton_where_triton_has_it() -> None:
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    done = subprocess.run(
        [sys.executable, "-c", _WHERE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
