"""Continuous batching over a paged cache, with several steps in flight."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, abc, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter, itemgetter

import numpy as np
import numpy.typing as npt

from engine_core.cache import (
    NULL_BLOCK,
    BlockPool,
    cut_before_span,
    extend_block_keys,
    longest_cached_prefix,
    open_groups,
)
from engine_core.configs import CacheConfig, CacheGroup, SchedulerConfig
from engine_core.errors import ErrorCode, RequestError
from engine_core.inputs import MediaItem
from engine_core.scheduler.encoder_cache import EncoderCache
from engine_core.scheduler.lockstep import MOST_KEPT, MOST_STOPS, Lockstep
from engine_core.scheduler.sequence import Sequence, SequenceStatus
from engine_core.steps import (
    Admission,
    MediaUse,
    MediaWork,
    PlanRow,
    PlanRows,
    RowError,
    RowResult,
    StepPlan,
    StepResult,
    TokenColumns,
    TokenLogprobs,
    TokenRows,
    TokenUpdate,
    TokenUpdates,
)

_Blocks = tuple[tuple[int, ...], ...]
# Of so many running sequences with states one is at the end of a block, at most, as a rule.
_GROWING = 8
# Parts in which a model is taken to compute a picture before it says so: fewer than most have
# layers, since of a part that is smaller than the model's own nothing may be left to compute.
_USUAL_PARTS = 16
# Sizes of a kind whose number of parts is remembered.
_SIZES_KNOWN = 64
# Keys of a prompt that are looked up first, and then twice as many.
_FIRST_KEYS = 32
_rank = attrgetter("rank")
_num_scheduled = attrgetter("num_scheduled")
_new = tuple.__new__


@dataclass(frozen=True, slots=True)
class _Holding:
    """Row and blocks of a sequence that left the batch, kept until no step in flight names it."""

    row: int
    block_tables: list[list[int]]


@dataclass(slots=True)
class _Draft:
    """A plan in the making: lives inside one call of ``schedule``.

    Attributes:
        whole_budget: tokens of prompts that may be computed.
        budget: how many of these are left.
        tokens: how many are in chunks.
        encoding: how many take as long as the embeddings that are computed.
        prompts: sequences not planned yet that want some of the budget; 0 if they need not share.
        repeat: how often the sequences planned so far let the plan be run, at most.
        singles: sequences that compute one token.
        chunks: sequences that compute more, and how many.
        new_blocks: by sequence id, the blocks appended to each group's table.
        grown: the same by row, of members of the lockstep.
        admitted: sequences that got a row.
        ahead: those of them that compute no token yet, but the item that they begin with.
        beside: whether sequences decode, so that items are computed within the budget.
        chunked: whether a sequence with more than one token left was looked at.
        media: items that are touched: the sequence, which of its items, the slot of its embeddings.
        media_work: embeddings that are computed, by slot: the sequence, the item, from where on and
            up to which one.
        share: tokens of which a part of an item takes the time, half of them if others wait.
        passed: the sequence that leaves the step's time to those behind it, for what a part took
            beyond its share.
        owes: whether there is such a part in this step.
        swap_in: pairs of a block and the slot that is copied to it.
        short_of_blocks: whether a sequence waits for blocks that will be released; none of a
            higher rank number may take any.
    """

    whole_budget: int
    budget: int
    prompts: int
    repeat: int
    tokens: int = 0
    encoding: float = 0.0
    beside: bool = False
    chunked: bool = False
    singles: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    new_blocks: dict[str, list[list[int]]] = field(default_factory=dict)
    grown: dict[int, _Blocks] = field(default_factory=dict)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    ahead: list[Sequence] = field(default_factory=list)
    media: list[tuple[Sequence, int, int]] = field(default_factory=list)
    media_work: dict[int, tuple[Sequence, int, int, int]] = field(default_factory=dict)
    share: float = 0.0
    passed: Sequence | None = None
    owes: bool = False
    short_of_blocks: bool = False

    def add(self, sequence: Sequence, count: int) -> None:
        if count == 1:
            self.singles.append(sequence)
        else:
            self.chunks.append((sequence, count))


def _touched(sequence: Sequence, start: int, end: int) -> abc.Iterator[tuple[int, MediaItem]]:
    """The items whose spans overlap positions ``[start, end)``, with their indices."""
    for index, item in enumerate(sequence.prompt.media):
        if item.span[0] < end and start < item.span[1]:
            yield index, item


def _media_key(sequence: Sequence, item: MediaItem) -> abc.Hashable:
    """The name of an item, which only sequences of the same salts share."""
    return item.digest, sequence.prompt.cache_salts


def check_sequence(sequence: Sequence, config: SchedulerConfig) -> None:
    """Refuse a sequence that a scheduler of these limits could never run, whatever else it holds.

    Raises:
        RequestError: says why.
    """
    name = f"request {sequence.sequence_id!r}"
    if type(sequence.priority) is not int:
        raise RequestError(f"{name}: priority must be an integer, got {sequence.priority!r}")
    if sequence.prompt_len == 0:
        raise RequestError(f"{name}: the prompt is empty; give at least one token")
    if sequence.max_model_len > config.max_model_len:
        raise RequestError(
            f"{name}: its max_model_len is {sequence.max_model_len}, above the engine's "
            f"{config.max_model_len}; give the engine's"
        )
    if sequence.pooling is not None:
        if sequence.prompt_len > sequence.max_model_len:
            raise RequestError(
                f"{name}: a prompt of {sequence.prompt_len} tokens is longer than max_model_len "
                f"{sequence.max_model_len}; shorten it, or cut it with truncate_prompt_tokens",
                code=ErrorCode.PROMPT_TOO_LONG,
            )
    elif sequence.prompt_len >= sequence.max_model_len:
        raise RequestError(
            f"{name}: a prompt of {sequence.prompt_len} tokens leaves no room for output in "
            f"max_model_len {sequence.max_model_len}; shorten the prompt",
            code=ErrorCode.PROMPT_TOO_LONG,
        )
    room = sequence.max_model_len - sequence.prompt_len
    if sequence.sampling.min_tokens > room:
        raise RequestError(
            f"{name}: min_tokens {sequence.sampling.min_tokens} cannot be kept: the prompt of "
            f"{sequence.prompt_len} tokens leaves {room} in max_model_len "
            f"{sequence.max_model_len}; lower min_tokens or shorten the prompt",
            param="min_tokens",
        )
    before = 0
    for start, end in sequence.prompt.atomic_spans:
        if not before <= start < end <= sequence.prompt_len:
            raise RequestError(
                f"{name}: atomic spans must be sorted, disjoint and within the prompt of "
                f"{sequence.prompt_len} tokens, got {sequence.prompt.atomic_spans}"
            )
        before = end
        if end - start > config.max_num_batched_tokens:
            raise RequestError(
                f"{name}: the {end - start} tokens from {start} to {end} must be computed in "
                f"one step, which holds {config.max_num_batched_tokens}; raise "
                "max_num_batched_tokens"
            )
    before = 0
    for item in sequence.prompt.media:
        if not before <= item.span[0] < item.span[1] <= sequence.prompt_len:
            raise RequestError(
                f"{name}: spans of media must be sorted, disjoint and within the prompt of "
                f"{sequence.prompt_len} tokens, got {[each.span for each in sequence.prompt.media]}"
            )
        before = item.span[1]
    whole = [item.span for item in sequence.prompt.media]
    for start, end in (*whole, *sequence.prompt.atomic_spans):
        # What is computed in one step is needed at once.
        size = sum(last - first for first, last in whole if first < end and start < last)
        if size > config.encoder_cache_tokens:
            raise RequestError(
                f"{name}: pictures, videos or sounds at tokens {start} to {end} have {size} "
                f"embeddings, and encoder_cache_tokens are {config.encoder_cache_tokens}; make "
                "them smaller or raise encoder_cache_tokens"
            )


class Scheduler:
    """Decides what each step computes and takes its results in.

    ``schedule`` may be called again before the results of earlier plans are in: a sampled token
    that the host does not know yet is scheduled by its position, and the runner takes it from the
    device. ``update`` is called with the results in the order of the plans.

    Sequences are served by rank: by priority, the lowest number first, and among equals in the
    order in which they were added. Each step is planned in that order, running and waiting
    sequences together: the first waiting sequence is admitted or no other is, and when blocks run
    out the running sequence of the highest rank is preempted. A waiting sequence preempts running
    ones of a less important priority, the least important first, if it needs their row or blocks
    and they are enough for it. No option turns that off: who uses priorities wants the urgent
    sequence to run now, not when a background job happens to end. Unimportant sequences starve
    while more important ones keep coming; with one priority for all none does.

    So the first unfinished sequence in rank always goes on. If it runs, it gets tokens and blocks
    before all others, who are preempted one by one until it has enough: alone it fits, or it
    would have been refused. If it waits, every running sequence has a less important priority:
    an equal one that came later is admitted only when no earlier one waits, and is preempted
    before it. Those in its way are preempted, the blocks that come back are kept for it, and it
    is admitted when the steps in flight are done.

    A preempted sequence is computed again later, from its first token that is not in the prefix
    cache, or its blocks are copied to host memory and back if ``config.num_swap_blocks`` has room
    for them. Either way it keeps its tokens, and gets those that its steps in flight bring.

    The exception are patient sequences: prompts that came at once, no more than there are rows, and
    whose tokens nobody sees before their end. They do not begin to decode while such prompts fill
    steps. A step full of prompts is bound by products, and each decoding row adds its own; a decode
    step waits for memory, and a row more adds its cache alone. So they all decode together, and the
    last ones are not left to decode alone. Nobody waits longer than for the prompts of as many
    sequences as there are rows. Who has begun goes on: where prompts come as others end, its tokens
    would need steps of their own.

    Lifetime: the row and the blocks of a sequence that finished or was preempted may still be
    written by steps in flight. They are given back after the last submitted step that names the
    sequence has been updated. With a sliding window, blocks are given back earlier, once no query
    of a step in flight or to come sees them. What is copied to host memory is given back at once:
    the next plan begins with the copy, after every step that writes the blocks and before any that
    uses them anew.

    Args:
        config: limits.
        cache: the cache groups of the model, and the blocks that they draw from one pool.

    Attributes:
        groups: the cache groups.
        pool: their blocks.
        repeat_limit: how often a plan may be run now; the scheduler's user may lower it from
            ``config.max_repeat`` and raise it again.
        prompt_budget: tells how many tokens of prompts a step in which rows decode computes at
            most, from the number of these rows, the tokens of prompts that wait to be computed
            (counted up to three full steps) and the most that is in the cache of one of these
            prompts. The scheduler's user may change it between steps. None for the most that the
            config allows in every step, which makes the plans of equal runs equal. Where there is a
            budget, a prompt that takes several steps leaves half of it to those behind it, so that
            a short one need not wait for the end of a long one.
        media_cost: tells how many tokens of that budget take as long as a part of an item: from how
            many embeddings the item has, and from where on and up to which one the part goes. It is
            None as long as nobody knows. While sequences decode, an item is computed within the
            budget, over several steps if need be, and its chunks come after that. None to compute
            what a chunk touches in the chunk's own step.
        prompt_sizes: in ascending order, those that the tokens of a step's prompts are padded to.
            Tokens beside an item are as many as one of these has, so that the padding has its time
            too. Empty for no padding.
        media_in_parts: whether the model computes an item in parts; else all of it in one step. How
            many there are is learned from results, by kind and size.
        prefix_cache_queries: tokens looked up in the prefix cache when sequences got their first
            row.
        prefix_cache_hits: how many of them were found there.
        num_preemptions: how often a running sequence lost its row and blocks.
        num_swaps: how many of these preemptions copied the blocks to host memory.
        lockstep_from: number of running sequences from which on those that keep decoding are
            planned, and their tokens taken in, as columns of numbers. For fewer, numpy's calls take
            longer than a loop.
    """

    lockstep_from = 96

    def __init__(self, config: SchedulerConfig, cache: CacheConfig) -> None:
        self.config = config
        self.cache = cache
        self.groups = open_groups(cache)
        self.pool = self.groups[0].pool if self.groups else BlockPool(cache.num_blocks)
        self.repeat_limit = config.max_repeat
        self.prompt_budget: abc.Callable[[int, int, int], int] | None = None
        self.media_cost: abc.Callable[[int, int, int], float | None] | None = None
        self.prompt_sizes: abc.Sequence[int] = ()
        self.media_in_parts = False
        # By kind, and number of embeddings, those that came last at the end.
        self._media_parts: dict[str, dict[int, int]] = {}
        # How many tokens of prompts take as long as what a part took beyond its share.
        self._media_owed = 0.0
        self._key_size = cache.block_size
        self._prefix_caching = cache.enable_prefix_caching
        self.encoder_cache = EncoderCache(config.encoder_cache_tokens)
        self._no_blocks: _Blocks = ((),) * len(self.groups)
        # Groups that give the same blocks back at the same time, if they give back any.
        kinds: dict[CacheGroup, list[int]] = {}
        for index, group in enumerate(cache.groups):
            if group.spec.first_needed(config.max_model_len) > 0:
                kinds.setdefault(group, []).append(index)
        self._windowed = tuple(kinds.values())

        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_preemptions = 0
        self.num_swaps = 0

        self._sequences: dict[str, Sequence] = {}
        # Both by rank.
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._free_rows = list(range(config.max_num_seqs))  # a heap: low rows are used first
        self._in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()
        # Blocks of running sequences that no plan has told of, by sequence id and group.
        self._untold: dict[str, list[list[int]]] = {}
        self._deferred: dict[int, list[_Holding]] = {}
        self._lockstep = Lockstep(config.max_num_seqs)
        # Whether the last plan was made with more than one token left of some sequence.
        self._had_chunks = False
        self._next_step = 0
        self._completed_step = -1
        self._next_order = 0
        # The waiting sequence that found too few blocks or no row; not tried again before some come
        # back. And whether rows and blocks of sequences preempted for it are still to come back.
        self._blocked: Sequence | None = None
        self._blocked_is_next = False
        # Slots of host memory, and the copies to them that the next plan makes.
        self._free_slots = list(range(config.num_swap_blocks))
        self._swap_out: list[tuple[int, int]] = []

    @property
    def num_waiting(self) -> int:
        """Sequences without a row, preempted ones included."""
        return len(self._waiting)

    @property
    def has_prompts_ahead(self) -> bool:
        """Whether those that wait have the tokens of a whole step, so that it needs no others."""
        tokens = 0
        for sequence in self._waiting:
            tokens += len(sequence.token_ids)
            if tokens >= self.config.max_num_batched_tokens:
                return True
        return False

    @property
    def num_running(self) -> int:
        """Sequences with a row."""
        return len(self._running)

    @property
    def num_steps_in_flight(self) -> int:
        """Plans whose results are not in."""
        return len(self._in_flight)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that sequences hold, in [0, 1]."""
        return self.pool.num_used / (self.pool.num_blocks - 1)

    def has_unfinished(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue, behind those of its priority.

        Raises:
            RequestError: it could never run; the message says why. The others go on.
        """
        self._validate(sequence)
        sequence.order = self._next_order
        sequence.rank = (sequence.priority, sequence.order)
        self._next_order += 1
        self._sequences[sequence.sequence_id] = sequence
        insort(self._waiting, sequence, key=_rank)

    def abort(self, sequence_id: str) -> None:
        """End a sequence; what its steps in flight bring is discarded. Unknown ids are ignored."""
        self.finish(sequence_id, "abort")

    def finish(self, sequence_id: str, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence, say because of a stop string; its accepted tokens stay.

        Does nothing if no unfinished sequence has the id: it may have ended a moment ago.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._finish(sequence, reason, stop_reason)

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can run before a result or a sequence arrives."""
        lockstep = self._lockstep
        if lockstep.order.size and (
            self.repeat_limit > 1 or len(self._running) < self.lockstep_from
        ):
            lockstep.leave(lockstep.order)
        preempted = self.num_preemptions
        draft = self._draft()
        while (
            (draft.media_work or self.num_preemptions > preempted)
            and not self._in_flight
            and not self._has_rows(draft)
        ):
            # Who was to decode was preempted in the making, or waits for the item of its last
            # token. So nobody decodes, and items need not be computed within a budget beside that.
            self._take_back(draft)
            preempted = self.num_preemptions
            draft = self._draft(alone=True)
        if not self._has_rows(draft):
            self._take_back(draft)
            return None
        if draft.chunks and draft.budget == 0:
            self._hold_back(draft)
        if self._untold:
            self._tell(draft)
        repeat = self._allocate_ahead(draft)
        return self._submit(draft, repeat)

    def _hold_back(self, draft: _Draft) -> None:
        """Leave the first tokens after prompts to a later step than this full one.

        Most of its tokens must be of patient prompts that go on to decode. What is urgent does not
        wait for what is not, and nobody for those that came long after it.
        """
        going_on = [
            (sequence, count)
            for sequence, count in draft.chunks
            if sequence.patient and sequence.limit > sequence.prompt_len + 1
        ]
        if 2 * sum(count for _, count in going_on) <= draft.tokens:
            return
        last = max(sequence.priority for sequence, _ in draft.chunks)
        first = max(sequence.order for sequence, _ in going_on) - self.config.max_num_seqs
        singles, draft.singles = draft.singles, []
        for sequence in singles:
            # One that is computed again has begun before.
            begins = sequence.num_scheduled == sequence.prompt_len == sequence.admitted_len
            waits = sequence.patient and sequence.priority >= last and sequence.order > first
            if not (begins and waits):
                draft.singles.append(sequence)
            elif sequence.sequence_id in draft.new_blocks:
                self._untold[sequence.sequence_id] = draft.new_blocks.pop(sequence.sequence_id)

    def _tell(self, draft: _Draft) -> None:
        """Have the plan tell of the blocks that its sequences got while they were held back."""
        for sequence in draft.singles:
            if sequence.sequence_id in self._untold:
                draft.new_blocks[sequence.sequence_id] = self._untold.pop(sequence.sequence_id)

    def _has_rows(self, draft: _Draft) -> bool:
        lockstep = self._lockstep
        advances = bool(lockstep.order.size) and lockstep.can_advance()
        return bool(draft.singles or draft.chunks or advances)

    def _take_back(self, draft: _Draft) -> None:
        """Let those wait again that only a plan without rows would admit."""
        for sequence in draft.ahead:
            if sequence.row is not None:
                self._preempt(sequence)

    def _draft(self, *, alone: bool = False) -> _Draft:
        """Plan by rank; with the budget of a step beside which nobody decodes if ``alone``."""
        lockstep = self._lockstep
        draft = _Draft(0, 0, 0, self.repeat_limit)
        if lockstep.order.size:
            self._feed_lockstep(draft)
        running: list[Sequence] = []
        if lockstep.order.size < len(self._running):
            running = [sequence for sequence in self._running if not sequence.in_lockstep]
        if alone:
            draft.budget = self.config.max_num_batched_tokens
        else:
            draft.budget, draft.prompts, draft.beside = self._prompt_budget(running)
        draft.whole_budget = draft.budget
        draft.share = draft.budget / 2 if draft.prompts > 1 else draft.budget
        planned = 0
        # By rank: the running sequences before the first waiting one, that one, and so on.
        while self._waiting:
            first = self._waiting[0]
            end = bisect_left(running, first.rank, lo=planned, key=_rank)
            if end > planned:
                self._continue_running(running[planned:end], draft)
                planned = end
                continue  # one of them may wait now
            if draft.short_of_blocks or not self._admit_first(draft):
                break
            if planned < len(running) and running[planned] is first:
                planned += 1  # preempted a moment ago, and back already
        self._continue_running(running[planned:], draft)
        passed, draft.passed = draft.passed, None
        if passed is not None and passed.row is not None and draft.budget == draft.whole_budget:
            # Nobody behind it had a use for the time.
            self._media_owed = 0.0
            self._compute_ahead(passed, passed.num_scheduled, draft)
        if not draft.owes:
            self._media_owed = max(0.0, self._media_owed - draft.share)
        return draft

    def update(self, result: StepResult) -> TokenUpdates:
        """Take in the results of the oldest step in flight.

        Returns:
            one update for each row with new tokens, in plan order, except that of the rows in
            lockstep those that just go on come first, as columns. Results of sequences that have
            ended meanwhile are discarded; those of preempted ones are accepted.
        """
        assert self._in_flight, f"result of step {result.step_id}, but no step is in flight"
        plan, sequences = self._in_flight.popleft()
        assert plan.step_id == result.step_id, (
            f"result of step {result.step_id}, but step {plan.step_id} is the oldest in flight"
        )
        assert len(result.rows) == len(plan.rows), (
            f"step {plan.step_id} has {len(plan.rows)} rows, its result {len(result.rows)}"
        )
        self._completed_step = plan.step_id
        for (kind, size), parts in result.media_parts.items():
            self._take_media_parts(kind, size, parts)
        updates: list[TokenUpdate] = []
        columns = None
        rows: abc.Sequence[PlanRow] = plan.rows
        results = result.rows
        if isinstance(rows, PlanRows):
            columns = self._accept_lockstep(rows, results, updates)
            results = results[len(rows.sequence_ids) :]
            rows = rows.others
        for sequence, row, row_result in zip(sequences, rows, results, strict=True):
            if sequence.finish_reason is None:
                self._unlock(sequence)
                update = self._accept(sequence, row, row_result, plan.repeat)
                if update is not None:
                    updates.append(update)
        for holding in self._deferred.pop(plan.step_id, ()):
            self._release(holding)
        return TokenUpdates(updates, columns)

    def check(self) -> None:
        """Verify the invariants of the scheduler and its pools; linear in what they hold.

        Raises:
            AssertionError: one is broken; the message gives the numbers.
        """
        self._lockstep.sync(self._lockstep.order)
        self.encoder_cache.check()
        rows = list(self._free_rows)
        tables = []
        for name, queue in (("running", self._running), ("waiting", self._waiting)):
            ranks = [sequence.rank for sequence in queue]
            assert ranks == sorted(ranks), f"{name} out of rank: {ranks}"
        for sequence in self._running:
            assert sequence.status is SequenceStatus.RUNNING, f"{sequence} is among the running"
            assert sequence.row is not None, f"{sequence} runs without a row"
            assert not sequence.num_swapped, f"{sequence} runs, {sequence.num_swapped} swapped"
            rows.append(sequence.row)
            tables.append(sequence.block_tables)
            computed, scheduled = sequence.num_computed, sequence.num_scheduled
            known = len(sequence.token_ids) + sequence.num_pending
            assert computed <= scheduled, f"{sequence}: {computed} computed, {scheduled} scheduled"
            assert scheduled < sequence.admitted_len or scheduled == known - 1, (
                f"{sequence}: {scheduled} positions scheduled, {known} tokens"
            )
            assert scheduled <= sequence.capacity, (
                f"{sequence}: {scheduled} positions scheduled, blocks for {sequence.capacity}"
            )
            assert known <= sequence.limit, f"{sequence}: {known} tokens, limit {sequence.limit}"
            capacity = min(
                (
                    len(table) * group.block_size
                    for table, group in zip(sequence.block_tables, self.groups, strict=True)
                ),
                default=sequence.max_model_len,
            )
            assert capacity == sequence.capacity, (
                f"{sequence}: blocks for {capacity} tokens, capacity {sequence.capacity}"
            )
        for sequence_id, untold in self._untold.items():
            sequence = self._sequences[sequence_id]
            assert sequence.row is not None, f"{sequence} has no row, and blocks {untold}"
            for table, last in zip(sequence.block_tables, untold, strict=True):
                assert table[len(table) - len(last) :] == last, f"{sequence}: {last} of {table}"
        newest: dict[int, int] = {}
        for sequence in self._running:
            newest[sequence.priority] = sequence.order
        slots = self._free_slots.copy()
        for sequence in self._waiting:
            assert sequence.status is SequenceStatus.WAITING, f"{sequence} is among the waiting"
            assert sequence.row is None, f"{sequence} waits but has row {sequence.row}"
            assert newest.get(sequence.priority, -1) < sequence.order, (
                f"{sequence} waits, a younger sequence of its priority runs"
            )
            assert sequence.num_swapped <= len(sequence.token_ids) + sequence.num_pending - 1, (
                f"{sequence}: {sequence.num_swapped} positions swapped"
            )
            for mine, group in zip(
                sequence.swap_slots, self.groups, strict=bool(sequence.num_swapped)
            ):
                first = group.prefix.first_needed_block(sequence.num_swapped)
                blocks = -(-sequence.num_swapped // group.block_size) - first
                assert len(mine) == blocks, f"{sequence}: {len(mine)} slots for {blocks} blocks"
                slots.extend(mine)
        assert sorted(slots) == list(range(self.config.num_swap_blocks)), (
            f"slots leaked: {sorted(slots)}"
        )
        for step, holdings in self._deferred.items():
            assert step > self._completed_step, (
                f"blocks wait for step {step}, but {self._completed_step} is complete"
            )
            rows.extend(holding.row for holding in holdings)
            tables.extend(holding.block_tables for holding in holdings)
        assert sorted(rows) == list(range(self.config.max_num_seqs)), f"rows leaked: {sorted(rows)}"
        live = len(self._running) + len(self._waiting)
        assert live == len(self._sequences), f"{live} queued, {len(self._sequences)} unfinished"
        self.pool.check()
        owners: Counter[int] = Counter()
        for index in range(len(self.groups)):
            owners.update({block for of_groups in tables for block in of_groups[index]})
        del owners[NULL_BLOCK]
        shared = [block for block, count in owners.items() if count > 1]
        assert not shared, f"blocks {shared} are held in several groups"
        held = Counter(block for of_groups in tables for table in of_groups for block in table)
        del held[NULL_BLOCK]
        refs = {b: n for b in range(self.pool.num_blocks) if (n := self.pool.refs(b))}
        assert held == refs, f"tables hold {dict(held)}, the pool says {refs}"

    def _validate(self, sequence: Sequence) -> None:
        name = f"request {sequence.sequence_id!r}"
        config = self.config
        if sequence.sequence_id in self._sequences:
            raise RequestError(f"{name}: an unfinished request has this id; choose another")
        if sequence.order >= 0:
            raise RequestError(f"{name} was added before; make a new Sequence")
        check_sequence(sequence, config)
        # The engine's cache is planned for every length; the last token is never computed.
        blocks = self.cache.max_blocks(sequence.limit - 1, config.max_num_batched_tokens)
        if blocks > self.cache.num_blocks - 1:
            raise RequestError(
                f"{name}: {sequence.limit} tokens of prompt and output need {blocks} blocks of "
                f"{self.cache.block_size}, the cache has {self.cache.num_blocks - 1}; lower "
                "max_tokens or give the cache more memory"
            )
        try:
            hash(sequence.prompt.cache_salts)
        except TypeError as error:
            raise RequestError(f"{name}: its cache salts must be hashable: {error}") from None

    def _prompt_budget(self, running: abc.Sequence[Sequence]) -> tuple[int, int, bool]:
        """Tokens of prompts that the next step may compute, and how many sequences share them.

        And whether items are computed within that budget too. ``running`` are those that are not in
        lockstep.
        """
        limit = self.config.max_num_batched_tokens
        # Without prompts nothing is asked of the budget, and looking at all rows would cost a
        # decode step of 1,024 rows a tenth of its host time.
        if self.prompt_budget is None or not (self._waiting or self._had_chunks):
            return limit, 0, False
        left = [len(r.token_ids) + r.num_pending - r.num_scheduled for r in running]
        begun = [
            (count, r.num_scheduled) for count, r in zip(left, running, strict=True) if count > 1
        ]
        prompts, tokens = len(begun), sum(count for count, _ in begun)
        decoding = left.count(1) + self._lockstep.order.size
        if self._waiting and self._waiting[0] is not self._blocked:
            prompts += len(self._waiting)
            for sequence in self._waiting:
                if tokens > 3 * limit:
                    break
                tokens += len(sequence.token_ids)
        if not decoding:
            return limit, prompts, False
        cached = max((start for _, start in begun), default=0)
        budget = min(limit, self.prompt_budget(decoding, tokens, cached))
        return budget, prompts, self.media_cost is not None

    def _continue_running(self, sequences: abc.Sequence[Sequence], draft: _Draft) -> None:
        """Plan running sequences, which are given by rank."""
        singles = draft.singles
        for sequence in sequences:
            if sequence.row is None:  # preempted just now, and so are all of a higher rank
                return
            start = sequence.num_scheduled
            num_tokens = len(sequence.token_ids) + sequence.num_pending
            repeat = 1
            if num_tokens - start == 1:
                # It takes nothing from the budget: prompts are cut into as few chunks as without
                # decodes, and no chunk is of the few tokens that decodes left over.
                count = 1
                prompted = start < sequence.prompt_len
                if prompted and not self._with_media(sequence, start, 1, draft, whole=True):
                    continue
                left = sequence.limit - num_tokens
                if left == 0:  # the last sample it may have is in flight
                    continue
                # The first token after a preemption comes from the host.
                if start >= sequence.admitted_len and not sequence.needs_host:
                    repeat = left
                # As most rows of most steps it needs nothing.
                if start < sequence.capacity and not prompted:
                    singles.append(sequence)
                    if repeat < draft.repeat:
                        draft.repeat = repeat
                    continue
            else:
                if draft.beside and start < sequence.prompt_len and sequence.prompt.media:
                    self._compute_ahead(sequence, start, draft)
                count = self._chunk(sequence, start, num_tokens, draft)
                if count == 0:
                    continue
            if start + count > sequence.capacity:
                needed = self._missing(sequence, start + count)
                if draft.short_of_blocks or not self._make_room(sequence, sum(needed)):
                    draft.short_of_blocks = True
                    continue
                draft.new_blocks[sequence.sequence_id] = self._grow(sequence, needed)
            if repeat < draft.repeat:
                draft.repeat = repeat
            if num_tokens - start > 1:
                self._spend(draft, tokens=count)
            self._hold_media(sequence, start, count, draft)
            draft.add(sequence, count)

    def _admit_first(self, draft: _Draft) -> bool:
        """Give a row to the first waiting sequence; False if it has to wait, and all others."""
        sequence = self._waiting[0]
        if sequence is self._blocked:
            draft.short_of_blocks = self._blocked_is_next
            return False
        # A preempted sequence first gets back what is in flight of it.
        if draft.budget == 0 or sequence.last_step > self._completed_step:
            return False
        count = self._admit(sequence, draft)
        if count is None:
            return False
        draft.repeat = 1
        if count == 0:
            draft.ahead.append(sequence)
            self._compute_ahead(sequence, 0, draft)
            return True
        self._spend(draft, tokens=count)
        self._hold_media(sequence, sequence.num_scheduled, count, draft)
        draft.add(sequence, count)
        return True

    def _admit(self, sequence: Sequence, draft: _Draft) -> int | None:
        """Give the sequence a row and blocks for its first chunk, whose size is returned.

        It is 0 for one that begins with an item that takes several steps, and None if the sequence
        has to wait.
        """
        num_tokens = len(sequence.token_ids)
        keys = sequence.block_keys
        cached = 0
        # Cached positions are not computed and so give no prompt logprobs.
        if self._prefix_caching and sequence.prompt_logprobs_done:
            self._find_keys(sequence)
            spans = sequence.prompt.atomic_spans
            cached = longest_cached_prefix(self.groups, keys, num_tokens - 1, spans)
            begin = cached * self._key_size
            if draft.beside:
                # What is computed over several steps is that of sequences that have a row already:
                # so there must be something else for the first chunk.
                for _, item in _touched(sequence, begin, begin + 1):
                    key = _media_key(sequence, item)
                    if self.encoder_cache.computed(key) < item.num_embeddings:
                        most = max(0, item.span[0] - 1)
                        cached = longest_cached_prefix(self.groups, keys, most, spans)
        start = max(cached * self._key_size, sequence.num_swapped)
        count = self._chunk(sequence, start, num_tokens, draft)
        if count == 0 and not self._begins_ahead(sequence, start, draft):
            return None
        end = start + max(1, count)
        if not self._has_room(sequence, start, end, cached):
            coming = self._preempt_for(sequence, start, end, cached)
            if not self._has_room(sequence, start, end, cached):
                self._blocked = sequence
                self._blocked_is_next = draft.short_of_blocks = coming
                return None

        assert sequence.num_pending == 0, f"{sequence} is admitted with samples in flight"
        self._waiting.pop(0)
        insort(self._running, sequence, key=_rank)
        sequence.status = SequenceStatus.RUNNING
        sequence.row = heappop(self._free_rows)
        sequence.block_tables = []
        for group in self.groups:
            first = group.prefix.first_needed_block(start)
            sequence.block_tables.append(group.prefix.acquire(keys, cached, first))
        sequence.num_dropped = [
            self.groups[kind[0]].prefix.first_needed_block(start) for kind in self._windowed
        ]
        # No group takes free blocks before all have acquired theirs, which may be free as well.
        if count > 0:
            self._grow(sequence, self._missing(sequence, end))
            draft.new_blocks[sequence.sequence_id] = sequence.block_tables
        sequence.num_computed = sequence.num_scheduled = start
        sequence.num_registered = cached
        sequence.admitted_len = num_tokens
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = start
            if self._prefix_caching and sequence.prompt_logprobs_done:
                self.prefix_cache_queries += num_tokens
                self.prefix_cache_hits += start
        if not sequence.prompt_logprobs_done and start == 0:
            sequence.prompt_logprobs.clear()
        if sequence.num_swapped:
            self._swap_in(sequence, draft, cached)
        draft.admitted.append(
            Admission(
                sequence.sequence_id,
                sequence.row,
                sequence.token_ids[:],
                sequence.prompt_len,
                sequence.sampling,
                sequence.prompt,
                sequence.pooling,
            )
        )
        return count

    def _has_room(self, sequence: Sequence, start: int, end: int, cached: int) -> bool:
        """Whether there is a row and blocks for a sequence that is admitted with these numbers.

        Args:
            sequence: a waiting one.
            start: the first position that it would compute.
            end: the position after its first chunk.
            cached: how many of its block keys are in the prefix cache.
        """
        wanted = self._wanted(sequence, start, end, cached, len(self._running))
        return bool(self._free_rows) and wanted <= self.pool.num_free

    def _wanted(
        self, sequence: Sequence, start: int, end: int, cached: int, num_running: int
    ) -> int:
        """Blocks that must be free for an admission beside ``num_running`` others.

        The other arguments are those of :meth:`_has_room`.
        """
        num_tokens = len(sequence.token_ids)
        wanted = 0
        for group in self.groups:
            first = group.prefix.first_needed_block(start)
            present = max(cached * self._key_size // group.block_size, first)
            count = -(-end // group.block_size) - present
            if num_running:
                # Room for all its tokens, and for every sequence to grow by a block: otherwise it
                # would soon be preempted, its work lost. Alone, it needs no such reserve.
                whole = group.max_blocks(num_tokens, self.config.max_num_batched_tokens)
                rest = -(-num_tokens // group.block_size) - present
                spare = num_running + 1
                if group.spec.keeps_state:
                    # Who takes another at the end of a block gives that one back.
                    grows = group.block_size < self.config.max_model_len
                    spare = grows * (num_running // _GROWING + 1)
                count = max(count, min(whole, rest)) + spare
            wanted += count + group.prefix.num_free_taken(sequence.block_keys, cached, first)
        return wanted

    def _preempt_for(self, sequence: Sequence, start: int, end: int, cached: int) -> bool:
        """Preempt sequences of less important priority, if that makes room for a waiting one.

        The arguments are those of :meth:`_has_room`. Rows and blocks that are on their way back
        already are counted.

        Returns:
            whether there is room now, or when the steps in flight are done. If not, nobody is
            preempted.
        """
        if not self._running or self._running[-1].priority <= sequence.priority:
            return False
        leaving = [holding for holdings in self._deferred.values() for holding in holdings]
        num_rows = len(self._free_rows) + len(leaving)
        free = self.pool.num_free
        held: Counter[int] = Counter()
        own: set[int] = set()
        for group in self.groups:
            first = group.prefix.first_needed_block(start)
            own.update(group.prefix.blocks(sequence.block_keys, cached, first))

        def given_back(tables: abc.Sequence[abc.Sequence[int]]) -> int:
            """How many more blocks are free once these tables are given up."""
            count = 0
            for table in tables:
                for block in table:
                    held[block] += 1
                    # Shared blocks come back with the last who holds them; those of its own
                    # prefix are taken again.
                    count += (
                        block != NULL_BLOCK
                        and held[block] == self.pool.refs(block)
                        and block not in own
                    )
            return count

        for holding in leaving:
            free += given_back(holding.block_tables)
        count = 0
        num_running = len(self._running)
        while True:
            wanted = self._wanted(sequence, start, end, cached, num_running - count)
            if num_rows > 0 and wanted <= free:
                break
            if count == num_running or (
                (victim := self._running[-1 - count]).priority <= sequence.priority
            ):
                return False
            count += 1
            num_rows += 1
            free += given_back(victim.block_tables)
        for victim in self._running[num_running - count :][::-1]:
            self._preempt(victim)
        return True

    def _allocate_ahead(self, draft: _Draft) -> int:
        """Allocate blocks for as many repeats as memory allows, and return how many."""
        repeat = draft.repeat
        if repeat == 1:
            return 1
        growing = [r for r in draft.singles if r.num_scheduled + repeat > r.capacity]
        if not growing:
            return repeat

        def needed_by_all(repeat: int) -> int:
            return sum(sum(self._missing(r, r.num_scheduled + repeat)) for r in growing)

        candidates = range(2, repeat + 1)
        available = 0 if draft.short_of_blocks else self.pool.num_free
        repeat = 1 + bisect_right(candidates, available, key=needed_by_all)
        for sequence in growing:
            if sequence.num_scheduled + repeat > sequence.capacity:
                grown = self._grow(
                    sequence, self._missing(sequence, sequence.num_scheduled + repeat)
                )
                before = draft.new_blocks.setdefault(sequence.sequence_id, grown)
                if before is not grown:
                    for table, blocks in zip(before, grown, strict=True):
                        table.extend(blocks)
        return repeat

    def _submit(self, draft: _Draft, repeat: int) -> StepPlan:
        """Freeze the draft, and count its tokens as in flight."""
        step_id = self._next_step
        self._next_step += 1
        none = self._no_blocks
        new_blocks: dict[str, _Blocks] = {
            sequence_id: tuple(tuple(blocks) for blocks in tables)
            for sequence_id, tables in draft.new_blocks.items()
        }
        if self.repeat_limit == 1 and len(self._running) >= self.lockstep_from:
            self._join_lockstep(draft)
        members = self._lockstep.advance(step_id) if self._lockstep.order.size else None
        rows = []
        # On a GPU programs begin in the order of the rows: those with the most to read go first, so
        # that none of them is left alone at the end.
        sequences = sorted(draft.singles, key=_num_scheduled, reverse=True)
        for sequence in sequences:
            start = sequence.num_scheduled
            sample = start + 1 == len(sequence.token_ids) + sequence.num_pending
            blocks = new_blocks.get(sequence.sequence_id, none)
            assert sequence.row is not None, f"{sequence} is planned without a row"
            # Not by the named tuple's constructor, which is a Python function.
            own = (sequence.sequence_id, sequence.row, start, 1, blocks, sample)
            rows.append(_new(PlanRow, own))
            sequence.num_scheduled = start + repeat
            if sample:
                sequence.num_pending += repeat
            sequence.last_step = step_id
        if not self.groups:
            # What has no cache attends to itself alone: prompts of one length at once.
            draft.chunks.sort(key=itemgetter(1))
        for sequence, count in draft.chunks:
            start = sequence.num_scheduled
            sample = start + count == len(sequence.token_ids)
            blocks = new_blocks.get(sequence.sequence_id, none)
            assert sequence.row is not None, f"{sequence} is planned without a row"
            rows.append(PlanRow(sequence.sequence_id, sequence.row, start, count, blocks, sample))
            sequence.num_scheduled = start + count
            sequence.num_pending = int(sample)
            sequence.last_step = step_id
            sequences.append(sequence)
        all_rows: abc.Sequence[PlanRow] = tuple(rows)
        if members is not None and members[0]:
            ids, numbers, starts = members
            grown = draft.grown
            for sequence_id, tables in new_blocks.items():
                sequence = self._sequences[sequence_id]
                if sequence.in_lockstep and sequence.row is not None:
                    grown[sequence.row] = tables
            if grown:
                places = np.full(self.config.max_num_seqs, -1, dtype=np.int64)
                places[numbers] = np.arange(len(ids))
                # Who was preempted after it grew is in no row of the plan.
                indices = zip(places[[*grown]].tolist(), grown.values(), strict=True)
                grown = {index: tables for index, tables in indices if index >= 0}
            all_rows = PlanRows(ids, numbers, starts, grown, tuple(rows), len(self.groups))
        swap_out, swap_in = tuple(self._swap_out), tuple(draft.swap_in)
        self._swap_out.clear()
        plan = StepPlan(
            step_id,
            all_rows,
            tuple(draft.admitted),
            repeat,
            swap_out,
            swap_in,
            self.encoder_cache.take_freed(),
            *self._planned_media(draft, sequences, len(all_rows) - len(sequences)),
        )
        self._in_flight.append((plan, sequences))
        self._had_chunks = draft.chunked
        return plan

    def _planned_media(
        self, draft: _Draft, sequences: list[Sequence], first: int
    ) -> tuple[tuple[MediaUse, ...], tuple[MediaWork, ...]]:
        """The items of a draft; its sequences have the plan's rows from ``first`` on."""
        work = []
        for slot, (sequence, index, begin, end) in draft.media_work.items():
            item = sequence.prompt.media[index]
            key = _media_key(sequence, item)
            # Else it was preempted a moment ago.
            if sequence.row is not None and self.encoder_cache.slot(key) == slot:
                self.encoder_cache.compute(key, end)
                size = item.num_embeddings
                work.append(MediaWork(sequence.row, index, slot, begin, end, size))
        if not draft.media:
            return (), tuple(work)
        places = {sequence.sequence_id: first + i for i, sequence in enumerate(sequences)}
        uses = []
        for sequence, index, slot in draft.media:
            # The runner follows plans in order, so that later ones may drop what this one uses.
            self._release_media(sequence, sequence.num_scheduled)
            uses.append(MediaUse(places[sequence.sequence_id], index, slot))
        return tuple(uses), tuple(work)

    def _feed_lockstep(self, draft: _Draft) -> None:
        """Give members the blocks that they need; without enough, plan them as others are."""
        lockstep = self._lockstep
        rows = lockstep.order
        rows = rows[lockstep.scheduled[rows] >= lockstep.bound[rows]]
        plenty = self.pool.num_free >= rows.size * len(self.groups) and (
            not self._waiting or self._running[-1].rank < self._waiting[0].rank
        )
        rows = rows[
            lockstep.scheduled[rows] < lockstep.limit[rows] - 1
        ]  # else the last is in flight
        if not plenty or not rows.size:
            lockstep.leave(rows)
            return
        members: list[Sequence] = lockstep.owners[rows].tolist()
        given: list[_Blocks]
        if len(self.groups) == 1:  # as usual: all at once
            blocks = self.pool.allocate(len(members))
            given = [((block,),) for block in blocks]
            for member, block in zip(members, blocks, strict=True):
                member.block_tables[0].append(block)
                member.capacity += self._key_size
        else:
            grown = [self._grow(m, self._missing(m, m.capacity + 1)) for m in members]
            given = [tuple(map(tuple, tables)) for tables in grown]
        draft.grown = dict(zip(rows.tolist(), given, strict=True))
        capacities = [member.capacity for member in members]
        lockstep.bound[rows] = np.minimum(capacities, lockstep.limit[rows] - 1)

    def _join_lockstep(self, draft: _Draft) -> None:
        """Move those of the draft's sequences that go on decoding to the members."""
        joining = []
        singles, draft.singles = draft.singles, []
        for sequence in singles:
            length = len(sequence.token_ids)
            if (
                sequence.num_scheduled < sequence.admitted_len
                or length <= sequence.admitted_len
                or not sequence.prompt_logprobs_done
                or sequence.sampling.logprobs is not None
                or len(sequence.stop_token_ids) > MOST_STOPS
            ):
                draft.singles.append(sequence)
                continue
            joining.append(sequence)
        if joining:
            self._lockstep.join(joining, self._due(joining))

    def _due(self, sequences: abc.Sequence[Sequence]) -> npt.NDArray[np.int64]:
        """The lengths at which blocks of members are out of sight, or enough is kept.

        Full blocks are registered for several at once, then or when a member leaves. Those who
        joined together are not due together.
        """
        counts = [(len(sequence.token_ids), sequence.row) for sequence in sequences]
        lengths, rows = np.array(counts, dtype=np.int64).T
        due: npt.NDArray[np.int64] = lengths + MOST_KEPT - (lengths + rows) % MOST_KEPT
        for kind, indices in enumerate(self._windowed):
            first = self.groups[indices[0]].prefix.first_needed_block
            for place, sequence in enumerate(sequences):
                dropped, low, high = sequence.num_dropped[kind], lengths[place] - 1, due[place]
                due[place] = min(high, bisect_right(range(high), dropped, low, key=first) + 1)
        return due

    def _note_computed(self, sequence: Sequence) -> None:
        """Register the blocks that became full, and give back those out of sight."""
        if self._prefix_caching:
            num_keys = sequence.num_computed // self._key_size
            if num_keys > sequence.num_registered:
                self._register(sequence, num_keys)
        if self._windowed:
            self._drop_unseen(sequence)

    def _unlock(self, sequence: Sequence) -> None:
        """Have the sequence's own counts and tokens be true, and its full blocks registered."""
        if sequence.in_lockstep:
            self._lockstep.leave(np.array([sequence.row], dtype=np.int64))
            self._note_computed(sequence)

    def _accept_lockstep(
        self, rows: PlanRows, results: abc.Sequence[RowResult], updates: list[TokenUpdate]
    ) -> TokenColumns:
        """Take in the results of a plan's columns; those with more to say are added to updates."""
        lockstep, numbers, ids = self._lockstep, rows.numbers, rows.sequence_ids
        count = len(ids)
        plain: npt.NDArray[np.bool_] = lockstep.live[numbers]
        if isinstance(results, TokenRows):
            tokens = results.tokens[:count].copy()  # all of them sample
        else:
            found = [result.sequence_id for result in results[:count]]
            assert found == ids, f"results of {found} where the plan has {ids}"
            alone = [len(r.token_ids) == 1 and r[2:] == (None,) * 4 for r in results[:count]]
            plain &= np.array(alone)
            given = [r.token_ids[0] if ok else -1 for r, ok in zip(results, alone, strict=False)]
            tokens = np.array(given, dtype=np.int64)
        plain &= ~lockstep.may_end(numbers, tokens)
        noted = np.flatnonzero(~plain)
        if noted.size:
            going = numbers[plain]
            columns = lockstep.accept(going, tokens[plain], None)
        else:
            going = numbers
            columns = lockstep.accept(going, tokens, ids)
        due = lockstep.all_due(going)
        if due.size:
            lockstep.sync(due)
            members = lockstep.owners[due].tolist()
            for sequence in members:
                self._note_computed(sequence)
            lockstep.due[due] = self._due(members)
        left = numbers[noted]
        lockstep.leave(left[lockstep.live[left]])
        for index in noted.tolist():
            sequence = lockstep.owners[numbers[index]]
            if sequence.finish_reason is None:
                name, row, start = ids[index], int(numbers[index]), int(rows.starts[index])
                taken = PlanRow(name, row, start, 1, (), True)
                if isinstance(results, TokenRows):
                    result = RowResult(name, (int(tokens[index]),))
                else:
                    result = results[index]
                update = self._accept(sequence, taken, result, 1)
                if update is not None:
                    updates.append(update)
        return columns

    def _accept(
        self, sequence: Sequence, row: PlanRow, result: RowResult, repeat: int
    ) -> TokenUpdate | None:
        """Take in one row's result; the sequence has not finished."""
        # Taken apart at once: a field of a tuple is much slower to look up than a local name.
        sequence_id, _, start, num_tokens, _, sample = row
        result_id, new_tokens, logprobs, chunk_logprobs, error, pooled = result
        assert result_id == sequence_id, (
            f"result of {result_id!r} where the plan has {sequence_id!r}"
        )
        if error is not None:
            self._finish(sequence, "error", None, error)
            return _update(sequence, (), None, None)

        reason: str | None = None
        stop_reason: int | None = None
        if sample and sequence.pooling is None:
            sequence.num_pending -= repeat
            token_ids = sequence.token_ids
            stops = sequence.stop_token_ids
            count = 0
            for token in new_tokens:
                token_ids.append(token)
                count += 1
                if token in stops and len(token_ids) >= sequence.stop_min_len:
                    reason = "stop"
                    stop_reason = None if token in sequence.eos_token_ids else token
                    break
                if len(token_ids) == sequence.limit:
                    reason = "length"
                    break
            assert reason is not None or count == repeat, (
                f"{sequence}: {count} tokens from {repeat} repeats, and none of them ends it"
            )
            if count < len(new_tokens):
                new_tokens = new_tokens[:count]
                logprobs = None if logprobs is None else logprobs[:count]
            # The last token accepted was sampled by the last position computed.
            end = start + num_tokens - 1 + count
        else:
            end = start + num_tokens

        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        if not sequence.prompt_logprobs_done:
            # Recomputation before the prompt's end starts the collection again, at admission; once
            # complete and given out, what recomputed chunks bring is not looked at.
            sequence.prompt_logprobs.extend(chunk_logprobs or ())
            if start + num_tokens >= sequence.prompt_len:
                sequence.prompt_logprobs_done = True
                prompt_logprobs = tuple(sequence.prompt_logprobs)
                sequence.prompt_logprobs.clear()

        if sequence.row is not None:  # a preempted sequence computes these positions again
            sequence.num_computed = end
            self._note_computed(sequence)
        if pooled is not None:
            reason = "stop"
        if reason is not None:
            self._finish(sequence, reason, stop_reason)
        elif not new_tokens and prompt_logprobs is None:
            return None
        return _update(sequence, new_tokens, logprobs, prompt_logprobs, pooled)

    def _chunk(self, sequence: Sequence, start: int, num_tokens: int, draft: _Draft) -> int:
        """How many of the known tokens from ``start`` on fit the budget with no span split."""
        budget = draft.budget
        draft.chunked = True
        draft.prompts -= 1
        if draft.prompts > 0 and num_tokens - start > budget:
            budget = -(-budget // 2)
        spans = sequence.prompt.atomic_spans
        count = cut_before_span(min(num_tokens, start + budget), spans) - start
        if count == 0 and draft.budget == draft.whole_budget:
            # The span is larger than the budget beside decodes. No other prompt comes with it.
            budget = self.config.max_num_batched_tokens
            count = cut_before_span(min(num_tokens, start + budget), spans) - start
        if not sequence.prompt.media:
            return count
        whole = not draft.beside
        ready = self._with_media(sequence, start, count, draft, whole=whole)
        waits = sequence.row is None and not self._begins_ahead(sequence, start, draft)
        if ready == 0 < count and not whole and waits:
            # Only one with a row has its items computed over several steps. This one is computed in
            # this step, and its tokens have the rest of the time.
            (_, item), *others = [*_touched(sequence, start, start + count)]
            size = item.num_embeddings
            rest = budget - self._media_cost(size, self._computed(sequence, item, draft), size)
            rest = max(1, self._unpadded(rest))
            most = min([start + rest, *(other.span[0] for _, other in others)])
            count = cut_before_span(min(start + count, most), spans) - start or count
            ready = self._with_media(sequence, start, count, draft, whole=True)
        return ready

    def _begins_ahead(self, sequence: Sequence, start: int, draft: _Draft) -> bool:
        """Whether a waiting sequence begins with an item that is to take several steps."""
        item = next((item for _, item in _touched(sequence, start, start + 1)), None)
        if start > 0 or item is None or not (draft.beside and self.media_in_parts):
            return False
        key, size = _media_key(sequence, item), item.num_embeddings
        cost = self._media_cost(size, self._computed(sequence, item, draft), size)
        return cost > self._time_left(draft) and self.encoder_cache.fits([(key, size)])

    def _with_media(
        self, sequence: Sequence, start: int, count: int, draft: _Draft, *, whole: bool
    ) -> int:
        """How many of ``count`` tokens come before the first item that they cannot have.

        One that the encoder cache has no room for or, unless items are computed ``whole`` in this
        step, one that is not computed by the end of it.
        """
        items: list[tuple[abc.Hashable, int]] = []
        for _, item in _touched(sequence, start, start + count):
            size = item.num_embeddings
            items.append((_media_key(sequence, item), size))
            left = size - self._computed(sequence, item, draft)
            if not ((whole or left == 0) and self.encoder_cache.fits(items)):
                end = cut_before_span(item.span[0], sequence.prompt.atomic_spans)
                return max(0, end - start)
        return count

    def _computed(self, sequence: Sequence, item: MediaItem, draft: _Draft) -> int:
        """How many embeddings of an item are computed by the end of the step in the making."""
        key = _media_key(sequence, item)
        work = draft.media_work.get(self.encoder_cache.slot(key))
        planned = work is not None and work[0].row is not None  # else it was preempted just now
        return work[3] if work is not None and planned else self.encoder_cache.computed(key)

    def _compute_ahead(self, sequence: Sequence, start: int, draft: _Draft) -> None:
        """Spend budget on the next item of a sequence that is not computed.

        Whatever chunks would need at once is held at once, and so is all that is needed before it.
        Else an item could take the room of an earlier one, and wait for it for ever.
        """
        budget = draft.budget if draft.prompts <= 1 else -(-draft.budget // 2)
        until = start + budget
        # A span that does not fit is computed whole all the same, so its items are needed.
        begun = [last for first, last in sequence.prompt.atomic_spans if first < until]
        for index, item in _touched(sequence, start, max([until, *begun])):
            done, size = self._computed(sequence, item, draft), item.num_embeddings
            if done == size:
                continue
            end = self._part_end(sequence, item, done, draft)
            if end == done:
                return
            first, last = item.span
            for span in sequence.prompt.atomic_spans:
                if span[0] < last and first < span[1]:
                    first, last = min(first, span[0]), max(last, span[1])
            needed = list(_touched(sequence, min(start, first), last))
            if not self.encoder_cache.fits(
                (_media_key(sequence, each), each.num_embeddings) for _, each in needed
            ):
                return
            for other, _ in needed:
                self._hold(sequence, other)
            self._add_work(sequence, index, end, draft)
            return

    def _part_end(self, sequence: Sequence, item: MediaItem, done: int, draft: _Draft) -> int:
        """Up to which embedding an item is computed in this step; ``done`` if none of it is.

        The model computes it in parts that nobody can halve: one more than a step has time for
        would be a step too long. Whoever is the first to take some of the time gets one part at
        least. If that takes longer than its share, those behind have the steps after it, but for
        no such part of theirs: else one that begins later would be done sooner.
        """
        size, parts = item.num_embeddings, 1
        if self.media_in_parts:
            parts = min(size, self._find_media_parts(item.kind, size))
        # Of a part that was begun before its number was known, the model has computed all.
        begun = min(-(-done * parts // size), parts - 1)
        # Rounded down, as a share that the model reaches with the last of its own parts.
        ends = [part * size // parts for part in range(begun + 1, parts + 1)]
        left = self._time_left(draft)
        share = left if draft.prompts <= 1 else left / 2
        affordable = [end for end in ends if self._media_cost(size, done, end) <= share]
        if affordable:
            return affordable[-1]
        cost = self._media_cost(size, done, ends[0])
        if cost <= left:
            return ends[0]
        if draft.budget < draft.whole_budget or draft.passed is not None:
            return done
        goes_on = draft.singles or draft.chunks or self._running[0].in_lockstep
        if draft.prompts > 1 and self._media_owed > 0 and goes_on:
            draft.passed = sequence
            return done
        draft.owes = True
        self._media_owed = 0.0 if cost == math.inf else cost - share
        return ends[0]

    def _take_media_parts(self, kind: str, size: int, parts: int) -> None:
        known = self._media_parts.setdefault(kind, {})
        known.pop(size, None)
        known[size] = parts
        if len(known) > _SIZES_KNOWN:
            del known[next(iter(known))]

    def _find_media_parts(self, kind: str, size: int) -> int:
        """In how many parts the model computes an item, as it did the one nearest in size."""
        known = self._media_parts.get(kind)
        if not known:
            return _USUAL_PARTS
        return known.get(size) or known[min(known, key=lambda other: abs(other - size))]

    def _time_left(self, draft: _Draft) -> float:
        """How many tokens of prompts take as long as what a step has time for yet."""
        index = bisect_left(self.prompt_sizes, draft.tokens)
        padded = self.prompt_sizes[index] if index < len(self.prompt_sizes) else draft.tokens
        return draft.whole_budget - draft.encoding - (padded if draft.tokens else 0)

    def _unpadded(self, tokens: float) -> int:
        """The most tokens of prompts that take no longer than so many."""
        if not self.prompt_sizes:
            return math.floor(max(0, tokens))
        index = bisect_right(self.prompt_sizes, tokens)
        return self.prompt_sizes[index - 1] if index else 0

    def _spend(self, draft: _Draft, *, tokens: int = 0, encoding: float = 0.0) -> None:
        """Take note of a chunk, or of embeddings that take as long as so many tokens."""
        draft.tokens += tokens
        draft.encoding += encoding
        most = draft.whole_budget
        if draft.encoding > 0:
            most = self._unpadded(most - draft.encoding)
        draft.budget = max(0, most - draft.tokens)

    def _media_cost(self, size: int, begin: int, end: int) -> float:
        """As ``media_cost``; of what nobody knows the cost of a step has one part, and no more."""
        assert self.media_cost is not None, "items are computed within the budget"
        cost = self.media_cost(size, begin, end)
        return math.inf if cost is None else cost

    def _add_work(self, sequence: Sequence, index: int, end: int, draft: _Draft) -> None:
        slot, item = sequence.media_slots[index], sequence.prompt.media[index]
        done = self._computed(sequence, item, draft)
        begun = draft.media_work.get(slot)
        begin = done if begun is None else begun[2]
        draft.media_work[slot] = (sequence, index, begin, end)
        draft.repeat = 1
        if draft.beside:
            self._spend(draft, encoding=self._media_cost(item.num_embeddings, done, end))

    def _hold(self, sequence: Sequence, index: int) -> int:
        """Hold an item that fits for a sequence, if it does not; returns its slot."""
        if index not in sequence.media_slots:
            item = sequence.prompt.media[index]
            slot = self.encoder_cache.hold(_media_key(sequence, item), item.num_embeddings)
            sequence.media_slots[index] = slot
        return sequence.media_slots[index]

    def _hold_media(self, sequence: Sequence, start: int, count: int, draft: _Draft) -> None:
        """Hold the items that a chunk touches until their spans are computed."""
        for index, item in _touched(sequence, start, start + count):
            slot = self._hold(sequence, index)
            if self._computed(sequence, item, draft) < item.num_embeddings:
                self._add_work(sequence, index, item.num_embeddings, draft)
            draft.media.append((sequence, index, slot))

    def _release_media(self, sequence: Sequence, end: int) -> None:
        """Give back the items before position ``end``."""
        for index in list(sequence.media_slots):
            item = sequence.prompt.media[index]
            if item.span[1] <= end:
                del sequence.media_slots[index]
                self.encoder_cache.release(_media_key(sequence, item))

    def _make_room(self, sequence: Sequence, needed: int) -> bool:
        """Whether ``needed`` blocks are free, if need be after preemptions."""
        while self.pool.num_free < needed:
            # Blocks are on their way back already; preempting more would waste work.
            if self._blocks_return():
                return False
            last = self._running[-1]
            if last is sequence and len(self._running) == 1:
                # Alone it fits, see _validate; but blocks that only its own steps in flight see
                # are not back yet.
                assert sequence.last_step > self._completed_step, (
                    f"{sequence} alone needs {needed} blocks, {self.pool.num_free} are free"
                )
                return False
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _blocks_return(self) -> bool:
        """Whether blocks of sequences that left the batch wait for steps in flight."""
        return any(
            any(table)  # null blocks do not count
            for holdings in self._deferred.values()
            for holding in holdings
            for table in holding.block_tables
        )

    def _missing(self, sequence: Sequence, end: int) -> list[int]:
        """How many blocks each group's table lacks for the positions up to ``end``."""
        return [
            max(0, -(-end // group.block_size) - len(table))
            for group, table in zip(self.groups, sequence.block_tables, strict=True)
        ]

    def _grow(self, sequence: Sequence, counts: abc.Sequence[int]) -> list[list[int]]:
        """Append so many blocks to the table of each group, and return them by group."""
        grown = [self.pool.allocate(count) for count in counts]
        for table, blocks in zip(sequence.block_tables, grown, strict=True):
            table.extend(blocks)
        sequence.capacity = min(
            (
                len(table) * group.block_size
                for group, table in zip(self.groups, sequence.block_tables, strict=True)
            ),
            default=sequence.max_model_len,
        )
        return grown

    def _find_keys(self, sequence: Sequence) -> None:
        """Extend a sequence's keys as far as they may be found.

        Of most prompts little is cached, and a first token would wait for the keys of all of it:
        4 ms for 30,000 tokens. The others follow while its chunks are computed.
        """
        keys = sequence.block_keys
        whole = len(sequence.token_ids) // self._key_size
        begin = 0
        while not any(group.prefix.ends_before(keys, begin, whole) for group in self.groups):
            begin = len(keys)
            if begin >= whole:
                break
            self._extend_keys(sequence, max(_FIRST_KEYS, 2 * begin))

    def _extend_keys(self, sequence: Sequence, most: int) -> None:
        if self._prefix_caching:
            extend_block_keys(
                sequence.block_keys,
                sequence.token_ids,
                self._key_size,
                spans=sequence.prompt.atomic_spans,
                salts=sequence.prompt.cache_salts,
                media=sequence.prompt.media,
                most=most,
            )

    def _register(self, sequence: Sequence, num_keys: int) -> None:
        """Make the blocks of the first ``num_keys`` keys findable: their tokens are accepted."""
        self._extend_keys(sequence, num_keys)
        keys = sequence.block_keys
        for group, table in zip(self.groups, sequence.block_tables, strict=True):
            per_block = group.block_size // self._key_size
            for index in range(sequence.num_registered // per_block, num_keys // per_block):
                # Swapped-in tables begin with null blocks in place of those no longer needed.
                if table[index] != NULL_BLOCK:
                    group.prefix.register(table[index], keys, index)
        sequence.num_registered = num_keys

    def _drop_unseen(self, sequence: Sequence) -> None:
        """Give back the blocks that no query after the computed positions needs."""
        for kind, indices in enumerate(self._windowed):
            first = self.groups[indices[0]].prefix.first_needed_block(sequence.num_computed)
            dropped = sequence.num_dropped[kind]
            if first > dropped:
                for index in indices:
                    table = sequence.block_tables[index]
                    self.pool.release(table[dropped:first], passed=True)
                    table[dropped:first] = [NULL_BLOCK] * (first - dropped)
                sequence.num_dropped[kind] = first
                self._blocked = None

    def _preempt(self, sequence: Sequence) -> None:
        """Take the row and blocks away; the sequence waits to go on later."""
        self._unlock(sequence)
        self._remove(self._running, sequence)
        insort(self._waiting, sequence, key=_rank)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._save(sequence)
        sequence.num_computed = sequence.num_scheduled = 0
        self._release_media(sequence, sequence.prompt_len)
        self._detach(sequence)

    def _save(self, sequence: Sequence) -> None:
        """Have a sequence's blocks copied to host memory, if there is room, and release them.

        Steps in flight still write up to ``num_scheduled``. The copy comes after them, and their
        results are accepted, so that everything up to there is kept. Blocks that only those steps
        see stay in the table.
        """
        end = sequence.num_scheduled
        ranges = [
            (group.prefix.first_needed_block(end), -(-end // group.block_size))
            for group in self.groups
        ]
        if end == 0 or sum(last - first for first, last in ranges) > len(self._free_slots):
            return
        for (first, last), table in zip(ranges, sequence.block_tables, strict=True):
            blocks = table[first:last]
            slots = [self._free_slots.pop() for _ in blocks]
            self._swap_out.extend(zip(blocks, slots, strict=True))
            sequence.swap_slots.append(slots)
            self.pool.release(reversed(blocks))
            del table[first:last]
        sequence.num_swapped = sequence.num_scheduled
        self.num_swaps += 1
        self._blocked = None

    def _swap_in(self, sequence: Sequence, draft: _Draft, cached: int) -> None:
        """Have the blocks after the ``cached`` keys copied back, and free the slots.

        A plan copies out before it copies in, but this one copies nothing to these slots: while
        the sequence waited nobody of a higher rank was admitted, so that nobody is preempted now.
        """
        for group, table, slots in zip(
            self.groups, sequence.block_tables, sequence.swap_slots, strict=True
        ):
            end = -(-sequence.num_swapped // group.block_size)
            first = end - len(slots)
            present = cached * self._key_size // group.block_size
            draft.swap_in.extend(
                (table[block], slots[block - first]) for block in range(max(first, present), end)
            )
            self._free_slots.extend(slots)
        sequence.num_swapped = 0
        sequence.swap_slots = []

    def _finish(
        self,
        sequence: Sequence,
        reason: str,
        stop_reason: int | str | None,
        error: RowError | None = None,
    ) -> None:
        self._unlock(sequence)
        running = sequence.status is SequenceStatus.RUNNING
        self._remove(self._running if running else self._waiting, sequence)
        del self._sequences[sequence.sequence_id]
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        sequence.error = error
        for slots in sequence.swap_slots:
            self._free_slots.extend(slots)
        sequence.num_swapped = 0
        sequence.swap_slots = []
        if sequence is self._blocked:
            self._blocked = None
        self._release_media(sequence, sequence.prompt_len)
        self._detach(sequence)

    @staticmethod
    def _remove(queue: list[Sequence], sequence: Sequence) -> None:
        """Take a sequence out of a queue by rank."""
        index = bisect_left(queue, sequence.rank, key=_rank)
        assert queue[index] is sequence, f"{sequence} is not where its rank {sequence.rank} belongs"
        del queue[index]

    def _detach(self, sequence: Sequence) -> None:
        """Give row and blocks back, now or after the last step in flight that names them."""
        if sequence.row is None:
            return
        self._untold.pop(sequence.sequence_id, None)
        holding = _Holding(sequence.row, sequence.block_tables)
        sequence.row = None
        sequence.block_tables = []
        sequence.capacity = 0
        if sequence.last_step > self._completed_step:
            self._deferred.setdefault(sequence.last_step, []).append(holding)
        else:
            self._release(holding)

    def _release(self, holding: _Holding) -> None:
        heappush(self._free_rows, holding.row)
        for table in holding.block_tables:
            # The end first, to be evicted first: it is of no use without the blocks before it.
            self.pool.release(reversed(table))
        self._blocked = None


def _update(
    sequence: Sequence,
    new_token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...] | None,
    prompt_logprobs: tuple[TokenLogprobs, ...] | None,
    pooled: bytes | None = None,
) -> TokenUpdate:
    """A sequence's update from a step, with its state after it."""
    return _new(
        TokenUpdate,
        (
            sequence.sequence_id,
            new_token_ids,
            logprobs,
            prompt_logprobs,
            sequence.finish_reason,
            sequence.stop_reason,
            sequence.error,
            sequence.num_cached_tokens,
            sequence.num_preemptions,
            sequence.number,
            pooled,
        ),
    )
