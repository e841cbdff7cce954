"""The kernels of steps that are compiled beside a start, and who waits for them."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from engine_core.runtime.capture import Capturer

logger = logging.getLogger(__name__)


class Compiles:
    """Kernels of captured steps that somebody else compiles; here nobody does.

    A step is named by its :class:`~engine_core.runtime.step_batch.GraphKey`, and what is run beside
    captured steps by the class of the graphs and ``"others"``.

    Attributes:
        capturer: what captures steps in place of the device's own; None for that.
    """

    capturer: Callable[[Any], Capturer] | None = None

    def ready(self, step: Any, seconds: float = 0.0) -> bool:
        """Whether the step's kernels need no compile; waits so long for it."""
        del step, seconds
        return True

    def wait(self, step: Any) -> None:
        """Return once the step's kernels need no compile, or nobody compiles them any more."""
        self.ready(step, float("inf"))

    def loaded(self, model: Any) -> None:
        """Take notice that the model has its weights; no step was run yet."""

    def close(self) -> None:
        """End what compiles."""


NOBODY = Compiles()


def name_of(step: Any) -> str:
    """The name of a step between processes."""
    return repr(tuple(step)) if isinstance(step, tuple) else str(step)


class CompileProcess(Compiles):
    """A process that finds out what steps launch, and has it compiled by others.

    It writes a line for each event, an object of JSON: ``recorded`` names a step, with the
    ``kernels`` that it needs; ``compiled`` names one of these; ``ended`` is the last.
    """

    def __init__(self, command: Sequence[str], task: bytes, environment: dict[str, str]) -> None:
        """Start it; ``task`` is what it reads."""
        self._changed = threading.Condition()
        self._kernels: dict[str, list[str]] = {}
        self._compiled: set[str] = set()
        self._ended: dict[str, Any] | None = None
        self._begin = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what fails is in an event
            env=environment,
        )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "it is a pipe"
        assert stdout is not None, "it is a pipe"
        threading.Thread(target=self._read, args=(stdout,), name="compiles", daemon=True).start()
        with contextlib.suppress(OSError):  # if it is gone already its reader says so
            stdin.write(task)
            stdin.close()

    def ready(self, step: Any, seconds: float = 0.0) -> bool:
        """See :class:`Compiles`."""
        name = name_of(step)
        with self._changed:
            if seconds <= 0:
                return self._is_ready(name)
            timeout = None if seconds == float("inf") else seconds
            return self._changed.wait_for(lambda: self._is_ready(name), timeout)

    def close(self) -> None:
        """See :class:`Compiles`."""
        self._process.kill()
        self._process.wait()

    def _is_ready(self, name: str) -> bool:
        if self._ended is not None:
            return True
        kernels = self._kernels.get(name)
        return kernels is not None and self._compiled.issuperset(kernels)

    def _read(self, stdout: IO[bytes]) -> None:
        ended: dict[str, Any] = {}
        try:
            for line in stdout:
                event = json.loads(line)
                with self._changed:
                    if "recorded" in event:
                        self._kernels[event["recorded"]] = event["kernels"]
                    elif "compiled" in event:
                        self._compiled.add(event["compiled"])
                    else:
                        ended = event
                    self._changed.notify_all()
        except (OSError, ValueError) as error:
            ended = {"failed": f"{type(error).__name__}: {error}"}
        self._process.wait()
        with self._changed:
            self._ended = ended
            self._changed.notify_all()
        seconds = time.monotonic() - self._begin
        if "ended" in ended:
            logger.info("kernels ahead: %s, within %.1f s", ended["ended"], seconds)
        else:
            why = ended.get("failed") or "the process ended"
            logger.info("kernels are not compiled ahead any more: %s", why)
