"""A number that several processes share."""

from __future__ import annotations


class SharedCount:
    """A sum of numbers, of which each process writes one.

    Nobody waits for anybody: a number is written at once, and the sum may lack what others write
    meanwhile.

    Args:
        numbers: 64 bits for each process, in memory that all of them map; None for one process.
        place: index of this process's number, which is set to 0, whatever was left there.
    """

    def __init__(self, numbers: memoryview | None = None, place: int = 0) -> None:
        self._numbers = memoryview(bytearray(8)).cast("q") if numbers is None else numbers
        self._place = place
        self.own = 0

    @property
    def own(self) -> int:
        """This process's number."""
        number: int = self._numbers[self._place]
        return number

    @own.setter
    def own(self, number: int) -> None:
        self._numbers[self._place] = number

    @property
    def total(self) -> int:
        """The sum of all processes' numbers."""
        return sum(self._numbers)
