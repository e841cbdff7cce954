"""The choice of a replica for each request, by the tokens that it costs there.

The unit of everything is a prompt's token that a replica computes. A request costs a replica the
sum of

- its work: tokens of prompts sent there whose first token has not come, and for each sequence
  there the tokens that it is expected to generate yet;
- its queue: if it has no row for all, a row is free once a sequence has ended. That takes as many
  steps as a sequence is expected to generate, and so long prompts of some length could be computed
  (``step_tokens`` for each step);
- the request's own tokens: those of its prompt that the replica does not have in blocks;
- what it pushes out: as many cached tokens as there is no room for beside its new ones.

It goes where that is least. So it stays with the blocks of its beginning until the work that waits
there exceeds the work elsewhere by more tokens than those blocks save. What nobody has goes where
least is cached, if costs are equal, so that conversations spread over all caches.

A sequence is expected to generate as many tokens as those that ended did on average, or as those at
its replica have so far, if that is more.

What a replica has is known by the keys of the blocks of prompts that were sent there (digests of
token chains, and salts), as many as its cache has room for, least recently sent out first. Answers
and what the replica dropped otherwise are not known; a wrong guess costs time, never a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

# Keys of a replica at most, of some 250 bytes each.
MOST_KEYS = 1 << 16

Why = Literal["prefix", "load", "new"]


@dataclass(slots=True)
class _Known:
    """The router's knowledge of one replica.

    Attributes:
        block_size: tokens that a key stands for.
        capacity: keys of blocks that its cache has room for.
        keys: of blocks that it should have, least recently sent first.
        rows: sequences that run at once.
        waiting: tokens of prompts that are to be computed.
        sequences: those under way.
        done: tokens that sequences generated which have ended.
    """

    block_size: int
    capacity: int
    rows: int
    keys: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)
    waiting: int = 0
    sequences: int = 0
    done: int = 0

    def match(self, keys: Sequence[Hashable]) -> int:
        """How many of the first ``keys`` it has."""
        for index, key in enumerate(keys):
            if key not in self.keys:
                return index
        return len(keys)

    def work(self, mean: float, generated: int, more: int, step_tokens: float) -> float:
        """Tokens that are to be computed there before ``more`` sequences have rows."""
        expected = max(mean, (generated - self.done) / max(1, self.sequences))
        queued = max(0, self.sequences + more - self.rows)
        queue = step_tokens * expected * queued / self.rows
        return self.waiting + expected * self.sequences + queue

    def own(self, num_tokens: int, num_keys: int, matched: int) -> int:
        """Tokens of a prompt that it does not have, and those that they push out."""
        too_many = len(self.keys) + num_keys - matched - self.capacity
        pushed_out = min(max(0, too_many), len(self.keys))
        return num_tokens + (pushed_out - matched) * self.block_size

    def take(self, keys: Sequence[Hashable]) -> None:
        """Note the blocks of a prompt; the end of a chain goes before its beginning."""
        for key in reversed(keys[: self.capacity]):
            self.keys[key] = None
            self.keys.move_to_end(key)
        while len(self.keys) > self.capacity:
            self.keys.popitem(last=False)


@dataclass(slots=True)
class Ticket:
    """A request at a replica, from :meth:`Router.route` to :meth:`Router.ended`.

    Attributes:
        replica: its number.
        sequences: how many the request has.
        waiting: tokens of its prompt that are to be computed; 0 once its first token has come.
        why: "prefix" if no replica has more of its beginning, "load" if one has but costs more,
            "new" if none has any of it.
    """

    replica: int
    sequences: int
    waiting: int
    why: Why
    _known: _Known


class Router:
    """Chooses a replica for each request; see the module for the rule."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        # Of sequences that have ended, how many they are and what they generated.
        self._ended = self._generated = 0

    @property
    def open(self) -> tuple[int, ...]:
        """The numbers of the replicas that take requests."""
        return tuple(self._known)

    def join(self, replica: int, block_size: int, num_blocks: int, rows: int) -> None:
        """Send requests to a replica, whose cache is empty and has so many blocks."""
        self._known[replica] = _Known(block_size, min(num_blocks, MOST_KEYS), rows)

    def leave(self, replica: int) -> None:
        """Send a replica no more requests, and forget what it has."""
        self._known.pop(replica, None)

    def num_keys(self, replica: int) -> int:
        """How many blocks a replica should have."""
        return len(self._known[replica].keys) if replica in self._known else 0

    def route(
        self,
        num_tokens: int,
        keys: Sequence[Hashable],
        sequences: int,
        generated: Mapping[int, int],
        step_tokens: float,
    ) -> Ticket:
        """Choose a replica for a request and count it there; there must be one.

        Args:
            num_tokens: of its prompt.
            keys: of the prompt's full blocks, each standing for all tokens up to its end.
            sequences: how many continue the prompt.
            generated: tokens that each replica has generated since it joined.
            step_tokens: tokens of prompts computed in the time of a step in which all rows decode.
        """
        matches = {number: known.match(keys) for number, known in self._known.items()}
        mean = self._generated / max(1, self._ended)

        def order(number: int) -> tuple[float, int, int]:
            known, matched = self._known[number], matches[number]
            cost = known.work(mean, generated[number], sequences, step_tokens)
            cost += known.own(num_tokens, len(keys), matched)
            return cost, -matched, len(known.keys)

        chosen = min(self._known, key=order)
        known, matched, most = self._known[chosen], matches[chosen], max(matches.values())
        waiting = num_tokens - matched * known.block_size
        known.waiting += waiting
        known.sequences += sequences
        known.take(keys)
        why: Why = "load" if matched < most else "prefix" if matched else "new"
        return Ticket(chosen, sequences, waiting, why, known)

    def began(self, ticket: Ticket) -> None:
        """Take note that a request's prompt is computed."""
        ticket._known.waiting -= ticket.waiting
        ticket.waiting = 0

    def ended(self, ticket: Ticket, tokens: int) -> None:
        """Take note that a request is over, in whatever way, with so many tokens generated."""
        self.began(ticket)
        self._ended += ticket.sequences
        self._generated += tokens
        ticket._known.sequences -= ticket.sequences
        ticket._known.done += tokens
        ticket.sequences = 0


__all__ = ["MOST_KEYS", "Router", "Ticket", "Why"]
