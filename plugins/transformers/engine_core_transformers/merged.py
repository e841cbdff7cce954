"""Linears of one input as one, and gated feed-forward parts as our blocks.

A model runs once on the meta device while a :class:`Watch` notes its modules' calls; what these
show decides. A feed-forward part is replaced only where random numbers show that ours is the same.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_core.nn import Linear, build_merged_colwise_linear
from engine_core.nn.activation import build_gated_activation
from engine_core.nn.blocks import FeedForward
from engine_core.nn.epilogue import Activated
from engine_core.nn.module import Module

# Whether a linear's rows, and not its inputs, are what the ranks share out, if they share any.
ByRows = Callable[[nn.Module], bool]
# Path of a linear in a checkpoint -> path of the one that it is a part of, and its number there.
Merges = dict[str, tuple[str, int]]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_GATED = ("gate_proj", "up_proj", "down_proj")
_PACKED = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a module; ``before`` and ``after`` count changes of its first input and output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    before: int
    after: int

    @property
    def alone(self) -> bool:
        """Whether it was a tensor that the module took, and nothing else, and one that it gave."""
        given = len(self.args) == 1 and not self.kwargs and isinstance(self.args[0], Tensor)
        return given and isinstance(self.output, Tensor)


class Watch:
    """The calls of a model's modules, each module's in order, the modules by their first call."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[nn.Module, list[Call]] = {}
        self._hooks = [
            module.register_forward_hook(self._note, with_kwargs=True) for module in model.modules()
        ]

    def _note(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        states = [x._version if isinstance(x, Tensor) else 0 for x in (*args[:1], output)]
        call = Call(args, kwargs, output, states[0] if args else 0, states[-1])
        self.calls.setdefault(module, []).append(call)

    def once(self, module: nn.Module) -> Call | None:
        """The call of a module that was called once, None of others."""
        calls = self.calls.get(module, [])
        return calls[0] if len(calls) == 1 else None

    def end(self) -> None:
        """Note nothing any more."""
        for hook in self._hooks:
            hook.remove()


class GatedMLP(FeedForward):
    """``down(act(gate(x)) * up(x))`` of linears that are there."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down
        self.act = build_gated_activation(activation)

    def ends(self) -> tuple[Linear, Activated, Linear]:
        """The gate's and up's linear, which is activated, and down's."""
        return self._between(self.gate_up_proj, self.down_proj)


def merge_feed_forward(model: nn.Module, watch: Watch, by_rows: ByRows) -> Merges:
    """Put our block in the place of each gated feed-forward part that is nothing else.

    Returns:
        the linears that became parts of others.
    """
    merges: Merges = {}
    for name, module in _once_there(model):
        calls = watch.calls.get(module, [])
        if not calls or not all(call.alone for call in calls):
            continue
        linears = {key: each for key, each in module.named_children() if type(each) is Linear}
        if not set(linears) & set(_PACKED) or _others(module, linears):
            continue
        if tuple(sorted(linears)) == tuple(sorted(_GATED)):
            gate, up, down = (linears[key] for key in _GATED)
            merged = _merged([gate, up], by_rows)
        elif tuple(sorted(linears)) == tuple(sorted(_PACKED)):
            merged, down = linears["gate_up_proj"], linears["down_proj"]
        else:
            continue
        activation = _activation(module, linears)
        if merged is None or activation is None:
            continue
        if "gate_proj" in linears:
            path = f"{name}.gate_up_proj"
            merges |= {f"{name}.gate_proj": (path, 0), f"{name}.up_proj": (path, 1)}
        model.set_submodule(name, GatedMLP(merged, down, activation))
    return merges


def _once_there(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that have one name, which is the checkpoint's."""
    named = list(model.named_modules(remove_duplicate=False))
    count = Counter(id(module) for _, module in named)
    return [(name, module) for name, module in named if count[id(module)] == 1 and name]


def _others(module: nn.Module, linears: dict[str, Linear]) -> bool:
    """Whether a module has parameters or buffers beside those of its linears."""
    own = {id(p) for linear in linears.values() for p in linear.parameters()}
    return any(id(p) not in own for p in module.parameters()) or any(True for _ in module.buffers())


def _merged(linears: list[Linear], by_rows: ByRows) -> Linear | None:
    """One linear in the place of several of one input; None if they are not alike."""
    first = linears[0]
    kinds = {(each.in_features, each.dtype, each.bias is None) for each in linears}
    if len(kinds) > 1 or not all(map(by_rows, linears)):
        return None
    ranks = first.context.tp_size
    rows = [each.out_features * ranks for each in linears]
    bias = first.bias is not None
    return build_merged_colwise_linear(first.in_features, rows, bias, dtype=first.dtype)


class _Sparse(nn.Module):
    """A linear with one number in each row of its matrix, whose product costs next to nothing."""

    def __init__(self, inputs: int, outputs: int, random: torch.Generator) -> None:
        super().__init__()
        self.index = torch.randint(inputs, (outputs,), generator=random)
        self.scale = torch.randn(outputs, generator=random)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., inputs]`` to ``[..., outputs]``."""
        return x[..., self.index] * self.scale


def _activation(module: nn.Module, linears: dict[str, Linear]) -> str | None:
    """The activation if the module's forward is that of :class:`GatedMLP`; None if it is not."""
    random = torch.Generator(device="cpu").manual_seed(0)
    with torch.device("cpu"):
        fakes = {
            key: _Sparse(each.in_features, each.out_features, random)
            for key, each in linears.items()
        }
        width = next(each for key, each in linears.items() if key != "down_proj").in_features
        x = torch.randn(2, 3, width, generator=random)
    probe = copy.copy(module)
    probe.__dict__["_modules"] = {**module._modules, **fakes}
    found = set(_ACTIVATIONS)
    # The larger ones would show a limit.
    for size in (1.0, 20.0):
        try:
            theirs = type(module).forward(probe, x * size)
            for name in list(found):
                if not torch.allclose(theirs, _gated(fakes, name, x * size), 1e-4, 1e-5 * size**2):
                    found.discard(name)
        except Exception:  # Its code is anything, which need not run with these linears.
            return None
    return found.pop() if len(found) == 1 else None


def _gated(linears: dict[str, _Sparse], activation: str, x: Tensor) -> Tensor:
    if "gate_proj" in linears:
        gate, up = linears["gate_proj"](x), linears["up_proj"](x)
    else:
        gate, up = linears["gate_up_proj"](x).chunk(2, dim=-1)
    out: Tensor = linears["down_proj"](_ACTIVATIONS[activation](gate) * up)
    return out


class _Product:
    """The product of a merged linear, of which each part is handed out once."""

    def __init__(self, linear: Linear, sizes: list[int]) -> None:
        self._linear, self._sizes = linear, sizes
        self._x: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def part(self, x: Tensor, index: int) -> Tensor:
        if self._x is not x or self._parts[index] is None:
            self._x, self._parts = x, list(self._linear(x).split(self._sizes, dim=-1))
        part = self._parts[index]
        assert part is not None, "it was made just now, or not taken yet"
        # Nothing is kept longer than it is wanted: prompts are long.
        self._parts[index] = None
        if not any(each is not None for each in self._parts):
            self._x = None
        return part


class Part(Module):
    """In the place of a linear that is a part of another: gives a view of that one's product."""

    def __init__(self, product: _Product, index: int) -> None:
        super().__init__()
        self._product, self._index = product, index

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]`` of the part."""
        return self._product.part(x, self._index)


class SameInputs:
    """The linears of attention modules that are called with one tensor, merged."""

    def __init__(
        self, model: nn.Module, attending: list[nn.Module], watch: Watch, by_rows: ByRows
    ) -> None:
        self.merges: Merges = {}
        self._before: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
        for name, module in _once_there(model):
            if module in attending:
                for group in _groups(module, watch):
                    self._merge(name, module, group, by_rows)

    def _merge(self, name: str, module: nn.Module, group: list[str], by_rows: ByRows) -> None:
        linears = [module.get_submodule(key) for key in group]
        merged = _merged(linears, by_rows)  # type: ignore[arg-type]
        together = "_".join(group)
        if set(group) == {"q_proj", "k_proj", "v_proj"}:
            together = "qkv_proj"
        if merged is None or hasattr(module, together):
            return
        self._before.append((module, dict(module._modules)))
        product = _Product(merged, [each.out_features for each in linears])  # type: ignore[misc]
        module.add_module(together, merged)
        for index, key in enumerate(group):
            module._modules[key] = Part(product, index)
            self.merges[f"{name}.{key}"] = (f"{name}.{together}", index)

    def undo(self) -> None:
        """Put the linears back."""
        for module, children in reversed(self._before):
            module.__dict__["_modules"] = children
        self.merges.clear()


def _groups(module: nn.Module, watch: Watch) -> list[list[str]]:
    """Names of linears in a module that got one tensor, unchanged between them."""
    names = {each: key for key, each in module.named_children() if type(each) is Linear}
    groups: dict[tuple[int, int], list[str]] = {}
    for child in watch.calls:
        call = watch.once(child)
        if child in names and call is not None and call.alone:
            groups.setdefault((id(call.args[0]), call.before), []).append(names[child])
    return [group for group in groups.values() if len(group) > 1]
