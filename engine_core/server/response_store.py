"""Responses kept in memory, for requests that continue them or ask for them again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response.

    Attributes:
        answer: its object, as JSON.
        messages: the conversation up to its end as messages of a chat, as JSON.
    """

    answer: bytes
    messages: bytes

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.answer) + len(self.messages)


class ResponseStore:
    """The responses that were used last; who asks for one must have the key that it was made with.

    Args:
        max_count: responses at most.
        max_size: bytes of all of them at most.
    """

    def __init__(self, max_count: int, max_size: int) -> None:
        self._max_count = max_count
        self._max_size = max_size
        self._size = 0
        self._responses: OrderedDict[tuple[bytes, str], StoredResponse] = OrderedDict()

    def put(self, key: bytes, name: str, response: StoredResponse) -> bool:
        """Keep a response, in place of those not used for longest; false if it is too large."""
        if response.size > self._max_size:
            return False
        self._responses[key, name] = response
        self._size += response.size
        while len(self._responses) > self._max_count or self._size > self._max_size:
            _, dropped = self._responses.popitem(last=False)
            self._size -= dropped.size
        return True

    def get(self, key: bytes, name: str) -> StoredResponse | None:
        """The response of this name, if the key has one."""
        found = self._responses.get((key, name))
        if found is not None:
            self._responses.move_to_end((key, name))
        return found

    def delete(self, key: bytes, name: str) -> bool:
        """Drop a response; false if the key has none of this name."""
        dropped = self._responses.pop((key, name), None)
        if dropped is None:
            return False
        self._size -= dropped.size
        return True
