"""Whether the kernels for Hopper are used, which are written in Gluon.

Gluon changes between releases of Triton. With one release the kernels ran on GPUs, in tests and
benchmarks. For some others they were only compiled: with such a release each kernel is compared
with plain PyTorch on a small case before it is first used, and kernels that fail are off. With any
other release, and on other GPUs, the portable kernels run.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Releases of Triton that ran the kernels, and those that make machine code of them for sm_90.
_RAN = ("3.6",)
_COMPILE = ("3.7", "3.8", "3.9")
# Of the largest difference, relative to 1 + |expected|: what the kernels' tests allow.
_TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
# Seconds that a small case, which takes a millisecond, may take before it counts as one that hangs.
_PATIENCE = 30.0


_presumed_right = ContextVar("_presumed_right", default=False)


@contextmanager
def presumed_right() -> Iterator[None]:
    """Have trials in the ``with`` block find kernels right: for launches that only say what is run.

    What a trial launches is launched all the same.
    """
    before = _presumed_right.set(True)
    try:
        yield
    finally:
        _presumed_right.reset(before)


@functools.cache
def triton_release() -> str | None:
    """The release of Triton that is installed, such as "3.6.0"; None if there is none."""
    try:
        import triton
    except ImportError:
        return None
    release: str = triton.__version__
    return release


def _is_of(release: str | None, lines: tuple[str, ...]) -> bool:
    return release is not None and ".".join(release.split(".")[:2]) in lines


def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU that the kernels are for."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


@functools.cache
def runs_gluon(device: torch.device, release: str | None = None) -> bool:
    """Whether the kernels for Hopper run there, if their :class:`Family` is not off.

    ``release`` is Triton's; None for the one that is installed.
    """
    return is_hopper(device) and _is_of(release or triton_release(), _RAN + _COMPILE)


def support(devices: Iterable[torch.device], release: str | None = None) -> str:
    """Whether a Hopper GPU among the devices runs the kernels, and why, in a line.

    ``release`` is Triton's; None for the one that is installed.
    """
    if not any(map(is_hopper, devices)):
        return "off: there is no GPU of compute capability 9.0"
    release = release or triton_release()
    if release is None:
        return "off: Triton is not installed"
    if _is_of(release, _RAN):
        return f"on: Triton {release} ran them in tests on GPUs"
    if _is_of(release, _COMPILE):
        return (
            f"on, if they prove right: Triton {release} compiles them and has run them on no GPU, "
            "so each is compared with PyTorch before its first use"
        )
    known = ", ".join(_RAN + _COMPILE)
    return (
        f"off: Triton {release} was not tried, they are for {known}; portable kernels run, and "
        "prompts take longer"
    )


class Trial(NamedTuple):
    """A small case of a kernel.

    Attributes:
        run: launches it and returns what it gave, of 16 bits.
        expected: the same by plain PyTorch, float32.
    """

    run: Callable[[], Tensor]
    expected: Tensor


class Family:
    """The kernels of one operation, and whether they are used.

    With a release of Triton that has run them, always. With another, from when a kernel was right
    in a trial; the first that is wrong, or does not compile, turns all of them off.
    """

    def __init__(
        self,
        name: str,
        cost: str,
        *,
        ran: tuple[str, ...] = _RAN,
        release: str | None = None,
        notes: Path | None = None,
    ) -> None:
        """Nothing is tried yet.

        Args:
            name: what they compute.
            cost: what it takes instead without them, as a clause.
            ran: releases of Triton that have run them.
            release: of Triton; None for the one that is installed.
            notes: a folder, where a trial after which the GPU cannot go on leaves a note for the
                next start; None for that of Triton's compiled kernels.
        """
        self._name, self._cost = name, cost
        self._ran, self._release, self._notes = ran, release, notes
        self._right: set[tuple[torch.device, Hashable]] = set()
        self._off = False

    def allows(self, device: torch.device, kind: Hashable, make: Callable[[], Trial]) -> bool:
        """Whether a kernel of this family may be used; it may be tried for that now.

        A trial allocates, waits for the device and compiles, so none is made within a graph
        capture: what was not tried before is not used there.

        Args:
            device: where it runs.
            kind: what its machine code depends on; each is tried.
            make: makes a case of this kind.

        Raises:
            RuntimeError: the kernel hangs, or broke the GPU's context: this process cannot go on.
                The next one will not use it.
            torch.OutOfMemoryError: there is no memory for the case.
        """
        if self._off:
            return False
        release = self._release or triton_release()
        if _is_of(release, self._ran) or (device, kind) in self._right:
            return True
        if _presumed_right.get():
            with suppress(Exception):  # numbers are missing, launches are not
                make().run()
            self._right.add((device, kind))
            return True
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        begin = time.perf_counter()
        why = self._noted(release) or self._try(device, make, release)
        if why is None:
            self._right.add((device, kind))
            seconds = time.perf_counter() - begin
            logger.info(
                "Hopper's kernel of %s is right with Triton %s: tried in %.2f s with its compile",
                self._name,
                release,
                seconds,
            )
            return True
        self._off = True
        logger.warning(
            "Hopper's kernels of %s are off with Triton %s: %s. %s. %s",
            self._name,
            release,
            why,
            self._cost,
            f"Triton {', '.join(self._ran)} ran them" if self._ran else "No Triton has run them",
        )
        return False

    def _try(
        self, device: torch.device, make: Callable[[], Trial], release: str | None
    ) -> str | None:
        """The reason why a kernel is not used; None if it is right."""
        try:
            trial = make()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            got = trial.run()
            ended = _ends(device, _PATIENCE)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).strip() or 'no message'}"[:400]
            if _is_broken(device):
                self._note(release, f"it broke the GPU's context ({why})", error)
            return why
        if not ended:
            self._note(release, f"a small case did not end in {_PATIENCE:.0f} s")
        difference = (got.float() - trial.expected).abs() / (1 + trial.expected.abs())
        worst = difference.nan_to_num(torch.inf, torch.inf).max().item()
        allowed = _TOLERANCE[got.dtype]
        if worst < allowed:
            return None
        return f"a small case is off by {worst:.2g}, where {allowed:.2g} is allowed"

    def _file(self, release: str | None) -> Path:
        folder = self._notes
        if folder is None:
            from triton import knobs

            folder = Path(knobs.cache.dir)
        return folder / f"engine-core off {self._name}, Triton {release}.txt"

    def _noted(self, release: str | None) -> str | None:
        """The note of an earlier process that could not go on; None if there is none."""
        file = self._file(release)
        try:
            return f"{file.read_text().strip()} (delete {str(file)!r} to try it again)"
        except OSError:
            return None

    def _note(self, release: str | None, why: str, cause: Exception | None = None) -> None:
        """Leave a note, and end: the GPU takes no more work of this process."""
        file, what = self._file(release), "start it again, without them"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(why + "\n")
        except OSError as error:
            what = f"a note for the next start could not be written ({error}); take another Triton"
        raise RuntimeError(
            f"Hopper's kernel of {self._name} was tried with Triton {release}: {why}. This "
            f"process cannot go on: {what}"
        ) from cause


def _ends(device: torch.device, patience: float) -> bool:
    """Whether what was launched ends in so many seconds; what it raised is raised."""
    if device.type != "cuda":
        return True
    event = torch.cuda.Event()
    event.record()
    end = time.monotonic() + patience
    while not event.query():
        if time.monotonic() > end:
            return False
        time.sleep(1e-3)
    return True


def _is_broken(device: torch.device) -> bool:
    """Whether the device's context takes no more work, as after an illegal address."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except Exception:
        return True
    return False
