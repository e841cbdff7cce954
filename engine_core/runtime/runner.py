"""Runs the scheduler's plans on the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from engine_core.configs import SamplingParams, SchedulerConfig
from engine_core.kernels import choose_greedy, compiled
from engine_core.nn.attention import Attention
from engine_core.runtime.block_tables import BlockTables, IntArray
from engine_core.runtime.graphs import (
    Captured,
    Choice,
    DecodeGraphs,
    GraphState,
    MixedGraphs,
    MixedStep,
    largest_step_bytes,
)
from engine_core.runtime.guided import GrammarCompiler
from engine_core.runtime.memory import CachePlan
from engine_core.runtime.platform import all_to_device, to_device
from engine_core.runtime.recording import RecordedSteps
from engine_core.runtime.sampler import REASONS, Sampler, is_hosted, token_logprobs
from engine_core.runtime.swap import SwapSpace
from engine_core.step_context import AttentionMetadata, GroupMetadata, StepContext
from engine_core.steps import Admission, RowError, RowResult, StepPlan, StepResult, TokenLogprobs

# Signed integers, by their bytes.
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class _Row:
    """What the host knows of the request in one row of the persistent batch."""

    token_ids: IntArray
    prompt_len: int
    sampling: SamplingParams
    token_state: Mapping[str, IntArray]
    # How a captured step can choose its token; None if the host has a part in it, or reports more
    # than the token.
    choice: Choice | None

    @property
    def plain(self) -> bool:
        """Whether the most probable token is taken as it is, and nothing else is reported."""
        return self.choice is Choice.GREEDY


class PendingStep:
    """A step that was submitted; on a GPU it may still be running."""

    def __init__(
        self, finish: Callable[[], StepResult], is_done: Callable[[], bool] | None = None
    ) -> None:
        """``is_done`` tells without waiting; None if nobody can."""
        self._finish = finish
        self._is_done = is_done

    @property
    def done(self) -> bool:
        """Whether the device is known to have finished the step."""
        return self._is_done is not None and self._is_done()

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
        grammar_compiler: Callable[[], GrammarCompiler] | None = None,
    ) -> None:
        """The model is loaded and on ``device``.

        Args:
            model: keeps the interface of DESIGN: ``forward`` and, if it can, ``get_logits`` and
                ``prepare_inputs_for_generation``.
            plan: the cache to make.
            scheduler_config: rows and lengths.
            device: where everything runs.
            eos_token_ids: what ``min_tokens`` forbids besides a request's own stop tokens.
            eager: launch every kernel one by one, also where CUDA graphs could be replayed or, on a
                CPU, recorded steps.
            capture_at_start: capture now what the first greedy request with a short prompt needs;
                False if what a row keeps is not known before the first request.
            grammar_compiler: makes what guided requests need, at the first of them.
        """
        self.model = model
        self._modules = tuple(model.modules())
        self.device = device
        self._eos_token_ids = eos_token_ids
        rows = scheduler_config.max_num_seqs
        config = plan.cache_config
        longest = -(-scheduler_config.max_model_len // config.block_size)
        self._tables = [BlockTables(rows, longest, config.block_size, device) for _ in plan.groups]
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        assert len(layers) == len(plan.layer_groups), (
            f"{len(layers)} attention layers, but the cache is planned for {len(plan.layer_groups)}"
        )
        self.kv_cache: list[tuple[Tensor, Tensor]] = []
        for layer, group_id in zip(layers, plan.layer_groups, strict=True):
            layer.group_id = group_id
            spec = plan.groups[group_id]
            shape = (config.num_blocks, config.block_size, spec.num_kv_heads)
            dtype = getattr(torch, spec.dtype)
            self.kv_cache.append(
                (
                    _zeros((*shape, spec.head_dim), dtype, device),
                    _zeros((*shape, spec.v_head_dim), dtype, device),
                )
            )
        num_slots = scheduler_config.num_swap_blocks
        self._swap_space = (
            SwapSpace(self.kv_cache, plan.layer_groups, num_slots) if num_slots > 0 else None
        )
        self._rows: dict[int, _Row] = {}
        # One row more than there are sequences: a graph's padding is computed in it.
        self._max_rows = rows + 1
        self._sampler = Sampler(self._max_rows, device, grammar_compiler)
        self._row_state: dict[str, Tensor] = {
            "prompt_len": torch.zeros(self._max_rows, dtype=torch.int64, device=device)
        }
        self._token_state_widths: dict[str, int] = {}
        self._recorded_steps: RecordedSteps | None = None
        if device.type == "cpu" and not eager and compiled.available():
            self._recorded_steps = RecordedSteps(
                self._context_logits, [longest] * len(self._tables), scheduler_config.max_model_len
            )
        self._decode_graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        if device.type == "cuda" and not eager and _supports_graphs(model):
            state = GraphState(
                self._graph_logits,
                lambda: self._sampler.state,
                self._tables,
                self._sampler.last_tokens,
                rows,
                scheduler_config.max_model_len,
                largest_step_bytes(model, scheduler_config.max_num_batched_tokens + rows),
            )
            self._decode_graphs = DecodeGraphs(state)
            self._mixed_graphs = MixedGraphs(
                state,
                _launch_bound_tokens(model, len(layers)),
                scheduler_config.max_num_batched_tokens,
            )
            self._name_state()
            if capture_at_start:
                with torch.inference_mode():
                    self._decode_graphs.capture_at_start()
                    self._mixed_graphs.capture_at_start()
        self._state_known = capture_at_start

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one more step that is likely to be needed; a step may be in flight meanwhile.

        Returns:
            False if there is none left, or too little memory, if one could not be captured, and
            before it is known what a row keeps.
        """
        return self._state_known and any(
            graphs is not None and graphs.capture_next()
            for graphs in (self._decode_graphs, self._mixed_graphs)
        )

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        """Run ``plan``; the result may be asked for later."""
        if self._swap_space is not None:
            if plan.swap_out:
                self._swap_space.copy_out(plan.swap_out)
            if plan.swap_in:
                self._swap_space.copy_in(plan.swap_in)
        if plan.admitted:
            self._admit(plan.admitted)
        for row in plan.rows:
            for table, blocks in zip(self._tables, row.new_blocks, strict=True):
                table.append(row.row, blocks)
        decodes = self._only_decodes(plan)
        if self._decode_graphs is not None and decodes:
            pending = self._replay(self._decode_graphs, plan)
            if pending is not None:
                return pending
        if plan.repeat > 1:
            return self._repeat(plan)
        if self.device.type == "cpu" and not self._token_state_widths and decodes:
            return self._decode(plan)
        step = self._mixed_step(plan)
        # Decode steps whose graph there is no memory for are submitted several times before one is
        # waited for: more than the mixed graphs have pinned buffers.
        if self._mixed_graphs is not None and not decodes and not self._wants_prompt_logprobs(plan):
            captured = self._mixed_graphs.begin(step)
            if captured is not None:
                return self._replay_mixed(*captured, plan)
        hidden = self._forward(self._context(step))
        prompt_logprobs = self._prompt_logprobs(plan, hidden, step.starts)
        sampled = [index for index, row in enumerate(plan.rows) if row.sample]
        if not sampled:
            return self._unsampled(plan, prompt_logprobs)
        logits = self._logits(hidden, step.starts[1:][sampled] - 1)
        return self._sample(plan, sampled, logits, prompt_logprobs)

    def _decode(self, plan: StepPlan) -> PendingStep:
        """Run a step of decode rows on a CPU, without numpy and, if all are plain, the sampler.

        A model leaves neither their code nor their data in the caches, so that the dozens of small
        calls that a mixed step makes take several times as long as they would by themselves.
        """
        rows = [row.row for row in plan.rows]
        positions = [row.start for row in plan.rows]
        context = self._decode_context(rows, positions)
        logits = None
        if self._recorded_steps is not None and not self._watched:
            logits = self._recorded_steps.logits(context)
        if logits is None:
            logits = self._context_logits(context)
        if not all(self._rows[row].plain for row in rows):
            return self._sample(plan, range(len(rows)), logits, {})
        tokens, status = choose_greedy(logits)
        self._sampler.last_tokens[torch.tensor(rows)] = tokens
        errors = {
            place: REASONS[wrong].at(positions[place] + 1)
            for place, wrong in enumerate(status.tolist())
            if wrong
        }
        result = _result(plan, dict(enumerate(tokens.tolist())), {}, {}, errors)
        return PendingStep(lambda: result)

    @property
    def _watched(self) -> bool:
        """Whether somebody waits for a module to be called; in a recorded step none is."""
        return any(module._forward_hooks or module._forward_pre_hooks for module in self._modules)

    def _decode_context(self, rows: list[int], positions: list[int]) -> StepContext:
        """What the model is given of a CPU step of one token a row."""
        count, longest = len(rows), max(positions) + 1
        index = torch.tensor(rows)
        groups = tuple(
            GroupMetadata(
                block_tables=table.device_table[index, : -(-longest // table.block_size)],
                slot_mapping=torch.tensor(
                    [table.slot(row, place) for row, place in zip(rows, positions, strict=True)]
                ),
            )
            for table in self._tables
        )
        return StepContext(
            input_ids=self._sampler.last_tokens[index].unsqueeze(0),
            position_ids=torch.tensor([positions]),
            row_ids=torch.arange(count),
            attn_metadata=AttentionMetadata(
                query_start=torch.arange(count + 1, dtype=torch.int32),
                kv_lens=torch.tensor(positions, dtype=torch.int32).add_(1),
                max_query_len=1,
                max_kv_len=longest,
                num_decode_rows=count,
                groups=groups,
            ),
            row_state={name: state[index] for name, state in self._row_state.items()},
        )

    def _context_logits(self, context: StepContext) -> Tensor:
        """``[T, V]`` of every token of a step."""
        return self._to_logits(self._forward(context)[0])

    def _repeat(self, plan: StepPlan) -> PendingStep:
        """Run a step of decode rows again and again without a graph."""
        turns = []
        for turn in range(plan.repeat):
            none = ((),) * len(self._tables)
            rows = tuple(row._replace(start=row.start + turn, new_blocks=none) for row in plan.rows)
            turns.append(self.submit(StepPlan(plan.step_id, rows)))
        return _joined(plan, turns)

    def _forward(self, context: StepContext) -> Tensor:
        """Hidden states ``[1, T, H]``, or logits of a model without ``get_logits``."""
        prepare = getattr(self.model, "prepare_inputs_for_generation", None)
        inputs: dict[str, Any] = (
            prepare(self.kv_cache, context.inputs_embeds, context)
            if prepare is not None
            else context.model_inputs(self.kv_cache)
        )
        hidden: Tensor = self.model(**inputs)
        return hidden

    def _graph_logits(self, context: StepContext, places: Tensor | None) -> Tensor:
        """``[S, V]`` of the tokens at ``places [S]``, or of every token, in the model's dtype."""
        hidden = self._forward(context)[0]
        return self._to_logits(hidden if places is None else hidden[places])

    def _wants_prompt_logprobs(self, plan: StepPlan) -> bool:
        return any(self._rows[row.row].sampling.prompt_logprobs is not None for row in plan.rows)

    def _only_decodes(self, plan: StepPlan) -> bool:
        """Whether every row computes the token that it sampled last, and samples the next."""
        return all(
            row.num_tokens == 1 and row.sample and row.start >= len(self._rows[row.row].token_ids)
            for row in plan.rows
        )

    def _replay(self, graphs: DecodeGraphs, plan: StepPlan) -> PendingStep | None:
        """Run a step of decode rows; None if there is no graph for it."""
        rows = [row.row for row in plan.rows]
        starts = [row.start for row in plan.rows]
        count = len(rows)
        choices = [c for row in rows if (c := self._rows[row].choice) is not None]
        if len(choices) < count:
            captured = graphs.begin(rows, starts)
            if captured is None:
                return None
            assert captured.logits is not None, "greedy steps keep their logits"
            every = list(range(count))
            turns = []
            for turn in range(plan.repeat):
                captured.graph.replay()
                turns.append(self._sample(plan, every, captured.logits[:count], {}, turn))
            return turns[0] if plan.repeat == 1 else _joined(plan, turns)
        captured = graphs.begin(rows, starts, max(choices))
        if captured is None:
            return None
        shape = (plan.repeat, *captured.tokens.shape)
        tokens = torch.empty(shape, dtype=torch.int64, pin_memory=True)
        status = torch.empty(shape, dtype=torch.int8, pin_memory=True)
        for turn in range(plan.repeat):
            captured.graph.replay()
            tokens[turn].copy_(captured.tokens, non_blocking=True)
            status[turn].copy_(captured.status, non_blocking=True)
        return self._captured_result(plan, range(count), tokens, status)

    def _replay_mixed(self, captured: Captured, places: IntArray, plan: StepPlan) -> PendingStep:
        """Run a step whose numbers are set; ``places [R]`` are its rows in the results."""
        captured.graph.replay()
        if all(self._rows[row.row].plain for row in plan.rows):
            tokens = torch.empty(1, *captured.tokens.shape, dtype=torch.int64, pin_memory=True)
            status = torch.empty(1, *captured.status.shape, dtype=torch.int8, pin_memory=True)
            tokens[0].copy_(captured.tokens, non_blocking=True)
            status[0].copy_(captured.status, non_blocking=True)
            return self._captured_result(plan, places.tolist(), tokens, status)
        sampled = [index for index, row in enumerate(plan.rows) if row.sample]
        if not sampled:
            return self._unsampled(plan, {})
        assert captured.logits is not None, "mixed steps keep their logits"
        logits = captured.logits[self._to_device(places[sampled])]
        return self._sample(plan, sampled, logits, {})

    def _unsampled(
        self, plan: StepPlan, prompt_logprobs: Mapping[int, list[TokenLogprobs]]
    ) -> PendingStep:
        """A step that brings no token. It is waited for all the same.

        Else the host would run ahead through a long prompt, chunk after chunk, and write the inputs
        of one into the pinned buffers from which another's are still to be copied.
        """
        result = _result(plan, {}, {}, prompt_logprobs, {})
        if self.device.type == "cpu":
            return PendingStep(lambda: result)
        event = torch.cuda.Event()
        event.record()

        def finish() -> StepResult:
            event.synchronize()
            return result

        return PendingStep(finish, event.query)

    def _captured_result(
        self, plan: StepPlan, places: Sequence[int], tokens: Tensor, status: Tensor
    ) -> PendingStep:
        """Tokens that a graph chose, on their way to the host as ``[repeat, rows]``.

        Args:
            plan: the step.
            places: for each plan row the column of its token.
            tokens: int64, pinned.
            status: int8, pinned; a key of ``REASONS`` where the token means nothing.
        """
        event = torch.cuda.Event()
        event.record()

        def finish() -> StepResult:
            event.synchronize()
            columns = tokens.T.tolist()
            wrong = status.T.tolist() if status.any() else None
            rows = []
            for row, place in zip(plan.rows, places, strict=True):
                if not row.sample:
                    rows.append(RowResult(row.request_id, ()))
                elif wrong is not None and any(wrong[place]):
                    turn = next(turn for turn, value in enumerate(wrong[place]) if value)
                    position = row.start + row.num_tokens + turn
                    error = REASONS[wrong[place][turn]].at(position)
                    rows.append(RowResult(row.request_id, (), error=error))
                else:
                    rows.append(RowResult(row.request_id, tuple(columns[place])))
            return StepResult(plan.step_id, tuple(rows))

        return PendingStep(finish, event.query)

    def _admit(self, admissions: Sequence[Admission]) -> None:
        """Give rows to requests. What the device keeps of them is written for all at once."""
        given: dict[str, dict[int, Any]] = {"prompt_len": {}}
        for admission in admissions:
            row = admission.row
            for table in self._tables:
                table.clear(row)
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
                choice=_choice(admission.sampling),
            )
            given["prompt_len"][row] = admission.prompt_len
            for name, value in admission.prompt.row_state.items():
                given.setdefault(name, {})[row] = value
            for name, array in self._rows[row].token_state.items():
                self._token_state_widths[name] = array.shape[0]
        self._sampler.flush()
        for name, values in given.items():
            self._set_row_state(name, values)
        self._name_state()
        self._state_known = True

    def _set_row_state(self, name: str, values: Mapping[int, Any]) -> None:
        """Write what the family, or the engine, keeps of some rows, by row.

        All of a name's values have the dtype and shape of the first one.
        """
        rows = list(values)
        host = torch.stack([torch.as_tensor(value) for value in values.values()])
        if name not in self._row_state:
            shape = (self._max_rows, *host.shape[1:])
            self._row_state[name] = torch.zeros(shape, dtype=host.dtype, device=self.device)
        state = self._row_state[name]
        if host.dim() == 1 and len(rows) == 1:
            # Filled in by a kernel's argument, without a transfer.
            state[rows[0]] = host[0].item()
            return
        # As signed integers of the size: not every dtype is known to numpy and to indexing.
        bits = _SIGNED.get(state.dtype.itemsize, state.dtype)
        where, sent = all_to_device(
            [np.array(rows, dtype=np.int64), host.to(state.dtype).view(bits).numpy()], self.device
        )
        state.view(bits)[where] = sent

    def _name_state(self) -> None:
        """Tell the graphs what is kept a row and a token."""
        for graphs in (self._decode_graphs, self._mixed_graphs):
            if graphs is not None:
                graphs.set_state(self._row_state, self._token_state_widths)

    def _to_device(self, array: npt.NDArray[Any]) -> Tensor:
        return to_device(torch.from_numpy(array), self.device)

    def _mixed_step(self, plan: StepPlan) -> MixedStep:
        """The plan's numbers, token by token."""
        count = len(plan.rows)
        numbers = [(row.row, row.start, row.num_tokens, row.sample) for row in plan.rows]
        rows, first, lengths, samples = np.array(numbers, dtype=np.int64).T.copy()
        starts: IntArray = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        row_ids = np.repeat(np.arange(count), lengths)
        positions = np.arange(starts[-1]) + np.repeat(first - starts[:-1], lengths)
        token_ids = np.full(starts[-1], -1, dtype=np.int64)
        token_state: dict[str, IntArray] = {}
        for row, begin in zip(plan.rows, starts.tolist(), strict=False):
            known = self._rows[row.row]
            tokens = known.token_ids[row.start : row.start + row.num_tokens]
            token_ids[begin : begin + len(tokens)] = tokens
            for name, given in known.token_state.items():
                if name not in token_state:
                    token_state[name] = np.zeros((given.shape[0], starts[-1]), dtype=np.int64)
                piece = given[:, row.start : row.start + row.num_tokens]
                token_state[name][:, begin : begin + piece.shape[1]] = piece
        return MixedStep(
            rows=rows,
            starts=starts,
            num_decode_rows=_leading_ones(lengths),
            token_ids=token_ids,
            positions=positions,
            row_ids=row_ids,
            slots=[table.slots(rows, lengths, positions) for table in self._tables],
            samples=samples,
            token_state=token_state,
        )

    def _context(self, step: MixedStep) -> StepContext:
        """What the model is given of a step that is run without a graph."""
        kv_lens = step.positions[step.starts[1:] - 1] + 1
        longest = int(kv_lens.max())
        changed = [table for table in self._tables if table.changed]
        # The device has nothing to do before it has them.
        rows, row_ids, token_ids, positions, query_start, kv_lens_sent, *sent = all_to_device(
            [
                step.rows,
                step.row_ids,
                step.token_ids,
                step.positions,
                step.starts.astype(np.int32),
                kv_lens.astype(np.int32),
                *step.slots,
                *step.token_state.values(),
                *(array for table in changed for array in table.take_changes()),
            ],
            self.device,
        )
        remaining = iter(sent)
        slots = [next(remaining) for _ in step.slots]
        token_state = {name: next(remaining) for name in step.token_state}
        for table in changed:
            table.apply(next(remaining), next(remaining))
        if (step.token_ids < 0).any():
            # Sampled by an earlier step: only the device is sure to have it already.
            latest = self._sampler.last_tokens[rows][row_ids]
            token_ids = torch.where(token_ids < 0, latest, token_ids)
        groups = tuple(
            GroupMetadata(
                block_tables=table.device_table[rows, : -(-longest // table.block_size)],
                slot_mapping=mapping,
            )
            for table, mapping in zip(self._tables, slots, strict=True)
        )
        return StepContext(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            row_ids=row_ids,
            attn_metadata=AttentionMetadata(
                query_start=query_start,
                kv_lens=kv_lens_sent,
                max_query_len=int(np.diff(step.starts).max()),
                max_kv_len=longest,
                num_decode_rows=step.num_decode_rows,
                groups=groups,
            ),
            row_state={name: state[rows] for name, state in self._row_state.items()},
            token_state=token_state,
        )

    def _logits(self, hidden: Tensor, indices: IntArray) -> Tensor:
        """``[S, V]`` at the given places of the step's tokens."""
        return self._to_logits(hidden[0, self._to_device(indices)])

    def _to_logits(self, hidden: Tensor) -> Tensor:
        """``[S, H]`` to ``[S, V]``."""
        get_logits = getattr(self.model, "get_logits", None)
        logits: Tensor = hidden if get_logits is None else get_logits(hidden)
        return logits

    def _sample(
        self,
        plan: StepPlan,
        sampled: Sequence[int],
        logits: Tensor,
        prompt_logprobs: Mapping[int, list[TokenLogprobs]],
        turn: int = 0,
    ) -> PendingStep:
        """Choose a token for each plan row that ``sampled`` names from ``logits [S, V]``.

        ``turn`` counts the repeats of the plan.
        """
        rows = [plan.rows[index] for index in sampled]
        counts = [self._rows[row.row].sampling.logprobs for row in rows]
        wanted = [place for place, count in enumerate(counts) if count is not None]
        # The next step overwrites a graph's logits, and a recording's.
        reported = logits[wanted].float() if wanted else None
        positions = [row.start + row.num_tokens + turn for row in rows]
        result = self._sampler.sample(logits, [row.row for row in rows], positions)
        tokens = result.token_ids
        host_tokens, host_status, event = self._fetch(tokens, result.status)

        def finish() -> StepResult:
            if event is not None:
                event.synchronize()
            values = host_tokens.tolist()
            chosen = {index: values[place] for place, index in enumerate(sampled)}
            errors = {
                sampled[place]: error.at(positions[place])
                for place, status in enumerate(host_status.tolist())
                if (error := result.error(place, status)) is not None
            }
            logprobs: dict[int, TokenLogprobs] = {}
            if reported is not None:
                numbers = [counts[place] or 0 for place in wanted]
                entries = token_logprobs(reported, tokens[wanted], numbers)
                logprobs = {sampled[i]: entry for i, entry in zip(wanted, entries, strict=True)}
            return _result(plan, chosen, logprobs, prompt_logprobs, errors)

        return PendingStep(finish, None if event is None else event.query)

    def _fetch(
        self, tokens: Tensor, status: Tensor
    ) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
        """Copies for the host, and what to wait for before they are read."""
        if self.device.type == "cpu":
            return tokens, status, None
        host_tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host_status = torch.empty(status.shape, dtype=status.dtype, pin_memory=True)
        host_tokens.copy_(tokens, non_blocking=True)
        host_status.copy_(status, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host_tokens, host_status, event

    def _prompt_logprobs(
        self, plan: StepPlan, hidden: Tensor, starts: IntArray
    ) -> dict[int, list[TokenLogprobs]]:
        """For each row that asks: the tokens that this chunk's positions predict."""
        out: dict[int, list[TokenLogprobs]] = defaultdict(list)
        for index, plan_row in enumerate(plan.rows):
            row = self._rows[plan_row.row]
            count = row.sampling.prompt_logprobs
            last = min(plan_row.start + plan_row.num_tokens, row.prompt_len - 1)
            if count is None or last <= plan_row.start:
                continue
            places = starts[index] + np.arange(last - plan_row.start)
            targets = self._to_device(row.token_ids[plan_row.start + 1 : last + 1])
            logits = self._logits(hidden, places).float()
            out[index] = token_logprobs(logits, targets, [count] * len(places))
        return out


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, because what lies behind an attention mask must be finite.

    On a CPU they come from numpy, whose calloc takes memory page by page as it is written, where
    torch would write all of it at once: 4 GiB take 13 s.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)


def _supports_graphs(model: nn.Module) -> bool:
    """Whether the model's author allows its decode steps to be captured."""
    support = getattr(model, "support_cuda_graph", False)
    return bool(support() if callable(support) else support)


def _choice(params: SamplingParams) -> Choice | None:
    """How a captured step can choose by these parameters; None if not all is done in it."""
    if is_hosted(params) or params.logprobs is not None:
        return None
    if params.changes_logits:
        return Choice.ADJUSTED
    return Choice.GREEDY if params.greedy else Choice.RANDOM


def _launch_bound_tokens(model: nn.Module, num_layers: int) -> int:
    """Tokens of a step that the device computes while the host launches its kernels one by one.

    Seen on an H200 host: about 1 ms a layer for the launches, and 600 TFLOP/s for the products.
    """
    num_params = sum(param.numel() for param in dict.fromkeys(model.parameters()))
    return int(1e-3 * num_layers * 600e12 / (2 * num_params))


def _leading_ones(lengths: IntArray) -> int:
    """How many of the first rows have exactly one token."""
    longer = np.flatnonzero(lengths != 1)
    return int(longer[0]) if longer.size else len(lengths)


def _joined(plan: StepPlan, turns: Sequence[PendingStep]) -> PendingStep:
    """The results of a plan's repeats as one."""

    def finish() -> StepResult:
        rows = []
        for results in zip(*(turn.result().rows for turn in turns), strict=True):
            logprobs = [entry for result in results for entry in result.logprobs or ()]
            rows.append(
                RowResult(
                    request_id=results[0].request_id,
                    token_ids=tuple(token for result in results for token in result.token_ids),
                    logprobs=tuple(logprobs) or None,
                    error=next((r.error for r in results if r.error is not None), None),
                )
            )
        return StepResult(plan.step_id, tuple(rows))

    return PendingStep(finish, lambda: turns[-1].done)


def _result(
    plan: StepPlan,
    tokens: Mapping[int, int],
    logprobs: Mapping[int, TokenLogprobs],
    prompt_logprobs: Mapping[int, list[TokenLogprobs]],
    errors: Mapping[int, RowError],
) -> StepResult:
    rows = []
    for index, row in enumerate(plan.rows):
        bad = index in errors
        rows.append(
            RowResult(
                request_id=row.request_id,
                token_ids=(tokens[index],) if index in tokens and not bad else (),
                logprobs=(logprobs[index],) if index in logprobs and not bad else None,
                prompt_logprobs=(
                    tuple(prompt_logprobs[index]) if index in prompt_logprobs else None
                ),
                error=errors.get(index),
            )
        )
    return StepResult(plan.step_id, tuple(rows))
