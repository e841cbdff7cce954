"""Traces of each layer's outputs, for debugging."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine_core.nn.attention import CachedLayer
from engine_core.steps import StepPlan

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer's output in one step.

    Attributes:
        name: the module's name in the model.
        shape: the output's shape; a decoder layer's is its residual stream.
        dtype: the output's element type, without ``torch.``.
        mean: of the finite values, 0 if there are none.
        max_abs: the largest magnitude of the finite values, 0 if there are none.
        num_non_finite: how many values are NaN or infinite.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    mean: float
    max_abs: float
    num_non_finite: int


@dataclass(slots=True)
class StepTrace:
    """The layers' outputs in one step.

    Attributes:
        phase: "decode" if every row computes the token that it generated last.
        num_tokens: tokens computed, of all rows together.
        layers: decoder layers, and modules outside of them that have no parts, in the order in
            which they ended. A layer that failed, and those after it, are not there.
        first_non_finite: the module, perhaps a part of a layer, that gave NaN or infinite values
            before any other did; None if there is none.
    """

    phase: Phase
    num_tokens: int
    layers: list[LayerRecord] = field(default_factory=list)
    first_non_finite: str | None = None


class LayerTrace:
    """Records the first prefill step and the first decode step that it is told of.

    Attributes:
        steps: what was recorded so far, at most one step of each phase.
    """

    def __init__(self, model: nn.Module) -> None:
        self.steps: list[StepTrace] = []
        self._model = model
        layers = tuple(decoder_layers(model))
        self._decoder_layers = frozenset(layers)
        inside = tuple(f"{name}." for name in layers)
        self._shown = self._decoder_layers | {
            name
            for name, module in model.named_modules()
            if not name.startswith(inside) and next(module.children(), None) is None
        }
        self._prompt_lens: dict[int, int] = {}

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """``plan`` is run in the ``with`` block; record it if it is the first of its phase."""
        for admission in plan.admitted:
            self._prompt_lens[admission.row] = admission.prompt_len
        phase = self._phase(plan)
        if any(step.phase == phase for step in self.steps):
            yield
            return
        step = StepTrace(phase, plan.num_tokens)
        self.steps.append(step)
        seen: set[str] = set()

        def note(name: str, value: Tensor) -> None:
            if name in seen:
                return  # A plan may be run several times.
            seen.add(name)
            record = _record(name, value)
            if record.num_non_finite and step.first_non_finite is None:
                step.first_non_finite = name
            if name in self._shown:
                step.layers.append(record)

        with watching(self._model, self._decoder_layers, note):
            yield

    def _phase(self, plan: StepPlan) -> Phase:
        # A row that was there before this trace has passed its prompt, or computes several tokens.
        prefill = any(
            row.num_tokens > 1 or row.start < self._prompt_lens.get(row.row, 0) for row in plan.rows
        )
        return "prefill" if prefill else "decode"


def _record(name: str, value: Tensor) -> LayerRecord:
    numbers = value.detach().float()
    finite = numbers.isfinite()
    count = int(finite.sum())
    kept = torch.where(finite, numbers, 0.0)
    return LayerRecord(
        name=name,
        shape=tuple(value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        mean=float(kept.sum(dtype=torch.float64)) / max(count, 1),
        max_abs=float(kept.abs().max()) if count else 0.0,
        num_non_finite=value.numel() - count,
    )


def decoder_layers(model: nn.Module, count: int | None = None) -> list[str]:
    """Names of the decoder layers: the items of the first ``nn.ModuleList`` that looks like them.

    Args:
        model: any model.
        count: how many there must be; if None each must hold a :class:`CachedLayer` instead.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        if count is None:
            fits = all(any(isinstance(m, CachedLayer) for m in item.modules()) for item in module)
        else:
            fits = len(module) == count
        if fits:
            return [f"{name}.{index}" for index in range(len(module))]
    return []


@contextmanager
def watching(
    model: nn.Module, layers: Collection[str], note: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call ``note`` with each module's name and output, where that is of floating point.

    Args:
        model: any model; lists of modules, and itself, are left out.
        layers: names of the decoder layers, whose output is their residual stream.
        note: called as soon as a module is done.
    """

    def hook(name: str) -> Any:
        def noted(module: nn.Module, args: Any, output: Any) -> None:
            del module, args
            value = _main_output(output, is_layer=name in layers)
            if value is not None and value.is_floating_point():
                note(name, value)

        return noted

    handles = [
        module.register_forward_hook(hook(name))
        for name, module in model.named_modules()
        if name and not isinstance(module, nn.ModuleList)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _main_output(output: Any, *, is_layer: bool) -> Tensor | None:
    """The tensor that stands for a module's output; None if there is none.

    A decoder layer returns its hidden states, or ``(x, residual)`` whose sum they are; another
    module may return more than one thing, the first of which is what it computed.
    """
    if isinstance(output, Tensor):
        return output
    if not isinstance(output, Sequence) or not output or not isinstance(output[0], Tensor):
        return None
    first = output[0]
    second = output[1] if len(output) > 1 else None
    if is_layer and isinstance(second, Tensor) and second.shape == first.shape:
        return first + second
    return first
