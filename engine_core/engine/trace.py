"""A trace of steps and requests, written in a form that Perfetto and chrome://tracing open.

Two parts record, each in its own process: :class:`EngineTrace` in the step loop, and
:class:`FrontendTrace` where requests come in and text goes out. :func:`write_trace` joins them. All
times are seconds of ``time.monotonic``, which Linux has in common for all processes. The events and
their arguments are described in docs/trace.md.
"""

from __future__ import annotations

import json
import time
from collections import abc, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core import own_process
from engine_core.errors import ConfigError
from engine_core.scheduler import Sequence
from engine_core.steps import PlanRow, RequestOutput, StepPlan, TokenUpdate

if TYPE_CHECKING:
    from engine_core.runtime.runner import PendingStep

# Records kept of each kind; the oldest are dropped first. 200,000 small steps take minutes.
_MOST_STEPS = 200_000
_MOST_OUTPUTS = 1_000_000


@dataclass(slots=True)
class StepRecord:
    """One step. Times follow each other in the order of the fields.

    Attributes:
        plan_id: ``StepPlan.step_id``.
        kind: "decode", "prefill" or "mixed".
        way: "graph", "recorded" or "eager".
        repeat: runs of the plan.
        decode_rows: rows that compute one token after their prompt.
        prompts: sequence, first position and number of tokens of each part of a prompt.
        padded_tokens: tokens of one run, padding included.
        media: embeddings that it computed: from where on, up to which one, of how many of an item.
        admitted: sequences that got their row with it.
        in_flight: steps in flight once it was submitted.
        running: sequences with a row then.
        waiting: sequences without one then.
        begun: when its planning began.
        planned: when its plan was made.
        submitted: when the device had been given it.
        asked: when its result was asked for.
        done: when its result was there.
        applied: when the scheduler had taken the result in.
        sent: when the outputs were handed on.
        early: whether it was done before it was asked for, at a time that is not known.
        generated: tokens accepted of it.
        encoded: seconds that its embeddings took on the device.
    """

    plan_id: int
    kind: str
    way: str
    repeat: int
    decode_rows: int
    prompts: tuple[tuple[str, int, int], ...]
    padded_tokens: int
    media: tuple[tuple[int, int, int], ...]
    admitted: tuple[str, ...]
    in_flight: int
    running: int
    waiting: int
    begun: float
    planned: float
    submitted: float
    asked: float = 0.0
    done: float = 0.0
    applied: float = 0.0
    sent: float = 0.0
    early: bool = False
    generated: int = 0
    encoded: float = 0.0


@dataclass(slots=True)
class SequenceRecord:
    """One sequence in the engine.

    Attributes:
        sequence_id: its id.
        prompt_tokens: tokens of its prompt.
        arrival: when its request arrived.
        added: when the engine took it.
        admitted: when it was first planned, and in which step.
        first: when its first token was there, and of which step.
        finished: when it ended, and why.
        generated: tokens accepted; this and what follows is None until it ends.
        cached_tokens: prompt tokens found in the prefix cache.
        preemptions: how often it lost its blocks.
    """

    sequence_id: str
    prompt_tokens: int
    arrival: float
    added: float
    admitted: tuple[float, int] | None = None
    first: tuple[float, int] | None = None
    finished: tuple[float, str] | None = None
    generated: int | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None


