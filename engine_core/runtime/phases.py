"""Seconds of each phase of start-up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases(dict[str, float]):
    """Names of start-up phases and their seconds, in the order they ran."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the ``with`` block as phase ``name``."""
        start = time.perf_counter()
        yield
        self[name] = self.get(name, 0.0) + time.perf_counter() - start
