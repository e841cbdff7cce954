"""Triton kernels compiled before they are launched, in processes, without the GPU.

:func:`recording` has launches say which variant of a kernel they need instead of running it, and
:class:`Compilers` compiles variants into Triton's cache on the disk, each in a process of its own.
Whoever launches the kernel finds it there: a variant has the key that Triton itself gives it. Some
releases of Triton also have a C compiler make an extension module for each signature of kernels,
which launches them; these are compiled ahead too.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import io
import os
import pickle
import select
import shutil
import subprocess
import sysconfig
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar
from unittest.mock import patch

from triton import __version__ as triton_release
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import compile as compile_kernel
from triton.compiler.compiler import make_backend
from triton.runtime.build import platform_key
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from engine_core import own_process

try:
    from triton.runtime.cache import get_cache_invalidating_env_vars
except ImportError:
    from triton._C.libtriton import get_cache_invalidating_env_vars


class Need(IntEnum):
    """Who waits for a part of a launch; the first of these is compiled first."""

    FIRST = 0
    """The first token."""
    SOON = 1
    """Requests that come right after it."""
    LATER = 2
    """Nobody: something else stands in for it."""


# How much a process gives way, by who needs what it compiles.
_NICE = {Need.FIRST: 0, Need.SOON: 5, Need.LATER: 10}
# Releases of Triton that have a C compiler make modules. Later ones launch all kernels by one.
_WITH_MODULES = "3.6."
# Debian's own scheme has no headers, as Triton knows.
_SCHEME = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")


def target_of(capability: tuple[int, int]) -> GPUTarget:
    """Triton's name for NVIDIA's GPUs of a compute capability."""
    return GPUTarget("cuda", 10 * capability[0] + capability[1], 32)


@dataclass(frozen=True, slots=True)
class Launch:
    """All that Triton compiles a variant by in a launch, so that it can be loaded without one.

    Attributes:
        function: the kernel.
        key: by which launches look for what they have loaded.
        signature: types of the arguments.
        constants: arguments that are compiled in.
        options: for the compiler.
        attributes: alignments of the arguments.
    """

    function: JITFunction[Any]
    key: Any
    signature: Any
    constants: Any
    options: dict[str, Any]
    attributes: Any

    def load(self) -> None:
        """Load the variant from Triton's cache onto the current GPU, unless it was before.

        Raises:
            Exception: whatever Triton, or the GPU's driver, says.
        """
        device = driver.active.get_current_device()
        kernels, _, _, backend, *_ = self.function.device_caches[device]
        if self.key in kernels:
            return
        kernel = self.function._do_compile(
            self.key,
            self.signature,
            device,
            self.constants,
            backend.parse_options(dict(self.options)),
            self.attributes,
            warmup=False,
        )
        # Else its first launch would: where the device is at work that may wait for it.
        kernel._init_handles()


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with the types, constants and alignments that it is compiled for.

    Attributes:
        name: the kernel's function.
        key: of its entry in Triton's cache.
        source: what Triton compiles.
        options: for the compiler.
        target: the kind of GPU.
        launch: what a launch of it asks Triton for; None if it was not launched.
    """

    name: str
    key: str
    source: Any
    options: dict[str, Any]
    target: GPUTarget
    launch: Launch | None = field(default=None, compare=False)

    @classmethod
    def of(cls, source: Any, options: dict[str, Any], target: GPUTarget) -> Variant:
        """The variant that Triton would compile of a source with these options."""
        backend = make_backend(target)
        parsed = backend.parse_options({**options, **source.parse_options()})
        key = get_cache_key(source, backend, parsed, get_cache_invalidating_env_vars())
        hashed = hashlib.sha256(key.encode()).hexdigest()
        return cls(source.name, hashed, source, options, target)

    @property
    def file(self) -> str:
        """The file of its entry that is written last."""
        return f"{self.name[:150]}.json"

    @property
    def is_slow(self) -> bool:
        """Whether it takes long to compile, as a kernel in Gluon does."""
        return bool(self.source.fn.is_gluon())

    def compile(self) -> None:
        """Put it into the cache."""
        compile_kernel(self.source, target=self.target, options=self.options)