class EngineTrace:
    """Records of the step loop; the oldest are dropped once there are too many.

    Attributes:
        steps: those whose results are in, in their order.
        ended: the sequences that ended.
        open: those that have not, by id.
        commands: begin and end of the time in which commands were taken in, and their number.
        dropped: steps that were dropped.
    """

    def __init__(self) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=_MOST_STEPS)
        self.ended: deque[SequenceRecord] = deque(maxlen=_MOST_STEPS)
        self.open: dict[str, SequenceRecord] = {}
        self.commands: deque[tuple[float, float, int]] = deque(maxlen=_MOST_STEPS)
        self.dropped = 0
        self._flight: dict[int, StepRecord] = {}
        self._unsent: StepRecord | None = None

    def added(self, sequence: Sequence, now: float) -> None:
        """Take note of a sequence that the engine took."""
        name = sequence.sequence_id
        record = SequenceRecord(name, sequence.prompt_len, sequence.arrival_time, now)
        self.open[name] = record

    def took(self, commands: int, begin: float) -> None:
        """Take note of commands that were read from ``begin`` on, and followed."""
        self.commands.append((begin, time.monotonic(), commands))

    def submitted(
        self,
        plan: StepPlan,
        pending: PendingStep,
        prompts: abc.Sequence[PlanRow],
        times: tuple[float, float, float],
        load: tuple[int, int, int],
    ) -> None:
        """Take note of a step that the device was given.

        Args:
            plan: what it computes.
            pending: says how it runs.
            prompts: those of its rows that compute tokens of prompts.
            times: when its planning began, when it was planned, and when it was submitted.
            load: steps in flight, sequences that run, and that wait.
        """
        admitted = tuple(admission.sequence_id for admission in plan.admitted)
        self._flight[plan.step_id] = StepRecord(
            plan.step_id,
            plan.kind,
            pending.way,
            plan.repeat,
            len(plan.rows) - len(prompts),
            tuple((row.sequence_id, row.start, row.num_tokens) for row in prompts),
            pending.num_tokens,
            tuple((work.begin, work.end, work.size) for work in plan.media_work),
            admitted,
            *load,
            *times,
        )
        for sequence_id in admitted:
            record = self.open.get(sequence_id)
            if record is not None and record.admitted is None:
                record.admitted = (times[1], plan.step_id)

    def done(
        self,
        plan: StepPlan,
        pending: PendingStep,
        times: tuple[float, float, float],
        generated: int,
        *,
        early: bool,
        encoded: float,
    ) -> None:
        """Take note of a step whose result was taken in.

        Args:
            plan: the step's.
            pending: says how it was run, as ranks in other processes tell with their results.
            times: when its result was asked for, was there, and was taken in.
            generated: tokens accepted of it.
            early: whether the device was done before it was asked for.
            encoded: seconds that its pictures, videos and sounds took on the device.
        """
        record = self._flight.pop(plan.step_id, None)
        if record is None:  # submitted before there was a trace
            return
        record.way, record.padded_tokens = pending.way, pending.num_tokens
        record.asked, record.done, record.applied = times
        record.sent = record.applied
        record.early, record.generated, record.encoded = early, generated, encoded
        self.dropped += len(self.steps) == self.steps.maxlen
        self.steps.append(record)
        self._unsent = record
        _spare_collections(len(self.steps))

    def sent(self) -> None:
        """Take note that the outputs of the last step were handed on."""
        if self._unsent is not None:
            self._unsent.sent = time.monotonic()
            self._unsent = None

    def first(self, sequence_id: str, now: float, plan_id: int) -> None:
        """Take note of a sequence's first token, and of the step that gave it."""
        record = self.open.get(sequence_id)
        if record is not None:
            record.first = (now, plan_id)

    def finished(self, sequence: Sequence, reason: str, now: float) -> None:
        """Take note of the end of a sequence."""
        record = self.open.pop(sequence.sequence_id, None)
        if record is not None:
            record.finished = (now, reason)
            record.generated = sequence.num_output_tokens
            record.cached_tokens = sequence.num_cached_tokens
            record.preemptions = sequence.num_preemptions
            self.ended.append(record)


@dataclass(slots=True)
class RequestRecord:
    """One request where it came in.

    Attributes:
        request_id: its id.
        sequence_ids: those of its sequences in the engine.
        arrival: when it arrived.
        tokenized: when its prompt was known in tokens.
        queued: when it was sent to the engine.
    """

    request_id: str
    sequence_ids: tuple[str, ...]
    arrival: float
    tokenized: float
    queued: float


