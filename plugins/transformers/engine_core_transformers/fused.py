"""Our kernels in the place of what transformers' code computes in many launches.

A norm takes seven launches there and a rotation of queries and keys ten, which is what decoding
waits for. A module or function is replaced only where random numbers show that ours gives the same.
What stands between a layer's modules is in :mod:`~engine_core_transformers.layers`.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.kernels.norm import rms_norm
from engine_core.kernels.rotary import apply_rotary
from engine_core_transformers.attention import PagedAttention, Step, Turn, attention_of, rows

_ROTATION = "apply_rotary_pos_emb"
# The module of the decorator that takes arguments by their former names.
_RENAMING = "transformers.utils.deprecation"
Rotate = Callable[..., tuple[Tensor, Tensor]]


class Norm:
    """A root mean square norm of a model, by our kernel."""

    def __init__(self, module: nn.Module, eps: float, offset: float, step: Step) -> None:
        self._module, self._eps, self._offset, self._step = module, eps, offset, step

    def __call__(self, x: Tensor) -> Tensor:
        """``norm(x)``, which the layer before may have computed together with x."""
        kept, self._step.normed = self._step.normed, None
        if kept is not None and kept[0] is self and kept[1] is x:
            return kept[2]
        weight: Tensor = self._module.weight  # type: ignore[assignment]
        return rms_norm(x, weight, self._eps, offset=self._offset)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``norm(x + residual)`` and that sum."""
        weight: Tensor = self._module.weight  # type: ignore[assignment]
        return rms_norm(x, weight, self._eps, residual=residual, offset=self._offset)

    def ahead(self, x: Tensor, residual: Tensor) -> Tensor:
        """``x + residual``, whose norm is kept for when the model asks for it."""
        normed, total = self.add(x, residual)
        self._step.normed = (self, total, normed)
        return total


def replace_norms(model: nn.Module, dtype: torch.dtype, step: Step) -> dict[nn.Module, Norm]:
    """Have our kernel compute each root mean square norm of ``model`` with weights of ``dtype``."""
    norms = {}
    for module in model.modules():
        kind = _kind_of_norm(module, dtype)
        if kind is not None:
            norms[module] = module.forward = Norm(module, *kind, step)
    return norms


def _kind_of_norm(module: nn.Module, dtype: torch.dtype) -> tuple[float, float] | None:
    """The eps and the offset of a root mean square norm, None for another module."""
    weight = module._parameters.get("weight")
    stated = [vars(module)[key] for key in ("variance_epsilon", "eps") if key in vars(module)]
    plain = "RMSNorm" in type(module).__name__ and len(module._parameters) == 1
    plain = plain and len(stated) == 1 and isinstance(stated[0], float)
    if not plain or weight is None or weight.dim() != 1 or weight.dtype is not dtype:
        return None
    (eps,) = stated
    probe = copy.copy(module)
    with torch.device("cpu"):
        draw = torch.randn(4, len(weight), generator=torch.Generator("cpu").manual_seed(0))
    draw = draw.float()
    # So small that a forgotten or another eps would show.
    x, scale = draw[:3] * eps**0.5, draw[3]
    probe.__dict__["_parameters"] = {"weight": nn.Parameter(scale, requires_grad=False)}
    try:
        theirs = type(module).forward(probe, x)
    except (TypeError, ValueError, RuntimeError):  # It wants more than x, or other shapes.
        return None
    for offset in (0.0, 1.0):
        if _close(theirs, rms_norm(x, scale, eps, offset=offset)):
            return eps, offset
    return None


