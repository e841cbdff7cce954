"""Steps whose kernels should be compiled soon, however fast they are.

A first start waits for the kernels of its first step. What takes seconds to compile, such as
Hopper's kernels, has something in its place there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum


class Quick(IntEnum):
    """How many operations of a step have kernels that are compiled soon; each includes those above.

    As a number in place of a word, since it is part of a step's name.
    """

    NOTHING = 0
    PRODUCTS = 1
    """Linears: cuBLAS has them of any number of rows."""
    ATTENTION = 2
    """Attention to prompts, by the portable kernel."""


_QUICK = ContextVar("engine_core_quick", default=Quick.NOTHING)


@contextmanager
def quickly(what: Quick) -> Iterator[None]:
    """Launch, in the ``with`` block, kernels that are compiled soon in place of faster ones."""
    token = _QUICK.set(what)
    try:
        yield
    finally:
        _QUICK.reset(token)


def is_quick(what: Quick) -> bool:
    """Whether this is inside of :func:`quickly`, and these operations are meant."""
    return _QUICK.get() >= what
