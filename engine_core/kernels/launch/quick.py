"""Steps whose kernels should be compiled soon, however fast they are.

A first start waits for the kernels of its first step. What takes seconds to compile, such as
Hopper's kernels, has something in its place there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_QUICK = ContextVar("engine_core_quick", default=False)


@contextmanager
def quickly() -> Iterator[None]:
    """Launch, in the ``with`` block, kernels that are compiled soon in place of faster ones."""
    token = _QUICK.set(True)
    try:
        yield
    finally:
        _QUICK.reset(token)


def is_quick() -> bool:
    """Whether this is inside of :func:`quickly`."""
    return _QUICK.get()
