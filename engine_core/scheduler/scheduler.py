"""Continuous batching over a paged cache, with several steps in flight."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from engine_core.cache import (
    NULL_BLOCK,
    KVCacheGroup,
    cut_before_span,
    extend_block_keys,
    longest_cached_prefix,
)
from engine_core.configs import CacheConfig, KVCacheSpec, SchedulerConfig
from engine_core.errors import ConfigError, RequestError
from engine_core.scheduler.request import Request, RequestStatus
from engine_core.steps import (
    Admission,
    PlanRow,
    RowError,
    RowResult,
    StepPlan,
    StepResult,
    SwapPairs,
    TokenLogprobs,
    TokenUpdate,
)

_Blocks = tuple[tuple[int, ...], ...]
_rank = attrgetter("rank")
_num_scheduled = attrgetter("num_scheduled")


@dataclass(frozen=True, slots=True)
class _Holding:
    """What a request that left the batch gives back once no step in flight names it."""

    row: int
    block_tables: list[list[int]]


@dataclass(slots=True)
class _Draft:
    """A plan in the making: lives inside one call of ``schedule``.

    Attributes:
        budget: tokens of prompts that may still be computed.
        repeat: upper bound from what has been planned so far.
        singles: requests that compute one token.
        chunks: requests that compute more, and how many.
        new_blocks: by request id, the blocks appended to each group's table.
        admitted: requests that got a row.
        swap_in: for each group, pairs of a block and the slot that is copied to it.
        short_of_blocks: some request waits for blocks that are on their way back to it; nobody
            of a higher rank may take any.
    """

    budget: int
    repeat: int
    swap_in: list[list[tuple[int, int]]]
    singles: list[Request] = field(default_factory=list)
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    new_blocks: dict[str, list[list[int]]] = field(default_factory=dict)
    admitted: list[Admission] = field(default_factory=list)
    short_of_blocks: bool = False

    def add(self, request: Request, count: int) -> None:
        if count == 1:
            self.singles.append(request)
        else:
            self.chunks.append((request, count))


def check_request(
    request: Request,
    config: SchedulerConfig,
    groups: Iterable[tuple[KVCacheSpec, CacheConfig]],
) -> None:
    """Refuse a request that a scheduler of these limits could never run, whatever else it holds.

    ``groups`` says of each cache group what a layer keeps and how many blocks there are.

    Raises:
        RequestError: says why.
    """
    name = f"request {request.request_id!r}"
    if type(request.priority) is not int:
        raise RequestError(f"{name}: priority is a whole number, got {request.priority!r}")
    if request.prompt_len == 0:
        raise RequestError(f"{name}: the prompt is empty; give at least one token")
    if request.max_model_len > config.max_model_len:
        raise RequestError(
            f"{name} is made for {request.max_model_len} tokens, the engine for "
            f"{config.max_model_len}; give its max_model_len"
        )
    if request.prompt_len >= request.max_model_len:
        raise RequestError(
            f"{name}: a prompt of {request.prompt_len} tokens leaves no room for output in "
            f"max_model_len {request.max_model_len}; shorten it"
        )
    room = request.max_model_len - request.prompt_len
    if request.sampling.min_tokens > room:
        raise RequestError(
            f"{name}: min_tokens {request.sampling.min_tokens} cannot be kept, a prompt of "
            f"{request.prompt_len} tokens leaves {room} in max_model_len {request.max_model_len}",
            param="min_tokens",
        )
    before = 0
    for start, end in request.prompt.atomic_spans:
        if not before <= start < end <= request.prompt_len:
            raise RequestError(
                f"{name}: atomic spans must be sorted, disjoint and within the prompt of "
                f"{request.prompt_len} tokens, got {request.prompt.atomic_spans}"
            )
        before = end
        if end - start > config.max_num_batched_tokens:
            raise RequestError(
                f"{name}: the {end - start} tokens from {start} to {end} must be computed in "
                f"one step, which holds {config.max_num_batched_tokens}; raise "
                "max_num_batched_tokens"
            )
    # The last token is never computed.
    positions = request.limit - 1
    for spec, cache in groups:
        blocks = spec.max_blocks(
            positions, block_size=cache.block_size, max_chunk=config.max_num_batched_tokens
        )
        if blocks > cache.num_blocks - 1:
            raise RequestError(
                f"{name}: {request.limit} tokens of prompt and output need {blocks} blocks of "
                f"{cache.block_size}, the cache has {cache.num_blocks - 1}; lower "
                "max_tokens or give the cache more memory"
            )


class Scheduler:
    """Decides what each step computes and takes its results in.

    ``schedule`` may be called again before the results of earlier plans are in: a sampled token
    that the host does not know yet is scheduled by its position, and the runner takes it from the
    device. ``update`` is called with the results in the order of the plans.

    Requests are served by rank: by priority, the lowest number first, and among equals in the
    order in which they were added. Each step is planned in that order, running and waiting
    requests together: the first waiting request is admitted or no other is, and when blocks run
    out the running request of the highest rank is preempted. A waiting request preempts running
    ones of a less important priority, the least important first, if it needs their row or blocks
    and they are enough for it. That is not an option: whoever gives priorities wants the urgent
    request to run now, not when a background job happens to end. Unimportant requests starve
    while more important ones keep coming, by definition; with one priority for all nobody does.

    So the first unfinished request in rank always goes on. If it runs, it gets tokens and blocks
    before all others, who are preempted one by one until it has enough: alone it fits, or it
    would have been refused. If it waits, every running request has a less important priority:
    an equal one that came later is admitted only when no earlier one waits, and is preempted
    before it. Those in its way are preempted, the blocks that come back are kept for it, and it
    is admitted when the steps in flight are done.

    A preempted request is computed again later, from its first token that is not in the prefix
    cache, or its blocks are copied to host memory and back if ``config.num_swap_blocks`` has room
    for them. It keeps its tokens either way, and takes in what is in flight of it.

    Lifetime: the row and the blocks of a request that finished or was preempted may still be
    written by steps in flight. They are given back after the last submitted step that names the
    request has been updated. With a sliding window, blocks are given back earlier, once no query
    of a step in flight or to come sees them. What is copied to host memory is given back at once:
    the next plan begins with the copy, after every step that writes the blocks and before any that
    uses them anew.

    Args:
        config: limits.
        groups: the cache groups of the model; all have the same block size.

    Attributes:
        repeat_limit: how often a plan may be replayed now; its user may lower it from
            ``config.max_repeat`` and raise it again.
        prefix_cache_queries: tokens of requests that got their first row, looked up in the cache.
        prefix_cache_hits: how many of them were found there.
        num_preemptions: how often a running request lost its row and blocks.
        num_swaps: how many of these preemptions copied the blocks to host memory.

    Raises:
        ConfigError: there is no group, or block sizes or prefix caching differ.
    """

    def __init__(self, config: SchedulerConfig, groups: Sequence[KVCacheGroup]) -> None:
        if len({(group.block_size, group.enable_prefix_caching) for group in groups}) != 1:
            offered = [(group.block_size, group.enable_prefix_caching) for group in groups]
            raise ConfigError(
                "cache groups need one block size and one setting of prefix caching, got "
                f"(block_size, enable_prefix_caching) {offered}"
            )
        self.config = config
        self.groups = tuple(groups)
        self.repeat_limit = config.max_repeat
        self._block_size = groups[0].block_size
        self._prefix_caching = groups[0].enable_prefix_caching
        self._windowed = [i for i, group in enumerate(groups) if group.spec.window is not None]
        self._no_blocks: _Blocks = ((),) * len(groups)

        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_preemptions = 0
        self.num_swaps = 0

        self._requests: dict[str, Request] = {}
        # Both by rank.
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._free_rows = list(range(config.max_num_seqs))  # a heap: low rows are used first
        self._in_flight: deque[tuple[StepPlan, list[Request]]] = deque()
        self._deferred: dict[int, list[_Holding]] = {}
        self._next_step = 0
        self._completed_step = -1
        self._next_order = 0
        # The waiting request that found too few blocks or no row; not tried again before some come
        # back. Whether what has been preempted for it is on its way.
        self._blocked: Request | None = None
        self._blocked_is_next = False
        # Slots of host memory a group, and the copies to them that the next plan makes.
        self._free_slots = [list(range(config.num_swap_blocks)) for _ in groups]
        self._swap_out: list[list[tuple[int, int]]] = [[] for _ in groups]

    @property
    def num_waiting(self) -> int:
        """Requests without a row, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return len(self._running)

    @property
    def num_steps_in_flight(self) -> int:
        """Plans whose results are not in."""
        return len(self._in_flight)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that requests hold, in [0, 1], in the fullest group."""
        return max(group.pool.num_used / (group.pool.num_blocks - 1) for group in self.groups)

    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Put a new request into the queue, behind those of its priority.

        Raises:
            RequestError: it could never run; the message says why. The others go on.
        """
        self._validate(request)
        request.order = self._next_order
        request.rank = (request.priority, request.order)
        self._next_order += 1
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=_rank)

    def abort(self, request_id: str) -> None:
        """End a request; what its steps in flight bring is discarded. Unknown ids are ignored."""
        self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request, say because of a stop string; its accepted tokens stay.

        Does nothing if no unfinished request has the id: it may have ended a moment ago.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason, stop_reason)

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can run before a result comes in or a request."""
        draft = _Draft(
            self.config.max_num_batched_tokens,
            self.repeat_limit,
            swap_in=[[] for _ in self.groups],
        )
        running = self._running.copy()
        planned = 0
        # By rank: the running requests before the first waiting one, that one, and so on.
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
        if not draft.singles and not draft.chunks:
            return None
        repeat = self._allocate_ahead(draft)
        return self._submit(draft, repeat)

    def update(self, result: StepResult) -> list[TokenUpdate]:
        """Take in the results of the oldest step in flight.

        Returns:
            one update for each row that brought something, in plan order. What came for requests
            that have ended meanwhile is discarded; what came for preempted ones is accepted.
        """
        assert self._in_flight, f"result of step {result.step_id}, but no step is in flight"
        plan, requests = self._in_flight.popleft()
        assert plan.step_id == result.step_id, (
            f"result of step {result.step_id}, but step {plan.step_id} is the oldest in flight"
        )
        assert len(result.rows) == len(requests), (
            f"step {plan.step_id} has {len(requests)} rows, its result {len(result.rows)}"
        )
        self._completed_step = plan.step_id
        updates = []
        for request, row, row_result in zip(requests, plan.rows, result.rows, strict=True):
            if request.finish_reason is None:
                update = self._accept(request, row, row_result, plan.repeat)
                if update is not None:
                    updates.append(update)
        for holding in self._deferred.pop(plan.step_id, ()):
            self._release(holding)
        return updates

    def check(self) -> None:
        """Verify the invariants of the scheduler and its pools; linear in what they hold.

        Raises:
            AssertionError: one is broken; the message gives the numbers.
        """
        rows = list(self._free_rows)
        tables = []
        for name, queue in (("running", self._running), ("waiting", self._waiting)):
            ranks = [request.rank for request in queue]
            assert ranks == sorted(ranks), f"{name} out of rank: {ranks}"
        for request in self._running:
            assert request.status is RequestStatus.RUNNING, f"{request} is among the running"
            assert request.row is not None, f"{request} runs without a row"
            assert not request.num_swapped, f"{request} runs, {request.num_swapped} swapped"
            rows.append(request.row)
            tables.append(request.block_tables)
            computed, scheduled = request.num_computed, request.num_scheduled
            known = len(request.token_ids) + request.num_pending
            assert computed <= scheduled, f"{request}: {computed} computed, {scheduled} scheduled"
            assert scheduled < request.admitted_len or scheduled == known - 1, (
                f"{request}: {scheduled} positions scheduled, {known} tokens"
            )
            assert scheduled <= request.capacity, (
                f"{request}: {scheduled} positions scheduled, blocks for {request.capacity}"
            )
            assert known <= request.limit, f"{request}: {known} tokens, limit {request.limit}"
            for table in request.block_tables:
                assert len(table) * self._block_size == request.capacity, (
                    f"{request}: table of {len(table)} blocks, capacity {request.capacity}"
                )
        newest: dict[int, int] = {}
        for request in self._running:
            newest[request.priority] = request.order
        slots = [free.copy() for free in self._free_slots]
        for request in self._waiting:
            assert request.status is RequestStatus.WAITING, f"{request} is among the waiting"
            assert request.row is None, f"{request} waits but has row {request.row}"
            assert newest.get(request.priority, -1) < request.order, (
                f"{request} waits, a younger request of its priority runs"
            )
            assert request.num_swapped <= len(request.token_ids) + request.num_pending - 1, (
                f"{request}: {request.num_swapped} positions swapped"
            )
            for mine, group, free in zip(
                request.swap_slots, self.groups, slots, strict=bool(request.num_swapped)
            ):
                first = group.prefix.first_visible_block(request.num_swapped)
                blocks = -(-request.num_swapped // self._block_size) - first
                assert len(mine) == blocks, f"{request}: {len(mine)} slots for {blocks} blocks"
                free.extend(mine)
        for index, found in enumerate(slots):
            assert sorted(found) == list(range(self.config.num_swap_blocks)), (
                f"slots of group {index} leaked: {sorted(found)}"
            )
        for step, holdings in self._deferred.items():
            assert step > self._completed_step, (
                f"blocks wait for step {step}, but {self._completed_step} is complete"
            )
            rows.extend(holding.row for holding in holdings)
            tables.extend(holding.block_tables for holding in holdings)
        assert sorted(rows) == list(range(self.config.max_num_seqs)), f"rows leaked: {sorted(rows)}"
        live = len(self._running) + len(self._waiting)
        assert live == len(self._requests), f"{live} queued, {len(self._requests)} unfinished"
        for index, group in enumerate(self.groups):
            group.pool.check()
            held = Counter(block for table in tables for block in table[index])
            del held[NULL_BLOCK]
            refs = {b: n for b in range(group.pool.num_blocks) if (n := group.pool.refs(b))}
            assert held == refs, f"group {index}: tables hold {dict(held)}, the pool says {refs}"

    def _validate(self, request: Request) -> None:
        name = f"request {request.request_id!r}"
        config = self.config
        if request.request_id in self._requests:
            raise RequestError(f"{name}: an unfinished request has this id; choose another")
        if request.order >= 0:
            raise RequestError(f"{name} was added before; make a new Request")
        check_request(request, config, ((group.spec, group.cache_config) for group in self.groups))
        try:
            hash(request.prompt.cache_salts)
        except TypeError as error:
            raise RequestError(f"{name}: its cache salts must be hashable: {error}") from None

    def _continue_running(self, requests: Sequence[Request], draft: _Draft) -> None:
        """Plan running requests, which are given by rank."""
        block_size = self._block_size
        for request in requests:
            if request.row is None:  # preempted just now, and so are all of a higher rank
                return
            start = request.num_scheduled
            num_tokens = len(request.token_ids) + request.num_pending
            repeat = 1
            if num_tokens - start == 1:
                # It takes nothing from the budget: prompts are cut into as few chunks as without
                # company, and no chunk is of the few tokens that decodes left over.
                count = 1
                left = request.limit - num_tokens
                if left == 0:  # the last sample it may have is in flight
                    continue
                # The first token after a preemption comes from the host.
                if start >= request.admitted_len and not request.needs_host:
                    repeat = left
            else:
                count = self._chunk(request, start, num_tokens, draft.budget)
                if count == 0:
                    continue
            if start + count > request.capacity:
                needed = -(-(start + count - request.capacity) // block_size)
                if draft.short_of_blocks or not self._make_room(request, needed):
                    draft.short_of_blocks = True
                    continue
                draft.new_blocks[request.request_id] = self._grow(request, needed)
            if repeat < draft.repeat:
                draft.repeat = repeat
            if num_tokens - start > 1:
                draft.budget -= count
            draft.add(request, count)

    def _admit_first(self, draft: _Draft) -> bool:
        """Give a row to the first waiting request; False if it has to wait, and all others."""
        request = self._waiting[0]
        if request is self._blocked:
            draft.short_of_blocks = self._blocked_is_next
            return False
        # A preempted request first gets back what is in flight of it.
        if draft.budget == 0 or request.last_step > self._completed_step:
            return False
        count = self._admit(request, draft)
        if count == 0:
            return False
        draft.repeat = 1
        draft.budget -= count
        draft.add(request, count)
        return True

    def _admit(self, request: Request, draft: _Draft) -> int:
        """Give the request a row and blocks for its first chunk, whose size is returned, or 0."""
        block_size = self._block_size
        num_tokens = len(request.token_ids)
        keys = request.block_keys
        cached = 0
        # Cached positions are not computed and so give no prompt logprobs.
        if self._prefix_caching and request.prompt_logprobs_done:
            self._extend_keys(request)
            spans = request.prompt.atomic_spans
            cached = longest_cached_prefix(self.groups, keys, num_tokens - 1, spans)
        start = max(cached * block_size, request.num_swapped)
        count = self._chunk(request, start, num_tokens, draft.budget)
        if count == 0:
            return 0
        num_blocks = -(-(start + count) // block_size)
        if not self._has_room(request, start, num_blocks, cached):
            coming = self._preempt_for(request, start, num_blocks, cached)
            if not self._has_room(request, start, num_blocks, cached):
                self._blocked = request
                self._blocked_is_next = draft.short_of_blocks = coming
                return 0

        assert request.num_pending == 0, f"{request} is admitted with samples in flight"
        self._waiting.pop(0)
        insort(self._running, request, key=_rank)
        request.status = RequestStatus.RUNNING
        request.row = heappop(self._free_rows)
        request.block_tables = []
        request.num_dropped = []
        for group in self.groups:
            first = group.prefix.first_visible_block(start)
            table = group.prefix.acquire(keys, cached, first)
            table.extend(group.pool.allocate(num_blocks - len(table)))
            request.block_tables.append(table)
            request.num_dropped.append(first)
        request.capacity = num_blocks * block_size
        draft.new_blocks[request.request_id] = request.block_tables
        request.num_computed = request.num_scheduled = start
        request.num_registered = cached
        request.admitted_len = num_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = start
            if self._prefix_caching and request.prompt_logprobs_done:
                self.prefix_cache_queries += num_tokens
                self.prefix_cache_hits += start
        if not request.prompt_logprobs_done and start == 0:
            request.prompt_logprobs.clear()
        if request.num_swapped:
            self._swap_in(request, draft, cached)
        draft.admitted.append(
            Admission(
                request.request_id,
                request.row,
                request.token_ids[:],
                request.prompt_len,
                request.sampling,
                request.prompt,
            )
        )
        return count

    def _has_room(self, request: Request, start: int, num_blocks: int, cached: int) -> bool:
        """Whether there is a row and blocks for a request that is admitted with these numbers.

        Args:
            request: a waiting one.
            start: the first position that it would compute.
            num_blocks: the length of its block tables after the first chunk.
            cached: how many of these blocks are in the prefix cache.
        """
        if not self._free_rows:
            return False
        wanted = self._wanted(request, start, num_blocks, cached, len(self._running))
        return all(
            count <= group.pool.num_free for group, count in zip(self.groups, wanted, strict=True)
        )

    def _wanted(
        self, request: Request, start: int, num_blocks: int, cached: int, num_running: int
    ) -> list[int]:
        """Blocks of each group that must be free for an admission beside ``num_running`` others.

        The other arguments are those of :meth:`_has_room`.
        """
        num_tokens = len(request.token_ids)
        wanted = []
        for group in self.groups:
            first = group.prefix.first_visible_block(start)
            present = max(cached, first)
            count = num_blocks - present
            if num_running:
                # Room for all its tokens, and for every request to grow by a block: otherwise it
                # would soon be preempted, its work lost. Alone, it needs no such reserve.
                whole = group.max_blocks(num_tokens, self.config.max_num_batched_tokens)
                rest = -(-num_tokens // self._block_size) - present
                count = max(count, min(whole, rest)) + num_running + 1
            wanted.append(count + group.prefix.num_free_taken(request.block_keys, cached, first))
        return wanted

    def _preempt_for(self, request: Request, start: int, num_blocks: int, cached: int) -> bool:
        """Preempt requests of less important priority, if that makes room for a waiting one.

        The arguments are those of :meth:`_has_room`. What is on its way back already is counted.

        Returns:
            whether there is room now, or when the steps in flight are done. If not, nobody is
            preempted.
        """
        if not self._running or self._running[-1].priority <= request.priority:
            return False
        leaving = [holding for holdings in self._deferred.values() for holding in holdings]
        num_rows = len(self._free_rows) + len(leaving)
        free = [group.pool.num_free for group in self.groups]
        held: list[Counter[int]] = [Counter() for _ in self.groups]
        own = [
            set(
                group.prefix.blocks(
                    request.block_keys, cached, group.prefix.first_visible_block(start)
                )
            )
            for group in self.groups
        ]

        def give_back(tables: Sequence[Sequence[int]]) -> None:
            for index, table in enumerate(tables):
                for block in table:
                    held[index][block] += 1
                    # Shared blocks come back with the last who holds them; those of its own
                    # prefix are taken again.
                    if (
                        block != NULL_BLOCK
                        and held[index][block] == self.groups[index].pool.refs(block)
                        and block not in own[index]
                    ):
                        free[index] += 1

        for holding in leaving:
            give_back(holding.block_tables)
        count = 0
        num_running = len(self._running)
        while True:
            wanted = self._wanted(request, start, num_blocks, cached, num_running - count)
            if num_rows > 0 and all(w <= f for w, f in zip(wanted, free, strict=True)):
                break
            if count == num_running or (
                (victim := self._running[-1 - count]).priority <= request.priority
            ):
                return False
            count += 1
            num_rows += 1
            give_back(victim.block_tables)
        for victim in self._running[num_running - count :][::-1]:
            self._preempt(victim)
        return True

    def _allocate_ahead(self, draft: _Draft) -> int:
        """Allocate blocks for as many repeats as memory allows, and return how many."""
        repeat = draft.repeat
        if repeat == 1:
            return 1
        block_size = self._block_size
        growing = [r for r in draft.singles if r.num_scheduled + repeat > r.capacity]
        if not growing:
            return repeat

        def needed(request: Request, repeat: int) -> int:
            return max(0, -(-(request.num_scheduled + repeat - request.capacity) // block_size))

        def needed_by_all(repeat: int) -> int:
            return sum(needed(request, repeat) for request in growing)

        candidates = range(2, repeat + 1)
        available = 0 if draft.short_of_blocks else self._num_free()
        repeat = 1 + bisect_right(candidates, available, key=needed_by_all)
        for request in growing:
            count = needed(request, repeat)
            if count > 0:
                grown = self._grow(request, count)
                before = draft.new_blocks.setdefault(request.request_id, grown)
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
            request_id: tuple(tuple(blocks) for blocks in tables)
            for request_id, tables in draft.new_blocks.items()
        }
        rows = []
        # On a GPU programs begin in the order of the rows: those with the most to read go first, so
        # that none of them is left alone at the end.
        requests = sorted(draft.singles, key=_num_scheduled, reverse=True)
        for request in requests:
            start = request.num_scheduled
            sample = start + 1 == len(request.token_ids) + request.num_pending
            blocks = new_blocks.get(request.request_id, none)
            assert request.row is not None, f"{request} is planned without a row"
            rows.append(PlanRow(request.request_id, request.row, start, 1, blocks, sample))
            request.num_scheduled = start + repeat
            if sample:
                request.num_pending += repeat
            request.last_step = step_id
        for request, count in draft.chunks:
            start = request.num_scheduled
            sample = start + count == len(request.token_ids)
            blocks = new_blocks.get(request.request_id, none)
            assert request.row is not None, f"{request} is planned without a row"
            rows.append(PlanRow(request.request_id, request.row, start, count, blocks, sample))
            request.num_scheduled = start + count
            request.num_pending = int(sample)
            request.last_step = step_id
            requests.append(request)
        swap_out: tuple[SwapPairs, ...] = ()
        swap_in: tuple[SwapPairs, ...] = ()
        if any(self._swap_out):
            swap_out = tuple(tuple(pairs) for pairs in self._swap_out)
            self._swap_out = [[] for _ in self.groups]
        if any(draft.swap_in):
            swap_in = tuple(tuple(pairs) for pairs in draft.swap_in)
        plan = StepPlan(step_id, tuple(rows), tuple(draft.admitted), repeat, swap_out, swap_in)
        self._in_flight.append((plan, requests))
        return plan

    def _accept(
        self, request: Request, row: PlanRow, result: RowResult, repeat: int
    ) -> TokenUpdate | None:
        """Take in one row's result; the request has not finished."""
        # Taken apart at once: a field of a tuple is much slower to look up than a local name.
        request_id, _, start, num_tokens, _, sample = row
        result_id, new_tokens, logprobs, chunk_logprobs, error = result
        assert result_id == request_id, f"result of {result_id!r} where the plan has {request_id!r}"
        if error is not None:
            self._finish(request, "error", None, error)
            return _update(request, (), None, None)

        reason: str | None = None
        stop_reason: int | None = None
        if sample:
            request.num_pending -= repeat
            token_ids = request.token_ids
            stops = request.stop_token_ids
            count = 0
            for token in new_tokens:
                token_ids.append(token)
                count += 1
                if token in stops and len(token_ids) >= request.stop_min_len:
                    reason = "stop"
                    stop_reason = None if token in request.eos_token_ids else token
                    break
                if len(token_ids) == request.limit:
                    reason = "length"
                    break
            assert reason is not None or count == repeat, (
                f"{request}: {count} tokens from {repeat} repeats, and none of them ends it"
            )
            if count < len(new_tokens):
                new_tokens = new_tokens[:count]
                logprobs = None if logprobs is None else logprobs[:count]
            # The last token accepted was sampled by the last position computed.
            end = start + num_tokens - 1 + count
        else:
            end = start + num_tokens

        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        if not request.prompt_logprobs_done:
            # Recomputation before the prompt's end starts the collection again, at admission; once
            # complete and given out, what recomputed chunks bring is not looked at.
            request.prompt_logprobs.extend(chunk_logprobs or ())
            if start + num_tokens >= request.prompt_len:
                request.prompt_logprobs_done = True
                prompt_logprobs = tuple(request.prompt_logprobs)
                request.prompt_logprobs.clear()

        if request.row is not None:  # a preempted request computes these positions again
            request.num_computed = end
            if self._prefix_caching:
                num_full = end // self._block_size
                if num_full > request.num_registered:
                    self._register(request, num_full)
            if self._windowed:
                self._drop_unseen(request)
        if reason is not None:
            self._finish(request, reason, stop_reason)
        elif not new_tokens and prompt_logprobs is None:
            return None
        return _update(request, new_tokens, logprobs, prompt_logprobs)

    def _chunk(self, request: Request, start: int, num_tokens: int, budget: int) -> int:
        """How many of the known tokens from ``start`` on fit the budget with no span split."""
        end = min(num_tokens, start + budget)
        return cut_before_span(end, request.prompt.atomic_spans) - start

    def _make_room(self, request: Request, needed: int) -> bool:
        """Whether ``needed`` blocks are free in every group, if need be after preemptions."""
        while self._num_free() < needed:
            # Blocks are on their way back already; preempting more would waste work.
            if self._blocks_return():
                return False
            last = self._running[-1]
            if last is request and len(self._running) == 1:
                # Alone it fits, see _validate; but blocks that only its own steps in flight see
                # are not back yet.
                assert request.last_step > self._completed_step, (
                    f"{request} runs alone and needs {needed} blocks, {self._num_free()} are free"
                )
                return False
            self._preempt(last)
            if last is request:
                return False
        return True

    def _blocks_return(self) -> bool:
        """Whether blocks of requests that left the batch wait for steps in flight."""
        return any(
            any(table)  # null blocks do not count
            for holdings in self._deferred.values()
            for holding in holdings
            for table in holding.block_tables
        )

    def _num_free(self) -> int:
        return min(group.pool.num_free for group in self.groups)

    def _grow(self, request: Request, count: int) -> list[list[int]]:
        """Append ``count`` blocks to the table of each group; the blocks, a list a group."""
        grown = [group.pool.allocate(count) for group in self.groups]
        for table, blocks in zip(request.block_tables, grown, strict=True):
            table.extend(blocks)
        request.capacity += count * self._block_size
        return grown

    def _extend_keys(self, request: Request) -> None:
        if self._prefix_caching:
            extend_block_keys(
                request.block_keys,
                request.token_ids,
                self._block_size,
                spans=request.prompt.atomic_spans,
                salts=request.prompt.cache_salts,
            )

    def _register(self, request: Request, num_blocks: int) -> None:
        """Make the first ``num_blocks`` blocks findable: computed, and all tokens accepted."""
        self._extend_keys(request)
        keys = request.block_keys
        for group, table in zip(self.groups, request.block_tables, strict=True):
            for index in range(request.num_registered, num_blocks):
                # What came back from host memory begins with the blocks still seen.
                if table[index] != NULL_BLOCK:
                    group.prefix.register(table[index], keys[index])
        request.num_registered = num_blocks

    def _drop_unseen(self, request: Request) -> None:
        """Give back the blocks that no query after the computed positions sees."""
        for index in self._windowed:
            group = self.groups[index]
            first = group.prefix.first_visible_block(request.num_computed)
            dropped = request.num_dropped[index]
            if first > dropped:
                table = request.block_tables[index]
                group.pool.release(table[dropped:first])
                table[dropped:first] = [NULL_BLOCK] * (first - dropped)
                request.num_dropped[index] = first
                self._blocked = None

    def _preempt(self, request: Request) -> None:
        """Take the row and blocks away; the request waits to go on later."""
        self._remove(self._running, request)
        insort(self._waiting, request, key=_rank)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._save(request)
        request.num_computed = request.num_scheduled = 0
        self._detach(request)

    def _save(self, request: Request) -> None:
        """Have a request's blocks copied to host memory, if there is room, and release them.

        Steps in flight still write up to ``num_scheduled``; the copy comes after them, and they
        are accepted, so all that is kept. Blocks that only those steps see stay in the table.
        """
        num_blocks = -(-request.num_scheduled // self._block_size)
        firsts = [group.prefix.first_visible_block(request.num_scheduled) for group in self.groups]
        if num_blocks == 0 or any(
            num_blocks - first > len(slots)
            for first, slots in zip(firsts, self._free_slots, strict=True)
        ):
            return
        for index, group in enumerate(self.groups):
            table = request.block_tables[index]
            blocks = table[firsts[index] : num_blocks]
            slots = [self._free_slots[index].pop() for _ in blocks]
            self._swap_out[index].extend(zip(blocks, slots, strict=True))
            request.swap_slots.append(slots)
            group.pool.release(reversed(blocks))
            del table[firsts[index] : num_blocks]
        request.num_swapped = request.num_scheduled
        self.num_swaps += 1
        self._blocked = None

    def _swap_in(self, request: Request, draft: _Draft, cached: int) -> None:
        """Have the blocks after the ``cached`` ones copied back, and free the slots.

        No copy of this plan goes to these slots, which would come before: as long as the request
        waited, nobody of a higher rank was admitted, so that there is nobody to preempt now.
        """
        num_blocks = -(-request.num_swapped // self._block_size)
        for index, slots in enumerate(request.swap_slots):
            table = request.block_tables[index]
            first = num_blocks - len(slots)
            draft.swap_in[index].extend(
                (table[block], slots[block - first])
                for block in range(max(first, cached), num_blocks)
            )
            self._free_slots[index].extend(slots)
        request.num_swapped = 0
        request.swap_slots = []

    def _finish(
        self,
        request: Request,
        reason: str,
        stop_reason: int | str | None,
        error: RowError | None = None,
    ) -> None:
        running = request.status is RequestStatus.RUNNING
        self._remove(self._running if running else self._waiting, request)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.error = error
        for free, slots in zip(self._free_slots, request.swap_slots, strict=False):
            free.extend(slots)
        request.num_swapped = 0
        request.swap_slots = []
        if request is self._blocked:
            self._blocked = None
        self._detach(request)

    @staticmethod
    def _remove(queue: list[Request], request: Request) -> None:
        """Take a request out of a queue by rank."""
        index = bisect_left(queue, request.rank, key=_rank)
        assert queue[index] is request, f"{request} is not where its rank {request.rank} belongs"
        del queue[index]

    def _detach(self, request: Request) -> None:
        """Give row and blocks back, now or after the last step in flight that names them."""
        if request.row is None:
            return
        holding = _Holding(request.row, request.block_tables)
        request.row = None
        request.block_tables = []
        request.capacity = 0
        if request.last_step > self._completed_step:
            self._deferred.setdefault(request.last_step, []).append(holding)
        else:
            self._release(holding)

    def _release(self, holding: _Holding) -> None:
        heappush(self._free_rows, holding.row)
        for group, table in zip(self.groups, holding.block_tables, strict=True):
            # The end first: a prefix is of use without what follows it, not the other way round.
            group.pool.release(reversed(table))
        self._blocked = None


def _update(
    request: Request,
    new_token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...] | None,
    prompt_logprobs: tuple[TokenLogprobs, ...] | None,
) -> TokenUpdate:
    """What a step brought for a request, and where the request stands after it."""
    return TokenUpdate(
        request.request_id,
        new_token_ids,
        logprobs,
        prompt_logprobs,
        request.finish_reason,
        request.stop_reason,
        request.error,
        request.num_cached_tokens,
        request.num_preemptions,
    )
