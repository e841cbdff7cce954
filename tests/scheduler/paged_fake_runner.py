"""A runner without a model: it keeps the device's state and catches every wrong use of a block.

Each position has a value that depends on its token, its atomic span, the salts, and the values of
every position that the attention of each group sees. Values are written to and read from a fake
paged memory through the block tables, and copied to a fake host memory and back; a read that gives
anything but the row's own value, and a write into a block that belongs to another row, is a
``ContractError``. Steps take effect in order, but only when their result is fetched: until then
they are in flight, while later plans already hand out rows and blocks. A block that a step in
flight uses may be handed out only if it is copied to the host after that step.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from engine_core.configs import CacheConfig, KVCacheSpec, SamplingParams, SchedulerConfig
from engine_core.errors import ErrorCode
from engine_core.inputs import MediaItem, ProcessedPrompt
from engine_core.scheduler import Scheduler, Sequence, SequenceStatus
from engine_core.steps import (
    Admission,
    Logprob,
    MediaWork,
    PlanRows,
    RowError,
    RowResult,
    StepPlan,
    StepResult,
    TokenRows,
)

VOCAB = 11
EOS = 0
NAN = "nan"
NOT_FINITE = RowError(ErrorCode.NOT_FINITE, "logits are NaN")


class ContractError(AssertionError):
    """The scheduler broke its contract with the runner."""


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise ContractError(message)


def value_at(
    prompt: ProcessedPrompt,
    tokens: abc.Sequence[int],
    position: int,
    seen: abc.Sequence[abc.Sequence[int]],
) -> int:
    """The value a model would keep at a position, given what each group sees before it."""
    span = next(((s, e) for s, e in prompt.atomic_spans if s <= position < e), None)
    around = None if span is None else (span, *tokens[span[0] : span[1]])
    shown = shown_at(prompt, position)
    salts = sum(ord(char) for salt in prompt.cache_salts for char in str(salt))
    view = tuple(hash(tuple(values)) for values in seen)
    own = tokens[position] if shown is None else (shown[0].digest, position - shown[0].span[0])
    return hash((salts, own, hash(around) if around else 0, position, view))


def shown_at(prompt: ProcessedPrompt, position: int) -> tuple[MediaItem, int] | None:
    """The item whose embedding a position takes, and its index."""
    for index, item in enumerate(prompt.media):
        if item.span[0] <= position < item.span[1]:
            return item, index
    return None


def first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def extend_values(
    values: list[int],
    prompt: ProcessedPrompt,
    tokens: abc.Sequence[int],
    windows: abc.Sequence[int | None],
) -> None:
    """The values of all positions, without blocks, rows or steps."""
    for position in range(len(values), len(tokens)):
        seen = [values[first_seen(position, window) : position] for window in windows]
        values.append(value_at(prompt, tokens, position, seen))


def next_token(value: int) -> int:
    return value % VOCAB


def ends(token: int, num_outputs: int, sampling: SamplingParams) -> bool:
    is_eos = token == EOS and not sampling.ignore_eos
    return num_outputs >= sampling.min_tokens and (is_eos or token in sampling.stop_token_ids)


def media_name(row: DeviceRow, item: MediaItem) -> object:
    """Whose embeddings an item may have: nobody's of other salts."""
    return item.digest, row.prompt.cache_salts


@dataclass(eq=False)
class DeviceRow:
    """The device's state of one admission."""

    sequence_id: str
    prompt: ProcessedPrompt
    sampling: SamplingParams
    prompt_len: int
    tokens: list[int]
    tables: list[list[int]]
    values: list[int] = field(default_factory=list)
    computed: int | None = None
    alive: bool = True


