"""Continuous batching over a paged cache, with several steps in flight."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from engine_core.cache import (
    NULL_BLOCK,
    KVCacheGroup,
    cut_before_span,
    extend_block_keys,
    longest_cached_prefix,
)
from engine_core.configs import SchedulerConfig
from engine_core.errors import ConfigError, RequestError
from engine_core.scheduler.request import Request, RequestStatus
from engine_core.steps import Admission, PlanRow, RowResult, StepPlan, StepResult, TokenLogprobs

_Blocks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What one step brought for one request. Written by the scheduler.

    Attributes:
        request: whose it is.
        new_token_ids: the tokens accepted; the last is the stop token if one ended the sequence.
        logprobs: one mapping a token in ``new_token_ids``, or None.
        prompt_logprobs: one mapping for each prompt token but the first, all in one update, the
            one after which the prompt is computed; None in every other.
        finished: whether the request ended with this step.
    """

    request: Request
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None
    finished: bool


@dataclass(frozen=True, slots=True)
class _Holding:
    """What a request that left the batch gives back once no step in flight names it."""

    row: int
    block_tables: list[list[int]]


@dataclass(slots=True)
class _Draft:
    """A plan in the making: lives inside one call of ``schedule``.

    Attributes:
        budget: tokens that may still be computed.
        repeat: upper bound from what has been planned so far.
        singles: requests that compute one token.
        chunks: requests that compute more, and how many.
        new_blocks: by request id, the blocks appended to each group's table.
        admitted: requests that got a row.
        short_of_blocks: some request lacks blocks; nobody younger may take any, so that those
            which come back are the older one's.
    """

    budget: int
    repeat: int
    singles: list[Request] = field(default_factory=list)
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    new_blocks: dict[str, list[list[int]]] = field(default_factory=dict)
    admitted: list[Admission] = field(default_factory=list)
    short_of_blocks: bool = False

    def add(self, request: Request, count: int) -> None:
        self.budget -= count
        if count == 1:
            self.singles.append(request)
        else:
            self.chunks.append((request, count))


