"""Recorded decode steps on a CPU, repeated without the model's Python.

A step of a small model takes as long in Python as in its kernels. So a step is recorded, as a CUDA
graph is captured: the calls of our kernels and of torch's operations, on the tensors of the
recording, which stay where they are. Another step with as many rows writes its numbers into the
same tensor and makes the same calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine_core.kernels import compiled
from engine_core.runtime.step_batch import StepBatch, StepOutputs, StepState
from engine_core.step_context import StepContext

logger = logging.getLogger(__name__)

# With more rows Python is a small part of a step.
_MOST_ROWS = 16
# What the tensors of all recordings may take. A model of billions of weights reaches it with few
# rows, and has little use for recordings: its kernels take hundreds of times as long as its Python.
_MOST_BYTES = 128 * 2**20
# Composite operations whose result has a shape or an offset that depends on a tensor's values. In
# inference mode the dispatcher does not take them apart, so that their parts' tags are not seen.
_SHAPED_BY_NUMBERS = frozenset(
    {
        "aten::combinations",
        "aten::narrow.Tensor",
        "aten::nonzero_numpy",
        "aten::repeat_interleave.self_Tensor",
        "aten::tensor_split.tensor_indices_or_sections",
        "aten::where",
    }
)
# Operations that make a tensor without setting its values.
_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})

# Ways for Python to take a tensor's numbers that are no operations.
_TAKES_NUMBERS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})

Model = Callable[[StepContext], Tensor]


class NotRecordableError(Exception):
    """A step has an operation that a recording cannot repeat."""


class _NumbersStay(TorchFunctionMode):
    """Ends a recording before numbers of this step, such as places in the cache, are kept in it.

    Repeated, it would write to those places in every step.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _TAKES_NUMBERS:
            raise NotRecordableError(f"Python takes its numbers: {func}")
        return func(*args, **kwargs or {})


class _Recorder(TorchDispatchMode):
    """Appends each torch operation to ``calls``.

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
        if (
            func.name() in _SHAPED_BY_NUMBERS
            or torch.Tag.data_dependent_output in func.tags
            or (torch.Tag.dynamic_output_shape in func.tags and not _indexes_by_numbers(func, args))
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
            raise NotRecordableError(f"its result is no tensor: {func}")
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
    """Whether it is ``x[i]`` without masks, whose shape depends only on that of ``i``."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(x is None or x.dtype in (torch.int32, torch.int64) for x in args[1])


@dataclass(slots=True)
class _Recording:
    """One step's calls, and what they read and write.

    Attributes:
        batch: its numbers are overwritten with those of each step that is repeated.
        calls: compute ``outputs`` from them.
        outputs: the logits.
        kept: everything whose address a call holds.
        proven: whether its result has matched the model's once.
    """

    batch: StepBatch
    calls: list[Callable[[], object]]
    outputs: StepOutputs
    kept: list[Tensor]
    proven: bool = False


class RecordedSteps:
    """Recordings of a model's decode steps, one for each number of rows.

    A recording is made when a number of rows comes for the second time. Its first result is
    compared with the model's own. A model whose Python depends on the step's values does not agree,
    and is not recorded any more.
    """

    def __init__(self, state: StepState, logits_of: Model) -> None:
        """To be used under ``torch.inference_mode``.

        Args:
            state: what is kept from step to step.
            logits_of: a step's context, of decode rows only, to logits ``[R, V]``.
        """
        self._state = state
        self._logits_of = logits_of
        # None is for a number of rows that came once.
        self._recordings: dict[int, _Recording | None] = {}
        self._nbytes = 0
        self._refused = False

    def run(self, batch: StepBatch) -> StepOutputs | None:
        """Repeat a step; see :class:`~engine_core.runtime.step_batch.Steps`."""
        count = batch.key.tokens
        if not batch.decodes or self._refused or count > _MOST_ROWS:
            return None
        if count not in self._recordings:
            self._recordings[count] = None
            return None
        recording = self._recordings[count]
        if recording is None:
            if self._nbytes >= _MOST_BYTES:
                return None
            recording = self._recordings[count] = self._record(batch)
            return None if recording is None else recording.outputs
        recording.batch.numbers.copy_(batch.numbers)
        for call in recording.calls:
            call()
        if not recording.proven:
            recording.proven = True
            expected = self._run_model(recording.batch)
            given = recording.outputs.logits
            assert given is not None, "a recording gives logits"
            if not torch.allclose(given, expected, rtol=0, atol=0, equal_nan=True):
                self._refuse("what it computes depends on more than its tensors")
                return StepOutputs(expected)
        return recording.outputs

    def forget(self) -> None:
        """Drop all recordings: the family's state of a row or token has got a new part."""
        self._recordings.clear()
        self._nbytes = 0

    def _run_model(self, batch: StepBatch) -> Tensor:
        parts = self._state.split(batch, batch.numbers)
        return self._logits_of(self._state.context(batch, parts))

    def _record(self, batch: StepBatch) -> _Recording | None:
        # The numbers become the recording's own. It holds every step with as many rows.
        batch = replace(batch, max_kv_len=self._state.max_model_len)
        calls: list[Callable[[], object]] = []
        recorder = _Recorder(calls)
        try:
            with recorder, _NumbersStay(), compiled.recording(calls):
                logits = self._run_model(batch)
        except NotRecordableError as error:
            self._refuse(str(error))
            return None
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in recorder.kept}
        self._nbytes += sum(storage.nbytes() for storage in storages.values())
        return _Recording(batch, calls, StepOutputs(logits), recorder.kept)

    def _refuse(self, why: str) -> None:
        logger.debug("decode steps are not recorded: %s", why)
        self._refused = True
        self._recordings.clear()
