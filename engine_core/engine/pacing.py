"""Limits of how far the host runs ahead, and of the prompt tokens in a step."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import combinations
from math import hypot
from statistics import median

from engine_core.runtime.step_batch import sizes_beside
from engine_core.scheduler import Scheduler
from engine_core.steps import MediaWork, StepPlan

# Steps of a size that are remembered, and how many of them are believed before the other sizes.
_REMEMBERED = 15
_TELLING = 3
# While many prompts wait a step may be so often as long as its decoding rows need: else prompts
# would hardly get on where rows alone take as long as a step should.
_BACKLOG_ROWS = 3
# But never more than so many times as long as a step should be, whatever rows seem to take.
_BACKLOG_MOST = 7
# Of the step that brought the most tokens in its time, so much at least is its tokens'.
_LEAST_SHARE = 0.5
# While fewer of the gaps between tokens than this share are long, so many fewer prompts are many. A
# step of so much of the time that it should have at most makes them long. At most this number of
# long gaps is saved up.
_LONG_GAPS = 0.01
_LONG = 0.95
_FEWER = 0.75
_MOST_SAVED = 100.0
# Where other work changes what steps take, what a size took so many steps with prompts ago is old.
_OLD = 30
# Sizes that bring so much of the most tokens a second are as good.
_ALIKE = 0.97
# Where attention makes even a step with the fewest tokens too long, so many times its attention is
# allowed for the sake of more tokens.
_ATTENTION_STRETCH = 1.25
# The mean number of tokens that those of a prompt attend to, from which on attention to them tells.
_FAR = 2048
# Seconds between the submission of a step and the end of the one before it, at least and at most.
_LEAST_MARGIN, _MOST_MARGIN = 0.0003, 0.05

# Seconds of a step, the rows that decoded in it, and its tokens of prompts.
_Taken = tuple[float, float, float]


class StepTimes:
    """Durations of steps, by the rows that decode and by the tokens of prompts beside them.

    A step takes something whatever is in it, something for each row that decodes and something for
    each token of a prompt. On a CPU a row costs much, and rows come and go within seconds, so no
    step is taken for one with other rows if there was one like it. A step is as long as the
    captured one that holds it, so tokens are counted in those sizes, padded rows among them. Far
    into a long prompt attention takes most of a step: something for each pair of a token and one
    that it attends to. A token more than fills a device takes as long as if it were filled once
    more, since one part of it goes through all that a token attends to. Embeddings of pictures,
    videos and sounds take what such steps took longer: something for each, and something for the
    beginning and the end of an item that takes several steps, since its features are sent to the
    device in the first.
    """

    def __init__(
        self,
        max_tokens: int,
        filling_tokens: int = 1,
        rooms: Sequence[int] = (),
        *,
        steady: bool = True,
    ) -> None:
        """Nothing is known yet.

        Args:
            max_tokens: of the prompts of a step, at most.
            filling_tokens: tokens of a prompt whose attention fills the whole device once.
            rooms: numbers of decoding rows that captured steps have room for; none if rows are not
                padded.
            steady: whether a step takes what such a step took long ago. Other work on a CPU, or
                code that is compiled at first, makes steps long for a while. Sizes that were too
                long then would not be tried again.
        """
        self._rooms = rooms
        self._steady = steady
        self._added = 0  # steps with rows that decode and prompts
        self._last: dict[tuple[int, int], int] = {}  # which of them was the last of its kind
        self._sizes = {room: sizes_beside(room, max_tokens) for room in (0, *rooms)}
        self._filling_tokens = filling_tokens
        # Seconds, rows and tokens by the binary digits of the rows and by size: 0 rows without any
        # that decodes, size 0 for decode steps, for others the tokens of the captured step. Then
        # their medians.
        self._seen: defaultdict[tuple[int, int], deque[_Taken]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED)
        )
        self._medians: dict[tuple[int, int], _Taken] = {}
        # By size, the binary digits of the rows beside which it came often enough to be believed.
        self._told: defaultdict[int, list[int]] = defaultdict(list)
        self._fixed = self._a_row = self._a_pair = 0.0
        self._pairs_seen: deque[float] = deque(maxlen=_REMEMBERED)
        # Seconds of an embedding, by the binary digits of how many an item has: attention makes
        # those of a large one dear. And what more the first steps of items took (1), and the last
        # (-1).
        self._embeddings_seen: defaultdict[int, deque[float]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED)
        )
        self._edges_seen: defaultdict[int, deque[float]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED)
        )
        self._a_token: float | None = None  # None before there was a step of both kinds

    def add(self, plan: StepPlan, seconds: float) -> None:
        """Take note of a step that took ``seconds``, all its repeats together."""
        rows, size, tokens, pairs = self._kind(plan)
        # Without a graph nothing is padded: a step much smaller than its size says little of it.
        if 8 * tokens < 7 * size:
            return
        if plan.media_work:
            if self._a_token is not None:
                left = seconds - self._on_line(rows, size) - self._a_pair * pairs
                self._add_media(plan.media_work, left)
            return
        if pairs > _FAR * size > 0:
            if self._a_token is not None:
                self._pairs_seen.append((seconds - self._on_line(rows, size)) / pairs)
                self._a_pair = max(0.0, median(self._pairs_seen))
            return
        key = rows.bit_length(), size
        seen = self._seen[key]
        seen.append((seconds / plan.repeat, rows, tokens))
        if rows:
            # Medians, so that neither a step that waited for a compile counts nor a rare size.
            each, counts, sizes = zip(*seen, strict=True)
            self._medians[key] = median(each), median(counts), median(sizes)
            if size:
                self._added += 1
                self._last[key] = self._added
                if len(seen) == _TELLING:
                    self._told[size].append(key[0])
                self._fit()

    def expect(self, plan: StepPlan) -> float | None:
        """Seconds that a step will hardly fall below; None if nothing is known of such steps."""
        rows, size, _, pairs = self._kind(plan)
        more = self._a_pair * pairs
        for work in plan.media_work:
            encoding = self.media_seconds(work.size, work.begin, work.end)
            if encoding is None:
                return None
            more += encoding
        seen = self._seen.get((rows.bit_length(), size), ())
        if len(seen) >= _TELLING:
            taken = sorted(each + self._a_row * (rows - count) for each, count, _ in seen)
            return plan.repeat * (taken[len(taken) // 5] + more)
        if self._a_token is None:
            return None
        return plan.repeat * (self._on_line(rows, size) + more)

    def of_rows(self, rows: int) -> float:
        """Seconds of a step with prompts that go to the rows that decode, and to what is fixed."""
        return self._on_line(rows, 0)

    def budget(self, seconds: float, rows: int, cached: int = 0) -> int | None:
        """How many tokens of prompts a step of so many rows should have within ``seconds``.

        The size of which the device computes the most tokens a second: products are in tiles, and
        a step with a few tokens more than fill them takes as long as if they were filled once more.
        Of sizes that differ by less than 3% it is the largest. Where the smallest size takes
        longer, a quarter more of its attention's time is allowed. ``cached`` are the tokens before
        those of the prompt.

        Returns:
            None if no step with decoding rows and prompts was seen.
        """
        if self._a_token is None:
            return None
        fitting: list[tuple[float, int]] = []
        room = self._room(rows)
        for size in self._sizes[room]:
            attention = self._a_pair * self._pairs(size, cached)
            taken = self._of_size(rows, room + size) + attention
            if not fitting:
                seconds = max(seconds, taken + (_ATTENTION_STRETCH - 1) * attention)
            if taken <= seconds:
                fitting.append((size / max(taken, 1e-9), size))
        fastest = max(fitting)[0]
        return max(size for speed, size in fitting if speed >= _ALIKE * fastest)

    def _of_size(self, rows: int, size: int) -> float:
        """Seconds of a step of this size, by what such steps took beside most alike rows.

        Without attention to what is far. On the line if none was seen.
        """
        if size not in self._told:
            return self._on_line(rows, size)
        taken, new = self._of_alike(rows, size)
        if new:
            return taken
        # What is fixed does not grow with the tokens, so a step takes less than in proportion.
        for told in self._told:
            if told < size:
                smaller, new = self._of_alike(rows, told)
                if new:
                    taken = min(taken, smaller * size / told)
        return taken

    def _of_alike(self, rows: int, size: int) -> tuple[float, bool]:
        """The same of a size that was seen, and whether that is new."""
        digits = rows.bit_length()
        key = min(self._told[size], key=lambda seen: abs(seen - digits)), size
        each, count, _ = self._medians[key]
        new = self._steady or self._added - self._last[key] < _OLD
        return max(0.0, each + self._a_row * (rows - count)), new

    def sizes(self, rows: int) -> list[int]:
        """As :meth:`Pacing.sizes`."""
        return self._sizes[self._room(rows)]

    def _room(self, rows: int) -> int:
        """Tokens that decoding rows take in a step with prompts, with padding; 0 if unpadded."""
        return next((room for room in self._rooms if room >= rows > 0), 0)

    def of_token(self, rows: int, tokens: int, cached: int) -> float | None:
        """Seconds that each of so many tokens of prompts adds to a step with so many rows.

        None as long as nobody knows.
        """
        if self._a_token is None:
            return None
        room = self._room(rows)
        size = self._sizes[room][bisect_left(self._sizes[room], tokens)]
        taken = self._of_size(rows, room + size) + self._a_pair * self._pairs(size, cached)
        return max(1e-9, (taken - self._on_line(rows, 0)) / tokens)

    def media_seconds(self, size: int, begin: int, end: int) -> float | None:
        """Seconds of embeddings ``begin`` to ``end`` of ``size`` that an item has.

        None as long as nobody knows.
        """
        each = self._embedding(size)
        if each is None:
            return None
        seen = self._edges_seen.get(_edge(size, begin, end))
        return each * (end - begin) + (median(seen) if seen else 0.0)

    def _add_media(self, media_work: Sequence[MediaWork], seconds: float) -> None:
        """Take note that a step took so much longer for these."""
        count = sum(work.end - work.begin for work in media_work)
        edges = [edge for each in media_work if (edge := _edge(each.size, each.begin, each.end))]
        if not edges:
            for work in media_work:
                self._embeddings_seen[work.size.bit_length()].append(max(0.0, seconds / count))
        elif len({*edges}) == 1:
            known = [self._embedding(work.size) for work in media_work]
            for work, each in zip(media_work, known, strict=True):
                if each is None:
                    return
                seconds -= each * (work.end - work.begin)
            self._edges_seen[edges[0]].append(max(0.0, seconds / len(edges)))

    def _embedding(self, size: int) -> float | None:
        """Seconds of an embedding, by the items nearest in size of those that are no smaller.

        None if there were none: attention may make those of a larger item as dear as it likes.
        """
        digits = min(
            (digits for digits in self._embeddings_seen if digits >= size.bit_length()),
            default=None,
        )
        return None if digits is None else median(self._embeddings_seen[digits])

    def _on_line(self, rows: int, tokens: int) -> float:
        return self._fixed + self._a_row * rows + (self._a_token or 0.0) * tokens

    def _fit(self) -> None:
        """Find what a row and a token of a prompt add: medians of what any two sizes say.

        For a row two count for more if they are far apart, and for less if they took long
        (Theil-Sen with the weights of Jaeckel, 1972, for errors in proportion): of others the
        difference is mostly what else the machine did meanwhile.
        """
        by_size = defaultdict(list)
        for (_, size), taken in self._medians.items():
            by_size[size].append(taken)
        a_row = [
            ((y - x) / (more - rows), abs(more - rows) / max(hypot(x, y), 1e-9))
            for same in by_size.values()
            for (x, rows, _), (y, more, _) in combinations(same, 2)
        ]
        self._a_row = max(0.0, _weighted_median(a_row or [(0.0, 1.0)]))
        points = [
            (median(tokens for *_, tokens in same), median(x - self._a_row * n for x, n, _ in same))
            for same in by_size.values()
        ]
        slopes = [
            (y - x) / (more - tokens)
            for (tokens, x), (more, y) in combinations(points, 2)
            if more != tokens
        ]
        a_token = median(slopes or [points[0][1] / points[0][0]])
        # What a busy machine did may be laid to rows, and tokens would seem to be free.
        least = min(x / tokens for x, _, tokens in self._medians.values() if tokens)
        a_token = max(1e-9, a_token, _LEAST_SHARE * least)
        self._fixed = max(0.0, median(y - a_token * x for x, y in points))
        self._a_token = a_token

    def _pairs(self, tokens: int, cached: int) -> float:
        """Pairs that take as long as attention of a prompt's tokens behind ``cached`` ones."""
        filled = -(-tokens // self._filling_tokens) * self._filling_tokens
        return filled * (cached + tokens / 2)

    def _kind(self, plan: StepPlan) -> tuple[int, int, int, float]:
        """The rows that decode, the step's size, its tokens, and pairs of attention.

        Tokens are those of prompts and the padded decoding rows; both are 0 without prompts.
        """
        chunks = [row for row in plan.others if row.num_tokens > 1]
        if not chunks:
            return len(plan.rows), 0, 0, 0.0
        tokens = sum(row.num_tokens for row in chunks)
        pairs = max(
            max(self._pairs(row.num_tokens, row.start) for row in chunks),
            sum(row.num_tokens * (row.start + row.num_tokens / 2) for row in chunks),
        )
        rows = len(plan.rows) - len(chunks)
        room = self._room(rows)
        sizes = self._sizes[room]
        return rows, room + sizes[bisect_left(sizes, tokens)], room + tokens, pairs


def _weighted_median(values: list[tuple[float, float]]) -> float:
    """The least of these values up to which lies half of the weight, which is given beside each."""
    left = sum(weight for _, weight in values) / 2
    for value, weight in sorted(values):
        left -= weight
        if left <= 0:
            return value
    raise ValueError("no values")


def _edge(size: int, begin: int, end: int) -> int:
    """1 for the first of an item's parts, -1 for the last, 0 for others and for all at once."""
    return (begin == 0) - (end == size)


class Pacing:
    """Decide how many steps are in flight, how often a plan is replayed, and a step's prompts.

    A step that is done before its result is asked for was shorter than the host's work for one: the
    device waited. Then decode plans are replayed more often, which spares the host work. Replays
    cost latency, since whoever arrives waits for all that is in flight. So the rule depends on who
    waits:

    - Offline nobody does: a few early steps double the replays, and many in a row that had to be
      waited for halve them. A step computes as many tokens of prompts as the scheduler's limit
      allows, so that equal runs have equal steps.
    - A server replays only while the device keeps waiting for the host and nobody arrives. It plans
      the step behind the one that runs shortly before that one ends, by what such steps took, so
      that whoever arrives until then is in it: sooner by what the host's work for a step has taken,
      and by a margin that doubles whenever the device had to wait, and then shrinks slowly. A step
      in which rows decode keeps within ``max_step_time``, by what steps took of late, and has as
      many tokens of prompts as make the most of the device. While prompts for more than
      ``backlog_steps`` such steps wait, or for three quarters of them as long as fewer than 1% of
      the gaps between tokens are longer, it may take ``backlog_stretch`` times as long, or three
      times what the rows need if that is more, up to seven times ``max_step_time``. Figures are in
      benchmarks/notes/serving.md.

    Args:
        scheduler: asked for plans; its ``repeat_limit``, ``prompt_budget``, ``media_cost`` and
            ``prompt_sizes`` are set here.
        depth: steps that may be queued offline before the first result is read; 0 where a step is
            done when it is submitted.
        max_step_time: seconds that a step with decoding rows should take at most; None offline.
        backlog_stretch: how often as long a step may take while many prompts wait.
        backlog_steps: prompts for more steps than these are many.
        first_budget: tokens of prompts in such a step before any was seen.
        filling_tokens: as of :class:`StepTimes`, like ``rooms`` and ``steady``.
        clock: seconds since some moment.

    Attributes:
        depth: steps that may be queued before the first result is read.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        depth: int,
        *,
        max_step_time: float | None = None,
        backlog_stretch: float = 1.4,
        backlog_steps: float = 2.0,
        first_budget: int = 512,
        filling_tokens: int = 1,
        rooms: Sequence[int] = (),
        steady: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._serving = max_step_time is not None
        self._max_step_time = max_step_time or 0.0
        self._backlog_stretch = backlog_stretch
        self._backlog_steps = backlog_steps
        self._long_gaps = 0.0  # that there may be
        self.depth = min(depth, 1) if self._serving else depth
        self._scheduler = scheduler
        self._clock = clock
        scheduler.repeat_limit = 1
        scheduler.prompt_budget = self._prompt_budget if self._serving else None
        self._first_budget = first_budget
        # Steps in a row that were done early, or had to be waited for, before the replays change.
        self._early_steps, self._waiting_steps = (32, 1) if self._serving else (4, 64)
        self._early = 0
        self._waits = 0
        limit = scheduler.config.max_num_batched_tokens
        self._times = StepTimes(limit, filling_tokens, rooms, steady=steady)
        scheduler.media_cost = self._media_cost if self._serving else None
        # Where steps are computed after they were submitted, most are captured, and padded.
        self._padded = self._serving and self.depth > 0
        scheduler.prompt_sizes = self._times.sizes(1) if self._padded else ()
        self._token_seconds: float | None = None  # of those that the last budget is of
        self._last_end = 0.0
        self._host_seconds = 0.0
        self._margin = _LEAST_MARGIN

    def sizes(self, rows: int) -> list[int]:
        """Tokens of prompts that captured steps hold beside so many decoding rows, ascending."""
        return self._times.sizes(rows)

    def arrived(self) -> None:
        """Take note of a new request."""
        if self._serving:
            self._scheduler.repeat_limit = 1
            self._early = 0

    def submitted(self, seconds: float) -> None:
        """Take note of how long a step took the host, from its planning to its submission."""
        # The longest of late, since a step that comes too late costs more than one too early.
        self._host_seconds = max(seconds, 0.9 * self._host_seconds)

    def spare(self, plan: StepPlan, submitted: float) -> float:
        """Seconds until the next step is to be planned; 0 or less for at once.

        Args:
            plan: that of the only step in flight, which is running.
            submitted: when it was given to the device, by the clock.
        """
        expected = self._times.expect(plan)
        if expected is None:
            return 0.0
        begin = max(submitted, self._last_end)
        return begin + expected - self._host_seconds - self._margin - self._clock()

    def waiting(self, plan: StepPlan, *, early: bool) -> None:
        """Take note of the oldest step in flight, before its result is waited for.

        Args:
            plan: the step's plan.
            early: whether the device was done with it already.
        """
        margin = 2 * self._margin if early else 0.995 * self._margin
        self._margin = min(max(margin, _LEAST_MARGIN), _MOST_MARGIN)
        scheduler = self._scheduler
        if plan.rows[-1].num_tokens > 1 or plan.media_work or plan.repeat < scheduler.repeat_limit:
            return  # it says nothing about decode plans as long as those to come
        if early:
            self._waits = 0
            self._early += 1
            if self._early >= self._early_steps:
                self._early = 0
                scheduler.repeat_limit = min(2 * plan.repeat, scheduler.config.max_repeat)
        else:
            self._early = 0
            self._waits += 1
            if self._waits >= self._waiting_steps:
                self._waits = 0
                scheduler.repeat_limit = max(1, plan.repeat // 2)

    def finished(self, plan: StepPlan, submitted: float, *, early: bool) -> None:
        """Take note of a step whose result is there.

        Args:
            plan: the step's plan.
            submitted: when it was given to the device, by the clock.
            early: whether it was done before anybody asked, so that its end is not known.
        """
        if not self._serving:
            return
        # It began when it was submitted, or when the one before it ended.
        begin, self._last_end = max(submitted, self._last_end), self._clock()
        if early:
            return
        seconds = self._last_end - begin
        rows = len(plan.rows) - sum(row.num_tokens > 1 for row in plan.others)
        saved = self._long_gaps + _LONG_GAPS * rows * plan.repeat
        if seconds > _LONG * self._max_step_time * plan.repeat:
            saved -= rows
        self._long_gaps = min(max(saved, 0.0), _MOST_SAVED)
        self._times.add(plan, seconds)

    def _prompt_budget(self, rows: int, tokens: int, cached: int) -> int:
        """Tokens of prompts in a step beside so many rows, as :attr:`Scheduler.prompt_budget`."""
        times, limit = self._times, self._max_step_time
        budget = times.budget(limit, rows, cached) or self._first_budget
        many = self._backlog_steps * (_FEWER if self._long_gaps >= rows else 1.0)
        if tokens > many * budget:
            needed = min(_BACKLOG_ROWS * times.of_rows(rows), _BACKLOG_MOST * limit)
            stretched = max(self._backlog_stretch * limit, needed)
            budget = max(budget, times.budget(stretched, rows, cached) or 0)
        budget = min(budget, self._scheduler.config.max_num_batched_tokens)
        self._token_seconds = times.of_token(rows, budget, cached)
        if self._padded:
            self._scheduler.prompt_sizes = times.sizes(rows)
        return budget

    def _media_cost(self, size: int, begin: int, end: int) -> float | None:
        """As :attr:`Scheduler.media_cost`: a part may take as long as all tokens of the budget."""
        seconds = self._times.media_seconds(size, begin, end)
        if seconds is None or self._token_seconds is None:
            return None
        return seconds / self._token_seconds


__all__ = ["Pacing", "StepTimes"]