class FakeRunner:
    """Runs plans for ``config`` and ``cache``; ``fail_at`` gives NaN at a request's n-th token."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        stops_on_device: bool = True,
        fail_at: Mapping[str, int] | None = None,
    ) -> None:
        self.config = config
        self.block_sizes = [group.block_size for group in cache.groups]
        self.windows: list[int | None] = []
        for group in cache.groups:
            assert isinstance(group.spec, KVCacheSpec)
            self.windows.append(group.spec.window)
        self.num_blocks = cache.num_blocks
        self.stops_on_device = stops_on_device
        self.fail_at = dict(fail_at or {})
        self.rows: dict[int, DeviceRow] = {}
        # Blocks are of one pool: by block and offset, whatever group they hold.
        self.memory: dict[tuple[int, int], int | str] = {}
        self.host: dict[tuple[int, int], int | str | None] = {}
        self.writer: dict[int, tuple[int, DeviceRow]] = {}
        self.claims: dict[int, list[tuple[int, int, DeviceRow]]] = {}
        self.saved: dict[int, int] = {}
        # Embeddings by slot: whose they are, and how many; and how many of them are computed.
        self.media: dict[int, tuple[tuple[object, int], int]] = {}
        self.shown: dict[int, list[tuple[MediaWork, DeviceRow]]] = {}
        self.num_encoded = 0
        self.num_parts = 0
        self.media_parts: dict[tuple[str, int], int] = {}  # that it says to have
        self.flight: deque[tuple[StepPlan, list[DeviceRow]]] = deque()
        self.last_step = -1
        self.max_repeat_seen = 0
        self.num_tokens_run = 0

    def submit(self, plan: StepPlan) -> None:
        expect(plan.step_id == self.last_step + 1, f"step {plan.step_id} after {self.last_step}")
        self.last_step = plan.step_id
        self.max_repeat_seen = max(self.max_repeat_seen, plan.repeat)
        expect(len(plan.rows) > 0, "empty plan")
        chunked = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        expect(chunked <= self.config.max_num_batched_tokens, "too many tokens in a step")
        expect(len(plan.rows) <= self.config.max_num_seqs, "too many rows in a step")
        expect(1 <= plan.repeat <= self.config.max_repeat, f"repeat {plan.repeat}")
        lone = [row.num_tokens == 1 for row in plan.rows]
        expect(lone == sorted(lone, reverse=True), "decode rows do not come first")
        expect(plan.repeat == 1 or (all(lone) and not plan.admitted), "repeated prefill")
        for block, slot in plan.swap_out:
            expect(0 < block < self.num_blocks, f"block {block} is swapped")
            expect(0 <= slot < self.config.num_swap_blocks, f"no slot {slot}")
            self.saved[block] = plan.step_id
        restored = {block for block, _ in plan.swap_in}
        self.claims[plan.step_id] = []
        for admission in plan.admitted:
            self._admit(admission)
        in_step = []
        for row in plan.rows:
            device_row = self.rows[row.row]
            expect(device_row.sequence_id == row.sequence_id, f"row {row.row} is not its own")
            expect(device_row not in in_step, f"row {row.row} twice in a step")
            expect(plan.repeat == 1 or row.sample, "a repeated row does not sample")
            in_step.append(device_row)
            if device_row.computed is None:
                device_row.computed = row.start  # what is before comes from the prefix cache
            for group, blocks in enumerate(row.new_blocks):
                for block in blocks:
                    fresh = self._append(device_row, group, block, row.start)
                    if fresh or block in restored:
                        self._claim(plan, device_row, group, block)
                capacity = len(device_row.tables[group]) * self.block_sizes[group]
                needed = row.start + row.num_tokens - 1 + plan.repeat
                expect(needed <= capacity, f"{needed} positions, blocks for {capacity}")
        self.shown[plan.step_id] = [(work, self.rows[work.row]) for work in plan.media_work]
        self.flight.append((plan, in_step))

    def result(self) -> StepResult:
        """Run the oldest step in flight."""
        plan, rows = self.flight.popleft()
        self._copy_and_claim(plan)
        used = self._show(plan, rows)
        self.num_tokens_run += plan.num_tokens * plan.repeat
        tokens: list[list[int]] = [[] for _ in rows]
        prompt_logprobs: list[list[dict[int, Logprob]]] = [[] for _ in rows]
        errors: list[RowError | None] = [None] * len(rows)
        for run in range(plan.repeat):
            for i, (row, plan_row) in enumerate(zip(rows, plan.rows, strict=True)):
                if not row.alive:
                    continue
                start = plan_row.start + run
                expect(start == row.computed, f"start {start}, the row is at {row.computed}")
                end = start + plan_row.num_tokens
                expect(end <= len(row.tokens), f"computes {end} of {len(row.tokens)} tokens")
                sampled = end == len(row.tokens)
                expect(plan_row.sample == sampled, f"sample is {plan_row.sample} at {end}")
                for span_start, span_end in row.prompt.atomic_spans:
                    expect(
                        end <= span_start
                        or start >= span_end
                        or (start <= span_start and span_end <= end),
                        f"chunk {start}..{end} splits the span {span_start}..{span_end}",
                    )
                broken = self.fail_at.get(row.sequence_id, 10**9) < end
                last = 0
                for position in range(start, end):
                    shown = shown_at(row.prompt, position)
                    expect(
                        shown is None or used.get((i, shown[1])) == media_name(row, shown[0]),
                        f"{row.sequence_id} at {position} lacks the embeddings of its item",
                    )
                    last = self._compute(row, position)
                    if position + 1 < row.prompt_len and row.sampling.prompt_logprobs is not None:
                        entry = {row.tokens[position + 1]: Logprob(-float(position), 1)}
                        prompt_logprobs[i].append(entry)
                row.computed = end
                if broken:
                    for position in range(start, end):
                        self._spoil(row, position)
                    errors[i] = NOT_FINITE
                    row.alive = False
                elif plan_row.sample:
                    self._sample(row, next_token(last))
                    tokens[i].append(next_token(last))
        results = tuple(
            RowResult(
                row.sequence_id,
                tuple(tokens[i]),
                logprobs=None
                if row.sampling.logprobs is None
                else tuple({token: Logprob(-1.0, 1)} for token in tokens[i]),
                prompt_logprobs=tuple(prompt_logprobs[i])
                if row.sampling.prompt_logprobs is not None
                else None,
                error=errors[i],
            )
            for i, row in enumerate(rows)
        )
        given = self._as_columns(plan, results) or results
        return StepResult(plan.step_id, given, media_parts=self.media_parts)

    def _as_columns(
        self, plan: StepPlan, results: abc.Sequence[RowResult]
    ) -> abc.Sequence[RowResult] | None:
        """The results as a runner gives those that are a token each; None if others are there."""
        plain = isinstance(plan.rows, PlanRows) and plan.repeat == 1
        if not plain or any(result[2:] != (None, None, None) for result in results):
            return None
        places, given = [], []
        for row, result in zip(plan.rows, results, strict=True):
            places.append(len(given))
            if row.sample:
                # What a row chooses after its end means nothing.
                given.append(result.token_ids[0] if result.token_ids else EOS)
        return TokenRows(plan.rows, np.array(given, dtype=np.int64), places)

    def _show(self, plan: StepPlan, rows: abc.Sequence[DeviceRow]) -> dict[tuple[int, int], object]:
        """Drop and compute a plan's embeddings; gives whose are used, by row and item."""
        for slot in plan.freed_media:
            expect(slot in self.media, f"slot {slot} is freed and is not there")
            del self.media[slot]
        for work, row in self.shown.pop(plan.step_id):
            item = row.prompt.media[work.item]
            of, done = self.media.get(work.slot, ((media_name(row, item), item.num_embeddings), 0))
            expect(of == (media_name(row, item), item.num_embeddings), f"slot {work.slot} is taken")
            expect(done == work.begin < work.end <= of[1], f"{work} after {done} embeddings")
            self.media[work.slot] = of, work.end
            self.num_encoded += work.begin == 0
            self.num_parts += 1
        kept = sum(size for (_, size), _ in self.media.values())
        expect(kept <= self.config.encoder_cache_tokens, f"{kept} embeddings are kept")
        used = {}
        for use in plan.media:
            expect(use.slot in self.media, f"slot {use.slot} is used and is not there")
            (name, size), done = self.media[use.slot]
            expect(done == size, f"slot {use.slot} is used with {done} of {size} embeddings")
            used[use.place, use.item] = name
        return used

    def _admit(self, admission: Admission) -> None:
        expect(0 <= admission.row < self.config.max_num_seqs, f"no row {admission.row}")
        for plan, _ in self.flight:
            expect(
                all(row.row != admission.row for row in plan.rows),
                f"row {admission.row} is given away with step {plan.step_id} in flight",
            )
            expect(
                all(row.sequence_id != admission.sequence_id for row in plan.rows),
                f"{admission.sequence_id} is admitted with step {plan.step_id} in flight",
            )
        self.rows[admission.row] = DeviceRow(
            admission.sequence_id,
            admission.prompt,
            admission.sampling,
            admission.prompt_len,
            list(admission.token_ids),
            [[] for _ in self.windows],
        )

    def _append(self, row: DeviceRow, group: int, block: int, start: int) -> bool:
        """Add a block to a table; whether nothing before ``start`` lies in it."""
        table = row.tables[group]
        block_size = self.block_sizes[group]
        begin = len(table) * block_size
        table.append(block)
        expect(0 <= block < self.num_blocks, f"no block {block}")
        if block == 0:
            unseen = begin + block_size <= first_seen(start, self.windows[group])
            expect(unseen, f"null block for positions from {begin}, first query {start}")
        return block != 0 and begin >= start

    def _claim(self, plan: StepPlan, row: DeviceRow, group: int, block: int) -> None:
        """A row begins to write a block: no step in flight may use it without a copy after it."""
        for earlier, others in self.flight:
            if self.saved.get(block, -1) > earlier.step_id:
                continue
            for other, used in zip(others, earlier.rows, strict=True):
                end = used.start + used.num_tokens - 2 + earlier.repeat
                for index, (window, size) in enumerate(
                    zip(self.windows, self.block_sizes, strict=True)
                ):
                    first = first_seen(used.start, window) // size
                    expect(
                        block not in other.tables[index][first : end // size + 1],
                        f"{row.sequence_id} gets block {block} for group {group}, which step "
                        f"{earlier.step_id} in flight uses for group {index} of "
                        f"{other.sequence_id}",
                    )
        self.claims[plan.step_id].append((group, block, row))

    def _copy_and_claim(self, plan: StepPlan) -> None:
        """Apply a plan's changes of memory before its rows run."""
        offsets = range(max(self.block_sizes))
        for block, slot in plan.swap_out:
            for offset in offsets:
                self.host[slot, offset] = self.memory.get((block, offset))
        for group, block, row in self.claims.pop(plan.step_id):
            self.writer[block] = (group, row)
            for offset in offsets:
                self.memory.pop((block, offset), None)
        for block, slot in plan.swap_in:
            for offset in offsets:
                value = self.host.get((slot, offset))
                if value is not None:
                    self.memory[block, offset] = value

    def _compute(self, row: DeviceRow, position: int) -> int:
        extend_values(row.values, row.prompt, row.tokens, self.windows)
        seen = []
        for group, (window, size) in enumerate(zip(self.windows, self.block_sizes, strict=True)):
            values = []
            for other in range(first_seen(position, window), position):
                block = row.tables[group][other // size]
                value = self.memory.get((block, other % size))
                expect(
                    value == row.values[other] + group,
                    f"{row.sequence_id} at {position} reads position {other} in block {block} of "
                    f"group {group} and finds {value}, not its own {row.values[other] + group}",
                )
                values.append(row.values[other])
            seen.append(values)
        value = value_at(row.prompt, row.tokens, position, seen)
        for group, size in enumerate(self.block_sizes):
            block = row.tables[group][position // size]
            owner = self.writer.get(block)
            expect(
                owner == (group, row),
                f"{row.sequence_id} writes position {position} into block {block} of group {group}"
                f", which belongs to {owner and (owner[0], owner[1].sequence_id)}",
            )
            # What a group keeps is its own: no other group's block can stand in for it.
            self.memory[block, position % size] = value + group
        return value

    def _spoil(self, row: DeviceRow, position: int) -> None:
        for table, size in zip(row.tables, self.block_sizes, strict=True):
            self.memory[table[position // size], position % size] = NAN

    def _sample(self, row: DeviceRow, token: int) -> None:
        row.tokens.append(token)
        num_outputs = len(row.tokens) - row.prompt_len
        limit = row.sampling.max_tokens or self.config.max_model_len
        expect(num_outputs <= limit, f"{num_outputs} tokens, max_tokens {limit}")
        expect(len(row.tokens) <= self.config.max_model_len, "past max_model_len")
        if self.stops_on_device and ends(token, num_outputs, row.sampling):
            row.alive = False


@dataclass(frozen=True)
class Job:
    """A request of a workload, and what happens to it.

    ``arrival`` and ``abort_at`` count turns of the loop; ``cut_at`` is the number of output tokens
    after which the host finds a stop string.
    """

    prompt: ProcessedPrompt
    sampling: SamplingParams
    arrival: int = 0
    abort_at: int | None = None
    cut_at: int | None = None
    fail_at: int | None = None
    priority: int = 0
    patient: bool = False


@dataclass
class Outcome:
    """A job's result, as its user sees it."""

    request: Sequence
    tokens: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    prompt_logprobs: list[tuple[object, ...]] = field(default_factory=list)
    num_finished: int = 0


def reference(
    job: Job, windows: abc.Sequence[int | None], max_model_len: int
) -> tuple[list[int], str, int | None]:
    """Output tokens, finish reason and stop reason of a job that runs alone, without a cache."""
    tokens = list(job.prompt.token_ids)
    values: list[int] = []
    while True:
        extend_values(values, job.prompt, tokens, windows)
        token = next_token(values[-1])
        tokens.append(token)
        outputs = tokens[len(job.prompt.token_ids) :]
        if ends(token, len(outputs), job.sampling):
            is_eos = token == EOS and not job.sampling.ignore_eos
            return outputs, "stop", None if is_eos else token
        if len(outputs) == job.sampling.max_tokens or len(tokens) == max_model_len:
            return outputs, "length", None


@dataclass
class Workload:
    """Jobs run to their end through a scheduler and the fake runner.

    ``depths`` are the steps that may be in flight after each turn of the loop, ``budgets`` the
    scheduler's for prompts and for a backlog of them, and ``checks`` whether its invariants are
    verified, which brings what is in lockstep up to date; all begin anew at their end.
    """

    scheduler: Scheduler
    runner: FakeRunner
    jobs: abc.Sequence[Job]
    depths: abc.Sequence[int]
    budgets: abc.Sequence[tuple[int, int] | None] = (None,)
    checks: abc.Sequence[bool] = (True,)
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self) -> list[Outcome]:
        max_model_len = self.scheduler.config.max_model_len
        for number, job in enumerate(self.jobs):
            request = Sequence(
                f"r{number}",
                job.prompt,
                job.sampling,
                eos_token_ids=(EOS,),
                arrival_time=float(job.arrival),
                max_model_len=max_model_len,
                priority=job.priority,
                patient=job.patient,
            )
            self.outcomes.append(Outcome(request))
            if job.fail_at is not None:
                self.runner.fail_at[request.sequence_id] = job.fail_at
        self.added: list[int] = []
        turn = 0
        # Each turn runs a step of at least one token, or fetches one. All tokens of all jobs,
        # computed again for each preemption by an older one, are far fewer turns than this.
        most = 50 + 40 * (1 + len(self.jobs)) * max_model_len
        last_arrival = max(job.arrival for job in self.jobs)
        while turn <= last_arrival or self.scheduler.has_unfinished() or self.runner.flight:
            self.checked = self.checks[turn % len(self.checks)]
            self._events(turn)
            self.budget = budgets = self.budgets[turn % len(self.budgets)]
            self.scheduler.prompt_budget = budgets and (
                lambda rows, tokens, cached, of=budgets: of[tokens > 2 * of[0]]
            )
            self.held = [each.request for each in self.outcomes if each.request.media_slots]
            plan = self.scheduler.schedule()
            self._check()
            self._check_first(plan)
            if plan is not None:
                self._check_order(plan)
                self.runner.submit(plan)
            elif not self.runner.flight:
                expect(not self.scheduler.has_unfinished(), "deadlock")
            depth = self.depths[turn % len(self.depths)]
            if plan is None and self.runner.flight:
                self._fetch()
            while len(self.runner.flight) > depth:
                self._fetch()
            turn += 1
            expect(turn < most, f"no end after {turn} turns")
        num_used = self.scheduler.pool.num_used
        expect(num_used == 0, f"{num_used} blocks leaked")
        self.scheduler.check()
        return self.outcomes

    def _events(self, turn: int) -> None:
        for number, job in enumerate(self.jobs):
            if job.arrival == turn:
                self.scheduler.add(self.outcomes[number].request)
                self.added.append(number)
            if job.abort_at == turn:
                self.scheduler.abort(f"r{number}")
                self._check()

    def _check(self) -> None:
        if self.checked:
            self.scheduler.check()

    def _check_first(self, plan: StepPlan | None) -> None:
        """The first of the unfinished requests goes on, if nothing in flight is waited for.

        With patience it begins to decode when prompts no longer fill the steps.
        Only for the room of its items does it wait, as long as others hold theirs: of them and of
        those before them somebody goes on.
        """
        unfinished = [
            self.outcomes[number].request
            for number in self.added
            if not self.outcomes[number].request.finished
        ]
        if self.runner.flight or not unfinished:
            return
        unfinished.sort(key=lambda request: (request.priority, request.order))
        first = unfinished[0]
        begins = first.num_scheduled == first.prompt_len == first.admitted_len
        if first.patient and begins and plan is not None:
            least = min((self.scheduler.config.max_num_batched_tokens, *(self.budget or ())))
            patient = {each.sequence_id for each in unfinished if each.patient}
            chunks = [row for row in plan.rows if row.num_tokens > 1]
            tokens = sum(row.num_tokens for row in chunks if row.sequence_id in patient)
            if sum(row.num_tokens for row in plan.rows) >= least and tokens > 0:
                return
        until = 1
        if any(item.span[1] > first.num_computed for item in first.prompt.media):
            holders = [place for place, request in enumerate(unfinished) if request in self.held]
            until = max(holders, default=0) + 1
        planned = [] if plan is None else [row.sequence_id for row in plan.rows]
        shown = [] if plan is None else [work.row for work in plan.media_work]
        goes_on = any(
            request.sequence_id in planned or request.row in shown for request in unfinished[:until]
        )
        expect(goes_on, f"{first} is first and does not go on")

    def _check_order(self, plan: StepPlan) -> None:
        """Nobody is admitted before someone of the same or a more important priority who waits."""
        for admission in plan.admitted:
            number = int(admission.sequence_id[1:])
            own = (self.jobs[number].priority, self.added.index(number))
            for place, other in enumerate(self.added):
                if (self.jobs[other].priority, place) < own:
                    status = self.outcomes[other].request.status
                    expect(status is not SequenceStatus.WAITING, f"r{number} overtakes r{other}")

    def _fetch(self) -> None:
        updates = self.scheduler.update(self.runner.result())
        self._check()
        for update in updates:
            number = int(update.sequence_id[1:])
            outcome = self.outcomes[number]
            expect(outcome.num_finished == 0, f"r{number} goes on after its end")
            outcome.tokens.extend(update.new_token_ids)
            outcome.logprobs.extend(update.logprobs or ())
            if update.prompt_logprobs is not None:
                outcome.prompt_logprobs.append(update.prompt_logprobs)
            outcome.num_finished += update.finished
            cut_at = self.jobs[number].cut_at
            if cut_at is not None and len(outcome.tokens) >= cut_at and not update.finished:
                self.scheduler.finish(update.sequence_id, "stop", "stop string")
                self._check()

    def verify(self) -> None:
        """Compare every job with what it gives alone."""
        max_model_len = self.scheduler.config.max_model_len
        for job, outcome in zip(self.jobs, self.outcomes, strict=True):
            request = outcome.request
            tokens, reason, stop_reason = reference(job, self.runner.windows, max_model_len)
            if job.sampling.prompt_logprobs is not None:
                whole = tuple(
                    {token: Logprob(-float(position), 1)}
                    for position, token in enumerate(job.prompt.token_ids[1:])
                )
                reported = [whole] if outcome.tokens else outcome.prompt_logprobs[:1]
                assert outcome.prompt_logprobs == reported
                assert all(found == whole for found in outcome.prompt_logprobs)
            else:
                assert outcome.prompt_logprobs == []
            if job.sampling.logprobs is not None:
                assert outcome.logprobs == [{token: Logprob(-1.0, 1)} for token in outcome.tokens]
            assert outcome.tokens == request.output_token_ids
            if request.finish_reason == "abort":
                assert job.abort_at is not None
                assert outcome.tokens == tokens[: len(outcome.tokens)]
            elif request.stop_reason == "stop string":
                assert job.cut_at is not None
                assert len(outcome.tokens) == job.cut_at
                assert outcome.tokens == tokens[: job.cut_at]
            elif request.finish_reason == "error":
                assert job.fail_at is not None
                assert request.error == NOT_FINITE
                assert outcome.num_finished == 1
                assert outcome.tokens == tokens[: len(outcome.tokens)]
            else:
                assert outcome.tokens == tokens
                assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
                assert outcome.num_finished == 1
            assert request.finished
