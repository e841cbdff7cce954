"""Commands that start in milliseconds: forked from a process that has imported, and used, torch.

:func:`run` and :class:`Popen` stand for those of ``subprocess`` where a test starts a command of
Python's. A server is started with the first of them: it imports what the commands import, uses
nothing of it, and forks. What it forks is a true child of who asked for it, with its arguments,
environment, folder, files and session, so that signals, exit codes and processor time are as with a
process of its own; every fork has a server for the processes that it spawns in turn.

A fork ends after its exit functions, and Python does not take it apart: what is only written when a
file that nobody closed is collected is not written.

A process of its own remains what the import itself decides: other flags of Python's, or another
value of a variable that a library reads at its import. Where there is a GPU, all remain.

A test that shows what is imported, what the garbage collector keeps, or how long a start takes,
uses ``subprocess``.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import importlib.metadata
import inspect
import io
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import quick_numba

PRELOADED = (
    *("torch", "torch.distributed", "torch.multiprocessing", "numba", "llguidance", "uvloop"),
    *("fastapi", "uvicorn", "httptools", "prometheus_client", "rich", "typer", "gguf"),
    *("engine_core.engine.llm", "engine_core.server.app", "engine_core.cli.root"),
    *(f"engine_core.kernels.{name}.numba" for name in ("activation", "attention", "norm")),
    *("engine_core.kernels.rotary_store.numba", "engine_core.kernels.compiled.numbers"),
    *("numba.core.ccallback", "numba.np.arrayobj", "numba.np.linalg", "numba.np.random"),
    *("numba.np.polynomial", "numba.typed.typeddict", "numba.cpython.setobj", "email.policy"),
    *("av", "PIL.Image", "engine_core.engine.media_worker", "engine_core.runtime.grammar_trial"),
)
# Every start asks each installed family, and most run Llama. A fork with other folders on its path
# imports them anew: it may have a copy of one.
FAMILY_MODULES = ("plugin", "config")
_FAMILIES: set[str] = set()
# For a command that imports the models of all families: it takes three seconds of most.
TRANSFORMERS = ("transformers.modeling_utils", "engine_core_transformers.model")
# What begins so is read when a library is imported, or when Python starts.
_FIXED = ("CUDA_", "GOMP_", "KMP_", "MKL_", "NUMBA_", "OMP_", "PYTHON", "TORCH_", "TYPER_")
_FIXED += ("PROMETHEUS_",)
# Python reads PYTHONBREAKPOINT at a breakpoint only, and Ray sets it for good where it connects.
# GOMP_SPINCOUNT is for threads that wait for others: a process of ours sets it for those it spawns.
# MKL_NUM_THREADS is what OMP_NUM_THREADS is where it is set, for the template of a pool's workers.
_SET_ANEW = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONBREAKPOINT", "GOMP_SPINCOUNT")
_SET_ANEW += ("MKL_NUM_THREADS",)
# What a fork with a variable imports anew, because it is read at the import and costs little.
_IMPORTED_ANEW = {
    "PROMETHEUS_MULTIPROC_DIR": ("prometheus_client", "engine_core.server", "engine_core.cli")
}
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # before a test changes it for a while
_PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_TRITON = "TRITON_INTERPRET"  # read when Triton is imported, which PRELOADED does not do
_HERE = str(Path(__file__).parent)

Task = Callable[[], None]

# Processes of this one's that imported all anew, by the variables that forbade a fork.
afresh: Counter[str] = Counter()


def _fixed(environment: dict[str, str], *, has_triton: bool) -> dict[str, str]:
    fixed = (*_FIXED, _TRITON) if has_triton else _FIXED
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(fixed) and name not in (*_SET_ANEW, *_IMPORTED_ANEW)
    }


class Server:
    """A process that forks, as its parent sees it."""

    def __init__(
        self, connection: socket.socket, environment: dict[str, str], *, has_triton: bool
    ) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._has_triton = has_triton
        self._environment = _fixed(environment, has_triton=has_triton)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._owner = os.getpid()

    def offers(self, environment: dict[str, str]) -> bool:
        """Whether a process with this environment may come from here."""
        asked = _fixed(environment, has_triton=self._has_triton)
        other = {name for name, _ in asked.items() ^ self._environment.items()}
        if other:
            afresh[", ".join(sorted(other))] += 1
        return os.getpid() == self._owner and not other

    def fork(self, files: Sequence[tuple[int, int]], **request: Any) -> int:
        """A new child's process id. ``files`` are pairs: one open here, its number there."""
        message = json.dumps({**request, "files": [there for _, there in files]}).encode()
        with self._lock:
            # The process between us and the child ends at once, and we inherit the child.
            self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                header = struct.pack("=I", len(message))
                socket.send_fds(self._connection, [header], [here for here, _ in files])
                self._connection.sendall(message)
                answer = self._connection.recv(4, socket.MSG_WAITALL)
            finally:
                self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert len(answer) == 4, "the fork server has died; its standard error says why"
        return int(struct.unpack("=I", answer)[0])


