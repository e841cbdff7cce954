"""Traces of every module's outputs, and the first place where two models differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from engine_core.runtime.layer_trace import watching

TOLERANCE = 1e-4
"""Largest difference of float32 logits that is put down to rounding."""

# Of the largest value; float32 has 1e-7, and a layer adds up some hundred products.
_ROUNDING = 1e-5
_INPUT = "the input of the first decoder layer"


@dataclass
class Trace:
    """Outputs of a model's modules for one sequence.

    Attributes:
        layers: names of the decoder layers.
        outputs: module name to ``[length, features]`` float32, in the order in which the modules
            first finished. A decoder layer's is its residual stream.
    """

    layers: Sequence[str]
    outputs: dict[str, Tensor] = field(default_factory=dict)


class Recorder:
    """Records, while :meth:`recording`, what each module puts out for each token."""

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        self._model = model
        self._layers = tuple(layers)
        self._passes: dict[str, list[tuple[list[tuple[int, int]], Tensor]]] = {}
        self._tokens: list[tuple[int, int]] = []

    def begin(self, tokens: list[tuple[int, int]]) -> None:
        """The next pass computes these tokens, each given as (sequence, position)."""
        self._tokens = tokens

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Listen to the model inside the ``with`` block."""
        with watching(self._model, self._layers, self._note), ExitStack() as stack:
            if self._layers:
                layer = self._model.get_submodule(self._layers[0])
                stack.callback(first_input(layer, partial(self._note, _INPUT)).remove)
            yield

    def _note(self, name: str, value: Tensor) -> None:
        count = len(self._tokens)
        if value.shape[:1] == (count,) or value.shape[:2] == (1, count):
            rows = value.detach().to("cpu", torch.float32, copy=True).reshape(count, -1)
            self._passes.setdefault(name, []).append((self._tokens, rows))

    def trace(self, sequence: int, length: int) -> Trace:
        """One sequence's recorded outputs, of the modules that return one row per token."""
        trace = Trace(self._layers)
        for name, passes in self._passes.items():
            found: dict[int, Tensor] = {}
            for tokens, rows in passes:
                for (owner, position), row in zip(tokens, rows, strict=True):
                    if owner == sequence:
                        found[position] = row
            if len(found) == length and len({row.shape for row in found.values()}) == 1:
                trace.outputs[name] = torch.stack([found[place] for place in range(length)])
        return trace


def first_input(layer: nn.Module, note: Callable[[Tensor], object]) -> RemovableHandle:
    """Call ``note`` with a copy of the first tensor that ``layer`` is called with."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        del module
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        found = next(tensors, None)
        if found is not None:
            note(found.detach().to("cpu", copy=True))

    return layer.register_forward_pre_hook(hook, with_kwargs=True)


def difference(ours: Tensor, theirs: Tensor) -> tuple[float, int]:
    """The largest difference of two ``[length, ...]``, and the first position beyond the tolerance.

    NaN counts as infinitely far.
    """
    apart = (ours - theirs).abs().flatten(1).nan_to_num(nan=torch.inf).amax(dim=1)
    return float(apart.max()), int((apart > TOLERANCE).int().argmax())


def explain(ours: Trace, theirs: Trace, prefix: str = "") -> str:
    """The first decoder layer, and the first module in it, that differ, and by how much.

    Args:
        ours: of the model under test.
        theirs: of the same model run in another way, or of a reference.
        prefix: what the reference's names may begin with and ours do not.
    """
    pairs = _pairs(ours, theirs, prefix)
    layers = {name: other for name, other in pairs.items() if name in ours.layers}
    if not layers:
        return "No decoder layer of the two could be matched, so the place cannot be named."
    for floor in (1.0, 0.0):  # Small values are looked at closely if nothing larger shows.
        apart = {
            name: _apart(ours.outputs[name], theirs.outputs[other], floor)
            for name, other in pairs.items()
        }
        first = next((name for name in layers if apart[name] > 0), None)
        if first is not None:
            break
    else:
        return "Every decoder layer agrees: the difference arises after the last one."
    assert first is not None, "the loop ended with one"
    modules = [name for name in pairs if apart[name] > 0 and name not in layers]
    before = next((name for name in modules if not _in_layer(name, ours.layers)), None)
    if _INPUT in pairs and not apart[_INPUT]:
        before = None  # Something before the layers differs by what is made up for there.
    within = next((name for name in modules if name.startswith(f"{first}.")), None)
    sizes = ", ".join(f"{name} by {apart[name]:.2g}" for name in layers)
    place = f"The first decoder layer that differs is {first} (layers differ: {sizes})"
    if before is not None and list(pairs).index(before) < list(pairs).index(first):
        return f"{place}; before it {before} differs, by {apart[before]:.2g}."
    if within is not None:
        return f"{place}; inside it {within} differs first, by {apart[within]:.2g}."
    return f"{place}."


def _in_layer(name: str, layers: Sequence[str]) -> bool:
    return any(name.startswith(f"{layer}.") for layer in layers)


def _pairs(ours: Trace, theirs: Trace, prefix: str) -> dict[str, str]:
    """Modules of the same place in both: layers by their index, what is in them by its name."""
    pairs: dict[str, str] = {}
    for name in ours.outputs:
        candidates = [name, f"{prefix}.{name}"]
        for mine, other in zip(ours.layers, theirs.layers, strict=False):
            if name == mine or name.startswith(f"{mine}."):
                candidates = [other + name[len(mine) :]]
        for candidate in candidates:
            found = theirs.outputs.get(candidate)
            if found is not None and found.shape == ours.outputs[name].shape:
                pairs[name] = candidate
                break
    return pairs


def _apart(ours: Tensor, theirs: Tensor, floor: float) -> float:
    """The largest difference, or 0 if it is within rounding of such values, or of ``floor``."""
    apart, _ = difference(ours, theirs)
    largest = float(theirs.nan_to_num().abs().max())
    allowed = TOLERANCE * max(floor, largest) if floor else _ROUNDING * largest
    return apart if apart > allowed else 0.0
