"""The step loop, on tokens alone."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import replace

from engine_core.engine.pacing import Pacing
from engine_core.engine.startup import Loaded
from engine_core.engine.step_stats import StepStats
from engine_core.engine.timings import Timings
from engine_core.engine.trace import EngineTrace
from engine_core.engine.trials import trials
from engine_core.errors import EngineDeadError, ErrorCode, RequestError
from engine_core.plugin_code import described
from engine_core.runtime.layer_trace import LayerTrace
from engine_core.runtime.runner import PendingStep
from engine_core.scheduler import Sequence, check_sequence
from engine_core.steps import (
    EngineStats,
    NewSequence,
    PlanRow,
    RowError,
    StepPlan,
    TokenUpdate,
    TokenUpdates,
)

CALLED_FROM_STEP = (
    "the engine was called from within its own step: logits processors and forward hooks have to "
    "leave the LLM, and the engine, that runs them alone"
)
# How long a core that has nothing else to do waits for a grammar before it looks for commands.
_PREPARING_SECONDS = 0.01


class EngineCore:
    """Scheduler, executor and the steps in flight between them, without text.

    It is not thread-safe: one thread owns it.

    Args:
        loaded: its parts.
        pacing: how far the host runs ahead of the device; as offline if None.
        beside: whether grammars are compiled while others' steps go on, as a server wants it; else
            :meth:`add` waits, so that equal runs have equal steps.

    Attributes:
        scheduler: decides what each step computes.
        executor: runs the steps.
        pacing: decides how far the host runs ahead of the device.
        step_stats: where the time of its steps went; put a new one here to begin anew.
        trace: records each step and sequence; None for no records.
    """

    def __init__(
        self, loaded: Loaded, pacing: Pacing | None = None, *, beside: bool = False
    ) -> None:
        self.scheduler = loaded.scheduler
        self.executor = loaded.executor
        self.pacing = pacing or Pacing(loaded.scheduler, loaded.depth)
        self.step_stats = StepStats()
        self.trace: EngineTrace | None = None
        self._eos_token_ids = loaded.eos_token_ids
        self._scheduler_config = loaded.scheduler_config
        self._max_model_len = loaded.cache_plan.max_model_len
        self._beside = beside
        self._sequences: dict[str, Sequence] = {}
        # Those whose grammar is being compiled; the scheduler does not know them yet.
        self._preparing: dict[str, Future[None]] = {}
        self._flight: deque[tuple[StepPlan, float, PendingStep]] = deque()
        self._dead: BaseException | None = None
        self._stepping: int | None = None  # the thread that is in a step
        self._aborted = 0
        self._added = 0
        self._steps = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._last_plan = -1
        self._timings = Timings()
        # When sequences that were never planned came, and when those without a token were planned.
        self._queued: dict[str, float] = {}
        self._prefilling: dict[str, float] = {}
        self._last_end = 0.0

    @property
    def has_unfinished(self) -> bool:
        """Whether a call of :meth:`step` can still bring something."""
        return bool(self._sequences) or bool(self._flight)

    @property
    def is_preparing(self) -> bool:
        """Whether a sequence waits for its grammar."""
        return bool(self._preparing)

    @property
    def num_in_flight(self) -> int:
        """Submitted steps that have not come back."""
        return len(self._flight)

    @property
    def num_steps(self) -> int:
        """Steps submitted since its start; one that is repeated counts as often."""
        return self._steps

    def stats(self) -> EngineStats:
        """Current load, and counts since its start."""
        scheduler = self.scheduler
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + len(self._preparing),
            kv_cache_usage=scheduler.kv_cache_usage,
            added=self._added,
            aborted=self._aborted,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            num_preemptions=scheduler.num_preemptions,
            encoder_cache_queries=scheduler.encoder_cache.queries,
            encoder_cache_hits=scheduler.encoder_cache.hits,
            last_plan=self._last_plan,
            timings=self._timings.encode(),
        )

    def add(self, new: NewSequence) -> None:
        """Queue a sequence.

        Raises:
            RequestError: it could never run; nothing of it is kept.
            EngineDeadError: the engine has stopped.
        """
        self.check_alive()
        self._added += 1
        for item in new.prompt.media:
            if (lost := getattr(item.features, "lost", None)) is not None:
                raise RequestError(f"{new.sequence_id}: its {item.kind} is not there: {lost}")
        sequence = Sequence(
            new.sequence_id,
            new.prompt,
            new.sampling,
            eos_token_ids=self._eos_token_ids,
            arrival_time=new.arrival_time,
            max_model_len=self._max_model_len,
            priority=new.priority,
            number=new.number,
            pooling=new.pooling,
            patient=new.patient,
        )
        if new.sampling.guided is not None:
            check_sequence(sequence, self._scheduler_config)
            prepared = self.executor.prepare(new.sampling.guided)
            if self._beside:
                self._preparing[new.sequence_id] = prepared
            else:
                self.wait_prepared(prepared)
                prepared.result()
        if new.sequence_id not in self._preparing:
            self.scheduler.add(sequence)
        self.pacing.arrived()
        self._sequences[new.sequence_id] = sequence
        self._queued[new.sequence_id] = now = time.monotonic()
        if self.trace is not None:
            self.trace.added(sequence, now)

    def wait_prepared(self, prepared: Future[None]) -> None:
        """Wait for what the executor prepares: ranks in other processes are heard only if asked."""
        while not prepared.done():
            wait([prepared], _PREPARING_SECONDS)
            self.executor.poll()

    def abort(self, sequence_id: str) -> None:
        """End a sequence; nothing more comes of it. Unknown ids are ignored."""
        self.scheduler.abort(sequence_id)
        if self._leave(sequence_id, "abort", time.monotonic()):
            self._aborted += 1

    def finish(self, sequence_id: str, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence whose text says that it is complete. Unknown ids are ignored."""
        self.scheduler.finish(sequence_id, reason, stop_reason)
        self._leave(sequence_id, reason, time.monotonic())

    @property
    def spare_seconds(self) -> float:
        """Seconds until :meth:`step` is to be called; 0 or less for at once.

        Until then the device is busy, and a sequence that is added is in the next step all the
        same.
        """
        if not self._flight:
            return 0.0
        plan, begin, pending = self._flight[-1]
        return 0.0 if pending.done is not False else self.pacing.spare(plan, begin)

    def step(self) -> TokenUpdates:
        """Submit a step if there is one, and take the results of the oldest in flight if due.

        Returns:
            One update per sequence with something new.

        Raises:
            EngineDeadError: the model failed; every request is lost.
        """
        self.check_alive()
        stats = self.step_stats
        self._stepping = threading.get_ident()
        try:
            begun = stats.begin()
            failed = self._take_prepared() if self._preparing else []
            plan = self.scheduler.schedule()
            asked = planned = stats.scheduled()
            if plan is not None:
                pending = self.executor.submit(plan)
                self._flight.append((plan, planned, pending))
                asked = stats.submitted(plan)
                self.pacing.submitted(asked - begun)
                self._steps += plan.repeat
                if plan.admitted:
                    self._count_admitted(plan, planned)
                if self.trace is not None:
                    self._trace_submitted(self.trace, plan, pending, (begun, planned, asked))
            if not self._flight or (plan is not None and len(self._flight) <= self.pacing.depth):
                return TokenUpdates(failed)
            done, planned, pending = self._flight.popleft()
            early = pending.done is True
            self.pacing.waiting(done, early=early)
            result = pending.result()
            self._timings.count(pending.way, done.repeat)
            self.pacing.finished(done, planned, early=early)
            ended = stats.waited(done)
            seconds = ended - max(planned, self._last_end)
            self._timings.observe(f"step_{done.kind}", seconds / done.repeat, done.repeat)
            if result.encode_seconds:
                self._timings.observe("encode", result.encode_seconds)
            self._last_end = ended
            updates = self.scheduler.update(result)
            if failed:
                updates = replace(updates, others=failed + updates.others)
            self._last_plan = done.step_id
            generated = self._count_updates(updates, ended)
            applied = stats.applied()
            if self.trace is not None:
                times, encoded = (asked, ended, applied), result.encode_seconds
                self.trace.done(done, pending, times, generated, early=early, encoded=encoded)
            return updates
        except Exception as error:
            raise self.fail(error) from error
        except BaseException as error:
            # What was scheduled may not have been submitted; nothing fits together any more.
            self.fail(RuntimeError(f"a step was interrupted by {type(error).__name__}"))
            raise
        finally:
            self._stepping = None

    def _take_prepared(self) -> list[TokenUpdate]:
        """Queue the sequences whose grammar is compiled; the ends of those where that failed."""
        if not self._flight and not self.scheduler.has_unfinished():
            wait(self._preparing.values(), _PREPARING_SECONDS, FIRST_COMPLETED)
        self.executor.poll()
        failed = []
        for sequence_id, future in list(self._preparing.items()):
            if not future.done():
                continue
            del self._preparing[sequence_id]
            error = future.exception()
            if error is None:
                self.scheduler.add(self._sequences[sequence_id])
                continue
            reason = RowError(ErrorCode.GUIDED, f"guided decoding failed: {error}")
            number = self._sequences[sequence_id].number
            failed.append(
                TokenUpdate(sequence_id, (), finish_reason="error", error=reason, number=number)
            )
            self._leave(sequence_id, "error", time.monotonic())
        return failed

    def capture_next(self, *, part: bool = False) -> bool:
        """Capture one more step that is likely to be needed; called when the engine is idle.

        On a GPU a step is replayed as a CUDA graph, which is captured when it is first needed if it
        was not before. ``part`` says to do half of it, so that a request is looked for in between.

        Returns:
            False if there is none left, too little memory for more, or one could not be captured.

        Raises:
            EngineDeadError: the model failed; every request is lost.
        """
        self.check_alive()
        try:
            return self.executor.capture_next(part=part)
        except Exception as error:
            raise self.fail(error, "while a step was captured") from error
        except BaseException as error:
            self.fail(RuntimeError(f"a capture was interrupted by {type(error).__name__}"))
            raise

    def time_steps(self, seconds: float) -> Generator[None, None, None]:
        """Run steps of nobody for so many seconds at most, to know what steps take.

        One whenever the next is asked for, while the engine is idle. Closed before its end it
        leaves nothing behind.

        Raises:
            EngineDeadError: the model failed.
        """
        self.check_alive()
        try:
            yield from trials(self.executor, self.scheduler, self.pacing, seconds)
        except Exception as error:
            raise self.fail(error, "while steps were timed") from error

    def fail(self, error: Exception, when: str = "in a step") -> EngineDeadError:
        """Stop because of ``error``; what is returned says so and is to be raised from it."""
        self._dead = error
        self.executor.close()
        return EngineDeadError(f"the engine stopped {when}: {described(error)}")

    def trace_layers(self) -> AbstractContextManager[LayerTrace]:
        """See :meth:`Engine.trace_layers`."""
        self.check_alive()
        return self.executor.trace_layers()

    def close(self) -> None:
        """Drop the model and its cache; the engine cannot be used after."""
        self._flight.clear()
        self._sequences.clear()
        self._preparing.clear()
        if self._dead is None:
            self._dead = RuntimeError("the engine was closed")
        self.executor.close()

    def check_alive(self) -> None:
        """Raise if the engine has stopped.

        Raises:
            EngineDeadError: it has; from what stopped it.
            RequestError: a step called what called this.
        """
        self.check_outside()
        if self._dead is not None:
            raise EngineDeadError(f"the engine has stopped: {self._dead}") from self._dead

    def check_outside(self) -> None:
        """Raise if this is called from within a step.

        Raises:
            RequestError: it is.
        """
        if self._stepping == threading.get_ident():
            raise RequestError(CALLED_FROM_STEP)

    def _trace_submitted(
        self,
        trace: EngineTrace,
        plan: StepPlan,
        pending: PendingStep,
        times: tuple[float, float, float],
    ) -> None:
        prompts: list[PlanRow] = []
        if self._prefilling or plan.kind != "decode":
            # The last token of a prompt may have a step of its own.
            prompts = [
                row
                for row in plan.rows
                if row.num_tokens > 1 or row.start < self._sequences[row.sequence_id].prompt_len
            ]
        load = (len(self._flight), self.scheduler.num_running, self.scheduler.num_waiting)
        trace.submitted(plan, pending, prompts, times, load)

    def _count_admitted(self, plan: StepPlan, now: float) -> None:
        for admission in plan.admitted:
            since = self._queued.pop(admission.sequence_id, None)
            if since is not None:  # else it was preempted, and is back
                self._timings.observe("queue", now - since)
                self._prefilling[admission.sequence_id] = now
                self._prompt_tokens += admission.prompt_len

    def _count_updates(self, updates: TokenUpdates, now: float) -> int:
        """Count what a step brought, and return how many tokens that are."""
        generated = len(updates) - len(updates.others)  # columns: neither a first token nor a last
        prefilling = self._prefilling
        for update in updates.others:
            generated += len(update.new_token_ids)
            came = update.new_token_ids or update.pooled
            if prefilling and came and update.sequence_id in prefilling:
                since = prefilling.pop(update.sequence_id)
                self._timings.observe("prefill", now - since)
                if self.trace is not None:
                    self.trace.first(update.sequence_id, now, self._last_plan)
            if update.finish_reason is not None:
                self._leave(update.sequence_id, update.finish_reason, now)
        self._generated_tokens += generated
        return generated

    def _leave(self, sequence_id: str, reason: str, now: float) -> bool:
        """Forget a sequence that has ended; False if there is none of this id."""
        self._preparing.pop(sequence_id, None)
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return False
        self._queued.pop(sequence_id, None)
        self._prefilling.pop(sequence_id, None)
        if self.trace is not None:
            self.trace.finished(sequence, reason, now)
        return True


__all__ = ["EngineCore"]