_servers: dict[Sequence[str], Server] = {}
_starting = threading.Lock()


def server(more: Sequence[str] = ()) -> Server | None:
    """The server of this process that imports ``more`` too, started if it must be.

    None where every process is its own.
    """
    if not sys.platform.startswith("linux") or Path("/dev/nvidiactl").exists():
        return None
    with _starting:
        if more not in _servers:
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno()), *more],
                    env=_ENVIRONMENT,
                    pass_fds=[theirs.fileno()],
                )
            # What else it imports may import Triton.
            _servers[more] = Server(ours, _ENVIRONMENT, has_triton=bool(more))
            atexit.register(process.wait)
            atexit.register(ours.close)  # before it, which tells the server to end
        return _servers[more]


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A child of this process, as ``subprocess.Popen`` makes it; ``preloaded`` as for a server.

    Attributes:
        alone: it has no server of its own, which would be one of its children.
    """

    alone = False

    def __init__(self, *values: Any, preloaded: Sequence[str] = (), **options: Any) -> None:
        self._preloaded = preloaded
        super().__init__(*values, **options)

    def _execute_child(self, *values: Any) -> None:
        names = inspect.signature(subprocess.Popen._execute_child).parameters  # type: ignore[attr-defined]
        asked = dict(zip(list(names)[1:], values, strict=True))
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        known = server(self._preloaded) if _is_plain(asked) else None
        if known is None or not known.offers(environment):
            super()._execute_child(*values)  # type: ignore[misc]
            return
        ends = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
        files = [(number if end == -1 else end, number) for number, end in enumerate(ends)]
        files += [(number, number) for number in asked["pass_fds"]]
        try:
            self.pid = known.fork(
                files,
                arguments=[os.fspath(word) for word in asked["args"]],
                environment=environment,
                folder=os.fspath(asked["cwd"] or Path.cwd()),
                session=asked["start_new_session"],
                alone=self.alone,
            )
            self._child_created = True
        finally:
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(asked[name] for name in ends))  # type: ignore[attr-defined]


def _is_plain(asked: dict[str, Any]) -> bool:
    """Whether it is ``python -m``, ``python -c`` or ``python file``, with nothing unusual."""
    command = asked["args"]
    unusual = ("executable", "preexec_fn", "shell", "gid", "gids", "uid", "startupinfo")
    return (
        not isinstance(command, str | bytes | os.PathLike)
        and len(command) > 1
        and command[0] == sys.executable
        and (command[1] in ("-m", "-c") or not os.fspath(command[1]).startswith("-"))
        and all(asked[name] in (None, False, (), -1, sys.executable) for name in unusual)
        and asked["umask"] == -1
        and asked["process_group"] == -1
    )


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    input: str | bytes | None = None,  # noqa: A002
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run``; ``options`` are those of :class:`Popen`."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            output, errors = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


# multiprocessing's own, for a test that is about processes that inherit nothing.
spawn_afresh = multiprocessing.util.spawnv_passfds


def spawn_from_here() -> None:
    """Let what ``multiprocessing`` spawns in this process come from its server."""
    multiprocessing.util.spawnv_passfds = _spawned


def _spawned(path: bytes, command: list[Any], passed: Sequence[int]) -> int:
    words = [os.fsdecode(word) for word in command]
    environment = dict(os.environ)
    if (
        words[-1] != "--multiprocessing-fork"  # it is the resource tracker
        or (known := server()) is None
        or not known.offers(environment)
    ):
        return spawn_afresh(path, command, passed)
    return known.fork(
        [(number, number) for number in {0, 1, 2, *map(int, passed)}],
        arguments=[sys.executable, *words[words.index("-c") :]],
        environment=environment,
        folder=str(Path.cwd()),
        session=False,
        alone=False,
    )


class _Template(Popen):
    """The process that a pool of workers forks them from."""

    alone = True


def templates_from_here() -> None:
    """Let templates of pools of workers come from this process's server.

    Each imports again what is imported there: a second of a processor for one of pictures.
    """
    pool: Any = importlib.import_module("engine_core.workers.pool")
    pool.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": _Template})


def templates_afresh() -> None:
    """Let them be processes of their own again."""
    pool: Any = importlib.import_module("engine_core.workers.pool")
    pool.subprocess = subprocess


# What follows runs in the server and in what it forks.


def _serve(connection: socket.socket) -> Task:
    """Fork what is asked for, until nobody can ask. Returns in each fork what that is to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the others of the terminal
    while asked := _receive(connection):
        request, files = asked
        threads = list(Path("/proc/self/task").iterdir())
        assert len(threads) == 1, (
            f"an import has started threads, and none would be forked: {threads}"
        )
        told, tell = os.pipe()
        begin, go = os.pipe()
        between = os.fork()
        if between:
            os.close(tell)
            os.close(begin)
            pid = os.read(told, 4)
            os.waitpid(between, 0)
            os.close(told)
            os.close(go)  # its parent is now who asked
            for file in files:
                os.close(file)
            connection.sendall(pid)
            continue
        if child := os.fork():
            os.write(tell, struct.pack("=I", child))
            os._exit(0)
        os.close(tell)
        os.close(told)
        os.close(go)
        os.read(begin, 1)
        os.close(begin)
        connection.close()
        if request["alone"]:
            return lambda: _become(request, files)
        ours, theirs = socket.socketpair()
        if os.fork() == 0:  # the server of this fork, as fresh as the one that it comes from
            ours.close()
            connection = theirs
            for file in files:
                os.close(file)
            continue
        theirs.close()
        high = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 500))
        ours.close()
        has_triton = "triton" in sys.modules
        _servers[()] = Server(high, request["environment"], has_triton=has_triton)
        return lambda: _become(request, files)
    os._exit(0)  # nothing was used, so nothing is to be put away


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request with the files that came with it."""
    header, files, _, _ = socket.recv_fds(connection, 4, 64)
    if not header:
        return None
    (size,) = struct.unpack("=I", header)
    return json.loads(connection.recv(size, socket.MSG_WAITALL)), files


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Be the process that was asked for: all that Python sets at its start, then the program."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 600) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(high, request["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    server_path = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = _stream(0, "r", unbuffered)
    sys.stdout = sys.__stdout__ = _stream(1, "w", unbuffered)
    sys.stderr = sys.__stderr__ = _stream(2, "w", unbuffered)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python's own generator is seeded anew in every fork
    gone = {_HERE, *server_path.split(os.pathsep)}
    new = [word for word in os.environ.get("PYTHONPATH", "").split(os.pathsep) if word]
    sys.path[:] = [*new, *(folder for folder in sys.path if folder not in gone)]
    importlib.invalidate_caches()
    anew = [packages for name, packages in _IMPORTED_ANEW.items() if name in os.environ]
    if os.environ.get("PYTHONPATH", "") != server_path:
        anew.append(tuple(_FAMILIES))
    for packages in anew:
        for name in [name for name in sys.modules if _belongs(name, packages)]:
            del sys.modules[name]
    # What the server imported stays frozen. An engine's process thaws what it loaded, and collects:
    # it would look at all of the imports, and write to their pages.
    gc.freeze = gc.unfreeze = lambda: None  # type: ignore[assignment]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    spawn_from_here()
    templates_from_here()

    _, first, *rest = request["arguments"]
    if first == "-m":
        sys.argv = rest
        sys.path.insert(0, str(Path.cwd()))
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        return
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).resolve().parent))
        main.__file__ = first
        code = compile(Path(first).read_bytes(), first, "exec")
    exec(code, main.__dict__)


def _belongs(module: str, packages: Sequence[str]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def _run(task: Task) -> None:
    """Run a fork's program, and end as Python does without taking apart all that was imported.

    That takes ten times as long as the fork, whose pages it all writes to.
    """
    code: object = 0
    try:
        task()
    except SystemExit as error:
        code = error.code
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)  # Python says what is wrong with them
    os._exit(code or 0)


def _stream(number: int, mode: str, unbuffered: bool) -> io.TextIOWrapper:
    """A standard stream as Python makes it."""
    binary: Any = open(number, f"{mode}b", 0 if unbuffered and mode == "w" else -1, closefd=False)  # noqa: SIM115
    was: Any = (sys.__stdin__, sys.__stdout__, sys.__stderr__)[number]
    stream = io.TextIOWrapper(
        binary,
        encoding=was.encoding,
        errors=was.errors,
        line_buffering=not unbuffered and (number == 2 or binary.isatty()),
        write_through=unbuffered,
    )
    stream.mode = mode  # type: ignore[misc]
    return stream


def _main() -> Task:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    for name in (*PRELOADED, *sys.argv[2:]):
        with suppress(ImportError):  # a test that needs it says so
            importlib.import_module(name)
    for entry in importlib.metadata.entry_points(group="engine_core"):
        family = entry.module.partition(".")[0]
        _FAMILIES.add(family)
        for module in FAMILY_MODULES:
            with suppress(ImportError):
                importlib.import_module(f"{family}.{module}")
    with suppress(ImportError):
        importlib.import_module("engine_core_llama.model")
    assert sys.argv[2:] or "triton" not in sys.modules, "forks could not choose how kernels run"
    if numba := sys.modules.get("numba"):
        # What a compiled function's first load would do in every fork.
        target = numba.core.registry.cpu_target
        target.typing_context.refresh()
        target.target_context.refresh()
        quick_numba.quicken()
    # Else every fork copies all of it for its first collection, and looks through it at its end.
    gc.collect()
    gc.freeze()
    return _serve(connection)


if __name__ == "__main__":
    _run(_main())
