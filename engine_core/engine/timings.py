"""Histograms and counts of an engine's steps, made in its process and sent to servers as bytes."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import accumulate

# Upper bounds of buckets, in seconds: those of vLLM's time to first token up to 160.
_REQUEST: tuple[float, ...] = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_REQUEST += (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
# Decode steps take a millisecond, and steps full of prompts seconds.
_STEP: tuple[float, ...] = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05)
_STEP += (0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_BOUNDS = {"queue": _REQUEST, "prefill": _REQUEST}
_BOUNDS |= {f"step_{kind}": _STEP for kind in ("decode", "prefill", "mixed")}
_BOUNDS["encode"] = _STEP
_WAYS = ("graph", "recorded", "eager")
# A histogram is its sum, the counts of its buckets, and the count of values above all buckets.
_ENDS = list(accumulate(len(bounds) + 2 for bounds in _BOUNDS.values()))
_PLACES = dict(zip(_BOUNDS, [0, *_ENDS], strict=False))
_SIZE = _ENDS[-1] + len(_WAYS)


class Timings:
    """Histograms by name, and counts of steps by how they were run.

    ``queue`` and ``prefill`` are of sequences, in seconds: until they are first planned, and from
    there to their first token. ``step_decode``, ``step_prefill`` and ``step_mixed`` are of steps,
    ``encode`` of what pictures, videos and sounds take in those that compute some.

    Args:
        data: what :meth:`encode` gave; all zero if empty.
    """

    def __init__(self, data: bytes = b"") -> None:
        self._numbers = array("d", data or bytes(8 * _SIZE))

    def encode(self) -> bytes:
        """All of it in a form that is cheap to send."""
        return self._numbers.tobytes()

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Count ``value`` in a histogram, ``times`` times."""
        place = _PLACES[name]
        self._numbers[place] += value * times
        self._numbers[place + 1 + bisect_left(_BOUNDS[name], value)] += times

    def count(self, way: str, steps: int) -> None:
        """Count steps that were run in a way: "graph", "recorded" or "eager"."""
        self._numbers[_WAYS.index(way) - len(_WAYS)] += steps

    def histogram(self, name: str) -> tuple[list[tuple[str, float]], float]:
        """Upper bound and number of values up to it of each bucket, and the sum of all values."""
        place, bounds = _PLACES[name], _BOUNDS[name]
        counts = self._numbers[place + 1 : place + 2 + len(bounds)]
        names = [*map(str, bounds), "+Inf"]
        return list(zip(names, accumulate(counts), strict=True)), self._numbers[place]

    def steps(self) -> dict[str, float]:
        """How many steps were run in each way."""
        return dict(zip(_WAYS, self._numbers[-len(_WAYS) :], strict=True))


__all__ = ["Timings"]