@dataclass(frozen=True, slots=True)
class Module:
    """An extension module that a C compiler makes, by which kernels are loaded or launched.

    Attributes:
        name: of the module.
        key: of its entry in Triton's cache.
        code: in C.
    """

    name: str
    key: str
    code: str
    is_slow: ClassVar[bool] = False

    @classmethod
    def of(cls, name: str, code: str) -> Module:
        """The module that Triton would make of this code."""
        key = hashlib.sha256((code + platform_key()).encode()).hexdigest()
        return cls(name, key, code)

    @property
    def file(self) -> str:
        """The file of its entry."""
        return f"{self.name}{sysconfig.get_config_var('EXT_SUFFIX')}"

    def compile(self) -> None:
        """Put it into the cache; it is linked with the driver, which need not be here."""
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "cc"
        shared = [compiler, "-shared", "-fPIC"]
        with TemporaryDirectory() as name:
            folder = Path(name)
            source, made = folder / f"{self.name}.c", folder / self.file
            source.write_text(self.code)
            nothing = [*shared, "-x", "c", os.devnull]
            drivers = [folder / each for each in nvidia.libraries]
            for library in drivers:  # nothing but its name counts
                _call([*nothing, f"-Wl,-soname,{library.name}", "-o", str(library)])
            included = [*nvidia.include_dirs, sysconfig.get_path("include", _SCHEME)]
            command = [*shared, "-O3", "-Wno-psabi", str(source), "-o", str(made)]
            command += [f"-I{each}" for each in included]
            # Of an empty library it would take nothing, and so not even name it.
            _call([*command, "-Wl,--no-as-needed", *map(str, drivers)])
            get_cache_manager(self.key).put(made.read_bytes(), self.file, binary=True)


def _call(command: list[str]) -> None:
    """Run a C compiler."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]}: {done.stderr.strip().splitlines()[-1:]}")


Part = Variant | Module
"""What a launch needs compiled."""


@functools.cache
def _loader() -> Module:
    """The module that loads all kernels."""
    return Module.of("cuda_utils", Path(nvidia.dirname, "driver.c").read_text())


def _launcher(variant: Variant) -> Module:
    """The module that launches variants of this signature."""
    signature = dict(variant.source.signature)
    described = sum(str(kind).startswith("tensordesc") for kind in signature.values())
    # From Hopper on the hardware takes descriptors; what is in them does not show in the module.
    taken = variant.target.arch >= 90 and described > 0
    code = nvidia.make_launcher({}, signature, [{}] * described if taken else None)
    return Module.of("__triton_launcher", code)


def parts_of(variant: Variant, release: str = triton_release) -> list[Part]:
    """All that a launch of a variant needs compiled, with this release of Triton."""
    has_modules = release.startswith(_WITH_MODULES) and hasattr(nvidia, "make_launcher")
    return [_loader(), _launcher(variant), variant] if has_modules else [variant]


class _Pickler(pickle.Pickler):
    """Writes a kernel as its name: it is the one, or an argument that another is compiled with."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, JITFunction):
            return _kernel, (obj.fn.__module__, obj.fn.__qualname__)
        return NotImplemented


def _kernel(module: str, name: str) -> JITFunction[Any]:
    """The kernel of this name."""
    found = getattr(import_module(module), name)
    if not isinstance(found, JITFunction):
        raise TypeError(f"{module}.{name} is no kernel by itself but {type(found).__name__}")
    return found


def packed(variant: Variant) -> str | None:
    """A line of text that :func:`load` takes; None if nothing can be loaded by itself."""
    if variant.launch is None:
        return None
    file = io.BytesIO()
    try:
        _Pickler(file).dump(variant.launch)
    except Exception:  # an argument that it is compiled with may be anything
        return None
    return file.getvalue().hex()


