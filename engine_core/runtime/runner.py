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
from engine_core.nn.attention import Attention
from engine_core.runtime.block_tables import BlockTables, IntArray
from engine_core.runtime.graphs import DecodeGraphs
from engine_core.runtime.memory import CachePlan
from engine_core.runtime.platform import to_device
from engine_core.runtime.sampler import Sampler, token_logprobs
from engine_core.step_context import AttentionMetadata, GroupMetadata, StepContext
from engine_core.steps import Admission, RowResult, StepPlan, StepResult, TokenLogprobs


@dataclass(slots=True)
class _Row:
    """What the host knows of the request in one row of the persistent batch."""

    token_ids: IntArray
    prompt_len: int
    sampling: SamplingParams
    token_state: Mapping[str, IntArray]

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken as it is, and nothing else is reported."""
        params = self.sampling
        return params.greedy and params.logprobs is None and not params.changes_logits


class PendingStep:
    """A step that was submitted; on a GPU it may still be running."""

    def __init__(self, finish: Callable[[], StepResult]) -> None:
        self._finish = finish

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
    ) -> None:
        """The model is loaded and on ``device``.

        Args:
            model: keeps the interface of DESIGN: ``forward`` and, if it can, ``get_logits`` and
                ``prepare_inputs_for_generation``.
            plan: the cache to make.
            scheduler_config: rows and lengths.
            device: where everything runs.
            eos_token_ids: what ``min_tokens`` forbids besides a request's own stop tokens.
            eager: launch every kernel one by one, also where CUDA graphs could be replayed.
        """
        self.model = model
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
        self._rows: dict[int, _Row] = {}
        # One row more than there are sequences: a graph's padding is computed in it.
        self._max_rows = rows + 1
        self._sampler = Sampler(self._max_rows, device)
        self._row_state: dict[str, Tensor] = {
            "prompt_len": torch.zeros(self._max_rows, dtype=torch.int64, device=device)
        }
        self._token_state_widths: dict[str, int] = {}
        self._graphs: DecodeGraphs | None = None
        if device.type == "cuda" and not eager and _supports_graphs(model):
            self._graphs = DecodeGraphs(
                self._decode_logits,
                self._tables,
                self._sampler.last_tokens,
                rows,
                scheduler_config.max_model_len,
            )
            self._graphs.set_state(self._row_state, self._token_state_widths)
            with torch.inference_mode():
                self._graphs.capture_all()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        """Run ``plan``; the result may be asked for later."""
        for admission in plan.admitted:
            self._admit(admission)
        for row in plan.rows:
            for table, blocks in zip(self._tables, row.new_blocks, strict=True):
                table.append(row.row, blocks)
        if self._graphs is not None and self._only_decodes(plan):
            return self._replay(self._graphs, plan)
        assert plan.repeat == 1, f"only a captured step is repeated, not {plan.repeat} times"
        context, starts = self._context(plan)
        hidden = self._forward(context)
        prompt_logprobs = self._prompt_logprobs(plan, hidden, starts)
        sampled = [index for index, row in enumerate(plan.rows) if row.sample]
        if not sampled:
            return PendingStep(lambda: _result(plan, {}, {}, prompt_logprobs, {}))
        logits = self._logits(hidden, starts[1:][sampled] - 1)
        return self._sample(plan, sampled, logits, prompt_logprobs)

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

    def _decode_logits(self, context: StepContext) -> Tensor:
        """``[B, V]`` float32 of a step in which every row computes one token."""
        return self._to_logits(self._forward(context)[0])

    def _only_decodes(self, plan: StepPlan) -> bool:
        """Whether every row computes the token that it sampled last, and samples the next."""
        return all(
            row.num_tokens == 1 and row.sample and row.start >= len(self._rows[row.row].token_ids)
            for row in plan.rows
        )

    def _replay(self, graphs: DecodeGraphs, plan: StepPlan) -> PendingStep:
        rows = [row.row for row in plan.rows]
        count = len(rows)
        bucket = graphs.begin(rows, [row.start for row in plan.rows])
        if not all(self._rows[row].greedy for row in rows):
            assert plan.repeat == 1, "only greedy steps are repeated on the device"
            logits, _, _ = graphs.replay(bucket)
            return self._sample(plan, list(range(count)), logits[:count], {})
        tokens = torch.empty(plan.repeat, bucket, dtype=torch.int64, pin_memory=True)
        status = torch.empty(plan.repeat, bucket, dtype=torch.int8, pin_memory=True)
        for turn in range(plan.repeat):
            _, chosen, bad = graphs.replay(bucket)
            tokens[turn].copy_(chosen, non_blocking=True)
            status[turn].copy_(bad, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def finish() -> StepResult:
            event.synchronize()
            columns = tokens.T.tolist()
            wrong = status[:, :count].any(dim=0).tolist()
            return StepResult(
                plan.step_id,
                tuple(
                    RowResult(
                        request_id=row.request_id,
                        token_ids=() if bad else tuple(column),
                        error=(
                            f"the model gave logits that are not finite at or after position "
                            f"{row.start + 1}"
                            if bad
                            else None
                        ),
                    )
                    for row, column, bad in zip(plan.rows, columns, wrong, strict=False)
                ),
            )

        return PendingStep(finish)

    def _admit(self, admission: Admission) -> None:
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
        )
        state = {"prompt_len": admission.prompt_len, **admission.prompt.row_state}
        for name, given in state.items():
            value = torch.as_tensor(given)
            if name not in self._row_state:
                shape = (self._max_rows, *value.shape)
                self._row_state[name] = torch.zeros(shape, dtype=value.dtype, device=self.device)
            # A number is filled in by a kernel's argument, without a transfer.
            self._row_state[name][row] = (
                value.item() if value.dim() == 0 else to_device(value, self.device)
            )
        for name, array in self._rows[row].token_state.items():
            self._token_state_widths[name] = array.shape[0]
        if self._graphs is not None:
            self._graphs.set_state(self._row_state, self._token_state_widths)

    def _to_device(self, array: npt.NDArray[Any]) -> Tensor:
        return to_device(torch.from_numpy(array), self.device)

    def _context(self, plan: StepPlan) -> tuple[StepContext, IntArray]:
        """The step's context and where each row's tokens begin, ``[R + 1]``."""
        count = len(plan.rows)
        batch_rows = np.fromiter((row.row for row in plan.rows), np.int64, count)
        first = np.fromiter((row.start for row in plan.rows), np.int64, count)
        lengths = np.fromiter((row.num_tokens for row in plan.rows), np.int64, count)
        starts: IntArray = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        row_ids = np.repeat(np.arange(count), lengths)
        positions = np.arange(starts[-1]) + np.repeat(first - starts[:-1], lengths)

        tokens = np.full(starts[-1], -1, dtype=np.int64)
        for index, row in enumerate(plan.rows):
            known = self._rows[row.row].token_ids[row.start : row.start + row.num_tokens]
            tokens[starts[index] : starts[index] + len(known)] = known
        input_ids = self._to_device(tokens)
        device_rows = self._to_device(batch_rows)
        device_row_ids = self._to_device(row_ids)
        if (tokens < 0).any():
            # Sampled by an earlier step: only the device is sure to have it already.
            latest = self._sampler.last_tokens[device_rows][device_row_ids]
            input_ids = torch.where(input_ids < 0, latest, input_ids)

        for table in self._tables:
            table.flush()
        kv_lens = first + lengths
        longest = int(kv_lens.max())
        groups = tuple(
            GroupMetadata(
                block_tables=table.device_table[device_rows, : -(-longest // table.block_size)],
                slot_mapping=self._to_device(table.slots(batch_rows[row_ids], positions)),
            )
            for table in self._tables
        )
        context = StepContext(
            input_ids=input_ids.unsqueeze(0),
            position_ids=self._to_device(positions).unsqueeze(0),
            row_ids=device_row_ids,
            attn_metadata=AttentionMetadata(
                query_start=self._to_device(starts.astype(np.int32)),
                kv_lens=self._to_device(kv_lens.astype(np.int32)),
                max_query_len=int(lengths.max()),
                max_kv_len=longest,
                num_decode_rows=_leading_ones(lengths),
                groups=groups,
            ),
            row_state={name: state[device_rows] for name, state in self._row_state.items()},
            token_state=self._token_state(plan, starts),
        )
        return context, starts

    def _token_state(self, plan: StepPlan, starts: IntArray) -> dict[str, Tensor]:
        arrays: dict[str, IntArray] = {}
        for index, row in enumerate(plan.rows):
            for name, given in self._rows[row.row].token_state.items():
                if name not in arrays:
                    arrays[name] = np.zeros((given.shape[0], int(starts[-1])), dtype=np.int64)
                piece = given[:, row.start : row.start + row.num_tokens]
                arrays[name][:, starts[index] : starts[index] + piece.shape[1]] = piece
        return {name: self._to_device(array) for name, array in arrays.items()}

    def _logits(self, hidden: Tensor, indices: IntArray) -> Tensor:
        """``[S, V]`` float32 at the given places of the step's tokens."""
        return self._to_logits(hidden[0, self._to_device(indices)])

    def _to_logits(self, hidden: Tensor) -> Tensor:
        """``[S, H]`` to ``[S, V]`` float32."""
        get_logits = getattr(self.model, "get_logits", None)
        logits: Tensor = hidden if get_logits is None else get_logits(hidden)
        return logits.float()

    def _sample(
        self,
        plan: StepPlan,
        sampled: Sequence[int],
        logits: Tensor,
        prompt_logprobs: Mapping[int, list[TokenLogprobs]],
    ) -> PendingStep:
        """Choose a token for each plan row that ``sampled`` names from ``logits [S, V]``."""
        rows = [plan.rows[index] for index in sampled]
        counts = [self._rows[row.row].sampling.logprobs for row in rows]
        wanted = [place for place, count in enumerate(counts) if count is not None]
        # Sampling overwrites the logits; what is reported are the model's own.
        untouched = logits[wanted].clone() if wanted else None
        positions = [row.start + row.num_tokens for row in rows]
        result = self._sampler.sample(logits, [row.row for row in rows], positions)
        tokens = result.token_ids
        host_tokens, host_status, event = self._fetch(tokens, result.status)

        def finish() -> StepResult:
            if event is not None:
                event.synchronize()
            values = host_tokens.tolist()
            chosen = {index: values[place] for place, index in enumerate(sampled)}
            errors = {
                sampled[place]: f"{error} at position {positions[place]}"
                for place, status in enumerate(host_status.tolist())
                if (error := result.error(place, status)) is not None
            }
            logprobs: dict[int, TokenLogprobs] = {}
            if untouched is not None:
                reported = [counts[place] or 0 for place in wanted]
                entries = token_logprobs(untouched, tokens[wanted], reported)
                logprobs = {sampled[i]: entry for i, entry in zip(wanted, entries, strict=True)}
            return _result(plan, chosen, logprobs, prompt_logprobs, errors)

        return PendingStep(finish)

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
            logits = self._logits(hidden, places)
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


def _leading_ones(lengths: IntArray) -> int:
    """How many of the first rows have exactly one token."""
    longer = np.flatnonzero(lengths != 1)
    return int(longer[0]) if longer.size else len(lengths)


def _result(
    plan: StepPlan,
    tokens: Mapping[int, int],
    logprobs: Mapping[int, TokenLogprobs],
    prompt_logprobs: Mapping[int, list[TokenLogprobs]],
    errors: Mapping[int, str],
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