class Rotations:
    """The rotations of a model's attention modules.

    While the model runs once, each call is looked at; :meth:`replace` has our kernel do those that
    were what it can do. Functions are replaced for this model's modules alone.
    """

    def __init__(self, modules: list[nn.Module], step: Step) -> None:
        self._step, self._attending = step, modules
        self._seen: dict[nn.Module, list[bool | None]] = {}
        self._given: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        for module in modules:
            forward = _own_forward(module)
            plain = isinstance(forward, FunctionType) and inspect.unwrap(forward) is forward
            original = forward.__globals__.get(_ROTATION) if plain else None
            if original is None or _ROTATION not in forward.__code__.co_names:
                continue
            self._seen[module] = []
            self._call_instead(module, self._watched(module, original))

    def _call_instead(self, module: nn.Module, rotate: Rotate) -> None:
        """Have the module's forward find ``rotate`` under the name of the original."""
        forward: Any = _own_forward(module)
        names = {**forward.__globals__, _ROTATION: rotate}
        code, defaults, cells = forward.__code__, forward.__defaults__, forward.__closure__
        copied = FunctionType(code, names, forward.__name__, defaults, cells)
        copied.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(copied, module)

    def _watched(self, module: nn.Module, original: Rotate) -> Rotate:
        def rotate(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            known = None if kwargs or len(args) != 4 else _pairing(original, *args)
            self._seen[module].append(known)
            self._given[module] = original(*args, **kwargs)
            return self._given[module]

        return rotate

    def replace(self) -> int:
        """Put our kernel, or the original, where calls were looked at; the number of ours."""
        count = 0
        uses = Counter(id(attention_of(module).offered[1]) for module in self._attending)
        for module, seen in self._seen.items():
            pairing = seen[0] if len(set(seen)) == 1 else None
            if pairing is None:
                del module.forward
                continue
            # What the module hands on as it is may as well be rotated where it is stored.
            layer, given = attention_of(module), self._given[module]
            direct = all(a is b for a, b in zip(layer.offered, given, strict=True))
            # A layer after it may take the same keys, rotated.
            direct = direct and uses[id(layer.offered[1])] == 1
            self._call_instead(module, self._ours(pairing, layer if direct else None))
            count += 1
        self._given.clear()
        return count

    def restore(self) -> None:
        """Put the originals back."""
        for module in self._seen:
            module.__dict__.pop("forward", None)

    def _ours(self, interleaved: bool, layer: PagedAttention | None) -> Rotate:
        step = self._step

        def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            # All layers get the same two tensors, so these are made once a step.
            kept = step.angles.get(id(cos))
            if kept is None:
                kept = (cos, *_angles(cos, sin, interleaved))
                step.angles[id(cos)] = kept
            turn = Turn(q, k, kept[1], kept[2], interleaved)
            if layer is None:
                turn.now()
            else:
                layer.turn = turn
            return q, k

        return rotate


def _own_forward(module: nn.Module) -> Any:
    """The forward of a module's class, without what renames arguments of older releases.

    Since 5.24 transformers wraps that of each attention so; its layers use the new names.
    """
    forward: Any = type(module).forward
    while _is_renaming(forward):
        forward = forward.__wrapped__
    return forward


def _is_renaming(function: Any) -> bool:
    names = getattr(function, "__globals__", {})
    return hasattr(function, "__wrapped__") and names.get("__name__") == _RENAMING


def _angles(cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """``[1, T, 2 * half]`` to ``[T, half]`` in float32."""
    half = cos.shape[-1] // 2
    which = slice(None, None, 2) if interleaved else slice(half)
    return cos[0, :, which].float().contiguous(), sin[0, :, which].float().contiguous()


def _pairing(original: Rotate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool | None:
    """Whether the original turns neighbours as our kernel does (True), or halves (False).

    None if it does something else, or changes shapes.
    """
    fits = q.dim() == k.dim() == 4 and q.shape[0] == 1 and cos.dim() == 3 and cos.shape[0] == 1
    if (
        not fits
        or q.data_ptr() == k.data_ptr()
        or q.stride(-1) != 1
        or k.stride(-1) != 1
        or cos.shape[-1] % 2
    ):
        return None
    wide = [x.detach().float() for x in (q, k, cos, sin)]
    theirs = original(*(x.clone() for x in wide))
    for interleaved in (False, True):
        ours = [x.clone() for x in wide[:2]]
        turns = _angles(wide[2], wide[3], interleaved)
        try:
            apply_rotary(rows(ours[0]), rows(ours[1]), *turns, interleaved=interleaved)
        except ValueError:
            return None
        pairs = list(zip(ours, theirs, strict=True))
        if all(a.shape == b.shape and _close(a, b) for a, b in pairs):
            return interleaved
    return None


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)
