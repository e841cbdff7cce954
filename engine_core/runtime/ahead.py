"""Triton kernels compiled before they are launched, in processes, without the GPU.

:func:`recording` has launches say which variant of a kernel they need instead of running it, and
:class:`Compilers` compiles variants into Triton's cache on the disk, each in a process of its own.
Whoever launches the kernel finds it there: a variant has the key that Triton itself gives it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_kernel
from triton.compiler.compiler import make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from engine_core import own_process

try:
    from triton.runtime.cache import get_cache_invalidating_env_vars
except ImportError:
    from triton._C.libtriton import get_cache_invalidating_env_vars


def target_of(capability: tuple[int, int]) -> GPUTarget:
    """Triton's name for NVIDIA's GPUs of a compute capability."""
    return GPUTarget("cuda", 10 * capability[0] + capability[1], 32)


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with the types, constants and alignments that it is compiled for.

    Attributes:
        name: the kernel's function.
        key: of its entry in Triton's cache.
        source: what Triton compiles.
        options: for the compiler.
        target: the kind of GPU.
    """

    name: str
    key: str
    source: Any
    options: dict[str, Any]
    target: GPUTarget

    @classmethod
    def of(cls, source: Any, options: dict[str, Any], target: GPUTarget) -> Variant:
        """The variant that Triton would compile of a source with these options."""
        backend = make_backend(target)
        parsed = backend.parse_options({**options, **source.parse_options()})
        key = get_cache_key(source, backend, parsed, get_cache_invalidating_env_vars())
        hashed = hashlib.sha256(key.encode()).hexdigest()
        return cls(source.name, hashed, source, options, target)

    @property
    def cached(self) -> bool:
        """Whether it is in the cache."""
        return is_kept(self.name, self.key)

    def compile(self) -> None:
        """Put it into the cache."""
        compile_kernel(self.source, target=self.target, options=self.options)


def is_kept(name: str, key: str) -> bool:
    """Whether the variant ``key`` of the kernel ``name`` is in Triton's cache."""
    file = f"{name[:150]}.json"
    return file in (get_cache_manager(key).get_group(file) or {})


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
def recording(target: GPUTarget, note: Callable[[Variant], None]) -> Iterator[None]:
    """Have launches in the ``with`` block call ``note`` with the variant, and do nothing else.

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
        touched.add(self)
        kernel = self.device_caches[device][0][key] = _Unlaunched(lambda: note(variant))
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
        variant: what was compiled.
        seconds: how long it took.
        error: why it failed; None if it is in the cache.
    """

    variant: Variant
    seconds: float
    error: str | None = None


class Compilers:
    """Processes that compile variants, forked from this one, which must have one thread.

    Attributes:
        hits: variants that were in the cache already.
        done: all that are in the cache now.
        failed: what could not be compiled.
        seconds: of all compiles together.
    """

    def __init__(self, most: int) -> None:
        """``most``: how many compile at once."""
        self._most = max(1, most)
        self._queue: deque[Variant] = deque()
        self._running: dict[int, tuple[int, Variant, float]] = {}  # by their pipes
        self._known: set[str] = set()
        self.hits, self.seconds = 0, 0.0
        self.done: list[Variant] = []
        self.failed: list[Compiled] = []

    def knows(self, variant: Variant) -> bool:
        """Whether it was added before."""
        return variant.key in self._known

    def summary(self) -> str:
        """How many there are and where they come from, in words."""
        kernels = len({variant.name for variant in self.done})
        text = (
            f"{len(self.done)} variants of {kernels} kernels, {self.hits} of them kept from before "
            f"and the others compiled in {self.seconds:.1f} s of processes"
        )
        return text + (f", and {len(self.failed)} not compiled" if self.failed else "")

    def add(self, variant: Variant) -> bool:
        """Queue a variant; False if it is known or in the cache already."""
        if variant.key in self._known:
            return False
        self._known.add(variant.key)
        if variant.cached:
            self.hits += 1
            self.done.append(variant)
            return False
        self._queue.append(variant)
        return True

    @property
    def busy(self) -> bool:
        """Whether a variant is queued or being compiled."""
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
        pid, variant, begin = self._running.pop(pipe)
        with os.fdopen(pipe, errors="replace") as said:
            why = said.read().strip()
        _, status = os.waitpid(pid, 0)
        code, error = os.waitstatus_to_exitcode(status), None
        if code != 0:
            error = why or f"{variant.name}: its compiler ended {own_process.how_ended(code)}"
        end = Compiled(variant, time.monotonic() - begin, error)
        self.seconds += end.seconds
        if error is None:
            self.done.append(variant)
        else:
            self.failed.append(end)
        return end

    def _start(self) -> None:
        while self._queue and len(self._running) < self._most:
            # A kernel in Gluon takes longest, and so begins first.
            variant = next((v for v in self._queue if v.source.fn.is_gluon()), self._queue[0])
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
                _compile_alone(variant, theirs, parent)
            os.close(theirs)
            self._queue.remove(variant)
            self._running[ours] = (pid, variant, time.monotonic())


def _compile_alone(variant: Variant, pipe: int, parent: int) -> None:
    """The life of a forked process."""
    status = 1
    try:
        own_process.die_with(parent)
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        with suppress(OSError):  # a cache elsewhere, or a file system without locks
            _lock(variant)
        variant.compile()
        status = 0
    except BaseException as error:
        last = traceback.format_exception_only(error)[-1].strip()
        os.write(pipe, f"{variant.name}: {last}"[:4000].encode())
    finally:
        os._exit(status)


def _lock(variant: Variant) -> None:
    """Wait for other engines that compile the same, to find it in the cache."""
    folder = os.open(Path(knobs.cache.dir) / variant.key, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # until the process ends


__all__ = ["Compiled", "Compilers", "Variant", "recording", "target_of"]
