"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStringMatcher:
    """Cuts a text, which arrives in pieces, before the first stop string.

    The text ends with the piece that completes a stop string. If that piece completes several, the
    one that begins first counts, and of those the longest. At most ``max(len(stop)) - 1``
    characters are held back.

    Args:
        stop: the stop strings, none of them empty; none at all is allowed.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise ValueError(f"an empty stop string would end every text at once: {list(stop)!r}")
        self._stop = tuple(stop)
        self._firsts = frozenset(string[0] for string in stop)
        self._beginnings = _beginnings(self._stop)
        self._longest = max(map(len, stop), default=1) - 1
        self._held = ""
        self._stopped = False

    def append(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Take the next piece of the text.

        Args:
            text: the piece.
            may_stop: False while stop strings that are completed do not count; they are then
                ordinary text.

        Returns:
            Text that is now certain not to be part of a stop string, and the stop string that was
            completed, or None; the text ends before it.
        """
        assert not self._stopped, "text appended after a stop string was completed"
        buffer = self._held + text
        if self._firsts.isdisjoint(buffer):
            return buffer, None
        if may_stop:
            found = []
            for stop in self._stop:
                # Only what ends in the new piece: an earlier one was ordinary text.
                start = buffer.find(stop, max(len(self._held) - len(stop) + 1, 0))
                if start >= 0:
                    found.append((start, -len(stop), stop))
            if found:
                start, _, stopped_by = min(found)
                self._stopped = True
                self._held = ""
                return buffer[:start], stopped_by
        end = len(buffer)
        places = range(max(end - self._longest, 0), end)
        hold = next((place for place in places if buffer[place:] in self._beginnings), end)
        self._held = buffer[hold:]
        return buffer[:hold], None

    def finish(self) -> str:
        """Return the text held back: no stop string can be completed any more."""
        held, self._held = self._held, ""
        return held


# The sequences of a request share theirs.
@lru_cache(maxsize=16)
def _beginnings(stop: tuple[str, ...]) -> frozenset[str]:
    """Ends of a text with which one of the strings may begin."""
    return frozenset(string[:length] for string in stop for length in range(1, len(string)))