@dataclass(slots=True)
class UpdatesRecord:
    """One message of the engine.

    Attributes:
        plan_id: the last step whose results are in it.
        sequences: sequences that have something new.
        tokens: their new tokens.
        received: when it was received.
        applied: when its tokens were text.
    """

    plan_id: int
    sequences: int
    tokens: int
    received: float
    applied: float


@dataclass(slots=True)
class OutputRecord:
    """One output of a request that its reader took: an event of a stream.

    Attributes:
        request_id: the request's.
        plan_id: the last step that was received then.
        tokens: new tokens.
        taken: when it was taken.
        written: when its reader asked for more, having written it; None if it has not.
    """

    request_id: str
    plan_id: int
    tokens: int
    taken: float
    written: float | None = None


class FrontendTrace:
    """Records of a process that takes requests; the oldest are dropped.

    Attributes:
        name: of the process.
        requests: those that were sent to the engine.
        updates: the engine's messages.
        outputs: what readers took.
    """

    def __init__(self, name: str = "server") -> None:
        self.name = name
        self.requests: deque[RequestRecord] = deque(maxlen=_MOST_STEPS)
        self.updates: deque[UpdatesRecord] = deque(maxlen=_MOST_STEPS)
        self.outputs: deque[OutputRecord] = deque(maxlen=_MOST_OUTPUTS)

    def received(
        self, updates: abc.Sequence[TokenUpdate], columns: int, plan_id: int, received: float
    ) -> None:
        """Take note of a message whose updates, and ``columns`` of one token, were applied."""
        tokens = columns + sum(len(update.new_token_ids) for update in updates)
        now = time.monotonic()
        sequences = columns + len(updates)
        self.updates.append(UpdatesRecord(plan_id, sequences, tokens, received, now))

    def taken(self, output: RequestOutput, plan_id: int) -> OutputRecord:
        """Take note of an output that its reader takes; the caller sets ``written`` later."""
        tokens = sum(len(completion.token_ids) for completion in output.outputs)
        record = OutputRecord(output.request_id, plan_id, tokens, time.monotonic())
        self.outputs.append(record)
        _spare_collections(len(self.outputs))
        return record


def _spare_collections(records: int) -> None:
    """Hide the records, every 10,000 of them, from the garbage collector.

    With a million its pauses, which the trace would show, take a third of a second.
    """
    if records % 10_000 == 0:
        own_process.freeze()


