"""Decode steps on a CPU that are run again without the model's Python.

A step of a small model takes as long in Python as in its kernels. So a step is recorded, as a CUDA
graph is captured: the calls of our kernels and of torch's operations, on the tensors of the
recording, which stay where they are. Another step with as many rows writes its numbers into the
same inputs and makes the same calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine_core.kernels import compiled
from engine_core.runtime.block_tables import BlockTables
from engine_core.step_context import AttentionMetadata, GroupMetadata, StepContext

logger = logging.getLogger(__name__)

# With more rows Python is a small part of a step.
_MOST_ROWS = 16
# What the tensors of all recordings may take. A model of billions of weights reaches it with few
# rows, and has little use for recordings: its kernels take hundreds of times as long as its Python.
_MOST_BYTES = 128 * 2**20
# What makes a tensor without setting its numbers.
_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})

Model = Callable[[StepContext], Tensor]


class NotRecordableError(Exception):
    """A step does what a recording cannot repeat."""


class _Recorder(TorchDispatchMode):
    """Appends to ``calls`` what torch is asked to do.

    Attributes:
        calls: each repeats one operation or kernel on the same tensors.
        kept: all tensors that were made; the calls know some by their address only.
    """

    def __init__(self, calls: list[Callable[[], object]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls
        self.kept: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # To keep torch.compile away from a mode, torch imports all of it: 0.6 s in the first step
        # that is recorded.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in ("aten", "mkldnn"):
            raise NotRecordableError(f"it calls {func}")
        if torch.Tag.data_dependent_output in func.tags or (
            torch.Tag.dynamic_output_shape in func.tags and not _indexes_by_numbers(func, args)
        ):
            raise NotRecordableError(f"it reads numbers that differ from step to step: {func}")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotRecordableError(f"it draws random numbers: {func}")
        out = func(*args, **kwargs)
        outs = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]
        if func._schema.is_mutable:
            self.calls.append(lambda: func(*args, **kwargs))
            return out
        if not outs:
            raise NotRecordableError(f"it asks for what is no tensor: {func}")
        if func._opname in _EMPTY:
            self.kept += outs
            return out
        given = {
            x.untyped_storage().data_ptr()
            for x in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(x, Tensor) and x.layout == torch.strided
        }
        fresh = [x.untyped_storage().data_ptr() not in given for x in outs]
        if not any(fresh):
            return out  # a view of what is there
        if not all(fresh):
            raise NotRecordableError(f"it gives views and new tensors at once: {func}")
        self.kept += outs

        def again() -> None:
            new = torch.utils._pytree.tree_leaves(func(*args, **kwargs))
            for old, value in zip(outs, (x for x in new if isinstance(x, Tensor)), strict=True):
                old.copy_(value)

        if out is outs[0]:
            self.calls.append(lambda: outs[0].copy_(func(*args, **kwargs)))
        else:
            self.calls.append(again)
        return out


def _indexes_by_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is ``x[i]`` without masks, whose shape hangs on that of ``i`` only."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(x is None or x.dtype in (torch.int32, torch.int64) for x in args[1])


@dataclass(slots=True)
class _Recording:
    """One step's calls, and what they read and write.

    Attributes:
        context: with the tensors into which each step's numbers are written.
        calls: what computes ``logits`` of them.
        logits: ``[R, V]``.
        kept: everything whose address a call holds.
        nbytes: of what is kept.
        proven: whether it has given once what the model gave.
    """

    context: StepContext
    calls: list[Callable[[], object]]
    logits: Tensor
    kept: list[Tensor]
    nbytes: int
    proven: bool = False


class RecordedSteps:
    """Recordings of a model's decode steps, for each number of rows one.

    A recording is made when a number of rows comes for the second time. What it gives is compared
    with the model's own the first time that it is used: a model whose Python decides by numbers of
    the step would not agree, and is not recorded any more.
    """

    def __init__(
        self,
        model: Model,
        tables: Sequence[BlockTables],
        last_tokens: Tensor,
        max_model_len: int,
    ) -> None:
        """To be used under ``torch.inference_mode``.

        Args:
            model: a step's context, of decode rows only, to logits ``[R, V]``.
            tables: one a cache group.
            last_tokens: ``[max_rows]`` int64, the token that each row sampled last.
            max_model_len: tokens of the longest sequence.
        """
        self._model = model
        self._tables = tables
        self._last_tokens = last_tokens
        self._max_model_len = max_model_len
        # None is for a number of rows that came once.
        self._recordings: dict[int, _Recording | None] = {}
        self._nbytes = 0
        self._refused = False

    def logits(
        self, rows: list[int], positions: list[int], row_state: Mapping[str, Tensor]
    ) -> Tensor | None:
        """``[R, V]`` of a step, overwritten by the next; None if it has to be run by the model.

        Args:
            rows: of the persistent batch, each of which computes one token.
            positions: of these tokens.
            row_state: of the whole batch, as in :class:`StepContext`.
        """
        count = len(rows)
        if self._refused or count > _MOST_ROWS:
            return None
        if count not in self._recordings:
            self._recordings[count] = None
            return None
        recording = self._recordings[count]
        if recording is not None and recording.context.row_state.keys() != row_state.keys():
            self._nbytes -= recording.nbytes
            recording = None
        if recording is None and self._nbytes >= _MOST_BYTES:
            return None
        context = self._context(count, row_state) if recording is None else recording.context
        self._write(context, rows, positions, row_state)
        if recording is None:
            self._recordings[count] = recording = self._record(context)
            return None if recording is None else recording.logits
        for call in recording.calls:
            call()
        if not recording.proven:
            recording.proven = True
            expected = self._model(context)
            if not torch.allclose(recording.logits, expected, rtol=0, atol=0, equal_nan=True):
                self._refuse("what it computes hangs on more than its tensors")
                return expected
        return recording.logits

    def _context(self, count: int, row_state: Mapping[str, Tensor]) -> StepContext:
        """Tensors for a step's numbers."""
        groups = tuple(
            GroupMetadata(
                block_tables=table.device_table[:count].clone(),
                slot_mapping=torch.zeros(count, dtype=torch.int64),
            )
            for table in self._tables
        )
        return StepContext(
            input_ids=torch.zeros(1, count, dtype=torch.int64),
            position_ids=torch.zeros(1, count, dtype=torch.int64),
            row_ids=torch.arange(count),
            attn_metadata=AttentionMetadata(
                query_start=torch.arange(count + 1, dtype=torch.int32),
                kv_lens=torch.zeros(count, dtype=torch.int32),
                max_query_len=1,
                max_kv_len=self._max_model_len,
                num_decode_rows=count,
                groups=groups,
            ),
            row_state={name: state[:count].clone() for name, state in row_state.items()},
        )

    def _write(
        self,
        context: StepContext,
        rows: list[int],
        positions: list[int],
        row_state: Mapping[str, Tensor],
    ) -> None:
        index, places = torch.tensor(rows), torch.tensor(positions)
        torch.index_select(self._last_tokens, 0, index, out=context.input_ids[0])
        context.position_ids[0].copy_(places)
        context.attn_metadata.kv_lens.copy_(places + 1)
        for table, group in zip(self._tables, context.attn_metadata.groups, strict=True):
            torch.index_select(table.device_table, 0, index, out=group.block_tables)
            slots = [table.slot(row, place) for row, place in zip(rows, positions, strict=True)]
            group.slot_mapping.copy_(torch.tensor(slots))
        for name, state in row_state.items():
            torch.index_select(state, 0, index, out=context.row_state[name])

    def _record(self, context: StepContext) -> _Recording | None:
        calls: list[Callable[[], object]] = []
        recorder = _Recorder(calls)
        try:
            with recorder, compiled.recording(calls):
                logits = self._model(context)
        except NotRecordableError as error:
            self._refuse(str(error))
            return None
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in recorder.kept}
        nbytes = sum(storage.nbytes() for storage in storages.values())
        self._nbytes += nbytes
        return _Recording(context, calls, logits, recorder.kept, nbytes)

    def _refuse(self, why: str) -> None:
        logger.debug("decode steps are not recorded: %s", why)
        self._refused = True
        self._recordings.clear()
