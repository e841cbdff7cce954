"""The kernels of steps that are compiled beside a start, and who waits for them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO, Any, Protocol

from engine_core.plugin_code import described
from engine_core.runtime.capture import Capturer

logger = logging.getLogger(__name__)

# Seconds without an event after which a process is taken to be stuck. The slowest kernel takes some
# 15 seconds, and more where several share a core.
_SILENCE = 180.0
PATIENCE = 0.02
"""Seconds that an engine waits for kernels before it looks for requests, if it is idle, or for what
it can load meanwhile."""


class Compiles:
    """Kernels of captured steps that somebody else compiles; here nobody does.

    A step is named by its :class:`~engine_core.runtime.step_batch.GraphKey`, and what is run beside
    captured steps by the class of the graphs and ``"others"``.

    Attributes:
        capturer: what captures steps in place of the device's own; None for that.
        late: how often an idle engine captured nothing in its turn, since kernels were not there
            yet or were to be loaded, or since the step was to be run before.
        reads_weights: whether the checkpoint's numbers are read; without, weights have any.
    """

    capturer: Callable[[Any], Capturer] | None = None
    late = 0
    reads_weights = True

    @property
    def under_way(self) -> bool:
        """Whether kernels are still to come."""
        return False

    def ready(self, step: Any, seconds: float = 0.0) -> bool:
        """Whether the step's kernels need no compile; waits so long for it."""
        del step, seconds
        return True

    def wait(self, step: Any) -> None:
        """Return once the step's kernels need no compile, or nobody compiles them any more."""
        self.ready(step, float("inf"))

    def load_next(self) -> bool:
        """Load a kernel that was compiled, before a step launches it; False if there is none now.

        It takes some 10 ms, and where the device is at work as long as that.
        """
        return False

    def loaded(self, model: Any) -> None:
        """Take notice that the model has its weights; no step was run yet."""

    def close(self) -> None:
        """End what compiles."""


NOBODY = Compiles()

MEMORY, START = "memory of ranks", "start of ranks"
"""Names of what several ranks launch when they share memory, and until all are ready for steps."""
ALL = "all"
"""The name of what is there once nobody compiles any more."""
QUICK = "quick steps"
"""The name of what steps of any shape launch that are quick in all."""


def name_of(step: Any) -> str:
    """The name of a step between processes."""
    return repr(tuple(step)) if isinstance(step, tuple) else str(step)


class Child(Protocol):
    """A process that was started."""

    def kill(self) -> None:
        """End it at once."""

    def wait(self) -> Any:
        """Return when it has ended."""


class Forked:
    """A process that was forked from this one."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ended = False
        self._lock = threading.Lock()

    def kill(self) -> None:
        """See :class:`Child`."""
        with contextlib.suppress(ProcessLookupError):
            if not self._ended:
                os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> None:
        """See :class:`Child`."""
        with self._lock:
            if not self._ended:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(self._pid, 0)
            self._ended = True


class CompileProcess(Compiles):
    """A process that finds out what steps launch, and has it compiled by others.

    It writes a line for each event, an object of JSON: ``recorded`` names a step, with the
    ``kernels`` that it needs; ``compiled`` names one of these; ``load`` has a variant that can be
    loaded, as :func:`~engine_core.runtime.ahead.load` takes it; ``ended`` or ``failed`` is the
    last.
    """

    def __init__(
        self,
        process: Child,
        stdin: IO[bytes],
        stdout: IO[bytes],
        silence: float = _SILENCE,
    ) -> None:
        """Read what the process writes to ``stdout``; ``stdin`` is for :meth:`send`.

        Who waits for it ends it after ``silence`` seconds without an event: a model's code may do
        anything there.
        """
        self._changed = threading.Condition()
        self._kernels: dict[str, list[str]] = {}
        self._compiled: set[str] = set()
        self._unloaded: deque[str] = deque()
        self._ended: dict[str, Any] | None = None
        self._closed = False
        self._begin = self._heard = time.monotonic()
        self._silence = silence
        self._process, self._stdin = process, stdin
        threading.Thread(target=self._read, args=(stdout,), name="compiles", daemon=True).start()

    def send(self, task: bytes) -> None:
        """Say what it is to do, once."""
        with contextlib.suppress(OSError):  # if it is gone already its reader says so
            self._stdin.write(task)
            self._stdin.close()

    @property
    def under_way(self) -> bool:
        """See :class:`Compiles`."""
        return self._ended is None

    def ready(self, step: Any, seconds: float = 0.0) -> bool:
        """See :class:`Compiles`."""
        name = name_of(step)
        until = time.monotonic() + seconds
        with self._changed:
            while not self._is_ready(name):
                now = time.monotonic()
                patience = self._heard + self._silence - now
                if patience <= 0:
                    self._give_up()
                elif now >= until:
                    return False
                else:
                    self._changed.wait(min(until - now, patience))
        return True

    def wait(self, step: Any) -> None:
        """See :class:`Compiles`. Meanwhile kernels are loaded that are there."""
        while not self.ready(step):
            if not self.load_next():
                self.ready(step, PATIENCE)

    def load_next(self) -> bool:
        """See :class:`Compiles`."""
        if not self._unloaded:
            return False
        from engine_core.runtime import ahead

        try:
            ahead.load(self._unloaded.popleft())
        except Exception as error:
            # Its first launch will load it, or say why it cannot.
            logger.info("a kernel is not loaded ahead: %s", described(error))
        return True

    def close(self) -> None:
        """See :class:`Compiles`."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._stdin.close()  # if it was sent nothing
        self._process.kill()
        self._process.wait()

    def _is_ready(self, name: str) -> bool:
        if self._ended is not None:
            return True
        kernels = self._kernels.get(name)
        return kernels is not None and self._compiled.issuperset(kernels)

    def _give_up(self) -> None:
        logger.warning(
            "kernels are not compiled ahead any more: their process was silent for %.0f s",
            self._silence,
        )
        self._ended, self._closed = {}, True
        self._process.kill()

    def _read(self, stdout: IO[bytes]) -> None:
        ended: dict[str, Any] = {}
        try:
            for line in stdout:
                event = json.loads(line)
                with self._changed:
                    self._heard = time.monotonic()
                    if "recorded" in event:
                        self._kernels[event["recorded"]] = event["kernels"]
                    elif "compiled" in event:
                        self._compiled.add(event["compiled"])
                    elif "load" in event:
                        self._unloaded.append(event["load"])
                    else:
                        ended = event
                    self._changed.notify_all()
        except Exception as error:  # whatever the process wrote
            ended = {"failed": f"{type(error).__name__}: {error}"}
        stdout.close()
        self._process.wait()
        seconds = time.monotonic() - self._begin
        if "ended" in ended:
            logger.info("kernels ahead: %s, within %.1f s", ended["ended"], seconds)
        elif not self._closed:
            why = ended.get("failed") or "the process ended"
            logger.warning(
                "kernels are not compiled ahead any more, and a start takes longer: %s", why
            )
        with self._changed:
            self._ended = ended
            self._changed.notify_all()