def load(text: str) -> None:
    """Load a variant that :func:`packed` gave, from Triton's cache onto the current GPU.

    Raises:
        Exception: as of :meth:`Launch.load`.
    """
    launch: Launch = pickle.loads(bytes.fromhex(text))
    launch.load()


def is_kept(key: str, file: str) -> bool:
    """Whether the entry ``key`` of Triton's cache is there, with its last ``file``."""
    cache = get_cache_manager(key)
    if file.endswith(".json"):
        return file in (cache.get_group(file) or {})
    return cache.get_file(file) is not None


# No GPU's number: of a process that was forked, kernels may be loaded that are not to be launched.
_DEVICE = -1


class _Driver:
    """Answers to what Triton asks of a driver before it launches."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return _DEVICE

    def get_current_stream(self, device: int) -> int:
        del device
        return 0


class _Unlaunched:
    """A compiled kernel whose launch says so and does nothing."""

    def __init__(self, launched: Callable[[], None]) -> None:
        self._launched = launched

    def run(self, *args: Any) -> None:
        """Take the launch's arguments."""
        del args
        self._launched()

    def result(self) -> _Unlaunched:
        """The kernel itself: it is not compiled elsewhere."""
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self


@contextmanager
def recording(target: GPUTarget, note: Callable[[Part], None]) -> Iterator[None]:
    """Have launches in the ``with`` block call ``note`` with what they need, and do nothing else.

    For a process that launches nothing else, now or later.
    """
    touched: set[Any] = set()

    def compile_nothing(
        self: Any,
        key: Any,
        signature: Any,
        device: Any,
        constexprs: Any,
        options: Any,
        attrs: Any,
        warmup: Any,
    ) -> Any:
        del warmup
        source = self.ASTSource(self, signature, constexprs, attrs)
        variant = Variant.of(source, options.__dict__, target)
        given = dict(options.__dict__)
        variant = replace(variant, launch=Launch(self, key, signature, constexprs, given, attrs))
        touched.add(self)
        parts = parts_of(variant)

        def launched() -> None:
            for part in parts:
                note(part)

        kernel = self.device_caches[device][0][key] = _Unlaunched(launched)
        return kernel

    driver.set_active(_Driver(target))
    try:
        with patch.object(JITFunction, "_do_compile", compile_nothing):
            yield
    finally:
        for function in touched:
            function.device_caches.pop(_DEVICE, None)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The end of a compile.

    Attributes:
        part: what was compiled.
        seconds: how long it took.
        error: why it failed; None if it is in the cache.
    """

    part: Part
    seconds: float
    error: str | None = None


class Compilers:
    """Processes that compile parts of launches, forked from this one, which must have one thread.

    Attributes:
        hits: variants that were in the cache already.
        done: all that is in the cache now.
        failed: what could not be compiled.
        longest: the compile that took longest.
        seconds: of all compiles together.
    """

    def __init__(self, most: int) -> None:
        """``most``: how many compile at once."""
        self._most = max(1, most)
        self._queue: deque[tuple[Part, Need]] = deque()
        # By their pipes: each process, what it compiles, who needs that, its begin.
        self._running: dict[int, tuple[int, Part, Need, float]] = {}
        self._known: set[str] = set()
        self.hits, self.seconds = 0, 0.0
        self.done: list[Part] = []
        self.failed: list[Compiled] = []
        self.longest: Compiled | None = None

    def knows(self, part: Part) -> bool:
        """Whether it was added before."""
        return part.key in self._known

    @property
    def variants(self) -> Counter[str]:
        """How many variants of each kernel are in the cache."""
        return Counter(part.name for part in self.done if not isinstance(part, Module))

    def summary(self) -> str:
        """How many there are and where they come from, in words."""
        variants = self.variants
        text = (
            f"{variants.total()} variants of {len(variants)} kernels, {self.hits} of them kept "
            f"from before and the others compiled in {self.seconds:.1f} s of processes"
        )
        if self.longest is not None:
            text += f" ({self.longest.part.name} in {self.longest.seconds:.1f} s)"
        if modules := len(self.done) - variants.total():
            text += f", with {modules} modules to launch them"
        return text + (f", and {len(self.failed)} not compiled" if self.failed else "")

    def add(self, part: Part, need: Need = Need.FIRST) -> bool:
        """Queue what is to be compiled; False if it is known or in the cache already.

        What nobody waits for leaves the processors to all else: while there is some of that left,
        others take up to half of them, as two share a core that runs two threads.
        """
        if part.key in self._known:
            return False
        self._known.add(part.key)
        if is_kept(part.key, part.file):
            self.hits += not isinstance(part, Module)
            self.done.append(part)
            return False
        self._queue.append((part, need))
        return True

    @property
    def busy(self) -> bool:
        """Whether something is queued or being compiled."""
        return bool(self._queue or self._running)

    def poll(self, *, wait: bool = False) -> list[Compiled]:
        """Start what there is room for; return what has ended, if ``wait`` at least one of them."""
        ended: list[Compiled] = []
        self._start()
        while self._running:
            pipes = select.poll()
            for pipe in self._running:
                pipes.register(pipe, select.POLLIN)
            # The end of a process closes its pipe.
            ready = pipes.poll(None if wait and not ended else 0)
            if not ready:
                break
            ended += [self._end(pipe) for pipe, _ in ready]
            self._start()
        return ended

    def _end(self, pipe: int) -> Compiled:
        """Take the end of the process with this pipe."""
        pid, part, _, begin = self._running.pop(pipe)
        with os.fdopen(pipe, errors="replace") as said:
            why = said.read().strip()
        _, status = os.waitpid(pid, 0)
        code, error = os.waitstatus_to_exitcode(status), None
        if code != 0:
            error = why or f"{part.name}: its compiler ended {own_process.how_ended(code)}"
        end = Compiled(part, time.monotonic() - begin, error)
        self.seconds += end.seconds
        if self.longest is None or end.seconds > self.longest.seconds:
            self.longest = end
        if error is None:
            self.done.append(part)
        else:
            self.failed.append(end)
        return end

    def _start(self) -> None:
        while self._queue and len(self._running) < self._most:
            # What is needed first is first, and of that what takes longest.
            part, need = min(self._queue, key=lambda each: (each[1], not each[0].is_slow))
            urgent = any(other < Need.LATER for _, _, other, _ in self._running.values())
            waits = need is Need.LATER and urgent
            if waits and len(self._running) >= max(1, self._most // 2):
                return
            parent = os.getpid()
            pipe: tuple[int, ...] = ()
            try:
                ours, theirs = pipe = os.pipe()
                pid = os.fork()
            except OSError:  # a limit of processes, files or memory
                for end in pipe:
                    os.close(end)
                if not self._running:
                    raise
                self._most = len(self._running)
                return
            if pid == 0:
                _compile_alone(part, theirs, parent, need)
            os.close(theirs)
            self._queue.remove((part, need))
            self._running[ours] = (pid, part, need, time.monotonic())


def _compile_alone(part: Part, pipe: int, parent: int, need: Need) -> None:
    """The life of a forked process."""
    status = 1
    try:
        own_process.die_with(parent)
        os.nice(_NICE[need])
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        with suppress(OSError):  # a cache elsewhere, or a file system without locks
            _lock(part)
        if not is_kept(part.key, part.file):
            part.compile()
        status = 0
    except BaseException as error:
        last = traceback.format_exception_only(error)[-1].strip()
        os.write(pipe, f"{part.name}: {last}"[:4000].encode())
    finally:
        os._exit(status)


def _lock(part: Part) -> None:
    """Wait for other engines that compile the same, to find it in the cache."""
    folder = getattr(get_cache_manager(part.key), "cache_dir", None)
    if folder is not None:
        # Until the process ends.
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)


__all__ = [
    "Compiled",
    "Compilers",
    "Launch",
    "Module",
    "Need",
    "Part",
    "Variant",
    "load",
    "packed",
    "parts_of",
    "recording",
    "target_of",
]
