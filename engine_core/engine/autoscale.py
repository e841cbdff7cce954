"""The number of an engine's replicas between two bounds, by the queue.

The unit is a sequence; a replica runs as many at once as it has rows.

- More: when some have waited in every look of ``up_delay`` seconds, there are to be as many
  replicas as have rows for all sequences, those that run and those that wait.
- Fewer: when in every look of ``down_delay`` seconds none waited, and those that ran would have
  filled at most 70% of the rows of one replica less, there is to be one less.
- Else their number stays. Every change begins both times anew.

What lies between the two conditions changes nothing, so that a load that stays the same is
followed by changes in one direction only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine_core.errors import EngineError

if TYPE_CHECKING:
    from engine_core.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

# The most of fewer replicas' rows that may be taken when they become fewer.
_FILLED = 0.7
# Seconds between two looks, at most.
_LOOK_SECONDS = 1.0


@dataclass(slots=True)
class ScaleRule:
    """The rule of the module, with its memory of what was seen.

    Attributes:
        least: replicas at least.
        most: replicas at most.
        rows: sequences that a replica runs at once.
        up_delay: seconds that some must have waited.
        down_delay: seconds that a replica must have been too many.
    """

    least: int
    most: int
    rows: int
    up_delay: float = 10.0
    down_delay: float = 300.0
    _waits_since: float | None = field(default=None, init=False)
    _idle_since: float | None = field(default=None, init=False)

    def wanted(self, now: float, replicas: int, running: int, waiting: int) -> int:
        """How many replicas there should be.

        Args:
            now: seconds of any clock that never goes back.
            replicas: how many there are, ready or being started.
            running: sequences that have rows.
            waiting: sequences that wait for rows.
        """
        crowded = waiting > 0 and replicas < self.most
        fits = running <= _FILLED * self.rows * (replicas - 1)
        idle = waiting == 0 and fits and replicas > self.least
        self._waits_since = _since(crowded, self._waits_since, now)
        self._idle_since = _since(idle, self._idle_since, now)
        wanted = replicas
        if self._waits_since is not None and now - self._waits_since >= self.up_delay:
            # Some wait though others may have rows: one more at least.
            wanted = max(replicas + 1, -(-(running + waiting) // self.rows))
        elif self._idle_since is not None and now - self._idle_since >= self.down_delay:
            wanted = replicas - 1
        wanted = min(self.most, max(self.least, wanted))
        if wanted != replicas:
            self._waits_since = self._idle_since = None
        return wanted


def _since(holds: bool, since: float | None, now: float) -> float | None:
    """Since when a condition holds."""
    if not holds:
        return None
    return now if since is None else since


async def follow_queue(engine: AsyncEngine, rule: ScaleRule) -> None:
    """Scale an engine by a rule until this is cancelled.

    A replica that takes no more requests, but has some, takes requests again if more are needed.
    One that cannot be started is tried again after ``up_delay``.
    """
    look = min(_LOOK_SECONDS, rule.up_delay / 4, rule.down_delay / 4)
    scaling: asyncio.Task[None] | None = None
    # What there are, or will be once they are scaled.
    aim = len(engine.replicas)
    try:
        while True:
            await asyncio.sleep(look)
            if scaling is not None and scaling.done():
                _tell(scaling)
                scaling, aim = None, len(engine.replicas)
            stats = engine.stats()
            wanted = rule.wanted(time.monotonic(), aim, stats.running, stats.waiting)
            grows_while_shrinking = scaling is not None and wanted > aim < len(engine.replicas)
            if wanted == aim or (scaling is not None and not grows_while_shrinking):
                continue
            if scaling is not None:
                scaling.cancel()
                await asyncio.gather(scaling, return_exceptions=True)
            logger.info(
                "%d replicas instead of %d: %d sequences run, %d wait",
                wanted,
                aim,
                stats.running,
                stats.waiting,
            )
            aim = wanted
            scaling = asyncio.ensure_future(engine.scale(wanted))
    finally:
        if scaling is not None:
            scaling.cancel()
            await asyncio.gather(scaling, return_exceptions=True)


def _tell(scaling: asyncio.Task[None]) -> None:
    """Log why replicas could not be started, if so."""
    error = None if scaling.cancelled() else scaling.exception()
    if isinstance(error, EngineError):
        logger.error("no more replicas could be started: %s", error, exc_info=error)
    elif error is not None:
        raise error


__all__ = ["ScaleRule", "follow_queue"]
