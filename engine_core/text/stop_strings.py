"""Stop strings in a stream of text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The result of feeding one piece of text.

    Attributes:
        text: text that is now certain not to be part of a stop string.
        stopped_by: the stop string that was completed, or None; ``text`` ends before it.
    """

    text: str
    stopped_by: str | None = None


@dataclass(slots=True)
class _Node:
    """A state of the automaton: the longest end of the text that begins a stop string.

    Attributes:
        depth: how many characters that is.
        next: the state after each character that goes on with it.
        fail: the state of the next shorter end of the text.
        completed: the longest stop string that the text ends with here.
        hold: characters that may become part of a stop string which is not complete here.
    """

    depth: int
    next: dict[str, _Node] = field(default_factory=dict)
    fail: _Node | None = None
    completed: str | None = None
    hold: int = 0


class StopStringMatcher:
    """Cuts a text, which arrives in pieces, before the first stop string.

    The text ends with the piece that completes a stop string. If that piece completes several, the
    one that begins first counts, and of those the longest. At most ``max(len(stop)) - 1``
    characters are held back. Time is constant for each character (Aho and Corasick, "Efficient
    String Matching", 1975).

    Args:
        stop: the stop strings, none of them empty; none at all is allowed.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise ValueError(f"an empty stop string would end every text at once: {list(stop)!r}")
        self._root = _automaton(tuple(stop))
        self._node = self._root
        self._held = ""
        self._stopped = False

    def append(self, text: str, *, may_stop: bool = True) -> StopMatch:
        """The next piece of the text.

        Args:
            text: the piece.
            may_stop: False while stop strings that are completed do not count; they are then
                ordinary text.
        """
        assert not self._stopped, "text appended after a stop string was completed"
        if not self._root.next:
            return StopMatch(text)
        buffer = self._held + text
        node = self._node
        start, stopped_by = len(buffer), None
        for end, character in enumerate(text, start=len(self._held) + 1):
            node = self._step(node, character)
            completed = node.completed
            # Strings that begin at one place are completed in the order of their length: "<=".
            if completed is not None and may_stop and end - len(completed) <= start:
                start, stopped_by = end - len(completed), completed
        if stopped_by is not None:
            self._stopped = True
            self._held = ""
            return StopMatch(buffer[:start], stopped_by)
        self._node = node
        self._held = buffer[len(buffer) - node.hold :]
        return StopMatch(buffer[: len(buffer) - node.hold])

    def finish(self) -> str:
        """Return the text held back: no stop string can be completed any more."""
        held, self._held = self._held, ""
        self._node = self._root
        return held

    def _step(self, node: _Node, character: str) -> _Node:
        while character not in node.next:
            if node.fail is None:
                return node
            node = node.fail
        return node.next[character]


# The sequences of a request share theirs, which nobody changes once it is made.
@lru_cache(maxsize=16)
def _automaton(stop: tuple[str, ...]) -> _Node:
    root = _Node(0)
    for string in stop:
        node = root
        for character in string:
            node = node.next.setdefault(character, _Node(node.depth + 1))
        node.completed = string
    queue = deque([root])
    while queue:
        node = queue.popleft()
        for character, child in node.next.items():
            fail = node.fail
            while fail is not None and character not in fail.next:
                fail = fail.fail
            child.fail = root if fail is None else fail.next[character]
            child.completed = child.completed or child.fail.completed
            # A complete string that no longer one continues is not held for its own sake.
            child.hold = child.depth if child.next else child.fail.hold
            queue.append(child)
    return root