def check_trace_file(path: Path) -> None:
    """Make an empty file, so that a wrong path is found before the work.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_bytes(b"")
    except OSError as error:
        raise ConfigError(f"trace: {path} cannot be written: {error}; give another file") from None


def write_trace(
    path: Path,
    engine: EngineTrace | None,
    frontends: abc.Sequence[FrontendTrace] = (),
    *,
    seconds: float | None = None,
) -> None:
    """Write a trace as Chrome's trace-event JSON.

    Args:
        path: the file.
        engine: the step loop's part; None if its process has died.
        frontends: those of the processes that take requests.
        seconds: how many of the last seconds are wanted; None for all.

    Raises:
        OSError: it cannot be written.
    """
    events = list(_Writer(engine or EngineTrace(), frontends, seconds).events())
    begin = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = _micros(event["ts"] - begin)
    other = {
        "clock": "time.monotonic",
        "begin": begin,
        "dropped_steps": 0 if engine is None else engine.dropped,
    }
    with path.open("w", encoding="utf-8") as file:
        lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
        file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n')
        file.write(f"{lines}\n]}}\n")


_ENGINE, _REQUESTS, _FRONTEND = 1, 2, 3
_HOST, _DEVICE = 1, 2
# Fields of a step's record that its event on the device's track shows.
_SHOWN: tuple[str, ...] = (
    "way",
    "repeat",
    "decode_rows",
    "padded_tokens",
    "generated",
    "prompts",
    "media",
    "admitted",
)
_SHOWN += ("in_flight", "running", "waiting", "early")


class _Writer:
    """Makes events of records. Their ``ts`` are seconds until all are there."""

    def __init__(
        self, engine: EngineTrace, frontends: abc.Sequence[FrontendTrace], seconds: float | None
    ) -> None:
        last = max(
            (
                *(record.sent for record in [*engine.steps][-1:]),
                *(record.applied for each in frontends for record in [*each.updates][-1:]),
            ),
            default=0.0,
        )
        self._start = float("-inf") if seconds is None else last - seconds
        self._last = last
        self._frontends = frontends
        self._commands = [each for each in engine.commands if each[1] >= self._start]
        self._steps = [record for record in engine.steps if record.sent >= self._start]
        self._sequences = [
            record
            for record in chain(engine.ended, engine.open.values())
            if record.finished is None or record.finished[0] >= self._start
        ]

    def events(self) -> Iterator[dict[str, Any]]:
        yield _named("process_name", _ENGINE, "engine")
        yield _named("thread_name", _ENGINE, "host", _HOST)
        yield _named("thread_name", _ENGINE, "device", _DEVICE)
        yield _named("process_name", _REQUESTS, "requests")
        for begin, end, count in self._commands:
            yield _slice("commands", _ENGINE, _HOST, begin, end, {"commands": count})
        device_free = float("-inf")
        for record in self._steps:
            yield from self._step(record, device_free)
            device_free = record.done
        for pid, frontend in enumerate(self._frontends, _FRONTEND):
            yield _named("process_name", pid, frontend.name)
            yield _named("thread_name", pid, "event loop", _HOST)
            yield from self._frontend(pid, frontend)
        yield from self._requests()

    def _step(self, record: StepRecord, device_free: float) -> Iterator[dict[str, Any]]:
        number = {"step": record.plan_id}
        host = (
            ("plan", record.begun, record.planned),
            ("submit", record.planned, record.submitted),
            ("wait", record.asked, record.done),
            ("apply", record.done, record.applied),
            ("send", record.applied, record.sent),
        )
        for name, begin, end in host:
            yield _slice(name, _ENGINE, _HOST, begin, end, number)
        begin = max(record.planned, device_free)
        args: dict[str, Any] = {name: getattr(record, name) for name in _SHOWN}
        args["prompt_tokens"] = sum(count for _, _, count in record.prompts)
        args["encode_us"] = _micros(record.encoded)
        yield _slice(record.kind, _ENGINE, _DEVICE, begin, record.done, number | args)
        load = {"running": record.running, "waiting": record.waiting}
        yield _counter("sequences", record.planned, load)
        yield _counter("steps in flight", record.submitted, {"steps": record.in_flight})
        flow = ("step", record.plan_id, _ENGINE)
        last = "t" if self._frontends else "f"
        yield _arrow("s", *flow, _HOST, record.planned, record.submitted)
        yield _arrow("t", *flow, _DEVICE, begin, record.done)
        yield _arrow(last, *flow, _HOST, record.applied, record.sent)
        for sequence_id in record.admitted if self._frontends else ():
            yield _arrow("f", "queue", sequence_id, _ENGINE, _HOST, record.begun, record.planned)

    def _frontend(self, pid: int, frontend: FrontendTrace) -> Iterator[dict[str, Any]]:
        for record in frontend.updates:
            if record.applied < self._start:
                continue
            times = (record.received, record.applied)
            args = {"step": record.plan_id, "sequences": record.sequences, "tokens": record.tokens}
            yield _slice("updates", pid, _HOST, *times, args)
            if record.sequences:
                yield _arrow("f", "step", record.plan_id, pid, _HOST, *times)
        for request in frontend.requests:
            if request.queued < self._start:
                continue
            times = (request.tokenized, request.queued)
            yield _slice("queue", pid, _HOST, *times, {"request": request.request_id})
            for sequence_id in request.sequence_ids:
                yield _arrow("s", "queue", sequence_id, pid, _HOST, *times)

    def _requests(self) -> Iterator[dict[str, Any]]:
        """One track per request, or per sequence of a request with several."""
        requests = {r.request_id: r for each in self._frontends for r in each.requests}
        owners = {child: r for r in requests.values() for child in r.sequence_ids}
        outputs: dict[str, list[OutputRecord]] = {}
        for each in self._frontends:
            for output in each.outputs:
                if output.taken >= self._start:
                    outputs.setdefault(output.request_id, []).append(output)
        for record in self._sequences:
            request = owners.get(record.sequence_id)
            alone = request is not None and len(request.sequence_ids) == 1
            track = request.request_id if request is not None and alone else record.sequence_id
            events = outputs.pop(track, []) if alone else []
            yield from self._sequence(track, record, request, events)
        for request_id, rest in outputs.items():
            end = max(output.written or output.taken for output in rest)
            yield from _span(request_id, "request", rest[0].taken, end, {"request": request_id})
            yield from _instants(request_id, rest)

    def _sequence(
        self,
        track: str,
        record: SequenceRecord,
        request: RequestRecord | None,
        events: abc.Sequence[OutputRecord],
    ) -> Iterator[dict[str, Any]]:
        finished, reason = record.finished or (self._last, None)
        admitted = (finished, None) if record.admitted is None else record.admitted
        first = (finished, None) if record.first is None else record.first
        written = [event.written or event.taken for event in events]
        args = {
            "request": track if request is None else request.request_id,
            "sequence": record.sequence_id,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "generated": record.generated,
            "preemptions": record.preemptions,
            "admitted_step": admitted[1],
            "first_token_step": first[1],
            "finish_reason": reason,
        }
        phases = [
            ("arrive", record.arrival, record.added),
            ("queued", record.added, admitted[0]),
            ("prefill", admitted[0], first[0]),
            ("decode", first[0], finished),
        ]
        if request is not None:
            phases[:1] = [
                ("tokenize", request.arrival, request.tokenized),
                ("to engine", request.tokenized, record.added),
            ]
        end = max(finished, *written, record.arrival)
        yield _async("b", track, "request", record.arrival, args)
        for name, since, until in phases:
            yield from _span(track, name, since, until, {})
        yield from _instants(track, events)
        yield _async("e", track, "request", end, {})


def _instants(track: str, events: abc.Sequence[OutputRecord]) -> Iterator[dict[str, Any]]:
    for event in events:
        args: dict[str, Any] = {"tokens": event.tokens, "step": event.plan_id}
        if event.written is not None:
            args["write_us"] = _micros(event.written - event.taken)
        yield _async("n", track, "tokens", event.taken, args)


def _span(
    track: str, name: str, begin: float, end: float, args: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    yield _async("b", track, name, begin, args)
    yield _async("e", track, name, max(begin, end), {})


def _async(phase: str, track: str, name: str, at: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": phase,
        "cat": "request",
        "id": track,
        "name": name,
        "pid": _REQUESTS,
        "tid": 0,
        "ts": at,
        "args": args,
    }


def _slice(
    name: str, pid: int, tid: int, begin: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": begin,
        "dur": _micros(max(0.0, end - begin)),
        "args": args,
    }


def _arrow(
    phase: str, name: str, number: int | str, pid: int, tid: int, begin: float, end: float
) -> dict[str, Any]:
    """A point of an arrow, in the slice from ``begin`` to ``end``."""
    event: dict[str, Any] = {
        "ph": phase,
        "cat": name,
        "name": name,
        "id": f"{name} {number}",
        "pid": pid,
        "tid": tid,
        "ts": (begin + end) / 2,
    }
    if phase == "f":
        event["bp"] = "e"
    return event


def _counter(name: str, at: float, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": _ENGINE, "ts": at, "args": values}


def _named(what: str, pid: int, name: str, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


__all__ = ["EngineTrace", "FrontendTrace", "check_trace_file", "write_trace"]
