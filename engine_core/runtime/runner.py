"""Runs the scheduler's plans on the model."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from engine_core.configs import PoolingConfig, PoolingParams, SamplingParams, SchedulerConfig
from engine_core.errors import ErrorCode, ModelError
from engine_core.kernels import choose_greedy, compiled
from engine_core.nn.attention import cached_layers
from engine_core.plugin_code import described
from engine_core.runtime.block_tables import BlockTables, IntArray
from engine_core.runtime.capture import Agreement, capturer_of
from engine_core.runtime.compiles import NOBODY, Compiles
from engine_core.runtime.eager import EagerSteps, ForwardPass
from engine_core.runtime.graphs import (
    DecodeGraphs,
    GraphState,
    GraphSteps,
    is_packed,
    largest_step_bytes,
    launch_bound_tokens,
)
from engine_core.runtime.guided import GrammarCompiler
from engine_core.runtime.kv_cache import KVCache
from engine_core.runtime.media import MediaEmbeddings
from engine_core.runtime.media_graphs import MediaGraphs
from engine_core.runtime.memory import CachePlan
from engine_core.runtime.platform import all_to_device, to_device, to_host
from engine_core.runtime.pooling import Pooler
from engine_core.runtime.recording import RecordedSteps
from engine_core.runtime.sampler import REASONS, Sampler, is_hosted, token_logprobs
from engine_core.runtime.step_batch import Choice, StepOutputs, Steps, StepState
from engine_core.runtime.swap import SwapSpace
from engine_core.steps import (
    Admission,
    PlanRow,
    PlanRows,
    RowError,
    RowResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenRows,
)

if TYPE_CHECKING:
    from engine_core.inputs import MediaItem, PromptState
    from engine_core.runtime.stages import StageLink

logger = logging.getLogger(__name__)

Way = Literal["graph", "recorded", "eager"]

_NOT_FINITE = RowError(ErrorCode.NOT_FINITE, "the model gave hidden states that are not finite")

# Seconds after which a start looks again which of its first steps have their kernels.
_LOOK_AGAIN = 0.005
# Rows that choose greedily at once. On a GPU more may have a kernel of their own, but that of a
# first token, which so many have, is there from the start.
_GREEDY_ROWS = 32
# Types of logits.
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Signed integers, by their bytes.
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class _Row:
    """The host's state of the sequence in one row of the persistent batch."""

    token_ids: IntArray
    prompt_len: int
    sampling: SamplingParams
    token_state: Mapping[str, IntArray]
    media: Sequence[MediaItem]
    # The captured kind of choice for its token; None if the host has a part in it, or more than the
    # token is reported.
    choice: Choice | None
    pooling: PoolingParams | None = None


class PendingStep:
    """A step that was submitted; on a GPU it may still be running.

    Args:
        finish: waits for its result.
        num_tokens: tokens of one run, padding included.
        way: how it was run; the last time, if it was repeated. Ranks in other processes tell it,
            and ``num_tokens``, with the result.
        is_done: tells, without waiting, whether the device has finished, or None if that is unknown
            now; None if nothing can tell.
    """

    def __init__(
        self,
        finish: Callable[[], StepResult],
        num_tokens: int,
        way: Way = "eager",
        is_done: Callable[[], bool | None] | None = None,
    ) -> None:
        self._finish = finish
        self.num_tokens = num_tokens
        self.way = way
        self._is_done = is_done

    @property
    def done(self) -> bool | None:
        """Whether the device has finished the step; None if that is unknown."""
        return None if self._is_done is None else self._is_done()

    def result(self) -> StepResult:
        """Wait for the step and return what it gave."""
        return self._finish()


