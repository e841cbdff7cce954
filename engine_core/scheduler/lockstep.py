"""Decoding sequences that need nothing of the scheduler, as columns of numbers."""

from __future__ import annotations

from collections.abc import Sequence as AnySequence

import numpy as np
import numpy.typing as npt

from engine_core.scheduler.sequence import Sequence
from engine_core.steps import TokenColumns

_Ints = npt.NDArray[np.int64]

MOST_STOPS = 8
"""Stop tokens of a member, at most."""

MOST_KEPT = 64
"""Tokens of a member that are accepted and not yet in its ``token_ids``, at most."""


class Lockstep:
    """Members advance by a token each step, with no object of Python's for each of them.

    Columns are by row of the persistent batch. A row is not given to another sequence while a step
    in flight names it, so that a row of a plan always tells whose it is. While a sequence is a
    member, its own counts and tokens are those of the last :meth:`sync`.

    Args:
        num_rows: of the persistent batch.

    Attributes:
        live: ``[num_rows]``, whether the row's sequence is a member.
        owners: ``[num_rows]``, the sequence that was last a member in the row.
        scheduled: its ``num_scheduled``.
        length: its tokens.
        limit: the tokens at which it ends.
        bound: it is planned while ``scheduled`` is less.
        due: the length at which more is to be done than to take in a token, though it goes on.
    """

    def __init__(self, num_rows: int) -> None:
        self.live = np.zeros(num_rows, dtype=np.bool_)
        self.owners = np.full(num_rows, None, dtype=object)
        self._ids = self.owners.copy()
        self._stops = np.full((MOST_STOPS, num_rows), -1, dtype=np.int64)
        self._most_stops = 0
        self._tokens = np.zeros((num_rows, MOST_KEPT), dtype=np.int64)
        self._counts = np.zeros((10, num_rows), dtype=np.int64)
        self.scheduled, self.length, self.bound, self.due, self.limit, *others = self._counts
        self._written, self._cached, self._preempted, self._last_step, self._numbers = others
        # None while it is to be found anew; their names in this order, if they have been asked for.
        self._order: _Ints | None = np.zeros(0, dtype=np.int64)
        self._names: list[str] | None = None

    @property
    def order(self) -> _Ints:
        """The members' rows, the longest first."""
        if self._order is None:
            rows = np.flatnonzero(self.live)
            self._order = rows[np.argsort(-self.scheduled[rows], kind="stable")]
            self._names = None
        return self._order

    def join(self, sequences: AnySequence[Sequence], due: _Ints) -> None:
        """Make members of sequences with a row; ``due`` is the column's for each."""
        rows = np.array([sequence.row for sequence in sequences], dtype=np.int64)
        counts = [
            (
                s.num_scheduled,
                len(s.token_ids),
                min(s.capacity, s.limit - 1),
                0,
                s.limit,
                len(s.token_ids),
                s.num_cached_tokens,
                s.num_preemptions,
                s.last_step,
                s.number,
            )
            for s in sequences
        ]
        self._counts[:, rows] = np.array(counts, dtype=np.int64).T
        self.due[rows] = due
        for row, sequence in zip(rows.tolist(), sequences, strict=True):
            if self.owners[row] is not sequence:
                self.owners[row], self._ids[row] = sequence, sequence.sequence_id
                count = len(sequence.stop_token_ids)
                self._stops[:count, row], self._stops[count:, row] = [*sequence.stop_token_ids], -1
                self._most_stops = max(count, self._most_stops)
            sequence.in_lockstep = True
        self.live[rows] = True
        self._order = None

    def sync(self, rows: _Ints) -> None:
        """Bring the tokens and counts of members up to date."""
        columns = self._counts[:, rows].tolist()
        columns = (rows.tolist(), columns[0], columns[1], columns[5], columns[8])
        for row, scheduled, length, written, last_step in zip(*columns, strict=True):
            sequence: Sequence = self.owners[row]
            if length > written:
                sequence.token_ids.frombytes(self._tokens[row, : length - written].tobytes())
                sequence.num_computed = length - 1
            sequence.num_scheduled = scheduled
            sequence.num_pending = scheduled + 1 - length
            sequence.last_step = last_step
        self._written[rows] = self.length[rows]

    def leave(self, rows: _Ints) -> None:
        """End the membership of rows."""
        if rows.size:
            self.sync(rows)
            for sequence in self.owners[rows].tolist():
                sequence.in_lockstep = False
            self.live[rows] = False
            self._order = None

    def can_advance(self) -> bool:
        """Whether a member may have one more token."""
        rows = self.order
        return bool((self.scheduled[rows] < self.bound[rows]).any())

    def advance(self, step_id: int) -> tuple[list[str], _Ints, _Ints]:
        """Plan a token of each member that may have one more: names, rows and positions."""
        rows = self.order
        starts = self.scheduled[rows]
        able = starts < self.bound[rows]
        if able.all():
            if self._names is None:
                self._names = self._ids[rows].tolist()
            names = self._names
        else:
            rows, starts = rows[able], starts[able]
            names = self._ids[rows].tolist()
        self.scheduled[rows] = starts + 1
        self._last_step[rows] = step_id
        return names, rows, starts

    def may_end(self, rows: _Ints, tokens: _Ints) -> npt.NDArray[np.bool_]:
        """Whether these tokens of some rows may be their last."""
        ends: npt.NDArray[np.bool_] = self.length[rows] + 1 >= self.limit[rows]
        for stops in self._stops[: self._most_stops]:
            ends |= stops[rows] == tokens
        return ends

    def all_due(self, rows: _Ints) -> _Ints:
        """Those of some rows that have reached the length at which they are due."""
        due: _Ints = rows[self.length[rows] >= self.due[rows]]
        return due

    def accept(self, rows: _Ints, tokens: _Ints, names: list[str] | None) -> TokenColumns:
        """Take in a token for each of some rows, whose names may be known; returns the updates."""
        length = self.length[rows]
        self._tokens[rows, length - self._written[rows]] = tokens
        self.length[rows] = length + 1
        return TokenColumns(
            self._numbers[rows],
            tokens,
            self._ids[rows].tolist() if names is None else names,
            self._cached[rows],
            self._preempted[rows],
        )