class Scheduler:
    """Decides what each step computes and takes its results in.

    ``schedule`` may be called again before the results of earlier plans are in: a sampled token
    that the host does not know yet is scheduled by its position, and the runner takes it from the
    device. ``update`` is called with the results in the order of the plans.

    Requests run in the order in which they were added, and every running request is older than
    every waiting one: the oldest waiting request is admitted first or nobody is, and when blocks
    run out the youngest running request is preempted and computed again later. So the oldest
    request always goes on.

    Lifetime: the row and the blocks of a request that finished or was preempted may still be
    written by steps in flight. They are given back after the last submitted step that names the
    request has been updated. With a sliding window, blocks are given back earlier, once no query
    of a step in flight or to come sees them.

    Args:
        config: limits.
        groups: the cache groups of the model; all have the same block size.

    Attributes:
        repeat_limit: how often a plan may be replayed now; its user may lower it from
            ``config.max_repeat`` and raise it again.

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

        self._requests: dict[str, Request] = {}
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: dict[str, Request] = {}
        self._free_rows = list(range(config.max_num_seqs))  # a heap: low rows are used first
        self._in_flight: deque[tuple[StepPlan, list[Request]]] = deque()
        self._deferred: dict[int, list[_Holding]] = {}
        self._next_step = 0
        self._completed_step = -1
        self._next_order = 0
        # The waiting request that found too few blocks; not tried again before some come back.
        self._blocked: Request | None = None

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
        """Put a new request at the end of the queue.

        Raises:
            RequestError: it could never run; the message says why. The others go on.
        """
        self._validate(request)
        request.order = self._next_order
        self._next_order += 1
        self._requests[request.request_id] = request
        self._waiting[request.request_id] = request

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
        draft = _Draft(self.config.max_num_batched_tokens, self.repeat_limit)
        self._continue_running(draft)
        if not draft.short_of_blocks:
            self._admit_waiting(draft)
        if not draft.singles and not draft.chunks:
            return None
        repeat = self._allocate_ahead(draft)
        return self._submit(draft, repeat)

    def update(self, result: StepResult) -> list[RequestUpdate]:
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
            if request.status is not RequestStatus.FINISHED:
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
        newest_running = -1
        for request in self._running.values():
            assert request.status is RequestStatus.RUNNING, f"{request} is among the running"
            assert request.row is not None, f"{request} runs without a row"
            assert newest_running < request.order, f"{request} is out of order of arrival"
            newest_running = request.order
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
        for request in self._waiting.values():
            assert request.status is RequestStatus.WAITING, f"{request} is among the waiting"
            assert request.row is None, f"{request} waits but has row {request.row}"
            assert newest_running < request.order, f"{request} waits, a younger request runs"
        orders = [request.order for request in self._waiting.values()]
        assert orders == sorted(orders), f"waiting out of order of arrival: {orders}"
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
        for group in self.groups:
            blocks = group.max_blocks(positions, config.max_num_batched_tokens)
            if blocks > group.pool.num_blocks - 1:
                raise RequestError(
                    f"{name}: {request.limit} tokens of prompt and output need {blocks} blocks of "
                    f"{self._block_size}, the cache has {group.pool.num_blocks - 1}; lower "
                    "max_tokens or give the cache more memory"
                )
        try:
            hash(request.prompt.cache_salts)
            self._extend_keys(request)
        except (TypeError, OverflowError) as error:
            raise RequestError(
                f"{name}: its tokens must be integers and its cache salts hashable: {error}"
            ) from None

    def _continue_running(self, draft: _Draft) -> None:
        """Plan the running requests, oldest first."""
        block_size = self._block_size
        for request in list(self._running.values()):
            if draft.budget == 0:
                return
            if request.row is None:  # preempted just now, and so are all the younger ones
                return
            start = request.num_scheduled
            num_tokens = len(request.token_ids) + request.num_pending
            repeat = 1
            if num_tokens - start == 1:
                count = 1
                left = request.limit - num_tokens
                if left == 0:  # the last sample it may have is in flight
                    continue
                # The first token after a recomputation comes from the host.
                if start >= request.admitted_len and not request.sampling.needs_host:
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
            draft.add(request, count)

    def _admit_waiting(self, draft: _Draft) -> None:
        """Give rows to waiting requests in order of arrival, until one has to wait."""
        while self._waiting and self._free_rows and draft.budget > 0:
            request = next(iter(self._waiting.values()))
            # A preempted request first gets back what is in flight of it.
            if request is self._blocked or request.last_step > self._completed_step:
                return
            count = self._admit(request, draft)
            if count == 0:
                return
            draft.repeat = 1
            draft.add(request, count)

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
        start = cached * block_size
        count = self._chunk(request, start, num_tokens, draft.budget)
        if count == 0:
            return 0
        needed = -(-(start + count) // block_size) - cached
        for group in self.groups:
            wanted = needed
            if self._running:
                # Room for all its tokens, and for every request to grow by a block: otherwise it
                # would soon be preempted, its work lost. Alone, it needs no such reserve.
                whole = group.max_blocks(num_tokens, self.config.max_num_batched_tokens)
                rest = -(-num_tokens // block_size) - cached
                wanted = max(needed, min(whole, rest)) + len(self._running) + 1
            if wanted > group.pool.num_free - group.prefix.num_free_taken(keys, cached):
                self._blocked = request
                return 0

        assert request.num_pending == 0, f"{request} is admitted with samples in flight"
        del self._waiting[request.request_id]
        self._running[request.request_id] = request
        request.status = RequestStatus.RUNNING
        request.row = heappop(self._free_rows)
        request.block_tables = [group.prefix.acquire(keys, cached) for group in self.groups]
        request.num_dropped = [group.prefix.first_visible_block(start) for group in self.groups]
        request.capacity = start
        self._grow(request, needed)
        draft.new_blocks[request.request_id] = request.block_tables
        request.num_computed = request.num_scheduled = start
        request.num_registered = cached
        request.admitted_len = num_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = start
        if not request.prompt_logprobs_done:
            request.prompt_logprobs.clear()
        draft.admitted.append(
            Admission(
                request.request_id,
                request.row,
                tuple(request.token_ids),
                request.prompt_len,
                request.sampling,
                request.prompt,
            )
        )
        return count

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
        repeat = 1 + bisect_right(candidates, self._num_free(), key=needed_by_all)
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
        requests = draft.singles
        for request in draft.singles:
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
        plan = StepPlan(step_id, tuple(rows), tuple(draft.admitted), repeat)
        self._in_flight.append((plan, requests))
        return plan

    def _accept(
        self, request: Request, row: PlanRow, result: RowResult, repeat: int
    ) -> RequestUpdate | None:
        """Take in one row's result; the request has not finished."""
        assert result.request_id == row.request_id, (
            f"result of {result.request_id!r} where the plan has {row.request_id!r}"
        )
        if result.error is not None:
            self._finish(request, "error", None, result.error)
            return RequestUpdate(request, (), None, None, finished=True)

        new_tokens = result.token_ids
        logprobs = result.logprobs
        reason: str | None = None
        stop_reason: int | None = None
        if row.sample:
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
            end = row.start + row.num_tokens - 1 + count
        else:
            end = row.start + row.num_tokens

        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        if not request.prompt_logprobs_done:
            # A preemption before the prompt's end starts the collection again, at admission; once
            # complete and given out, what recomputed chunks bring is not looked at.
            request.prompt_logprobs.extend(result.prompt_logprobs or ())
            if row.start + row.num_tokens >= request.prompt_len:
                request.prompt_logprobs_done = True
                prompt_logprobs = tuple(request.prompt_logprobs)
                request.prompt_logprobs.clear()

        if request.row is not None:  # a preempted request computes these positions again
            request.num_computed = end
            if self._prefix_caching and end // self._block_size > request.num_registered:
                self._register(request, end // self._block_size)
            if self._windowed:
                self._drop_unseen(request)
        if reason is not None:
            self._finish(request, reason, stop_reason)
        elif not new_tokens and prompt_logprobs is None:
            return None
        return RequestUpdate(request, new_tokens, logprobs, prompt_logprobs, reason is not None)

    def _chunk(self, request: Request, start: int, num_tokens: int, budget: int) -> int:
        """How many of the known tokens from ``start`` on fit the budget with no span split."""
        end = min(num_tokens, start + budget)
        return cut_before_span(end, request.prompt.atomic_spans) - start

    def _make_room(self, request: Request, needed: int) -> bool:
        """Whether ``needed`` blocks are free in every group, if need be after preemptions."""
        while self._num_free() < needed:
            # Blocks are on their way back already; preempting more would waste work.
            if self._deferred:
                return False
            youngest = self._running[next(reversed(self._running))]
            if youngest is request and len(self._running) == 1:
                # Alone it fits, see _validate; but blocks that only its own steps in flight see
                # are not back yet.
                assert request.last_step > self._completed_step, (
                    f"{request} runs alone and needs {needed} blocks, {self._num_free()} are free"
                )
                return False
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

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
        """Take the row and blocks away; the request waits to be computed again."""
        del self._running[request.request_id]
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        request.num_computed = request.num_scheduled = 0
        self._detach(request)

    def _finish(
        self,
        request: Request,
        reason: str,
        stop_reason: int | str | None,
        error: str | None = None,
    ) -> None:
        queue = self._running if request.status is RequestStatus.RUNNING else self._waiting
        del queue[request.request_id]
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.error = error
        self._detach(request)

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