class ModelRunner:
    """Holds the model, its cache and the persistent batch, and runs one plan after another.

    The token that a row sampled last stays on the device, so that a plan can be submitted before
    the host has seen the tokens of the one before.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: CachePlan,
        scheduler_config: SchedulerConfig,
        device: torch.device,
        *,
        eos_token_ids: tuple[int, ...] = (),
        eager: bool = False,
        capture_at_start: bool = True,
        prompt_state: PromptState | None = None,
        grammar_compiler: Callable[[], GrammarCompiler] | None = None,
        vocab_size: int | None = None,
        deterministic: bool = False,
        pooling: PoolingConfig | None = None,
        link: StageLink | None = None,
        agreement: Agreement | None = None,
        compiles: Compiles = NOBODY,
    ) -> None:
        """The model is loaded and on ``device``.

        Args:
            model: a model with the interface of ``nn.CausalLM``: ``forward`` and, if it can,
                ``get_logits`` and ``prepare_inputs_for_generation``.
            plan: the cache to make.
            scheduler_config: rows and lengths.
            device: where everything runs.
            eos_token_ids: what ``min_tokens`` forbids besides a request's own stop tokens.
            eager: launch every kernel one by one, also where CUDA graphs could be replayed or, on a
                CPU, recorded steps.
            capture_at_start: capture now what the first greedy request with a short prompt needs;
                False if what a row keeps is not known before the first request.
            prompt_state: what a family keeps of rows and tokens; what it does not declare, the
                first request shows.
            grammar_compiler: makes the compiler of grammars, at the first guided request.
            vocab_size: that of the logits; None if it is not known.
            deterministic: whether tokens are computed alike whatever else is in a step.
            pooling: how all rows are pooled; None if they give tokens.
            link: the stage of a pipeline that this is; None if there is one.
            agreement: with the ranks that run the same plans on their part of the model, each of
                which makes its runner now; None if there are none.
            compiles: the kernels of captured steps that are compiled beside this.
        """
        agreement = agreement or Agreement()
        self._link = link
        self.model = model
        self.device = device
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        rows = scheduler_config.max_num_seqs
        groups = plan.cache_config.groups
        longest = [-(-scheduler_config.max_model_len // group.block_size) for group in groups]
        self._tables = [
            BlockTables(rows, most, group.block_size, device)
            for most, group in zip(longest, groups, strict=True)
        ]
        layers = cached_layers(model)
        assert len(layers) == len(plan.layer_groups), (
            f"{len(layers)} layers with a cache, but it is planned for {len(plan.layer_groups)}"
        )
        for layer, group_id in zip(layers, plan.layer_groups, strict=True):
            layer.group_id = group_id
            layer.block_size = groups[group_id].block_size
        self._cache = KVCache(plan, device)
        self.kv_cache = self._cache.layers
        num_slots = scheduler_config.num_swap_blocks
        self._swap_space = SwapSpace(self._cache.planes, num_slots) if num_slots > 0 else None
        self._rows: dict[int, _Row] = {}
        self._encoding: _Clock | None = None  # of the step that is being submitted
        # The choice of each row's sequence; -1 for None.
        self._choices = np.full(rows, -1, dtype=np.int64)
        # One row more than there are sequences: a graph's padding is computed in it.
        self._decode_graphs: DecodeGraphs | None = None
        self._compiles = compiles
        self._sampler = Sampler(rows + 1, device, grammar_compiler, self._is_choice_compiled)
        self.guides = self._sampler.guides  # what compiles the grammars of requests
        self._state = StepState(
            self._tables,
            self._sampler.last_tokens,
            scheduler_config.max_model_len,
            {"prompt_len": torch.zeros(rows + 1, dtype=torch.int64, device=device)},
        )
        if prompt_state is not None:
            for name, (dtype, shape) in prompt_state.row_state.items():
                one = torch.from_numpy(np.zeros((1, *shape), dtype))
                self._state.row_state[name] = one.to(device).repeat(rows + 1, *[1] * len(shape))
            self._state.token_state.update(prompt_state.token_state)
        forward = self._forward = ForwardPass(
            model, self.kv_cache, vocab_size, deterministic=deterministic
        )
        self._media: MediaEmbeddings | None = None
        if forward.takes_media and scheduler_config.encoder_cache_tokens > 0:
            with torch.inference_mode():
                self._media = MediaEmbeddings(
                    forward, scheduler_config.encoder_cache_tokens, device
                )
            self._state.media = self._media.table
            self._state.embed_tokens = forward.embed_tokens
        # It takes every step that none of the others, which are faster, has taken.
        chooses = pooling is None and (link is None or link.last)
        self._eager_steps = EagerSteps(self._state, forward, chooses=chooses)
        self._pooler = None if pooling is None else Pooler(forward, pooling)
        self._recorded_steps: RecordedSteps | None = None
        repeats = not eager and pooling is None and _may_repeat(model, device)
        if device.type == "cpu" and repeats and agreement.size == 1 and compiled.available():
            self._recorded_steps = RecordedSteps(self._state, forward)
        self._graph_steps: GraphSteps | None = None
        self._left_at_start: Sequence[Iterator[object]] = ()
        self._media_graphs: MediaGraphs | None = None
        capturer = compiles.capturer or capturer_of(device)
        if capturer is not None and repeats:
            most = scheduler_config.max_num_batched_tokens
            own = (
                largest_step_bytes(model, most + rows),
                launch_bound_tokens(model, len(layers)),
                is_packed(model),
            )
            # Parts of a model may differ in size, and what is captured may not.
            step_bytes, launch_bound, packed = map(max, zip(*agreement.gather(own), strict=True))
            state = GraphState(
                self._state,
                forward,
                lambda: self._sampler.state,
                step_bytes,
                agreement,
                deterministic,
                capturer,
                compiles,
                coded=any(getattr(group.spec, "quantized", False) for group in groups),
                packed=bool(packed),
                max_repeat=scheduler_config.max_repeat,
            )
            self._decode_graphs = DecodeGraphs(state)
            self._graph_steps = GraphSteps(state, launch_bound, most)
            if self._media is not None and forward.may_capture_media:
                self._media.graphs = self._media_graphs = MediaGraphs(
                    forward, device, agreement, capturer
                )
            if capture_at_start and not forward.watched:
                with torch.inference_mode():
                    kinds = self._graph_steps, self._decode_graphs
                    self._left_at_start = self._capture_at_start(kinds, compiles, self._load_choice)
        self._state_known = capture_at_start
        # The tokens of steps that may not have ended, on their way to the host.
        self._sending: deque[tuple[torch.cuda.Event, list[_Turns]]] = deque()
        # How the last run went, and its tokens, padding included.
        self._ran: tuple[Way, int] = ("eager", 0)

    @staticmethod
    def _capture_at_start(
        kinds: Sequence[DecodeGraphs | GraphSteps],
        compiles: Compiles,
        beside: Callable[[], None],
    ) -> Sequence[Iterator[object]]:
        """Capture what the first request needs, each step as soon as its kernels are compiled.

        Prompts come first: attention to them takes longest to compile. While kernels are still to
        come a first token waits for no more. Meanwhile ``beside`` is called, once, and kernels are
        loaded that are there.

        Returns:
            What captures the rest.
        """
        started = [graphs.starts() for graphs in kinds]
        coming = {each: key for each in started if (key := next(each, None)) is not None}
        called = False
        while coming:
            ready = (each for each, key in coming.items() if compiles.ready(key))
            each = next(ready, None)
            if each is None:
                if compiles.load_next():
                    continue
                if not called:
                    called = True
                    beside()
                compiles.ready([*coming.values()][-1], _LOOK_AGAIN)
            elif (key := next(each, None)) is None:
                del coming[each]
                if each is started[0] and compiles.under_way:
                    break
            else:
                coming[each] = key
        return [*coming]

    def _is_choice_compiled(self, count: int | None) -> bool:
        """Whether kernels of random choice need no compile now, or nobody compiles them ahead.

        ``count`` is as of :meth:`DecodeGraphs.chooses`.
        """
        return self._decode_graphs is None or self._decode_graphs.chooses(count)

    def _load_choice(self) -> None:
        """Load what makes random choices until their kernels are compiled."""
        dtypes = (param.dtype for param in self.model.parameters())
        dtype = next((each for each in dtypes if each in _FLOATS), torch.float32)
        if self._vocab_size is None:
            return
        try:
            self._sampler.load_plain(self._vocab_size, dtype)
        except Exception as error:
            # The first random choice will load it, or say why it cannot.
            logger.info("what chooses is not loaded ahead: %s", described(error))

    @torch.inference_mode()
    def wait_for_prompts(self) -> None:
        """Return once no prompt waits for a kernel; see :meth:`GraphSteps.wait_for_prompts`.

        What a start left is captured, so that a step for which that fails is found now.

        Raises:
            EngineError: as of a start: the step cannot be captured, and there is one rank.
        """
        if self._graph_steps is not None:
            self._graph_steps.wait_for_prompts()
        for left in self._left_at_start:
            for _ in left:
                pass
        self._left_at_start = ()

    @torch.inference_mode()
    def run_quick(self) -> None:
        """Run what launches the same as quick steps; see :meth:`GraphSteps.run_quick`."""
        if self._graph_steps is not None:
            self._graph_steps.run_quick()

    @torch.inference_mode()
    def capture_next(self, *, part: bool = False) -> bool:
        """Capture one more step that is likely to be needed; a step may be in flight meanwhile.

        ``part`` is as of :meth:`GraphSteps.capture_next`.

        Returns:
            False if no step is left, memory is short, a capture failed, forward hooks are
            registered, or it is not known yet what a row keeps.
        """
        if not self._state_known or self._forward.watched:
            return False
        # In turns: among the first are the largest, which take the place of all others. What waits
        # for kernels comes last.
        kinds = [each for each in (self._decode_graphs, self._graph_steps) if each is not None]
        kinds.sort(key=lambda each: (each.awaits_kernels, each.num_captured))
        if any(each.capture_next(part=part) for each in kinds):
            return True
        return self._media_graphs is not None and self._media_graphs.capture_next()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        """Run ``plan``; the result may be asked for later.

        While forward hooks are registered, the model itself runs every step.
        """
        if self._link is not None:
            touched = {row.row for part in (plan.rows, plan.admitted) for row in part}
            self._link.settle(touched, self._sampler.last_tokens)
        if self._swap_space is not None:
            if plan.swap_out:
                self._swap_space.copy_out(plan.swap_out)
            if plan.swap_in:
                self._swap_space.copy_in(plan.swap_in)
        if plan.admitted:
            self._admit(plan.admitted)
        if plan.media_work or plan.freed_media:
            self._encode(plan)
        for group_id in self._cache.zeroed_groups:
            table = self._tables[group_id]
            given = [(row.row, row.new_blocks[group_id], row.start) for row in plan.growing]
            self._cache.clear(group_id, [b for each in given for b in table.unwritten(*each)])
        rows = plan.rows
        if isinstance(rows, PlanRows) and rows.new_blocks:
            grown = rows.numbers[[*rows.new_blocks]].tolist()
            of_groups = zip(*rows.new_blocks.values(), strict=True)
            for table, of_group in zip(self._tables, of_groups, strict=True):
                table.append_each(grown, of_group)
        for row in plan.others:
            for table, blocks in zip(self._tables, row.new_blocks, strict=True):
                table.append(row.row, blocks)
        choices: set[Any] = {self._rows[row.row].choice for row in plan.others}
        if isinstance(plan.rows, PlanRows):
            own = self._choices[plan.rows.numbers]
            choices |= {None if own.min() < 0 else Choice(own.max())}
        choice: Choice | None = None if None in choices else max(choices)
        decodes = True
        for row in plan.others:
            known = self._rows[row.row].token_ids.size
            if row.num_tokens > 1 or row.start < known or not row.sample:
                decodes = False
                break
        watched = self._forward.watched
        if self._decode_graphs is not None and decodes and not watched:
            choice = self._decode_graphs.offer(len(plan.rows), choice)
            replayed = self._decode_graphs.begin(*_places(plan), choice or Choice.GREEDY)
            if replayed is not None:
                self._ran = "graph", replayed.room.rows
                turns = self._decode_graphs.replays(
                    replayed, plan.repeat, len(plan.rows), chosen=choice is not None
                )
                return self._collect(plan, choice, turns)
        steps = None if watched else self._graph_steps or self._recorded_steps
        pending = self._collect(plan, choice, self._run(plan, choice, steps, decodes=decodes))
        for row in plan.others:
            held = self._rows[row.row]
            if held.media and row.start + row.num_tokens >= held.prompt_len:
                held.media = ()  # and the memory of its features, which others may share
        return pending

    def _run(
        self, plan: StepPlan, choice: Choice | None, steps: Steps | None, *, decodes: bool
    ) -> Iterator[StepOutputs]:
        """Run the step as often as planned; each repeat goes on from the tokens of the last one.

        ``steps`` are tried first; what they do not take is run eagerly.
        """
        fit = None
        known = (self._rows[row.row] for row in plan.others)
        whole = any(row.sampling.prompt_logprobs is not None for row in known)
        if self._graph_steps is not None and steps is self._graph_steps and not whole:
            fit = self._graph_steps.fit_decodes if decodes else self._graph_steps.fit
        for turn in range(plan.repeat):
            if decodes and fit is None and self.device.type == "cpu":
                numbers, starts = ([*map(int, each)] for each in _places(plan))
                positions = [start + turn for start in starts]
                batch = self._state.decode_batch(numbers, positions, choice)
            else:
                rows = list(plan.rows)
                if turn:
                    rows = [row._replace(start=row.start + turn) for row in rows]
                media = self._touched(plan)
                batch = self._state.batch(rows, self._rows, choice, fit, media, whole=whole)
            outputs = None if steps is None else steps.run(batch)
            way: Way = "graph" if steps is self._graph_steps else "recorded"
            if outputs is None:
                outputs, way = self._eager_steps.run(batch), "eager"
            self._ran = way, batch.key.tokens
            yield outputs

    def _encode(self, plan: StepPlan) -> None:
        """Drop the embeddings that a plan drops, and compute those that it computes.

        Raises:
            ModelError: the model makes none, or not as many as an item has positions.
        """
        if self._media is None:
            raise ModelError(
                f"{self._forward.model_name} has no embed_media, which pictures, videos and sounds "
                "in prompts need"
            )
        self._media.drop(plan.freed_media)
        if not plan.media_work:
            return
        clock = _Clock(self.device)
        self._media.run([(work, self._rows[work.row].media[work.item]) for work in plan.media_work])
        clock.stop()
        self._encoding = clock

    def _touched(self, plan: StepPlan) -> list[tuple[int, int, IntArray]]:
        """The embeddings that a plan's chunks touch, as :meth:`StepState.batch` takes them."""
        found = []
        for use in plan.media:
            assert self._media is not None, "they were computed"
            row = plan.rows[use.place]
            first, last = self._rows[row.row].media[use.item].span
            begin, end = max(first, row.start), min(last, row.start + row.num_tokens)
            rows = self._media.rows(use.slot)[begin - first : end - first]
            found.append((use.place, begin - row.start, rows))
        return found

    def _admit(self, admissions: Sequence[Admission]) -> None:
        """Give rows to requests. Their state on the device is written for all at once."""
        given: dict[str, dict[int, Any]] = {"prompt_len": {}}
        for admission in admissions:
            row = admission.row
            for table in self._tables:
                table.clear(row)
            if admission.pooling is None:
                self._sampler.admit(
                    row,
                    admission.token_ids,
                    admission.prompt_len,
                    admission.sampling,
                    self._eos_token_ids,
                )
            self._rows[row] = _Row(
                token_ids=np.asarray(admission.token_ids, dtype=np.int64),
                prompt_len=admission.prompt_len,
                sampling=admission.sampling,
                token_state={
                    name: np.atleast_2d(np.asarray(value, dtype=np.int64))
                    for name, value in admission.prompt.token_state.items()
                },
                media=admission.prompt.media,
                choice=_choice(admission.sampling),
                pooling=admission.pooling,
            )
            choice = self._rows[row].choice
            self._choices[row] = -1 if choice is None else choice
            given["prompt_len"][row] = admission.prompt_len
            for name, value in admission.prompt.row_state.items():
                given.setdefault(name, {})[row] = value
            for name, array in self._rows[row].token_state.items():
                if self._state.token_state.get(name) != array.shape[0]:
                    self._state.token_state[name] = array.shape[0]
                    self._forget_steps()
        self._sampler.flush()
        for name, values in given.items():
            self._set_row_state(name, values)
        self._state_known = True

    def _set_row_state(self, name: str, values: Mapping[int, Any]) -> None:
        """Write what the family, or the engine, keeps of some rows, by row.

        All of a name's values have the dtype and shape of the first one.
        """
        rows = list(values)
        host = torch.stack([torch.as_tensor(value) for value in values.values()])
        if name not in self._state.row_state:
            shape = (self._state.max_rows + 1, *host.shape[1:])
            state = torch.zeros(shape, dtype=host.dtype, device=self.device)
            self._state.row_state[name] = state
            self._forget_steps()
        state = self._state.row_state[name]
        if host.dim() == 1 and len(rows) == 1:
            # A kernel's argument. An assignment would copy from pageable memory, and so wait for
            # the steps in flight.
            state[rows[0]].fill_(host[0].item())
            return
        # As signed integers of the size: not every dtype is known to numpy and to indexing.
        bits = _SIGNED.get(state.dtype.itemsize, state.dtype)
        where, sent = all_to_device(
            [np.array(rows, dtype=np.int64), host.to(state.dtype).view(bits).numpy()], self.device
        )
        state.view(bits)[where] = sent

    def _forget_steps(self) -> None:
        """Capture and record anew, with the current per-row and per-token state."""
        for steps in (self._decode_graphs, self._graph_steps, self._recorded_steps):
            if steps is not None:
                steps.forget()

    def _collect(
        self, plan: StepPlan, choice: Choice | None, turns: Iterable[StepOutputs]
    ) -> PendingStep:
        """Choose tokens where a step has not done it, and send them all to the host.

        A step without tokens is waited for all the same: the host is not to run ahead through a
        long prompt, chunk after chunk.
        """
        if self._link is not None and not self._link.last:
            return self._pass_on(plan, turns, self._link)
        result = _Results(plan)
        result.encoding, self._encoding = self._encoding, None
        if self._media is not None and plan.media_work:
            result.media_parts = self._media.parts
        for turn, outputs in enumerate(turns):
            if self._pooler is not None:
                self._pool(result, outputs)
            elif outputs.hidden is not None:
                result.prompt_logprobs = self._prompt_logprobs(plan, outputs.hidden)
            if outputs.logits is not None:
                outputs = self._choose(result, turn, choice, outputs.logits)
                if self._link is not None and outputs.tokens is not None:
                    self._link.send_tokens(outputs.tokens)
            if outputs.room is not None:
                tokens, status = outputs.room.to_host(outputs.turn, outputs.turns)
            elif outputs.tokens is not None and outputs.status is not None:
                tokens = to_host(outputs.tokens).unsqueeze(0)
                status = to_host(outputs.status).unsqueeze(0)
            else:
                continue
            result.turns.append(_Turns(tokens, status, outputs.places))
        way, num_tokens = self._ran
        if self.device.type == "cpu":
            return PendingStep(result.read, num_tokens, way)
        result.event = torch.cuda.Event()
        result.event.record()
        # A kernel may write to the tokens' memory, though nobody wants them any more.
        self._sending.append((result.event, result.turns))
        while self._sending and self._sending[0][0].query():
            self._sending.popleft()
        return PendingStep(result.read, num_tokens, way, result.event.query)

    def _pass_on(
        self, plan: StepPlan, turns: Iterable[StepOutputs], link: StageLink
    ) -> PendingStep:
        """Run a step whose tokens the last stage chooses."""
        rows = [row.row for row in plan.rows if row.sample]
        for _ in turns:
            if rows:
                link.expect_tokens(rows, self.device)
        return PendingStep(lambda: StepResult(plan.step_id, ()), plan.num_tokens)

    def _pool(self, result: _Results, outputs: StepOutputs) -> None:
        """Have the vectors or scores of the rows that are done sent to the host."""
        assert self._pooler is not None, "all rows are pooled"
        assert outputs.hidden is not None, "they run eagerly"
        rows = list(result.plan.rows)
        params = {row.row: self._rows[row.row].pooling or PoolingParams() for row in rows}
        for places, given in self._pooler(rows, outputs.hidden, params):
            result.pooled.append((places, to_host(given)))

    def _choose(
        self, result: _Results, turn: int, choice: Choice | None, logits: Tensor
    ) -> StepOutputs:
        """A token for each plan row that samples, from ``logits [S, V]``."""
        all_rows = list(result.plan.rows)
        sampled = [index for index, row in enumerate(all_rows) if row.sample]
        plan_rows = [all_rows[index] for index in sampled]
        rows = [row.row for row in plan_rows]
        places = None
        if len(rows) < len(all_rows):
            places = [bisect_left(sampled, index) for index in range(len(all_rows))]
        if choice is Choice.GREEDY:
            # Without the sampler, whose small calls weigh, and whose kernels may be missing.
            most = len(rows) if self.device.type == "cpu" else _GREEDY_ROWS
            parts = [choose_greedy(some) for some in logits.split(most)]
            tokens, status = parts[0]
            if len(parts) > 1:
                tokens, status = (torch.cat(some) for some in zip(*parts, strict=True))
            self._sampler.last_tokens[to_device(torch.tensor(rows), self.device)] = tokens
            return StepOutputs(tokens=tokens, status=status, places=places)
        counts = [self._rows[row].sampling.logprobs for row in rows]
        wanted = [place for place, count in enumerate(counts) if count is not None]
        # The next step overwrites a graph's logits, and a recording's.
        reported = logits[wanted].float() if wanted else None
        positions = [row.start + row.num_tokens + turn for row in plan_rows]
        chosen = self._sampler.sample(logits, rows, positions)
        for place, why in chosen.failures.items():
            result.failures[turn, sampled[place]] = why
        if reported is not None:
            numbers = [counts[place] or 0 for place in wanted]
            indices = [sampled[place] for place in wanted]
            result.reports.append((indices, numbers, reported, chosen.token_ids[wanted]))
        return StepOutputs(tokens=chosen.token_ids, status=chosen.status, places=places)

    def _prompt_logprobs(
        self, plan: StepPlan, hidden: Tensor
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """For each row that asks: the tokens that this chunk's positions predict."""
        out = {}
        begin = 0
        for index, plan_row in enumerate(plan.rows):
            row = self._rows[plan_row.row]
            count = row.sampling.prompt_logprobs
            length = min(plan_row.num_tokens, row.prompt_len - 1 - plan_row.start)
            if count is not None and length > 0:
                first = plan_row.start + 1
                targets = torch.from_numpy(row.token_ids[first : first + length])
                logits = self._forward.logits(hidden[begin : begin + length]).float()
                out[index] = tuple(
                    token_logprobs(logits, to_device(targets, self.device), [count] * length)
                )
            begin += plan_row.num_tokens
        return out


class _Clock:
    """Times work on a device, from its making to :meth:`stop`, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._begin, self._taken = time.perf_counter(), 0.0
        if device.type == "cuda":
            self._events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
            self._events[0].record()

    def stop(self) -> None:
        """The work is submitted."""
        self._taken = time.perf_counter() - self._begin
        if self._events is not None:
            self._events[1].record()

    @property
    def seconds(self) -> float:
        """The seconds that it took, once it is done."""
        if self._events is None:
            return self._taken
        begin, end = self._events
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000


class _Turns(NamedTuple):
    """The choice of some repeats of a plan, one after another and run in the same way.

    Attributes:
        tokens: ``[turns, N]`` int64.
        status: ``[turns, N]`` int8; a key of ``REASONS`` where the token means nothing.
        places: for each row of the plan its column, if it samples; None for their order.
    """

    tokens: Tensor
    status: Tensor
    places: Sequence[int] | None


class _Results:
    """The tokens that the repeats of a plan chose, in flight to the host.

    Attributes:
        plan: what is run.
        turns: all that was chosen, in order; empty if no row samples.
        event: what to wait for before they are read; None if nothing.
        failures: what went wrong on the host, by turn and plan row.
        reports: for each turn with log-probabilities the plan rows ``[W]`` that want them, of how
            many tokens each, the logits ``[W, V]``, and the tokens chosen ``[W]``.
        prompt_logprobs: by plan row.
        pooled: places among the plan's rows, and their vectors or scores ``[N, D]`` float32.
        encoding: timed the step's pictures, videos and sounds; None if it had none to compute.
        media_parts: as of :class:`StepResult`.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.encoding: _Clock | None = None
        self.media_parts: Mapping[tuple[str, int], int] = {}
        self.turns: list[_Turns] = []
        self.event: torch.cuda.Event | None = None
        self.failures: dict[tuple[int, int], RowError] = {}
        self.reports: list[tuple[Sequence[int], Sequence[int], Tensor, Tensor]] = []
        self.prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = {}
        self.pooled: list[tuple[Sequence[int], Tensor]] = []

    def read(self) -> StepResult:
        """The result; waits for it."""
        if self.event is not None:
            self.event.synchronize()
        seconds = 0.0 if self.encoding is None else self.encoding.seconds
        if self.pooled:
            return self._result(self._pooled_rows(), seconds)
        columns: list[tuple[int, ...]] = []
        codes: list[tuple[int, ...]] = []
        places: Sequence[int] = range(len(self.plan.rows))
        wrong = bool(self.failures)
        if self.turns:
            all_tokens, status, places = self._joined()
            # As bytes: torch, and numpy, take ten times as long to find one that is not 0.
            wrong = wrong or bool(status.tobytes().strip(b"\0"))
            plain = not (wrong or self.reports or self.prompt_logprobs)
            if plain and isinstance(self.plan.rows, PlanRows) and self.plan.repeat == 1:
                tokens = TokenRows(self.plan.rows, all_tokens[0], places)
                return self._result(tokens, seconds)
            columns = list(zip(*all_tokens.tolist(), strict=True))
            codes = list(zip(*status.tolist(), strict=True)) if wrong else []
        if wrong or self.reports or self.prompt_logprobs:
            rows = self._rows(columns, codes, places)
        else:
            rows = [
                RowResult(row.sequence_id, columns[place] if row.sample else ())
                for row, place in zip(self.plan.rows, places, strict=True)
            ]
        return self._result(tuple(rows), seconds)

    def _joined(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8], Sequence[int]]:
        """Tokens and status of all turns, and the columns of the plan's rows in them."""
        own = range(len(self.plan.rows))
        if len(self.turns) == 1:
            tokens, status, places = self.turns[0]
            return tokens.numpy(), status.numpy(), own if places is None else places
        # Turns that were run in different ways have their columns at different places. There may be
        # none of a row that does not sample.
        joined: list[Any] = [
            [
                np.take(part.numpy(), own if some.places is None else some.places, 1, mode="clip")
                for part in (some.tokens, some.status)
            ]
            for some in self.turns
        ]
        all_tokens, all_status = (np.concatenate(parts) for parts in zip(*joined, strict=True))
        return all_tokens, all_status, own

    def _result(self, rows: Sequence[RowResult], seconds: float) -> StepResult:
        return StepResult(self.plan.step_id, rows, seconds, self.media_parts)

    def _pooled_rows(self) -> tuple[RowResult, ...]:
        """Each row's result where rows give vectors or scores."""
        rows = [RowResult(row.sequence_id, ()) for row in self.plan.rows]
        for places, values in self.pooled:
            array = values.numpy()
            fine = np.isfinite(array).all(axis=1)
            for index, place in enumerate(places):
                if fine[index]:
                    rows[place] = rows[place]._replace(pooled=array[index].tobytes())
                else:
                    rows[place] = rows[place]._replace(error=_NOT_FINITE)
        return tuple(rows)

    def _rows(
        self,
        columns: Sequence[tuple[int, ...]],
        codes: Sequence[tuple[int, ...]],
        places: Sequence[int],
    ) -> list[RowResult]:
        """Each row's result, of all kinds that a row can give.

        Without ``codes``, of the status, all tokens are good.
        """
        logprobs: dict[int, list[TokenLogprobs]] = defaultdict(list)
        for indices, numbers, logits, tokens in self.reports:
            entries = token_logprobs(logits, tokens, numbers)
            for index, entry in zip(indices, entries, strict=True):
                logprobs[index].append(entry)
        rows = []
        for index, (row, place) in enumerate(zip(self.plan.rows, places, strict=True)):
            looked_at = row.sample and bool(codes)
            error = self._error(row, index, codes[place]) if looked_at else None
            good = row.sample and error is None
            rows.append(
                RowResult(
                    row.sequence_id,
                    columns[place] if good else (),
                    tuple(logprobs[index]) if good and index in logprobs else None,
                    self.prompt_logprobs.get(index),
                    error,
                )
            )
        return rows

    def _error(self, row: PlanRow, index: int, codes: Sequence[int]) -> RowError | None:
        """The reason why a row's tokens are invalid, from the first repeat that failed; or None."""
        for turn, code in enumerate(codes):
            reason = self.failures.get((turn, index)) or REASONS.get(code)
            if reason is not None:
                return reason.at(row.start + row.num_tokens + turn)
        return None


def _places(plan: StepPlan) -> tuple[Sequence[int] | IntArray, Sequence[int] | IntArray]:
    """The row of the persistent batch, and the first position, of each row of a plan."""
    numbers, starts = [row.row for row in plan.others], [row.start for row in plan.others]
    if not isinstance(plan.rows, PlanRows):
        return numbers, starts
    if not numbers:
        return plan.rows.numbers, plan.rows.starts
    return np.append(plan.rows.numbers, numbers), np.append(plan.rows.starts, starts)


def _may_repeat(model: nn.Module, device: torch.device) -> bool:
    """Whether the model's author lets its steps be captured or, on a CPU, recorded."""
    support = getattr(model, "support_cuda_graph", device.type == "cpu")
    return bool(support() if callable(support) else support)


def _choice(params: SamplingParams) -> Choice | None:
    """The captured kind of choice for these parameters; None if part of it needs the host."""
    if is_hosted(params) or params.logprobs is not None:
        return None
    if params.changes_logits:
        return Choice.ADJUSTED
    return Choice.GREEDY if params.greedy else Choice.RANDOM
