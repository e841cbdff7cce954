"""Ctrl-C in the middle of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class _Hold:
    """A handler that keeps the first signal for later and lets the next through to ``handler``."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self.handler = handler
        self.held: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.held is None:
            self.held = (number, frame)
        else:
            self.held = None
            self.handler(number, frame)


@contextmanager
def held_interrupt() -> Iterator[None]:
    """Let a SIGINT that comes in the ``with`` block take effect at its end; a second one at once.

    For work that must be done whole or not at all. Only the main thread gets signals: in other
    threads, and where SIGINT is ignored, nothing is held. Within another such block the outer one
    holds.
    """
    handler = signal.getsignal(signal.SIGINT)
    if (
        threading.current_thread() is not threading.main_thread()
        or not callable(handler)
        or isinstance(handler, _Hold)
    ):
        yield
        return
    hold = _Hold(handler)
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if hold.held is not None:
            handler(*hold.held)


__all__ = ["held_interrupt"]
